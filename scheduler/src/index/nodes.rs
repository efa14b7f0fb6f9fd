//! Nodes and Device objects as watches show them, turned into inventories.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use placement::OwnerId;
pub use proto::device::RawDevice;
use proto::node::Node;
use proto::plugin_reports;
use proto::plugin_reports::PodUids;
use proto::pod::Taint;
use proto::resource::is_gpu_resource;
use tracing::warn;

use super::Index;
use crate::accounting::Recorded;
use crate::given::GivenByPod;
use crate::inventory::{self, DeviceReport, NodeReport};
use crate::watch::ObjectStore;

/// What is known of a node.
#[derive(Debug, Default)]
pub(super) struct NodeState {
    pub(super) node: Option<Node>,
    device: Option<DeviceReport>,
    /// Numbers of the lists that named the two last.
    node_list: u32,
    device_list: u32,
    /// The records that its pods have exchanged, by UID.
    pub(super) exchanged: BTreeMap<String, Recorded>,
    /// What its kubelet has given to pods that somebody else placed.
    pub(super) given: GivenByPod,
    /// Pods that its plugin reports to have been given nothing; `None` if it reports no such pods.
    pub(super) without_devices: Option<PodUids>,
    /// Pods bound to it of which something is in doubt, and which hold nothing.
    pub(super) unheld: BTreeSet<OwnerId>,
    /// What the two amount to.
    report: Option<NodeReport>,
    /// The amounts of our resources that pods may be given, by kube-scheduler's sums.
    allocatable: Vec<(Box<str>, u64)>,
    /// The faults in it that keep parts from use.
    pub(super) problems: Vec<String>,
}

impl NodeState {
    pub(super) fn exists(&self) -> bool {
        self.node.is_some()
    }

    /// The amount of a resource of ours that pods may be given, if the node has it.
    pub(super) fn allocatable_of(&self, resource: &str) -> Option<u64> {
        self.allocatable
            .iter()
            .find(|(name, _)| **name == *resource)
            .map(|(_, amount)| *amount)
    }

    pub(super) fn is_opaque(&self) -> bool {
        self.report.as_ref().is_some_and(|report| report.opaque)
    }

    /// Takes in which pods have exchanged their records; whether that is news.
    fn exchange(&mut self, device: &ObjectMeta) -> bool {
        match plugin_reports::read_swapped_records(device.annotations.as_ref()) {
            Ok(exchanged) => {
                let exchanged = exchanged
                    .into_iter()
                    .map(|(uid, record)| (uid, Recorded::of_allocations(&record)))
                    .collect();
                let is_news = self.exchanged != exchanged;
                self.exchanged = exchanged;
                is_news
            }
            Err(error) => {
                warn!(node = device.name, %error, "what pods have exchanged is taken to be as it was before");
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
}

impl ObjectStore<Node> for Index {
    const KIND: &'static str = "nodes";

    fn apply(&mut self, node: Node) {
        let Some(name) = node.metadata.name.as_deref() else {
            return;
        };
        self.see_host(name, &node);
        self.see_plugin_state(name, &node);
        let state = self.nodes.entry(name.into()).or_default();
        state.node_list = self.node_list.number;
        let ours = node
            .status
            .allocatable
            .iter()
            .filter(|(resource, _)| is_gpu_resource(resource, &self.names));
        state.allocatable = ours
            .map(|(resource, amount)| (resource.as_str().into(), amount.units()))
            .collect();
        let trimmed = inventory::trim(&node, &self.names);
        // Nodes report their health every few seconds; most of that changes nothing here.
        if state.node.as_ref() != Some(&trimmed) {
            self.note_taints(name, &trimmed.spec.taints);
            if let Some(state) = self.nodes.get_mut(name) {
                state.node = Some(trimmed);
            }
            self.refresh_node(name);
        }
    }

    fn delete(&mut self, node: &Node) {
        if let Some(name) = node.metadata.name.as_deref() {
            self.forget_node(name);
        }
    }

    fn begin_list(&mut self) {
        self.node_list.begin(self.fleet.n_openings());
    }

    fn end_list(&mut self) {
        let number = self.node_list.number;
        let gone = self
            .nodes
            .iter()
            .filter(|(_, state)| state.node.is_some() && state.node_list != number);
        let gone: Vec<Box<str>> = gone.map(|(name, _)| name.clone()).collect();
        for name in gone {
            self.forget_node(&name);
        }
        self.node_list.synced = true;
        self.note_silent_since(self.node_list.n_openings);
    }
}

impl ObjectStore<RawDevice> for Index {
    const KIND: &'static str = "devices";
    const MAY_BE_ABSENT: bool = true;

    fn apply(&mut self, device: RawDevice) {
        let Some(name) = device.metadata.name.as_deref() else {
            return;
        };
        let n_openings = self.fleet.n_openings();
        let state = self.nodes.entry(name.into()).or_default();
        state.device_list = self.device_list.number;
        let report = DeviceReport::of(&device.metadata, &device.spec);
        let has_exchanged = state.exchange(&device.metadata);
        if state.device.as_ref() != Some(&report) {
            self.replace_device(name, Some(report));
        }
        if has_exchanged {
            self.account_again(name);
        }
        self.read_given(name, &device.metadata);
        self.read_without_devices(name, &device.metadata);
        self.note_silent_since(n_openings);
        self.keep_for_nominees();
    }

    fn delete(&mut self, device: &RawDevice) {
        if let Some(name) = device.metadata.name.as_deref() {
            let n_openings = self.fleet.n_openings();
            self.forget_device(name);
            self.note_silent_since(n_openings);
        }
    }

    fn begin_list(&mut self) {
        self.device_list.begin(self.fleet.n_openings());
    }

    fn end_list(&mut self) {
        let number = self.device_list.number;
        let gone = self
            .nodes
            .iter()
            .filter(|(_, state)| state.device.is_some() && state.device_list != number);
        let gone: Vec<Box<str>> = gone.map(|(name, _)| name.clone()).collect();
        for name in gone {
            self.forget_device(&name);
        }
        self.device_list.synced = true;
        self.note_silent_since(self.device_list.n_openings);
    }
}

impl Index {
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
        self.fleet.set_host(name, None);
        if let Some(state) = self.nodes.get_mut(name) {
            state.node = None;
            self.refresh_node(name);
        }
    }

    fn forget_device(&mut self, name: &str) {
        if let Some(state) = self.nodes.get_mut(name) {
            let had_exchanged = !std::mem::take(&mut state.exchanged).is_empty();
            self.replace_given(name, GivenByPod::new());
            self.replace_without_devices(name, None);
            self.replace_device(name, None);
            if had_exchanged {
                self.account_again(name);
            }
        }
    }

    /// Takes in what a node's Device object says now, and which types of devices there are by that.
    fn replace_device(&mut self, name: &str, device: Option<DeviceReport>) {
        let Some(state) = self.nodes.get_mut(name) else {
            return;
        };
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
            .filter(|(_, entry)| entry.facts.ask.others().iter().any(asks));
        let affected: Vec<_> = affected.map(|(owner, _)| owner.clone()).collect();
        for owner in affected {
            self.account(&owner);
        }
    }

    /// Works a node's inventory out anew, and what pods hold there if it has changed.
    fn refresh_node(&mut self, name: &str) {
        let Some(state) = self.nodes.get_mut(name) else {
            return;
        };
        // A Device object may outlive its node, or come before it: without the node there is nothing to place on.
        let report = state
            .node
            .as_ref()
            .and_then(|node| inventory::report(node, state.device.as_ref(), &self.names));
        if report == state.report {
            self.drop_unknown_node(name);
            return;
        }
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
            // Without devices nothing that pods hold can be compared with any; it stays as it is until there are some.
            _ => self.fleet.remove_inventory(name),
        }
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

    /// Forgets a node of which neither object is there.
    fn drop_unknown_node(&mut self, name: &str) {
        if self
            .nodes
            .get(name)
            .is_some_and(|state| state.node.is_none() && state.device.is_none())
        {
            self.nodes.remove(name);
        }
    }
}
