//! `inspect`: who holds what, in the old extender's JSON with more fields behind the old ones.
//!
//! Numbers named `…GPU` are in the node's memory units: totals rounded down, what is used rounded up.

use std::collections::BTreeMap;

use placement::{DeviceVerdict, Hints, OwnerId};
use serde::Serialize;

use crate::accounting::{Ask, PodFacts};
use crate::index::{DeviceShow, GpuShow, HolderShow, Index, NodeAsk, NodeShow};

/// The pod that a query such as `pod=namespace/name` asks for.
///
/// Names of pods need no escapes; the slash between them may have one.
pub fn pod_of_query(query: &str) -> Option<String> {
    let pod = query.split('&').find_map(|pair| pair.strip_prefix("pod="))?;
    Some(pod.replace("%2F", "/").replace("%2f", "/"))
}

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
struct InspectedDevice {
    #[serde(rename = "type")]
    kind: String,
    id: String,
    minor: u32,
    healthy: bool,
    resources: BTreeMap<String, InspectedAmount>,
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

/// The standing of one pod.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Standing {
    namespace: String,
    name: String,
    uid: String,
    /// What it asks for, for people.
    request: String,
    /// Why no node can take it, whatever is free.
    #[serde(skip_serializing_if = "Option::is_none")]
    invalid: Option<String>,
    /// Where it is bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    node: Option<String>,
    assumed: bool,
    /// Why it is counted conservatively.
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
    /// What every device says to it, as long as it is not bound.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    devices: Vec<DeviceStanding>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct DeviceStanding {
    node: String,
    id: u32,
    free_bytes: u64,
    needed_bytes: u64,
    fits: bool,
    #[serde(skip_serializing_if = "str::is_empty")]
    reason: &'static str,
}

/// The answer for pods.
#[derive(Debug, Default, Serialize)]
struct InspectedPods {
    pods: Vec<Standing>,
    #[serde(skip_serializing_if = "String::is_empty")]
    error: String,
}

/// One pod, by `namespace/name`.
pub fn pod(index: &Index, pod: &str) -> Vec<u8> {
    let Some((namespace, name)) = pod.split_once('/') else {
        let error = format!("{pod:?} is not namespace/name");
        return json(&InspectedPods { pods: Vec::new(), error });
    };
    let asking = index.pods_named(namespace, name).filter(|(_, facts)| index.concerns(facts));
    let mut pods: Vec<Standing> = asking.map(|(uid, facts)| standing(index, uid, facts)).collect();
    pods.sort_by(|a, b| a.uid.cmp(&b.uid));
    let error = if pods.is_empty() { format!("there is no pod {pod:?} that asks for a share of a GPU") } else { String::new() };
    json(&InspectedPods { pods, error })
}

fn standing(index: &Index, uid: &OwnerId, facts: &PodFacts) -> Standing {
    let (assumed, problem) = index.standing(uid);
    let node = facts.bound.as_ref().map(|bound| bound.node.to_string());
    let request = match &facts.ask {
        Ask::Request(request) => request.to_string(),
        Ask::Invalid(_) => String::new(),
    };
    let (invalid, devices) = match index.ask(uid.as_str(), facts) {
        Err(error) => (Some(error.to_string()), Vec::new()),
        Ok(Some(ask)) if node.is_none() && !assumed => (None, devices(index, &ask)),
        Ok(_) => (None, Vec::new()),
    };
    Standing {
        namespace: facts.namespace.to_string(),
        name: facts.name.to_string(),
        uid: uid.to_string(),
        request,
        invalid,
        node,
        assumed,
        problem: problem.map(str::to_owned),
        devices,
    }
}

fn devices(index: &Index, ask: &NodeAsk<'_>) -> Vec<DeviceStanding> {
    let mut devices = Vec::new();
    for name in index.gpu_nodes() {
        let Some(node) = index.fleet().node_id(&name) else { continue };
        let verdicts = index.fleet().explain(node, ask.gpus, Hints::RespectOthers(ask.uid));
        devices.extend(verdicts.into_iter().flatten().map(|verdict| DeviceStanding::new(&name, &verdict)));
    }
    devices
}

impl DeviceStanding {
    fn new(node: &str, verdict: &DeviceVerdict<'_>) -> Self {
        Self {
            node: node.to_owned(),
            id: verdict.gpu.minor,
            free_bytes: verdict.free.memory.bytes_floor(),
            needed_bytes: verdict.need.memory.bytes_ceil(),
            fits: verdict.fit.is_ok(),
            reason: verdict.fit.err().map_or("", placement::Reason::as_str),
        }
    }
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
        let DeviceShow { kind, id, minor, healthy, resources } = device;
        let resources = resources.into_iter().map(|(resource, (free, total))| (resource, InspectedAmount { free, total }));
        Self { kind, id, minor, healthy, resources: resources.collect() }
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
