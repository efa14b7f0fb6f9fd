//! The next workload model: the results of the kinds of requests that are asked now are computed by it a few at a time, before it
//! takes effect, so that no request waits until all nodes are simulated.

use std::sync::Arc;

use crate::batch::cache::ScoreCache;
use crate::batch::evaluation::BatchEvaluation;
use crate::choice::cost::WorkloadModel;
use crate::data::holding::Hints;
use crate::fleet::Fleet;

/// Most results that are computed at a time, about 3 µs each.
const RESULTS_AT_ONCE: usize = 16;

/// Most nodes that are looked at at a time, a few nanoseconds each if their results are known.
const NODES_AT_ONCE: usize = 4096;

/// Most times that all kinds and nodes are gone through. Nodes change meanwhile: each time leaves those that have changed since.
const MAX_ROUNDS: u32 = 4;

/// A workload model that is not in effect yet, with its results so far.
#[derive(Debug)]
pub struct NextModel {
    pub(crate) model: WorkloadModel,
    pub(crate) cache: ScoreCache,
    /// The place of the next kind and the index of the next node to look at.
    kind: usize,
    index: u32,
    /// The number of the present round, and of the results that it has computed.
    n_rounds: u32,
    n_computed: usize,
}

impl NextModel {
    pub(crate) fn new(model: WorkloadModel, cache: ScoreCache) -> Self {
        Self {
            model,
            cache,
            kind: 0,
            index: 0,
            n_rounds: 0,
            n_computed: 0,
        }
    }

    /// Computes a few more results, for tenths of a millisecond; returns false once nearly all are there.
    pub fn prepare(&mut self, fleet: &Fleet) -> bool {
        let (mut n_results, mut n_nodes) = (RESULTS_AT_ONCE, NODES_AT_ONCE);
        let n_slots = fleet.nodes.slots.len();
        while let Some((key, scores)) = self.cache.kind(self.kind, n_slots) {
            let context = fleet.context_by(&self.model, Hints::Respect);
            let batch = BatchEvaluation::new(&fleet.nodes, context, &self.cache, key.request());
            let mut batch = batch.with_scores(key.policies, Arc::clone(&scores));
            for version in fleet.nodes.versions.iter().skip(self.index as usize) {
                if n_results == 0 || n_nodes == 0 {
                    return true;
                }
                n_nodes -= 1;
                if scores.get(self.index, version.number).is_none() {
                    n_results -= 1;
                    self.n_computed += 1;
                    // The result is kept, a refusal too.
                    let _ = batch.evaluate(version.node_at(self.index), key.policies);
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
