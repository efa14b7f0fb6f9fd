//! The next workload model. Before it takes effect, its results for the kinds of requests that came lately are computed, a few at
//! a time, so that no request waits until all nodes are simulated.

use std::sync::Arc;

use crate::batch::cache::ScoreCache;
use crate::batch::evaluation::BatchEvaluation;
use crate::choice::cost::{ChoiceContext, WorkloadModel};
use crate::data::holding::Hints;
use crate::data::inventory::GpuModel;
use crate::fleet::Fleet;

/// Most results that are computed at a time, about 3 µs each.
const RESULTS_AT_ONCE: usize = 16;

/// Most nodes that are looked at at a time, a few nanoseconds each if their results are known.
const NODES_AT_ONCE: usize = 4096;

/// Most rounds over all kinds and nodes. Nodes change meanwhile, and each round computes their results again.
const MAX_ROUNDS: u32 = 4;

/// A workload model that is not in effect yet, with its results so far.
#[derive(Debug, Default)]
pub struct NextModel {
    pub(crate) model: WorkloadModel,
    pub(crate) cache: ScoreCache,
    /// The models of GPU on which the expected pods are not simulated yet.
    gpus: Vec<GpuModel>,
    /// The place of the next kind and the index of the next node to look at.
    kind: usize,
    index: u32,
    /// The number of the present round, and of the results that it has computed.
    n_rounds: u32,
    n_computed: usize,
}

impl NextModel {
    /// The next model, with the models of GPU to simulate and a cache without results.
    pub(crate) fn new(model: WorkloadModel, gpus: Vec<GpuModel>, cache: ScoreCache) -> Self {
        Self {
            model,
            cache,
            gpus,
            ..Self::default()
        }
    }

    /// Simulates the expected pods on every model of GPU, for up to milliseconds. The fleet is not needed meanwhile.
    pub fn simulate(&mut self) {
        for gpu in std::mem::take(&mut self.gpus) {
            self.model.add_gpu_model(gpu);
        }
    }

    /// Computes a few more results, for tenths of a millisecond; returns false once nearly all are there.
    pub fn prepare(&mut self, fleet: &Fleet) -> bool {
        // A result by a model without the GPUs of a node would be wrong: such a node may have come a moment ago.
        self.model.add_gpu_models_of(&fleet.model);
        let (mut results_left, mut nodes_left) = (RESULTS_AT_ONCE, NODES_AT_ONCE);
        while let Some((key, scores)) = self.cache.kind(self.kind, &fleet.nodes) {
            let context = ChoiceContext {
                model: &self.model,
                ..fleet.context(key.request(), key.policies.device, Hints::Respect)
            };
            let mut batch =
                BatchEvaluation::new(&fleet.nodes, context, key.policies.node, Arc::clone(&scores));
            for summary in fleet.nodes.summaries.iter().skip(self.index as usize) {
                if results_left == 0 || nodes_left == 0 {
                    return true;
                }
                nodes_left -= 1;
                if summary.exists && scores.get(self.index).is_none() {
                    results_left -= 1;
                    self.n_computed += 1;
                    // The evaluation puts the result, a refusal too, into `self.cache`.
                    let _ = batch.evaluate(summary.node_at(self.index));
                }
                self.index += 1;
            }
            (self.kind, self.index) = (self.kind + 1, 0);
        }
        self.n_rounds += 1;
        self.kind = 0;
        std::mem::take(&mut self.n_computed) > RESULTS_AT_ONCE && self.n_rounds < MAX_ROUNDS
    }
}
