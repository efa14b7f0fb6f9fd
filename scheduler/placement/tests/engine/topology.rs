//! The choice of devices by topology and constraints: the examples of the proposals, and the rules one by one.

use placement::{
    Constraints, Device, DeviceAttributes, DeviceConstraint, DeviceLocation, DevicePolicy, DeviceRequest,
    DeviceType, DevicesOfType, Exclusion, Fleet, FunctionGroup, Hints, Inventory, JointAllocation,
    LimitLevel, NodeRequest, Partition, PartitionConstraint, PartitionTable, Placement, Reason,
    RequestedGpus, Scope, Selector, Strategy, VirtualFunction,
};
use rstest::rstest;

use crate::build::{GIB, ask, gpu};

pub(crate) fn place(numa: u32, switch: u32) -> DeviceLocation {
    DeviceLocation {
        numa: Some(numa),
        switch: Some(format!("0000:{switch:02x}").into()),
    }
}

pub(crate) fn gpu_at(minor: u32, numa: u32, switch: u32) -> Device {
    Device {
        attributes: DeviceAttributes {
            location: Some(place(numa, switch)),
            ..DeviceAttributes::default()
        },
        ..gpu("n", minor, 80 * GIB)
    }
}

pub(crate) fn nic_at(minor: u32, numa: u32, switch: u32) -> Device {
    let resources = [("rdma".into(), 100)].into();
    let attributes = DeviceAttributes {
        location: Some(place(numa, switch)),
        ..DeviceAttributes::default()
    };
    Device {
        resources,
        attributes,
        ..Device::new(format!("nic{minor}"), minor)
    }
}

pub(crate) fn class(kind: &str, devices: Vec<Device>) -> DevicesOfType {
    DevicesOfType {
        kind: kind.into(),
        devices: devices.into(),
    }
}

/// Eight switches on two NUMA nodes, each with a GPU, and NICs on some of them.
fn eight_switches(nics: &[u32]) -> Inventory {
    let gpus = (0..8).map(|minor| gpu_at(minor, minor / 4, minor)).collect();
    let nics = (0..)
        .zip(nics)
        .map(|(minor, switch)| nic_at(minor, switch / 4, *switch))
        .collect();
    Inventory {
        gpus,
        other_devices: Some(vec![class("rdma", nics)]),
        serves_vendor: true,
        ..Inventory::default()
    }
}

pub(crate) fn fleet_of(inventory: Inventory) -> Fleet {
    let mut fleet = Fleet::new();
    assert!(fleet.set_inventory("n", inventory).is_empty());
    fleet
}

/// A node that gives its GPUs whole too, and has no other devices.
fn fleet_of_gpus(gpus: Vec<Device>) -> Fleet {
    fleet_of(Inventory {
        gpus: gpus.into(),
        serves_vendor: true,
        ..Inventory::default()
    })
}

/// A node with network adapters alone.
fn fleet_of_nics(nics: Vec<Device>) -> Fleet {
    fleet_of(Inventory {
        other_devices: Some(vec![class("rdma", nics)]),
        ..Inventory::default()
    })
}

pub(crate) fn rdma(amount: u64) -> DeviceRequest {
    DeviceRequest {
        kind: "rdma".into(),
        amounts: [("rdma".into(), amount)].into(),
        whole: Some(100),
    }
}

pub(crate) fn nic() -> DeviceType {
    DeviceType::from("rdma")
}

fn joint(same_switch: bool) -> Constraints {
    Constraints {
        joint: Some(JointAllocation {
            kinds: vec![DeviceType::Gpu, nic()],
            same_switch,
        }),
        ..Constraints::default()
    }
}

fn constraint_of(kind: DeviceType, constraint: DeviceConstraint) -> Constraints {
    Constraints {
        by_kind: vec![(kind, constraint)],
        ..Constraints::default()
    }
}

pub(crate) fn try_choose(
    fleet: &Fleet,
    gpus: RequestedGpus,
    others: &[DeviceRequest],
    constraints: Option<&Constraints>,
) -> Result<Placement, Reason> {
    let id = fleet.node_id("n").ok_or(Reason::NoDevice)?;
    let ask = NodeRequest {
        gpus,
        others,
        constraints,
        ..NodeRequest::default()
    };
    let choice = fleet.choose_devices(id, ask, DevicePolicy::Binpack, Hints::Respect);
    assert_eq!(
        choice.as_ref().map(drop).map_err(|reason| *reason),
        fleet.fit(id, ask, Hints::Respect)
    );
    choice
}

/// Minors of GPUs and of NICs.
pub(crate) fn chosen(choice: Result<Placement, Reason>) -> Result<(Vec<u32>, Vec<u32>), Reason> {
    let minors = |placement: Placement| {
        (
            placement.gpus().map(|share| share.minor).collect(),
            placement.others().map(|share| share.minor).collect(),
        )
    };
    choice.map(minors)
}

fn why(fleet: &Fleet, gpus: RequestedGpus, others: &[DeviceRequest], constraints: &Constraints) -> String {
    let id = fleet.node_id("n");
    let misfit = id.and_then(|id| {
        fleet.misfit(
            id,
            NodeRequest {
                gpus,
                others,
                constraints: Some(constraints),
                ..NodeRequest::default()
            },
            Hints::Respect,
        )
    });
    misfit.map_or_else(|| "fits".to_owned(), |misfit| misfit.to_string())
}

fn reserve(fleet: &mut Fleet, owner: &str, choice: Result<Placement, Reason>) {
    let id = fleet.node_id("n").ok_or(Reason::NoDevice);
    let reserved = choice.and_then(|placement| Ok(fleet.reserve(&owner.into(), id?, &placement)));
    assert_eq!(reserved, Ok(Ok(())));
    assert_eq!(fleet.check(), []);
}

fn take(
    fleet: &mut Fleet,
    owner: &str,
    gpus: RequestedGpus,
    others: &[DeviceRequest],
    constraints: Option<&Constraints>,
) {
    let choice = try_choose(fleet, gpus, others, constraints);
    reserve(fleet, owner, choice);
}

fn part(memory: u32) -> RequestedGpus {
    RequestedGpus::from(&ask(1, placement::RequestedMemory::Ratio(memory)))
}

/// Four GPUs on four switches, and three NICs on the first of them: each switch gets its own NIC before one gets a second.
#[rstest]
fn each_switch_with_a_gpu_gets_its_own_nic_first(
    #[values(1, 100, 200, 300, 400)] amount: u64,
    #[values([0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1])] numas: [u32; 4],
    #[values(RequestedGpus::Whole(4), RequestedGpus::from(&ask(4, placement::RequestedMemory::Ratio(100))))]
    gpus: RequestedGpus,
) {
    let at = |switch: u32| (numas[switch as usize], switch);
    let of_gpus = (0..4).map(|minor| gpu_at(minor, at(minor).0, minor)).collect();
    let nics = (0..)
        .zip([0, 0, 0, 1, 2, 3])
        .map(|(minor, switch)| nic_at(minor, at(switch).0, switch))
        .collect();
    let inventory = Inventory {
        gpus: of_gpus,
        other_devices: Some(vec![class("rdma", nics)]),
        serves_vendor: true,
        ..Inventory::default()
    };
    let choice = try_choose(&fleet_of(inventory), gpus, &[rdma(amount)], Some(&joint(false)));
    assert_eq!(chosen(choice), Ok((vec![0, 1, 2, 3], vec![0, 3, 4, 5])));
}

/// The vendor's plugin chooses the GPUs, and a pod that takes all that are free leaves it no choice.
#[rstest]
#[case::all_that_are_free(4, &[0, 3, 4, 5])]
#[case::some_of_them(3, &[0, 1, 2, 3])]
fn nics_follow_gpus_that_the_vendors_plugin_must_choose(#[case] n: u32, #[case] nics: &[u32]) {
    let of_gpus = (0..4).map(|minor| gpu_at(minor, 0, minor)).collect();
    let of_nics = (0..)
        .zip([0, 0, 0, 1, 2, 3])
        .map(|(minor, switch)| nic_at(minor, 0, switch))
        .collect();
    let inventory = Inventory {
        gpus: of_gpus,
        other_devices: Some(vec![class("rdma", of_nics)]),
        ..Inventory::default()
    };
    let choice = try_choose(
        &fleet_of(inventory),
        RequestedGpus::Whole(n),
        &[rdma(400)],
        Some(&joint(false)),
    );
    assert_eq!(chosen(choice), Ok((vec![], nics.to_vec())));
}

#[test]
fn switches_without_a_free_nic_are_skipped() {
    let mut fleet = fleet_of(eight_switches(&[0, 2, 5, 7]));
    take(&mut fleet, "a", RequestedGpus::Nothing, &[rdma(100)], None);
    let choice = try_choose(&fleet, RequestedGpus::Whole(3), &[rdma(1)], Some(&joint(true)));
    assert_eq!(chosen(choice), Ok((vec![2, 5, 7], vec![1, 2, 3])));
    assert_eq!(
        why(&fleet, RequestedGpus::Whole(4), &[rdma(1)], &joint(true)),
        "4 GPUs fit, no rdma left on switch 0000:00"
    );
}

#[test]
fn the_smallest_group_that_fits_comes_first_and_partly_used_ones_before_it() {
    let gpus = (0..8).map(|minor| gpu_at(minor, minor / 4, minor / 2)).collect();
    let mut fleet = fleet_of_gpus(gpus);
    take(&mut fleet, "a", part(30), &[], None);
    let choice = try_choose(&fleet, RequestedGpus::Whole(1), &[], None);
    assert_eq!(
        chosen(choice.clone()),
        Ok((vec![1], vec![])),
        "its switch is broken already"
    );
    assert_eq!(
        chosen(try_choose(&fleet, RequestedGpus::Whole(2), &[], None)),
        Ok((vec![2, 3], vec![])),
        "one switch, in a broken NUMA node"
    );
    assert_eq!(
        chosen(try_choose(&fleet, RequestedGpus::Whole(3), &[], None)),
        Ok((vec![1, 2, 3], vec![])),
        "one NUMA node"
    );
    assert_eq!(
        chosen(try_choose(&fleet, part(80), &[], None)),
        Ok((vec![1], vec![])),
        "shared pods too"
    );
    reserve(&mut fleet, "b", choice);
    assert_eq!(
        chosen(try_choose(&fleet, part(80), &[], None)),
        Ok((vec![2], vec![])),
        "a broken NUMA node"
    );
    assert_eq!(
        chosen(try_choose(&fleet, part(30), &[], None)),
        Ok((vec![0], vec![])),
        "the fullest first of all"
    );
}

fn partition(minors: &[u32], score: i64, bandwidth: Option<u64>) -> Partition {
    Partition {
        minors: minors.to_vec(),
        bandwidth,
        score,
    }
}

/// Pairs, fours and the eight of eight GPUs, all of one score.
fn halves(is_binding: bool) -> PartitionTable {
    let of = |size: u32| {
        (0..8 / size)
            .map(move |at| partition(&(at * size..(at + 1) * size).collect::<Vec<_>>(), 1, Some(400)))
    };
    PartitionTable {
        is_binding,
        partitions: [1, 2, 4, 8].into_iter().flat_map(of).collect(),
    }
}

#[test]
fn the_chosen_partition_leaves_the_best_ones_free() {
    let mut fleet = fleet_of(Inventory {
        partitions: Some(halves(true)),
        ..eight_switches(&[])
    });
    let selects_4 = Constraints {
        partition: Some(PartitionConstraint::default()),
        ..Constraints::default()
    };
    take(
        &mut fleet,
        "first",
        RequestedGpus::Whole(4),
        &[],
        Some(&selects_4),
    );
    take(&mut fleet, "one", RequestedGpus::Whole(1), &[], None);
    assert_eq!(
        chosen(try_choose(&fleet, RequestedGpus::Whole(1), &[], None)),
        Ok((vec![5], vec![])),
        "the pair 6, 7 stays whole"
    );
    assert_eq!(
        chosen(try_choose(&fleet, RequestedGpus::Whole(2), &[], None)),
        Ok((vec![6, 7], vec![]))
    );
    assert_eq!(
        chosen(try_choose(&fleet, RequestedGpus::Whole(3), &[], None)),
        Err(Reason::Partition)
    );
    let why = |n| why(&fleet, RequestedGpus::Whole(n), &[], &selects_4);
    assert_eq!(why(3), "the node's table has no partition of 3 GPUs");
}

/// A table that cannot be read is not the absence of a table, nor one without a free partition.
#[rstest]
#[case::binding(Some(PartitionTable { is_binding: true, partitions: vec![] }))]
#[case::preferred(None)]
fn an_unreadable_table_has_a_reason_of_its_own(#[case] partitions: Option<PartitionTable>) {
    let is_binding = partitions.is_some();
    let fleet = fleet_of(Inventory {
        partitions,
        has_unreadable_partitions: true,
        ..eight_switches(&[])
    });
    let demanding = Constraints {
        partition: Some(PartitionConstraint::default()),
        ..Constraints::default()
    };
    let two = RequestedGpus::Whole(2);
    let choice = chosen(try_choose(&fleet, two, &[], Some(&demanding)));
    assert_eq!(choice, Err(Reason::PartitionsUnreadable));
    assert_eq!(
        why(&fleet, two, &[], &demanding),
        "the node's partition table cannot be read"
    );
    let choice = chosen(try_choose(&fleet, two, &[], None));
    assert_eq!(choice.err(), is_binding.then_some(Reason::PartitionsUnreadable));
}

#[rstest]
#[case::restricted(true, &[], Ok(vec![2, 3]), "fits")]
#[case::restricted_waits(true, &[2], Err(Reason::Partition), "no free partition of 2 GPUs with score 10; the best free one has score 5")]
#[case::best_effort(false, &[2], Ok(vec![0, 1]), "fits")]
fn a_partition_is_chosen_by_its_score(
    #[case] restricted: bool,
    #[case] used: &[u32],
    #[case] expected: Result<Vec<u32>, Reason>,
    #[case] message: &str,
) {
    let gpus = (0..4).map(|minor| gpu_at(minor, 0, minor)).collect();
    let partitions = vec![
        partition(&[0, 1], 5, None),
        partition(&[2, 3], 10, Some(100)),
        partition(&[0, 2], 1, None),
    ];
    let partitions = Some(PartitionTable {
        is_binding: false,
        partitions,
    });
    let mut fleet = fleet_of(Inventory {
        gpus,
        partitions,
        serves_vendor: true,
        ..Inventory::default()
    });
    for minor in used {
        crate::build::hold(
            &mut fleet,
            &format!("o{minor}"),
            "n",
            crate::build::on_minor(*minor, placement::RequestedMemory::Ratio(1)),
        );
    }
    let constraints = Constraints {
        partition: Some(PartitionConstraint {
            restricted,
            bandwidth: None,
        }),
        ..Constraints::default()
    };
    let choice = try_choose(&fleet, RequestedGpus::Whole(2), &[], Some(&constraints));
    assert_eq!(chosen(choice).map(|(gpus, _)| gpus), expected);
    assert_eq!(why(&fleet, RequestedGpus::Whole(2), &[], &constraints), message);
    let fast = Constraints {
        partition: Some(PartitionConstraint {
            restricted: false,
            bandwidth: Some(101),
        }),
        ..Constraints::default()
    };
    assert_eq!(
        why(&fleet, RequestedGpus::Whole(2), &[], &fast),
        "no free partition of 2 GPUs is known to have the bandwidth"
    );
}

/// A pod that takes all memory of its GPUs takes whole GPUs, in whatever terms.
#[rstest]
#[case::percent(placement::RequestedMemory::Ratio(100))]
#[case::bytes(placement::RequestedMemory::Bytes(80 * GIB))]
#[case::units(placement::RequestedMemory::Units(80))]
fn a_binding_table_applies_to_full_shares_in_any_unit(#[case] memory: placement::RequestedMemory) {
    let table = PartitionTable {
        is_binding: true,
        partitions: vec![partition(&[2, 5], 1, None)],
    };
    let inventory = Inventory {
        partitions: Some(table),
        unit_bytes: Some(GIB),
        ..eight_switches(&[])
    };
    let mut fleet = fleet_of(inventory);
    let pair = RequestedGpus::from(&ask(2, memory));
    assert_eq!(
        chosen(try_choose(
            &fleet,
            RequestedGpus::from(&ask(3, memory)),
            &[],
            None
        )),
        Err(Reason::Partition)
    );
    assert_eq!(
        chosen(try_choose(&fleet, pair, &[], None)),
        Ok((vec![2, 5], vec![]))
    );
    take(&mut fleet, "a", RequestedGpus::Whole(2), &[], None);
    assert_eq!(
        chosen(try_choose(&fleet, pair, &[], None)),
        Err(Reason::Partition)
    );
}

/// The scope holds for more GPUs than a set has room for, too.
#[test]
fn a_required_scope_holds_for_more_than_64_gpus() {
    let gpus = (0..80).map(|minor| gpu_at(minor, minor / 70, minor)).collect();
    let fleet = fleet_of_gpus(gpus);
    let within = |scope| {
        constraint_of(
            DeviceType::Gpu,
            DeviceConstraint {
                scope: Some(scope),
                ..DeviceConstraint::default()
            },
        )
    };
    assert_eq!(
        chosen(try_choose(
            &fleet,
            RequestedGpus::Whole(75),
            &[],
            Some(&within(Scope::Numa))
        )),
        Err(Reason::Together)
    );
    assert_eq!(
        try_choose(
            &fleet,
            RequestedGpus::Whole(75),
            &[],
            Some(&within(Scope::Machine))
        )
        .map(|placement| placement.shares.len()),
        Ok(75)
    );
}

#[test]
fn an_exclusive_switch_excludes_earlier_and_later_pods() {
    let gpus = (0..4).map(|minor| gpu_at(minor, 0, minor / 2)).collect();
    let nics = (0..4).map(|minor| nic_at(minor, 0, minor / 2)).collect();
    let mut fleet = fleet_of(Inventory {
        gpus,
        other_devices: Some(vec![class("rdma", nics)]),
        serves_vendor: true,
        ..Inventory::default()
    });
    let keeps = constraint_of(
        nic(),
        DeviceConstraint {
            exclusion: Some(Exclusion::Switch),
            ..DeviceConstraint::default()
        },
    );
    take(
        &mut fleet,
        "keeper",
        RequestedGpus::Nothing,
        &[rdma(1)],
        Some(&keeps),
    );
    let later = try_choose(&fleet, RequestedGpus::Nothing, &[rdma(1)], None);
    assert_eq!(
        chosen(later.clone()),
        Ok((vec![], vec![2])),
        "not on the kept switch"
    );
    reserve(&mut fleet, "later", later);
    assert_eq!(
        why(&fleet, RequestedGpus::Nothing, &[rdma(1)], &keeps),
        "0 of the 4 devices of type rdma that have room are not ruled out by exclusive use, 1 is needed"
    );
    let late = Placement {
        shares: vec![placement::Share {
            kind: "rdma".into(),
            id: "nic1".into(),
            minor: 1,
            resources: [("rdma".into(), 1)].into(),
            virtual_functions: Vec::new(),
            amounts: placement::Amounts::ZERO,
        }],
        ..Placement::default()
    };
    let reserved = fleet.reserve(&"late".into(), fleet.node_id("n").unwrap(), &late);
    assert_eq!(
        reserved.unwrap_err().to_string(),
        "rdma nic1: exclusive use does not allow it"
    );
}

fn with_functions(minor: u32, label: &str, ids: &[&str]) -> Device {
    let functions = (0..)
        .zip(ids)
        .map(|(minor, id)| VirtualFunction {
            id: (*id).into(),
            minor,
        })
        .collect();
    let group = FunctionGroup {
        labels: [("type".into(), label.into())].into(),
        functions,
    };
    let device = nic_at(minor, 0, minor);
    Device {
        attributes: DeviceAttributes {
            function_groups: vec![group],
            ..device.attributes.clone()
        },
        ..device
    }
}

fn functions(placement: &Placement) -> Vec<String> {
    placement
        .others()
        .flat_map(|share| &share.virtual_functions)
        .map(|function| function.id.to_string())
        .collect()
}

#[test]
fn a_count_of_two_takes_one_function_of_each_of_two_nics() {
    let nics = vec![
        with_functions(0, "a", &["b2", "b1"]),
        with_functions(1, "a", &["c1"]),
        with_functions(2, "b", &["d1"]),
    ];
    let mut fleet = fleet_of_nics(nics);
    let strategy = Some(Strategy::RequestsAsCount);
    let any = constraint_of(
        nic(),
        DeviceConstraint {
            virtual_functions: Some(Selector::default()),
            strategy,
            ..DeviceConstraint::default()
        },
    );
    let first = try_choose(&fleet, RequestedGpus::Nothing, &[rdma(2)], Some(&any));
    assert_eq!(
        first.as_ref().map(functions),
        Ok(vec!["b1".to_owned(), "c1".to_owned()])
    );
    reserve(&mut fleet, "first", first.clone());
    let again = fleet.reserve(&"again".into(), fleet.node_id("n").unwrap(), &first.unwrap());
    assert_eq!(
        again.unwrap_err().to_string(),
        "virtual function b1 is gone or taken"
    );
    let of_a = Selector {
        requirements: vec![placement::Requirement {
            key: "type".into(),
            test: placement::LabelCondition::In(vec!["a".into()]),
        }],
    };
    let only_a = constraint_of(
        nic(),
        DeviceConstraint {
            virtual_functions: Some(of_a),
            strategy,
            ..DeviceConstraint::default()
        },
    );
    assert_eq!(
        why(&fleet, RequestedGpus::Nothing, &[rdma(2)], &only_a),
        "1 of the 3 devices of type rdma have a free VF of the requested kind, 2 are needed"
    );
    assert_eq!(
        try_choose(&fleet, RequestedGpus::Nothing, &[rdma(2)], Some(&any))
            .as_ref()
            .map(functions),
        Ok(vec!["b2".to_owned(), "d1".to_owned()])
    );
}

#[rstest]
#[case::all(Strategy::ApplyForAll, None, 100, Ok(vec![100, 100, 100]))]
#[case::a_part_of_all(Strategy::ApplyForAll, None, 7, Ok(vec![7, 7, 7]))]
#[case::count(Strategy::RequestsAsCount, None, 2, Ok(vec![1, 1]))]
#[case::count_of_whole_ones(Strategy::RequestsAsCount, Some(Exclusion::Device), 2, Ok(vec![100, 100]))]
#[case::too_many(Strategy::RequestsAsCount, None, 4, Err(Reason::OtherDevices))]
#[case::so_many_whole_ones(Strategy::ApplyForAll, None, 200, Ok(vec![100, 100]))]
fn the_allocation_strategy_turns_amounts_into_devices(
    #[case] strategy: Strategy,
    #[case] exclusion: Option<Exclusion>,
    #[case] amount: u64,
    #[case] expected: Result<Vec<u64>, Reason>,
) {
    let nics = (0..3).map(|minor| nic_at(minor, 0, minor)).collect();
    let fleet = fleet_of_nics(nics);
    let constraints = constraint_of(
        nic(),
        DeviceConstraint {
            strategy: Some(strategy),
            exclusion,
            ..DeviceConstraint::default()
        },
    );
    let choice = try_choose(
        &fleet,
        RequestedGpus::Nothing,
        &[rdma(amount)],
        Some(&constraints),
    );
    let amounts = |placement: Placement| {
        placement
            .others()
            .flat_map(|share| share.resources.values().copied())
            .collect::<Vec<u64>>()
    };
    assert_eq!(choice.map(amounts), expected);
}

/// Devices of any type take part.
#[test]
fn devices_of_three_types_are_placed_on_the_same_switches() {
    let mut inventory = eight_switches(&[1, 3, 4, 6]);
    let cards = [3, 4, 5].map(|switch| Device {
        resources: [("npu".into(), 100)].into(),
        ..nic_at(switch, switch / 4, switch)
    });
    inventory
        .other_devices
        .get_or_insert_default()
        .push(class("npu", cards.to_vec()));
    let mut fleet = fleet_of(inventory);
    let npu = DeviceRequest {
        kind: "npu".into(),
        amounts: [("npu".into(), 50)].into(),
        whole: Some(100),
    };
    let kinds = vec![
        nic(),
        DeviceType::Gpu,
        DeviceType::from("npu"),
        DeviceType::from("fpga"),
    ];
    let constraints = Constraints {
        joint: Some(JointAllocation {
            kinds,
            same_switch: true,
        }),
        ..Constraints::default()
    };
    let choice = try_choose(
        &fleet,
        RequestedGpus::Whole(2),
        &[rdma(200), npu.clone()],
        Some(&constraints),
    );
    assert_eq!(
        chosen(choice),
        Ok((vec![3, 4], vec![1, 2, 3, 4])),
        "one GPU and one card for each NIC"
    );
    let choice = try_choose(
        &fleet,
        RequestedGpus::Whole(1),
        &[rdma(200), npu.clone()],
        Some(&constraints),
    );
    assert_eq!(
        chosen(choice),
        Err(Reason::Together),
        "no GPU comes that was not asked for"
    );
    take(
        &mut fleet,
        "a",
        RequestedGpus::Whole(1),
        &[rdma(100), npu.clone()],
        Some(&constraints),
    );
    assert_eq!(
        why(&fleet, RequestedGpus::Whole(2), &[rdma(200), npu], &constraints),
        "2 rdma fit, no npu left on switch 0000:06"
    );
}

/// A node that reports no places is not taken for one whose devices are apart.
#[test]
fn unknown_places_are_named() {
    let unplaced = |mut device: Device| {
        device.attributes.location = None;
        device
    };
    let inventory = Inventory {
        gpus: vec![unplaced(gpu_at(0, 0, 0)), unplaced(gpu_at(1, 0, 0))].into(),
        other_devices: Some(vec![class("rdma", vec![unplaced(nic_at(0, 0, 0))])]),
        serves_vendor: true,
        ..Inventory::default()
    };
    let fleet = fleet_of(inventory);
    assert_eq!(
        why(&fleet, RequestedGpus::Whole(1), &[rdma(1)], &joint(true)),
        "the node does not report the switch of its GPUs, so that they cannot be chosen by it"
    );
    let constraints = Constraints {
        by_kind: vec![(
            DeviceType::Gpu,
            DeviceConstraint {
                scope: Some(Scope::Numa),
                ..DeviceConstraint::default()
            },
        )],
        ..Constraints::default()
    };
    assert_eq!(
        why(&fleet, RequestedGpus::Whole(2), &[], &constraints),
        "the node does not report the NUMA node of its GPUs, so that they cannot be chosen by it"
    );
}

/// Four GPUs, of which the first `n_driver` enforce memory limits by the driver and the others as `rest` says.
#[rstest]
#[case::all(4, LimitLevel::None, Ok(vec![0, 1]))]
#[case::two(2, LimitLevel::Library, Ok(vec![0, 1]))]
#[case::one_of_two(1, LimitLevel::Library, Err(Reason::LimitedByLibrary))]
#[case::none(0, LimitLevel::None, Err(Reason::Unlimited))]
fn a_share_goes_where_memory_limits_are_enforced(
    #[case] n_driver: u32,
    #[case] rest: LimitLevel,
    #[case] expected: Result<Vec<u32>, Reason>,
) {
    let gpu = |minor| {
        let mut gpu = gpu_at(minor, 0, minor);
        gpu.attributes.limits = if minor < n_driver {
            LimitLevel::Driver
        } else {
            rest
        };
        gpu
    };
    let fleet = fleet_of(Inventory {
        gpus: (0..4).map(gpu).collect(),
        ..Inventory::default()
    });
    let demanding = Constraints {
        limits: LimitLevel::Driver,
        ..Constraints::default()
    };
    let two = RequestedGpus::from(&ask(2, placement::RequestedMemory::Ratio(30)));
    let choice = chosen(try_choose(&fleet, two, &[], Some(&demanding)));
    assert_eq!(choice.map(|(gpus, _)| gpus), expected);
    let whole = chosen(try_choose(&fleet, RequestedGpus::Whole(4), &[], Some(&demanding)));
    assert!(whole.is_ok(), "nobody shares them");
    if let Err(reason) = expected {
        assert!(!reason.is_lack_of_room(), "no eviction helps");
        let text = why(&fleet, two, &[], &demanding);
        assert!(text.ends_with(reason.as_str()), "{text}");
    }
}

#[test]
fn pods_that_see_all_gpus_and_exclusive_pods_use_different_nodes() {
    let all = RequestedGpus::All { slots: 1 };
    let keeps = constraint_of(
        DeviceType::Gpu,
        DeviceConstraint {
            exclusion: Some(Exclusion::Device),
            ..DeviceConstraint::default()
        },
    );
    let mut fleet = fleet_of(eight_switches(&[]));
    take(&mut fleet, "keeper", part(30), &[], Some(&keeps));
    assert_eq!(chosen(try_choose(&fleet, all, &[], None)), Err(Reason::Selected));
    assert_eq!(
        chosen(try_choose(&fleet, part(30), &[], None)),
        Ok((vec![1], vec![])),
        "there is room on 0, but it is kept"
    );
    fleet.release("keeper");
    take(&mut fleet, "seer", all, &[], None);
    assert_eq!(
        chosen(try_choose(&fleet, part(30), &[], Some(&keeps))),
        Err(Reason::Selected)
    );
    assert_eq!(
        chosen(try_choose(&fleet, part(30), &[], None)),
        Ok((vec![0], vec![]))
    );
}

/// A holder of unknown devices may hold any.
#[test]
fn a_holder_of_unknown_devices_blocks_exclusive_use_of_all() {
    let mut fleet = fleet_of(eight_switches(&[0, 1]));
    let device = placement::DeviceRef::Any;
    let held = placement::HeldPart {
        resources: [("rdma".into(), 1)].into(),
        trusted: false,
        ..placement::HeldPart::new("rdma".into(), device)
    };
    let exclusions = vec![(nic(), Exclusion::Device)];
    fleet.hold(
        &"doubtful".into(),
        "n",
        placement::Holdings {
            parts: vec![held],
            exclusions,
            ..placement::Holdings::default()
        },
    );
    assert_eq!(
        chosen(try_choose(&fleet, RequestedGpus::Nothing, &[rdma(1)], None)),
        Err(Reason::OtherDevices)
    );
    assert_eq!(fleet.check(), []);
}

/// GPUs that the vendor's plugin chooses take no constraints.
#[test]
fn constraints_refuse_gpus_that_the_vendors_plugin_chooses() {
    let fleet = fleet_of(Inventory {
        serves_vendor: false,
        ..eight_switches(&[0])
    });
    let constraints = Constraints {
        partition: Some(PartitionConstraint::default()),
        ..Constraints::default()
    };
    assert_eq!(
        chosen(try_choose(
            &fleet,
            RequestedGpus::Whole(2),
            &[],
            Some(&constraints)
        )),
        Err(Reason::Vendor)
    );
    let choice = try_choose(&fleet, RequestedGpus::Whole(2), &[rdma(1)], Some(&joint(false)));
    assert_eq!(
        choice.map(|placement| (placement.n_unknown_gpus, placement.others().count())),
        Ok((2, 1)),
        "NICs are chosen by themselves"
    );
}

/// More devices than a set has room for.
#[test]
fn joint_allocation_works_with_more_than_64_devices() {
    let gpus = (0..80)
        .map(|minor| gpu_at(minor, minor / 40, minor / 2))
        .collect();
    let nics = (0..80)
        .map(|minor| nic_at(minor, minor / 40, minor / 2))
        .collect();
    let fleet = fleet_of(Inventory {
        gpus,
        other_devices: Some(vec![class("rdma", nics)]),
        serves_vendor: true,
        ..Inventory::default()
    });
    let n = |n, constraints: Option<&Constraints>| {
        let choice = chosen(try_choose(
            &fleet,
            RequestedGpus::Whole(n),
            &[rdma(1)],
            constraints,
        ));
        choice.map(|(gpus, nics)| (gpus.len(), nics.len()))
    };
    assert_eq!(n(70, None), Ok((70, 1)));
    assert_eq!(n(70, Some(&joint(false))), Ok((70, 1)));
    assert_eq!(n(4, Some(&joint(true))), Ok((4, 2)));
    assert_eq!(n(81, None), Err(Reason::TooLarge));
}

/// Nodes of an equivalence class share a result; nodes that differ in anything relevant do not.
#[test]
fn one_result_per_equivalence_class() {
    let mut fleet = Fleet::new();
    for node in 0..30_u32 {
        let name = format!("n{node}");
        let mut inventory = eight_switches(if node < 20 { &[0, 1, 2, 5] } else { &[5] });
        inventory
            .gpus
            .iter_mut()
            .for_each(|gpu| gpu.id = format!("{name}-{}", gpu.minor).as_str().into());
        fleet.set_inventory(&name, inventory);
        if node % 2 == 0 {
            crate::build::hold(
                &mut fleet,
                &format!("o{node}"),
                &name,
                crate::build::on_minor(0, placement::RequestedMemory::Ratio(10)),
            );
        }
        if node % 5 == 0 {
            let id = fleet.node_id(&name).into_iter().next();
            let share = placement::Share {
                kind: "rdma".into(),
                id: "nic0".into(),
                minor: 0,
                resources: [("rdma".into(), 100)].into(),
                virtual_functions: vec![],
                amounts: placement::Amounts::ZERO,
            };
            let hinted = id.is_some_and(|id| {
                fleet.hint(
                    &format!("h{node}").as_str().into(),
                    id,
                    &Placement {
                        shares: vec![share],
                        ..Placement::default()
                    },
                )
            });
            assert!(hinted);
        }
    }
    let (constraints, others) = (joint(true), [rdma(1)]);
    for (cpu_milli, hints) in (0..).zip([Hints::Ignore, Hints::Respect, Hints::RespectOthers("h5")]) {
        // Requests of their own, so that none finds the cached results of another.
        let host = placement::HostAmounts { cpu_milli, memory: 0 };
        let ask = NodeRequest {
            gpus: RequestedGpus::Whole(3),
            others: &others,
            constraints: Some(&constraints),
            host,
        };
        let policies = placement::Policies::default();
        let mut evaluation = fleet.evaluation(ask, policies, hints);
        let ids: Vec<_> = fleet.nodes().map(placement::NodeView::id).collect();
        for id in ids {
            assert_eq!(
                evaluation.evaluate(id).unwrap_or_default(),
                fleet.score(id, ask, policies, hints)
            );
        }
        // A node whose only hint is the requesting owner's own has another class than nodes without hints.
        let n_evaluated = match hints {
            Hints::Ignore => 4,
            Hints::Respect => 8,
            Hints::RespectOthers(_) => 9,
        };
        assert_eq!(evaluation.n_evaluated(), n_evaluated);
    }
    assert_eq!(fleet.check(), []);
}

#[test]
fn cached_evaluations_equal_fresh_ones_for_every_policy() {
    use placement::{NodePolicy, Policies};

    let mut fleet = Fleet::new();
    for node in ["n0", "n1", "n2"] {
        let mut inventory = eight_switches(&[0, 1]);
        inventory
            .gpus
            .iter_mut()
            .for_each(|gpu| gpu.id = format!("{node}-{}", gpu.minor).as_str().into());
        fleet.set_inventory(node, inventory);
    }
    crate::build::hold(
        &mut fleet,
        "a",
        "n1",
        crate::build::on_minor(0, placement::RequestedMemory::Ratio(10)),
    );
    let share = |devices| RequestedGpus::from(&ask(devices, placement::RequestedMemory::Ratio(30)));
    let (constraints, others) = (joint(true), [rdma(1)]);
    let plain = [
        RequestedGpus::Nothing,
        RequestedGpus::Whole(2),
        RequestedGpus::Whole(8),
        share(1),
        share(3),
        RequestedGpus::All { slots: 1 },
    ];
    let plain = plain.map(|gpus| NodeRequest {
        gpus,
        ..NodeRequest::default()
    });
    let beside = NodeRequest {
        gpus: RequestedGpus::Whole(1),
        others: &others,
        ..NodeRequest::default()
    };
    let asks = plain.into_iter().chain([
        beside,
        NodeRequest {
            constraints: Some(&constraints),
            ..beside
        },
    ]);
    let nodes = [
        NodePolicy::Fill,
        NodePolicy::Binpack,
        NodePolicy::Spread,
        NodePolicy::LeastAllocated,
        NodePolicy::MostAllocated,
    ];
    for (ask, node) in asks.flat_map(|ask| nodes.map(|node| (ask, node))) {
        let policies = Policies {
            node,
            device: DevicePolicy::Binpack,
        };
        for hints in [Hints::Respect, Hints::Ignore] {
            let mut evaluation = fleet.evaluation(ask, policies, hints);
            for id in fleet.nodes().map(placement::NodeView::id) {
                let fresh = fleet
                    .fit(id, ask, hints)
                    .map(|()| fleet.score(id, ask, policies, hints));
                assert_eq!(evaluation.evaluate(id), fresh, "{ask:?} {policies:?}");
                assert_eq!(
                    evaluation.evaluate(id),
                    fresh,
                    "asked again: {ask:?} {policies:?}"
                );
            }
        }
    }
}

/// A function that two facts name, and devices that have moved onto a switch of exclusive use.
#[test]
fn check_finds_double_holdings_and_broken_exclusive_use() {
    let of = |switches: [u32; 2]| {
        let nics = (0..)
            .zip(switches)
            .map(|(minor, switch)| nic_at(minor, 0, switch))
            .collect();
        Inventory {
            other_devices: Some(vec![class("rdma", nics)]),
            ..Inventory::default()
        }
    };
    let mut fleet = fleet_of(of([0, 1]));
    let keeps = constraint_of(
        nic(),
        DeviceConstraint {
            exclusion: Some(Exclusion::Switch),
            ..DeviceConstraint::default()
        },
    );
    take(
        &mut fleet,
        "keeper",
        RequestedGpus::Nothing,
        &[rdma(1)],
        Some(&keeps),
    );
    take(&mut fleet, "other", RequestedGpus::Nothing, &[rdma(1)], None);
    fleet.set_inventory("n", of([1, 1]));
    let broken = fleet.check();
    assert!(
        matches!(broken.as_slice(), [placement::Violation::ExclusionBroken(text)] if text.contains(" nic1,")),
        "{broken:?}"
    );
    fleet.release("other");
    let held = placement::HeldPart {
        resources: [("rdma".into(), 1)].into(),
        virtual_functions: vec!["f".into()],
        trusted: true,
        ..placement::HeldPart::new("rdma".into(), placement::DeviceRef::Id("nic1".into()))
    };
    for owner in ["one", "two"] {
        fleet.hold(
            &owner.into(),
            "n",
            placement::Holdings {
                parts: vec![held.clone()],
                ..placement::Holdings::default()
            },
        );
    }
    let twice = fleet.check();
    assert!(
        matches!(twice.as_slice(), [placement::Violation::FunctionHeldTwice(_)]),
        "facts break exclusions freely: {twice:?}"
    );
}

#[test]
fn fewer_numa_nodes_are_preferred_to_fewer_switches() {
    let places = [(1, 1), (1, 1), (0, 0), (0, 2), (0, 4)];
    let gpus = (0..)
        .zip(places)
        .map(|(minor, (numa, switch))| gpu_at(minor, numa, switch))
        .collect();
    let fleet = fleet_of_gpus(gpus);
    assert_eq!(
        chosen(try_choose(&fleet, RequestedGpus::Whole(3), &[], None)),
        Ok((vec![2, 3, 4], vec![]))
    );
}

/// Types that are far from each other cost no more than types that are near.
#[test]
fn the_search_over_many_device_types_is_bounded() {
    let gpus = (0..2).map(|minor| gpu_at(minor, 0, minor)).collect();
    let kinds: Vec<String> = (0..12).map(|nth| format!("type{nth:02}")).collect();
    let of = |kind: &String| {
        let device = Device {
            resources: [(kind.as_str().into(), 100)].into(),
            ..nic_at(0, 1, 9)
        };
        class(kind, vec![device])
    };
    let other_devices = Some(kinds.iter().map(of).collect());
    let fleet = fleet_of(Inventory {
        gpus,
        other_devices,
        serves_vendor: true,
        ..Inventory::default()
    });
    let request = |kind: &String| DeviceRequest {
        kind: kind.as_str().into(),
        amounts: [(kind.as_str().into(), 1)].into(),
        whole: None,
    };
    let requests: Vec<DeviceRequest> = kinds.iter().map(request).collect();
    let joined = [DeviceType::Gpu]
        .into_iter()
        .chain(kinds.iter().map(|kind| DeviceType::from(kind.as_str())))
        .collect();
    let constraints = Constraints {
        joint: Some(JointAllocation {
            kinds: joined,
            same_switch: false,
        }),
        ..Constraints::default()
    };
    let (gpus, others) = chosen(try_choose(
        &fleet,
        RequestedGpus::Whole(1),
        &requests,
        Some(&constraints),
    ))
    .unwrap();
    assert_eq!((gpus, others.len()), (vec![0], 12));
}
