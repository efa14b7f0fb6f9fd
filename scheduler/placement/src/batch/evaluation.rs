//! Batch evaluation: one request on many nodes, where equal nodes share a result that takes work.
//!
//! Nodes that were bought together have one hardware class and are in few equivalence classes, so that the engine decides a
//! request with constraints a few times and not thousands of times.

use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::batch::cache::{CachedScores, ScoreCache};
use crate::choice::cost::{cost_decides, cost_of_gpus};
use crate::choice::node_choice::{ChoiceContext, gpus_by_rules, is_cheapest_share, score, score_from};
use crate::data::holding::Hints;
use crate::data::ident::NodeId;
use crate::data::policy::{NodePolicy, Policies, Score};
use crate::data::reason::Reason;
use crate::data::request::NodeRequest;
use crate::state::equivalence::{EquivalenceClassId, EquivalenceKey, has_class, key_with};
use crate::state::nodes::{NodeSummary, Nodes};

/// The evaluation of one request on many nodes, with the results that are known.
#[derive(Debug)]
pub struct BatchEvaluation<'a> {
    pub(crate) nodes: &'a Nodes,
    context: ChoiceContext<'a>,
    cache: &'a ScoreCache,
    request: NodeRequest<'a>,
    /// Results by class; `None` until a node of the class is evaluated.
    by_class: FxHashMap<ClassKey, Option<(Policies, Evaluated)>>,
    /// The cached results of equal requests, and the policies that they are for.
    cached: Option<(Policies, Arc<CachedScores>)>,
    /// Index of the node with the hint of the pod that requests, if it has one.
    pub(crate) own: Option<u32>,
}

/// Identifies nodes that give the same results.
#[derive(Debug, PartialEq, Eq, Hash)]
enum ClassKey {
    /// Nodes on which no hint counts.
    Class(EquivalenceClassId),
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
    /// Prepares an evaluation: finds the node with a hint of the pod that requests.
    pub(crate) fn new(
        nodes: &'a Nodes,
        context: ChoiceContext<'a>,
        cache: &'a ScoreCache,
        request: NodeRequest<'a>,
    ) -> Self {
        let own = match context.hints {
            Hints::RespectOthers(own) => nodes.hinted.get(own).copied(),
            Hints::Ignore | Hints::Respect => None,
        };
        Self {
            nodes,
            context,
            cache,
            request,
            by_class: FxHashMap::default(),
            cached: None,
            own,
        }
    }

    /// The same evaluation with the cached results of its kind of request under these policies.
    pub(crate) fn with_scores(self, policies: Policies, scores: Arc<CachedScores>) -> Self {
        Self {
            cached: Some((policies, scores)),
            ..self
        }
    }

    /// The result of [`Fleet::fit`](crate::Fleet::fit) and [`Fleet::score`](crate::Fleet::score) on a node: from the cache,
    /// unless the node has changed since the last equal request.
    ///
    /// # Errors
    /// The reason for which there is no room.
    #[inline]
    pub fn evaluate(&mut self, node: NodeId, policies: Policies) -> Result<Score, Reason> {
        // A node that is gone has no version.
        let version = self.nodes.version(node).ok_or(Reason::NoDevice)?;
        match self.cached(node.index, version, policies) {
            Some(cached) => cached,
            None => self.evaluate_uncached(node, version, policies),
        }
    }

    /// The score on a node, if there is room and it is at least `least`: less work than [`Self::evaluate`] where it is far lower.
    pub(crate) fn evaluate_from(&mut self, least: Score, id: NodeId, policies: Policies) -> Option<Score> {
        let node = self.nodes.get(id)?;
        let score = if self.may_differ_by_owner(id.index) || !is_cheapest_share(node, self.request, policies)
        {
            self.evaluate(id, policies).ok()?
        } else {
            let version = self.nodes.version(id)?;
            let scores = self.cached_scores(policies);
            if let Some(known) = scores.get(id.index, version) {
                known.ok()?
            } else {
                // A score that is too low stays unknown.
                let score = score_from(least, node, self.request, self.context)?;
                scores.set(id.index, version, Ok(score));
                score
            }
        };
        (score >= least).then_some(score)
    }

    /// The cached result on the node at an index, if it is of this version of the node. Always `None` before the first evaluation
    /// by these policies.
    #[inline]
    fn cached(&self, index: u32, version: u64, policies: Policies) -> Option<Result<Score, Reason>> {
        let (cached_policies, scores) = self.cached.as_ref()?;
        if *cached_policies == policies && !self.may_differ_by_owner(index) {
            scores.get(index, version)
        } else {
            None
        }
    }

    /// Returns true if the result on a node may hold for no other pod: the pod has a hint there, or the hints of others do not
    /// count.
    #[inline]
    pub(crate) fn may_differ_by_owner(&self, index: u32) -> bool {
        self.own == Some(index) || self.context.hints == Hints::Ignore
    }

    /// Evaluates a node of which this evaluation knows no result, and puts the result into the cache if it holds for every pod
    /// with an equal request.
    // Out of line, so that the loop over nodes with cached results stays small.
    #[inline(never)]
    fn evaluate_uncached(&mut self, node: NodeId, version: u64, policies: Policies) -> Result<Score, Reason> {
        let summary = *self.nodes.summary(node).ok_or(Reason::NoDevice)?;
        // A result that may hold for this pod alone must not get into the cache.
        if summary.has_hints && self.may_differ_by_owner(node.index) {
            return self.compute(node, &summary, policies);
        }
        // Another request of this kind may have evaluated the node since this evaluation began.
        let scores = self.cached_scores(policies);
        if let Some(result) = scores.get(node.index, version) {
            return result;
        }
        let result = self.compute(node, &summary, policies);
        scores.set(node.index, version, result);
        result
    }

    /// The cached results of this kind of request, looked up once for each change of the policies.
    pub(crate) fn cached_scores(&mut self, policies: Policies) -> Arc<CachedScores> {
        if let Some((_, scores)) = self.cached.as_ref().filter(|(of, _)| *of == policies) {
            return Arc::clone(scores);
        }
        let n_nodes = self.nodes.slots.len();
        let scores = self.cache.scores(&self.request, policies, n_nodes);
        self.cached = Some((policies, Arc::clone(&scores)));
        scores
    }

    /// Computes the result on a node, or takes that of an equal node.
    fn compute(&mut self, id: NodeId, summary: &NodeSummary, policies: Policies) -> Result<Score, Reason> {
        let (request, context) = (self.request, self.context);
        let node = self.nodes.get(id).ok_or(Reason::NoDevice)?;
        let compute = || score(node, request, policies, context);
        // If the cost decides which GPU is taken, nodes of one class may give different GPUs.
        if cost_decides(node, request) {
            return compute();
        }
        let Some(results) = self.class_results(id, summary) else {
            return compute();
        };
        // A result by other policies does not hold; most often all nodes are evaluated by the same.
        results.take_if(|(of, _)| *of != policies);
        let (_, evaluated) = results.get_or_insert_with(|| {
            // The value of a node depends on its CPU and memory, which differ within a class.
            let evaluated = match policies.node {
                NodePolicy::Fill => Evaluated::Gpus(gpus_by_rules(node, request, policies.device, context)),
                _ => Evaluated::Score(compute()),
            };
            (policies, evaluated)
        });
        match evaluated {
            Evaluated::Score(result) => *result,
            Evaluated::Gpus(Err(reason)) => Err(*reason),
            Evaluated::Gpus(Ok(gpus)) => {
                let cost = cost_of_gpus(
                    node,
                    request,
                    gpus.iter().copied(),
                    context.look_ahead(request),
                    context.hints,
                );
                Ok(Score::of_cost(cost.rank()))
            }
        }
    }

    /// Number of equivalence classes with results.
    pub fn n_evaluated(&self) -> usize {
        self.by_class.len()
    }

    /// The entry for the result on the class of a node, empty before the first; `None` for a node of no class.
    fn class_results(
        &mut self,
        node: NodeId,
        summary: &NodeSummary,
    ) -> Option<&mut Option<(Policies, Evaluated)>> {
        let hints = self.context.hints;
        let node = self.nodes.get(node).filter(|_| summary.has_hints);
        let key = match node.filter(|node| node.any_hint_counts(hints)) {
            // The summary has the class without hints, so the key with them is computed here.
            Some(node) if has_class(node) => ClassKey::WithHints(key_with(node, hints)),
            // A node of no class (see `has_class`): only the free amounts of GPUs count there, and evaluating them is cheaper
            // than computing a key.
            Some(_) => return None,
            None => ClassKey::Class(summary.class?),
        };
        Some(self.by_class.entry(key).or_default())
    }
}
