//! Chooses the victims on a node so that a request fits there: as few, and as unimportant, as kube-scheduler would have it.
//!
//! kube-scheduler chooses victims by a node's sums, and cannot know on which device a pod sits. The search chooses them by
//! device: the holders of one set of GPUs, the least important first, until the request fits; then it reprieves each that can
//! stay, the most important first. It tries every set of GPUs that might serve, and the best set of victims wins.
//!
//! The search is bounded. It finds victims wherever evicting all that may be evicted helps, and no pod among them could stay.
//! Of a few pods every set is tried; of more, with many sizes and priorities, there may be a set that is a little better.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use crate::class::ClassRequest;
use crate::fit::Hints;
use crate::fleet::{Fleet, NodeId};
use crate::holding::Holdings;
use crate::ident::OwnerId;
use crate::node::{Held, Node};
use crate::request::{Ask, GpuAsk};

/// Most sets of GPUs that are tried on one node, besides those that its topology names.
const MOST_SETS: usize = 70;

/// Most comparisons of the request with one node.
const MOST_CHECKS: u32 = 4096;

/// Most pods of which every set is tried.
const FEW_PODS: usize = 8;

/// A pod that may be evicted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Evictable {
    /// Its owner of holdings, if it has any.
    pub owner: OwnerId,
    /// Its rank: pods of low priority go first.
    pub priority: i32,
    /// The time at which it began to run, on any scale: of equal pods the one that began last goes first.
    pub started: i64,
    /// True if it is being deleted anyway, so that it is a victim at no cost.
    pub is_leaving: bool,
    /// True if it must be among the victims, for reasons that the search does not weigh.
    pub is_forced: bool,
    /// The budgets that its eviction draws on, by their places in [`Preemption::budgets`].
    pub budgets: Vec<usize>,
    /// The amount of each sum that its eviction frees, as in [`Preemption::must_free`].
    pub frees: Vec<u64>,
}

/// The pods of a node that may be evicted for a request, and the limits on their eviction.
#[derive(Clone, Copy, Debug)]
pub struct Preemption<'a> {
    /// The pods that may be evicted.
    pub pods: &'a [Evictable],
    /// The number of evictions that each budget allows.
    pub budgets: &'a [i64],
    /// The amounts that victims must free together, by sums that are not those of devices.
    pub must_free: &'a [u64],
    /// The owners whose hints do not count against the request: the one that asks, and those of lower priority.
    pub outranked: &'a [OwnerId],
}

/// The pods that must go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Victims {
    /// By falling importance: priority, then start.
    pub owners: Vec<OwnerId>,
    /// The number of these pods whose eviction violates a budget.
    pub n_violations: usize,
}

/// The cost of evicting a set of pods, in the order in which kube-scheduler compares nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Cost {
    n_violations: usize,
    highest: i64,
    /// Sum of the priorities, each raised so that none is negative: more victims cost more.
    sum: i64,
    n_victims: usize,
    /// The earliest start among the victims with the highest priority.
    started: Reverse<i64>,
}

impl Fleet {
    /// The victims by which a request fits on a node; `None` if evicting all pods that may be evicted does not help.
    ///
    /// Empty if the request fits as it is.
    pub fn preempt(&self, node: NodeId, ask: Ask<'_>, preemption: Preemption<'_>) -> Option<Victims> {
        let mut search = Search::of(self.node(node)?, ask, preemption);
        let (_, victims) = search.best()?;
        Some(search.victims(&victims))
    }
}

/// One way through the pods: levels that are evicted together, one after the other, until the request fits.
type Levels = Vec<Vec<usize>>;

struct Search<'a> {
    ask: Ask<'a>,
    preemption: Preemption<'a>,
    /// A copy of the node, without the pods that are away.
    node: Node,
    pods: Vec<Pod>,
    n_checks: u32,
}

/// The state of one pod that may be evicted, at the same place as in [`Preemption::pods`].
struct Pod {
    held: Option<Held>,
    /// The GPUs that it holds something of.
    rows: BTreeSet<usize>,
    /// True if it holds a device of another type that is asked for.
    holds_others: bool,
    /// All that it holds of GPUs' memory, in bytes.
    size: u128,
    /// 2 if a budget forbids its eviction, 1 if one counts it, 0 without.
    protection: u8,
    is_away: bool,
}

impl<'a> Search<'a> {
    fn of(node: &Node, ask: Ask<'a>, preemption: Preemption<'a>) -> Self {
        let node = node.copy_heeding(|owner| !preemption.outranked.contains(owner));
        let pods = preemption
            .pods
            .iter()
            .map(|pod| Pod::of(pod, &node, ask.others, preemption.budgets))
            .collect();
        Self {
            ask,
            preemption,
            node,
            pods,
            n_checks: 0,
        }
    }

    /// The cheapest set of victims that was found.
    fn best(&mut self) -> Option<(Cost, Vec<usize>)> {
        let everything: Vec<usize> = (0..self.pods.len()).collect();
        self.evict(&everything);
        if !self.fits() {
            return None;
        }
        let mut best: Option<(Cost, Vec<usize>)> = None;
        if self.pods.len() <= FEW_PODS {
            self.try_every_subset(&mut best);
            return best;
        }
        let mut tried: BTreeSet<Levels> = BTreeSet::new();
        for rows in self.sets() {
            for by_device_first in [true, false] {
                let levels = self.levels(&rows, by_device_first);
                if tried.insert(levels.clone()) && (best.is_none() || self.n_checks < MOST_CHECKS) {
                    self.walk(&levels, &mut best);
                }
            }
        }
        best
    }

    /// Compares every set of victims that there is, where there are few.
    fn try_every_subset(&mut self, best: &mut Option<(Cost, Vec<usize>)>) {
        for bits in 0..1_usize << self.pods.len() {
            let is_in = |at: &usize| bits & (1 << at) != 0;
            let set: Vec<usize> = (0..self.pods.len()).filter(is_in).collect();
            let is_forced = |at: usize| self.pod(at).is_some_and(|pod| pod.is_forced);
            let lacks_forced = (0..self.pods.len()).any(|at| is_forced(at) && !is_in(&at));
            let cost = self.cost(&set);
            let is_better =
                |(cheapest, before): &(Cost, Vec<usize>)| (&cost, set.len()) < (cheapest, before.len());
            if lacks_forced || !best.as_ref().is_none_or(is_better) {
                continue;
            }
            self.restore_all();
            self.evict(&set);
            if self.fits() {
                *best = Some((cost, set));
            }
        }
    }

    /// Evicts level by level until the request fits, then reprieves the pods that can stay, in two orders.
    fn walk(&mut self, levels: &Levels, best: &mut Option<(Cost, Vec<usize>)>) {
        self.restore_all();
        let mut last = &[][..];
        let mut fits = self.fits();
        for level in levels {
            if fits {
                break;
            }
            self.evict(level);
            last = level;
            fits = self.fits();
        }
        // Without the last level the request does not fit, so at least one of its pods is a victim.
        let highest = last
            .iter()
            .filter_map(|at| self.pod(*at))
            .map(|pod| i64::from(pod.priority))
            .min();
        let is_worse = |(cost, _): &(Cost, Vec<usize>)| {
            cost.n_violations == 0 && highest.is_some_and(|highest| cost.highest < highest)
        };
        if !fits || best.as_ref().is_some_and(is_worse) {
            return;
        }
        let away = self.away();
        for small_first in [false, true] {
            self.restore_all();
            self.evict(&away);
            self.spare(&away, small_first);
            let victims = self.away();
            let cost = self.cost(&victims);
            if best.as_ref().is_none_or(|(cheapest, _)| cost < *cheapest) {
                *best = Some((cost, victims));
            }
        }
    }

    /// Puts back each of these pods without which the request still fits, the most important first.
    fn spare(&mut self, away: &[usize], small_first: bool) {
        let mut order: Vec<usize> = away
            .iter()
            .copied()
            .filter(|at| self.pod(*at).is_some_and(|pod| !pod.is_forced))
            .collect();
        order.sort_by_cached_key(|at| {
            let (pod, own) = (self.pod(*at), self.pods.get(*at));
            let protection = own.map_or(0, |own| own.protection);
            let size = own.filter(|_| small_first).map(|own| own.size);
            pod.map(|pod| {
                (
                    pod.is_leaving,
                    Reverse(protection),
                    Reverse(pod.priority),
                    size,
                    pod.started,
                    pod.owner.clone(),
                )
            })
        });
        for at in order {
            self.restore(at);
            if !self.fits() {
                self.evict(&[at]);
            }
        }
    }

    fn fits(&mut self) -> bool {
        self.n_checks += 1;
        let frees = |sum: usize| {
            let away = self
                .pods
                .iter()
                .zip(self.preemption.pods)
                .filter(|(own, _)| own.is_away);
            away.fold(0_u64, |freed, (_, pod)| {
                freed.saturating_add(pod.frees.get(sum).copied().unwrap_or(0))
            })
        };
        let mut sums = self.preemption.must_free.iter().enumerate();
        sums.all(|(sum, needed)| frees(sum) >= *needed) && self.node.fit_all(self.ask, Hints::Respect).is_ok()
    }

    fn evict(&mut self, pods: &[usize]) {
        let mut owners = BTreeSet::new();
        for at in pods {
            if let (Some(own), Some(pod)) = (self.pods.get_mut(*at), self.preemption.pods.get(*at)) {
                own.is_away = true;
                owners.extend(own.held.is_some().then_some(pod.owner.as_str()));
            }
        }
        if !owners.is_empty() {
            self.node.take_all(&owners);
        }
    }

    fn restore(&mut self, at: usize) {
        if let Some(own) = self.pods.get_mut(at).filter(|own| own.is_away) {
            own.is_away = false;
            if let Some(held) = &own.held {
                self.node.put(held.clone());
            }
        }
    }

    fn restore_all(&mut self) {
        for at in 0..self.pods.len() {
            self.restore(at);
        }
    }

    fn away(&self) -> Vec<usize> {
        self.pods
            .iter()
            .enumerate()
            .filter(|(_, own)| own.is_away)
            .map(|(at, _)| at)
            .collect()
    }

    fn pod(&self, at: usize) -> Option<&'a Evictable> {
        self.preemption.pods.get(at)
    }

    /// The order in which the search evicts pods for these GPUs: pods that cost nothing, then the GPUs' holders, holders of
    /// other requested devices, and the rest, in each by protection and priority; or by protection before all.
    fn levels(&self, rows: &BTreeSet<usize>, by_device_first: bool) -> Levels {
        let key = |at: usize| {
            let (own, pod) = (self.pods.get(at)?, self.pod(at)?);
            if pod.is_leaving || pod.is_forced {
                return None;
            }
            let distance = match own {
                own if !own.rows.is_disjoint(rows) => 0,
                own if own.holds_others => 1,
                _ => 2_u8,
            };
            let (first, second) = if by_device_first {
                (distance, own.protection)
            } else {
                (own.protection, distance)
            };
            Some((first, second, pod.priority))
        };
        let mut keyed: Vec<_> = (0..self.pods.len()).map(|at| (key(at), at)).collect();
        keyed.sort_unstable();
        keyed
            .chunk_by(|(key, _), (other, _)| key == other)
            .map(|level| level.iter().map(|(_, at)| *at).collect())
            .collect()
    }

    /// The sets of GPUs that may serve the request.
    fn sets(&self) -> Vec<BTreeSet<usize>> {
        let n_gpus = self.node.gpus().len();
        let all: BTreeSet<usize> = (0..n_gpus).collect();
        let n_needed = match self.ask.gpus {
            GpuAsk::Share(request) => usize::try_from(request.devices).unwrap_or(usize::MAX),
            GpuAsk::Whole(n) => usize::try_from(n).unwrap_or(usize::MAX),
            GpuAsk::All { .. } => n_gpus,
            GpuAsk::Nothing => 0,
        };
        let mut sets = self.sets_by_topology(n_needed);
        sets.extend(combinations(n_gpus, n_needed).unwrap_or_else(|| self.growing_sets(n_needed)));
        sets.push(all);
        sets
    }

    /// GPUs that partitions, switches and NUMA nodes hold together, if there are enough of them.
    fn sets_by_topology(&self, n_needed: usize) -> Vec<BTreeSet<usize>> {
        let places = || {
            self.node
                .gpus()
                .iter()
                .map(|gpu| gpu.traits.place.as_ref())
                .enumerate()
        };
        let mut sets: Vec<BTreeSet<usize>> = Vec::new();
        for (_, place) in places() {
            let Some(place) = place else { continue };
            let with = |same: &dyn Fn(&crate::traits::Place) -> bool| {
                places()
                    .filter(|(_, other)| other.is_some_and(same))
                    .map(|(at, _)| at)
                    .collect::<BTreeSet<usize>>()
            };
            sets.push(with(&|other| other.numa == place.numa));
            sets.push(with(&|other| {
                other.numa == place.numa && other.switch == place.switch
            }));
        }
        let table = self
            .node
            .inventory
            .as_ref()
            .and_then(|inventory| inventory.partitions.as_ref());
        let row_of = |minor: &u32| self.node.gpus().iter().position(|gpu| gpu.minor == *minor);
        let partitions = table.into_iter().flat_map(|table| &table.partitions);
        sets.extend(partitions.map(|partition| partition.minors.iter().filter_map(row_of).collect()));
        sets.retain(|set| set.len() >= n_needed && n_needed > 1);
        sets.sort_unstable_by(|one, other| one.len().cmp(&other.len()).then_with(|| one.cmp(other)));
        sets.dedup();
        sets
    }

    /// The GPUs whose holders cost least, more and more of them.
    fn growing_sets(&self, n_needed: usize) -> Vec<BTreeSet<usize>> {
        let n_gpus = self.node.gpus().len();
        let cost = |row: &usize| {
            let holders: Vec<usize> = (0..self.pods.len())
                .filter(|at| self.pods.get(*at).is_some_and(|own| own.rows.contains(row)))
                .collect();
            self.cost(&holders)
        };
        let mut rows: Vec<usize> = (0..n_gpus).collect();
        rows.sort_by_cached_key(cost);
        (n_needed..n_gpus)
            .map(|n| rows.iter().take(n).copied().collect())
            .collect()
    }

    fn cost(&self, victims: &[usize]) -> Cost {
        let order = self.by_importance(victims);
        let paid: Vec<&Evictable> = order.iter().copied().filter(|pod| !pod.is_leaving).collect();
        let highest = paid.first().map_or(i64::MIN, |pod| i64::from(pod.priority));
        let raised = |pod: &&Evictable| i64::from(pod.priority) - i64::from(i32::MIN);
        let first = paid
            .iter()
            .take_while(|pod| i64::from(pod.priority) == highest)
            .map(|pod| pod.started)
            .min();
        Cost {
            n_violations: n_violations(order.iter().copied(), self.preemption.budgets),
            highest,
            sum: paid.iter().map(raised).fold(0, i64::saturating_add),
            n_victims: paid.len(),
            started: Reverse(first.unwrap_or(i64::MAX)),
        }
    }

    fn by_importance(&self, pods: &[usize]) -> Vec<&'a Evictable> {
        by_importance(pods.iter().filter_map(|at| self.pod(*at)))
    }

    fn victims(&self, victims: &[usize]) -> Victims {
        let order = self.by_importance(victims);
        Victims {
            n_violations: n_violations(order.iter().copied(), self.preemption.budgets),
            owners: order.iter().map(|pod| pod.owner.clone()).collect(),
        }
    }
}

impl Pod {
    fn of(pod: &Evictable, node: &Node, others: &[ClassRequest], budgets: &[i64]) -> Self {
        let held = node.held_by(pod.owner.as_str()).cloned();
        let (mut rows, mut size) = (BTreeSet::new(), 0_u128);
        if let (Some(held), Some(inventory)) = (&held, &node.inventory) {
            inventory.charge(&held.holdings.gpus, &mut |charge| {
                rows.insert(charge.row);
                size += u128::from(charge.amounts.memory.bytes_ceil());
            });
            // Any GPU may be the one that the vendor's plugin has given it.
            rows.extend((0..inventory.gpus.len()).filter(|_| held.holdings.unknown_whole > 0));
        }
        let is_asked_for = |holdings: &Holdings| {
            holdings
                .others
                .iter()
                .any(|held| others.iter().any(|other| other.kind == held.kind))
        };
        let holds_others = held.as_ref().is_some_and(|held| is_asked_for(&held.holdings));
        let allowed = pod.budgets.iter().filter_map(|budget| budgets.get(*budget)).min();
        let protection = allowed.map_or(0, |allowed| if *allowed <= 0 { 2 } else { 1 });
        Self {
            held,
            rows,
            holds_others,
            size,
            protection,
            is_away: false,
        }
    }
}

/// Pods by falling importance: of higher priority, or of the same and longer on their nodes.
fn by_importance<'a>(pods: impl Iterator<Item = &'a Evictable>) -> Vec<&'a Evictable> {
    let mut pods: Vec<&Evictable> = pods.collect();
    pods.sort_by_key(|pod| (Reverse(pod.priority), pod.started, &pod.owner));
    pods
}

/// The number of these pods whose eviction violates a budget.
///
/// As kube-scheduler counts: pods draw on their budgets by falling importance, and each that finds one used up counts.
pub fn n_violations<'a>(pods: impl Iterator<Item = &'a Evictable>, budgets: &[i64]) -> usize {
    let mut allowed = budgets.to_vec();
    let mut n_violations = 0;
    for pod in by_importance(pods) {
        let mut is_violating = false;
        for budget in &pod.budgets {
            if let Some(allowed) = allowed.get_mut(*budget) {
                *allowed -= 1;
                is_violating |= *allowed < 0;
            }
        }
        n_violations += usize::from(is_violating);
    }
    n_violations
}

/// All sets of `size` of the numbers below `n`, if they are few.
fn combinations(n: usize, size: usize) -> Option<Vec<BTreeSet<usize>>> {
    let mut sets = vec![BTreeSet::new()];
    for _ in 0..size.min(n) {
        let longer = |set: &BTreeSet<usize>| {
            let set = set.clone();
            let first = set.last().map_or(0, |last| last + 1);
            (first..n)
                .map(move |next| set.iter().copied().chain([next]).collect::<BTreeSet<usize>>())
                .collect::<Vec<_>>()
        };
        sets = sets.iter().flat_map(longer).collect();
        if sets.len() > MOST_SETS {
            return None;
        }
    }
    Some(sets)
}
