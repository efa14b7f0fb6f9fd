//! A cluster of objects: nodes of eight GPUs as the plugin reports them, and pods as the scheduler binds them.
//!
//! This file makes the objects and puts them into the testbed's API server; `schedule` creates the same objects
//! on a real API server.

use anyhow::{Context, Result};
use proto::extender::ExtenderBindingArgs;
use proto::record::{
    BIND_TIMESTAMP, DEVICE_ALLOCATED, MEM_ASSIGNED, MEM_ASSUME_TIME, MEM_DEV, MEM_IDX, MEM_POD,
};
use proto::resource::{GPU_CORE, GPU_COUNT, GPU_MEM, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED};
use serde_json::{Value, json};

use crate::replay::objects;
use kit::apiserver::ApiObjects;
use kit::pods::{set, set_in};

const GPUS: u32 = 8;
pub(super) const GIB_OF_GPU: u32 = 16;
pub(super) const DEVICES: &str = "devices.scheduling.koordinator.sh";
pub(super) const NAMESPACE: &str = "default";

/// Most pods that are bound to one node before the measurement: one for each GPU, which holds half of that GPU.
pub(super) const MOST_PODS: u32 = GPUS;

pub(super) fn node_name(idx: u32) -> String {
    format!("node-{idx:05}.example.com")
}

/// Creates nodes, their Device objects, and bound pods that hold half a GPU each.
pub(super) fn fill(objects: &ApiObjects, n_nodes: u32, n_pods: u32, pod_bytes: usize) -> Result<()> {
    objects.create("customresourcedefinitions.apiextensions.k8s.io", crd()?)?;
    for idx in 0..n_nodes {
        let name = node_name(idx);
        objects.create("nodes", node(&name))?;
        objects.create(DEVICES, device(&name))?;
    }
    for idx in 0..n_pods {
        objects.create("pods", bound_pod(idx, n_nodes, pod_bytes))?;
    }
    Ok(())
}

/// The `CustomResourceDefinition` of Device objects, as it is shipped in `deploy/`.
pub(super) fn crd() -> Result<Value> {
    let crd = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/base/crd.yaml"));
    serde_yaml_ng::from_str(crd).context("the CustomResourceDefinition is malformed")
}

pub(super) fn pending(objects: &ApiObjects, n_nodes: u32, n_pods: u32) -> Result<Vec<ExtenderBindingArgs>> {
    (0..n_pods)
        .map(|idx| pending_pod(objects, &format!("pod-{idx:05}"), idx % n_nodes))
        .collect()
}

/// Creates a pod without a node, and returns the request to bind it to a node.
pub(super) fn pending_pod(objects: &ApiObjects, name: &str, node_idx: u32) -> Result<ExtenderBindingArgs> {
    let pod = objects.create("pods", pod(name, "1"))?;
    let uid = pod.pointer("/metadata/uid").and_then(Value::as_str);
    Ok(ExtenderBindingArgs {
        pod_name: name.to_owned(),
        pod_namespace: NAMESPACE.to_owned(),
        pod_uid: uid.context("a pod has no UID")?.to_owned(),
        node: node_name(node_idx),
    })
}

pub(super) fn node(name: &str) -> Value {
    let gib = GPUS * GIB_OF_GPU;
    let amounts = json!({
        "cpu": "64", "memory": "512Gi", "pods": "250",
        GPU_MEM: gib.to_string(), GPU_COUNT: GPUS.to_string(), GPU_SHARED: (GPUS * 100).to_string(),
        GPU_MEMORY: format!("{gib}Gi"), GPU_MEMORY_RATIO: (GPUS * 100).to_string(), GPU_CORE: (GPUS * 100).to_string(),
    });
    json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "annotations": {format!("{GPU_MEM}-unit"): "GiB"}},
        "status": {"capacity": amounts, "allocatable": amounts, "conditions": [{"type": "Ready", "status": "True"}]},
    })
}

pub(super) fn device(name: &str) -> Value {
    objects::device(name, GPUS, GIB_OF_GPU)
}

/// A pod without a node that asks for memory units.
pub(super) fn pod(name: &str, units: &str) -> Value {
    let container = json!({"name": "main", "image": "busybox:1.36", "resources": {"limits": {GPU_MEM: units}, "requests": {GPU_MEM: units}}});
    let metadata = json!({"name": name, "namespace": NAMESPACE});
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}})
}

/// A pod of about `bytes` that holds half of a GPU; consecutive pods are on consecutive nodes.
pub(super) fn bound_pod(idx: u32, n_nodes: u32, bytes: usize) -> Value {
    let (node, minor) = (node_name(idx % n_nodes), idx / n_nodes % GPUS);
    let units = GIB_OF_GPU / 2;
    let mut pod = pod(&format!("bound-{idx:06}"), &units.to_string());
    // The annotations below add about 600 bytes to the pod.
    let size = pod.to_string().len() + 600;
    let mut annotations = record(&node, minor, units, u64::from(idx));
    // Real pods carry environment, volumes and managed fields: the scheduler has to read past them.
    let padding = "x".repeat(bytes.saturating_sub(size));
    set(&mut annotations, "example.com/padding", json!(padding));
    set_in(&mut pod, "metadata", "annotations", annotations);
    set_in(&mut pod, "spec", "nodeName", json!(node));
    pod
}

/// The annotations that the scheduler writes into a pod to which it gives `gib` of a GPU; `nanos` keeps the assume times apart.
pub(super) fn record(node: &str, minor: u32, gib: u32, nanos: u64) -> Value {
    let resources =
        json!({GPU_MEMORY: format!("{gib}Gi"), GPU_MEMORY_RATIO: (100 * gib / GIB_OF_GPU).to_string()});
    let record =
        json!({"gpu": [{"minor": minor, "id": format!("GPU-{node}-{minor}"), "resources": resources}]});
    let time = (1_700_000_000_000_000_000 + nanos).to_string();
    json!({
        DEVICE_ALLOCATED: record.to_string(), BIND_TIMESTAMP: time, MEM_ASSUME_TIME: time, MEM_IDX: minor.to_string(),
        MEM_POD: gib.to_string(), MEM_DEV: GIB_OF_GPU.to_string(), MEM_ASSIGNED: "true",
    })
}
