//! Plans on 5,000 nodes of eight GPUs with 40,000 holders and 10,000 disruption budgets: the time of each, and the longest time that
//! a writer waits for the index meanwhile, which a read lock of the plan holds up.

#![expect(
    clippy::print_stdout,
    reason = "criterion shows the means of waits, and their maximum counts"
)]

use std::collections::BTreeMap;
use std::hint::black_box;
use std::thread;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use proto::read_api::{PlanGoal, PlanLimits, PlanRequest, PodVolumes};
use scheduler::index::{Index, Shared};
use scheduler::offline;
use scheduler::read_api::plan;
use scheduler::watch::ObjectStore;
use serde_json::{Value, json};

const N_NODES: usize = 5_000;
const N_GPUS: usize = 8;
/// Pods of one application, which have a budget.
const PODS_OF_APP: usize = 4;
/// The node whose pods have volumes.
const WITH_VOLUMES: usize = 18;
/// A day after the start of the pods.
const NOW: u64 = 1_767_225_600 + 86_400;

fn name(at: usize) -> String {
    format!("node-{at:05}.example.internal")
}

fn node(at: usize) -> Value {
    let labels: BTreeMap<String, &str> = (0..16)
        .map(|label| (format!("example.com/label-{label}"), ""))
        .collect();
    json!({
        "metadata": {"name": name(at), "labels": labels, "annotations": {"aliyun.com/gpu-mem-unit": "MiB"}},
        "status": {
            "capacity": {"aliyun.com/gpu-count": "8", "koordinator.sh/gpu-memory": "655360Mi"},
            "allocatable": {"cpu": "128", "memory": "1Ti"},
        },
    })
}

fn device(at: usize) -> Value {
    let gpu = |minor: usize| {
        let resources = json!({"koordinator.sh/gpu-core": "100", "koordinator.sh/gpu-memory": "81920Mi", "koordinator.sh/gpu-memory-ratio": "100"});
        json!({"type": "gpu", "id": format!("GPU-{at:08}-{minor}"), "minor": minor, "health": true, "resources": resources})
    };
    json!({"metadata": {"name": name(at)}, "spec": {"devices": (0..N_GPUS).map(gpu).collect::<Vec<_>>()}})
}

/// A pod of a controller that holds 10 to 70 GiB of one GPU.
fn holder(at: usize, minor: usize) -> Value {
    let memory = format!("{}Mi", 10_240 * (1 + (at * 5 + minor * 3) % 7));
    let record = json!({"gpu": [{"minor": minor, "id": format!("GPU-{at:08}-{minor}"), "resources": {"koordinator.sh/gpu-memory": memory}}]});
    let resources = json!({"requests": {"cpu": "4", "memory": "8Gi"}, "limits": {"koordinator.sh/gpu.shared": "1", "koordinator.sh/gpu-memory": memory}});
    let app = (at * N_GPUS + minor) / PODS_OF_APP;
    let volumes = if at == WITH_VOLUMES {
        json!([{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}])
    } else {
        json!([])
    };
    json!({
        "metadata": {
            "name": format!("holder-{at}-{minor}"), "namespace": "default", "uid": format!("uid-{at}-{minor}"),
            "labels": {"app": format!("app-{app}"), "pod-template-hash": "5d8f7c9b6"},
            "annotations": {"scheduling.koordinator.sh/device-allocated": record.to_string()},
            "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true}],
        },
        "spec": {"nodeName": name(at), "volumes": volumes, "containers": [{"name": "c", "resources": resources}]},
        "status": {"phase": "Running", "startTime": "2026-01-01T00:00:00Z"},
    })
}

fn budget(app: usize) -> Value {
    json!({
        "metadata": {"name": format!("budget-{app}"), "namespace": "default"},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": {"app": format!("app-{app}")}}},
        "status": {"disruptionsAllowed": 1, "currentHealthy": 4, "desiredHealthy": 3, "expectedPods": 4},
    })
}

/// Volumes with the longest node affinity that a request may have, another one for each pod of a node.
fn volumes() -> PodVolumes {
    let of_pod = |minor: usize| {
        let requirement = json!({"key": format!("key-{minor}"), "operator": "DoesNotExist"});
        let selector = json!({"nodeSelectorTerms": [{"matchExpressions": vec![requirement; 254]}]});
        let selectors = serde_json::from_value(json!([selector])).unwrap_or_default();
        (format!("uid-{WITH_VOLUMES}-{minor}"), selectors)
    };
    (0..N_GPUS).map(of_pod).collect()
}

fn cluster() -> Shared<Index> {
    let nodes = (0..N_NODES).map(node);
    let devices = (0..N_NODES).map(device);
    let pods = (0..N_NODES).flat_map(|at| (0..N_GPUS).map(move |minor| holder(at, minor)));
    let mut index = offline::index(nodes, devices, pods);
    for app in 0..N_NODES * N_GPUS / PODS_OF_APP {
        if let Ok(budget) = serde_json::from_value::<PodDisruptionBudget>(budget(app)) {
            index.apply(budget);
        }
    }
    Shared::new(index)
}

/// The longest wait of a writer while a plan is made.
fn longest_wait(index: &Shared<Index>, request: &PlanRequest) -> Duration {
    thread::scope(|scope| {
        let planning = scope.spawn(|| plan(index, request, NOW, &|| false).is_ok());
        let mut longest = Duration::ZERO;
        while !planning.is_finished() {
            let began = Instant::now();
            drop(index.write());
            longest = longest.max(began.elapsed());
            thread::yield_now();
        }
        longest
    })
}

fn bench(criterion: &mut Criterion) {
    let index = cluster();
    let goals = [
        ("empty-node", PlanGoal::EmptyNode { node: name(17) }),
        (
            "volumes",
            PlanGoal::EmptyNode {
                node: name(WITH_VOLUMES),
            },
        ),
        (
            "free",
            PlanGoal::Free {
                bytes: 80 << 30,
                gpus: 1,
                nodes: None,
            },
        ),
        ("join", PlanGoal::Join {}),
    ];
    let requests = goals.map(|(what, goal)| {
        let limits = PlanLimits {
            max_moves: 20,
            volumes: if what == "volumes" {
                volumes()
            } else {
                PodVolumes::new()
            },
            ..PlanLimits::default()
        };
        (what, PlanRequest { goal, limits })
    });
    let mut group = criterion.benchmark_group("POST plan");
    group.sample_size(10);
    for (what, request) in &requests {
        group.bench_function(*what, |bencher| {
            bencher.iter(|| plan(black_box(&index), request, NOW, &|| false));
        });
    }
    group.finish();
    let mut group = criterion.benchmark_group("longest wait of a writer during POST plan");
    group.sample_size(10);
    let mut longest = Vec::new();
    for (what, request) in &requests {
        let mut of_all = Duration::ZERO;
        group.bench_function(*what, |bencher| {
            bencher.iter_custom(|n| {
                let waits = (0..n).map(|_| longest_wait(&index, request));
                waits.inspect(|wait| of_all = of_all.max(*wait)).sum()
            });
        });
        longest.push(format!("{what} {of_all:?}"));
    }
    group.finish();
    println!("longest of all waits: {}", longest.join(", "));
}

criterion_group!(benches, bench);
criterion_main!(benches);
