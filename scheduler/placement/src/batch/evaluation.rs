//! Batch evaluation: one request on many nodes, where equal nodes share a result that takes work.
//!
//! Nodes that were bought together have one hardware class and are in few equivalence classes, so that the engine decides a
//! request with constraints a few times and not thousands of times.

use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::batch::cache::{CachedScores, ScoreCache};
use crate::choice::choose::{cost, fit, gpus_by_rules, score};
use crate::choice::cost::{LookAhead, PlacementCost, WorkloadModel, cost_decides, cost_of_gpus};
use crate::data::holding::Hints;
use crate::data::ident::NodeId;
use crate::data::policy::{NodePolicy, Policies, ResourceWeights, Score};
use crate::data::reason::Reason;
use crate::data::request::NodeRequest;
use crate::state::equivalence::{EquivalenceClassId, EquivalenceKey, has_class, key_with};
use crate::state::nodes::{NodeSummary, Nodes};

/// One request, with the results that are known.
#[derive(Debug)]
pub struct BatchEvaluation<'a> {
    nodes: &'a Nodes,
    weights: &'a ResourceWeights,
    model: &'a WorkloadModel,
    cache: &'a ScoreCache,
    request: NodeRequest<'a>,
    hints: Hints<'a>,
    by_class: FxHashMap<ClassKey, ClassResults>,
    /// The cached results of equal requests, and the policies that they are for.
    cached: Option<(Policies, Arc<CachedScores>)>,
    /// Index of the node with the requesting owner's own hint.
    own: Option<u32>,
}

/// Identifies nodes that give the same results.
#[derive(Debug, PartialEq, Eq, Hash)]
enum ClassKey {
    /// Nodes on which no hint counts.
    Class(EquivalenceClassId),
    /// Nodes with hints that count.
    WithHints(EquivalenceKey),
}

/// The results on all nodes of a class.
#[derive(Debug, Default)]
struct ClassResults {
    fit: Option<Result<(), Reason>>,
    /// By these policies.
    evaluated: Option<(Policies, Evaluated)>,
}

/// The result of evaluating one node of a class.
#[derive(Debug)]
enum Evaluated {
    /// The score, the same for all of them.
    Score(Result<Score, Reason>),
    /// The GPUs that the request takes of each. Their cost differs with the CPU and memory of the node.
    Gpus(Result<Vec<usize>, Reason>),
}

impl<'a> BatchEvaluation<'a> {
    pub(crate) fn new(
        nodes: &'a Nodes,
        weights: &'a ResourceWeights,
        model: &'a WorkloadModel,
        cache: &'a ScoreCache,
        request: NodeRequest<'a>,
        hints: Hints<'a>,
    ) -> Self {
        let own = match hints {
            Hints::RespectOthers(own) => nodes.hinted.get(own).copied(),
            Hints::Ignore | Hints::Respect => None,
        };
        Self {
            nodes,
            weights,
            model,
            cache,
            request,
            hints,
            by_class: FxHashMap::default(),
            cached: None,
            own,
        }
    }

    /// The result of [`Fleet::fit`](crate::Fleet::fit) and [`Fleet::score`](crate::Fleet::score) on a node: from the cache,
    /// unless the node has changed since the last equal request.
    ///
    /// # Errors
    /// The reason for which there is no room.
    #[inline]
    pub fn evaluate(&mut self, node: NodeId, policies: Policies) -> Result<Score, Reason> {
        let summary = self.nodes.summary(node).ok_or(Reason::NoDevice)?;
        match self.cached(node.index, policies) {
            Some(cached) => cached,
            None => self.evaluate_uncached(node, *summary, policies),
        }
    }

    /// The cached result on the node at an index, if the node has not changed since. Always `None` before the first
    /// evaluation by these policies.
    #[inline]
    fn cached(&self, index: u32, policies: Policies) -> Option<Result<Score, Reason>> {
        let (of, scores) = self.cached.as_ref()?;
        if *of == policies && !self.may_differ_by_owner(index) {
            scores.get(index, self.nodes.version_at(index))
        } else {
            None
        }
    }

    /// Returns true if the result may hold for the requesting owner alone: it has a hint there, or ignores those of others.
    #[inline]
    fn may_differ_by_owner(&self, index: u32) -> bool {
        self.own == Some(index) || self.hints == Hints::Ignore
    }

    #[inline(never)]
    fn evaluate_uncached(
        &mut self,
        node: NodeId,
        summary: NodeSummary,
        policies: Policies,
    ) -> Result<Score, Reason> {
        // A result that holds for one owner alone must not get into the cache.
        if summary.has_hints && self.may_differ_by_owner(node.index) {
            return self.compute(node, &summary, policies);
        }
        let scores = self.cached_scores(policies);
        let version = self.nodes.version_at(node.index);
        if let Some(result) = scores.get(node.index, version) {
            return result;
        }
        let result = self.compute(node, &summary, policies);
        scores.set(node.index, version, result);
        result
    }

    fn cached_scores(&mut self, policies: Policies) -> Arc<CachedScores> {
        if let Some((_, scores)) = self.cached.as_ref().filter(|(of, _)| *of == policies) {
            return Arc::clone(scores);
        }
        let n_nodes = self.nodes.slots.len();
        let scores = self
            .cache
            .scores(&self.request, policies, self.model.number(), n_nodes);
        self.cached = Some((policies, Arc::clone(&scores)));
        scores
    }

    fn compute(&mut self, id: NodeId, summary: &NodeSummary, policies: Policies) -> Result<Score, Reason> {
        let (request, hints, weights, look_ahead) =
            (self.request, self.hints, self.weights, self.look_ahead());
        let node = self.nodes.get(id).ok_or(Reason::NoDevice)?;
        let compute = || score(node, request, policies, weights, look_ahead, hints);
        // Where the cost decides which GPU is taken, a class has no GPUs in common.
        if cost_decides(node, request) {
            return compute();
        }
        let Some(results) = self.class_results(id, summary) else {
            return compute();
        };
        results.evaluated.take_if(|(of, _)| *of != policies);
        let (_, evaluated) = results.evaluated.get_or_insert_with(|| {
            let evaluated = match policies.node {
                NodePolicy::Fill => {
                    Evaluated::Gpus(gpus_by_rules(node, request, policies.device, weights, hints))
                }
                _ => Evaluated::Score(compute()),
            };
            (policies, evaluated)
        });
        match evaluated {
            Evaluated::Score(result) => *result,
            Evaluated::Gpus(Err(reason)) => Err(*reason),
            Evaluated::Gpus(Ok(gpus)) => {
                let cost = cost_of_gpus(node, request, gpus.iter().copied(), look_ahead, hints);
                Ok(Score::of_cost(cost.rank()))
            }
        }
    }

    fn look_ahead(&self) -> LookAhead<'a> {
        LookAhead {
            model: self.model,
            host: self.request.host,
        }
    }

    /// The result of [`Fleet::fit`](crate::Fleet::fit) on a node.
    ///
    /// # Errors
    /// The reason for which there is no room.
    #[inline]
    pub fn fit(&mut self, node: NodeId) -> Result<(), Reason> {
        let (nodes, request, hints) = (self.nodes, self.request, self.hints);
        let summary = nodes.summary(node).ok_or(Reason::NoDevice)?;
        let compute = || fit(nodes.get(node).ok_or(Reason::NoDevice)?, request, hints);
        // Everything else takes a few comparisons, less than finding the class.
        let takes_work = request.constraints.is_some() || summary.has_rules || !request.others.is_empty();
        let results = if takes_work {
            self.class_results(node, summary)
        } else {
            None
        };
        match results {
            Some(results) => *results.fit.get_or_insert_with(compute),
            None => compute(),
        }
    }

    /// The `n` best nodes, the best first, of those with a cached result or a hint of the requesting owner.
    ///
    /// Looks at every node, but computes nothing that is not cached.
    pub fn best_nodes(&mut self, n: usize, policies: Policies) -> Vec<(NodeId, Score)> {
        let scores = self.cached_scores(policies);
        let mut best: Vec<(NodeId, Score)> = Vec::with_capacity(n + 1);
        let nodes = self.nodes;
        // The summaries are dense; reading every node itself would cost a cache miss each.
        for (index, summary) in (0..).zip(&nodes.summaries).filter(|(_, summary)| summary.exists) {
            let id = NodeId {
                index,
                generation: summary.generation,
            };
            let result = if self.may_differ_by_owner(id.index) {
                Some(self.evaluate(id, policies))
            } else {
                scores.get(id.index, self.nodes.version_at(id.index))
            };
            let Some(Ok(score)) = result else { continue };
            // Of equal scores the lower index comes first, so that equal fleets give equal answers.
            let at = best.partition_point(|(_, known)| *known >= score);
            if at < n {
                best.insert(at, (id, score));
                best.truncate(n);
            }
        }
        best
    }

    /// The cost that a node's score stands for; `None` if there is no room, or another policy than [`NodePolicy::Fill`]
    /// decides.
    pub fn placement_cost(&self, node: NodeId, policies: Policies) -> Option<PlacementCost> {
        if policies.node != NodePolicy::Fill {
            return None;
        }
        let node = self.nodes.get(node)?;
        let policy = policies.device;
        cost(
            node,
            self.request,
            policy,
            self.weights,
            self.look_ahead(),
            self.hints,
        )
        .ok()
    }

    /// Number of equivalence classes with results.
    pub fn n_evaluated(&self) -> usize {
        self.by_class.len()
    }

    /// The results on the class of a node; `None` if it has none.
    fn class_results(&mut self, node: NodeId, summary: &NodeSummary) -> Option<&mut ClassResults> {
        let hints = self.hints;
        let node = self.nodes.get(node).filter(|_| summary.has_hints);
        let key = match node.filter(|node| node.any_hint_counts(hints)) {
            Some(node) if has_class(node) => ClassKey::WithHints(key_with(node, hints)),
            // Free amounts of GPUs alone take fewer steps to compare than to find a class.
            Some(_) => return None,
            None => ClassKey::Class(summary.class?),
        };
        Some(self.by_class.entry(key).or_default())
    }
}
