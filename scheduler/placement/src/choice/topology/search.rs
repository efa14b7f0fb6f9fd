//! The search for the choice of leading devices with the least rank.
//!
//! Devices of one switch differ in their preference and minor only. So the search runs over the number of devices that are
//! taken of each switch, and keeps the cheapest way to each state: a number of leading devices taken, of followers near them,
//! and of switches, where these are limited. That is exact; 16 of 32 GPUs on 16 switches with 32 followers take 54,000 steps. If
//! pairs of GPUs have different numbers of links, it tries all sets of GPUs instead: 12,870 for 8 of 16.

use crate::choice::topology::candidates::CandidateSet;
use crate::choice::topology::problem::{Distance, Numa, Problem, Rank, Switch, n_bare};

/// Most steps of one search. Beyond it leading devices are chosen by themselves, which may miss a choice on shared switches.
const MAX_STEPS: usize = 1 << 22;
/// Most sets of leading GPUs that are tried one by one. Beyond it links are ignored.
const MAX_SUBSETS: u64 = 13_000;

/// The best choice of leading devices and its rank; `None` if there is none.
pub(crate) fn search(problem: &Problem<'_>) -> Option<(CandidateSet, Rank)> {
    let n = problem.lead.n_requested;
    // Nothing is left to search, as where the devices are those of a partition.
    if problem.allowed.len() == n {
        return Some((problem.allowed, problem.rank(problem.allowed)?));
    }
    // Links between pairs do not add up over switches, so the search by states cannot count them.
    let links = problem.links;
    let has_different_links = links.is_some_and(|links| n > 1 && !links.are_equal(problem.allowed));
    if has_different_links && problem.allowed.n_subsets(n) <= MAX_SUBSETS {
        return try_all(problem);
    }
    // Closeness of the leading devices comes first here, and the closest ones may have no device of another type near.
    if problem.closeness_first && !problem.same_switch {
        return search_nearer(problem);
    }
    // Most often all types fit on the switches, and no farther choice is better than one there.
    let nearest = search_within(problem, &vec![Distance::Switch; problem.followers.len()]);
    if nearest.is_some() || problem.same_switch {
        return nearest;
    }
    search_nearer(problem)
}

/// The best choice where not all types need to be on the switches of leading devices: as near as the rank allows for the first
/// follower type, then for the next.
fn search_nearer(problem: &Problem<'_>) -> Option<(CandidateSet, Rank)> {
    let mut limits = vec![Distance::Machine; problem.followers.len()];
    let mut found = search_within(problem, &limits)?;
    for at in 0..limits.len() {
        for distance in [Distance::Switch, Distance::Numa] {
            let mut nearer = limits.clone();
            if let Some(limit) = nearer.get_mut(at) {
                *limit = distance;
            }
            // The nearest distance comes first, so the first one that makes the rank no worse is the best for this type.
            if let Some(better) = search_within(problem, &nearer).filter(|(_, rank)| *rank <= found.1) {
                (found, limits) = (better, nearer);
                break;
            }
        }
    }
    Some(found)
}

/// The cheapest choice with each follower type within its distance in `limits`, and its rank.
fn search_within(problem: &Problem<'_>, limits: &[Distance]) -> Option<(CandidateSet, Rank)> {
    let mut table = StateTable::new(problem, limits)?;
    let n_steps_per_state = problem.allowed.len() + problem.n_switches();
    if table.n_states().saturating_mul(n_steps_per_state) > MAX_STEPS {
        // An exact search would take too long for a request in a scheduling cycle.
        table = StateTable::of_leading_devices(problem);
    }
    let chosen = table.run(problem)?;
    Some((chosen, problem.rank(chosen)?))
}

/// Tries every set of leading devices, for GPUs of which some pairs have more links than others.
fn try_all(problem: &Problem<'_>) -> Option<(CandidateSet, Rank)> {
    let mut best: Option<(CandidateSet, Rank)> = None;
    let n = problem.lead.n_requested;
    for chosen in problem.allowed.subsets(n) {
        if let Some(rank) = problem.rank(chosen)
            && best.is_none_or(|(_, best)| rank < best)
        {
            best = Some((chosen, rank));
        }
    }
    best
}

/// The cheapest way to a state: its cost, and the leading devices that it takes.
#[derive(Clone, Copy)]
struct Way {
    cost: u128,
    chosen: CandidateSet,
}

/// The entry of a state that no way leads to; any way costs less.
const NO_WAY: Way = Way {
    cost: u128::MAX,
    chosen: CandidateSet::EMPTY,
};

/// The dimensions of the table of states. The index of a state counts followers near fastest, then switches used, then leading
/// devices taken; states that use the current NUMA node are in the second half.
struct StateTable {
    /// For each follower type, one more than the most devices that are counted: the base of its digit in a state.
    bases: Vec<usize>,
    /// For each follower type, the distance within which its requested devices must be.
    limits: Vec<Distance>,
    /// Number of leading devices to take.
    n_leading: usize,
    /// Most switches that may be used; `None` without a limit.
    max_switches: Option<usize>,
}

impl StateTable {
    /// The table for one search; `None` if a follower type has fewer devices than requested.
    fn new(problem: &Problem<'_>, limits: &[Distance]) -> Option<Self> {
        let mut bases = Vec::with_capacity(limits.len());
        for (limit, follower) in limits.iter().zip(&problem.followers) {
            if follower.allowed.len() < follower.pool.n_requested {
                return None;
            }
            // Devices anywhere on the machine need no count.
            bases.push(if *limit == Distance::Machine {
                1
            } else {
                follower.pool.n_requested + 1
            });
        }
        Some(Self {
            bases,
            limits: limits.to_vec(),
            n_leading: problem.lead.n_requested,
            max_switches: problem.max_switches(),
        })
    }

    /// A table that counts leading devices only.
    fn of_leading_devices(problem: &Problem<'_>) -> Self {
        let n_types = problem.followers.len();
        Self {
            bases: vec![1; n_types],
            limits: vec![Distance::Machine; n_types],
            n_leading: problem.lead.n_requested,
            // The number of switches is not counted either; a choice that uses too many has no rank.
            max_switches: None,
        }
    }

    /// Number of states in the table.
    fn n_states(&self) -> usize {
        // Saturated, because the number is only compared with `MAX_STEPS`.
        let counted = (self.n_leading + 1)
            .saturating_mul(2)
            .saturating_mul(self.n_used());
        counted.saturating_mul(self.n_near())
    }

    /// Number of states that differ only in the number of used switches.
    fn n_used(&self) -> usize {
        self.max_switches.map_or(1, |max| max + 1)
    }

    /// Number of states that differ only in the followers near.
    fn n_near(&self) -> usize {
        self.bases.iter().fold(1, |n, base| n.saturating_mul(*base))
    }

    /// The leading devices of the cheapest choice, found switch by switch; `None` if no choice takes all leading devices, with
    /// enough followers near and on no more switches than allowed.
    fn run(&self, problem: &Problem<'_>) -> Option<CandidateSet> {
        let (n_near, n_used) = (self.n_near(), self.n_used());
        let half = n_near * n_used * (self.n_leading + 1);
        // The first half has the ways that use nothing of the current NUMA node.
        let mut ways = vec![NO_WAY; half * 2];
        // The first state has no device yet, and every way begins there.
        ways.first_mut()?.cost = 0;
        // Two tables, so that no way takes devices of one switch twice.
        let mut next = ways.clone();
        for numa in &problem.numas {
            for switch in &numa.switches {
                next.copy_from_slice(&ways);
                self.step(problem, numa, switch, &ways, &mut next);
                std::mem::swap(&mut ways, &mut next);
            }
            // The next NUMA node is new to every state, whichever of its predecessors are used.
            let (unused, used) = ways.split_at_mut(half);
            for (unused, used) in unused.iter_mut().zip(used) {
                if used.cost < unused.cost {
                    *unused = *used;
                }
                *used = NO_WAY;
            }
        }
        let mut best = NO_WAY;
        for used in 0..n_used {
            // All leading devices are taken, and as many followers are near as the limits demand.
            let complete = ways.get((self.n_leading * n_used + used) * n_near + n_near - 1)?;
            if complete.cost < best.cost {
                best = *complete;
            }
        }
        (best.cost != u128::MAX).then_some(best.chosen)
    }

    /// Goes on from every way in `ways` with each number of devices of one switch, and keeps the cheapest ways in `next`.
    fn step(&self, problem: &Problem<'_>, numa: &Numa, switch: &Switch, ways: &[Way], next: &mut [Way]) {
        let order = problem.lead.by_preference(switch.lead);
        let (n_near, n_used) = (self.n_near(), self.n_used());
        let half = n_near * n_used * (self.n_leading + 1);
        for (state, way) in ways.iter().enumerate().filter(|(_, way)| way.cost != u128::MAX) {
            let is_numa_used = state >= half;
            let taken = state % half / n_near / n_used;
            let used = state / n_near % n_used + usize::from(self.max_switches.is_some());
            // One switch more would be more than are allowed.
            if used == n_used && self.max_switches.is_some() {
                continue;
            }
            let near = self.near(state % n_near, switch, (!is_numa_used).then_some(numa));
            let mut way = Way {
                cost: way.cost + cost_of_switch(problem, switch, (!is_numa_used).then_some(numa)),
                chosen: way.chosen,
            };
            // Of one switch the preferred devices are taken first: any others would cost more and be no nearer.
            for (count, at) in (1..).zip(order.iter().take(self.n_leading - taken)) {
                way.cost += cost_of_device(problem.lead.preference(*at), *at);
                way.chosen = way.chosen.with(*at);
                // The state with these devices taken; the switch's NUMA node is in use there, so it is in the second half.
                let to = half + ((taken + count) * n_used + used) * n_near + near;
                if let Some(known) = next.get_mut(to).filter(|known| way.cost < known.cost) {
                    *known = way;
                }
            }
        }
    }

    /// The numbers of followers near, one digit for each type by [`Self::bases`]: the numbers `before`, and the followers that a
    /// switch adds, or its NUMA node if it is new, by the limit of the type.
    fn near(&self, before: usize, switch: &Switch, new_numa: Option<&Numa>) -> usize {
        let (mut rest, mut near, mut digit) = (before, 0, 1);
        for (at, (base, limit)) in self.bases.iter().zip(&self.limits).enumerate() {
            let more = match limit {
                Distance::Switch => switch.n_followers.get(at),
                Distance::Numa => new_numa.and_then(|numa| numa.n_followers.get(at)),
                Distance::Machine => None,
            };
            // More followers than requested are no better than enough, and counting no further keeps the table small.
            near += (rest % base + more.copied().unwrap_or(0)).min(base - 1) * digit;
            (rest, digit) = (rest / base, digit * base);
        }
        near
    }
}

/// The cost of using a switch, and its NUMA node if that is new, in one number whose bits from the highest on weigh as the fields
/// of [`Rank`], and do not overflow into each other: at most 64 devices are taken, and more than 127 follower types count as 127.
fn cost_of_switch(problem: &Problem<'_>, switch: &Switch, new_numa: Option<&Numa>) -> u128 {
    let closeness = u128::from(new_numa.is_some()) << 7 | 1;
    let bare_switches = u128::from(n_bare(&switch.n_followers).min(127));
    let bare_numas = u128::from(new_numa.map_or(0, |numa| n_bare(&numa.n_followers)).min(127));
    let bare = bare_switches << 13 | bare_numas;
    if problem.closeness_first {
        closeness << 114 | bare << 88
    } else {
        bare << 102 | closeness << 88
    }
}

/// The cost of using a device: its preference, then its minor, such that the lowest minors cost least.
fn cost_of_device(preference: u32, at: usize) -> u128 {
    u128::from(preference) << 72 | ((1 << 64) - u128::from(CandidateSet::EMPTY.with(at).lowness()))
}
