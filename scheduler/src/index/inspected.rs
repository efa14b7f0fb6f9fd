//! The view of one node for people: its devices and the pods that hold shares of them.
//!
//! Numbers named `…GPU` are whole memory units of the node; the exact bytes stand beside them.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use placement::{DeviceLocation, GpuView, NodeView, OtherDeviceView};
use proto::device::ENFORCEMENT;
use proto::memory_unit::MemoryUnit;
use serde::Serialize;

use super::cluster::Cluster;
use super::node_filter::NodeFilter;
use crate::inventory::record_id;

/// One node, in the old extender's JSON with more fields behind the old ones.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct InspectedNode {
    name: String,
    #[serde(rename = "totalGPU")]
    total_gpu: u64,
    #[serde(rename = "usedGPU")]
    used_gpu: u64,
    devs: Vec<InspectedGpu>,
    unit: String,
    unit_bytes: u64,
    /// Devices of other types than GPU.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    other_devices: Vec<InspectedDevice>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    problems: Vec<String>,
    /// The reason that the node is offered to no pods, or few, because of its device plugin.
    #[serde(skip_serializing_if = "Option::is_none")]
    plugin: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct InspectedDevice {
    #[serde(rename = "type")]
    kind: String,
    id: String,
    minor: u32,
    healthy: bool,
    resources: BTreeMap<String, InspectedAmount>,
    /// Virtual functions, if it has any.
    #[serde(skip_serializing_if = "Option::is_none")]
    virtual_functions: Option<InspectedAmount>,
    #[serde(flatten)]
    place: InspectedPlace,
}

/// The place of a device, as far as its node reports it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct InspectedPlace {
    #[serde(skip_serializing_if = "Option::is_none")]
    numa_node: Option<u32>,
    #[serde(rename = "pcieID", skip_serializing_if = "Option::is_none")]
    pcie_id: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct InspectedAmount {
    free: u64,
    total: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct InspectedGpu {
    id: u32,
    #[serde(rename = "totalGPU")]
    total_gpu: u64,
    #[serde(rename = "usedGPU")]
    used_gpu: u64,
    pods: Vec<InspectedPod>,
    uuid: String,
    healthy: bool,
    total_bytes: u64,
    used_bytes: u64,
    total_core: u32,
    used_core: u32,
    total_slots: u32,
    used_slots: u32,
    #[serde(flatten)]
    place: InspectedPlace,
    /// The enforcement level of memory limits: `driver`, `hami-core` or `none`.
    #[serde(skip_serializing_if = "Option::is_none")]
    enforcement: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct InspectedPod {
    name: String,
    namespace: String,
    #[serde(rename = "usedGPU")]
    used_gpu: u64,
    uid: String,
    used_bytes: u64,
    /// True if a bind has decided this and no watch has shown the binding yet.
    assumed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

impl InspectedNode {
    /// A node; `None` if there is no such node.
    pub(super) fn of(filter: NodeFilter<'_>, name: &str) -> Option<Self> {
        let cluster = filter.cluster;
        let state = cluster.nodes.get(name).filter(|state| state.exists())?;
        let view = cluster.view(name);
        let inventory = view.and_then(NodeView::inventory);
        let published = inventory.and_then(|inventory| inventory.unit_bytes);
        let unit_bytes = published.unwrap_or(MemoryUnit::MIB.bytes()).max(1);
        let (mut devs, mut other_devices) = (Vec::new(), Vec::new());
        if let Some(view) = view {
            for gpu in view.gpus() {
                devs.push(InspectedGpu::new(cluster, &gpu, unit_bytes));
            }
            for device in view.other_devices() {
                other_devices.push(InspectedDevice::new(view, &device));
            }
        }
        let unit = match MemoryUnit::from_bytes(unit_bytes) {
            _ if state.is_opaque() => "unknown".to_owned(),
            Some(unit) => unit.to_string(),
            None => unit_bytes.to_string(),
        };
        Some(Self {
            name: name.to_owned(),
            total_gpu: devs.iter().map(|gpu| gpu.total_gpu).sum(),
            used_gpu: devs.iter().map(|gpu| gpu.used_gpu).sum(),
            devs,
            unit,
            unit_bytes,
            other_devices,
            problems: state.problems.clone(),
            plugin: filter.plugin_problem(name),
        })
    }
}

impl InspectedGpu {
    fn new(cluster: &Cluster, view: &GpuView<'_>, unit: u64) -> Self {
        let used = view.used.plus(view.suspect);
        let (total_bytes, used_bytes) = (view.gpu.memory_bytes, used.memory.bytes_ceil());
        let used_gpu = used_units(used_bytes, total_bytes, unit);
        let mut pods: Vec<InspectedPod> = Vec::with_capacity(view.holders.len());
        for holder in &view.holders {
            let entry = cluster.pods.get(holder.owner);
            let facts = entry.map(|entry| &entry.facts);
            pods.push(InspectedPod {
                name: facts.map(|facts| facts.name.to_string()).unwrap_or_default(),
                namespace: facts.map(|facts| facts.namespace.to_string()).unwrap_or_default(),
                used_gpu: 0,
                uid: holder.owner.to_string(),
                used_bytes: holder.amounts.memory.bytes_ceil(),
                assumed: entry.is_some_and(|entry| entry.assumption.is_some()),
                problem: entry.and_then(|entry| entry.problem.as_deref().map(str::to_owned)),
            });
        }
        pods.sort_by(|a, b| (&a.namespace, &a.name, &a.uid).cmp(&(&b.namespace, &b.name, &b.uid)));
        // The units of the pods add up to those of the GPU, as users of the old tools expect.
        let bytes: Vec<u64> = pods.iter().map(|pod| pod.used_bytes).collect();
        for (pod, units) in pods.iter_mut().zip(shares(&bytes, used_gpu, unit)) {
            pod.used_gpu = units;
        }
        Self {
            id: view.gpu.minor,
            total_gpu: total_bytes / unit,
            used_gpu,
            pods,
            uuid: record_id(view.gpu.uuid.as_str()).to_owned(),
            healthy: view.gpu.healthy,
            total_bytes,
            used_bytes,
            total_core: view.gpu.core,
            used_core: used.core,
            total_slots: view.gpu.slots,
            used_slots: used.slots,
            place: InspectedPlace::new(view.gpu.attributes.location.as_ref()),
            enforcement: view
                .gpu
                .attributes
                .labels
                .get(ENFORCEMENT)
                .map(ToString::to_string),
        }
    }
}

impl InspectedDevice {
    fn new(node: NodeView<'_>, view: &OtherDeviceView<'_>) -> Self {
        let mut resources = BTreeMap::new();
        for (resource, total) in &view.device.resources {
            let free = view.free.get(resource).copied().unwrap_or_default();
            let amount = InspectedAmount { free, total: *total };
            resources.insert(resource.to_string(), amount);
        }
        let mut functions = InspectedAmount { free: 0, total: 0 };
        let groups = view.device.attributes.functions.iter();
        for function in groups.flat_map(|group| &group.functions) {
            let mut held = node.held().flat_map(|held| &held.holdings.others);
            let is_held = held.any(|held| held.kind == *view.kind && held.functions.contains(&function.id));
            functions.total += 1;
            functions.free += u64::from(!is_held);
        }
        Self {
            kind: view.kind.to_string(),
            id: record_id(view.device.id.as_str()).to_owned(),
            minor: view.device.minor,
            healthy: view.device.healthy,
            resources,
            virtual_functions: Some(functions).filter(|functions| functions.total > 0),
            place: InspectedPlace::new(view.device.attributes.location.as_ref()),
        }
    }
}

impl InspectedPlace {
    fn new(location: Option<&DeviceLocation>) -> Self {
        Self {
            numa_node: location.and_then(|location| location.numa),
            pcie_id: location.and_then(|location| Some(location.switch.as_ref()?.to_string())),
        }
    }
}

/// The used bytes of a GPU in whole units: rounded up, though not above the whole units of its total, unless the GPU is
/// overcommitted.
fn used_units(used: u64, total: u64, unit: u64) -> u64 {
    let rounded_up = used.div_ceil(unit);
    if used <= total {
        rounded_up.min(total / unit)
    } else {
        rounded_up
    }
}

/// The bytes of each pod on a GPU in whole units, which add up to the `used` units of the GPU: rounded down, and the units that
/// this leaves go to the pods with the largest remainders.
fn shares(bytes: &[u64], used: u64, unit: u64) -> Vec<u64> {
    let mut shares: Vec<u64> = bytes.iter().map(|bytes| bytes / unit).collect();
    let left = used.saturating_sub(shares.iter().sum());
    let mut remainders: Vec<(u64, &mut u64)> = Vec::new();
    for (bytes, share) in bytes.iter().zip(&mut shares) {
        if bytes % unit > 0 {
            remainders.push((bytes % unit, share));
        }
    }
    remainders.sort_by_key(|(remainder, _)| Reverse(*remainder));
    for (_, share) in remainders
        .into_iter()
        .take(usize::try_from(left).unwrap_or(usize::MAX))
    {
        *share += 1;
    }
    shares
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    /// A GPU of 159 bytes in units of 10.
    #[rstest]
    #[case::nothing(&[], 0, &[])]
    #[case::whole_units(&[20, 30], 5, &[2, 3])]
    #[case::one_byte(&[1], 1, &[1])]
    #[case::full_to_the_last_byte(&[159], 15, &[15])]
    #[case::full_by_thirds(&[53, 53, 53], 15, &[5, 5, 5])]
    #[case::the_largest_rest_first(&[12, 14, 19], 5, &[1, 2, 2])]
    #[case::overcommitted(&[159, 20], 18, &[16, 2])]
    fn rounded(#[case] bytes: &[u64], #[case] used: u64, #[case] expected: &[u64]) {
        let found = used_units(bytes.iter().sum(), 159, 10);
        assert_eq!((found, shares(bytes, found, 10).as_slice()), (used, expected));
    }

    proptest! {
        #[test]
        fn used_amounts_are_shown_within_the_totals(unit in 1_u64..50, total in 0_u64..1000, parts in prop::collection::vec(0_u64..300, 0..8)) {
            let used: u64 = parts.iter().sum();
            let shown = used_units(used, total, unit);
            let shares = shares(&parts, shown, unit);
            prop_assert!(shares.iter().sum::<u64>() <= shown);
            prop_assert!(used > total || shown <= total / unit);
            prop_assert!(shown.abs_diff(used / unit) <= 1 && shares.iter().zip(&parts).all(|(share, part)| share.abs_diff(part / unit) <= 1));
        }
    }
}
