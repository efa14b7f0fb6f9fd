//! Translates the rows of a trace to the objects that users, kubelets and plugins would write: nodes, Device
//! objects and pods.

use proto::device::{GPU_MODEL_LABEL, SERVES_VENDOR_LABEL};
use proto::resource::{GPU_CORE, GPU_COUNT, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED};
use serde_json::{Map, Value, json};

use super::kube::{DEFAULT_CPU, DEFAULT_MEMORY};
use super::trace::{NodeRow, PERCENT, TracePod};
use super::world::{Lifetime, NumberTable, ReplayInput, ReplayNode, ReplayPod};
use kit::pods::set;
use kit::vendor_plugin::NVIDIA_GPU;

const MIB: i64 = 1 << 20;
/// Memory of every GPU, in GiB. Pods of a trace ask for parts of a GPU, so that the amount makes no difference.
const GIB_OF_GPU: usize = 16;
/// The amount of `gpu.shared`, of memory ratio and of core that one GPU adds to its node.
const PER_GPU: i64 = 100;
const NAMESPACE: &str = "default";
/// The extended resources of a trace; further resources of a live cluster come after these.
pub const COLUMNS: [&str; 4] = [GPU_SHARED, GPU_MEMORY_RATIO, GPU_CORE, NVIDIA_GPU];

/// The replay's input from a trace.
pub fn world(nodes: &[NodeRow], pods: &[TracePod]) -> ReplayInput {
    let serves_vendor = pods.iter().any(|pod| pod.is_vendor);
    let (mut models, mut replayed) = (Vec::new(), Vec::new());
    for row in nodes {
        models.push(row.model.as_str());
        replayed.push(node(row, serves_vendor));
    }
    let (pods, eligible) = self::pods(pods, &models);
    ReplayInput {
        nodes: replayed,
        pods,
        columns: COLUMNS.map(str::to_owned).to_vec(),
        eligible,
        is_exact: true,
        ..ReplayInput::default()
    }
}

/// The pods in the order of their names, and the sets of nodes that they may go to; `models` are the nodes' GPU
/// models.
pub fn pods(rows: &[TracePod], models: &[&str]) -> (Vec<ReplayPod>, Vec<Box<[bool]>>) {
    let mut sets = NumberTable::default();
    let mut eligible = Vec::new();
    let mut pods = Vec::with_capacity(rows.len());
    for row in rows {
        let mut pod = pod(row);
        if !row.models.is_empty() {
            let (set, is_new) = sets.of(&row.models);
            if is_new {
                eligible.push(accepting(&row.models, models));
            }
            pod.eligible = Some(set);
        }
        pods.push(pod);
    }
    pods.sort_by(|one, other| one.name.cmp(&other.name));
    (pods, eligible)
}

/// True for each node whose GPU model is one of the `wanted`, which stand between vertical bars.
fn accepting(wanted: &str, models: &[&str]) -> Box<[bool]> {
    let wanted: Vec<&str> = wanted.split('|').collect();
    let mut accepted = Vec::with_capacity(models.len());
    for model in models {
        accepted.push(wanted.contains(model));
    }
    accepted.into()
}

/// The node of a trace as the plugin would report it, with its Device object.
fn node(row: &NodeRow, serves_vendor: bool) -> ReplayNode {
    let n_gpus = i64::try_from(row.gpus).unwrap_or(0);
    let percents = (n_gpus * PER_GPU).to_string();
    let n_vendor = if serves_vendor { n_gpus } else { 0 };
    let mut amounts = json!({
        "cpu": format!("{}m", row.cpu_milli), "memory": format!("{}Mi", row.memory_mib), "pods": "1000",
        GPU_COUNT: row.gpus.to_string(), GPU_MEMORY: format!("{}Gi", row.gpus * GIB_OF_GPU),
        GPU_SHARED: percents, GPU_MEMORY_RATIO: percents, GPU_CORE: percents,
    });
    let mut labels = json!({GPU_MODEL_LABEL: row.model});
    if serves_vendor {
        set(&mut amounts, NVIDIA_GPU, json!(n_gpus.to_string()));
        set(&mut labels, SERVES_VENDOR_LABEL, json!("true"));
    }
    let mut devices = Vec::with_capacity(row.gpus);
    for minor in 0..row.gpus {
        devices.push(json!({
            "type": "gpu", "id": format!("GPU-{}-{minor}", row.name), "minor": minor, "health": true,
            "resources": {GPU_MEMORY: format!("{GIB_OF_GPU}Gi"), GPU_CORE: "100", GPU_MEMORY_RATIO: "100"},
        }));
    }
    ReplayNode {
        name: row.name.as_str().into(),
        cpu: row.cpu_milli,
        memory: row.memory_mib * MIB,
        extended: [n_gpus * PER_GPU, n_gpus * PER_GPU, n_gpus * PER_GPU, n_vendor].into(),
        minors: (0..i32::try_from(row.gpus).unwrap_or(0)).collect(),
        object: json!({"metadata": {"name": row.name, "labels": labels}, "status": {"capacity": amounts, "allocatable": amounts}}),
        device: Some(json!({"metadata": {"name": row.name, "labels": labels}, "spec": {"devices": devices}})),
    }
}

/// The pod of a trace in the form of a replay.
fn pod(row: &TracePod) -> ReplayPod {
    let (cpu, memory) = (row.cpu_milli, row.memory_mib * MIB);
    let n_gpus = i64::try_from(row.gpus).unwrap_or(0);
    let percent = n_gpus * row.gpu_milli / PERCENT;
    let extended: Vec<(usize, i64)> = match row {
        TracePod { gpus: 0, .. } => Vec::new(),
        TracePod { is_vendor: true, .. } => vec![(3, n_gpus)],
        _ => (0..).zip([n_gpus, percent, percent]).collect(),
    };
    ReplayPod {
        name: row.name.as_str().into(),
        namespace: NAMESPACE.into(),
        metadata: String::new().into(),
        spec: spec(row, &extended).to_string().into(),
        cpu,
        memory,
        scored: [
            if cpu > 0 { cpu } else { DEFAULT_CPU },
            if memory > 0 { memory } else { DEFAULT_MEMORY },
        ],
        extended: extended.into(),
        is_managed: row.gpus > 0,
        gpus: row.gpus,
        milli: row.gpu_milli,
        eligible: None,
        stay: Lifetime {
            from: row.created,
            to: row.deleted,
        },
    }
}

/// The spec of a trace's pod: its resources, and the GPU models that it accepts.
fn spec(row: &TracePod, extended: &[(usize, i64)]) -> Value {
    let mut limits = Map::new();
    for (column, amount) in extended {
        if let Some(name) = COLUMNS.get(*column) {
            limits.insert((*name).to_owned(), json!(amount.to_string()));
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
    spec
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::super::trace::{nodes_of, pods_of};
    use super::*;

    #[test]
    fn a_replayed_pod_has_the_fields_that_a_user_writes() {
        let nodes =
            nodes_of("sn,cpu_milli,memory_mib,gpu,model\na,64000,262144,2,P100\nb,64000,262144,2,T4\n")
                .unwrap();
        let pods = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\np2,4000,8192,2,1000,T4|V100\np1,500,0,1,460,\np0,1000,64,0,0,\n";
        let world = world(&nodes, &pods_of(pods).unwrap());
        let specs: Vec<String> = world
            .pods
            .iter()
            .map(|pod| format!("{} {:?} {}", pod.name, pod.eligible, pod.spec))
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
