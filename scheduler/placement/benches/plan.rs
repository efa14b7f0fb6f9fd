//! Time of plans on 5,000 nodes x 8 GPUs with 40,000 holders.

#![expect(clippy::unwrap_used, reason = "a benchmark whose set-up fails should stop")]

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use placement::{
    Device, DevicePolicy, Fleet, Goal, Hints, Holder, HostAmounts, Inventory, Limits, NodeId, NodeRequest,
    NodeView, PodProfile, Policies, RequestedGpus, RequestedMemory, ShareRequest, plan,
};

const GIB: u64 = 1 << 30;
const N_NODES: u32 = 5_000;
const N_HOLDERS: u32 = 40_000;

/// Requests of typical pods: GiB of each GPU, GPUs, CPUs; and their frequency. Eight of them always find room on a node, where
/// there are 80 GiB for each.
const PODS: [(u64, u32, u64, u32); 7] = [
    (10, 1, 2, 10),
    (20, 1, 4, 10),
    (30, 1, 4, 15),
    (40, 1, 8, 15),
    (60, 1, 8, 20),
    (80, 1, 12, 20),
    (40, 2, 24, 10),
];

fn name(at: u32) -> String {
    format!("gpu-node-{at:05}.cluster.local")
}

fn request(gib: u64, devices: u32, cpus: u64) -> NodeRequest<'static> {
    let share = ShareRequest {
        devices,
        memory: RequestedMemory::Bytes(gib * GIB),
        core: 0,
        slots: 1,
    };
    NodeRequest {
        host: HostAmounts {
            cpu_milli: cpus * 1000,
            memory: 8 * GIB,
        },
        ..NodeRequest::from(&share)
    }
}

/// A number that looks random, from a counter.
fn scattered(at: u64) -> u64 {
    let mut x = at.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^ (x >> 31)
}

fn nodes_without_pods() -> Fleet {
    let mut fleet = Fleet::new();
    for node in 0..N_NODES {
        let gpu = |minor| Device {
            memory_bytes: 80 * GIB,
            core: 100,
            slots: 100,
            ..Device::new(
                format!("GPU-00000000-0000-4000-8000-{node:08x}{minor:04x}"),
                minor,
            )
        };
        let inventory = Inventory {
            gpus: (0..8).map(gpu).collect(),
            ..Inventory::default()
        };
        fleet.set_inventory(&name(node), inventory);
        let host = HostAmounts {
            cpu_milli: 128_000,
            memory: 1024 * GIB,
        };
        fleet.set_host(&name(node), Some(host));
    }
    fleet
}

/// A fleet in which each node has eight pods, spread over its GPUs so that none is idle, and its holders.
fn fragmented() -> (Fleet, Vec<Holder<'static>>) {
    let mut fleet = nodes_without_pods();
    let often = PODS
        .iter()
        .flat_map(|(gib, n, cpus, often)| (0..*often).map(|_| request(*gib, *n, *cpus)));
    let kinds: Vec<NodeRequest<'static>> = often.collect();
    let mut holders = Vec::new();
    let mut tries = 0..u64::MAX;
    while holders.len() < N_HOLDERS as usize {
        let at = tries.next().unwrap();
        let kind = usize::try_from(scattered(at) % kinds.len() as u64).unwrap();
        let request = *kinds.get(kind).unwrap();
        let node = u32::try_from(holders.len() / 8).unwrap();
        let id = fleet.node_id(&name(node)).unwrap();
        let Ok(placement) = fleet.choose_devices(id, request, DevicePolicy::Spread, Hints::Respect) else {
            continue;
        };
        let owner = format!("{at:08x}-0000-4000-8000-000000000000").as_str().into();
        fleet.reserve(&owner, id, &placement).unwrap();
        fleet.set_host_use(&owner, &name(node), request.host, false);
        let NodeRequest { gpus, host, .. } = request;
        fleet.workload_mut().add(PodProfile { gpus, host });
        holders.push(Holder {
            owner,
            request,
            policies: Policies::default(),
            nodes: None,
            priority: 0,
            run_seconds: 600 + scattered(at) % 600_000,
            stays: None,
        });
    }
    fleet.refresh_workload_model();
    (fleet, holders)
}

fn plans(criterion: &mut Criterion) {
    let (mut fleet, holders) = fragmented();
    let nodes: Vec<NodeId> = fleet.nodes().map(NodeView::id).collect();
    let free = |gib: u64, n_gpus| Goal::Free {
        bytes: gib * GIB,
        n_gpus,
        nodes: &nodes,
    };
    let goals = [
        ("empty-node", Goal::EmptyNode(*nodes.get(17).unwrap()), 100),
        ("free, 80 GiB of one GPU", free(80, 1), 10),
        ("free, 80 GiB of 4 GPUs", free(80, 4), 10),
        ("free, 80 GiB of 8 GPUs", free(80, 8), 100),
        ("join, 20 moves", Goal::Join, 20),
    ];
    let mut group = criterion.benchmark_group("plan on 5000 nodes x 8 GPUs with 40000 holders");
    group.sample_size(10);
    for (what, goal, max_moves) in goals {
        let limits = Limits {
            max_moves,
            min_run_seconds: 300,
        };
        let found = plan(&fleet, goal, &holders, limits).unwrap();
        assert!(!found.moves.is_empty(), "{what}");
        group.bench_function(what, |b| {
            b.iter(|| plan(black_box(&fleet), goal, &holders, limits).unwrap());
        });
    }
    let mut stuck = holders.clone();
    for holder in &mut stuck {
        holder.nodes = Some(&[]);
    }
    let limits = Limits {
        max_moves: 10,
        min_run_seconds: 300,
    };
    group.bench_function("free, 80 GiB of one GPU, no pod has a place", |b| {
        b.iter(|| plan(black_box(&fleet), free(80, 1), &stuck, limits).unwrap());
    });
    group.finish();
    // Every change of the workload model makes the cached scores of nodes worthless.
    let mut group = criterion.benchmark_group("plan without cached scores");
    group.sample_size(10);
    for (what, goal, max_moves) in goals {
        let limits = Limits {
            max_moves,
            min_run_seconds: 300,
        };
        let odd = PodProfile {
            gpus: RequestedGpus::Whole(3),
            host: HostAmounts::default(),
        };
        let mut is_added = false;
        group.bench_function(what, |b| {
            b.iter_custom(|n| {
                let mut sum = Duration::ZERO;
                for _ in 0..n {
                    for _ in 0..N_HOLDERS {
                        if is_added {
                            fleet.workload_mut().remove(&odd);
                        } else {
                            fleet.workload_mut().add(odd);
                        }
                    }
                    is_added = !is_added;
                    assert!(fleet.refresh_workload_model());
                    #[expect(clippy::disallowed_methods, reason = "a benchmark measures")]
                    let start = Instant::now();
                    black_box(plan(black_box(&fleet), goal, &holders, limits).unwrap());
                    sum += start.elapsed();
                }
                sum
            });
        });
    }
    group.finish();
}

criterion_group!(benches, plans);
criterion_main!(benches);
