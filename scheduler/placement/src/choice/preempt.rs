//! Preemption: chooses the victims on a node so that a request fits, as few and as unimportant as kube-scheduler would, but by
//! device, which kube-scheduler cannot know.
//!
//! The search evicts, on a copy of the node, the holders of one set of GPUs, the least important first, until the request fits;
//! then it reprieves each that can stay, the most important first. It finds victims wherever evicting all pods that may be
//! evicted helps, and none of them could stay. Of a few pods it tries every set; of more, a slightly better set may exist.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use crate::choice::node_choice::fit;
use crate::data::device::{Device, DeviceLocation};
use crate::data::holding::{Held, Hints};
use crate::data::ident::OwnerId;
use crate::data::indices_where;
use crate::data::request::{DeviceRequest, NodeRequest, RequestedGpus};
use crate::state::charges::gpus_of_holdings;
use crate::state::node::Node;

/// Most sets of GPUs that are tried on one node, besides those that its topology defines: all sets of 4 of 8 GPUs.
const MAX_SETS: usize = 70;

/// Most comparisons of the request with one node, since kube-scheduler waits for the answer about all nodes.
const MAX_CHECKS: u32 = 4096;

/// Most pods of which the search tries every set: 256 sets.
const FEW_PODS: usize = 8;

/// A pod that may be evicted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Evictable {
    /// The pod, as an owner of holdings; it may hold nothing.
    pub owner: OwnerId,
    /// The pod's priority: pods of low priority are evicted first.
    pub priority: i32,
    /// The time of the pod's start, in any unit: of equal pods the last to start is evicted first.
    pub started: i64,
    /// True if the pod is being deleted anyway, so that its eviction costs nothing except of its budgets.
    pub is_leaving: bool,
    /// True if the pod must be among the victims, for reasons that the search does not know.
    pub is_forced: bool,
    /// The disruption budgets that its eviction draws on, by their indices in [`Preemption::budgets`].
    pub budgets: Vec<usize>,
    /// The amounts that its eviction frees, of the resources and in the order of [`Preemption::must_free`].
    pub frees: Vec<u64>,
}

/// The pods of a node that may be evicted for a request, and the limits on their eviction.
#[derive(Clone, Copy, Debug)]
pub struct Preemption<'a> {
    /// The pods that may be evicted.
    pub pods: &'a [Evictable],
    /// The number of evictions that each budget allows.
    pub budgets: &'a [i64],
    /// The amounts that all victims together must free of resources that kube-scheduler counts by node, such as CPU.
    pub must_free: &'a [u64],
    /// The pods whose hints do not count against the request: the preemptor, and pods of lower priority.
    pub outranked: &'a [OwnerId],
}

/// The pods to evict.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Victims {
    /// The pods by falling importance: priority, then start.
    pub owners: Vec<OwnerId>,
    /// The number of these pods whose eviction violates a disruption budget.
    pub n_violations: usize,
    /// The cost of their eviction: of several nodes the one with the least cost is the best.
    pub cost: EvictionCost,
}

/// The cost of evicting a set of pods, in the order in which kube-scheduler compares nodes; the first field weighs most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct EvictionCost {
    /// Number of victims whose eviction violates a disruption budget.
    n_violations: usize,
    /// The priority of the most important victim.
    highest_priority: i64,
    /// Sum of the priorities, each raised by 2^31 so that none is negative: more victims cost more.
    priority_sum: i64,
    n_victims: usize,
    /// The earliest start among the victims with the highest priority; the later it is, the less work is lost.
    started: Reverse<i64>,
}

/// The victims by which a request fits on a node, none if it fits as it is; `None` if evicting all pods that may be evicted
/// does not help.
pub(crate) fn preempt(node: &Node, request: NodeRequest<'_>, preemption: Preemption<'_>) -> Option<Victims> {
    let mut search = VictimSearch::new(node, request, preemption);
    let (cost, victims) = search.best()?;
    let order = search.by_importance(&victims);
    Some(Victims {
        cost,
        n_violations: n_violations(order.iter().copied(), preemption.budgets),
        owners: order.iter().map(|pod| pod.owner.clone()).collect(),
    })
}

/// Groups of pods, by their indices, to evict one group after the other until the request fits.
type EvictionOrder = Vec<Vec<usize>>;

/// The cheapest victims so far, by their indices, and their cost.
type Best = Option<(EvictionCost, Vec<usize>)>;

/// The search for victims on one node, with the pods that it has evicted from its copy of the node at the moment.
struct VictimSearch<'a> {
    request: NodeRequest<'a>,
    preemption: Preemption<'a>,
    /// A copy of the node, without the evicted pods.
    node: Node,
    /// The states of the pods of [`Preemption::pods`], in the same order.
    pods: Vec<PodState>,
    /// Number of comparisons of the request with the copy so far, at most about [`MAX_CHECKS`].
    n_checks: u32,
}

/// The state of one pod that may be evicted, at the same index as in [`Preemption::pods`].
struct PodState {
    /// Its holding on the node, which comes back when the search restores the pod.
    held: Option<Held>,
    /// Indices of the GPUs that it holds a part of.
    gpus: BTreeSet<usize>,
    /// True if it holds a device of a type other than GPU that the preemptor requests.
    holds_requested_devices: bool,
    /// All GPU memory that it holds, in bytes.
    size: u128,
    /// 2 if a disruption budget allows no eviction of the pod, 1 if all its budgets allow one, 0 if no budget selects it.
    protection: u8,
    /// True while the search has taken the pod off its copy of the node.
    is_evicted: bool,
}

impl<'a> VictimSearch<'a> {
    /// A search that has evicted no pod yet.
    fn new(node: &Node, request: NodeRequest<'a>, preemption: Preemption<'a>) -> Self {
        // The search evicts and restores pods many times, so it works on a copy, which no other request sees.
        let node = node.copy_with_hints(|owner| !preemption.outranked.contains(owner));
        let mut pods = Vec::with_capacity(preemption.pods.len());
        for pod in preemption.pods {
            pods.push(PodState::new(pod, &node, request.others, preemption.budgets));
        }
        Self {
            pods,
            request,
            preemption,
            node,
            n_checks: 0,
        }
    }

    /// The cheapest set of victims that the search finds.
    fn best(&mut self) -> Best {
        // If the eviction of all pods does not help, no smaller set does.
        let all_pods: Vec<usize> = (0..self.pods.len()).collect();
        self.evict(&all_pods);
        if !self.fits() {
            return None;
        }
        let mut best: Best = None;
        if self.pods.len() <= FEW_PODS {
            self.try_every_subset(&mut best);
            return best;
        }
        let mut tried: BTreeSet<EvictionOrder> = BTreeSet::new();
        for gpus in self.sets_of_gpus() {
            for by_device_first in [true, false] {
                let order = self.eviction_order(&gpus, by_device_first);
                // Without any victims yet the search goes on: some set helps, as the eviction of all pods does.
                let may_try = best.is_none() || self.n_checks < MAX_CHECKS;
                if may_try && tried.insert(order.clone()) {
                    self.evict_and_reprieve(&order, &mut best);
                }
            }
        }
        best
    }

    /// Tries every set of the pods that may be evicted, and keeps the cheapest one with which the request fits. The bits of a
    /// number are one set, so that [`FEW_PODS`] pods take 256 steps.
    fn try_every_subset(&mut self, best: &mut Best) {
        let mut forced = 0_usize;
        for (at, pod) in self.preemption.pods.iter().enumerate() {
            // One mask of all forced pods, so that a set without one of them is found by one comparison.
            forced |= usize::from(pod.is_forced) << at;
        }
        for bits in 0..1_usize << self.pods.len() {
            let mut set = Vec::new();
            for at in 0..self.pods.len() {
                if bits & (1 << at) != 0 {
                    set.push(at);
                }
            }
            // The cost is compared first, as it takes less time than the comparison of the request with the node.
            let cost = self.cost(&set);
            // Of equal costs the smaller set: pods that are being deleted anyway cost nothing, but need not all go.
            let is_cheapest = match best {
                Some((cheapest, known)) => (&cost, set.len()) < (&*cheapest, known.len()),
                None => true,
            };
            if bits & forced != forced || !is_cheapest {
                continue;
            }
            self.restore_all();
            self.evict(&set);
            if self.fits() {
                *best = Some((cost, set));
            }
        }
    }

    /// Evicts group after group until the request fits, then reprieves the pods that can stay, in two orders.
    fn evict_and_reprieve(&mut self, order: &EvictionOrder, best: &mut Best) {
        // The copy of the node still lacks the pods that were evicted before.
        self.restore_all();
        let mut last = &[][..];
        let mut fits = self.fits();
        for group in order {
            if fits {
                break;
            }
            self.evict(group);
            last = group;
            fits = self.fits();
        }
        // Without the eviction of the last group the request does not fit, so at least one pod of this group is a victim.
        let least_important = self.by_importance(last).pop();
        // So each set of this order has a victim no less important than that pod, and a known set of less important pods
        // without a violation stays better.
        let cannot_win = match (&*best, least_important) {
            (Some((cost, _)), Some(pod)) => {
                cost.n_violations == 0 && cost.highest_priority < i64::from(pod.priority)
            }
            _ => false,
        };
        if !fits || cannot_win {
            return;
        }
        let evicted = self.evicted();
        // Among pods of one priority: early ones first, which spares long work; or small ones first, which spares more pods.
        for small_first in [false, true] {
            self.restore_all();
            self.evict(&evicted);
            self.reprieve(&evicted, small_first);
            let victims = self.evicted();
            let cost = self.cost(&victims);
            match best {
                Some((cheapest, _)) if *cheapest <= cost => {}
                _ => *best = Some((cost, victims)),
            }
        }
    }

    /// Restores each evicted pod beside which the request still fits, the most important first.
    fn reprieve(&mut self, evicted: &[usize], small_first: bool) {
        let mut keyed = Vec::with_capacity(evicted.len());
        for at in evicted {
            // A forced victim stays one, whether or not the request fits without its eviction.
            if let (Some(pod), Some(state)) = (self.pod(*at), self.pods.get(*at))
                && !pod.is_forced
            {
                let size = if small_first { state.size } else { 0 };
                let importance = (
                    Reverse(state.protection),
                    Reverse(pod.priority),
                    size,
                    pod.started,
                );
                // Pods that are being deleted anyway are restored last, since they are the cheapest victims.
                keyed.push(((pod.is_leaving, importance, &pod.owner), *at));
            }
        }
        keyed.sort();
        for (_, at) in keyed {
            self.restore(at);
            if !self.fits() {
                self.evict(&[at]);
            }
        }
    }

    /// Returns true if the evicted pods free enough of the sums in [`Preemption::must_free`], and the request fits on the copy
    /// of the node without these pods.
    fn fits(&mut self) -> bool {
        self.n_checks += 1;
        for (sum, needed) in self.preemption.must_free.iter().enumerate() {
            let mut freed = 0_u64;
            for (state, pod) in self.pods.iter().zip(self.preemption.pods) {
                if state.is_evicted {
                    // A saturated sum is enough for any amount that is needed.
                    freed = freed.saturating_add(pod.frees.get(sum).copied().unwrap_or(0));
                }
            }
            if freed < *needed {
                return false;
            }
        }
        fit(&self.node, self.request, Hints::Respect).is_ok()
    }

    /// Marks pods as evicted, and removes what they hold from the copy of the node.
    fn evict(&mut self, pods: &[usize]) {
        let mut owners = BTreeSet::new();
        for at in pods {
            if let (Some(state), Some(pod)) = (self.pods.get_mut(*at), self.preemption.pods.get(*at)) {
                state.is_evicted = true;
                if state.held.is_some() {
                    owners.insert(pod.owner.as_str());
                }
            }
        }
        if !owners.is_empty() {
            // One removal for all, since the node computes its free amounts from scratch at each change.
            self.node.remove_all_held(&owners);
        }
    }

    /// Puts an evicted pod back onto the copy of the node.
    fn restore(&mut self, at: usize) {
        let Some(state) = self.pods.get_mut(at) else {
            return;
        };
        // Each insertion computes the node's free amounts again, so a pod that is not evicted is not inserted.
        if std::mem::take(&mut state.is_evicted)
            && let Some(held) = &state.held
        {
            self.node.insert_held(held.clone());
        }
    }

    fn restore_all(&mut self) {
        for at in 0..self.pods.len() {
            self.restore(at);
        }
    }

    /// Indices of the pods that are evicted at the moment.
    fn evicted(&self) -> Vec<usize> {
        indices_where(&self.pods, |state| state.is_evicted).collect()
    }

    fn pod(&self, at: usize) -> Option<&'a Evictable> {
        self.preemption.pods.get(at)
    }

    /// The order in which to evict pods for a set of GPUs: first pods that go in any case, then holders of these GPUs, holders of
    /// other requested devices, and the rest; within each of these by protection and priority. Without `by_device_first` the
    /// protection weighs more than the devices.
    fn eviction_order(&self, gpus: &BTreeSet<usize>, by_device_first: bool) -> EvictionOrder {
        let mut keyed = Vec::with_capacity(self.pods.len());
        for (at, (state, pod)) in self.pods.iter().zip(self.preemption.pods).enumerate() {
            let by_device = if !state.gpus.is_disjoint(gpus) {
                0
            } else if state.holds_requested_devices {
                1
            } else {
                2_u8
            };
            let (first, second) = if by_device_first {
                (by_device, state.protection)
            } else {
                (state.protection, by_device)
            };
            let key = (first, second, pod.priority);
            let goes_anyway = pod.is_leaving || pod.is_forced;
            // `None` sorts before every key, so that such pods form the first group.
            keyed.push((Some(key).filter(|_| !goes_anyway), at));
        }
        keyed.sort_unstable();
        let mut order = EvictionOrder::new();
        for group in keyed.chunk_by(|(key, _), (other, _)| key == other) {
            order.push(group.iter().map(|(_, at)| *at).collect());
        }
        order
    }

    /// The sets of GPUs that the search tries: for several GPUs those of the topology; all of the needed size if they are few,
    /// else growing ones; last, all GPUs.
    fn sets_of_gpus(&self) -> Vec<BTreeSet<usize>> {
        let n_gpus = self.node.gpus().len();
        let n_needed = match self.request.gpus {
            RequestedGpus::Share(request) => usize::try_from(request.devices).unwrap_or(usize::MAX),
            RequestedGpus::Whole(n) => usize::try_from(n).unwrap_or(usize::MAX),
            RequestedGpus::All { .. } => n_gpus,
            RequestedGpus::Nothing => 0,
        };
        let mut sets = if n_needed > 1 {
            self.sets_by_topology(n_needed)
        } else {
            Vec::new()
        };
        sets.extend(combinations(n_gpus, n_needed).unwrap_or_else(|| self.growing_sets(n_needed)));
        // Last, so that the search finds victims wherever evicting all pods helps.
        sets.push((0..n_gpus).collect());
        sets
    }

    /// The GPUs of each partition, switch and NUMA node that has enough; small sets first.
    fn sets_by_topology(&self, n_needed: usize) -> Vec<BTreeSet<usize>> {
        let gpus = self.node.gpus();
        let mut sets: Vec<BTreeSet<usize>> = Vec::new();
        for gpu in gpus {
            if let Some(location) = &gpu.attributes.location {
                sets.push(self.gpus_at(|other| other.numa == location.numa));
                sets.push(self.gpus_at(|other| other == location));
            }
        }
        let inventory = &self.node.inventory;
        for partition in inventory.partitions.iter().flat_map(|table| &table.partitions) {
            sets.push(inventory.indices_of(&partition.minors));
        }
        sets.retain(|set| set.len() >= n_needed);
        // Small sets first, since fewer pods hold a part of them.
        sets.sort_unstable_by(|one, other| (one.len(), one).cmp(&(other.len(), other)));
        sets.dedup();
        sets
    }

    /// Indices of the GPUs whose locations meet a condition; a GPU of unknown location meets none.
    fn gpus_at(&self, is_there: impl Fn(&DeviceLocation) -> bool) -> BTreeSet<usize> {
        let is_located = |gpu: &Device| gpu.attributes.location.as_ref().is_some_and(&is_there);
        indices_where(self.node.gpus(), is_located).collect()
    }

    /// Sets of the GPUs whose holders cost least to evict: as many as needed, one more, and so on.
    fn growing_sets(&self, n_needed: usize) -> Vec<BTreeSet<usize>> {
        let mut gpus: Vec<usize> = (0..self.node.gpus().len()).collect();
        // Cached, since each cost walks through all holders of a GPU and their budgets.
        gpus.sort_by_cached_key(|gpu| self.cost(&self.holders_of(*gpu)));
        let sizes = n_needed..gpus.len();
        sizes.map(|n| gpus.iter().take(n).copied().collect()).collect()
    }

    /// Indices of the pods that hold something of a GPU.
    fn holders_of(&self, gpu: usize) -> Vec<usize> {
        indices_where(&self.pods, |state| state.gpus.contains(&gpu)).collect()
    }

    /// The cost of evicting the pods at these indices.
    fn cost(&self, victims: &[usize]) -> EvictionCost {
        // `n_violations` draws on the budgets in this order too.
        let order = self.by_importance(victims);
        let mut cost = EvictionCost {
            n_violations: n_violations(order.iter().copied(), self.preemption.budgets),
            highest_priority: i64::MIN,
            priority_sum: 0,
            n_victims: 0,
            started: Reverse(i64::MAX),
        };
        for pod in order {
            // A pod that is being deleted anyway costs nothing but its budget.
            if pod.is_leaving {
                continue;
            }
            let priority = i64::from(pod.priority);
            // The pods come by falling priority, and those of one priority by their start: the first has both extremes.
            if cost.n_victims == 0 {
                (cost.highest_priority, cost.started) = (priority, Reverse(pod.started));
            }
            cost.n_victims += 1;
            cost.priority_sum = cost.priority_sum.saturating_add(priority - i64::from(i32::MIN));
        }
        cost
    }

    /// The pods at these indices, by falling importance.
    fn by_importance(&self, pods: &[usize]) -> Vec<&'a Evictable> {
        by_importance(pods.iter().filter_map(|at| self.pod(*at)))
    }
}

impl PodState {
    /// The state of a pod before the search, with its holdings on the node and its protection by disruption budgets.
    fn new(pod: &Evictable, node: &Node, requests: &[DeviceRequest], budgets: &[i64]) -> Self {
        let held = node.held_by(pod.owner.as_str()).cloned();
        let (mut gpus, mut size, mut holds_requested_devices) = (BTreeSet::new(), 0_u128, false);
        if let Some(held) = &held {
            for (gpu, memory) in gpus_of_holdings(&node.inventory, &held.holdings) {
                gpus.insert(gpu);
                size += u128::from(memory.bytes_ceil());
            }
            for part in &held.holdings.parts {
                holds_requested_devices |= requests.iter().any(|request| request.kind == part.kind);
            }
        }
        // The strictest budget decides.
        let allowed = pod.budgets.iter().filter_map(|budget| budgets.get(*budget)).min();
        let protection = allowed.map_or(0, |allowed| if *allowed <= 0 { 2 } else { 1 });
        Self {
            held,
            gpus,
            holds_requested_devices,
            size,
            protection,
            is_evicted: false,
        }
    }
}

/// Pods by falling importance: by falling priority, and pods of one priority by their start, the earliest first.
fn by_importance<'a>(pods: impl Iterator<Item = &'a Evictable>) -> Vec<&'a Evictable> {
    let mut pods: Vec<&Evictable> = pods.collect();
    // By the owner last, so that the order of equal pods does not depend on the caller's.
    pods.sort_by_key(|pod| (Reverse(pod.priority), pod.started, &pod.owner));
    pods
}

/// The number of these pods whose eviction violates a disruption budget.
///
/// As in kube-scheduler, pods draw on their budgets by falling importance, and each that finds one used up counts.
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

/// All sets of `size` of the numbers below `n`; `None` if there are more than [`MAX_SETS`].
pub(crate) fn combinations(n: usize, size: usize) -> Option<Vec<BTreeSet<usize>>> {
    let mut sets = vec![BTreeSet::new()];
    for _ in 0..size.min(n) {
        let mut longer: Vec<BTreeSet<usize>> = Vec::new();
        for set in &sets {
            // A set only grows by numbers above its largest one, so that no set comes up twice.
            for next in set.last().map_or(0, |last| last + 1)..n {
                let mut set = set.clone();
                set.insert(next);
                longer.push(set);
            }
        }
        sets = longer;
        // Checked at every size: the sets of half of many GPUs would fill the memory before the last size is reached.
        if sets.len() > MAX_SETS {
            return None;
        }
    }
    Some(sets)
}
