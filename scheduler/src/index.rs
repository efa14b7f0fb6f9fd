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
pub(crate) mod view;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use placement::{
    Fleet, Hints, Holdings, NodeId, NodePolicy, NodeView, OwnerId, Placement, Policies, Reason,
    RequestedGpus, ResourceWeights,
};
use proto::node::Node;
use proto::pod::{Pod, Taint};
use proto::record::DEVICE_ALLOCATED;
use proto::request::RequestError;
use proto::request::hints::DemandedEnforcement;
use proto::resource::ResourceNames;
use proto::totals::HostResources;
use rustc_hash::{FxHashMap, FxHashSet};
use tokio::sync::Notify;

pub use assumption::{AssumeError, Assumed, Assumption, AssumptionState, Phase};

pub use hints::{Attempt, HintQueue, HintTimes};
pub use inspected::InspectedNode;
pub use node_filter::NodeFilter;
pub use objects::RawDevice;
pub use openings::Openings;
pub use resource_demand::ResourceDemand;
pub use snapshot::{GpuSnapshot, NamespaceSnapshot, Snapshot};
pub use stamp::Stamps;
pub use victims::{Preemptor, Promised};

use crate::accounting::{self, Bound, PodFacts};
use crate::bind::{PodBinding, PodId, PodLookup};
pub use crate::watch::Shared;

use crate::watch::ObjectStore;
use budgets::Budgets;
use cluster::Cluster;
use eviction::PlainPods;
use failing::FailingNodes;
use plugins::Plugins;
use pods::PodEntry;
use record::record;

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
    /// True if pods that request device resources were unbound at the end of the first list of pods.
    began_with_pending: bool,
    /// Notified when a complete list of pods lacks a pod whose binding is written.
    unlisted: Arc<Notify>,
}

/// The progress of the list of one kind; objects carry the number of the list that named them last.
#[derive(Clone, Copy, Debug, Default)]
struct List {
    number: u32,
    synced: bool,
    /// The number of times room had opened when the list began.
    n_openings: u64,
}

impl List {
    /// Begins a list with the next number.
    fn begin(&mut self, n_openings: u64) {
        self.n_openings = n_openings;
        // Zero stands for objects that no list and no event has shown.
        self.number = self.number.wrapping_add(1).max(1);
    }
}

impl Index {
    /// An index that has seen no objects yet. Hints last `hint_ttl` at most unless [`Self::holding`] sets other times.
    pub fn new(names: ResourceNames, policies: Policies, hint_ttl: Duration) -> Self {
        let first = List {
            // Not zero, which stands for objects that no watch has shown.
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

    /// Allows pods to see all devices of their node without holding any. If that is not allowed, such pods are refused, and bound
    /// ones count as holders of all devices that their records name.
    #[must_use]
    pub fn allowing_all_devices(mut self, allows_all_devices: bool) -> Self {
        self.cluster.allows_all_devices = allows_all_devices;
        self
    }

    /// Sets the enforcement of memory limits for pods whose annotations demand none.
    #[must_use]
    pub fn demanding(mut self, enforcement: DemandedEnforcement) -> Self {
        self.cluster.enforcement = enforcement;
        self
    }

    /// Makes a refreshed workload model count only after [`Self::finish_workload_refresh`], once the model has been evaluated on
    /// all nodes in advance.
    #[must_use]
    pub fn prewarming(self) -> Self {
        Self {
            prewarms: true,
            ..self
        }
    }

    /// Sets the namespace of the device plugin's pods. Without one, no pod counts as the plugin's.
    #[must_use]
    pub fn watching_plugins_in(self, namespace: &str) -> Self {
        Self {
            plugins: Plugins::of_namespace(namespace),
            ..self
        }
    }

    /// Sets the weights for the policies that weigh resources.
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

    /// Each kind of object, with true once a list of all its objects was complete.
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
    /// A sentence that names the kinds of which no list was complete yet.
    pub fn ready(&self) -> Result<(), String> {
        let mut missing = Vec::new();
        for (kind, is_synced) in self.synced() {
            if !is_synced {
                missing.push(kind);
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        Err(format!(
            "not ready: waiting for the list of {}",
            missing.join(", ")
        ))
    }

    /// Returns true if pods that ask for device resources were unbound at the end of the first list of pods: an earlier scheduler
    /// may be binding them.
    pub fn began_with_pending(&self) -> bool {
        self.began_with_pending
    }

    /// Notified when a complete list of pods lacks a pod whose binding is written: the pod was deleted, or is younger than the
    /// list.
    pub fn unlisted(&self) -> Arc<Notify> {
        Arc::clone(&self.unlisted)
    }

    /// Returns true if the binding of an assumption is being written, or may have been written without an answer.
    pub fn has_unknown_outcomes(&self) -> bool {
        let mut open = self.cluster.assumptions();
        open.any(|assumption| assumption.state.phase != Phase::Written)
    }

    /// Ends this replica's term as the leader: another replica may decide from now on, and may give away the devices of
    /// open assumptions, so that their bindings are not written again.
    pub fn end_term(&mut self) {
        for entry in self.cluster.pods.values_mut() {
            // The assumption itself stays counted: a write of its binding that is under way may still get through.
            if let Some(assumption) = &mut entry.assumption {
                assumption.outlived = true;
            }
        }
    }

    /// Returns true if a Node object of this name exists.
    pub fn knows_node(&self, name: &str) -> bool {
        self.cluster.knows_node(name)
    }

    /// The facts of a pod that asks for device resources.
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
        self.failing.ranks_last(node)
    }

    /// Returns true if a watch has shown this pod, which asks for device resources.
    pub fn is_shown(&self, uid: &str) -> bool {
        self.cluster.pods.get(uid).is_some_and(|entry| entry.list != 0)
    }

    /// Finds pods by name; more than one while a pod and its successor of the same name overlap.
    pub fn pods_named<'a>(
        &'a self,
        namespace: &'a str,
        name: &'a str,
    ) -> impl Iterator<Item = (&'a OwnerId, &'a PodFacts)> {
        // A scan: only the read API asks, about one pod at a time, and UIDs are the keys of all other look-ups.
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

    /// The demand of a pod, which is compared with nodes; `None` if the pod requests no devices.
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
    pub fn requests_devices(&self, facts: &PodFacts) -> bool {
        self.cluster.requests_devices(facts)
    }

    /// The state in numbers.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot::of(self)
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
        let mut names = Vec::new();
        for (name, state) in &self.cluster.nodes {
            if state.has_devices() {
                names.push(name.clone());
            }
        }
        names
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
        InspectedNode::of(self, name)
    }

    /// The UID of the device plugin's pod on a node, and the address of its metrics, if it serves them.
    pub fn plugin_metrics(&self, node: &str) -> Option<(&str, SocketAddr)> {
        self.plugins.metrics(node)
    }

    /// Returns true if no node is refused for its device plugin.
    pub fn all_plugins_serve(&self) -> bool {
        self.plugins.all_serve()
    }

    /// The pod's UID, as the text that is kept already if there is one.
    pub fn owner(&self, uid: &str) -> OwnerId {
        self.cluster.owner(uid)
    }

    /// The node on which a pod is assumed, while no watch has shown the pod bound.
    pub fn assumed_node(&self, uid: &str) -> Option<&str> {
        Some(self.cluster.assumption(uid)?.binding.node.as_str())
    }

    /// Sets the longest times that hints last.
    #[must_use]
    pub fn holding(mut self, times: HintTimes) -> Self {
        self.hints.times = times;
        self
    }

    /// Returns true if [`Self::tick`] has something to do.
    pub fn is_due(&self, now: Instant) -> bool {
        self.hints.is_due(now) || self.failing.is_due(now) || self.plugins.is_due(now)
    }

    /// Ends what is over at the time `now`: hints, the time for which failing nodes rank last, and the pauses of nodes whose device
    /// plugin was away.
    pub fn tick(&mut self, now: Instant) {
        self.failing.advance(now);
        // Plugins come before hints: a node that is offered again may have room for a nominated pod.
        if self.plugins.advance(now) {
            self.cluster.note_silent_opening();
        }
        self.hints.advance(&mut self.cluster, now);
    }

    /// Keeps room for a pod on the node that it was answered with.
    pub fn hint(&mut self, node: NodeId, demand: &ResourceDemand<'_>, attempt: &Attempt, now: Instant) {
        // Expired hints go first, or the new one would find less room than there is.
        self.tick(now);
        self.hints.hint(&mut self.cluster, node, demand, attempt, now);
    }

    /// Ends a pod's hint.
    pub fn unhint(&mut self, uid: &str) {
        self.hints.unhint(&mut self.cluster, uid);
    }

    /// Frees the room of the `PodGroup`s whose scheduling cycle will come to nothing, now that a pod of this group, or of none, is
    /// filtered.
    pub fn end_gang_cycles(&mut self, filtered: Option<&str>) {
        self.hints.end_gang_cycles(&mut self.cluster, filtered);
    }

    /// Notes that no node had room for a member of a `PodGroup`; room that is kept for it stays.
    pub fn refuse_member(&mut self, uid: &str, attempt: &Attempt, now: Instant) {
        self.hints
            .note_member(&mut self.cluster, uid, attempt, false, now);
    }

    /// The `PreferNoSchedule` taints of a node; `None` if it has none.
    #[inline]
    pub fn soft_taints(&self, name: &str) -> Option<&[Taint]> {
        if self.soft_taints.is_empty() {
            None
        } else {
            self.soft_taints.get(name).map(|taints| &**taints)
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
        let entry = self.cluster.pods.get(uid);
        entry.is_none_or(|entry| entry.bound().is_none())
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

    /// Chooses devices for a pod on a node and reserves them. A pod that is assumed already gets the same binding again.
    ///
    /// # Errors
    /// The reason for which the pod cannot be bound there.
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
            return assumption.repeat(node, now);
        }
        // kube-scheduler may have seen a new node before us; what it has is not known until we see it too.
        if !self.knows_node(node) {
            return Err(AssumeError::NoRoom {
                node: node.to_owned(),
                reason: Reason::NoDevice,
                detail: None,
            });
        }
        // Device objects may have changed since the caller looked, so that the pod requests no device any more.
        let demand = self.cluster.demand(&pod.uid, facts)?.unwrap_or_default();
        let placement = self.choose(&demand, node)?;
        let stamp = self.stamps.next(nanos);
        let record = record(&self.cluster, facts.request.gpus(), node, &placement, stamp);
        let mut annotations = record.annotations();
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
        let owner = self.cluster.owner(&pod.uid);
        let entry = self.cluster.pods.entry(owner.clone());
        let entry = entry.or_insert_with(|| PodEntry::new(facts.clone()));
        entry.assumption = Some(Box::new(Assumption::new(binding.clone(), stamp, now)));
        // The hint has served its purpose; on another node its room is free again.
        self.hints.end_hint(&mut self.cluster, &pod.uid, Some(node));
        // Policies that look ahead count the CPU of the pod now, not only when a watch shows the pod bound.
        self.cluster.fleet.set_host_use(&owner, node, facts.host);
        Ok(Assumed::Write {
            binding,
            stamp,
            repeated: false,
        })
    }

    /// Chooses devices on a node and reserves them. Room that is kept for other pods is taken only if there is no other;
    /// a pod that loses its room fails its own bind, and kube-scheduler filters it again.
    fn choose(&mut self, demand: &ResourceDemand<'_>, node: &str) -> Result<Placement, AssumeError> {
        let owner = self.cluster.owner(demand.uid);
        let placement = match self.cluster.fleet.node_id(node) {
            Some(id) => self.choose_on(id, node, demand),
            // A node without known devices takes pods that need none of them, and the vendor's pods with whole GPUs.
            None => match self.filter().fit(node, demand) {
                Ok(_) => return Ok(self.hold_unknown(&owner, demand, node)),
                Err(reason) => Err(reason),
            },
        };
        let placement = placement.map_err(|reason| AssumeError::NoRoom {
            node: node.to_owned(),
            reason,
            detail: self.filter().detail(node, demand, reason),
        })?;
        if let Some(id) = self.cluster.fleet.node_id(node)
            && placement != Placement::default()
        {
            let reserved = self.cluster.fleet.reserve(&owner, id, &placement);
            reserved.map_err(|source| AssumeError::Reserve {
                node: node.to_owned(),
                source,
            })?;
        }
        Ok(placement)
    }

    /// Chooses devices on a node of the fleet.
    fn choose_on(&self, id: NodeId, node: &str, demand: &ResourceDemand<'_>) -> Result<Placement, Reason> {
        // The engine checks the room itself when it chooses; only the facts that it does not know are checked here.
        self.filter().check_served(node, demand)?;
        let (fleet, policy) = (&self.cluster.fleet, demand.policies.device);
        let respecting = Hints::RespectOthers(demand.uid);
        fleet
            .choose(id, demand.devices(), policy, respecting)
            .or_else(|_| fleet.choose(id, demand.devices(), policy, Hints::Ignore))
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

    /// Notes that the binding of an assumption is written.
    pub fn confirm(&mut self, uid: &str, stamp: u64, now: Instant) {
        self.set_phase(uid, stamp, Phase::Written, now);
    }

    /// Confirms the assumption of a pod that a read of the API server found on the assumed node. The pod then holds what the
    /// annotations that were read say, as another scheduler may have written them.
    pub fn confirm_found(
        &mut self,
        uid: &str,
        stamp: u64,
        annotations: &BTreeMap<String, String>,
        now: Instant,
    ) {
        self.confirm(uid, stamp, now);
        let Some(assumption) = self.cluster.assumption_mut(uid, stamp) else {
            return;
        };
        let binding = &mut assumption.binding;
        if Bound::read(&binding.node, Some(annotations)).assumed_at != Some(stamp) {
            binding.annotations.clone_from(annotations);
            let owner = self.cluster.owner(uid);
            self.cluster.account(&owner);
        }
    }

    /// Notes that the outcome of a write is unknown: the binding of the assumption may have been written.
    pub fn mark_unknown(&mut self, uid: &str, stamp: u64, now: Instant) {
        self.set_phase(uid, stamp, Phase::Unknown, now);
    }

    /// Notes the phase in which the assumption with this stamp is since `now`; an assumption of another stamp stays as it is.
    fn set_phase(&mut self, uid: &str, stamp: u64, phase: Phase, now: Instant) {
        if let Some(assumption) = self.cluster.assumption_mut(uid, stamp) {
            assumption.state.phase = phase;
            assumption.state.since = now;
            assumption.unlisted = false;
        }
    }

    /// Takes back an assumption whose binding has certainly not been written, and will not be: its devices are free again.
    pub fn forget(&mut self, uid: &str, stamp: u64) {
        if self.cluster.assumption_mut(uid, stamp).is_none() {
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
            objects::remove_pod(self, uid);
        }
    }

    /// The state of a pod's assumption; `None` once a watch has shown the pod bound, or the assumption was taken back.
    pub fn assumption_state(&self, uid: &str) -> Option<AssumptionState> {
        Some(self.cluster.assumption(uid)?.state)
    }

    /// Confirms or takes back a pod's assumption by what a read of the pod has found. `state` is that of the assumption before the
    /// read; if the assumption has changed since, nothing happens. Returns true if nothing is left to settle.
    ///
    /// A pod that was found unbound settles nothing for a while: the write of its binding may still be under way.
    pub fn settle(&mut self, uid: &str, state: AssumptionState, found: &PodLookup, now: Instant) -> bool {
        let Some(assumption) = self.cluster.assumption(uid) else {
            return true;
        };
        if assumption.state != state {
            return false;
        }
        let n_openings = self.cluster.fleet.n_openings();
        match found {
            PodLookup::Bound { node, annotations } if *node == assumption.binding.node => {
                self.confirm_found(uid, state.stamp, annotations, now);
            }
            PodLookup::Unbound if now.saturating_duration_since(state.since) < UNDER_WAY => return false,
            PodLookup::Gone => objects::remove_pod(self, uid),
            // If another scheduler has bound it, the watch will show where; the room here is free.
            PodLookup::Bound { .. } | PodLookup::Unbound => self.forget(uid, state.stamp),
        }
        self.cluster.note_silent_since(n_openings);
        true
    }

    /// The pods to look up, with the states of their assumptions: those assumed longer ago than `limit` that no watch has shown
    /// bound, and those that a complete list of pods lacks.
    pub fn overdue(&self, now: Instant, limit: Duration) -> Vec<(PodId, AssumptionState)> {
        let mut overdue = Vec::new();
        for assumption in self.cluster.assumptions() {
            // A watch that hangs shows nothing, so age alone is a reason to look.
            let is_old = now.saturating_duration_since(assumption.state.since) >= limit;
            if assumption.unlisted || is_old {
                overdue.push((assumption.binding.pod.clone(), assumption.state));
            }
        }
        overdue
    }
}

#[cfg(test)]
mod tests;
