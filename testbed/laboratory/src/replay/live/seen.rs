//! A cluster's API objects as a world: pods to place again, pods that stay, and the devices they hold. Pure.

use std::collections::{BTreeSet, HashMap};

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::{Node as NodeObject, Pod as PodObject};
use proto::device::GPU_MODEL_LABEL;
use proto::record::{
    BIND_TIMESTAMP, DEVICE_ALLOCATED, GPU_MINORS, MEM_ASSIGNED, MEM_ASSUME_TIME, MEM_CONTAINER, MEM_DEV,
    MEM_IDX, MEM_POD,
};
use proto::request::{Memory, PodRequest};
use proto::resource::{
    FPGA, GPU, GPU_CORE, GPU_MEM, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED, RDMA, ResourceNames, VENDOR_GPUS,
};
use scheduler::offline;
use serde_json::{Map, Value, json};

use super::LiveCluster;
use crate::replay::affinity::allows;
use crate::replay::kube::{DEFAULT_CPU, DEFAULT_MEMORY};
use crate::replay::objects;
use crate::replay::occupancy::GpuShare;
use crate::replay::trace::{PERCENT, TracePod, WHOLE};
use crate::replay::world::{Lifetime, NumberTable, PlacedPod, ReplayInput, ReplayNode, ReplayPod};
use testbed::kube_scheduler::{ResourceAmounts, repels};

/// Labels and annotations of a scheduler or node, which a pod that is placed again does not have.
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
/// The mark of a pod that kubelet runs from a file.
const MIRROR: &str = "kubernetes.io/config.mirror";
const THOUSAND: i128 = 1000;

/// The world of a cluster.
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
        let node = object
            .spec
            .as_ref()
            .and_then(|spec| spec.node_name.as_deref())
            .filter(|name| !name.is_empty());
        let at = node.and_then(|name| live.by_name.get(name)).copied();
        let pod = ReplayPod {
            eligible: sets.of(object, &live),
            ..live.pod(value, object)?
        };
        let parts = object
            .metadata
            .uid
            .as_deref()
            .and_then(|uid| live.held.get(uid))
            .cloned()
            .unwrap_or_default();
        match at {
            Some(node) if arrivals.is_some() || is_tied(object) => {
                world.present.push(PlacedPod {
                    object: (*value).clone(),
                    pod,
                    node,
                    parts,
                });
            }
            _ if node.is_some() && at.is_none() => {}
            _ if arrivals.is_some() => {}
            at => {
                world
                    .as_it_is
                    .extend(at.map(|node| (world.pods.len(), node, parts)));
                world.pods.push(pod);
            }
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
    let owners = pod.metadata.owner_references.as_deref().unwrap_or_default();
    let is_mirror = pod
        .metadata
        .annotations
        .as_ref()
        .is_some_and(|annotations| annotations.contains_key(MIRROR));
    is_mirror
        || owners
            .iter()
            .any(|owner| owner.kind == "DaemonSet" || owner.kind == "Node")
}

/// A cluster's objects, read.
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
    /// Bytes, and memory units, of a GPU on average.
    per_gpu: [i64; 2],
}

impl<'s> Live<'s> {
    fn of(seen: &'s LiveCluster) -> Result<Self> {
        let nodes: Vec<NodeObject> = seen.nodes.iter().map(read).collect::<Result<_>>()?;
        let pods = seen
            .pods
            .iter()
            .map(|value| Ok((value, read::<PodObject>(value)?)))
            .collect::<Result<Vec<_>>>()?;
        let mut pods: Vec<(&Value, PodObject)> =
            pods.into_iter().filter(|(_, pod)| !is_terminal(pod)).collect();
        pods.sort_by(|(_, one), (_, other)| one.metadata.name.cmp(&other.metadata.name));
        let by_name = nodes
            .iter()
            .enumerate()
            .map(|(at, node)| (node.metadata.name.clone().unwrap_or_default(), at))
            .collect();
        let mut columns: BTreeSet<String> = BTreeSet::new();
        for (_, pod) in &pods {
            columns.extend(
                ResourceAmounts::of_pod(pod)?
                    .besides_cpu_and_memory()
                    .map(|(name, _)| name.to_owned()),
            );
        }
        let first = objects::COLUMNS.map(str::to_owned);
        let rest = columns.into_iter().filter(|name| !first.contains(name));
        let columns = first.iter().cloned().chain(rest).collect();
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

    /// The engine reads devices and records of any writer.
    fn look_into_devices(&mut self) {
        let LiveCluster { nodes, devices, pods } = self.seen;
        let index = offline::index(
            nodes.iter().cloned(),
            devices.iter().cloned(),
            pods.iter().cloned(),
        );
        let (mut bytes, mut n_gpus) = (0_i64, 0_i64);
        for node in &self.nodes {
            let view = index
                .fleet()
                .node_id(node.metadata.name.as_deref().unwrap_or_default())
                .and_then(|id| index.fleet().view(id));
            let gpus = view.map(placement::NodeView::gpus).unwrap_or_default();
            let healthy = || gpus.iter().filter(|view| view.gpu.healthy);
            self.minors.push(
                healthy()
                    .map(|view| i32::try_from(view.gpu.minor).unwrap_or(-1))
                    .collect(),
            );
            for (gpu, view) in healthy().enumerate() {
                n_gpus += 1;
                bytes += i64::try_from(view.gpu.memory_bytes).unwrap_or(0);
                for holder in view.holders.iter().filter(|holder| !holder.suspect) {
                    let percent = holder
                        .amounts
                        .memory
                        .percent_of(view.gpu.total().memory)
                        .max(holder.amounts.core);
                    let part = GpuShare {
                        gpu,
                        milli: i64::from(percent) * PERCENT,
                    };
                    self.held
                        .entry(holder.owner.as_str().to_owned())
                        .or_default()
                        .push(part);
                }
            }
        }
        let units: i128 = self
            .nodes
            .iter()
            .map(|node| ResourceAmounts::allocatable(node).get(GPU_MEM) / THOUSAND)
            .sum();
        let n_gpus = n_gpus.max(1);
        self.per_gpu = [
            (bytes / n_gpus).max(1),
            (i64::try_from(units).unwrap_or(0) / n_gpus).max(1),
        ];
    }

    fn nodes(&self) -> Result<Vec<ReplayNode>> {
        let device = |name: &str| {
            self.seen
                .devices
                .iter()
                .find(|device| device.pointer("/metadata/name").and_then(Value::as_str) == Some(name))
        };
        let node = |((object, value), minors): ((&NodeObject, &Value), &[i32])| {
            let name = object.metadata.name.as_deref().context("a node has no name")?;
            let allocatable = ResourceAmounts::allocatable(object);
            Ok(ReplayNode {
                name: name.into(),
                cpu: narrow(allocatable.get("cpu")),
                memory: narrow(allocatable.get("memory") / THOUSAND),
                extended: self
                    .columns
                    .iter()
                    .map(|column| narrow(allocatable.get(column) / THOUSAND))
                    .collect(),
                minors: minors.into(),
                object: value.clone(),
                device: device(name).cloned(),
            })
        };
        self.nodes
            .iter()
            .zip(&self.seen.nodes)
            .zip(self.minors.iter().map(AsRef::as_ref))
            .map(node)
            .collect()
    }

    fn models(&self) -> Vec<&str> {
        let labels = self.nodes.iter().map(|node| node.metadata.labels.as_ref());
        labels
            .map(|labels| {
                labels
                    .and_then(|labels| labels.get(GPU_MODEL_LABEL))
                    .map_or("", String::as_str)
            })
            .collect()
    }

    fn pod(&self, value: &Value, object: &PodObject) -> Result<ReplayPod> {
        let amounts = ResourceAmounts::of_pod(object)?;
        let column = |name: &str| self.columns.iter().position(|column| column == name);
        let extended = amounts
            .besides_cpu_and_memory()
            .filter_map(|(name, amount)| Some((column(name)?, narrow(amount / THOUSAND))));
        let (cpu, memory) = (
            narrow(amounts.get("cpu")),
            narrow(amounts.get("memory") / THOUSAND),
        );
        let (gpus, milli) = self.gpus(value, object)?;
        let created = object
            .metadata
            .creation_timestamp
            .as_ref()
            .map(|time| time.0.as_second());
        Ok(ReplayPod {
            name: object
                .metadata
                .name
                .as_deref()
                .context("a pod has no name")?
                .into(),
            namespace: object.metadata.namespace.as_deref().unwrap_or("default").into(),
            metadata: metadata(value).into(),
            spec: spec(value).into(),
            cpu,
            memory,
            scored: [
                if cpu > 0 { cpu } else { DEFAULT_CPU },
                if memory > 0 { memory } else { DEFAULT_MEMORY },
            ],
            extended: extended.collect(),
            is_managed: asks_for_devices(value)?,
            gpus,
            milli,
            eligible: None,
            stay: Lifetime {
                from: created,
                to: None,
            },
        })
    }

    /// The number of a pod's GPUs, and its share of each: as it holds them, else of an average GPU.
    fn gpus(&self, value: &Value, object: &PodObject) -> Result<(usize, i64)> {
        if let Some(parts) = object.metadata.uid.as_deref().and_then(|uid| self.held.get(uid)) {
            let milli = parts.iter().map(|part| part.milli).max().unwrap_or(0);
            return Ok(if milli > 0 { (parts.len(), milli) } else { (0, 0) });
        }
        let pod: proto::pod::Pod = read(value)?;
        let request = PodRequest::read(&pod, &ResourceNames::default())
            .ok()
            .flatten()
            .and_then(|request| request.gpus);
        let Some(request) = request else { return Ok((0, 0)) };
        let devices = i64::from(request.devices).max(1);
        let [bytes_per_gpu, units_per_gpu] = self.per_gpu;
        let amount = |amount: u64| i64::try_from(amount).unwrap_or(i64::MAX / WHOLE);
        let memory = match request.memory {
            Memory::Ratio(percent) => amount(percent) * PERCENT / devices,
            Memory::Bytes(bytes) => (amount(bytes) / devices).saturating_mul(WHOLE) / bytes_per_gpu,
            Memory::Units(units) => (amount(units) / devices).saturating_mul(WHOLE) / units_per_gpu,
        };
        let milli = memory.max(amount(request.core) * PERCENT / devices).min(WHOLE);
        let milli = (milli + PERCENT - 1) / PERCENT * PERCENT;
        Ok(if milli > 0 {
            (usize::try_from(devices).unwrap_or(0), milli)
        } else {
            (0, 0)
        })
    }
}

/// True if kube-scheduler, as `deploy/` configures it, calls the extender for a pod.
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
    ]
    .into_iter()
    .chain(VENDOR_GPUS);
    let containers = || pod.spec.init_containers.iter().chain(&pod.spec.containers);
    Ok(managed
        .into_iter()
        .any(|resource| containers().any(|container| container.asks_for(resource))))
}

/// Sets of nodes by the pods' constraints on nodes.
#[derive(Default)]
struct NodeSets {
    numbers: NumberTable,
    sets: Vec<Box<[bool]>>,
}

impl NodeSets {
    fn of(&mut self, pod: &PodObject, live: &Live<'_>) -> Option<usize> {
        let spec = pod.spec.as_ref()?;
        let affinity = spec
            .affinity
            .as_ref()
            .and_then(|affinity| affinity.node_affinity.as_ref());
        let (set, is_new) = self
            .numbers
            .of(&json!([spec.node_selector, spec.tolerations, affinity]).to_string());
        if is_new {
            self.sets.push(
                live.nodes
                    .iter()
                    .map(|node| !repels(pod, node) && allows(pod, node))
                    .collect(),
            );
        }
        Some(set)
    }
}

fn read<T: serde::de::DeserializeOwned>(value: &Value) -> Result<T> {
    let name = || {
        value
            .pointer("/metadata/name")
            .and_then(Value::as_str)
            .unwrap_or("(unnamed)")
            .to_owned()
    };
    serde_json::from_value(value.clone()).with_context(|| format!("{} cannot be read", name()))
}

fn is_terminal(pod: &PodObject) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

fn narrow(amount: i128) -> i64 {
    i64::try_from(amount).unwrap_or(i64::MAX)
}

/// A pod's labels and annotations as its user wrote them, each field with a comma before it.
fn metadata(pod: &Value) -> String {
    let field = |name: &str| {
        pod.pointer(&format!("/metadata/{name}"))
            .and_then(Value::as_object)
            .cloned()
            .unwrap_or_default()
    };
    let annotations: Map<String, Value> = field("annotations")
        .into_iter()
        .filter(|(key, _)| !WRITTEN.contains(&key.as_str()))
        .collect();
    format!(
        r#","labels":{},"annotations":{}"#,
        Value::Object(field("labels")),
        Value::Object(annotations)
    )
}

fn spec(pod: &Value) -> String {
    let mut spec = pod.get("spec").cloned().unwrap_or_default();
    if let Some(spec) = spec.as_object_mut() {
        spec.remove("nodeName");
    }
    spec.to_string()
}
