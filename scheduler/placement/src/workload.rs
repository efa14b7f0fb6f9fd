//! What pods usually ask for: how many of each kind have been seen, and a sample that stands for all of them.
//!
//! A sample is a function of the numbers alone. It changes little when they do: every place in it holds the winner of a
//! race of its own among all kinds, in which a kind's chance is in proportion to its number, and few races are decided
//! otherwise when a pod comes or goes.

use std::hash::{Hash, Hasher};

use rustc_hash::{FxHashMap, FxHasher};

use crate::host::HostAmounts;
use crate::request::GpuAsk;

/// Places in a sample.
pub(crate) const N_PLACES: usize = 8 * 36;

/// What one kind of pod asks of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Spec {
    /// Of its GPUs.
    pub gpus: GpuAsk,
    /// Of the node itself.
    pub host: HostAmounts,
}

/// How many pods there are of each kind that asks for GPUs.
#[derive(Clone, Debug, Default)]
pub struct Workload {
    counts: FxHashMap<Spec, u32>,
    n_pods: u64,
    n_changes: u64,
}

/// A sample of what pods ask for: as many places as it has, or none if no pod has been seen.
pub(crate) type Sample = Vec<Spec>;

impl Workload {
    /// One more pod of this kind is there.
    pub fn add(&mut self, spec: Spec) {
        if !spec.asks_for_gpus() {
            return;
        }
        *self.counts.entry(spec).or_default() += 1;
        self.n_pods += 1;
        self.n_changes += 1;
    }

    /// One pod of this kind is gone.
    pub fn remove(&mut self, spec: &Spec) {
        let Some(count) = self.counts.get_mut(spec) else { return };
        *count -= 1;
        if *count == 0 {
            self.counts.remove(spec);
        }
        self.n_pods -= 1;
        self.n_changes += 1;
    }

    /// Number of pods.
    pub fn n_pods(&self) -> u64 {
        self.n_pods
    }

    /// How often a pod has come or gone.
    pub fn n_changes(&self) -> u64 {
        self.n_changes
    }

    pub(crate) fn sample(&self) -> Sample {
        let kinds: Vec<(&Spec, u64, f64)> = self.counts.iter().map(|(spec, count)| (spec, spec.mark(), f64::from(*count))).collect();
        let place = |at: u64| {
            let time = |mark: u64, count: f64| -unit(mix(mark ^ mix(at))).ln() / count;
            let timed = kinds.iter().map(|(spec, mark, count)| (time(*mark, *count), *mark, *spec));
            timed.min_by(|one, other| one.0.total_cmp(&other.0).then(one.1.cmp(&other.1))).map(|(.., spec)| *spec)
        };
        (1..).take(N_PLACES).filter_map(place).collect()
    }
}

impl Spec {
    fn asks_for_gpus(&self) -> bool {
        matches!(self.gpus, GpuAsk::Share(_) | GpuAsk::Whole(1..))
    }

    /// A number that tells it from other kinds.
    fn mark(&self) -> u64 {
        let mut hasher = FxHasher::default();
        self.hash(&mut hasher);
        mix(hasher.finish())
    }
}

/// Scatters the bits of a number over all of its bits (the finalizer of `SplitMix64`).
fn mix(number: u64) -> u64 {
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

/// A number between 0 and 1, and neither, from the upper bits.
fn unit(number: u64) -> f64 {
    let upper = u32::try_from(number >> 32).unwrap_or(u32::MAX);
    (f64::from(upper) + 0.5) / (f64::from(u32::MAX) + 1.0)
}

#[cfg(test)]
mod tests;
