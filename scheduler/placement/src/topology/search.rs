//! The choice of leading devices of the least rank.
//!
//! Devices of one switch differ in their level and minor only, so the search runs over how many are taken of each switch,
//! and keeps for each number of devices (and of devices that come along; and of switches, where these are limited) the
//! cheapest way: at most 2 · (n + 1) · ∏ (n of a type + 1) states, and as many steps from each as there are devices and switches. That is exact, and
//! for 16 GPUs with 32 devices that come along 54,000 steps for each of three distances. Where pairs of GPUs are
//! linked differently, all sets of GPUs are tried instead, 12,870 for 8 of 16.
//!
//! Beyond [`MAX_STEPS`], which two types of so many devices do not reach, the leading devices are chosen by themselves and
//! the others as they come; a solution may then be missed where all must share switches. Beyond [`MAX_SETS`] links are not
//! looked at.

use crate::topology::problem::{Numa, Problem, Switch};
use crate::topology::rank::{Distance, Rank};
use crate::topology::sets::Set;

/// Most steps that one search may take.
const MAX_STEPS: usize = 1 << 22;
/// Most sets that are tried one by one.
const MAX_SETS: u64 = 13_000;

/// The cheapest way to a state: what it costs, and the devices that it takes.
#[derive(Clone, Copy)]
struct Way {
    cost: u128,
    chosen: Set,
}

const NO_WAY: Way = Way {
    cost: u128::MAX,
    chosen: Set::EMPTY,
};

impl Problem<'_> {
    /// The best choice and its rank; `None` if there is none.
    pub(crate) fn search(&self) -> Option<(Set, Rank)> {
        let n = self.lead.n;
        let differ = self
            .links
            .is_some_and(|links| n > 1 && !links.are_equal(self.allowed));
        if differ && self.allowed.n_subsets(n) <= MAX_SETS {
            return self.try_all();
        }
        let nearest = self.reach(&vec![Distance::Switch; self.followers.len()]);
        if self.same_switch {
            nearest
        } else {
            nearest.or_else(|| self.farther())
        }
    }

    /// The best choice where not all types can be on the switches: the first type is brought as near as can be, then the next.
    fn farther(&self) -> Option<(Set, Rank)> {
        let mut target = vec![Distance::Machine; self.followers.len()];
        let mut found = self.reach(&target)?;
        for at in 0..target.len() {
            for distance in [Distance::Switch, Distance::Numa] {
                let nearer = target
                    .iter()
                    .enumerate()
                    .map(|(of, before)| if of == at { distance } else { *before });
                let nearer: Vec<Distance> = nearer.collect();
                if let Some(better) = self.reach(&nearer).filter(|(_, rank)| *rank <= found.1) {
                    (found, target) = (better, nearer);
                    break;
                }
            }
        }
        Some(found)
    }

    /// The cheapest choice with no larger distances than these, and its rank.
    fn reach(&self, target: &[Distance]) -> Option<(Set, Rank)> {
        let chosen = self.count_up(target)?;
        Some((chosen, self.rank(chosen)?))
    }

    fn try_all(&self) -> Option<(Set, Rank)> {
        let mut best: Option<(Set, Rank)> = None;
        self.allowed.subsets(self.lead.n, &mut |chosen| {
            if let Some(rank) = self
                .rank(chosen)
                .filter(|rank| best.is_none_or(|(_, best)| *rank < best))
            {
                best = Some((chosen, rank));
            }
        });
        best
    }

    /// The leading devices of that.
    fn count_up(&self, target: &[Distance]) -> Option<Set> {
        let table = Table::new(self, target)?;
        let n_steps = table
            .n_states()
            .saturating_mul(self.allowed.len() + self.n_switches());
        if n_steps > MAX_STEPS {
            return Table::blind(self).run(self);
        }
        table.run(self)
    }
}

/// How many devices have been taken, how many of those that come along are near, and whether the NUMA node at hand is used.
struct Table {
    /// One more than the most devices that are counted, of each type that comes along.
    bases: Vec<usize>,
    target: Vec<Distance>,
    n: usize,
    /// Most switches that may be used, if that is limited.
    most_switches: Option<usize>,
}

impl Table {
    /// `None` if there are too few devices of a type.
    fn new(problem: &Problem<'_>, target: &[Distance]) -> Option<Self> {
        let base = |(distance, follower): (&Distance, &super::problem::Follower<'_>)| {
            let enough = follower.allowed.len() >= follower.pool.n;
            enough.then_some(if *distance == Distance::Machine {
                1
            } else {
                follower.pool.n + 1
            })
        };
        let bases = target
            .iter()
            .zip(&problem.followers)
            .map(base)
            .collect::<Option<Vec<usize>>>()?;
        Some(Self {
            bases,
            target: target.to_vec(),
            n: problem.lead.n,
            most_switches: problem.most_switches(),
        })
    }

    /// Counts leading devices only.
    fn blind(problem: &Problem<'_>) -> Self {
        let n_types = problem.followers.len();
        Self {
            bases: vec![1; n_types],
            target: vec![Distance::Machine; n_types],
            n: problem.lead.n,
            most_switches: None,
        }
    }

    fn n_states(&self) -> usize {
        let counted = (self.n + 1).saturating_mul(2).saturating_mul(self.n_used());
        self.bases
            .iter()
            .fold(counted, |states, base| states.saturating_mul(*base))
    }

    /// States in which as much of everything has been taken, by how many switches are used.
    fn n_used(&self) -> usize {
        self.most_switches.map_or(1, |most| most + 1)
    }

    /// States in which so many have been taken, by how many devices come along.
    fn n_nearby(&self) -> usize {
        self.bases
            .iter()
            .fold(1, |states, base| states.saturating_mul(*base))
    }

    fn run(&self, problem: &Problem<'_>) -> Option<Set> {
        let (n_nearby, n_used) = (self.n_nearby(), self.n_used());
        let half = n_nearby * n_used * (self.n + 1);
        // The first half has the ways that use nothing of the NUMA node at hand.
        let mut ways = vec![NO_WAY; half * 2];
        *ways.first_mut()? = Way {
            cost: 0,
            chosen: Set::EMPTY,
        };
        let mut next = ways.clone();
        for numa in &problem.numas {
            for switch in &numa.switches {
                let order = problem.lead.by_preference(switch.lead);
                next.copy_from_slice(&ways);
                self.step(problem, numa, switch, &order, &ways, &mut next);
                std::mem::swap(&mut ways, &mut next);
            }
            let (unused, used) = ways.split_at_mut(half);
            for (unused, used) in unused.iter_mut().zip(used) {
                if used.cost < unused.cost {
                    *unused = *used;
                }
                *used = NO_WAY;
            }
        }
        let last =
            (0..n_used).filter_map(|used| ways.get((self.n * n_used + used) * n_nearby + n_nearby - 1));
        last.filter(|way| way.cost != u128::MAX)
            .min_by_key(|way| way.cost)
            .map(|way| way.chosen)
    }

    /// Takes every number of devices of one switch from every state.
    fn step(
        &self,
        problem: &Problem<'_>,
        numa: &Numa,
        switch: &Switch,
        order: &[usize],
        ways: &[Way],
        next: &mut [Way],
    ) {
        let (n_nearby, n_used) = (self.n_nearby(), self.n_used());
        let half = n_nearby * n_used * (self.n + 1);
        for (state, way) in ways.iter().enumerate().filter(|(_, way)| way.cost != u128::MAX) {
            let is_used = state >= half;
            let (taken, used) = (
                state % half / n_nearby / n_used,
                state / n_nearby % n_used + usize::from(self.most_switches.is_some()),
            );
            if used == n_used && self.most_switches.is_some() {
                continue;
            }
            let nearby = self.nearby(state % n_nearby, switch, (!is_used).then_some(numa));
            let first = cost_of_switch(switch.n_bare(), !is_used);
            let mut way = Way {
                cost: way.cost + first,
                chosen: way.chosen,
            };
            for (count, at) in (1..).zip(order.iter().take(self.n - taken)) {
                way = Way {
                    cost: way.cost + cost_of(problem.lead.level(*at), *at),
                    chosen: way.chosen.with(*at),
                };
                let to = half + ((taken + count) * n_used + used) * n_nearby + nearby;
                if let Some(before) = next.get_mut(to).filter(|before| way.cost < before.cost) {
                    *before = way;
                }
            }
        }
    }

    /// How many devices come along once a switch, and perhaps its NUMA node, is used.
    fn nearby(&self, before: usize, switch: &Switch, numa: Option<&Numa>) -> usize {
        let (mut rest, mut nearby, mut place) = (before, 0, 1);
        let counts = |at: usize| {
            switch.n_near.get(at).copied().zip(Some(
                numa.and_then(|numa| numa.n_near.get(at)).copied().unwrap_or(0),
            ))
        };
        for (at, (base, distance)) in self.bases.iter().zip(&self.target).enumerate() {
            let (on_switch, on_numa) = counts(at).unwrap_or((0, 0));
            let more = match distance {
                Distance::Switch => on_switch,
                Distance::Numa => on_numa,
                Distance::Machine => 0,
            };
            nearby += (rest % base + more).min(base - 1) * place;
            (rest, place) = (rest / base, place * base);
        }
        nearby
    }
}

/// What the use of a switch costs, in one number whose parts do not run over: at most 64 devices are ever taken.
fn cost_of_switch(n_bare: u32, is_new_numa: bool) -> u128 {
    u128::from(n_bare) << 112 | u128::from(is_new_numa) << 104 | 1 << 96
}

/// What the use of a device costs: its level, then its minor, such that the lowest minors cost least.
fn cost_of(level: u32, at: usize) -> u128 {
    u128::from(level) << 72 | ((1 << 64) - u128::from(Set::EMPTY.with(at).lowness()))
}
