//! A decision to make room on 5,000 nodes of eight GPUs, each with a pod of low priority, with 10,000 disruption budgets and as
//! many refused pods as are remembered: its time, and the longest time that a writer waits for the index meanwhile.

#![expect(
    clippy::print_stdout,
    reason = "criterion shows the means of waits, and their maximum counts"
)]

mod budgets;
mod cluster;
mod waits;

use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use daemon::events;
use kube::Client;
use prometheus_client::registry::Registry;
use scheduler::extender::{Extender, filter};
use scheduler::make_room::{RoomMaker, RoomSettings};
use scheduler::metrics::RoomMetrics;
use scheduler::offline;
use serde_json::{Value, json};

use cluster::{N_GPUS, device, holder, name, node};
use waits::longest_wait;

const N_NODES: usize = 5_000;
/// As many refused pods as the leader remembers.
const N_REFUSED: usize = 1_024;

/// A pod of a controller that holds half of one GPU's memory, of a priority that rises with the number of the GPU.
fn low(at: usize, minor: usize) -> Value {
    let owner =
        json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true}]);
    let fields = [
        ("/metadata", "labels", budgets::labels(at, minor)),
        ("/metadata", "ownerReferences", owner),
        ("/spec", "priority", minor.into()),
    ];
    holder(at, minor, "40960Mi", fields)
}

fn important(at: usize) -> Value {
    let limits = json!({"koordinator.sh/gpu.shared": "1", "koordinator.sh/gpu-memory": "41000Mi"});
    let condition = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable"});
    json!({
        "metadata": {"name": format!("high-{at}"), "namespace": "default", "uid": format!("uid-high-{at}")},
        "spec": {"priority": 1000, "containers": [{"name": "c", "resources": {"limits": limits}}]},
        "status": {"phase": "Pending", "conditions": [condition]},
    })
}

/// An extender that has refused the pods on all nodes.
fn extender() -> Extender {
    let nodes = || 0..N_NODES;
    let holders = nodes().flat_map(|at| (0..N_GPUS).map(move |minor| low(at, minor)));
    let pods = holders.chain((0..N_REFUSED).map(important));
    let mut index = offline::index(nodes().map(node), nodes().map(device), pods);
    budgets::apply(&mut index, N_NODES);
    let mut extender = offline::extender(index);
    extender.evicts_for_room = Some(true);
    let names: Vec<String> = nodes().map(name).collect();
    for at in 0..N_REFUSED {
        let body = json!({"Pod": important(at), "NodeNames": names}).to_string();
        let _ = filter::answer(&extender, body.as_bytes(), Instant::now());
    }
    extender
}

fn bench(criterion: &mut Criterion) {
    let runtime = tokio::runtime::Runtime::new();
    let _entered = runtime.as_ref().map(tokio::runtime::Runtime::enter);
    let refuse_connection = tower::service_fn(|_: http::Request<kube::client::Body>| async {
        Err::<http::Response<kube::client::Body>, _>(std::io::Error::from(
            std::io::ErrorKind::ConnectionRefused,
        ))
    });
    let client = Client::new(refuse_connection, "default");
    let (recorder, _) = events::recorder(&client.clone().into(), "bench", None);
    let settings = RoomSettings {
        evicts: false,
        after: Duration::ZERO,
        per_hour: 0,
        below: 1_000_000,
        hold: Duration::ZERO,
    };
    let metrics = RoomMetrics::register(&mut Registry::default());
    let extender = Arc::new(extender());
    let maker = RoomMaker::new(Arc::clone(&extender), (client, recorder), metrics, settings);
    let search = || assert_eq!(maker.search(), Some(64), "as many nodes as are searched at most");
    criterion.bench_function("make room", |bencher| bencher.iter(search));
    let mut longest = Duration::ZERO;
    criterion.bench_function("longest wait of a writer during make room", |bencher| {
        bencher.iter_custom(|n| {
            let waits = (0..n).map(|_| longest_wait(extender.index(), search));
            waits.inspect(|wait| longest = longest.max(*wait)).sum()
        });
    });
    println!("longest of all waits: {longest:?}");
}

criterion_group!(benches, bench);
criterion_main!(benches);
