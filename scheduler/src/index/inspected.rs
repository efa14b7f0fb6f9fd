//! The view of one node for people: its devices and the pods that hold shares of them.
//!
//! Numbers named `…GPU` are whole memory units of the node; the exact bytes stand beside them.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use placement::{DeviceLocation, DeviceView, NodeView};
use proto::memory_unit::MemoryUnit;
use serde::Serialize;

use super::cluster::Cluster;
use super::{Index, view};
use crate::inventory::record_id;

/// One node, in the JSON of gpushare-scheduler-extender with more fields behind those of that project.
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
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
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
    total_core: u64,
    used_core: u64,
    total_slots: u64,
    used_slots: u64,
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
    /// True if a bind has chosen the node and no watch has shown the binding yet.
    assumed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

impl InspectedNode {
    /// A node; `None` if there is no such node.
    pub(super) fn of(index: &Index, name: &str) -> Option<Self> {
        let cluster = &index.cluster;
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
            plugin: index.filter().plugin_problem(name),
        })
    }
}

impl InspectedGpu {
    /// A GPU for people, with its amounts in bytes and in units of `unit` bytes.
    fn new(cluster: &Cluster, view: &DeviceView<'_>, unit: u64) -> Self {
        // Stranded memory, which alone depends on typical requests, is not part of this view.
        let gpu = view::gpu(cluster, view, &[], None);
        let (total_bytes, used_bytes) = (gpu.memory.total, gpu.memory.allocated);
        let used_gpu = used_units(used_bytes, total_bytes, unit);
        let bytes: Vec<u64> = gpu.holders.iter().map(|holder| holder.memory).collect();
        let mut pods = Vec::with_capacity(gpu.holders.len());
        // The units of the pods add up to those of the GPU, as users of the old tools expect.
        for (holder, used_gpu) in gpu.holders.into_iter().zip(split_units(&bytes, used_gpu, unit)) {
            pods.push(InspectedPod {
                name: holder.name,
                namespace: holder.namespace,
                used_gpu,
                uid: holder.uid,
                used_bytes: holder.memory,
                assumed: holder.assumed,
                problem: holder.problem,
            });
        }
        Self {
            id: gpu.minor,
            total_gpu: total_bytes / unit,
            used_gpu,
            pods,
            uuid: gpu.uuid,
            healthy: gpu.healthy,
            total_bytes,
            used_bytes,
            total_core: gpu.core.total,
            used_core: gpu.core.allocated,
            total_slots: gpu.sharers.total,
            used_slots: gpu.sharers.allocated,
            place: InspectedPlace::new(view.device.attributes.location.as_ref()),
            enforcement: gpu.enforcement,
        }
    }
}

impl InspectedDevice {
    /// A device of another type than GPU for people, with its free amounts and its free virtual functions (SR-IOV).
    fn new(node: NodeView<'_>, view: &DeviceView<'_>) -> Self {
        let mut resources = BTreeMap::new();
        for (resource, total) in &view.device.resources {
            let free = view.free_resources.get(resource).copied().unwrap_or_default();
            let amount = InspectedAmount { free, total: *total };
            resources.insert(resource.to_string(), amount);
        }
        let mut functions = InspectedAmount { free: 0, total: 0 };
        for function in view.device.attributes.all_functions() {
            let mut held = node.held().flat_map(|held| &held.holdings.parts);
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
    /// The place of a device in its machine; empty if its Device object names none.
    fn new(location: Option<&DeviceLocation>) -> Self {
        let Some(location) = location else {
            return Self::default();
        };
        Self {
            numa_node: location.numa,
            pcie_id: location.switch.as_ref().map(ToString::to_string),
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
fn split_units(bytes: &[u64], used: u64, unit: u64) -> Vec<u64> {
    let mut shares: Vec<u64> = bytes.iter().map(|bytes| bytes / unit).collect();
    let mut n_left = used.saturating_sub(shares.iter().sum());
    let mut remainders: Vec<(Reverse<u64>, &mut u64)> = Vec::new();
    for (bytes, share) in bytes.iter().zip(&mut shares) {
        remainders.push((Reverse(bytes % unit), share));
    }
    // A stable sort: of equal pods the first in the answer gets the unit.
    remainders.sort_by_key(|(remainder, _)| *remainder);
    for (Reverse(remainder), share) in remainders {
        if n_left > 0 && remainder > 0 {
            *share += 1;
            n_left -= 1;
        }
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
        assert_eq!(
            (found, split_units(bytes, found, 10).as_slice()),
            (used, expected)
        );
    }

    proptest! {
        #[test]
        fn used_amounts_are_shown_within_the_totals(unit in 1_u64..50, total in 0_u64..1000, parts in prop::collection::vec(0_u64..300, 0..8)) {
            let used: u64 = parts.iter().sum();
            let shown = used_units(used, total, unit);
            let shares = split_units(&parts, shown, unit);
            prop_assert!(shares.iter().sum::<u64>() <= shown);
            prop_assert!(used > total || shown <= total / unit);
            prop_assert!(shown.abs_diff(used / unit) <= 1 && shares.iter().zip(&parts).all(|(share, part)| share.abs_diff(part / unit) <= 1));
        }
    }
}
