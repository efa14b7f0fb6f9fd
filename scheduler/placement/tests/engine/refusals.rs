//! The reasons of refusals.

use std::collections::BTreeSet;

use placement::{DeviceRef, HeldPart, Hints, Holdings, Reason, RequestedMemory, ShareRequest};
use rstest::rstest;

use crate::build::{ask, hold, inventory, one_node, share, units};

const EMPTY: [(u64, u32, u32); 2] = [(0, 0, 0); 2];

fn with_core(core: u32) -> ShareRequest {
    ShareRequest { core, ..units(1) }
}

fn with_slots(slots: u32) -> ShareRequest {
    ShareRequest { slots, ..units(1) }
}

/// Two GPUs of 8192 MiB, core 100 and 100 slots, with these amounts taken.
#[rstest]
#[case::zero_memory(EMPTY, units(0), Reason::InvalidRequest)]
#[case::zero_ratio(EMPTY, ask(1, RequestedMemory::Ratio(0)), Reason::InvalidRequest)]
#[case::zero_devices(EMPTY, ask(0, RequestedMemory::Units(1)), Reason::InvalidRequest)]
#[case::more_memory_than_any(EMPTY, units(8193), Reason::TooLarge)]
#[case::absurd_bytes(EMPTY, ask(1, RequestedMemory::Bytes(u64::MAX)), Reason::TooLarge)]
#[case::absurd_ratio(EMPTY, ask(1, RequestedMemory::Ratio(u32::MAX)), Reason::TooLarge)]
#[case::ratio_over_100(EMPTY, ask(1, RequestedMemory::Ratio(101)), Reason::TooLarge)]
#[case::more_core_than_any(EMPTY, with_core(101), Reason::TooLarge)]
#[case::more_slots_than_any(EMPTY, with_slots(101), Reason::TooLarge)]
#[case::more_devices_than_there_are(EMPTY, ask(3, RequestedMemory::Units(1)), Reason::TooLarge)]
#[case::absurd_devices(EMPTY, ask(u32::MAX, RequestedMemory::Units(1)), Reason::TooLarge)]
#[case::memory([(8192, 0, 0), (8000, 0, 0)], units(193), Reason::Memory)]
#[case::core([(0, 100, 0), (0, 90, 0)], with_core(11), Reason::Core)]
#[case::slots([(0, 0, 100), (0, 0, 100)], units(1), Reason::Slots)]
#[case::too_few([(8192, 0, 0), (0, 0, 0)], ask(2, RequestedMemory::Units(1)), Reason::TooFew)]
#[case::one_short_of_one_thing_is_nearest([(8192, 100, 0), (0, 100, 0)], with_core(1), Reason::Core)]
#[case::memory_is_named_before_core([(8192, 100, 0), (8192, 100, 0)], with_core(1), Reason::Memory)]
#[case::memory_is_named_of_equal_misses([(0, 100, 0), (8192, 0, 0)], with_core(1), Reason::Memory)]
fn reasons(#[case] taken: [(u64, u32, u32); 2], #[case] request: ShareRequest, #[case] expected: Reason) {
    let (mut fleet, id) = one_node(&[8192, 8192]);
    for (minor, (memory, core, slots)) in (0..).zip(taken) {
        let share = HeldPart {
            core,
            slots,
            ..share(DeviceRef::Minor(minor), RequestedMemory::Units(memory))
        };
        hold(
            &mut fleet,
            &format!("taker-{minor}"),
            "n",
            Holdings::from(vec![share]),
        );
    }
    assert_eq!(fleet.fit(id, &request, Hints::Respect), Err(expected));
    assert_eq!(
        fleet.choose_devices(id, &request, placement::DevicePolicy::Spread, Hints::Respect),
        Err(expected)
    );
}

#[rstest]
#[case::one_unhealthy_one_full(&[false, true], units(8000), Reason::Memory)]
#[case::both_unhealthy(&[false, false], units(1), Reason::Unhealthy)]
#[case::two_requested_one_unhealthy(&[false, true], ask(2, RequestedMemory::Units(1)), Reason::Unhealthy)]
#[case::too_large_even_if_healthy(&[false, false], units(9000), Reason::TooLarge)]
fn reasons_with_unhealthy_gpus(
    #[case] health: &[bool],
    #[case] request: ShareRequest,
    #[case] expected: Reason,
) {
    let (mut fleet, id) = one_node(&[8192, 8192]);
    let mut devices = inventory("n", &[8192, 8192]);
    devices
        .gpus
        .iter_mut()
        .zip(health)
        .for_each(|(gpu, healthy)| gpu.healthy = *healthy);
    fleet.set_inventory("n", devices);
    hold(
        &mut fleet,
        "pod",
        "n",
        crate::build::on_minor(1, RequestedMemory::Units(1000)),
    );
    assert_eq!(fleet.fit(id, &request, Hints::Respect), Err(expected));
}

/// Two GPUs, of which some are healthy and some closed; 1000 MiB of the second are held.
#[rstest]
#[case::one_closed_one_full([(true, true), (true, false)], units(8000), Reason::Memory)]
#[case::both_closed([(true, true); 2], units(1), Reason::Closed)]
#[case::two_requested_one_closed([(true, true), (true, false)], ask(2, RequestedMemory::Units(1)), Reason::Closed)]
#[case::closed_and_unhealthy([(false, true); 2], units(1), Reason::Unhealthy)]
#[case::one_closed_one_unhealthy([(true, true), (false, false)], units(1), Reason::Closed)]
#[case::too_large_even_if_open([(true, true); 2], units(9000), Reason::TooLarge)]
fn reasons_with_closed_gpus(
    #[case] states: [(bool, bool); 2],
    #[case] request: ShareRequest,
    #[case] expected: Reason,
) {
    let (mut fleet, id) = one_node(&[8192, 8192]);
    let mut devices = inventory("n", &[8192, 8192]);
    for (gpu, (healthy, closed)) in devices.gpus.iter_mut().zip(states) {
        (gpu.healthy, gpu.closed) = (healthy, closed);
    }
    let pod = crate::build::on_minor(1, RequestedMemory::Units(1000));
    hold(&mut fleet, "pod", "n", pod);
    fleet.set_inventory("n", devices);
    assert_eq!(fleet.fit(id, &request, Hints::Respect), Err(expected));
    assert_eq!(fleet.check(), []);
}

/// A GPU that is closed between the choice and the binding gets no pod: neither by a hint nor for victims. Its holders stay.
#[test]
fn a_closed_gpu_takes_no_new_pod_and_keeps_its_holders() {
    let (mut fleet, id) = one_node(&[8192]);
    let placement = fleet
        .choose_devices(id, &units(1), placement::DevicePolicy::Fill, Hints::Respect)
        .unwrap();
    crate::build::place(&mut fleet, "holder", id, &units(8000)).unwrap();
    assert!(fleet.hint(&"late".into(), id, &placement));
    let mut devices = inventory("n", &[8192]);
    devices.gpus[0].closed = true;
    fleet.set_inventory("n", devices);
    assert!(!fleet.admits(id, &placement));
    let refused = fleet.reserve(&"late".into(), id, &placement).unwrap_err();
    assert_eq!(refused.to_string(), "GPU n-0 is closed for maintenance");
    let pods = [crate::build::evictable("holder", 0)];
    let preemption = placement::Preemption {
        pods: &pods,
        budgets: &[],
        must_free: &[],
        outranked: &[],
    };
    assert_eq!(fleet.preempt(id, (&units(1)).into(), preemption), None);
    let sees_all = placement::RequestedGpus::All { slots: 1 };
    assert_eq!(fleet.fit(id, sees_all, Hints::Respect), Err(Reason::Closed));
    let fits = fleet.explain(id, &units(1), Hints::Respect).unwrap();
    assert_eq!(fits[0].fit, Err(Reason::Closed));
    let gpus = crate::build::gpus(&fleet, id);
    assert_eq!(gpus[0].used.memory, crate::build::mib(8000));
    fleet.set_inventory("n", inventory("n", &[8192]));
    assert_eq!(fleet.fit(id, &units(1), Hints::Ignore), Ok(()));
    assert_eq!(fleet.check(), []);
}

/// The plugin starts such a pod only if its record names every healthy GPU.
#[test]
fn a_pod_that_sees_all_gpus_goes_to_no_node_with_a_closed_gpu() {
    let (mut fleet, id) = one_node(&[8192, 8192]);
    let sees_all = placement::RequestedGpus::All { slots: 1 };
    let mut devices = inventory("n", &[8192, 8192]);
    devices.gpus[0].closed = true;
    fleet.set_inventory("n", devices.clone());
    assert_eq!(fleet.fit(id, sees_all, Hints::Respect), Err(Reason::Closed));
    devices.gpus[0].healthy = false;
    fleet.set_inventory("n", devices);
    assert_eq!(fleet.fit(id, sees_all, Hints::Respect), Ok(()));
}

#[test]
fn explain_lists_every_gpu() {
    let (mut fleet, id) = one_node(&[8192, 4096, 8192, 8192]);
    let mut devices = inventory("n", &[8192, 4096, 8192, 8192]);
    devices.gpus[2].healthy = false;
    fleet.set_inventory("n", devices);
    hold(
        &mut fleet,
        "pod",
        "n",
        crate::build::on_minor(0, RequestedMemory::Units(5000)),
    );
    let fits = fleet.explain(id, &units(5000), Hints::Respect).unwrap();
    let by_minor: Vec<_> = fits.iter().map(|gpu| (gpu.gpu.minor, gpu.fit)).collect();
    assert_eq!(
        by_minor,
        [
            (0, Err(Reason::Memory)),
            (1, Err(Reason::TooLarge)),
            (2, Err(Reason::Unhealthy)),
            (3, Ok(()))
        ]
    );
    assert_eq!(fits[0].free.memory, crate::build::mib(3192));
    assert_eq!(
        fleet.explain(id, &units(0), Hints::Respect).unwrap_err(),
        Reason::InvalidRequest
    );
}

/// Counters and caches store a reason as its number and read it back by its place in the list.
#[test]
fn the_list_of_reasons_has_the_order_of_their_numbers() {
    for (place, reason) in Reason::ALL.into_iter().enumerate() {
        assert_eq!(reason as usize, place, "{reason:?}");
    }
}

/// kube-scheduler joins the texts of all nodes, so there must be few. A request that breaks a rule gets the text of that rule.
#[test]
fn there_are_sixteen_refusal_texts_besides_those_of_rules() {
    let texts: BTreeSet<&str> = Reason::ALL.iter().map(|reason| reason.as_str()).collect();
    let labels: BTreeSet<&str> = Reason::ALL.iter().map(|reason| reason.label()).collect();
    assert_eq!((texts.len(), labels.len()), (17, 20));
    assert!(
        labels
            .iter()
            .all(|label| label.chars().all(|c| c.is_ascii_lowercase() || c == '_'))
    );
}
