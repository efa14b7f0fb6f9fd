//! Joining free memory: the moves by which the largest free blocks of the nodes grow most, one after the other.

use std::cmp::Reverse;

use crate::data::amounts::Memory;
use crate::data::device::Device;
use crate::plan::Plan;
use crate::plan::trials::{Movable, Trials};
use crate::state::node::Node;

/// Most moves that are compared for each move of the plan.
const MAX_COMPARED: usize = 256;

/// A holder that may move, on its node.
struct Candidate {
    index: u32,
    one: Movable,
}

/// The plan by which the sum of the largest free blocks grows most.
pub(super) fn join(trials: &mut Trials<'_>) -> Plan {
    let mut candidates = Vec::new();
    for (id, node) in trials.fleet.nodes.iter() {
        let held = node.held.iter();
        let movable = held.filter_map(|held| trials.movable(node, held).ok());
        let index = id.index;
        candidates.extend(movable.map(|one| Candidate { index, one }));
    }
    let mut gain = Memory::ZERO;
    while trials.n_moves() < trials.limits.max_moves {
        let Some((best, gained)) = best_move(trials, &candidates) else {
            break;
        };
        if trials.make(&best.one).is_err() {
            break;
        }
        gain = gain.plus(gained);
    }
    Plan {
        moves: trials.moves(),
        left: Vec::new(),
        is_reached: true,
        gain_bytes: gain.bytes_floor(),
        price: trials.price(),
    }
}

/// The move by which the blocks grow most, of equal ones the cheapest, and their growth; `None` if none makes them grow.
fn best_move<'c>(trials: &mut Trials<'_>, candidates: &'c [Candidate]) -> Option<(&'c Candidate, Memory)> {
    let mut ranked = Vec::new();
    for candidate in candidates {
        let most = most_growth(trials, candidate);
        if most > Memory::ZERO && !trials.is_moved(&candidate.one) {
            let one = &candidate.one;
            let key = (Reverse(most), one.price.total(), one.priority, &one.owner);
            ranked.push((key, candidate));
        }
    }
    ranked.sort_by_key(|(key, _)| *key);
    let mut best: Option<(Memory, u128, &Candidate)> = None;
    for ((Reverse(most), price, ..), candidate) in ranked.into_iter().take(MAX_COMPARED) {
        // Those that follow have no more growth, and of equal growth no lower price.
        if best.is_some_and(|(growth, of_best, _)| (most, Reverse(price)) <= (growth, Reverse(of_best))) {
            break;
        }
        let Some(growth) = growth(trials, candidate) else {
            continue;
        };
        if best.is_none_or(|(known, of_best, _)| (growth, Reverse(price)) > (known, Reverse(of_best))) {
            best = Some((growth, price, candidate));
        }
    }
    best.map(|(growth, _, candidate)| (candidate, growth))
}

/// The most by which the move of a holder can make the block of its node grow.
fn most_growth(trials: &Trials<'_>, candidate: &Candidate) -> Memory {
    let index = candidate.index;
    let gpus = trials.node(index).map_or(&[][..], Node::gpus);
    let mut most = Memory::ZERO;
    for (gpu, memory) in &candidate.one.gpus {
        // What a holder leaves on a closed or unhealthy GPU is not free.
        if gpus.get(*gpu).is_some_and(Device::is_open) {
            most = most.max(trials.free_of(index, *gpu).plus(*memory));
        }
    }
    most.less(block(trials, index))
}

/// The growth of all blocks by the move of a holder; `None` without any.
fn growth(trials: &mut Trials<'_>, candidate: &Candidate) -> Option<Memory> {
    let from = candidate.index;
    trials.make(&candidate.one).ok()?;
    let to = trials.last().map(|made| made.to.index);
    let other = to.filter(|to| *to != from);
    let blocks = |trials: &Trials<'_>| {
        let other = other.map(|to| block(trials, to)).unwrap_or_default();
        block(trials, from).plus(other)
    };
    let after = blocks(trials);
    trials.undo();
    let growth = after.less(blocks(trials));
    (growth > Memory::ZERO).then_some(growth)
}

/// The largest free block of a node: the most memory that is free on one of its GPUs.
fn block(trials: &Trials<'_>, index: u32) -> Memory {
    let n_gpus = trials.node(index).map_or(0, |node| node.gpus().len());
    let free = (0..n_gpus).map(|gpu| trials.free_of(index, gpu));
    free.max().unwrap_or_default()
}
