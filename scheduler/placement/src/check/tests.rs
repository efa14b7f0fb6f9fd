//! Breaks the state by hand in every way that the check is for.

use rstest::rstest;

use super::Violation;
use crate::amounts::Amounts;
use crate::class::{Class, Device};
use crate::fleet::{Fleet, NodeId};
use crate::gpu::{Gpu, Inventory};
use crate::holding::{GpuRef, HeldMemory, HeldShare, Holding, Placement, Share};
use crate::memory::Memory;
use crate::node::Node;

fn gpu(node: &str, minor: u32) -> Gpu {
    Gpu {
        uuid: format!("{node}-{minor}").into(),
        minor,
        memory_bytes: 1000,
        core: 100,
        slots: 10,
        healthy: true,
        sharing: true,
        traits: crate::traits::Traits::default(),
    }
}

fn share(gpu: GpuRef, memory: u64, core: u32, slots: u32) -> HeldShare {
    HeldShare {
        gpu,
        memory: HeldMemory::Exact(Memory::from_bytes(memory)),
        core,
        slots,
        trusted: true,
    }
}

/// Two nodes of two GPUs and an adapter; `a` and `b` hold shares of `n`, `h` has a hint there.
fn fleet() -> Fleet {
    let mut fleet = Fleet::new();
    for node in ["n", "m"] {
        let resources = [("rdma".into(), 100)].into();
        let nic = Device {
            id: "nic".into(),
            minor: 0,
            resources,
            healthy: true,
            traits: crate::traits::Traits::default(),
        };
        let classes = Some(vec![Class {
            kind: "rdma".into(),
            devices: vec![nic],
        }]);
        fleet.set_inventory(
            node,
            Inventory {
                gpus: vec![gpu(node, 0), gpu(node, 1)],
                classes,
                ..Inventory::default()
            },
        );
    }
    for (owner, minor) in [("a", 0), ("b", 1)] {
        fleet.hold(
            &owner.into(),
            "n",
            Holding::Shares(vec![share(GpuRef::Minor(minor), 100, 10, 1)]),
        );
    }
    let amounts = Amounts {
        memory: Memory::from_bytes(100),
        core: 0,
        slots: 1,
    };
    let placement = Placement {
        shares: vec![Share {
            gpu: "n-0".into(),
            minor: 0,
            amounts,
        }],
        ..Placement::default()
    };
    let id = fleet.node_id("n").unwrap();
    assert!(fleet.hint(&"h".into(), id, placement));
    for owner in ["a", "p"] {
        fleet.run(
            &owner.into(),
            "n",
            crate::host::HostAmounts {
                cpu_milli: 5,
                memory: 6,
            },
        );
    }
    assert_eq!(fleet.check(), []);
    fleet
}

/// The first node.
fn n(fleet: &mut Fleet) -> &mut Node {
    fleet.slots[0].node.as_mut().unwrap()
}

fn m(fleet: &mut Fleet) -> &mut Node {
    fleet.slots[1].node.as_mut().unwrap()
}

#[rstest]
#[case::free_memory(|fleet: &mut Fleet| n(fleet).rows[0].free.memory = Memory::from_bytes(901), &["RowDiffers"])]
#[case::free_core(|fleet: &mut Fleet| n(fleet).rows[1].free.core -= 1, &["RowDiffers"])]
#[case::free_slots(|fleet: &mut Fleet| m(fleet).rows[1].free.slots -= 1, &["RowDiffers"])]
#[case::total(|fleet: &mut Fleet| m(fleet).rows[0].total.core = 0, &["RowDiffers"])]
#[case::free_though_sick(|fleet: &mut Fleet| sicken(n(fleet)), &["RowDiffers"])]
#[case::sickness_not_noted(
    |fleet: &mut Fleet| {
        n(fleet).inventory.as_mut().unwrap().gpus[0].healthy = false;
        n(fleet).rows[0].free = Amounts::ZERO;
    },
    &["Index"]
)]
#[case::mark_of_a_holder(|fleet: &mut Fleet| n(fleet).marks[0].is_held = false, &["RowDiffers"])]
#[case::mark_of_a_sharer(|fleet: &mut Fleet| n(fleet).marks[1].is_shared = false, &["RowDiffers"])]
#[case::mark_of_one_that_is_withheld(|fleet: &mut Fleet| m(fleet).marks[0].is_withheld = true, &["RowDiffers"])]
#[case::free_of_another_device(
    |fleet: &mut Fleet| { n(fleet).free_others[0][0].insert("rdma".into(), 99); },
    &["RowDiffers"]
)]
#[case::another_device_missing(|fleet: &mut Fleet| m(fleet).free_others.clear(), &["RowDiffers"])]
#[case::row_missing(|fleet: &mut Fleet| m(fleet).rows.resize(0), &["Index", "RowDiffers", "RowDiffers"])]
#[case::gpus_out_of_order(|fleet: &mut Fleet| m(fleet).inventory.as_mut().unwrap().gpus.reverse(), &["Index"])]
#[case::uuid_twice(|fleet: &mut Fleet| m(fleet).inventory.as_mut().unwrap().gpus[1].uuid = "m-0".into(), &["Index"])]
#[case::name_lost(|fleet: &mut Fleet| { fleet.names.remove("m"); }, &["Index", "Index"])]
#[case::name_astray(|fleet: &mut Fleet| { fleet.names.insert("m", NodeId::new(0, 0)); }, &["Index"])]
#[case::name_of_nothing(|fleet: &mut Fleet| { fleet.names.insert("x", NodeId::new(7, 0)); }, &["Index"])]
#[case::idle_node(|fleet: &mut Fleet| drop(m(fleet).set_inventory(None)), &["Index", "RowDiffers"])]
#[case::owner_lost(|fleet: &mut Fleet| { fleet.owners.remove("a"); }, &["Index", "Index", "Index"])]
#[case::owner_astray(|fleet: &mut Fleet| { fleet.owners.insert("a".into(), 1); }, &["Index"])]
#[case::owner_of_nothing(|fleet: &mut Fleet| { fleet.owners.insert("x".into(), 1); }, &["Index"])]
#[case::hint_lost(|fleet: &mut Fleet| { fleet.hinted.remove("h"); }, &["Index", "Index"])]
#[case::hint_astray(|fleet: &mut Fleet| { fleet.hinted.insert("h".into(), 1); }, &["Index"])]
#[case::hint_beside_holding(
    |fleet: &mut Fleet| {
        n(fleet).hints[0].owner = "a".into();
        fleet.hinted.remove("h");
        fleet.hinted.insert("a".into(), 0);
    },
    &["Index"]
)]
#[case::hint_charged_elsewhere(|fleet: &mut Fleet| n(fleet).hints[0].charges[0].0 = 1, &["RowDiffers"])]
#[case::holdings_out_of_order(|fleet: &mut Fleet| n(fleet).held.reverse(), &["Index"])]
#[case::owner_on_two_nodes(
    |fleet: &mut Fleet| {
        let held = n(fleet).held.remove(1);
        let copy = crate::node::Held { owner: held.owner.clone(), origin: held.origin, holdings: held.holdings.clone() };
        n(fleet).put(held);
        m(fleet).put(copy);
    },
    &["OwnerOnSeveralNodes", "RowDiffers"]
)]
#[case::host_use_lost(|fleet: &mut Fleet| fleet.running.clear(), &["Index", "Index"])]
#[case::host_use_uncounted(|fleet: &mut Fleet| n(fleet).host.used.cpu_milli += 1, &["Index"])]
#[case::use_beside_gpus_uncounted(|fleet: &mut Fleet| fleet.beside = crate::beside::Beside::default(), &["Index"])]
#[case::hint_not_told(|fleet: &mut Fleet| fleet.briefs[0].has_hints = false, &["RowDiffers"])]
#[case::rule_not_told(|fleet: &mut Fleet| fleet.briefs[1].has_rules = true, &["RowDiffers"])]
#[case::not_told_of(|fleet: &mut Fleet| fleet.briefs[1].is_there = false, &["RowDiffers"])]
#[case::generation_not_told(|fleet: &mut Fleet| fleet.briefs[1].generation += 1, &["RowDiffers"])]
#[case::state_not_told(|fleet: &mut Fleet| fleet.briefs[1].state = None, &["Index", "RowDiffers"])]
#[case::state_of_nobody(
    |fleet: &mut Fleet| {
        let state = m(fleet).state_under(crate::fit::Hints::Respect);
        fleet.states.enter(state);
    },
    &["Index"]
)]
fn corruption_is_found(#[case] corrupt: fn(&mut Fleet), #[case] expected: &[&str]) {
    let mut fleet = fleet();
    corrupt(&mut fleet);
    assert_eq!(kinds(&fleet), expected, "{:#?}", fleet.check());
}

/// Notes the sickness of a device, but leaves its room on offer.
fn sicken(node: &mut Node) {
    node.inventory.as_mut().unwrap().gpus[0].healthy = false;
    node.any_aside = true;
}

#[rstest]
#[case::memory(share(GpuRef::Minor(0), 901, 0, 0), &["Oversubscribed"])]
#[case::core(share(GpuRef::Minor(0), 1, 91, 0), &["Oversubscribed"])]
#[case::slots(share(GpuRef::Uuid("n-0".into()), 1, 0, 10), &["Oversubscribed"])]
#[case::all_at_once(share(GpuRef::Minor(0), 901, 91, 10), &["Oversubscribed", "Oversubscribed", "Oversubscribed"])]
#[case::just_full(share(GpuRef::Minor(0), 900, 90, 9), &[])]
#[case::no_such_minor(share(GpuRef::Minor(9), 5000, 0, 0), &["MissingGpu"])]
#[case::no_such_uuid(share(GpuRef::Uuid("x".into()), 5000, 0, 0), &["MissingGpu"])]
#[case::in_doubt(HeldShare { trusted: false, ..share(GpuRef::Minor(0), 5000, 0, 0) }, &[])]
fn facts_that_break_an_invariant_are_found(#[case] share: HeldShare, #[case] expected: &[&str]) {
    let mut fleet = fleet();
    fleet.hold(&"fact".into(), "n", Holding::Shares(vec![share]));
    assert_eq!(kinds(&fleet), expected, "{:#?}", fleet.check());
}

#[test]
fn one_device_shared_twice_by_one_owner_is_found() {
    let mut fleet = fleet();
    let shares = vec![
        share(GpuRef::Minor(0), 1, 0, 0),
        share(GpuRef::Minor(1), 1, 0, 0),
        share(GpuRef::Uuid("n-0".into()), 1, 0, 0),
    ];
    fleet.hold(&"twice".into(), "n", Holding::Shares(shares));
    let expected = Violation::SameGpuTwice {
        node: "n".into(),
        owner: "twice".into(),
        gpu: "n-0".into(),
    };
    assert_eq!(fleet.check(), [expected]);
}

#[test]
fn what_is_held_of_sick_or_vanished_devices_breaks_nothing() {
    let mut fleet = fleet();
    let sick = Gpu {
        healthy: false,
        ..gpu("n", 0)
    };
    fleet.set_inventory(
        "n",
        Inventory {
            gpus: vec![sick, gpu("n", 1)],
            unit_bytes: None,
            ..Inventory::default()
        },
    );
    assert_eq!(fleet.check(), []);
    fleet.remove_inventory("n");
    assert_eq!(fleet.check(), []);
}

fn kinds(fleet: &Fleet) -> Vec<&'static str> {
    let kind = |violation: &Violation| match violation {
        Violation::Oversubscribed { .. } => "Oversubscribed",
        Violation::DeviceOversubscribed { .. } => "DeviceOversubscribed",
        Violation::RowDiffers { .. } => "RowDiffers",
        Violation::OwnerOnSeveralNodes { .. } => "OwnerOnSeveralNodes",
        Violation::SameGpuTwice { .. } => "SameGpuTwice",
        Violation::MissingGpu { .. } => "MissingGpu",
        Violation::FunctionHeldTwice { .. } => "FunctionHeldTwice",
        Violation::ExclusionBroken { .. } => "ExclusionBroken",
        Violation::Index { .. } => "Index",
    };
    fleet.check().iter().map(kind).collect()
}
