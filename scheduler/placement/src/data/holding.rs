//! Holdings: the devices that an owner holds, as a record states them or as the engine has chosen them.

use crate::data::amounts::{Amounts, Memory, NamedAmounts};
use crate::data::constraints::{DeviceKind, Exclusion};
use crate::data::device::{DeviceRef, Function};
use crate::data::ident::{DeviceId, DeviceType, FunctionId, GpuUuid, OwnerId};
use crate::data::request::{RequestedMemory, ShareRequest};

/// How a record identifies a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GpuRef {
    /// By UUID, which is exact.
    Uuid(GpuUuid),
    /// By its minor number on its node at the time of the record.
    Minor(u32),
}

/// How a record states memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeldMemory {
    /// An exact amount.
    Exact(Memory),
    /// In terms that depend on the GPU or the node; evaluated again whenever they change.
    Requested(RequestedMemory),
}

/// A share of one GPU that an owner holds according to a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldShare {
    /// The GPU.
    pub gpu: GpuRef,
    /// Memory of it.
    pub memory: HeldMemory,
    /// Percent of its computing power.
    pub core: u32,
    /// Slots.
    pub slots: u32,
    /// False if the record is doubtful: the share takes its room from the GPU, but does not count as oversubscription.
    pub trusted: bool,
}

/// The shares of GPUs that one owner holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HeldGpus {
    /// Shares of GPUs that the record identifies.
    Shares(Vec<HeldShare>),
    /// Shares of unknown GPUs of the node: the request is charged to each GPU.
    Unknown(ShareRequest),
    /// Shares that the node has not allocated yet, and will refuse on a GPU without room: the request is charged once, to
    /// the GPUs with the most room.
    Pending(ShareRequest),
}

impl HeldGpus {
    /// Returns true if no GPU is held.
    pub(crate) fn is_empty(&self) -> bool {
        matches!(self, Self::Shares(shares) if shares.is_empty())
    }
}

/// A part of a device that is not a GPU; a record says that an owner holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldDevice {
    /// The device's type.
    pub kind: DeviceType,
    /// The device.
    pub device: DeviceRef,
    /// Amounts of it.
    pub amounts: NamedAmounts,
    /// Its virtual functions that are held, if it is not held itself.
    pub functions: Vec<FunctionId>,
    /// False if the record is doubtful: the part is charged, but does not count as oversubscription.
    pub trusted: bool,
}

/// Everything that one owner holds of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holdings {
    /// Shares of GPUs.
    pub gpus: HeldGpus,
    /// Number of whole GPUs that the vendor's plugin has given, or will give, to the owner and whose UUIDs are unknown.
    pub unknown_whole: u32,
    /// True if the owner asks in the vendor's name, and so shares its GPUs with no other.
    pub is_vendor: bool,
    /// Parts of devices of other types.
    pub others: Vec<HeldDevice>,
    /// Exclusive use, by type.
    pub exclusions: Vec<(DeviceKind, Exclusion)>,
}

impl From<HeldGpus> for Holdings {
    fn from(gpus: HeldGpus) -> Self {
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
        Self::from(HeldGpus::Shares(Vec::new()))
    }
}

impl Holdings {
    /// Returns true if nothing is held.
    pub fn is_empty(&self) -> bool {
        self.gpus.is_empty() && self.unknown_whole == 0 && self.others.is_empty()
    }
}

/// The source of a holding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A record from elsewhere, which stands whether or not there is room.
    Fact,
    /// A reservation by this engine, after a check that there is room.
    Decision,
}

/// The holding of one owner on a node.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    pub(crate) owner: OwnerId,
    pub(crate) origin: Origin,
    pub(crate) holdings: Holdings,
}

/// Number of whole GPUs that holdings have and whose UUIDs are not known.
pub(crate) fn n_unknown_whole(held: &[Held]) -> u32 {
    held.iter()
        .fold(0, |sum, held| sum.saturating_add(held.holdings.unknown_whole))
}

/// A chosen share of one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// The GPU.
    pub gpu: GpuUuid,
    /// Its minor number at the time of the choice.
    pub minor: u32,
    /// Amounts of it.
    pub amounts: Amounts,
}

/// A chosen part of a device of another type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceShare {
    /// The device's type.
    pub kind: DeviceType,
    /// The device.
    pub id: DeviceId,
    /// Its minor number at the time of the choice.
    pub minor: u32,
    /// Amounts of it.
    pub amounts: NamedAmounts,
    /// Its virtual functions that are taken, if it is not taken itself.
    pub functions: Vec<Function>,
}

/// Chosen devices of one node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// Shares of distinct GPUs, by rising minor; of an owner that sees all GPUs, the one whose slots it takes comes first.
    pub shares: Vec<Share>,
    /// Number of whole GPUs that the vendor's plugin will choose.
    pub unknown_whole: u32,
    /// True if the request is in the vendor's name.
    pub is_vendor: bool,
    /// Parts of devices of other types, by type and minor.
    pub others: Vec<DeviceShare>,
    /// Exclusive use, by type.
    pub exclusions: Vec<(DeviceKind, Exclusion)>,
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

impl From<&DeviceShare> for HeldDevice {
    fn from(share: &DeviceShare) -> Self {
        let functions = share.functions.iter().map(|function| function.id.clone());
        Self {
            kind: share.kind.clone(),
            device: DeviceRef::Id(share.id.clone()),
            amounts: share.amounts.clone(),
            functions: functions.collect(),
            trusted: true,
        }
    }
}

impl From<&Placement> for Holdings {
    fn from(placement: &Placement) -> Self {
        Self {
            gpus: HeldGpus::Shares(placement.shares.iter().map(HeldShare::from).collect()),
            unknown_whole: placement.unknown_whole,
            is_vendor: placement.is_vendor,
            others: placement.others.iter().map(HeldDevice::from).collect(),
            exclusions: placement.exclusions.clone(),
        }
    }
}

/// Selects the hints that count as taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hints<'a> {
    /// None.
    Ignore,
    /// All.
    Respect,
    /// All but those of this owner.
    RespectOthers(&'a str),
}

impl Hints<'_> {
    /// Returns true if an owner's hint counts.
    pub(crate) fn counts(self, owner: &OwnerId) -> bool {
        match self {
            Self::Ignore => false,
            Self::Respect => true,
            Self::RespectOthers(own) => owner.as_str() != own,
        }
    }
}
