//! Corrupts the state in every way that the check is meant to find.

use rstest::rstest;

use super::Violation;
use crate::choice::group::SharedDomain;
use crate::data::amounts::{Amounts, HostAmounts, Memory};
use crate::data::device::{Device, DeviceRef, DevicesOfType};
use crate::data::holding::{HeldMemory, HeldPart, Hints, Holdings, Placement, Share};
use crate::data::ident::{DeviceType, NodeId, OwnerId};
use crate::data::inventory::{Inventory, LinkGroup};
use crate::data::workload::Workload;
use crate::fleet::Fleet;
use crate::state::equivalence::key_with;
use crate::state::node::Node;

fn gpu(node: &str, minor: u32) -> Device {
    Device {
        memory_bytes: 1000,
        core: 100,
        slots: 10,
        ..Device::new(format!("{node}-{minor}"), minor)
    }
}

fn share(gpu: DeviceRef, memory: u64, core: u32, slots: u32) -> HeldPart {
    HeldPart {
        memory: HeldMemory::Exact(Memory::from_bytes(memory)),
        core,
        slots,
        ..HeldPart::new(DeviceType::Gpu, gpu)
    }
}

/// Two nodes of two GPUs and an adapter; `a` and `b` hold shares of `n`, `h` has a hint there.
fn fleet() -> Fleet {
    let mut fleet = Fleet::new();
    for node in ["n", "m"] {
        let resources = [("rdma".into(), 100)].into();
        let nic = Device {
            resources,
            ..Device::new("nic", 0)
        };
        let other_devices = Some(vec![DevicesOfType {
            kind: "rdma".into(),
            devices: vec![nic].into(),
        }]);
        fleet.set_inventory(
            node,
            Inventory {
                gpus: vec![gpu(node, 0), gpu(node, 1)].into(),
                other_devices,
                ..Inventory::default()
            },
        );
    }
    for (owner, minor) in [("a", 0), ("b", 1)] {
        fleet.hold(
            &owner.into(),
            "n",
            Holdings::from(vec![share(DeviceRef::Minor(minor), 100, 10, 1)]),
        );
    }
    let amounts = Amounts {
        memory: Memory::from_bytes(100),
        core: 0,
        slots: 1,
    };
    let placement = Placement {
        shares: vec![Share {
            id: "n-0".into(),
            minor: 0,
            amounts,
            kind: DeviceType::Gpu,
            resources: [].into(),
            virtual_functions: Vec::new(),
        }],
        ..Placement::default()
    };
    let id = fleet.node_id("n").unwrap();
    assert!(fleet.hint(&"h".into(), id, &placement));
    for owner in ["a", "p"] {
        fleet.set_host_use(
            &owner.into(),
            "n",
            HostAmounts {
                cpu_milli: 5,
                memory: 6,
            },
            false,
        );
    }
    assert_eq!(fleet.check(), []);
    fleet
}

/// The first node.
fn n(fleet: &mut Fleet) -> &mut Node {
    fleet.nodes.slots[0].as_mut().unwrap()
}

fn m(fleet: &mut Fleet) -> &mut Node {
    fleet.nodes.slots[1].as_mut().unwrap()
}

#[rstest]
#[case::free_memory(|fleet: &mut Fleet| n(fleet).rows[0].free.memory = Memory::from_bytes(901), &["RowDiffers"])]
#[case::free_core(|fleet: &mut Fleet| n(fleet).rows[1].free.core -= 1, &["RowDiffers"])]
#[case::free_slots(|fleet: &mut Fleet| m(fleet).rows[1].free.slots -= 1, &["RowDiffers"])]
#[case::total(|fleet: &mut Fleet| m(fleet).rows[0].total.core = 0, &["RowDiffers"])]
#[case::free_though_unhealthy(|fleet: &mut Fleet| keep_free_when_unhealthy(n(fleet)), &["RowDiffers"])]
#[case::unhealthy_gpu_without_flag(
    |fleet: &mut Fleet| {
        n(fleet).inventory.gpus[0].healthy = false;
        n(fleet).rows[0].free = Amounts::ZERO;
    },
    &["Index"]
)]
#[case::flag_of_an_occupied_gpu(|fleet: &mut Fleet| n(fleet).flags[0].is_occupied = false, &["RowDiffers"])]
#[case::flag_of_a_shared_gpu(|fleet: &mut Fleet| n(fleet).flags[1].is_shared = false, &["RowDiffers"])]
#[case::flag_of_a_withheld_gpu(|fleet: &mut Fleet| m(fleet).flags[0].is_withheld = true, &["RowDiffers"])]
#[case::free_of_another_device(
    |fleet: &mut Fleet| { n(fleet).free_resources[1][0].insert("rdma".into(), 99); },
    &["RowDiffers"]
)]
#[case::another_device_missing(|fleet: &mut Fleet| m(fleet).free_resources.clear(), &["RowDiffers"])]
#[case::row_missing(|fleet: &mut Fleet| m(fleet).rows.resize(0), &["Index", "RowDiffers", "RowDiffers"])]
#[case::gpus_out_of_order(|fleet: &mut Fleet| m(fleet).inventory.gpus.reverse(), &["Index"])]
#[case::uuid_twice(|fleet: &mut Fleet| m(fleet).inventory.gpus[1].id = "m-0".into(), &["Index"])]
#[case::name_lost(|fleet: &mut Fleet| { fleet.nodes.names.remove("m"); }, &["Index", "Index"])]
#[case::name_of_another_node(|fleet: &mut Fleet| { fleet.nodes.names.insert("m".into(), NodeId { index: 0, generation: 0 }); }, &["Index"])]
#[case::name_of_nothing(|fleet: &mut Fleet| { fleet.nodes.names.insert("x".into(), NodeId { index: 7, generation: 0 }); }, &["Index"])]
#[case::idle_node(|fleet: &mut Fleet| drop(m(fleet).set_inventory(None)), &["Index", "RowDiffers"])]
#[case::owner_lost(|fleet: &mut Fleet| { fleet.nodes.owners.remove("a"); }, &["Index", "Index", "Index"])]
#[case::owner_on_another_node(|fleet: &mut Fleet| { fleet.nodes.owners.insert("a".into(), 1); }, &["Index"])]
#[case::owner_of_nothing(|fleet: &mut Fleet| { fleet.nodes.owners.insert("x".into(), 1); }, &["Index"])]
#[case::hint_lost(|fleet: &mut Fleet| { fleet.nodes.hinted.remove("h"); }, &["Index", "Index"])]
#[case::hint_on_another_node(|fleet: &mut Fleet| { fleet.nodes.hinted.insert("h".into(), 1); }, &["Index"])]
#[case::hint_and_holding(
    |fleet: &mut Fleet| {
        n(fleet).hints[0].owner = "a".into();
        fleet.nodes.hinted.remove("h");
        fleet.nodes.hinted.insert("a".into(), 0);
    },
    &["Index"]
)]
#[case::hint_charged_elsewhere(|fleet: &mut Fleet| n(fleet).hints[0].gpu_charges[0].0 = 1, &["RowDiffers"])]
#[case::holdings_out_of_order(|fleet: &mut Fleet| n(fleet).held.reverse(), &["Index"])]
#[case::owner_on_two_nodes(
    |fleet: &mut Fleet| {
        let held = n(fleet).held.remove(1);
        let copy = crate::data::holding::Held { owner: held.owner.clone(), origin: held.origin, holdings: held.holdings.clone() };
        n(fleet).insert_held(held);
        m(fleet).insert_held(copy);
    },
    &["OwnerOnSeveralNodes", "RowDiffers"]
)]
#[case::host_use_lost(|fleet: &mut Fleet| fleet.nodes.host_uses.clear(), &["Index", "Index"])]
#[case::host_use_uncounted(|fleet: &mut Fleet| n(fleet).host.used.cpu_milli += 1, &["Index"])]
#[case::cpu_only_pod_uncounted(|fleet: &mut Fleet| fleet.nodes.cpu_only = Workload::default(), &["Index"])]
#[case::summary_without_hint(|fleet: &mut Fleet| fleet.nodes.summaries[0].has_hints = false, &["RowDiffers"])]
#[case::summary_without_node(|fleet: &mut Fleet| fleet.nodes.summaries[1].exists = false, &["RowDiffers"])]
#[case::summary_of_another_generation(|fleet: &mut Fleet| fleet.nodes.summaries[1].generation += 1, &["Index"])]
#[case::summary_without_class(|fleet: &mut Fleet| fleet.nodes.summaries[1].class = None, &["Index", "RowDiffers"])]
#[case::class_without_node(
    |fleet: &mut Fleet| {
        let key = key_with(n(fleet), Hints::Respect);
        fleet.nodes.classes.class_of(key);
    },
    &["Index"]
)]
fn corruption_is_found(#[case] corrupt: fn(&mut Fleet), #[case] expected: &[&str]) {
    let mut fleet = fleet();
    corrupt(&mut fleet);
    assert_eq!(kinds(&fleet), expected, "{:#?}", fleet.check());
}

/// Marks a GPU as unhealthy, but leaves its row free.
fn keep_free_when_unhealthy(node: &mut Node) {
    node.inventory.gpus[0].healthy = false;
    node.any_unavailable = true;
}

#[rstest]
#[case::memory(share(DeviceRef::Minor(0), 901, 0, 0), &["Oversubscribed"])]
#[case::core(share(DeviceRef::Minor(0), 1, 91, 0), &["Oversubscribed"])]
#[case::slots(share(DeviceRef::Id("n-0".into()), 1, 0, 10), &["Oversubscribed"])]
#[case::all_at_once(share(DeviceRef::Minor(0), 901, 91, 10), &["Oversubscribed", "Oversubscribed", "Oversubscribed"])]
#[case::just_full(share(DeviceRef::Minor(0), 900, 90, 9), &[])]
#[case::no_such_minor(share(DeviceRef::Minor(9), 5000, 0, 0), &["MissingGpu"])]
#[case::no_such_uuid(share(DeviceRef::Id("x".into()), 5000, 0, 0), &["MissingGpu"])]
#[case::in_doubt(HeldPart { trusted: false, ..share(DeviceRef::Minor(0), 5000, 0, 0) }, &[])]
fn facts_that_break_an_invariant_are_found(#[case] share: HeldPart, #[case] expected: &[&str]) {
    let mut fleet = fleet();
    fleet.hold(&"fact".into(), "n", Holdings::from(vec![share]));
    assert_eq!(kinds(&fleet), expected, "{:#?}", fleet.check());
}

#[test]
fn one_device_shared_twice_by_one_owner_is_found() {
    let mut fleet = fleet();
    let shares = vec![
        share(DeviceRef::Minor(0), 1, 0, 0),
        share(DeviceRef::Minor(1), 1, 0, 0),
        share(DeviceRef::Id("n-0".into()), 1, 0, 0),
    ];
    fleet.hold(&"twice".into(), "n", Holdings::from(shares));
    let text = "twice holds two parts of n-0".to_owned();
    assert_eq!(fleet.check(), [Violation::SameGpuTwice(text)]);
}

#[test]
fn holdings_of_unhealthy_or_missing_devices_violate_nothing() {
    let mut fleet = fleet();
    let unhealthy = Device {
        healthy: false,
        ..gpu("n", 0)
    };
    fleet.set_inventory(
        "n",
        Inventory {
            gpus: vec![unhealthy, gpu("n", 1)].into(),
            unit_bytes: None,
            ..Inventory::default()
        },
    );
    assert_eq!(fleet.check(), []);
    fleet.remove_inventory("n");
    assert_eq!(fleet.check(), []);
}

/// The driver keeps memory that owners were given before. Only what they hold beyond that is too much.
#[test]
fn memory_that_the_driver_keeps_by_now_is_no_oversubscription() {
    for (memory_bytes, reserved_bytes, expected) in [
        (100, 0, &[][..]),
        (90, 10, &[][..]),
        (90, 9, &["Oversubscribed"]),
        (90, 0, &["Oversubscribed"]),
    ] {
        let mut fleet = fleet();
        let shrunk = Device {
            memory_bytes,
            reserved_bytes,
            ..gpu("n", 0)
        };
        let inventory = Inventory {
            gpus: vec![shrunk, gpu("n", 1)].into(),
            ..Inventory::default()
        };
        fleet.set_inventory("n", inventory);
        assert_eq!(
            kinds(&fleet),
            expected,
            "{memory_bytes} and {reserved_bytes} bytes"
        );
    }
}

/// `a` and `b` hold shares of the two GPUs of `n`; `c` has an adapter that has the minor of the second GPU.
#[rstest]
#[case::on_linked_gpus([[0, 1]], ["a", "b"], false)]
#[case::on_gpus_without_links([], ["a", "b"], true)]
#[case::on_gpus_of_two_link_groups([[0, 2], [1, 3]], ["a", "b"], true)]
#[case::an_adapter_is_no_gpu([], ["a", "c"], false)]
#[case::on_two_nodes([[0, 1]], ["a", "d"], true)]
fn members_apart_are_found<const N: usize>(
    #[case] links: [[u32; 2]; N],
    #[case] members: [&str; 2],
    #[case] is_violation: bool,
) {
    let mut fleet = fleet();
    let links = links.iter().map(|minors| LinkGroup {
        minors: minors.to_vec(),
        n_links: 1,
    });
    let inventory = Inventory {
        links: links.collect(),
        ..n(&mut fleet).inventory.clone()
    };
    fleet.set_inventory("n", inventory);
    let adapter = HeldPart::new("rdma".into(), DeviceRef::Minor(1));
    fleet.hold(&"c".into(), "n", Holdings::from(vec![adapter]));
    let on_other_node = Holdings::from(vec![share(DeviceRef::Minor(0), 100, 10, 1)]);
    fleet.hold(&"d".into(), "m", on_other_node);
    let violation = fleet.check_group(&members.map(OwnerId::from), SharedDomain::Link);
    assert_eq!(violation.is_some(), is_violation, "{violation:?}");
}

fn kinds(fleet: &Fleet) -> Vec<&'static str> {
    let kind = |violation: &Violation| match violation {
        Violation::Oversubscribed { .. } => "Oversubscribed",
        Violation::RowDiffers(_) => "RowDiffers",
        Violation::OwnerOnSeveralNodes(_) => "OwnerOnSeveralNodes",
        Violation::SameGpuTwice(_) => "SameGpuTwice",
        Violation::MissingGpu(_) => "MissingGpu",
        Violation::FunctionHeldTwice(_) => "FunctionHeldTwice",
        Violation::ExclusionBroken(_) => "ExclusionBroken",
        Violation::GroupApart(_) => "GroupApart",
        Violation::Index(_) => "Index",
    };
    fleet.check().iter().map(kind).collect()
}
