//! Times of whole filter requests, from the body to the result, on clusters that are half full.
//!
//! Names come in an order that has nothing to do with the order in which the scheduler learned of the nodes, as
//! kube-scheduler's do.

mod cluster;

use std::ops::Range;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use scheduler::extender::{Extender, filter};
use serde_json::{Value, json};

use cluster::{N_GPUS, device, gpu, holder, name, node};

/// The UID of the pod.
const UID: &str = "uid-0000000000";

/// A node with places, two adapters of eight virtual functions on each of eight switches, and the model's partition table.
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

/// The memory of half a GPU.
const HALF: &str = "40960Mi";

/// The fields are in kube-scheduler's order.
fn as_sent(pod: &Value, names: &[String]) -> Vec<u8> {
    format!(
        r#"{{"Pod":{pod},"Nodes":null,"NodeNames":{}}}"#,
        Value::from(names)
    )
    .into_bytes()
}

/// Sends the same request for another pod each time: a pod that returns could be sent to another node.
struct Requests<'a> {
    extender: &'a Extender,
    body: Vec<u8>,
    /// The bytes of the pod's UID in the body.
    uid: Range<usize>,
    n_sent: u32,
}

impl<'a> Requests<'a> {
    fn new(extender: &'a Extender, body: Vec<u8>) -> Self {
        let at = body
            .windows(UID.len())
            .position(|bytes| bytes == UID.as_bytes())
            .unwrap_or(0);
        Self {
            extender,
            body,
            uid: at..at + UID.len(),
            n_sent: 0,
        }
    }

    fn time(&mut self, n_times: u64) -> Duration {
        let began = Instant::now();
        for _ in 0..n_times {
            self.n_sent += 1;
            if let Some(uid) = self.body.get_mut(self.uid.clone()) {
                uid.copy_from_slice(format!("uid-{:010}", self.n_sent).as_bytes());
            }
            // So much later that the hint of the last pod has expired.
            let now = began + Duration::from_secs(60) * self.n_sent;
            let _ = std::hint::black_box(filter::answer(self.extender, &self.body, now));
        }
        began.elapsed()
    }
}

/// A fixed order of nodes in which neighbours are far apart: a step that has no factor in common with their number.
fn order(n_nodes: usize) -> impl Iterator<Item = usize> {
    (0..n_nodes).map(move |nth| nth * 7919 % n_nodes)
}

/// A request of a pod for an amount of memory of one GPU, or for no GPU if the amount is zero.
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

/// A request for four whole GPUs, each with a virtual function on its switch, to all nodes.
fn joint_request(n_nodes: usize) -> Vec<u8> {
    let names: Vec<String> = order(n_nodes).map(name).collect();
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

/// A request of the first of `n` pods that have to be on the GPUs of one link group, to all nodes.
fn group_request(n_nodes: usize, n: usize, mib: usize) -> Vec<u8> {
    let names: Vec<String> = order(n_nodes).map(name).collect();
    let annotations = json!({
        "gang.scheduling.koordinator.sh/name": "group", "gang.scheduling.koordinator.sh/min-available": n.to_string(),
        "gpushare/group-domain": "link", "gpushare/group-domain-policy": "required",
    });
    let pod = json!({
        "metadata": {"name": "new", "namespace": "default", "uid": UID, "annotations": annotations},
        "spec": {"containers": [{"name": "c", "resources": {"limits": {"aliyun.com/gpu-mem": mib.to_string()}}}]},
    });
    as_sent(&pod, &names)
}

/// Nodes with places and adapters. Of the eight GPUs of a node up to seven have a pod each.
fn placed_cluster(n_nodes: usize) -> Extender {
    let devices = (0..n_nodes).map(placed_device);
    let pods = (0..n_nodes).flat_map(|at| (0..at % N_GPUS).map(move |minor| holder(at, minor, HALF, [])));
    scheduler::offline::extender(scheduler::offline::index((0..n_nodes).map(node), devices, pods))
}

fn cluster(n_nodes: usize) -> Extender {
    let nodes = (0..n_nodes).map(node);
    let devices = (0..n_nodes).map(device);
    let pods = (0..n_nodes).flat_map(|at| (0..N_GPUS).map(move |minor| holder(at, minor, HALF, [])));
    scheduler::offline::extender(scheduler::offline::index(nodes, devices, pods))
}

fn bench(criterion: &mut Criterion) {
    // The extender's API client needs a runtime, although no request uses the client.
    let runtime = tokio::runtime::Runtime::new();
    let _entered = runtime.as_ref().map(tokio::runtime::Runtime::enter);
    let mut group = criterion.benchmark_group("filter");
    group.measurement_time(Duration::from_secs(5));
    let mut bench = |name: &str, n_names: usize, extender: &Extender, body: Vec<u8>| {
        let mut requests = Requests::new(extender, body);
        group.throughput(Throughput::Elements(u64::try_from(n_names).unwrap_or(0)));
        group.bench_function(BenchmarkId::new(name, n_names), |bencher| {
            bencher.iter_custom(|n_times| requests.time(n_times));
        });
    };
    for n_nodes in [5_000, 15_000] {
        let extender = cluster(n_nodes);
        for (name, mib) in [("all fit", 8138), ("none fits", 41_000), ("no GPU", 0)] {
            bench(name, n_nodes, &extender, request(order(n_nodes), mib));
        }
        let sample = request(order(n_nodes).take(n_nodes / 10), 8138);
        bench("all fit, sample", n_nodes / 10, &extender, sample);
    }
    for n_nodes in [5_000, 15_000] {
        let extender = placed_cluster(n_nodes);
        bench(
            "shares of placed devices",
            n_nodes,
            &extender,
            request(order(n_nodes), 8138),
        );
        bench("joint allocation", n_nodes, &extender, joint_request(n_nodes));
        // On a NUMA node, of which each has four GPUs of 80 GiB.
        for (n, mib) in [(8, 40_960), (64, 4096), (64, 8138)] {
            let name = format!("group of {n} pods of {mib} MiB");
            bench(&name, n_nodes, &extender, group_request(n_nodes, n, mib));
        }
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
