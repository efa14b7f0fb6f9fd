//! Batch evaluation: one request on many nodes, where equal nodes share a result that takes work.
//!
//! Nodes that were bought together have one hardware class and are in few equivalence classes, so that the engine decides a
//! request with constraints a few times and not thousands of times.

use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::batch::cache::CachedScores;
use crate::choice::cost::{ChoiceContext, cost_decides};
use crate::choice::node_choice::{gpus_to_take, score, score_from, score_of_gpus};
use crate::data::holding::Hints;
use crate::data::ident::NodeId;
use crate::data::policy::{NodePolicy, Score};
use crate::data::reason::Reason;
use crate::state::equivalence::{EquivalenceKey, has_class, key_with};
use crate::state::nodes::{NodeSummary, Nodes};

/// The evaluation of one request on many nodes, with the results that are known.
#[derive(Debug)]
pub struct BatchEvaluation<'a> {
    nodes: &'a Nodes,
    context: ChoiceContext<'a>,
    policy: NodePolicy,
    /// The cached results of equal requests.
    scores: Arc<CachedScores>,
    /// Results by class; `None` while the first node of the class is evaluated.
    by_class: FxHashMap<ClassKey, Option<Evaluated>>,
    /// Index of the node with the hint of the pod that requests, if it has one.
    own_hint_at: Option<u32>,
}

/// Identifies nodes that give the same results.
#[derive(Debug, PartialEq, Eq, Hash)]
enum ClassKey {
    /// Nodes on which no hint counts, by the address of their class.
    Class(usize),
    /// Nodes with hints that count.
    WithHints(EquivalenceKey),
}

/// The result of evaluating one node of a class.
#[derive(Debug)]
enum Evaluated {
    /// The score, the same for all nodes of the class.
    Score(Result<Score, Reason>),
    /// The GPUs that the request takes of each node of the class. Their cost differs with the CPU and memory of the node.
    Gpus(Result<Vec<usize>, Reason>),
}

impl<'a> BatchEvaluation<'a> {
    /// Prepares an evaluation with the cached results of equal requests.
    pub(crate) fn new(
        nodes: &'a Nodes,
        context: ChoiceContext<'a>,
        policy: NodePolicy,
        scores: Arc<CachedScores>,
    ) -> Self {
        let own_hint_at = match context.hints {
            Hints::RespectOthers(own) => nodes.hinted.get(own).copied(),
            Hints::Ignore | Hints::Respect => None,
        };
        Self {
            nodes,
            context,
            policy,
            scores,
            by_class: FxHashMap::default(),
            own_hint_at,
        }
    }

    /// The score of a node, or the reason for which there is no room: from the cache, unless the node has changed since the last
    /// equal request.
    #[inline]
    pub fn evaluate(&mut self, node: NodeId) -> Result<Score, Reason> {
        match self.cached(node) {
            Some(cached) => cached,
            None => self.evaluate_uncached(node),
        }
    }

    /// Returns true if the cached result on a node that exists is a score below `least`: one load and two comparisons, for the
    /// many nodes of a large request that cannot be the best.
    #[inline]
    pub fn is_known_below(&self, least: Score, node: NodeId) -> bool {
        debug_assert!(self.nodes.summary(node).is_some(), "{node:?} is gone");
        self.scores.is_below(least, node.index) && !self.may_differ_by_owner(node.index)
    }

    /// The score on a node, if there is room and it is at least `least`: less work than [`Self::evaluate`] where it is far lower.
    pub(crate) fn evaluate_from(&mut self, least: Score, id: NodeId) -> Option<Score> {
        let node = self.nodes.get(id)?;
        // The score is then the cost of one GPU, which `score_from` compares with `least` early.
        let is_cheapest = self.policy == NodePolicy::Fill && cost_decides(node, self.context);
        let score = if self.cached(id).is_none() && is_cheapest && !self.may_differ_by_owner(id.index) {
            // A score that is too low stays unknown.
            let score = score_from(least, node, self.context).ok()?;
            self.scores.set(id.index, Ok(score));
            score
        } else {
            self.evaluate(id).ok()?
        };
        (score >= least).then_some(score)
    }

    /// The cached result on a node that exists.
    #[inline]
    fn cached(&self, node: NodeId) -> Option<Result<Score, Reason>> {
        self.nodes.summary(node)?;
        if self.may_differ_by_owner(node.index) {
            return None;
        }
        self.scores.get(node.index)
    }

    /// Returns true if the result on a node, in case it has hints, may hold for no other pod: one of them is the pod's own, which
    /// does not count for it, or no hint counts.
    #[inline]
    fn may_differ_by_owner(&self, index: u32) -> bool {
        self.own_hint_at == Some(index) || self.context.hints == Hints::Ignore
    }

    /// Evaluates a node of which this evaluation knows no result, and puts the result into the cache if it holds for every pod
    /// with an equal request.
    // Out of line, so that the loop over nodes with cached results stays small.
    #[inline(never)]
    fn evaluate_uncached(&mut self, node: NodeId) -> Result<Score, Reason> {
        let summary = self.nodes.summary(node).ok_or(Reason::NoDevice)?;
        // A result that may hold for this pod alone must not get into the cache.
        if summary.has_hints && self.may_differ_by_owner(node.index) {
            return self.compute(node, summary);
        }
        // `cached` has skipped this node although it has no hint, or another request of this kind has evaluated it meanwhile.
        if let Some(result) = self.scores.get(node.index) {
            return result;
        }
        let result = self.compute(node, summary);
        self.scores.set(node.index, result);
        result
    }

    /// Computes the result on a node, or takes that of a node of its class.
    fn compute(&mut self, id: NodeId, summary: &NodeSummary) -> Result<Score, Reason> {
        let (context, policy) = (self.context, self.policy);
        let node = self.nodes.get(id).ok_or(Reason::NoDevice)?;
        // If the cost decides which GPU is taken, nodes of one class may give different GPUs.
        if cost_decides(node, context) {
            return score(node, policy, context);
        }
        let Some(results) = self.class_results(id, summary) else {
            return score(node, policy, context);
        };
        // The value of a node depends on its CPU and memory, which differ within a class.
        let evaluated = results.get_or_insert_with(|| match policy {
            NodePolicy::Fill => Evaluated::Gpus(gpus_to_take(node, context)),
            _ => Evaluated::Score(score(node, policy, context)),
        });
        match evaluated {
            Evaluated::Score(result) => *result,
            Evaluated::Gpus(Err(reason)) => Err(*reason),
            Evaluated::Gpus(Ok(gpus)) => Ok(score_of_gpus(node, gpus, context)),
        }
    }

    /// Number of equivalence classes with results.
    #[cfg(any(test, feature = "check"))]
    pub fn n_evaluated(&self) -> usize {
        self.by_class.len()
    }

    /// The entry for the class of a node, which is empty until a node of the class is evaluated; `None` for a node of no class.
    fn class_results(&mut self, node: NodeId, summary: &NodeSummary) -> Option<&mut Option<Evaluated>> {
        let hints = self.context.hints;
        let key = match self.nodes.get(node) {
            Some(node) if summary.has_hints && node.any_hint_counts(hints) => {
                // A node of no class (see `has_class`): only the free amounts of GPUs count there, and evaluating them is cheaper
                // than computing a key.
                if !has_class(node) {
                    return None;
                }
                // The summary has the class without hints, so the key with them is computed here.
                ClassKey::WithHints(key_with(node, hints))
            }
            _ => ClassKey::Class(Arc::as_ptr(summary.class.as_ref()?).addr()),
        };
        Some(self.by_class.entry(key).or_default())
    }
}
