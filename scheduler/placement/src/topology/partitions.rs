//! Sets of GPUs that a partition table, or a scope, leaves to choose from.
//!
//! Partitions come by their score, the highest first; of one score that one first after which the table is best: the one
//! that leaves the largest free partition, then the largest bandwidth of those, then the most free partitions of each
//! size from the largest on; then in the order of the table.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::gpu::Gpu;
use crate::miss::{Miss, NoPartition};
use crate::topology::pool::Pool;
use crate::topology::sets::Set;
use crate::topology::uses::Use;
use crate::traits::{Partition, PartitionTable};
use crate::wishes::PartitionWish;

/// A set of GPUs to choose from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) allowed: Set,
    /// Place of its score among the scores, if only partitions will do.
    pub(crate) score: u32,
    /// Place of the partition; the last place if it is none.
    pub(crate) partition: u32,
}

impl Choice {
    /// Not a partition.
    pub(crate) const fn of(allowed: Set) -> Self {
        Self {
            allowed,
            score: 0,
            partition: u32::MAX,
        }
    }
}

/// A table as it is at the moment.
pub(crate) struct Tables<'a> {
    pub(crate) table: Option<&'a PartitionTable>,
    pub(crate) wish: Option<PartitionWish>,
    pub(crate) gpus: &'a [Gpu],
    pub(crate) uses: &'a [Use],
    pub(crate) pool: &'a Pool,
}

impl Tables<'_> {
    /// Whether only partitions will do.
    pub(crate) fn is_binding(&self) -> bool {
        self.wish.is_some() || self.table.is_some_and(|table| table.is_binding)
    }

    /// The partitions that may be taken, the best first.
    pub(crate) fn choices(&self) -> Result<Vec<Choice>, Miss> {
        let miss = |problem| Miss::Partition {
            needed: self.pool.n,
            problem,
        };
        let table = self.table.ok_or(miss(NoPartition::Table))?;
        let of_size: Vec<&Partition> = table
            .partitions
            .iter()
            .filter(|one| size(one) == self.pool.n)
            .collect();
        let best = of_size
            .iter()
            .map(|one| one.score)
            .max()
            .ok_or(miss(NoPartition::Size))?;
        let wish = self.wish.unwrap_or_default();
        let is_fast = |one: &Partition| {
            wish.bandwidth
                .is_none_or(|least| one.bandwidth.is_some_and(|bandwidth| bandwidth >= least))
        };
        let free: Vec<(&Partition, Set)> = of_size
            .iter()
            .filter_map(|one| Some((*one, self.free(one)?)))
            .collect();
        let fast: Vec<(&Partition, Set)> = free.iter().filter(|(one, _)| is_fast(one)).copied().collect();
        let mut usable: Vec<(&Partition, Set)> = fast
            .iter()
            .filter(|(one, _)| !wish.restricted || one.score == best)
            .copied()
            .collect();
        if usable.is_empty() {
            let best_of = |some: &[(&Partition, Set)]| some.iter().map(|(one, _)| one.score).max();
            return Err(miss(match (best_of(&fast), best_of(&free)) {
                (Some(free), _) => NoPartition::Score { wanted: best, free },
                (None, Some(_)) => NoPartition::Bandwidth,
                (None, None) => NoPartition::Free,
            }));
        }
        let whole: Vec<&Partition> = table
            .partitions
            .iter()
            .filter(|one| is_whole(one, self.gpus, self.uses))
            .collect();
        let none: Left = table
            .partitions
            .iter()
            .map(|one| (Reverse(size(one)), (0, None)))
            .collect();
        usable.sort_by_cached_key(|(one, _)| (Reverse(one.score), left_by(&whole, none.clone(), one)));
        let mut choices: Vec<Choice> = Vec::new();
        let mut last = None;
        let mut score = 0;
        for (place, (one, allowed)) in (0..).zip(usable) {
            score += u32::from(last.is_some_and(|last| last != one.score));
            last = Some(one.score);
            choices.push(Choice {
                allowed,
                score: if self.is_binding() { score } else { 0 },
                partition: place,
            });
        }
        Ok(choices)
    }

    /// The candidates that a partition consists of, if all of them may be taken and nobody uses any.
    fn free(&self, partition: &Partition) -> Option<Set> {
        let is_in = |at: usize| {
            self.gpus
                .get(at)
                .is_some_and(|gpu| partition.minors.contains(&gpu.minor))
        };
        let is_taken = |at: usize| self.uses.get(at).is_none_or(|one| one.is_taken);
        let members = self
            .pool
            .those(|candidate| is_in(candidate.at) && !is_taken(candidate.at));
        (members.len() == size(partition)).then_some(members)
    }
}

/// How many partitions of each size are left, and the largest bandwidth of them.
type Left = BTreeMap<Reverse<usize>, (u32, Option<u64>)>;

/// What is left of whole partitions when one is given away, the best first.
fn left_by(whole: &[&Partition], mut left: Left, given: &Partition) -> impl Ord + use<> {
    for one in whole
        .iter()
        .filter(|one| one.minors.iter().all(|minor| !given.minors.contains(minor)))
    {
        let (n, bandwidth) = left.entry(Reverse(size(one))).or_default();
        *n += 1;
        *bandwidth = (*bandwidth).max(one.bandwidth);
    }
    let largest = left
        .iter()
        .find(|(_, (n, _))| *n > 0)
        .map(|(size, (_, bandwidth))| (size.0, *bandwidth));
    let counts: Vec<Reverse<u32>> = left.values().map(|(n, _)| Reverse(*n)).collect();
    (Reverse(largest), counts)
}

/// Whether all GPUs of a partition are there and well, and nobody uses any.
pub(crate) fn is_whole(partition: &Partition, gpus: &[Gpu], uses: &[Use]) -> bool {
    let is_free = |minor: &u32| {
        let found = gpus.iter().zip(uses).find(|(gpu, _)| gpu.minor == *minor);
        found.is_some_and(|(gpu, one)| gpu.healthy && !one.is_taken)
    };
    partition.minors.iter().all(is_free)
}

/// How many GPUs a partition has; naming one twice makes no more of it.
fn size(partition: &Partition) -> usize {
    let mut minors = partition.minors.clone();
    minors.sort_unstable();
    minors.dedup();
    minors.len()
}
