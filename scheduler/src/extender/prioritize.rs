//! `prioritize`: a score from 0 to 10 for each node of the request, relative to the others.

use proto::extender::HostPriority;

use super::evaluation::{Demand, FilterRequest, RankKey, Ranker, evaluate_all};
use super::{Extender, RequestError, json, now};
use crate::accounting::PodFacts;

/// The number of different scores that an extender can give, from 0.
const N_SCORES: usize = 11;

/// Answers a prioritize request.
pub fn answer(extender: &Extender, body: &[u8]) -> Result<Vec<u8>, RequestError> {
    let request = FilterRequest::parse("prioritize", body, &extender.name_lists)?;
    // Without the Node objects no node is evaluated as an autoscaler's template: one that does not exist gets no score.
    let request = FilterRequest {
        whole_nodes: None,
        ..request
    };
    let FilterRequest { pod, names, .. } = &request;
    let index = extender.index.read();
    index.ready().map_err(RequestError::NotReady)?;
    let facts = PodFacts::of(pod, index.names());
    // Evaluated again and not taken from the filter: kube-scheduler may ask about other nodes, and the cache has the results.
    let demand = Demand::of(&index, pod, facts.as_ref());
    let failed = extender.memory().avoided_nodes.avoided(pod.uid(), now());
    let ranker = Ranker {
        index: &index,
        spec: &pod.spec,
        failed: &failed,
    };
    // A node has the score 0 if the pod does not fit there, and so have all if nodes do not differ for the pod.
    let mut answer: Vec<_> = names.iter().map(|host| HostPriority { host, score: 0 }).collect();
    if demand.resources().is_some() {
        let fitting = evaluate_all(&index, &demand, &request, None).reported;
        let ranks = fitting.iter().map(|node| ranker.rank(node.name, node.score));
        let ranks: Vec<_> = ranks.collect();
        // Scores are relative, so all ranks have to be known first.
        for (node, scaled) in fitting.iter().zip(scale(&ranks)) {
            if let Some(priority) = answer.get_mut(node.idx) {
                priority.score = scaled;
            }
        }
    }
    Ok(json(&answer))
}

/// A score for each rank, in the order given. All scores from 10 down are used, and the best node has a score of its own.
///
/// Up to eleven nodes get different scores. With more, nodes that are equally good by policy share one, so that the pod's
/// own preferences decide among them and not their names.
fn scale(ranks: &[RankKey<'_>]) -> Vec<i64> {
    let mut order: Vec<(usize, &RankKey<'_>)> = ranks.iter().enumerate().collect();
    order.sort_unstable_by_key(|(_, rank)| *rank);
    let n_others = order.len().saturating_sub(1);
    let mut scores = vec![0; ranks.len()];
    let mut previous: Option<(&RankKey<'_>, usize)> = None;
    for (nth, (idx, rank)) in order.iter().enumerate() {
        // The number of nodes before all that are as good as this one.
        let n_better = match previous {
            Some((same, n_better)) if nth > 1 && same.is_as_good(rank) => n_better,
            _ => nth,
        };
        previous = Some((rank, n_better));
        let deduction = match nth {
            0 => 0,
            _ if order.len() <= N_SCORES => nth,
            // More nodes are spread over the ten scores below the best.
            _ => 1 + (n_better - 1) * (N_SCORES - 1) / n_others,
        };
        if let Some(score) = scores.get_mut(*idx) {
            *score = i64::try_from((N_SCORES - 1).saturating_sub(deduction)).unwrap_or(0);
        }
    }
    scores
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::extender::evaluation::tests::rank;

    proptest! {
        /// Scores follow the order of ranks, strictly up to eleven nodes; the best node alone has its score, and nodes that
        /// differ only by name share one beyond eleven.
        #[test]
        fn scores_follow_the_ranks(nodes in prop::collection::vec((any::<bool>(), any::<bool>(), 0..4_u32, "[a-z]{12}"), 0..40)) {
            let ranks: Vec<RankKey<'_>> = nodes.iter().map(rank).collect();
            let scores = scale(&ranks);
            let mut both: Vec<_> = ranks.iter().zip(&scores).collect();
            both.sort();
            prop_assert!(both.iter().all(|(_, score)| (0..=10).contains(*score)));
            prop_assert!(both.first().is_none_or(|(_, score)| **score == 10));
            for (nth, pair) in both.windows(2).enumerate() {
                let [(first, better), (second, worse)] = pair else { continue };
                prop_assert!(better >= worse);
                prop_assert!(both.len() > N_SCORES || better > worse, "up to eleven differ");
                prop_assert!(nth > 0 || better > worse, "the best has its own");
                prop_assert!(both.len() <= N_SCORES || nth == 0 || !first.is_as_good(second) || better == worse);
            }
        }
    }

    #[test]
    fn many_different_nodes_use_the_whole_range_of_scores() {
        let nodes: Vec<_> = (0..101_u32)
            .map(|nth| (false, false, nth, format!("{nth:03}")))
            .collect();
        let ranks: Vec<RankKey<'_>> = nodes.iter().map(rank).collect();
        let scores = scale(&ranks);
        let counts = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
            .map(|score| scores.iter().filter(|other| **other == score).count());
        assert_eq!(counts, [10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 1]);
    }
}
