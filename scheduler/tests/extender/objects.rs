//! Nodes, Device objects and pods as JSON, in few words.

use serde_json::{Value, json};

/// Allocatable amounts so large that kube-scheduler's own sums refuse no pod, and devices alone decide.
fn ample() -> Value {
    let resources = [
        "cpu",
        "memory",
        "pods",
        "aliyun.com/gpu-mem",
        "nvidia.com/gpu",
        "koordinator.sh/gpu.shared",
        "koordinator.sh/gpu-memory",
        "koordinator.sh/gpu-memory-ratio",
        "koordinator.sh/gpu-core",
        "koordinator.sh/gpu",
        "koordinator.sh/rdma",
        "koordinator.sh/fpga",
    ];
    resources
        .into_iter()
        .map(|resource| (resource.to_owned(), json!("1P")))
        .collect()
}

/// A node that our plugin runs on, with its unit in the annotation and its totals in status.
pub(crate) fn node(name: &str, unit: &str) -> Value {
    json!({
        "metadata": {"name": name, "annotations": {"aliyun.com/gpu-mem-unit": unit}},
        "status": {
            "capacity": {"cpu": "8", "koordinator.sh/gpu-memory": "1Gi"},
            "allocatable": ample(),
        },
    })
}

/// A node that the old plugin runs on: two numbers and no unit.
pub(crate) fn old_node(name: &str, n_gpus: u64, units: u64) -> Value {
    json!({
        "metadata": {"name": name},
        "status": {
            "capacity": {"aliyun.com/gpu-count": n_gpus.to_string(), "aliyun.com/gpu-mem": units.to_string()},
            "allocatable": ample(),
        },
    })
}

/// UUID of a node's GPU.
pub(crate) fn uuid(node: &str, minor: usize) -> String {
    format!("GPU-{node}-{minor}")
}

/// One entry of a Device object.
pub(crate) fn gpu(node: &str, minor: usize, mib: u64) -> Value {
    json!({
        "type": "gpu", "id": uuid(node, minor), "minor": minor, "health": true,
        "resources": {
            "koordinator.sh/gpu-core": "100", "koordinator.sh/gpu-memory": format!("{mib}Mi"), "koordinator.sh/gpu-memory-ratio": "100",
        },
    })
}

/// The Device object of a node whose GPUs have these sizes in MiB.
pub(crate) fn device(node: &str, mibs: &[u64]) -> Value {
    let gpus: Vec<Value> = mibs
        .iter()
        .enumerate()
        .map(|(minor, mib)| gpu(node, minor, *mib))
        .collect();
    json!({"metadata": {"name": node}, "spec": {"devices": gpus}})
}

/// A pending pod of one container with these limits.
pub(crate) fn pod(name: &str, limits: &Value) -> Value {
    json!({
        "metadata": {"name": name, "namespace": "default", "uid": format!("uid-{name}")},
        "spec": {"containers": [{"name": "main", "resources": {"limits": limits, "requests": limits}}]},
        "status": {"phase": "Pending"},
    })
}

/// A pending gpushare pod.
pub(crate) fn units(name: &str, units: u64) -> Value {
    pod(name, &json!({"aliyun.com/gpu-mem": units.to_string()}))
}

/// A pending Koordinator pod: the number of devices, and the bytes over all of them.
pub(crate) fn shared(name: &str, devices: u64, mib: u64) -> Value {
    pod(
        name,
        &json!({"koordinator.sh/gpu.shared": devices.to_string(), "koordinator.sh/gpu-memory": format!("{mib}Mi")}),
    )
}

/// The pod, bound to a node.
pub(crate) fn on(mut pod: Value, node: &str) -> Value {
    pod["spec"]["nodeName"] = node.into();
    pod
}

/// The pod with one more annotation.
pub(crate) fn annotated(mut pod: Value, key: &str, value: &str) -> Value {
    pod["metadata"]["annotations"][key] = value.into();
    pod
}

/// The pod as the old extender left it.
pub(crate) fn placed_by_old_extender(
    pod: Value,
    node: &str,
    idx: u64,
    units: u64,
    device_units: u64,
) -> Value {
    let pod = annotated(on(pod, node), "ALIYUN_COM_GPU_MEM_IDX", &idx.to_string());
    let pod = annotated(pod, "ALIYUN_COM_GPU_MEM_POD", &units.to_string());
    let pod = annotated(pod, "ALIYUN_COM_GPU_MEM_DEV", &device_units.to_string());
    let pod = annotated(pod, "ALIYUN_COM_GPU_MEM_ASSUME_TIME", "1700000000000000000");
    annotated(pod, "ALIYUN_COM_GPU_MEM_ASSIGNED", "true")
}

/// The pod in another phase.
pub(crate) fn phase(mut pod: Value, phase: &str) -> Value {
    pod["status"]["phase"] = phase.into();
    pod
}
