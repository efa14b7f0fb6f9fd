//! The problem of choosing leading devices so that devices of other types, which follow them, are near.
//!
//! [`Rank`] is the specification: of all choices of leading devices that break no rule, the one with the least rank is taken. In
//! a joint allocation, which asks for devices of several types near each other, the devices of the first type lead, and those of
//! the other types follow from them, see [`Follower::follow`]. A type outside a joint allocation leads, and no other follows it.

use std::cmp::Reverse;

use crate::choice::topology::candidates::{CandidateSet, Pool};
use crate::choice::topology::groups::Links;
use crate::data::ident::DeviceType;
use crate::state::hardware::Location;

/// The rank of a choice; smaller is better, the first field weighs most, and no two choices of leading devices are equal.
///
/// The closeness of leading GPUs to one another weighs more than that of the devices that follow them. Leading devices of
/// other types have nothing to exchange, so they are taken where the devices that follow are near.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    /// Place of the partition by score (`GpuSet::score_place`); for GPUs that no type follows, by preference. 0 if it counts only
    /// in `partition_after`.
    pub(crate) partition: u32,
    /// Closeness of the leading devices, if it weighs more than the devices that follow.
    pub(crate) closeness: Closeness,
    /// For each follower type, the distance of the farthest requested device from the leading devices, as one number: the first
    /// type is the highest digit.
    pub(crate) distances: u64,
    /// Number of switches of leading devices without a device of a follower type, summed over these types.
    pub(crate) bare_switches: u32,
    /// The same of NUMA nodes. Where each choice has a requested device on no NUMA node of a leading one, this prefers choices
    /// that have others nearer.
    pub(crate) bare_numas: u32,
    /// Place of the partition by preference (`GpuSet::preference_place`), if a type follows.
    pub(crate) partition_after: u32,
    /// Closeness of the leading devices, if it weighs less than the devices that follow.
    pub(crate) closeness_after: Closeness,
    /// Sum of the devices' places in the order of preference: by policy, then by the groups that they break.
    pub(crate) preferences: u32,
    /// Lowest minors, compared from the lowest on.
    pub(crate) lowness: Reverse<u64>,
}

/// Closeness of devices to one another; smaller is closer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Closeness {
    /// Fewest links between any two of the GPUs, most first; zero for other types.
    fewest_links: Reverse<u32>,
    /// Links between the GPUs in all, most first.
    links: Reverse<u32>,
    /// Number of NUMA nodes that the devices are spread over.
    n_numas: u32,
    /// Number of switches that the devices are spread over.
    n_switches: u32,
}

/// The distance of a device that follows from the nearest leading device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Distance {
    /// On the switch of a leading device.
    Switch,
    /// On the NUMA node of a leading device.
    Numa,
    /// On no NUMA node of a leading device.
    Machine,
}

/// The rank of the devices of one follower type: their distances, the farthest first; the sum of their preferences; their
/// minors. It decides between choices with the same leading devices.
pub(crate) type FollowerRank = (Vec<Distance>, u32, Reverse<u64>);

/// A follower type: a device type whose devices are taken near the leading devices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Follower<'a> {
    pub(crate) pool: &'a Pool,
    /// The devices that may be taken.
    pub(crate) allowed: CandidateSet,
}

impl Follower<'_> {
    /// Returns true if more devices may be taken than requested: one on each switch of a leading device. Not for GPUs, which are
    /// the expensive part.
    pub(crate) fn may_exceed_request(&self) -> bool {
        self.pool.kind != DeviceType::Gpu
    }

    /// The devices of the type to take for leading devices at these locations, and their rank.
    ///
    /// On every switch of a leading device the preferred device of the type is taken, requested or not, if there is one;
    /// but no more GPUs than requested. If more are requested, the nearest are taken, of these the preferred, of these the
    /// lowest minors.
    pub(crate) fn follow(&self, lead: &[Location]) -> (CandidateSet, FollowerRank) {
        let Self { pool, allowed } = *self;
        let mut order = Vec::with_capacity(allowed.len());
        for at in pool.by_preference(allowed) {
            order.push((distance(pool.location(at), lead), at));
        }
        // Devices at one distance stay in the order of preference.
        order.sort_by_key(|(distance, _)| *distance);
        let mut switches = Vec::new();
        let mut taken = CandidateSet::EMPTY;
        // One device per switch first, so that no leading device has to go without while another has two.
        for (distance, at) in &order {
            let switch = pool.location(*at).switch;
            let may_take = self.may_exceed_request() || taken.len() < pool.n_requested;
            if *distance == Distance::Switch && may_take && !switches.contains(&switch) {
                switches.push(switch);
                taken = taken.with(*at);
            }
        }
        let mut distances = Vec::with_capacity(taken.len().max(pool.n_requested));
        for (distance, at) in order {
            if taken.len() < pool.n_requested {
                taken = taken.with(at);
            }
            if taken.contains(at) {
                distances.push(distance);
            }
        }
        // Farthest first, so that choices are compared by their farthest devices before the nearer ones count.
        distances.reverse();
        (
            taken,
            (distances, pool.preference_sum(taken), Reverse(taken.lowness())),
        )
    }
}

/// The distance of a device at a location from the nearest of the leading devices.
fn distance(location: Location, lead: &[Location]) -> Distance {
    let mut nearest = Distance::Machine;
    for other in lead {
        if other.switch == location.switch {
            return Distance::Switch;
        }
        if other.numa == location.numa {
            nearest = Distance::Numa;
        }
    }
    nearest
}

/// The devices to choose from and the rules between their types.
#[derive(Debug)]
pub(crate) struct Problem<'a> {
    /// The leading type.
    pub(crate) lead: &'a Pool,
    /// Leading devices that may be taken.
    pub(crate) allowed: CandidateSet,
    /// The follower types, in the order of the joint allocation.
    pub(crate) followers: Vec<Follower<'a>>,
    /// True if every switch must have devices of all types or of none.
    pub(crate) same_switch: bool,
    /// True if the closeness of the leading devices to one another weighs more than the devices that follow.
    pub(crate) closeness_first: bool,
    pub(crate) links: Option<&'a Links>,
    /// NUMA nodes with leading devices that may be taken.
    pub(crate) numas: Vec<Numa>,
}

/// A NUMA node with leading devices.
#[derive(Debug)]
pub(crate) struct Numa {
    pub(crate) switches: Vec<Switch>,
    /// For each follower type, the number of its devices on the NUMA node.
    pub(crate) n_followers: Vec<usize>,
}

/// A switch with leading devices.
#[derive(Debug)]
pub(crate) struct Switch {
    /// The leading devices on the switch that may be taken.
    pub(crate) lead: CandidateSet,
    /// For each follower type, the number of its devices on the switch.
    pub(crate) n_followers: Vec<usize>,
}

impl Numa {
    /// Returns true if the NUMA node has a chosen leading device.
    fn is_used(&self, chosen: CandidateSet) -> bool {
        self.switches.iter().any(|switch| switch.is_used(chosen))
    }
}

impl Switch {
    /// Returns true if the switch has a chosen leading device.
    pub(crate) fn is_used(&self, chosen: CandidateSet) -> bool {
        !self.lead.and(chosen).is_empty()
    }
}

/// Number of types that have no device, where `n_followers` has the number of devices of each type.
pub(crate) fn n_bare(n_followers: &[usize]) -> u32 {
    n_followers.iter().map(|n| u32::from(*n == 0)).sum()
}

impl<'a> Problem<'a> {
    /// Groups the leading devices that may be taken by NUMA node and switch, and counts the followers there.
    pub(crate) fn new(
        lead: &'a Pool,
        allowed: CandidateSet,
        followers: Vec<Follower<'a>>,
        same_switch: bool,
        links: Option<&'a Links>,
    ) -> Self {
        let mut problem = Self {
            lead,
            allowed,
            followers,
            same_switch,
            closeness_first: lead.kind == DeviceType::Gpu,
            links,
            numas: Vec::new(),
        };
        let mut locations: Vec<Location> = allowed.members().map(|at| lead.location(at)).collect();
        // Sorted, so that the switches of one NUMA node are next to each other.
        locations.sort_by_key(|location| (location.numa, location.switch));
        locations.dedup_by_key(|location| (location.numa, location.switch));
        for on_numa in locations.chunk_by(|one, next| one.numa == next.numa) {
            let switches: Vec<Switch> = on_numa.iter().filter_map(|at| problem.switch_at(*at)).collect();
            let numa = on_numa.first().map_or(0, |location| location.numa);
            if !switches.is_empty() {
                let n_followers = problem.count_followers(|location| location.numa == numa);
                problem.numas.push(Numa {
                    switches,
                    n_followers,
                });
            }
        }
        problem
    }

    /// The switch at a location; `None` if it lacks a type that every switch must have.
    fn switch_at(&self, location: Location) -> Option<Switch> {
        let lead = self.lead;
        let on_switch = lead.select(|candidate| candidate.location.switch == location.switch);
        let switch = Switch {
            lead: on_switch.and(self.allowed),
            n_followers: self.count_followers(|other| other.switch == location.switch),
        };
        (!self.same_switch || n_bare(&switch.n_followers) == 0).then_some(switch)
    }

    /// Number of devices of each follower type, at the locations for which `is_there` returns true.
    fn count_followers(&self, is_there: impl Fn(&Location) -> bool) -> Vec<usize> {
        let mut counts = Vec::with_capacity(self.followers.len());
        for follower in &self.followers {
            let there = follower.pool.select(|candidate| is_there(&candidate.location));
            counts.push(there.and(follower.allowed).len());
        }
        counts
    }

    /// Number of switches with leading devices that may be taken.
    pub(crate) fn n_switches(&self) -> usize {
        self.numas.iter().map(|numa| numa.switches.len()).sum()
    }

    /// Most switches that leading devices may be on, so that each has a device of every type; `None` without a limit.
    pub(crate) fn max_switches(&self) -> Option<usize> {
        if !self.same_switch {
            return None;
        }
        let followers = self.followers.iter();
        let limited = followers.filter(|follower| !follower.may_exceed_request());
        limited.map(|follower| follower.pool.n_requested).min()
    }

    /// The devices of each follower type for the chosen leading devices, and their ranks.
    pub(crate) fn follow(&self, chosen: CandidateSet) -> Vec<(CandidateSet, FollowerRank)> {
        let lead: Vec<Location> = chosen.members().map(|at| self.lead.location(at)).collect();
        let followers = self.followers.iter();
        followers.map(|follower| follower.follow(&lead)).collect()
    }

    /// The rank of a choice of leading devices, apart from its partition; `None` if it breaks a rule.
    pub(crate) fn rank(&self, chosen: CandidateSet) -> Option<Rank> {
        let (fewest_links, _, links) = self.links.map_or((0, 0, 0), |links| links.among(chosen));
        let mut closeness = Closeness {
            fewest_links: Reverse(fewest_links),
            links: Reverse(links),
            ..Closeness::default()
        };
        let (mut bare_switches, mut bare_numas) = (0, 0);
        let mut on_switches = CandidateSet::EMPTY;
        for numa in self.numas.iter().filter(|numa| numa.is_used(chosen)) {
            closeness.n_numas += 1;
            bare_numas += n_bare(&numa.n_followers);
            for switch in numa.switches.iter().filter(|switch| switch.is_used(chosen)) {
                closeness.n_switches += 1;
                bare_switches += n_bare(&switch.n_followers);
                on_switches = on_switches.or(switch.lead);
            }
        }
        let max_switches = self.max_switches();
        let is_too_wide = max_switches.is_some_and(|max| closeness.n_switches as usize > max);
        // A switch that must not be used is in no NUMA node's list, so its devices are on none of these switches.
        if chosen.len() != self.lead.n_requested || !chosen.is_within(on_switches) || is_too_wide {
            return None;
        }
        let (closeness, closeness_after) = if self.closeness_first {
            (closeness, Closeness::default())
        } else {
            (Closeness::default(), closeness)
        };
        let mut rank = Rank {
            // The caller adds the places of the partition, which belong to its `GpuSet`.
            partition: 0,
            closeness,
            distances: 0,
            bare_switches,
            bare_numas,
            partition_after: 0,
            closeness_after,
            preferences: self.lead.preference_sum(chosen),
            lowness: Reverse(chosen.lowness()),
        };
        for at in 0..self.followers.len() {
            let distance = self.distance(at, chosen)? as u64;
            // There are three distances, so that numbers to the base of three compare type by type.
            rank.distances = rank.distances.saturating_mul(3).saturating_add(distance);
        }
        Some(rank)
    }

    /// The distance of the farthest requested device of the follower type at an index, if each is as near as possible; `None` if
    /// these are too few, or some is not on a switch of a leading device although it must be.
    fn distance(&self, at: usize, chosen: CandidateSet) -> Option<Distance> {
        let follower = self.followers.get(at)?;
        let (mut on_switches, mut on_numas) = (0, 0);
        for numa in &self.numas {
            if !numa.is_used(chosen) {
                continue;
            }
            on_numas += numa.n_followers.get(at).copied().unwrap_or(0);
            for switch in &numa.switches {
                if switch.is_used(chosen) {
                    on_switches += switch.n_followers.get(at).copied().unwrap_or(0);
                }
            }
        }
        // More devices may follow than are requested, but only as many have to be near.
        let n = follower.pool.n_requested;
        if on_switches >= n {
            Some(Distance::Switch)
        } else if self.same_switch {
            None
        } else if on_numas >= n {
            Some(Distance::Numa)
        } else {
            (follower.allowed.len() >= n).then_some(Distance::Machine)
        }
    }
}
