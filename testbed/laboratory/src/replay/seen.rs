//! Translates a cluster's API objects to a replay's input: pods to place again, pods that stay, and the devices
//! they hold. Pure.

use std::collections::HashMap;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{Node as NodeObject, Pod as PodObject};
use kube::ResourceExt;
use proto::pod::MIRROR;
use proto::record::{
    BIND_TIMESTAMP, DEVICE_ALLOCATED, GPU_MINORS, MEM_ASSIGNED, MEM_ASSUME_TIME, MEM_CONTAINER, MEM_DEV,
    MEM_IDX, MEM_POD,
};
use proto::request::{Memory, PodRequest};
use proto::resource::{GPU_MEM, ResourceNames};
use scheduler::offline;
use serde_json::{Value, json};

use super::objects;
use super::occupancy::GpuShare;
use super::trace::{PERCENT, TracePod, WHOLE};
use super::world::{Lifetime, PlacedPod, ReplayInput, ReplayNode, ReplayPod};
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
/// The thousandths in which `ResourceAmounts` counts one unit of a resource.
const THOUSAND: i128 = 1000;

/// The objects of a cluster that a replay reads, as the API server shows them.
#[derive(Clone, Debug, Default)]
pub struct ClusterObjects {
    pub nodes: Vec<Value>,
    /// Objects of Koordinator's kind Device; none if the cluster lacks that kind.
    pub devices: Vec<Value>,
    pub pods: Vec<Value>,
}

/// The replay's input from a cluster.
///
/// Its pods are placed again, but for those that are tied to their nodes. With `arrivals` these alone are placed: the cluster's
/// pods stay on their nodes, and those without a node are left out.
pub fn world(seen: &ClusterObjects, arrivals: Option<&[TracePod]>) -> Result<ReplayInput> {
    let cluster = Objects::of(seen)?;
    let mut world = ReplayInput {
        nodes: cluster.nodes()?,
        ..ReplayInput::default()
    };
    let mut sets = NodeSets::default();
    for (value, object) in &cluster.pods {
        let node = node_of(object);
        let node_idx = node.and_then(|name| cluster.by_name.get(name)).copied();
        let pod = ReplayPod {
            eligible: sets.of(object, &cluster),
            ..cluster.pod(value, object)?
        };
        let parts = cluster.held.get(&object.uid().unwrap_or_default()).cloned();
        let parts = parts.unwrap_or_default();
        match node_idx {
            Some(node) if arrivals.is_some() || is_tied(object) => world.present.push(PlacedPod {
                object: (*value).clone(),
                pod,
                node,
                parts,
            }),
            Some(node) => {
                // Where the pod is today, for the comparison with the replay.
                world.bound_today.push((world.pods.len(), node, parts));
                world.pods.push(pod);
            }
            // A pod on a node that is gone is no pod to place.
            None if node.is_none() && arrivals.is_none() => world.pods.push(pod),
            None => {}
        }
    }
    if let Some(rows) = arrivals {
        for row in rows {
            let value = objects::pod(row);
            let object = read(&value)?;
            world.pods.push(ReplayPod {
                eligible: sets.of(&object, &cluster),
                stay: Lifetime {
                    from: row.created,
                    to: row.deleted,
                },
                ..cluster.pod(&value, &object)?
            });
        }
        // By name, as in [`Objects::of`].
        world.pods.sort_by(|one, other| one.name.cmp(&other.name));
    }
    world.eligible = sets.sets;
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
struct Objects<'s> {
    seen: &'s ClusterObjects,
    nodes: Vec<NodeObject>,
    pods: Vec<(&'s Value, PodObject)>,
    by_name: HashMap<String, usize>,
    /// The minors of the healthy GPUs of each node, in the order of `nodes`.
    minors: Vec<Box<[i32]>>,
    /// The parts of GPUs that pods hold, by the pod's UID.
    held: HashMap<String, Vec<GpuShare>>,
    /// The memory of an average GPU: in bytes, and in the memory units of `aliyun.com/gpu-mem`.
    per_gpu: [i64; 2],
}

impl<'s> Objects<'s> {
    /// Reads the objects of a cluster; pods that have ended are left out.
    fn of(seen: &'s ClusterObjects) -> Result<Self> {
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
        let names = nodes.iter().map(ResourceExt::name_any);
        let by_name = names.zip(0..).collect();
        let mut cluster = Self {
            seen,
            nodes,
            pods,
            by_name,
            minors: Vec::new(),
            held: HashMap::new(),
            per_gpu: [1; 2],
        };
        cluster.read_devices();
        Ok(cluster)
    }

    /// Fills in `minors`, `held` and `per_gpu` by the scheduler's own index, which reads Device objects and
    /// records of any writer.
    fn read_devices(&mut self) {
        let ClusterObjects { nodes, devices, pods } = self.seen;
        let index = offline::index(
            nodes.iter().cloned(),
            devices.iter().cloned(),
            pods.iter().cloned(),
        );
        let (mut bytes, mut n_gpus) = (0_i64, 0_i64);
        for node in &self.nodes {
            let id = index.fleet().node_id(&node.name_any());
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
        let units = i64::try_from(units.sum::<i128>()).unwrap_or(0);
        self.per_gpu = [bytes, units].map(|amount| (amount / n_gpus.max(1)).max(1));
    }

    fn nodes(&self) -> Result<Vec<ReplayNode>> {
        let mut devices: HashMap<&str, &Value> = HashMap::new();
        for device in &self.seen.devices {
            let name = device.pointer("/metadata/name").and_then(Value::as_str);
            devices.extend(name.map(|name| (name, device)));
        }
        let mut nodes = Vec::new();
        for ((object, value), minors) in self.nodes.iter().zip(&self.seen.nodes).zip(&self.minors) {
            let name = object.metadata.name.as_deref().context("a node has no name")?;
            nodes.push(ReplayNode {
                name: name.into(),
                cpu: narrow(ResourceAmounts::allocatable(object).get("cpu")),
                minors: minors.clone(),
                object: value.clone(),
                device: devices.get(name).copied().cloned(),
            });
        }
        Ok(nodes)
    }

    fn pod(&self, value: &Value, object: &PodObject) -> Result<ReplayPod> {
        let (gpus, milli) = self.gpus(value, object)?;
        let created = object.metadata.creation_timestamp.as_ref();
        let name = object.metadata.name.as_deref().context("a pod has no name")?;
        Ok(ReplayPod {
            name: name.into(),
            namespace: object.metadata.namespace.as_deref().unwrap_or("default").into(),
            object: template(value),
            cpu: narrow(ResourceAmounts::of_pod(object)?.get("cpu")),
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
        let request = PodRequest::read(&pod, &ResourceNames::default()).ok().flatten();
        let Some(request) = request.and_then(|request| request.gpus) else {
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
            (usize::try_from(devices)?, milli)
        } else {
            (0, 0)
        })
    }
}

/// The sets of nodes that pods may go to; pods with equal constraints share one.
#[derive(Default)]
struct NodeSets {
    /// The index in `sets` by the constraints as JSON; `None` for all nodes.
    known: HashMap<String, Option<usize>>,
    sets: Vec<Box<[bool]>>,
}

impl NodeSets {
    /// The index in `sets` of the nodes that a pod's selectors, affinity and tolerations allow; `None` for all nodes.
    fn of(&mut self, pod: &PodObject, cluster: &Objects<'_>) -> Option<usize> {
        let spec = pod.spec.as_ref()?;
        let affinity = spec.affinity.as_ref().map(|affinity| &affinity.node_affinity);
        let constraints = json!([spec.node_selector, spec.tolerations, affinity]).to_string();
        if let Some(set) = self.known.get(&constraints) {
            return *set;
        }
        // A bound pod is placed again, on any node that its constraints allow.
        let mut pod = pod.clone();
        pod.spec.iter_mut().for_each(|spec| spec.node_name = None);
        let allowed: Box<[bool]> = cluster.nodes.iter().map(|node| !repels(&pod, node)).collect();
        let set = allowed.contains(&false).then_some(self.sets.len());
        if set.is_some() {
            self.sets.push(allowed);
        }
        self.known.insert(constraints, set);
        set
    }
}

pub fn read<T: serde::de::DeserializeOwned>(value: &Value) -> Result<T> {
    let name = value.pointer("/metadata/name").and_then(Value::as_str);
    T::deserialize(value).with_context(|| format!("{} cannot be read", name.unwrap_or("(unnamed)")))
}

fn narrow(amount: i128) -> i64 {
    i64::try_from(amount).unwrap_or(i64::MAX)
}

/// A pod as its user wrote it: without the node and the annotations that schedulers and plugins write.
fn template(pod: &Value) -> Value {
    let field = |path: &str| pod.pointer(path).cloned().filter(Value::is_object);
    let mut annotations = field("/metadata/annotations").unwrap_or_else(|| json!({}));
    if let Some(annotations) = annotations.as_object_mut() {
        annotations.retain(|key, _| !WRITTEN.contains(&key.as_str()));
    }
    let mut spec = field("/spec").unwrap_or_default();
    if let Some(spec) = spec.as_object_mut() {
        spec.remove("nodeName");
    }
    let metadata = json!({
        "namespace": pod.pointer("/metadata/namespace"), "labels": field("/metadata/labels"), "annotations": annotations,
    });
    json!({"metadata": metadata, "spec": spec})
}
