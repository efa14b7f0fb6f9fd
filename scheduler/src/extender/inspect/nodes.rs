//! The view of nodes: their devices and the pods that hold shares of them, in the old extender's JSON with more fields behind
//! the old ones.
//!
//! Numbers named `…GPU` are whole memory units of the node; the exact bytes stand beside them.

use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};
use std::ops::ControlFlow;

use placement::DeviceLocation;
use serde::Serialize;

use super::json;
use crate::index::{DeviceShow, GpuShow, HolderShow, Index, NodeShow, Shared};

/// The number of names that are read from the index under one lock.
const NAMES: usize = 1000;

/// The answer for nodes.
#[derive(Debug, Default, Serialize)]
struct Inspected {
    nodes: Vec<InspectedNode>,
    #[serde(skip_serializing_if = "String::is_empty")]
    error: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct InspectedNode {
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

#[derive(Debug, Serialize)]
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
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct InspectedPlace {
    #[serde(skip_serializing_if = "Option::is_none")]
    numa_node: Option<u32>,
    #[serde(rename = "pcieID", skip_serializing_if = "Option::is_none")]
    pcie_id: Option<String>,
}

#[derive(Debug, Serialize)]
struct InspectedAmount {
    free: u64,
    total: u64,
}

#[derive(Debug, Serialize)]
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

#[derive(Debug, Serialize)]
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

/// The JSON of one node, if the index has it.
pub(super) fn show(node: Option<NodeShow>, name: &str) -> Vec<u8> {
    let mut answer = Inspected::default();
    match node {
        Some(node) => answer.nodes.push(node.into()),
        None => answer.error = format!("there is no node {name:?}"),
    }
    json(&answer)
}

/// A part of all nodes, in the order of their names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Page {
    /// The largest number of nodes; `None` for all.
    limit: Option<usize>,
    /// The last node of the page before.
    after: Option<String>,
}

impl Page {
    /// Parses a query such as `limit=500&continue=n0499`; the error says what to write.
    pub(super) fn parse(query: &str) -> Result<Self, String> {
        let mut page = Self::default();
        for (key, value) in query.split('&').filter_map(|pair| pair.split_once('=')) {
            match key {
                "limit" => {
                    let Ok(limit) = value.parse::<usize>() else {
                        return Err(format!(
                            "limit={value:?}: write a whole number, such as limit=500"
                        ));
                    };
                    // Zero means no limit, as in the Kubernetes API.
                    page.limit = (limit > 0).then_some(limit);
                }
                "continue" if value.bytes().all(is_in_names) => {
                    page.after = (!value.is_empty()).then(|| value.to_owned());
                }
                "continue" => {
                    return Err(format!(
                        "continue={value:?}: write what the page before says in \"continue\""
                    ));
                }
                _ => {}
            }
        }
        Ok(page)
    }
}

fn is_in_names(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-.".contains(&byte)
}

/// Writes a page node by node; holds no lock in between.
#[derive(Debug)]
pub(super) struct NodeListing {
    page: Page,
    /// Names that have been read from the index, and whose nodes have not been written.
    names: VecDeque<String>,
    n_written: usize,
    has_begun: bool,
}

impl NodeListing {
    pub(super) fn new(page: Page) -> Self {
        Self {
            page,
            names: VecDeque::new(),
            n_written: 0,
            has_begun: false,
        }
    }

    /// Writes the next node, or the end of the page.
    pub(super) fn write_next(&mut self, index: &Shared<Index>, json: &mut Vec<u8>) -> ControlFlow<()> {
        if !std::mem::replace(&mut self.has_begun, true) {
            json.extend_from_slice(b"{\"nodes\":[");
        }
        let is_full = self.page.limit.is_some_and(|limit| self.n_written >= limit);
        // A thousand names at a time: one by one, the search for the next name would take as long as the whole list.
        if !is_full && self.names.is_empty() {
            let index = index.read();
            self.names = index.gpu_nodes_after(self.page.after.as_deref(), NAMES).into();
        }
        let Some(name) = (if is_full { None } else { self.names.pop_front() }) else {
            self.write_end(index, json);
            return ControlFlow::Break(());
        };
        // A node may be gone since its name was read.
        let shown = index.read().show_node(&name);
        if let Some(node) = shown {
            if self.n_written > 0 {
                json.push(b',');
            }
            json.extend_from_slice(&super::json(&InspectedNode::from(node)));
            self.n_written += 1;
        }
        self.page.after = Some(name);
        ControlFlow::Continue(())
    }

    fn write_end(&self, index: &Shared<Index>, json: &mut Vec<u8>) {
        json.push(b']');
        // Only a limited page says where the next one begins, and only if there is one.
        let last = self.page.after.as_deref().filter(|_| self.page.limit.is_some());
        if let Some(last) = last.filter(|last| !index.read().gpu_nodes_after(Some(last), 1).is_empty()) {
            json.extend_from_slice(b",\"continue\":");
            json.extend_from_slice(&super::json(&last));
        }
        json.push(b'}');
    }
}

impl From<NodeShow> for InspectedNode {
    fn from(node: NodeShow) -> Self {
        let mut devs = Vec::with_capacity(node.gpus.len());
        for gpu in node.gpus {
            devs.push(InspectedGpu::new(gpu, node.unit_bytes));
        }
        Self {
            name: node.name,
            total_gpu: devs.iter().map(|gpu| gpu.total_gpu).sum(),
            used_gpu: devs.iter().map(|gpu| gpu.used_gpu).sum(),
            devs,
            unit: node.unit,
            unit_bytes: node.unit_bytes,
            other_devices: node.others.into_iter().map(InspectedDevice::from).collect(),
            problems: node.problems,
            plugin: node.plugin,
        }
    }
}

impl From<DeviceShow> for InspectedDevice {
    fn from(device: DeviceShow) -> Self {
        let resources = device.resources.into_iter();
        let (n_free, n_functions) = device.functions;
        Self {
            kind: device.kind,
            id: device.id,
            minor: device.minor,
            healthy: device.healthy,
            resources: resources
                .map(|(resource, (free, total))| (resource, InspectedAmount { free, total }))
                .collect(),
            virtual_functions: (n_functions > 0).then(|| InspectedAmount {
                free: u64::try_from(n_free).unwrap_or(u64::MAX),
                total: u64::try_from(n_functions).unwrap_or(u64::MAX),
            }),
            place: device.place.into(),
        }
    }
}

impl From<DeviceLocation> for InspectedPlace {
    fn from(place: DeviceLocation) -> Self {
        Self {
            numa_node: place.numa,
            pcie_id: place.switch.map(|switch| switch.to_string()),
        }
    }
}

impl InspectedGpu {
    fn new(gpu: GpuShow, unit: u64) -> Self {
        let used_gpu = used_units(gpu.used, gpu.total, unit);
        // The units of the pods add up to those of the GPU, as users of the old tools expect.
        let bytes: Vec<u64> = gpu.holders.iter().map(|holder| holder.bytes).collect();
        let mut pods = Vec::with_capacity(gpu.holders.len());
        for (holder, units) in gpu.holders.into_iter().zip(shares(&bytes, used_gpu, unit)) {
            pods.push(InspectedPod::new(holder, units));
        }
        Self {
            id: gpu.minor,
            total_gpu: gpu.total / unit,
            used_gpu,
            pods,
            uuid: gpu.uuid,
            healthy: gpu.healthy,
            total_bytes: gpu.total,
            used_bytes: gpu.used,
            total_core: gpu.core.1,
            used_core: gpu.core.0,
            total_slots: gpu.slots.1,
            used_slots: gpu.slots.0,
            place: gpu.place.into(),
            enforcement: gpu.enforcement,
        }
    }
}

impl InspectedPod {
    fn new(holder: HolderShow, units: u64) -> Self {
        Self {
            used_gpu: units,
            name: holder.name,
            namespace: holder.namespace,
            uid: holder.uid,
            used_bytes: holder.bytes,
            assumed: holder.assumed,
            problem: holder.problem,
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
