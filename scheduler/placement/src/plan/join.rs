//! Joining free memory: the moves by which the largest free blocks of the nodes grow most, one after the other.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::ops::Range;

use rustc_hash::FxHashMap;

use crate::data::amounts::Memory;
use crate::data::device::Device;
use crate::data::ident::OwnerId;
use crate::plan::Plan;
use crate::plan::trials::{Movable, Trials};
use crate::state::node::Node;

/// Most moves that are compared for each move of the plan.
const MAX_COMPARED: usize = 256;

/// A holder that may move, with the index of its node.
struct Candidate {
    index: u32,
    one: Movable,
}

/// The order in which moves are compared: the most possible growth first, of equal ones the least price, priority and owner. The
/// last is the candidate's place.
type Rank<'c> = (Reverse<Memory>, u128, i32, &'c OwnerId, usize);

/// The plan by which the sum of the largest free blocks grows most.
pub(super) fn join(trials: &mut Trials<'_>) -> Plan {
    let mut candidates = Vec::new();
    for (id, node) in trials.fleet.nodes.iter() {
        for held in &node.held {
            if let Ok(one) = trials.movable(node, held) {
                candidates.push(Candidate { index: id.index, one });
            }
        }
    }
    let mut ranking = Ranking::new(trials, &candidates);
    let mut gain = Memory::ZERO;
    while trials.n_moves() < trials.limits.max_moves {
        let Some((best, gained)) = ranking.best_move(trials) else {
            break;
        };
        if trials.make_move(&best.one).is_err() {
            break;
        }
        gain = gain.plus(gained);
        // No other node has changed by the move.
        for index in trials.last_target().into_iter().chain([best.index]) {
            ranking.update(trials, index);
        }
    }
    Plan {
        moves: trials.moves(),
        left: Vec::new(),
        is_reached: true,
        gain_bytes: gain.bytes_floor(),
        price: trials.price(),
    }
}

/// Holders by the most that their moves can gain, after the moves in effect.
struct Ranking<'c> {
    candidates: &'c [Candidate],
    /// The places of the candidates of each node.
    by_node: FxHashMap<u32, Range<usize>>,
    /// The result of [`most_growth`] for each candidate.
    most: Vec<Memory>,
    /// The candidates whose moves may gain something.
    ranked: BTreeSet<Rank<'c>>,
}

impl<'c> Ranking<'c> {
    /// The ranking of candidates, of which those of one node are next to each other.
    fn new(trials: &Trials<'_>, candidates: &'c [Candidate]) -> Self {
        let mut by_node: FxHashMap<u32, Range<usize>> = FxHashMap::default();
        for (at, candidate) in candidates.iter().enumerate() {
            by_node.entry(candidate.index).or_insert(at..at).end = at + 1;
        }
        let nodes: Vec<u32> = by_node.keys().copied().collect();
        let mut ranking = Self {
            candidates,
            by_node,
            most: vec![Memory::ZERO; candidates.len()],
            ranked: BTreeSet::new(),
        };
        for index in nodes {
            ranking.update(trials, index);
        }
        ranking
    }

    /// Ranks the candidates of a node by the trials as they are, without those whose move is in effect or can gain nothing.
    fn update(&mut self, trials: &Trials<'_>, index: u32) {
        let block = block(trials, index);
        for at in self.by_node.get(&index).cloned().into_iter().flatten() {
            let (Some(candidate), Some(most)) = (self.candidates.get(at), self.most.get_mut(at)) else {
                continue;
            };
            let one = &candidate.one;
            let rank = |growth| (Reverse(growth), one.price.total(), one.priority, &one.owner, at);
            self.ranked.remove(&rank(*most));
            *most = most_growth(trials, candidate, block);
            if *most > Memory::ZERO && !trials.is_moved(one) {
                self.ranked.insert(rank(*most));
            }
        }
    }

    /// The move by which the blocks grow most, of equal ones the cheapest, and their growth; `None` if none makes them grow.
    fn best_move(&self, trials: &mut Trials<'_>) -> Option<(&'c Candidate, Memory)> {
        let mut best: Option<(Memory, u128, &Candidate)> = None;
        for (Reverse(most), price, _, _, at) in self.ranked.iter().take(MAX_COMPARED) {
            // Those that follow have no more growth, and of equal growth no lower price.
            if best.is_some_and(|(known, of_best, _)| (*most, Reverse(*price)) <= (known, Reverse(of_best))) {
                break;
            }
            let Some(candidate) = self.candidates.get(*at) else {
                continue;
            };
            let Some(growth) = growth(trials, candidate) else {
                continue;
            };
            if best.is_none_or(|(known, of_best, _)| (growth, Reverse(*price)) > (known, Reverse(of_best))) {
                best = Some((growth, *price, candidate));
            }
        }
        best.map(|(growth, _, candidate)| (candidate, growth))
    }
}

/// The most by which the move of a holder can make the block of its node grow beyond `block`. No other block grows by the move.
fn most_growth(trials: &Trials<'_>, candidate: &Candidate, block: Memory) -> Memory {
    let index = candidate.index;
    let gpus = trials.node(index).map_or(&[][..], Node::gpus);
    let mut most = Memory::ZERO;
    for (gpu, memory) in &candidate.one.gpus {
        // What a holder leaves on a closed or unhealthy GPU is not free.
        if gpus.get(*gpu).is_some_and(Device::is_open) {
            most = most.max(trials.free_of(index, *gpu).plus(*memory));
        }
    }
    most.less(block)
}

/// The sum by which the blocks of all nodes grow by the move of a holder, which is tried and taken back; `None` if they do not.
fn growth(trials: &mut Trials<'_>, candidate: &Candidate) -> Option<Memory> {
    let from = candidate.index;
    trials.make_move(&candidate.one).ok()?;
    let to = trials.last_target()?;
    let after = blocks(trials, from, to);
    trials.undo();
    let growth = after.less(blocks(trials, from, to));
    (growth > Memory::ZERO).then_some(growth)
}

/// The sum of the blocks of two nodes, which may be the same.
fn blocks(trials: &Trials<'_>, one: u32, other: u32) -> Memory {
    if one == other {
        return block(trials, one);
    }
    block(trials, one).plus(block(trials, other))
}

/// The largest free block of a node: the most memory that is free on one of its GPUs.
fn block(trials: &Trials<'_>, index: u32) -> Memory {
    let n_gpus = trials.node(index).map_or(0, |node| node.gpus().len());
    let free = (0..n_gpus).map(|gpu| trials.free_of(index, gpu));
    free.max().unwrap_or_default()
}
