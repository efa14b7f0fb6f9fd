//! The facts by which the leader makes room: the pods that wait for it, the nodes on which it may be made, and the pods that go.

use std::collections::BTreeMap;

use placement::{NodeId, NodeView, OwnerId};

use super::NodeFilter;
use super::cluster::Cluster;
use super::room_rules::{NotPreemptor, is_refusal};
use super::view;
use crate::accounting::PodFacts;
use crate::bind::PodId;
use crate::kube_scheduler::PodRules;

/// The cluster, as far as rooms depend on it.
#[derive(Clone, Copy, Debug)]
pub struct RoomFacts<'a> {
    pub(super) cluster: &'a Cluster,
}

/// A pod that waits for a node.
#[derive(Clone, Copy, Debug)]
pub struct WaitingPod<'a> {
    /// Its request.
    pub facts: &'a PodFacts,
    /// The fields that kube-scheduler compares with nodes, and its last attempt.
    pub rules: &'a PodRules,
    /// The node that it is nominated to.
    pub nominated: Option<&'a str>,
    /// The reason in its spec for which no room is made for it.
    pub(crate) no_room: Option<NotPreemptor>,
}

/// A pod that the leader, now or before, has nominated to the node on which it makes room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoomNominee {
    /// The pod.
    pub pod: PodId,
    /// The node.
    pub node: Box<str>,
    /// The time of the nomination, in seconds since 1970.
    pub nominated_at: i64,
    /// The pods of lower priority that are leaving the node.
    pub leaving: Vec<OwnerId>,
    /// The longest grace period of these pods, in seconds.
    pub grace_seconds: u32,
}

impl WaitingPod<'_> {
    /// The reason for which no room is made for the pod, as far as the pod itself shows one.
    pub(crate) fn not_preemptor(&self) -> Option<NotPreemptor> {
        let attempt = self.rules.last_attempt.as_ref();
        let is_refused = attempt.is_some_and(|attempt| is_refusal(&attempt.reason));
        let nominated = self.nominated.map(|_| NotPreemptor::Nominated);
        let not_refused = (!is_refused).then_some(NotPreemptor::NotRefused);
        self.no_room.or(nominated).or(not_refused)
    }
}

impl<'a> RoomFacts<'a> {
    /// A pod that a watch has shown waiting, and that no bind has assumed.
    pub fn waiting(self, uid: &str) -> Option<WaitingPod<'a>> {
        let entry = self.cluster.pods.get(uid)?;
        let is_waiting = entry.list != 0 && entry.assumption.is_none() && !entry.preemption.is_leaving;
        let rules = entry.rules.as_deref().filter(|_| is_waiting)?;
        Some(WaitingPod {
            facts: &entry.facts,
            rules,
            nominated: entry.preemption.nominated.as_deref(),
            no_room: entry.preemption.no_room,
        })
    }

    /// Returns true if a waiting pod is nominated by the leader, now or before.
    pub fn is_nominee(self, uid: &str) -> bool {
        let entry = self.cluster.pods.get(uid);
        entry.is_some_and(|entry| entry.preemption.nominated_for_room.is_some())
            && self.waiting(uid).is_some()
    }

    /// The name of a node, unless it is gone.
    pub fn node_name(self, node: NodeId) -> Option<&'a str> {
        let name = self.cluster.fleet.view(node)?.name();
        self.cluster.knows_node(name).then_some(name)
    }

    /// The number of pods with a lower priority that hold devices of a node, and that may be evicted or are leaving.
    pub fn n_victims_on(self, node: NodeId, priority: i32) -> usize {
        let held = self.cluster.fleet.view(node).into_iter().flat_map(NodeView::held);
        let entries = held.filter_map(|held| self.cluster.pods.get(&held.owner));
        let evictions = entries.map(|entry| &entry.preemption);
        let goes = evictions.filter(|eviction| eviction.is_leaving || eviction.evictable_within.is_some());
        goes.filter(|eviction| eviction.rank.priority < priority).count()
    }

    /// The bytes that these pods hold of each GPU of a node, by the GPU's minor number.
    pub fn held_by(self, node: &str, pods: impl Iterator<Item = &'a str>) -> BTreeMap<u32, u64> {
        let mut held = BTreeMap::new();
        for uid in pods {
            for (minor, bytes) in view::counted_on(NodeFilter::of(self.cluster), node, uid) {
                *held.entry(minor).or_default() += bytes;
            }
        }
        held
    }

    /// The pods that the leader, now or before, has nominated, and that wait still.
    pub fn nominees(self) -> Vec<RoomNominee> {
        let mut nominees = Vec::new();
        for owner in &self.cluster.nominated {
            let Some(entry) = self.cluster.pods.get(owner) else {
                continue;
            };
            if let Some(nominated_at) = entry.preemption.nominated_for_room
                && let Some(node) = &entry.preemption.nominated
                && self.waiting(owner.as_str()).is_some()
            {
                let (leaving, grace_seconds) = self.leaving(node, entry.preemption.rank.priority);
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

    /// The pods with a lower priority that are leaving a node, and the longest of their grace periods in seconds.
    fn leaving(self, node: &str, priority: i32) -> (Vec<OwnerId>, u32) {
        let (mut leaving, mut grace_seconds) = (Vec::new(), 0);
        for held in self.cluster.view(node).into_iter().flat_map(NodeView::held) {
            if let Some(entry) = self.cluster.pods.get(&held.owner)
                && entry.preemption.is_leaving
                && entry.preemption.rank.priority < priority
            {
                leaving.push(held.owner.clone());
                grace_seconds = grace_seconds.max(entry.preemption.evictable_within.unwrap_or_default());
            }
        }
        (leaving, grace_seconds)
    }
}
