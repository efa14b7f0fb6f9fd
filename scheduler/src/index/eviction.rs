//! The fields of pods by which kube-scheduler chooses victims.

use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;
use placement::OwnerId;
use proto::pod::Pod;
use proto::totals::NamedRequests;
use rustc_hash::FxHashMap;

/// The facts by which kube-scheduler chooses victims, of a pod that asks for our resources.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Eviction {
    pub(super) rank: EvictionRank,
    /// True if the pod is being deleted.
    pub(super) is_leaving: bool,
    /// True if it keeps certain pods away from its node.
    pub(super) repels: bool,
    pub(super) labels: BTreeMap<String, String>,
    /// All that it requests of a node except CPU and memory.
    pub(super) requests: NamedRequests,
    /// The node that kube-scheduler keeps for it.
    pub(super) nominated: Option<Box<str>>,
}

/// A pod's importance beside others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EvictionRank {
    pub(super) priority: i32,
    /// Seconds since 1970; of a pod that has not started, the end of time.
    pub(super) started: i64,
}

impl Default for EvictionRank {
    fn default() -> Self {
        Self {
            priority: 0,
            started: i64::MAX,
        }
    }
}

impl EvictionRank {
    pub(super) fn of(pod: &Pod) -> Self {
        let started = pod
            .status
            .start_time
            .as_deref()
            .and_then(|text| text.parse::<Timestamp>().ok());
        Self {
            priority: pod.priority(),
            started: started.map_or(i64::MAX, Timestamp::as_second),
        }
    }
}

impl Eviction {
    pub(super) fn of(pod: &Pod) -> Self {
        Self {
            rank: EvictionRank::of(pod),
            is_leaving: pod.is_deleting(),
            repels: pod.spec.affinity.pod_anti_affinity.is_required,
            labels: pod.metadata.labels.clone().unwrap_or_default(),
            requests: NamedRequests::of_pod(pod),
            nominated: pod.nominated_node().map(Into::into),
        }
    }

    /// Returns true if kubelet has taken the pod on.
    pub(super) fn is_admitted(&self) -> bool {
        self.rank.started != EvictionRank::default().started
    }
}

/// Pods that use CPU and memory and ask for nothing of ours, by UID.
pub(super) type PlainPods = FxHashMap<OwnerId, PlainPod>;

/// The record of such a pod.
#[derive(Debug)]
pub(super) struct PlainPod {
    pub(super) rank: EvictionRank,
    /// Number of the list that named it last.
    pub(super) list: u32,
}
