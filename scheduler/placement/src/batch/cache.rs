//! The score cache: results of earlier evaluations, so that a request evaluates only the nodes that have changed since the last
//! equal request. Equal requests are of one kind. As scores depend on the workload model, each model has a cache of its own.
//!
//! For each kind of request there is one word per node. Words are read and written whole and without locks: no node changes
//! while a request is evaluated, and the first request after a change forgets the results of the nodes that have changed.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::data::amounts::HostAmounts;
use crate::data::constraints::Constraints;
use crate::data::policy::{Policies, Score};
use crate::data::reason::Reason;
use crate::data::request::{DeviceRequest, NodeRequest, RequestedGpus};
use crate::state::nodes::Nodes;

/// Most kinds of requests in the cache; a new one replaces the one that was evaluated longest ago. Each takes four bytes a node.
const MAX_REQUESTS: usize = 128;

/// A kind of request leaves the cache when this many workload models in a row have had no request of it.
const KEPT_MODELS: u32 = 3;

/// The word of a node whose result is not known.
const UNKNOWN: u32 = u32::MAX;
/// The bit of a word that is set for a refusal; the other bits are then the place of the reason in [`Reason::ALL`].
const REFUSED: u32 = 1 << 31;

/// Everything that a result depends on besides the node and the workload model.
#[derive(Debug, PartialEq)]
pub(crate) struct RequestKey {
    gpus: RequestedGpus,
    others: Box<[DeviceRequest]>,
    constraints: Option<Constraints>,
    host: HostAmounts,
    pub(crate) policies: Policies,
}

impl RequestKey {
    fn new(request: &NodeRequest<'_>, policies: Policies) -> Self {
        Self {
            gpus: request.gpus,
            others: request.others.into(),
            constraints: request.constraints.cloned(),
            host: request.host,
            policies,
        }
    }

    /// A request of the kind that the key stands for.
    pub(crate) fn request(&self) -> NodeRequest<'_> {
        NodeRequest {
            gpus: self.gpus,
            others: &self.others,
            constraints: self.constraints.as_ref(),
            host: self.host,
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct ScoreCache {
    /// In the order of their last use.
    known: Mutex<Vec<KnownKind>>,
}

/// A kind of request with results.
#[derive(Debug)]
struct KnownKind {
    key: Arc<RequestKey>,
    scores: Arc<CachedScores>,
    /// The number of changes of the fleet up to which the results are right.
    n_changes: u64,
    /// The number of workload models since the last request of the kind.
    n_models: u32,
}

impl ScoreCache {
    /// The results of one kind of request on the nodes as they are now.
    pub(crate) fn scores(
        &self,
        request: &NodeRequest<'_>,
        policies: Policies,
        nodes: &Nodes,
    ) -> Arc<CachedScores> {
        // A panic of another thread leaves at most a list without one entry, so the poison of the lock is ignored.
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        // From the end: the equal pods of a Job or Deployment come in a row.
        let mut kinds = known.iter();
        let found = kinds.rposition(|kind| kind.key.policies == policies && kind.key.request() == *request);
        let mut kind = if let Some(at) = found {
            // Pushed to the end of the list again below, which is in the order of use.
            known.remove(at)
        } else {
            // The list is in the order of use, so that the first kind was requested longest ago.
            if known.len() >= MAX_REQUESTS {
                known.remove(0);
            }
            KnownKind::new(Arc::new(RequestKey::new(request, policies)))
        };
        kind.n_models = 0;
        let scores = kind.scores_on(nodes);
        known.push(kind);
        scores
    }

    /// A cache for the next workload model, with the kinds that were requested lately but none of their results.
    pub(crate) fn without_results(&self) -> Self {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let recent = known.iter().filter(|kind| kind.n_models < KEPT_MODELS);
        let kinds = recent.map(|kind| KnownKind {
            n_models: kind.n_models + 1,
            ..KnownKind::new(Arc::clone(&kind.key))
        });
        Self {
            known: Mutex::new(kinds.collect()),
        }
    }

    /// The kind at this place from the latest used, and its results on the nodes as they are now; `None` beyond the last.
    pub(crate) fn kind(&self, place: usize, nodes: &Nodes) -> Option<(Arc<RequestKey>, Arc<CachedScores>)> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let kind = known.iter_mut().nth_back(place)?;
        Some((Arc::clone(&kind.key), kind.scores_on(nodes)))
    }
}

impl KnownKind {
    /// A kind without results and without room for any.
    fn new(key: Arc<RequestKey>) -> Self {
        Self {
            key,
            scores: Arc::default(),
            n_changes: 0,
            n_models: 0,
        }
    }

    /// The results on the nodes as they are now, with room for all of them.
    fn scores_on(&mut self, nodes: &Nodes) -> Arc<CachedScores> {
        if self.scores.0.len() < nodes.slots.len() {
            self.scores = Arc::new(self.scores.grown(nodes.slots.len()));
        }
        for index in nodes.changed_since(self.n_changes) {
            self.scores.store(index, UNKNOWN);
        }
        self.n_changes = nodes.n_changes;
        Arc::clone(&self.scores)
    }
}

/// The results of one kind of request: the word of each node, by its index in the fleet.
#[derive(Debug, Default)]
pub(crate) struct CachedScores(Box<[AtomicU32]>);

impl CachedScores {
    /// A copy with room for nodes that have come since, and for some more.
    fn grown(&self, n_nodes: usize) -> Self {
        // A quarter more than needed, so that a growing cluster does not copy all results with every new node.
        let spare = if self.0.is_empty() { 0 } else { n_nodes / 4 };
        let known = self.0.iter().map(|word| word.load(Ordering::Relaxed));
        let words = known.chain(std::iter::repeat(UNKNOWN)).map(AtomicU32::new);
        Self(words.take(n_nodes + spare).collect())
    }

    #[inline]
    pub(crate) fn get(&self, index: u32) -> Option<Result<Score, Reason>> {
        // No order with other words matters: a word is right or wrong by itself.
        match self.0.get(index as usize)?.load(Ordering::Relaxed) {
            UNKNOWN => None,
            points if points & REFUSED == 0 => Some(Ok(Score::of_points(points))),
            word => Reason::ALL.get((word & !REFUSED) as usize).copied().map(Err),
        }
    }

    /// Returns true if the result on a node is known and a score below `least`.
    #[inline]
    pub(crate) fn is_below(&self, least: Score, index: u32) -> bool {
        // The words of refusals and of unknown results are above those of all scores.
        let word = self.0.get(index as usize);
        word.is_some_and(|word| word.load(Ordering::Relaxed) < least.points())
    }

    pub(crate) fn set(&self, index: u32, result: Result<Score, Reason>) {
        let word = match result {
            Ok(score) => score.points(),
            // Reasons are few, and their numbers are their places in `Reason::ALL`.
            Err(reason) => REFUSED | reason as u32,
        };
        self.store(index, word);
    }

    fn store(&self, index: u32, value: u32) {
        if let Some(word) = self.0.get(index as usize) {
            word.store(value, Ordering::Relaxed);
        }
    }
}
