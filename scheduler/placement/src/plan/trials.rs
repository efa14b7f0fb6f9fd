//! Trials of moves on copies of nodes: a pod is gone from its place, and its successor takes the best place that is left.

use std::cmp::Reverse;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BinaryHeap};

use rustc_hash::FxHashMap;

use crate::choice::node_choice::{choose_devices, score};
use crate::data::amounts::{HostAmounts, Memory};
use crate::data::holding::{Held, Hints, Holdings, Origin, Placement};
use crate::data::ident::{DeviceId, NodeId, OwnerId};
use crate::data::policy::{Policies, Score};
use crate::data::request::NodeRequest;
use crate::fleet::Fleet;
use crate::plan::holder::{Holder, Obstacle, Price};
use crate::plan::{Limits, Move};
use crate::state::charges::gpus_of_holdings;
use crate::state::node::Node;

/// Most moves that are tried for one plan.
pub(super) const MAX_TRIES: usize = 8192;

/// The fleet after the moves that are tried at the moment.
pub(super) struct Trials<'a> {
    pub(super) fleet: &'a Fleet,
    pub(super) holders: &'a [Holder<'a>],
    pub(super) limits: Limits,
    /// The index of each holder in `holders`.
    by_owner: FxHashMap<&'a str, usize>,
    kinds: Vec<Kind<'a>>,
    /// Copies of the nodes that differ from those of the fleet, by the index of the node.
    copies: BTreeMap<u32, ChangedNode>,
    /// The moves that are in effect on the copies.
    steps: Vec<Step>,
    /// The number of moves that may still be tried.
    pub(super) n_tries_left: usize,
}

/// Everything about a holder that decides the place of its successor.
#[derive(Clone, Copy, PartialEq)]
struct KindKey<'a> {
    request: NodeRequest<'a>,
    policies: Policies,
    nodes: Option<&'a [NodeId]>,
}

/// A kind of holders, with the best nodes of the fleet that have room for their successors before any move, the best first: more
/// nodes than can have copies at one time.
struct Kind<'a> {
    key: KindKey<'a>,
    ranked: Vec<(Score, NodeId)>,
}

/// A copy of a node that differs from the fleet's node.
struct ChangedNode {
    node: Node,
    /// Number of changes that make the difference.
    n_changes: usize,
    /// The scores for the kinds of holders that were asked about since the last change; `None` if there is no room.
    scores: FxHashMap<usize, Option<Score>>,
}

/// A move in effect, of the holder at an index.
struct Step {
    holder: usize,
    price: Price,
    made: Move,
    /// The holding before the move.
    held: Held,
    /// CPU and memory in use on its node before the holder left, and on the new node before its successor came.
    used_before: [HostAmounts; 2],
}

/// A holder that may move, with the GPUs that it has in the fleet before any move.
#[derive(Clone, Debug)]
pub(super) struct Movable {
    /// Its index among the holders.
    pub(super) holder: usize,
    pub(super) owner: OwnerId,
    /// Its GPUs by their indices, with the memory that it takes of each.
    pub(super) gpus: BTreeMap<usize, Memory>,
    /// The memory that it takes of all of them.
    pub(super) memory: Memory,
    pub(super) price: Price,
    pub(super) priority: i32,
}

/// The places of moved holders, which are the same for orders of moves that lead to the same fleet.
pub(super) type Places = Vec<(usize, NodeId, Vec<DeviceId>)>;

impl Movable {
    /// The memory that the holder takes of these GPUs.
    pub(super) fn memory_on(&self, gpus: &[usize]) -> Memory {
        let here = self.gpus.iter().filter(|(gpu, _)| gpus.contains(gpu));
        here.fold(Memory::ZERO, |sum, (_, memory)| sum.plus(*memory))
    }
}

impl<'a> Trials<'a> {
    /// Trials on a fleet, with no move in effect.
    pub(super) fn new(fleet: &'a Fleet, holders: &'a [Holder<'a>], limits: Limits) -> Self {
        let owners = holders.iter().enumerate();
        Self {
            fleet,
            holders,
            limits,
            by_owner: owners.map(|(at, holder)| (holder.owner.as_str(), at)).collect(),
            kinds: Vec::new(),
            copies: BTreeMap::new(),
            steps: Vec::new(),
            n_tries_left: MAX_TRIES,
        }
    }

    /// The node at an index after the moves in effect.
    pub(super) fn node(&self, index: u32) -> Option<&Node> {
        match self.copies.get(&index) {
            Some(copy) => Some(&copy.node),
            None => self.fleet.nodes.at(index),
        }
    }

    /// Memory of a GPU that is free for new shares after the moves in effect, with the memory of hints taken off.
    pub(super) fn free_of(&self, index: u32, gpu: usize) -> Memory {
        let Some(node) = self.node(index) else {
            return Memory::ZERO;
        };
        let row = node.rows.get(gpu).copied().unwrap_or_default();
        node.row_with(gpu, row, Hints::Respect).free.memory
    }

    /// The owner of a holding as a holder that may move, or what keeps it from moving.
    pub(super) fn movable(&self, node: &Node, held: &Held) -> Result<Movable, Obstacle> {
        let at = *self.by_owner.get(held.owner.as_str()).ok_or(Obstacle::Unknown)?;
        let holder = self.holders.get(at).ok_or(Obstacle::Unknown)?;
        if let Some(obstacle) = holder.obstacle(self.limits.min_run_seconds) {
            return Err(obstacle);
        }
        // Without a report of devices nothing says which GPUs the pod holds.
        if node.hardware.is_none() {
            return Err(Obstacle::Unknown);
        }
        let gpus = gpus_of_holdings(&node.inventory, &held.holdings);
        let memory = gpus.values().copied().fold(Memory::ZERO, Memory::plus);
        Ok(Movable {
            holder: at,
            owner: held.owner.clone(),
            gpus,
            memory,
            price: Price::of_move(memory.bytes_ceil(), holder.run_seconds),
            priority: holder.priority,
        })
    }

    /// Returns true if the holder's move is in effect.
    pub(super) fn is_moved(&self, one: &Movable) -> bool {
        self.steps.iter().any(|step| step.holder == one.holder)
    }

    /// The price of the moves in effect.
    pub(super) fn price(&self) -> Price {
        let prices = self.steps.iter().map(|step| step.price);
        prices.fold(Price::default(), Price::plus)
    }

    /// The moves in effect.
    pub(super) fn moves(&self) -> Vec<Move> {
        self.steps.iter().map(|step| step.made.clone()).collect()
    }

    /// Number of moves in effect.
    pub(super) fn n_moves(&self) -> usize {
        self.steps.len()
    }

    /// The index of the node of the last move's successor.
    pub(super) fn last_target(&self) -> Option<u32> {
        Some(self.steps.last()?.made.to.index)
    }

    /// The places of the holders whose moves are in effect.
    pub(super) fn places(&self) -> Places {
        let mut places = Vec::with_capacity(self.steps.len());
        for Step { holder, made, .. } in &self.steps {
            let devices = made.placement.shares.iter().map(|share| share.id.clone());
            places.push((*holder, made.to, devices.collect()));
        }
        places.sort();
        places
    }

    /// Closes GPUs of a node for all moves to come.
    pub(super) fn close(&mut self, node: u32, gpus: &[usize]) {
        if let Some(node) = self.change(node) {
            node.change_gpus(|at, gpu| gpu.closed |= gpus.contains(&at));
        }
    }

    /// Moves a holder to the place that its successor would get with all moves in effect; else the reason for which it stays.
    pub(super) fn make_move(&mut self, one: &Movable) -> Result<(), Obstacle> {
        let holders = self.holders;
        let holder = holders.get(one.holder).ok_or(Obstacle::Unknown)?;
        if self.n_tries_left == 0 {
            return Err(Obstacle::Limit);
        }
        self.n_tries_left -= 1;
        let owner = holder.owner.as_str();
        let nodes = &self.fleet.nodes;
        let from = *nodes.owners.get(owner).ok_or(Obstacle::Unknown)?;
        let node = self.node(from).ok_or(Obstacle::Unknown)?;
        let held = node.held_by(owner).cloned().ok_or(Obstacle::Unknown)?;
        let from_gpus = minors(node, &held.holdings);
        let used_before = node.host.used;
        let own_use = match nodes.host_uses.get(owner) {
            Some(own) if own.node_index == from => own.amounts,
            _ => HostAmounts::default(),
        };
        if let Some(node) = self.change(from) {
            node.remove_held(owner);
            node.host.used = node.host.used.less(own_use);
        }
        let (to, placement, used_on_target) = match self.place_for(holder, from, &from_gpus) {
            Ok(place) => place,
            Err(obstacle) => {
                if let Some(node) = self.change_back(from, used_before) {
                    node.insert_held(held);
                }
                return Err(obstacle);
            }
        };
        let used_before = [used_before, used_on_target];
        if let Some(node) = self.change(to.index) {
            node.insert_held(Held {
                owner: holder.owner.clone(),
                origin: Origin::Decision,
                holdings: Holdings::from(&placement),
            });
            node.host.used = node.host.used.plus(holder.request.host);
        }
        let made = Move {
            owner: holder.owner.clone(),
            from: nodes.id_at(from),
            from_gpus,
            to,
            placement,
        };
        self.steps.push(Step {
            holder: one.holder,
            price: one.price,
            made,
            held,
            used_before,
        });
        Ok(())
    }

    /// Tries the move of a holder, and takes it back; returns the reason for which it is not possible now.
    pub(super) fn obstacle_to_move(&mut self, one: &Movable) -> Option<Obstacle> {
        let obstacle = self.make_move(one).err();
        if obstacle.is_none() {
            self.undo();
        }
        obstacle
    }

    /// Takes the last move back.
    pub(super) fn undo(&mut self) {
        let Some(step) = self.steps.pop() else { return };
        let [used_from, used_to] = step.used_before;
        let owner = step.made.owner.as_str();
        if let Some(node) = self.change_back(step.made.to.index, used_to) {
            node.remove_held(owner);
        }
        if let Some(node) = self.change_back(step.made.from.index, used_from) {
            node.insert_held(step.held);
        }
    }

    /// The node of the successor of a holder that has left these GPUs, its devices, and CPU and memory in use there.
    fn place_for(
        &mut self,
        holder: &Holder<'a>,
        from: u32,
        from_gpus: &[u32],
    ) -> Result<(NodeId, Placement, HostAmounts), Obstacle> {
        let (to, placement) = self.best_place(holder).ok_or(Obstacle::NoPlace)?;
        let target = self.node(to.index).ok_or(Obstacle::NoPlace)?;
        if to.index == from && minors(target, &Holdings::from(&placement)) == from_gpus {
            return Err(Obstacle::Returns);
        }
        Ok((to, placement, target.host.used))
    }

    /// The best node for the successor of a holder, and the devices there.
    fn best_place(&mut self, holder: &Holder<'a>) -> Option<(NodeId, Placement)> {
        let kind_at = self.kind(holder);
        let Kind { key, ranked } = self.kinds.get(kind_at)?;
        let (fleet, policies) = (self.fleet, key.policies);
        let context = fleet.context(key.request, policies.device, Hints::Respect);
        // A node without a copy is as it was when it was ranked.
        let unchanged = ranked.iter().find(|(_, id)| !self.copies.contains_key(&id.index));
        let mut best = unchanged.copied();
        for (index, copy) in &mut self.copies {
            let id = fleet.nodes.id_at(*index);
            if !key.allows(id, &copy.node) {
                continue;
            }
            let compute = || score(&copy.node, policies.node, context).ok();
            let Some(score) = *copy.scores.entry(kind_at).or_insert_with(compute) else {
                continue;
            };
            let rank = rank_of(fleet, (score, id));
            if best.is_none_or(|best| rank < rank_of(fleet, best)) {
                best = Some((score, id));
            }
        }
        let (_, id) = best?;
        let placement = choose_devices(self.node(id.index)?, context).ok()?;
        Some((id, placement))
    }

    /// The index of the kind of a holder, which is added if it is new.
    fn kind(&mut self, holder: &Holder<'a>) -> usize {
        let key = KindKey {
            request: holder.request,
            policies: holder.policies,
            nodes: holder.nodes,
        };
        if let Some(known) = self.kinds.iter().position(|kind| kind.key == key) {
            return known;
        }
        // The most copies at one time and one more: two for each move, two for a move that is tried, one for closed GPUs.
        let n = self.limits.max_moves.saturating_add(2).saturating_mul(2);
        let ranked = key.rank(self.fleet, n);
        self.kinds.push(Kind { key, ranked });
        self.kinds.len() - 1
    }

    /// The copy of a node, which is made if there is none, for one change.
    fn change(&mut self, index: u32) -> Option<&mut Node> {
        let node = self.fleet.nodes.at(index)?;
        let copy = self.copies.entry(index).or_insert_with(|| ChangedNode {
            node: node.copy(),
            n_changes: 0,
            scores: FxHashMap::default(),
        });
        copy.n_changes += 1;
        // Both are of the node before the change.
        copy.scores.clear();
        copy.node.value_cache.clear();
        Some(&mut copy.node)
    }

    /// The copy of a node, for taking back its last change, before which `used` CPU and memory were in use. `None` if it would
    /// not differ any more, and is dropped.
    fn change_back(&mut self, index: u32, used: HostAmounts) -> Option<&mut Node> {
        let Entry::Occupied(mut entry) = self.copies.entry(index) else {
            return None;
        };
        entry.get_mut().n_changes -= 1;
        if entry.get().n_changes == 0 {
            entry.remove();
            return None;
        }
        let copy = entry.into_mut();
        copy.scores.clear();
        copy.node.value_cache.clear();
        copy.node.host.used = used;
        Some(&mut copy.node)
    }
}

impl KindKey<'_> {
    /// Returns true if a successor may go to a node, by everything but its devices.
    fn allows(&self, id: NodeId, node: &Node) -> bool {
        let is_listed = self.nodes.is_none_or(|nodes| nodes.binary_search(&id).is_ok());
        is_listed && self.request.host.n_within(node.host.free()) > 0
    }

    /// The best nodes with room, `n` at most, the best first; of equal nodes the first by name, as in a filter.
    fn rank(&self, fleet: &Fleet, n: usize) -> Vec<(Score, NodeId)> {
        let mut evaluation = fleet.evaluation(self.request, self.policies, Hints::Respect);
        // The worst of them is on top.
        let mut best: BinaryHeap<(Reverse<Score>, &str, NodeId)> = BinaryHeap::new();
        for (id, node) in fleet.nodes.iter().filter(|(id, node)| self.allows(*id, node)) {
            let least = match best.peek() {
                Some((Reverse(score), ..)) if best.len() >= n => *score,
                _ => Score::default(),
            };
            if let Some(score) = evaluation.evaluate_from(least, id) {
                best.push((Reverse(score), &*node.name, id));
            }
            if best.len() > n {
                best.pop();
            }
        }
        let best = best.into_sorted_vec().into_iter();
        best.map(|(score, _, id)| (score.0, id)).collect()
    }
}

/// The rank of a place, less for a better one: of equal nodes the first by name, as in [`KindKey::rank`].
fn rank_of(fleet: &Fleet, (score, id): (Score, NodeId)) -> (Reverse<Score>, Option<&str>) {
    (Reverse(score), fleet.nodes.get(id).map(|node| &*node.name))
}

/// Minors of the GPUs that holdings are, or may be, of.
fn minors(node: &Node, holdings: &Holdings) -> Vec<u32> {
    let gpus = gpus_of_holdings(&node.inventory, holdings).into_keys();
    gpus.filter_map(|at| Some(node.gpus().get(at)?.minor)).collect()
}
