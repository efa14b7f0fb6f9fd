//! Times of whole filter requests, bytes in to bytes out, on clusters that are half full. Names come in a shuffled order.

use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use scheduler::extender::{Extender, filter};
use serde_json::{Value, json};

/// GPUs of every node.
const N_GPUS: usize = 8;

fn node(at: usize) -> Value {
    json!({
        "metadata": {"name": name(at), "annotations": {"aliyun.com/gpu-mem-unit": "MiB"}},
        "status": {"capacity": {"aliyun.com/gpu-count": "8", "koordinator.sh/gpu-memory": "655360Mi"}},
    })
}

fn device(at: usize) -> Value {
    let gpu = |minor: usize| {
        json!({
            "type": "gpu", "id": format!("GPU-{at:08}-{minor}"), "minor": minor, "health": true,
            "resources": {"koordinator.sh/gpu-core": "100", "koordinator.sh/gpu-memory": "81920Mi", "koordinator.sh/gpu-memory-ratio": "100"},
        })
    };
    json!({"metadata": {"name": name(at)}, "spec": {"devices": (0..N_GPUS).map(gpu).collect::<Vec<_>>()}})
}

/// A pod that holds half of one GPU's memory.
fn holder(at: usize, minor: usize) -> Value {
    let record =
        json!({"gpu": [{"minor": minor, "id": format!("GPU-{at:08}-{minor}"), "resources": {"koordinator.sh/gpu-memory": "40960Mi"}}]});
    json!({
        "metadata": {
            "name": format!("holder-{at}-{minor}"), "namespace": "default", "uid": format!("uid-{at}-{minor}"),
            "annotations": {"scheduling.koordinator.sh/device-allocated": record.to_string()},
        },
        "spec": {
            "nodeName": name(at),
            "containers": [{"name": "c", "resources": {"limits": {"koordinator.sh/gpu.shared": "1", "koordinator.sh/gpu-memory": "40960Mi"}}}],
        },
        "status": {"phase": "Running"},
    })
}

fn name(at: usize) -> String {
    format!("node-{at:05}.example.internal")
}

/// Asks for so many MiB on one GPU, of all nodes.
fn request(n_nodes: usize, mib: usize) -> Vec<u8> {
    // A step that has no factor in common with the number visits every node once, far from the order of entry.
    let names: Vec<String> = (0..n_nodes).map(|at| name(at * 7919 % n_nodes)).collect();
    let pod = json!({
        "metadata": {"name": "new", "namespace": "default", "uid": "new"},
        "spec": {"containers": [{"name": "c", "resources": {"limits": {"aliyun.com/gpu-mem": mib.to_string()}}}]},
    });
    json!({"Pod": pod, "NodeNames": names}).to_string().into_bytes()
}

fn cluster(n_nodes: usize) -> Extender {
    let nodes = (0..n_nodes).map(node);
    let devices = (0..n_nodes).map(device);
    let pods = (0..n_nodes).flat_map(|at| (0..N_GPUS).map(move |minor| holder(at, minor)));
    scheduler::offline::extender(nodes, devices, pods)
}

fn bench(criterion: &mut Criterion) {
    // The extender's client of the API server wants one, although nothing here uses it.
    let runtime = tokio::runtime::Runtime::new();
    let _entered = runtime.as_ref().map(tokio::runtime::Runtime::enter);
    let mut group = criterion.benchmark_group("filter");
    group.measurement_time(Duration::from_secs(5));
    for n_nodes in [5_000, 15_000] {
        let extender = cluster(n_nodes);
        group.throughput(Throughput::Elements(u64::try_from(n_nodes).unwrap_or(0)));
        for (what, mib) in [("all fit", 8138), ("none fits", 41_000)] {
            let body = request(n_nodes, mib);
            group.bench_function(BenchmarkId::new(what, n_nodes), |bencher| {
                bencher.iter(|| filter::answer(&extender, &body, Instant::now()));
            });
        }
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
