//! The framing of calls on a runtime's NRI socket: two connections multiplexed over one stream of bytes (containerd's
//! `nri/pkg/net/multiplex`), each carrying messages of ttrpc. No I/O.
//!
//! A frame is the number of its connection, the length of its data (32 bits each, big endian), and the data; a message may
//! span frames. A message is the length of its payload, the number of the call (32 bits each, big endian), its kind and flags
//! (a byte each), and the payload. NRI uses no streaming calls.

use std::collections::BTreeMap;

/// Longest payload of a message, in bytes: ttrpc's own limit.
pub const MAX_PAYLOAD: usize = 4 << 20;

/// Longest data of a frame that is read, in bytes: the other side may write a whole message, but no more, in one frame.
pub const MAX_FRAME: usize = MAX_PAYLOAD + MESSAGE_HEADER;

/// Longest data of a frame that is written, in bytes: containerd closes the socket on one that is longer than its buffer.
const MAX_WRITTEN_FRAME: usize = 4096;

const FRAME_HEADER: usize = 8;
const MESSAGE_HEADER: usize = 10;

/// One of the connections on a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ConnectionId {
    /// The runtime calls the plugin.
    Plugin,
    /// The plugin calls the runtime.
    Runtime,
}

impl ConnectionId {
    fn number(self) -> u32 {
        match self {
            Self::Plugin => 1,
            Self::Runtime => 2,
        }
    }

    fn from_number(number: u32) -> Option<Self> {
        match number {
            1 => Some(Self::Plugin),
            2 => Some(Self::Runtime),
            _ => None,
        }
    }
}

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A call of a method.
    Request,
    /// The answer to a call.
    Response,
    /// A kind that NRI does not use.
    Other(u8),
}

impl Kind {
    fn number(self) -> u8 {
        match self {
            Self::Request => 1,
            Self::Response => 2,
            Self::Other(number) => number,
        }
    }
}

impl From<u8> for Kind {
    fn from(number: u8) -> Self {
        match number {
            1 => Self::Request,
            2 => Self::Response,
            other => Self::Other(other),
        }
    }
}

/// A call or an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// The connection that carries the message.
    pub connection: ConnectionId,
    /// The number of the call; odd, and larger than that of the call before on this connection.
    pub call: u32,
    /// A call, or the answer to one.
    pub kind: Kind,
    /// An encoded [`super::ttrpc`] message.
    pub payload: Vec<u8>,
}

/// Bytes that are not frames or messages, after which no other bytes can be read; or a message that is too long to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The length of a frame exceeds [`MAX_FRAME`].
    #[error("a frame of {0} bytes, more than {MAX_FRAME}")]
    LongFrame(u32),
    /// The length of a message exceeds [`MAX_PAYLOAD`].
    #[error("a message of {0} bytes, more than {MAX_PAYLOAD}")]
    LongMessage(usize),
}

impl Message {
    /// The bytes of the message in its frames.
    pub fn encode(&self) -> Result<Vec<u8>, WireError> {
        let too_long = WireError::LongMessage(self.payload.len());
        let length = match u32::try_from(self.payload.len()) {
            Ok(length) if self.payload.len() <= MAX_PAYLOAD => length,
            // Refused here, because the other side closes the socket on a longer message.
            _ => return Err(too_long),
        };
        let mut message = Vec::with_capacity(MESSAGE_HEADER + self.payload.len());
        message.extend(length.to_be_bytes());
        message.extend(self.call.to_be_bytes());
        // No flags: they belong to streaming calls.
        message.extend([self.kind.number(), 0]);
        message.extend(&self.payload);
        // The chunks are as small as containerd's buffer, whatever this side would accept.
        let n_headers = message.len() / MAX_WRITTEN_FRAME + 1;
        let mut framed = Vec::with_capacity(message.len() + FRAME_HEADER * n_headers);
        for data in message.chunks(MAX_WRITTEN_FRAME) {
            framed.extend(self.connection.number().to_be_bytes());
            framed.extend(u32::try_from(data.len()).map_err(|_| too_long)?.to_be_bytes());
            framed.extend(data);
        }
        Ok(framed)
    }
}

/// Decodes messages from bytes that arrive in pieces. Buffers only what has arrived, whatever lengths the headers claim.
#[derive(Debug, Default)]
pub struct Decoder {
    /// The part of the next frame's header that has arrived.
    header: Vec<u8>,
    /// The frame that is being read: its connection, `None` if NRI has no such connection, and the number of bytes to come.
    frame: Option<(Option<ConnectionId>, usize)>,
    /// The message of each connection that has arrived in part.
    partial: BTreeMap<ConnectionId, Partial>,
}

#[derive(Debug, Default)]
struct Partial {
    header: Vec<u8>,
    payload: Vec<u8>,
}

impl Decoder {
    /// Reads more bytes; returns the messages that they complete. After an error it cannot read any further bytes.
    pub fn feed(&mut self, mut bytes: &[u8]) -> Result<Vec<Message>, WireError> {
        let mut messages = Vec::new();
        while !bytes.is_empty() {
            // Headers and data may be cut anywhere, so that each step takes what is there and returns.
            let Some((connection, left)) = self.frame else {
                self.begin_frame(&mut bytes)?;
                continue;
            };
            let mut data = split_front(&mut bytes, left);
            // A frame without data left is over; the next bytes are a header.
            self.frame = (left > data.len()).then_some((connection, left - data.len()));
            // Frames of unknown connections are skipped, as the socket may carry more than the two of [`ConnectionId`].
            let Some(connection) = connection else {
                continue;
            };
            let partial = self.partial.entry(connection).or_default();
            while !data.is_empty() {
                messages.extend(partial.feed(connection, &mut data)?);
            }
        }
        Ok(messages)
    }

    /// Reads the header of a frame as far as it has arrived; begins the frame if the header is complete.
    fn begin_frame(&mut self, bytes: &mut &[u8]) -> Result<(), WireError> {
        let missing = FRAME_HEADER - self.header.len();
        self.header.extend(split_front(bytes, missing));
        let (Some(number), Some(length)) = (number_at(&self.header, 0), number_at(&self.header, 4)) else {
            return Ok(());
        };
        let left = usize::try_from(length).unwrap_or(usize::MAX);
        if left > MAX_FRAME {
            return Err(WireError::LongFrame(length));
        }
        self.header.clear();
        self.frame = (left > 0).then_some((ConnectionId::from_number(number), left));
        Ok(())
    }
}

impl Partial {
    /// Takes the bytes of this message off the front of `data`; returns the message if they complete it.
    fn feed(&mut self, connection: ConnectionId, data: &mut &[u8]) -> Result<Option<Message>, WireError> {
        let missing = MESSAGE_HEADER - self.header.len();
        self.header.extend(split_front(data, missing));
        let (Some(length), Some(call), Some([kind, _flags])) = (
            number_at(&self.header, 0),
            number_at(&self.header, 4),
            self.header.get(8..MESSAGE_HEADER),
        ) else {
            return Ok(None);
        };
        // Refused before any payload is buffered.
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        if length > MAX_PAYLOAD {
            return Err(WireError::LongMessage(length));
        }
        let kind = Kind::from(*kind);
        self.payload
            .extend(split_front(data, length - self.payload.len()));
        if self.payload.len() < length {
            return Ok(None);
        }
        // The header is taken away too, so that the next message of the connection begins with an empty one.
        let payload = std::mem::take(self).payload;
        Ok(Some(Message {
            connection,
            call,
            kind,
            payload,
        }))
    }
}

/// Removes up to `most` bytes from the front of `bytes`, and returns them.
fn split_front<'a>(bytes: &mut &'a [u8], most: usize) -> &'a [u8] {
    let (taken, rest) = bytes.split_at_checked(most).unwrap_or((*bytes, &[]));
    *bytes = rest;
    taken
}

fn number_at(bytes: &[u8], at: usize) -> Option<u32> {
    let four: [u8; 4] = bytes.get(at..at + 4)?.try_into().ok()?;
    Some(u32::from_be_bytes(four))
}

#[cfg(test)]
mod tests;
