//! Mixes of pods: their sizes, and the frequency of each size.

use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;

use crate::replay::trace::{PERCENT, WHOLE};

/// The shares of a GPU that people ask for, in thousandths.
const SHARES: [i64; 14] = [50, 80, 100, 120, 150, 200, 250, 300, 330, 400, 500, 600, 750, 800];
/// The numbers of whole GPUs of one pod, and the relative frequency of each.
const WHOLES: [(usize, u32); 4] = [(1, 60), (2, 20), (4, 12), (8, 8)];
/// The number of GPUs of the largest nodes.
pub const GPUS: usize = 8;
/// Host memory that a node has for each of its GPUs, in MiB.
const HOST_MIB_PER_GPU: i64 = 64 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PodSize {
    pub gpus: usize,
    pub milli: i64,
    pub cpu_milli: i64,
    pub memory_mib: i64,
    /// True if it asks for its whole GPUs by a vendor's resource, such as `nvidia.com/gpu`.
    pub wants_vendor_resource: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mix(Vec<(PodSize, u32)>);

#[derive(Clone, Copy, Debug)]
pub struct MixRules {
    /// Thousandths of a CPU that a node has for each of its GPUs.
    pub cpu_of_gpu: i64,
    /// The part of its GPU's CPUs that a pod asks for, in percent: the least and the most.
    pub cpu_percent: (i64, i64),
}

impl PodSize {
    pub fn demand(&self) -> i64 {
        i64::try_from(self.gpus).unwrap_or(0) * self.milli
    }

    /// A size of pods with GPUs; CPU and memory are drawn by the rules of the mix.
    fn of(gpus: usize, milli: i64, rules: MixRules, dice: &mut StdRng) -> Self {
        let demand = i64::try_from(gpus).unwrap_or(0) * milli;
        let part = dice.random_range(rules.cpu_percent.0..=rules.cpu_percent.1);
        let cpu_milli = (demand * rules.cpu_of_gpu * part / (100 * WHOLE)).max(100);
        Self {
            gpus,
            milli,
            cpu_milli,
            // Half of the host memory that belongs to its GPUs: no pod fails for want of host memory.
            memory_mib: HOST_MIB_PER_GPU * demand / (2 * WHOLE),
            wants_vendor_resource: false,
        }
    }
}

impl Mix {
    /// A mix in which all pods ask for the same part of one GPU, or for one whole GPU.
    pub fn of_one(milli: i64, rules: MixRules, dice: &mut StdRng) -> Self {
        Self(vec![(PodSize::of(1, milli, rules, dice), 1)])
    }

    /// A mix of three to five sizes of shares.
    pub fn of_shares(rules: MixRules, dice: &mut StdRng) -> Self {
        let mut sizes = Vec::new();
        for _ in 0..dice.random_range(3..=5) {
            let milli = SHARES.choose(dice).copied().unwrap_or(WHOLE);
            sizes.push((PodSize::of(1, milli, rules, dice), dice.random_range(1..=4)));
        }
        Self(sizes)
    }

    pub fn of_whole(rules: MixRules, dice: &mut StdRng) -> Self {
        Self(
            WHOLES
                .map(|(n, weight)| {
                    let size = PodSize::of(n, WHOLE, rules, dice);
                    (size, weight * dice.random_range(50..=200) / 100)
                })
                .into(),
        )
    }

    /// A mix of pods with as many GPUs as the largest node has.
    pub fn of_nodes(rules: MixRules, dice: &mut StdRng) -> Self {
        Self(vec![(PodSize::of(GPUS, WHOLE, rules, dice), 1)])
    }

    /// A mix of all parts of one GPU from 5 to 100 %, equally frequent.
    pub fn of_any(rules: MixRules, dice: &mut StdRng) -> Self {
        let sizes = (5..=100).map(|percent| (PodSize::of(1, percent * PERCENT, rules, dice), 1));
        Self(sizes.collect())
    }

    pub fn of_plain(rules: MixRules, dice: &mut StdRng) -> Self {
        let sizes = [(); 3].map(|()| PodSize {
            gpus: 0,
            milli: 0,
            cpu_milli: rules.cpu_of_gpu * dice.random_range(5..=50) / 100,
            memory_mib: HOST_MIB_PER_GPU / 8,
            wants_vendor_resource: false,
        });
        Self(sizes.map(|size| (size, 1)).into())
    }

    /// This mix, in which `percent` of the pods are of another mix instead.
    #[must_use]
    pub fn with(self, other: Self, percent: u32) -> Self {
        let (own_weight, other_weight) = (self.total_weight(), other.total_weight());
        let mut sizes = Vec::new();
        // The weights of the two mixes have different sums, so each mix is scaled by the other's sum.
        for (mix, by) in [
            (self, other_weight * (100 - percent)),
            (other, own_weight * percent),
        ] {
            sizes.extend(mix.0.into_iter().map(|(size, weight)| (size, weight * by)));
        }
        Self(sizes)
    }

    /// The same mix, in which pods of whole GPUs ask for the vendor's resource.
    #[must_use]
    pub fn by_vendor(mut self) -> Self {
        for (size, _) in &mut self.0 {
            size.wants_vendor_resource = size.gpus > 0 && size.milli == WHOLE;
        }
        self
    }

    /// A random size, in proportion to the weights; `None` if the mix has no sizes.
    pub fn draw(&self, dice: &mut StdRng) -> Option<PodSize> {
        let mut left = dice.random_range(0..self.total_weight().max(1));
        for (size, weight) in &self.0 {
            if left < *weight {
                return Some(*size);
            }
            left -= weight;
        }
        None
    }

    /// GPU thousandths of a pod on average; at least one, since callers divide by it.
    pub fn mean(&self) -> i64 {
        let demands = self
            .0
            .iter()
            .map(|(size, weight)| size.demand() * i64::from(*weight));
        (demands.sum::<i64>() / i64::from(self.total_weight().max(1))).max(1)
    }

    fn total_weight(&self) -> u32 {
        self.0.iter().map(|(_, weight)| weight).sum()
    }
}
