//! What is asked for: equal shares on distinct devices of one node.

use crate::amounts::Amounts;
use crate::class::ClassRequest;
use crate::host::HostAmounts;
use crate::memory::Memory;
use crate::reason::Reason;
use crate::wishes::Wishes;

/// Memory on one device, in the terms in which it was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum MemoryAsk {
    /// Bytes.
    Bytes(u64),
    /// Memory units of the node; how many bytes one is, is the node's to say.
    Units(u64),
    /// Percent of the device's memory.
    Ratio(u32),
}

/// Equal shares on `devices` distinct devices of one node; amounts are those of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Request {
    /// Number of distinct devices, at least 1.
    pub devices: u32,
    /// Memory of each device, more than zero.
    pub memory: MemoryAsk,
    /// Percent of computing power of each device; 0 if it does not matter.
    pub core: u32,
    /// Places for sharers on each device; usually 1.
    pub slots: u32,
}

/// What is asked of the GPUs of one node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GpuAsk {
    /// Nothing.
    #[default]
    Nothing,
    /// Shares.
    Share(Request),
    /// So many whole devices in the vendor's name, which nobody else may use.
    Whole(u32),
    /// To see all devices and to take nothing of them but so many places for sharers on one.
    All {
        /// Places for sharers.
        slots: u32,
    },
}

/// Everything that is asked of one node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ask<'a> {
    /// Of its GPUs.
    pub gpus: GpuAsk,
    /// Of its other devices, one entry per type.
    pub others: &'a [ClassRequest],
    /// How devices are to be chosen, if that is not left to us.
    pub wishes: Option<&'a Wishes>,
    /// Of the node itself; no node is refused for it.
    pub host: HostAmounts,
}

impl From<&Request> for GpuAsk {
    fn from(request: &Request) -> Self {
        Self::Share(*request)
    }
}

impl From<&Request> for Ask<'_> {
    fn from(request: &Request) -> Self {
        Self {
            gpus: GpuAsk::Share(*request),
            ..Self::default()
        }
    }
}

impl From<GpuAsk> for Ask<'_> {
    fn from(gpus: GpuAsk) -> Self {
        Self {
            gpus,
            ..Self::default()
        }
    }
}

impl MemoryAsk {
    /// The amount that this is on a device with `total` memory; `None` if it is in units and they are unknown.
    pub fn on(self, total: Memory, unit_bytes: Option<u64>) -> Option<Memory> {
        match self {
            Self::Bytes(bytes) => Some(Memory::from_bytes(bytes)),
            Self::Units(units) => unit_bytes.map(|unit| Memory::from_bytes(units.saturating_mul(unit))),
            Self::Ratio(percent) => Some(total.percent(percent)),
        }
    }

    const fn is_zero(self) -> bool {
        matches!(self, Self::Bytes(0) | Self::Units(0) | Self::Ratio(0))
    }
}

/// A request in the terms of one node, ready to be compared with many devices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Need {
    memory: NeededMemory,
    core: u32,
    slots: u32,
    pub(crate) devices: usize,
}

/// What is asked of one GPU, with memory in one form only.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Stated {
    /// Percent of its memory.
    pub(crate) ratio: u64,
    /// Bytes of its memory.
    pub(crate) bytes: u64,
    /// Percent of its computing power.
    pub(crate) core: u64,
}

#[derive(Clone, Copy, Debug)]
enum NeededMemory {
    Flat(Memory),
    Percent(u32),
}

impl Need {
    /// Translates a request for a node with such units.
    #[inline]
    pub(crate) fn of(request: &Request, unit_bytes: Option<u64>) -> Result<Self, Reason> {
        if request.devices == 0 || request.memory.is_zero() {
            return Err(Reason::InvalidRequest);
        }
        let memory = match (request.memory, unit_bytes) {
            (MemoryAsk::Ratio(percent), _) => NeededMemory::Percent(percent),
            (MemoryAsk::Bytes(bytes), _) => NeededMemory::Flat(Memory::from_bytes(bytes)),
            (MemoryAsk::Units(units), Some(unit)) => {
                NeededMemory::Flat(Memory::from_bytes(units.saturating_mul(unit)))
            }
            (MemoryAsk::Units(_), None) => return Err(Reason::NotServed),
        };
        let devices = usize::try_from(request.devices).unwrap_or(usize::MAX);
        Ok(Self {
            memory,
            core: request.core,
            slots: request.slots,
            devices,
        })
    }

    /// What is asked of one device, in the terms in which it was asked for.
    pub(crate) fn stated(self) -> Stated {
        let (ratio, bytes) = match self.memory {
            NeededMemory::Flat(memory) => (0, memory.bytes_ceil()),
            NeededMemory::Percent(percent) => (u64::from(percent), 0),
        };
        Stated {
            ratio,
            bytes,
            core: u64::from(self.core),
        }
    }

    /// The amounts that this is on a device with `total`.
    #[inline]
    pub(crate) fn on(self, total: Amounts) -> Amounts {
        let memory = match self.memory {
            NeededMemory::Flat(memory) => memory,
            NeededMemory::Percent(percent) => total.memory.percent(percent),
        };
        Amounts {
            memory,
            core: self.core,
            slots: self.slots,
        }
    }
}
