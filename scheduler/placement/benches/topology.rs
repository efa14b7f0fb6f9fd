//! Time of decisions by topology and constraints.

#![expect(clippy::unwrap_used, reason = "a benchmark whose set-up fails should stop")]

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use placement::{
    Constraints, Device, DeviceAttributes, DeviceLocation, DevicePolicy, DeviceRef, DeviceRequest,
    DeviceType, DevicesOfType, Fleet, HeldMemory, HeldPart, Hints, Holdings, Inventory, JointAllocation,
    LinkGroup, NodeId, NodeRequest, Partition, PartitionConstraint, PartitionTable, Policies, RequestedGpus,
    RequestedMemory,
};

const GIB: u64 = 1 << 30;

fn name(at: u32) -> String {
    format!("gpu-node-{at:05}.cluster.local")
}

fn attributes(numa: u32, switch: u32) -> DeviceAttributes {
    DeviceAttributes {
        location: Some(DeviceLocation {
            numa: Some(numa),
            switch: Some(format!("0000:{switch:02x}:00.0").into()),
        }),
        ..DeviceAttributes::default()
    }
}

/// GPUs and NICs spread evenly over switches, and these over two NUMA nodes.
fn machine(node: u32, n_gpus: u32, n_nics: u32, n_switches: u32) -> Inventory {
    let place = |at: u32, n: u32| {
        let switch = at * n_switches / n;
        attributes(switch * 2 / n_switches, switch)
    };
    let gpu = |minor| {
        let uuid = format!("GPU-00000000-0000-4000-8000-{node:08x}{minor:04x}");
        let attributes = place(minor, n_gpus);
        Device {
            memory_bytes: 80 * GIB,
            core: 100,
            slots: 100,
            attributes,
            ..Device::new(uuid, minor)
        }
    };
    let nic = |minor| {
        let id = format!("{node:04x}:{minor:02x}:00.0");
        Device {
            resources: [("rdma".into(), 100)].into(),
            attributes: place(minor, n_nics),
            ..Device::new(id, minor)
        }
    };
    let other_devices = Some(vec![DevicesOfType {
        kind: "rdma".into(),
        devices: (0..n_nics).map(nic).collect(),
    }]);
    Inventory {
        gpus: (0..n_gpus).map(gpu).collect(),
        serves_vendor: true,
        other_devices,
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

fn rdma(amount: u64) -> DeviceRequest {
    DeviceRequest {
        kind: "rdma".into(),
        amounts: [("rdma".into(), amount)].into(),
        whole: Some(100),
    }
}

fn joint(leads: bool, same_switch: bool) -> Constraints {
    let (gpu, nic) = (DeviceType::Gpu, DeviceType::from("rdma"));
    Constraints {
        joint: Some(JointAllocation {
            kinds: if leads { vec![gpu, nic] } else { vec![nic, gpu] },
            same_switch,
        }),
        ..Constraints::default()
    }
}

/// Takes a part of one GPU.
fn use_gpu(fleet: &mut Fleet, node: u32, minor: u32) {
    let uuid = format!("GPU-00000000-0000-4000-8000-{node:08x}{minor:04x}")
        .as_str()
        .into();
    let memory = HeldMemory::Requested(RequestedMemory::Ratio(30));
    let share = HeldPart {
        memory,
        core: 0,
        slots: 1,
        ..HeldPart::new(DeviceType::Gpu, DeviceRef::Id(uuid))
    };
    fleet.hold(
        &format!("pod-{node}-{minor}").as_str().into(),
        &name(node),
        Holdings::from(vec![share]),
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

/// Its name, the inventory, the minors of used GPUs, and the requested GPUs, RDMA percent and constraints.
type Case = (
    &'static str,
    Inventory,
    &'static [u32],
    RequestedGpus,
    u64,
    Constraints,
);

fn cases() -> [Case; 9] {
    let common = || machine(0, 8, 16, 4);
    // All NICs on switches of their own: no solution, and no rule that excludes one early.
    let apart = || {
        let mut inventory = machine(0, 8, 16, 8);
        let nics = inventory
            .other_devices
            .iter_mut()
            .flatten()
            .flat_map(|class| class.devices.iter_mut());
        (0_u32..)
            .zip(nics)
            .filter(|(at, _)| at % 4 < 3)
            .for_each(|(at, nic)| nic.attributes = attributes(at % 2, 100 + at));
        inventory
    };
    let large = || machine(0, 16, 32, 16);
    let constrained = |partition| Constraints {
        partition: Some(partition),
        ..Constraints::default()
    };
    let partition = || constrained(PartitionConstraint::default());
    [
        (
            "8 GPUs, 16 NICs: 4 and 1 on the same switches",
            common(),
            &[],
            RequestedGpus::Whole(4),
            1,
            joint(true, true),
        ),
        (
            "8 GPUs, 16 NICs: 4 and 1",
            common(),
            &[],
            RequestedGpus::Whole(4),
            1,
            joint(true, false),
        ),
        (
            "8 GPUs, 16 NICs: 4 and 1, broken",
            common(),
            &[0, 3, 5],
            RequestedGpus::Whole(4),
            1,
            joint(true, true),
        ),
        (
            "8 GPUs, 16 NICs: 4 and 8, NICs lead",
            common(),
            &[1, 2],
            RequestedGpus::Whole(4),
            800,
            joint(false, false),
        ),
        (
            "8 GPUs, 16 NICs: 4 and 6, NICs apart, none fits",
            apart(),
            &[1],
            RequestedGpus::Whole(4),
            600,
            joint(true, true),
        ),
        (
            "8 GPUs, 16 NICs: 4 and 6, NICs apart",
            apart(),
            &[1],
            RequestedGpus::Whole(4),
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
            RequestedGpus::Whole(4),
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
            RequestedGpus::Whole(2),
            1,
            partition(),
        ),
        (
            "16 GPUs, 32 NICs, 16 switches: 8 and 16",
            large(),
            &[1, 8],
            RequestedGpus::Whole(8),
            1600,
            joint(true, false),
        ),
    ]
}

fn decide_one_node(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("decide");
    for (what, inventory, used, gpus, nics, constraints) in &cases() {
        let (fleet, id) = one(inventory.clone(), used);
        let others = [rdma(*nics)];
        let ask = NodeRequest {
            gpus: *gpus,
            others: &others,
            constraints: Some(constraints),
            ..NodeRequest::default()
        };
        assert_eq!(
            fleet.fit(id, ask, Hints::Respect).is_err(),
            what.ends_with("none fits"),
            "{what}"
        );
        group.bench_function(*what, |b| {
            b.iter(|| {
                fleet
                    .choose_devices(black_box(id), ask, DevicePolicy::Binpack, Hints::Respect)
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
    for (what, constraints) in [
        ("no constraints", None),
        ("4 and 1 on the same switches", Some(joint(true, true))),
        ("4 and 1", Some(joint(true, false))),
    ] {
        let ask = NodeRequest {
            gpus: RequestedGpus::Whole(4),
            others: &others,
            constraints: constraints.as_ref(),
            ..NodeRequest::default()
        };
        group.bench_function(format!("evaluate, {what}"), |b| {
            b.iter(|| {
                let mut evaluation = fleet.evaluation(ask, Policies::default(), Hints::Respect);
                let evaluate = |name: &String| fleet.node_id(name).map(|id| evaluation.evaluate(id));
                black_box(&names).iter().map(evaluate).max()
            });
        });
    }
    group.finish();
}

criterion_group!(benches, decide_one_node, filter);
criterion_main!(benches);
