//! Times of whole filter requests, bytes in to bytes out, on clusters that are half full. Names come in the order of
//! kube-scheduler's list, which is not ours; as sixteen workers find them in it; or, as never happens, in another order each time.

use std::ops::Range;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use scheduler::extender::{Extender, filter};
use serde_json::{Value, json};

/// UID of the pod that is asked about.
const UID: &str = "uid-0000000000";

/// GPUs of every node.
const N_GPUS: usize = 8;

fn node(at: usize) -> Value {
    json!({
        "metadata": {"name": name(at), "annotations": {"aliyun.com/gpu-mem-unit": "MiB"}},
        "status": {"capacity": {"aliyun.com/gpu-count": "8", "koordinator.sh/gpu-memory": "655360Mi"}},
    })
}

fn gpu(at: usize, minor: usize, topology: &Value) -> Value {
    json!({
        "type": "gpu", "id": format!("GPU-{at:08}-{minor}"), "minor": minor, "health": true, "topology": topology,
        "resources": {"koordinator.sh/gpu-core": "100", "koordinator.sh/gpu-memory": "81920Mi", "koordinator.sh/gpu-memory-ratio": "100"},
    })
}

fn device(at: usize) -> Value {
    let gpus = (0..N_GPUS).map(|minor| gpu(at, minor, &Value::Null));
    json!({"metadata": {"name": name(at)}, "spec": {"devices": gpus.collect::<Vec<_>>()}})
}

/// The same with places, two adapters of eight virtual functions on each of eight switches, and the model's partition table.
fn placed_device(at: usize) -> Value {
    let place = |switch: usize| json!({"socketID": -1, "nodeID": switch / 4, "pcieID": format!("0000:{switch:02x}:00.0"), "busID": ""});
    let nic = |minor: usize| {
        let function = |nth: usize| json!({"minor": nth, "busID": format!("0000:{minor:02x}:01.{nth}")});
        json!({
            "type": "rdma", "id": format!("0000:{minor:02x}:00.0"), "minor": minor, "health": true, "topology": place(minor / 2),
            "resources": {"koordinator.sh/rdma": "100"},
            "vfGroups": [{"labels": {"type": "general"}, "vfs": (0..8).map(function).collect::<Vec<_>>()}],
        })
    };
    let gpus = (0..N_GPUS).map(|minor| gpu(at, minor, &place(minor)));
    let labels = json!({"gpushare/serves-vendor": "true", "node.koordinator.sh/gpu-model": "H100"});
    let devices: Vec<Value> = gpus.chain((0..2 * N_GPUS).map(nic)).collect();
    json!({"metadata": {"name": name(at), "labels": labels}, "spec": {"devices": devices}})
}

/// A pod that holds half of one GPU's memory.
fn holder(at: usize, minor: usize) -> Value {
    let record = json!({"gpu": [{"minor": minor, "id": format!("GPU-{at:08}-{minor}"), "resources": {"koordinator.sh/gpu-memory": "40960Mi"}}]});
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

/// The fields in the order in which kube-scheduler sends them.
fn as_sent(pod: &Value, names: &[String]) -> Vec<u8> {
    format!(
        r#"{{"Pod":{pod},"Nodes":null,"NodeNames":{}}}"#,
        Value::from(names)
    )
    .into_bytes()
}

/// Asks several questions in turn, each time for another pod: one that asks again would be answered with all nodes.
struct Asker<'a> {
    extender: &'a Extender,
    bodies: Vec<Vec<u8>>,
    uid: Range<usize>,
    n_asked: u32,
}

impl<'a> Asker<'a> {
    fn new(extender: &'a Extender, bodies: Vec<Vec<u8>>) -> Self {
        let at = bodies
            .first()
            .and_then(|body| body.windows(UID.len()).position(|bytes| bytes == UID.as_bytes()))
            .unwrap_or(0);
        Self {
            extender,
            bodies,
            uid: at..at + UID.len(),
            n_asked: 0,
        }
    }

    fn time(&mut self, n_times: u64) -> Duration {
        let began = Instant::now();
        for _ in 0..n_times {
            self.n_asked += 1;
            let turn = self.n_asked as usize % self.bodies.len().max(1);
            let Some(body) = self.bodies.get_mut(turn) else {
                break;
            };
            if let Some(uid) = body.get_mut(self.uid.clone()) {
                uid.copy_from_slice(format!("uid-{:010}", self.n_asked).as_bytes());
            }
            // By now the hint of the pod before has grown old.
            let now = began + Duration::from_secs(60) * self.n_asked;
            let _ = std::hint::black_box(filter::answer(self.extender, body, now));
        }
        began.elapsed()
    }
}

/// An order in which kube-scheduler may have its nodes: a step that has no factor in common with their number.
fn listed(n_nodes: usize) -> impl Iterator<Item = usize> {
    (0..n_nodes).map(move |at| at * 7919 % n_nodes)
}

/// Numbers that look drawn, the same each time.
fn dice(seed: usize) -> impl FnMut() -> usize {
    let mut dice = seed;
    move || {
        dice = dice
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        dice >> 33
    }
}

/// The same as sixteen workers pass them that go through a piece of the list each, in no even pace.
fn by_workers(n_nodes: usize, seed: usize) -> Vec<usize> {
    let list: Vec<usize> = listed(n_nodes).collect();
    let mut pieces: Vec<Range<usize>> = (0..16)
        .map(|worker| worker * n_nodes / 16..(worker + 1) * n_nodes / 16)
        .collect();
    let mut dice = dice(seed);
    let turns = std::iter::from_fn(|| {
        pieces.retain(|piece| !piece.is_empty());
        let worker = dice().checked_rem(pieces.len())?;
        list.get(pieces.get_mut(worker)?.next()?).copied()
    });
    turns.collect()
}

/// Every node once, in an order of its own.
fn drawn(n_nodes: usize, seed: usize) -> Vec<usize> {
    let mut nodes: Vec<usize> = (0..n_nodes).collect();
    let mut dice = dice(seed);
    nodes.sort_by_cached_key(|_| dice());
    nodes
}

/// Asks for so many MiB on one GPU, of these nodes; for nothing, if for none.
fn request(nodes: impl IntoIterator<Item = usize>, mib: usize) -> Vec<u8> {
    let names: Vec<String> = nodes.into_iter().map(name).collect();
    let limits = if mib > 0 {
        json!({"aliyun.com/gpu-mem": mib.to_string()})
    } else {
        json!({})
    };
    let pod = json!({
        "metadata": {"name": "new", "namespace": "default", "uid": UID},
        "spec": {"containers": [{"name": "c", "resources": {"limits": limits}}]},
    });
    as_sent(&pod, &names)
}

/// Asks for four whole GPUs, each with a virtual function on its switch, of all nodes.
fn wishing_request(n_nodes: usize) -> Vec<u8> {
    let names: Vec<String> = listed(n_nodes).map(name).collect();
    let annotations = json!({
        "scheduling.koordinator.sh/device-joint-allocate": r#"{"deviceTypes": ["gpu", "rdma"], "requiredScope": "SamePCIe"}"#,
        "scheduling.koordinator.sh/device-allocate-hint": r#"{"rdma": {"vfSelector": {}, "exclusivePolicy": "PCIeLevel"}}"#,
    });
    let pod = json!({
        "metadata": {"name": "new", "namespace": "default", "uid": UID, "annotations": annotations},
        "spec": {"containers": [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": "4", "koordinator.sh/rdma": "1"}}}]},
    });
    as_sent(&pod, &names)
}

/// Nodes with places and adapters, of whose GPUs a pod each holds up to seven, in one of eight ways.
fn placed_cluster(n_nodes: usize) -> Extender {
    let devices = (0..n_nodes).map(placed_device);
    let pods = (0..n_nodes).flat_map(|at| (0..at % N_GPUS).map(move |minor| holder(at, minor)));
    scheduler::offline::extender((0..n_nodes).map(node), devices, pods)
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
    let mut bench = |what: &str, n_names: usize, extender: &Extender, bodies: Vec<Vec<u8>>| {
        let mut asker = Asker::new(extender, bodies);
        group.throughput(Throughput::Elements(u64::try_from(n_names).unwrap_or(0)));
        group.bench_function(BenchmarkId::new(what, n_names), |bencher| {
            bencher.iter_custom(|n_times| asker.time(n_times));
        });
    };
    for n_nodes in [5_000, 15_000] {
        let extender = cluster(n_nodes);
        for (what, mib) in [("all fit", 8138), ("none fits", 41_000)] {
            bench(what, n_nodes, &extender, vec![request(listed(n_nodes), mib)]);
        }
        bench(
            "all fit, by workers",
            n_nodes,
            &extender,
            (0..8)
                .map(|seed| request(by_workers(n_nodes, seed), 8138))
                .collect(),
        );
        bench(
            "all fit, in no order",
            n_nodes,
            &extender,
            (0..8).map(|seed| request(drawn(n_nodes, seed), 8138)).collect(),
        );
        bench(
            "all fit, sampled",
            n_nodes / 10,
            &extender,
            vec![request(listed(n_nodes).take(n_nodes / 10), 8138)],
        );
        bench(
            "names alone",
            n_nodes,
            &extender,
            vec![request(listed(n_nodes), 0)],
        );
    }
    for n_nodes in [5_000, 15_000] {
        let extender = placed_cluster(n_nodes);
        for (what, body) in [
            ("shares of placed devices", request(listed(n_nodes), 8138)),
            ("joint allocation", wishing_request(n_nodes)),
        ] {
            bench(what, n_nodes, &extender, vec![body]);
        }
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
