//! Simulation of pods to come: how much of a node's GPUs typical pods would fill, which is the node's value.
//!
//! The sample of the workload is cut into parts, and each part makes two sequences of pods: one in the order of the sample, and
//! one largest first. The pods of a sequence are placed on the node again and again until none fits, each on the fitting GPUs
//! with the least free, as long as the node's CPU and memory last. The sum of all that the sequences take is the value, in
//! thousandths of a GPU, of memory and of computing power, so that one step is a few instructions over all GPUs of a node.
//!
//! The results are estimates. Labels, topology, other devices and slots are ignored, GPUs beyond [`MAX_GPUS`] count as full, and
//! on a node of different models every GPU counts as the largest.

use std::cmp::Reverse;

use crate::data::amounts::{HostAmounts, Memory};
use crate::data::inventory::GpuModel;
use crate::data::request::{RequestedGpus, RequestedMemory};
use crate::data::workload::{N_PLACES, PodProfile, Sample};

/// Number of simulated sequences.
pub(crate) const N_SEQUENCES: u8 = 8;

/// Number of pods in one sequence: each part of the sample makes two sequences, so there are half as many parts as sequences.
const SEQUENCE_LENGTH: usize = 2 * N_PLACES as usize / N_SEQUENCES as usize;
const _: () = assert!(
    SEQUENCE_LENGTH <= u64::BITS as usize,
    "a sequence has a bit for each pod"
);

/// Weight of whole idle GPUs in thousandths, where CPU and memory suffice. With 200, one of 500 random mixes of pod sizes takes
/// up to three times the nodes that it needs; with 300, none of 1,000 does (`tests/engine/nodes_used.rs`). With 400, the default
/// pod list of the openb trace fills 0.25 percentage points less of the GPUs than with 300.
const IDLE_WEIGHT: u64 = 300;

/// A whole GPU, in thousandths.
pub(crate) const WHOLE: i16 = 1000;

/// Most GPUs of one node that count.
pub(crate) const MAX_GPUS: usize = LANES * 8;

/// GPUs that are compared at once.
const LANES: usize = 8;

/// Sequences of typical pods for one model of GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Simulation {
    /// Each kind of pod that asks for GPUs, with the number of pods of this kind in the sample.
    kinds: Vec<(SimulatedPod, u32)>,
    sequences: Vec<Sequence>,
    /// CPU and memory that pods ask for per GPU, CPU-only pods included.
    host_per_gpu: HostAmounts,
    /// True if memory is the larger part that each kind takes of a GPU, and so the size of the kind.
    is_sized_by_memory: bool,
}

/// The simulation without any pods.
pub(crate) static NO_PODS: Simulation = Simulation {
    kinds: Vec::new(),
    sequences: Vec::new(),
    host_per_gpu: HostAmounts {
        cpu_milli: 0,
        memory: 0,
    },
    is_sized_by_memory: true,
};

/// Pods that arrive one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Sequence {
    /// The pods in order, each with the bits of the pods that are equal to it: bit n is that of pod n.
    pods: Vec<(SimulatedPod, u64)>,
    /// The bits of the pods that ask for GPUs.
    with_gpus: u64,
}

/// A pod that the simulation places, by the amounts that it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SimulatedPod {
    cpu_milli: u64,
    host_memory: u64,
    /// The part that the pod takes of each of its GPUs.
    part: GpuPart,
    n_gpus: u16,
}

/// A part of one GPU, in thousandths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct GpuPart {
    pub(crate) memory: i16,
    pub(crate) core: i16,
}

impl GpuPart {
    /// A whole GPU.
    pub(crate) const WHOLE: Self = Self {
        memory: WHOLE,
        core: WHOLE,
    };

    /// The part that counts as taken: the larger dimension.
    pub(crate) fn size(self) -> i16 {
        self.memory.max(self.core)
    }

    /// The part that counts as idle: the smaller dimension, at least zero.
    fn idle(self) -> u32 {
        u32::from(self.memory.min(self.core).max(0).unsigned_abs())
    }
}

/// The free parts of the GPUs of a node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FreeGpus {
    /// Number of GPUs that count, at most [`MAX_GPUS`].
    n_gpus: u32,
    /// Number of blocks that have any of these GPUs.
    n_blocks: usize,
    // Of a fixed size, so that each trial on a copy of the node needs no allocation.
    blocks: [Block; MAX_GPUS / LANES],
}

/// The free parts of eight GPUs, laid out for vector instructions.
#[derive(Clone, Copy, Debug)]
struct Block {
    // Thousandths fit in 16 bits, so that a vector register of 128 bits compares eight GPUs at once.
    memory: [i16; LANES],
    core: [i16; LANES],
}

/// A block of GPUs on which no pod fits.
// Less than nothing is free, so that even a pod that asks for no computing power does not fit.
const FULL: Block = Block {
    memory: [-1; LANES],
    core: [-1; LANES],
};

impl Simulation {
    /// The sequences of a sample, for one model of GPU.
    pub(crate) fn new(sample: &Sample, model: GpuModel) -> Self {
        let mut kinds: Vec<(SimulatedPod, u32)> = Vec::new();
        for profile in sample {
            let Some(pod) = SimulatedPod::new(profile, model).filter(|pod| pod.n_gpus > 0) else {
                continue;
            };
            match kinds.iter_mut().find(|(kind, _)| *kind == pod) {
                Some((_, n)) => *n += 1,
                None => kinds.push((pod, 1)),
            }
        }
        let mut sequences = Vec::with_capacity(usize::from(N_SEQUENCES));
        for profiles in sample.chunks(SEQUENCE_LENGTH) {
            // Pods that no GPU of the model can take say nothing about its nodes.
            let pods = profiles.iter();
            let pods = pods.filter_map(|profile| SimulatedPod::new(profile, model));
            let in_order: Vec<SimulatedPod> = pods.collect();
            // Large pods lose to small ones that arrive earlier, and to CPU-only pods that take their node's CPU: sorted by
            // size and without the latter, the sequence shows what the node is worth to large pods.
            let mut largest_first: Vec<SimulatedPod> =
                in_order.iter().copied().filter(|pod| pod.n_gpus > 0).collect();
            largest_first.sort_by_key(|pod| Reverse(pod.size()));
            sequences.push(Sequence::new(&in_order));
            sequences.push(Sequence::new(&largest_first));
        }
        Self {
            host_per_gpu: host_per_gpu(sample, &kinds),
            is_sized_by_memory: kinds.iter().all(|(kind, _)| kind.part.core <= kind.part.memory),
            kinds,
            sequences,
        }
    }

    /// Thousandths of GPUs that all sequences together take of a node.
    pub(crate) fn value(&self, gpus: &FreeGpus, host: HostAmounts) -> u32 {
        let mut value = 0;
        for sequence in &self.sequences {
            value += sequence.simulate(*gpus, host);
        }
        value
    }

    /// The value is at most this, which takes no simulation: no sequence takes more than is free. Free memory and core count
    /// both, unless the memory of each kind of pod is its size.
    pub(crate) fn most_value(&self, gpus: &FreeGpus) -> u32 {
        let mut most = 0;
        for part in gpus.parts() {
            let core = if self.is_sized_by_memory { 0 } else { part.core };
            most += u32::from(part.memory.max(0).unsigned_abs()) + u32::from(core.max(0).unsigned_abs());
        }
        most * u32::from(N_SEQUENCES)
    }

    /// Idle thousandths of GPUs that are of no use to a typical pod, summed over as many pods as there are sequences. "Beware of
    /// Fragmentation" (USENIX ATC '23) places pods by this measure.
    pub(crate) fn unusable(&self, gpus: &FreeGpus, host: HostAmounts) -> u32 {
        let (mut sum, mut n_pods) = (0, 0);
        // Equal pods are counted once, as a sample has few kinds.
        for (kind, n) in &self.kinds {
            sum += u64::from(*n) * u64::from(gpus.unusable_to(kind, host));
            n_pods += u64::from(*n);
        }
        // Without any pods that ask for GPUs, nothing counts as unusable.
        u32::try_from((sum * u64::from(N_SEQUENCES)).checked_div(n_pods).unwrap_or(0)).unwrap_or(u32::MAX)
    }

    /// Weight in thousandths of whole idle GPUs, for pods unlike those seen so far, on a node with this number of GPUs, CPU and
    /// memory. Half of it where pods ask for more CPU or memory per GPU than the node has: there these run out first.
    pub(crate) fn idle_weight(&self, n_gpus: usize, host: Option<HostAmounts>) -> u64 {
        let n_gpus = u64::try_from(n_gpus).unwrap_or(u64::MAX);
        let HostAmounts { cpu_milli, memory } = self.host_per_gpu;
        let Some(host) = host else {
            return IDLE_WEIGHT;
        };
        let has_cpu = cpu_milli.saturating_mul(n_gpus) <= host.cpu_milli;
        let has_memory = memory.saturating_mul(n_gpus) <= host.memory;
        if has_cpu && has_memory {
            IDLE_WEIGHT
        } else {
            IDLE_WEIGHT / 2
        }
    }
}

/// CPU and memory of all pods of a sample, per GPU that the pods of these kinds ask for.
fn host_per_gpu(sample: &Sample, kinds: &[(SimulatedPod, u32)]) -> HostAmounts {
    let (mut thousandths, mut cpu_milli, mut memory) = (0_u128, 0_u128, 0_u128);
    for (pod, n) in kinds {
        thousandths += u128::from(pod.size()) * u128::from(*n);
    }
    for pod in sample {
        cpu_milli += u128::from(pod.host.cpu_milli);
        memory += u128::from(pod.host.memory);
    }
    let per_gpu = |sum: u128| {
        let each = (sum * 1000).checked_div(thousandths).unwrap_or(0);
        u64::try_from(each).unwrap_or(u64::MAX)
    };
    HostAmounts {
        cpu_milli: per_gpu(cpu_milli),
        memory: per_gpu(memory),
    }
}

impl Sequence {
    /// The sequence of these pods, each with the bits of the pods equal to it.
    fn new(pods: &[SimulatedPod]) -> Self {
        let mut sequence = Self {
            pods: Vec::with_capacity(pods.len()),
            with_gpus: 0,
        };
        for (at, pod) in pods.iter().enumerate() {
            let mut equal = 0;
            for (other_at, other) in pods.iter().enumerate() {
                equal |= u64::from(other == pod) << other_at;
            }
            sequence.pods.push((*pod, equal));
            sequence.with_gpus |= u64::from(pod.n_gpus > 0) << at;
        }
        sequence
    }

    /// Thousandths of GPUs that the pods take, placed again and again until no pod that asks for GPUs fits.
    fn simulate(&self, mut gpus: FreeGpus, mut host: HostAmounts) -> u32 {
        let (mut taken, mut most_memory) = (0, gpus.most_memory());
        let n_unused_bits = u64::BITS - u32::try_from(self.pods.len()).unwrap_or(0);
        // One bit for each pod that may still fit. A pod that did not fit never will, since no pod ends here; nor will an equal
        // pod. For a sequence without pods the shift is by all bits and has no result, and 0 stands for no pods.
        let mut fitting = u64::MAX.checked_shr(n_unused_bits).unwrap_or(0);
        while fitting & self.with_gpus != 0 {
            let mut round = fitting;
            while round != 0 {
                // The lowest bit is the pod that comes first in the sequence.
                let Some((pod, equal)) = self.pods.get(round.trailing_zeros() as usize) else {
                    break;
                };
                round &= round - 1;
                if pod.take(&mut gpus, &mut host, most_memory) {
                    taken += pod.size();
                    most_memory = gpus.most_memory();
                } else {
                    fitting &= !equal;
                    round &= !equal;
                }
            }
        }
        taken
    }
}

impl SimulatedPod {
    /// The pod on a model of GPU; `None` if no GPU of the model can take it.
    fn new(profile: &PodProfile, model: GpuModel) -> Option<Self> {
        let (part, n_gpus) = if profile.asks_for_gpus() {
            requested_part(profile.gpus, model)?
        } else {
            (GpuPart::default(), 0)
        };
        Some(Self {
            cpu_milli: profile.host.cpu_milli,
            host_memory: profile.host.memory,
            part,
            n_gpus,
        })
    }

    /// Thousandths that the pod takes of all its GPUs together.
    fn size(&self) -> u32 {
        u32::from(self.n_gpus) * u32::from(self.part.size().unsigned_abs())
    }

    /// Takes the pod's GPUs, CPU and memory; returns false if it does not fit. No GPU has more memory free than `most_memory`.
    #[inline]
    fn take(&self, gpus: &mut FreeGpus, host: &mut HostAmounts, most_memory: i16) -> bool {
        // Comparisons of single numbers come first, as they spare most pods that do not fit the walk over all GPUs.
        let may_fit = host.cpu_milli >= self.cpu_milli
            && host.memory >= self.host_memory
            && most_memory >= self.part.memory;
        if !may_fit || (self.n_gpus > 0 && !gpus.take_tightest(self.part, self.n_gpus)) {
            return false;
        }
        host.cpu_milli -= self.cpu_milli;
        host.memory -= self.host_memory;
        true
    }
}

/// The part that a pod takes of each GPU (10 of 1,000 for each percent), and the number of GPUs; `None` if the part is more than
/// a GPU, or nothing.
fn requested_part(gpus: RequestedGpus, model: GpuModel) -> Option<(GpuPart, u16)> {
    match gpus {
        RequestedGpus::Whole(n) => Some((GpuPart::WHOLE, u16::try_from(n).ok().filter(|n| *n > 0)?)),
        RequestedGpus::Share(request) => {
            let memory = match request.memory {
                RequestedMemory::Ratio(percent) => i16::try_from(percent.checked_mul(10)?).ok()?,
                memory => thousandths_up(memory.on(model.memory, model.unit_bytes)?, model.memory)?,
            };
            let core = i16::try_from(request.core.checked_mul(10)?).ok()?;
            let part = GpuPart { memory, core };
            (memory > 0 && part.size() <= WHOLE).then_some((part, u16::try_from(request.devices).ok()?))
        }
        RequestedGpus::All { .. } | RequestedGpus::Nothing => None,
    }
}

/// An amount in thousandths of `total`, rounded up.
pub(crate) fn thousandths_up(amount: Memory, total: Memory) -> Option<i16> {
    let total = u128::from(total.hundredths());
    // A thousand times an amount may exceed 64 bits.
    let scaled = u128::from(amount.hundredths()) * 1000;
    i16::try_from(scaled.checked_add(total.checked_sub(1)?)? / total).ok()
}

/// An amount in thousandths of `total`, rounded down and at most a whole.
pub(crate) fn thousandths_down(amount: u64, total: u64) -> i16 {
    let scaled = match amount.checked_mul(1000) {
        Some(scaled) => scaled.checked_div(total).unwrap_or(0),
        // If the product has no room in 64 bits, the divisor is scaled down instead; the error is far below a thousandth.
        None => amount.checked_div(total.div_ceil(1000)).unwrap_or(0),
    };
    i16::try_from(scaled).unwrap_or(WHOLE).min(WHOLE)
}

impl FreeGpus {
    /// The free parts in the order of the inventory.
    pub(crate) fn new(parts: impl Iterator<Item = GpuPart>) -> Self {
        let mut gpus = Self {
            n_gpus: 0,
            n_blocks: 0,
            blocks: [FULL; MAX_GPUS / LANES],
        };
        for (at, part) in parts.enumerate().take(MAX_GPUS) {
            gpus.n_gpus += 1;
            gpus.n_blocks = at / LANES + 1;
            gpus.set(at, part);
        }
        gpus
    }

    /// Takes a part of one GPU; if less is free, all that is free.
    pub(crate) fn take(&mut self, at: usize, part: GpuPart) {
        if let Some(free) = self.get(at) {
            // A request that is rounded up may take a thousandth more than is free.
            let rest = GpuPart {
                memory: (free.memory - part.memory).max(0),
                core: (free.core - part.core).max(0),
            };
            self.set(at, rest);
        }
    }

    /// The value of GPUs that are entirely idle: their number squared, divided by the number of all, in thousandths. So an
    /// idle node counts for all its GPUs, and half of it for a quarter of them.
    pub(crate) fn idle_value(&self) -> u64 {
        let n_idle: u64 = self.parts().map(|part| u64::from(part == GpuPart::WHOLE)).sum();
        (n_idle * n_idle * u64::from(WHOLE.unsigned_abs()))
            .checked_div(u64::from(self.n_gpus))
            .unwrap_or(0)
    }

    /// Idle thousandths of all GPUs.
    pub(crate) fn idle(&self) -> u32 {
        self.parts().map(GpuPart::idle).sum()
    }

    /// The free part of the GPU at an index; `None` from [`MAX_GPUS`] on.
    fn get(&self, at: usize) -> Option<GpuPart> {
        let block = self.blocks.get(at / LANES)?;
        Some(GpuPart {
            memory: *block.memory.get(at % LANES)?,
            core: *block.core.get(at % LANES)?,
        })
    }

    /// Sets the free part of the GPU at an index.
    fn set(&mut self, at: usize, part: GpuPart) {
        let Some(block) = self.blocks.get_mut(at / LANES) else {
            return;
        };
        if let (Some(memory), Some(core)) = (block.memory.get_mut(at % LANES), block.core.get_mut(at % LANES))
        {
            (*memory, *core) = (part.memory, part.core);
        }
    }

    /// The blocks that have GPUs of the node.
    fn used_blocks(&self) -> impl Iterator<Item = &Block> {
        self.blocks.iter().take(self.n_blocks)
    }

    /// The free parts of all GPUs, followed by full GPUs up to the end of the last block.
    fn parts(&self) -> impl Iterator<Item = GpuPart> {
        let blocks = self.used_blocks();
        let parts = blocks.flat_map(|block| block.memory.iter().zip(&block.core));
        parts.map(|(memory, core)| GpuPart {
            memory: *memory,
            core: *core,
        })
    }

    /// The most thousandths of memory that are free on one GPU.
    fn most_memory(&self) -> i16 {
        let memory = self.used_blocks().flat_map(|block| block.memory);
        memory.max().unwrap_or(0)
    }

    /// Idle thousandths of no use to a pod: those of GPUs that are too full for it, or of all GPUs if the node has no room for
    /// it.
    fn unusable_to(&self, pod: &SimulatedPod, host: HostAmounts) -> u32 {
        let (mut n_fitting, mut too_full) = (0, 0);
        for part in self.parts() {
            let fits = part.memory >= pod.part.memory && part.core >= pod.part.core;
            n_fitting += u16::from(fits);
            too_full += if fits { 0 } else { part.idle() };
        }
        let has_room =
            n_fitting >= pod.n_gpus && host.cpu_milli >= pod.cpu_milli && host.memory >= pod.host_memory;
        if has_room { too_full } else { self.idle() }
    }

    /// Takes a part of each of the `n` fitting GPUs with the least free; returns false, and takes nothing, if fewer fit.
    fn take_tightest(&mut self, part: GpuPart, n: u16) -> bool {
        // Most pods ask for one GPU, which takes no second pass.
        if n == 1 {
            let Some(at) = self.tightest(part) else {
                return false;
            };
            self.take(at, part);
            return true;
        }
        // A copy takes less time than a list of the GPUs that were taken: no node has more than 64 GPUs here.
        let untouched = *self;
        let mut taken = 0_u64;
        for _ in 0..n {
            let Some(at) = self.tightest(part) else {
                *self = untouched;
                return false;
            };
            // Full for now, so that no GPU is taken twice.
            self.set(at, GpuPart { memory: -1, core: -1 });
            taken |= 1 << at;
        }
        while taken != 0 {
            let at = taken.trailing_zeros() as usize;
            taken &= taken - 1;
            if let Some(free) = untouched.get(at) {
                self.set(at, free);
                self.take(at, part);
            }
        }
        true
    }

    /// The fitting GPU with the least free memory and core in sum; the first of several.
    #[inline]
    fn tightest(&self, part: GpuPart) -> Option<usize> {
        let mut best: Option<(i16, usize)> = None;
        for (nth, block) in self.used_blocks().enumerate() {
            let key = block.tightest(part);
            // A key is the amount that is left, times eight, plus the place in the block, which is not compared: of equals the
            // first block wins.
            if key < i16::MAX && best.is_none_or(|(best, _)| key >> 3 < best >> 3) {
                best = Some((key, nth));
            }
        }
        best.map(|(key, nth)| nth * LANES + usize::from(key.unsigned_abs() & 7))
    }
}

impl Block {
    /// The key of the fitting GPU with the least free memory and core in sum: that sum times eight, plus its place in the block;
    /// `i16::MAX` if none fits.
    #[inline]
    fn tightest(&self, part: GpuPart) -> i16 {
        const PLACES: [i16; LANES] = [0, 1, 2, 3, 4, 5, 6, 7];
        let mut least = i16::MAX;
        for ((memory, core), place) in self.memory.iter().zip(&self.core).zip(PLACES) {
            let fits = *memory >= part.memory && *core >= part.core;
            // Two dimensions of at most 1,000 each, times eight, stay below 16,008.
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
