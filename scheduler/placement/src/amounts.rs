//! What of one device is asked for, used, free or there in all.

use std::fmt;

use crate::memory::Memory;

/// An amount in each dimension of one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Amounts {
    /// Device memory.
    pub memory: Memory,
    /// Percent of computing power; a whole device usually has 100.
    pub core: u32,
    /// How many of the places for sharers; a pod usually takes one on each of its devices.
    pub slots: u32,
}

/// One of the things that a device can run out of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Dimension {
    /// Device memory.
    Memory,
    /// Computing power.
    Core,
    /// Places for sharers.
    Slots,
}

impl Amounts {
    /// Nothing of anything.
    pub const ZERO: Self = Self {
        memory: Memory::ZERO,
        core: 0,
        slots: 0,
    };

    /// The sum, at most what the types hold.
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

    /// Whether this is no more than `room` in any dimension.
    pub fn within(self, room: Self) -> bool {
        self.memory <= room.memory && self.core <= room.core && self.slots <= room.slots
    }

    /// The dimensions in which this is more than `room`, in the order memory, core, slots.
    pub(crate) fn lacking(self, room: Self) -> impl Iterator<Item = Dimension> {
        let memory = (self.memory > room.memory).then_some(Dimension::Memory);
        let core = (self.core > room.core).then_some(Dimension::Core);
        let slots = (self.slots > room.slots).then_some(Dimension::Slots);
        [memory, core, slots].into_iter().flatten()
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

impl fmt::Display for Dimension {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Memory => "memory",
            Self::Core => "core",
            Self::Slots => "slots",
        })
    }
}
