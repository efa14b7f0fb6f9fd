//! Holdings: the devices that an owner (a pod, by its UID) holds, as its record states them or as the engine has chosen them.

use crate::data::amounts::{Amounts, Memory, NamedAmounts};
use crate::data::constraints::Exclusion;
use crate::data::device::{DeviceRef, VirtualFunction};
use crate::data::ident::{DeviceId, DeviceType, FunctionId, OwnerId};
use crate::data::request::{RequestedMemory, ShareRequest};

/// Memory of a GPU, in the form in which a record states it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeldMemory {
    /// An exact amount.
    Exact(Memory),
    /// An amount as a request has it; in units or percent it depends on the node or the GPU, and changes with these.
    Requested(RequestedMemory),
}

/// A part of one device that an owner holds according to a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldPart {
    /// The device's type.
    pub kind: DeviceType,
    /// The device.
    pub device: DeviceRef,
    /// Memory of a GPU.
    pub memory: HeldMemory,
    /// Percent of a GPU's computing power.
    pub core: u32,
    /// Slots of a GPU.
    pub slots: u32,
    /// Amounts of the named resources of a device of another type.
    pub resources: NamedAmounts,
    /// Virtual functions of the device that the owner holds instead of the device itself.
    pub virtual_functions: Vec<FunctionId>,
    /// False if the record is doubtful, or others may hold the device too: the part reduces what is free on the device, but never
    /// counts as oversubscription.
    pub trusted: bool,
}

impl HeldPart {
    /// A part without amounts, which the caller adds.
    pub fn new(kind: DeviceType, device: DeviceRef) -> Self {
        Self {
            kind,
            device,
            memory: HeldMemory::Exact(Memory::ZERO),
            core: 0,
            slots: 0,
            resources: NamedAmounts::new(),
            virtual_functions: Vec::new(),
            trusted: true,
        }
    }
}

/// A share of an unknown GPU: the request is charged to every GPU of the node.
impl From<&ShareRequest> for HeldPart {
    fn from(request: &ShareRequest) -> Self {
        Self {
            memory: HeldMemory::Requested(request.memory),
            core: request.core,
            slots: request.slots,
            // The pod holds the share of one GPU, and it is not known of which, so that none counts as oversubscribed by it.
            trusted: false,
            ..Self::new(DeviceType::Gpu, DeviceRef::Any)
        }
    }
}

/// Everything that one owner holds of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holdings {
    /// Parts of devices.
    pub parts: Vec<HeldPart>,
    /// Shares of GPUs that the node has not allocated yet, and will refuse on a GPU without room: the request is charged
    /// once, to the GPUs with the most room.
    pub pending: Option<ShareRequest>,
    /// Number of whole GPUs that the vendor's plugin has given, or will give, to the owner and whose UUIDs are unknown.
    pub n_unknown_gpus: u32,
    /// True if the owner asks for whole GPUs by the vendor's resource name (`nvidia.com/gpu`), and so shares them with no other.
    pub is_vendor: bool,
    /// Exclusive use, by type.
    pub exclusions: Vec<(DeviceType, Exclusion)>,
}

impl From<Vec<HeldPart>> for Holdings {
    fn from(parts: Vec<HeldPart>) -> Self {
        Self {
            parts,
            ..Self::default()
        }
    }
}

impl Holdings {
    /// The holdings of an owner whose shares the node has not allocated yet.
    pub fn pending(request: ShareRequest) -> Self {
        Self {
            pending: Some(request),
            ..Self::default()
        }
    }

    /// Returns true if nothing is held.
    pub fn is_empty(&self) -> bool {
        self.parts.is_empty() && self.pending.is_none() && self.n_unknown_gpus == 0
    }

    /// Returns true if some device of a type is held, known or not.
    pub fn has(&self, kind: &DeviceType) -> bool {
        self.has_parts_of(kind) || (*kind == DeviceType::Gpu && self.n_unknown_gpus > 0)
    }

    /// Returns true if a part of some device of a type is held; whole GPUs of unknown UUID do not count.
    pub(crate) fn has_parts_of(&self, kind: &DeviceType) -> bool {
        // A pending holding has no part yet.
        let is_pending = *kind == DeviceType::Gpu && self.pending.is_some();
        is_pending || self.parts.iter().any(|part| part.kind == *kind)
    }
}

/// The source of a holding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A record that the caller has read from a pod, which stands whether or not there is room.
    Fact,
    /// A reservation by this engine, after a check that there is room.
    Decision,
}

/// The holding of one owner on a node.
#[derive(Clone, Debug)]
pub struct Held {
    /// The owner.
    pub owner: OwnerId,
    /// The source of the holding.
    pub origin: Origin,
    /// The devices.
    pub holdings: Holdings,
}

/// Number of whole GPUs that holdings have and whose UUIDs are not known.
pub(crate) fn n_unknown_whole(held: &[Held]) -> u32 {
    let mut n_unknown: u32 = 0;
    for held in held {
        // A record may state any number, and more than all GPUs means the same as all.
        n_unknown = n_unknown.saturating_add(held.holdings.n_unknown_gpus);
    }
    n_unknown
}

/// A chosen part of one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// The device's type.
    pub kind: DeviceType,
    /// The device.
    pub id: DeviceId,
    /// Its minor number at the time of the choice.
    pub minor: u32,
    /// Memory, computing power and slots of a GPU.
    pub amounts: Amounts,
    /// Amounts of the named resources of a device of another type.
    pub resources: NamedAmounts,
    /// Virtual functions of the device that the owner gets instead of the device itself.
    pub virtual_functions: Vec<VirtualFunction>,
}

/// Chosen devices of one node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// Parts of distinct devices: GPUs first, then other types in the order of the request, each type by rising minor. Of an
    /// owner that sees all GPUs, the one whose slots it takes comes first.
    pub shares: Vec<Share>,
    /// Number of whole GPUs that the vendor's plugin will choose.
    pub n_unknown_gpus: u32,
    /// True if the request is for whole GPUs by the vendor's resource name (`nvidia.com/gpu`).
    pub is_vendor: bool,
    /// Exclusive use, by type.
    pub exclusions: Vec<(DeviceType, Exclusion)>,
}

impl Placement {
    /// Chosen GPUs.
    pub fn gpus(&self) -> impl Iterator<Item = &Share> {
        self.shares.iter().filter(|share| share.kind == DeviceType::Gpu)
    }

    /// Chosen devices of types other than GPU.
    pub fn others(&self) -> impl Iterator<Item = &Share> {
        self.shares.iter().filter(|share| share.kind != DeviceType::Gpu)
    }
}

/// The part that an owner holds when a chosen share is reserved for it.
impl From<&Share> for HeldPart {
    fn from(share: &Share) -> Self {
        let Amounts { memory, core, slots } = share.amounts;
        let functions = share.virtual_functions.iter();
        Self {
            kind: share.kind.clone(),
            device: DeviceRef::Id(share.id.clone()),
            memory: HeldMemory::Exact(memory),
            core,
            slots,
            resources: share.resources.clone(),
            virtual_functions: functions.map(|function| function.id.clone()).collect(),
            trusted: true,
        }
    }
}

/// The holdings of an owner when a placement is reserved for it.
impl From<&Placement> for Holdings {
    fn from(placement: &Placement) -> Self {
        Self {
            parts: placement.shares.iter().map(HeldPart::from).collect(),
            pending: None,
            n_unknown_gpus: placement.n_unknown_gpus,
            is_vendor: placement.is_vendor,
            exclusions: placement.exclusions.clone(),
        }
    }
}

/// The hints (room that is kept for pods which are not bound yet) that count as taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hints<'a> {
    /// No hint counts.
    Ignore,
    /// All hints count.
    Respect,
    /// All hints but those of this owner count.
    RespectOthers(&'a str),
}

impl Hints<'_> {
    /// Returns true if the hint of this owner counts.
    pub(crate) fn counts(self, owner: &OwnerId) -> bool {
        match self {
            Self::Ignore => false,
            Self::Respect => true,
            Self::RespectOthers(own) => owner.as_str() != own,
        }
    }
}
