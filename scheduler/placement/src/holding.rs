//! What owners hold, in the terms in which it was learnt or decided.

use crate::amounts::Amounts;
use crate::ident::GpuUuid;
use crate::memory::Memory;
use crate::request::{MemoryAsk, Request};

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

/// What one owner holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Holding {
    /// Shares of devices that the record names.
    Shares(Vec<HeldShare>),
    /// Shares of unknown devices of the node: each device is charged as if it were one of them.
    Anywhere(Request),
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

/// Shares of distinct devices of one node, by rising minor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The shares, at least one.
    pub shares: Vec<Share>,
}

impl From<&Share> for HeldShare {
    fn from(share: &Share) -> Self {
        let Amounts { memory, core, slots } = share.amounts;
        Self { gpu: GpuRef::Uuid(share.gpu.clone()), memory: HeldMemory::Exact(memory), core, slots, trusted: true }
    }
}

impl From<&Placement> for Holding {
    fn from(placement: &Placement) -> Self {
        Self::Shares(placement.shares.iter().map(HeldShare::from).collect())
    }
}
