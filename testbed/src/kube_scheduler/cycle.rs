//! One scheduling cycle: filters, extenders one after the other, scores, and the node that wins.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{Node, Pod};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use tracing::warn;

use super::amounts::Amounts;
use super::cache::NodeView;
use super::diagnosis::Diagnosis;
use super::extender::{Extender, ExtenderError};
use super::fit;

/// Why a cycle found no node.
#[derive(Debug)]
pub(super) enum Failure {
    /// No node fits.
    NoFit,
    /// Something went wrong.
    Error(String),
}

/// Finds nodes for pods.
#[derive(Debug)]
pub(super) struct Cycle {
    pub(super) extenders: Vec<Extender>,
    /// Resources that the aggregate fit leaves out.
    pub(super) ignored: BTreeSet<String>,
    /// Chooses among equal scores; the first name wins without it.
    pub(super) ties: Option<StdRng>,
}

impl Cycle {
    /// The node for a pod; `diagnosis` says why not the others.
    pub(super) async fn place(
        &mut self,
        pod: &Pod,
        request: &Amounts,
        nodes: &BTreeMap<String, NodeView>,
        diagnosis: &mut Diagnosis,
    ) -> Result<String, Failure> {
        diagnosis.n_nodes = nodes.len();
        let mut feasible: BTreeMap<&str, &NodeView> = BTreeMap::new();
        for (name, view) in nodes {
            match fit::refusal(pod, request, view, &self.ignored) {
                Some(refusal) => {
                    diagnosis.refusals.insert(name.clone(), refusal);
                }
                None => {
                    feasible.insert(name, view);
                }
            }
        }
        self.ask_extenders(pod, &mut feasible, diagnosis).await.map_err(|error| Failure::Error(error.to_string()))?;
        match feasible.len() {
            0 => Err(Failure::NoFit),
            1 => Ok(feasible.keys().map(|name| (*name).to_owned()).collect()),
            _ => Ok(self.choose(&self.scores(pod, request, &feasible).await)),
        }
    }

    async fn ask_extenders(
        &self,
        pod: &Pod,
        feasible: &mut BTreeMap<&str, &NodeView>,
        diagnosis: &mut Diagnosis,
    ) -> Result<(), ExtenderError> {
        for extender in self.extenders.iter().filter(|e| e.is_filter() && e.is_interested(pod)) {
            if feasible.is_empty() {
                break;
            }
            let answer = match extender.filter(pod, &whole(feasible)).await {
                Err(error) if extender.is_ignorable() => {
                    warn!(%error, "skipping an ignorable extender");
                    continue;
                }
                answer => answer?,
            };
            for (node, reason) in &answer.unresolvable {
                diagnosis.refuse(node, reason, true);
            }
            for (node, reason) in answer.failed.iter().filter(|(node, _)| !answer.unresolvable.contains_key(*node)) {
                diagnosis.refuse(node, reason, false);
            }
            feasible.retain(|name, _| answer.passed.contains(*name));
        }
        Ok(())
    }

    /// Scores of feasible nodes; an extender that fails to answer has no say.
    async fn scores(&self, pod: &Pod, request: &Amounts, feasible: &BTreeMap<&str, &NodeView>) -> BTreeMap<String, i64> {
        let own = feasible.iter().map(|(name, view)| ((*name).to_owned(), request.score(&view.allocatable, &view.used)));
        let mut scores: BTreeMap<String, i64> = own.collect();
        for extender in self.extenders.iter().filter(|e| e.is_prioritizer() && e.is_interested(pod)) {
            match extender.prioritize(pod, &whole(feasible)).await {
                Ok(theirs) => {
                    for (name, score) in &mut scores {
                        *score = score.saturating_add(theirs.get(name).copied().unwrap_or(0));
                    }
                }
                Err(error) => warn!(%error, "an extender does not prioritize"),
            }
        }
        scores
    }

    fn choose(&mut self, scores: &BTreeMap<String, i64>) -> String {
        let best = scores.values().max();
        let tied: Vec<&String> = scores.iter().filter(|(_, score)| Some(*score) == best).map(|(name, _)| name).collect();
        let winner = match &mut self.ties {
            Some(rng) => tied.choose(rng),
            None => tied.first(),
        };
        winner.map(|name| (*name).clone()).unwrap_or_default()
    }
}

fn whole<'a>(views: &BTreeMap<&'a str, &'a NodeView>) -> BTreeMap<&'a str, &'a Node> {
    views.iter().map(|(name, view)| (*name, &*view.node)).collect()
}
