//! The state in numbers and in lists, copied out for metrics and for people.

use std::collections::BTreeMap;

use placement::{DeviceLocation, Function, NodeView, OtherDeviceView, OwnerId};
use proto::memory_unit::MemoryUnit;

use super::{Index, NodeState};
use crate::inventory::record_id;

/// The state in numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// Nodes that exist.
    pub n_nodes: u64,
    /// Nodes with GPUs to share.
    pub n_gpu_nodes: u64,
    /// Pods that hold a share.
    pub n_pods: u64,
    /// Unbound pods that ask for a share.
    pub n_pending: u64,
    /// Decisions that are not seen yet.
    pub n_assumed: u64,
    /// Pods whose devices are not known for sure.
    pub n_conservative: u64,
    /// Pods whose record says more than they ask for.
    pub n_contradicting: u64,
    /// Hints that are out.
    pub n_hints: u64,
    /// Nodes that are left out because pods failed there.
    pub n_failing: u64,
    /// Nodes that no pod is sent to because their device plugin is away.
    pub n_plugin_away: u64,
    /// Each kind of object and whether all of it has been seen.
    pub synced: [(&'static str, bool); 3],
    /// Every GPU.
    pub gpus: Vec<GpuCensus>,
}

/// One GPU in numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuCensus {
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
}

/// One node for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeShow {
    /// Node name.
    pub name: String,
    /// Bytes of the unit that the numbers are shown in.
    pub unit_bytes: u64,
    /// What the unit is called.
    pub unit: String,
    /// What in the node's report cannot be used.
    pub problems: Vec<String>,
    /// The reason for which no pods, or few, are sent to it on account of its device plugin.
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
    /// Whether it takes new pods.
    pub healthy: bool,
    /// What is free and what there is in all, by resource.
    pub resources: BTreeMap<String, (u64, u64)>,
    /// Virtual functions that nobody holds, and all.
    pub functions: (usize, usize),
    /// Where it sits.
    pub place: DeviceLocation,
}

/// One GPU for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuShow {
    /// Minor number.
    pub minor: u32,
    /// UUID, empty if it is not known.
    pub uuid: String,
    /// Whether it takes new pods.
    pub healthy: bool,
    /// Bytes in all.
    pub total: u64,
    /// Bytes that pods hold, or may hold.
    pub used: u64,
    /// Core percent that is held, and in all.
    pub core: (u32, u32),
    /// Places for sharers that are held, and in all.
    pub slots: (u32, u32),
    /// Who holds it, by namespace and name.
    pub holders: Vec<HolderShow>,
    /// Where it sits.
    pub place: DeviceLocation,
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
    /// Whether a bind has decided it and the watch has not shown it yet.
    pub assumed: bool,
    /// Why it is counted conservatively.
    pub problem: Option<String>,
}

impl Index {
    /// The state in numbers.
    pub fn census(&self) -> Census {
        let count = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
        let pods = || self.pods.values();
        Census {
            n_nodes: count(self.nodes.values().filter(|node| node.exists()).count()),
            n_gpu_nodes: count(self.nodes.values().filter(|node| node.shares_gpus()).count()),
            n_pods: count(self.fleet.n_owners()),
            n_pending: count(
                pods()
                    .filter(|entry| {
                        entry.facts.bound.is_none()
                            && entry.assumption.is_none()
                            && self.concerns(&entry.facts)
                    })
                    .count(),
            ),
            n_assumed: count(pods().filter(|entry| entry.assumption.is_some()).count()),
            n_conservative: count(pods().filter(|entry| entry.problem.is_some()).count()),
            n_contradicting: count(pods().filter(|entry| entry.contradicts).count()),
            n_hints: count(self.fleet.n_hints()),
            n_failing: count(self.failing.n_last()),
            n_plugin_away: count(self.plugins.n_out()),
            synced: self.synced(),
            gpus: self.gpu_census(),
        }
    }

    fn gpu_census(&self) -> Vec<GpuCensus> {
        let mut gpus: Vec<GpuCensus> = self.fleet.nodes().flat_map(count_gpus).collect();
        gpus.sort_by(|a, b| (&a.node, a.minor).cmp(&(&b.node, b.minor)));
        gpus
    }

    /// Names of nodes that share GPUs or have a problem: those that come first behind `after`, no more than `most`, sorted.
    pub fn gpu_nodes_after(&self, after: Option<&str>, most: usize) -> Vec<String> {
        let is_behind = |name: &str| after.is_none_or(|after| name > after);
        let sharing = self
            .nodes
            .iter()
            .filter(|(_, state)| state.shares_gpus() || !state.problems.is_empty());
        let mut names: Vec<&str> = sharing
            .map(|(name, _)| &**name)
            .filter(|name| is_behind(name))
            .collect();
        if most < names.len() {
            names.select_nth_unstable(most);
            names.truncate(most);
        }
        names.sort_unstable();
        names.into_iter().map(str::to_owned).collect()
    }

    /// Names of nodes that have devices of any type, in no order.
    pub fn device_nodes(&self) -> Vec<Box<str>> {
        self.nodes
            .iter()
            .filter(|(_, state)| state.has_devices())
            .map(|(name, _)| name.clone())
            .collect()
    }

    /// One node for people; `None` if there is no such node.
    pub fn show_node(&self, name: &str) -> Option<NodeShow> {
        let state = self.nodes.get(name).filter(|state| state.exists())?;
        let view = self.fleet.node_id(name).and_then(|node| self.fleet.view(node));
        let published = view
            .and_then(NodeView::inventory)
            .and_then(|inventory| inventory.unit_bytes);
        let unit_bytes = published.unwrap_or(MemoryUnit::MIB.bytes()).max(1);
        Some(NodeShow {
            name: name.to_owned(),
            unit_bytes,
            unit: unit_name(state, unit_bytes),
            problems: state.problems.clone(),
            plugin: self.plugin_problem(name),
            gpus: view
                .map(|view| view.gpus().iter().map(|gpu| self.show_gpu(gpu)).collect())
                .unwrap_or_default(),
            others: view.map(show_others).unwrap_or_default(),
        })
    }

    fn show_gpu(&self, view: &placement::GpuView<'_>) -> GpuShow {
        let used = view.used.plus(view.suspect);
        let mut holders: Vec<HolderShow> = view
            .holders
            .iter()
            .map(|holder| self.show_holder(holder))
            .collect();
        holders.sort_by(|a, b| (&a.namespace, &a.name, &a.uid).cmp(&(&b.namespace, &b.name, &b.uid)));
        GpuShow {
            minor: view.gpu.minor,
            uuid: record_id(view.gpu.uuid.as_str()).to_owned(),
            healthy: view.gpu.healthy,
            total: view.gpu.memory_bytes,
            used: used.memory.bytes_ceil(),
            core: (used.core, view.gpu.core),
            slots: (used.slots, view.gpu.slots),
            holders,
            place: view.gpu.attributes.location.clone().unwrap_or_default(),
        }
    }

    fn show_holder(&self, holder: &placement::HolderView<'_>) -> HolderShow {
        let entry = self.pods.get(holder.owner);
        HolderShow {
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

    /// Whether a pod's decision is open, and what is doubtful about the pod.
    pub fn standing(&self, owner: &OwnerId) -> (bool, Option<&str>) {
        let entry = self.pods.get(owner);
        (
            entry.is_some_and(|entry| entry.assumption.is_some()),
            entry.and_then(|entry| entry.problem.as_deref()),
        )
    }
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

fn count_gpus(node: NodeView<'_>) -> Vec<GpuCensus> {
    let gpu = |gpu: placement::GpuView<'_>| GpuCensus {
        node: node.name().to_owned(),
        minor: gpu.gpu.minor,
        uuid: record_id(gpu.gpu.uuid.as_str()).to_owned(),
        total: gpu.gpu.memory_bytes,
        used: gpu.used.plus(gpu.suspect).memory.bytes_ceil(),
    };
    node.gpus().into_iter().map(gpu).collect()
}

fn unit_name(state: &NodeState, unit_bytes: u64) -> String {
    if state.is_opaque() {
        return "unknown".to_owned();
    }
    MemoryUnit::from_bytes(unit_bytes).map_or_else(|| unit_bytes.to_string(), |unit| unit.to_string())
}
