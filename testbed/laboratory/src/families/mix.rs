//! Mixes of pods: their sizes, and the frequency of each size.

use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;

use crate::replay::portion::{floor, real};
use crate::replay::trace::{PERCENT, WHOLE};

/// The shares of a GPU that people ask for, in thousandths.
const SHARES: [i64; 14] = [50, 80, 100, 120, 150, 200, 250, 300, 330, 400, 500, 600, 750, 800];
/// The numbers of whole GPUs of one pod, and the relative frequency of each.
const WHOLES: [(usize, u32); 4] = [(1, 60), (2, 20), (4, 12), (8, 8)];
/// Host memory that a node has for each of its GPUs, in MiB.
const MEMORY_OF_GPU: i64 = 64 << 10;

/// The request of one pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PodSize {
    /// The number of GPUs.
    pub gpus: usize,
    /// Thousandths of each of these GPUs.
    pub milli: i64,
    /// Thousandths of a CPU.
    pub cpu_milli: i64,
    /// Host memory in MiB.
    pub memory_mib: i64,
    /// True if it asks for its whole GPUs by a vendor's resource, such as `nvidia.com/gpu`.
    pub is_vendor: bool,
}

/// Sizes of pods, each with its relative frequency.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mix(Vec<(PodSize, u32)>);

/// The distributions that a mix is drawn from.
#[derive(Clone, Copy, Debug)]
pub struct MixRules {
    /// Thousandths of a CPU that a node has for each of its GPUs.
    pub cpu_of_gpu: i64,
    /// The most GPUs that a node has.
    pub most_gpus: usize,
    /// The part of its GPU's CPUs that a pod asks for, in percent: the least and the most.
    pub cpu_percent: (i64, i64),
}

impl PodSize {
    /// GPU thousandths in all.
    pub fn demand(&self) -> i64 {
        i64::try_from(self.gpus).unwrap_or(0) * self.milli
    }

    /// A size of pods with GPUs; CPU and memory are drawn by the rules of the mix.
    fn of(gpus: usize, milli: i64, habits: MixRules, dice: &mut StdRng) -> Self {
        let demand = i64::try_from(gpus).unwrap_or(0) * milli;
        let part = dice.random_range(habits.cpu_percent.0..=habits.cpu_percent.1);
        let cpu_milli = (demand * habits.cpu_of_gpu * part / (100 * WHOLE)).max(100);
        Self {
            gpus,
            milli,
            cpu_milli,
            // Half of the host memory that belongs to its GPUs: no pod fails for want of host memory.
            memory_mib: MEMORY_OF_GPU * demand / (2 * WHOLE),
            is_vendor: false,
        }
    }
}

impl Mix {
    /// A mix of one size of share.
    pub fn of_one(milli: i64, habits: MixRules, dice: &mut StdRng) -> Self {
        Self(vec![(PodSize::of(1, milli, habits, dice), 1)])
    }

    /// A mix of three to five sizes of shares.
    pub fn of_shares(habits: MixRules, dice: &mut StdRng) -> Self {
        let n = dice.random_range(3..=5);
        let share = |_| {
            let milli = SHARES.choose(dice).copied().unwrap_or(WHOLE);
            (PodSize::of(1, milli, habits, dice), dice.random_range(1..=4))
        };
        Self((0..n).map(share).collect())
    }

    /// A mix of pods with one to eight whole GPUs.
    pub fn of_whole(habits: MixRules, dice: &mut StdRng) -> Self {
        let fitting = WHOLES.iter().filter(|(n, _)| *n <= habits.most_gpus);
        Self(
            fitting
                .map(|(n, often)| {
                    (
                        PodSize::of(*n, WHOLE, habits, dice),
                        often * dice.random_range(50..=200) / 100,
                    )
                })
                .collect(),
        )
    }

    /// A mix of pods with as many GPUs as the largest node has.
    pub fn of_nodes(habits: MixRules, dice: &mut StdRng) -> Self {
        Self(vec![(PodSize::of(habits.most_gpus, WHOLE, habits, dice), 1)])
    }

    /// A mix of all parts of one GPU from 5 to 100 %, equally frequent.
    pub fn of_any(habits: MixRules, dice: &mut StdRng) -> Self {
        Self(
            (5..=100)
                .map(|percent| (PodSize::of(1, percent * PERCENT, habits, dice), 1))
                .collect(),
        )
    }

    /// A mix of pods that ask for no GPU.
    pub fn of_plain(habits: MixRules, dice: &mut StdRng) -> Self {
        let plain = |_| {
            let cpu_milli = habits.cpu_of_gpu * dice.random_range(5..=50) / 100;
            (
                PodSize {
                    gpus: 0,
                    milli: 0,
                    cpu_milli,
                    memory_mib: MEMORY_OF_GPU / 8,
                    is_vendor: false,
                },
                1,
            )
        };
        Self((0..3).map(plain).collect())
    }

    /// This mix with a percentage of pods of another.
    #[must_use]
    pub fn with(self, other: Self, percent: u32) -> Self {
        let (own, others) = (self.n(), other.n());
        let scaled = |mix: Self, by: u32| mix.0.into_iter().map(move |(size, often)| (size, often * by));
        Self(
            // The weights of the two mixes have different sums, so each mix is scaled by the other's sum.
            scaled(self, others * (100 - percent))
                .chain(scaled(other, own * percent))
                .collect(),
        )
    }

    /// The same mix, in which pods of whole GPUs ask for the vendor's resource.
    #[must_use]
    pub fn by_vendor(mut self) -> Self {
        for (size, _) in &mut self.0 {
            size.is_vendor = size.gpus > 0 && size.milli == WHOLE;
        }
        self
    }

    /// A random pod of this mix; `None` if it has no sizes.
    pub fn draw(&self, dice: &mut StdRng) -> Option<PodSize> {
        let mut at = dice.random_range(0..self.n().max(1));
        let found = self.0.iter().find(|(_, often)| {
            let is_here = at < *often;
            at = at.saturating_sub(*often);
            is_here
        });
        found.map(|(size, _)| *size)
    }

    /// GPU thousandths of a pod on average, at least one.
    pub fn mean(&self) -> i64 {
        let sum: i64 = self
            .0
            .iter()
            .map(|(size, often)| size.demand() * i64::from(*often))
            .sum();
        floor(real(sum) / real(i64::from(self.n().max(1)))).max(1)
    }

    /// The sum of the weights of all sizes.
    fn n(&self) -> u32 {
        self.0.iter().map(|(_, often)| often).sum()
    }
}
