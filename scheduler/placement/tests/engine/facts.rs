//! Facts from watches: they come in any order, may contradict the inventory, and are never refused.

use placement::{
    Amounts, DeviceRef, Fleet, HeldMemory, HeldPart, Hints, Holdings, Reason, RequestedMemory, Violation,
};
use rstest::rstest;

use crate::build::{
    GIB, MIB, ask, free_mib, gpus, hold, inventory, mib, on_minor, on_uuid, one_node, ratio, share, units,
};

/// E1: a GPU with more held than it has has nothing free.
#[rstest]
#[case::one_unit_too_many(8193)]
#[case::thousandfold(8_192_000)]
#[case::largest_number(u64::MAX)]
fn e1_oversubscription_leaves_nothing_free(#[case] used: u64) {
    let (mut fleet, id) = one_node(&[8192, 4096]);
    hold(&mut fleet, "pod", "n", on_minor(0, RequestedMemory::Units(used)));
    assert_eq!(free_mib(&fleet, "n"), [0, 4096]);
    assert_eq!(fleet.fit(id, &units(4097), Hints::Respect), Err(Reason::Memory));
    assert!(
        matches!(fleet.check()[..], [Violation::Oversubscribed { .. }]),
        "{:?}",
        fleet.check()
    );
}

#[test]
fn e1_sums_of_huge_facts_do_not_wrap_around() {
    let (mut fleet, id) = one_node(&[8192]);
    for owner in ["a", "b", "c"] {
        let huge = HeldPart {
            core: u32::MAX,
            slots: u32::MAX,
            ..share(DeviceRef::Minor(0), RequestedMemory::Bytes(u64::MAX))
        };
        hold(&mut fleet, owner, "n", Holdings::from(vec![huge]));
    }
    assert_eq!(gpus(&fleet, id)[0].free, Amounts::ZERO);
    assert_eq!(fleet.fit(id, &units(1), Hints::Respect), Err(Reason::Memory));
    assert!(
        fleet
            .check()
            .iter()
            .all(|violation| matches!(violation, Violation::Oversubscribed { .. }))
    );
    assert_eq!(fleet.check().len(), 3);
}

/// E2: amounts in units follow the node's unit, and free amounts follow the inventory.
#[test]
fn e2_amounts_follow_a_change_of_the_memory_unit() {
    let (mut fleet, id) = one_node(&[16384]);
    hold(&mut fleet, "pod", "n", on_minor(0, RequestedMemory::Units(3)));
    assert_eq!(free_mib(&fleet, "n"), [16381]);
    let mut in_gib = inventory("n", &[16384]);
    in_gib.unit_bytes = Some(GIB);
    fleet.set_inventory("n", in_gib);
    assert_eq!(free_mib(&fleet, "n"), [16384 - 3 * 1024]);
    assert_eq!(fleet.fit(id, &units(13), Hints::Respect), Ok(()));
    assert_eq!(fleet.fit(id, &units(14), Hints::Respect), Err(Reason::Memory));
    fleet.set_inventory("n", inventory("n", &[16384, 8192]));
    assert_eq!(free_mib(&fleet, "n"), [16381, 8192]);
    assert_eq!(fleet.check(), []);
}

#[test]
fn e2_free_amounts_follow_fewer_or_smaller_gpus() {
    let (mut fleet, id) = one_node(&[8192, 8192]);
    hold(
        &mut fleet,
        "pod",
        "n",
        on_uuid("n-1", RequestedMemory::Units(6000)),
    );
    fleet.set_inventory("n", inventory("n", &[8192, 4096]));
    assert_eq!(free_mib(&fleet, "n"), [8192, 0]);
    fleet.set_inventory("n", inventory("n", &[8192]));
    assert_eq!(free_mib(&fleet, "n"), [8192]);
    fleet.set_inventory("n", inventory("n", &[8192, 8192]));
    assert_eq!(free_mib(&fleet, "n"), [8192, 2192]);
    assert_eq!(
        fleet.fit(id, &ask(2, RequestedMemory::Units(2192)), Hints::Respect),
        Ok(())
    );
}

/// E3: a node that was first seen without capacity is used once it has some.
#[test]
fn e3_a_node_first_seen_without_capacity_is_used_later() {
    let mut fleet = Fleet::new();
    fleet.set_inventory("n", inventory("n", &[]));
    hold(&mut fleet, "pod", "n", on_minor(1, RequestedMemory::Units(100)));
    let id = fleet.node_id("n").unwrap();
    assert_eq!(fleet.fit(id, &units(1), Hints::Respect), Err(Reason::NoDevice));
    assert_eq!(fleet.set_inventory("n", inventory("n", &[0, 0])).len(), 2);
    assert_eq!(fleet.fit(id, &ratio(1), Hints::Respect), Err(Reason::NoDevice));
    fleet.set_inventory("n", inventory("n", &[8192, 8192]));
    assert_eq!(free_mib(&fleet, "n"), [8192, 8092]);
    assert_eq!(fleet.check(), []);
}

/// E4, E5: capacity is free again when the holding is released, once, and not otherwise.
#[test]
fn e4_a_release_frees_a_share_once() {
    let (mut fleet, _) = one_node(&[8192]);
    hold(&mut fleet, "pod", "n", on_minor(0, RequestedMemory::Units(100)));
    hold(&mut fleet, "pod", "n", on_minor(0, RequestedMemory::Units(100)));
    assert_eq!(free_mib(&fleet, "n"), [8092]);
    assert!(fleet.release("pod"));
    assert!(!fleet.release("pod"));
    assert_eq!(free_mib(&fleet, "n"), [8192]);
    assert_eq!(fleet.n_owners(), 0);
    assert_eq!(fleet.check(), []);
}

/// E6: pods of unknown nodes are no error, whichever comes first.
#[test]
fn e6_pods_may_come_before_their_node() {
    let mut fleet = Fleet::new();
    hold(&mut fleet, "pod", "n", on_uuid("n-0", RequestedMemory::Ratio(50)));
    assert_eq!(fleet.check(), []);
    let id = fleet.node_id("n").unwrap();
    assert_eq!(fleet.fit(id, &units(1), Hints::Respect), Err(Reason::NoDevice));
    fleet.set_inventory("n", inventory("n", &[8192]));
    assert_eq!(free_mib(&fleet, "n"), [4096]);
}

/// E14: a node that goes and comes back has its pods; without any reference its entry goes.
#[test]
fn e14_a_node_that_comes_back_has_its_pods() {
    let (mut fleet, id) = one_node(&[8192]);
    hold(
        &mut fleet,
        "pod",
        "n",
        on_uuid("n-0", RequestedMemory::Units(5000)),
    );
    fleet.remove_inventory("n");
    assert_eq!(fleet.fit(id, &units(1), Hints::Respect), Err(Reason::NoDevice));
    let held: Vec<_> = fleet
        .nodes()
        .map(|node| (node.name(), node.held().count()))
        .collect();
    assert_eq!(held, [("n", 1)]);
    fleet.set_inventory("n", inventory("n", &[8192]));
    assert_eq!(free_mib(&fleet, "n"), [3192]);
    fleet.remove_inventory("n");
    assert!(fleet.release("pod"));
    assert_eq!(fleet.node_id("n"), None);
    assert_eq!(fleet.nodes().count(), 0);
    assert_eq!(fleet.check(), []);
}

#[test]
fn the_id_of_a_removed_node_refers_to_no_other() {
    let (mut fleet, stale) = one_node(&[8192]);
    fleet.remove_inventory("n");
    fleet.set_inventory("other", inventory("other", &[8192]));
    assert_eq!(fleet.fit(stale, &units(1), Hints::Respect), Err(Reason::NoDevice));
    assert!(fleet.view(stale).is_none());
    assert_eq!(fleet.nodes().count(), 1);
}

#[test]
fn a_share_of_a_missing_gpu_is_reported_and_not_charged() {
    let (mut fleet, _) = one_node(&[8192, 8192]);
    hold(
        &mut fleet,
        "pod",
        "n",
        on_uuid("elsewhere", RequestedMemory::Units(5000)),
    );
    assert_eq!(free_mib(&fleet, "n"), [8192, 8192]);
    assert!(matches!(fleet.check()[..], [Violation::MissingGpu { .. }]));
}

#[rstest]
#[case::unknown_devices(Holdings::from(vec![HeldPart::from(&units(5000))]))]
#[case::unknown_minor(on_minor(7, RequestedMemory::Units(5000)))]
fn a_share_of_unknown_gpus_is_charged_to_every_gpu(#[case] holding: Holdings) {
    let (mut fleet, id) = one_node(&[8192, 8192, 4096]);
    hold(&mut fleet, "pod", "n", holding);
    assert_eq!(free_mib(&fleet, "n"), [3192, 3192, 0]);
    assert_eq!(gpus(&fleet, id)[0].suspect.memory, mib(5000));
    assert_eq!(gpus(&fleet, id)[0].used, Amounts::ZERO);
    let oversubscribed = |violation: &Violation| matches!(violation, Violation::Oversubscribed { .. });
    assert!(!fleet.check().iter().any(oversubscribed));
}

#[test]
fn an_amount_in_unknown_units_takes_the_whole_device() {
    let (mut fleet, id) = one_node(&[8192, 8192]);
    let mut without_unit = inventory("n", &[8192, 8192]);
    without_unit.unit_bytes = None;
    fleet.set_inventory("n", without_unit);
    hold(&mut fleet, "pod", "n", on_minor(1, RequestedMemory::Units(1)));
    assert_eq!(free_mib(&fleet, "n"), [8192, 0]);
    assert_eq!(fleet.fit(id, &units(1), Hints::Respect), Err(Reason::UnitUnknown));
    assert_eq!(
        fleet.fit(id, &ask(1, RequestedMemory::Bytes(MIB)), Hints::Respect),
        Ok(())
    );
    assert_eq!(fleet.check(), []);
}

#[test]
fn an_untrusted_record_is_charged_and_violates_nothing() {
    let (mut fleet, _) = one_node(&[8192]);
    let doubtful = HeldPart {
        trusted: false,
        ..share(DeviceRef::Minor(0), RequestedMemory::Units(9000))
    };
    hold(&mut fleet, "pod", "n", Holdings::from(vec![doubtful]));
    assert_eq!(free_mib(&fleet, "n"), [0]);
    assert_eq!(fleet.check(), []);
}

#[test]
fn a_later_holding_replaces_the_earlier_one_on_any_node() {
    let (mut fleet, _) = one_node(&[8192]);
    fleet.set_inventory("m", inventory("m", &[8192]));
    hold(&mut fleet, "pod", "n", on_minor(0, RequestedMemory::Units(100)));
    hold(&mut fleet, "pod", "m", on_minor(0, RequestedMemory::Units(200)));
    assert_eq!(free_mib(&fleet, "n"), [8192]);
    assert_eq!(free_mib(&fleet, "m"), [7992]);
    hold(
        &mut fleet,
        "pod",
        "m",
        on_uuid("m-0", RequestedMemory::Units(300)),
    );
    assert_eq!(free_mib(&fleet, "m"), [7892]);
    assert_eq!(fleet.n_owners(), 1);
    assert_eq!(fleet.check(), []);
}

#[test]
fn shares_of_an_unhealthy_gpu_stay_counted() {
    let (mut fleet, id) = one_node(&[8192]);
    hold(&mut fleet, "pod", "n", on_minor(0, RequestedMemory::Units(5000)));
    let mut sick = inventory("n", &[8192]);
    sick.gpus[0].healthy = false;
    fleet.set_inventory("n", sick);
    assert_eq!(fleet.fit(id, &units(1), Hints::Respect), Err(Reason::Unhealthy));
    assert_eq!(free_mib(&fleet, "n"), [3192]);
    assert_eq!(fleet.check(), []);
    fleet.set_inventory("n", inventory("n", &[8192]));
    assert_eq!(fleet.fit(id, &units(3192), Hints::Respect), Ok(()));
    assert_eq!(fleet.fit(id, &units(3193), Hints::Respect), Err(Reason::Memory));
}

#[test]
fn views_list_the_holders_of_devices() {
    let (mut fleet, id) = one_node(&[8192]);
    let exact = HeldPart {
        memory: HeldMemory::Exact(mib(10)),
        core: 30,
        ..share(DeviceRef::Minor(0), RequestedMemory::Units(0))
    };
    hold(&mut fleet, "b", "n", Holdings::from(vec![exact]));
    hold(&mut fleet, "a", "n", on_minor(0, RequestedMemory::Ratio(50)));
    let gpu = gpus(&fleet, id).remove(0);
    assert_eq!(
        gpu.used,
        Amounts {
            memory: mib(4106),
            core: 30,
            slots: 2
        }
    );
    assert_eq!(
        gpu.free,
        Amounts {
            memory: mib(4086),
            core: 70,
            slots: 98
        }
    );
    let holders: Vec<_> = gpu
        .holders
        .iter()
        .map(|holder| (holder.owner.as_str(), holder.amounts.memory))
        .collect();
    assert_eq!(holders, [("a", mib(4096)), ("b", mib(10))]);
}
