//! The score cache: results of earlier evaluations, so that a request evaluates only the nodes that have changed since the last
//! equal request. Equal requests are of one kind.
//!
//! For each kind of request there is one word per node: the node's version at its evaluation, and the result. Words are read
//! and written whole and without locks, so that concurrent requests share them. A word of another version does not count.
//!
//! Scores depend on the workload model, so that each model has a cache of its own.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::data::amounts::HostAmounts;
use crate::data::constraints::Constraints;
use crate::data::policy::{Policies, Score};
use crate::data::reason::Reason;
use crate::data::request::{DeviceRequest, NodeRequest, RequestedGpus};

/// Most kinds of requests in the cache; a new one replaces the one that was evaluated longest ago. Each takes one word per node.
const MAX_REQUESTS: usize = 128;

/// Workload models without a request of a kind after which its results are not computed any more.
const KEPT_MODELS: u32 = 3;

/// Bits of a result; the rest of a word is a version, which repeats after 68 billion changes.
const RESULT_BITS: u32 = 28;
const VERSION_MASK: u64 = u64::MAX >> RESULT_BITS;
/// The word of a node without a result: its version comes only after 68 billion changes.
const UNKNOWN: u64 = u64::MAX;
/// The bit of a result that is set for a refusal; the other bits are then the place of the reason in [`Reason::ALL`].
const REFUSED: u32 = 1 << (RESULT_BITS - 1);

/// The result of a request on a node, in 28 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachedResult(u32);

/// Everything that a result depends on besides the node and the workload model.
#[derive(Debug, PartialEq)]
pub(crate) struct RequestKey {
    gpus: RequestedGpus,
    others: Box<[DeviceRequest]>,
    constraints: Option<Constraints>,
    host: HostAmounts,
    pub(crate) policies: Policies,
}

impl CachedResult {
    #[inline]
    pub(crate) fn of(result: Result<Score, Reason>) -> Self {
        match result {
            Ok(score) => Self(score.points()),
            // Reasons are few, and their numbers are their places in `Reason::ALL`.
            Err(reason) => Self(REFUSED | reason as u32),
        }
    }

    /// The score, or the reason for which there is no room.
    ///
    /// # Errors
    /// The reason.
    #[inline]
    pub fn get(self) -> Result<Score, Reason> {
        if self.0 & REFUSED == 0 {
            return Ok(Score::of_points(self.0));
        }
        let reason = Reason::ALL.get((self.0 & !REFUSED) as usize);
        Err(reason.copied().unwrap_or(Reason::NoDevice))
    }
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

/// The results of all kinds of requests.
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
    /// The number of workload models since the last request of the kind.
    n_models: u32,
}

impl ScoreCache {
    /// The results of one kind of request, with room for `n_nodes`.
    pub(crate) fn scores(
        &self,
        request: &NodeRequest<'_>,
        policies: Policies,
        n_nodes: usize,
    ) -> Arc<CachedScores> {
        // A panic of another thread leaves at most a list without one entry, so the poison of the lock is ignored.
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        // From the end: the equal pods of a Job or Deployment come in a row.
        let found = known
            .iter()
            .rposition(|kind| kind.key.policies == policies && kind.key.request() == *request);
        let mut kind = if let Some(at) = found {
            // Pushed to the end of the list again below, which is in the order of use.
            known.remove(at)
        } else {
            if known.len() >= MAX_REQUESTS {
                known.remove(0);
            }
            KnownKind::new(Arc::new(RequestKey::new(request, policies)))
        };
        kind.n_models = 0;
        let scores = kind.scores_of(n_nodes);
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

    /// The kind at this place from the latest used, and its results, with room for `n_nodes`; `None` beyond the last.
    pub(crate) fn kind(&self, place: usize, n_nodes: usize) -> Option<(Arc<RequestKey>, Arc<CachedScores>)> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let kind = known.iter_mut().nth_back(place)?;
        Some((Arc::clone(&kind.key), kind.scores_of(n_nodes)))
    }
}

impl KnownKind {
    /// A kind without results and without room for any.
    fn new(key: Arc<RequestKey>) -> Self {
        Self {
            key,
            scores: Arc::new(CachedScores::new(0)),
            n_models: 0,
        }
    }

    /// The results, with room for `n_nodes`.
    fn scores_of(&mut self, n_nodes: usize) -> Arc<CachedScores> {
        // Requests that still hold the smaller copy lose the results that they add, but read no wrong ones.
        if self.scores.words.len() < n_nodes {
            self.scores = Arc::new(self.scores.grown(n_nodes));
        }
        Arc::clone(&self.scores)
    }
}

/// The results of one kind of request on all nodes.
#[derive(Debug)]
pub(crate) struct CachedScores {
    /// The word of each node, by its index in the fleet.
    words: Box<[AtomicU64]>,
}

impl CachedScores {
    /// Room for the results of this number of nodes, none of which is known yet.
    fn new(n_nodes: usize) -> Self {
        let words = std::iter::repeat_with(|| AtomicU64::new(UNKNOWN));
        Self {
            words: words.take(n_nodes).collect(),
        }
    }

    /// A copy with room for nodes that have come since, and for some more.
    fn grown(&self, n_nodes: usize) -> Self {
        // A quarter more than needed, so that a growing cluster does not copy all results with every new node.
        let spare = if self.words.is_empty() { 0 } else { n_nodes / 4 };
        let grown = Self::new(n_nodes + spare);
        for (word, known) in grown.words.iter().zip(&self.words) {
            word.store(known.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        grown
    }

    /// The result on a node of this version, if it is known.
    #[inline]
    pub(crate) fn get(&self, index: u32, version: u64) -> Option<Result<Score, Reason>> {
        // No order with other words matters: a word is right or wrong by itself.
        let word = self.words.get(index as usize)?.load(Ordering::Relaxed);
        // The version in the word makes a stale result worthless, so nothing has to be invalidated.
        if word >> RESULT_BITS != version & VERSION_MASK {
            return None;
        }
        let bits = u32::try_from(word & ((1 << RESULT_BITS) - 1)).unwrap_or(0);
        Some(CachedResult(bits).get())
    }

    /// Keeps the result on a node of this version, in place of an older one.
    pub(crate) fn set(&self, index: u32, version: u64, result: Result<Score, Reason>) {
        if let Some(word) = self.words.get(index as usize) {
            // Version and result are stored in one word at once, so that no reader sees the one without the other.
            let version = (version & VERSION_MASK) << RESULT_BITS;
            let CachedResult(bits) = CachedResult::of(result);
            word.store(version | u64::from(bits), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_was_never_evaluated_has_no_result() {
        let scores = CachedScores::new(2);
        scores.set(0, 7, Err(Reason::NoDevice));
        let grown = scores.grown(4);
        assert_eq!(
            [7, 8].map(|version| grown.get(0, version)),
            [Some(Err(Reason::NoDevice)), None]
        );
        assert!((1..4).all(|index| grown.get(index, 0).is_none()));
    }
}
