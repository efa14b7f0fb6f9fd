//! `inspect`: the holdings of pods, in the old extender's JSON with more fields behind the old ones.
//!
//! Numbers named `…GPU` are whole memory units of the node: totals are rounded down, used amounts up, though never above their
//! total. Knows no HTTP but the text of a query.

use std::collections::{BTreeMap, VecDeque};
use std::ops::ControlFlow;

use placement::DeviceLocation;
use serde::Serialize;

use crate::index::{DeviceShow, GpuShow, HolderShow, Index, NodeShow, Shared};

pub mod pods;
mod rounding;

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
    /// The reason for which no pods, or few, are sent here on account of the device plugin.
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

/// One node, as the index shows it, if it is there.
pub fn node(shown: Option<NodeShow>, name: &str) -> Vec<u8> {
    json(&match shown {
        Some(node) => Inspected {
            nodes: vec![node.into()],
            error: String::new(),
        },
        None => Inspected {
            nodes: Vec::new(),
            error: format!("there is no node {name:?}"),
        },
    })
}

/// Names that are read from the index at one time.
const NAMES: usize = 1000;

/// The part of the nodes that a client wants: up to `limit` of them, behind the last one that it has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Page {
    /// The most nodes of the part; `None` for all.
    limit: Option<usize>,
    /// The last node of the page before.
    after: Option<String>,
}

impl Page {
    /// Parses a query such as `limit=500&continue=n0499`.
    ///
    /// # Errors
    /// The parameter that cannot be read, and what to write.
    pub fn of_query(query: Option<&str>) -> Result<Self, String> {
        let mut page = Self::default();
        for (key, value) in query
            .unwrap_or_default()
            .split('&')
            .filter_map(|pair| pair.split_once('='))
        {
            match key {
                "limit" => {
                    let limit: usize = value
                        .parse()
                        .map_err(|_| format!("limit={value:?}: write a whole number, such as limit=500"))?;
                    page.limit = (limit > 0).then_some(limit);
                }
                "continue"
                    if value
                        .bytes()
                        .all(|byte| byte.is_ascii_alphanumeric() || b"-.".contains(&byte)) =>
                {
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

/// Writes a page node by node, sorted by name; holds no lock in between.
#[derive(Debug)]
pub struct Listing {
    page: Page,
    /// Nodes that have been read from the index and not written.
    names: VecDeque<String>,
    n_written: usize,
    has_begun: bool,
}

impl Listing {
    /// Begins a page.
    pub fn new(page: Page) -> Self {
        Self {
            page,
            names: VecDeque::new(),
            n_written: 0,
            has_begun: false,
        }
    }

    /// Writes the next node, or the end.
    pub fn write_next(&mut self, index: &Shared<Index>, json: &mut Vec<u8>) -> ControlFlow<()> {
        if !std::mem::replace(&mut self.has_begun, true) {
            json.extend_from_slice(b"{\"nodes\":[");
        }
        let is_full = self.page.limit.is_some_and(|limit| self.n_written >= limit);
        if !is_full && self.names.is_empty() {
            self.names = index
                .read()
                .gpu_nodes_after(self.page.after.as_deref(), NAMES)
                .into();
        }
        let Some(name) = (if is_full { None } else { self.names.pop_front() }) else {
            self.write_end(index, json);
            return ControlFlow::Break(());
        };
        // A node that is gone since its name was read is left out.
        let shown = index.read().show_node(&name);
        if let Some(node) = shown {
            if self.n_written > 0 {
                json.push(b',');
            }
            json.extend_from_slice(&self::json(&InspectedNode::from(node)));
            self.n_written += 1;
        }
        self.page.after = Some(name);
        ControlFlow::Continue(())
    }

    fn write_end(&self, index: &Shared<Index>, json: &mut Vec<u8>) {
        json.push(b']');
        let last = self.page.after.as_deref().filter(|_| self.page.limit.is_some());
        if let Some(last) = last.filter(|last| !index.read().gpu_nodes_after(Some(last), 1).is_empty()) {
            json.extend_from_slice(b",\"continue\":");
            json.extend_from_slice(&self::json(&last));
        }
        json.push(b'}');
    }
}

impl From<NodeShow> for InspectedNode {
    fn from(node: NodeShow) -> Self {
        let devs: Vec<InspectedGpu> = node
            .gpus
            .into_iter()
            .map(|gpu| InspectedGpu::new(gpu, node.unit_bytes))
            .collect();
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
        let DeviceShow {
            kind,
            id,
            minor,
            healthy,
            resources,
            functions: (n_free, n_functions),
            place,
        } = device;
        let resources = resources
            .into_iter()
            .map(|(resource, (free, total))| (resource, InspectedAmount { free, total }));
        let count = |n: usize| u64::try_from(n).unwrap_or(u64::MAX);
        let virtual_functions = (n_functions > 0).then(|| InspectedAmount {
            free: count(n_free),
            total: count(n_functions),
        });
        Self {
            kind,
            id,
            minor,
            healthy,
            resources: resources.collect(),
            virtual_functions,
            place: place.into(),
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
        let used_gpu = rounding::used_units(gpu.used, gpu.total, unit);
        let bytes: Vec<u64> = gpu.holders.iter().map(|holder| holder.bytes).collect();
        let shares = rounding::shares(&bytes, used_gpu, unit);
        Self {
            id: gpu.minor,
            total_gpu: gpu.total / unit,
            used_gpu,
            pods: gpu
                .holders
                .into_iter()
                .zip(shares)
                .map(|(holder, units)| InspectedPod::new(holder, units))
                .collect(),
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

fn json(answer: &impl Serialize) -> Vec<u8> {
    // Plain structs of texts and numbers always serialise.
    serde_json::to_vec(answer).unwrap_or_default()
}
