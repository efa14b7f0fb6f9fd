//! Plans: tables of edge cases, and random small fleets compared with every order of moves that there is.

mod exhaustion;
mod world;

use std::cell::Cell;

use placement::{
    Fleet, Goal, Hints, Limits, Move, NodeId, Obstacle, OwnerId, Plan, PlanError, Price, Reason, plan,
};
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use rstest::rstest;

use crate::build::GIB;
use exhaustion::{Best, best};
use world::{Aim, Pod, World, world};

/// A pod of this many GiB on a GPU of a node, which may move and has run for an hour.
fn pod(name: &str, node: usize, minor: u32, gib: u64) -> Pod {
    Pod {
        name: name.to_owned(),
        node,
        minors: vec![minor],
        gib,
        ..Pod::default()
    }
}

/// Nodes `n0`, `n1` and so on, each with these GPUs in GiB, and pods on them.
fn fleet(nodes: &[&[u64]], pods: Vec<Pod>) -> World {
    World {
        nodes: nodes.iter().map(|gpus| world::Machine::of(gpus)).collect(),
        pods,
        max_moves: 10,
        ..World::default()
    }
}

/// A plan in words: each move as `pod n0/[0]->n1/[1]`.
fn words(world: &World, fleet: &Fleet, plan: &Plan) -> Vec<String> {
    let name = |id: NodeId| {
        fleet
            .view(id)
            .map_or("gone", placement::NodeView::name)
            .to_owned()
    };
    let describe = |made: &Move| {
        let minors: Vec<u32> = made.placement.gpus().map(|share| share.minor).collect();
        let (from, to) = (name(made.from), name(made.to));
        format!("{} {from}/{:?}->{to}/{minors:?}", made.owner, made.from_gpus)
    };
    assert_eq!(plan.moves.len(), plan.price.n_restarts as usize, "{world:?}");
    plan.moves.iter().map(describe).collect()
}

fn planned(world: &World, aim: Aim) -> (Vec<String>, Plan) {
    let world = World { aim, ..world.clone() };
    let fleet = world.fleet();
    let plan = world.plan(&fleet).unwrap();
    (words(&world, &fleet, &plan), plan)
}

fn left(plan: &Plan) -> Vec<(&str, Obstacle)> {
    let left = plan.left.iter();
    left.map(|(owner, obstacle)| (owner.as_str(), obstacle.clone()))
        .collect()
}

#[test]
fn a_node_is_emptied_and_the_large_pods_go_first() {
    let pods = vec![
        pod("small", 0, 0, 4),
        pod("large", 0, 0, 8),
        pod("other", 1, 0, 4),
    ];
    let (moves, plan) = planned(&fleet(&[&[12], &[12], &[4]], pods), Aim::Node(0));
    assert_eq!(moves, ["large n0/[0]->n1/[0]", "small n0/[0]->n2/[0]"]);
    assert_eq!(
        (plan.is_reached, plan.left.len(), plan.gain_bytes),
        (true, 0, 12 * GIB)
    );
    let price = Price {
        n_restarts: 2,
        byte_seconds: u128::from(12 * GIB) * 3600,
    };
    assert_eq!(plan.price, price);
    assert_eq!(plan.price.total(), u128::from(14 * GIB) * 3600);
}

/// The successor of a pod on a GPU that becomes empty may take another GPU of the node, and none that becomes empty.
#[test]
fn gpus_are_emptied_onto_others_of_the_node_or_elsewhere() {
    let pods = vec![pod("a", 0, 0, 4), pod("b", 0, 1, 4), pod("c", 0, 2, 4)];
    let (moves, plan) = planned(&fleet(&[&[8, 8, 8]], pods), Aim::Gpus(0, vec![0, 1]));
    assert_eq!(moves, ["a n0/[0]->n0/[2]"]);
    assert_eq!(left(&plan), [("b", Obstacle::NoPlace)]);
    assert!(!plan.is_reached);
}

#[rstest]
#[case::no_controller(Obstacle::NoController)]
#[case::daemon_set(Obstacle::Controller("DaemonSet".into()))]
#[case::annotation(Obstacle::Annotation)]
#[case::budget(Obstacle::Budget { name: "pdb".into(), allowed: 0 })]
#[case::affinity(Obstacle::Affinity)]
#[case::volume(Obstacle::Volume)]
fn a_pod_that_must_not_move_is_left_with_the_reason(#[case] obstacle: Obstacle) {
    let stays = Pod {
        stays: Some(obstacle.clone()),
        ..pod("stays", 0, 0, 4)
    };
    let (moves, plan) = planned(
        &fleet(&[&[8], &[8]], vec![stays, pod("goes", 0, 0, 4)]),
        Aim::Node(0),
    );
    assert_eq!(moves, ["goes n0/[0]->n1/[0]"]);
    assert_eq!(left(&plan), [("stays", obstacle)]);
    assert!(plan.is_reached, "all that may move are gone");
}

#[test]
fn young_and_unknown_pods_stay() {
    let young = Pod {
        run_seconds: 299,
        ..pod("young", 0, 0, 1)
    };
    let unknown = Pod {
        is_unknown: true,
        ..pod("unknown", 0, 0, 1)
    };
    let (moves, plan) = planned(&fleet(&[&[8], &[8]], vec![young, unknown]), Aim::Node(0));
    assert!(moves.is_empty());
    assert_eq!(
        left(&plan),
        [("unknown", Obstacle::Unknown), ("young", Obstacle::Young)]
    );
}

#[test]
fn a_move_needs_cpu_and_memory_of_its_target() {
    let mut world = fleet(&[&[8], &[8], &[8]], vec![pod("a", 0, 0, 4)]);
    world.nodes[1].cpus = Some(0);
    assert_eq!(planned(&world, Aim::Node(0)).0, ["a n0/[0]->n2/[0]"]);
    world.nodes[2].cpus = Some(0);
    let (moves, plan) = planned(&world, Aim::Node(0));
    assert!(moves.is_empty());
    assert_eq!(left(&plan), [("a", Obstacle::NoPlace)]);
}

/// Each of the two pods has a place alone; both together have one CPU too few.
#[test]
fn earlier_moves_take_cpu_of_their_target() {
    let mut world = fleet(&[&[8], &[8]], vec![pod("a", 0, 0, 4), pod("b", 0, 0, 4)]);
    world.nodes[1].cpus = Some(1);
    let (moves, plan) = planned(&world, Aim::Node(0));
    assert_eq!(moves, ["a n0/[0]->n1/[0]"]);
    assert_eq!(left(&plan), [("b", Obstacle::NoPlace)]);
}

#[test]
fn a_pod_goes_to_its_own_nodes_alone() {
    let bound = Pod {
        nodes: Some(vec![0, 2]),
        ..pod("a", 0, 0, 4)
    };
    let pods = vec![bound, pod("packed", 1, 0, 2)];
    let (moves, _) = planned(&fleet(&[&[8], &[8], &[8]], pods), Aim::Node(0));
    assert_eq!(moves, ["a n0/[0]->n2/[0]"]);
}

#[test]
fn the_limit_of_moves_takes_the_cheapest_pods() {
    let pods = vec![pod("a", 0, 0, 4), pod("b", 0, 0, 2), pod("c", 0, 0, 1)];
    let mut world = fleet(&[&[8], &[8]], pods);
    world.max_moves = 2;
    let (moves, plan) = planned(&world, Aim::Node(0));
    assert_eq!(moves, ["c n0/[0]->n1/[0]", "b n0/[0]->n1/[0]"]);
    assert_eq!(
        (left(&plan), plan.is_reached),
        (vec![("a", Obstacle::Limit)], false)
    );
    world.max_moves = 0;
    assert!(planned(&world, Aim::Node(0)).0.is_empty());
}

/// Fragments of one node are joined: two GPUs are half full, and a whole one is needed.
#[test]
fn memory_in_pieces_comes_together_on_one_gpu() {
    let pods = vec![pod("a", 0, 0, 4), pod("b", 0, 1, 4)];
    let (moves, plan) = planned(&fleet(&[&[8, 8]], pods), Aim::Free(8, 1));
    assert_eq!(moves, ["a n0/[0]->n0/[1]"]);
    assert_eq!((plan.is_reached, plan.gain_bytes), (true, 4 * GIB));
}

#[rstest]
#[case::free_already(7, 1, &[], true)]
#[case::the_cheaper_of_two_pods(10, 1, &["b n0/[1]->n2/[0]"], true)]
#[case::two_gpus(10, 2, &["a n0/[0]->n1/[0]", "b n0/[1]->n2/[0]"], true)]
fn the_least_price_is_found(
    #[case] gib: u64,
    #[case] n_gpus: usize,
    #[case] expected: &[&str],
    #[case] reached: bool,
) {
    let pods = vec![pod("a", 0, 0, 4), pod("b", 0, 1, 3)];
    let (moves, plan) = planned(&fleet(&[&[10, 10], &[4], &[3]], pods), Aim::Free(gib, n_gpus));
    assert_eq!(
        (moves, plan.is_reached),
        (expected.iter().map(|m| (*m).to_owned()).collect(), reached)
    );
}

/// The best place of the successor is the place that it has left, so that its move frees nothing.
#[test]
fn a_pod_that_would_come_back_is_left() {
    let (moves, plan) = planned(
        &fleet(&[&[8], &[16]], vec![pod("a", 0, 0, 4)]),
        Aim::FreeOn(0, 8, 1),
    );
    assert!(moves.is_empty());
    assert_eq!(
        (left(&plan), plan.is_reached),
        (vec![("a", Obstacle::Returns)], false)
    );
}

/// A pod that holds several GPUs pays once, and its move frees all of them.
#[test]
fn a_pod_on_two_gpus_frees_both() {
    let wide = Pod {
        minors: vec![0, 1],
        ..pod("wide", 0, 0, 4)
    };
    let (moves, plan) = planned(&fleet(&[&[8, 8], &[4, 4]], vec![wide]), Aim::Free(8, 2));
    assert_eq!(moves, ["wide n0/[0, 1]->n1/[0, 1]"]);
    assert_eq!((plan.price.n_restarts, plan.gain_bytes), (1, 8 * GIB));
    assert_eq!(plan.price.byte_seconds, u128::from(8 * GIB) * 3600);
}

#[test]
fn closed_gpus_are_neither_targets_nor_freed() {
    let mut world = fleet(&[&[8, 8], &[8]], vec![pod("a", 0, 0, 4)]);
    world.nodes[1].closed = vec![0];
    let (moves, _) = planned(&world, Aim::Gpus(0, vec![0]));
    assert_eq!(moves, ["a n0/[0]->n0/[1]"]);
    let (moves, plan) = planned(&world, Aim::FreeOn(1, 8, 1));
    assert!(moves.is_empty() && !plan.is_reached);
}

/// The first move empties a GPU of 8 GiB, the second of 4; a third would gain nothing.
#[test]
fn joining_makes_the_largest_gain_first() {
    let stays_there = |pod: Pod| Pod {
        nodes: Some(vec![pod.node]),
        ..pod
    };
    let pods = vec![
        pod("a", 0, 0, 4),
        pod("b", 0, 1, 4),
        stays_there(pod("c", 1, 0, 2)),
        stays_there(pod("d", 1, 1, 2)),
        pod("e", 2, 0, 1),
    ];
    let world = fleet(&[&[8, 8], &[4, 4], &[1]], pods);
    let (moves, plan) = planned(&world, Aim::Join);
    assert_eq!(moves, ["a n0/[0]->n0/[1]", "c n1/[0]->n1/[1]"]);
    assert_eq!((plan.gain_bytes, plan.is_reached), (6 * GIB, true));
    let one = World {
        max_moves: 1,
        ..world
    };
    assert_eq!(planned(&one, Aim::Join).1.gain_bytes, 4 * GIB);
}

#[test]
fn goals_that_no_fleet_can_reach_are_refused() {
    let limits = Limits {
        max_moves: 10,
        min_run_seconds: 300,
    };
    let empty = Fleet::new();
    assert_eq!(plan(&empty, Goal::Join, &[], limits).unwrap().moves, []);
    let free = |bytes, n_gpus, nodes| Goal::Free { bytes, n_gpus, nodes };
    let no_node = |known: &str| Err(PlanError::NoNode(known.to_owned()));
    assert_eq!(
        plan(&empty, free(1, 1, &[]), &[], limits),
        no_node("no node has any")
    );
    let world = fleet(&[&[8, 4], &[]], Vec::new());
    let fleet = world.fleet();
    let (nodes, without_gpus) = ([world.id(&fleet, 0)], [world.id(&fleet, 1)]);
    let of = |goal| plan(&fleet, goal, &[], limits);
    assert_eq!(
        plan(&empty, Goal::EmptyNode(nodes[0]), &[], limits),
        Err(PlanError::NoGpu)
    );
    assert_eq!(of(Goal::EmptyNode(without_gpus[0])), Err(PlanError::NoGpu));
    assert_eq!(of(free(1, 1, &without_gpus)), no_node("those with GPUs are n0"));
    let known = vec![0, 1];
    let none_named = PlanError::NoGpuNamed { known: known.clone() };
    assert_eq!(of(Goal::EmptyGpus(nodes[0], &[])), Err(none_named));
    let unknown = PlanError::UnknownGpu { minor: 7, known };
    assert_eq!(of(Goal::EmptyGpus(nodes[0], &[0, 7])), Err(unknown));
    let (bytes, largest) = (8 * GIB + 1, 8 * GIB);
    let nothing = PlanError::Nothing { largest };
    assert_eq!(of(free(0, 1, &nodes)), Err(nothing.clone()));
    assert_eq!(of(free(1, 0, &nodes)), Err(nothing));
    assert_eq!(
        of(free(bytes, 1, &nodes)),
        Err(PlanError::TooLarge { bytes, largest })
    );
    let (n_gpus, bytes, most) = (2, 5 * GIB, 1);
    assert_eq!(
        of(free(bytes, 2, &nodes)),
        Err(PlanError::TooMany { n_gpus, bytes, most })
    );
    let nothing_to_do = of(Goal::EmptyNode(nodes[0])).unwrap();
    assert!(nothing_to_do.is_reached && nothing_to_do.moves.is_empty());
}

/// Far more holders than are tried exactly: all have room, and all move once.
#[test]
fn a_node_with_many_holders_is_emptied() {
    let pods = (0..64)
        .map(|at| pod(&format!("p{at:02}"), 0, at % 8, u64::from(at % 5 + 1)))
        .collect();
    let mut world = fleet(&[&[24; 8], &[24; 8], &[24; 8]], pods);
    world.max_moves = 100;
    let (moves, plan) = planned(&world, Aim::Node(0));
    assert_eq!((moves.len(), plan.is_reached, plan.left), (64, true, vec![]));
}

/// Makes the moves of a plan on the fleet: each goes to the best place by the engine, and no invariant breaks.
fn replay(world: &World, fleet: &mut Fleet, plan: &Plan) -> Result<(), TestCaseError> {
    world.close(fleet);
    proptest::prop_assert_eq!(fleet.check(), []);
    for made in &plan.moves {
        let at = world
            .pods
            .iter()
            .position(|pod| pod.name == made.owner.as_str())
            .unwrap();
        fleet.release(made.owner.as_str());
        fleet.clear_host_use(made.owner.as_str());
        let place = exhaustion::place(world, fleet, at);
        proptest::prop_assert_eq!(place.as_ref(), Some(&(made.to, made.placement.clone())));
        let request = world.request(at);
        proptest::prop_assert_eq!(fleet.fit(made.to, request, Hints::Respect), Ok::<(), Reason>(()));
        fleet.reserve(&made.owner, made.to, &made.placement).unwrap();
        let node = fleet.view(made.to).unwrap().name().to_owned();
        fleet.set_host_use(&made.owner, &node, request.host, false);
        proptest::prop_assert_eq!(fleet.check(), []);
    }
    Ok(())
}

/// Plans reach their goals exactly when some order of moves does, for the least price; each move has a place, and breaks nothing.
#[test]
fn plans_are_as_good_as_exhaustion() {
    let (n_reached, n_moves, n_unreached) = (Cell::new(0_u32), Cell::new(0), Cell::new(0_u32));
    let mut runner = TestRunner::new(Config {
        cases: 10_000,
        failure_persistence: None,
        ..Config::default()
    });
    let outcome = runner.run(&world(0..=8), |world| {
        let mut fleet = world.fleet();
        let found = world.plan(&fleet);
        proptest::prop_assert_eq!(&found, &world.plan(&fleet), "the same plan twice");
        let Ok(found) = found else {
            proptest::prop_assert!(!best(&world).is_reached, "{:?}", found);
            return Ok(());
        };
        let mut reversed = world.clone();
        reversed.is_reversed = true;
        let other = reversed.fleet();
        let again = reversed.plan(&other).unwrap();
        proptest::prop_assert_eq!(words(&world, &fleet, &found), words(&world, &other, &again));
        replay(&world, &mut fleet, &found)?;
        world.check_left(&found)?;
        if world.aim == Aim::Join {
            proptest::prop_assert_eq!(
                world.joined(&fleet) - world.joined(&world.fleet()),
                found.gain_bytes
            );
            return Ok(());
        }
        let Best {
            is_reached,
            price,
            most_moves,
        } = best(&world);
        proptest::prop_assert_eq!(found.is_reached, is_reached, "{:?}", found);
        if !matches!(world.aim, Aim::Free(..)) {
            proptest::prop_assert_eq!(found.moves.len(), most_moves);
        }
        if is_reached {
            proptest::prop_assert_eq!(found.price.total(), price);
            n_reached.set(n_reached.get() + 1);
            n_moves.set(n_moves.get() + found.moves.len());
        } else {
            n_unreached.set(n_unreached.get() + 1);
        }
        Ok(())
    });
    outcome.unwrap();
    let counts = (n_reached.get(), n_moves.get(), n_unreached.get());
    assert!(
        counts.0 > 2000 && counts.1 > 2000 && counts.2 > 1000,
        "{counts:?}"
    );
}

/// Of more holders the moves are not the best for certain, but each has a place and breaks nothing.
#[test]
fn plans_for_many_holders_can_be_made() {
    let mut runner = TestRunner::new(Config {
        cases: 1000,
        failure_persistence: None,
        ..Config::default()
    });
    let outcome = runner.run(&world(9..=40), |world| {
        let mut fleet = world.fleet();
        let Ok(found) = world.plan(&fleet) else {
            return Ok(());
        };
        proptest::prop_assert_eq!(&found, &world.plan(&fleet).unwrap(), "the same plan twice");
        replay(&world, &mut fleet, &found)?;
        world.check_left(&found)
    });
    outcome.unwrap();
}

/// A plan of few moves orders few of the nodes.
#[test]
fn the_best_of_many_nodes_takes_the_successor() {
    let mut runner = TestRunner::new(Config {
        cases: 300,
        failure_persistence: None,
        ..Config::default()
    });
    let outcome = runner.run(&world(3..=12), |world| {
        let world = world.with_copies(6);
        let mut fleet = world.fleet();
        world
            .plan(&fleet)
            .map_or(Ok(()), |found| replay(&world, &mut fleet, &found))
    });
    outcome.unwrap();
}

/// Room that is kept for a pod which is not bound yet is no place for a successor.
#[test]
fn hints_count_on_targets() {
    let world = World {
        aim: Aim::Node(0),
        ..fleet(&[&[8], &[8]], vec![pod("a", 0, 0, 4)])
    };
    let mut fleet = world.fleet();
    let target = world.id(&fleet, 1);
    let kept = fleet.choose_devices(
        target,
        world.request(0),
        placement::DevicePolicy::Fill,
        Hints::Respect,
    );
    assert!(fleet.hint(&"waits".into(), target, &kept.clone().unwrap()));
    assert_eq!(world.plan(&fleet).unwrap().moves.len(), 1, "4 GiB are left");
    fleet.reserve(&"bound".into(), target, &kept.unwrap()).unwrap();
    let plan = world.plan(&fleet).unwrap();
    assert_eq!(left(&plan), [("a", Obstacle::NoPlace)]);
}

/// A pod with a whole GPU of the vendor's name goes to a whole GPU, and not to one that another pod shares.
#[test]
fn whole_gpus_move_to_whole_gpus() {
    let mut fleet = Fleet::new();
    for name in ["n0", "n1"] {
        let mut devices = crate::build::inventory(name, &[8192, 8192]);
        devices.serves_vendor = true;
        fleet.set_inventory(name, devices);
    }
    let [from, to] = ["n0", "n1"].map(|name| fleet.node_id(name).unwrap());
    let request = placement::NodeRequest::from(placement::RequestedGpus::Whole(1));
    let policies = placement::Policies::default();
    let placement = fleet.choose_devices(from, request, policies.device, Hints::Respect);
    fleet.reserve(&"whole".into(), from, &placement.unwrap()).unwrap();
    crate::build::place(&mut fleet, "share", to, &crate::build::units(1)).unwrap();
    let holder = placement::Holder {
        request,
        ..World::default().holder_named("whole")
    };
    let limits = Limits {
        max_moves: 10,
        min_run_seconds: 300,
    };
    let found = plan(&fleet, Goal::EmptyNode(from), &[holder], limits).unwrap();
    let [made] = &found.moves[..] else {
        panic!("{found:?}")
    };
    assert_eq!((made.to, crate::build::minors(&made.placement)), (to, vec![1]));
    assert!(made.placement.is_vendor && found.is_reached);
}

/// A holder is named once by its UID, wherever its node is in the fleet.
#[test]
fn an_owner_without_holding_does_not_matter() {
    let world = fleet(&[&[8]], Vec::new());
    let fleet = world.fleet();
    let mut gone = world.holder_named("gone");
    gone.owner = OwnerId::from("gone");
    let limits = Limits {
        max_moves: 1,
        min_run_seconds: 0,
    };
    let plan = plan(&fleet, Goal::EmptyNode(world.id(&fleet, 0)), &[gone], limits).unwrap();
    assert!(plan.is_reached && plan.left.is_empty());
}
