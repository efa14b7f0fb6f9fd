//! Nodes, pods and the devices that pods hold: the accounts of the index.
//!
//! A node has the devices that follow from its Node and its Device object together; a pod holds those that follow from its spec,
//! its record and the reports of its node. Whenever one of these changes, the pods that it concerns are accounted again.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use placement::{Fleet, HostAmounts, NodeView, OwnerId, PodProfile, Policies};
use proto::plugin_reports::PodUids;
use proto::pod::{Pod, Taint};
use proto::request::hints::DemandedEnforcement;
use proto::resource::ResourceNames;
use proto::totals::HostResources;
use rustc_hash::{FxHashMap, FxHashSet};
use tokio::sync::Notify;
use tracing::warn;

use super::budgets::Budgets;
use super::eviction::{EvictionRank, PlainPod, PreemptionFacts};
use super::group_members::GroupMembers;
use super::moving::SharedRules;
use super::node_state::NodeState;
use super::plugins::{Plugins, Standing};
use super::pods::{Assumption, Phase, PodEntry};
use crate::accounting::kubelet_allocations::{self, AllocatedDevice, AllocationsByPod};
use crate::accounting::{self, Bound, NodeContext, PodFacts, Recorded, hold};
use crate::inventory::device_types::DeviceTypes;
use crate::inventory::{self, DeviceReport, NodeReport};
use crate::kube_scheduler::{NodeRequests, PodRequests, PodRules, requests_of};

#[derive(Debug, Default)]
pub(super) struct Cluster {
    pub(super) names: ResourceNames,
    pub(super) policies: Policies,
    pub(super) fleet: Fleet,
    /// Every node that exists or has a Device object, by name. Boxed, since a hash table that has grown is half empty.
    pub(super) nodes: FxHashMap<Box<str>, Box<NodeState>>,
    pub(super) kinds: DeviceTypes,
    /// The nodes whose kubelet allocated devices to a pod of another scheduler, by the UID of the pod.
    allocated_on: FxHashMap<Box<str>, Vec<Box<str>>>,
    /// Pods that have ended and are still listed, by UID, with the serial number of the newest list of pods when they were last
    /// shown.
    pub(super) ended: FxHashMap<OwnerId, u32>,
    /// True if pods may see all devices of their node without holding any.
    pub(super) allows_all_devices: bool,
    /// The enforcement of memory limits for pods that do not say which they demand.
    pub(super) enforcement: DemandedEnforcement,
    /// The number of nodes that exist, and of those with GPUs to share.
    pub(super) n_existing: usize,
    pub(super) n_gpu_nodes: usize,
    /// The number of nodes whose memory unit is not known.
    pub(super) n_unknown_units: usize,
    pub(super) n_closed_gpus: usize,
    /// Is notified when a [`NodeReport::closing_problem`] changes.
    pub(super) closing_change: Arc<Notify>,
    /// `PreferNoSchedule` taints by node name.
    pub(super) soft_taints: FxHashMap<Box<str>, Box<[Taint]>>,
    /// The number of nodes with each size of a memory unit, in bytes.
    n_nodes_by_unit: BTreeMap<u64, usize>,
    /// Pods that request device resources and are not terminal, by UID. Boxed like nodes.
    pub(super) pods: FxHashMap<OwnerId, Box<PodEntry>>,
    /// Those of `pods` that no watch has shown bound, the assumed ones included.
    pub(super) unbound: BTreeSet<OwnerId>,
    /// Those of `pods` with a [`PodEntry::problem`], or whose record [contradicts](PodEntry::contradicts) request or allocation.
    pub(super) doubtful: FxHashSet<OwnerId>,
    /// Those of `pods` with `status.nominatedNodeName`: kube-scheduler keeps that node for them.
    pub(super) nominated: FxHashSet<OwnerId>,
    /// Pods that use only CPU and memory of their nodes.
    pub(super) plain: FxHashMap<OwnerId, PlainPod>,
    pub(super) budgets: Budgets,
    /// The rules by which successors of bound pods get a node, for plans that move pods.
    successor_rules: SharedRules,
    pub(super) group_members: GroupMembers,
    pub(super) plugins: Plugins,
    pub(super) requests: NodeRequests,
    /// The number of times room has opened without an event that kube-scheduler sees.
    pub(super) n_silent_openings: u64,
}

impl Cluster {
    pub(super) fn new(names: ResourceNames, policies: Policies) -> Self {
        Self {
            names,
            policies,
            ..Self::default()
        }
    }

    /// The key of a pod, shared with its entry if there is one: most owners are known, and need no allocation.
    pub(super) fn owner(&self, uid: &str) -> OwnerId {
        match self.pods.get_key_value(uid) {
            Some((owner, _)) => owner.clone(),
            None => OwnerId::from(uid),
        }
    }

    /// The assumption of a pod; `None` once a watch has shown the pod bound.
    pub(super) fn assumption(&self, uid: &str) -> Option<&Assumption> {
        self.pods.get(uid)?.assumption.as_deref()
    }

    pub(super) fn assumption_mut(&mut self, uid: &str, assumed_at: u64) -> Option<&mut Assumption> {
        let assumption = self.pods.get_mut(uid)?.assumption.as_deref_mut();
        assumption.filter(|assumption| assumption.state.assumed_at == assumed_at)
    }

    pub(super) fn open_assumptions(&self) -> impl Iterator<Item = &Assumption> {
        let unbound = self.unbound.iter();
        unbound.filter_map(|uid| self.pods.get(uid)?.assumption.as_deref())
    }

    /// The amount of a resource that a pod requests; 0 for a pod that requests no device resources.
    pub(super) fn requested(&self, uid: &str, resource: &str) -> u64 {
        let Some(entry) = self.pods.get(uid) else { return 0 };
        let requests = match &entry.rules {
            Some(waiting) => Some(&waiting.requests),
            None => self.requests.of_pod(uid),
        };
        let amount = requests.and_then(|requests| requests.get(resource));
        amount.copied().unwrap_or(0)
    }

    /// The nodes that kube-scheduler keeps for pods with devices, with the requests of these pods: those that are as important as
    /// `priority`, but not the pod `uid` itself.
    pub(super) fn nominees(&self, uid: &str, priority: i32) -> impl Iterator<Item = (&str, &PodRequests)> {
        self.nominated.iter().filter_map(move |owner| {
            let entry = self.pods.get(owner)?;
            let node = entry.preemption.nominated.as_deref()?;
            // The requests of an assumed pod are counted on its node already.
            let is_counted = owner.as_str() != uid
                && entry.assumption.is_none()
                && entry.preemption.rank.priority >= priority;
            is_counted.then_some((node, &entry.rules.as_ref()?.requests))
        })
    }

    /// The size of a memory unit in bytes, if it is known of all nodes that serve units, and the same on all.
    pub(super) fn common_unit(&self) -> Option<u64> {
        let mut units = self.n_nodes_by_unit.keys();
        let unit = units.next()?;
        (self.n_unknown_units == 0 && units.next().is_none()).then_some(*unit)
    }

    /// The number of memory units of the largest GPU, in the unit of its node; 0 if no GPU is known.
    pub(super) fn largest_gpu_in_units(&self) -> u64 {
        let mut largest = 0;
        for state in self.nodes.values() {
            if let (Some(unit), Some(report)) = (state.unit(), &state.report) {
                for gpu in &report.inventory.gpus {
                    largest = largest.max(gpu.memory_bytes / unit.max(1));
                }
            }
        }
        largest
    }

    pub(super) fn node(&self, name: &str) -> Option<&NodeState> {
        Some(self.nodes.get(name)?)
    }

    pub(super) fn knows_node(&self, name: &str) -> bool {
        self.node(name).is_some_and(NodeState::exists)
    }

    pub(super) fn view(&self, name: &str) -> Option<NodeView<'_>> {
        self.fleet.view(self.fleet.node_id(name)?)
    }

    /// Replaces a node's Device object, and accounts the pods with resources whose device type this changes.
    pub(super) fn replace_device(&mut self, name: &str, device: Option<DeviceReport>) {
        let Some(state) = self.nodes.get_mut(name) else {
            return;
        };
        // The types of devices are counted over all nodes: those of the old object give way to those of the new one.
        let before = std::mem::replace(&mut state.device, device);
        let before = before.as_ref().map(DeviceReport::other_devices);
        let now = state.device.as_ref().map(DeviceReport::other_devices);
        let (before, now) = (before.unwrap_or_default(), now.unwrap_or_default());
        let changed = self.kinds.replace(before, now, &self.names);
        self.refresh_node(name);
        if changed.is_empty() {
            return;
        }
        let mut affected = Vec::new();
        // Pods on any node may request the resource whose device type has changed.
        for (owner, entry) in &self.pods {
            let mut requested = entry.facts.request.others().iter();
            if requested.any(|(resource, _)| changed.contains(&resource.as_str().into())) {
                affected.push(owner.clone());
            }
        }
        for owner in affected {
            self.account(&owner);
        }
    }

    /// Updates a node's inventory by its Node and its Device object. If it has changed, accounts the pods there. Removes a node
    /// that has neither object any more.
    pub(super) fn refresh_node(&mut self, name: &str) {
        let Some(state) = self.nodes.get_mut(name) else {
            return;
        };
        // A Device object may exist without its node, which then takes no pod.
        let node = state.node.as_ref();
        let report = node.and_then(|node| inventory::report(node, state.device.as_ref(), &self.names));
        if report == state.report {
            self.drop_unknown_node(name);
            return;
        }
        // The counts spare filters and scrapes a look at every node.
        self.n_gpu_nodes -= usize::from(state.shares_gpus());
        self.n_unknown_units -= usize::from(state.is_unit_unknown());
        if let Some(unit) = state.unit()
            && let Some(n_nodes) = self.n_nodes_by_unit.get_mut(&unit)
        {
            *n_nodes -= 1;
            if *n_nodes == 0 {
                self.n_nodes_by_unit.remove(&unit);
            }
        }
        self.n_closed_gpus -= state.n_closed_gpus();
        if closing_problem(report.as_ref()) != closing_problem(state.report.as_ref()) {
            self.closing_change.notify_one();
        }
        state.report = report;
        self.n_closed_gpus += state.n_closed_gpus();
        self.n_gpu_nodes += usize::from(state.shares_gpus());
        self.n_unknown_units += usize::from(state.is_unit_unknown());
        if let Some(unit) = state.unit() {
            *self.n_nodes_by_unit.entry(unit).or_default() += 1;
        }
        let report = state.report.as_ref();
        let mut problems = report.map(|report| report.problems.clone()).unwrap_or_default();
        match &state.report {
            Some(report) if report.inventory.has_devices() => {
                problems.extend(self.fleet.set_inventory(name, report.inventory.clone()));
            }
            // Without devices the holdings of pods stay as they are.
            _ => self.fleet.remove_inventory(name),
        }
        // Logged once for each change of the report, not at each request.
        for problem in &problems {
            warn!(
                node = name,
                problem, "a part of the report of a node cannot be used"
            );
        }
        state.problems = problems;
        self.account_pods_on(name);
        self.account_kubelet_allocations_on(name);
        self.drop_unknown_node(name);
    }

    fn drop_unknown_node(&mut self, name: &str) {
        if let Some(state) = self.node(name)
            && state.node.is_none()
            && state.device.is_none()
        {
            self.nodes.remove(name);
        }
    }

    /// Takes over a pod that requests device resources, as the list of this number or a later event shows it.
    pub(super) fn put_pod(&mut self, pod: &Pod, facts: PodFacts, list: u32) {
        let (uid, owner) = (pod.uid(), self.owner(pod.uid()));
        let is_bound = facts.bound.is_some();
        let rules = (!is_bound).then(|| Box::new(PodRules::of(pod)));
        let moving = is_bound.then(|| self.successor_rules.moving(pod));
        let entry = self.pods.entry(owner.clone());
        let entry = entry.or_insert_with(|| Box::new(PodEntry::new(facts.clone())));
        let was_bound = entry.facts.bound.is_some() && entry.assumption.is_none();
        let is_unchanged = is_bound && entry.facts == facts && entry.assumption.is_none() && entry.list != 0;
        entry.show(facts, list, rules);
        entry.moving = moving;
        if is_bound {
            // The watch shows the pod bound, in place of the assumption.
            entry.assumption = None;
            self.unbound.remove(uid);
            // A bound pod is shown many times; only its first binding, or a changed record, changes its holdings.
            if !is_unchanged || self.fleet.held_by(uid).is_none() {
                self.account(&owner);
            }
        } else {
            // Kubernetes never unbinds a pod; after a restore of etcd a watch may show an older version of it.
            if was_bound {
                (entry.problem, entry.contradicts) = (None, false);
                self.doubtful.remove(uid);
                self.fleet.release(uid);
            }
            self.unbound.insert(owner);
        }
        self.put_preemption_facts(pod);
        // Only bound pods count in the workload model, since pending ones may ask for anything, in any number.
        if is_bound && !pod.is_tied_to_node() {
            self.count_request(uid);
        }
    }

    /// Removes a pod that requests device resources, with its holdings, its CPU and memory, and its part in the workload model.
    pub(super) fn remove_pod(&mut self, uid: &str) {
        self.fleet.release(uid);
        self.nominated.remove(uid);
        self.unbound.remove(uid);
        self.doubtful.remove(uid);
        let Some(entry) = self.pods.remove(uid) else {
            return;
        };
        if let Some(bound) = entry.bound()
            && let Some(state) = self.nodes.get_mut(&*bound.node)
        {
            state.without_holdings.remove(uid);
        }
        self.requests.remove(uid);
        self.fleet.clear_host_use(uid);
        if let Some(profile) = entry.counted {
            self.fleet.workload_mut().remove(&profile);
        }
    }

    fn put_preemption_facts(&mut self, pod: &Pod) {
        let preemption = PreemptionFacts::of(pod);
        let owner = self.owner(pod.uid());
        // kubelet updates the status of a pod often; most updates change nothing that matters here.
        let entry = self.pods.get_mut(&owner);
        let Some(entry) = entry.filter(|entry| entry.preemption != preemption) else {
            return;
        };
        if preemption.nominated.is_some() {
            self.nominated.insert(owner);
        } else {
            self.nominated.remove(&owner);
        }
        let is_newly_admitted = !entry.preemption.is_admitted() && preemption.is_admitted();
        entry.preemption = preemption;
        // A node whose plugin is on trial takes a few pods at a time; once kubelet has admitted one of them, it takes one more.
        if let Some(bound) = &entry.facts.bound
            && is_newly_admitted
            && self.plugins.standing(&bound.node) == Standing::Tried
        {
            self.note_silent_opening();
        }
    }

    /// Counts the CPU, memory and other amounts that a pod requests of its node. `requested` has CPU and memory of a pod that
    /// requests device resources, and is `None` for any other pod.
    pub(super) fn put_host_use(&mut self, pod: &Pod, requested: Option<HostAmounts>, list: u32) {
        let uid = pod.uid();
        let node = pod.spec.node_name.as_deref().unwrap_or_default();
        if node.is_empty() || pod.is_terminal() {
            // The amounts of an assumed pod stay counted as long as its assumption exists.
            if self.assumption(uid).is_none() {
                self.remove_host_use(uid);
            }
            return;
        }
        let owner = self.owner(uid);
        let amounts = requested.unwrap_or_else(|| accounting::host_amounts(HostResources::of_pod(pod)));
        let is_daemon = pod.is_tied_to_node();
        self.fleet.set_host_use(&owner, node, amounts, is_daemon);
        self.requests
            .put(owner.clone(), node, &requests_of(pod), is_daemon);
        if requested.is_some() {
            self.plain.remove(uid);
            return;
        }
        let rank = EvictionRank::of(pod);
        self.plain.insert(owner, PlainPod { rank, list });
    }

    pub(super) fn remove_host_use(&mut self, uid: &str) {
        self.requests.remove(uid);
        self.fleet.clear_host_use(uid);
        self.plain.remove(uid);
    }

    /// Marks the assumptions whose binding is written and whose pod is not in the complete list of this number; returns true if
    /// there are any. Such a pod was deleted, or is younger than the list; the list cannot say which.
    pub(super) fn mark_unlisted(&mut self, list: u32) -> bool {
        let mut is_any_unlisted = false;
        for entry in self.pods.values_mut() {
            if let Some(assumption) = entry.assumption.as_mut()
                && entry.list != list
                && assumption.state.phase == Phase::Written
            {
                (assumption.unlisted, is_any_unlisted) = (true, true);
            }
        }
        is_any_unlisted
    }

    /// Works out the devices that a bound or assumed pod holds, and passes them to the engine.
    pub(super) fn account(&mut self, owner: &OwnerId) {
        let Some(entry) = self.pods.get_mut(owner) else {
            return;
        };
        let Some(bound) = entry.bound() else { return };
        // Not `Self::view`: the entry is borrowed mutably.
        let node = self.fleet.node_id(&bound.node);
        let view = node.and_then(|node| self.fleet.view(node));
        let state = self.nodes.get(&*bound.node).map(|state| &**state);
        let uid = owner.as_str();
        let context = NodeContext {
            inventory: view.and_then(NodeView::inventory),
            kinds: &self.kinds,
            allocated: state.map(|state| state.allocated_to(uid)).unwrap_or_default(),
            allows_all_devices: self.allows_all_devices,
            report: state.map(|state| state.report_on(uid)).unwrap_or_default(),
        };
        let record = effective_record(state, uid, &bound);
        let account = hold::account_of(&entry.facts, &record, context);
        let problem: Option<Box<str>> = account.problem.map(Into::into);
        // Logged once for each problem: the pod is accounted again with every change of its node.
        if let Some(problem) = &problem
            && entry.problem.as_ref() != Some(problem)
        {
            let (namespace, name, node) = (&entry.facts.namespace, &entry.facts.name, &bound.node);
            let contradicts = account.contradicts;
            warn!(%namespace, pod = %name, %node, problem = &**problem, contradicts, "a pod is counted conservatively, or its record does not count");
        }
        let holds_nothing = account.holdings.is_empty();
        if let Some(state) = self.nodes.get_mut(&*bound.node) {
            if holds_nothing && problem.is_some() {
                state.without_holdings.insert(owner.clone());
            } else {
                state.without_holdings.remove(owner);
            }
        }
        if holds_nothing {
            self.fleet.release(owner.as_str());
        } else {
            self.fleet.hold(owner, &bound.node, account.holdings);
        }
        if problem.is_some() || account.contradicts {
            self.doubtful.insert(owner.clone());
        } else {
            self.doubtful.remove(owner);
        }
        (entry.problem, entry.contradicts) = (problem, account.contradicts);
    }

    /// The GPUs in the record of a bound pod that its node does not have any more, by UUID or minor.
    pub(super) fn gone_gpus(&self, uid: &str) -> Vec<String> {
        // A record that names a GPU which is gone always has a problem, and few records have one.
        if let Some(entry) = self.pods.get(uid)
            && entry.problem.is_some()
            && let Some(bound) = entry.bound()
            && let Some(inventory) = self.view(&bound.node).and_then(NodeView::inventory)
        {
            return effective_record(self.node(&bound.node), uid, &bound).gone_gpus(inventory);
        }
        Vec::new()
    }

    /// Counts the request of a bound pod, in place of what was counted for it before, among the pods from which the workload
    /// model learns the mix of pods to come.
    fn count_request(&mut self, uid: &str) {
        let Some(entry) = self.pods.get_mut(uid) else {
            return;
        };
        let gpus = entry.facts.request.gpus();
        let profile = PodProfile {
            gpus: gpus.map(accounting::requested_gpus).unwrap_or_default(),
            host: entry.facts.host,
        };
        if entry.counted == Some(profile) {
            return;
        }
        let before = entry.counted.replace(profile);
        let workload = self.fleet.workload_mut();
        workload.add(profile);
        if let Some(before) = before {
            workload.remove(&before);
        }
    }

    /// Accounts the pods on a node again, after its devices, its memory unit or its plugin's reports have changed.
    pub(super) fn account_pods_on(&mut self, node: &str) {
        let held = self.view(node).into_iter().flat_map(NodeView::held);
        let mut owners: Vec<OwnerId> = held.map(|held| held.owner.clone()).collect();
        // Pods that hold nothing are on no node of the fleet, but their records may count now.
        if let Some(state) = self.node(node) {
            owners.extend(state.without_holdings.iter().cloned());
        }
        for owner in owners {
            self.account(&owner);
        }
    }

    pub(super) fn replace_without_devices(&mut self, node: &str, reported: Option<PodUids>) {
        let Some(state) = self.nodes.get_mut(node) else {
            return;
        };
        if state.without_devices == reported {
            return;
        }
        let before = std::mem::replace(&mut state.without_devices, reported.clone());
        // The accounts of all pods on the node depend on whether its plugin reports such pods at all (`PluginReport::Silent`).
        if before.is_some() != reported.is_some() {
            self.account_pods_on(node);
        }
        let (before, reported) = (before.unwrap_or_default(), reported.unwrap_or_default());
        for uid in before.symmetric_difference(&reported) {
            let owner = self.owner(uid);
            self.account(&owner);
        }
    }

    /// Replaces the kubelet allocations of a node, and accounts the pods that they concern.
    pub(super) fn replace_kubelet_allocations(&mut self, node: &str, now: AllocationsByPod) {
        let Some(state) = self.nodes.get_mut(node) else {
            return;
        };
        if state.kubelet_allocations == now {
            return;
        }
        let before = std::mem::replace(&mut state.kubelet_allocations, now);
        let mut uids: BTreeSet<Box<str>> = before.into_keys().collect();
        uids.extend(state.kubelet_allocations.keys().cloned());
        for uid in &uids {
            let is_allocated = !self.allocated_to(uid, node).is_empty();
            let nodes = self.allocated_on.entry(uid.clone()).or_default();
            nodes.retain(|other| **other != *node);
            if is_allocated {
                nodes.push(node.into());
            } else if nodes.is_empty() {
                self.allocated_on.remove(uid);
            }
            let owner = self.owner(uid);
            self.account(&owner);
            self.account_unknown_pod(uid, node);
        }
    }

    /// Accounts the kubelet allocations of a pod after the pod has changed.
    pub(super) fn account_kubelet_allocations(&mut self, uid: &str) {
        for node in self.allocated_on.get(uid).cloned().unwrap_or_default() {
            self.account_unknown_pod(uid, &node);
        }
    }

    /// Accounts the kubelet allocations on a node after its devices have changed.
    pub(super) fn account_kubelet_allocations_on(&mut self, node: &str) {
        let Some(state) = self.node(node) else {
            return;
        };
        let uids: Vec<Box<str>> = state.kubelet_allocations.keys().cloned().collect();
        for uid in uids {
            self.account_unknown_pod(&uid, node);
        }
    }

    fn allocated_to(&self, uid: &str, node: &str) -> &[AllocatedDevice] {
        let state = self.node(node);
        state.map(|state| state.allocated_to(uid)).unwrap_or_default()
    }

    /// Counts the devices that kubelet allocated to a pod which no watch has shown on that node, and nothing for any other pod.
    /// Their owner is no pod: it is named by the UID and the node.
    fn account_unknown_pod(&mut self, uid: &str, node: &str) {
        // With the node's name, since a wrong checkpoint may name a pod of another node, whose own holdings must stay.
        let owner = OwnerId::from(format!("{uid}@{node}"));
        let allocated = self.allocated_to(uid, node);
        let bound = self.pods.get(uid).and_then(|entry| entry.bound());
        let is_known = bound.is_some_and(|bound| *bound.node == *node);
        // kubelet's checkpoint lists a pod that has ended until kubelet allocates the next devices.
        if allocated.is_empty() || is_known || self.ended.contains_key(uid) {
            self.fleet.release(owner.as_str());
            return;
        }
        let inventory = self.view(node).and_then(NodeView::inventory);
        let (holdings, problem) = kubelet_allocations::of_unknown_pod(allocated, inventory);
        if let Some(problem) = problem {
            warn!(
                node,
                pod = uid,
                problem,
                "devices that kubelet allocated to a pod cannot be counted"
            );
        }
        if holdings.is_empty() {
            self.fleet.release(owner.as_str());
        } else {
            self.fleet.hold(&owner, node, holdings);
        }
    }

    /// Counts an opening of room of which kube-scheduler sees no event (a silent opening).
    pub(super) fn note_silent_opening(&mut self) {
        self.fleet.note_opening();
        self.n_silent_openings += 1;
    }

    /// Counts one silent opening if room has opened since the engine had counted `n_before` openings.
    pub(super) fn note_silent_since(&mut self, n_before: u64) {
        self.n_silent_openings += u64::from(self.fleet.n_openings() != n_before);
    }
}

/// See [`NodeReport::closing_problem`].
pub(super) fn closing_problem(report: Option<&NodeReport>) -> Option<&String> {
    report?.closing_problem.as_ref()
}

/// The record of a bound pod that counts: its own, or that of another pod if the node's plugin reports that it has swapped both
/// (mode `envvar`). The annotations of the pods themselves change later.
fn effective_record<'a>(state: Option<&NodeState>, uid: &str, bound: &'a Bound) -> Cow<'a, Recorded> {
    match state.and_then(|state| state.swapped.get(uid)) {
        Some(swapped) => Cow::Owned(swapped.clone().with_units_of(&bound.record)),
        None => Cow::Borrowed(&bound.record),
    }
}
