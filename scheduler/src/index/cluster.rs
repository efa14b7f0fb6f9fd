//! Nodes, pods and the devices that pods hold: the part of the index that accounts.
//!
//! A node counts by its Node and its Device object together, a pod by its spec, its record and the reports of its node. Whenever
//! one of these changes, the holdings of the pods that it concerns are worked out again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use placement::{Fleet, LimitLevel, NodeView, OwnerId, PodProfile, Policies};
use proto::kubelet_allocations::KubeletAllocations;
use proto::node::Node;
use proto::plugin_reports::{self, PodUids};
use proto::request::hints::DemandedEnforcement;
use proto::request::{Dialect, GpuRequest, Memory, RequestError};
use proto::resource::{ISOLATION_PROVIDER, ResourceNames};
use rustc_hash::FxHashMap;
use tracing::warn;

use super::pods::PodEntries;
use super::resource_demand::ResourceDemand;
use crate::accounting::kubelet_allocations::{self, AllocatedDevice, AllocationsByPod};
use crate::accounting::{self, NodeContext, PluginReport, PodFacts, Recorded};
use crate::inventory::device_types::Kinds;
use crate::inventory::{self, DeviceReport, NodeReport};

/// Nodes, pods and the devices that pods hold.
#[derive(Debug)]
pub(super) struct Cluster {
    pub(super) names: ResourceNames,
    pub(super) policies: Policies,
    pub(super) fleet: Fleet,
    /// Every node that exists or has a Device object, by name.
    pub(super) nodes: FxHashMap<Box<str>, NodeState>,
    /// The device type of each resource.
    pub(super) kinds: Kinds,
    /// The nodes whose kubelet allocated devices to a pod of another scheduler, by its UID.
    given_on: FxHashMap<Box<str>, Vec<Box<str>>>,
    /// Pods that have ended and are still listed, by UID, with the number of the list that named them last.
    pub(super) ended: FxHashMap<OwnerId, u32>,
    /// True if pods may see all devices of their node without holding any.
    pub(super) allows_all_devices: bool,
    /// The enforcement of memory limits for pods that do not say which they demand.
    pub(super) enforcement: DemandedEnforcement,
    /// The number of nodes whose memory unit is not known.
    pub(super) n_opaque: usize,
    /// Pods that request device resources and are not terminal, by UID.
    pub(super) pods: PodEntries,
    /// The number of times room has opened without an event that kube-scheduler sees.
    pub(super) n_silent_openings: u64,
}

/// A node and its Device object.
#[derive(Debug, Default)]
pub(super) struct NodeState {
    pub(super) node: Option<Node>,
    pub(super) device: Option<DeviceReport>,
    /// The numbers of the lists that named the two last.
    pub(super) node_list: u32,
    pub(super) device_list: u32,
    /// The records that its plugin has swapped between pods, by UID.
    pub(super) exchanged: BTreeMap<String, Recorded>,
    /// The devices that its kubelet allocated to pods of other schedulers.
    pub(super) given: AllocationsByPod,
    /// Pods that were allocated no device, as its plugin reports; `None` if it reports no such pods.
    pub(super) without_devices: Option<PodUids>,
    /// Pods bound to it that hold nothing and have a problem.
    pub(super) unheld: BTreeSet<OwnerId>,
    /// The inventory by both objects.
    report: Option<NodeReport>,
    /// The allocatable amounts of device resources.
    pub(super) allocatable: Vec<(Box<str>, u64)>,
    /// Problems of the two objects that keep devices from use.
    pub(super) problems: Vec<String>,
}

impl Cluster {
    /// A cluster of which nothing is known.
    pub(super) fn new(names: ResourceNames, policies: Policies) -> Self {
        Self {
            names,
            policies,
            fleet: Fleet::new(),
            nodes: FxHashMap::default(),
            kinds: Kinds::default(),
            given_on: FxHashMap::default(),
            ended: FxHashMap::default(),
            allows_all_devices: false,
            enforcement: DemandedEnforcement::Any,
            n_opaque: 0,
            pods: PodEntries::default(),
            n_silent_openings: 0,
        }
    }

    /// The request of a pod for nodes; `None` if it requests no device.
    ///
    /// # Errors
    /// The rule that its request breaks on every node.
    pub(super) fn demand<'a>(
        &self,
        uid: &'a str,
        facts: &PodFacts,
    ) -> Result<Option<ResourceDemand<'a>>, RequestError> {
        let request = match &facts.request {
            accounting::ParsedRequest::Valid(request) => request,
            accounting::ParsedRequest::Invalid(error, _) => return Err((**error).clone()),
        };
        let gpus = request.gpus.as_ref();
        if !self.allows_all_devices && gpus.is_some_and(|gpus| gpus.dialect == Dialect::AllDevices) {
            return Err(RequestError::AllDevicesForbidden);
        }
        let others = self.kinds.requests(&request.others);
        if gpus.is_none() && others.is_empty() {
            return Ok(None);
        }
        let mut constraints = facts.constraints.clone().map_err(|error| (*error).clone())?;
        // A pod with whole GPUs needs no limit, as it shares them with no other.
        let demanded = facts.preference.enforcement_or(self.enforcement);
        if demanded == DemandedEnforcement::Driver && gpus.is_some_and(GpuRequest::is_shared) {
            let mut demanding = constraints.as_deref().cloned().unwrap_or_default();
            demanding.limits = LimitLevel::Driver;
            constraints = Some(Arc::new(demanding));
        }
        let counts_bytes = gpus.is_some_and(|gpus| {
            gpus.dialect == Dialect::Koordinator && !matches!(gpus.memory, Memory::Units(_))
        });
        let gpus = gpus.map(accounting::requested_gpus).unwrap_or_default();
        let isolation = facts.needs_isolation().map(Into::into);
        Ok(Some(ResourceDemand {
            uid,
            gpus,
            others,
            constraints,
            in_units: !counts_bytes,
            isolation,
            policies: facts.preference.or(self.policies),
            host: facts.host,
        }))
    }

    /// Returns true if a pod requests devices, validly or not.
    pub(super) fn concerns(&self, facts: &PodFacts) -> bool {
        !matches!(self.demand("", facts), Ok(None))
    }

    /// Returns true if there is a Node object of this name.
    pub(super) fn knows_node(&self, name: &str) -> bool {
        self.nodes.get(name).is_some_and(NodeState::exists)
    }

    pub(super) fn view(&self, name: &str) -> Option<NodeView<'_>> {
        self.fleet.view(self.fleet.node_id(name)?)
    }

    /// Replaces a node's Device object, and accounts the pods whose resources have another device type by that.
    pub(super) fn replace_device(&mut self, name: &str, device: Option<DeviceReport>) {
        let Some(state) = self.nodes.get_mut(name) else {
            return;
        };
        // The types of devices are counted over all nodes: the old object's give way to the new one's.
        let before = std::mem::replace(&mut state.device, device);
        let classes = |device: &Option<DeviceReport>| {
            device
                .as_ref()
                .map(|device| device.classes().to_vec())
                .unwrap_or_default()
        };
        let changed = self
            .kinds
            .replace(&classes(&before), &classes(&state.device), &self.names);
        self.refresh_node(name);
        if changed.is_empty() {
            return;
        }
        let asks = |(resource, _): &(String, u64)| changed.iter().any(|changed| changed.as_str() == resource);
        let affected = self
            .pods
            .iter()
            .filter(|(_, entry)| entry.facts.request.others().iter().any(asks));
        let affected: Vec<_> = affected.map(|(owner, _)| owner.clone()).collect();
        // Pods on any node may request the resource whose device type has changed.
        for owner in affected {
            self.account(&owner);
        }
    }

    /// Updates a node's inventory; if it has changed, accounts the pods there.
    pub(super) fn refresh_node(&mut self, name: &str) {
        let Some(state) = self.nodes.get_mut(name) else {
            return;
        };
        // A Device object may exist without its node, which then takes no pod.
        let report = state
            .node
            .as_ref()
            .and_then(|node| inventory::report(node, state.device.as_ref(), &self.names));
        if report == state.report {
            self.drop_unknown_node(name);
            return;
        }
        // The count spares filters the look-up of every node's unit while all units are known.
        self.n_opaque -= usize::from(state.is_opaque());
        state.report = report;
        self.n_opaque += usize::from(state.is_opaque());
        let mut problems = state
            .report
            .as_ref()
            .map(|report| report.problems.clone())
            .unwrap_or_default();
        match &state.report {
            Some(report) if report.inventory.has_devices() => {
                let unusable = self.fleet.set_inventory(name, report.inventory.clone());
                problems.extend(unusable.iter().map(ToString::to_string));
            }
            // Without devices the holdings of pods stay as they are.
            _ => self.fleet.remove_inventory(name),
        }
        // Logged once for each change of the report, not at each request.
        for problem in &problems {
            warn!(
                node = name,
                problem, "a device or the memory unit of a node cannot be used"
            );
        }
        state.problems = problems;
        self.account_again(name);
        self.account_given_on(name);
        self.drop_unknown_node(name);
    }

    /// Removes a node of which neither object exists.
    fn drop_unknown_node(&mut self, name: &str) {
        if self
            .nodes
            .get(name)
            .is_some_and(|state| state.node.is_none() && state.device.is_none())
        {
            self.nodes.remove(name);
        }
    }

    /// Works out the holdings of a pod that is bound, or will be once its decision is written.
    pub(super) fn account(&mut self, owner: &OwnerId) {
        let Some(entry) = self.pods.get_mut(owner) else {
            return;
        };
        let Some(bound) = entry.bound() else { return };
        let view = self
            .fleet
            .node_id(&bound.node)
            .and_then(|node| self.fleet.view(node));
        let state = self.nodes.get(&*bound.node);
        // The node's plugin has swapped the records of two pods, whose annotations change later.
        let exchanged = state.and_then(|node| node.exchanged.get(owner.as_str()));
        let given = state
            .map(|state| state.given_to(owner.as_str()))
            .unwrap_or_default();
        let inventory = view.and_then(NodeView::inventory);
        let report = state
            .map(|state| state.report_on(owner.as_str()))
            .unwrap_or_default();
        let context = NodeContext {
            inventory,
            kinds: &self.kinds,
            given,
            allows_all_devices: self.allows_all_devices,
            report,
        };
        let exchanged = exchanged.map(|record| record.clone().or_units_of(&bound.record));
        let account = entry
            .facts
            .account_of(exchanged.as_ref().unwrap_or(&bound.record), context);
        let problem: Option<Box<str>> = account.problem.map(Into::into);
        if let Some(problem) = problem
            .as_deref()
            .filter(|problem| entry.problem.as_deref() != Some(problem))
        {
            let (namespace, name, node) = (&entry.facts.namespace, &entry.facts.name, &bound.node);
            let contradicts = account.contradicts;
            warn!(%namespace, pod = %name, %node, problem, contradicts, "a pod is counted conservatively, or its record does not count");
        }
        let is_unheld = account.holdings.is_empty();
        if let Some(state) = self.nodes.get_mut(&*bound.node) {
            if is_unheld && problem.is_some() {
                state.unheld.insert(owner.clone());
            } else {
                state.unheld.remove(owner);
            }
        }
        if is_unheld {
            self.fleet.release(owner.as_str());
        } else {
            self.fleet.hold(owner, &bound.node, account.holdings);
        }
        (entry.problem, entry.contradicts) = (problem, account.contradicts);
    }

    /// Counts the request of a bound pod in the workload that policies look ahead to.
    pub(super) fn count_request(&mut self, uid: &str) {
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

    /// Works out again what the pods on a node hold, after its devices or its memory unit have changed.
    pub(super) fn account_again(&mut self, node: &str) {
        let unheld = self
            .nodes
            .get(node)
            .map(|state| state.unheld.clone())
            .unwrap_or_default();
        let view = self.fleet.node_id(node).and_then(|node| self.fleet.view(node));
        let held: Vec<OwnerId> = view
            .into_iter()
            .flat_map(|node| node.held().map(|held| held.owner.clone()))
            .collect();
        // Pods that hold nothing are on no node of the fleet, but their records may count now.
        for owner in held.into_iter().chain(unheld) {
            self.account(&owner);
        }
    }

    /// Reads the kubelet allocations of a Device object; an unreadable annotation changes nothing.
    pub(super) fn read_given(&mut self, node: &str, device: &ObjectMeta) {
        let read = device
            .annotations
            .as_ref()
            .map(KubeletAllocations::read)
            .transpose();
        match read {
            Ok(checkpoints) => {
                let given = checkpoints
                    .flatten()
                    .map(|checkpoints| kubelet_allocations::of_checkpoints(&checkpoints, &self.names));
                self.replace_given(node, given.unwrap_or_default());
            }
            Err(error) => {
                warn!(node, %error, "the kubelet allocations cannot be read; the previous ones stay");
            }
        }
    }

    /// Reads the pods without devices of a Device object; an unreadable annotation changes nothing.
    pub(super) fn read_without_devices(&mut self, node: &str, device: &ObjectMeta) {
        match plugin_reports::read_pods_without_devices(device.annotations.as_ref()) {
            Ok(now) => self.replace_without_devices(node, now),
            Err(error) => {
                warn!(node, %error, "the pods without devices cannot be read; the previous ones stay");
            }
        }
    }

    /// Accounts the pods whose report by the node's plugin has changed.
    pub(super) fn replace_without_devices(&mut self, node: &str, now: Option<PodUids>) {
        let Some(state) = self.nodes.get_mut(node) else {
            return;
        };
        if state.without_devices == now {
            return;
        }
        let before = std::mem::replace(&mut state.without_devices, now.clone());
        if before.is_some() != now.is_some() {
            self.account_again(node);
        }
        let (before, now) = (before.unwrap_or_default(), now.unwrap_or_default());
        for uid in before.symmetric_difference(&now) {
            let owner = self.pods.owner(uid);
            self.account(&owner);
        }
    }

    /// Replaces the kubelet allocations of a node, and accounts the pods that they concern.
    pub(super) fn replace_given(&mut self, node: &str, now: AllocationsByPod) {
        let Some(state) = self.nodes.get_mut(node) else {
            return;
        };
        if state.given == now {
            return;
        }
        let before = std::mem::replace(&mut state.given, now);
        let uids: BTreeSet<Box<str>> = before.into_keys().chain(state.given.keys().cloned()).collect();
        for uid in &uids {
            let is_given = self
                .nodes
                .get(node)
                .is_some_and(|state| state.given.contains_key(uid));
            let nodes = self.given_on.entry(uid.clone()).or_default();
            nodes.retain(|other| **other != *node);
            if is_given {
                nodes.push(node.into());
            } else if nodes.is_empty() {
                self.given_on.remove(uid);
            }
            let owner = self.pods.owner(uid);
            self.account(&owner);
            self.account_alone(uid, node);
        }
    }

    /// Accounts the kubelet allocations of a pod after the pod has changed.
    pub(super) fn account_given(&mut self, uid: &str) {
        for node in self.given_on.get(uid).cloned().unwrap_or_default() {
            self.account_alone(uid, &node);
        }
    }

    /// Accounts the kubelet allocations on a node after its devices have changed.
    pub(super) fn account_given_on(&mut self, node: &str) {
        let uids: Vec<Box<str>> = self
            .nodes
            .get(node)
            .map(|state| state.given.keys().cloned().collect())
            .unwrap_or_default();
        for uid in uids {
            self.account_alone(&uid, node);
        }
    }

    /// Accounts the kubelet allocations of a pod that is not known on that node, under an owner of their own.
    fn account_alone(&mut self, uid: &str, node: &str) {
        let owner = OwnerId::from(format!("{uid}@{node}"));
        let given = self
            .nodes
            .get(node)
            .map(|state| state.given_to(uid))
            .unwrap_or_default();
        let is_known = self
            .pods
            .get(uid)
            .is_some_and(|entry| entry.bound().is_some_and(|bound| *bound.node == *node));
        if given.is_empty() || is_known || self.ended.contains_key(uid) {
            self.fleet.release(owner.as_str());
            return;
        }
        let view = self.fleet.node_id(node).and_then(|id| self.fleet.view(id));
        let (holdings, problem) = kubelet_allocations::alone(given, view.and_then(NodeView::inventory));
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

    /// Counts an opening of room without an event that kube-scheduler sees.
    pub(super) fn note_silent_opening(&mut self) {
        self.fleet.note_opening();
        self.n_silent_openings += 1;
    }

    /// Counts one opening as silent if room has opened since it had opened `n_before` times.
    pub(super) fn note_silent_since(&mut self, n_before: u64) {
        self.n_silent_openings += u64::from(self.fleet.n_openings() != n_before);
    }
}

impl NodeState {
    pub(super) fn exists(&self) -> bool {
        self.node.is_some()
    }

    /// The allocatable amount of a device resource, if the node has it.
    pub(super) fn allocatable_of(&self, resource: &str) -> Option<u64> {
        self.allocatable
            .iter()
            .find(|(name, _)| **name == *resource)
            .map(|(_, amount)| *amount)
    }

    pub(super) fn is_opaque(&self) -> bool {
        self.report.as_ref().is_some_and(|report| report.opaque)
    }

    /// Reads the records that the plugin has swapped, and returns true if they have changed.
    pub(super) fn exchange(&mut self, device: &ObjectMeta) -> bool {
        match plugin_reports::read_swapped_records(device.annotations.as_ref()) {
            Ok(exchanged) => {
                let exchanged = exchanged
                    .into_iter()
                    .map(|(uid, record)| (uid, Recorded::of_allocations(&record)))
                    .collect();
                let has_changed = self.exchanged != exchanged;
                self.exchanged = exchanged;
                has_changed
            }
            Err(error) => {
                warn!(node = device.name, %error, "swapped records cannot be read; the previous ones stay");
                false
            }
        }
    }

    pub(super) fn has_devices(&self) -> bool {
        self.report
            .as_ref()
            .is_some_and(|report| report.inventory.has_devices())
    }

    pub(super) fn shares_gpus(&self) -> bool {
        self.report
            .as_ref()
            .is_some_and(|report| !report.inventory.gpus.is_empty())
    }

    /// The devices that kubelet allocated to a pod.
    pub(super) fn given_to(&self, uid: &str) -> &[AllocatedDevice] {
        self.given.get(uid).map(Vec::as_slice).unwrap_or_default()
    }

    /// The report of the node's plugin on a pod.
    pub(super) fn report_on(&self, uid: &str) -> PluginReport {
        match &self.without_devices {
            None => PluginReport::Silent,
            Some(uids) if uids.contains(uid) => PluginReport::NoDevices,
            Some(_) => PluginReport::Pending,
        }
    }

    /// The isolation provider in the node's label.
    pub(super) fn isolation(&self) -> Option<&str> {
        let labels = self.node.as_ref()?.metadata.labels.as_ref()?;
        labels.get(ISOLATION_PROVIDER).map(String::as_str)
    }
}
