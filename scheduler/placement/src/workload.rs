//! What pods usually ask for: how many of each kind have been seen, and a sample that stands for all of them.
//!
//! A sample is a function of the numbers alone: kinds are laid in line, each as long as it has pods, and the places of the
//! sample look at points at equal distances. So each kind has places in proportion to its pods, to within one place, and a
//! pod that comes or goes moves few points from one kind to the next.

use rustc_hash::FxHashMap;

use crate::host::HostAmounts;
use crate::request::GpuAsk;

/// Places in a sample.
pub(crate) const N_PLACES: u8 = 144;

/// The golden ratio, as a part of all numbers: its multiples are scattered more evenly than chance would do.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// What one kind of pod asks of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Spec {
    /// Of its GPUs.
    pub gpus: GpuAsk,
    /// Of the node itself.
    pub host: HostAmounts,
}

/// How many pods there are of each kind.
#[derive(Clone, Debug, Default)]
pub struct Workload {
    counts: FxHashMap<Spec, u32>,
    n_pods: u64,
    n_changes: u64,
}

/// A sample of what pods ask for: as many places as it has, or none if no pod has been seen.
pub(crate) type Sample = Vec<Spec>;

impl Workload {
    /// One more pod of this kind is there; one that asks for nothing is not counted.
    pub fn add(&mut self, spec: Spec) {
        if !spec.asks_for_gpus() && spec.host == HostAmounts::default() {
            return;
        }
        *self.counts.entry(spec).or_default() += 1;
        self.n_pods += 1;
        self.n_changes += 1;
    }

    /// One pod of this kind is gone.
    pub fn remove(&mut self, spec: &Spec) {
        let Some(count) = self.counts.get_mut(spec) else {
            return;
        };
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

    /// Whether there are as many of each kind.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.n_pods == other.n_pods && self.counts == other.counts
    }

    /// A sample of these pods and of those `beside` them. Its parts, too, stand for all: next to one another are kinds from
    /// far apart.
    pub(crate) fn sample(&self, beside: &Self) -> Sample {
        let mut kinds: Vec<(&Spec, u64)> = self
            .counts
            .iter()
            .chain(&beside.counts)
            .map(|(spec, count)| (spec, u64::from(*count)))
            .collect();
        kinds.sort_unstable();
        let n_pods = self.n_pods + beside.n_pods;
        let mut line = kinds.into_iter().scan(0, |end, (spec, count)| {
            *end += count;
            Some((spec, *end))
        });
        let Some(mut kind) = line.next() else {
            return Vec::new();
        };
        let mut places = Vec::new();
        for place in 0..u64::from(N_PLACES) {
            let point = (2 * place + 1) * n_pods / (2 * u64::from(N_PLACES));
            while kind.1 <= point
                && let Some(next) = line.next()
            {
                kind = next;
            }
            places.push((place.wrapping_mul(GOLDEN), *kind.0));
        }
        places.sort_unstable_by_key(|(scattered, _)| *scattered);
        places.into_iter().map(|(_, spec)| spec).collect()
    }
}

impl Spec {
    pub(crate) fn asks_for_gpus(&self) -> bool {
        matches!(self.gpus, GpuAsk::Share(_) | GpuAsk::Whole(1..))
    }
}

#[cfg(test)]
mod tests;
