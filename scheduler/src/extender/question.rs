//! The request of `filter` and `prioritize`. In the form in which kube-scheduler writes it, node names are not parsed one by
//! one: they are found by their quotes, and stay where they are.
//!
//! Any other form is parsed in the usual way, and comes to the same.

use std::borrow::Cow;
use std::hash::BuildHasher;

use memchr::{memchr, memmem};
use placement::{Fleet, NodeId};
use proto::extender::{ExtenderArgs, Name, NodeList};
use proto::pod::Pod;
use rustc_hash::FxBuildHasher;
use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};

use super::roll::{Known, Reader, Roll};

/// What comes before the names.
const NAMES: &[u8] = br#","NodeNames":["#;

/// What is asked.
#[derive(Debug)]
pub(super) struct Question<'a> {
    /// The pod to place.
    pub(super) pod: Pod,
    /// A JSON object that has the pod in it as the request has.
    pub(super) head: Cow<'a, [u8]>,
    /// The nodes that it may go to.
    pub(super) nodes: Nodes<'a>,
}

/// Nodes in one of two forms.
#[derive(Debug)]
pub(super) enum Nodes<'a> {
    /// Their names.
    Names(Names<'a>),
    /// All of each.
    Whole(NodeList),
}

/// Names of nodes, in the order of the request.
#[derive(Debug)]
pub(super) enum Names<'a> {
    /// As they stand in the request, in quotes and with commas between them; nothing in them is escaped.
    Plain {
        /// From the first quote to the last.
        text: &'a [u8],
        /// Where the closing quote of each is.
        ends: Vec<u32>,
        /// What the roll knows of each.
        known: Vec<Known>,
        /// Which of them are not on the roll, in order.
        strangers: Vec<usize>,
    },
    /// One by one.
    Parsed(Vec<Name<'a>>),
}

/// Why a request cannot be read.
#[derive(Debug, thiserror::Error)]
pub(super) enum QuestionError {
    /// It is no JSON, or not the JSON that it should be.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// It says nothing of nodes.
    #[error("neither NodeNames nor Nodes is given")]
    NoNodes,
}

/// Everything before the names.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Head {
    pod: Pod,
    #[serde(default, rename = "Nodes")]
    _nodes: Option<NodeList>,
    #[serde(default, deserialize_with = "is_there")]
    node_names: bool,
}

fn is_there<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    IgnoredAny::deserialize(deserializer).map(|_| true)
}

impl<'a> Question<'a> {
    /// Reads a request; names that follow each other as they do on the roll are read fastest.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(super) fn read(body: &'a [u8], roll: &Roll) -> Result<Self, QuestionError> {
        match Self::read_plain(body, roll) {
            Some(question) => Ok(question),
            None => Self::parse(body),
        }
    }

    /// Reads a request whose last field is a plain list of names; `None` if it is none, or if anything else is unusual.
    ///
    /// What comes before the names is an object of its own once it is closed, so the request is that object with one more
    /// field.
    fn read_plain(body: &'a [u8], roll: &Roll) -> Option<Self> {
        let at = memmem::find(body, NAMES)?;
        let (head, tail) = (body.get(..at)?, body.get(at + NAMES.len()..)?);
        let names = Names::plain(tail.strip_suffix(b"]}")?, roll)?;
        let head = [head, b"}"].concat();
        let Head { pod, node_names, .. } = serde_json::from_slice(&head).ok()?;
        (!node_names).then_some(Self {
            pod,
            head: head.into(),
            nodes: Nodes::Names(names),
        })
    }

    /// Reads a request of any form.
    fn parse(body: &'a [u8]) -> Result<Self, QuestionError> {
        let args: ExtenderArgs<'a> = serde_json::from_slice(body)?;
        let nodes = match (args.node_names, args.nodes) {
            (Some(names), _) => Nodes::Names(Names::Parsed(names)),
            (None, Some(nodes)) => Nodes::Whole(nodes),
            (None, None) => return Err(QuestionError::NoNodes),
        };
        Ok(Self {
            pod: args.pod,
            head: body.into(),
            nodes,
        })
    }
}

impl Nodes<'_> {
    /// The number of nodes.
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Names(names) => names.len(),
            Self::Whole(nodes) => nodes.items.len(),
        }
    }

    /// A number for the set of their names, in whatever order they come.
    pub(super) fn set(&self) -> u64 {
        let hash = |name: &str| FxBuildHasher.hash_one(name);
        match self {
            Self::Names(names) => names.iter().map(hash).fold(0, u64::wrapping_add),
            Self::Whole(nodes) => {
                let names = nodes
                    .items
                    .iter()
                    .filter_map(|whole| whole.node.metadata.name.as_deref());
                names.map(hash).fold(0, u64::wrapping_add)
            }
        }
    }

    /// Whether a node of this name is among them.
    pub(super) fn contains(&self, node: &str) -> bool {
        match self {
            Self::Names(names) => names.iter().any(|name| name == node),
            Self::Whole(nodes) => nodes
                .items
                .iter()
                .any(|whole| whole.node.metadata.name.as_deref() == Some(node)),
        }
    }
}

impl<'a> Names<'a> {
    /// Finds names by their quotes; `None` if there is anything but names, commas and quotes, or a name is not plain.
    fn plain(text: &'a [u8], roll: &Roll) -> Option<Self> {
        let capacity = text.len() / 16;
        let (mut ends, mut known, mut strangers) = (
            Vec::with_capacity(capacity),
            Vec::with_capacity(capacity),
            Vec::new(),
        );
        let (mut begin, mut length, mut reader) = (0, 0, Reader::of(roll));
        while begin < text.len() {
            let rest = text.get(begin..)?;
            let offset = u32::try_from(begin).ok()?;
            if let Some(run) = reader.run(rest) {
                ends.extend(run.ends(offset));
                known.extend(run.known());
            } else {
                // Most names are as long as the one before, and one that is on the roll has no quote in it.
                let (name, found) =
                    match quoted(rest, length).and_then(|name| Some((name, reader.find(name)?))) {
                        Some((name, found)) => (name, Some(found)),
                        None => first_quoted(rest).map(|name| (name, reader.find(name)))?,
                    };
                length = name.len();
                if found.is_none() {
                    // All names on the roll are plain.
                    is_plain(name).then(|| strangers.push(ends.len()))?;
                }
                ends.push(offset + 1 + u32::try_from(name.len()).ok()?);
                known.push(found.unwrap_or(Known::STRANGER));
            }
            begin = *ends.last()? as usize + 2;
        }
        // Behind the last name is the end, and not another comma.
        let is_whole = begin == text.len() + 1 || text.is_empty();
        is_whole.then_some(Self::Plain {
            text,
            ends,
            known,
            strangers,
        })
    }

    /// What the roll knows of a name that is on it.
    #[inline]
    pub(super) fn known(&self, at: usize) -> Option<Known> {
        match self {
            Self::Plain { known, .. } => known.get(at).copied().filter(|known| *known != Known::STRANGER),
            Self::Parsed(_) => None,
        }
    }

    /// The node of a name; a roll that is current knows where in the fleet it is.
    pub(super) fn node(&self, at: usize, is_current: bool, fleet: &Fleet) -> Option<NodeId> {
        match self.known(at).filter(|_| is_current) {
            Some(known) => fleet.id_at(known.index()?),
            None => fleet.node_id(self.get(at)?),
        }
    }

    /// Whether one name comes behind another by its letters.
    #[inline]
    pub(super) fn is_behind(&self, at: usize, other: usize) -> bool {
        match self.known(at).zip(self.known(other)) {
            Some((one, other)) => one.rank > other.rank,
            None => self.bytes(at) > self.bytes(other),
        }
    }

    /// Plain names that are not on the roll.
    pub(super) fn strangers(&self) -> impl Iterator<Item = &str> {
        let strangers = match self {
            Self::Plain { strangers, .. } => strangers.as_slice(),
            Self::Parsed(_) => &[],
        };
        strangers.iter().filter_map(|at| self.get(*at))
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Self::Plain { ends, .. } => ends.len(),
            Self::Parsed(names) => names.len(),
        }
    }

    pub(super) fn get(&self, at: usize) -> Option<&str> {
        std::str::from_utf8(self.bytes(at)?).ok()
    }

    /// A name as it is in memory.
    #[inline]
    pub(super) fn bytes(&self, at: usize) -> Option<&[u8]> {
        match self {
            Self::Plain { text, ends, .. } => {
                let begin = match at.checked_sub(1) {
                    None => 1,
                    Some(before) => *ends.get(before)? as usize + 3,
                };
                text.get(begin..*ends.get(at)? as usize)
            }
            Self::Parsed(names) => names.get(at).map(|name| name.0.as_bytes()),
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &str> {
        (0..self.len()).filter_map(|at| self.get(at))
    }

    /// Writes all names as JSON, with commas between them.
    pub(super) fn write_all(&self, json: &mut Vec<u8>) {
        match self {
            Self::Plain { text, .. } => json.extend_from_slice(text),
            Self::Parsed(names) => self.write_some(0..names.len(), json),
        }
    }

    /// Writes names by their places as JSON, with commas between them.
    pub(super) fn write_some(&self, places: impl IntoIterator<Item = usize>, json: &mut Vec<u8>) {
        for (nth, at) in places.into_iter().enumerate() {
            if nth > 0 {
                json.push(b',');
            }
            self.write(at, json);
        }
    }

    /// Writes a name as JSON.
    pub(super) fn write(&self, at: usize, json: &mut Vec<u8>) {
        match (self, self.get(at)) {
            (_, None) => {}
            (Self::Plain { .. }, Some(plain)) => {
                json.push(b'"');
                json.extend_from_slice(plain.as_bytes());
                json.push(b'"');
            }
            (Self::Parsed(_), Some(name)) => {
                json.extend_from_slice(serde_json::Value::from(name).to_string().as_bytes());
            }
        }
    }
}

/// So many bytes behind the quote with which a text begins, if another quote is behind them, and then a comma or the end.
#[inline]
fn quoted(text: &[u8], length: usize) -> Option<&[u8]> {
    let (first, last) = (text.first()?, text.get(length + 1)?);
    let is_whole = (*first, *last) == (b'"', b'"') && text.get(length + 2).is_none_or(|byte| *byte == b',');
    is_whole.then(|| text.get(1..=length))?
}

/// What is in the quotes with which a text begins, if a comma or the end is behind them.
#[inline]
fn first_quoted(text: &[u8]) -> Option<&[u8]> {
    let text = text.strip_prefix(b"\"")?;
    let end = memchr(b'"', text)?;
    text.get(end + 1)
        .is_none_or(|byte| *byte == b',')
        .then(|| text.get(..end))?
}

/// Whether JSON would escape nothing in a name.
fn is_plain(name: &[u8]) -> bool {
    name.iter().fold(0, |odd, byte| {
        odd | u8::from(!(0x20..0x7f).contains(byte)) | u8::from(*byte == b'\\')
    }) == 0
}

#[cfg(test)]
mod tests;
