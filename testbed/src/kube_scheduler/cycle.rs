//! One scheduling cycle: filters, extenders one after the other, scores, and the node that wins.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{Node, Pod};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use tracing::warn;

use super::amounts::Amounts;
use super::cache::NodeView;
use super::diagnosis::{Diagnosis, Refusal};
use super::extender::{Extender, ExtenderError};
use super::fit;
use super::preemption::nominated_node;
use super::sampling::Sampling;
use super::waits::Claims;

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
    pub(super) sampling: Sampling,
    /// Volumes that are bound.
    pub(super) claims: Claims,
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
        // The node that is kept for the pod is looked at first, and taken if it fits.
        let nominated = nominated_node(pod).and_then(|name| nodes.get_key_value(name));
        if let Some((name, view)) = nominated
            && let Ok(fitting) = self.fitting(pod, request, [(name, view)], 1, diagnosis).await
            && !fitting.0.is_empty()
        {
            return Ok(name.clone());
        }
        let all: Vec<_> = nodes.iter().collect();
        let n_to_find = self.sampling.n_to_find(all.len());
        let order: Vec<_> = self
            .sampling
            .order(all.len())
            .filter_map(|at| all.get(at).copied())
            .collect();
        let found = self.fitting(pod, request, order, n_to_find, diagnosis).await;
        let (feasible, n_seen) = found.map_err(|error| Failure::Error(error.to_string()))?;
        self.sampling.seen(n_seen, all.len());
        match feasible.len() {
            0 => Err(Failure::NoFit),
            1 => Ok(feasible.keys().map(|name| (*name).to_owned()).collect()),
            _ => Ok(self.choose(&self.scores(pod, request, &feasible).await)),
        }
    }

    /// The first nodes that fit, as many as are to be found, less those that extenders refuse, and the number of nodes that
    /// were looked at; `diagnosis` gets the reasons against the others, in place of its earlier ones.
    async fn fitting<'n>(
        &self,
        pod: &Pod,
        request: &Amounts,
        nodes: impl IntoIterator<Item = (&'n String, &'n NodeView)>,
        n_to_find: usize,
        diagnosis: &mut Diagnosis,
    ) -> Result<(BTreeMap<&'n str, &'n NodeView>, usize), ExtenderError> {
        let mut feasible: BTreeMap<&str, &NodeView> = BTreeMap::new();
        let mut n_seen = 0;
        for (name, view) in nodes {
            if feasible.len() >= n_to_find {
                break;
            }
            n_seen += 1;
            diagnosis.refusals.remove(name);
            self.look(pod, request, name, view, &mut feasible, diagnosis);
        }
        self.ask_extenders(pod, &mut feasible, diagnosis).await?;
        Ok((feasible, n_seen))
    }

    /// Looks at one node with the filters of kube-scheduler itself.
    fn look<'n>(
        &self,
        pod: &Pod,
        request: &Amounts,
        name: &'n str,
        view: &'n NodeView,
        feasible: &mut BTreeMap<&'n str, &'n NodeView>,
        diagnosis: &mut Diagnosis,
    ) {
        if let Some(refusal) = fit::refusal(pod, request, view, &self.ignored) {
            diagnosis.refusals.insert(name.to_owned(), refusal);
        } else if self.claims.refuse(pod, name) {
            let reasons = vec!["node(s) had volume node affinity conflict".to_owned()];
            diagnosis.refusals.insert(
                name.to_owned(),
                Refusal {
                    reasons,
                    unresolvable: true,
                    by_extender: false,
                },
            );
        } else {
            feasible.insert(name, view);
        }
    }

    async fn ask_extenders(
        &self,
        pod: &Pod,
        feasible: &mut BTreeMap<&str, &NodeView>,
        diagnosis: &mut Diagnosis,
    ) -> Result<(), ExtenderError> {
        for extender in self
            .extenders
            .iter()
            .filter(|e| e.is_filter() && e.is_interested(pod))
        {
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
            for (node, reason) in answer
                .failed
                .iter()
                .filter(|(node, _)| !answer.unresolvable.contains_key(*node))
            {
                diagnosis.refuse(node, reason, false);
            }
            feasible.retain(|name, _| answer.passed.contains(*name));
        }
        Ok(())
    }

    /// Scores of feasible nodes; an extender that fails to answer has no say.
    async fn scores(
        &self,
        pod: &Pod,
        request: &Amounts,
        feasible: &BTreeMap<&str, &NodeView>,
    ) -> BTreeMap<String, i64> {
        let own = feasible
            .iter()
            .map(|(name, view)| ((*name).to_owned(), request.score(&view.allocatable, &view.used)));
        let mut scores: BTreeMap<String, i64> = own.collect();
        for extender in self
            .extenders
            .iter()
            .filter(|e| e.is_prioritizer() && e.is_interested(pod))
        {
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
        let tied: Vec<&String> = scores
            .iter()
            .filter(|(_, score)| Some(*score) == best)
            .map(|(name, _)| name)
            .collect();
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
