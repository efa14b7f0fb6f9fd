//! Which leading devices to take so that the devices that come along are near, and the rank of every choice.

use std::cmp::Reverse;

use crate::shape::Spot;
use crate::topology::links::Links;
use crate::topology::pool::Pool;
use crate::topology::rank::{Distance, Distances, Rank};
use crate::topology::sets::Set;

/// Devices of a type that come along.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Follower<'a> {
    pub(crate) pool: &'a Pool,
    /// Those that may be taken.
    pub(crate) allowed: Set,
}

/// What is to be chosen.
#[derive(Debug)]
pub(crate) struct Problem<'a> {
    pub(crate) lead: &'a Pool,
    /// Leading devices that may be taken.
    pub(crate) allowed: Set,
    pub(crate) followers: Vec<Follower<'a>>,
    /// Whether every switch must have devices of all types or of none.
    pub(crate) same_switch: bool,
    pub(crate) links: Option<&'a Links>,
    /// NUMA nodes with leading devices that may be taken.
    pub(crate) numas: Vec<Numa>,
}

/// A NUMA node with leading devices.
#[derive(Debug)]
pub(crate) struct Numa {
    pub(crate) switches: Vec<Switch>,
    /// How many devices of each type that comes along are there.
    pub(crate) n_near: Vec<usize>,
}

/// A switch with leading devices.
#[derive(Debug)]
pub(crate) struct Switch {
    pub(crate) lead: Set,
    /// How many devices of each type that comes along are there.
    pub(crate) n_near: Vec<usize>,
}

impl Switch {
    /// How many types that come along have no device there.
    pub(crate) fn n_bare(&self) -> u32 {
        self.n_near.iter().fold(0, |sum, n| sum + u32::from(*n == 0))
    }
}

impl<'a> Problem<'a> {
    pub(crate) fn new(
        lead: &'a Pool,
        allowed: Set,
        followers: Vec<Follower<'a>>,
        same_switch: bool,
        links: Option<&'a Links>,
    ) -> Self {
        let mut problem = Self {
            lead,
            allowed,
            followers,
            same_switch,
            links,
            numas: Vec::new(),
        };
        let mut spots: Vec<Spot> = allowed.members().map(|at| lead.spot(at)).collect();
        spots.sort_by_key(|spot| (spot.numa, spot.switch));
        spots.dedup_by_key(|spot| (spot.numa, spot.switch));
        for of_numa in spots.chunk_by(|one, next| one.numa == next.numa) {
            let switches: Vec<Switch> = of_numa.iter().filter_map(|spot| problem.switch(*spot)).collect();
            let numa = of_numa.first().map_or(0, |spot| spot.numa);
            let n_near = problem.count(|spot| spot.numa == numa);
            if !switches.is_empty() {
                problem.numas.push(Numa { switches, n_near });
            }
        }
        problem
    }

    /// One switch; `None` if nothing there may be taken.
    fn switch(&self, spot: Spot) -> Option<Switch> {
        let n_near = self.count(|other| other.switch == spot.switch);
        let lead = self
            .lead
            .those(|candidate| candidate.spot.switch == spot.switch)
            .and(self.allowed);
        let switch = Switch { lead, n_near };
        (!self.same_switch || switch.n_bare() == 0).then_some(switch)
    }

    /// Devices of each type that comes along at such places.
    fn count(&self, is_there: impl Fn(&Spot) -> bool) -> Vec<usize> {
        let there = |follower: &Follower<'_>| {
            follower
                .pool
                .those(|candidate| is_there(&candidate.spot))
                .and(follower.allowed)
                .len()
        };
        self.followers.iter().map(there).collect()
    }

    pub(crate) fn n_switches(&self) -> usize {
        self.numas.iter().map(|numa| numa.switches.len()).sum()
    }

    /// Most switches that leading devices may be on, so that each has a device of every type, if that is limited.
    pub(crate) fn most_switches(&self) -> Option<usize> {
        let limited = self
            .followers
            .iter()
            .filter(|follower| self.same_switch && !follower.may_be_more());
        limited.map(|follower| follower.pool.n).min()
    }

    /// The rank of a choice of leading devices, without that of a partition; `None` if it breaks a rule.
    pub(crate) fn rank(&self, chosen: Set) -> Option<Rank> {
        let (fewest_links, links) = self.links.map_or((0, 0), |links| links.among(chosen));
        let mut rank = Rank {
            score: 0,
            distances: Distances::default(),
            n_bare: 0,
            partition: 0,
            fewest_links: Reverse(fewest_links),
            links: Reverse(links),
            n_numas: 0,
            n_switches: 0,
            levels: self.lead.levels(chosen),
            lowness: Reverse(chosen.lowness()),
        };
        let mut counted = Set::EMPTY;
        for numa in &self.numas {
            let on = |switch: &&Switch| !switch.lead.and(chosen).is_empty();
            rank.n_numas += u32::from(numa.switches.iter().any(|switch| on(&switch)));
            for switch in numa.switches.iter().filter(on) {
                rank.n_switches += 1;
                rank.n_bare += switch.n_bare();
                counted = counted.or(switch.lead);
            }
        }
        let is_too_wide = self
            .most_switches()
            .is_some_and(|most| rank.n_switches as usize > most);
        if chosen.len() != self.lead.n || !chosen.is_within(counted) || is_too_wide {
            return None;
        }
        for at in 0..self.followers.len() {
            rank.distances = rank.distances.then(self.distance(at, chosen)?);
        }
        Some(rank)
    }

    /// How far the farthest of the devices of a type is that were asked for; `None` if they are too few, or too far.
    fn distance(&self, at: usize, chosen: Set) -> Option<Distance> {
        let follower = self.followers.get(at)?;
        let is_on = |switch: &&Switch| !switch.lead.and(chosen).is_empty();
        let of = |near: &[usize]| near.get(at).copied().unwrap_or(0);
        let touched = || {
            self.numas
                .iter()
                .filter(|numa| numa.switches.iter().any(|switch| is_on(&switch)))
        };
        let on_switches: usize = touched()
            .flat_map(|numa| numa.switches.iter().filter(is_on))
            .map(|switch| of(&switch.n_near))
            .sum();
        let n = follower.pool.n;
        if on_switches >= n {
            return Some(Distance::Switch);
        }
        let on_numas: usize = touched().map(|numa| of(&numa.n_near)).sum();
        match () {
            () if self.same_switch => None,
            () if on_numas >= n => Some(Distance::Numa),
            () if follower.allowed.len() >= n => Some(Distance::Machine),
            () => None,
        }
    }
}
