//! Plans on 5,000 nodes of eight GPUs with 40,000 holders and 10,000 disruption budgets: the time of each, and the longest time
//! that a writer waits for the index meanwhile, which a read lock of the plan holds up.

#![expect(
    clippy::print_stdout,
    reason = "criterion shows the means of waits, and their maximum counts"
)]

mod budgets;
mod cluster;
mod waits;

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use proto::read_api::{PlanGoal, PlanLimits, PlanRequest, PodVolumes};
use scheduler::index::{Index, Shared};
use scheduler::offline;
use scheduler::read_api::plan;
use serde_json::{Value, json};

use cluster::{N_GPUS, device, holder, name, node, set};
use waits::longest_wait;

const N_NODES: usize = 5_000;
/// The node whose pods have volumes.
const WITH_VOLUMES: usize = 18;
/// A day after the start of the pods.
const NOW: u64 = 1_767_225_600 + 86_400;

fn labelled_node(at: usize) -> Value {
    let labels = (0..16).map(|label| (format!("example.com/label-{label}"), Value::from("")));
    let mut node = node(at);
    set(&mut node, "/metadata", "labels", Value::Object(labels.collect()));
    set(
        &mut node,
        "/status",
        "allocatable",
        json!({"cpu": "128", "memory": "1Ti"}),
    );
    node
}

/// A pod of a controller that holds 10 to 70 GiB of one GPU.
fn pod_of_app(at: usize, minor: usize) -> Value {
    let memory = format!("{}Mi", 10_240 * (1 + (at * 5 + minor * 3) % 7));
    let owner =
        json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true}]);
    let volumes = if at == WITH_VOLUMES {
        json!([{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}])
    } else {
        json!([])
    };
    let fields = [
        ("/metadata", "labels", budgets::labels(at, minor)),
        ("/metadata", "ownerReferences", owner),
        ("/spec", "volumes", volumes),
        (
            "/spec/containers/0/resources",
            "requests",
            json!({"cpu": "4", "memory": "8Gi"}),
        ),
        ("/status", "startTime", json!("2026-01-01T00:00:00Z")),
    ];
    holder(at, minor, &memory, fields)
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

fn shared_index() -> Shared<Index> {
    let nodes = (0..N_NODES).map(labelled_node);
    let devices = (0..N_NODES).map(device);
    let pods = (0..N_NODES).flat_map(|at| (0..N_GPUS).map(move |minor| pod_of_app(at, minor)));
    let mut index = offline::index(nodes, devices, pods);
    budgets::apply(&mut index, N_NODES);
    Shared::new(index)
}

fn bench(criterion: &mut Criterion) {
    let index = shared_index();
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
            bencher.iter(|| plan(black_box(&index), request, NOW, &|| false, || {}));
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
                let plan = || plan(&index, request, NOW, &|| false, || {}).is_ok();
                let waits = (0..n).map(|_| longest_wait(&index, plan));
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
