//! A node: its Node and its Device object, and what follows from both.

use std::collections::{BTreeMap, BTreeSet};

use placement::OwnerId;
use proto::node::Node;
use proto::plugin_reports::{PodUids, SwappedRecords};
use proto::resource::ISOLATION_PROVIDER;

use crate::accounting::kubelet_allocations::{AllocatedDevice, AllocationsByPod};
use crate::accounting::{PluginReport, Recorded};
use crate::inventory::{DeviceReport, NodeReport};
use crate::kube_scheduler::NodeFacts;

#[derive(Debug, Default)]
pub(super) struct NodeState {
    pub(super) node: Option<Node>,
    pub(super) device: Option<DeviceReport>,
    /// The serial number of the newest list of nodes at the time when a list or a watch event last showed the node. Nodes with an
    /// older number than that of a complete list are gone.
    pub(super) node_list: u32,
    /// The same as `node_list`, for lists of Device objects and the node's Device object.
    pub(super) device_list: u32,
    /// The records that its plugin has swapped between pods, by UID.
    pub(super) swapped: BTreeMap<String, Recorded>,
    /// The devices that its kubelet allocated to pods of other schedulers.
    pub(super) kubelet_allocations: AllocationsByPod,
    /// Pods that were allocated no device, as its plugin reports; `None` if it reports no such pods.
    pub(super) without_devices: Option<PodUids>,
    /// Pods bound to it that hold nothing because their record has a problem: another inventory may make the record count.
    pub(super) without_holdings: BTreeSet<OwnerId>,
    /// The devices that follow from both objects, as far as they can be read; `None` if there are none.
    pub(super) report: Option<NodeReport>,
    pub(super) facts: NodeFacts,
    /// Problems in the Node and the Device object that keep devices from use, for people.
    pub(super) problems: Vec<String>,
}

impl NodeState {
    /// Returns true if there is a Node object, and not a Device object alone.
    pub(super) fn exists(&self) -> bool {
        self.node.is_some()
    }

    /// The size of a memory unit in bytes, if the node has devices and the size is known.
    pub(super) fn unit(&self) -> Option<u64> {
        let report = self.report.as_ref().filter(|report| !report.is_unit_unknown)?;
        report.inventory.unit_bytes
    }

    /// Returns true if the node has devices and the size of its memory unit is not known.
    pub(super) fn is_unit_unknown(&self) -> bool {
        self.report.as_ref().is_some_and(|report| report.is_unit_unknown)
    }

    /// Replaces the records that the plugin has swapped, and returns true if they have changed.
    pub(super) fn replace_swapped_records(&mut self, swapped: SwappedRecords) -> bool {
        let mut records = BTreeMap::new();
        for (uid, record) in swapped {
            records.insert(uid, Recorded::of_allocations(&record));
        }
        let has_changed = self.swapped != records;
        self.swapped = records;
        has_changed
    }

    pub(super) fn n_closed_gpus(&self) -> usize {
        let Some(report) = &self.report else { return 0 };
        report.inventory.gpus.iter().filter(|gpu| gpu.closed).count()
    }

    pub(super) fn shares_gpus(&self) -> bool {
        let report = self.report.as_ref();
        report.is_some_and(|report| !report.inventory.gpus.is_empty())
    }

    pub(super) fn allocated_to(&self, uid: &str) -> &[AllocatedDevice] {
        let allocated = self.kubelet_allocations.get(uid);
        allocated.map(Vec::as_slice).unwrap_or_default()
    }

    /// The report of the node's plugin on a pod, by the pods that it reports as without devices.
    pub(super) fn report_on(&self, uid: &str) -> PluginReport {
        match &self.without_devices {
            None => PluginReport::Silent,
            Some(uids) if uids.contains(uid) => PluginReport::NoDevices,
            Some(_) => PluginReport::Pending,
        }
    }

    pub(super) fn isolation(&self) -> Option<&str> {
        let labels = self.node.as_ref()?.metadata.labels.as_ref()?;
        labels.get(ISOLATION_PROVIDER).map(String::as_str)
    }
}
