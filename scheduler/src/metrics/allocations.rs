//! A copy of all GPUs in numbers, and of what pods hold of them.

use std::collections::BTreeMap;

use placement::{DeviceView, NodeId, RequestedGpus};

use crate::index::{Index, Shared, view};
use crate::inventory::record_id;

const NODES_PER_LOCK: usize = 8;
const USUAL_GPUS: usize = 16;

/// All GPUs in numbers, and what pods hold of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllocationSnapshot {
    /// Every GPU, by node and minor.
    pub gpus: Vec<GpuSnapshot>,
    /// The pods that hold parts of GPUs, by namespace.
    pub namespaces: BTreeMap<String, NamespaceSnapshot>,
}

/// The pods of one namespace in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NamespaceSnapshot {
    /// The number of pods that hold parts of GPUs; a pod counts once for each of its GPUs.
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
    /// The free bytes if no typical pod fits on the GPU, or else 0.
    pub stranded: u64,
    /// Core percent that pods hold.
    pub core_held: u32,
    /// Core percent in all.
    pub core_total: u32,
    /// Slots that pods hold.
    pub slots_held: u32,
    /// Slots in all.
    pub slots_total: u32,
    /// Pods that hold a part of it.
    pub n_pods: u32,
    /// True if it takes new pods.
    pub healthy: bool,
    /// True if an annotation of the node closes it to new pods.
    pub closed: bool,
}

impl AllocationSnapshot {
    /// Reads all GPUs, those of a few nodes under each lock: filters wait meanwhile, for 15,000 nodes up to 0.3 s.
    pub fn read(index: &Shared<Index>) -> Self {
        let (nodes, typical) = {
            let index = index.read();
            let nodes: Vec<_> = index.fleet().node_versions().map(|(node, _)| node).collect();
            (nodes, view::typical_requests(index.fleet()))
        };
        let mut snapshot = Self::default();
        for nodes in nodes.chunks(NODES_PER_LOCK) {
            // Before the lock is taken: a list without room for more is copied.
            snapshot.gpus.reserve(NODES_PER_LOCK * USUAL_GPUS);
            snapshot.add(&index.read(), nodes, &typical);
        }
        snapshot.sorted()
    }

    /// Reads all GPUs of an index at one moment.
    pub fn of(index: &Index) -> Self {
        let nodes: Vec<_> = index.fleet().node_versions().map(|(node, _)| node).collect();
        let mut snapshot = Self::default();
        snapshot.add(index, &nodes, &view::typical_requests(index.fleet()));
        snapshot.sorted()
    }

    fn sorted(mut self) -> Self {
        self.gpus
            .sort_by(|a, b| (&a.node, a.minor).cmp(&(&b.node, b.minor)));
        self
    }

    /// Adds the GPUs of these nodes, as far as the nodes still exist.
    fn add(&mut self, index: &Index, nodes: &[NodeId], typical: &[RequestedGpus]) {
        for node in nodes.iter().filter_map(|id| index.fleet().view(*id)) {
            let unit = node.inventory().and_then(|inventory| inventory.unit_bytes);
            for view in node.gpus() {
                // An amount that a pod only may hold is no room for others, and so counts as used.
                let used = view.used.plus(view.suspect);
                self.gpus.push(GpuSnapshot {
                    node: node.name().to_owned(),
                    minor: view.device.minor,
                    uuid: record_id(view.device.id.as_str()).to_owned(),
                    total: view::shown_total(view.device, used.memory.bytes_ceil()),
                    used: used.memory.bytes_ceil(),
                    stranded: view::stranded_bytes(&view, typical, unit),
                    core_held: used.core,
                    core_total: view.device.core,
                    slots_held: used.slots,
                    slots_total: view.device.slots,
                    n_pods: u32::try_from(view.holders.len()).unwrap_or(u32::MAX),
                    healthy: view.device.healthy,
                    closed: view.device.closed,
                });
                self.add_holders(index, &view);
            }
        }
    }

    /// Adds the pods that hold a part of a GPU to the sums of their namespaces.
    fn add_holders(&mut self, index: &Index, gpu: &DeviceView<'_>) {
        for holder in &gpu.holders {
            // Devices of other schedulers' pods are known by kubelet's checkpoint alone, which names no namespace.
            let Some(facts) = index.pod(holder.owner.as_str()) else {
                continue;
            };
            let namespace = &*facts.namespace;
            let sum = match self.namespaces.get_mut(namespace) {
                Some(sum) => sum,
                None => self.namespaces.entry(namespace.to_owned()).or_default(),
            };
            sum.n_parts += 1;
            sum.bytes = sum.bytes.saturating_add(holder.amounts.memory.bytes_ceil());
            sum.core += u64::from(holder.amounts.core);
        }
    }
}
