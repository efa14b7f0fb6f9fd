//! Facts from watches and hints, in cases that the random steps of the model-based tests do not reach.

use placement::{
    Amounts, DevicePolicy, DeviceRef, HeldMemory, HeldPart, Hints, Holdings, Reason, RequestedMemory,
    Violation,
};

use crate::build::{gpus, hold, inventory, mib, on_minor, one_node, share, units};

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

#[test]
fn a_hint_follows_a_change_of_the_inventory() {
    let (mut fleet, id) = one_node(&[8192]);
    let chosen = fleet
        .choose_devices(id, &units(5000), DevicePolicy::Binpack, Hints::Respect)
        .unwrap();
    assert!(fleet.hint(&"a".into(), id, &chosen));
    let mut moved = inventory("n", &[4096, 8192]);
    moved.gpus[0].id = "new".into();
    moved.gpus[1].id = "n-0".into();
    fleet.set_inventory("n", moved);
    assert_eq!(fleet.fit(id, &units(4096), Hints::Respect), Ok(()));
    assert_eq!(fleet.fit(id, &units(4097), Hints::Respect), Err(Reason::Memory));
    assert_eq!(fleet.check(), []);
}
