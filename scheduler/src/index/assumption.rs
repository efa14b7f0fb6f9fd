//! Assumptions. An assumption is the decision of a bind until the watch of pods shows the pod bound: a node, and devices there
//! that are chosen and reserved for the pod.

use std::time::Instant;

use placement::{Reason, ReserveError};

use proto::request::RequestError;

use crate::bind::PodBinding;

/// The decision of a bind that the watch of pods has not shown yet.
#[derive(Clone, Debug)]
pub struct Assumption {
    /// The binding as it is written, every time it is written.
    pub binding: PodBinding,
    /// The progress of the write.
    pub state: AssumptionState,
    /// True if a complete list of pods, after the binding was written, lacks its pod: the pod was deleted, or is younger than the
    /// list.
    pub(super) unlisted: bool,
    /// True if this replica's term as the leader has ended since the decision, so that the binding must not be written again.
    pub(super) outlived: bool,
}

/// The phase of an assumption.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The binding is being written.
    Writing,
    /// The binding was written, and no watch has shown it yet.
    Written,
    /// The binding may have been written or not.
    Unknown,
}

/// The state of an assumption at one moment, to compare with a later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AssumptionState {
    /// The assume time, which differs from that of every other assumption.
    pub stamp: u64,
    /// The phase of the write.
    pub phase: Phase,
    /// The beginning of the phase.
    pub(super) since: Instant,
}

/// The result of [`super::Index::assume`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Assumed {
    /// The binding to write.
    Write {
        /// The binding.
        binding: PodBinding,
        /// The assume time of the assumption.
        stamp: u64,
        /// True if it has been written before, with an unknown outcome.
        repeated: bool,
    },
    /// The watch has shown the pod on that node already.
    AlreadyBound,
}

/// The reason for which a bind cannot be decided; nothing has changed.
#[derive(Debug, thiserror::Error)]
pub enum AssumeError {
    /// The pod is on another node.
    #[error("the pod is already bound to node {node:?}")]
    BoundElsewhere {
        /// The node that the pod is bound to.
        node: String,
    },
    /// An earlier bind to another node may have got through.
    #[error("an earlier bind of the pod to node {node:?} is not settled yet")]
    AssumedElsewhere {
        /// The node of the earlier bind.
        node: String,
    },
    /// An earlier bind to the same node may have got through, and must not be repeated.
    #[error("an earlier bind of the pod is not settled yet; another replica may have decided since")]
    Outlived,
    /// The request breaks a rule.
    #[error(transparent)]
    Invalid(#[from] RequestError),
    /// The node has no room for the pod.
    #[error("node {node:?}: {reason}{}", .detail.as_ref().map(|detail| format!(": {detail}")).unwrap_or_default())]
    NoRoom {
        /// The node.
        node: String,
        /// The reason.
        reason: Reason,
        /// The rule, and how near the node comes, if there is more to say.
        detail: Option<String>,
    },
    /// The engine refused its own choice.
    #[error("node {node:?} cannot take the pod")]
    Reserve {
        /// The node.
        node: String,
        /// The cause.
        #[source]
        source: ReserveError,
    },
}

impl Assumption {
    /// The assumption of a binding that is about to be written.
    pub(super) fn new(binding: PodBinding, stamp: u64, now: Instant) -> Self {
        let state = AssumptionState {
            stamp,
            phase: Phase::Writing,
            since: now,
        };
        Self {
            binding,
            state,
            unlisted: false,
            outlived: false,
        }
    }

    /// Returns the same binding, to be written again: the API server merges the annotations into the pod, so that another choice of
    /// devices would contradict a write that got through.
    pub(super) fn repeat(&mut self, node: &str, now: Instant) -> Result<Assumed, AssumeError> {
        if self.binding.node != node {
            return Err(AssumeError::AssumedElsewhere {
                node: self.binding.node.clone(),
            });
        }
        // Another leader may have given the room away since.
        if self.outlived {
            return Err(AssumeError::Outlived);
        }
        self.state.phase = Phase::Writing;
        self.state.since = now;
        Ok(Assumed::Write {
            binding: self.binding.clone(),
            stamp: self.state.stamp,
            repeated: true,
        })
    }
}
