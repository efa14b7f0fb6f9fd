//! The facts by which the leader makes room: the pods that wait for it, the nodes on which it may be made, and the pods that go.

use placement::{NodeView, OwnerId};

use super::Index;
use super::cluster::Cluster;
use super::room_rules::{NotPreemptor, is_refusal};
use crate::accounting::PodFacts;
use crate::bind::PodId;
use crate::kube_scheduler::PodRules;

/// A pod that waits for a node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WaitingPod<'a> {
    pub(crate) facts: &'a PodFacts,
    pub(crate) rules: &'a PodRules,
    /// The node that it is nominated to.
    pub(crate) nominated: Option<&'a str>,
    /// The reason in its spec for which no room is made for it.
    pub(crate) no_room: Option<NotPreemptor>,
}

/// A pod that the leader, now or before, has nominated to the node on which it makes room.
#[derive(Debug)]
pub(crate) struct RoomNominee {
    pub(crate) pod: PodId,
    pub(crate) node: Box<str>,
    /// The time of the nomination, in seconds since 1970.
    pub(crate) nominated_at: i64,
    /// The pods of lower priority that are leaving the node.
    pub(crate) leaving: Vec<OwnerId>,
    /// The longest grace period of these pods, in seconds.
    pub(crate) grace_seconds: u32,
}

impl WaitingPod<'_> {
    /// The reason for which no room is made for the pod, as far as the pod itself shows one.
    pub(crate) fn not_preemptor(&self) -> Option<NotPreemptor> {
        match &self.rules.last_attempt {
            _ if self.no_room.is_some() => self.no_room,
            _ if self.nominated.is_some() => Some(NotPreemptor::Nominated),
            Some(attempt) if is_refusal(&attempt.reason) => None,
            _ => Some(NotPreemptor::NotRefused),
        }
    }
}

/// A pod that a watch has shown waiting, and that no bind has assumed.
pub(crate) fn waiting<'a>(index: &'a Index, uid: &str) -> Option<WaitingPod<'a>> {
    let entry = index.cluster.pods.get(uid)?;
    let is_waiting = entry.list != 0 && entry.assumption.is_none() && !entry.preemption.is_leaving;
    is_waiting.then_some(WaitingPod {
        facts: &entry.facts,
        rules: entry.rules.as_deref()?,
        nominated: entry.preemption.nominated.as_deref(),
        no_room: entry.preemption.no_room,
    })
}

/// Returns true if a waiting pod is nominated by the leader, now or before.
pub(crate) fn is_nominee(index: &Index, uid: &str) -> bool {
    let entry = index.cluster.pods.get(uid);
    entry.is_some_and(|entry| entry.preemption.nominated_for_room.is_some()) && waiting(index, uid).is_some()
}

/// The pods that the leader, now or before, has nominated, and that wait still.
pub(crate) fn nominees(index: &Index) -> Vec<RoomNominee> {
    let mut nominees = Vec::new();
    for owner in &index.cluster.nominated {
        let Some(entry) = index.cluster.pods.get(owner) else {
            continue;
        };
        if let Some(nominated_at) = entry.preemption.nominated_for_room
            && let Some(node) = &entry.preemption.nominated
            && waiting(index, owner.as_str()).is_some()
        {
            let (leaving, grace_seconds) = leaving(&index.cluster, node, entry.preemption.rank.priority);
            nominees.push(RoomNominee {
                pod: entry.id(owner),
                node: node.clone(),
                nominated_at,
                leaving,
                grace_seconds,
            });
        }
    }
    nominees
}

/// Returns true if a pod of lower priority that holds devices of a node is being deleted.
pub(crate) fn has_leaving(index: &Index, node: &str, priority: i32) -> bool {
    !leaving(&index.cluster, node, priority).0.is_empty()
}

/// The pods with a lower priority that are leaving a node, and the longest of their grace periods in seconds.
fn leaving(cluster: &Cluster, node: &str, priority: i32) -> (Vec<OwnerId>, u32) {
    let (mut leaving, mut grace_seconds) = (Vec::new(), 0);
    for held in cluster.view(node).into_iter().flat_map(NodeView::held) {
        if let Some(entry) = cluster.pods.get(&held.owner)
            && entry.preemption.is_leaving
            && entry.preemption.rank.priority < priority
        {
            leaving.push(held.owner.clone());
            grace_seconds = grace_seconds.max(entry.preemption.evictable_within.unwrap_or_default());
        }
    }
    (leaving, grace_seconds)
}
