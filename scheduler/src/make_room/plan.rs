//! The choice of the node on which room is made for a pod, and of the pods that go there.
//!
//! Changes nothing, and reads no clock: the caller brings it. The index is read-locked for the search on one node at a time, or
//! for the count of the pods of a few: watches and filters write to it, and must not wait long.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use placement::{NodeId, NodeView};

use crate::index::{Index, NodeRoom, Preemptor, RoomSearch, Shared};

/// The most nodes that are searched for one decision: those with the fewest pods that may be evicted or are leaving.
const MAX_NODES: usize = 64;

/// The longest time for which nodes are searched for one decision.
const SEARCH_LIMIT: Duration = Duration::from_millis(50);

/// The number of nodes whose pods are counted under one lock: filters that keep room write to the index, and wait as long.
const COUNTED_AT_ONCE: usize = 32;

/// The most plans for one pod: if the API server refuses the evictions of one, the next is tried.
pub(super) const MAX_PLANS: usize = 3;

/// The result of the search on all nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Plans {
    /// The best plans, best first: by kube-scheduler's order of nodes, then by the node's name. Nodes that have refused come
    /// last.
    pub(super) best: Vec<NodeRoom>,
    /// A node on which the pod fits without an eviction, at once or when pods have ended that are leaving.
    pub(super) free: Option<Box<str>>,
    /// The number of nodes that were searched; 0 if the pod fits at once.
    pub(super) n_searched: usize,
}

/// Searches for room for a pod on these nodes; those in `refusing`, on which the API server has refused evictions for it, come
/// last. `now` is the clock.
pub(super) fn plans(
    preemptor: &Preemptor<'_>,
    refusing: &BTreeSet<Box<str>>,
    index: &Shared<Index>,
    nodes: &[NodeId],
    now: impl Fn() -> Instant,
) -> Plans {
    let began = now();
    let mut plans = Plans::default();
    let cheapest = match cheapest(preemptor, refusing, index, nodes) {
        Ok(cheapest) => cheapest,
        Err(fitting) => {
            plans.free = Some(fitting);
            return plans;
        }
    };
    for node in cheapest {
        // One node is searched in any case, however long the count of pods took.
        if plans.n_searched > 0 && now().saturating_duration_since(began) > SEARCH_LIMIT {
            break;
        }
        plans.n_searched += 1;
        match preemptor.room_on(index.read().filter(), &node) {
            RoomSearch::NeedsNoEviction => {
                plans.free.get_or_insert(node);
            }
            RoomSearch::Evictions(room) => plans.best.push(room),
            RoomSearch::Nothing => {}
        }
    }
    let best = &mut plans.best;
    best.sort_by_cached_key(|room| (refusing.contains(&room.node), room.cost, room.node.clone()));
    plans.best.truncate(MAX_PLANS);
    plans
}

/// The names of the nodes to search: of those with pods that may go, the ones with the fewest. An error is the name of a node
/// that fits now, so that no pod has to go.
fn cheapest(
    preemptor: &Preemptor<'_>,
    refusing: &BTreeSet<Box<str>>,
    index: &Shared<Index>,
    nodes: &[NodeId],
) -> Result<Vec<Box<str>>, Box<str>> {
    let mut counted: Vec<(bool, usize, Box<str>)> = Vec::with_capacity(nodes.len());
    for some in nodes.chunks(COUNTED_AT_ONCE) {
        let index = index.read();
        let filter = index.filter();
        let mut batch = filter.batch(preemptor.demand);
        for node in some {
            let name = index.fleet().view(*node).map(NodeView::name);
            let Some(name) = name.filter(|name| index.knows_node(name)) else {
                continue;
            };
            let fit = filter.evaluate(|| name, Some(*node), preemptor.demand, &mut batch);
            if fit.is_ok() {
                return Err(name.into());
            }
            let n_victims = index.n_victims_on(*node, preemptor.victims_below);
            if n_victims > 0 {
                counted.push((refusing.contains(name), n_victims, name.into()));
            }
        }
    }
    counted.sort_unstable();
    counted.truncate(MAX_NODES);
    Ok(counted.into_iter().map(|(_, _, name)| name).collect())
}

#[cfg(test)]
mod tests;
