//! The detailed explanation of a refusal, for users: the rule, and how far the node is from meeting it.

use std::fmt;

use crate::data::constraints::{Scope, Selector};
use crate::data::device::LimitLevel;
use crate::data::ident::{DeviceType, SwitchId};
use crate::data::reason::Reason;

/// Why a node cannot take a request, in the terms of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Misfit {
    /// The reason says everything: too little is free, for example.
    Plain(Reason),
    /// Too few devices of a type are eligible.
    TooFew {
        /// The type.
        kind: DeviceType,
        /// Number of devices that the request needs.
        needed: usize,
        /// Number of devices after each rule.
        tally: CandidateCounts,
    },
    /// The request takes every selected device of a type, and one of them is not eligible.
    NotAll {
        /// The type.
        kind: DeviceType,
        /// Number of devices after each rule.
        tally: CandidateCounts,
    },
    /// No partition of GPUs can be allocated.
    Partition {
        /// Number of GPUs that the request needs.
        needed: usize,
        /// The rule that no partition meets.
        problem: NoPartition,
    },
    /// The eligible GPUs are too far apart.
    Scope {
        /// Number of GPUs that the request needs.
        needed: usize,
        /// The widest part of the machine that the GPUs may be spread over.
        scope: Scope,
        /// The most eligible GPUs within one such part.
        most: usize,
    },
    /// The node does not report where devices of a type are, so that a rule about their places is met by none for certain.
    PlacesUnknown {
        /// The type.
        kind: DeviceType,
        /// The part of the machine that the rule is about.
        scope: Scope,
    },
    /// Devices of several types are not on the same switches.
    Together {
        /// The leading type.
        lead: DeviceType,
        /// Number of its devices that the request needs.
        needed: usize,
        /// Another type with too few devices there.
        lacking: DeviceType,
        /// The switch without a device of that type, if it is one switch.
        switch: Option<SwitchId>,
    },
    /// Too few GPUs enforce memory limits as strongly as the request demands.
    WeakLimits {
        /// Number of GPUs that the request needs.
        needed: usize,
        /// Number of GPUs with the demanded enforcement.
        found: usize,
        /// The strongest enforcement of the other GPUs.
        best: LimitLevel,
    },
    /// The vendor's plugin chooses the GPUs, so the node cannot meet constraints on them.
    NotChosenHere,
    /// The request asks to see all GPUs, and another pod uses one exclusively.
    SeesExclusive,
}

/// The number of devices of a type that remain after each rule.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CandidateCounts {
    /// Number of all devices of the type.
    pub all: usize,
    /// The requested labels.
    pub selector: Option<Selector>,
    /// Of all, those with the requested labels.
    pub selected: usize,
    /// True if virtual functions are requested.
    pub wants_functions: bool,
    /// Of the selected, those with a free virtual function of the requested kind.
    pub with_function: usize,
    /// Of these, those that are healthy and have room.
    pub with_room: usize,
    /// Of these, those that exclusive use leaves.
    pub permitted: usize,
}

/// Why no partition can be allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoPartition {
    /// The node has no table.
    Table,
    /// The node's table cannot be read.
    Unreadable,
    /// The table has no partition of the requested size.
    Size,
    /// No partition of the requested size is free.
    Free,
    /// No free partition is known to have the bandwidth that the pod demands.
    Bandwidth,
    /// No free partition has the best score of the table, which the pod demands.
    Score {
        /// The best score.
        wanted: i64,
        /// The best score of a free partition.
        free: i64,
    },
}

impl Misfit {
    /// The refusal reason, of which there are few.
    pub fn reason(&self) -> Reason {
        match self {
            Self::Plain(reason) => *reason,
            Self::TooFew {
                kind: DeviceType::Gpu,
                ..
            }
            | Self::SeesExclusive => Reason::Selected,
            Self::TooFew { .. } | Self::NotAll { .. } => Reason::OtherDevices,
            Self::Partition {
                problem: NoPartition::Unreadable,
                ..
            } => Reason::PartitionsUnreadable,
            Self::Partition { .. } => Reason::Partition,
            Self::Scope { .. } | Self::PlacesUnknown { .. } | Self::Together { .. } => Reason::Together,
            Self::WeakLimits { best, .. } => Reason::weak_limits(*best),
            Self::NotChosenHere => Reason::Vendor,
        }
    }
}

impl From<Misfit> for Reason {
    fn from(misfit: Misfit) -> Self {
        misfit.reason()
    }
}

impl fmt::Display for Misfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plain(reason) => reason.fmt(f),
            Self::TooFew { kind, needed, tally } => {
                tally.write(kind, *needed, f)?;
                write!(f, ", {needed} {} needed", if *needed == 1 { "is" } else { "are" })
            }
            Self::NotAll { kind, tally } if tally.selected == 0 => tally.write(kind, 1, f),
            Self::NotAll { kind, tally } => {
                tally.write(kind, tally.selected, f)?;
                write!(f, ", all are needed")
            }
            Self::Partition { needed, problem } => problem.write(*needed, f),
            Self::Scope { needed, scope, most } => {
                let (scope, gpus) = (scope.name(), count(*needed, &DeviceType::Gpu));
                write!(
                    f,
                    "no {scope} has {gpus} that may be taken; the most on one {scope} is {most}"
                )
            }
            Self::PlacesUnknown { kind, scope } => write!(
                f,
                "the node does not report the {} of its {}, so that they cannot be chosen by it",
                scope.name(),
                noun(kind)
            ),
            Self::Together {
                lead,
                needed,
                lacking,
                switch,
            } => {
                let lead = count(*needed, lead);
                match switch {
                    Some(switch) => write!(f, "{lead} fit, no {lacking} left on switch {switch}"),
                    None => write!(f, "{lead} fit, too few {lacking} left on their switches"),
                }
            }
            Self::WeakLimits { needed, found, .. } => write!(
                f,
                "{found} of the node's GPUs limit memory as the pod demands, {needed} {} needed: {}",
                if *needed == 1 { "is" } else { "are" },
                self.reason()
            ),
            Self::NotChosenHere => f.write_str(
                "the vendor's plugin chooses GPUs on this node and cannot meet constraints on them",
            ),
            Self::SeesExclusive => f.write_str(
                "another pod has exclusive use of a GPU, and a pod that sees all GPUs would see it",
            ),
        }
    }
}

impl NoPartition {
    /// Writes the rule that no partition of this many GPUs meets.
    fn write(self, needed: usize, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gpus = count(needed, &DeviceType::Gpu);
        match self {
            Self::Table => write!(f, "the node has no table of GPU partitions"),
            Self::Unreadable => f.write_str(Reason::PartitionsUnreadable.as_str()),
            Self::Size => write!(f, "the node's table has no partition of {gpus}"),
            Self::Free => write!(f, "no partition of {gpus} is free"),
            Self::Bandwidth => write!(f, "no free partition of {gpus} is known to have the bandwidth"),
            Self::Score { wanted, free } => write!(
                f,
                "no free partition of {gpus} with score {wanted}; the best free one has score {free}"
            ),
        }
    }
}

impl CandidateCounts {
    /// Writes the counts up to the first rule that leaves too few devices.
    fn write(&self, kind: &DeviceType, needed: usize, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut noun = noun(kind);
        if self.all < needed {
            return write!(f, "the node has {} {noun}", self.all);
        }
        let labels = self.selector.as_ref();
        if let Some(labels) = labels.filter(|labels| !labels.requirements.is_empty()) {
            if self.selected < needed {
                let (selected, all) = (self.selected, self.all);
                return write!(f, "{selected} of the {all} {noun} have labels {labels}");
            }
            noun = format!("{noun} with labels {labels}");
        }
        if self.with_function < needed {
            let (with_function, selected) = (self.with_function, self.selected);
            return write!(
                f,
                "{with_function} of the {selected} {noun} have a free VF of the requested kind"
            );
        }
        if self.wants_functions {
            noun += " with a free VF";
        }
        if self.with_room < needed {
            let (with_room, with_function) = (self.with_room, self.with_function);
            return write!(
                f,
                "{with_room} of the {with_function} {noun} are healthy and have room"
            );
        }
        let (permitted, with_room) = (self.permitted, self.with_room);
        write!(
            f,
            "{permitted} of the {with_room} {noun} that have room are not ruled out by exclusive use"
        )
    }
}

/// Devices of a type in words.
fn noun(kind: &DeviceType) -> String {
    match kind {
        DeviceType::Gpu => "GPUs".to_owned(),
        DeviceType::Other(kind) => format!("devices of type {kind}"),
    }
}

/// A number of devices in words, such as `2 GPUs`.
fn count(n: usize, kind: &DeviceType) -> String {
    match kind {
        DeviceType::Gpu if n == 1 => "1 GPU".to_owned(),
        DeviceType::Gpu => format!("{n} GPUs"),
        DeviceType::Other(kind) => format!("{n} {kind}"),
    }
}
