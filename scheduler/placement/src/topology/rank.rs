//! How good a choice of devices is: the specification that searches are held to.
//!
//! Of all choices that break no rule the one of the least rank is taken. What comes first in [`Rank`] weighs most. A choice
//! is that of the leading devices (those of the first type of a joint wish, or of a type on its own); which devices of
//! the other types come with them follows from it, see [`follow`](super::follow).

use std::cmp::Reverse;

/// How good a choice is; smaller is better, and no two choices of leading devices have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    /// Place of the partition's score among the scores in the table, the highest first, if only partitions will do.
    pub(crate) score: u32,
    /// For each type that comes along, in the order of the wish, how far the farthest device that was asked for is from the
    /// leading ones: 0 if it shares a switch with one of them, 1 a NUMA node, 2 the machine.
    pub(crate) distances: Distances,
    /// Leading devices' switches without a device of a type that comes along, summed over these types.
    pub(crate) n_bare: u32,
    /// Place of the partition in the order of the table: highest score, best table left, first; last if it is none.
    pub(crate) partition: u32,
    /// Fewest links between any two of the GPUs, most first; the same for all choices of other types.
    pub(crate) fewest_links: Reverse<u32>,
    /// Links between the GPUs in all, most first.
    pub(crate) links: Reverse<u32>,
    /// NUMA nodes that the leading devices are spread over.
    pub(crate) n_numas: u32,
    /// Switches that they are spread over.
    pub(crate) n_switches: u32,
    /// Sum of the devices' places in the order of preference: by policy, then those first whose groups (partitions, links,
    /// NUMA nodes, switches) are broken already. Equals share a place.
    pub(crate) levels: u32,
    /// Lowest minors, compared from the lowest on.
    pub(crate) lowness: Reverse<u64>,
}

/// Distances by type, the first type in the highest place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Distances(u64);

impl Distances {
    pub(crate) fn then(self, distance: Distance) -> Self {
        Self(self.0.saturating_mul(3).saturating_add(distance as u64))
    }
}

/// How far devices are from the leading ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Distance {
    /// On a switch of one of them.
    Switch,
    /// On a NUMA node of one of them.
    Numa,
    /// On the machine.
    Machine,
}
