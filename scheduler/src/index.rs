//! The index: the cluster's state as watches have shown it and as this scheduler has decided it: all answers are read from it.
//!
//! It changes by objects of watches ([`ObjectStore`], in `objects`), by binds ([`Index::assume`]), by filter requests and rooms
//! that the leader makes (hints), and by time ([`Index::tick`]). Does no I/O, reads no clock: callers bring the time.
//!
//! `cluster` has the data, and accounts which devices each pod holds. Assumptions, hints, victims and views build on it, and it
//! uses none of them. Longer steps are functions of these modules, with the index or a part of it as the first argument.

mod assume_times;
pub(crate) mod assumption;
mod budgets;
mod cluster;
mod eviction;
mod failing;
mod gangs;
pub(crate) mod group_members;
mod group_rooms;
pub(crate) mod group_view;
pub(crate) mod hints;
mod moving;
mod node_filter;
mod node_state;
mod objects;
mod openings;
pub(crate) mod plan_facts;
mod plugins;
mod pod_groups;
mod pods;
mod record;
mod resource_demand;
pub(crate) mod room_facts;
pub(crate) mod room_rules;
mod snapshot;
pub(crate) mod started_groups;
mod tried_placements;
mod victims;
pub(crate) mod view;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use placement::{
    Fleet, NextModel, NodeId, NodePolicy, NodeView, OwnerId, Placement, Policies, ResourceWeights,
};
use proto::node::Node;
use proto::pod::{Pod, Taint};
use proto::pod_group::PodGroupApi;
use proto::request::RequestError;
use proto::request::hints::DemandedEnforcement;
use proto::resource::ResourceNames;
use proto::totals::HostResources;
use tokio::sync::Notify;

pub(crate) use eviction::ROOM_MANAGER;

pub(crate) use group_rooms::{ChosenRoom, MemberOutcome, MemberStep};
pub(crate) use hints::Attempt;
pub(crate) use plan_facts::HolderFacts;
pub(crate) use pod_groups::GroupOfPod;
pub(crate) use pods::{AssumptionState, Phase};

pub use assumption::{AssumeError, Assumed};
pub use hints::{HintQueue, HintTimes};
pub use node_filter::{NodeFilter, NodeFit};
pub use openings::Openings;
pub use pod_groups::GroupStore;
pub use proto::device::RawDevice;
pub use resource_demand::ResourceDemand;
pub use snapshot::Snapshot;
pub use victims::{NodeRoom, Preemptor, Promised, RoomSearch, RoomVictim};

use crate::accounting::{self, PodFacts};
use crate::bind::{PodId, PodLookup};
use crate::kube_scheduler::{NodeFacts, NodeRequests, PodRules, RequestSums};
use crate::watch::ObjectStore;
pub use crate::watch::Shared;
use assume_times::AssumeTimes;
use cluster::{Cluster, closing_problem};
use failing::FailingNodes;
use plugins::{Plugins, Standing};
use pod_groups::PodGroups;
use pods::PodEntry;
use resource_demand::requests_devices;

/// Nodes, devices, pods, and the devices that pods hold.
#[derive(Debug)]
pub struct Index {
    cluster: Cluster,
    /// Nodes that rank last because kubelet has refused several pods there.
    failing: FailingNodes,
    /// Room that is kept for pods that are not bound yet.
    hints: HintQueue,
    pod_groups: PodGroups,
    /// Issues the assume times that binds write into records.
    assume_times: AssumeTimes,
    /// [`placement::Workload::n_changes`] when a new workload model was last due.
    n_changes_when_due: u64,
    /// Is notified when a workload model is due; `None` if it then takes effect at once.
    model_due: Option<Arc<Notify>>,
    node_list: List,
    device_list: List,
    pod_list: List,
    budget_list: List,
    /// True if pods that ask for device resources were unbound at the end of the first list of pods: an earlier scheduler may be
    /// binding them.
    pub(crate) began_with_pending: bool,
    /// Is notified when a complete list of pods lacks a pod with a written binding: deleted, or younger than the list.
    pub(crate) unlisted: Arc<Notify>,
}

/// The progress of a watch's lists of one kind of object. Lists have serial numbers; an object carries the number of the newest
/// list at the time when a list or a watch event last showed it, so that a complete list shows which objects are gone.
#[derive(Clone, Copy, Debug, Default)]
struct List {
    number: u32,
    /// True once a list was complete.
    synced: bool,
    /// [`Fleet::n_openings`] when the list began. If it has grown at the end, room has opened by the list.
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
    /// An index that has seen no objects yet. Room is kept for an unbound pod (a hint) for `hint_ttl` at most, unless
    /// [`Self::with_hint_times`] sets other times.
    pub fn new(names: ResourceNames, policies: Policies, hint_ttl: Duration) -> Self {
        let first = List {
            // Not zero, which stands for objects that no watch has shown.
            number: 1,
            ..List::default()
        };
        Self {
            cluster: Cluster::new(names, policies),
            failing: FailingNodes::default(),
            hints: HintQueue::new(HintTimes::all(hint_ttl)),
            pod_groups: PodGroups::default(),
            assume_times: AssumeTimes::default(),
            n_changes_when_due: 0,
            model_due: None,
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

    /// Sets the namespace of the device plugin's pods. Without one, no pod counts as the plugin's.
    #[must_use]
    pub fn watching_plugins_in(mut self, namespace: &str) -> Self {
        self.cluster.plugins = Plugins::of_namespace(namespace);
        self
    }

    /// Sets the weights of the resources for the policies `least-allocated` and `most-allocated`.
    #[must_use]
    pub fn with_weights(mut self, weights: ResourceWeights) -> Self {
        self.cluster.fleet = self.cluster.fleet.with_weights(weights);
        self
    }

    /// The resource names that the operator has configured.
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
        let missing = missing.join(", ");
        Err(format!("not ready: waiting for the list of {missing}"))
    }

    /// Returns true once a list of all disruption budgets was complete. Readiness does not wait for it.
    pub(crate) fn has_listed_budgets(&self) -> bool {
        self.budget_list.synced
    }

    /// Problems of the annotations by which GPUs are closed for maintenance, by node name.
    pub fn closing_problems(&self) -> BTreeMap<&str, &str> {
        let mut problems = BTreeMap::new();
        for (name, state) in &self.cluster.nodes {
            if let Some(problem) = closing_problem(state.report.as_ref()) {
                problems.insert(&**name, problem.as_str());
            }
        }
        problems
    }

    /// From now on, notifies the caller when a workload model is due, in place of putting it into effect at once.
    pub(crate) fn announce_due_models(&mut self) -> Arc<Notify> {
        Arc::clone(self.model_due.get_or_insert_default())
    }

    /// Puts a workload model of this index's fleet into effect, and leaves the one before in its place.
    pub(crate) fn set_workload_model(&mut self, next: &mut NextModel) {
        self.cluster.fleet.set_model(next);
    }

    /// Is notified when [`Self::closing_problems`] change.
    pub(crate) fn closing_change(&self) -> Arc<Notify> {
        Arc::clone(&self.cluster.closing_change)
    }

    /// Returns true if the binding of any assumed pod is being written, or may have been written without an answer.
    pub(crate) fn has_unknown_outcomes(&self) -> bool {
        let mut open = self.cluster.open_assumptions();
        open.any(|assumption| assumption.state.phase != Phase::Written)
    }

    pub(crate) fn knows_node(&self, name: &str) -> bool {
        self.cluster.knows_node(name)
    }

    /// The facts of a pod that asks for device resources.
    pub fn pod(&self, uid: &str) -> Option<&PodFacts> {
        Some(&self.cluster.pods.get(uid)?.facts)
    }

    /// Number of nodes that are known by a Node or Device object.
    pub fn n_nodes(&self) -> usize {
        self.cluster.nodes.len()
    }

    /// Returns true if kubelet has refused several pods on a node lately, so that it ranks behind all others.
    #[inline]
    pub(crate) fn is_failing(&self, node: &str) -> bool {
        self.failing.ranks_last(node)
    }

    /// Returns true if a watch has shown this pod, which asks for device resources.
    pub(crate) fn is_shown(&self, uid: &str) -> bool {
        // List 0 stands for a pod that only a bind has added.
        self.cluster.pods.get(uid).is_some_and(|entry| entry.list != 0)
    }

    /// Finds pods by name; more than one while a pod and its successor of the same name overlap.
    pub(crate) fn pods_named<'a>(
        &'a self,
        namespace: &'a str,
        name: &'a str,
    ) -> impl Iterator<Item = (&'a OwnerId, &'a PodFacts)> {
        // A scan: UIDs are the keys. The read API asks about one pod at a time, and the guard of bindings about those that
        // another user makes without a record.
        let entries = self.cluster.pods.iter().map(|(uid, entry)| (uid, &entry.facts));
        entries.filter(move |(_, facts)| &*facts.namespace == namespace && &*facts.name == name)
    }

    /// The nodes as filters evaluate them.
    pub fn filter(&self) -> NodeFilter<'_> {
        NodeFilter::of(&self.cluster)
    }

    /// Returns true if no pod gets memory of a node: it is cordoned, has a taint of its own state, such as `unreachable`, or its
    /// device plugin is away. Taints that people set keep some pods away and others not.
    pub(crate) fn takes_no_pods(&self, node: &str) -> bool {
        let is_of_state = |taint: &Taint| taint.key.starts_with("node.kubernetes.io/");
        let facts = self.cluster.node(node).map(|state| &state.facts);
        facts.is_some_and(|facts| facts.unschedulable || facts.hard_taints.iter().any(is_of_state))
            || matches!(self.cluster.plugins.standing(node), Standing::Out(_))
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
        ResourceDemand::of_pod(&self.cluster, uid, facts)
    }

    /// CPU and memory of a pod without devices, by which a policy that looks ahead ranks nodes; `None` under other policies.
    pub(crate) fn host_demand<'a>(&self, pod: &'a Pod) -> Option<ResourceDemand<'a>> {
        if self.cluster.policies.node != NodePolicy::Fill {
            return None;
        }
        Some(ResourceDemand {
            uid: pod.uid(),
            host: accounting::host_amounts(HostResources::of_pod(pod)),
            policies: self.cluster.policies,
            in_units: true,
            ..ResourceDemand::default()
        })
    }

    /// Returns true if a pod requests devices, in a valid request or not.
    pub fn requests_devices(&self, facts: &PodFacts) -> bool {
        requests_devices(&self.cluster, facts)
    }

    pub(crate) fn common_unit(&self) -> Option<u64> {
        self.cluster.common_unit()
    }

    pub(crate) fn node_names(&self) -> Vec<Box<str>> {
        let existing = self.cluster.nodes.iter().filter(|(_, state)| state.exists());
        existing.map(|(name, _)| name.clone()).collect()
    }

    /// The fields of a node that kube-scheduler compares with pods; `None` if there is no such node.
    pub(crate) fn node_facts(&self, name: &str) -> Option<&NodeFacts> {
        let state = self.cluster.node(name)?;
        state.exists().then_some(&state.facts)
    }

    /// The requests of all pods that are bound, or whose binding is under way.
    pub(crate) fn requests(&self) -> &NodeRequests {
        &self.cluster.requests
    }

    /// The fields of a waiting pod that kube-scheduler compares with nodes; `None` for a pod that no watch has shown waiting.
    pub fn rules_of(&self, uid: &str) -> Option<&PodRules> {
        self.cluster.pods.get(uid)?.rules.as_deref()
    }

    /// The requests of pods with devices that kube-scheduler keeps room for, by the node that they are nominated to: those that
    /// are as important as `priority`, but not the pod `uid` itself.
    pub(crate) fn nominated_requests(&self, uid: &str, priority: i32) -> BTreeMap<Box<str>, RequestSums> {
        let mut nominated: BTreeMap<Box<str>, RequestSums> = BTreeMap::new();
        for (node, requests) in self.cluster.nominees(uid, priority) {
            nominated.entry(node.into()).or_default().add(requests);
        }
        nominated
    }

    /// The number of changes so far by which a refused pod may fit.
    pub fn openings(&self) -> Openings {
        Openings {
            all: self.cluster.fleet.n_openings(),
            silent: self.cluster.n_silent_openings,
        }
    }

    /// `None` for a pod that is a member of no group.
    pub(crate) fn group_of(&self, pod: &Pod) -> Option<GroupOfPod> {
        self.pod_groups.group_of(pod)
    }

    /// The store of the `PodGroup`s of an API, for its watch.
    pub fn pod_groups_mut(&mut self, api: PodGroupApi) -> &mut GroupStore {
        self.pod_groups.store(api)
    }

    /// The hints, to read.
    pub fn hints(&self) -> &HintQueue {
        &self.hints
    }

    /// The state in numbers, for metrics.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot::of(self)
    }

    /// A node in the terms of the read API, without stranded memory; `None` if there is no such node.
    pub fn show_node(&self, name: &str) -> Option<proto::read_api::Node> {
        let no_typical_requests = &[];
        view::node(self.filter(), self.cluster.view(name)?.id(), no_typical_requests)
    }

    /// The UID of the device plugin's pod on a node, and the address of its metrics, if it serves them.
    pub(crate) fn plugin_metrics(&self, node: &str) -> Option<(&str, SocketAddr)> {
        self.cluster.plugins.metrics(node)
    }

    pub(crate) fn all_plugins_serve(&self) -> bool {
        self.cluster.plugins.all_serve()
    }

    pub(crate) fn owner(&self, uid: &str) -> OwnerId {
        self.cluster.owner(uid)
    }

    /// The node on which a pod is assumed, while no watch has shown the pod bound.
    pub(crate) fn assumed_node(&self, uid: &str) -> Option<&str> {
        Some(self.cluster.assumption(uid)?.binding.node.as_str())
    }

    /// Ends a pod's hint: no more room is kept for it.
    pub fn unhint(&mut self, uid: &str) {
        hints::unhint(self, uid);
    }

    /// Sets the longest times for which room is kept for pods that are not bound yet (hints).
    #[must_use]
    pub fn with_hint_times(mut self, times: HintTimes) -> Self {
        self.hints.times = times;
        self
    }

    /// Returns true if [`Self::tick`] has something to do.
    pub fn is_due(&self, now: Instant) -> bool {
        self.hints.is_due(now) || self.failing.is_due(now) || self.cluster.plugins.is_due(now)
    }

    /// Ends what is over at the time `now`: hints, the time for which failing nodes rank last, and the pauses of nodes whose
    /// device plugin was away.
    pub fn tick(&mut self, now: Instant) {
        self.failing.advance(now);
        // Plugins come before hints: a node that is offered again may have room for a nominated pod.
        if self.cluster.plugins.advance(now) {
            self.cluster.note_silent_opening();
        }
        hints::advance(self, now);
    }

    /// Returns true if [`started_groups::keep_room`] may have room to keep.
    pub(crate) fn has_changed_groups(&self) -> bool {
        !self.cluster.group_members.changed.is_empty()
    }

    /// The place of a member on the node of its group; `None` if the room that is kept for the group has none for it.
    pub(crate) fn place_in_group(
        &self,
        group: &GroupOfPod,
        demand: &ResourceDemand<'_>,
    ) -> Option<Placement> {
        let room = self.hints.rooms.cycle(&group.id)?.kept()?;
        room.place_for(&self.cluster, demand)
    }

    /// The `PreferNoSchedule` taints of a node; `None` if it has none.
    #[inline]
    pub(crate) fn soft_taints(&self, name: &str) -> Option<&[Taint]> {
        Some(self.cluster.soft_taints.get(name)?)
    }

    /// Returns true if a pod may still need a node: no watch has shown it bound, or at all, and no bind has assumed it.
    pub(crate) fn is_pending(&self, uid: &str) -> bool {
        let entry = self.cluster.pods.get(uid);
        entry.is_none_or(|entry| entry.bound().is_none())
    }

    /// The node that kube-scheduler keeps for a pod (`status.nominatedNodeName`), as a watch has shown it last.
    pub(crate) fn nominated_node(&self, uid: &str) -> Option<&str> {
        self.cluster.pods.get(uid)?.preemption.nominated.as_deref()
    }

    /// Returns true if a pod that was to be evicted is being deleted, false if not yet, and `None` once it has ended.
    pub(crate) fn is_victim_leaving(&self, uid: &str) -> Option<bool> {
        match self.cluster.pods.get(uid) {
            Some(entry) => Some(entry.preemption.is_leaving),
            // The index does not keep the deletion timestamps of pods without devices.
            None => self.cluster.plain.contains_key(uid).then_some(false),
        }
    }

    /// The number of pods with a lower priority that hold devices of a node, and that may be evicted or are leaving.
    pub fn n_victims_on(&self, node: NodeId, priority: i32) -> usize {
        let mut n_victims = 0;
        for held in self.cluster.fleet.view(node).into_iter().flat_map(NodeView::held) {
            if let Some(entry) = self.cluster.pods.get(&held.owner) {
                let eviction = &entry.preemption;
                let may_go = eviction.is_leaving || eviction.evictable_within.is_some();
                n_victims += usize::from(may_go && eviction.rank.priority < priority);
            }
        }
        n_victims
    }

    pub(crate) fn gone_gpus(&self, uid: &str) -> Vec<String> {
        self.cluster.gone_gpus(uid)
    }

    /// Chooses devices for a pod on a node and reserves them. A pod that is assumed already gets the same binding again.
    /// `nanos` is the present time in unix nanoseconds, for the record; `now` is the same time, for the age of the assumption.
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
        assumption::assume(self, pod, facts, node, nanos, now)
    }

    /// Notes that the binding of an assumption is written.
    pub fn confirm(&mut self, uid: &str, assumed_at: u64, now: Instant) {
        assumption::set_phase(&mut self.cluster, uid, assumed_at, Phase::Written, now);
    }

    /// Takes back an assumption whose binding has certainly not been written, and will not be: its devices are free again.
    pub fn forget(&mut self, uid: &str, assumed_at: u64) {
        if self.cluster.assumption_mut(uid, assumed_at).is_none() {
            return;
        }
        let Some(entry) = self.cluster.pods.get_mut(uid) else {
            return;
        };
        (entry.assumption, entry.problem, entry.contradicts) = (None, None, false);
        self.cluster.doubtful.remove(uid);
        // List 0: only the bind has added the pod, so that nothing of it is left without the assumption.
        let is_unseen = entry.list == 0;
        self.cluster.group_members.note_assumption(uid);
        self.cluster.fleet.release(uid);
        self.cluster.requests.remove(uid);
        self.cluster.fleet.clear_host_use(uid);
        if is_unseen {
            self.remove_pod(uid);
        } else {
            hints::resume_room(self, uid);
        }
    }

    /// Confirms or takes back a pod's assumption by what a read of the pod has found. `state` is that of the assumption before
    /// the read; if the assumption has changed since, nothing happens. Returns true if nothing is left to settle.
    ///
    /// A pod that was found unbound settles nothing for a while.
    pub(crate) fn settle(
        &mut self,
        uid: &str,
        state: AssumptionState,
        found: &PodLookup,
        now: Instant,
    ) -> bool {
        assumption::settle(self, uid, state, found, now)
    }

    /// `None` once a watch has shown the pod bound, or the assumption was taken back.
    pub(crate) fn assumption_state(&self, uid: &str) -> Option<AssumptionState> {
        Some(self.cluster.assumption(uid)?.state)
    }

    /// The assumed pods to look up at the API server, with the states of their assumptions: those that no watch has shown bound
    /// for `limit` since the last change of state, and those that a complete list of pods lacks.
    pub(crate) fn overdue(&self, now: Instant, limit: Duration) -> Vec<(PodId, AssumptionState)> {
        let mut overdue = Vec::new();
        for assumption in self.cluster.open_assumptions() {
            // A watch that hangs shows nothing, so age alone is a reason to look.
            let is_old = now.saturating_duration_since(assumption.state.since) >= limit;
            if assumption.unlisted || is_old {
                overdue.push((assumption.binding.pod.clone(), assumption.state));
            }
        }
        overdue
    }

    /// Removes a pod that requests device resources, with its hint and its holdings.
    fn remove_pod(&mut self, uid: &str) {
        hints::end(self, uid, None);
        hints::note_ended(self, uid);
        self.cluster.remove_pod(uid);
    }
}

#[cfg(test)]
mod tests;
