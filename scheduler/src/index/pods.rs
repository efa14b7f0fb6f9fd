//! The pods that request device resources, with what the cluster cache derives from each.

use std::borrow::Cow;
use std::ops::{Deref, DerefMut};

use placement::{OwnerId, PodProfile};
use rustc_hash::FxHashMap;

use super::assumption::Assumption;
use super::eviction::Eviction;
use crate::accounting::{Bound, PodFacts};

/// The entries by UID.
#[derive(Debug, Default)]
pub(super) struct PodEntries(FxHashMap<OwnerId, PodEntry>);

/// One pod.
#[derive(Debug)]
pub(super) struct PodEntry {
    pub(super) facts: PodFacts,
    /// The decision of a bind that no watch has shown yet.
    pub(super) assumption: Option<Box<Assumption>>,
    /// The reason for which its record is counted conservatively or not at all.
    pub(super) problem: Option<Box<str>>,
    /// True if its record names more than it requests or was given.
    pub(super) contradicts: bool,
    /// The request as the workload model counts it.
    pub(super) counted: Option<PodProfile>,
    pub(super) eviction: Eviction,
    /// The number of the list that named it last; zero if no watch has shown it.
    pub(super) list: u32,
}

impl Deref for PodEntries {
    type Target = FxHashMap<OwnerId, PodEntry>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl DerefMut for PodEntries {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

impl PodEntries {
    /// The key of a pod, shared with the entry if there is one: most owners are known, and need no allocation.
    pub(super) fn owner(&self, uid: &str) -> OwnerId {
        match self.get_key_value(uid) {
            Some((owner, _)) => owner.clone(),
            None => OwnerId::from(uid),
        }
    }

    /// The decision about a pod that no watch has shown yet.
    pub(super) fn assumption(&self, uid: &str) -> Option<&Assumption> {
        self.get(uid)?.assumption.as_deref()
    }

    /// The same, if it is the decision with this stamp.
    pub(super) fn assumption_mut(&mut self, uid: &str, stamp: u64) -> Option<&mut Assumption> {
        let assumption = self.get_mut(uid)?.assumption.as_deref_mut();
        assumption.filter(|assumption| assumption.moment.stamp == stamp)
    }

    /// All decisions that no watch has shown yet.
    pub(super) fn assumptions(&self) -> impl Iterator<Item = &Assumption> {
        self.values().filter_map(|entry| entry.assumption.as_deref())
    }

    /// The node that the decision about a pod names, while no watch has shown the pod on it.
    pub(super) fn assumed_node(&self, uid: &str) -> Option<&str> {
        Some(self.assumption(uid)?.binding.node.as_str())
    }
}

impl PodEntry {
    pub(super) fn new(facts: PodFacts) -> Self {
        Self {
            facts,
            assumption: None,
            problem: None,
            contradicts: false,
            counted: None,
            eviction: Eviction::default(),
            list: 0,
        }
    }

    /// The pod's node and record: those that a watch has shown, else those of the decision.
    pub(super) fn bound(&self) -> Option<Cow<'_, Bound>> {
        match (self.facts.bound.as_deref(), &self.assumption) {
            (Some(bound), _) => Some(Cow::Borrowed(bound)),
            (None, Some(assumption)) => {
                let binding = &assumption.binding;
                Some(Cow::Owned(Bound::read(&binding.node, Some(&binding.annotations))))
            }
            (None, None) => None,
        }
    }
}
