//! Every order of moves, made on the fleet itself by its public interface: the rules of a plan, written a second time.

use std::collections::{BTreeMap, BTreeSet};

use placement::{DeviceId, Fleet, Hints, NodeId, NodeView, Placement};

use super::world::{Aim, World, name};
use crate::build::{GIB, gpus};

/// The best that any moves reach.
pub(super) struct Best {
    pub(super) is_reached: bool,
    /// The least price of moves that reach the goal, in byte-seconds.
    pub(super) price: u128,
    /// The most pods that leave GPUs which become empty.
    pub(super) most_moves: usize,
}

/// The place of each moved pod.
type State = BTreeMap<usize, (NodeId, Vec<DeviceId>)>;

/// Returns true if moves have reached the goal.
type IsGoal<'w> = Box<dyn Fn(&Fleet, &State) -> bool + 'w>;

/// Moves of some pods.
struct Walk<'w> {
    world: &'w World,
    movable: Vec<usize>,
    is_goal: IsGoal<'w>,
    seen: BTreeSet<State>,
    best: Option<u128>,
    most_moves: usize,
}

/// The best node for a pod that is on none, and its devices there: fit, CPU and memory, score, name.
pub(super) fn place(world: &World, fleet: &Fleet, at: usize) -> Option<(NodeId, Placement)> {
    let (pod, request) = (&world.pods[at], world.request(at));
    let mut best = None;
    // Of equal nodes the first by name.
    let mut nodes: Vec<usize> = (0..world.nodes.len()).collect();
    nodes.sort_by_key(|node| name(*node));
    for node in nodes {
        let id = fleet.node_id(&name(node))?;
        let free = fleet.view(id).and_then(NodeView::host_free);
        let has_host = free.is_none_or(|free| {
            free.cpu_milli >= request.host.cpu_milli && free.memory >= request.host.memory
        });
        let is_allowed = pod.nodes.as_ref().is_none_or(|nodes| nodes.contains(&node));
        if !has_host || !is_allowed || fleet.fit(id, request, Hints::Respect).is_err() {
            continue;
        }
        let score = fleet.score(id, request, pod.policies, Hints::Respect);
        if best.is_none_or(|(known, _)| score > known) {
            best = Some((score, id));
        }
    }
    let (_, id) = best?;
    let devices = fleet.choose_devices(id, request, pod.policies.device, Hints::Respect);
    Some((id, devices.unwrap()))
}

/// The price of a move: a restart is a GiB for an hour.
fn price(world: &World, at: usize) -> u128 {
    let pod = &world.pods[at];
    let bytes = pod.gib * pod.minors.len() as u64 * GIB;
    u128::from(bytes) * u128::from(pod.run_seconds) + u128::from(GIB) * 3600
}

pub(super) fn best(world: &World) -> Best {
    let (best, most_moves) = match &world.aim {
        Aim::Node(node) => empty(world, *node, &(0..4).collect::<Vec<u32>>()),
        Aim::Gpus(node, minors) => empty(world, *node, minors),
        Aim::Free(gib, n) => (
            (0..world.nodes.len())
                .filter_map(|node| free(world, node, *gib, *n))
                .min(),
            0,
        ),
        Aim::FreeOn(node, gib, n) => (free(world, *node, *gib, *n), 0),
        Aim::Join => (None, 0),
    };
    Best {
        is_reached: best.is_some(),
        price: best.unwrap_or(0),
        most_moves,
    }
}

fn holders(world: &World, node: usize, minors: &[u32]) -> Vec<usize> {
    let pods = world.pods.iter().enumerate();
    let here =
        pods.filter(|(_, pod)| pod.node == node && pod.minors.iter().any(|minor| minors.contains(minor)));
    here.map(|(at, _)| at).filter(|at| world.may_move(*at)).collect()
}

fn empty(world: &World, node: usize, minors: &[u32]) -> (Option<u128>, usize) {
    let movable = holders(world, node, minors);
    let n = movable.len();
    walk(world, movable, Box::new(move |_, state| state.len() == n))
}

/// The least price over all sets of `n` GPUs of a node.
fn free(world: &World, node: usize, gib: u64, n: usize) -> Option<u128> {
    let n_gpus = world.nodes[node].gpus.len();
    let sets = (0_u32..1 << n_gpus).filter(|bits| bits.count_ones() as usize == n);
    let mut best = None;
    for bits in sets {
        let minors: Vec<u32> = (0..4).filter(|minor| bits >> minor & 1 == 1).collect();
        let movable = holders(world, node, &minors);
        let is_goal = move |fleet: &Fleet, _: &State| {
            let gpus = gpus(fleet, fleet.node_id(&name(node)).unwrap());
            let is_free = |gpu: &placement::DeviceView<'_>| {
                !gpu.device.closed && gpu.free.memory.bytes_floor() >= gib * GIB
            };
            gpus.iter()
                .filter(|gpu| minors.contains(&gpu.device.minor))
                .all(is_free)
        };
        let (found, _) = walk(world, movable, Box::new(is_goal));
        best = best.into_iter().chain(found).min();
    }
    best
}

fn walk<'w>(world: &'w World, movable: Vec<usize>, is_goal: IsGoal<'w>) -> (Option<u128>, usize) {
    let mut fleet = world.fleet();
    world.close(&mut fleet);
    let mut walk = Walk {
        world,
        movable,
        is_goal,
        seen: BTreeSet::new(),
        best: None,
        most_moves: 0,
    };
    walk.go_on(&mut fleet, &State::new());
    (walk.best, walk.most_moves)
}

impl Walk<'_> {
    fn go_on(&mut self, fleet: &mut Fleet, state: &State) {
        if !self.seen.insert(state.clone()) {
            return;
        }
        self.most_moves = self.most_moves.max(state.len());
        if (self.is_goal)(fleet, state) {
            let sum = state.keys().map(|at| price(self.world, *at)).sum();
            self.best = Some(self.best.map_or(sum, |best| best.min(sum)));
        }
        if state.len() == self.world.max_moves {
            return;
        }
        for at in self.movable.clone() {
            if state.contains_key(&at) {
                continue;
            }
            let pod = &self.world.pods[at];
            fleet.release(&pod.name);
            fleet.clear_host_use(&pod.name);
            if let Some((id, placement)) = place(self.world, fleet, at) {
                let minors: Vec<u32> = placement.gpus().map(|share| share.minor).collect();
                let node = fleet.view(id).unwrap().name().to_owned();
                if (&node, &minors) != (&name(pod.node), &pod.minors) {
                    let owner = pod.name.as_str().into();
                    fleet.reserve(&owner, id, &placement).unwrap();
                    fleet.set_host_use(&owner, &node, self.world.request(at).host, false);
                    let devices = placement.gpus().map(|share| share.id.clone()).collect();
                    let mut next = state.clone();
                    next.insert(at, (id, devices));
                    self.go_on(fleet, &next);
                    fleet.release(&pod.name);
                }
            }
            self.world.put(fleet, at);
        }
    }
}
