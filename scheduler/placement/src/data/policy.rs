//! Policies: which of several fitting devices, and of several fitting nodes, is preferred; and scores by weighted resources.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use crate::data::ident::ResourceName;

/// Highest score by weighted resources.
pub(crate) const BEST: u32 = 100;

/// Preference among the devices of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DevicePolicy {
    /// The fitting device that costs the least room for typical pods; where that does not decide, as `Binpack`.
    #[default]
    Fill,
    /// The fitting device that will have the least room left.
    Binpack,
    /// The fitting device that will have the most room left.
    Spread,
    /// The fitting device with the lowest minor.
    InOrder,
    /// The fitting device that scores best for its free amounts, by weighted resources.
    LeastAllocated,
    /// The fitting device that scores best for its used amounts, by weighted resources.
    MostAllocated,
}

/// Preference among nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum NodePolicy {
    /// The node that loses the least room for typical pods; of equal nodes the one with the least left.
    #[default]
    Fill,
    /// The fullest node.
    Binpack,
    /// The emptiest node.
    Spread,
    /// The node that scores best for its free amounts, by weighted resources.
    LeastAllocated,
    /// The node that scores best for its used amounts, by weighted resources.
    MostAllocated,
}

/// Preferences among nodes and among the devices of each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Policies {
    /// Among nodes.
    pub node: NodePolicy,
    /// Among the devices of a node.
    pub device: DevicePolicy,
}

/// A text that names no policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no policy: choose one of {choice}")]
pub struct PolicyError {
    text: String,
    choice: String,
}

/// Implements parsing and printing of a policy by the names that flags and annotations have for it.
macro_rules! policy_names {
    ($policy:ident { $($variant:ident = $name:literal),+ }) => {
        impl FromStr for $policy {
            type Err = PolicyError;

            fn from_str(text: &str) -> Result<Self, PolicyError> {
                match text {
                    $($name => Ok(Self::$variant),)+
                    _ => Err(PolicyError { text: text.chars().take(64).collect(), choice: [$($name),+].join(", ") }),
                }
            }
        }

        impl fmt::Display for $policy {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self {
                    $(Self::$variant => $name,)+
                })
            }
        }
    };
}

policy_names!(DevicePolicy {
    Fill = "fill",
    Binpack = "binpack",
    Spread = "spread",
    InOrder = "in-order",
    LeastAllocated = "least-allocated",
    MostAllocated = "most-allocated"
});
policy_names!(NodePolicy {
    Fill = "fill",
    Binpack = "binpack",
    Spread = "spread",
    LeastAllocated = "least-allocated",
    MostAllocated = "most-allocated"
});

/// The score of a node for a request; higher is better, and only scores of one policy compare.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Score(u32);

/// The best score: the largest multiple of a million below [`COST_END`].
const BEST_SCORE: u32 = 134_000_000;
/// Points per millionth of the best score.
const POINTS_PER_MILLIONTH: u32 = BEST_SCORE / 1_000_000;
/// Ranks of costs (`PlacementCost::rank`, for the policy `fill`) are less than this.
pub(crate) const COST_END: u32 = 1 << 27;

impl Score {
    /// The score in points, of which the best has 134 million.
    pub const fn of_points(points: u32) -> Self {
        Self(points)
    }

    /// The least score that is better than this one.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }

    /// The best score times `part / total`.
    pub(crate) fn of_share(part: u128, total: u128) -> Self {
        let millionths = (part * 1_000_000).checked_div(total).unwrap_or(0);
        let millionths = u32::try_from(millionths).unwrap_or(u32::MAX).min(1_000_000);
        Self(millionths * POINTS_PER_MILLIONTH)
    }

    /// The score of a cost with this rank, which is less than [`COST_END`].
    pub(crate) const fn of_cost(rank: u32) -> Self {
        Self(BEST_SCORE.saturating_sub(rank))
    }

    /// The highest rank of a cost with this score. All ranks from [`BEST_SCORE`] on have the score 0.
    pub(crate) const fn rank_of_cost(self) -> u32 {
        if self.0 == 0 {
            COST_END
        } else {
            BEST_SCORE.saturating_sub(self.0)
        }
    }

    /// The points, less than [`COST_END`].
    pub(crate) const fn points(self) -> u32 {
        self.0
    }

    /// Millionths of the best score.
    #[cfg(any(test, feature = "check"))]
    pub const fn parts_per_million(self) -> u32 {
        self.0 / POINTS_PER_MILLIONTH
    }
}

/// The conversion of amounts to a score, as in kube-scheduler's `NodeResourcesFit` and Koordinator's device plugin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ScoringStrategy {
    /// A high score for much that is free.
    LeastAllocated,
    /// A high score for much that is used.
    MostAllocated,
}

/// The weight of each resource in a score; a resource without a weight does not count.
///
/// GPU memory counts in bytes and in percent, each with its weight; a request adds to the one in which it is stated.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResourceWeights {
    /// GPU memory in percent of a device.
    pub memory_ratio: u32,
    /// GPU memory in bytes.
    pub memory: u32,
    /// Computing power of GPUs.
    pub core: u32,
    /// Resources of devices of other types.
    pub others: BTreeMap<ResourceName, u32>,
}

/// One resource of a device, or of several together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResourceUsage {
    /// The weight of the resource in the score.
    pub weight: u32,
    /// The total amount.
    pub total: u64,
    /// The amount that no owner holds.
    pub free: u64,
    /// The amount that the request asks for.
    pub requested: u64,
}

impl ScoringStrategy {
    /// The weighted mean over all resources with a total above zero, requested or not; from 0 to 100.
    pub fn score(self, usages: impl IntoIterator<Item = ResourceUsage>) -> u32 {
        let (mut sum, mut weights) = (0_u64, 0_u64);
        // A resource that no device has would pull the mean towards an end.
        for usage in usages.into_iter().filter(|usage| usage.total > 0) {
            let weight = u64::from(usage.weight);
            sum += weight * u64::from(self.score_one(usage));
            weights += weight;
        }
        u32::try_from(sum.checked_div(weights).unwrap_or(0)).unwrap_or(BEST)
    }

    /// The score of one resource with the requested amount taken, from 0 to 100.
    fn score_one(self, usage: ResourceUsage) -> u32 {
        let used = usage.total.saturating_sub(usage.free);
        // A request for more than the total counts as a full device, not as an empty one.
        let used = used.saturating_add(usage.requested);
        let part = match self {
            Self::LeastAllocated => usage.total.saturating_sub(used),
            Self::MostAllocated => used.min(usage.total),
        };
        // Each resource is rounded down before it is weighed, as kube-scheduler does.
        // A hundred times an amount of bytes may exceed 64 bits.
        let scaled = u128::from(part) * u128::from(BEST) / u128::from(usage.total.max(1));
        u32::try_from(scaled).unwrap_or(BEST)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::{BEST_SCORE, COST_END, ResourceUsage, Score, ScoringStrategy};

    const fn usage(weight: u32, total: u64, free: u64, requested: u64) -> ResourceUsage {
        ResourceUsage {
            weight,
            total,
            free,
            requested,
        }
    }

    #[rstest]
    #[case::nothing_at_all(ScoringStrategy::LeastAllocated, &[], 0)]
    #[case::no_total(ScoringStrategy::MostAllocated, &[usage(1, 0, 0, 7)], 0)]
    #[case::no_weight(ScoringStrategy::MostAllocated, &[usage(0, 100, 0, 7)], 0)]
    #[case::empty(ScoringStrategy::LeastAllocated, &[usage(1, 100, 100, 30)], 70)]
    #[case::half_used(ScoringStrategy::MostAllocated, &[usage(1, 100, 50, 30)], 80)]
    #[case::more_requested_than_total(ScoringStrategy::MostAllocated, &[usage(1, 100, 50, 80)], 100)]
    #[case::more_requested_than_free(ScoringStrategy::LeastAllocated, &[usage(1, 100, 50, 80)], 0)]
    #[case::each_is_rounded_down(ScoringStrategy::LeastAllocated, &[usage(1, 3, 2, 0), usage(1, 3, 1, 0)], 49)]
    #[case::weighted(ScoringStrategy::LeastAllocated, &[usage(3, 100, 100, 0), usage(1, 100, 100, 100)], 75)]
    #[case::a_resource_that_is_not_requested_counts(ScoringStrategy::LeastAllocated, &[usage(1, 100, 75, 50), usage(1, 16, 12, 0)], 50)]
    fn scores(#[case] strategy: ScoringStrategy, #[case] usages: &[ResourceUsage], #[case] expected: u32) {
        assert_eq!(strategy.score(usages.iter().copied()), expected);
    }

    #[rstest]
    #[case::none(0)]
    #[case::last_with_points(BEST_SCORE - 1)]
    #[case::first_without_points(BEST_SCORE)]
    #[case::last(COST_END - 1)]
    fn no_cost_is_above_the_rank_of_its_score(#[case] rank: u32) {
        assert!(Score::of_cost(rank).rank_of_cost() >= rank);
    }

    proptest! {
        /// No amounts, however large, leave the range, and what one strategy prefers the other does not.
        #[test]
        fn scores_stay_in_range(amounts in prop::collection::vec((any::<u32>(), any::<u64>(), any::<u64>(), any::<u64>()), 0..5)) {
            let usages = || amounts.iter().map(|&(weight, total, free, requested)| usage(weight, total, free, requested));
            let (least, most) = (ScoringStrategy::LeastAllocated.score(usages()), ScoringStrategy::MostAllocated.score(usages()));
            prop_assert!(least + most <= 100);
        }
    }
}
