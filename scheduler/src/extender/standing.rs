//! Where nodes that fit stand among each other: a strict order, which chance has no part in.

use std::cmp::Reverse;

use placement::{NodeId, Score};
use proto::pod::PodSpec;

use crate::index::Index;

/// Scores that an answer of `prioritize` can give, from 0.
const SCORES: usize = 11;

/// Where a node stands; the least stands first. No two nodes stand at the same place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Standing<'a> {
    /// True if the pod failed there for want of room, or several pods have failed there lately.
    has_failed: bool,
    /// True if it has a taint that the pod had better avoid.
    is_avoided: bool,
    /// The score of the node by policy.
    merit: Reverse<Score>,
    name: &'a str,
}

/// What decides where nodes stand for one pod.
#[derive(Debug)]
pub(super) struct Order<'a> {
    index: &'a Index,
    spec: &'a PodSpec,
    /// The nodes on which the pod failed.
    failed: &'a [Box<str>],
}

/// The nodes that stand first, of many.
#[derive(Debug)]
pub(super) struct Contest<'a> {
    n_most: usize,
    /// In order, each with its place in the request and in the fleet.
    first: Vec<(Standing<'a>, usize, Option<NodeId>)>,
    /// Who stands behind the node at this place in the request, which is so good, has lost, whatever else is to be said of it.
    bar: Option<(Score, usize)>,
}

impl<'a> Order<'a> {
    pub(super) fn new(index: &'a Index, spec: &'a PodSpec, failed: &'a [Box<str>]) -> Self {
        Self { index, spec, failed }
    }

    /// Where a node stands that fits.
    #[inline]
    pub(super) fn standing<'n>(&self, name: &'n str, merit: Score) -> Standing<'n> {
        Standing {
            has_failed: self.index.is_failing(name) || self.failed.iter().any(|failed| **failed == *name),
            is_avoided: self
                .index
                .soft_taints(name)
                .is_some_and(|taints| self.spec.avoids(taints)),
            merit: Reverse(merit),
            name,
        }
    }
}

impl<'a> Contest<'a> {
    /// A contest in which so many can win.
    pub(super) fn of(n_most: usize) -> Self {
        Self {
            n_most,
            first: Vec::with_capacity(n_most.min(SCORES) + 1),
            bar: None,
        }
    }

    /// Whether a node that is so good cannot win any more; `is_behind` says whether its name comes behind that at a place in
    /// the request.
    #[inline]
    pub(super) fn is_lost(&self, merit: Score, is_behind: impl FnOnce(usize) -> bool) -> bool {
        self.bar
            .is_some_and(|(least, last)| merit < least || (merit == least && is_behind(last)))
    }

    #[inline]
    pub(super) fn enter(&mut self, standing: Standing<'a>, at: usize, node: Option<NodeId>) {
        if self.first.len() == self.n_most && self.first.last().is_some_and(|(last, ..)| *last <= standing) {
            return;
        }
        let place = self.first.partition_point(|(before, ..)| *before <= standing);
        self.first.insert(place, (standing, at, node));
        self.first.truncate(self.n_most);
        let last = self
            .first
            .last()
            .filter(|(last, ..)| self.first.len() == self.n_most && !last.has_failed && !last.is_avoided);
        self.bar = last.map(|(last, at, _)| (last.merit.0, *at));
    }

    /// The winner's name and its place in the fleet.
    pub(super) fn winner(&self) -> Option<(&'a str, Option<NodeId>)> {
        self.first
            .first()
            .map(|(standing, _, node)| (standing.name, *node))
    }

    /// Places in the request of those that have won, in order.
    pub(super) fn places(&self) -> impl Iterator<Item = usize> {
        self.first.iter().map(|(_, at, _)| *at)
    }
}

/// A score for each standing, in the order given: as many scores as there are, and the first of all has its own.
///
/// Up to eleven are told apart. Of more, those that are equally good by policy have one score, or chance would speak where the
/// pod has preferences of its own.
pub(super) fn scores(standings: &[Standing<'_>]) -> Vec<i64> {
    let mut order: Vec<usize> = (0..standings.len()).collect();
    order.sort_unstable_by_key(|at| standings.get(*at));
    let n_others = order.len().saturating_sub(1);
    let is_short = order.len() <= SCORES;
    let mut scores = vec![0; standings.len()];
    let mut before: Option<(&Standing<'_>, usize)> = None;
    for (nth, at) in order.iter().enumerate() {
        let Some(standing) = standings.get(*at) else {
            continue;
        };
        // How many stand before all that are as good as this one.
        let ahead = match before {
            Some((same, ahead)) if nth > 1 && same.is_as_good(standing) => ahead,
            _ => nth,
        };
        before = Some((standing, ahead));
        let lost = match nth {
            0 => 0,
            _ if is_short => nth,
            _ => 1 + (ahead - 1) * (SCORES - 1) / n_others,
        };
        if let Some(score) = scores.get_mut(*at) {
            *score = i64::try_from(SCORES - 1 - lost.min(SCORES - 1)).unwrap_or(0);
        }
    }
    scores
}

impl Standing<'_> {
    fn is_as_good(&self, other: &Self) -> bool {
        (self.has_failed, self.is_avoided, self.merit) == (other.has_failed, other.is_avoided, other.merit)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn standings() -> impl Strategy<Value = Vec<(bool, bool, u32, String)>> {
        let one = (any::<bool>(), any::<bool>(), 0..4_u32, "[a-z]{3}");
        prop::collection::btree_map("[a-z]{3}", one, 0..40).prop_map(|nodes| {
            nodes
                .into_iter()
                .map(|(name, (failed, avoided, merit, _))| (failed, avoided, merit, name))
                .collect()
        })
    }

    fn standing((has_failed, is_avoided, merit, name): &(bool, bool, u32, String)) -> Standing<'_> {
        Standing {
            has_failed: *has_failed,
            is_avoided: *is_avoided,
            merit: Reverse(Score::of_points(*merit)),
            name,
        }
    }

    proptest! {
        /// A contest comes to the same as sorting all.
        #[test]
        fn the_first_of_all_win(nodes in standings().prop_shuffle(), n_most in 1..12_usize) {
            let mut contest = Contest::of(n_most);
            for (at, node) in nodes.iter().enumerate() {
                contest.enter(standing(node), at, None);
            }
            let mut order: Vec<usize> = (0..nodes.len()).collect();
            order.sort_by_key(|at| standing(&nodes[*at]));
            let (winners, others) = order.split_at(n_most.min(order.len()));
            let is_lost = |at: &usize| contest.is_lost(Score::of_points(nodes[*at].2), |last| nodes[*at].3 > nodes[last].3);
            prop_assert!(!winners.iter().any(is_lost));
            let is_plain = winners.last().is_some_and(|at| !nodes[*at].0 && !nodes[*at].1);
            prop_assert!(!is_plain || others.iter().filter(|at| !nodes[**at].0 && !nodes[**at].1).all(is_lost), "all plain ones are known to have lost");
            let order = winners;
            prop_assert_eq!(contest.winner().map(|(name, _)| name), order.first().map(|at| nodes[*at].3.as_str()));
            prop_assert_eq!(contest.places().collect::<Vec<_>>(), order);
        }

        /// Scores follow the order, up to eleven strictly; the first is alone, and no score is lost where nodes differ.
        #[test]
        fn scores_follow_the_order(nodes in standings().prop_shuffle()) {
            let standings: Vec<Standing<'_>> = nodes.iter().map(standing).collect();
            let scored = scores(&standings);
            let mut both: Vec<_> = standings.iter().zip(&scored).collect();
            both.sort();
            prop_assert!(both.iter().all(|(_, score)| (0..=10).contains(*score)));
            prop_assert!(both.first().is_none_or(|(_, score)| **score == 10));
            for (nth, pair) in both.windows(2).enumerate() {
                let [(first, better), (second, worse)] = pair else { continue };
                prop_assert!(better >= worse);
                prop_assert!(both.len() > SCORES || better > worse, "up to eleven are told apart");
                prop_assert!(nth > 0 || better > worse, "the first has its own");
                prop_assert!(both.len() <= SCORES || nth == 0 || !first.is_as_good(second) || better == worse);
            }
        }
    }

    #[test]
    fn many_that_differ_use_all_scores() {
        let names: Vec<String> = (0..101).map(|at| format!("{at:03}")).collect();
        let standings: Vec<Standing<'_>> = (0..101)
            .zip(&names)
            .map(|(merit, name)| Standing {
                has_failed: false,
                is_avoided: false,
                merit: Reverse(Score::of_points(merit)),
                name,
            })
            .collect();
        let scored = scores(&standings);
        let counts: Vec<usize> = (0..=10)
            .map(|score| scored.iter().filter(|other| **other == score).count())
            .collect();
        assert_eq!(counts, [10, 10, 10, 10, 10, 10, 10, 10, 10, 10, 1]);
    }
}
