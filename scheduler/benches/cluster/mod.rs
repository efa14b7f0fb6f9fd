//! Objects of a cluster that benchmarks are about: nodes of eight GPUs of 80 GiB, and pods that hold a part of one.

use serde_json::{Value, json};

/// GPUs of every node.
pub(crate) const N_GPUS: usize = 8;

pub(crate) fn name(at: usize) -> String {
    format!("node-{at:05}.example.internal")
}

pub(crate) fn node(at: usize) -> Value {
    json!({
        "metadata": {"name": name(at), "annotations": {"aliyun.com/gpu-mem-unit": "MiB"}},
        "status": {"capacity": {"aliyun.com/gpu-count": "8", "koordinator.sh/gpu-memory": "655360Mi"}},
    })
}

pub(crate) fn gpu(at: usize, minor: usize, topology: &Value) -> Value {
    json!({
        "type": "gpu", "id": format!("GPU-{at:08}-{minor}"), "minor": minor, "health": true, "topology": topology,
        "resources": {"koordinator.sh/gpu-core": "100", "koordinator.sh/gpu-memory": "81920Mi", "koordinator.sh/gpu-memory-ratio": "100"},
    })
}

pub(crate) fn device(at: usize) -> Value {
    let gpus = (0..N_GPUS).map(|minor| gpu(at, minor, &Value::Null));
    json!({"metadata": {"name": name(at)}, "spec": {"devices": gpus.collect::<Vec<_>>()}})
}

/// A pod that holds memory of one GPU, with these fields besides: the path of the parent, the key and the value of each.
pub(crate) fn holder<'f>(
    at: usize,
    minor: usize,
    memory: &str,
    fields: impl IntoIterator<Item = (&'f str, &'f str, Value)>,
) -> Value {
    let record = json!({"gpu": [{"minor": minor, "id": format!("GPU-{at:08}-{minor}"), "resources": {"koordinator.sh/gpu-memory": memory}}]});
    let limits = json!({"koordinator.sh/gpu.shared": "1", "koordinator.sh/gpu-memory": memory});
    let mut pod = json!({
        "metadata": {
            "name": format!("holder-{at}-{minor}"), "namespace": "default", "uid": format!("uid-{at}-{minor}"),
            "annotations": {"scheduling.koordinator.sh/device-allocated": record.to_string()},
        },
        "spec": {"nodeName": name(at), "containers": [{"name": "c", "resources": {"limits": limits}}]},
        "status": {"phase": "Running"},
    });
    for (parent, key, value) in fields {
        set(&mut pod, parent, key, value);
    }
    pod
}

/// Sets a field of an object, if its parent exists.
pub(crate) fn set(object: &mut Value, parent: &str, key: &str, value: Value) {
    if let Some(Value::Object(fields)) = object.pointer_mut(parent) {
        fields.insert(key.to_owned(), value);
    }
}
