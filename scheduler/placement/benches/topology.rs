//! How long decisions take where it matters which devices a request gets.

#![expect(clippy::unwrap_used, reason = "a benchmark whose set-up fails should stop")]

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use placement::{
    Ask, Asking, Class, ClassRequest, Device, DevicePolicy, Fleet, Gpu, GpuAsk, GpuRef, HeldMemory,
    HeldShare, Hints, Holding, Inventory, Joint, Kind, LinkGroup, MemoryAsk, NodeId, Partition,
    PartitionTable, PartitionWish, Place, Policies, Traits, Wishes,
};

const GIB: u64 = 1 << 30;

fn name(at: u32) -> String {
    format!("gpu-node-{at:05}.cluster.local")
}

fn traits(numa: u32, switch: u32) -> Traits {
    Traits {
        place: Some(Place {
            numa: Some(numa),
            switch: Some(format!("0000:{switch:02x}:00.0").into()),
        }),
        ..Traits::default()
    }
}

/// GPUs and NICs spread evenly over switches, and these over two NUMA nodes.
fn machine(node: u32, n_gpus: u32, n_nics: u32, n_switches: u32) -> Inventory {
    let place = |at: u32, n: u32| {
        let switch = at * n_switches / n;
        traits(switch * 2 / n_switches, switch)
    };
    let gpu = |minor| {
        let uuid = format!("GPU-00000000-0000-4000-8000-{node:08x}{minor:04x}").into();
        let traits = place(minor, n_gpus);
        Gpu {
            uuid,
            minor,
            memory_bytes: 80 * GIB,
            core: 100,
            slots: 100,
            healthy: true,
            sharing: true,
            traits,
        }
    };
    let nic = |minor| {
        let id = format!("{node:04x}:{minor:02x}:00.0").into();
        Device {
            id,
            minor,
            resources: [("rdma".into(), 100)].into(),
            healthy: true,
            traits: place(minor, n_nics),
        }
    };
    let classes = Some(vec![Class {
        kind: "rdma".into(),
        devices: (0..n_nics).map(nic).collect(),
    }]);
    Inventory {
        gpus: (0..n_gpus).map(gpu).collect(),
        serves_vendor: true,
        classes,
        ..Inventory::default()
    }
}

fn halves() -> PartitionTable {
    let of = |size: u32| {
        let partition = move |at: u32| Partition {
            minors: (at * size..(at + 1) * size).collect(),
            bandwidth: Some(400),
            score: 1,
        };
        (0..8 / size).map(partition)
    };
    PartitionTable {
        is_binding: true,
        partitions: [1, 2, 4, 8].into_iter().flat_map(of).collect(),
    }
}

fn rdma(amount: u64) -> ClassRequest {
    ClassRequest {
        kind: "rdma".into(),
        amounts: [("rdma".into(), amount)].into(),
        whole: Some(100),
    }
}

fn joint(leads: bool, same_switch: bool) -> Wishes {
    let (gpu, nic) = (Kind::Gpu, Kind::Other("rdma".into()));
    Wishes {
        joint: Some(Joint {
            kinds: if leads { vec![gpu, nic] } else { vec![nic, gpu] },
            same_switch,
        }),
        ..Wishes::default()
    }
}

/// Takes a part of one GPU.
fn use_gpu(fleet: &mut Fleet, node: u32, minor: u32) {
    let uuid = format!("GPU-00000000-0000-4000-8000-{node:08x}{minor:04x}")
        .as_str()
        .into();
    let memory = HeldMemory::Ask(MemoryAsk::Ratio(30));
    let share = HeldShare {
        gpu: GpuRef::Uuid(uuid),
        memory,
        core: 0,
        slots: 1,
        trusted: true,
    };
    fleet.hold(
        &format!("pod-{node}-{minor}").as_str().into(),
        &name(node),
        Holding::Shares(vec![share]),
    );
}

fn one(inventory: Inventory, used: &[u32]) -> (Fleet, NodeId) {
    let mut fleet = Fleet::new();
    fleet.set_inventory(&name(0), inventory);
    for minor in used {
        use_gpu(&mut fleet, 0, *minor);
    }
    let id = fleet.node_id(&name(0)).unwrap();
    (fleet, id)
}

/// Pairs of GPUs linked as in a cube: sets of GPUs differ, so that all are tried.
fn cube() -> Vec<LinkGroup> {
    let pairs = (0_u32..8)
        .flat_map(|one| [1, 2, 4].map(move |bit| (one, one ^ bit)))
        .filter(|(one, other)| one < other);
    pairs
        .map(|(one, other)| LinkGroup {
            minors: vec![one, other],
            n_links: 1 + (one ^ other) % 3,
        })
        .collect()
}

/// What it is, what there is, which GPUs are used, and what is asked.
type Case<'a> = (&'a str, Inventory, &'a [u32], GpuAsk, u64, Wishes);

fn decide_one_node(criterion: &mut Criterion) {
    let common = || machine(0, 8, 16, 4);
    // Every NIC on switches of their own: no solution, and nothing that rules sets out early.
    let apart = || {
        let mut inventory = machine(0, 8, 16, 8);
        let nics = inventory
            .classes
            .iter_mut()
            .flatten()
            .flat_map(|class| &mut class.devices);
        (0_u32..)
            .zip(nics)
            .filter(|(at, _)| at % 4 < 3)
            .for_each(|(at, nic)| nic.traits = traits(at % 2, 100 + at));
        inventory
    };
    let large = || machine(0, 16, 32, 16);
    let wished = |partition| Wishes {
        partition: Some(partition),
        ..Wishes::default()
    };
    let partition = || wished(PartitionWish::default());
    let cases: [Case<'_>; 9] = [
        (
            "8 GPUs, 16 NICs: 4 and 1 on the same switches",
            common(),
            &[],
            GpuAsk::Whole(4),
            1,
            joint(true, true),
        ),
        (
            "8 GPUs, 16 NICs: 4 and 1",
            common(),
            &[],
            GpuAsk::Whole(4),
            1,
            joint(true, false),
        ),
        (
            "8 GPUs, 16 NICs: 4 and 1, broken",
            common(),
            &[0, 3, 5],
            GpuAsk::Whole(4),
            1,
            joint(true, true),
        ),
        (
            "8 GPUs, 16 NICs: 4 and 8, NICs lead",
            common(),
            &[1, 2],
            GpuAsk::Whole(4),
            800,
            joint(false, false),
        ),
        (
            "8 GPUs, 16 NICs: 4 and 6, NICs apart, none fits",
            apart(),
            &[1],
            GpuAsk::Whole(4),
            600,
            joint(true, true),
        ),
        (
            "8 GPUs, 16 NICs: 4 and 6, NICs apart",
            apart(),
            &[1],
            GpuAsk::Whole(4),
            600,
            joint(true, false),
        ),
        (
            "8 GPUs, 16 NICs: 4 of a cube",
            Inventory {
                links: cube(),
                ..common()
            },
            &[1],
            GpuAsk::Whole(4),
            1,
            joint(true, false),
        ),
        (
            "8 GPUs, 16 NICs: partition of 2",
            Inventory {
                partitions: Some(halves()),
                ..common()
            },
            &[1],
            GpuAsk::Whole(2),
            1,
            partition(),
        ),
        (
            "16 GPUs, 32 NICs, 16 switches: 8 and 16",
            large(),
            &[1, 8],
            GpuAsk::Whole(8),
            1600,
            joint(true, false),
        ),
    ];
    let mut group = criterion.benchmark_group("decide");
    for (what, inventory, used, gpus, nics, wishes) in &cases {
        let (fleet, id) = one(inventory.clone(), used);
        let others = [rdma(*nics)];
        let ask = Ask {
            gpus: *gpus,
            others: &others,
            wishes: Some(wishes),
            ..Ask::default()
        };
        assert_eq!(
            fleet.fit(id, ask, Hints::Respect).is_err(),
            what.ends_with("none fits"),
            "{what}"
        );
        group.bench_function(*what, |b| {
            b.iter(|| {
                fleet
                    .choose(black_box(id), ask, DevicePolicy::Binpack, Hints::Respect)
                    .is_ok()
            });
        });
    }
    group.finish();
}

fn filter(criterion: &mut Criterion) {
    let n_nodes = 5_000;
    let mut fleet = Fleet::new();
    for node in 0..n_nodes {
        fleet.set_inventory(
            &name(node),
            Inventory {
                links: cube(),
                ..machine(node, 8, 16, 4)
            },
        );
        for minor in (0..8).filter(|minor| ((node % 64) >> (minor % 6)) & 1 == 1) {
            use_gpu(&mut fleet, node, minor);
        }
    }
    let names: Vec<String> = (0..n_nodes).map(name).collect();
    let others = [rdma(1)];
    let mut group =
        criterion.benchmark_group("5000 nodes x 8 GPUs, 16 NICs, with places and links, in 64 states");
    group.throughput(Throughput::Elements(n_nodes.into()));
    for (what, wishes) in [
        ("no wishes", None),
        ("4 and 1 on the same switches", Some(joint(true, true))),
        ("4 and 1", Some(joint(true, false))),
    ] {
        let ask = Ask {
            gpus: GpuAsk::Whole(4),
            others: &others,
            wishes: wishes.as_ref(),
            ..Ask::default()
        };
        group.bench_function(format!("fit, {what}"), |b| {
            b.iter(|| {
                let mut asking = Asking::new(&fleet, ask, Hints::Respect);
                let fits = |name: &&String| fleet.node_id(name).is_some_and(|id| asking.fit(id).is_ok());
                black_box(&names).iter().filter(fits).count()
            });
        });
        group.bench_function(format!("verdict, {what}"), |b| {
            b.iter(|| {
                let mut asking = Asking::new(&fleet, ask, Hints::Respect);
                let verdict = |name: &String| {
                    fleet
                        .node_id(name)
                        .map(|id| asking.verdict(id, Policies::default()))
                };
                black_box(&names).iter().map(verdict).max()
            });
        });
    }
    group.finish();
}

criterion_group!(benches, decide_one_node, filter);
criterion_main!(benches);
