//! Devices of other types than GPU: tables, and random sequences against a plain list.

use std::collections::{BTreeMap, BTreeSet};

use placement::{
    Device, DevicePolicy, DeviceRef, DeviceRequest, DevicesOfType, Fleet, HeldPart, Hints, Holdings,
    Inventory, NamedAmounts, NodeRequest, OwnerId, Placement, Preemption, Reason, RequestedGpus, Violation,
};
use proptest::prelude::*;
use rstest::rstest;

use crate::build::{evictable, gpu, units};

fn amounts(pairs: &[(&str, u64)]) -> NamedAmounts {
    pairs
        .iter()
        .map(|(resource, amount)| ((*resource).into(), *amount))
        .collect()
}

fn device(minor: u32, pairs: &[(&str, u64)]) -> Device {
    Device {
        resources: amounts(pairs),
        ..Device::new(format!("d{minor}"), minor)
    }
}

fn class(kind: &str, devices: Vec<Device>) -> DevicesOfType {
    DevicesOfType {
        kind: kind.into(),
        devices: devices.into(),
    }
}

fn with(other_devices: Vec<DevicesOfType>) -> Inventory {
    Inventory {
        other_devices: Some(other_devices),
        ..Inventory::default()
    }
}

/// Three adapters, of which the last is unhealthy, and two cards of another type with two resources.
fn fleet() -> Fleet {
    let rdma = (0..3)
        .map(|minor| Device {
            healthy: minor < 2,
            ..device(minor, &[("rdma", 100)])
        })
        .collect();
    let npu = vec![
        device(0, &[("cores", 8), ("gib", 32)]),
        device(1, &[("cores", 8), ("gib", 64)]),
    ];
    let mut fleet = Fleet::new();
    let problems = fleet.set_inventory("n", with(vec![class("rdma", rdma), class("npu", npu)]));
    assert!(problems.is_empty(), "{problems:?}");
    fleet
}

fn percent(amount: u64) -> DeviceRequest {
    DeviceRequest {
        kind: "rdma".into(),
        amounts: amounts(&[("rdma", amount)]),
        whole: Some(100),
    }
}

fn cards(cores: u64, gib: u64) -> DeviceRequest {
    let pairs = [("cores", cores), ("gib", gib)];
    let pairs: Vec<_> = pairs.into_iter().filter(|(_, amount)| *amount > 0).collect();
    DeviceRequest {
        kind: "npu".into(),
        amounts: amounts(&pairs),
        whole: None,
    }
}

fn choose(fleet: &Fleet, requests: &[DeviceRequest]) -> Result<Placement, Reason> {
    let ask = NodeRequest {
        gpus: RequestedGpus::Nothing,
        others: requests,
        constraints: None,
        ..NodeRequest::default()
    };
    let id = fleet.node_id("n").unwrap();
    let choice = fleet.choose_devices(id, ask, DevicePolicy::Binpack, Hints::Respect);
    assert_eq!(
        choice.as_ref().map(drop).map_err(|reason| *reason),
        fleet.fit(id, ask, Hints::Respect)
    );
    choice
}

fn shown(placement: &Placement) -> Vec<String> {
    let share = |share: &placement::Share| format!("{} {} {:?}", share.kind, share.minor, share.resources);
    placement.others().map(share).collect()
}

/// Two pods hold the adapters that are healthy, and two less important ones the cards.
#[rstest]
#[case::a_part_is_free(&[percent(40)], &[])]
#[case::the_less_important(&[percent(100)], &["second"])]
#[case::both_adapters(&[percent(200)], &["first", "second"])]
#[case::a_card(&[cards(8, 0)], &["fourth"])]
#[case::one_of_each(&[percent(50), cards(0, 40)], &["second", "fourth"])]
#[case::more_than_there_is(&[percent(300)], &[])]
fn holders_of_the_requested_devices_are_evicted(
    #[case] requests: &[DeviceRequest],
    #[case] expected: &[&str],
) {
    let mut fleet = fleet();
    let mut pods = Vec::new();
    for (owner, priority, kind, minor, held) in [
        ("first", 5, "rdma", 0, amounts(&[("rdma", 100)])),
        ("second", 4, "rdma", 1, amounts(&[("rdma", 60)])),
        ("third", 1, "npu", 0, amounts(&[("cores", 8), ("gib", 32)])),
        ("fourth", 0, "npu", 1, amounts(&[("cores", 8), ("gib", 64)])),
    ] {
        let part = HeldPart {
            resources: held,
            ..HeldPart::new(kind.into(), DeviceRef::Minor(minor))
        };
        fleet.hold(&owner.into(), "n", Holdings::from(vec![part]));
        pods.push(evictable(owner, priority));
    }
    let request = NodeRequest {
        gpus: RequestedGpus::Nothing,
        others: requests,
        ..NodeRequest::default()
    };
    let preemption = Preemption {
        pods: &pods,
        budgets: &[],
        must_free: &[],
        outranked: &[],
    };
    let victims = fleet.preempt(fleet.node_id("n").unwrap(), request, preemption);
    let owners = victims.map(|victims| victims.owners).unwrap_or_default();
    let owners: Vec<&str> = owners.iter().map(OwnerId::as_str).collect();
    assert_eq!(owners, expected);
}

#[rstest]
#[case::part(&[percent(30)], &[r#"rdma 0 {"rdma": 30}"#])]
#[case::whole(&[percent(100)], &[r#"rdma 0 {"rdma": 100}"#])]
#[case::two_whole(&[percent(200)], &[r#"rdma 0 {"rdma": 100}"#, r#"rdma 1 {"rdma": 100}"#])]
#[case::both_types(&[percent(1), cards(1, 1)], &[r#"rdma 0 {"rdma": 1}"#, r#"npu 0 {"cores": 1, "gib": 1}"#])]
#[case::only_one_card_is_large_enough(&[cards(0, 33)], &[r#"npu 1 {"gib": 33}"#])]
#[case::both_cards(&[cards(16, 32)], &[r#"npu 0 {"cores": 8, "gib": 16}"#, r#"npu 1 {"cores": 8, "gib": 16}"#])]
fn devices_are_chosen_in_the_order_of_minors(#[case] requests: &[DeviceRequest], #[case] expected: &[&str]) {
    assert_eq!(shown(&choose(&fleet(), requests).unwrap()), expected);
}

#[rstest]
#[case::more_than_are_healthy(&[percent(300)])]
#[case::neither_part_nor_whole(&[percent(150)])]
#[case::more_than_any_has(&[cards(0, 100)])]
#[case::no_such_resource(&[DeviceRequest { kind: "npu".into(), amounts: amounts(&[("rdma", 1)]), whole: None }])]
#[case::no_such_type(&[DeviceRequest { kind: "fpga".into(), amounts: amounts(&[("fpga", 1)]), whole: Some(100) }])]
#[case::one_of_two_types(&[percent(1), cards(9, 0)])]
fn requests_that_no_devices_satisfy_are_refused(#[case] requests: &[DeviceRequest]) {
    assert_eq!(choose(&fleet(), requests), Err(Reason::OtherDevices));
}

#[test]
fn a_node_without_a_list_of_other_devices_refuses_no_request_for_them() {
    let mut fleet = Fleet::new();
    fleet.set_inventory(
        "n",
        Inventory {
            gpus: vec![gpu("n", 0, 1 << 30)].into(),
            ..Inventory::default()
        },
    );
    assert_eq!(
        choose(&fleet, &[percent(300)]).map(|placement| placement.shares),
        Ok(Vec::new())
    );
}

/// GPUs and other devices are reserved together or not at all.
#[test]
fn gpus_and_other_devices_are_reserved_together_or_not_at_all() {
    let mut fleet = fleet();
    let mut inventory = fleet
        .view(fleet.node_id("n").unwrap())
        .unwrap()
        .inventory()
        .unwrap()
        .clone();
    inventory.gpus = vec![gpu("n", 0, 1 << 30)].into();
    inventory.unit_bytes = Some(1 << 20);
    fleet.set_inventory("n", inventory);
    let id = fleet.node_id("n").unwrap();
    let requests = [percent(60)];
    let ask = NodeRequest {
        gpus: RequestedGpus::Share(units(1000)),
        others: &requests,
        constraints: None,
        ..NodeRequest::default()
    };
    let placement = fleet
        .choose_devices(id, ask, DevicePolicy::Binpack, Hints::Respect)
        .unwrap();
    fleet.reserve(&"a".into(), id, &placement).unwrap();
    let error = fleet
        .reserve(&"b".into(), id, &placement)
        .unwrap_err()
        .to_string();
    assert!(error.contains(" has too little memory free: "), "{error}");
    let others = Placement {
        shares: placement.others().cloned().collect(),
        ..placement
    };
    let error = fleet.reserve(&"b".into(), id, &others).unwrap_err();
    assert_eq!(error.to_string(), "rdma d0 has too little rdma free: 40 for 60");
    let twice = Placement {
        shares: [others.shares.clone(), others.shares].concat(),
        ..Placement::default()
    };
    fleet.release("a");
    let error = fleet.reserve(&"b".into(), id, &twice).unwrap_err();
    assert_eq!(error.to_string(), "rdma d0 is chosen twice");
    assert_eq!((fleet.n_owners(), fleet.check()), (0, Vec::new()));
}

#[test]
fn devices_with_a_duplicate_id_or_minor_are_left_out() {
    let devices = vec![
        device(1, &[("x", 1)]),
        device(0, &[("x", 1)]),
        Device {
            minor: 2,
            ..device(0, &[("x", 1)])
        },
        device(1, &[("x", 1)]),
    ];
    let problems = Fleet::new().set_inventory("n", with(vec![class("t", devices)]));
    let left_out =
        |minor: u32, id: &str| format!("t {id} is listed twice; the one with minor {minor} is ignored");
    assert_eq!(problems, [left_out(1, "d1"), left_out(2, "d0")]);
}

#[test]
fn check_finds_holdings_that_exceed_a_device() {
    let mut fleet = fleet();
    let held = |device, trusted| HeldPart {
        resources: amounts(&[("rdma", 101)]),
        trusted,
        ..HeldPart::new("rdma".into(), device)
    };
    fleet.hold(
        &"a".into(),
        "n",
        Holdings {
            parts: vec![held(DeviceRef::Minor(0), true)],
            ..Holdings::default()
        },
    );
    fleet.hold(
        &"b".into(),
        "n",
        Holdings {
            parts: vec![held(DeviceRef::Any, false)],
            ..Holdings::default()
        },
    );
    assert!(
        matches!(
            fleet.check().as_slice(),
            [Violation::Oversubscribed {
                used: 101,
                total: 100,
                ..
            }]
        ),
        "{:?}",
        fleet.check()
    );
    assert_eq!(
        choose(&fleet, &[percent(1)]),
        Err(Reason::OtherDevices),
        "each may be the one"
    );
}

/// A step on a node with up to three devices of one resource and perhaps another.
#[derive(Clone, Debug)]
enum Step {
    Devices(Vec<(u32, u64, Option<u64>, bool)>),
    Gone,
    Hold(u8, DeviceRef, u64, bool),
    DeviceLocation(u8, u64, Option<u64>, bool),
    Hint(u8, u64),
    Release(u8),
}

fn step() -> impl Strategy<Value = Step> {
    let devices = proptest::collection::btree_map(
        0_u32..4,
        (
            0_u64..6,
            proptest::option::of(0_u64..4),
            prop::bool::weighted(0.8),
        ),
        0..4,
    );
    let reference = prop_oneof![
        (0_u32..5).prop_map(|minor| DeviceRef::Id(format!("d{minor}").as_str().into())),
        (0_u32..5).prop_map(DeviceRef::Minor),
        Just(DeviceRef::Any)
    ];
    prop_oneof![
        2 => devices.prop_map(|devices| Step::Devices(devices.into_iter().map(|(minor, (x, y, healthy))| (minor, x, y, healthy)).collect())),
        1 => Just(Step::Gone),
        3 => (0_u8..4, reference, 0_u64..5, any::<bool>()).prop_map(|(owner, device, x, trusted)| Step::Hold(owner, device, x, trusted)),
        6 => (0_u8..4, 1_u64..9, proptest::option::of(1_u64..3), any::<bool>()).prop_map(|(owner, x, y, spread)| Step::DeviceLocation(owner, x, y, spread)),
        2 => (0_u8..4, 1_u64..5).prop_map(|(owner, x)| Step::Hint(owner, x)),
        2 => (0_u8..4).prop_map(Step::Release),
    ]
}

/// Devices, holdings and hints as plain lists.
#[derive(Default)]
struct Model {
    devices: Option<Vec<Device>>,
    held: BTreeMap<u8, Vec<HeldPart>>,
    hints: BTreeMap<u8, Placement>,
}

impl Model {
    /// Free amounts of every healthy device under the hints of all but one owner.
    fn free(&self, own: Option<u8>) -> Vec<(u32, BTreeMap<String, i128>)> {
        let devices = self.devices.iter().flatten().filter(|device| device.healthy);
        let free = devices.map(|device| {
            let mut free: BTreeMap<String, i128> = device
                .resources
                .iter()
                .map(|(name, total)| (name.to_string(), (*total).into()))
                .collect();
            let is_unknown = |minor: &u32| self.devices.iter().flatten().all(|device| device.minor != *minor);
            let on_this = self.held.values().flatten().filter(|held| match &held.device {
                DeviceRef::Id(id) => *id == device.id,
                DeviceRef::Minor(minor) => *minor == device.minor || is_unknown(minor),
                DeviceRef::Any => true,
            });
            let hinted = self
                .hints
                .iter()
                .filter(|(owner, _)| Some(**owner) != own)
                .flat_map(|(_, hint)| hint.others());
            let hinted = hinted
                .filter(|share| share.id == device.id)
                .flat_map(|share| &share.resources);
            for (name, amount) in on_this.flat_map(|held| &held.resources).chain(hinted) {
                if let Some(free) = free.get_mut(name.as_str()) {
                    *free -= i128::from(*amount);
                }
            }
            (device.minor, free)
        });
        free.collect()
    }

    /// Returns true if a request has room: on one device, or on whole largest devices.
    fn fits(&self, request: &DeviceRequest, own: Option<u8>) -> bool {
        let Some(devices) = &self.devices else { return true };
        let n = request.amounts.iter().map(|(name, amount)| {
            let largest = devices
                .iter()
                .filter_map(|device| device.resources.get(name))
                .max()
                .copied()
                .unwrap_or(0);
            match *amount {
                amount if amount <= largest => Some(1),
                amount if largest > 0 && amount % largest == 0 => Some(amount / largest),
                _ => None,
            }
        });
        let Some(n) = n
            .collect::<Option<Vec<u64>>>()
            .and_then(|all| all.into_iter().max())
        else {
            return false;
        };
        let fits = |free: &BTreeMap<String, i128>| {
            request.amounts.iter().all(|(name, amount)| {
                free.get(name.as_str())
                    .is_some_and(|free| i128::from(amount.div_ceil(n)) <= *free)
            })
        };
        self.free(own).iter().filter(|(_, free)| fits(free)).count() as u64 >= n
    }
}

fn request(x: u64, y: Option<u64>) -> DeviceRequest {
    let pairs: Vec<_> = [Some(("x", x)), y.map(|y| ("y", y))]
        .into_iter()
        .flatten()
        .collect();
    DeviceRequest {
        kind: "t".into(),
        amounts: amounts(&pairs),
        whole: None,
    }
}

fn name(owner: u8) -> String {
    format!("o{owner}")
}

fn take(fleet: &mut Fleet, model: &mut Model, step: &Step) {
    match step {
        Step::Devices(devices) => {
            let of = |(minor, x, y, healthy): &(u32, u64, Option<u64>, bool)| {
                let pairs: Vec<_> = [Some(("x", *x)), y.map(|y| ("y", y))]
                    .into_iter()
                    .flatten()
                    .collect();
                Device {
                    healthy: *healthy,
                    ..device(*minor, &pairs)
                }
            };
            let devices: Vec<Device> = devices.iter().map(of).collect();
            fleet.set_inventory("n", with(vec![class("t", devices.clone())]));
            model.devices = Some(devices);
        }
        Step::Gone => {
            fleet.remove_inventory("n");
            model.devices = None;
        }
        Step::Hold(owner, reference, x, trusted) => {
            let amounts = amounts(&[("x", *x)]);
            let held = HeldPart {
                resources: amounts,
                trusted: *trusted,
                ..HeldPart::new("t".into(), reference.clone())
            };
            fleet.hold(
                &name(*owner).as_str().into(),
                "n",
                Holdings {
                    parts: vec![held.clone()],
                    ..Holdings::default()
                },
            );
            model.hints.remove(owner);
            model.held.insert(*owner, vec![held]);
        }
        Step::DeviceLocation(owner, x, y, spread) => place(fleet, model, *owner, &request(*x, *y), *spread),
        Step::Hint(owner, x) => hint(fleet, model, *owner, request(*x, None)),
        Step::Release(owner) => {
            fleet.release(&name(*owner));
            model.held.remove(owner);
            model.hints.remove(owner);
        }
    }
}

fn place(fleet: &mut Fleet, model: &mut Model, owner: u8, request: &DeviceRequest, spread: bool) {
    let Some(id) = fleet.node_id("n") else { return };
    let ask = NodeRequest {
        gpus: RequestedGpus::Nothing,
        others: std::slice::from_ref(request),
        constraints: None,
        ..NodeRequest::default()
    };
    let policy = if spread {
        DevicePolicy::Spread
    } else {
        DevicePolicy::Binpack
    };
    let own = name(owner);
    let choice = fleet.choose_devices(id, ask, policy, Hints::RespectOthers(&own));
    assert_eq!(choice.is_ok(), model.fits(request, Some(owner)), "{request:?}");
    let Ok(placement) = choice else { return };
    let distinct: BTreeSet<_> = placement.others().map(|share| share.minor).collect();
    assert_eq!(distinct.len(), placement.others().count());
    if model.held.contains_key(&owner) || placement.others().next().is_none() {
        return;
    }
    assert_eq!(fleet.reserve(&own.as_str().into(), id, &placement), Ok(()));
    model.hints.remove(&owner);
    model
        .held
        .insert(owner, placement.others().map(HeldPart::from).collect());
}

fn hint(fleet: &mut Fleet, model: &mut Model, owner: u8, request: DeviceRequest) {
    let Some(id) = fleet.node_id("n") else { return };
    let ask = NodeRequest {
        gpus: RequestedGpus::Nothing,
        others: &[request],
        constraints: None,
        ..NodeRequest::default()
    };
    let Ok(placement) = fleet.choose_devices(id, ask, DevicePolicy::Binpack, Hints::Respect) else {
        return;
    };
    model.hints.remove(&owner);
    if fleet.hint(&name(owner).as_str().into(), id, &placement) {
        model.hints.insert(owner, placement);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// The engine accepts and refuses the same requests as the list, and decisions never oversubscribe a device.
    #[test]
    fn other_devices_are_counted_as_the_model_counts_them(steps in proptest::collection::vec(step(), 1..40)) {
        let (mut fleet, mut model) = (Fleet::new(), Model::default());
        for step in &steps {
            take(&mut fleet, &mut model, step);
            let only_facts = |violation: &Violation| matches!(violation, Violation::Oversubscribed { .. });
            prop_assert!(fleet.check().iter().all(only_facts), "{:?} after {step:?}", fleet.check());
            let facts = steps.iter().any(|step| matches!(step, Step::Hold(..)));
            let changes = steps.iter().filter(|step| matches!(step, Step::Devices(_))).count() > 1;
            prop_assert!(facts || changes || fleet.check().is_empty(), "decisions alone oversubscribe nothing: {:?}", fleet.check());
        }
    }
}
