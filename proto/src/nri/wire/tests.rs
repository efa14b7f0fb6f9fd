//! Encoded messages decode from pieces of any size, and invalid bytes are refused without buffering more than they are.

use proptest::prelude::*;
use rstest::rstest;

use super::*;

fn message(call: u32, payload: &[u8]) -> Message {
    Message {
        connection: ConnectionId::Plugin,
        call,
        kind: Kind::Request,
        payload: payload.to_vec(),
    }
}

fn frame(connection: u32, content: &[u8]) -> Vec<u8> {
    let length = u32::try_from(content.len()).unwrap();
    [&connection.to_be_bytes()[..], &length.to_be_bytes(), content].concat()
}

fn arb_message() -> impl Strategy<Value = Message> {
    let connection = prop_oneof![Just(ConnectionId::Plugin), Just(ConnectionId::Runtime)];
    let payload = prop_oneof![
        3 => prop::collection::vec(any::<u8>(), 0..40),
        1 => (0..20_000_usize).prop_map(|n| (0..=255).cycle().take(n).collect()),
    ];
    (connection, any::<u32>(), any::<u8>(), payload).prop_map(|(connection, call, kind, payload)| Message {
        connection,
        call,
        kind: kind.into(),
        payload,
    })
}

#[test]
fn a_call_has_the_bytes_of_ttrpc() {
    let expected = [
        0, 0, 0, 1, 0, 0, 0, 13, 0, 0, 0, 3, 0, 0, 0, 5, 1, 0, b'a', b'b', b'c',
    ];
    assert_eq!(message(5, b"abc").encode().unwrap(), expected);
}

#[test]
fn long_messages_are_written_in_frames_of_limited_size() {
    let bytes = message(1, &[7; 10_000]).encode().unwrap();
    let mut rest = &bytes[..];
    let mut lengths = Vec::new();
    while !rest.is_empty() {
        let length = u32::from_be_bytes(rest[4..8].try_into().unwrap()) as usize;
        lengths.push(length);
        rest = &rest[8 + length..];
    }
    assert_eq!(lengths, [4096, 4096, 1818]);
}

/// The decoder skips frames of unknown connections, and empty frames.
#[test]
fn unknown_connections_are_skipped() {
    let call = message(1, b"x").encode().unwrap();
    let (first, second) = call.split_at(12);
    let bytes = [
        &frame(7, b"who?")[..],
        &frame(1, b""),
        first,
        second,
        &frame(0, &[255; 9]),
    ]
    .concat();
    assert_eq!(Decoder::default().feed(&bytes).unwrap(), [message(1, b"x")]);
}

/// Two connections with alternating frames, and two messages in one frame.
#[test]
fn frames_of_connections_may_alternate() {
    let plain = |bytes: Vec<u8>| bytes[8..].to_vec();
    let (one, two) = (
        plain(message(1, b"abcdef").encode().unwrap()),
        plain(message(3, b"").encode().unwrap()),
    );
    let other = Message {
        connection: ConnectionId::Runtime,
        ..message(9, b"other")
    };
    let other_bytes = plain(other.encode().unwrap());
    let bytes = [
        frame(1, &one[..4]),
        frame(2, &other_bytes[..11]),
        frame(1, &[&one[4..], &two].concat()),
        frame(2, &other_bytes[11..]),
    ]
    .concat();
    assert_eq!(
        Decoder::default().feed(&bytes).unwrap(),
        [message(1, b"abcdef"), message(3, b""), other]
    );
}

#[rstest]
#[case::frame(&frame_header(u32::MAX), WireError::LongFrame(u32::MAX))]
#[case::frame_a_byte_too_long(&frame_header(4_194_315), WireError::LongFrame(4_194_315))]
#[case::message(&frame(1, &[255; 10]), WireError::LongMessage(u32::MAX as usize))]
#[case::message_a_byte_too_long(&frame(2, &[0, 0x40, 0, 1, 0, 0, 0, 1, 1, 0]), WireError::LongMessage(MAX_PAYLOAD + 1))]
fn lengths_that_are_too_large_are_refused(#[case] bytes: &[u8], #[case] expected: WireError) {
    assert_eq!(Decoder::default().feed(bytes).unwrap_err(), expected);
}

fn frame_header(length: u32) -> Vec<u8> {
    [[0, 0, 0, 1], length.to_be_bytes()].concat()
}

#[test]
fn the_longest_message_passes_and_a_longer_one_is_not_sent() {
    let longest = message(1, &vec![1; MAX_PAYLOAD]);
    assert_eq!(
        Decoder::default().feed(&longest.encode().unwrap()).unwrap(),
        [longest]
    );
    assert_eq!(
        message(1, &vec![1; MAX_PAYLOAD + 1]).encode().unwrap_err(),
        WireError::LongMessage(MAX_PAYLOAD + 1)
    );
}

/// The decoder allocates no memory for a length in a header.
#[test]
fn memory_grows_with_the_bytes_read() {
    let mut decoder = Decoder::default();
    let header = [0, 0x40, 0, 0, 0, 0, 0, 1, 1, 0];
    assert_eq!(
        decoder
            .feed(&frame_header(u32::try_from(MAX_FRAME).unwrap()))
            .unwrap(),
        []
    );
    assert_eq!(decoder.feed(&header).unwrap(), []);
    assert_eq!(decoder.feed(&[1; 100]).unwrap(), []);
    let held: usize = decoder
        .partial
        .values()
        .map(|partial| partial.payload.capacity())
        .sum();
    assert!(held < 1000, "{held}");
}

proptest! {
    #[test]
    fn messages_decode_from_pieces_of_any_size(
        messages in prop::collection::vec(arb_message(), 0..6),
        cuts in prop::collection::vec(1..9_000_usize, 1..20),
    ) {
        let bytes: Vec<u8> = messages.iter().flat_map(|message| message.encode().unwrap()).collect();
        let mut decoder = Decoder::default();
        let (mut rest, mut found) = (&bytes[..], Vec::new());
        for cut in cuts.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            found.extend(decoder.feed(split_front(&mut rest, *cut)).unwrap());
        }
        prop_assert_eq!(found, messages);
    }

    /// The decoder never buffers more than it has read.
    #[test]
    fn random_bytes_are_decoded_or_refused(pieces in prop::collection::vec(prop::collection::vec(prop_oneof![Just(0_u8), Just(1), any::<u8>()], 0..64), 0..20)) {
        let mut decoder = Decoder::default();
        let mut n_fed = 0;
        for piece in &pieces {
            n_fed += piece.len();
            let Ok(messages) = decoder.feed(piece) else { break };
            let held: usize = decoder.partial.values().map(|partial| partial.payload.len() + partial.header.len()).sum();
            prop_assert!(held + messages.iter().map(|message| message.payload.len()).sum::<usize>() <= n_fed);
        }
    }
}
