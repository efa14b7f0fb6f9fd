//! How much of a node's GPUs the pods to come would fill: what a placement costs is what it takes of that.
//!
//! A forecast plays sequences of typical pods, again and again until nothing of them fits. Each pod goes onto the fitting GPUs
//! with least left, as long as the node's CPU and memory last, and what all take together is the node's worth. Every sequence
//! is played twice: as it comes, pods that ask for no GPU included, which take CPU that others need; and the largest first,
//! which need GPUs that nobody has broken yet and would hardly ever find a node before small ones do. All is counted in
//! thousandths of a GPU, of memory and of computing power, so that one step is a few instructions over all GPUs of a node.
//!
//! Besides, it tells how much of what is idle a typical pod could not use where it is: on a node without the CPU, the memory
//! or enough devices for it everything idle, else what is idle on devices that are too full for it. That is the measure of
//! fragmentation by which "Beware of Fragmentation" (USENIX ATC '23) places pods.
//!
//! What was seen so far need not be what comes. So it tells, besides, how much whole GPUs are worth that lie idle on one node,
//! as a pod may come that wants any number of them. They are worth half as much where pods ask for more CPU or memory per GPU
//! than the node has: there these run out first, and other pods will have taken them before GPUs are wanted.
//!
//! An estimate, not a rule: labels, topology, other devices and places for sharers are not looked at, GPUs beyond
//! [`MAX_GPUS`] count as full, and on a node of different models all count as the largest.

use std::cmp::Reverse;

use crate::host::HostAmounts;
use crate::memory::Memory;
use crate::request::{GpuAsk, MemoryAsk};
use crate::workload::{N_PLACES, Sample, Spec};

/// Sequences that are played.
pub(crate) const N_SEQUENCES: u8 = 8;

/// Pods of one sequence: those of a sample are dealt to half of the sequences, as each is played twice.
const LENGTH: usize = 2 * N_PLACES as usize / N_SEQUENCES as usize;

/// Thousandths that whole idle GPUs count for, where CPU and memory suffice. With 200 one mix of sizes in 500 comes to lie on
/// up to three times the nodes that it needs, with 300 none of 1,000 (`tests/engine/nodes_used.rs`); with 400 openb's default
/// list loses another quarter of a point (`laboratory replay`).
const CAUTION: u64 = 300;

/// Thousandths of a GPU.
pub(crate) const WHOLE: i16 = 1000;

/// GPUs of one node that are counted.
pub(crate) const MAX_GPUS: usize = LANES * 8;

/// GPUs that are compared at once.
const LANES: usize = 8;

/// What the GPUs of a node are like, as far as typical pods need to be told in thousandths of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Model {
    /// Memory of one GPU.
    pub(crate) memory: Memory,
    /// Bytes of one memory unit.
    pub(crate) unit_bytes: Option<u64>,
}

/// Sequences of typical pods for one model of GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Forecast {
    /// Each kind of pod that asks for GPUs, once, and how many places of the sample it has.
    kinds: Vec<(Step, u32)>,
    sequences: Vec<Sequence>,
    /// CPU and memory that pods ask for with each GPU, those that ask for no GPU included.
    beside_gpu: HostAmounts,
}

/// Pods that come one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Sequence {
    /// At most 64; each with the places of those that are alike, a bit for each.
    steps: Vec<(Step, u64)>,
    /// The places of pods that ask for GPUs.
    with_gpus: u64,
}

/// A pod of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Step {
    cpu_milli: u64,
    host_memory: u64,
    part: Part,
    n_gpus: u16,
}

/// Thousandths of one GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) memory: i16,
    pub(crate) core: i16,
}

/// What is free of the GPUs of a node, in thousandths.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lanes {
    n: u32,
    n_blocks: usize,
    blocks: [Block; MAX_GPUS / LANES],
}

#[derive(Clone, Copy, Debug)]
struct Block {
    memory: [i16; LANES],
    core: [i16; LANES],
}

/// A lane that nothing fits.
const FULL: Block = Block {
    memory: [-1; LANES],
    core: [-1; LANES],
};

impl Part {
    /// What counts as taken: the dimension of which more is.
    pub(crate) fn size(self) -> i16 {
        self.memory.max(self.core)
    }
}

impl Forecast {
    /// The sequences of a sample, for one model.
    pub(crate) fn of(sample: &Sample, model: Model) -> Self {
        let parts = sample
            .chunks(LENGTH)
            .map(|specs| specs.iter().filter_map(|spec| Step::of(spec, model)));
        let mut kinds: Vec<(Step, u32)> = Vec::new();
        for step in sample
            .iter()
            .filter_map(|spec| Step::of(spec, model))
            .filter(|step| step.n_gpus > 0)
        {
            match kinds.iter_mut().find(|(kind, _)| *kind == step) {
                Some((_, n)) => *n += 1,
                None => kinds.push((step, 1)),
            }
        }
        let sequences = parts
            .flat_map(|steps| {
                [
                    Sequence::as_they_come(steps.clone()),
                    Sequence::largest_first(steps),
                ]
            })
            .collect();
        Self {
            beside_gpu: beside_gpu(sample, &kinds),
            kinds,
            sequences,
        }
    }

    /// Thousandths of GPUs that are idle and that a typical pod could not use, for as many typical pods as there are sequences.
    pub(crate) fn fragment(&self, lanes: &Lanes, host: HostAmounts) -> u32 {
        let (mut sum, mut n_pods) = (0, 0);
        for (kind, n) in &self.kinds {
            sum += u64::from(*n) * u64::from(lanes.useless(kind, host));
            n_pods += u64::from(*n);
        }
        u32::try_from((sum * u64::from(N_SEQUENCES)).checked_div(n_pods).unwrap_or(0)).unwrap_or(u32::MAX)
    }

    /// Thousandths that whole idle GPUs of a node count for, of so many GPUs and with this CPU and memory.
    pub(crate) fn caution(&self, n_gpus: usize, host: Option<HostAmounts>) -> u64 {
        let n_gpus = u64::try_from(n_gpus).unwrap_or(u64::MAX);
        let HostAmounts { cpu_milli, memory } = self.beside_gpu;
        let suffices = |host: HostAmounts| {
            cpu_milli.saturating_mul(n_gpus) <= host.cpu_milli && memory.saturating_mul(n_gpus) <= host.memory
        };
        if host.is_none_or(suffices) {
            CAUTION
        } else {
            CAUTION / 2
        }
    }

    /// Thousandths of GPUs that all sequences together take of a node.
    pub(crate) fn worth(&self, lanes: &Lanes, host: HostAmounts) -> u32 {
        self.sequences
            .iter()
            .map(|sequence| sequence.play(*lanes, host))
            .sum()
    }
}

/// CPU and memory that all pods of a sample ask for, per GPU that those of these kinds ask for.
fn beside_gpu(sample: &Sample, kinds: &[(Step, u32)]) -> HostAmounts {
    let gpus: u128 = kinds
        .iter()
        .map(|(step, n)| u128::from(step.size()) * u128::from(*n))
        .sum();
    let per_gpu = |amount: fn(&Spec) -> u64| {
        let all: u128 = sample.iter().map(|spec| u128::from(amount(spec))).sum();
        (all * 1000)
            .checked_div(gpus)
            .map_or(0, |each| u64::try_from(each).unwrap_or(u64::MAX))
    };
    HostAmounts {
        cpu_milli: per_gpu(|spec| spec.host.cpu_milli),
        memory: per_gpu(|spec| spec.host.memory),
    }
}

impl Sequence {
    fn as_they_come(steps: impl Iterator<Item = Step>) -> Self {
        let steps: Vec<Step> = steps.take(LENGTH).collect();
        let places = |is_meant: &dyn Fn(&Step) -> bool| {
            (0..)
                .zip(&steps)
                .filter(|(_, step)| is_meant(step))
                .fold(0, |places, (at, _)| places | 1 << at)
        };
        let with_gpus = places(&|step| step.n_gpus > 0);
        let with_alike = steps.iter().map(|step| (*step, places(&|other| other == step)));
        Self {
            steps: with_alike.collect(),
            with_gpus,
        }
    }

    fn largest_first(steps: impl Iterator<Item = Step>) -> Self {
        let mut steps: Vec<Step> = steps.filter(|step| step.n_gpus > 0).collect();
        steps.sort_by_key(|step| Reverse(step.size()));
        Self::as_they_come(steps.into_iter())
    }

    /// Thousandths of GPUs that it takes, played until none of it fits.
    fn play(&self, mut lanes: Lanes, mut host: HostAmounts) -> u32 {
        let (mut taken, mut most) = (0, lanes.most());
        // What did not fit never will: nothing is given back.
        let mut fitting = u64::MAX
            .checked_shr(u64::BITS - u32::try_from(self.steps.len()).unwrap_or(0))
            .unwrap_or(0);
        while fitting & self.with_gpus != 0 {
            let mut round = fitting;
            while round != 0 {
                let Some((step, alike)) = self.steps.get(round.trailing_zeros() as usize) else {
                    break;
                };
                round &= round - 1;
                if step.is_taken(&mut lanes, &mut host, most) {
                    taken += step.size();
                    most = lanes.most();
                } else {
                    fitting &= !alike;
                    round &= !alike;
                }
            }
        }
        taken
    }
}

impl Step {
    /// Takes it of a node, on no GPU of which more memory is free than this, if it fits.
    #[inline]
    fn is_taken(&self, lanes: &mut Lanes, host: &mut HostAmounts, most: i16) -> bool {
        let fits =
            host.cpu_milli >= self.cpu_milli && host.memory >= self.host_memory && most >= self.part.memory;
        if !fits || (self.n_gpus > 0 && lanes.take_tightest(self.part, self.n_gpus) == 0) {
            return false;
        }
        host.cpu_milli -= self.cpu_milli;
        host.memory -= self.host_memory;
        true
    }

    /// Thousandths of all its GPUs together.
    fn size(&self) -> u32 {
        u32::from(self.n_gpus) * u32::from(self.part.size().unsigned_abs())
    }

    /// `None` if no GPU of the model can take it.
    fn of(spec: &Spec, model: Model) -> Option<Self> {
        let none = (Part::default(), 0);
        let (part, n_gpus) = if spec.asks_for_gpus() {
            part_of(spec.gpus, model)?
        } else {
            none
        };
        let HostAmounts {
            cpu_milli,
            memory: host_memory,
        } = spec.host;
        Some(Self {
            cpu_milli,
            host_memory,
            part,
            n_gpus,
        })
    }
}

/// Thousandths of each of so many GPUs; `None` if that is more than a GPU, or nothing.
fn part_of(gpus: GpuAsk, model: Model) -> Option<(Part, u16)> {
    match gpus {
        GpuAsk::Whole(n) => Some((
            Part {
                memory: WHOLE,
                core: WHOLE,
            },
            u16::try_from(n).ok().filter(|n| *n > 0)?,
        )),
        GpuAsk::Share(request) => {
            let memory = match request.memory {
                MemoryAsk::Ratio(percent) => i16::try_from(percent.checked_mul(10)?).ok()?,
                ask => thousandths_up(ask.on(model.memory, model.unit_bytes)?, model.memory)?,
            };
            let core = i16::try_from(request.core.checked_mul(10)?).ok()?;
            let part = Part { memory, core };
            (memory > 0 && part.size() <= WHOLE).then_some((part, u16::try_from(request.devices).ok()?))
        }
        GpuAsk::All { .. } | GpuAsk::Nothing => None,
    }
}

/// How many thousandths of `total` an amount is, rounded up.
pub(crate) fn thousandths_up(amount: Memory, total: Memory) -> Option<i16> {
    let scaled = u128::from(amount.hundredths()) * 1000;
    i16::try_from(
        scaled.checked_add(u128::from(total.hundredths()).checked_sub(1)?)? / u128::from(total.hundredths()),
    )
    .ok()
}

/// How many thousandths of `total` an amount is, rounded down and at most a whole.
pub(crate) fn thousandths_down(amount: u64, total: u64) -> i16 {
    let scaled = match amount.checked_mul(1000) {
        Some(scaled) => scaled.checked_div(total).unwrap_or(0),
        None => amount.checked_div(total.div_ceil(1000)).unwrap_or(0),
    };
    i16::try_from(scaled).unwrap_or(WHOLE).min(WHOLE)
}

impl Lanes {
    /// What is free of each GPU of a node.
    pub(crate) fn of(parts: impl Iterator<Item = Part>) -> Self {
        let mut lanes = Self {
            n: 0,
            n_blocks: 0,
            blocks: [FULL; MAX_GPUS / LANES],
        };
        for (at, part) in parts.enumerate().take(MAX_GPUS) {
            lanes.n += 1;
            lanes.n_blocks = at / LANES + 1;
            lanes.set(at, part);
        }
        lanes
    }

    pub(crate) fn get(&self, at: usize) -> Option<Part> {
        let block = self.blocks.get(at / LANES)?;
        Some(Part {
            memory: *block.memory.get(at % LANES)?,
            core: *block.core.get(at % LANES)?,
        })
    }

    fn set(&mut self, at: usize, part: Part) {
        let Some(block) = self.blocks.get_mut(at / LANES) else {
            return;
        };
        if let (Some(memory), Some(core)) = (block.memory.get_mut(at % LANES), block.core.get_mut(at % LANES))
        {
            (*memory, *core) = (part.memory, part.core);
        }
    }

    /// Takes a part of one GPU, as much as there is.
    pub(crate) fn take(&mut self, at: usize, part: Part) {
        if let Some(free) = self.get(at) {
            self.set(
                at,
                Part {
                    memory: (free.memory - part.memory).max(0),
                    core: (free.core - part.core).max(0),
                },
            );
        }
    }

    /// The most that is free of the memory of one GPU.
    fn most(&self) -> i16 {
        let blocks = self.blocks.iter().take(self.n_blocks);
        blocks.flat_map(|block| block.memory).max().unwrap_or(0)
    }

    /// Thousandths of GPUs that those of which nothing is taken are worth together: their number squared, in parts of the
    /// number of all. So a node that is idle counts for all its GPUs, and half of it for a quarter of them.
    pub(crate) fn idle(&self) -> u64 {
        let blocks = self.blocks.iter().take(self.n_blocks);
        let parts = blocks.flat_map(|block| block.memory.iter().zip(&block.core));
        let n_idle: u64 = parts
            .map(|(memory, core)| u64::from(*memory == WHOLE && *core == WHOLE))
            .sum();
        (n_idle * n_idle * u64::from(WHOLE.unsigned_abs()))
            .checked_div(u64::from(self.n))
            .unwrap_or(0)
    }

    /// Thousandths that are free of the GPUs, of whichever dimension there is less.
    pub(crate) fn free(&self) -> u32 {
        let blocks = self.blocks.iter().take(self.n_blocks);
        let parts = blocks.flat_map(|block| block.memory.iter().zip(&block.core));
        parts
            .map(|(memory, core)| u32::from((*memory).min(*core).max(0).unsigned_abs()))
            .sum()
    }

    /// Thousandths that are free and of no use to a pod.
    fn useless(&self, pod: &Step, host: HostAmounts) -> u32 {
        let (mut n_fitting, mut too_full) = (0, 0);
        for block in self.blocks.iter().take(self.n_blocks) {
            for (memory, core) in block.memory.iter().zip(&block.core) {
                let fits = *memory >= pod.part.memory && *core >= pod.part.core;
                n_fitting += u16::from(fits);
                too_full += if fits {
                    0
                } else {
                    u32::from((*memory).min(*core).max(0).unsigned_abs())
                };
            }
        }
        let has_room =
            n_fitting >= pod.n_gpus && host.cpu_milli >= pod.cpu_milli && host.memory >= pod.host_memory;
        if has_room { too_full } else { self.free() }
    }

    /// Takes a part of so many GPUs, those with least left, if so many fit; how many were taken.
    fn take_tightest(&mut self, part: Part, n: u16) -> u32 {
        if n == 1 {
            let Some(at) = self.tightest(part) else { return 0 };
            self.take(at, part);
            return 1;
        }
        let before = *self;
        for _ in 0..n {
            let Some(at) = self.tightest(part) else {
                *self = before;
                return 0;
            };
            // Taken out of sight, so that no GPU is taken twice.
            self.set(at, Part { memory: -1, core: -1 });
        }
        for at in 0..self.n_blocks * LANES {
            if let (Some(free), Some(Part { memory: -1, .. })) =
                (before.get(at).filter(|free| free.memory >= 0), self.get(at))
            {
                self.set(
                    at,
                    Part {
                        memory: free.memory - part.memory,
                        core: free.core - part.core,
                    },
                );
            }
        }
        u32::from(n)
    }

    /// The fitting GPU with least left; the first of several.
    #[inline]
    fn tightest(&self, part: Part) -> Option<usize> {
        let mut best: Option<(i16, usize)> = None;
        for (nth, block) in self.blocks.iter().enumerate().take(self.n_blocks) {
            let key = block.least(part);
            if key < i16::MAX && best.is_none_or(|(best, _)| key >> 3 < best >> 3) {
                best = Some((key, nth));
            }
        }
        best.map(|(key, nth)| nth * LANES + usize::from(key.unsigned_abs() & 7))
    }
}

impl Block {
    /// What is left of the fitting GPU with least left, in eighths with its place; the largest number if none fits.
    #[inline]
    fn least(&self, part: Part) -> i16 {
        const PLACES: [i16; LANES] = [0, 1, 2, 3, 4, 5, 6, 7];
        let mut least = i16::MAX;
        for ((memory, core), place) in self.memory.iter().zip(&self.core).zip(PLACES) {
            let fits = *memory >= part.memory && *core >= part.core;
            // Thousandths of two dimensions, in eighths: below 16,008.
            let key = if fits {
                (memory + core) * 8 + place
            } else {
                i16::MAX
            };
            least = least.min(key);
        }
        least
    }
}

#[cfg(test)]
mod tests;
