//! Nodes and pods in the terms of the read API.

use std::collections::BTreeMap;

use placement::{Amounts, Device, DeviceView, Fleet, HolderView, NodeId, NodeView, RequestedGpus};
use proto::device::{ENFORCEMENT, GPU_MODEL_LABEL};
use proto::memory_text::{memory_text, units_text};
use proto::read_api::{Amount, FreeAmount, Gpu, Holder, Node, OtherDevice, PendingPod};
use proto::request::{Dialect, GpuRequest, Memory};

use super::cluster::Cluster;
use super::node_filter::NodeFilter;
use super::node_state::NodeState;
use super::resource_demand::requests_devices;
use crate::accounting::ParsedRequest;
use crate::inventory::record_id;

/// A request is typical if at least this part of the expected pods make it, in thousandths.
const TYPICAL_PERMILLE: u32 = 20;

/// The requests of typical pods, by which free memory counts as usable.
pub(crate) fn typical_requests(fleet: &Fleet) -> Vec<RequestedGpus> {
    let mut typical = Vec::new();
    for (profile, permille) in fleet.expected_workload() {
        let takes_gpus = matches!(profile.gpus, RequestedGpus::Share(_) | RequestedGpus::Whole(_));
        if permille >= TYPICAL_PERMILLE && takes_gpus && !typical.contains(&profile.gpus) {
            typical.push(profile.gpus);
        }
    }
    typical
}

/// All nodes, in the order of their names.
pub(crate) fn nodes_by_name(fleet: &Fleet) -> Vec<NodeId> {
    let mut nodes: Vec<NodeView<'_>> = fleet.nodes().collect();
    nodes.sort_unstable_by_key(|node| node.name());
    nodes.into_iter().map(NodeView::id).collect()
}

/// A node in the terms of the read API; `None` if it shares no GPUs and has no problem.
pub(crate) fn listed_node(filter: NodeFilter<'_>, id: NodeId, typical: &[RequestedGpus]) -> Option<Node> {
    node(filter, id, typical).filter(|node| !node.gpus.is_empty() || !node.problems.is_empty())
}

/// A node in the terms of the read API; `None` if there is no Node object. `typical` decides which free memory is stranded.
pub(super) fn node(filter: NodeFilter<'_>, id: NodeId, typical: &[RequestedGpus]) -> Option<Node> {
    let cluster = filter.cluster;
    let view = cluster.fleet.view(id)?;
    let state = cluster.node(view.name()).filter(|state| state.exists())?;
    let unit = view.inventory().and_then(|inventory| inventory.unit_bytes);
    let gpus = view.gpus().into_iter();
    let other_devices = view.other_devices().into_iter();
    Some(Node {
        name: view.name().to_owned(),
        model: model(state, view).unwrap_or_default(),
        unit,
        problems: state.problems.clone(),
        plugin: filter.plugin_problem(view.name()),
        gpus: gpus.map(|view| gpu(cluster, &view, typical, unit)).collect(),
        other_devices: other_devices.map(|device| other_device(view, &device)).collect(),
    })
}

fn other_device(node: NodeView<'_>, view: &DeviceView<'_>) -> OtherDevice {
    let mut resources = BTreeMap::new();
    for (resource, total) in &view.device.resources {
        let free = view.free_resources.get(resource).copied().unwrap_or_default();
        resources.insert(resource.to_string(), FreeAmount { free, total: *total });
    }
    let mut functions = FreeAmount::default();
    for function in view.device.attributes.all_functions() {
        let mut held = node.held().flat_map(|held| &held.holdings.parts);
        let is_held =
            held.any(|held| held.kind == *view.kind && held.virtual_functions.contains(&function.id));
        functions.total += 1;
        functions.free += u64::from(!is_held);
    }
    let location = view.device.attributes.location.as_ref();
    OtherDevice {
        kind: view.kind.to_string(),
        id: record_id(view.device.id.as_str()).to_owned(),
        minor: view.device.minor,
        healthy: view.device.healthy,
        resources,
        virtual_functions: (functions.total > 0).then_some(functions),
        numa: location.and_then(|location| location.numa),
        pcie: location.and_then(|location| location.switch.as_ref().map(ToString::to_string)),
    }
}

/// The model that a node's label, or else its first GPU, names.
fn model(state: &NodeState, view: NodeView<'_>) -> Option<String> {
    if let Some(node) = &state.node
        && let Some(labels) = &node.metadata.labels
        && let Some(model) = labels.get(GPU_MODEL_LABEL)
    {
        return Some(model.clone());
    }
    let gpu = view.inventory()?.gpus.first()?;
    Some(gpu.attributes.labels.get(GPU_MODEL_LABEL)?.to_string())
}

/// The free memory of a GPU on which no typical pod fits; 0 if one does, if no pods are typical, or if the GPU is unhealthy or
/// closed.
pub(crate) fn stranded_bytes(view: &DeviceView<'_>, typical: &[RequestedGpus], unit: Option<u64>) -> u64 {
    let is_usable = |request: &RequestedGpus| has_room(*request, view.free, view.device.total(), unit);
    if !view.device.is_open() || typical.is_empty() || typical.iter().any(is_usable) {
        return 0;
    }
    view.free.memory.bytes_floor()
}

/// The total that is shown of a GPU's memory while pods hold `used` bytes of it. Pods that were placed before the driver's own
/// memory was withheld may hold a part of that memory, which is added to the total as long as they hold it.
pub(crate) fn shown_total(gpu: &Device, used: u64) -> u64 {
    gpu.memory_bytes.max(used.min(gpu.memory_with_reserved()))
}

/// A GPU in the terms of the read API; `unit` is the memory unit of its node.
fn gpu(cluster: &Cluster, view: &DeviceView<'_>, typical: &[RequestedGpus], unit: Option<u64>) -> Gpu {
    let gpu = &view.device;
    let location = gpu.attributes.location.as_ref();
    // An amount that a pod may hold (`suspect`) counts as held: other pods do not get it.
    let used = view.used.plus(view.suspect);
    let used_bytes = used.memory.bytes_ceil();
    let amount = |total: u64, allocated: u64| Amount { total, allocated };
    let mut holders = Vec::new();
    for holder in &view.holders {
        holders.push(show_holder(cluster, holder, unit));
    }
    // The engine's order of holders depends on earlier changes; equal states must look equal to clients that compare them.
    holders.sort_by(|a, b| (&a.namespace, &a.name, &a.uid).cmp(&(&b.namespace, &b.name, &b.uid)));
    Gpu {
        minor: gpu.minor,
        uuid: record_id(gpu.id.as_str()).to_owned(),
        healthy: gpu.healthy,
        closed: gpu.closed,
        memory: amount(shown_total(gpu, used_bytes), used_bytes),
        stranded: stranded_bytes(view, typical, unit),
        core: amount(gpu.core.into(), used.core.into()),
        sharers: amount(gpu.slots.into(), used.slots.into()),
        numa: location.and_then(|location| location.numa),
        pcie: location.and_then(|location| location.switch.as_ref().map(ToString::to_string)),
        enforcement: gpu.attributes.labels.get(ENFORCEMENT).map(ToString::to_string),
        // `read_api::memory_use` adds it, as the node's plugin measures it.
        used: None,
        holders,
    }
}

/// Returns true if one GPU with these free amounts has room for its part of a request.
fn has_room(request: RequestedGpus, free: Amounts, total: Amounts, unit: Option<u64>) -> bool {
    match request {
        RequestedGpus::Share(share) => {
            let (core, slots) = (share.core, share.slots);
            // `None` for memory units on a node whose unit is not known.
            let memory = share.memory.on(total.memory, unit);
            memory.is_some_and(|memory| Amounts { memory, core, slots }.within(free))
        }
        // A whole GPU takes no slots, so that only memory and compute have to be free.
        RequestedGpus::Whole(_) => free.memory == total.memory && free.core == total.core,
        RequestedGpus::All { .. } | RequestedGpus::Nothing => false,
    }
}

fn show_holder(cluster: &Cluster, holder: &HolderView<'_>, unit: Option<u64>) -> Holder {
    let mut shown = Holder {
        uid: holder.owner.to_string(),
        memory: holder.amounts.memory.bytes_ceil(),
        core: holder.amounts.core.into(),
        ..Holder::default()
    };
    if let Some(entry) = cluster.pods.get(holder.owner) {
        shown.namespace = entry.facts.namespace.to_string();
        shown.name = entry.facts.name.to_string();
        shown.asked = asked(&entry.facts.request, unit);
        shown.assumed = entry.assumption.is_some();
        shown.problem = entry.problem.as_deref().map(str::to_owned);
        shown.gone = cluster.gone_gpus(holder.owner.as_str());
    }
    shown
}

/// The GPUs on which a bound pod is counted, by minor, with the bytes of memory.
pub(crate) fn counted_on(filter: NodeFilter<'_>, node: &str, uid: &str) -> BTreeMap<u32, u64> {
    let mut counted = BTreeMap::new();
    let gpus = filter.cluster.view(node).map(NodeView::gpus);
    for gpu in gpus.unwrap_or_default() {
        for holder in gpu.holders.iter().filter(|holder| holder.owner.as_str() == uid) {
            *counted.entry(gpu.device.minor).or_default() += holder.amounts.memory.bytes_ceil();
        }
    }
    counted
}

/// The number of pods that wait for a node, and the first of them in the order of UIDs, `most` at most.
pub(crate) fn pending_pods(filter: NodeFilter<'_>, most: usize) -> (usize, Vec<PendingPod>) {
    let cluster = filter.cluster;
    let (mut total, mut pods) = (0, Vec::new());
    for uid in &cluster.unbound {
        let Some(entry) = cluster.pods.get(uid) else {
            continue;
        };
        // A pod whose binding is under way is shown on its node.
        if entry.assumption.is_some() || !requests_devices(cluster, &entry.facts) {
            continue;
        }
        total += 1;
        if pods.len() < most {
            pods.push(PendingPod {
                namespace: entry.facts.namespace.to_string(),
                name: entry.facts.name.to_string(),
                uid: uid.to_string(),
                asked: asked(&entry.facts.request, cluster.common_unit()),
                kind: entry.kind,
            });
        }
    }
    (total, pods)
}

/// The request of a pod in a few words, such as `8 GiB, 50 % core, over 2 GPUs`; `unit` is the size of a memory unit in bytes, if
/// it is known.
pub(crate) fn asked(request: &ParsedRequest, unit: Option<u64>) -> String {
    let request = match request {
        ParsedRequest::Valid(request) => request,
        ParsedRequest::Invalid(error, _) => return error.to_string(),
    };
    let mut parts = Vec::new();
    if let Some(gpus) = &request.gpus {
        parts.push(asked_gpus(gpus, unit));
    }
    for (resource, amount) in &request.others {
        parts.push(format!("{resource} {amount}"));
    }
    parts.join(", ")
}

fn asked_gpus(gpus: &GpuRequest, unit: Option<u64>) -> String {
    let mut text = match (gpus.dialect, gpus.memory) {
        (Dialect::AllDevices, _) => return "sight of all GPUs".to_owned(),
        (Dialect::Vendor, _) if gpus.devices == 1 => return "1 whole GPU".to_owned(),
        (Dialect::Vendor, _) => return format!("{} whole GPUs", gpus.devices),
        (_, Memory::Units(units)) => units_text(units, unit),
        (_, Memory::Bytes(bytes)) => memory_text(bytes),
        (_, Memory::Ratio(ratio)) => format!("{ratio} % of GPU memory"),
    };
    if gpus.core > 0 {
        text = format!("{text}, {} % core", gpus.core);
    }
    if gpus.devices > 1 {
        // The amounts of a request are those of all its GPUs together.
        text = format!("{text}, over {} GPUs", gpus.devices);
    }
    text
}
