//! How long a decision takes on 1,213 nodes of several kinds that are nearly full: which node is best for a pod, and which
//! of its GPUs.

#![expect(clippy::unwrap_used, reason = "a benchmark whose set-up fails should stop")]

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};

use criterion::{BatchSize, Bencher, Criterion, criterion_group, criterion_main};
use placement::{
    Ask, Asking, DevicePolicy, Fleet, Gpu, GpuAsk, Hints, HostAmounts, Inventory, MemoryAsk, NodeId,
    NodePolicy, OwnerId, Policies, Request, Score, Spec, Traits,
};

const GIB: u64 = 1 << 30;

/// How many nodes, with how many GPUs of how many GiB, and how many CPUs.
const KINDS: [(u32, u32, u64, u64); 6] = [
    (590, 8, 24, 96),
    (400, 2, 16, 104),
    (107, 2, 16, 16),
    (30, 8, 32, 96),
    (46, 4, 32, 64),
    (40, 1, 32, 8),
];

/// Percent of how many GPUs, and how many CPUs, typical pods ask for, and how often.
const PODS: [(u32, u32, u64, u32); 7] = [
    (100, 1, 8, 30),
    (50, 1, 6, 14),
    (81, 1, 11, 12),
    (25, 1, 4, 10),
    (33, 1, 3, 8),
    (100, 8, 64, 1),
    (100, 2, 16, 1),
];

fn spec(percent: u32, devices: u32, cpus: u64) -> Spec {
    let request = Request {
        devices,
        memory: MemoryAsk::Ratio(percent),
        core: percent,
        slots: 1,
    };
    Spec {
        gpus: GpuAsk::Share(request),
        host: HostAmounts {
            cpu_milli: cpus * 1000,
            memory: 4 * GIB,
        },
    }
}

fn ask(spec: Spec) -> Ask<'static> {
    Ask {
        gpus: spec.gpus,
        host: spec.host,
        ..Ask::default()
    }
}

fn empty_fleet() -> Fleet {
    let mut fleet = Fleet::new();
    for (kind, (n_nodes, n_gpus, gib, cpus)) in (0_u32..).zip(KINDS) {
        for node in 0..n_nodes {
            let name = format!("node-{kind}-{node:04}");
            let gpu = |minor| {
                let (uuid, traits) = (format!("GPU-{kind}-{node:04}-{minor}").into(), Traits::default());
                Gpu {
                    uuid,
                    minor,
                    memory_bytes: gib * GIB,
                    core: 100,
                    slots: 100,
                    healthy: true,
                    sharing: true,
                    traits,
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

/// The best node, and what it is worth.
fn best(fleet: &Fleet, ids: &[NodeId], ask: Ask<'_>, policies: Policies) -> Option<(Score, NodeId)> {
    let mut asking = Asking::new(fleet, ask, Hints::Respect);
    let verdicts = ids
        .iter()
        .filter_map(|id| Some((asking.verdict(*id, policies).ok()?, *id)));
    verdicts.reduce(|one, other| if other.0 > one.0 { other } else { one })
}

fn place(fleet: &mut Fleet, ids: &[NodeId], owner: &OwnerId, spec: Spec, policies: Policies) -> bool {
    let ask = ask(spec);
    let Some((_, id)) = best(fleet, ids, ask, policies) else {
        return false;
    };
    let placement = fleet.choose(id, ask, policies.device, Hints::Respect).unwrap();
    fleet.reserve(owner, id, &placement).unwrap();
    let name = fleet.view(id).unwrap().name().to_owned();
    fleet.run(owner, &name, spec.host);
    true
}

/// A fleet with so many typical pods; about 7,000 fill it.
fn filled(policies: Policies, n_pods: usize) -> (Fleet, Vec<NodeId>) {
    let mut fleet = empty_fleet();
    let ids: Vec<NodeId> = fleet.nodes().map(placement::NodeView::id).collect();
    let kinds: Vec<Spec> = PODS
        .iter()
        .flat_map(|(percent, n, cpus, often)| (0..*often).map(|_| spec(*percent, *n, *cpus)))
        .collect();
    for at in 0..n_pods {
        // A step that has no factor in common with the number takes all kinds in turn, well mixed.
        let kind = *kinds.get(at * 31 % kinds.len()).unwrap();
        fleet.workload_mut().add(kind);
        if at % 1000 == 999 {
            fleet.learn();
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
                fleet.end(owner.as_str());
            });
        });
        group.bench_function(
            format!("{}: of a kind that nobody has asked for", policies.node),
            |b| ask_anew(b, &fleet, &ids, policies),
        );
        let (fleet, ids) = filled(policies, 2_000);
        let name = format!(
            "{}: of a kind that nobody has asked for, most nodes idle",
            policies.node
        );
        group.bench_function(name, |b| ask_anew(b, &fleet, &ids, policies));
    }
    group.finish();
}

/// Asks for pods that differ from all before.
fn ask_anew(b: &mut Bencher<'_>, fleet: &Fleet, ids: &[NodeId], policies: Policies) {
    // Not begun anew for each sample: the questions of the last one are remembered.
    static N_ASKED: AtomicU64 = AtomicU64::new(0);
    let pod = spec(25, 1, 1);
    let mut new = || {
        let cpu_milli = pod.host.cpu_milli + N_ASKED.fetch_add(1, Ordering::Relaxed);
        Spec {
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
