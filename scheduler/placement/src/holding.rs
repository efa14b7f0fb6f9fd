//! What owners hold, in the terms in which it was learnt or decided.

use crate::amounts::Amounts;
use crate::class::{DeviceShare, HeldDevice};
use crate::ident::GpuUuid;
use crate::memory::Memory;
use crate::request::{MemoryAsk, Request};
use crate::wishes::{Exclusion, Kind};

/// How a record names a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GpuRef {
    /// By UUID, which is exact.
    Uuid(GpuUuid),
    /// By the minor number that it has, or had, on its node.
    Minor(u32),
}

/// How a record states memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeldMemory {
    /// An exact amount.
    Exact(Memory),
    /// In terms that depend on the device or the node; worked out anew whenever they change.
    Ask(MemoryAsk),
}

/// A share of one device that an owner is known to hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldShare {
    /// The device.
    pub gpu: GpuRef,
    /// Memory of it.
    pub memory: HeldMemory,
    /// Percent of its computing power.
    pub core: u32,
    /// Places for sharers.
    pub slots: u32,
    /// Whether the record is beyond doubt. A doubtful share takes its room from the device that it names, but does not
    /// count as oversubscription.
    pub trusted: bool,
}

/// Shares of GPUs that one owner holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Holding {
    /// Shares of devices that the record names.
    Shares(Vec<HeldShare>),
    /// Shares of unknown devices of the node: each device is charged as if it were one of them.
    Anywhere(Request),
    /// Shares of devices of the node that are not known yet, of a node that starts nothing on a device without room: charged
    /// once, on the devices with the most room.
    Somewhere(Request),
}

/// Everything that one owner holds of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holdings {
    /// Shares of GPUs.
    pub gpus: Holding,
    /// Whole GPUs that the vendor's plugin has given, or will give, to the owner, and nobody knows which.
    pub unknown_whole: u32,
    /// Whether the owner asks in the vendor's name, and so shares with nobody.
    pub is_vendor: bool,
    /// Parts of devices of other types.
    pub others: Vec<HeldDevice>,
    /// What it keeps others from, by type.
    pub exclusions: Vec<(Kind, Exclusion)>,
}

impl From<Holding> for Holdings {
    fn from(gpus: Holding) -> Self {
        Self {
            gpus,
            unknown_whole: 0,
            is_vendor: false,
            others: Vec::new(),
            exclusions: Vec::new(),
        }
    }
}

impl Default for Holdings {
    fn default() -> Self {
        Self::from(Holding::Shares(Vec::new()))
    }
}

impl Holdings {
    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.gpus == Holding::Shares(Vec::new()) && self.unknown_whole == 0 && self.others.is_empty()
    }
}

/// Where a holding comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Learnt from elsewhere; it is so, whether or not there is room.
    Fact,
    /// Decided here, after checking that there is room.
    Decision,
}

/// A share of one device that was chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// The device.
    pub gpu: GpuUuid,
    /// Its minor number when it was chosen.
    pub minor: u32,
    /// What is taken of it.
    pub amounts: Amounts,
}

/// Devices of one node that were chosen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// Shares of distinct GPUs, by rising minor; of an owner that sees them all, the one whose place it takes first.
    pub shares: Vec<Share>,
    /// Whole GPUs that the vendor's plugin will choose.
    pub unknown_whole: u32,
    /// Whether the request is in the vendor's name.
    pub is_vendor: bool,
    /// Parts of devices of other types, by type and minor.
    pub others: Vec<DeviceShare>,
    /// What the owner will keep others from, by type.
    pub exclusions: Vec<(Kind, Exclusion)>,
}

impl From<&Share> for HeldShare {
    fn from(share: &Share) -> Self {
        let Amounts { memory, core, slots } = share.amounts;
        Self {
            gpu: GpuRef::Uuid(share.gpu.clone()),
            memory: HeldMemory::Exact(memory),
            core,
            slots,
            trusted: true,
        }
    }
}

impl From<&Placement> for Holdings {
    fn from(placement: &Placement) -> Self {
        Self {
            gpus: Holding::Shares(placement.shares.iter().map(HeldShare::from).collect()),
            unknown_whole: placement.unknown_whole,
            is_vendor: placement.is_vendor,
            others: placement.others.iter().map(HeldDevice::from).collect(),
            exclusions: placement.exclusions.clone(),
        }
    }
}
