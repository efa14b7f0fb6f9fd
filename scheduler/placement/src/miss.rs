//! Why a request is refused, for people: the rule, and how near it came.

use std::fmt;

use crate::ident::SwitchId;
use crate::reason::Reason;
use crate::selector::Selector;
use crate::wishes::{Kind, Scope};

/// Why a node cannot take a request, in the terms of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Miss {
    /// Too little is free, or another reason that needs no rule of the wishes to be told.
    Plain(Reason),
    /// Too few devices of a type may be taken.
    TooFew {
        /// The type.
        kind: Kind,
        /// How many are needed.
        needed: usize,
        /// How many there are, step by step.
        tally: Tally,
    },
    /// A device that is to be taken with all others that are selected cannot be.
    NotAll {
        /// The type.
        kind: Kind,
        /// How many there are, step by step.
        tally: Tally,
    },
    /// No partition of GPUs can be given away.
    Partition {
        /// How many GPUs are needed.
        needed: usize,
        /// Why there is none.
        problem: NoPartition,
    },
    /// The GPUs that may be taken are too far apart.
    Scope {
        /// How many are needed.
        needed: usize,
        /// How wide they may be spread.
        scope: Scope,
        /// The most that are within one such scope.
        most: usize,
    },
    /// Devices of several types are not on the same switches.
    Together {
        /// The leading type.
        lead: Kind,
        /// How many devices of it are needed.
        needed: usize,
        /// Another type that has too few there.
        lacking: Kind,
        /// A switch on which there is none, if that is it.
        switch: Option<SwitchId>,
    },
    /// The vendor's plugin chooses the GPUs, and so nothing can be said of which.
    NotChosenHere,
    /// Somebody has a GPU to itself that whoever asks would see.
    SeesExclusive,
}

/// How many devices of a type are left after each rule.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// All of the type.
    pub all: usize,
    /// The labels that were asked for.
    pub selector: Option<Selector>,
    /// Of these, those with the labels that were asked for.
    pub selected: usize,
    /// Whether virtual functions were asked for.
    pub wants_functions: bool,
    /// Of these, those that have a free virtual function of the kind that was asked for.
    pub with_function: usize,
    /// Of these, those that are well and have room.
    pub with_room: usize,
    /// Of these, those that exclusions leave.
    pub permitted: usize,
}

/// Why no partition can be given away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoPartition {
    /// The node has no table.
    Table,
    /// The table has none of this size.
    Size,
    /// None is free.
    Free,
    /// None that is free is known to have the bandwidth.
    Bandwidth,
    /// None that is free has the best score.
    Score {
        /// The best score.
        wanted: i64,
        /// The best one that is free.
        free: i64,
    },
}

impl Miss {
    /// The reason that stands for it where texts must be few.
    pub fn reason(&self) -> Reason {
        match self {
            Self::Plain(reason) => *reason,
            Self::TooFew {
                kind: Kind::Other(_), ..
            }
            | Self::NotAll { .. } => Reason::OtherDevices,
            Self::TooFew { kind: Kind::Gpu, .. } | Self::SeesExclusive => Reason::Selected,
            Self::Partition { .. } => Reason::Partition,
            Self::Scope { .. } | Self::Together { .. } => Reason::Together,
            Self::NotChosenHere => Reason::Vendor,
        }
    }
}

impl fmt::Display for Miss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plain(reason) => reason.fmt(f),
            Self::TooFew { kind, needed, tally } => write!(
                f,
                "{}, {} needed",
                Told {
                    tally,
                    kind,
                    needed: *needed
                },
                are(*needed)
            ),
            Self::NotAll { kind, tally } if tally.selected == 0 => write!(
                f,
                "{}",
                Told {
                    tally,
                    kind,
                    needed: 1
                }
            ),
            Self::NotAll { kind, tally } => write!(
                f,
                "{}, all are needed",
                Told {
                    tally,
                    kind,
                    needed: tally.selected
                }
            ),
            Self::Partition { needed, problem } => problem.tell(*needed, f),
            Self::Scope { needed, scope, most } => {
                let scope = scope.name();
                write!(
                    f,
                    "no {scope} has {} that may be taken; the most on one {scope} is {most}",
                    count(*needed, &Kind::Gpu)
                )
            }
            Self::Together {
                lead,
                needed,
                lacking,
                switch: Some(switch),
            } => {
                write!(
                    f,
                    "{} fit, no {lacking} left on switch {switch}",
                    count(*needed, lead)
                )
            }
            Self::Together {
                lead,
                needed,
                lacking,
                switch: None,
            } => {
                write!(
                    f,
                    "{} fit, too few {lacking} left on their switches",
                    count(*needed, lead)
                )
            }
            Self::NotChosenHere => {
                f.write_str("the vendor's plugin chooses GPUs on this node, and heeds no wishes")
            }
            Self::SeesExclusive => {
                f.write_str("a pod has GPUs to itself, which a pod that sees all GPUs would see")
            }
        }
    }
}

impl NoPartition {
    fn tell(self, needed: usize, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gpus = count(needed, &Kind::Gpu);
        match self {
            Self::Table => write!(f, "the node has no table of GPU partitions"),
            Self::Size => write!(f, "the node's table has no partition of {gpus}"),
            Self::Free => write!(f, "no partition of {gpus} is free"),
            Self::Bandwidth => write!(f, "no free partition of {gpus} is known to have the bandwidth"),
            Self::Score { wanted, free } => {
                write!(
                    f,
                    "no free partition of {gpus} with score {wanted}; the best free one has score {free}"
                )
            }
        }
    }
}

/// A tally in words, up to the first rule that leaves too few.
struct Told<'a> {
    tally: &'a Tally,
    kind: &'a Kind,
    needed: usize,
}

impl fmt::Display for Told<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tally, kind, needed } = self;
        let noun = if **kind == Kind::Gpu {
            "GPUs".to_owned()
        } else {
            format!("devices of type {kind}")
        };
        let labels = tally
            .selector
            .as_ref()
            .filter(|selector| !selector.requirements.is_empty());
        if tally.all < *needed {
            return write!(f, "the node has {} {noun}", tally.all);
        }
        if let Some(labels) = labels.filter(|_| tally.selected < *needed) {
            return write!(
                f,
                "{} of the {} {noun} have labels {labels}",
                tally.selected, tally.all
            );
        }
        let noun = labels.map_or(noun.clone(), |labels| format!("{noun} with labels {labels}"));
        if tally.with_function < *needed {
            return write!(
                f,
                "{} of the {} {noun} have a free VF of the kind that is wanted",
                tally.with_function, tally.selected
            );
        }
        let noun = if tally.wants_functions {
            format!("{noun} with a free VF")
        } else {
            noun
        };
        if tally.with_room < *needed {
            return write!(
                f,
                "{} of the {} {noun} are well and have room",
                tally.with_room, tally.with_function
            );
        }
        write!(
            f,
            "{} of the {} {noun} that have room are not ruled out by exclusive use",
            tally.permitted, tally.with_room
        )
    }
}

fn are(n: usize) -> String {
    format!("{n} {}", if n == 1 { "is" } else { "are" })
}

fn count(n: usize, kind: &Kind) -> String {
    match kind {
        Kind::Gpu if n == 1 => "1 GPU".to_owned(),
        Kind::Gpu => format!("{n} GPUs"),
        Kind::Other(kind) => format!("{n} {kind}"),
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gpu => f.write_str("GPU"),
            Self::Other(kind) => kind.fmt(f),
        }
    }
}

impl Scope {
    const fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Switch => "switch",
            Self::Numa => "NUMA node",
            Self::Machine => "machine",
        }
    }
}
