//! Evacuation: the search for the moves by which GPUs of one node become empty, or free enough.

use std::cmp::Reverse;

use rustc_hash::FxHashSet;

use crate::data::amounts::Memory;
use crate::data::ident::{NodeId, OwnerId};
use crate::plan::Plan;
use crate::plan::holder::{Obstacle, Price};
use crate::plan::trials::{Movable, Places, Trials};
use crate::state::charges::gpus_of_holdings;

/// Most holders of which every subset and order is tried.
pub(super) const FEW_HOLDERS: usize = 8;

/// GPUs of one node, and what is to become of them.
#[derive(Clone, Debug)]
pub(super) struct Evacuation {
    /// The index of the node.
    pub(super) node: u32,
    /// The indices of the GPUs.
    pub(super) gpus: Vec<usize>,
    /// The holders of these GPUs that may move, in the order in which they are tried.
    pub(super) movable: Vec<Movable>,
    /// Memory that is to be free on each GPU; `None` if all that may move are to leave.
    pub(super) free: Option<Memory>,
    /// No moves that reach the goal cost less, in byte-seconds. With `free` an estimate, if a GPU has more than [`FEW_HOLDERS`]
    /// holders.
    pub(super) least_price: u128,
}

/// The best moves so far.
#[derive(Clone, Debug)]
pub(super) struct Found {
    evacuation: Evacuation,
    pub(super) is_reached: bool,
    /// The number of moves, or with [`Evacuation::free`] the memory that is free on the fullest GPU, in hundredths of a byte and
    /// no more than needed.
    progress: u64,
    pub(super) price: Price,
    /// The holders that move, in this order.
    moved: Vec<Movable>,
}

/// The search for one evacuation.
struct Search<'t, 'a> {
    trials: &'t mut Trials<'a>,
    evacuation: &'t Evacuation,
    best: &'t mut Option<Found>,
    /// The holders whose moves are in effect, in the order of the moves.
    moved: Vec<Movable>,
    /// The places of moved holders from which the search has gone on.
    reached: FxHashSet<Places>,
}

/// The plan that empties GPUs of a node.
pub(super) fn empty(trials: &mut Trials<'_>, node: NodeId, gpus: Vec<usize>) -> Plan {
    trials.close(node.index, &gpus);
    let mut movable = movable_of(trials, node.index, &gpus);
    let n_movable = movable.len();
    let n_gpus = trials.node(node.index).map_or(0, |node| node.gpus().len());
    if gpus.len() == n_gpus {
        // No move makes room on another node, so that a pod without a place now never gets one. On the GPUs of the node itself
        // that stay open it may get one.
        movable.retain(|one| trials.obstacle_to_move(one).is_none());
    }
    let is_hopeless = movable.len() < n_movable;
    movable.sort_by_key(|one| (one.price.total(), one.priority));
    let n_moves = movable.len().min(trials.limits.max_moves);
    let cheapest = movable.iter().take(n_moves).map(|one| one.price.total());
    let least_price = cheapest.fold(0, u128::saturating_add);
    if n_moves == movable.len() {
        // Large pods find few places, so they come first where no choice of pods has to be made.
        movable.sort_by_key(|one| Reverse(one.memory));
    }
    let evacuation = Evacuation {
        node: node.index,
        gpus,
        movable,
        free: None,
        least_price,
    };
    let mut best = None;
    evacuation.search(trials, &mut best);
    let mut plan = best.map_or_else(Plan::default, |best| best.into_plan(trials));
    plan.is_reached &= !is_hopeless;
    plan
}

/// The holders of GPUs of a node that may move, by owner.
pub(super) fn movable_of(trials: &Trials<'_>, node: u32, gpus: &[usize]) -> Vec<Movable> {
    let mut movable = Vec::new();
    let Some(node) = trials.fleet.nodes.at(node) else {
        return movable;
    };
    for held in &node.held {
        if let Ok(one) = trials.movable(node, held)
            && one.gpus.keys().any(|gpu| gpus.contains(gpu))
        {
            movable.push(one);
        }
    }
    movable
}

impl Evacuation {
    /// Looks for moves that are better than the best so far.
    pub(super) fn search(&self, trials: &mut Trials<'_>, best: &mut Option<Found>) {
        let mut search = Search {
            trials,
            evacuation: self,
            best,
            moved: Vec::new(),
            reached: FxHashSet::default(),
        };
        search.go_on();
        for _ in 0..search.moved.len() {
            search.trials.undo();
        }
    }

    /// The [progress](Found::progress) by which the goal is reached; without `free`, by which this number of moves comes nearest.
    fn needed(&self, max_moves: usize) -> u64 {
        let n_moves = self.movable.len().min(max_moves);
        self.free.map_or(n_moves as u64, Memory::hundredths)
    }
}

impl Search<'_, '_> {
    /// Tries every subset and order of up to [`FEW_HOLDERS`] holders. With more holders it tries one order: each holder that can
    /// move stays moved, and the others are tried again until none can move.
    fn go_on(&mut self) {
        self.keep_if_best();
        let evacuation = self.evacuation;
        let (is_exact, n_before) = (evacuation.movable.len() <= FEW_HOLDERS, self.moved.len());
        for one in &evacuation.movable {
            let price = self.trials.price().plus(one.price).total();
            let best = self.best_price();
            let is_last = self.moved.len() >= self.trials.limits.max_moves;
            // No moves cost less than `least_price`, so none are better than moves at that price.
            if is_last || best.is_some_and(|best| best <= evacuation.least_price) {
                return;
            }
            let is_too_dear = best.is_some_and(|best| best <= price);
            if is_too_dear || self.trials.is_moved(one) || self.trials.make_move(one).is_err() {
                continue;
            }
            self.moved.push(one.clone());
            if !is_exact {
                self.keep_if_best();
                continue;
            }
            // Orders that lead to the same places go on in the same way.
            if self.reached.insert(self.trials.places()) {
                self.go_on();
            }
            self.trials.undo();
            self.moved.pop();
        }
        if !is_exact && self.moved.len() > n_before {
            self.go_on();
        }
    }

    /// Keeps the moves in effect if they are the best so far: nearest to the goal, then the cheapest.
    fn keep_if_best(&mut self) {
        let Evacuation { node, gpus, free, .. } = self.evacuation;
        let on_gpus = gpus.iter().map(|gpu| self.trials.free_of(*node, *gpu));
        let least = on_gpus.min().unwrap_or_default();
        let progress = free.map_or(self.moved.len() as u64, |needed| least.min(needed).hundredths());
        let price = self.trials.price();
        let rank = (Reverse(progress), price.total());
        let best = self.best.as_ref();
        if best.is_none_or(|best| rank < (Reverse(best.progress), best.price.total())) {
            *self.best = Some(Found {
                evacuation: self.evacuation.clone(),
                is_reached: progress >= self.evacuation.needed(usize::MAX),
                progress,
                price,
                moved: self.moved.clone(),
            });
        }
    }

    /// The price of the best moves so far in byte-seconds, if no moves can come nearer to the goal.
    fn best_price(&self) -> Option<u128> {
        let needed = self.evacuation.needed(self.trials.limits.max_moves);
        let best = self.best.as_ref()?;
        (best.progress >= needed).then_some(best.price.total())
    }
}

impl Found {
    /// The plan of these moves, which are made again on the trials.
    pub(super) fn into_plan(self, trials: &mut Trials<'_>) -> Plan {
        let Evacuation { node, gpus, free, .. } = self.evacuation;
        // The bound of the search does not count for what is found already.
        trials.n_tries_left = usize::MAX;
        let mut gain = Memory::ZERO;
        for one in &self.moved {
            if trials.make_move(one).is_ok() {
                gain = gain.plus(one.memory_on(&gpus));
            }
        }
        let is_enough = free.is_some() && self.is_reached;
        Plan {
            moves: trials.moves(),
            left: if is_enough {
                Vec::new()
            } else {
                left(trials, node, &gpus)
            },
            is_reached: self.is_reached,
            gain_bytes: gain.bytes_floor(),
            price: self.price,
        }
    }
}

/// The holders that are left on GPUs of a node after the moves in effect, each with the reason for which it stays.
fn left(trials: &mut Trials<'_>, node: u32, gpus: &[usize]) -> Vec<(OwnerId, Obstacle)> {
    let mut left = Vec::new();
    let Some(node) = trials.fleet.nodes.at(node) else {
        return left;
    };
    for held in &node.held {
        let held_gpus = gpus_of_holdings(&node.inventory, &held.holdings);
        if !held_gpus.keys().any(|gpu| gpus.contains(gpu)) {
            continue;
        }
        let obstacle = match trials.movable(node, held) {
            Err(obstacle) => obstacle,
            Ok(one) if trials.is_moved(&one) => continue,
            Ok(_) if trials.n_moves() >= trials.limits.max_moves => Obstacle::Limit,
            Ok(one) => trials.obstacle_to_move(&one).unwrap_or(Obstacle::Limit),
        };
        left.push((held.owner.clone(), obstacle));
    }
    left
}
