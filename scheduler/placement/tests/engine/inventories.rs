//! Inventories that are partly unusable.

use placement::{Device, Fleet, Hints, Inventory, Reason, RequestedMemory};
use rstest::rstest;

use crate::build::{GIB, ask, gpu, gpus, units};

fn problems(extra: Device, unit_bytes: u64) -> (Vec<String>, usize) {
    let mut fleet = Fleet::new();
    let inventory = Inventory {
        gpus: vec![extra, gpu("n", 0, GIB), gpu("n", 1, GIB)].into(),
        unit_bytes: Some(unit_bytes),
        ..Inventory::default()
    };
    let problems = fleet.set_inventory("n", inventory);
    assert_eq!(fleet.check(), []);
    let id = fleet.node_id("n").unwrap();
    (problems, gpus(&fleet, id).len())
}

#[rstest]
#[case::uuid_twice(Device { minor: 2, ..gpu("n", 0, GIB) }, "GPU n-0 is listed twice; the one with minor 2 is ignored")]
#[case::minor_twice(Device { id: "x".into(), ..gpu("n", 1, GIB) }, "minor 1 is listed twice; GPU x is ignored")]
#[case::no_memory(
    gpu("n", 2, 0),
    "GPU n-2 has 0 bytes of memory, which is not from 1 to 2^50; it is ignored"
)]
#[case::too_much_memory(
    gpu("n", 2, (1 << 50) + 1),
    "GPU n-2 has 1125899906842625 bytes of memory, which is not from 1 to 2^50; it is ignored"
)]
#[case::absurd_core(
    Device { core: u32::MAX, ..gpu("n", 2, GIB) },
    "GPU n-2 has core 4294967295 and 100 slots, of which one is more than 2^20; it is ignored"
)]
#[case::absurd_slots(
    Device { slots: u32::MAX, ..gpu("n", 2, GIB) },
    "GPU n-2 has core 100 and 4294967295 slots, of which one is more than 2^20; it is ignored"
)]
fn gpus_that_cannot_be_used_are_left_out(#[case] extra: Device, #[case] message: &str) {
    let (problems, n_left) = problems(extra, GIB);
    assert_eq!(problems, [message]);
    assert_eq!(n_left, 2);
}

/// The order of the list does not decide which of two conflicting devices is used.
#[test]
fn the_order_of_devices_does_not_matter() {
    let devices = [
        gpu("n", 0, GIB),
        Device {
            id: "a".into(),
            ..gpu("n", 0, 2 * GIB)
        },
        Device {
            minor: 5,
            ..gpu("n", 0, 3 * GIB)
        },
    ];
    let kept = |order: [usize; 3]| {
        let mut fleet = Fleet::new();
        let gpus = order.into_iter().map(|at| devices[at].clone()).collect();
        fleet.set_inventory(
            "n",
            Inventory {
                gpus,
                unit_bytes: None,
                ..Inventory::default()
            },
        );
        fleet.nodes().next().unwrap().inventory().unwrap().clone()
    };
    let expected = kept([0, 1, 2]);
    for order in [[0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        assert_eq!(kept(order), expected);
    }
}

#[rstest]
#[case::zero(0)]
#[case::larger_than_any_device(u64::MAX)]
fn an_impossible_memory_unit_counts_as_unknown(#[case] unit_bytes: u64) {
    let (problems, n_left) = problems(gpu("n", 2, GIB), unit_bytes);
    let message = format!(
        "a memory unit of {unit_bytes} bytes is not from 1 to 2^50; the node's units are taken to be unknown"
    );
    assert_eq!(problems, [message]);
    assert_eq!(n_left, 3);
}

#[test]
fn the_largest_devices_are_counted_exactly() {
    let mut fleet = Fleet::new();
    let gpus = (0..16)
        .map(|minor| Device {
            core: 1 << 20,
            slots: 1 << 20,
            ..gpu("n", minor, 1 << 50)
        })
        .collect();
    let inventory = Inventory {
        gpus,
        unit_bytes: Some(1 << 40),
        ..Inventory::default()
    };
    assert!(fleet.set_inventory("n", inventory).is_empty());
    let id = fleet.node_id("n").unwrap();
    assert_eq!(
        fleet.fit(id, &ask(16, RequestedMemory::Ratio(100)), Hints::Respect),
        Ok(())
    );
    assert_eq!(fleet.fit(id, &units(1024), Hints::Respect), Ok(()));
    assert_eq!(fleet.fit(id, &units(1025), Hints::Respect), Err(Reason::TooLarge));
    assert_eq!(
        fleet.fit(id, &units(u64::MAX), Hints::Respect),
        Err(Reason::TooLarge)
    );
}
