//! Groups of GPUs: partitions of a table, links, and the loss when a device is taken out of a group that is whole.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use crate::choice::topology::candidates::{Pool, Set};
use crate::data::constraints::{DeviceKind, PartitionConstraint};
use crate::data::device::Gpu;
use crate::data::inventory::{Inventory, LinkGroup, Partition, PartitionTable};
use crate::data::misfit::{Misfit, NoPartition};
use crate::state::hardware::Location;
use crate::state::occupancy::DeviceUse;

/// A set of GPUs to choose from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GpuSet {
    pub(crate) allowed: Set,
    /// Place of its partition's score among the scores, if only partitions will do.
    pub(crate) score: u32,
    /// Place of the partition in the order of preference; the last place if it is none.
    pub(crate) partition: u32,
}

impl GpuSet {
    /// A set that is no partition.
    pub(crate) const fn plain(allowed: Set) -> Self {
        Self {
            allowed,
            score: 0,
            partition: u32::MAX,
        }
    }

    /// The candidates of a pool that may be taken: the set restricts GPUs alone.
    pub(crate) fn allowed_of(self, pool: &Pool) -> Set {
        match pool.kind {
            DeviceKind::Gpu => self.allowed,
            DeviceKind::Other(_) => pool.all(),
        }
    }
}

/// The partitions of a node at present, for one request.
pub(crate) struct Partitions<'a> {
    pub(crate) table: Option<&'a PartitionTable>,
    pub(crate) constraint: Option<PartitionConstraint>,
    pub(crate) gpus: &'a [Gpu],
    pub(crate) uses: &'a [DeviceUse],
    pub(crate) pool: &'a Pool,
}

impl Partitions<'_> {
    /// Returns true if only partitions will do.
    pub(crate) fn is_binding(&self) -> bool {
        self.constraint.is_some() || self.table.is_some_and(|table| table.is_binding)
    }

    /// The partitions that may be taken, the best first.
    ///
    /// A higher score is better. Of one score that partition is best after which the table is: the one that leaves the
    /// largest free partition, then the largest bandwidth of those, then the most free partitions of each size from the
    /// largest on; then the order of the table decides.
    pub(crate) fn choices(&self) -> Result<Vec<GpuSet>, Misfit> {
        let misfit = |problem| Misfit::Partition {
            needed: self.pool.n,
            problem,
        };
        let table = self.table.ok_or(misfit(NoPartition::Table))?;
        let of_size = table.partitions.iter().filter(|one| size(one) == self.pool.n);
        let best_score = of_size.clone().map(|one| one.score).max();
        let best_score = best_score.ok_or(misfit(NoPartition::Size))?;
        let constraint = self.constraint.unwrap_or_default();
        let mut usable: Vec<(&Partition, Set)> = Vec::new();
        let (mut best_free, mut best_fast) = (None::<i64>, None::<i64>);
        for partition in of_size {
            let Some(members) = self.free_members(partition) else {
                continue;
            };
            best_free = best_free.max(Some(partition.score));
            // A partition of unknown bandwidth may be slower than the request demands.
            if constraint.bandwidth.is_some() && partition.bandwidth < constraint.bandwidth {
                continue;
            }
            best_fast = best_fast.max(Some(partition.score));
            if !constraint.restricted || partition.score == best_score {
                usable.push((partition, members));
            }
        }
        if usable.is_empty() {
            return Err(misfit(match (best_fast, best_free) {
                (Some(free), _) => NoPartition::Score {
                    wanted: best_score,
                    free,
                },
                (None, Some(_)) => NoPartition::Bandwidth,
                (None, None) => NoPartition::Free,
            }));
        }
        self.sort(table, &mut usable);
        let mut choices: Vec<GpuSet> = Vec::with_capacity(usable.len());
        // Places instead of scores: a rank compares partitions and sets that are none.
        let (mut last, mut score) = (None, 0);
        for (place, (partition, allowed)) in (0..).zip(usable) {
            score += u32::from(last.is_some_and(|last| last != partition.score));
            last = Some(partition.score);
            choices.push(GpuSet {
                allowed,
                score: if self.is_binding() { score } else { 0 },
                partition: place,
            });
        }
        Ok(choices)
    }

    fn sort(&self, table: &PartitionTable, usable: &mut [(&Partition, Set)]) {
        let (mut whole, mut none) = (Vec::new(), LeftBySize::new());
        for partition in &table.partitions {
            // Every size of the table is counted, so that the counts of two partitions compare size by size.
            none.insert(Reverse(size(partition)), (0, None));
            if is_whole(partition, self.gpus, self.uses) {
                whole.push(partition);
            }
        }
        usable.sort_by_cached_key(|(one, _)| (Reverse(one.score), left_without(one, &whole, none.clone())));
    }

    /// The candidates that a partition consists of, if all of them may be taken and none is in use.
    fn free_members(&self, partition: &Partition) -> Option<Set> {
        let members = self.pool.select(|candidate| {
            let gpu = self.gpus.get(candidate.device);
            gpu.is_some_and(|gpu| partition.minors.contains(&gpu.minor))
                && self
                    .uses
                    .get(candidate.device)
                    .is_some_and(|gpu| !gpu.is_occupied)
        });
        (members.len() == size(partition)).then_some(members)
    }
}

/// Number of partitions that are left, and their largest bandwidth, by size.
type LeftBySize = BTreeMap<Reverse<usize>, (u32, Option<u64>)>;

/// A key that is smaller for a partition which leaves the better table of whole ones when it is taken.
fn left_without(taken: &Partition, whole: &[&Partition], mut left: LeftBySize) -> impl Ord + use<> {
    for one in whole {
        if one.minors.iter().all(|minor| !taken.minors.contains(minor)) {
            let (n, bandwidth) = left.entry(Reverse(size(one))).or_default();
            *n += 1;
            *bandwidth = (*bandwidth).max(one.bandwidth);
        }
    }
    let largest = left.iter().find(|(_, (n, _))| *n > 0);
    let largest = largest.map(|(size, (_, bandwidth))| (size.0, *bandwidth));
    let counts: Vec<Reverse<u32>> = left.values().map(|(n, _)| Reverse(*n)).collect();
    (Reverse(largest), counts)
}

/// Returns true if all GPUs of a partition exist, are healthy and are not in use.
fn is_whole(partition: &Partition, gpus: &[Gpu], uses: &[DeviceUse]) -> bool {
    partition.minors.iter().all(|minor| {
        let found = gpus.iter().zip(uses).find(|(gpu, _)| gpu.minor == *minor);
        found.is_some_and(|(gpu, used)| gpu.healthy && !used.is_occupied)
    })
}

/// Number of GPUs of a partition; a GPU that it names twice counts once.
fn size(partition: &Partition) -> usize {
    let mut minors = partition.minors.clone();
    minors.sort_unstable();
    minors.dedup();
    minors.len()
}

/// The groups that are broken when a device is taken; smaller for a device to prefer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Loss {
    /// GPUs of the largest partition, or group of linked GPUs, that is whole and has the device.
    largest: usize,
    /// Number of groups of that size.
    n: usize,
    /// True if the NUMA node's devices of its type are all free.
    numa: bool,
    /// True if the switch's devices of its type are all free.
    switch: bool,
}

/// The loss with each device of a type by its location; a device that is alone at its location breaks nothing.
pub(crate) fn losses(locations: &[Location], uses: &[DeviceUse]) -> Vec<Loss> {
    let mut losses = Vec::with_capacity(locations.len());
    for location in locations {
        losses.push(Loss {
            numa: is_free_group(locations, uses, |other| other.numa == location.numa),
            switch: is_free_group(locations, uses, |other| other.switch == location.switch),
            ..Loss::default()
        });
    }
    losses
}

/// Returns true if the devices at some locations are several, and all of them free.
fn is_free_group(locations: &[Location], uses: &[DeviceUse], is_there: impl Fn(&Location) -> bool) -> bool {
    let mut n_devices = 0;
    for (at, location) in locations.iter().enumerate() {
        if is_there(location) {
            if !is_free(uses, at) {
                return false;
            }
            n_devices += 1;
        }
    }
    n_devices > 1
}

fn is_free(uses: &[DeviceUse], at: usize) -> bool {
    uses.get(at).is_some_and(|device| !device.is_occupied)
}

/// The loss with each GPU.
pub(crate) fn gpu_losses(inventory: &Inventory, locations: &[Location], uses: &[DeviceUse]) -> Vec<Loss> {
    let mut losses = losses(locations, uses);
    let partitions = inventory.partitions.iter().flat_map(|table| &table.partitions);
    for partition in partitions.filter(|one| is_whole(one, &inventory.gpus, uses)) {
        add_loss(&mut losses, &inventory.indices_of(&partition.minors));
    }
    for group in &inventory.links {
        let gpus = inventory.indices_of(&group.minors);
        if gpus.iter().all(|at| is_free(uses, *at)) {
            add_loss(&mut losses, &gpus);
        }
    }
    losses
}

fn add_loss(losses: &mut [Loss], group: &BTreeSet<usize>) {
    // A GPU that is alone in its group breaks nothing.
    if group.len() < 2 {
        return;
    }
    for at in group {
        let Some(loss) = losses.get_mut(*at) else { continue };
        if group.len() > loss.largest {
            (loss.largest, loss.n) = (group.len(), 1);
        } else if group.len() == loss.largest {
            loss.n += 1;
        }
    }
}

/// Numbers of links between every two candidates of a pool.
#[derive(Debug)]
pub(crate) struct Links {
    n: usize,
    between: Vec<u32>,
}

impl Links {
    /// `None` if the node has no links.
    pub(crate) fn new(groups: &[LinkGroup], gpus: &[Gpu], pool: &Pool) -> Option<Self> {
        if groups.is_empty() {
            return None;
        }
        let n = pool.candidates.len();
        let mut links = Self {
            n,
            between: vec![0; n * n],
        };
        for group in groups {
            let is_in = |at: usize| gpus.get(at).is_some_and(|gpu| group.minors.contains(&gpu.minor));
            let members = pool.select(|candidate| is_in(candidate.device));
            for one in members.members() {
                for other in members.members().filter(|other| *other != one) {
                    if let Some(between) = links.between.get_mut(one * n + other) {
                        *between = between.saturating_add(group.n_links);
                    }
                }
            }
        }
        Some(links)
    }

    /// The links of all pairs of a set.
    fn pairs(&self, set: Set) -> impl Iterator<Item = u32> + '_ {
        set.members().flat_map(move |one| {
            let lower = set.members().take_while(move |other| *other < one);
            lower.map(move |other| self.between.get(one * self.n + other).copied().unwrap_or(0))
        })
    }

    /// The fewest links between any two members, and those of all together; zero for less than two.
    pub(crate) fn among(&self, set: Set) -> (u32, u32) {
        if set.len() < 2 {
            return (0, 0);
        }
        self.pairs(set)
            .fold((u32::MAX, 0), |(fewest, sum): (u32, u32), links| {
                (fewest.min(links), sum.saturating_add(links))
            })
    }

    /// Returns true if all pairs of members have the same number of links.
    pub(crate) fn are_equal(&self, set: Set) -> bool {
        let mut pairs = self.pairs(set);
        pairs.next().is_none_or(|first| pairs.all(|links| links == first))
    }
}
