//! Copies of the state, for metrics and for people: numbers, and lists of nodes with their devices.

use std::collections::BTreeMap;

use placement::{DeviceLocation, Function, NodeView, OtherDeviceView};
use proto::device::ENFORCEMENT;
use proto::memory_unit::MemoryUnit;

use super::cluster::{Cluster, NodeState};
use super::failing::FailingNodes;
use super::node_filter::NodeFilter;
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
    /// Decisions of binds that no watch has shown yet.
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
    /// Core percent that is held, and in all.
    pub core: (u32, u32),
    /// Slots that are held, and in all.
    pub slots: (u32, u32),
    /// Pods that hold a part of it.
    pub n_pods: u32,
    /// True if it takes new pods.
    pub healthy: bool,
}

/// One node for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeShow {
    /// Node name.
    pub name: String,
    /// Bytes of the unit that the numbers are shown in.
    pub unit_bytes: u64,
    /// Name of the unit.
    pub unit: String,
    /// Problems of the node's report.
    pub problems: Vec<String>,
    /// The reason for which it gets no pods, or few, on account of its device plugin.
    pub plugin: Option<String>,
    /// GPUs by minor.
    pub gpus: Vec<GpuShow>,
    /// Devices of other types, by type and minor.
    pub others: Vec<DeviceShow>,
}

/// One device of another type for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceShow {
    /// Its type.
    pub kind: String,
    /// Its ID, empty if it is not known.
    pub id: String,
    /// Minor number.
    pub minor: u32,
    /// True if it takes new pods.
    pub healthy: bool,
    /// The free amount and the total of each resource.
    pub resources: BTreeMap<String, (u64, u64)>,
    /// The number of free virtual functions, and of all.
    pub functions: (usize, usize),
    /// Its location in the machine.
    pub place: DeviceLocation,
}

/// One GPU for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuShow {
    /// Minor number.
    pub minor: u32,
    /// UUID, empty if it is not known.
    pub uuid: String,
    /// True if it takes new pods.
    pub healthy: bool,
    /// Bytes in all.
    pub total: u64,
    /// Bytes that pods hold, or may hold.
    pub used: u64,
    /// Core percent that is held, and in all.
    pub core: (u32, u32),
    /// Slots that are held, and in all.
    pub slots: (u32, u32),
    /// The pods that hold it, by namespace and name.
    pub holders: Vec<HolderShow>,
    /// Its location in the machine.
    pub place: DeviceLocation,
    /// The enforcement level of memory limits, if its node reports one.
    pub enforcement: Option<String>,
}

/// One pod on one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HolderShow {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// UID.
    pub uid: String,
    /// Bytes that it holds, or may hold.
    pub bytes: u64,
    /// True if a bind has decided it and no watch has shown it yet.
    pub assumed: bool,
    /// The reason for which it is counted conservatively.
    pub problem: Option<String>,
}

impl Snapshot {
    /// Counts a cluster.
    pub(super) fn of(
        filter: NodeFilter<'_>,
        failing: &FailingNodes,
        synced: [(&'static str, bool); 3],
    ) -> Self {
        let NodeFilter { cluster, plugins } = filter;
        let count = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
        let pods = || cluster.pods.values();
        Self {
            n_nodes: count(cluster.nodes.values().filter(|node| node.exists()).count()),
            n_gpu_nodes: count(cluster.nodes.values().filter(|node| node.shares_gpus()).count()),
            n_pods: count(cluster.fleet.n_owners()),
            n_pending: count(
                pods()
                    .filter(|entry| {
                        entry.facts.bound.is_none()
                            && entry.assumption.is_none()
                            && cluster.concerns(&entry.facts)
                    })
                    .count(),
            ),
            n_assumed: count(pods().filter(|entry| entry.assumption.is_some()).count()),
            n_conservative: count(pods().filter(|entry| entry.problem.is_some()).count()),
            n_contradicting: count(pods().filter(|entry| entry.contradicts).count()),
            n_hints: count(cluster.fleet.n_hints()),
            n_failing: count(failing.n_last()),
            n_plugin_away: count(plugins.n_out()),
            synced,
            gpus: gpu_snapshots(cluster),
            namespaces: namespace_snapshots(cluster),
        }
    }
}

impl NodeShow {
    /// A node; `None` if there is no such node.
    pub(super) fn of(filter: NodeFilter<'_>, name: &str) -> Option<Self> {
        let cluster = filter.cluster;
        let state = cluster.nodes.get(name).filter(|state| state.exists())?;
        let view = cluster
            .fleet
            .node_id(name)
            .and_then(|node| cluster.fleet.view(node));
        let published = view
            .and_then(NodeView::inventory)
            .and_then(|inventory| inventory.unit_bytes);
        let unit_bytes = published.unwrap_or(MemoryUnit::MIB.bytes()).max(1);
        Some(Self {
            name: name.to_owned(),
            unit_bytes,
            unit: unit_name(state, unit_bytes),
            problems: state.problems.clone(),
            plugin: filter.plugin_problem(name),
            gpus: view
                .map(|view| view.gpus().iter().map(|gpu| GpuShow::of(cluster, gpu)).collect())
                .unwrap_or_default(),
            others: view.map(show_others).unwrap_or_default(),
        })
    }
}

impl GpuShow {
    fn of(cluster: &Cluster, view: &placement::GpuView<'_>) -> Self {
        let used = view.used.plus(view.suspect);
        let mut holders: Vec<HolderShow> = view
            .holders
            .iter()
            .map(|holder| HolderShow::of(cluster, holder))
            .collect();
        holders.sort_by(|a, b| (&a.namespace, &a.name, &a.uid).cmp(&(&b.namespace, &b.name, &b.uid)));
        Self {
            minor: view.gpu.minor,
            uuid: record_id(view.gpu.uuid.as_str()).to_owned(),
            healthy: view.gpu.healthy,
            total: view.gpu.memory_bytes,
            used: used.memory.bytes_ceil(),
            core: (used.core, view.gpu.core),
            slots: (used.slots, view.gpu.slots),
            holders,
            place: view.gpu.attributes.location.clone().unwrap_or_default(),
            enforcement: view
                .gpu
                .attributes
                .labels
                .get(ENFORCEMENT)
                .map(ToString::to_string),
        }
    }
}

impl HolderShow {
    fn of(cluster: &Cluster, holder: &placement::HolderView<'_>) -> Self {
        let entry = cluster.pods.get(holder.owner);
        Self {
            namespace: entry
                .map(|entry| entry.facts.namespace.to_string())
                .unwrap_or_default(),
            name: entry
                .map(|entry| entry.facts.name.to_string())
                .unwrap_or_default(),
            uid: holder.owner.to_string(),
            bytes: holder.amounts.memory.bytes_ceil(),
            assumed: entry.is_some_and(|entry| entry.assumption.is_some()),
            problem: entry
                .and_then(|entry| entry.problem.as_deref())
                .map(str::to_owned),
        }
    }
}

/// Sums by namespace. Names are copied once per namespace, since the caller holds the lock of the index.
fn namespace_snapshots(cluster: &Cluster) -> BTreeMap<String, NamespaceSnapshot> {
    let mut namespaces: BTreeMap<String, NamespaceSnapshot> = BTreeMap::new();
    for node in cluster.fleet.nodes() {
        for view in node.gpus() {
            for holder in &view.holders {
                let Some(entry) = cluster.pods.get(holder.owner) else {
                    continue;
                };
                let name: &str = &entry.facts.namespace;
                if !namespaces.contains_key(name) {
                    namespaces.insert(name.to_owned(), NamespaceSnapshot::default());
                }
                if let Some(sum) = namespaces.get_mut(name) {
                    sum.n_parts += 1;
                    sum.bytes = sum.bytes.saturating_add(holder.amounts.memory.bytes_ceil());
                    sum.core += u64::from(holder.amounts.core);
                }
            }
        }
    }
    namespaces
}

fn gpu_snapshots(cluster: &Cluster) -> Vec<GpuSnapshot> {
    let mut gpus: Vec<GpuSnapshot> = cluster.fleet.nodes().flat_map(count_gpus).collect();
    gpus.sort_by(|a, b| (&a.node, a.minor).cmp(&(&b.node, b.minor)));
    gpus
}

fn show_others(node: NodeView<'_>) -> Vec<DeviceShow> {
    node.other_devices()
        .iter()
        .map(|device| show_device(node, device))
        .collect()
}

fn show_device(node: NodeView<'_>, view: &OtherDeviceView<'_>) -> DeviceShow {
    let free = |resource| view.free.get(resource).copied().unwrap_or_default();
    let resources = view.device.resources.iter();
    let held = || {
        node.held()
            .flat_map(|held| &held.holdings.others)
            .filter(|held| held.kind == *view.kind)
    };
    let functions = || {
        view.device
            .attributes
            .functions
            .iter()
            .flat_map(|group| &group.functions)
    };
    let is_free = |function: &&Function| held().all(|held| !held.functions.contains(&function.id));
    DeviceShow {
        kind: view.kind.to_string(),
        id: record_id(view.device.id.as_str()).to_owned(),
        minor: view.device.minor,
        healthy: view.device.healthy,
        resources: resources
            .map(|(resource, total)| (resource.to_string(), (free(resource), *total)))
            .collect(),
        functions: (functions().filter(is_free).count(), functions().count()),
        place: view.device.attributes.location.clone().unwrap_or_default(),
    }
}

fn count_gpus(node: NodeView<'_>) -> Vec<GpuSnapshot> {
    let mut gpus = Vec::new();
    for view in node.gpus() {
        let used = view.used.plus(view.suspect);
        gpus.push(GpuSnapshot {
            node: node.name().to_owned(),
            minor: view.gpu.minor,
            uuid: record_id(view.gpu.uuid.as_str()).to_owned(),
            total: view.gpu.memory_bytes,
            used: used.memory.bytes_ceil(),
            core: (used.core, view.gpu.core),
            slots: (used.slots, view.gpu.slots),
            n_pods: u32::try_from(view.holders.len()).unwrap_or(u32::MAX),
            healthy: view.gpu.healthy,
        });
    }
    gpus
}

fn unit_name(state: &NodeState, unit_bytes: u64) -> String {
    if state.is_opaque() {
        return "unknown".to_owned();
    }
    MemoryUnit::from_bytes(unit_bytes).map_or_else(|| unit_bytes.to_string(), |unit| unit.to_string())
}
