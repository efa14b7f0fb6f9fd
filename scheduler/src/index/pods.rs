//! A pod that requests device resources, with what the cluster cache derives from it.

use std::borrow::Cow;

use placement::PodProfile;

use super::assumption::Assumption;
use super::eviction::Eviction;
use crate::accounting::{Bound, PodFacts};
use crate::kube_scheduler::PodRules;

/// A pod that requests device resources.
#[derive(Debug)]
pub(super) struct PodEntry {
    pub(super) facts: PodFacts,
    /// The fields that kube-scheduler compares with nodes; `None` for a pod that a watch has shown bound, or not shown yet.
    pub(super) rules: Option<Box<PodRules>>,
    /// The decision of a bind, until a watch shows the pod bound.
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

impl PodEntry {
    /// The entry of a pod without an assumption, which no list has shown yet.
    pub(super) fn new(facts: PodFacts) -> Self {
        Self {
            facts,
            rules: None,
            assumption: None,
            problem: None,
            contradicts: false,
            counted: None,
            eviction: Eviction::default(),
            list: 0,
        }
    }

    /// The pod's node and record: those that a watch has shown, else those of the assumption.
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
