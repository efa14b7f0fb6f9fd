//! The state that every request is answered from: what watches have shown and what binds have decided.
//!
//! Changes only through [`ObjectStore`] (watches), and through assume, confirm and forget (binds). Does no I/O, reads no clock:
//! whoever calls brings the time.

mod ask;
mod assume;
mod budgets;
mod census;
mod eviction;
mod failing;
mod gangs;
mod given;
mod hints;
mod hosts;
mod nodes;
mod openings;
mod plugins;
mod pods;
mod stamp;

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use placement::{Fleet, OwnerId, Policies, ResourceWeights};
use proto::resource::ResourceNames;
use rustc_hash::{FxHashMap, FxHashSet};
use tokio::sync::Notify;

pub use ask::{Leader, NodeAsk};
pub use assume::{AssumeError, Assumed, Assumption, Moment, Phase};
pub use census::{Census, DeviceShow, GpuCensus, GpuShow, HolderShow, NodeShow};
pub use eviction::{Preemptor, Promised};
pub use hints::{Decision, HintTimes};
pub use nodes::RawDevice;
pub use openings::Openings;
pub use stamp::Stamps;

use crate::accounting::PodFacts;
use crate::kinds::Kinds;
use crate::watch::ObjectStore;
use budgets::Budgets;
use failing::FailingNodes;
use hints::HintQueue;
use hosts::PlainPods;
use nodes::NodeState;
use plugins::Plugins;
use pods::PodEntry;
use proto::node::Node;
use proto::pod::{Pod, Taint};

/// State behind a lock that is held for moments only and never while waiting for anything else.
#[derive(Debug)]
pub struct Shared<I>(Arc<RwLock<I>>);

impl<I> Clone for Shared<I> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<I> Shared<I> {
    /// Shares a state.
    pub fn new(state: I) -> Self {
        Self(Arc::new(RwLock::new(state)))
    }

    /// The state, to look at.
    pub fn read(&self) -> RwLockReadGuard<'_, I> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The state, to change.
    pub fn write(&self) -> RwLockWriteGuard<'_, I> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Nodes, devices, pods and who holds what.
#[derive(Debug)]
pub struct Index {
    names: ResourceNames,
    policies: Policies,
    fleet: Fleet,
    /// Every node that exists or has a Device object, by name.
    nodes: FxHashMap<Box<str>, NodeState>,
    /// Which type of device has which resource.
    kinds: Kinds,
    /// The nodes that say their kubelet has given devices to a pod, by its UID.
    given_on: FxHashMap<Box<str>, Vec<Box<str>>>,
    /// Pods that have ended and are still listed, by UID, with the number of the list that named them last.
    ended: FxHashMap<OwnerId, u32>,
    /// True if pods may see all devices of their node and be charged for none.
    allows_all_devices: bool,
    /// Whether somebody rehearses what is learnt.
    rehearses: bool,
    /// Taints of nodes that pods had better avoid, by the nodes' names.
    soft_taints: FxHashMap<Box<str>, Box<[Taint]>>,
    /// How many nodes count in units that nobody knows.
    n_opaque: usize,
    /// Pods that ask for our resources and are not terminal, by UID.
    pods: FxHashMap<OwnerId, PodEntry>,
    /// Pods that use only CPU and memory of their nodes.
    plain: PlainPods,
    /// Pods that ask for our resources and that kube-scheduler keeps a node for.
    nominated: FxHashSet<OwnerId>,
    budgets: Budgets,
    /// Changes of the workload that had happened when it was learnt last.
    n_learnt: u64,
    hints: HintQueue,
    /// The number of times room has opened without an event that kube-scheduler sees.
    n_silent_openings: u64,
    failing: FailingNodes,
    plugins: Plugins,
    stamps: Stamps,
    node_list: List,
    device_list: List,
    pod_list: List,
    budget_list: List,
    /// Whether pods that ask for our resources were unbound when all pods had been seen for the first time.
    began_with_pending: bool,
    /// Notified when a list has left out decisions that it should have shown.
    unlisted: Arc<Notify>,
}

/// How far the list of one kind has come; objects carry the number of the list that named them last.
#[derive(Clone, Copy, Debug, Default)]
struct List {
    number: u32,
    synced: bool,
    /// The number of times room had opened when it began.
    n_openings: u64,
}

impl List {
    fn begin(&mut self, n_openings: u64) {
        self.n_openings = n_openings;
        self.number = self.number.wrapping_add(1).max(1);
    }
}

impl Index {
    /// An index that has seen nothing yet, whose hints last `hint_ttl` at most unless [said otherwise](Self::holding).
    pub fn new(names: ResourceNames, policies: Policies, hint_ttl: Duration) -> Self {
        let first = List {
            number: 1,
            synced: false,
            n_openings: 0,
        };
        Self {
            names,
            policies,
            fleet: Fleet::new(),
            nodes: FxHashMap::default(),
            kinds: Kinds::default(),
            given_on: FxHashMap::default(),
            ended: FxHashMap::default(),
            allows_all_devices: false,
            rehearses: false,
            soft_taints: FxHashMap::default(),
            n_opaque: 0,
            pods: FxHashMap::default(),
            plain: PlainPods::default(),
            nominated: FxHashSet::default(),
            budgets: Budgets::default(),
            n_learnt: 0,
            hints: HintQueue::new(HintTimes::all(hint_ttl)),
            n_silent_openings: 0,
            failing: FailingNodes::default(),
            plugins: Plugins::default(),
            stamps: Stamps::default(),
            node_list: first,
            device_list: first,
            pod_list: first,
            budget_list: first,
            began_with_pending: false,
            unlisted: Arc::default(),
        }
    }

    /// The same index for a cluster in which pods may see all devices of their node; others are refused, and those that are bound
    /// count as holders of all that their records name.
    #[must_use]
    pub fn allowing_all_devices(self, allows_all_devices: bool) -> Self {
        Self {
            allows_all_devices,
            ..self
        }
    }

    /// The same index, which takes on what it learns only when [told](Self::end_learning): after [rehearsals](Fleet::rehearse).
    #[must_use]
    pub fn rehearsing(self) -> Self {
        Self {
            rehearses: true,
            ..self
        }
    }

    /// The same index, which takes pods of this namespace for those of device plugins, if they look like it.
    #[must_use]
    pub fn watching_plugins_in(self, namespace: &str) -> Self {
        Self {
            plugins: Plugins::of_namespace(namespace),
            ..self
        }
    }

    /// The same index with weights for the policies that weigh resources.
    #[must_use]
    pub fn weighing(self, weights: ResourceWeights) -> Self {
        Self {
            fleet: self.fleet.with_weights(weights),
            ..self
        }
    }

    /// Resource names that are the cluster's choice.
    pub fn names(&self) -> &ResourceNames {
        &self.names
    }

    /// The engine's state.
    pub fn fleet(&self) -> &Fleet {
        &self.fleet
    }

    /// Each kind of object and whether all of it has been seen.
    pub fn synced(&self) -> [(&'static str, bool); 3] {
        [
            (<Self as ObjectStore<Node>>::KIND, self.node_list.synced),
            (<Self as ObjectStore<RawDevice>>::KIND, self.device_list.synced),
            (<Self as ObjectStore<Pod>>::KIND, self.pod_list.synced),
        ]
    }

    /// Whether everything has been seen.
    ///
    /// # Errors
    /// A sentence that names what has not.
    pub fn ready(&self) -> Result<(), String> {
        let missing: Vec<&str> = self
            .synced()
            .into_iter()
            .filter(|(_, synced)| !synced)
            .map(|(kind, _)| kind)
            .collect();
        if missing.is_empty() {
            Ok(())
        } else {
            Err(format!(
                "not ready: waiting for the list of {}",
                missing.join(", ")
            ))
        }
    }

    /// Whether pods that ask for our resources were unbound at first: a scheduler before this one may be binding them.
    pub fn began_with_pending(&self) -> bool {
        self.began_with_pending
    }

    /// Notified when a list is complete that has left out decisions which it should have shown.
    pub fn unlisted(&self) -> Arc<Notify> {
        Arc::clone(&self.unlisted)
    }

    /// Whether it is not known of some binding whether it was written.
    pub fn has_doubts(&self) -> bool {
        let mut open = self.pods.values().filter_map(|entry| entry.assumption.as_deref());
        open.any(|assumption| assumption.phase != Phase::Written)
    }

    /// Somebody else may decide from now on: decisions that are open are not repeated, as their room may be given away.
    pub fn end_reign(&mut self) {
        for assumption in self
            .pods
            .values_mut()
            .filter_map(|entry| entry.assumption.as_deref_mut())
        {
            assumption.outlived = true;
        }
    }

    /// Whether there is a Node object of this name.
    pub fn knows_node(&self, name: &str) -> bool {
        self.nodes.get(name).is_some_and(NodeState::exists)
    }

    /// What is known of a pod that asks for our resources.
    pub fn pod(&self, uid: &str) -> Option<&PodFacts> {
        self.pods.get(uid).map(|entry| &entry.facts)
    }

    /// Number of nodes that are known by a Node or Device object.
    pub fn n_nodes(&self) -> usize {
        self.nodes.len()
    }

    /// Returns true if kubelet has refused several pods on a node lately, so that it ranks behind all others.
    #[inline]
    pub fn is_failing(&self, node: &str) -> bool {
        self.failing.is_last(node)
    }

    /// Whether a watch has shown this pod, which asks for our resources.
    pub fn is_shown(&self, uid: &str) -> bool {
        self.pods.get(uid).is_some_and(|entry| entry.list != 0)
    }

    /// Finds pods by name; more than one while a pod and its successor of the same name overlap.
    pub fn pods_named<'a>(
        &'a self,
        namespace: &'a str,
        name: &'a str,
    ) -> impl Iterator<Item = (&'a OwnerId, &'a PodFacts)> {
        let entries = self.pods.iter().map(|(uid, entry)| (uid, &entry.facts));
        entries.filter(move |(_, facts)| &*facts.namespace == namespace && &*facts.name == name)
    }
}

#[cfg(test)]
mod tests;
