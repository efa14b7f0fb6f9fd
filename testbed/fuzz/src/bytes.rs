//! Damages of bytes, whatever their form.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};

/// Most damages of one input.
const MOST: usize = 8;

/// Pieces at which parsers of text, lengths and markup go wrong.
const PIECES: [&[u8]; 23] = [
    b"",
    b"\0",
    b"\r\n\r\n",
    b"\"",
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"\\",
    b"null",
    b"1e999",
    b"\xef\xbf\xbd",
    b"[[[[[[[[[[[[[[[[",
    b"\\u0000",
    b"\\ud800",
    b"99999999999999999999",
    b"-1",
    b"\xff\xff\xff\xff",
    b"\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01",
    b"\xc3\x28",
    b"%00",
];

/// One damage.
#[derive(Clone, Debug)]
enum Damage {
    Set(Index, u8),
    Flip(Index, u8),
    Insert(Index, Vec<u8>),
    Remove(Index, usize),
    Repeat(Index, usize),
    Cut(Index),
}

/// Seeds, each damaged up to eight times.
pub fn damaged(seeds: Vec<Vec<u8>>) -> impl Strategy<Value = Vec<u8>> {
    (select(seeds), vec(damage(), 0..=MOST)).prop_map(|(mut bytes, damages)| {
        for damage in damages {
            damage.apply(&mut bytes);
        }
        bytes
    })
}

fn damage() -> impl Strategy<Value = Damage> {
    let at = any::<Index>;
    prop_oneof![
        (at(), any::<u8>()).prop_map(|(at, byte)| Damage::Set(at, byte)),
        (at(), 0..8_u8).prop_map(|(at, bit)| Damage::Flip(at, bit)),
        (at(), piece()).prop_map(|(at, piece)| Damage::Insert(at, piece)),
        (at(), 1..64_usize).prop_map(|(at, length)| Damage::Remove(at, length)),
        (at(), 1..64_usize).prop_map(|(at, length)| Damage::Repeat(at, length)),
        at().prop_map(Damage::Cut),
    ]
}

/// Bytes to be put in: a piece of the list, or any.
fn piece() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        select(&PIECES[..]).prop_map(<[u8]>::to_vec),
        vec(any::<u8>(), 0..4),
    ]
}

impl Damage {
    fn apply(&self, bytes: &mut Vec<u8>) {
        // One past the end is a place, too, at which there is no byte.
        let n_places = bytes.len() + 1;
        let place = |at: &Index| at.index(n_places);
        match self {
            Self::Set(at, byte) => {
                if let Some(found) = bytes.get_mut(place(at)) {
                    *found = *byte;
                }
            }
            Self::Flip(at, bit) => {
                if let Some(found) = bytes.get_mut(place(at)) {
                    *found ^= 1 << bit;
                }
            }
            Self::Insert(at, piece) => {
                let place = place(at);
                bytes.splice(place..place, piece.iter().copied());
            }
            Self::Remove(at, length) => {
                let place = place(at);
                bytes.drain(place..(place + length).min(bytes.len()));
            }
            Self::Repeat(at, length) => {
                let place = place(at);
                let end = (place + length).min(bytes.len());
                let piece: Vec<u8> = bytes.get(place..end).unwrap_or_default().repeat(3);
                bytes.splice(place..place, piece);
            }
            Self::Cut(at) => bytes.truncate(place(at)),
        }
    }
}
