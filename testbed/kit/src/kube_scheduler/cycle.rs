//! One scheduling cycle: the search for nodes that fit, by filters and then by each extender, their scores, and
//! the choice of one.
//!
//! A search starts behind the node at which the last search ended, and stops once it has found enough nodes that fit.

use std::collections::{BTreeMap, HashMap};

use k8s_openapi::api::core::v1::Pod;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use tracing::warn;

use super::amounts::ResourceAmounts;
use super::binding::VolumeClaims;
use super::cache::CachedNode;
use super::diagnosis::SchedulingDiagnosis;
use super::extender::ExtenderClient;
use super::fit;
use super::node_affinity::{AffineNodes, affine_nodes};
use super::report::nominated_node;

/// The reason for the refusal of all nodes if no node can match the pod's required node affinity.
const CONFLICT: &str = "pod affinity terms conflict";
/// The reason for the refusal of nodes that the pod's required node affinity does not name.
const NOT_NAMED: &str = "node(s) didn't satisfy plugin(s) [NodeAffinity]";

#[derive(Debug)]
pub(super) enum CycleFailure {
    NoFit,
    /// An extender failed, or the request does not parse.
    Error(String),
}

/// Nodes that fit, in the order in which they were found.
pub(super) type FeasibleNodes<'n> = Vec<(&'n str, &'n CachedNode)>;

/// The choice among nodes of equal score.
#[derive(Debug)]
pub enum Ties {
    /// A random one, as kube-scheduler chooses.
    Random(Box<StdRng>),
    /// The first by these ranks of nodes; nodes without a rank come first, by name.
    Ranked(HashMap<String, usize>),
}

impl Ties {
    /// The random choice that a seed decides.
    pub fn random(seed: u64) -> Self {
        Self::Random(Box::new(StdRng::seed_from_u64(seed)))
    }

    /// Shuffles items whose order is random in kube-scheduler; without a random choice they stay as they are.
    pub(super) fn shuffle<T>(&mut self, items: &mut [T]) {
        if let Self::Random(dice) = self {
            items.shuffle(dice);
        }
    }
}

impl Default for Ties {
    fn default() -> Self {
        Self::Ranked(HashMap::new())
    }
}

#[derive(Debug)]
pub(super) struct Cycle {
    pub(super) extenders: Vec<ExtenderClient>,
    pub(super) ties: Ties,
    pub(super) sampling: Sampling,
    pub(super) claims: VolumeClaims,
}

impl Cycle {
    /// Finds the node for a pod; records in `diagnosis` why other nodes were refused.
    pub(super) async fn place(
        &mut self,
        pod: &Pod,
        request: &ResourceAmounts,
        nodes: &BTreeMap<String, CachedNode>,
        diagnosis: &mut SchedulingDiagnosis,
    ) -> Result<String, CycleFailure> {
        let found = self.find(pod, request, nodes, diagnosis).await;
        let (feasible, _) = found.map_err(CycleFailure::Error)?;
        self.choose(pod, request, &feasible)
            .await
            .ok_or(CycleFailure::NoFit)
    }

    /// Chooses one of the nodes that fit; `None` if there are none.
    pub(super) async fn choose(
        &mut self,
        pod: &Pod,
        request: &ResourceAmounts,
        feasible: &FeasibleNodes<'_>,
    ) -> Option<String> {
        // As in kube-scheduler, a single feasible node is taken without calling any scorer.
        if let [(name, _)] = feasible.as_slice() {
            return Some((*name).to_owned());
        }
        let scores = self.scores(pod, request, feasible).await;
        self.select_host(&scores)
    }

    /// Finds nodes that fit a pod (`findNodesThatFitPod`), and returns them with the number of nodes that were filtered.
    pub(super) async fn find<'n>(
        &mut self,
        pod: &Pod,
        request: &ResourceAmounts,
        nodes: &'n BTreeMap<String, CachedNode>,
        diagnosis: &mut SchedulingDiagnosis,
    ) -> Result<(FeasibleNodes<'n>, usize), String> {
        diagnosis.n_nodes = nodes.len();
        let affine = affine_nodes(pod);
        if affine == AffineNodes::Conflict {
            diagnosis.prefilter = Some(CONFLICT.to_owned());
            for name in nodes.keys() {
                diagnosis.exclude(name, CONFLICT);
            }
            return Ok((Vec::new(), nodes.len()));
        }
        // evaluateNominatedNode: the nominated node is filtered first, and taken if it fits.
        let nominated = nominated_node(pod).and_then(|name| nodes.get_key_value(name));
        if let Some((name, view)) = nominated
            && let Ok((feasible, n_seen)) = self
                .filter_nodes(pod, request, [(name, view)], 1, diagnosis)
                .await
            && !feasible.is_empty()
        {
            return Ok((feasible, n_seen));
        }
        if let Some((name, _)) = nominated {
            // The node is filtered again below, and its refusal may be out of date by then.
            diagnosis.refusals.remove(name);
        }
        let mut all: Vec<_> = nodes.iter().collect();
        if let AffineNodes::Named(names) = &affine {
            for (name, _) in all.extract_if(.., |(name, _)| !names.contains(*name)) {
                diagnosis.exclude(name, NOT_NAMED);
            }
        }
        // findNodesThatPassFilters starts behind the last node that the previous cycle looked at
        // (nextStartNodeIndex), so that all nodes get pods although each cycle looks at some only.
        let n_to_find = self.sampling.n_to_find(all.len());
        let order = self.sampling.search_order(all.len());
        let order: Vec<_> = order.filter_map(|at| all.get(at).copied()).collect();
        let found = self.filter_nodes(pod, request, order, n_to_find, diagnosis).await;
        let (feasible, n_seen) = found?;
        self.sampling.advance(n_seen, all.len());
        Ok((feasible, n_seen))
    }

    /// Filters nodes until `n_to_find` of them fit, then asks the extenders; returns as [`Self::find`].
    pub(super) async fn filter_nodes<'n>(
        &self,
        pod: &Pod,
        request: &ResourceAmounts,
        nodes: impl IntoIterator<Item = (&'n String, &'n CachedNode)>,
        n_to_find: usize,
        diagnosis: &mut SchedulingDiagnosis,
    ) -> Result<(FeasibleNodes<'n>, usize), String> {
        let mut feasible = FeasibleNodes::new();
        let mut n_seen = 0;
        // One node after the other, as kube-scheduler does on one processor.
        for (name, view) in nodes {
            if feasible.len() >= n_to_find {
                break;
            }
            n_seen += 1;
            if let Some(refusal) = fit::refusal(pod, request, view) {
                diagnosis.refusals.insert(name.clone(), refusal);
            } else if self.claims.is_bound_elsewhere(pod, name) {
                // No victim can move a volume to another node.
                diagnosis.exclude(name, "node(s) had volume node affinity conflict");
            } else {
                feasible.push((name, view));
            }
        }
        self.ask_extenders(pod, &mut feasible, diagnosis).await?;
        Ok((feasible, n_seen))
    }

    /// Asks each interested extender to filter the feasible nodes, and removes the nodes that it refuses.
    async fn ask_extenders(
        &self,
        pod: &Pod,
        feasible: &mut FeasibleNodes<'_>,
        diagnosis: &mut SchedulingDiagnosis,
    ) -> Result<(), String> {
        for extender in &self.extenders {
            if extender.configuration.filter_verb.is_empty() || !extender.is_interested(pod) {
                continue;
            }
            // An extender is not called with an empty list of nodes.
            if feasible.is_empty() {
                break;
            }
            let answer = extender.filter(pod, &names_of(feasible)).await?;
            let unresolvable = answer.failed_and_unresolvable_nodes.unwrap_or_default();
            for (node, reason) in &unresolvable {
                diagnosis.refuse(node, reason, true);
            }
            // kube-scheduler counts a node in both lists as unresolvable.
            for (node, reason) in &answer.failed_nodes.unwrap_or_default() {
                if !unresolvable.contains_key(node) {
                    diagnosis.refuse(node, reason, false);
                }
            }
            // The next extender gets only the nodes that this one let through, in the order of its answer.
            let known: HashMap<&str, &CachedNode> = feasible.drain(..).collect();
            for passed in answer.node_names.iter().flatten() {
                if let Some((name, view)) = known.get_key_value(passed.as_str()) {
                    feasible.push((name, view));
                }
            }
        }
        Ok(())
    }

    /// The scores of feasible nodes; an extender that fails to answer adds nothing.
    async fn scores<'n>(
        &self,
        pod: &Pod,
        request: &ResourceAmounts,
        feasible: &FeasibleNodes<'n>,
    ) -> Vec<(&'n str, i64)> {
        let mut scores = Vec::with_capacity(feasible.len());
        for (name, view) in feasible {
            scores.push((*name, request.score(&view.allocatable, &view.used)));
        }
        for extender in &self.extenders {
            let is_asked = !extender.configuration.prioritize_verb.is_empty() && extender.is_interested(pod);
            if !is_asked || feasible.is_empty() {
                continue;
            }
            match extender.prioritize(pod, &names_of(feasible)).await {
                Ok(theirs) => {
                    for (name, score) in &mut scores {
                        *score = score.saturating_add(theirs.get(*name).copied().unwrap_or(0));
                    }
                }
                // A failed prioritize call never fails the cycle.
                Err(error) => warn!(%error, "an extender does not prioritize"),
            }
        }
        scores
    }

    /// Chooses one of the nodes with the best score (`selectHost`).
    pub(super) fn select_host(&mut self, scores: &[(&str, i64)]) -> Option<String> {
        let best = scores.iter().map(|(_, score)| *score).max()?;
        let tied = scores.iter().filter(|(_, score)| *score == best);
        let tied: Vec<&str> = tied.map(|(name, _)| *name).collect();
        let winner = match &mut self.ties {
            Ties::Random(dice) => tied.choose(dice).copied(),
            Ties::Ranked(ranks) => tied.into_iter().min_by_key(|name| (ranks.get(*name), *name)),
        };
        winner.map(str::to_owned)
    }
}

fn names_of<'a>(views: &FeasibleNodes<'a>) -> Vec<&'a str> {
    views.iter().map(|(name, _)| *name).collect()
}

/// A search never stops after fewer nodes that fit (`minFeasibleNodesToFind`).
const MIN_FEASIBLE_NODES: usize = 100;
/// The least percentage of nodes that the stock setting filters (`minFeasibleNodesPercentageToFind`).
const MIN_FEASIBLE_PERCENT: usize = 5;

/// The sampling of nodes: the start of the next search, and the number of nodes that ends it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sampling {
    /// `percentageOfNodesToScore`; 0 for the stock setting.
    percent: usize,
    /// Index of the node at which the next search starts.
    start: usize,
}

impl Sampling {
    /// The sampling of a kube-scheduler that has just started.
    pub(super) fn of(percent: usize) -> Self {
        Self { percent, start: 0 }
    }

    /// The number of nodes that fit after which a search among `n_nodes` ends.
    pub(super) fn n_to_find(self, n_nodes: usize) -> usize {
        if n_nodes < MIN_FEASIBLE_NODES {
            return n_nodes;
        }
        // numFeasibleNodesToFind.
        let percent = match self.percent {
            0 => 50_usize.saturating_sub(n_nodes / 125).max(MIN_FEASIBLE_PERCENT),
            percent => percent,
        };
        (n_nodes * percent / 100).max(MIN_FEASIBLE_NODES)
    }

    /// The indices of all nodes, in the order of the next search.
    pub(super) fn search_order(self, n_nodes: usize) -> impl Iterator<Item = usize> {
        let start = self.start.min(n_nodes);
        (start..n_nodes).chain(0..start)
    }

    /// Moves the start of the next search behind the `n_seen` nodes of this one.
    pub(super) fn advance(&mut self, n_seen: usize, n_nodes: usize) {
        self.start = (self.start + n_seen) % n_nodes.max(1);
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::few(0, 99, 99)]
    #[case::stock(0, 500, 230)]
    #[case::many(0, 15_000, 750)]
    #[case::no_fewer_than(10, 500, 100)]
    #[case::all(100, 500, 500)]
    fn as_many_nodes_are_sampled_as_by_kube_scheduler(
        #[case] percent: usize,
        #[case] n_nodes: usize,
        #[case] expected: usize,
    ) {
        assert_eq!(Sampling::of(percent).n_to_find(n_nodes), expected);
    }

    #[test]
    fn a_search_begins_where_the_last_one_ended() {
        let mut sampling = Sampling::default();
        sampling.advance(3, 5);
        assert_eq!(sampling.search_order(5).collect::<Vec<_>>(), [3, 4, 0, 1, 2]);
        sampling.advance(3, 5);
        assert_eq!(sampling.search_order(5).next(), Some(1));
        assert_eq!(sampling.search_order(0).count(), 0, "the nodes have gone");
    }
}
