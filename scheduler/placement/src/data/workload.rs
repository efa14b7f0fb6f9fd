//! The workload: what pods usually ask for, as numbers of pods of each kind and as a sample that represents all of them.
//!
//! A sample is a function of the numbers alone: the kinds lie in line, each as long as it has pods, and the places of the sample
//! are points of this line at equal distances. So each kind has places in proportion to its pods, to within one place, and a pod
//! that comes or goes moves few points from one kind to the next.

use rustc_hash::FxHashMap;

use crate::data::amounts::HostAmounts;
use crate::data::request::RequestedGpus;

/// Number of places in a sample, one for each sampled pod.
pub(crate) const N_PLACES: u8 = 144;

/// The golden ratio as a fraction of 2^64: its multiples, modulo 2^64, are scattered more evenly than random numbers.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// The request of one kind of pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodProfile {
    /// GPUs.
    pub gpus: RequestedGpus,
    /// CPU and memory of the node.
    pub host: HostAmounts,
}

/// The number of pods of each kind.
#[derive(Clone, Debug, Default)]
pub struct Workload {
    counts: FxHashMap<PodProfile, u32>,
    n_pods: u64,
    n_changes: u64,
}

/// A sample of pods: [`N_PLACES`] profiles, or none if there is no pod.
pub(crate) type Sample = Vec<PodProfile>;

impl Workload {
    /// Counts one more pod of this kind, unless it asks for nothing.
    pub fn add(&mut self, profile: PodProfile) {
        // A pod that asks for nothing fits anywhere, so it says nothing about room.
        if !profile.asks_for_gpus() && profile.host == HostAmounts::default() {
            return;
        }
        *self.counts.entry(profile).or_default() += 1;
        self.n_pods += 1;
        self.n_changes += 1;
    }

    /// Counts one pod of this kind less.
    pub fn remove(&mut self, profile: &PodProfile) {
        // A pod that asks for nothing was never counted.
        let Some(count) = self.counts.get_mut(profile) else {
            return;
        };
        *count -= 1;
        if *count == 0 {
            self.counts.remove(profile);
        }
        self.n_pods -= 1;
        self.n_changes += 1;
    }

    /// Number of pods.
    pub fn n_pods(&self) -> u64 {
        self.n_pods
    }

    /// Number of additions and removals so far.
    pub fn n_changes(&self) -> u64 {
        self.n_changes
    }

    /// Returns true if both have the same number of pods of each kind.
    #[cfg(any(test, feature = "check"))]
    pub(crate) fn has_same_pods(&self, other: &Self) -> bool {
        self.n_pods == other.n_pods && self.counts == other.counts
    }

    /// A sample of these pods and of CPU-only pods together. Any part of it is a sample of its own: places next to one
    /// another have kinds from far apart.
    pub(crate) fn sample(&self, cpu_only: &Self) -> Sample {
        let counts = self.counts.iter().chain(&cpu_only.counts);
        let mut kinds: Vec<(&PodProfile, u64)> = counts
            .map(|(profile, count)| (profile, u64::from(*count)))
            .collect();
        // The order of a hash map must not decide which profiles the sample has.
        kinds.sort_unstable();
        let n_pods = self.n_pods + cpu_only.n_pods;
        let mut line = kinds.into_iter();
        let Some((mut profile, mut end)) = line.next() else {
            return Vec::new();
        };
        let mut places = Vec::new();
        for place in 0..u64::from(N_PLACES) {
            // The middle of each place, which favours neither the first nor the last kind.
            let point = (2 * place + 1) * n_pods / (2 * u64::from(N_PLACES));
            while end <= point
                && let Some((next, count)) = line.next()
            {
                (profile, end) = (next, end + count);
            }
            // Sorted by these multiples, places next to one another come from points far apart on the line.
            places.push((place.wrapping_mul(GOLDEN), *profile));
        }
        places.sort_unstable_by_key(|(scattered, _)| *scattered);
        places.into_iter().map(|(_, profile)| profile).collect()
    }
}

impl PodProfile {
    /// Returns true if the pod takes a share or whole GPUs.
    pub(crate) fn asks_for_gpus(&self) -> bool {
        matches!(self.gpus, RequestedGpus::Share(_) | RequestedGpus::Whole(1..))
    }
}

#[cfg(test)]
mod tests;
