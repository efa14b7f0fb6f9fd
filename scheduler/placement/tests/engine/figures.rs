//! The examples of the proposal.

use placement::{Fleet, Hints, Reason, RequestedMemory};
use rstest::rstest;

use crate::build::{ask, fill, free_mib, gpus, inventory, minors, one_node, place, ratio, units};

/// Three nodes of two GPUs of 16276 MiB: N1 has 4069 left in all, N2 twice 4069, N3 8138 on one GPU.
#[rstest]
#[case::n1_has_too_little_in_all(&[0, 4069], Err(Reason::Memory))]
#[case::n2_has_enough_but_split(&[4069, 4069], Err(Reason::Memory))]
#[case::n3_has_it_on_one_gpu(&[8138, 0], Ok(()))]
fn filter_figure(#[case] free: &[u64], #[case] expected: Result<(), Reason>) {
    let (mut fleet, id) = one_node(&[16276, 16276]);
    fill(&mut fleet, "n", free);
    assert_eq!(fleet.fit(id, &units(8138), Hints::Respect), expected);
    assert_eq!(fleet.check(), []);
}

/// Of GPUs with 12207, 8138, 4069 and 16276 free the one with 8138 is the tightest fit.
#[rstest]
#[case::as_drawn(8138, 1)]
#[case::a_little_less(8137, 1)]
#[case::a_little_more(8139, 0)]
#[case::small(4069, 2)]
#[case::only_the_empty_one(12208, 3)]
fn the_bind_figure_of_the_proposal(#[case] asked: u64, #[case] minor: u32) {
    let (mut fleet, id) = one_node(&[16276; 4]);
    fill(&mut fleet, "n", &[12207, 8138, 4069, 16276]);
    let placement = place(&mut fleet, "pod", id, &units(asked)).unwrap();
    assert_eq!(minors(&placement), [minor]);
    assert_eq!(fleet.check(), []);
}

#[rstest]
#[case::even(8192)]
#[case::one_byte_off(8191)]
#[case::prime(16_381)]
#[case::one_mib(1)]
fn thirds_of_any_size_fill_a_gpu(#[case] mib: u64) {
    let (mut fleet, id) = one_node(&[mib]);
    for (owner, percent) in [("a", 33), ("b", 33), ("c", 34)] {
        place(&mut fleet, owner, id, &ratio(percent)).unwrap();
    }
    assert_eq!(
        fleet.fit(id, &ask(1, RequestedMemory::Bytes(1)), Hints::Respect),
        Err(Reason::Memory)
    );
    assert_eq!(gpus(&fleet, id)[0].used.memory, crate::build::mib(mib));
    assert_eq!(fleet.check(), []);
    assert!(fleet.release("b"));
    assert_eq!(fleet.fit(id, &ratio(33), Hints::Respect), Ok(()));
    assert_eq!(fleet.fit(id, &ratio(34), Hints::Respect), Err(Reason::Memory));
}

/// A byte size that no percentage divides; rounding up any third would refuse the last.
#[test]
fn thirds_of_an_odd_number_of_bytes_fill_a_gpu() {
    for bytes in [1, 7, 101, 85_899_345_919, (1 << 50) - 1] {
        let mut fleet = Fleet::new();
        let gpu = crate::build::gpu("n", 0, bytes);
        fleet.set_inventory(
            "n",
            placement::Inventory {
                gpus: vec![gpu],
                unit_bytes: None,
                ..placement::Inventory::default()
            },
        );
        let id = fleet.node_id("n").unwrap();
        for (owner, percent) in [("a", 34), ("b", 33), ("c", 33)] {
            place(&mut fleet, owner, id, &ratio(percent)).unwrap();
        }
        assert_eq!(fleet.fit(id, &ratio(1), Hints::Respect), Err(Reason::Memory));
        assert_eq!(fleet.check(), []);
    }
}

/// E13: each GPU counts for what it is, not for an equal part of the node.
#[test]
fn e13_gpus_of_unequal_size_are_not_averaged() {
    let (mut fleet, id) = one_node(&[4096, 24576]);
    assert_eq!(fleet.fit(id, &units(20480), Hints::Respect), Ok(()));
    assert_eq!(
        fleet.fit(id, &ask(2, RequestedMemory::Units(14336)), Hints::Respect),
        Err(Reason::TooLarge)
    );
    let placement = place(&mut fleet, "pod", id, &ask(2, RequestedMemory::Ratio(50))).unwrap();
    let shares: Vec<_> = placement
        .gpus()
        .map(|share| (share.minor, share.amounts.memory))
        .collect();
    assert_eq!(
        shares,
        [(0, crate::build::mib(2048)), (1, crate::build::mib(12288))]
    );
    assert_eq!(free_mib(&fleet, "n"), [2048, 12288]);
}

/// E16: a pod may take shares of several GPUs, and each is a different one.
#[test]
fn e16_the_gpus_of_a_pod_are_distinct() {
    let (mut fleet, id) = one_node(&[8192; 3]);
    let two = ask(2, RequestedMemory::Units(6000));
    assert_eq!(minors(&place(&mut fleet, "a", id, &two).unwrap()), [0, 1]);
    assert_eq!(fleet.fit(id, &two, Hints::Respect), Err(Reason::TooFew));
    assert_eq!(fleet.fit(id, &units(6000), Hints::Respect), Ok(()));
}

#[test]
fn pods_of_one_node_do_not_affect_another() {
    let mut fleet = Fleet::new();
    for node in ["n1", "n2"] {
        fleet.set_inventory(node, inventory(node, &[8192]));
    }
    let [n1, n2] = ["n1", "n2"].map(|node| fleet.node_id(node).unwrap());
    place(&mut fleet, "pod", n1, &units(8192)).unwrap();
    assert_eq!(fleet.fit(n1, &units(1), Hints::Respect), Err(Reason::Memory));
    assert_eq!(fleet.fit(n2, &units(8192), Hints::Respect), Ok(()));
}
