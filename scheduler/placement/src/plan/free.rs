//! Free memory on GPUs of one node: the sets of GPUs that may be freed, the cheapest first.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::choice::preempt::combinations;
use crate::data::amounts::Memory;
use crate::data::ident::NodeId;
use crate::plan::Plan;
use crate::plan::evacuation::{Evacuation, FEW_HOLDERS, Found, movable_of};
use crate::plan::trials::{Movable, Trials};
use crate::state::node::Node;

/// Most sets that are tried although their holders do not suffice, for the plan that comes nearest to the goal.
const MAX_HOPELESS: usize = 64;

/// A GPU that has the needed memory if it is empty, at this index.
struct Gpu {
    at: usize,
    /// The result of [`least_price`] for the holders that may move: what it costs to free enough memory.
    least_price: u128,
    /// Memory that is free once all that may move have left, if it is too little.
    too_little: Option<Memory>,
}

/// A node with its large GPUs, those with the best chances first.
struct LargeGpus<'a> {
    node: NodeId,
    name: &'a str,
    gpus: Vec<Gpu>,
}

/// GPUs of one node. Sets sort by their chances: those that may suffice by their least price, then the others by their memory.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct GpuSet<'a> {
    too_little: Option<Reverse<Memory>>,
    least_price: u128,
    name: &'a str,
    gpus: Vec<usize>,
    /// The place of its node in the list of nodes, if the set is the one with the best chances of the node.
    first_of: Option<usize>,
    /// The index of its node in the fleet.
    index: u32,
}

/// The plan by which `n_gpus` GPUs of one of the nodes have `bytes` free each.
pub(super) fn free(trials: &mut Trials<'_>, bytes: u64, n_gpus: usize, nodes: &[NodeId]) -> Plan {
    let (fleet, needed) = (trials.fleet, Memory::from_bytes(bytes));
    let mut large = Vec::with_capacity(nodes.len());
    for id in nodes {
        if let Some(node) = fleet.nodes.get(*id) {
            large.push(LargeGpus::new(trials, *id, node, needed));
        }
    }
    let mut sets = BinaryHeap::new();
    for (at, node) in large.iter().enumerate() {
        sets.extend(node.set(0..n_gpus, Some(at)).map(Reverse));
    }
    let mut best: Option<Found> = None;
    let mut n_hopeless = 0;
    while let Some(Reverse(set)) = sets.pop() {
        let reached = match &best {
            Some(best) if best.is_reached => Some(best.price.total()),
            _ => None,
        };
        n_hopeless += usize::from(set.too_little.is_some());
        let is_hopeless = set.too_little.is_some() && (reached.is_some() || n_hopeless > MAX_HOPELESS);
        // The sets come by falling chances, so that no later one is better.
        if is_hopeless || reached.is_some_and(|price| price <= set.least_price) || trials.n_tries_left == 0 {
            break;
        }
        // No set of a node has better chances than its first, so that the others come up after it.
        if let Some(node) = set.first_of.and_then(|at| large.get(at)) {
            sets.extend(node.other_sets(n_gpus).map(Reverse));
        }
        set.evacuation(trials, needed).search(trials, &mut best);
    }
    best.map_or_else(Plan::default, |best| best.into_plan(trials))
}

impl<'a> LargeGpus<'a> {
    /// The GPUs of a node that are open, take shares and have the needed memory, used or free.
    fn new(trials: &Trials<'_>, id: NodeId, node: &'a Node, needed: Memory) -> Self {
        let held = node.held.iter();
        let movable: Vec<Movable> = held.filter_map(|held| trials.movable(node, held).ok()).collect();
        let mut gpus = Vec::new();
        for (at, (gpu, flags)) in node.gpus().iter().zip(&node.flags).enumerate() {
            if !gpu.is_open() || flags.is_withheld || gpu.total().memory < needed {
                continue;
            }
            let free = trials.free_of(id.index, at);
            let (mut items, mut all) = (Vec::new(), free);
            for one in &movable {
                if let Some(memory) = one.gpus.get(&at) {
                    // A part of the price for each of its GPUs, so that a pod on several GPUs of a set counts once at most.
                    items.push((*memory, one.price.total() / one.gpus.len() as u128));
                    all = all.plus(*memory);
                }
            }
            gpus.push(Gpu {
                at,
                least_price: least_price(needed.less(free), &mut items),
                too_little: (all < needed).then_some(all),
            });
        }
        gpus.sort_by_key(|gpu| (gpu.too_little.map(Reverse), gpu.least_price, gpu.at));
        Self {
            node: id,
            name: &node.name,
            gpus,
        }
    }

    /// The set of the GPUs at these places of the list; `None` if there are fewer.
    fn set(&self, places: impl IntoIterator<Item = usize>, first_of: Option<usize>) -> Option<GpuSet<'a>> {
        let mut set = GpuSet {
            too_little: None,
            least_price: 0,
            name: self.name,
            gpus: Vec::new(),
            first_of,
            index: self.node.index,
        };
        for place in places {
            let gpu = self.gpus.get(place)?;
            // The GPU with the least memory decides.
            set.too_little = set.too_little.max(gpu.too_little.map(Reverse));
            set.least_price = set.least_price.saturating_add(gpu.least_price);
            set.gpus.push(gpu.at);
        }
        Some(set)
    }

    /// All sets of `n` GPUs but the first; none if there are more than [`combinations`] lists.
    fn other_sets(&self, n: usize) -> impl Iterator<Item = GpuSet<'a>> {
        let sets = combinations(self.gpus.len(), n).unwrap_or_default().into_iter();
        sets.skip(1).filter_map(|places| self.set(places, None))
    }
}

impl GpuSet<'_> {
    /// The evacuation of these GPUs until each has the needed memory free.
    fn evacuation(self, trials: &Trials<'_>, needed: Memory) -> Evacuation {
        let mut movable = movable_of(trials, self.index, &self.gpus);
        // The least price for each byte comes first, which is the seconds that the pod has run, and its part of a restart.
        movable.sort_by_key(|one| {
            // At least 1: a pod with whole GPUs that are not known counts on every GPU of its node, with no memory.
            let bytes = one.memory_on(&self.gpus).bytes_ceil().max(1);
            (one.price.total() / u128::from(bytes), one.priority)
        });
        Evacuation {
            node: self.index,
            gpus: self.gpus,
            movable,
            free: Some(needed),
            least_price: self.least_price,
        }
    }
}

/// The least price of items (memory of a holder, price of its move) that have the needed memory together; `u128::MAX` if all have
/// too little. Of more than [`FEW_HOLDERS`] items it is the price of a good choice, or of all if they have too little.
fn least_price(needed: Memory, items: &mut [(Memory, u128)]) -> u128 {
    if items.len() <= FEW_HOLDERS {
        let mut least = u128::MAX;
        for bits in 0..1_u32 << items.len() {
            let (mut memory, mut price) = (Memory::ZERO, 0_u128);
            for (at, (more, more_price)) in items.iter().enumerate() {
                if bits & (1 << at) != 0 {
                    memory = memory.plus(*more);
                    price = price.saturating_add(*more_price);
                }
            }
            if memory >= needed {
                least = least.min(price);
            }
        }
        return least;
    }
    items.sort_unstable_by_key(|(memory, price)| price / u128::from(memory.bytes_ceil().max(1)));
    let (mut memory, mut sum) = (Memory::ZERO, 0_u128);
    for (more, price) in items.iter() {
        if memory >= needed {
            break;
        }
        memory = memory.plus(*more);
        sum = sum.saturating_add(*price);
    }
    sum
}
