//! A copy of the state in numbers, for metrics.

use std::collections::BTreeMap;

use placement::NodeView;

use super::cluster::Cluster;
use super::resource_demand::requests_devices;
use super::{Index, view};
use crate::inventory::record_id;

/// The state in numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Nodes that exist.
    pub n_nodes: u64,
    /// Nodes with GPUs to share.
    pub n_gpu_nodes: u64,
    /// Pods that hold a share.
    pub n_pods: u64,
    /// Unbound pods that ask for a share.
    pub n_pending: u64,
    /// Assumed pods: binds have decided their nodes, and no watch has shown them bound.
    pub n_assumed: u64,
    /// Pods whose devices are not known for sure.
    pub n_conservative: u64,
    /// Pods whose record names more than they request.
    pub n_contradicting: u64,
    /// Hints.
    pub n_hints: u64,
    /// Nodes that rank last because pods failed there.
    pub n_failing: u64,
    /// Nodes that get no pods because their device plugin is away.
    pub n_plugin_away: u64,
    /// Each kind of object, with true if its list is complete.
    pub synced: [(&'static str, bool); 3],
    /// Every GPU.
    pub gpus: Vec<GpuSnapshot>,
    /// The pods that hold parts of GPUs, by namespace.
    pub namespaces: BTreeMap<String, NamespaceSnapshot>,
}

/// The pods of one namespace in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NamespaceSnapshot {
    /// Pods that hold parts of GPUs, once for each GPU.
    pub n_parts: u64,
    /// Bytes that they hold, or may hold.
    pub bytes: u64,
    /// Core percent that they hold.
    pub core: u64,
}

/// One GPU in numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuSnapshot {
    /// Node name.
    pub node: String,
    /// Minor number.
    pub minor: u32,
    /// UUID, empty if it is not known.
    pub uuid: String,
    /// Bytes in all.
    pub total: u64,
    /// Bytes that pods hold, or may hold.
    pub used: u64,
    /// Free bytes, if no typical pod fits on it.
    pub stranded: u64,
    /// Core percent that is held, and in all.
    pub core: (u32, u32),
    /// Slots that are held, and in all.
    pub slots: (u32, u32),
    /// Pods that hold a part of it.
    pub n_pods: u32,
    /// True if it takes new pods.
    pub healthy: bool,
}

impl Snapshot {
    /// Counts a cluster.
    pub(super) fn of(index: &Index) -> Self {
        let cluster = &index.cluster;
        let count = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
        let (mut n_pending, mut n_assumed, mut n_conservative, mut n_contradicting) = (0, 0, 0, 0);
        for entry in cluster.pods.values() {
            let is_undecided = entry.facts.bound.is_none() && entry.assumption.is_none();
            n_pending += u64::from(is_undecided && requests_devices(cluster, &entry.facts));
            n_assumed += u64::from(entry.assumption.is_some());
            n_conservative += u64::from(entry.problem.is_some());
            n_contradicting += u64::from(entry.contradicts);
        }
        Self {
            n_nodes: count(cluster.nodes.values().filter(|node| node.exists()).count()),
            n_gpu_nodes: count(cluster.nodes.values().filter(|node| node.shares_gpus()).count()),
            n_pods: count(cluster.fleet.n_owners()),
            n_pending,
            n_assumed,
            n_conservative,
            n_contradicting,
            n_hints: count(cluster.fleet.n_hints()),
            n_failing: count(index.failing.n_ranking_last()),
            n_plugin_away: count(index.plugins.n_left_out()),
            synced: index.synced(),
            gpus: gpu_snapshots(cluster),
            namespaces: namespace_snapshots(cluster),
        }
    }
}

/// Sums by namespace. Names are copied once per namespace, since the caller holds the lock of the index.
fn namespace_snapshots(cluster: &Cluster) -> BTreeMap<String, NamespaceSnapshot> {
    let mut namespaces: BTreeMap<&str, NamespaceSnapshot> = BTreeMap::new();
    for view in cluster.fleet.nodes().flat_map(NodeView::gpus) {
        for holder in &view.holders {
            // Devices of other schedulers' pods are known by kubelet's checkpoint alone, which names no namespace.
            let Some(entry) = cluster.pods.get(holder.owner) else {
                continue;
            };
            let sum = namespaces.entry(&entry.facts.namespace).or_default();
            sum.n_parts += 1;
            sum.bytes = sum.bytes.saturating_add(holder.amounts.memory.bytes_ceil());
            sum.core += u64::from(holder.amounts.core);
        }
    }
    let sums = namespaces.into_iter();
    sums.map(|(namespace, sum)| (namespace.to_owned(), sum)).collect()
}

/// Every GPU, by node and minor.
fn gpu_snapshots(cluster: &Cluster) -> Vec<GpuSnapshot> {
    let typical = view::typical_requests(&cluster.fleet);
    let mut gpus = Vec::new();
    for node in cluster.fleet.nodes() {
        let unit = node.inventory().and_then(|inventory| inventory.unit_bytes);
        for view in node.gpus() {
            // An amount that a pod only may hold is no room for others, and so counts as used.
            let used = view.used.plus(view.suspect);
            gpus.push(GpuSnapshot {
                node: node.name().to_owned(),
                minor: view.device.minor,
                uuid: record_id(view.device.id.as_str()).to_owned(),
                total: view.device.memory_bytes,
                used: used.memory.bytes_ceil(),
                stranded: view::stranded_bytes(&view, &typical, unit),
                core: (used.core, view.device.core),
                slots: (used.slots, view.device.slots),
                n_pods: u32::try_from(view.holders.len()).unwrap_or(u32::MAX),
                healthy: view.device.healthy,
            });
        }
    }
    gpus.sort_by(|a, b| (&a.node, a.minor).cmp(&(&b.node, b.minor)));
    gpus
}
