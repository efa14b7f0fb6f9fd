//! Victims by device: hand-made cases, and small nodes compared with every set of victims that there is.

use std::cmp::Reverse;

use placement::{
    DevicePolicy, DeviceRef, DeviceType, Evictable, Fleet, HeldMemory, HeldPart, Hints, Holdings, Memory,
    NodeId, NodeRequest, OwnerId, Preemption, Reason, RequestedGpus, RequestedMemory, ShareRequest, Victims,
};
use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use rstest::rstest;

use crate::build::{GIB, evictable, gpu, one_node};

/// A pod of a test with its holdings, priority and budgets.
#[derive(Clone, Debug)]
struct Running {
    /// Minors and GiB.
    shares: Vec<(u32, u64)>,
    core: u32,
    pod: Evictable,
}

fn running(name: &str, priority: i32, shares: &[(u32, u64)]) -> Running {
    Running {
        shares: shares.to_vec(),
        core: 0,
        pod: evictable(name, priority),
    }
}

impl Running {
    fn holding(&self) -> Holdings {
        let share = |(minor, gib): &(u32, u64)| {
            let memory = HeldMemory::Exact(Memory::from_bytes(gib * GIB));
            HeldPart {
                memory,
                core: self.core,
                slots: 1,
                ..HeldPart::new(DeviceType::Gpu, DeviceRef::Minor(*minor))
            }
        };
        Holdings::from(self.shares.iter().map(share).collect::<Vec<_>>())
    }

    fn leaving(mut self) -> Self {
        self.pod.is_leaving = true;
        self
    }

    fn since(mut self, started: i64) -> Self {
        self.pod.started = started;
        self
    }

    fn in_budgets(mut self, budgets: &[usize]) -> Self {
        self.pod.budgets = budgets.to_vec();
        self
    }

    fn freeing(mut self, sum: u64) -> Self {
        self.pod.frees = vec![sum];
        self
    }

    fn forced(mut self) -> Self {
        self.pod.is_forced = true;
        self
    }
}

/// A node of GPUs of 80 GiB on which these pods run.
fn node_of(n_gpus: usize, pods: &[Running]) -> (Fleet, NodeId) {
    let (mut fleet, id) = one_node(&vec![80 << 10; n_gpus]);
    for pod in pods.iter().filter(|pod| !pod.shares.is_empty()) {
        fleet.hold(&pod.pod.owner, "n", pod.holding());
    }
    (fleet, id)
}

fn gib(devices: u32, gib: u64) -> ShareRequest {
    ShareRequest {
        devices,
        memory: RequestedMemory::Bytes(gib * GIB),
        core: 0,
        slots: 1,
    }
}

fn preempt(
    n_gpus: usize,
    pods: &[Running],
    request: &ShareRequest,
    budgets: &[i64],
    must_free: &[u64],
) -> Option<Victims> {
    let (fleet, id) = node_of(n_gpus, pods);
    let evictable: Vec<Evictable> = pods.iter().map(|pod| pod.pod.clone()).collect();
    fleet.preempt(
        id,
        NodeRequest::from(request),
        Preemption {
            pods: &evictable,
            budgets,
            must_free,
            outranked: &[],
        },
    )
}

fn names(victims: Option<Victims>) -> Option<Vec<String>> {
    victims.map(|victims| {
        victims
            .owners
            .iter()
            .map(|owner| owner.as_str().to_owned())
            .collect()
    })
}

/// kube-scheduler takes any four of the 64 pods: their sum suffices. Here they are on one GPU.
#[test]
fn victims_are_four_pods_of_one_gpu() {
    let pods: Vec<Running> = (0..64)
        .map(|at| running(&format!("p{at:02}"), 0, &[(at / 8, 10)]))
        .collect();
    let victims = preempt(8, &pods, &gib(1, 40), &[], &[]).unwrap();
    assert_eq!(victims.owners.len(), 4);
    let gpus: std::collections::BTreeSet<usize> = victims
        .owners
        .iter()
        .map(|owner| owner.as_str()[1..].parse::<usize>().unwrap() / 8)
        .collect();
    assert_eq!(gpus.len(), 1, "{victims:?}");
}

#[rstest]
#[case::nothing_is_needed(&[running("a", 0, &[(0, 20)])], Some(vec![]))]
#[case::nothing_helps(&[], Some(vec![]))]
#[case::the_least_important(&[running("a", 5, &[(0, 80)]), running("b", 3, &[(1, 80)])], Some(vec!["b"]))]
#[case::one_of_many(&[running("a", 0, &[(0, 40)]), running("b", 0, &[(0, 40)]), running("c", 0, &[(1, 80)])], Some(vec!["c"]))]
#[case::the_younger(&[running("a", 0, &[(0, 80)]).since(1), running("b", 0, &[(1, 80)]).since(2)], Some(vec!["b"]))]
#[case::a_pod_that_is_leaving(&[running("a", 9, &[(0, 80)]).leaving(), running("b", 0, &[(1, 80)])], Some(vec!["a"]))]
#[case::a_pod_that_is_leaving_and_one_more(
    &[running("a", 0, &[(0, 40)]).leaving(), running("b", 0, &[(0, 40)]), running("c", 0, &[(1, 40)]), running("d", 0, &[(1, 40)])],
    Some(vec!["a", "b"])
)]
#[case::a_budget_forbids(&[running("a", 0, &[(0, 80)]).in_budgets(&[0]), running("b", 5, &[(1, 80)])], Some(vec!["b"]))]
#[case::a_budget_allows(&[running("a", 0, &[(0, 80)]).in_budgets(&[1]), running("b", 5, &[(1, 80)])], Some(vec!["a"]))]
#[case::a_budget_allows_one(
    &[running("a", 0, &[(0, 40)]).in_budgets(&[1]), running("b", 0, &[(0, 40)]).in_budgets(&[1]), running("c", 0, &[(1, 40)]).in_budgets(&[1]), running("d", 1, &[(1, 40)])],
    Some(vec!["d", "c"])
)]
#[case::a_pair_of_gpus_is_freed_for_the_price_of_one(&[running("a", 0, &[(0, 80), (1, 80)])], Some(vec!["a"]))]
fn two_gpus(#[case] pods: &[Running], #[case] expected: Option<Vec<&str>>) {
    let expected = expected.map(|expected| expected.into_iter().map(str::to_owned).collect());
    assert_eq!(names(preempt(2, pods, &gib(1, 60), &[0, 1], &[])), expected);
}

/// Of nine pods the search does not try every set. Those on GPU 1 come first only in the order of that GPU.
#[test]
fn the_order_of_each_gpu_is_tried() {
    let high = (0..5).map(|at| running(&format!("high-{at}"), 5, &[(0, 16)]));
    let low = (0..4).map(|at| running(&format!("low-{at}"), 0, &[(1, 20)]).in_budgets(&[0]));
    let pods: Vec<Running> = high.chain(low).collect();
    let victims = names(preempt(2, &pods, &gib(1, 80), &[4], &[])).unwrap();
    assert_eq!(victims, ["low-0", "low-1", "low-2", "low-3"]);
}

#[test]
fn no_victims_where_no_eviction_helps() {
    let stays = running("a", 0, &[(0, 80)]);
    let (fleet, id) = node_of(1, std::slice::from_ref(&stays));
    let other = [running("b", 0, &[]).pod];
    let preemption = Preemption {
        pods: &other,
        budgets: &[],
        must_free: &[],
        outranked: &[],
    };
    assert_eq!(
        fleet.preempt(id, NodeRequest::from(&gib(1, 60)), preemption),
        None
    );
}

#[test]
fn cpu_sums_and_terminating_pods_count() {
    let pods = [
        running("a", 0, &[(0, 80)]).freeing(1),
        running("b", 0, &[(1, 80)]).freeing(3),
        running("plain", 7, &[]).forced().freeing(1),
    ];
    assert_eq!(
        names(preempt(2, &pods, &gib(1, 60), &[], &[1])),
        Some(vec!["plain".to_owned(), "a".to_owned()])
    );
    assert_eq!(
        names(preempt(2, &pods, &gib(1, 60), &[], &[4])),
        Some(vec!["plain".to_owned(), "b".to_owned()])
    );
    assert_eq!(preempt(2, &pods, &gib(1, 60), &[], &[6]), None);
}

#[test]
fn victims_free_several_gpus_at_once() {
    let pods: Vec<Running> = (0..8)
        .map(|at| running(&format!("p{at}"), i32::try_from(at % 4).unwrap(), &[(at, 80)]))
        .collect();
    assert_eq!(
        names(preempt(8, &pods, &gib(2, 80), &[], &[])),
        Some(vec!["p0".to_owned(), "p4".to_owned()])
    );
    let whole = NodeRequest::from(RequestedGpus::All { slots: 1 });
    let (fleet, id) = node_of(8, &pods);
    let evictable: Vec<Evictable> = pods.iter().map(|pod| pod.pod.clone()).collect();
    let preemption = Preemption {
        pods: &evictable,
        budgets: &[],
        must_free: &[],
        outranked: &[],
    };
    assert!(fleet.preempt(id, whole, preemption).is_some());
}

#[test]
fn a_hinted_pod_keeps_its_room_unless_its_priority_is_lower() {
    let (mut fleet, id) = node_of(1, &[]);
    let hinted = OwnerId::from("expected");
    let placement = fleet
        .choose_devices(id, &gib(1, 40), DevicePolicy::Binpack, Hints::Respect)
        .unwrap();
    assert!(fleet.hint(&hinted, id, &placement));
    let preemption = Preemption {
        pods: &[],
        budgets: &[],
        must_free: &[],
        outranked: &[],
    };
    assert_eq!(
        fleet.preempt(id, NodeRequest::from(&gib(1, 60)), preemption),
        None
    );
    let outranked = Preemption {
        outranked: &[hinted],
        ..preemption
    };
    assert_eq!(
        fleet
            .preempt(id, NodeRequest::from(&gib(1, 60)), outranked)
            .unwrap()
            .owners,
        []
    );
}

/// Speed of one node as large and as full as they come, without a clock: comparisons are bounded, so this ends soon.
#[test]
fn the_search_on_a_full_node_of_16_gpus_is_bounded() {
    let pods: Vec<Running> = (0..320)
        .map(|at| {
            running(
                &format!("p{at:03}"),
                i32::try_from(at % 7).unwrap(),
                &[(at % 16, 4)],
            )
        })
        .collect();
    let victims = preempt(16, &pods, &gib(4, 80), &[], &[]).unwrap();
    assert_eq!(victims.owners.len(), 80);
}

/// Small nodes: up to three GPUs, `n_pods` pods of up to two shares, three priorities, two budgets.
fn small(
    n_pods: std::ops::RangeInclusive<usize>,
) -> impl Strategy<Value = (usize, Vec<Running>, ShareRequest, Vec<i64>)> {
    let pods = (1..=3_usize).prop_flat_map(move |n_gpus| {
        let minors: Vec<u32> = (0..u32::try_from(n_gpus).unwrap()).collect();
        let shares = (
            subsequence(minors, 1..=n_gpus.min(2)),
            select(vec![10_u64, 20, 30, 50]),
            select(vec![0_u32, 20, 50]),
        );
        let rank = (
            0..3_i32,
            0..4_i64,
            proptest::bool::weighted(0.1),
            subsequence(vec![0_usize, 1], 0..=2),
        );
        let pod = (shares, rank).prop_map(
            |((minors, size, core), (priority, started, is_leaving, budgets))| {
                let shares: Vec<(u32, u64)> = minors.into_iter().map(|minor| (minor, size)).collect();
                let mut pod = running("", priority, &shares).since(started).in_budgets(&budgets);
                pod.core = core;
                pod.pod.is_leaving = is_leaving;
                pod
            },
        );
        (Just(n_gpus), proptest::collection::vec(pod, n_pods.clone()))
    });
    let request = (
        1..=2_u32,
        select(vec![20_u64, 40, 70, 80]),
        select(vec![0_u32, 50, 100]),
    );
    (pods, request, proptest::collection::vec(0..3_i64, 2)).prop_map(
        |((n_gpus, drawn), (devices, size, core), budgets)| {
            let mut pods: Vec<Running> = Vec::new();
            for (at, mut pod) in drawn.into_iter().enumerate() {
                pod.pod.owner = OwnerId::from(format!("p{at}"));
                pods.push(pod);
                if !is_sound(n_gpus, &pods) || pods.len() > 11 {
                    pods.pop();
                }
            }
            (
                n_gpus,
                pods,
                ShareRequest {
                    core,
                    ..gib(devices, size)
                },
                budgets,
            )
        },
    )
}

/// Returns true if the request fits once these pods are gone.
fn fits_without(
    n_gpus: usize,
    pods: &[Running],
    request: &ShareRequest,
    gone: impl Fn(&Running) -> bool,
) -> bool {
    let left: Vec<Running> = pods.iter().filter(|pod| !gone(pod)).cloned().collect();
    let (fleet, id) = node_of(n_gpus, &left);
    assert_eq!(fleet.check(), [], "the scene itself is sound, or says why not");
    fleet.fit(id, request, Hints::Respect).is_ok()
}

/// Violations, highest priority, sum of priorities, victims that are paid for: as kube-scheduler compares.
type Cost = (usize, Option<i32>, i64, usize);

fn cost(gone: &[&Running], budgets: &[i64]) -> Cost {
    let mut order = gone.to_vec();
    order.sort_by_key(|pod| (Reverse(pod.pod.priority), pod.pod.started, pod.pod.owner.clone()));
    let mut allowed = budgets.to_vec();
    let mut n_violations = 0;
    for pod in &order {
        pod.pod.budgets.iter().for_each(|budget| allowed[*budget] -= 1);
        n_violations += usize::from(pod.pod.budgets.iter().any(|budget| allowed[*budget] < 0));
    }
    let paid = || order.iter().filter(|pod| !pod.pod.is_leaving);
    let raised = |pod: &Running| i64::from(pod.pod.priority) - i64::from(i32::MIN);
    (
        n_violations,
        paid().map(|pod| pod.pod.priority).max(),
        paid().map(|pod| raised(pod)).sum(),
        paid().count(),
    )
}

/// Returns true if no GPU holds more than its capacity, as on a real node.
fn is_sound(n_gpus: usize, pods: &[Running]) -> bool {
    (0..n_gpus).all(|minor| {
        let of = |pod: &Running| {
            pod.shares
                .iter()
                .filter(|(at, _)| *at as usize == minor)
                .map(|(_, gib)| *gib)
                .sum::<u64>()
        };
        let core = |pod: &Running| if of(pod) > 0 { pod.core } else { 0 };
        pods.iter().map(of).sum::<u64>() <= 80 && pods.iter().map(core).sum::<u32>() <= 100
    })
}

/// The cost of the victims found, and that of the best of all sets; both absent if no set helps.
///
/// Asserts that evicting the victims helps, and that none of them could stay.
fn compared(
    n_gpus: usize,
    pods: &[Running],
    request: &ShareRequest,
    budgets: &[i64],
) -> (Option<Cost>, Option<Cost>) {
    let helps = |gone: &[&Running]| {
        fits_without(n_gpus, pods, request, |pod| {
            gone.iter().any(|gone| gone.pod.owner == pod.pod.owner)
        })
    };
    let members = |bits: u32| {
        pods.iter()
            .enumerate()
            .filter(move |(at, _)| bits & (1 << at) != 0)
            .map(|(_, pod)| pod)
    };
    let sets = (0..1_u32 << pods.len()).map(|bits| members(bits).collect::<Vec<_>>());
    let best = sets
        .filter(|gone| helps(gone))
        .map(|gone| cost(&gone, budgets))
        .min();
    let victims = preempt(n_gpus, pods, request, budgets, &[]);
    let found = victims.map(|victims| {
        let gone: Vec<&Running> = pods
            .iter()
            .filter(|pod| victims.owners.contains(&pod.pod.owner))
            .collect();
        assert!(helps(&gone), "{victims:?}");
        for spared in &gone {
            let without: Vec<&Running> = gone
                .iter()
                .copied()
                .filter(|pod| pod.pod.owner != spared.pod.owner)
                .collect();
            assert!(!helps(&without), "{} could stay", spared.pod.owner);
        }
        let found = cost(&gone, budgets);
        assert_eq!(victims.n_violations, found.0);
        found
    });
    (found, best)
}

proptest! {
    /// The search finds victims exactly if some set of victims helps, and no other set is better.
    #[test]
    fn the_search_is_exact_on_small_nodes((n_gpus, pods, request, budgets) in small(0..=6)) {
        let (found, best) = compared(n_gpus, &pods, &request, &budgets);
        prop_assert_eq!(found, best);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// A search that does not try every set finds victims in the same cases, and violates no more budgets than it must.
    #[test]
    fn a_bounded_search_finds_victims_in_the_same_cases((n_gpus, pods, request, budgets) in small(12..=16)) {
        let (found, best) = compared(n_gpus, &pods, &request, &budgets);
        prop_assert_eq!(found.is_some(), best.is_some());
        let (without_budgets, best) = compared(n_gpus, &without_budgets(&pods), &request, &budgets);
        prop_assert_eq!(without_budgets.map(|cost| cost.1), best.map(|cost| cost.1), "the highest priority");
    }
}

fn without_budgets(pods: &[Running]) -> Vec<Running> {
    pods.iter().cloned().map(|pod| pod.in_budgets(&[])).collect()
}

#[test]
fn unhealthy_gpus_are_not_freed() {
    let pods = [running("a", 0, &[(0, 80)]), running("b", 5, &[(1, 80)])];
    let (mut fleet, _) = node_of(2, &pods);
    let mut inventory = crate::build::inventory("n", &[80 << 10, 80 << 10]);
    inventory.gpus[0] = placement::Device {
        healthy: false,
        ..gpu("n", 0, 80 * GIB)
    };
    fleet.set_inventory("n", inventory);
    let evictable: Vec<Evictable> = pods.iter().map(|pod| pod.pod.clone()).collect();
    let preemption = Preemption {
        pods: &evictable,
        budgets: &[],
        must_free: &[],
        outranked: &[],
    };
    let id = fleet.node_id("n").unwrap();
    assert_eq!(
        names(fleet.preempt(id, NodeRequest::from(&gib(1, 60)), preemption)),
        Some(vec!["b".to_owned()])
    );
}

/// The devices on which a hint keeps the room that victims are still holding.
#[test]
fn devices_are_chosen_as_if_victims_had_gone() {
    let (mut fleet, id) = one_node(&[80 << 10, 80 << 10]);
    for running in [running("a", 0, &[(0, 50)]), running("b", 0, &[(1, 50)])] {
        fleet.hold(&running.pod.owner, "n", running.holding());
    }
    let share = ShareRequest {
        devices: 1,
        memory: RequestedMemory::Bytes(60 * GIB),
        core: 0,
        slots: 1,
    };
    let request = NodeRequest {
        gpus: RequestedGpus::Share(share),
        ..NodeRequest::default()
    };
    let choose = |fleet: &Fleet, gone: &[OwnerId]| {
        fleet.choose_devices_among(id, request, DevicePolicy::Fill, None, (gone, &["new".into()]))
    };
    assert_eq!(choose(&fleet, &[]).map(drop), Err(Reason::Memory));
    let chosen = choose(&fleet, &["b".into()]).unwrap();
    assert_eq!(chosen.shares[0].minor, 1);
    // The hint keeps the free part at once, and the rest as soon as the victim has gone.
    let small = ShareRequest {
        memory: RequestedMemory::Bytes(GIB),
        ..share
    };
    assert!(fleet.hint(&"new".into(), id, &chosen));
    fleet.release("a");
    hold_all(&mut fleet, 0);
    assert_eq!(fleet.fit(id, &small, Hints::Respect), Err(Reason::Memory));
    fleet.release("b");
    let medium = ShareRequest {
        memory: RequestedMemory::Bytes(20 * GIB),
        ..share
    };
    assert_eq!(
        fleet.fit(id, &medium, Hints::Respect),
        Ok(()),
        "20 of 80 GiB are not kept"
    );
    assert_eq!(fleet.check(), []);
}

/// Fills a GPU.
fn hold_all(fleet: &mut Fleet, minor: u32) {
    let filler = running("filler", 0, &[(minor, 80)]);
    fleet.hold(&filler.pod.owner, "n", filler.holding());
}
