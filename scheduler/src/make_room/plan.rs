//! The choice of the node on which room is made for a pod, and of the pods that go there.
//!
//! Changes nothing, and reads no clock: the caller brings it. The index is read-locked for the search on one node at a time, or
//! for the count of the pods of a few: watches and filters write to it, and must not wait long.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use placement::NodeId;

use crate::index::{Index, NodeRoom, Preemptor, Promised, ResourceDemand, RoomSearch, Shared};
use crate::kube_scheduler::PodRules;

/// The most nodes that are searched for one decision: those with the fewest pods that may be evicted or are leaving.
const MAX_NODES: usize = 64;

/// The longest time for which nodes are searched for one decision.
const SEARCH_LIMIT: Duration = Duration::from_millis(50);

/// The number of nodes whose pods are counted under one lock: filters that keep room write to the index, and wait as long.
const COUNTED_AT_ONCE: usize = 32;

/// The most plans for one pod: if the API server refuses the evictions of one, the next is tried.
pub(super) const MAX_PLANS: usize = 3;

/// The pod that room is made for.
#[derive(Clone, Copy, Debug)]
pub(super) struct PlannedPod<'a> {
    pub(super) rules: &'a PodRules,
    /// Only pods below this priority may go.
    pub(super) below: i32,
    /// True if pods that are leaving make room without an eviction.
    pub(super) counts_leaving: bool,
    pub(super) demand: &'a ResourceDemand<'a>,
    /// The pods that are evicted for other pods.
    pub(super) promised: &'a Promised,
    /// The nodes on which the API server has refused evictions for the pod: they come last.
    pub(super) refusing: &'a BTreeSet<Box<str>>,
}

/// The room that can be made for a pod on one node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) node: Box<str>,
    pub(super) room: NodeRoom,
}

/// The result of the search on all nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Plans {
    /// The best plans, best first: by kube-scheduler's order of nodes, then by the node's name. Nodes that have refused come
    /// last.
    pub(super) best: Vec<Plan>,
    /// A node on which the pod fits without an eviction, at once or when pods have ended that are leaving.
    pub(super) free: Option<Box<str>>,
    /// The number of nodes that were searched; 0 if the pod fits at once.
    pub(super) n_searched: usize,
}

impl PlannedPod<'_> {
    /// Searches for room on these nodes. `now` is the clock.
    pub(super) fn plans(self, index: &Shared<Index>, nodes: &[NodeId], now: impl Fn() -> Instant) -> Plans {
        let began = now();
        let mut plans = Plans::default();
        let cheapest = match self.cheapest(index, nodes) {
            Ok(cheapest) => cheapest,
            Err(fitting) => {
                plans.free = Some(fitting);
                return plans;
            }
        };
        for node in cheapest {
            if plans.n_searched > 0 && now().saturating_duration_since(began) > SEARCH_LIMIT {
                break;
            }
            plans.n_searched += 1;
            match self.search(&index.read(), &node) {
                RoomSearch::NeedsNoEviction => {
                    plans.free.get_or_insert(node);
                }
                RoomSearch::Evictions(room) => plans.add(Plan { node, room }, self.refusing),
                RoomSearch::Nothing => {}
            }
        }
        plans
    }

    /// Searches for room on one node.
    pub(super) fn search(self, index: &Index, node: &str) -> RoomSearch {
        let below = (self.below, self.counts_leaving);
        let preemptor = Preemptor::for_room(self.rules, below, self.demand, self.promised);
        preemptor.room_on(index.filter(), node)
    }

    /// The names of the nodes to search: of those with pods that may go, the ones with the fewest. An error is the name of a node
    /// that fits now, so that no pod has to go.
    fn cheapest(self, index: &Shared<Index>, nodes: &[NodeId]) -> Result<Vec<Box<str>>, Box<str>> {
        let mut counted: Vec<(bool, usize, Box<str>)> = Vec::with_capacity(nodes.len());
        for some in nodes.chunks(COUNTED_AT_ONCE) {
            let index = index.read();
            let (facts, filter) = (index.room_facts(), index.filter());
            let mut batch = filter.batch(self.demand);
            for node in some {
                let Some(name) = facts.node_name(*node) else {
                    continue;
                };
                let fit = filter.evaluate(|| name, Some(*node), self.demand, &mut batch);
                if fit.is_ok() {
                    return Err(name.into());
                }
                let n_victims = facts.n_victims_on(*node, self.rules.priority.min(self.below));
                if n_victims > 0 {
                    counted.push((self.refusing.contains(name), n_victims, name.into()));
                }
            }
        }
        counted.sort_unstable();
        counted.truncate(MAX_NODES);
        Ok(counted.into_iter().map(|(_, _, name)| name).collect())
    }
}

impl Plans {
    /// Adds a plan, unless enough better ones are known.
    fn add(&mut self, plan: Plan, refusing: &BTreeSet<Box<str>>) {
        let key = |plan: &Plan| (refusing.contains(&plan.node), plan.room.cost, plan.node.clone());
        let at = self.best.partition_point(|known| key(known) < key(&plan));
        self.best.insert(at, plan);
        self.best.truncate(MAX_PLANS);
    }
}

#[cfg(test)]
mod tests;
