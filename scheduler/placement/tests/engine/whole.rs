//! Whole GPUs in the vendor's name on nodes with shared ones, GPUs left to the vendor's plugin, and owners that see all GPUs.

use std::collections::BTreeMap;

use placement::{
    Device, DevicePolicy, DeviceRef, DeviceType, Fleet, HeldMemory, HeldPart, Hints, Holdings, Inventory,
    Placement, Reason, RequestedGpus, RequestedMemory,
};
use proptest::prelude::*;
use rstest::rstest;

use crate::build::{MIB, ask, gpu, minors, on_minor, ratio, units};

/// GPUs of 1000 MiB; `apart` are left to the vendor's plugin.
fn inventory(n: u32, serves_vendor: bool, apart: &[u32]) -> Inventory {
    let gpu = |minor| Device {
        sharing: !apart.contains(&minor),
        ..gpu("n", minor, 1000 * MIB)
    };
    Inventory {
        gpus: (0..n).map(gpu).collect(),
        unit_bytes: Some(MIB),
        serves_vendor,
        ..Inventory::default()
    }
}

fn fleet(serves_vendor: bool, apart: &[u32]) -> Fleet {
    let mut fleet = Fleet::new();
    assert!(
        fleet
            .set_inventory("n", inventory(4, serves_vendor, apart))
            .is_empty()
    );
    fleet
}

/// Chooses and reserves; returns minors, and the number of GPUs that the vendor's plugin will choose.
fn place(fleet: &mut Fleet, owner: &str, ask: RequestedGpus) -> Result<(Vec<u32>, u32), Reason> {
    let id = fleet.node_id("n").unwrap();
    let placement = fleet.choose_devices(id, ask, DevicePolicy::Binpack, Hints::RespectOthers(owner))?;
    fleet.reserve(&owner.into(), id, &placement).unwrap();
    assert!(fleet.reserve(&owner.into(), id, &placement).is_err(), "once more");
    assert_eq!(fleet.check(), []);
    Ok((minors(&placement), placement.n_unknown_gpus))
}

fn whole(fleet: &mut Fleet, owner: &str, n: u32) -> Result<(Vec<u32>, u32), Reason> {
    place(fleet, owner, RequestedGpus::Whole(n))
}

fn share(fleet: &mut Fleet, owner: &str, mib: u64) -> Result<(Vec<u32>, u32), Reason> {
    place(fleet, owner, RequestedGpus::Share(units(mib)))
}

/// A pod whose whole GPU kubelet has reported.
fn reported(fleet: &mut Fleet, owner: &str, minor: u32) {
    let memory = HeldMemory::Requested(RequestedMemory::Ratio(100));
    let share = HeldPart {
        memory,
        core: 100,
        slots: 0,
        ..HeldPart::new(DeviceType::Gpu, DeviceRef::Id(format!("n-{minor}").into()))
    };
    fleet.hold(
        &owner.into(),
        "n",
        Holdings {
            is_vendor: true,
            ..Holdings::from(vec![share])
        },
    );
}

#[test]
fn a_node_that_serves_the_vendors_resource_has_whole_and_shared_gpus() {
    let mut fleet = fleet(true, &[3]);
    assert_eq!(share(&mut fleet, "s", 10), Ok((vec![0], 0)));
    assert_eq!(
        whole(&mut fleet, "v", 2),
        Ok((vec![1, 3], 0)),
        "the unshared one, and an empty one"
    );
    assert_eq!(whole(&mut fleet, "w", 2), Err(Reason::TooFew));
    assert_eq!(whole(&mut fleet, "w", 1), Ok((vec![2], 0)));
    assert_eq!(share(&mut fleet, "t", 991), Err(Reason::Memory));
    assert_eq!(share(&mut fleet, "t", 990), Ok((vec![0], 0)));
    fleet.release("v");
    assert_eq!(
        share(&mut fleet, "u", 1),
        Ok((vec![1], 0)),
        "not the one that is not to be shared"
    );
}

#[test]
fn whole_gpus_of_a_node_that_reports_none_count_by_their_number() {
    let mut fleet = fleet(true, &[]);
    fleet.set_inventory("n", inventory(0, true, &[]));
    assert_eq!(whole(&mut fleet, "v", 2), Ok((vec![], 2)));
}

#[test]
fn a_gpu_with_room_kept_for_another_pod_lacks_memory() {
    let mut fleet = fleet(true, &[]);
    let id = fleet.node_id("n").unwrap();
    let kept = fleet
        .choose_devices(id, &units(10), DevicePolicy::Binpack, Hints::Respect)
        .unwrap();
    assert!(fleet.hint(&"s".into(), id, &kept));
    let fits = fleet.explain(id, RequestedGpus::Whole(1), Hints::RespectOthers("v"));
    let fits: Vec<_> = fits.unwrap().iter().map(|fit| fit.fit).collect();
    assert_eq!(fits, [Err(Reason::Memory), Ok(()), Ok(()), Ok(())]);
}

/// The vendor's plugin takes any GPU: no pod shares one meanwhile, and no whole request goes where pods share.
#[test]
fn no_gpu_is_shared_while_those_of_the_vendors_plugin_are_unknown() {
    let mut fleet = fleet(false, &[]);
    assert_eq!(whole(&mut fleet, "v", 1), Ok((vec![], 1)));
    assert_eq!(share(&mut fleet, "s", 1), Err(Reason::Vendor));
    assert_eq!(whole(&mut fleet, "w", 3), Ok((vec![], 3)));
    assert_eq!(whole(&mut fleet, "x", 1), Err(Reason::TooFew));
    fleet.release("w");
    reported(&mut fleet, "v", 2);
    assert_eq!(share(&mut fleet, "s", 1), Ok((vec![0], 0)));
    assert_eq!(
        place(
            &mut fleet,
            "all",
            RequestedGpus::Share(ask(4, RequestedMemory::Units(1)))
        ),
        Err(Reason::TooFew),
        "not on the vendor's"
    );
    assert_eq!(
        whole(&mut fleet, "w", 1),
        Err(Reason::Vendor),
        "one is shared, and may be the one"
    );
    fleet.release("s");
    assert_eq!(whole(&mut fleet, "w", 3), Ok((vec![], 3)));
}

#[test]
fn reserved_gpus_separate_the_vendors_plugin_from_shared_ones() {
    let mut fleet = fleet(false, &[2, 3]);
    assert_eq!(share(&mut fleet, "s", 1000), Ok((vec![0], 0)));
    assert_eq!(whole(&mut fleet, "v", 2), Ok((vec![], 2)));
    assert_eq!(whole(&mut fleet, "w", 1), Err(Reason::TooFew));
    assert_eq!(whole(&mut fleet, "w", 3), Err(Reason::TooLarge));
    assert_eq!(share(&mut fleet, "t", 1000), Ok((vec![1], 0)));
    assert_eq!(share(&mut fleet, "u", 1), Err(Reason::Memory));
    let id = fleet.node_id("n").unwrap();
    assert_eq!(
        fleet.fit(id, &ask(3, RequestedMemory::Units(1)), Hints::Ignore),
        Err(Reason::Vendor)
    );
}

#[rstest]
#[case::served_by_the_node(true, &[], &[0, 1, 2], 2, Err(Reason::Unhealthy))]
#[case::unhealthy_gpus_are_not_taken(true, &[], &[0, 2], 2, Ok((vec![1, 3], 0)))]
#[case::unhealthy_reserved_gpu(false, &[0, 1], &[1], 2, Err(Reason::Unhealthy))]
#[case::unhealthy_shared_gpus_do_not_matter(false, &[0, 1], &[2, 3], 2, Ok((vec![], 2)))]
fn unhealthy_gpus_are_not_allocated_whole(
    #[case] serves: bool,
    #[case] apart: &[u32],
    #[case] sick: &[u32],
    #[case] n: u32,
    #[case] expected: Result<(Vec<u32>, u32), Reason>,
) {
    let mut fleet = fleet(serves, apart);
    let mut devices = inventory(4, serves, apart);
    devices
        .gpus
        .iter_mut()
        .for_each(|gpu| gpu.healthy = !sick.contains(&gpu.minor));
    fleet.set_inventory("n", devices);
    assert_eq!(whole(&mut fleet, "v", n), expected);
}

/// The vendor's plugin cannot be kept from closed GPUs, so that it gets no pod while one of its GPUs is closed.
#[rstest]
#[case::too_few_are_left(true, &[], &[0, 1, 2], 2, Err(Reason::Closed))]
#[case::the_others_are_taken(true, &[], &[0, 2], 2, Ok((vec![1, 3], 0)))]
#[case::a_gpu_of_the_vendor(false, &[0, 1, 2], &[1], 2, Err(Reason::Closed))]
#[case::a_gpu_for_shares(false, &[0, 1], &[2, 3], 2, Ok((vec![], 2)))]
fn closed_gpus_are_not_allocated_whole(
    #[case] serves: bool,
    #[case] apart: &[u32],
    #[case] closed: &[u32],
    #[case] n: u32,
    #[case] expected: Result<(Vec<u32>, u32), Reason>,
) {
    let mut fleet = fleet(serves, apart);
    let mut devices = inventory(4, serves, apart);
    for gpu in devices.gpus.iter_mut() {
        gpu.closed = closed.contains(&gpu.minor);
    }
    fleet.set_inventory("n", devices);
    assert_eq!(whole(&mut fleet, "v", n), expected);
    assert_eq!(fleet.check(), []);
}

/// A lost or removed inventory does not hide that a pod shares a GPU there.
#[test]
fn a_node_without_inventory_refuses_whole_gpus_while_a_pod_shares_one() {
    let mut fleet = fleet(false, &[]);
    assert_eq!(share(&mut fleet, "s", 1), Ok((vec![0], 0)));
    fleet.remove_inventory("n");
    let id = fleet.node_id("n").unwrap();
    assert_eq!(
        fleet.fit(id, RequestedGpus::Whole(1), Hints::Ignore),
        Err(Reason::Vendor)
    );
    fleet.hold(
        &"v".into(),
        "n",
        Holdings {
            n_unknown_gpus: 1,
            is_vendor: true,
            ..Holdings::default()
        },
    );
    fleet.release("s");
    assert_eq!(
        fleet.fit(id, RequestedGpus::Whole(9), Hints::Ignore),
        Ok(()),
        "kubelet knows"
    );
}

/// A GPU that the vendor's plugin gave out before the node served whole GPUs may be any of them.
#[test]
fn no_whole_gpu_is_chosen_while_allocated_uuids_are_unknown() {
    let mut fleet = fleet(true, &[]);
    fleet.hold(
        &"v".into(),
        "n",
        Holdings {
            n_unknown_gpus: 1,
            is_vendor: true,
            ..Holdings::default()
        },
    );
    let id = fleet.node_id("n").unwrap();
    assert_eq!(
        fleet.fit(id, RequestedGpus::Whole(1), Hints::Ignore),
        Err(Reason::Vendor)
    );
    assert_eq!(
        fleet.fit(id, RequestedGpus::Whole(5), Hints::Ignore),
        Err(Reason::TooLarge)
    );
    reported(&mut fleet, "v", 0);
    assert_eq!(whole(&mut fleet, "w", 3), Ok((vec![1, 2, 3], 0)));
}

#[test]
fn hints_keep_whole_and_shared_gpus_apart() {
    let mut fleet = fleet(false, &[]);
    let id = fleet.node_id("n").unwrap();
    let choose = |fleet: &Fleet, ask: RequestedGpus| {
        fleet
            .choose_devices(id, ask, DevicePolicy::Binpack, Hints::Ignore)
            .unwrap()
    };
    let vendor = choose(&fleet, RequestedGpus::Whole(3));
    assert!(fleet.hint(&"v".into(), id, &vendor));
    assert_eq!(fleet.check(), []);
    assert_eq!(fleet.fit(id, &units(1), Hints::Respect), Err(Reason::Memory));
    assert_eq!(
        fleet.fit(id, RequestedGpus::Whole(2), Hints::Respect),
        Err(Reason::TooFew)
    );
    assert_eq!(
        fleet.fit(id, RequestedGpus::Whole(4), Hints::RespectOthers("v")),
        Ok(())
    );
    let sharer = choose(&fleet, RequestedGpus::Share(units(1)));
    assert!(fleet.hint(&"v".into(), id, &sharer));
    assert_eq!(
        fleet.fit(id, RequestedGpus::Whole(1), Hints::Respect),
        Err(Reason::Vendor)
    );
}

/// The GPU with the taken slot comes first; nothing else is taken.
#[test]
fn a_pod_that_sees_all_gpus_is_charged_slots_only() {
    let mut fleet = fleet(true, &[3]);
    assert_eq!(share(&mut fleet, "s", 1000), Ok((vec![0], 0)));
    let slot = HeldPart {
        slots: 1,
        ..crate::build::share(DeviceRef::Minor(1), RequestedMemory::Units(0))
    };
    fleet.hold(&"t".into(), "n", Holdings::from(vec![slot]));
    assert_eq!(
        place(&mut fleet, "m", RequestedGpus::All { slots: 1 }),
        Ok((vec![2, 0, 1, 3], 0))
    );
    let seen: Vec<_> = fleet
        .view(fleet.node_id("n").unwrap())
        .unwrap()
        .gpus()
        .iter()
        .map(|gpu| (gpu.holders.len(), gpu.used.slots))
        .collect();
    assert_eq!(seen, [(2, 1), (2, 1), (1, 1), (1, 0)]);
    assert_eq!(
        whole(&mut fleet, "v", 3),
        Ok((vec![1, 2, 3], 0)),
        "no other pod uses these"
    );
    assert_eq!(
        fleet.fit(
            fleet.node_id("n").unwrap(),
            RequestedGpus::All { slots: 101 },
            Hints::Ignore
        ),
        Err(Reason::Slots)
    );
}

#[test]
fn empty_and_partial_placements_are_not_reserved() {
    let mut fleet = fleet(true, &[]);
    let id = fleet.node_id("n").unwrap();
    let choice = fleet
        .choose_devices(id, &ratio(50), DevicePolicy::Binpack, Hints::Ignore)
        .unwrap();
    let error = fleet.reserve(&"a".into(), id, &Placement::default()).unwrap_err();
    assert_eq!(error.to_string(), "the placement takes nothing");
    fleet.reserve(&"a".into(), id, &choice).unwrap();
    let whole = fleet
        .choose_devices(id, RequestedGpus::Whole(3), DevicePolicy::Binpack, Hints::Ignore)
        .unwrap();
    let mut taken = whole.clone();
    taken.shares[0].id = "n-0".into();
    let error = fleet.reserve(&"v".into(), id, &taken).unwrap_err().to_string();
    assert!(
        error.starts_with("GPU n-0 has too little memory free: "),
        "half of it is shared: {error}"
    );
    fleet.set_inventory("n", inventory(4, false, &[]));
    let unknown = Placement {
        shares: Vec::new(),
        n_unknown_gpus: 1,
        ..whole
    };
    let error = fleet.reserve(&"v".into(), id, &unknown).unwrap_err();
    assert_eq!(error.to_string(), format!("whole GPUs: {}", Reason::Vendor));
}

/// A step on a node where both kinds of pods come and go.
#[derive(Clone, Debug)]
enum Step {
    Inventory(bool, Vec<u32>),
    Share(u8, u64),
    Whole(u8, u32),
    Given(u8, u32),
    SeeAll(u8),
    Hint(u8, bool),
    Release(u8),
}

fn step() -> impl Strategy<Value = Step> {
    let apart = proptest::sample::subsequence(vec![0_u32, 1, 2, 3], 0..3);
    prop_oneof![
        1 => (any::<bool>(), apart).prop_map(|(serves, apart)| Step::Inventory(serves, apart)),
        4 => (0_u8..6, 1_u64..1001).prop_map(|(owner, mib)| Step::Share(owner, mib)),
        4 => (0_u8..6, 1_u32..4).prop_map(|(owner, n)| Step::Whole(owner, n)),
        3 => (0_u8..6, 0_u32..4).prop_map(|(owner, minor)| Step::Given(owner, minor)),
        1 => (0_u8..6).prop_map(Step::SeeAll),
        2 => (0_u8..6, any::<bool>()).prop_map(|(owner, whole)| Step::Hint(owner, whole)),
        4 => (0_u8..6).prop_map(Step::Release),
    ]
}

/// The holding of an owner of the model.
#[derive(Clone, Debug, PartialEq)]
enum Has {
    Shared(u32),
    Whole(Vec<u32>),
    Unknown(u32),
    Nothing,
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// No GPU is, or can be, shared and allocated whole at the same time.
    #[test]
    fn no_gpu_is_both_shared_and_whole(steps in proptest::collection::vec(step(), 1..50)) {
        let mut fleet = fleet(true, &[]);
        let (mut serves, mut apart) = (true, Vec::new());
        let mut model: BTreeMap<u8, Has> = BTreeMap::new();
        let id = fleet.node_id("n").unwrap();
        for step in steps {
            let (owner, ask) = match &step {
                Step::Inventory(now, gpus) => {
                    // Modes change while nothing is held: an administrator's mistakes are facts, not decisions.
                    if model.is_empty() {
                        (serves, apart) = (*now, gpus.clone());
                        fleet.set_inventory("n", inventory(4, serves, &apart));
                    }
                    continue;
                }
                Step::Release(owner) => {
                    fleet.release(&owner.to_string());
                    model.remove(owner);
                    continue;
                }
                Step::Given(owner, minor) => {
                    let may = |gpu: u32| apart.is_empty() || apart.contains(&gpu);
                    let used = model.values().any(|has| *has == Has::Shared(*minor) || matches!(has, Has::Whole(gpus) if gpus.contains(minor)));
                    if model.get(owner) == Some(&Has::Unknown(1)) && may(*minor) && !serves {
                        // The vendor's plugin may take any of its GPUs that are not in use: none of them may be shared.
                        let shared = model.values().any(|has| *has == Has::Shared(*minor));
                        prop_assert!(!shared, "GPU {minor} is shared and can be given away");
                        if !used {
                            reported(&mut fleet, &owner.to_string(), *minor);
                            model.insert(*owner, Has::Whole(vec![*minor]));
                        }
                    }
                    continue;
                }
                Step::Share(owner, mib) => (*owner, RequestedGpus::Share(units(*mib))),
                Step::Whole(owner, n) => (*owner, RequestedGpus::Whole(*n)),
                Step::SeeAll(owner) => (*owner, RequestedGpus::All { slots: 1 }),
                Step::Hint(owner, whole) => {
                    let ask = if *whole { RequestedGpus::Whole(1) } else { RequestedGpus::Share(units(100)) };
                    if let Ok(placement) = fleet.choose_devices(id, ask, DevicePolicy::Binpack, Hints::Respect) {
                        fleet.hint(&owner.to_string().as_str().into(), id, &placement);
                    }
                    prop_assert_eq!(fleet.check(), vec![]);
                    continue;
                }
            };
            if model.contains_key(&owner) {
                continue;
            }
            let name = owner.to_string();
            let Ok(placement) = fleet.choose_devices(id, ask, DevicePolicy::Binpack, Hints::RespectOthers(&name)) else { continue };
            prop_assert_eq!(fleet.reserve(&name.as_str().into(), id, &placement), Ok(()));
            prop_assert_eq!(fleet.check(), vec![]);
            let chosen = minors(&placement);
            let n_unknown: u32 = model.values().map(|has| if let Has::Unknown(n) = has { *n } else { 0 }).sum();
            let is_whole = |gpu: u32| model.values().any(|has| matches!(has, Has::Whole(gpus) if gpus.contains(&gpu)));
            let is_shared = |gpu: u32| model.values().any(|has| *has == Has::Shared(gpu));
            let for_vendor = |gpu: u32| serves || apart.is_empty() || apart.contains(&gpu);
            let has = match ask {
                RequestedGpus::Share(_) => {
                    prop_assert!(!is_whole(chosen[0]) && !apart.contains(&chosen[0]));
                    prop_assert!(n_unknown == 0 || !for_vendor(chosen[0]), "it may have been given away");
                    Has::Shared(chosen[0])
                }
                RequestedGpus::Whole(n) if serves => {
                    prop_assert!(chosen.len() == n as usize && chosen.iter().all(|gpu| !is_whole(*gpu) && !is_shared(*gpu)));
                    Has::Whole(chosen)
                }
                RequestedGpus::Whole(n) => {
                    let left = (0..4).filter(|gpu| for_vendor(*gpu) && !is_whole(*gpu)).count();
                    prop_assert!(chosen.is_empty() && placement.n_unknown_gpus == n);
                    prop_assert!((0..4).all(|gpu| !for_vendor(gpu) || !is_shared(gpu)), "the vendor's plugin may take a shared one");
                    prop_assert!(left >= (n + n_unknown) as usize, "more than there are");
                    Has::Unknown(n)
                }
                _ => {
                    prop_assert_eq!(chosen.len(), 4);
                    Has::Nothing
                }
            };
            model.insert(owner, has);
        }
    }
}

/// On GPUs of either use, the engine distinguishes a fact of a share from one of a whole GPU.
#[test]
fn a_shared_gpu_refuses_the_vendors_plugin() {
    let mut fleet = fleet(false, &[]);
    fleet.hold(&"old".into(), "n", on_minor(3, RequestedMemory::Units(1)));
    let id = fleet.node_id("n").unwrap();
    assert_eq!(
        fleet.fit(id, RequestedGpus::Whole(1), Hints::Ignore),
        Err(Reason::Vendor)
    );
    fleet.set_inventory("n", inventory(4, false, &[0, 1]));
    assert_eq!(fleet.fit(id, RequestedGpus::Whole(2), Hints::Ignore), Ok(()));
    fleet.set_inventory("n", inventory(4, false, &[3]));
    assert_eq!(
        fleet.fit(id, RequestedGpus::Whole(1), Hints::Ignore),
        Err(Reason::Vendor)
    );
}
