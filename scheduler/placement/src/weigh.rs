//! Scores by weighted resources, as Koordinator's scheduler gives them: how much is free, or used, once a request is in.
//!
//! Every resource that has a weight and that there is anything of counts, asked for or not. Memory counts in bytes and in
//! percent, each with its weight; a request adds to the one in which it is stated, and only what one device must have.

use std::collections::BTreeMap;

use crate::ident::ResourceName;

/// Highest score.
pub(crate) const BEST: u32 = 100;

/// What a high score tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Leaning {
    /// Much is left.
    Least,
    /// Much is used.
    Most,
}

/// How much each resource counts; those without a weight do not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Weights {
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// How much it counts.
    pub weight: u32,
    /// What there is of it in all.
    pub total: u64,
    /// What nobody holds.
    pub free: u64,
    /// What is asked for.
    pub requested: u64,
}

impl Leaning {
    /// The weighted mean over all resources that there is anything of, from 0 to 100.
    pub fn score(self, usages: impl IntoIterator<Item = Usage>) -> u32 {
        let counting = usages.into_iter().filter(|usage| usage.total > 0);
        let (sum, weights) = counting.fold((0_u64, 0_u64), |(sum, weights), usage| {
            let weight = u64::from(usage.weight);
            (sum + weight * u64::from(self.score_one(usage)), weights + weight)
        });
        u32::try_from(sum.checked_div(weights).unwrap_or(0)).unwrap_or(BEST)
    }

    fn score_one(self, usage: Usage) -> u32 {
        let used = usage
            .total
            .saturating_sub(usage.free)
            .saturating_add(usage.requested);
        let part = match self {
            Self::Least => usage.total.saturating_sub(used),
            Self::Most => used.min(usage.total),
        };
        let scaled = u128::from(part) * u128::from(BEST) / u128::from(usage.total.max(1));
        u32::try_from(scaled).unwrap_or(BEST)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::{Leaning, Usage};

    const fn usage(weight: u32, total: u64, free: u64, requested: u64) -> Usage {
        Usage {
            weight,
            total,
            free,
            requested,
        }
    }

    #[rstest]
    #[case::nothing_at_all(Leaning::Least, &[], 0)]
    #[case::nothing_there(Leaning::Most, &[usage(1, 0, 0, 7)], 0)]
    #[case::no_weight(Leaning::Most, &[usage(0, 100, 0, 7)], 0)]
    #[case::empty(Leaning::Least, &[usage(1, 100, 100, 30)], 70)]
    #[case::half_used(Leaning::Most, &[usage(1, 100, 50, 30)], 80)]
    #[case::more_than_there_is(Leaning::Most, &[usage(1, 100, 50, 80)], 100)]
    #[case::less_than_nothing_left(Leaning::Least, &[usage(1, 100, 50, 80)], 0)]
    #[case::each_is_rounded_down(Leaning::Least, &[usage(1, 3, 2, 0), usage(1, 3, 1, 0)], 49)]
    #[case::weighted(Leaning::Least, &[usage(3, 100, 100, 0), usage(1, 100, 100, 100)], 75)]
    #[case::what_nobody_asks_for_counts(Leaning::Least, &[usage(1, 100, 75, 50), usage(1, 16, 12, 0)], 50)]
    fn scores(#[case] leaning: Leaning, #[case] usages: &[Usage], #[case] expected: u32) {
        assert_eq!(leaning.score(usages.iter().copied()), expected);
    }

    proptest! {
        /// No amounts, however large, leave the range, and what one leaning likes better the other likes less.
        #[test]
        fn scores_stay_in_range(amounts in prop::collection::vec((any::<u32>(), any::<u64>(), any::<u64>(), any::<u64>()), 0..5)) {
            let usages = || amounts.iter().map(|&(weight, total, free, requested)| usage(weight, total, free, requested));
            let (least, most) = (Leaning::Least.score(usages()), Leaning::Most.score(usages()));
            prop_assert!(least + most <= 100);
        }
    }
}
