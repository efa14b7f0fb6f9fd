//! The fields of pods by which kube-scheduler, and the leader that makes room, choose victims.

use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;
use proto::pod::Pod;

use super::room_rules::{NotPreemptor, check_spec};

/// The manager of fields under which the leader nominates a pod to the node on which it makes room for it.
pub(crate) const ROOM_MANAGER: &str = "gpushare-make-room";

/// The grace period of a pod that names none, in seconds: Kubernetes' default.
const DEFAULT_GRACE: i64 = 30;

/// The fields that bear on preemption of a pod that asks for device resources.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct PreemptionFacts {
    pub(super) rank: EvictionRank,
    pub(super) is_leaving: bool,
    /// True if the pod has required anti-affinity, and so keeps other pods away.
    pub(super) repels: bool,
    pub(super) labels: BTreeMap<String, String>,
    /// The node in `status.nominatedNodeName`, which kube-scheduler keeps for the pod.
    pub(super) nominated: Option<Box<str>>,
    /// The time at which the leader has nominated the pod, in seconds since 1970; `None` if kube-scheduler has, or nothing has.
    pub(super) nominated_for_room: Option<i64>,
    /// The grace period in seconds of a pod that the leader may evict to make room for another; `None` for any other pod.
    pub(super) evictable_within: Option<u32>,
    /// The reason in its spec for which no room is made for the pod.
    pub(super) no_room: Option<NotPreemptor>,
}

/// A pod's importance compared with other pods: priority, then the earlier start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EvictionRank {
    pub(super) priority: i32,
    /// `status.startTime` in seconds since 1970; `i64::MAX` for a pod without one.
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
        let started = pod.status.start_time.as_deref();
        let started = started.and_then(|text| text.parse::<Timestamp>().ok());
        Self {
            priority: pod.priority(),
            // kube-scheduler takes a pod that has not started for the youngest, which goes first.
            started: started.map_or(i64::MAX, Timestamp::as_second),
        }
    }
}

impl PreemptionFacts {
    pub(super) fn of(pod: &Pod) -> Self {
        Self {
            rank: EvictionRank::of(pod),
            is_leaving: pod.is_deleting(),
            repels: pod.spec.affinity.pod_anti_affinity.is_required,
            labels: pod.metadata.labels.clone().unwrap_or_default(),
            nominated: pod.nominated_node().map(Into::into),
            nominated_for_room: pod.nominated_at_by(ROOM_MANAGER),
            evictable_within: pod.may_be_evicted().then_some(grace_seconds(pod)),
            no_room: check_spec(pod).err(),
        }
    }

    /// Returns true if kubelet has admitted the pod, and so has set its start time.
    pub(super) fn is_admitted(&self) -> bool {
        self.rank.started != i64::MAX
    }
}

fn grace_seconds(pod: &Pod) -> u32 {
    let grace = pod.spec.termination_grace_period_seconds;
    u32::try_from(grace.unwrap_or(DEFAULT_GRACE)).unwrap_or(0)
}

/// A pod that uses CPU and memory of a node and asks for no devices.
#[derive(Debug)]
pub(super) struct PlainPod {
    pub(super) rank: EvictionRank,
    pub(super) list: u32,
}
