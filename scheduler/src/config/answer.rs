//! How many of the nodes that fit a pod an answer tells of.

use std::num::NonZeroU8;
use std::str::FromStr;

/// Most nodes that scores from 0 to 10 can put in a strict order.
const MOST: u8 = 11;

/// How many of the nodes that fit a pod without preferences of its own an answer tells of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerNodes {
    /// The best ones.
    Best(NonZeroU8),
    /// All.
    All,
}

impl Default for AnswerNodes {
    fn default() -> Self {
        Self::Best(NonZeroU8::MIN)
    }
}

impl AnswerNodes {
    /// The greatest number, if there is one.
    pub fn most(self) -> Option<usize> {
        match self {
            Self::Best(n) => Some(n.get().into()),
            Self::All => None,
        }
    }
}

impl FromStr for AnswerNodes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let n: Option<NonZeroU8> = text.parse().ok();
        match n.filter(|n| n.get() <= MOST) {
            Some(n) => Ok(Self::Best(n)),
            None if text == "all" => Ok(Self::All),
            None => Err(format!("must be from 1 to {MOST}, or all")),
        }
    }
}
