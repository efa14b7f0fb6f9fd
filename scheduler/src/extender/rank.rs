//! The order of nodes that fit: strict, so that equal requests get equal answers.

use std::cmp::Reverse;

use placement::Score;
use proto::pod::PodSpec;

use crate::index::Index;

/// The rank of a node; the least is the best. No two nodes have the same rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct RankKey<'a> {
    /// True if the pod failed there for want of room, or kubelet has refused several pods there lately.
    pub(super) has_failed: bool,
    /// True if the node has a `PreferNoSchedule` taint that the pod does not tolerate.
    pub(super) is_avoided: bool,
    /// The score of the node by policy.
    pub(super) score: Reverse<Score>,
    pub(super) name: &'a str,
}

/// Ranks nodes for one pod.
#[derive(Debug)]
pub(super) struct Ranker<'a> {
    index: &'a Index,
    spec: &'a PodSpec,
    /// The nodes on which the pod failed.
    failed: &'a [Box<str>],
}

/// The `n` best of many nodes, each with an item of the caller.
#[derive(Debug)]
pub(super) struct TopN<'a, T> {
    n: usize,
    /// Best first.
    best: Vec<(RankKey<'a>, T)>,
}

impl RankKey<'_> {
    /// Returns true if only the names decide between two nodes.
    pub(super) fn is_as_good(&self, other: &Self) -> bool {
        (self.has_failed, self.is_avoided, self.score) == (other.has_failed, other.is_avoided, other.score)
    }
}

impl<'a> Ranker<'a> {
    pub(super) const fn new(index: &'a Index, spec: &'a PodSpec, failed: &'a [Box<str>]) -> Self {
        Self { index, spec, failed }
    }

    #[inline]
    pub(super) fn rank<'n>(&self, name: &'n str, score: Score) -> RankKey<'n> {
        // Few clusters have failing nodes or soft taints; without any, both look-ups end at once.
        let taints = self.index.soft_taints(name);
        RankKey {
            has_failed: self.index.is_failing(name) || self.failed.iter().any(|failed| **failed == *name),
            is_avoided: taints.is_some_and(|taints| self.spec.avoids(taints)),
            score: Reverse(score),
            name,
        }
    }
}

impl<'a, T> TopN<'a, T> {
    pub(super) fn new(n: usize) -> Self {
        Self { n, best: Vec::new() }
    }

    /// Returns true if a node with this score cannot be among the best, even if neither failures nor taints speak against it.
    #[inline]
    pub(super) fn excludes(&self, score: Score, name: &str) -> bool {
        let Some((last, _)) = self.best.last().filter(|_| self.best.len() == self.n) else {
            return false;
        };
        !last.has_failed && !last.is_avoided && (last.score, last.name) < (Reverse(score), name)
    }

    pub(super) fn insert(&mut self, rank: RankKey<'a>, item: T) {
        let at = self.best.partition_point(|(better, _)| *better <= rank);
        // Beyond the last place the node is not among the best.
        if at < self.n {
            self.best.truncate(self.n - 1);
            self.best.insert(at, (rank, item));
        }
    }

    /// The items of the best nodes, best first.
    pub(super) fn into_items(self) -> Vec<T> {
        self.best.into_iter().map(|(_, item)| item).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Nodes that differ at least by name: failed, avoided, score, name.
    fn nodes() -> impl Strategy<Value = Vec<(bool, bool, u32, String)>> {
        let one = (any::<bool>(), any::<bool>(), 0..4_u32);
        let by_name = prop::collection::btree_map("[a-z]{3}", one, 0..40);
        let nodes = by_name.prop_map(|nodes| {
            let nodes = nodes.into_iter();
            nodes
                .map(|(name, (failed, avoided, score))| (failed, avoided, score, name))
                .collect::<Vec<_>>()
        });
        nodes.prop_shuffle()
    }

    fn rank((has_failed, is_avoided, score, name): &(bool, bool, u32, String)) -> RankKey<'_> {
        RankKey {
            has_failed: *has_failed,
            is_avoided: *is_avoided,
            score: Reverse(Score::of_points(*score)),
            name,
        }
    }

    proptest! {
        /// `TopN` comes to the same as sorting all nodes.
        #[test]
        fn the_top_n_are_the_first_n_of_all_nodes_in_order(nodes in nodes(), n in 1..12_usize) {
            let mut top = TopN::new(n);
            for (idx, node) in nodes.iter().enumerate() {
                top.insert(rank(node), idx);
            }
            let mut order: Vec<usize> = (0..nodes.len()).collect();
            order.sort_by_key(|idx| rank(&nodes[*idx]));
            let (best, others) = order.split_at(n.min(order.len()));
            let is_excluded = |idx: &usize| top.excludes(Score::of_points(nodes[*idx].2), &nodes[*idx].3);
            let is_plain = |idx: &usize| !nodes[*idx].0 && !nodes[*idx].1;
            prop_assert!(!best.iter().any(is_excluded));
            if best.last().is_some_and(is_plain) {
                prop_assert!(others.iter().filter(|idx| is_plain(idx)).all(is_excluded), "plain nodes are excluded");
            }
            prop_assert_eq!(top.into_items(), best);
        }
    }
}
