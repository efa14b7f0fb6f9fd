//! Prewarming of the score cache: a new workload model is evaluated for the current kinds of requests before it takes effect.
//!
//! Requests meanwhile get answers under the old model, at the old speed.

use std::sync::Arc;

use crate::batch::cache::{RequestKey, ScoreCache};
use crate::batch::evaluation::BatchEvaluation;
use crate::choice::cost::WorkloadModel;
use crate::choice::node_choice::ChoiceContext;
use crate::data::ident::NodeId;
use crate::state::nodes::Nodes;

/// Nodes that are evaluated in one step.
// Few, so that a caller that locks the fleet for one step lets requests wait for a fraction of a millisecond.
const N_NODES_PER_STEP: usize = 64;

/// The progress of a prewarm.
#[derive(Debug)]
pub struct Prewarm {
    /// The kinds of requests that are left; the current one is last.
    requests: Vec<Arc<RequestKey>>,
    /// Index of the next node.
    from: usize,
    /// Number of the workload model that takes effect next.
    model: u32,
}

impl Prewarm {
    /// A prewarm of these kinds of requests, from the first node on.
    pub(crate) fn new(requests: Vec<Arc<RequestKey>>, model: &WorkloadModel) -> Self {
        Self {
            requests,
            from: 0,
            model: model.number(),
        }
    }

    /// Evaluates some nodes for one request; returns false when all is done, or another model has taken its place.
    pub(crate) fn step(&mut self, nodes: &Nodes, context: ChoiceContext<'_>, cache: &ScoreCache) -> bool {
        // The last kind is the one that was asked for last, so it is the likeliest to come next.
        let Some(key) = self
            .requests
            .last()
            .filter(|_| context.model.number() == self.model)
        else {
            return false;
        };
        let mut evaluation = BatchEvaluation::new(nodes, context, cache, key.request());
        let slots = nodes.slots.iter().zip(0..).skip(self.from).take(N_NODES_PER_STEP);
        for (slot, index) in slots.filter(|(slot, _)| slot.node.is_some()) {
            let generation = slot.generation;
            // The cache keeps the result, a refusal too.
            evaluation
                .evaluate(NodeId { index, generation }, key.policies)
                .ok();
        }
        // Nodes that come or change meanwhile are evaluated by the first request that asks about them.
        self.from += N_NODES_PER_STEP;
        if self.from >= nodes.slots.len() {
            self.from = 0;
            self.requests.pop();
        }
        !self.requests.is_empty()
    }
}

#[cfg(test)]
mod tests;
