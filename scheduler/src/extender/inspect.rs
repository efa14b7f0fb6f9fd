//! `inspect`: who holds what, in the old extender's JSON with more fields behind the old ones.
//!
//! Numbers named `…GPU` are in the node's memory units: totals rounded down, what is used rounded up.

use std::collections::BTreeMap;

use placement::Place;
use serde::Serialize;

use crate::index::{DeviceShow, GpuShow, HolderShow, Index, NodeShow};

pub mod pods;

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

/// Where a device sits, as far as its node says.
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
    /// Whether a bind has decided this and the pod is not yet seen bound.
    assumed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

/// All nodes that share GPUs, sorted by name.
pub fn all(index: &Index) -> Vec<u8> {
    let nodes = index.gpu_nodes();
    let nodes = nodes.iter().filter_map(|name| index.show_node(name)).map(InspectedNode::from).collect();
    json(&Inspected { nodes, error: String::new() })
}

/// One node.
pub fn node(index: &Index, name: &str) -> Vec<u8> {
    json(&match index.show_node(name) {
        Some(node) => Inspected { nodes: vec![node.into()], error: String::new() },
        None => Inspected { nodes: Vec::new(), error: format!("there is no node {name:?}") },
    })
}

impl From<NodeShow> for InspectedNode {
    fn from(node: NodeShow) -> Self {
        let devs: Vec<InspectedGpu> = node.gpus.into_iter().map(|gpu| InspectedGpu::new(gpu, node.unit_bytes)).collect();
        Self {
            name: node.name,
            total_gpu: devs.iter().map(|gpu| gpu.total_gpu).sum(),
            used_gpu: devs.iter().map(|gpu| gpu.used_gpu).sum(),
            devs,
            unit: node.unit,
            unit_bytes: node.unit_bytes,
            other_devices: node.others.into_iter().map(InspectedDevice::from).collect(),
            problems: node.problems,
        }
    }
}

impl From<DeviceShow> for InspectedDevice {
    fn from(device: DeviceShow) -> Self {
        let DeviceShow { kind, id, minor, healthy, resources, functions: (n_free, n_functions), place } = device;
        let resources = resources.into_iter().map(|(resource, (free, total))| (resource, InspectedAmount { free, total }));
        let count = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
        let virtual_functions = (n_functions > 0).then(|| InspectedAmount { free: count(n_free), total: count(n_functions) });
        Self { kind, id, minor, healthy, resources: resources.collect(), virtual_functions, place: place.into() }
    }
}

impl From<Place> for InspectedPlace {
    fn from(place: Place) -> Self {
        Self { numa_node: place.numa, pcie_id: place.switch.map(|switch| switch.to_string()) }
    }
}

impl InspectedGpu {
    fn new(gpu: GpuShow, unit: u64) -> Self {
        Self {
            id: gpu.minor,
            total_gpu: gpu.total / unit,
            used_gpu: gpu.used.div_ceil(unit),
            pods: gpu.holders.into_iter().map(|holder| InspectedPod::new(holder, unit)).collect(),
            uuid: gpu.uuid,
            healthy: gpu.healthy,
            total_bytes: gpu.total,
            used_bytes: gpu.used,
            total_core: gpu.core.1,
            used_core: gpu.core.0,
            total_slots: gpu.slots.1,
            used_slots: gpu.slots.0,
            place: gpu.place.into(),
        }
    }
}

impl InspectedPod {
    fn new(holder: HolderShow, unit: u64) -> Self {
        Self {
            used_gpu: holder.bytes.div_ceil(unit),
            name: holder.name,
            namespace: holder.namespace,
            uid: holder.uid,
            used_bytes: holder.bytes,
            assumed: holder.assumed,
            problem: holder.problem,
        }
    }
}

fn json(answer: &impl Serialize) -> Vec<u8> {
    // Plain structs of texts and numbers always serialise.
    serde_json::to_vec(answer).unwrap_or_default()
}
