//! Time of a decision on 1,213 nearly full nodes of several kinds: the best node for a pod, and the best of its GPUs.

#![expect(clippy::unwrap_used, reason = "a benchmark whose set-up fails should stop")]

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};

use criterion::{BatchSize, Bencher, Criterion, criterion_group, criterion_main};
use placement::{
    Device, DevicePolicy, Fleet, Hints, HostAmounts, Inventory, NodeId, NodePolicy, NodeRequest, OwnerId,
    PodProfile, Policies, RequestedGpus, RequestedMemory, Score, ShareRequest,
};

const GIB: u64 = 1 << 30;

/// Number of nodes, and the GPUs, GiB per GPU and CPUs of each.
const KINDS: [(u32, u32, u64, u64); 6] = [
    (590, 8, 24, 96),
    (400, 2, 16, 104),
    (107, 2, 16, 16),
    (30, 8, 32, 96),
    (46, 4, 32, 64),
    (40, 1, 32, 8),
];

/// Requests of typical pods: percent of each GPU, GPUs, CPUs; and their frequency.
const PODS: [(u32, u32, u64, u32); 7] = [
    (100, 1, 8, 30),
    (50, 1, 6, 14),
    (81, 1, 11, 12),
    (25, 1, 4, 10),
    (33, 1, 3, 8),
    (100, 8, 64, 1),
    (100, 2, 16, 1),
];

fn spec(percent: u32, devices: u32, cpus: u64) -> PodProfile {
    let request = ShareRequest {
        devices,
        memory: RequestedMemory::Ratio(percent),
        core: percent,
        slots: 1,
    };
    PodProfile {
        gpus: RequestedGpus::Share(request),
        host: HostAmounts {
            cpu_milli: cpus * 1000,
            memory: 4 * GIB,
        },
    }
}

fn ask(spec: PodProfile) -> NodeRequest<'static> {
    NodeRequest {
        gpus: spec.gpus,
        host: spec.host,
        ..NodeRequest::default()
    }
}

fn empty_fleet() -> Fleet {
    let mut fleet = Fleet::new();
    for (kind, (n_nodes, n_gpus, gib, cpus)) in (0_u32..).zip(KINDS) {
        for node in 0..n_nodes {
            let name = format!("node-{kind}-{node:04}");
            let gpu = |minor| {
                let uuid = format!("GPU-{kind}-{node:04}-{minor}");
                Device {
                    memory_bytes: gib * GIB,
                    core: 100,
                    slots: 100,
                    ..Device::new(uuid, minor)
                }
            };
            fleet.set_inventory(
                &name,
                Inventory {
                    gpus: (0..n_gpus).map(gpu).collect(),
                    ..Inventory::default()
                },
            );
            fleet.set_host(
                &name,
                Some(HostAmounts {
                    cpu_milli: cpus * 1000,
                    memory: 512 * GIB,
                }),
            );
        }
    }
    fleet
}

/// The best node and its score.
fn best(fleet: &Fleet, ids: &[NodeId], ask: NodeRequest<'_>, policies: Policies) -> Option<(Score, NodeId)> {
    let mut evaluation = fleet.evaluation(ask, policies, Hints::Respect);
    let fits = ids
        .iter()
        .filter_map(|id| Some((evaluation.evaluate(*id).ok()?, *id)));
    fits.reduce(|one, other| if other.0 > one.0 { other } else { one })
}

fn place(fleet: &mut Fleet, ids: &[NodeId], owner: &OwnerId, spec: PodProfile, policies: Policies) -> bool {
    let ask = ask(spec);
    let Some((_, id)) = best(fleet, ids, ask, policies) else {
        return false;
    };
    let placement = fleet
        .choose_devices(id, ask, policies.device, Hints::Respect)
        .unwrap();
    fleet.reserve(owner, id, &placement).unwrap();
    let name = fleet.view(id).unwrap().name().to_owned();
    fleet.set_host_use(owner, &name, spec.host, false);
    true
}

/// A fleet with this number of typical pods; about 7,000 fill it.
fn filled(policies: Policies, n_pods: usize) -> (Fleet, Vec<NodeId>) {
    let mut fleet = empty_fleet();
    let ids: Vec<NodeId> = fleet.nodes().map(placement::NodeView::id).collect();
    let kinds: Vec<PodProfile> = PODS
        .iter()
        .flat_map(|(percent, n, cpus, often)| (0..*often).map(|_| spec(*percent, *n, *cpus)))
        .collect();
    for at in 0..n_pods {
        // A step that has no factor in common with the number takes all kinds in turn, well mixed.
        let kind = *kinds.get(at * 31 % kinds.len()).unwrap();
        fleet.workload_mut().add(kind);
        if at % 1000 == 999 {
            fleet.refresh_workload_model();
        }
        place(
            &mut fleet,
            &ids,
            &format!("pod-{at}").as_str().into(),
            kind,
            policies,
        );
    }
    (fleet, ids)
}

fn decide(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("1213 nodes");
    let all = [
        Policies::default(),
        Policies {
            node: NodePolicy::Binpack,
            device: DevicePolicy::Binpack,
        },
        Policies {
            node: NodePolicy::Spread,
            device: DevicePolicy::Spread,
        },
    ];
    for policies in all {
        let (mut fleet, ids) = filled(policies, 6_000);
        let pod = spec(25, 1, 1);
        group.bench_function(format!("{}: nothing has changed", policies.node), |b| {
            b.iter(|| best(&fleet, black_box(&ids), ask(pod), policies));
        });
        let owner: OwnerId = "new".into();
        group.bench_function(format!("{}: choose, and take it back", policies.node), |b| {
            b.iter(|| {
                place(&mut fleet, black_box(&ids), &owner, pod, policies);
                fleet.release(owner.as_str());
                fleet.clear_host_use(owner.as_str());
            });
        });
        group.bench_function(format!("{}: of a new kind", policies.node), |b| {
            evaluate_new(b, &fleet, &ids, policies);
        });
        let (fleet, ids) = filled(policies, 2_000);
        let name = format!("{}: of a new kind, most nodes idle", policies.node);
        group.bench_function(name, |b| evaluate_new(b, &fleet, &ids, policies));
    }
    group.finish();
}

/// Evaluates requests that differ from all earlier ones.
fn evaluate_new(b: &mut Bencher<'_>, fleet: &Fleet, ids: &[NodeId], policies: Policies) {
    // Continued from sample to sample, since the cache has the requests of the last one.
    static N_ASKED: AtomicU64 = AtomicU64::new(0);
    let pod = spec(25, 1, 1);
    let mut new = || {
        let cpu_milli = pod.host.cpu_milli + N_ASKED.fetch_add(1, Ordering::Relaxed);
        PodProfile {
            host: HostAmounts {
                cpu_milli,
                ..pod.host
            },
            ..pod
        }
    };
    b.iter_batched(
        &mut new,
        |pod| best(fleet, black_box(ids), ask(pod), policies),
        BatchSize::PerIteration,
    );
}

criterion_group!(benches, decide);
criterion_main!(benches);
