//! Groups of devices: partitions of a table, linked GPUs, devices of one switch or NUMA node, and the loss when a device is taken
//! out of a group that is entirely free.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use crate::choice::topology::candidates::{CandidateSet, Pool};
use crate::data::constraints::PartitionConstraint;
use crate::data::device::Device;
use crate::data::ident::DeviceType;
use crate::data::inventory::{GPUS, Inventory, Partition};
use crate::data::misfit::{Misfit, number_of};
use crate::data::reason::Reason;
use crate::state::hardware::Location;
use crate::state::occupancy::DeviceUse;

/// A set of GPUs to choose from: those of a partition, or all that may be taken within one device, switch, NUMA node or machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GpuSet {
    /// The GPUs of the set, as candidates of the pool of GPUs.
    pub(crate) allowed: CandidateSet,
    /// Place of its partition's score among the different scores, 0 for the best; `u32::MAX` if the set is no partition.
    pub(crate) score_place: u32,
    /// Place of its partition in the order of preference, 0 for the best; `u32::MAX` if the set is no partition.
    pub(crate) preference_place: u32,
}

impl GpuSet {
    /// A set that is no partition.
    pub(crate) const fn plain(allowed: CandidateSet) -> Self {
        Self {
            allowed,
            score_place: u32::MAX,
            preference_place: u32::MAX,
        }
    }

    pub(crate) const fn is_partition(&self) -> bool {
        self.preference_place != u32::MAX
    }

    /// The candidates of a pool that may be taken with this set of GPUs, which restricts no other type.
    pub(crate) fn allowed_of(self, pool: &Pool) -> CandidateSet {
        match pool.kind {
            DeviceType::Gpu => self.allowed,
            DeviceType::Other(_) => pool.all(),
        }
    }
}

/// The partitions that may be taken, the best first; with a constraint only those that meet it.
///
/// A higher score is better. Of partitions with equal scores the one is best that leaves the best free partitions when it is
/// taken: the largest size, then the largest bandwidth of one of that size, then the most of each size from the largest on.
/// Between equals the order of the table decides.
pub(crate) fn partition_sets(
    inventory: &Inventory,
    constraint: Option<PartitionConstraint>,
    uses: &[DeviceUse],
    pool: &Pool,
) -> Result<Vec<GpuSet>, Misfit> {
    if inventory.has_unreadable_partitions {
        return Err(Reason::PartitionsUnreadable.into());
    }
    let misfit = |text| Misfit::new(Reason::Partition, text);
    let Some(table) = &inventory.partitions else {
        return Err(misfit("the node has no table of GPU partitions".to_owned()));
    };
    let partitions = table.partitions.iter();
    let of_size = partitions.filter(|one| size(one) == pool.n_requested);
    let Some(best_score) = of_size.clone().map(|one| one.score).max() else {
        let gpus = number_of(pool.n_requested, &DeviceType::Gpu);
        return Err(misfit(format!("the node's table has no partition of {gpus}")));
    };
    let constraint = constraint.unwrap_or_default();
    let mut usable: Vec<(&Partition, CandidateSet)> = Vec::new();
    // The best score of a free partition, and of a free one with the demanded bandwidth.
    let (mut best_free, mut best_with_bandwidth) = (None::<i64>, None::<i64>);
    for partition in of_size {
        let Some(members) = free_members(partition, &inventory.gpus, uses, pool) else {
            continue;
        };
        best_free = best_free.max(Some(partition.score));
        // A partition of unknown bandwidth may be slower than the request demands.
        if constraint.bandwidth.is_some() && partition.bandwidth < constraint.bandwidth {
            continue;
        }
        best_with_bandwidth = best_with_bandwidth.max(Some(partition.score));
        if !constraint.restricted || partition.score == best_score {
            usable.push((partition, members));
        }
    }
    if usable.is_empty() {
        let gpus = number_of(pool.n_requested, &DeviceType::Gpu);
        return Err(misfit(match (best_with_bandwidth, best_free) {
            (Some(free), _) => format!(
                "no free partition of {gpus} with score {best_score}; the best free one has score {free}"
            ),
            (None, Some(_)) => format!("no free partition of {gpus} is known to have the bandwidth"),
            (None, None) => format!("no partition of {gpus} is free"),
        }));
    }
    let (mut whole, mut none_left) = (Vec::new(), LeftBySize::new());
    for partition in &table.partitions {
        // Every size of the table is counted, so that the counts of two partitions compare size by size.
        none_left.insert(Reverse(size(partition)), (0, None));
        if is_whole(partition, &inventory.gpus, uses) {
            whole.push(partition);
        }
    }
    // Cached, since each key takes a walk over all whole partitions of the table.
    usable.sort_by_cached_key(|(one, _)| (Reverse(one.score), left_without(one, &whole, none_left.clone())));
    let mut choices: Vec<GpuSet> = Vec::with_capacity(usable.len());
    // Places instead of scores: a rank compares partitions with sets that have no score.
    let (mut last_score, mut score_place) = (None, 0);
    for (preference_place, (partition, allowed)) in (0..).zip(usable) {
        score_place += u32::from(last_score.is_some_and(|last| last != partition.score));
        last_score = Some(partition.score);
        choices.push(GpuSet {
            allowed,
            score_place,
            preference_place,
        });
    }
    Ok(choices)
}

/// The candidates that make up a partition; `None` unless all of its GPUs may be taken and are free.
fn free_members(
    partition: &Partition,
    gpus: &[Device],
    uses: &[DeviceUse],
    pool: &Pool,
) -> Option<CandidateSet> {
    let minors = &partition.minors;
    let members = pool.select(|one| has_minor(gpus, one.device, minors) && is_free(uses, one.device));
    (members.len() == size(partition)).then_some(members)
}

/// Number of partitions that are left, and their largest bandwidth, by size in GPUs, the largest size first.
type LeftBySize = BTreeMap<Reverse<usize>, (u32, Option<u64>)>;

/// A key that is smaller for a partition which, when it is taken, leaves better ones of the `whole` partitions. `left` comes with
/// every size of the table, and no partition counted.
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

/// Returns true if all GPUs of a partition exist, take new owners and are not in use.
fn is_whole(partition: &Partition, gpus: &[Device], uses: &[DeviceUse]) -> bool {
    for minor in &partition.minors {
        let found = gpus.iter().zip(uses).find(|(gpu, _)| gpu.minor == *minor);
        if found.is_none_or(|(gpu, device_use)| !gpu.is_open() || device_use.is_occupied) {
            return false;
        }
    }
    true
}

/// Number of GPUs of a partition; a GPU that it names twice counts once.
fn size(partition: &Partition) -> usize {
    // Asked for each partition of a table in each decision: sorting a few numbers is faster than a set of them.
    let mut minors = partition.minors.clone();
    minors.sort_unstable();
    minors.dedup();
    minors.len()
}

/// The groups that are broken when a device is taken; smaller for a device to prefer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Loss {
    /// Number of GPUs in the largest partition, or group of linked GPUs, that is free as a whole and has the device.
    largest_group: usize,
    /// Number of groups of that size that have the device.
    n_largest: usize,
    /// True if all devices of the type on the device's NUMA node are free.
    is_numa_free: bool,
    /// True if all devices of the type on the device's switch are free.
    is_switch_free: bool,
}

/// The groups that each device of the type at an index would break. A device that is alone in its group breaks nothing.
pub(crate) fn losses(
    inventory: &Inventory,
    type_at: usize,
    locations: &[Location],
    uses: &[DeviceUse],
) -> Vec<Loss> {
    let mut losses = Vec::with_capacity(locations.len());
    for location in locations {
        let (mut n_on_numa, mut n_on_switch) = (0, 0);
        let (mut is_numa_free, mut is_switch_free) = (true, true);
        for (at, other) in locations.iter().enumerate() {
            if other.numa == location.numa {
                n_on_numa += 1;
                is_numa_free &= is_free(uses, at);
            }
            if other.switch == location.switch {
                n_on_switch += 1;
                is_switch_free &= is_free(uses, at);
            }
        }
        losses.push(Loss {
            is_numa_free: n_on_numa > 1 && is_numa_free,
            is_switch_free: n_on_switch > 1 && is_switch_free,
            ..Loss::default()
        });
    }
    // Only GPUs are linked, and allocated in partitions.
    if type_at != GPUS {
        return losses;
    }
    let partitions = inventory.partitions.iter().flat_map(|table| &table.partitions);
    for partition in partitions.filter(|one| is_whole(one, &inventory.gpus, uses)) {
        add_loss(&mut losses, &inventory.indices_of(&partition.minors));
    }
    for group in &inventory.links {
        let gpus = inventory.indices_of(&group.minors);
        // Unlike a partition, a group of links stays whole without a GPU that the node has lost.
        if gpus.iter().all(|at| is_free(uses, *at)) {
            add_loss(&mut losses, &gpus);
        }
    }
    losses
}

/// Returns true if a device exists and is not occupied.
fn is_free(uses: &[DeviceUse], at: usize) -> bool {
    uses.get(at).is_some_and(|device| !device.is_occupied)
}

/// Returns true if the GPU at an index has one of these minors.
fn has_minor(gpus: &[Device], at: usize, minors: &[u32]) -> bool {
    gpus.get(at).is_some_and(|gpu| minors.contains(&gpu.minor))
}

/// Counts a group of GPUs that are all free in the loss of each of its GPUs.
fn add_loss(losses: &mut [Loss], group: &BTreeSet<usize>) {
    // A GPU that is alone in its group breaks nothing.
    if group.len() < 2 {
        return;
    }
    for at in group {
        let Some(loss) = losses.get_mut(*at) else { continue };
        if group.len() > loss.largest_group {
            (loss.largest_group, loss.n_largest) = (group.len(), 1);
        } else if group.len() == loss.largest_group {
            loss.n_largest += 1;
        }
    }
}

/// Numbers of links between every two candidates of a pool.
#[derive(Debug)]
pub(crate) struct Links {
    n_candidates: usize,
    /// One number for each ordered pair of candidates: that of `one` and `other` is at `one * n_candidates + other`.
    between: Vec<u32>,
}

impl Links {
    /// The links between the candidates of a pool of GPUs; `None` if the node has no links.
    pub(crate) fn new(inventory: &Inventory, pool: &Pool) -> Option<Self> {
        if inventory.links.is_empty() {
            return None;
        }
        let n_candidates = pool.candidates.len();
        let mut links = Self {
            n_candidates,
            between: vec![0; n_candidates * n_candidates],
        };
        for group in &inventory.links {
            let members = pool.select(|one| has_minor(&inventory.gpus, one.device, &group.minors));
            for one in members.members() {
                for other in members.members().filter(|other| *other != one) {
                    if let Some(between) = links.between.get_mut(one * n_candidates + other) {
                        // A pair may be in several groups, and a node may report any number of links for each.
                        *between = between.saturating_add(group.n_links);
                    }
                }
            }
        }
        Some(links)
    }

    /// The fewest and the most links between any two members of a set, and the links of all pairs together; zero for less than
    /// two members.
    pub(crate) fn among(&self, set: CandidateSet) -> (u32, u32, u32) {
        let (mut fewest, mut most, mut sum) = (u32::MAX, 0, 0_u32);
        for one in set.members() {
            // Members come lowest first, so that each pair is counted once.
            for other in set.members().take_while(|other| *other < one) {
                let links = self.between.get(one * self.n_candidates + other);
                let links = links.copied().unwrap_or(0);
                (fewest, most) = (fewest.min(links), most.max(links));
                sum = sum.saturating_add(links);
            }
        }
        if set.len() < 2 {
            (0, 0, 0)
        } else {
            (fewest, most, sum)
        }
    }

    /// Returns true if all pairs of members have the same number of links.
    pub(crate) fn are_equal(&self, set: CandidateSet) -> bool {
        let (fewest, most, _) = self.among(set);
        fewest == most
    }
}
