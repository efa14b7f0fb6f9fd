//! Translates a cluster's API objects to a replay's input: pods to place again, pods that stay, and the devices
//! they hold. Pure.

use std::collections::{BTreeSet, HashMap};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Node as NodeObject, Pod as PodObject};
use kube::ResourceExt;
use proto::device::GPU_MODEL_LABEL;
use proto::pod::MIRROR;
use proto::record::{
    BIND_TIMESTAMP, DEVICE_ALLOCATED, GPU_MINORS, MEM_ASSIGNED, MEM_ASSUME_TIME, MEM_CONTAINER, MEM_DEV,
    MEM_IDX, MEM_POD,
};
use proto::request::{Memory, PodRequest};
use proto::resource::{
    FPGA, GPU, GPU_CORE, GPU_MEM, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED, RDMA, ResourceNames, VENDOR_GPUS,
};
use scheduler::offline;
use serde_json::{Value, json};

use super::LiveCluster;
use crate::replay::kube::{DEFAULT_CPU, DEFAULT_MEMORY};
use crate::replay::objects;
use crate::replay::occupancy::GpuShare;
use crate::replay::trace::{PERCENT, TracePod, WHOLE};
use crate::replay::world::{Lifetime, NumberTable, PlacedPod, ReplayInput, ReplayNode, ReplayPod};
use kit::kube_scheduler::{ResourceAmounts, repels};
use kit::pod_fields::{has_ended, node_of};

/// Annotations that a scheduler or plugin writes, which a pod that is placed again does not have yet.
const WRITTEN: [&str; 9] = [
    DEVICE_ALLOCATED,
    BIND_TIMESTAMP,
    GPU_MINORS,
    MEM_IDX,
    MEM_POD,
    MEM_DEV,
    MEM_ASSIGNED,
    MEM_ASSUME_TIME,
    MEM_CONTAINER,
];
const THOUSAND: i128 = 1000;

/// The replay's input from a cluster.
///
/// Its pods are placed again, but for those that are tied to their nodes; with `arrivals` all of them stay where they
/// are, and the arrivals are placed.
///
/// # Errors
/// An object that cannot be read.
pub fn world(seen: &LiveCluster, arrivals: Option<&[TracePod]>) -> Result<ReplayInput> {
    let live = Live::of(seen)?;
    let mut world = ReplayInput {
        nodes: live.nodes()?,
        columns: live.columns.clone(),
        ..ReplayInput::default()
    };
    let mut sets = NodeSets::default();
    for (value, object) in &live.pods {
        let node = node_of(object);
        let at = node.and_then(|name| live.by_name.get(name)).copied();
        let pod = ReplayPod {
            eligible: sets.of(object, &live),
            ..live.pod(value, object)?
        };
        let parts = live.held.get(&object.uid().unwrap_or_default()).cloned();
        let parts = parts.unwrap_or_default();
        match at {
            Some(node) if arrivals.is_some() || is_tied(object) => {
                world.present.push(PlacedPod {
                    object: (*value).clone(),
                    pod,
                    node,
                    parts,
                });
            }
            _ if arrivals.is_some() => {}
            Some(node) => {
                // Where the pod is today, for the comparison with the replay.
                world.as_it_is.push((world.pods.len(), node, parts));
                world.pods.push(pod);
            }
            // A pod on a node that is gone is no pod to place.
            None if node.is_some() => {}
            None => world.pods.push(pod),
        }
    }
    if let Some(rows) = arrivals {
        let models = live.models();
        (world.pods, world.eligible) = objects::pods(rows, &models);
    } else {
        world.eligible = sets.sets;
    }
    ensure!(
        world.capacity() > 0,
        "the cluster has no healthy GPU that a Device object, or a node's capacity, speaks of"
    );
    Ok(world)
}

/// True if a pod belongs to its node and would not be placed elsewhere.
fn is_tied(pod: &PodObject) -> bool {
    let mut owners = pod.owner_references().iter();
    pod.annotations().contains_key(MIRROR)
        // Pods of a DaemonSet have an affinity to their node, and static pods belong to it.
        || owners.any(|owner| owner.kind == "DaemonSet" || owner.kind == "Node")
}

/// A cluster's objects, parsed, with the devices as the scheduler's placement engine counts them.
struct Live<'s> {
    seen: &'s LiveCluster,
    nodes: Vec<NodeObject>,
    pods: Vec<(&'s Value, PodObject)>,
    by_name: HashMap<String, usize>,
    columns: Vec<String>,
    /// The minors of every node's healthy GPUs.
    minors: Vec<Box<[i32]>>,
    /// The devices that pods hold, by UID.
    held: HashMap<String, Vec<GpuShare>>,
    /// The memory of an average GPU: bytes, and memory units.
    per_gpu: [i64; 2],
}

impl<'s> Live<'s> {
    /// Reads the objects of a cluster; pods that have ended are left out.
    fn of(seen: &'s LiveCluster) -> Result<Self> {
        let nodes: Vec<NodeObject> = seen.nodes.iter().map(read).collect::<Result<_>>()?;
        let mut pods = Vec::new();
        for value in &seen.pods {
            let pod: PodObject = read(value)?;
            if !has_ended(&pod) {
                pods.push((value, pod));
            }
        }
        // By name, so that pods created in the same second come in the order of their names; the API server lists by namespace
        // first.
        pods.sort_by_key(|(_, pod)| pod.metadata.name.clone());
        let names = nodes
            .iter()
            .map(|node| node.metadata.name.clone().unwrap_or_default());
        let by_name = names.zip(0..).collect();
        let mut columns: Vec<String> = objects::COLUMNS.map(str::to_owned).into();
        let mut others: BTreeSet<String> = BTreeSet::new();
        for (_, pod) in &pods {
            let amounts = ResourceAmounts::of_pod(pod)?;
            others.extend(amounts.besides_cpu_and_memory().map(|(name, _)| name.to_owned()));
        }
        others.retain(|name| !columns.contains(name));
        columns.extend(others);
        let mut live = Self {
            seen,
            nodes,
            pods,
            by_name,
            columns,
            minors: Vec::new(),
            held: HashMap::new(),
            per_gpu: [1; 2],
        };
        live.look_into_devices();
        Ok(live)
    }

    /// Fills in `minors`, `held` and `per_gpu` by the scheduler's own index, which reads Device objects and
    /// records of any writer.
    fn look_into_devices(&mut self) {
        let LiveCluster { nodes, devices, pods } = self.seen;
        let index = offline::index(
            nodes.iter().cloned(),
            devices.iter().cloned(),
            pods.iter().cloned(),
        );
        let (mut bytes, mut n_gpus) = (0_i64, 0_i64);
        for node in &self.nodes {
            let id = index
                .fleet()
                .node_id(node.metadata.name.as_deref().unwrap_or_default());
            let view = id.and_then(|id| index.fleet().view(id));
            let gpus = view.map(placement::NodeView::gpus).unwrap_or_default();
            let mut minors = Vec::new();
            for (gpu, view) in gpus.iter().filter(|view| view.device.healthy).enumerate() {
                minors.push(i32::try_from(view.device.minor).unwrap_or(-1));
                n_gpus += 1;
                bytes += i64::try_from(view.device.memory_bytes).unwrap_or(0);
                // Suspect holders have a record that contradicts another; they hold nothing for certain.
                for holder in view.holders.iter().filter(|holder| !holder.suspect) {
                    let memory = holder.amounts.memory.percent_of(view.device.total().memory);
                    let milli = i64::from(memory.max(holder.amounts.core)) * PERCENT;
                    let parts = self.held.entry(holder.owner.as_str().to_owned()).or_default();
                    parts.push(GpuShare { gpu, milli });
                }
            }
            self.minors.push(minors.into());
        }
        let units = self
            .nodes
            .iter()
            .map(|node| ResourceAmounts::allocatable(node).get(GPU_MEM) / THOUSAND);
        let units: i128 = units.sum();
        let n_gpus = n_gpus.max(1);
        self.per_gpu = [
            (bytes / n_gpus).max(1),
            (i64::try_from(units).unwrap_or(0) / n_gpus).max(1),
        ];
    }

    /// The nodes in the form of a replay, with their Device objects.
    fn nodes(&self) -> Result<Vec<ReplayNode>> {
        let mut devices: HashMap<&str, &Value> = HashMap::new();
        for device in &self.seen.devices {
            let name = device.pointer("/metadata/name").and_then(Value::as_str);
            devices.extend(name.map(|name| (name, device)));
        }
        let mut nodes = Vec::new();
        for ((object, value), minors) in self.nodes.iter().zip(&self.seen.nodes).zip(&self.minors) {
            let name = object.metadata.name.as_deref().context("a node has no name")?;
            let allocatable = ResourceAmounts::allocatable(object);
            let whole = |resource: &String| narrow(allocatable.get(resource) / THOUSAND);
            nodes.push(ReplayNode {
                name: name.into(),
                cpu: narrow(allocatable.get("cpu")),
                memory: narrow(allocatable.get("memory") / THOUSAND),
                extended: self.columns.iter().map(whole).collect(),
                minors: minors.clone(),
                object: value.clone(),
                device: devices.get(name).copied().cloned(),
            });
        }
        Ok(nodes)
    }

    /// The GPU model of each node, by its label.
    fn models(&self) -> Vec<&str> {
        let models = self.nodes.iter().map(|node| node.labels().get(GPU_MODEL_LABEL));
        models.map(|model| model.map_or("", String::as_str)).collect()
    }

    /// A pod in the form of a replay; `value` and `object` are the same Pod.
    fn pod(&self, value: &Value, object: &PodObject) -> Result<ReplayPod> {
        let amounts = ResourceAmounts::of_pod(object)?;
        let mut extended = Vec::new();
        for (name, amount) in amounts.besides_cpu_and_memory() {
            let column = self.columns.iter().position(|column| column == name);
            extended.extend(column.map(|column| (column, narrow(amount / THOUSAND))));
        }
        let cpu = narrow(amounts.get("cpu"));
        let memory = narrow(amounts.get("memory") / THOUSAND);
        let (gpus, milli) = self.gpus(value, object)?;
        let created = object.metadata.creation_timestamp.as_ref();
        let name = object.metadata.name.as_deref().context("a pod has no name")?;
        Ok(ReplayPod {
            name: name.into(),
            namespace: object.metadata.namespace.as_deref().unwrap_or("default").into(),
            metadata: metadata(value).into(),
            spec: spec(value).into(),
            cpu,
            memory,
            scored: [
                if cpu > 0 { cpu } else { DEFAULT_CPU },
                if memory > 0 { memory } else { DEFAULT_MEMORY },
            ],
            extended: extended.into(),
            is_managed: asks_for_devices(value)?,
            gpus,
            milli,
            eligible: None,
            stay: Lifetime {
                from: created.map(|time| time.0.as_second()),
                to: None,
            },
        })
    }

    /// The number of a pod's GPUs, and thousandths of each: those that it holds, else its request measured by
    /// an average GPU.
    fn gpus(&self, value: &Value, object: &PodObject) -> Result<(usize, i64)> {
        if let Some(parts) = self.held.get(&object.uid().unwrap_or_default()) {
            let milli = parts.iter().map(|part| part.milli).max().unwrap_or(0);
            return Ok(if milli > 0 { (parts.len(), milli) } else { (0, 0) });
        }
        let pod: proto::pod::Pod = read(value)?;
        // A malformed request counts as none: the extender refuses the pod, as it would in the cluster.
        let Ok(Some(request)) = PodRequest::read(&pod, &ResourceNames::default()) else {
            return Ok((0, 0));
        };
        let Some(request) = request.gpus else {
            return Ok((0, 0));
        };
        let devices = i64::from(request.devices).max(1);
        let [bytes_per_gpu, units_per_gpu] = self.per_gpu;
        let amount = |amount: u64| i64::try_from(amount).unwrap_or(i64::MAX / WHOLE);
        let memory = match request.memory {
            Memory::Ratio(percent) => amount(percent) * PERCENT / devices,
            Memory::Bytes(bytes) => (amount(bytes) / devices).saturating_mul(WHOLE) / bytes_per_gpu,
            Memory::Units(units) => (amount(units) / devices).saturating_mul(WHOLE) / units_per_gpu,
        };
        let milli = memory.max(amount(request.core) * PERCENT / devices).min(WHOLE);
        // Rounded up to whole percents, the grain of the engine.
        let milli = (milli + PERCENT - 1) / PERCENT * PERCENT;
        Ok(if milli > 0 {
            (usize::try_from(devices).unwrap_or(0), milli)
        } else {
            (0, 0)
        })
    }
}

/// True if a kube-scheduler with the configuration in `deploy/` calls the extender for a pod.
fn asks_for_devices(value: &Value) -> Result<bool> {
    let pod: proto::pod::Pod = read(value)?;
    let managed = [
        GPU_MEM,
        GPU_SHARED,
        GPU_MEMORY,
        GPU_MEMORY_RATIO,
        GPU_CORE,
        GPU,
        RDMA,
        FPGA,
    ];
    for container in pod.spec.init_containers.iter().chain(&pod.spec.containers) {
        let mut resources = managed.into_iter().chain(VENDOR_GPUS);
        if resources.any(|resource| container.asks_for(resource)) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The sets of nodes that pods may go to; pods with equal constraints share one.
#[derive(Default)]
struct NodeSets {
    numbers: NumberTable,
    sets: Vec<Box<[bool]>>,
}

impl NodeSets {
    /// The number of the set of nodes that a pod's selectors, affinity and tolerations allow.
    fn of(&mut self, pod: &PodObject, live: &Live<'_>) -> Option<usize> {
        let spec = pod.spec.as_ref()?;
        let affinity = spec
            .affinity
            .as_ref()
            .and_then(|affinity| affinity.node_affinity.as_ref());
        let constraints = json!([spec.node_selector, spec.tolerations, affinity]);
        let (set, is_new) = self.numbers.of(&constraints.to_string());
        if is_new {
            // A bound pod is placed again, on any node that its constraints allow.
            let mut pod = pod.clone();
            pod.spec.iter_mut().for_each(|spec| spec.node_name = None);
            let fits = |node: &NodeObject| !repels(&pod, node);
            self.sets.push(live.nodes.iter().map(fits).collect());
        }
        Some(set)
    }
}

/// Decodes an object; the error names it.
fn read<T: serde::de::DeserializeOwned>(value: &Value) -> Result<T> {
    let name = value.pointer("/metadata/name").and_then(Value::as_str);
    T::deserialize(value).with_context(|| format!("{} cannot be read", name.unwrap_or("(unnamed)")))
}

/// An amount as 64 bits, at most the largest that fits.
fn narrow(amount: i128) -> i64 {
    i64::try_from(amount).unwrap_or(i64::MAX)
}

/// A pod's labels and annotations as its user wrote them, each field with a comma before it.
fn metadata(pod: &Value) -> String {
    let field = |name: &str| {
        let found = pod.pointer(&format!("/metadata/{name}")).cloned();
        found.filter(Value::is_object).unwrap_or_else(|| json!({}))
    };
    let (labels, mut annotations) = (field("labels"), field("annotations"));
    if let Some(annotations) = annotations.as_object_mut() {
        annotations.retain(|key, _| !WRITTEN.contains(&key.as_str()));
    }
    format!(r#","labels":{labels},"annotations":{annotations}"#)
}

/// The pod's spec without its node, as it was before it was bound.
fn spec(pod: &Value) -> String {
    let mut spec = pod.get("spec").cloned().unwrap_or_default();
    if let Some(spec) = spec.as_object_mut() {
        spec.remove("nodeName");
    }
    spec.to_string()
}
