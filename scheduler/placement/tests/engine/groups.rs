//! Groups: room for all members in one domain is found exactly when trying everything finds some, and never spans two domains.

use std::collections::BTreeSet;

use placement::{
    Constraints, Device, DeviceAttributes, DeviceConstraint, DeviceLocation, DevicePolicy, DeviceType, Fleet,
    GroupRequest, GroupRoom, GroupSearch, Hints, HostAmounts, Inventory, LinkGroup, MAX_GROUP, NodePolicy,
    NodeRequest, OwnerId, Partition, PartitionTable, PodProfile, Policies, RequestedGpus, RequestedMemory,
    Scope, ShareRequest, SharedDomain,
};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use rstest::rstest;

use crate::build::{MIB, ask, fill, gpu, inventory, minors, on_minor, ratio, units};
use crate::topology::{fleet_of, gpu_at};

const POLICIES: Policies = Policies {
    node: NodePolicy::Binpack,
    device: DevicePolicy::Binpack,
};

fn group<'a>(member: impl Into<NodeRequest<'a>>, n_members: usize, domain: SharedDomain) -> GroupRequest<'a> {
    GroupRequest {
        member: member.into(),
        n_members,
        n_in_link_group: n_members,
        domain,
        bound: &[],
        policies: POLICIES,
    }
}

fn room(fleet: &Fleet, request: &GroupRequest<'_>) -> Result<GroupRoom, usize> {
    let node = fleet.node_id("n").unwrap();
    fleet.room_for_group(node, request, Hints::Respect, &mut GroupSearch::default())
}

/// The minors of each member.
fn places(fleet: &Fleet, request: &GroupRequest<'_>) -> Result<Vec<Vec<u32>>, usize> {
    room(fleet, request).map(|room| room.placements.iter().map(minors).collect())
}

/// Eight GPUs of 80 GiB on two NUMA nodes and four switches, linked in these groups.
fn eight_gpus(links: &[(&[u32], u32)]) -> Inventory {
    Inventory {
        gpus: (0..8).map(|minor| gpu_at(minor, minor / 4, minor / 2)).collect(),
        links: links
            .iter()
            .map(|(minors, n_links)| LinkGroup {
                minors: minors.to_vec(),
                n_links: *n_links,
            })
            .collect(),
        serves_vendor: true,
        ..Inventory::default()
    }
}

fn use_gpus(fleet: &mut Fleet, minors: &[u32]) {
    for minor in minors {
        let holding = on_minor(*minor, RequestedMemory::Ratio(50));
        fleet.hold(&OwnerId::from(format!("other-{minor}")), "n", holding);
    }
}

const LOW: &[u32] = &[0, 1, 2, 3];
const HALVES: &[(&[u32], u32)] = &[(LOW, 1), (&[4, 5, 6, 7], 1)];
const EVEN: &[(&[u32], u32)] = &[(&[0, 2, 4, 6], 1)];
const PAIR: &[(&[u32], u32)] = &[(&[0, 1], 1)];
const FAST_PAIR: &[(&[u32], u32)] = &[(LOW, 1), (&[6, 7], 2)];

#[rstest]
#[case::no_links(&[], 4, &[0], Ok(4..8))]
#[case::links_come_before_switches(EVEN, 4, &[], Ok(0..8))]
#[case::switches_without_links(&[], 2, &[0, 2, 4], Ok(6..8))]
#[case::a_busy_link_group_is_not_replaced_by_a_slower_one(HALVES, 4, &[0, 4], Err(3))]
#[case::a_numa_node_where_switches_are_too_small(&[], 3, &[0], Ok(1..8))]
#[case::none_is_large_enough(PAIR, 5, &[], Err(4))]
#[case::more_links_come_first(FAST_PAIR, 2, &[], Ok(6..8))]
#[case::fewer_links_where_more_are_too_small(FAST_PAIR, 3, &[], Ok(0..4))]
fn the_fastest_kind_of_link_that_can_hold_the_group_counts(
    #[case] links: &[(&[u32], u32)],
    #[case] n_members: usize,
    #[case] used: &[u32],
    #[case] expected: Result<std::ops::Range<u32>, usize>,
) {
    let mut fleet = fleet_of(eight_gpus(links));
    use_gpus(&mut fleet, used);
    let found = places(
        &fleet,
        &group(RequestedGpus::Whole(1), n_members, SharedDomain::Link),
    );
    match (found, expected) {
        (Ok(found), Ok(range)) => {
            let minors: BTreeSet<u32> = found.concat().into_iter().collect();
            assert_eq!(minors.len(), n_members);
            assert!(minors.iter().all(|minor| range.contains(minor)), "{minors:?}");
        }
        (found, expected) => assert_eq!(found.map(drop), expected.map(drop)),
    }
}

/// By the policy alone the first member would take the two fullest GPUs, which are full then.
#[test]
fn sets_of_gpus_are_tried_where_the_policy_leaves_no_room() {
    let mut fleet = fleet_of(inventory("n", &[100, 100, 100]));
    fill(&mut fleet, "n", &[50, 50, 100]);
    let request = group(&ask(2, RequestedMemory::Units(50)), 2, SharedDomain::Node);
    assert_eq!(places(&fleet, &request), Ok(vec![vec![0, 2], vec![1, 2]]));
}

#[test]
fn members_that_are_bound_decide_the_link_group() {
    let links: &[(&[u32], u32)] = &[(&[0, 1, 2, 3], 1), (&[4, 5, 6, 7], 1)];
    let mut fleet = fleet_of(eight_gpus(links));
    let first = OwnerId::from("first");
    fleet.hold(&first, "n", on_minor(5, RequestedMemory::Ratio(100)));
    let bound = [first];
    let request = GroupRequest {
        bound: &bound,
        n_in_link_group: 4,
        ..group(&ratio(100), 3, SharedDomain::Link)
    };
    assert_eq!(places(&fleet, &request), Ok(vec![vec![4], vec![6], vec![7]]));
    let too_large = GroupRequest {
        n_members: 4,
        ..request
    };
    assert_eq!(places(&fleet, &too_large), Err(3));
}

/// One more member alone would fit the switch of any GPU, where the bound ones are not.
#[test]
fn members_that_are_bound_count_for_the_kind_of_link() {
    let mut fleet = fleet_of(eight_gpus(&[]));
    let bound = ["a", "b", "c"].map(OwnerId::from);
    for (minor, owner) in (4..).zip(&bound) {
        fleet.hold(owner, "n", on_minor(minor, RequestedMemory::Ratio(100)));
    }
    let request = GroupRequest {
        bound: &bound,
        n_in_link_group: 4,
        ..group(&ratio(100), 1, SharedDomain::Link)
    };
    assert_eq!(places(&fleet, &request), Ok(vec![vec![7]]));
}

#[test]
fn a_node_without_topology_has_no_link_group() {
    let fleet = fleet_of(inventory("n", &[100, 100]));
    assert_eq!(places(&fleet, &group(&units(10), 2, SharedDomain::Link)), Err(0));
    assert_eq!(
        places(&fleet, &group(&units(10), 2, SharedDomain::Node)),
        Ok(vec![vec![0]; 2])
    );
}

#[test]
fn cpu_and_host_memory_limit_a_group() {
    let mut fleet = fleet_of(inventory("n", &[100, 100]));
    let cpus = |n: u64| HostAmounts {
        cpu_milli: n * 1000,
        memory: 0,
    };
    fleet.set_host("n", Some(cpus(10)));
    let share = units(10);
    let member = NodeRequest {
        host: cpus(4),
        ..NodeRequest::from(&share)
    };
    assert_eq!(places(&fleet, &group(member, 3, SharedDomain::Node)), Err(2));
    assert!(places(&fleet, &group(member, 2, SharedDomain::Node)).is_ok());
}

/// The members before it take room that the node without them has, which counts for the policy `fill`.
#[test]
fn the_score_is_that_of_the_node_for_the_last_member() {
    let mut fleet = fleet_of(inventory("n", &[100, 100]));
    fleet.workload_mut().add(PodProfile {
        gpus: RequestedGpus::from(&units(50)),
        host: HostAmounts::default(),
    });
    assert!(fleet.refresh_workload_model());
    let request = GroupRequest {
        policies: Policies::default(),
        ..group(&units(40), 2, SharedDomain::Node)
    };
    let (member, policies) = (request.member, request.policies);
    let mut copy = fleet.copy_node(fleet.node_id("n").unwrap()).unwrap();
    fleet.place_on_copy(&mut copy, member, policies).unwrap();
    let score = fleet.score_copy(&copy, member, policies).unwrap();
    assert_eq!(room(&fleet, &request).map(|room| room.score), Ok(score));
}

/// Free amounts would do for two of the three members.
#[test]
fn rules_limit_the_members_that_have_room() {
    let partition = Partition {
        minors: LOW.to_vec(),
        bandwidth: None,
        score: 1,
    };
    let fleet = fleet_of(Inventory {
        partitions: Some(PartitionTable {
            is_binding: true,
            partitions: vec![partition],
        }),
        ..eight_gpus(&[])
    });
    let request = group(RequestedGpus::Whole(4), 3, SharedDomain::Node);
    assert_eq!(places(&fleet, &request), Err(1));
}

#[rstest]
#[case::most(MAX_GROUP, Ok(()))]
#[case::more(MAX_GROUP + 1, Err(MAX_GROUP))]
#[case::far_more(10_000, Err(MAX_GROUP))]
fn a_group_has_a_most_number_of_members(#[case] n_members: usize, #[case] expected: Result<(), usize>) {
    let fleet = fleet_of(inventory("n", &[200_000]));
    assert_eq!(
        room(&fleet, &group(&units(1), n_members, SharedDomain::Node)).map(drop),
        expected
    );
}

/// A machine of a few GPUs, what is used of them, and a group that asks for room.
#[derive(Clone, Debug)]
struct Case {
    /// Switch (of which two are on each NUMA node), percent in use, health of each GPU.
    gpus: Vec<(Option<u32>, u32, bool)>,
    links: Vec<(BTreeSet<u32>, u32)>,
    /// Minors of the partitions of a table that binds.
    partitions: Option<Vec<BTreeSet<u32>>>,
    /// Number of GPUs, and percent of each; more than 100 means whole GPUs.
    member: (u32, u32),
    core: u32,
    scope: Option<Scope>,
    n_members: usize,
    domain: SharedDomain,
    policy: DevicePolicy,
}

fn case() -> impl Strategy<Value = Case> {
    let percent = prop_oneof![3 => Just(0_u32), 2 => (1_u32..=10).prop_map(|n| n * 10)];
    let part = (
        option::weighted(0.9, 0_u32..4),
        percent,
        prop::bool::weighted(0.95),
    );
    let minors = || prop::collection::btree_set(0_u32..8, 1..5);
    let scope = prop_oneof![8 => Just(None), 1 => Just(Some(Scope::Switch)), 1 => Just(Some(Scope::Numa))];
    let domain = prop_oneof![1 => Just(SharedDomain::Node), 2 => Just(SharedDomain::Link)];
    let policy = prop_oneof![
        Just(DevicePolicy::Binpack),
        Just(DevicePolicy::Spread),
        Just(DevicePolicy::Fill)
    ];
    (
        vec(part, 1..=8),
        vec((minors(), 1_u32..3), 0..4),
        option::weighted(0.2, vec(minors(), 1..6)),
        (1_u32..4, (1_u32..=12).prop_map(|n| n * 10)),
        prop_oneof![Just(0_u32), Just(30)],
        scope,
        1_usize..=5,
        domain,
        policy,
    )
        .prop_map(
            |(gpus, links, partitions, member, core, scope, n_members, domain, policy)| Case {
                gpus,
                links,
                partitions,
                member,
                core,
                scope,
                n_members,
                domain,
                policy,
            },
        )
}

impl Case {
    fn is_whole(&self) -> bool {
        self.member.1 > 100
    }

    fn fleet(&self) -> Fleet {
        let mut gpus = Vec::new();
        for (minor, (switch, _, healthy)) in (0..).zip(&self.gpus) {
            let location = switch.map(|switch| DeviceLocation {
                numa: Some(switch / 2),
                switch: Some(switch.to_string().as_str().into()),
            });
            gpus.push(Device {
                healthy: *healthy,
                attributes: DeviceAttributes {
                    location,
                    ..DeviceAttributes::default()
                },
                ..gpu("n", minor, 100 * MIB)
            });
        }
        let partitions = self.partitions.as_ref().map(|sets| PartitionTable {
            is_binding: true,
            partitions: sets
                .iter()
                .map(|set| Partition {
                    minors: set.iter().copied().collect(),
                    bandwidth: None,
                    score: 1,
                })
                .collect(),
        });
        let links = self.links.iter().map(|(minors, n_links)| LinkGroup {
            minors: minors.iter().copied().collect(),
            n_links: *n_links,
        });
        let mut fleet = fleet_of(Inventory {
            gpus: gpus.into(),
            links: links.collect(),
            partitions,
            serves_vendor: true,
            ..Inventory::default()
        });
        for (minor, (_, percent, _)) in (0..).zip(&self.gpus) {
            if *percent > 0 {
                let holding = on_minor(minor, RequestedMemory::Ratio(*percent));
                fleet.hold(&OwnerId::from(format!("other-{minor}")), "n", holding);
            }
        }
        fleet
    }

    fn gpus_of_member(&self) -> RequestedGpus {
        let (devices, percent) = self.member;
        if self.is_whole() {
            return RequestedGpus::Whole(devices);
        }
        RequestedGpus::Share(ShareRequest {
            core: self.core,
            ..ask(devices, RequestedMemory::Ratio(percent))
        })
    }

    fn constraints(&self) -> Option<Constraints> {
        let constraint = DeviceConstraint {
            scope: Some(self.scope?),
            ..DeviceConstraint::default()
        };
        Some(Constraints {
            by_kind: vec![(DeviceType::Gpu, constraint)],
            ..Constraints::default()
        })
    }

    /// The link groups, by the minors of their GPUs: a list for each kind of link, the fastest first.
    fn levels(&self) -> Vec<Vec<BTreeSet<u32>>> {
        let all: BTreeSet<u32> = (0..).zip(&self.gpus).map(|(minor, _)| minor).collect();
        if self.domain == SharedDomain::Node {
            return vec![vec![all]];
        }
        let of_links = |n: u32| {
            let groups = self.links.iter().filter(|(_, n_links)| *n_links == n);
            groups.map(|(minors, _)| minors & &all).collect()
        };
        let of_places = |place: fn(u32) -> u32| {
            let mut groups = Vec::new();
            for wanted in 0..4 {
                let members = (0..)
                    .zip(&self.gpus)
                    .filter(|(_, (switch, ..))| switch.map(place) == Some(wanted));
                groups.push(members.map(|(minor, _)| minor).collect());
            }
            groups
        };
        vec![
            of_links(2),
            of_links(1),
            of_places(|switch| switch),
            of_places(|switch| switch / 2),
        ]
    }

    /// The amounts that are free of each GPU: percent of memory, and percent of computing power.
    fn free(&self, is_empty: bool) -> Vec<(u32, u32)> {
        let free = self
            .gpus
            .iter()
            .map(|(_, percent, healthy)| match (*healthy, is_empty) {
                (false, _) => (0, 0),
                (true, true) => (100, 100),
                (true, false) => (100 - percent, 100),
            });
        free.collect()
    }

    /// Returns true if a member may take a set of GPUs, whatever is free.
    fn is_allowed(&self, set: &BTreeSet<u32>) -> bool {
        let places: BTreeSet<_> = set
            .iter()
            .map(|minor| {
                self.gpus[*minor as usize].0.map(|switch| match self.scope {
                    Some(Scope::Numa) => switch / 2,
                    _ => switch,
                })
            })
            .collect();
        let is_within = self.scope.is_none() || (places.len() == 1 && !places.contains(&None));
        // A share of all memory of a GPU takes the whole GPU.
        let is_partition = |sets: &Vec<BTreeSet<u32>>| sets.contains(set);
        let needs_partition = self.member.1 >= 100;
        is_within && (!needs_partition || self.partitions.as_ref().is_none_or(is_partition))
    }

    /// Every set of GPUs of a link group that a member may take, whatever is free.
    fn sets(&self, group: &BTreeSet<u32>) -> Vec<BTreeSet<u32>> {
        let mut sets = Vec::new();
        for bits in 1_u32..1 << self.gpus.len() {
            let set: BTreeSet<u32> = (0..8).filter(|minor| bits & (1 << minor) != 0).collect();
            if bits.count_ones() == self.member.0 && set.is_subset(group) && self.is_allowed(&set) {
                sets.push(set);
            }
        }
        sets
    }

    /// Returns true if members find room on these sets, each on one; the members are alike, so their order does not matter.
    fn has_room(&self, sets: &[BTreeSet<u32>], free: &[(u32, u32)], n_members: usize) -> bool {
        if n_members == 0 {
            return true;
        }
        let percent = self.member.1.min(100);
        let core = if self.is_whole() { 0 } else { self.core };
        for (at, set) in sets.iter().enumerate() {
            let has_room =
                |minor: &u32| free[*minor as usize].0 >= percent && free[*minor as usize].1 >= core;
            if !set.iter().all(has_room) {
                continue;
            }
            let mut left = free.to_vec();
            for minor in set {
                left[*minor as usize].0 -= percent;
                left[*minor as usize].1 -= core;
            }
            if self.has_room(&sets[at..], &left, n_members - 1) {
                return true;
            }
        }
        false
    }

    /// Returns true if a domain has room for the group.
    fn fits(&self) -> bool {
        for level in self.levels() {
            let sets: Vec<_> = level.iter().map(|group| self.sets(group)).collect();
            let fits = |is_empty| {
                let free = self.free(is_empty);
                sets.iter().any(|sets| self.has_room(sets, &free, self.n_members))
            };
            if fits(false) {
                return true;
            }
            if fits(true) {
                return false;
            }
        }
        false
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, ..ProptestConfig::default() })]

    #[test]
    fn a_domain_is_found_exactly_when_trying_everything_finds_one(case in case()) {
        let mut fleet = case.fleet();
        let constraints = case.constraints();
        let member = NodeRequest {
            constraints: constraints.as_ref(),
            ..NodeRequest::from(case.gpus_of_member())
        };
        let request = GroupRequest {
            policies: Policies { device: case.policy, ..POLICIES },
            ..group(member, case.n_members, case.domain)
        };
        let found = room(&fleet, &request);
        prop_assert_eq!(found.is_ok(), case.fits(), "{:?}", found);
        match found {
            Err(most) => prop_assert!(most < case.n_members),
            Ok(room) => {
                let node = fleet.node_id("n").unwrap();
                let mut members = Vec::new();
                let before = fleet.check();
                for (at, placement) in room.placements.iter().enumerate() {
                    let owner = OwnerId::from(format!("member-{at}"));
                    prop_assert_eq!(placement.gpus().count(), case.member.0 as usize);
                    fleet.reserve(&owner, node, placement).unwrap();
                    members.push(owner);
                }
                prop_assert_eq!(fleet.check(), before);
                prop_assert_eq!(fleet.check_group(&members, case.domain), None);
            }
        }
    }
}
