//! Translates the rows of a trace to the objects that users, kubelets and plugins would write: nodes, Device
//! objects and pods.

use anyhow::Result;
use proto::device::{GPU_MODEL_LABEL, SERVES_VENDOR_LABEL};
use proto::resource::{GPU_CORE, GPU_COUNT, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED};
use serde_json::{Map, Value, json};

use super::seen::{self, ClusterObjects};
use super::trace::{NodeRow, PERCENT, TracePod};
use super::world::ReplayInput;
use kit::pods::{set, set_in};
use kit::vendor_plugin::NVIDIA_GPU;

/// Memory of every GPU, in GiB. Pods of a trace ask for parts of a GPU, so that the amount makes no difference.
const GIB_OF_GPU: u32 = 16;
/// The amount of `gpu.shared`, of memory ratio and of core that one GPU adds to its node.
const PER_GPU: usize = 100;
const NAMESPACE: &str = "default";

/// The replay's input from a trace, and from pods (`present`) that are bound from the start.
pub fn world(nodes: &[NodeRow], pods: &[TracePod], present: Vec<Value>) -> Result<ReplayInput> {
    let serve_vendor_resource = pods.iter().any(|pod| pod.wants_vendor_resource);
    let mut cluster = ClusterObjects {
        pods: present,
        ..ClusterObjects::default()
    };
    for row in nodes {
        cluster.nodes.push(node(row, serve_vendor_resource));
        let n_gpus = u32::try_from(row.gpus)?;
        let mut device = device(&row.name, n_gpus, GIB_OF_GPU);
        if serve_vendor_resource {
            set_in(
                &mut device,
                "metadata",
                "labels",
                json!({SERVES_VENDOR_LABEL: "true"}),
            );
        }
        cluster.devices.push(device);
    }
    Ok(ReplayInput {
        // Pods of a trace ask for whole percents, so the engine counts exactly what the records say.
        is_in_percents: true,
        ..seen::world(&cluster, Some(pods))?
    })
}

/// The node of a trace as kubelet and gpushare's plugin would report it, with `nvidia.com/gpu` if the plugin serves that too.
fn node(row: &NodeRow, serve_vendor_resource: bool) -> Value {
    let percents = (row.gpus * PER_GPU).to_string();
    let mut amounts = json!({
        "cpu": format!("{}m", row.cpu_milli), "memory": format!("{}Mi", row.memory_mib), "pods": "1000",
        GPU_COUNT: row.gpus.to_string(), GPU_MEMORY: format!("{}Gi", row.gpus * GIB_OF_GPU as usize),
        GPU_SHARED: percents, GPU_MEMORY_RATIO: percents, GPU_CORE: percents,
    });
    if serve_vendor_resource {
        set(&mut amounts, NVIDIA_GPU, json!(row.gpus.to_string()));
    }
    json!({"metadata": {"name": row.name, "labels": {GPU_MODEL_LABEL: row.model}}, "status": {"capacity": amounts, "allocatable": amounts}})
}

pub fn device(name: &str, n_gpus: u32, gib_of_gpu: u32) -> Value {
    let gpu = |minor: u32| {
        json!({
            "type": "gpu", "id": format!("GPU-{name}-{minor}"), "minor": minor, "health": true,
            "resources": {GPU_MEMORY: format!("{gib_of_gpu}Gi"), GPU_CORE: "100", GPU_MEMORY_RATIO: "100"},
        })
    };
    json!({
        "apiVersion": "scheduling.koordinator.sh/v1alpha1", "kind": "Device", "metadata": {"name": name},
        "spec": {"devices": (0..n_gpus).map(gpu).collect::<Vec<_>>()},
    })
}

/// The pod of a trace: its resources, and the GPU models that it accepts.
pub fn pod(row: &TracePod) -> Value {
    let mut limits = Map::new();
    if row.wants_vendor_resource {
        limits.insert(NVIDIA_GPU.to_owned(), json!(row.gpus.to_string()));
    } else if row.gpus > 0 {
        let percent = i64::try_from(row.gpus).unwrap_or(0) * row.gpu_milli / PERCENT;
        limits.insert(GPU_SHARED.to_owned(), json!(row.gpus.to_string()));
        for resource in [GPU_MEMORY_RATIO, GPU_CORE] {
            limits.insert(resource.to_owned(), json!(percent.to_string()));
        }
    }
    let mut requests = limits.clone();
    for (name, amount, unit) in [("cpu", row.cpu_milli, "m"), ("memory", row.memory_mib, "Mi")] {
        if amount > 0 {
            requests.insert(name.to_owned(), json!(format!("{amount}{unit}")));
        }
    }
    let mut spec = json!({"containers": [{"name": "main", "image": "busybox:1.36", "resources": {"limits": limits, "requests": requests}}]});
    if !row.models.is_empty() {
        let models: Vec<&str> = row.models.split('|').collect();
        let term =
            json!({"matchExpressions": [{"key": GPU_MODEL_LABEL, "operator": "In", "values": models}]});
        let affinity = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}});
        set(&mut spec, "affinity", affinity);
    }
    json!({"metadata": {"name": row.name, "namespace": NAMESPACE}, "spec": spec})
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::super::trace::{nodes_of, pods_of};
    use super::super::world::ReplayPod;
    use super::*;

    #[test]
    fn a_replayed_pod_has_the_fields_that_a_user_writes() {
        let nodes =
            nodes_of("sn,cpu_milli,memory_mib,gpu,model\na,64000,262144,2,P100\nb,64000,262144,2,T4\n")
                .unwrap();
        let pods = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\np2,4000,8192,2,1000,T4|V100\np1,500,0,1,460,\np0,1000,64,0,0,\n";
        let world = world(&nodes, &pods_of(pods).unwrap(), Vec::new()).unwrap();
        let specs: Vec<String> = world
            .pods
            .iter()
            .map(|pod| format!("{} {:?} {}", pod.name, pod.eligible, pod.object["spec"]))
            .collect();
        assert_snapshot!(specs.join("\n"), @r#"
        p0 None {"containers":[{"image":"busybox:1.36","name":"main","resources":{"limits":{},"requests":{"cpu":"1000m","memory":"64Mi"}}}]}
        p1 None {"containers":[{"image":"busybox:1.36","name":"main","resources":{"limits":{"koordinator.sh/gpu-core":"46","koordinator.sh/gpu-memory-ratio":"46","koordinator.sh/gpu.shared":"1"},"requests":{"cpu":"500m","koordinator.sh/gpu-core":"46","koordinator.sh/gpu-memory-ratio":"46","koordinator.sh/gpu.shared":"1"}}}]}
        p2 Some(0) {"affinity":{"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":[{"matchExpressions":[{"key":"node.koordinator.sh/gpu-model","operator":"In","values":["T4","V100"]}]}]}}},"containers":[{"image":"busybox:1.36","name":"main","resources":{"limits":{"koordinator.sh/gpu-core":"200","koordinator.sh/gpu-memory-ratio":"200","koordinator.sh/gpu.shared":"2"},"requests":{"cpu":"4000m","koordinator.sh/gpu-core":"200","koordinator.sh/gpu-memory-ratio":"200","koordinator.sh/gpu.shared":"2","memory":"8192Mi"}}}]}
        "#);
        assert_eq!(world.eligible, [[false, true].into()]);
        assert_eq!(
            (
                world.capacity(),
                world.pods.iter().map(ReplayPod::demand).sum::<i64>()
            ),
            (4000, 2460)
        );
    }
}
