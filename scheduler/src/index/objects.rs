//! Objects of watches, carried into the index.

use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use placement::OwnerId;
pub use proto::device::RawDevice;
use proto::node::Node;
use proto::pod::Pod;
use proto::resource::is_gpu_resource;
use proto::totals::HostResources;
use rustc_hash::FxHashMap;

use super::Index;
use super::assumption::Phase;
use super::budgets::{Budget, key};
use super::cluster::NodeState;
use super::failing::is_refused_by_kubelet;
use super::hints::Shown;
use crate::accounting::{self, PodFacts};
use crate::inventory::{self, DeviceReport};
use crate::watch::ObjectStore;

impl ObjectStore<Node> for Index {
    const KIND: &'static str = "nodes";

    fn apply(&mut self, node: Node) {
        let Some(name) = node.metadata.name.as_deref() else {
            return;
        };
        let host = HostResources::of_node(&node);
        self.cluster
            .fleet
            .set_host(name, host.map(accounting::host_amounts));
        self.see_plugin_state(name, &node);
        let state = self.cluster.nodes.entry(name.into()).or_default();
        state.node_list = self.node_list.number;
        let ours = node
            .status
            .allocatable
            .iter()
            .filter(|(resource, _)| is_gpu_resource(resource, &self.cluster.names));
        state.allocatable = ours
            .map(|(resource, amount)| (resource.as_str().into(), amount.units()))
            .collect();
        let trimmed = inventory::trim(&node, &self.cluster.names);
        // Nodes report their health every few seconds; most of that changes nothing here.
        if state.node.as_ref() != Some(&trimmed) {
            self.note_taints(name, &trimmed.spec.taints);
            if let Some(state) = self.cluster.nodes.get_mut(name) {
                state.node = Some(trimmed);
            }
            self.cluster.refresh_node(name);
        }
    }

    fn delete(&mut self, node: &Node) {
        if let Some(name) = node.metadata.name.as_deref() {
            self.forget_node(name);
        }
    }

    fn begin_list(&mut self) {
        self.node_list.begin(self.cluster.fleet.n_openings());
    }

    /// Forgets the nodes that the complete list did not show.
    fn end_list(&mut self) {
        let number = self.node_list.number;
        let gone = names_where(&self.cluster.nodes, |state| {
            state.node.is_some() && state.node_list != number
        });
        for name in gone {
            self.forget_node(&name);
        }
        self.node_list.synced = true;
        self.cluster.note_silent_since(self.node_list.n_openings);
    }
}

impl ObjectStore<RawDevice> for Index {
    const KIND: &'static str = "devices";
    const MAY_BE_ABSENT: bool = true;

    fn apply(&mut self, device: RawDevice) {
        let Some(name) = device.metadata.name.as_deref() else {
            return;
        };
        let n_openings = self.cluster.fleet.n_openings();
        let state = self.cluster.nodes.entry(name.into()).or_default();
        state.device_list = self.device_list.number;
        let report = DeviceReport::of(&device.metadata, &device.spec);
        let has_exchanged = state.exchange(&device.metadata);
        if state.device.as_ref() != Some(&report) {
            self.cluster.replace_device(name, Some(report));
        }
        if has_exchanged {
            self.cluster.account_again(name);
        }
        self.cluster.read_given(name, &device.metadata);
        self.cluster.read_without_devices(name, &device.metadata);
        self.cluster.note_silent_since(n_openings);
        self.hints.keep_for_nominees(&mut self.cluster);
    }

    fn delete(&mut self, device: &RawDevice) {
        if let Some(name) = device.metadata.name.as_deref() {
            let n_openings = self.cluster.fleet.n_openings();
            self.forget_device(name);
            self.cluster.note_silent_since(n_openings);
        }
    }

    fn begin_list(&mut self) {
        self.device_list.begin(self.cluster.fleet.n_openings());
    }

    /// Forgets the Device objects that the complete list did not show.
    fn end_list(&mut self) {
        let number = self.device_list.number;
        let gone = names_where(&self.cluster.nodes, |state| {
            state.device.is_some() && state.device_list != number
        });
        for name in gone {
            self.forget_device(&name);
        }
        self.device_list.synced = true;
        self.cluster.note_silent_since(self.device_list.n_openings);
    }
}

impl ObjectStore<Pod> for Index {
    const KIND: &'static str = "pods";

    fn apply(&mut self, pod: Pod) {
        let uid = pod.uid();
        if uid.is_empty() {
            return;
        }
        if self.plugins.see_pod(&pod, self.pod_list.number) {
            self.cluster.note_silent_opening();
        }
        let facts = PodFacts::of(&pod, &self.cluster.names);
        let asked = facts.as_ref().map(|facts| facts.host);
        match facts {
            Some(facts) if !pod.is_terminal() => {
                let is_bound = facts.bound.is_some();
                self.put_pod(uid, facts);
                self.see_eviction(&pod);
                if !is_bound {
                    self.hints.follow_attempt(&mut self.cluster, uid, Shown::of(&pod));
                }
                // Pending pods may ask for anything, in any number; bound pods have passed admission.
                if is_bound && !pod.is_tied_to_node() {
                    self.cluster.count_request(uid);
                }
            }
            Some(facts) => {
                if let Some(bound) = facts
                    .bound
                    .as_deref()
                    .filter(|_| self.cluster.pods.contains_key(uid) && is_refused_by_kubelet(&pod))
                {
                    self.failing.note(&bound.node, uid);
                    self.plugins.note_failure(&bound.node, &pod);
                }
                self.remove_pod(uid);
                self.cluster
                    .ended
                    .insert(OwnerId::from(uid), self.pod_list.number);
            }
            None => self.remove_pod(uid),
        }
        self.see_use(&pod, asked);
        self.cluster.account_given(uid);
        self.hints.keep_for_nominees(&mut self.cluster);
        self.refresh_workload_if_due();
    }

    fn delete(&mut self, pod: &Pod) {
        if self.plugins.remove_pod(pod.uid()) {
            self.cluster.note_silent_opening();
        }
        self.remove_pod(pod.uid());
        self.see_no_use(pod.uid());
        self.refresh_workload_if_due();
        self.cluster.ended.remove(pod.uid());
        self.cluster.account_given(pod.uid());
        self.hints.keep_for_nominees(&mut self.cluster);
    }

    fn begin_list(&mut self) {
        self.pod_list.begin(self.cluster.fleet.n_openings());
    }

    /// Forgets the pods that the complete list did not show.
    fn end_list(&mut self) {
        mark_unlisted_decisions(self);
        remove_unlisted_pods(self);
        if self.plugins.end_list(self.pod_list.number) {
            self.cluster.note_silent_opening();
        }
        if !self.pod_list.synced {
            let mut entries = self.cluster.pods.values();
            self.began_with_pending =
                entries.any(|entry| entry.facts.bound.is_none() && self.cluster.concerns(&entry.facts));
        }
        self.pod_list.synced = true;
        self.cluster.note_silent_since(self.pod_list.n_openings);
        self.hints.keep_for_nominees(&mut self.cluster);
        self.refresh_workload();
    }
}

/// Marks the written decisions whose pods the complete list did not show. A binding that was written before the list has to be
/// in it, so the task of the bind looks the pod up.
fn mark_unlisted_decisions(index: &mut Index) {
    for entry in index.cluster.pods.values_mut() {
        if let Some(assumption) = entry.assumption.as_mut()
            && entry.list != index.pod_list.number
            && assumption.moment.phase == Phase::Written
        {
            assumption.unlisted = true;
            // Wakes the task of the bind, also if it waits only later.
            index.unlisted.notify_one();
        }
    }
}

/// Removes every trace of the pods that the complete list did not show.
fn remove_unlisted_pods(index: &mut Index) {
    let number = index.pod_list.number;
    let mut gone: Vec<OwnerId> = Vec::new();
    for (uid, entry) in index.cluster.pods.iter() {
        // An assumed pod may be younger than the list: it stays, and the task of its bind looks it up.
        if entry.list != number && entry.assumption.is_none() {
            gone.push(uid.clone());
        }
    }
    for uid in gone {
        index.remove_pod(uid.as_str());
        index.cluster.account_given(uid.as_str());
    }
    let unlisted: Vec<_> = index.plain.extract_if(|_, plain| plain.list != number).collect();
    for (uid, _) in unlisted {
        index.cluster.fleet.clear_host_use(uid.as_str());
    }
    // Nothing shows the end of these pods any more, so kubelet's checkpoint decides again what they hold.
    let forgotten: Vec<_> = index
        .cluster
        .ended
        .extract_if(|_, list| *list != number)
        .collect();
    for (uid, _) in forgotten {
        index.cluster.account_given(uid.as_str());
    }
}

/// The names of the nodes with a state that a condition holds for.
fn names_where(nodes: &FxHashMap<Box<str>, NodeState>, holds: impl Fn(&NodeState) -> bool) -> Vec<Box<str>> {
    let named = nodes.iter().filter(|(_, state)| holds(state));
    named.map(|(name, _)| name.clone()).collect()
}

impl ObjectStore<PodDisruptionBudget> for Index {
    const KIND: &'static str = "poddisruptionbudgets";
    const MAY_BE_ABSENT: bool = true;

    fn apply(&mut self, budget: PodDisruptionBudget) {
        self.budgets
            .insert(key(&budget), Budget::of(&budget, self.budget_list.number));
    }

    fn delete(&mut self, budget: &PodDisruptionBudget) {
        self.budgets.remove(&key(budget));
    }

    fn begin_list(&mut self) {
        self.budget_list.begin(self.cluster.fleet.n_openings());
    }

    /// Forgets the budgets that the complete list did not show.
    fn end_list(&mut self) {
        let number = self.budget_list.number;
        self.budgets.retain(|_, budget| budget.list == number);
        self.budget_list.synced = true;
    }
}
