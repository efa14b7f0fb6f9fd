//! Amounts of what a device, or a node itself, has: device memory, core, slots, named resources, CPU and host memory.
//!
//! Arithmetic stops at the ends of a type's range instead of wrapping around.

use std::collections::BTreeMap;
use std::fmt;

use crate::data::ident::ResourceName;
use crate::data::reason::Reason;

const HUNDREDTHS: u64 = 100;

/// An amount of memory, kept in hundredths of a byte so that any whole percentage of a device is exact.
///
/// The largest amount is about 160 PiB; a larger one counts as this amount.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Memory(u64);

impl Memory {
    /// No memory.
    pub const ZERO: Self = Self(0);

    /// The amount in bytes.
    pub const fn from_bytes(bytes: u64) -> Self {
        // A pod may ask for any number of bytes: one beyond the range must stay larger than every GPU.
        Self(bytes.saturating_mul(HUNDREDTHS))
    }

    /// The amount in hundredths of a byte.
    #[cfg(any(test, feature = "check"))]
    pub const fn from_hundredths(hundredths: u64) -> Self {
        Self(hundredths)
    }

    /// Hundredths of a byte.
    pub const fn hundredths(self) -> u64 {
        self.0
    }

    /// Whole bytes, rounded down.
    pub const fn bytes_floor(self) -> u64 {
        self.0 / HUNDREDTHS
    }

    /// Whole bytes, rounded up.
    pub const fn bytes_ceil(self) -> u64 {
        self.0.div_ceil(HUNDREDTHS)
    }

    /// A percentage of this amount; exact when this amount is a whole number of bytes.
    #[must_use]
    pub const fn percent(self, percent: u32) -> Self {
        // Bytes times percent are hundredths of a byte. The cast widens without loss; `From` is not const.
        Self((self.0 / HUNDREDTHS).saturating_mul(percent as u64))
    }

    /// This amount in percent of `total`, rounded up; 0 if `total` is zero.
    pub fn percent_of(self, total: Self) -> u32 {
        if total.0 == 0 {
            return 0;
        }
        // Rounded up: a record must not name less than the pod holds.
        let percent = (u128::from(self.0) * 100).div_ceil(u128::from(total.0));
        u32::try_from(percent).unwrap_or(u32::MAX)
    }

    /// The sum.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }

    /// The difference, at least zero.
    #[must_use]
    pub const fn less(self, other: Self) -> Self {
        // Records may exceed a device: below zero the number would wrap around, and almost everything would seem free.
        Self(self.0.saturating_sub(other.0))
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 % HUNDREDTHS {
            0 => write!(f, "{}", self.0 / HUNDREDTHS),
            rest => write!(f, "{}.{rest:02}", self.0 / HUNDREDTHS),
        }
    }
}

/// An amount in each dimension of one GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Amounts {
    /// Device memory.
    pub memory: Memory,
    /// Percent of computing power; a whole GPU usually has 100.
    pub core: u32,
    /// Number of pods that can share the GPU; a pod usually takes one slot on each of its GPUs.
    pub slots: u32,
}

impl Amounts {
    /// Zero in every dimension.
    pub const ZERO: Self = Self {
        memory: Memory::ZERO,
        core: 0,
        slots: 0,
    };

    /// The sum.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self {
            memory: self.memory.plus(other.memory),
            core: self.core.saturating_add(other.core),
            slots: self.slots.saturating_add(other.slots),
        }
    }

    /// The difference, at least zero in each dimension.
    #[must_use]
    pub const fn less(self, other: Self) -> Self {
        Self {
            memory: self.memory.less(other.memory),
            core: self.core.saturating_sub(other.core),
            slots: self.slots.saturating_sub(other.slots),
        }
    }

    /// Returns true if no dimension exceeds `room`.
    pub fn within(self, room: Self) -> bool {
        self.memory <= room.memory && self.core <= room.core && self.slots <= room.slots
    }

    /// The number of times that the amounts fit into `room` together; `usize::MAX` for zero amounts.
    pub(crate) fn n_within(self, room: Self) -> usize {
        let memory = n_times(self.memory.hundredths(), room.memory.hundredths());
        let core = n_times(self.core.into(), room.core.into());
        let slots = n_times(self.slots.into(), room.slots.into());
        memory.min(core).min(slots)
    }

    /// The first dimension that exceeds `room`, in the order memory, core, slots, as the reason of a refusal.
    pub(crate) fn lacking(self, room: Self) -> Option<Reason> {
        if self.memory > room.memory {
            Some(Reason::Memory)
        } else if self.core > room.core {
            Some(Reason::Core)
        } else {
            (self.slots > room.slots).then_some(Reason::Slots)
        }
    }

    /// Returns true if an owner of these amounts keeps the GPU from being allocated whole. Slots alone do not, as a request for
    /// whole GPUs needs none.
    pub(crate) fn occupies(self) -> bool {
        self.memory > Memory::ZERO || self.core > 0
    }
}

impl fmt::Display for Amounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} bytes, {} % of core, {} slots",
            self.memory, self.core, self.slots
        )
    }
}

/// Amounts by resource, for devices of types other than GPU.
pub type NamedAmounts = BTreeMap<ResourceName, u64>;

/// Returns true if `free` has at least these amounts of every resource.
pub(crate) fn is_within(amounts: &NamedAmounts, free: &NamedAmounts) -> bool {
    for (resource, amount) in amounts {
        // A resource that the device does not have is not free, whatever the amount.
        if free.get(resource).is_none_or(|free| amount > free) {
            return false;
        }
    }
    true
}

/// Subtracts amounts of the resources that `free` has, each down to zero at most.
pub(crate) fn subtract(free: &mut NamedAmounts, amounts: &NamedAmounts) {
    for (resource, amount) in amounts {
        // Records may name resources that the device has no more.
        if let Some(free) = free.get_mut(resource) {
            *free = free.saturating_sub(*amount);
        }
    }
}

/// CPU and memory, of a node or of a pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostAmounts {
    /// Thousandths of a CPU.
    pub cpu_milli: u64,
    /// Bytes of memory.
    pub memory: u64,
}

/// The number of times that `each` fits into `room`; `usize::MAX` if `each` is zero.
fn n_times(each: u64, room: u64) -> usize {
    room.checked_div(each)
        .map_or(usize::MAX, |n| usize::try_from(n).unwrap_or(usize::MAX))
}

impl HostAmounts {
    /// More than any node has.
    pub const PLENTY: Self = Self {
        cpu_milli: u64::MAX,
        memory: u64::MAX,
    };

    /// The number of times that the amounts fit into `room` together; `usize::MAX` for zero amounts.
    pub(crate) fn n_within(self, room: Self) -> usize {
        n_times(self.cpu_milli, room.cpu_milli).min(n_times(self.memory, room.memory))
    }

    /// The sum.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self {
            cpu_milli: self.cpu_milli.saturating_add(other.cpu_milli),
            memory: self.memory.saturating_add(other.memory),
        }
    }

    /// The difference, at least zero.
    #[must_use]
    pub const fn less(self, other: Self) -> Self {
        Self {
            cpu_milli: self.cpu_milli.saturating_sub(other.cpu_milli),
            memory: self.memory.saturating_sub(other.memory),
        }
    }
}
