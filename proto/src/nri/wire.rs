//! How calls lie on a runtime's socket: two conversations over one stream of bytes, each in frames, and in each of them the
//! messages of ttrpc. No I/O.
//!
//! A frame is the number of its conversation, the length of what follows (32 bits each, big endian), and a piece of that
//! conversation; where pieces end means nothing. A message is the length of its payload, the number of the call (32 bits each,
//! big endian), its kind and flags (a byte each), and the payload. Calls that stream are not part of this interface.

use std::collections::BTreeMap;

/// Longest payload of a message.
pub const MAX_PAYLOAD: usize = 4 << 20;

/// Longest frame that is read: the other side writes a message in one frame at most.
pub const MAX_FRAME: usize = MAX_PAYLOAD + MESSAGE_HEADER;

/// Longest frame that is written. The other side reads pieces into a buffer of this size, and gives up on longer ones.
const PIECE: usize = 4096;

const FRAME_HEADER: usize = 8;
const MESSAGE_HEADER: usize = 10;

/// One of the conversations on a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Conversation {
    /// The runtime calls the plugin.
    Plugin,
    /// The plugin calls the runtime.
    Runtime,
}

impl Conversation {
    fn number(self) -> u32 {
        match self {
            Self::Plugin => 1,
            Self::Runtime => 2,
        }
    }

    fn of(number: u32) -> Option<Self> {
        [Self::Plugin, Self::Runtime]
            .into_iter()
            .find(|conversation| conversation.number() == number)
    }
}

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A call.
    Request,
    /// The answer to a call.
    Response,
    /// Anything else, which this interface does not use.
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
    /// Where it was said.
    pub conversation: Conversation,
    /// The number of the call; odd, and larger than that of the call before.
    pub call: u32,
    /// What it is.
    pub kind: Kind,
    /// An envelope ([`super::ttrpc`]).
    pub payload: Vec<u8>,
}

/// Bytes that cannot be understood, after which nothing else can be; or a message that cannot be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// A frame claims to be longer than any may be.
    #[error("a frame of {0} bytes, more than {MAX_FRAME}")]
    LongFrame(u32),
    /// A message claims to be longer than any may be.
    #[error("a message of {0} bytes, more than {MAX_PAYLOAD}")]
    LongMessage(usize),
}

impl Message {
    /// The bytes of the message in its frames.
    ///
    /// # Errors
    /// It is too long.
    pub fn encode(&self) -> Result<Vec<u8>, WireError> {
        let too_long = WireError::LongMessage(self.payload.len());
        let length = u32::try_from(self.payload.len())
            .ok()
            .filter(|_| self.payload.len() <= MAX_PAYLOAD)
            .ok_or(too_long)?;
        let mut message = Vec::with_capacity(MESSAGE_HEADER + self.payload.len());
        message.extend(length.to_be_bytes());
        message.extend(self.call.to_be_bytes());
        message.extend([self.kind.number(), 0]);
        message.extend(&self.payload);
        let mut framed = Vec::with_capacity(message.len() + FRAME_HEADER * (message.len() / PIECE + 1));
        for piece in message.chunks(PIECE) {
            framed.extend(self.conversation.number().to_be_bytes());
            framed.extend(u32::try_from(piece.len()).map_err(|_| too_long)?.to_be_bytes());
            framed.extend(piece);
        }
        Ok(framed)
    }
}

/// Takes bytes as they come, and gives messages when they are complete.
///
/// Holds no more than what has come of one message per conversation, whatever lengths are claimed.
#[derive(Debug, Default)]
pub struct Decoder {
    header: Vec<u8>,
    /// The frame that is being read: whose it is, if that is known, and how much of it is to come.
    frame: Option<(Option<Conversation>, usize)>,
    partial: BTreeMap<Conversation, Partial>,
}

/// A message that has not come wholly.
#[derive(Debug, Default)]
struct Partial {
    header: Vec<u8>,
    payload: Vec<u8>,
}

impl Decoder {
    /// Takes more bytes; the messages that they complete.
    ///
    /// # Errors
    /// The bytes make no sense. What comes after them is not to be read.
    pub fn feed(&mut self, mut bytes: &[u8]) -> Result<Vec<Message>, WireError> {
        let mut messages = Vec::new();
        while !bytes.is_empty() {
            let Some((conversation, left)) = self.frame else {
                self.begin_frame(&mut bytes)?;
                continue;
            };
            let mut piece = take(&mut bytes, left);
            self.frame = Some((conversation, left - piece.len())).filter(|(_, left)| *left > 0);
            let Some(conversation) = conversation else {
                continue;
            };
            let partial = self.partial.entry(conversation).or_default();
            while !piece.is_empty() {
                messages.extend(partial.feed(conversation, &mut piece)?);
            }
        }
        Ok(messages)
    }

    fn begin_frame(&mut self, bytes: &mut &[u8]) -> Result<(), WireError> {
        self.header.extend(take(bytes, FRAME_HEADER - self.header.len()));
        let (Some(number), Some(length)) = (number_at(&self.header, 0), number_at(&self.header, 4)) else {
            return Ok(());
        };
        let left = usize::try_from(length)
            .ok()
            .filter(|length| *length <= MAX_FRAME)
            .ok_or(WireError::LongFrame(length))?;
        self.header.clear();
        self.frame = Some((Conversation::of(number), left)).filter(|(_, left)| *left > 0);
        Ok(())
    }
}

impl Partial {
    /// Takes from the piece what belongs to the message; the message if that completes it.
    fn feed(&mut self, conversation: Conversation, piece: &mut &[u8]) -> Result<Option<Message>, WireError> {
        self.header
            .extend(take(piece, MESSAGE_HEADER - self.header.len()));
        let (Some(length), Some(call), Some(kind)) = (
            number_at(&self.header, 0),
            number_at(&self.header, 4),
            self.header.get(8),
        ) else {
            return Ok(None);
        };
        if self.header.len() < MESSAGE_HEADER {
            return Ok(None);
        }
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        if length > MAX_PAYLOAD {
            return Err(WireError::LongMessage(length));
        }
        let kind = Kind::from(*kind);
        self.payload.extend(take(piece, length - self.payload.len()));
        if self.payload.len() < length {
            return Ok(None);
        }
        let payload = std::mem::take(self).payload;
        Ok(Some(Message {
            conversation,
            call,
            kind,
            payload,
        }))
    }
}

/// Takes up to so many bytes off the front.
fn take<'a>(bytes: &mut &'a [u8], most: usize) -> &'a [u8] {
    let (taken, rest) = bytes.split_at_checked(most).unwrap_or((*bytes, &[]));
    *bytes = rest;
    taken
}

/// The number of 32 bits at this place, if it is all there.
fn number_at(bytes: &[u8], at: usize) -> Option<u32> {
    let four: [u8; 4] = bytes.get(at..at + 4)?.try_into().ok()?;
    Some(u32::from_be_bytes(four))
}

#[cfg(test)]
mod tests;
