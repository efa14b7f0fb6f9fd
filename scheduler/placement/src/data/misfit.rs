//! The detailed explanation of a refusal, for users: the rule, and how far the node is from meeting it.

use std::borrow::Cow;
use std::fmt;

use crate::data::constraints::{DeviceConstraint, Scope};
use crate::data::ident::DeviceType;
use crate::data::reason::Reason;

/// Why a node cannot take a request, in the terms of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Misfit {
    reason: Reason,
    text: Cow<'static, str>,
}

/// The number of devices of a type that remain after each rule.
#[derive(Default)]
pub(crate) struct CandidateCounts {
    /// Number of all devices of the type.
    all: usize,
    /// Number of devices with the requested labels.
    pub(crate) selected: usize,
    /// Of these, those with a free virtual function of the requested kind; all of these if none is requested.
    with_free_function: usize,
    /// Of these, those that are healthy and have room.
    with_room: usize,
    /// Of these, those that exclusive use of this or another pod does not rule out.
    permitted: usize,
}

impl Misfit {
    /// A refusal for a reason, with a text that explains it.
    pub(crate) fn new(reason: Reason, text: impl Into<Cow<'static, str>>) -> Self {
        let text = text.into();
        Self { reason, text }
    }

    /// The refusal of a node that does not report where devices of a type are, so that none of them meets a rule about
    /// places for certain.
    pub(crate) fn places_unknown(kind: &DeviceType, scope: Scope) -> Self {
        let (scope, noun) = (scope.name(), noun(kind));
        let text = format!(
            "the node does not report the {scope} of its {noun}, so that they cannot be chosen by it"
        );
        Self::new(Reason::Together, text)
    }

    /// The refusal reason, whose text names no amount.
    pub fn reason(&self) -> Reason {
        self.reason
    }
}

/// For a reason that needs no further words, such as too little free memory.
impl From<Reason> for Misfit {
    fn from(reason: Reason) -> Self {
        Self::new(reason, reason.as_str())
    }
}

impl From<Misfit> for Reason {
    fn from(misfit: Misfit) -> Self {
        misfit.reason
    }
}

impl fmt::Display for Misfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl CandidateCounts {
    /// Counts a device under each rule that it passes before the first failure; returns true if it passes all. `passes` is in the
    /// order of [`Self::describe`], which names the first rule that leaves too few devices.
    pub(crate) fn add(&mut self, passes: [bool; 4]) -> bool {
        self.all += 1;
        let after_rules = [
            &mut self.selected,
            &mut self.with_free_function,
            &mut self.with_room,
            &mut self.permitted,
        ];
        for (count, passes) in after_rules.into_iter().zip(passes) {
            if !passes {
                return false;
            }
            *count += 1;
        }
        true
    }

    /// The counts up to the first rule that leaves fewer devices than needed, in words.
    pub(crate) fn describe(&self, kind: &DeviceType, needed: usize, rules: &DeviceConstraint) -> String {
        let mut noun = noun(kind);
        if self.all < needed {
            return format!("the node has {} {noun}", self.all);
        }
        let labels = rules.selector.as_ref();
        if let Some(labels) = labels.filter(|labels| !labels.requirements.is_empty()) {
            if self.selected < needed {
                let (selected, all) = (self.selected, self.all);
                return format!("{selected} of the {all} {noun} have labels {labels}");
            }
            noun = format!("{noun} with labels {labels}");
        }
        if self.with_free_function < needed {
            let (with_free_function, selected) = (self.with_free_function, self.selected);
            return format!(
                "{with_free_function} of the {selected} {noun} have a free VF of the requested kind"
            );
        }
        if rules.virtual_functions.is_some() {
            noun += " with a free VF";
        }
        if self.with_room < needed {
            let (with_room, with_free_function) = (self.with_room, self.with_free_function);
            return format!("{with_room} of the {with_free_function} {noun} are healthy and have room");
        }
        let (permitted, with_room) = (self.permitted, self.with_room);
        format!("{permitted} of the {with_room} {noun} that have room are not ruled out by exclusive use")
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
pub(crate) fn number_of(n: usize, kind: &DeviceType) -> String {
    match kind {
        DeviceType::Gpu if n == 1 => "1 GPU".to_owned(),
        DeviceType::Gpu => format!("{n} GPUs"),
        DeviceType::Other(kind) => format!("{n} {kind}"),
    }
}
