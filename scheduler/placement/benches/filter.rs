//! Time of a filter over whole clusters, by node names.

#![expect(clippy::unwrap_used, reason = "a benchmark whose set-up fails should stop")]

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use placement::{
    Amounts, Device, DevicePolicy, DeviceRef, DeviceType, Fleet, HeldMemory, HeldPart, Hints, Holdings,
    Inventory, Memory, Placement, Policies, RequestedMemory, Share, ShareRequest,
};

const GIB: u64 = 1 << 30;
const GPUS: u32 = 8;

fn name(at: u32) -> String {
    format!("gpu-node-{at:05}.cluster.local")
}

fn gpu(node: u32, minor: u32) -> Device {
    let uuid = format!("GPU-00000000-0000-4000-8000-{node:08x}{minor:04x}");
    Device {
        memory_bytes: 80 * GIB,
        core: 100,
        slots: 100,
        ..Device::new(uuid, minor)
    }
}

/// Nodes with 8 GPUs of 80 GiB; on every other node each GPU is too full for 40 GiB more.
fn half_full(n_nodes: u32) -> Fleet {
    let mut fleet = Fleet::new();
    for node in 0..n_nodes {
        let gpus: Vec<Device> = (0..GPUS).map(|minor| gpu(node, minor)).collect();
        fleet.set_inventory(
            &name(node),
            Inventory {
                gpus: gpus.clone().into(),
                unit_bytes: Some(GIB),
                ..Inventory::default()
            },
        );
        for gpu in gpus {
            let owner = format!("{node:08x}-0000-4000-8000-{:012x}", gpu.minor);
            let memory = HeldMemory::Exact(Memory::from_bytes(if node % 2 == 0 {
                30 * GIB
            } else {
                50 * GIB
            }));
            let share = HeldPart {
                memory,
                core: 40,
                slots: 1,
                ..HeldPart::new(DeviceType::Gpu, DeviceRef::Id(gpu.id))
            };
            fleet.hold(&owner.as_str().into(), &name(node), Holdings::from(vec![share]));
        }
    }
    fleet
}

fn hint_every_tenth(fleet: &mut Fleet, n_nodes: u32) {
    for node in (0..n_nodes).step_by(10) {
        let amounts = Amounts {
            memory: Memory::from_bytes(GIB),
            core: 0,
            slots: 1,
        };
        let shares = vec![Share {
            id: gpu(node, 0).id,
            minor: 0,
            amounts,
            kind: DeviceType::Gpu,
            resources: [].into(),
            virtual_functions: Vec::new(),
        }];
        let id = fleet.node_id(&name(node)).unwrap();
        fleet.hint(
            &format!("hinting-{node}").as_str().into(),
            id,
            &Placement {
                shares,
                ..Placement::default()
            },
        );
    }
}

fn n_fitting(fleet: &Fleet, names: &[String], request: &ShareRequest) -> usize {
    let fits = |name: &&String| {
        fleet
            .node_id(name)
            .is_some_and(|id| fleet.fit(id, request, Hints::Respect).is_ok())
    };
    names.iter().filter(fits).count()
}

fn filter(criterion: &mut Criterion) {
    let asks = [
        (
            "bytes",
            ShareRequest {
                devices: 1,
                memory: RequestedMemory::Bytes(40 * GIB),
                core: 0,
                slots: 1,
            },
        ),
        (
            "units",
            ShareRequest {
                devices: 1,
                memory: RequestedMemory::Units(40),
                core: 0,
                slots: 1,
            },
        ),
        (
            "4 devices by ratio",
            ShareRequest {
                devices: 4,
                memory: RequestedMemory::Ratio(50),
                core: 50,
                slots: 1,
            },
        ),
    ];
    for n_nodes in [5_000, 15_000] {
        let mut fleet = half_full(n_nodes);
        let names: Vec<String> = (0..n_nodes).map(name).collect();
        let mut group = criterion.benchmark_group(format!("{n_nodes} nodes x {GPUS} GPUs"));
        group.throughput(Throughput::Elements(n_nodes.into()));
        group.bench_function("names only", |b| {
            b.iter(|| {
                black_box(&names)
                    .iter()
                    .filter(|name| fleet.node_id(name).is_some())
                    .count()
            });
        });
        for (what, request) in &asks {
            assert_eq!(n_fitting(&fleet, &names, request), names.len() / 2);
            group.bench_function(format!("fit, {what}"), |b| {
                b.iter(|| n_fitting(&fleet, black_box(&names), request));
            });
        }
        let (_, request) = asks[0];
        hint_every_tenth(&mut fleet, n_nodes);
        group.bench_function("fit, a tenth of the nodes hinted at", |b| {
            b.iter(|| n_fitting(&fleet, black_box(&names), &request));
        });
        group.bench_function("score", |b| {
            let ids: Vec<_> = names.iter().filter_map(|name| fleet.node_id(name)).collect();
            let score = |id| {
                fleet
                    .score(id, &request, Policies::default(), Hints::Respect)
                    .parts_per_million()
            };
            b.iter(|| black_box(&ids).iter().map(|id| score(*id)).max());
        });
        group.finish();
    }
}

fn choose_and_reserve(criterion: &mut Criterion) {
    let mut fleet = half_full(5_000);
    let id = fleet.node_id(&name(2_000)).unwrap();
    let request = ShareRequest {
        devices: 2,
        memory: RequestedMemory::Ratio(30),
        core: 30,
        slots: 1,
    };
    criterion.bench_function("choose, reserve and release", |b| {
        b.iter(|| {
            let placement = fleet
                .choose_devices(id, &request, DevicePolicy::Binpack, Hints::Respect)
                .unwrap();
            fleet.reserve(&"pod".into(), id, &placement).unwrap();
            fleet.release("pod")
        });
    });
}

criterion_group!(benches, filter, choose_and_reserve);
criterion_main!(benches);
