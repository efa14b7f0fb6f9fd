//! The choice of devices, and the scores of nodes.

use placement::{
    DevicePolicy, Fleet, Hints, HostAmounts, NodePolicy, PodProfile, Policies, RequestedGpus,
    RequestedMemory, ResourceWeights, ShareRequest,
};
use rstest::rstest;

use crate::build::{ask, fill, inventory, minors, one_node, ratio, units};

fn memory_only() -> ResourceWeights {
    ResourceWeights {
        memory: 1,
        ..ResourceWeights::default()
    }
}

#[rstest]
#[case::least_room(DevicePolicy::Binpack, units(1000), &[2])]
#[case::most_room(DevicePolicy::Spread, units(1000), &[3])]
#[case::two_least(DevicePolicy::Binpack, ask(2, RequestedMemory::Units(1000)), &[1, 2])]
#[case::two_most(DevicePolicy::Spread, ask(2, RequestedMemory::Units(1000)), &[0, 3])]
#[case::three_of_three_that_fit(DevicePolicy::Binpack, ask(3, RequestedMemory::Units(3001)), &[0, 1, 3])]
#[case::first(DevicePolicy::InOrder, units(1000), &[0])]
#[case::first_two_that_fit(DevicePolicy::InOrder, ask(2, RequestedMemory::Units(6000)), &[0, 3])]
#[case::most_left(DevicePolicy::LeastAllocated, units(1000), &[3])]
#[case::two_with_most_left(DevicePolicy::LeastAllocated, ask(2, RequestedMemory::Units(1000)), &[0, 3])]
#[case::most_used(DevicePolicy::MostAllocated, units(1000), &[2])]
#[case::two_with_most_used(DevicePolicy::MostAllocated, ask(2, RequestedMemory::Units(1000)), &[1, 2])]
#[case::all(DevicePolicy::Spread, ask(4, RequestedMemory::Units(3000)), &[0, 1, 2, 3])]
fn each_device_policy_takes_its_gpus(
    #[case] policy: DevicePolicy,
    #[case] request: ShareRequest,
    #[case] expected: &[u32],
) {
    let (fleet, id) = one_node(&[9000; 4]);
    let mut fleet = fleet.with_weights(memory_only());
    fill(&mut fleet, "n", &[7000, 5000, 3000, 9000]);
    let placement = fleet
        .choose_devices(id, &request, policy, Hints::Respect)
        .unwrap();
    assert_eq!(minors(&placement), expected);
}

#[rstest]
#[case::binpack(DevicePolicy::Binpack)]
#[case::spread(DevicePolicy::Spread)]
#[case::in_order(DevicePolicy::InOrder)]
#[case::most_left(DevicePolicy::LeastAllocated)]
#[case::most_used(DevicePolicy::MostAllocated)]
fn equal_gpus_are_taken_by_minor(#[case] policy: DevicePolicy) {
    let (fleet, id) = one_node(&[9000; 4]);
    assert_eq!(
        minors(
            &fleet
                .choose_devices(id, &units(1), policy, Hints::Respect)
                .unwrap()
        ),
        [0]
    );
    assert_eq!(
        minors(
            &fleet
                .choose_devices(id, &ask(3, RequestedMemory::Units(1)), policy, Hints::Respect)
                .unwrap()
        ),
        [0, 1, 2]
    );
}

/// The rest of the fuller GPU would be too small for any of the expected pods.
#[test]
fn fill_leaves_room_for_the_expected_pods() {
    let (mut fleet, id) = one_node(&[10_000; 2]);
    fill(&mut fleet, "n", &[7000, 10_000]);
    fleet.workload_mut().add(PodProfile {
        gpus: RequestedGpus::Share(units(6000)),
        host: HostAmounts::default(),
    });
    assert!(fleet.refresh_workload_model());
    let choose = |policy| fleet.choose_devices(id, &units(4000), policy, Hints::Respect);
    assert_eq!(minors(&choose(DevicePolicy::Fill).unwrap()), [1]);
    assert_eq!(minors(&choose(DevicePolicy::Binpack).unwrap()), [0]);
}

/// Half of the small GPU leaves less than half of the large one, though the large one has less free.
#[test]
fn binpack_compares_the_memory_left_after_a_ratio() {
    let (mut fleet, id) = one_node(&[8000, 16000]);
    fill(&mut fleet, "n", &[8000, 8001]);
    assert_eq!(
        minors(
            &fleet
                .choose_devices(id, &ratio(50), DevicePolicy::Binpack, Hints::Respect)
                .unwrap()
        ),
        [1]
    );
    assert_eq!(
        minors(
            &fleet
                .choose_devices(id, &ratio(50), DevicePolicy::Spread, Hints::Respect)
                .unwrap()
        ),
        [0]
    );
}

#[rstest]
#[case::fullest(NodePolicy::Binpack, &[10, 3, 8])]
#[case::emptiest(NodePolicy::Spread, &[0, 8, 3])]
#[case::most_left(NodePolicy::LeastAllocated, &[0, 8, 3])]
#[case::most_used(NodePolicy::MostAllocated, &[10, 3, 8])]
fn each_node_policy_ranks_nodes(#[case] node: NodePolicy, #[case] expected: &[u32]) {
    let mut fleet = Fleet::new();
    for (name, free) in [
        ("full", [2000, 0]),
        ("empty", [10000, 7000]),
        ("half", [3000, 4000]),
    ] {
        fleet.set_inventory(name, inventory(name, &[10000, 10000]));
        fill(&mut fleet, name, &free);
    }
    let fleet = fleet.with_weights(memory_only());
    let policies = Policies {
        node,
        device: DevicePolicy::Binpack,
    };
    let score = |name| {
        fleet.score(
            fleet.node_id(name).unwrap(),
            &units(2000),
            policies,
            Hints::Respect,
        )
    };
    let scores = ["full", "empty", "half"].map(score);
    let tenths = scores.map(|score| (score.parts_per_million() + 50_000) / 100_000);
    assert_eq!(tenths, expected);
}

/// Nodes that differ by less than a step still differ.
#[test]
fn scores_of_almost_equal_nodes_differ() {
    let mut fleet = Fleet::new();
    for (name, free) in [("a", 8000), ("b", 7999)] {
        fleet.set_inventory(name, inventory(name, &[10000]));
        fill(&mut fleet, name, &[free]);
    }
    let policies = Policies {
        node: NodePolicy::Binpack,
        device: DevicePolicy::Binpack,
    };
    let score = |name| fleet.score(fleet.node_id(name).unwrap(), &units(1), policies, Hints::Respect);
    assert!(score("b").parts_per_million() - score("a").parts_per_million() < 100_000);
    assert!(score("a") < score("b"));
}

/// The score is that of the GPU that the policy takes: half of the large GPU or of the small one.
#[test]
fn the_score_is_that_of_the_gpu_that_is_taken() {
    let (fleet, id) = one_node(&[10000, 30000]);
    let score = |device| {
        fleet
            .score(
                id,
                &ratio(50),
                Policies {
                    node: NodePolicy::Binpack,
                    device,
                },
                Hints::Respect,
            )
            .parts_per_million()
    };
    assert_eq!(score(DevicePolicy::Binpack), 125_000);
    assert_eq!(score(DevicePolicy::Spread), 375_000);
}

#[test]
fn unhealthy_gpus_do_not_count_in_scores() {
    let (mut fleet, id) = one_node(&[10000, 10000]);
    let mut devices = inventory("n", &[10000, 10000]);
    devices.gpus[1].healthy = false;
    fleet.set_inventory("n", devices);
    let score = |node| {
        fleet
            .score(
                id,
                &units(2500),
                Policies {
                    node,
                    ..Policies::default()
                },
                Hints::Respect,
            )
            .parts_per_million()
    };
    assert_eq!(score(NodePolicy::Binpack), 250_000);
    assert_eq!(score(NodePolicy::Spread), 750_000);
}

#[test]
fn a_request_that_does_not_fit_scores_zero() {
    let (fleet, id) = one_node(&[10000]);
    let fleet = fleet.with_weights(memory_only());
    for node in [
        NodePolicy::Binpack,
        NodePolicy::Spread,
        NodePolicy::LeastAllocated,
        NodePolicy::MostAllocated,
    ] {
        let policies = Policies {
            node,
            ..Policies::default()
        };
        assert_eq!(
            fleet
                .score(id, &units(10001), policies, Hints::Respect)
                .parts_per_million(),
            0
        );
    }
}

#[rstest]
#[case::fill("fill")]
#[case::binpack("binpack")]
#[case::spread("spread")]
#[case::least_allocated("least-allocated")]
#[case::most_allocated("most-allocated")]
fn policies_are_named_as_written(#[case] text: &str) {
    assert_eq!(text.parse::<DevicePolicy>().unwrap().to_string(), text);
    assert_eq!(text.parse::<NodePolicy>().unwrap().to_string(), text);
}

#[rstest]
#[case::other_word("pack")]
#[case::capital("Binpack")]
#[case::empty("")]
fn unknown_policies_are_refused_with_the_known_ones(#[case] text: &str) {
    let error = text.parse::<DevicePolicy>().unwrap_err().to_string();
    let choices = "fill, binpack, spread, in-order, least-allocated, most-allocated";
    assert_eq!(error, format!("{text:?} is no policy: choose one of {choices}"));
    let error = text.parse::<NodePolicy>().unwrap_err().to_string();
    assert!(
        error.ends_with("choose one of fill, binpack, spread, least-allocated, most-allocated"),
        "{error}"
    );
}

/// A whole GPU is one of the healthy ones, which are all that a score counts.
#[test]
fn a_whole_gpu_counts_fully_beside_unhealthy_ones() {
    let (mut fleet, id) = one_node(&[10000; 4]);
    let mut devices = inventory("n", &[10000; 4]);
    devices.serves_vendor = true;
    devices.gpus[2].healthy = false;
    devices.gpus[3].healthy = false;
    fleet.set_inventory("n", devices);
    let score = |node| {
        let policies = Policies {
            node,
            ..Policies::default()
        };
        let score = fleet.score(id, RequestedGpus::Whole(1), policies, Hints::Respect);
        score.parts_per_million()
    };
    assert_eq!(score(NodePolicy::Binpack), 500_000);
    assert_eq!(score(NodePolicy::Spread), 500_000);
}
