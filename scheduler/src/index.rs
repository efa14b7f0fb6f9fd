//! The index: the cluster's state as watches have shown it and as binds have decided it. Every request is answered from it.
//!
//! Changes only through [`ObjectStore`] (watches), through assume, confirm and forget (binds), and
//! through [`Index::tick`] (time). Does no I/O, reads no clock: callers bring the time.
//!
//! `cluster` accounts which pods hold which devices; the other parts keep hints, budgets, failing nodes and the state of
//! device plugins, and know nothing of each other.

mod assumption;
mod budgets;
mod cluster;
mod eviction;
mod failing;
mod gangs;
mod hints;
mod inspected;
mod node_filter;
mod objects;
mod openings;
mod plugins;
mod pods;
mod record;
mod resource_demand;
mod snapshot;
mod stamp;
mod victims;
mod view;

use std::cmp::max;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use placement::{
    Fleet, Hints, Holdings, HostAmounts, HostLoad, NodeId, NodePolicy, NodeView, OwnerId, Placement,
    Policies, Reason, RequestedGpus, ResourceWeights,
};
use proto::extender::MetaVictims;
use proto::node::Node;
use proto::plugin_reports::PluginState;
use proto::pod::{Pod, Taint};
use proto::read_api;
use proto::record::DEVICE_ALLOCATED;
use proto::request::RequestError;
use proto::request::hints::DemandedEnforcement;
use proto::resource::ResourceNames;
use proto::totals::HostResources;
use rustc_hash::{FxHashMap, FxHashSet};
use tokio::sync::Notify;
use tracing::warn;

pub use assumption::{AssumeError, Assumed, Assumption, Moment, Phase};

pub use hints::{Decision, HintQueue, HintTimes};
pub use inspected::InspectedNode;
pub use node_filter::NodeFilter;
pub use objects::RawDevice;
pub use openings::Openings;
pub use resource_demand::ResourceDemand;
pub use snapshot::{GpuSnapshot, NamespaceSnapshot, Snapshot};
pub use stamp::Stamps;
pub use victims::{Preemptor, Promised};
pub(crate) use view::asked;

use crate::accounting::kubelet_allocations::AllocationsByPod;
use crate::accounting::{self, Bound, PodFacts};
use crate::bind::{PodBinding, PodId, PodLookup};
pub use crate::watch::Shared;

use crate::watch::ObjectStore;
use budgets::Budgets;
use cluster::Cluster;
use eviction::{Eviction, EvictionRank, PlainPod, PlainPods};
use failing::FailingNodes;
use plugins::{Plugins, Standing};
use pods::PodEntry;
use record::record;
use victims::ClusterVictimSearch;

/// The workload model is refreshed once this part of all pods has come or gone.
const CHANGED_PART: u64 = 32;
/// Or this number of pods, if they are few.
const MIN_CHANGES: u64 = 16;
/// Time after which a write without an answer has certainly ended: far longer than the timeout that the API server was given.
const UNDER_WAY: Duration = Duration::from_secs(60);

/// Nodes, devices, pods, and the devices that pods hold.
#[derive(Debug)]
pub struct Index {
    cluster: Cluster,
    plugins: Plugins,
    failing: FailingNodes,
    hints: HintQueue,
    budgets: Budgets,
    /// Pods that use only CPU and memory of their nodes.
    plain: PlainPods,
    /// Pods that request device resources and that kube-scheduler keeps a node for.
    nominated: FxHashSet<OwnerId>,
    /// Pods that request device resources and that no watch has shown bound.
    unbound: BTreeSet<OwnerId>,
    /// `PreferNoSchedule` taints by node name.
    soft_taints: FxHashMap<Box<str>, Box<[Taint]>>,
    stamps: Stamps,
    /// True if a refreshed workload model is prewarmed before it counts.
    prewarms: bool,
    /// The number of changes of the workload at the last refresh of its model.
    n_changes_at_refresh: u64,
    node_list: List,
    device_list: List,
    pod_list: List,
    budget_list: List,
    /// True if pods that request device resources were unbound when all pods had been seen for the first time.
    began_with_pending: bool,
    /// Notified when a list has left out decisions that it should have shown.
    unlisted: Arc<Notify>,
}

/// The progress of the list of one kind; objects carry the number of the list that named them last.
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
        // Zero stands for objects that no list and no event has shown.
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
            cluster: Cluster::new(names, policies),
            plugins: Plugins::default(),
            failing: FailingNodes::default(),
            hints: HintQueue::new(HintTimes::all(hint_ttl)),
            budgets: Budgets::default(),
            plain: PlainPods::default(),
            nominated: FxHashSet::default(),
            unbound: BTreeSet::new(),
            soft_taints: FxHashMap::default(),
            stamps: Stamps::default(),
            prewarms: false,
            n_changes_at_refresh: 0,
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
    pub fn allowing_all_devices(mut self, allows_all_devices: bool) -> Self {
        self.cluster.allows_all_devices = allows_all_devices;
        self
    }

    /// The same index for a cluster in which pods demand this enforcement of memory limits, unless they say otherwise.
    #[must_use]
    pub fn demanding(mut self, enforcement: DemandedEnforcement) -> Self {
        self.cluster.enforcement = enforcement;
        self
    }

    /// The same index, which uses a new workload model only after [`Self::finish_workload_refresh`], once the model has been evaluated on
    /// all nodes in advance.
    #[must_use]
    pub fn prewarming(self) -> Self {
        Self {
            prewarms: true,
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
    pub fn weighing(mut self, weights: ResourceWeights) -> Self {
        self.cluster.fleet = self.cluster.fleet.with_weights(weights);
        self
    }

    /// Resource names that are the cluster's choice.
    pub fn names(&self) -> &ResourceNames {
        &self.cluster.names
    }

    /// The engine's state.
    pub fn fleet(&self) -> &Fleet {
        &self.cluster.fleet
    }

    /// Each kind of object and whether all of it has been seen.
    pub fn synced(&self) -> [(&'static str, bool); 3] {
        [
            (<Self as ObjectStore<Node>>::KIND, self.node_list.synced),
            (<Self as ObjectStore<RawDevice>>::KIND, self.device_list.synced),
            (<Self as ObjectStore<Pod>>::KIND, self.pod_list.synced),
        ]
    }

    /// Checks that every watch has listed its objects.
    ///
    /// # Errors
    /// A sentence that names the watches that have not.
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

    /// True if pods that ask for our resources were unbound in the first list: an earlier scheduler may be binding them.
    pub fn began_with_pending(&self) -> bool {
        self.began_with_pending
    }

    /// Notified when a list is complete that has left out decisions which it should have shown.
    pub fn unlisted(&self) -> Arc<Notify> {
        Arc::clone(&self.unlisted)
    }

    /// True if the outcome of a binding is unknown: it may have been written.
    pub fn has_doubts(&self) -> bool {
        let mut open = self.cluster.pods.assumptions();
        open.any(|assumption| assumption.moment.phase != Phase::Written)
    }

    /// Ends the term: another replica may decide from now on. Open decisions are not repeated, as their room may be given away.
    pub fn end_term(&mut self) {
        for entry in self.cluster.pods.values_mut() {
            // The decision itself stays counted: its write may still get through.
            if let Some(assumption) = &mut entry.assumption {
                assumption.outlived = true;
            }
        }
    }

    /// Returns true if a Node object of this name exists.
    pub fn knows_node(&self, name: &str) -> bool {
        self.cluster.knows_node(name)
    }

    /// The facts of a pod that asks for our resources.
    pub fn pod(&self, uid: &str) -> Option<&PodFacts> {
        self.cluster.pods.get(uid).map(|entry| &entry.facts)
    }

    /// Number of nodes that are known by a Node or Device object.
    pub fn n_nodes(&self) -> usize {
        self.cluster.nodes.len()
    }

    /// Returns true if kubelet has refused several pods on a node lately, so that it ranks behind all others.
    #[inline]
    pub fn is_failing(&self, node: &str) -> bool {
        self.failing.is_last(node)
    }

    /// Returns true if a watch has shown this pod, which asks for our resources.
    pub fn is_shown(&self, uid: &str) -> bool {
        self.cluster.pods.get(uid).is_some_and(|entry| entry.list != 0)
    }

    /// Finds pods by name; more than one while a pod and its successor of the same name overlap.
    pub fn pods_named<'a>(
        &'a self,
        namespace: &'a str,
        name: &'a str,
    ) -> impl Iterator<Item = (&'a OwnerId, &'a PodFacts)> {
        let entries = self.cluster.pods.iter().map(|(uid, entry)| (uid, &entry.facts));
        entries.filter(move |(_, facts)| &*facts.namespace == namespace && &*facts.name == name)
    }

    /// The filter's view of the nodes.
    pub fn filter(&self) -> NodeFilter<'_> {
        NodeFilter {
            cluster: &self.cluster,
            plugins: &self.plugins,
        }
    }

    /// The request of a pod for nodes; `None` if it requests no devices.
    ///
    /// # Errors
    /// The rule that its request breaks on every node.
    pub fn demand<'a>(
        &self,
        uid: &'a str,
        facts: &PodFacts,
    ) -> Result<Option<ResourceDemand<'a>>, RequestError> {
        self.cluster.demand(uid, facts)
    }

    /// Returns true if a pod requests devices, validly or not.
    pub fn concerns(&self, facts: &PodFacts) -> bool {
        self.cluster.concerns(facts)
    }

    /// The victims by which a pod fits on a node, instead of those that kube-scheduler proposes; `None` if none help.
    ///
    /// All that kube-scheduler proposes where no device is short.
    pub fn victims(
        &self,
        node: &str,
        preemptor: &Preemptor<'_>,
        proposed: &MetaVictims,
    ) -> Option<MetaVictims> {
        let search = ClusterVictimSearch {
            filter: self.filter(),
            budgets: &self.budgets,
            plain: &self.plain,
            nominated: &self.nominated,
        };
        search.victims(node, preemptor, proposed)
    }

    /// The state in numbers.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot::of(self.filter(), &self.failing, self.synced())
    }

    /// Names of nodes that share GPUs or have a problem: the first `most` after `after`, sorted.
    pub fn gpu_nodes_after(&self, after: Option<&str>, most: usize) -> Vec<String> {
        let mut names: Vec<&str> = Vec::new();
        for (name, state) in &self.cluster.nodes {
            let is_behind = after.is_none_or(|after| **name > *after);
            if is_behind && (state.shares_gpus() || !state.problems.is_empty()) {
                names.push(name);
            }
        }
        if most < names.len() {
            // A page of a large cluster needs no sort of all names.
            names.select_nth_unstable(most);
            names.truncate(most);
        }
        names.sort_unstable();
        names.into_iter().map(str::to_owned).collect()
    }

    /// Names of nodes that have devices of any type, in no order.
    pub fn device_nodes(&self) -> Vec<Box<str>> {
        let nodes = self.cluster.nodes.iter();
        let with_devices = nodes.filter(|(_, state)| state.has_devices());
        with_devices.map(|(name, _)| name.clone()).collect()
    }

    /// The number of times room has opened.
    pub fn openings(&self) -> Openings {
        Openings {
            all: self.cluster.fleet.n_openings(),
            silent: self.cluster.n_silent_openings,
        }
    }

    /// The hints, to read.
    pub fn hints(&self) -> &HintQueue {
        &self.hints
    }

    /// One node for people; `None` if there is no such node.
    pub fn show_node(&self, name: &str) -> Option<InspectedNode> {
        InspectedNode::of(self.filter(), name)
    }

    /// The requests of typical pods, by which free memory counts as usable.
    pub fn typical_requests(&self) -> Vec<RequestedGpus> {
        view::typical_requests(self.fleet())
    }

    /// A node in the terms of the read API; `None` if it shares no GPUs and has no problem.
    pub fn view_node(&self, id: NodeId, typical: &[RequestedGpus]) -> Option<read_api::Node> {
        view::node(self.filter(), id, typical)
    }

    /// The number of pods that wait for a node, and some of them in the terms of the read API.
    pub fn pending_pods(&self, most: usize) -> (usize, Vec<read_api::PendingPod>) {
        view::pending_pods(&self.cluster, &self.unbound, most)
    }

    /// Pods by whose end a request fits on a node; none if no choice of them was found.
    pub fn pods_in_the_way(&self, node: NodeId, demand: &ResourceDemand<'_>) -> Vec<read_api::PodName> {
        view::pods_in_the_way(&self.cluster, node, demand)
    }

    /// The UID of the device plugin's pod on a node, and the address of its metrics, if it serves them.
    pub fn plugin_metrics(&self, node: &str) -> Option<(&str, SocketAddr)> {
        self.plugins.metrics(node)
    }

    /// Returns true if no node is refused for its device plugin.
    pub fn all_plugins_serve(&self) -> bool {
        self.plugins.is_calm()
    }

    /// The pod's UID, as the text that is kept already if there is one.
    pub fn owner(&self, uid: &str) -> OwnerId {
        self.cluster.pods.owner(uid)
    }

    /// The node of a pod's open decision.
    pub fn assumed_node(&self, uid: &str) -> Option<&str> {
        self.cluster.pods.assumed_node(uid)
    }

    /// The same index with these times for hints.
    #[must_use]
    pub fn holding(mut self, times: HintTimes) -> Self {
        self.hints.set_times(times);
        self
    }

    /// Returns true if [`Self::tick`] has something to do.
    pub fn is_due(&self, now: Instant) -> bool {
        self.hints.is_due(now) || self.failing.is_due(now) || self.plugins.is_due(now)
    }

    /// Ends hints, and the times of failing nodes and of device plugins, that are over by now.
    pub fn tick(&mut self, now: Instant) {
        self.failing.advance(now);
        if self.plugins.advance(now) {
            self.cluster.note_silent_opening();
        }
        self.hints.advance(&mut self.cluster, now);
    }

    /// Keeps room for a pod on the node that it was answered with.
    pub fn hint(&mut self, node: NodeId, demand: &ResourceDemand<'_>, decision: &Decision, now: Instant) {
        // Expired hints go first, or the new one would find less room than there is.
        self.tick(now);
        self.hints.hint(&mut self.cluster, node, demand, decision, now);
    }

    /// Ends a pod's hint.
    pub fn unhint(&mut self, uid: &str) {
        self.hints.unhint(&mut self.cluster, uid);
    }

    /// Frees the room of other `PodGroups` than this one whose scheduling cycle will come to nothing.
    pub fn end_gang_cycles(&mut self, asked: Option<&str>) {
        self.hints.end_gang_cycles(&mut self.cluster, asked);
    }

    /// Notes that no node had room for a member of a `PodGroup`; room that is kept for it stays.
    pub fn refuse_member(&mut self, uid: &str, decision: &Decision, now: Instant) {
        self.hints
            .note_member(&mut self.cluster, uid, decision, false, now);
    }

    fn note_taints(&mut self, name: &str, taints: &[Taint]) {
        if taints.is_empty() {
            self.soft_taints.remove(name);
        } else {
            self.soft_taints.insert(name.into(), taints.into());
        }
    }

    /// The taints for which pods that do not tolerate them had better avoid a node; `None` if it has none.
    #[inline]
    pub fn soft_taints(&self, name: &str) -> Option<&[Taint]> {
        if self.soft_taints.is_empty() {
            None
        } else {
            self.soft_taints.get(name).map(|taints| &**taints)
        }
    }

    fn forget_node(&mut self, name: &str) {
        self.note_taints(name, &[]);
        self.failing.remove(name);
        self.plugins.forget_node(name);
        self.cluster.fleet.set_host(name, None);
        if let Some(state) = self.cluster.nodes.get_mut(name) {
            state.node = None;
            self.cluster.refresh_node(name);
        }
    }

    fn forget_device(&mut self, name: &str) {
        if let Some(state) = self.cluster.nodes.get_mut(name) {
            let had_exchanged = !std::mem::take(&mut state.exchanged).is_empty();
            self.cluster.replace_given(name, AllocationsByPod::new());
            self.cluster.replace_without_devices(name, None);
            self.cluster.replace_device(name, None);
            if had_exchanged {
                self.cluster.account_again(name);
            }
        }
    }

    /// Takes in what a node's annotation says of its plugin.
    fn see_plugin_state(&mut self, name: &str, node: &Node) {
        match PluginState::read(node.metadata.annotations.as_ref()) {
            Ok(state) => {
                if self.plugins.see_state(name, state) {
                    self.cluster.note_silent_opening();
                }
            }
            Err(error) => {
                warn!(node = name, %error, "the state of the device plugin is taken to be as it was before");
            }
        }
    }

    fn put_pod(&mut self, uid: &str, facts: PodFacts) {
        let list = self.pod_list.number;
        let owner = self.cluster.pods.owner(uid);
        let Some(bound) = &facts.bound else {
            self.unbound.insert(owner.clone());
            let entry = self
                .cluster
                .pods
                .entry(owner)
                .or_insert_with(|| PodEntry::new(facts.clone()));
            let was_bound = entry.facts.bound.is_some() && entry.assumption.is_none();
            entry.facts = facts;
            entry.list = list;
            if was_bound {
                (entry.problem, entry.contradicts) = (None, false);
                self.cluster.fleet.release(uid);
            }
            return;
        };
        // Records of an earlier leader order the binds too, so new assume times begin above theirs.
        if let Some(nanos) = bound.assumed_at {
            self.stamps.saw(nanos);
        }
        let node = bound.node.clone();
        self.unbound.remove(uid);
        let entry = self
            .cluster
            .pods
            .entry(owner.clone())
            .or_insert_with(|| PodEntry::new(facts.clone()));
        let known = entry.facts == facts && entry.assumption.is_none() && entry.list != 0;
        entry.facts = facts;
        entry.list = list;
        // The watch now shows what the decision anticipated.
        entry.assumption = None;
        self.hints.end(&mut self.cluster, uid, Some(&node));
        // A bound pod is shown many times; only its first binding, or a changed record, is news.
        if !known || self.cluster.fleet.held_by(uid).is_none() {
            self.cluster.account(&owner);
        }
    }

    fn remove_pod(&mut self, uid: &str) {
        self.hints.end(&mut self.cluster, uid, None);
        self.cluster.fleet.release(uid);
        self.nominated.remove(uid);
        self.unbound.remove(uid);
        let Some(entry) = self.cluster.pods.remove(uid) else {
            return;
        };
        let node = entry.bound().map(|bound| bound.node.clone());
        if let Some(state) = node.and_then(|node| self.cluster.nodes.get_mut(&*node)) {
            state.unheld.remove(uid);
        }
        self.cluster.fleet.clear_host_use(uid);
        if let Some(spec) = entry.counted {
            self.cluster.fleet.workload_mut().remove(&spec);
        }
    }

    /// Takes note of what kube-scheduler goes by when it chooses victims.
    fn see_eviction(&mut self, pod: &Pod) {
        let Some((owner, entry)) = self.cluster.pods.get_key_value(pod.uid()) else {
            return;
        };
        let eviction = Eviction::of(pod);
        // kubelet updates the status of a pod often; most updates change nothing that matters here.
        if entry.eviction == eviction {
            return;
        }
        let owner = owner.clone();
        if eviction.nominated.is_some() {
            self.nominated.insert(owner.clone());
        } else {
            self.nominated.remove(&owner);
        }
        let Some(entry) = self.cluster.pods.get_mut(&owner) else {
            return;
        };
        // A pod that kubelet has admitted no longer counts against a plugin on trial, so its node takes one more.
        let is_admitted = !entry.eviction.is_admitted() && eviction.is_admitted();
        entry.eviction = eviction;
        let node = entry
            .facts
            .bound
            .as_ref()
            .filter(|_| is_admitted)
            .map(|bound| bound.node.clone());
        if node.is_some_and(|node| self.plugins.standing(&node) == Standing::Tried) {
            self.cluster.note_silent_opening();
        }
    }

    /// Takes in what a pod uses where it runs; `asked` is known of pods that ask for something of ours.
    fn see_use(&mut self, pod: &Pod, asked: Option<HostAmounts>) {
        let uid = pod.uid();
        let Some(node) = pod
            .spec
            .node_name
            .as_deref()
            .filter(|node| !node.is_empty() && !pod.is_terminal())
        else {
            // The CPU and memory of an assumed pod stay counted as long as the decision does.
            if self.cluster.pods.assumed_node(uid).is_none() {
                self.see_no_use(uid);
            }
            return;
        };
        let owner = self.cluster.pods.owner(uid);
        let amounts = asked.unwrap_or_else(|| accounting::host_amounts(HostResources::of_pod(pod)));
        self.cluster.fleet.set_host_use(
            &owner,
            node,
            HostLoad {
                amounts,
                is_daemon: pod.is_tied_to_node(),
            },
        );
        if asked.is_none() {
            self.plain.insert(
                owner,
                PlainPod {
                    rank: EvictionRank::of(pod),
                    list: self.pod_list.number,
                },
            );
        } else {
            self.plain.remove(uid);
        }
    }

    /// A pod uses nothing any more.
    fn see_no_use(&mut self, uid: &str) {
        self.cluster.fleet.clear_host_use(uid);
        self.plain.remove(uid);
    }

    /// Refreshes the workload model of the policies that look ahead if enough pods have come or gone since the last time.
    fn refresh_workload_if_due(&mut self) {
        let workload = self.cluster.fleet.workload();
        let n_changes = workload.n_changes().abs_diff(self.n_changes_at_refresh);
        let is_due = n_changes >= max(MIN_CHANGES, workload.n_pods() / CHANGED_PART);
        if !self.pod_list.synced || self.cluster.fleet.is_refreshing_workload() || !is_due {
            return;
        }
        if self.prewarms {
            self.n_changes_at_refresh = workload.n_changes();
            self.cluster.fleet.begin_workload_refresh();
        } else {
            self.refresh_workload();
        }
    }

    /// Puts a prewarmed workload model into effect.
    pub fn finish_workload_refresh(&mut self) {
        self.cluster.fleet.finish_workload_refresh();
    }

    /// Refreshes the workload model at once; returns true if it has changed.
    pub fn refresh_workload(&mut self) -> bool {
        self.n_changes_at_refresh = self.cluster.fleet.workload().n_changes();
        self.cluster.fleet.refresh_workload_model()
    }

    /// The demand of a pod without devices: with a policy that looks ahead, nodes are ranked so that CPU stays for GPU pods.
    pub fn host_demand<'a>(&self, pod: &'a Pod) -> Option<ResourceDemand<'a>> {
        let policies = self.cluster.policies;
        (policies.node == NodePolicy::Fill).then(|| ResourceDemand {
            uid: pod.uid(),
            host: accounting::host_amounts(HostResources::of_pod(pod)),
            policies,
            in_units: true,
            ..ResourceDemand::default()
        })
    }

    /// Returns true if a pod may still want a place: it is not bound, or not shown yet.
    pub fn is_pending(&self, uid: &str) -> bool {
        self.cluster
            .pods
            .get(uid)
            .is_none_or(|entry| entry.bound().is_none())
    }

    /// The node that kube-scheduler keeps for a pod, as far as the watch shows.
    pub fn nominated_node(&self, uid: &str) -> Option<&str> {
        self.cluster.pods.get(uid)?.eviction.nominated.as_deref()
    }

    /// Returns true if a pod that was to be evicted is being deleted, false if not yet, and `None` once it has ended.
    pub fn is_victim_leaving(&self, uid: &str) -> Option<bool> {
        match self.cluster.pods.get(uid) {
            Some(entry) => Some(entry.eviction.is_leaving),
            None => self.plain.contains_key(uid).then_some(false),
        }
    }

    /// Returns true if a pod of lower priority that holds devices of a node is being deleted.
    pub fn has_leaving(&self, node: &str, priority: i32) -> bool {
        let held = self.cluster.view(node).into_iter().flat_map(NodeView::held);
        let mut entries = held.filter_map(|held| self.cluster.pods.get(held.owner));
        entries.any(|entry| entry.eviction.is_leaving && entry.eviction.rank.priority < priority)
    }

    /// Chooses devices for a pod on a node and reserves them; for a decision that stands already, the same again.
    ///
    /// # Errors
    /// Why the pod cannot be bound there.
    pub fn assume(
        &mut self,
        pod: &PodId,
        facts: &PodFacts,
        node: &str,
        nanos: u64,
        now: Instant,
    ) -> Result<Assumed, AssumeError> {
        let entry = self.cluster.pods.get_mut(pod.uid.as_str());
        let shown = entry.as_ref().and_then(|entry| entry.facts.bound.as_ref());
        if let Some(bound) = shown.or(facts.bound.as_ref()) {
            if *bound.node == *node {
                return Ok(Assumed::AlreadyBound);
            }
            let node = bound.node.to_string();
            return Err(AssumeError::BoundElsewhere { node });
        }
        // kube-scheduler repeats a bind whose answer it did not get.
        if let Some(assumption) = entry.and_then(|entry| entry.assumption.as_mut()) {
            return assumption.again(node, now);
        }
        // kube-scheduler may have seen a new node before us; what it has is not known until we see it too.
        if !self.knows_node(node) {
            return Err(AssumeError::NoRoom {
                node: node.to_owned(),
                reason: Reason::NoDevice,
                detail: None,
            });
        }
        let demand = match self.cluster.demand(&pod.uid, facts) {
            Ok(demand) => demand.unwrap_or_default(),
            Err(error) => {
                let detail = error.to_string();
                return Err(AssumeError::Invalid { detail });
            }
        };
        let placement = self.choose(&demand, node)?;
        let stamp = self.stamps.next(nanos);
        let mut annotations =
            record(&self.cluster, facts.request.gpus(), node, &placement, stamp).annotations();
        // Where nothing is chosen here, a record that came with a copied pod must not be taken for what was chosen.
        annotations
            .entry(DEVICE_ALLOCATED.to_owned())
            .or_insert_with(|| "{}".to_owned());
        let binding = PodBinding {
            pod: pod.clone(),
            node: node.to_owned(),
            annotations,
            labels: facts.labels_on(node),
        };
        let assumption = Assumption {
            binding: binding.clone(),
            moment: Moment {
                stamp,
                phase: Phase::Writing,
                since: now,
            },
            unlisted: false,
            outlived: false,
        };
        let owner = self.cluster.pods.owner(&pod.uid);
        let entry = self.cluster.pods.entry(owner.clone());
        let entry = entry.or_insert_with(|| PodEntry::new(facts.clone()));
        entry.assumption = Some(Box::new(assumption));
        // The hint has served its purpose; on another node its room is free again.
        self.hints.end(&mut self.cluster, &pod.uid, Some(node));
        // Policies that look ahead count the CPU of the pod now, not only when a watch shows the pod bound.
        self.cluster.fleet.set_host_use(&owner, node, facts.host);
        Ok(Assumed::Write {
            binding,
            stamp,
            repeated: false,
        })
    }

    /// Chooses and reserves. Room that is hinted at is taken only if there is no other.
    fn choose(&mut self, demand: &ResourceDemand<'_>, node: &str) -> Result<Placement, AssumeError> {
        let no_room = |index: &Self, reason| AssumeError::NoRoom {
            node: node.to_owned(),
            reason,
            detail: index.filter().detail(node, demand, reason),
        };
        let owner = self.cluster.pods.owner(demand.uid);
        let Some(id) = self
            .served_node(node, demand)
            .map_err(|reason| no_room(self, reason))?
        else {
            return Ok(self.hold_unknown(&owner, demand, node));
        };
        let fleet = &self.cluster.fleet;
        let choose = |hints| fleet.choose(id, demand.devices(), demand.policies.device, hints);
        let placement = choose(Hints::RespectOthers(demand.uid))
            .or_else(|_| choose(Hints::Ignore))
            .map_err(|reason| no_room(self, reason))?;
        if placement != Placement::default() {
            let reserved = self.cluster.fleet.reserve(&owner, id, &placement);
            reserved.map_err(|source| AssumeError::Reserve {
                node: node.to_owned(),
                source,
            })?;
        }
        Ok(placement)
    }

    /// The node's place in the fleet, if its devices are known, or need not be.
    fn served_node(&self, node: &str, demand: &ResourceDemand<'_>) -> Result<Option<NodeId>, Reason> {
        match self.cluster.fleet.node_id(node) {
            // The engine checks the room itself when it chooses; only what it does not know is checked here.
            Some(id) => self.filter().check_served(node, demand).map(|()| Some(id)),
            None => self.filter().fit(node, demand),
        }
    }

    /// Counts the GPUs that a pod will hold on a node whose devices are not known; kubelet chooses them.
    fn hold_unknown(&mut self, owner: &OwnerId, demand: &ResourceDemand<'_>, node: &str) -> Placement {
        let mut placement = Placement::default();
        if let RequestedGpus::Whole(n) = demand.gpus {
            (placement.unknown_whole, placement.is_vendor) = (n, true);
            self.cluster.fleet.hold(owner, node, Holdings::from(&placement));
        }
        placement
    }

    /// Marks a decision as written.
    pub fn confirm(&mut self, uid: &str, stamp: u64, now: Instant) {
        self.advance(uid, stamp, Phase::Written, now);
    }

    /// Confirms a decision whose pod was found on the decided node. It holds there what its annotations say, as another
    /// scheduler may have written them.
    pub fn confirm_found(
        &mut self,
        uid: &str,
        stamp: u64,
        annotations: &BTreeMap<String, String>,
        now: Instant,
    ) {
        self.confirm(uid, stamp, now);
        let Some(assumption) = self.cluster.pods.assumption_mut(uid, stamp) else {
            return;
        };
        let binding = &mut assumption.binding;
        if Bound::read(&binding.node, Some(annotations)).assumed_at != Some(stamp) {
            binding.annotations.clone_from(annotations);
            let owner = self.cluster.pods.owner(uid);
            self.cluster.account(&owner);
        }
    }

    /// Marks the outcome of a decision as unknown: its binding may have been written.
    pub fn doubt(&mut self, uid: &str, stamp: u64, now: Instant) {
        self.advance(uid, stamp, Phase::Doubtful, now);
    }

    fn advance(&mut self, uid: &str, stamp: u64, phase: Phase, now: Instant) {
        if let Some(assumption) = self.cluster.pods.assumption_mut(uid, stamp) {
            assumption.moment.phase = phase;
            assumption.moment.since = now;
            assumption.unlisted = false;
        }
    }

    /// Drops a decision that has certainly not been written, and will not be: its devices are free again.
    pub fn forget(&mut self, uid: &str, stamp: u64) {
        if self.cluster.pods.assumption_mut(uid, stamp).is_none() {
            return;
        }
        let Some(entry) = self.cluster.pods.get_mut(uid) else {
            return;
        };
        (entry.assumption, entry.problem) = (None, None);
        let is_unseen = entry.list == 0;
        self.cluster.fleet.release(uid);
        self.cluster.fleet.clear_host_use(uid);
        if is_unseen {
            self.remove_pod(uid);
        }
    }

    /// The state of a pod's decision; `None` once a watch has shown it or it was taken back.
    pub fn moment(&self, uid: &str) -> Option<Moment> {
        Some(self.cluster.pods.assumption(uid)?.moment)
    }

    /// Settles a decision by the state in which its pod was found after `moment`, unless the decision has changed since;
    /// returns true if nothing is left to settle.
    ///
    /// That the pod is not bound settles nothing for a while: the write may still be under way.
    pub fn settle(&mut self, uid: &str, moment: Moment, found: &PodLookup, now: Instant) -> bool {
        let Some(assumption) = self.cluster.pods.assumption(uid) else {
            return true;
        };
        if assumption.moment != moment {
            return false;
        }
        let n_openings = self.cluster.fleet.n_openings();
        match found {
            PodLookup::Bound { node, annotations } if *node == assumption.binding.node => {
                self.confirm_found(uid, moment.stamp, annotations, now);
            }
            PodLookup::Unbound if now.saturating_duration_since(moment.since) < UNDER_WAY => return false,
            PodLookup::Gone => self.remove_pod(uid),
            // If another scheduler has bound it, the watch will show where; the room here is free.
            PodLookup::Bound { .. } | PodLookup::Unbound => self.forget(uid, moment.stamp),
        }
        self.cluster.note_silent_since(n_openings);
        true
    }

    /// Decisions that were written long ago and have not been seen, and those that a list should have shown.
    pub fn overdue(&self, now: Instant, limit: Duration) -> Vec<(PodId, Moment)> {
        let mut overdue = Vec::new();
        for assumption in self.cluster.pods.assumptions() {
            // A watch that hangs shows nothing, so age alone is a reason to look.
            let is_old = now.saturating_duration_since(assumption.moment.since) >= limit;
            if assumption.unlisted || is_old {
                overdue.push((assumption.binding.pod.clone(), assumption.moment));
            }
        }
        overdue
    }
}

#[cfg(test)]
mod tests;
