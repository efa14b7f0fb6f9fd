//! Hints: room that a pod will probably take soon.

use placement::{Hints, NodeId, Reason, RequestedMemory};
use rstest::rstest;

use crate::build::{gpus, hold, inventory, minors, on_minor, one_node, place, units};

fn hint(fleet: &mut placement::Fleet, owner: &str, node: NodeId, mib: u64) -> bool {
    let chosen = fleet
        .choose_devices(
            node,
            &units(mib),
            placement::DevicePolicy::Binpack,
            Hints::RespectOthers(owner),
        )
        .unwrap();
    fleet.hint(&owner.into(), node, &chosen)
}

#[rstest]
#[case::respected(Hints::Respect, Err(Reason::Memory))]
#[case::of_another(Hints::RespectOthers("b"), Err(Reason::Memory))]
#[case::own(Hints::RespectOthers("a"), Ok(()))]
#[case::ignored(Hints::Ignore, Ok(()))]
fn hints_count_by_owner(#[case] hints: Hints<'_>, #[case] expected: Result<(), Reason>) {
    let (mut fleet, id) = one_node(&[8192]);
    assert!(hint(&mut fleet, "a", id, 5000));
    assert_eq!(fleet.fit(id, &units(5000), hints), expected);
    assert_eq!(
        fleet
            .choose_devices(id, &units(5000), placement::DevicePolicy::Spread, hints)
            .map(drop),
        expected
    );
    assert_eq!(
        fleet
            .score(id, &units(5000), placement::Policies::default(), hints)
            .parts_per_million()
            > 0,
        expected.is_ok()
    );
    assert_eq!(gpus(&fleet, id)[0].hinted.memory, crate::build::mib(5000));
    assert_eq!(fleet.check(), []);
    assert!(fleet.unhint("a"));
    assert_eq!(fleet.fit(id, &units(8192), Hints::Respect), Ok(()));
}

#[test]
fn the_next_pod_gets_another_gpu_than_the_hint() {
    let (mut fleet, id) = one_node(&[8192, 8192]);
    assert!(hint(&mut fleet, "a", id, 5000));
    assert_eq!(minors(&place(&mut fleet, "b", id, &units(5000)).unwrap()), [1]);
    assert_eq!(minors(&place(&mut fleet, "a", id, &units(5000)).unwrap()), [0]);
    assert_eq!((fleet.n_hints(), fleet.n_owners()), (0, 2));
    assert_eq!(fleet.check(), []);
}

#[test]
fn a_hint_is_replaced_and_ends_with_the_reservation() {
    let (mut fleet, n) = one_node(&[8192]);
    fleet.set_inventory("m", inventory("m", &[8192]));
    let m = fleet.node_id("m").unwrap();
    assert!(hint(&mut fleet, "a", n, 5000));
    assert!(hint(&mut fleet, "a", m, 5000));
    assert_eq!(fleet.fit(n, &units(8192), Hints::Respect), Ok(()));
    hold(&mut fleet, "a", "m", on_minor(0, RequestedMemory::Units(1000)));
    assert_eq!(fleet.fit(m, &units(7192), Hints::Respect), Ok(()));
    assert!(!hint(&mut fleet, "a", n, 1));
    assert_eq!(fleet.n_hints(), 0);
    assert_eq!(fleet.check(), []);
}

#[test]
fn a_hint_follows_a_change_of_the_inventory() {
    let (mut fleet, id) = one_node(&[8192]);
    assert!(hint(&mut fleet, "a", id, 5000));
    let mut moved = inventory("n", &[4096, 8192]);
    moved.gpus[0].id = "new".into();
    moved.gpus[1].id = "n-0".into();
    fleet.set_inventory("n", moved);
    assert_eq!(fleet.fit(id, &units(4096), Hints::Respect), Ok(()));
    assert_eq!(fleet.fit(id, &units(4097), Hints::Respect), Err(Reason::Memory));
    assert_eq!(fleet.check(), []);
}

/// A hint keeps a node's entry until it is removed, which may be by a fact about its owner.
#[test]
fn a_hint_keeps_the_entry_of_a_removed_node() {
    let (mut fleet, id) = one_node(&[8192]);
    assert!(hint(&mut fleet, "a", id, 5000));
    fleet.remove_inventory("n");
    assert_eq!(fleet.check(), []);
    fleet.set_inventory("m", inventory("m", &[8192]));
    hold(&mut fleet, "a", "m", on_minor(0, RequestedMemory::Units(1)));
    assert_eq!(fleet.node_id("n"), None);
    assert_eq!(fleet.check(), []);
}
