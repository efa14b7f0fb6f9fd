//! Evacuation: the search for the moves by which GPUs of one node become empty, or free enough.

use rustc_hash::FxHashSet;

use crate::data::amounts::Memory;
use crate::data::ident::{DeviceId, NodeId, OwnerId};
use crate::plan::holder::{Obstacle, Price};
use crate::plan::trials::{Movable, Trials};
use crate::plan::{Move, Plan};
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
    /// No moves that reach the goal cost less, in byte-seconds.
    pub(super) least_price: u128,
}

/// The best moves so far.
#[derive(Clone, Debug)]
pub(super) struct Found {
    pub(super) evacuation: Evacuation,
    pub(super) is_reached: bool,
    /// The number of moves towards empty GPUs, or the memory that is free on the fullest GPU, in hundredths of a byte.
    progress: u64,
    price: Price,
    moves: Vec<Move>,
}

/// The search for one evacuation.
struct Search<'t, 'a> {
    trials: &'t mut Trials<'a>,
    evacuation: &'t Evacuation,
    best: &'t mut Option<Found>,
    /// The price of the moves in effect.
    price: Price,
    is_exact: bool,
    /// The places of moved holders that were reached, by any order.
    reached: FxHashSet<Vec<(usize, NodeId, Vec<DeviceId>)>>,
    n_tries_left: usize,
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
        movable.retain(|one| trials.has_place(one.holder));
    }
    let n_moves = movable.len().min(trials.limits.max_moves);
    let mut prices: Vec<u128> = movable.iter().map(|one| one.price.total()).collect();
    prices.sort_unstable();
    // Large ones find few places and so come first, unless the limit makes a choice of pods.
    let is_limited = n_moves < movable.len();
    movable.sort_by_cached_key(|one| {
        let size = if is_limited { Memory::ZERO } else { one.memory() };
        let holder = trials.holders.get(one.holder);
        let tie = holder.map(|holder| (holder.priority, holder.owner.clone()));
        (std::cmp::Reverse(size), one.price.total(), tie)
    });
    let evacuation = Evacuation {
        node: node.index,
        gpus,
        movable,
        free: None,
        least_price: prices
            .iter()
            .take(n_moves)
            .fold(0, |sum, price| sum.saturating_add(*price)),
    };
    let is_hopeless = evacuation.movable.len() < n_movable;
    let mut best = None;
    evacuation.search(trials, &mut best);
    let mut plan = best.map_or_else(Plan::default, |best| best.into_plan(trials));
    plan.is_reached &= !is_hopeless;
    plan
}

/// The holders of GPUs of a node that may move.
pub(super) fn movable_of(trials: &Trials<'_>, node: u32, gpus: &[usize]) -> Vec<Movable> {
    let mut movable = Vec::new();
    if let Some(node) = trials.fleet.nodes.at(node) {
        let all = node
            .held
            .iter()
            .filter_map(|held| trials.movable(node, held).ok());
        movable.extend(all.filter(|one| one.gpus.keys().any(|gpu| gpus.contains(gpu))));
    }
    movable
}

impl Evacuation {
    /// Looks for moves that are better than the best so far.
    pub(super) fn search(&self, trials: &mut Trials<'_>, best: &mut Option<Found>) {
        let n = self.movable.len();
        let is_exact = n <= FEW_HOLDERS;
        let mut search = Search {
            n_tries_left: if is_exact { usize::MAX } else { 2 * n },
            trials,
            evacuation: self,
            best,
            price: Price::default(),
            is_exact,
            reached: FxHashSet::default(),
        };
        search.go_on(0);
    }

    /// The progress by which the goal is reached, or as near as the limit of moves allows.
    fn needed(&self, max_moves: usize) -> u64 {
        let n_moves = self.movable.len().min(max_moves);
        self.free.map_or(n_moves as u64, Memory::hundredths)
    }

    /// The progress of the moves in effect.
    fn progress(&self, trials: &Trials<'_>) -> u64 {
        let Some(needed) = self.free else {
            return trials.n_moves() as u64;
        };
        let free = self.gpus.iter().map(|gpu| trials.free_of(self.node, *gpu));
        free.min().unwrap_or_default().min(needed).hundredths()
    }
}

impl Search<'_, '_> {
    /// Tries every holder as the next to move, from the one at `first` on.
    fn go_on(&mut self, first: usize) {
        self.note();
        let evacuation = self.evacuation;
        for (at, one) in evacuation.movable.iter().enumerate().skip(first) {
            let is_last = self.trials.n_moves() >= self.trials.limits.max_moves;
            if is_last || self.is_done() || self.n_tries_left == 0 {
                return;
            }
            let price = self.price.plus(one.price);
            if self.trials.is_moved(one.holder) || self.is_too_dear(price) || self.is_repetition(at) {
                continue;
            }
            self.n_tries_left -= 1;
            if self.trials.make(one.holder).is_err() {
                continue;
            }
            // Orders that lead to the same places go on in the same way.
            if !self.is_exact || self.reached.insert(self.trials.places()) {
                let before = std::mem::replace(&mut self.price, price);
                self.go_on(if self.is_exact { 0 } else { at + 1 });
                self.price = before;
            }
            self.trials.undo();
        }
    }

    /// Keeps the moves in effect if they are the best so far: nearest to the goal, then the cheapest.
    fn note(&mut self) {
        let progress = self.evacuation.progress(self.trials);
        if let Some(best) = &*self.best {
            let (known, known_price) = (best.progress, best.price.total());
            if progress < known || (progress == known && self.price.total() >= known_price) {
                return;
            }
        }
        let is_reached = progress >= self.evacuation.needed(usize::MAX);
        *self.best = Some(Found {
            evacuation: self.evacuation.clone(),
            is_reached,
            progress,
            price: self.price,
            moves: self.trials.moves(),
        });
    }

    /// The price of the best moves so far in byte-seconds, if no moves come nearer to the goal.
    fn best_price(&self) -> Option<u128> {
        let needed = self.evacuation.needed(self.trials.limits.max_moves);
        let best = self.best.as_ref().filter(|best| best.progress >= needed);
        best.map(|best| best.price.total())
    }

    /// Returns true if no moves can be better than the best so far.
    fn is_done(&self) -> bool {
        self.best_price()
            .is_some_and(|price| price <= self.evacuation.least_price)
    }

    /// Returns true if moves of this price, and so all with further moves, cannot be better than the best so far.
    fn is_too_dear(&self, price: Price) -> bool {
        self.best_price().is_some_and(|best| price.total() >= best)
    }

    /// Returns true if an earlier holder that has not moved is equal to the one at `at`, so that its move stands for both.
    fn is_repetition(&mut self, at: usize) -> bool {
        let Some((earlier, [one, ..])) = self.evacuation.movable.split_at_checked(at) else {
            return false;
        };
        let kind = self.trials.kind(one.holder);
        for other in earlier {
            let is_equal = other.gpus == one.gpus
                && other.price.total() <= one.price.total()
                && self.trials.kind(other.holder) == kind;
            if is_equal && self.is_exact && !self.trials.is_moved(other.holder) {
                return true;
            }
        }
        false
    }
}

impl Found {
    /// The price of the moves in byte-seconds, if they reach the goal.
    pub(super) fn reached_price(&self) -> Option<u128> {
        self.is_reached.then(|| self.price.total())
    }

    /// The plan of the moves, which are made again.
    pub(super) fn into_plan(self, trials: &mut Trials<'_>) -> Plan {
        let Evacuation {
            node, gpus, movable, ..
        } = &self.evacuation;
        let free = |trials: &Trials<'_>| {
            gpus.iter()
                .fold(Memory::ZERO, |sum, gpu| sum.plus(trials.free_of(*node, *gpu)))
        };
        let free_before = free(trials);
        // The bound of the search does not count for what is found already.
        trials.n_tries_left = usize::MAX;
        let mut moved = Memory::ZERO;
        for owner in self.moves.iter().map(|made| &made.owner) {
            let of_owner = |one: &&Movable| {
                trials
                    .holders
                    .get(one.holder)
                    .is_some_and(|holder| holder.owner == *owner)
            };
            let Some(one) = movable.iter().find(of_owner) else {
                continue;
            };
            if trials.make(one.holder).is_ok() {
                let here = one.gpus.iter().filter(|(gpu, _)| gpus.contains(gpu));
                moved = here.fold(moved, |sum, (_, memory)| sum.plus(*memory));
            }
        }
        let gain = match self.evacuation.free {
            // Closed GPUs have nothing free, so that what the pods held counts.
            None => moved,
            Some(_) => free(trials).less(free_before),
        };
        let is_left = self.evacuation.free.is_none() || !self.is_reached;
        Plan {
            moves: self.moves,
            left: if is_left {
                left(trials, *node, gpus)
            } else {
                Vec::new()
            },
            is_reached: self.is_reached,
            gain_bytes: gain.bytes_floor(),
            price: self.price,
        }
    }
}

/// The holders that are left on GPUs of a node after the moves in effect.
fn left(trials: &mut Trials<'_>, node: u32, gpus: &[usize]) -> Vec<(OwnerId, Obstacle)> {
    let mut left = Vec::new();
    let Some(node) = trials.fleet.nodes.at(node) else {
        return left;
    };
    for held in &node.held {
        let inventory = node.inventory.iter();
        let mut held_gpus =
            inventory.flat_map(|inventory| gpus_of_holdings(inventory, &held.holdings).into_keys());
        if !held_gpus.any(|gpu| gpus.contains(&gpu)) {
            continue;
        }
        let obstacle = match trials.movable(node, held) {
            Err(obstacle) => obstacle,
            Ok(one) if trials.is_moved(one.holder) => continue,
            Ok(_) if trials.n_moves() >= trials.limits.max_moves => Obstacle::Limit,
            Ok(one) => match trials.make(one.holder) {
                Err(obstacle) => obstacle,
                Ok(()) => {
                    trials.undo();
                    Obstacle::Limit
                }
            },
        };
        left.push((held.owner.clone(), obstacle));
    }
    left
}
