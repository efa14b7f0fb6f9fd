//! Reservations: checked, one for each owner, and undone by release.

use placement::{Amounts, DeviceType, Fleet, Hints, OwnerId, Placement, Reason, RequestedMemory, Share};
use rstest::rstest;

use crate::build::{
    ask, free_mib, gpus, hold, inventory, mib, minors, on_minor, one_node, place, ratio, units,
};

fn share(gpu: &str, minor: u32, mib_taken: u64) -> Share {
    Share {
        id: gpu.into(),
        minor,
        amounts: Amounts {
            memory: mib(mib_taken),
            core: 10,
            slots: 1,
        },
        kind: DeviceType::Gpu,
        resources: [].into(),
        virtual_functions: Vec::new(),
    }
}

fn on(shares: &[Share]) -> Placement {
    Placement {
        shares: shares.to_vec(),
        ..Placement::default()
    }
}

#[rstest]
#[case::nothing(on(&[]), "the placement takes nothing")]
#[case::no_memory(on(&[share("n-0", 0, 0)]), "the placement takes nothing")]
#[case::unknown_gpu(on(&[share("x", 0, 1)]), "GPU x is gone")]
#[case::sick_gpu(on(&[share("n-2", 2, 1)]), "GPU n-2 is unhealthy")]
#[case::twice(on(&[share("n-0", 0, 1), share("n-0", 0, 1)]), "GPU n-0 is chosen twice")]
#[case::too_much(
    on(&[share("n-1", 1, 1), share("n-0", 0, 8193)]),
    "GPU n-0 has too little memory free: 8589934592 bytes, 100 % of core, 100 slots for 8590983168 bytes, 10 % of core, 1 slots"
)]
fn refused(#[case] placement: Placement, #[case] message: &str) {
    let (mut fleet, id) = one_node(&[8192; 3]);
    let mut devices = inventory("n", &[8192; 3]);
    devices.gpus[2].healthy = false;
    fleet.set_inventory("n", devices);
    let error = fleet.reserve(&"pod".into(), id, &placement).unwrap_err();
    assert_eq!(error.to_string(), message);
    assert_eq!(free_mib(&fleet, "n"), [8192; 3]);
    assert!(fleet.held_by("pod").is_none());
    assert_eq!(fleet.check(), []);
}

#[test]
fn a_removed_node_takes_no_reservation() {
    let (mut fleet, id) = one_node(&[8192]);
    let placement = fleet
        .choose_devices(id, &units(1), placement::DevicePolicy::Binpack, Hints::Ignore)
        .unwrap();
    fleet.remove_inventory("n");
    let error = fleet.reserve(&"pod".into(), id, &placement).unwrap_err();
    assert_eq!(error.to_string(), "the node is gone");
}

#[test]
fn a_pod_that_holds_devices_of_another_node_is_not_reserved() {
    let (mut fleet, n) = one_node(&[8192]);
    fleet.set_inventory("m", inventory("m", &[8192]));
    hold(&mut fleet, "pod", "m", on_minor(0, RequestedMemory::Units(100)));
    let chosen = fleet
        .choose_devices(n, &units(100), placement::DevicePolicy::Binpack, Hints::Ignore)
        .unwrap();
    let owner = OwnerId::from("pod");
    let error = fleet.reserve(&owner, n, &chosen).unwrap_err();
    assert_eq!(error.to_string(), "the pod already holds other shares on node m");
}

#[rstest]
#[case::core(|request: &mut placement::ShareRequest| request.core = 60, Reason::Core)]
#[case::slots(|request: &mut placement::ShareRequest| request.slots = 60, Reason::Slots)]
fn core_and_slots_are_limited_like_memory(
    #[case] change: fn(&mut placement::ShareRequest),
    #[case] reason: Reason,
) {
    let (mut fleet, id) = one_node(&[8192; 2]);
    let mut request = ask(1, RequestedMemory::Ratio(1));
    change(&mut request);
    assert_eq!(minors(&place(&mut fleet, "a", id, &request).unwrap()), [0]);
    assert_eq!(minors(&place(&mut fleet, "b", id, &request).unwrap()), [1]);
    assert_eq!(place(&mut fleet, "c", id, &request), Err(reason));
    assert_eq!(gpus(&fleet, id)[0].used.memory, mib(8192).percent(1));
    assert_eq!(fleet.check(), []);
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
                gpus: vec![gpu].into(),
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
