//! A list of nodes that many requests ask about, with the results of the latest kinds of requests in its order: an equal request
//! evaluates only the nodes that have changed since, and reads the other results one after the other.
//!
//! The results are those of [`BatchEvaluation`], which knows them by node and looks each up.

use std::sync::{Arc, Mutex, PoisonError, TryLockError, Weak};

use crate::batch::cache::{CachedResult, CachedScores};
use crate::batch::evaluation::BatchEvaluation;
use crate::data::ident::NodeId;
use crate::data::policy::{Policies, Score};
use crate::data::reason::Reason;

/// Most kinds of requests with results; a new one replaces the one that was asked about longest ago. Each takes four bytes a node.
const MAX_KINDS: usize = 16;

/// The place of a node that is not in the list.
const ABSENT: u32 = u32::MAX;

/// Nodes in an order of the caller's.
#[derive(Debug)]
pub struct NodeList {
    nodes: Box<[Option<NodeId>]>,
    /// The place in the list of the node at each index of the fleet; [`ABSENT`] for a node that is not in it.
    places: Box<[u32]>,
    /// The kinds of requests with results, in the order of their last use.
    kinds: Mutex<Vec<RequestKind>>,
}

/// A kind of request with results.
#[derive(Debug)]
struct RequestKind {
    /// The results by node, which identify the kind.
    scores: Weak<CachedScores>,
    results: Arc<Mutex<ListResults>>,
}

/// The results of one kind of request.
#[derive(Debug, Default)]
struct ListResults {
    /// The number of changes of the fleet up to which they are right; `None` before the first evaluation.
    n_changes: Option<u64>,
    /// The result on each node of the list.
    results: Vec<CachedResult>,
}

impl NodeList {
    /// A list of nodes; `None` stands for a node of which the fleet knows nothing. Returns `None` for a list that names a node
    /// twice.
    pub fn new(nodes: Box<[Option<NodeId>]>) -> Option<Self> {
        let indices = nodes.iter().flatten().map(|node| node.index as usize);
        let n_indices = indices.max().map_or(0, |last| last + 1);
        let mut places = vec![ABSENT; n_indices];
        for (place, node) in (0..).zip(&nodes) {
            let Some(node) = node else { continue };
            if std::mem::replace(places.get_mut(node.index as usize)?, place) != ABSENT {
                return None;
            }
        }
        Some(Self {
            nodes,
            places: places.into(),
            kinds: Mutex::default(),
        })
    }

    /// The node at a place of the list.
    pub fn node(&self, place: usize) -> Option<NodeId> {
        self.nodes.get(place).copied().flatten()
    }

    /// Has `read` read the results of a request on all nodes of the list, in its order; those of nodes of which the fleet knows
    /// nothing are `unknown`, which has to be the same for equal requests.
    ///
    /// Returns `None` if the result on a node may differ by the pod that requests, or while another request of the kind is
    /// being answered: the nodes then have to be evaluated one by one.
    pub fn evaluate<T>(
        &self,
        batch: &mut BatchEvaluation<'_>,
        policies: Policies,
        unknown: Result<Score, Reason>,
        read: impl FnOnce(&[CachedResult]) -> T,
    ) -> Option<T> {
        let own = batch.own.unwrap_or(ABSENT);
        if self.place(own).is_some() || batch.may_differ_by_owner(ABSENT) {
            return None;
        }
        let known = self.results_of(&batch.cached_scores(policies));
        let mut known = match known.try_lock() {
            Ok(known) => known,
            // A panic of another thread may have left results behind that are half updated.
            Err(TryLockError::Poisoned(_) | TryLockError::WouldBlock) => return None,
        };
        let evaluate = |batch: &mut BatchEvaluation<'_>, node: Option<NodeId>| {
            CachedResult::of(node.map_or(unknown, |node| batch.evaluate(node, policies)))
        };
        let (n_changes, nodes) = (batch.nodes.n_changes(), batch.nodes);
        let before = known.n_changes.replace(n_changes);
        if let Some(changed) = before.and_then(|before| nodes.changed_since(before)) {
            for place in changed.filter_map(|index| self.place(index)) {
                if let Some(result) = known.results.get_mut(place) {
                    *result = evaluate(batch, self.node(place));
                }
            }
        } else {
            let nodes = self.nodes.iter();
            known.results = nodes.map(|node| evaluate(batch, *node)).collect();
        }
        Some(read(&known.results))
    }

    /// The place in the list of the node at an index of the fleet.
    fn place(&self, index: u32) -> Option<usize> {
        let place = self.places.get(index as usize)?;
        (*place != ABSENT).then_some(*place as usize)
    }

    /// The results of the kind of request whose results by node are `scores`.
    fn results_of(&self, scores: &Arc<CachedScores>) -> Arc<Mutex<ListResults>> {
        let mut kinds = self.kinds.lock().unwrap_or_else(PoisonError::into_inner);
        let scores = Arc::downgrade(scores);
        let found = kinds.iter().rposition(|kind| kind.scores.ptr_eq(&scores));
        let kind = if let Some(at) = found {
            kinds.remove(at)
        } else {
            // Results by node end with a change of the workload model, and with the kinds that are asked about no more.
            kinds.retain(|kind| kind.scores.strong_count() > 0);
            if kinds.len() >= MAX_KINDS {
                kinds.remove(0);
            }
            let results = Arc::default();
            RequestKind { scores, results }
        };
        let results = Arc::clone(&kind.results);
        kinds.push(kind);
        results
    }
}
