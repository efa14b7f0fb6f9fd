//! Objects of watches, carried into the index: into the cluster, and from there to hints, failing nodes and assume times.

use std::cmp::max;

use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use placement::OwnerId;
use proto::annotation::AnnotationError;
use proto::device::RawDevice;
use proto::kubelet_allocations::KubeletAllocations;
use proto::node::Node;
use proto::plugin_reports::{self, PluginState};
use proto::pod::{Pod, Taint};
use proto::totals::HostResources;
use rustc_hash::FxHashMap;
use tracing::warn;

use super::Index;
use super::budgets::{Budget, namespace_and_name};
use super::failing::is_refused_by_kubelet;
use super::hints::{self, Attempt};
use super::node_state::NodeState;
use crate::accounting::kubelet_allocations::{self, AllocationsByPod};
use crate::accounting::{self, PodFacts};
use crate::inventory::{self, DeviceReport};
use crate::kube_scheduler::NodeFacts;
use crate::watch::ObjectStore;

/// A new workload model is due once one in this many of all bound pods has come or gone.
const PODS_PER_CHANGE: u64 = 32;
/// The least number of bound pods that have come or gone when a workload model is due, in clusters of few pods.
const MIN_CHANGES: u64 = 16;

impl ObjectStore<Node> for Index {
    const KIND: &'static str = "nodes";

    /// Takes over a node: its capacity, taints and labels, and the report of its device plugin. If its devices have changed, the
    /// pods there are accounted again.
    fn apply(&mut self, node: Node) {
        let Some(name) = node.metadata.name.as_deref() else {
            return;
        };
        let host = HostResources::of_node(&node);
        let host = host.map(accounting::host_amounts);
        self.cluster.fleet.set_host(name, host);
        read_plugin_state(self, name, &node);
        let facts = NodeFacts::of(&node);
        let trimmed = inventory::trim(&node, &self.cluster.names);
        let state = self.cluster.nodes.entry(name.into()).or_default();
        state.node_list = self.node_list.number;
        state.facts = facts;
        // kubelet updates the Node object often; most updates change no field that is kept here.
        if state.node.as_ref() != Some(&trimmed) {
            set_soft_taints(&mut self.cluster.soft_taints, name, &trimmed.spec.taints);
            let isolation_before = state.isolation().map(str::to_owned);
            self.cluster.n_existing += usize::from(state.node.replace(trimmed).is_none());
            if state.isolation() != isolation_before.as_deref() {
                // Pods that demand the provider fit now, though nothing of the inventory has changed.
                self.cluster.fleet.note_opening();
            }
            self.cluster.refresh_node(name);
        }
    }

    fn delete(&mut self, node: &Node) {
        if let Some(name) = node.metadata.name.as_deref() {
            forget_node(self, name);
        }
    }

    fn begin_list(&mut self) {
        self.node_list.begin(self.cluster.fleet.n_openings());
    }

    fn end_list(&mut self) {
        let number = self.node_list.number;
        let is_gone = |state: &NodeState| state.node.is_some() && state.node_list != number;
        for name in names_where(&self.cluster.nodes, is_gone) {
            forget_node(self, &name);
        }
        self.node_list.synced = true;
        self.cluster.note_silent_since(self.node_list.n_openings);
    }
}

/// Takes over the annotation in which a node's plugin reports whether it serves.
fn read_plugin_state(index: &mut Index, name: &str, node: &Node) {
    match PluginState::read(node.metadata.annotations.as_ref()) {
        Ok(state) => {
            if index.cluster.plugins.set_state(name, state) {
                index.cluster.note_silent_opening();
            }
        }
        Err(error) => {
            warn!(node = name, %error, "the state of the device plugin is taken to be as it was before");
        }
    }
}

fn set_soft_taints(by_node: &mut FxHashMap<Box<str>, Box<[Taint]>>, name: &str, taints: &[Taint]) {
    // Few nodes have any, and the look-up of filters in an empty map costs nothing.
    if taints.is_empty() {
        by_node.remove(name);
    } else {
        by_node.insert(name.into(), taints.into());
    }
}

/// Forgets the Node object of a node that is gone. The state of its Device object stays while that exists.
fn forget_node(index: &mut Index, name: &str) {
    set_soft_taints(&mut index.cluster.soft_taints, name, &[]);
    index.failing.remove(name);
    index.cluster.plugins.forget_node(name);
    index.cluster.fleet.set_host(name, None);
    if let Some(state) = index.cluster.nodes.get_mut(name) {
        index.cluster.n_existing -= usize::from(state.node.take().is_some());
        state.facts = NodeFacts::default();
        index.cluster.refresh_node(name);
    }
}

impl ObjectStore<RawDevice> for Index {
    const KIND: &'static str = "devices";
    const MAY_BE_ABSENT: bool = true;

    /// Takes over a Device object: the devices of its node, and the plugin's reports about pods there. The pods that a change
    /// concerns are accounted again.
    fn apply(&mut self, device: RawDevice) {
        let Some(name) = device.metadata.name.as_deref() else {
            return;
        };
        let n_openings = self.cluster.fleet.n_openings();
        let state = self.cluster.nodes.entry(name.into()).or_default();
        state.device_list = self.device_list.number;
        let mut report = DeviceReport::of(&device.metadata, &device.spec);
        let annotations = device.metadata.annotations.as_ref();
        // Each value is `None` if its annotation cannot be read: then the last valid value stays in force.
        let swapped = value_or_problem(&mut report, plugin_reports::read_swapped_records(annotations));
        let allocations = annotations.map(KubeletAllocations::read).transpose();
        let allocations = value_or_problem(&mut report, allocations.map(Option::flatten));
        if let Some(Some(allocations)) = &allocations
            && let Some(key) = annotations.and_then(KubeletAllocations::key)
        {
            report.check_allocations(key, allocations);
        }
        let without_devices = plugin_reports::read_pods_without_devices(annotations);
        let without_devices = value_or_problem(&mut report, without_devices);
        let has_swapped = swapped.is_some_and(|swapped| state.replace_swapped_records(swapped));
        if state.device.as_ref() != Some(&report) {
            self.cluster.replace_device(name, Some(report));
        }
        if has_swapped {
            self.cluster.account_pods_on(name);
        }
        if let Some(allocations) = allocations {
            let allocations = allocations.unwrap_or_default();
            let by_pod = kubelet_allocations::of_checkpoints(&allocations, &self.cluster.names);
            self.cluster.replace_kubelet_allocations(name, by_pod);
        }
        if let Some(without_devices) = without_devices {
            self.cluster.replace_without_devices(name, without_devices);
        }
        // kube-scheduler watches no Device objects.
        self.cluster.note_silent_since(n_openings);
        hints::keep_for_nominees(self);
    }

    fn delete(&mut self, device: &RawDevice) {
        if let Some(name) = device.metadata.name.as_deref() {
            let n_openings = self.cluster.fleet.n_openings();
            forget_device(self, name);
            self.cluster.note_silent_since(n_openings);
        }
    }

    fn begin_list(&mut self) {
        self.device_list.begin(self.cluster.fleet.n_openings());
    }

    fn end_list(&mut self) {
        let number = self.device_list.number;
        let is_gone = |state: &NodeState| state.device.is_some() && state.device_list != number;
        for name in names_where(&self.cluster.nodes, is_gone) {
            forget_device(self, &name);
        }
        self.device_list.synced = true;
        self.cluster.note_silent_since(self.device_list.n_openings);
    }
}

/// The value of an annotation of a Device object; `None` if it cannot be read, and then the report gets the error as a problem.
fn value_or_problem<T>(report: &mut DeviceReport, value: Result<T, AnnotationError>) -> Option<T> {
    value
        .map_err(|error| report.add_annotation_problem(format_args!("{error}; its last valid value counts")))
        .ok()
}

/// Forgets the Device object of a node, and all that the node's plugin reports in it.
fn forget_device(index: &mut Index, name: &str) {
    if let Some(state) = index.cluster.nodes.get_mut(name) {
        let had_swapped = !std::mem::take(&mut state.swapped).is_empty();
        let none = AllocationsByPod::new();
        index.cluster.replace_kubelet_allocations(name, none);
        index.cluster.replace_without_devices(name, None);
        index.cluster.replace_device(name, None);
        if had_swapped {
            index.cluster.account_pods_on(name);
        }
    }
}

/// The names of the nodes whose state meets a condition, copied: the caller changes the nodes.
fn names_where(
    nodes: &FxHashMap<Box<str>, Box<NodeState>>,
    is_met: impl Fn(&NodeState) -> bool,
) -> Vec<Box<str>> {
    let found = nodes.iter().filter(|(_, state)| is_met(state));
    found.map(|(name, _)| name.clone()).collect()
}

impl ObjectStore<Pod> for Index {
    const KIND: &'static str = "pods";

    /// Takes over a pod. A bound pod holds devices from now on, an unbound one may have a hint, and one that has ended holds
    /// nothing.
    fn apply(&mut self, pod: Pod) {
        let uid = pod.uid();
        if uid.is_empty() {
            return;
        }
        let list = self.pod_list.number;
        // A node takes more pods than before, and kube-scheduler sees no event of that.
        if self.cluster.plugins.put_pod(&pod, list) {
            self.cluster.note_silent_opening();
        }
        let facts = PodFacts::of(&pod, &self.cluster.names);
        let requested = facts.as_ref().map(|facts| facts.host);
        if pod.is_terminal() {
            self.cluster.group_members.remove(uid);
        } else {
            let requests_devices = |facts: &PodFacts| self.requests_devices(facts);
            let has_devices = facts.as_ref().is_some_and(requests_devices);
            self.cluster.group_members.put(&pod, has_devices, list);
        }
        match facts {
            Some(facts) if !pod.is_terminal() => {
                let is_bound = facts.bound.is_some();
                if let Some(bound) = &facts.bound {
                    // The assume times in records of an earlier leader order the binds too, so new ones begin above them.
                    if let Some(nanos) = bound.assumed_at {
                        self.assume_times.note_recorded(nanos);
                    }
                    hints::end(self, uid, Some(&bound.node));
                }
                self.cluster.put_pod(&pod, facts, list);
                if !is_bound {
                    hints::update_attempt(self, uid, Attempt::of(&pod));
                }
            }
            Some(facts) => {
                if let Some(bound) = &facts.bound
                    // An entry exists only until the end of the pod is shown, so that each failure counts once.
                    && self.cluster.pods.contains_key(uid)
                    && is_refused_by_kubelet(&pod)
                {
                    self.failing.note_failure(&bound.node, uid);
                    self.cluster.plugins.note_failure(&bound.node, &pod);
                }
                self.remove_pod(uid);
                self.cluster.ended.insert(OwnerId::from(uid), list);
            }
            None => self.remove_pod(uid),
        }
        self.cluster.put_host_use(&pod, requested, list);
        self.cluster.account_kubelet_allocations(uid);
        hints::keep_for_nominees(self);
        renew_model_if_due(self);
    }

    fn delete(&mut self, pod: &Pod) {
        if self.cluster.plugins.remove_pod(pod.uid()) {
            self.cluster.note_silent_opening();
        }
        self.remove_pod(pod.uid());
        self.cluster.group_members.remove(pod.uid());
        self.cluster.remove_host_use(pod.uid());
        renew_model_if_due(self);
        self.cluster.ended.remove(pod.uid());
        self.cluster.account_kubelet_allocations(pod.uid());
        hints::keep_for_nominees(self);
    }

    fn begin_list(&mut self) {
        self.pod_list.begin(self.cluster.fleet.n_openings());
        self.hints.is_listing = true;
    }

    fn end_list(&mut self) {
        if self.cluster.mark_unlisted(self.pod_list.number) {
            // If the task that asks the API server about the pods (`extender::bind::sweep_unseen`) is not waiting at this moment,
            // `Notify` keeps the notification for its next wait.
            self.unlisted.notify_one();
        }
        remove_unlisted_pods(self);
        if self.cluster.plugins.end_list(self.pod_list.number) {
            self.cluster.note_silent_opening();
        }
        if !self.pod_list.synced {
            let mut pods = self.cluster.pods.values();
            self.began_with_pending =
                pods.any(|pod| pod.facts.bound.is_none() && self.requests_devices(&pod.facts));
        }
        renew_model(self);
        self.pod_list.synced = true;
        self.cluster.note_silent_since(self.pod_list.n_openings);
        self.hints.is_listing = false;
        hints::keep_for_nominees(self);
    }
}

/// Renews the workload model of the policies that look ahead if enough bound pods have come or gone since the last time.
fn renew_model_if_due(index: &mut Index) {
    let workload = index.cluster.fleet.workload();
    let n_changes = workload.n_changes().abs_diff(index.n_changes_when_due);
    if index.pod_list.synced && n_changes >= max(MIN_CHANGES, workload.n_pods() / PODS_PER_CHANGE) {
        renew_model(index);
    }
}

/// Puts a new workload model into effect, or notifies the task that computes one ([`Index::announce_due_models`]).
fn renew_model(index: &mut Index) {
    index.n_changes_when_due = index.cluster.fleet.workload().n_changes();
    match &index.model_due {
        Some(due) if index.pod_list.synced => due.notify_one(),
        // No request is answered before the end of the first list, and the first one needs the model.
        _ => {
            index.cluster.fleet.refresh_workload_model();
        }
    }
}

fn remove_unlisted_pods(index: &mut Index) {
    let number = index.pod_list.number;
    index.cluster.group_members.remove_unlisted(number);
    let mut gone: Vec<OwnerId> = Vec::new();
    for (uid, entry) in &index.cluster.pods {
        // An assumed pod may be younger than the list: it stays, see `Cluster::mark_unlisted`.
        if entry.list != number && entry.assumption.is_none() {
            gone.push(uid.clone());
        }
    }
    for uid in gone {
        index.remove_pod(uid.as_str());
        index.cluster.account_kubelet_allocations(uid.as_str());
    }
    let plain = &mut index.cluster.plain;
    let unlisted: Vec<_> = plain.extract_if(|_, plain| plain.list != number).collect();
    for (uid, _) in unlisted {
        index.cluster.remove_host_use(uid.as_str());
    }
    // No watch shows the end of these pods any more, so the devices in kubelet's checkpoint count as theirs again.
    let ended = &mut index.cluster.ended;
    let forgotten: Vec<_> = ended.extract_if(|_, list| *list != number).collect();
    for (uid, _) in forgotten {
        index.cluster.account_kubelet_allocations(uid.as_str());
    }
}

impl ObjectStore<PodDisruptionBudget> for Index {
    const KIND: &'static str = "poddisruptionbudgets";
    const MAY_BE_ABSENT: bool = true;

    fn apply(&mut self, budget: PodDisruptionBudget) {
        let budget = Budget::of(budget, self.budget_list.number);
        self.cluster.budgets.insert(budget);
    }

    fn delete(&mut self, budget: &PodDisruptionBudget) {
        self.cluster.budgets.remove(&namespace_and_name(budget));
    }

    fn begin_list(&mut self) {
        self.budget_list.begin(self.cluster.fleet.n_openings());
    }

    fn end_list(&mut self) {
        self.cluster.budgets.retain_shown(self.budget_list.number);
        self.budget_list.synced = true;
    }
}
