//! What a node says it has.

use std::collections::BTreeSet;

use crate::amounts::Amounts;
use crate::class::Class;
use crate::ident::{DeviceId, DeviceType, GpuUuid};
use crate::memory::Memory;
use crate::traits::{LinkGroup, PartitionTable, Traits};

/// Most memory that a device may have: 1 PiB.
const MAX_MEMORY_BYTES: u64 = 1 << 50;
/// Most core percent, and most slots, that a device may have.
const MAX_COUNT: u32 = 1 << 20;

/// One device as its node reports it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Gpu {
    /// What identifies it.
    pub uuid: GpuUuid,
    /// Its minor number, unique on its node; for display and to order equals.
    pub minor: u32,
    /// Its memory in bytes, from 1 to 2^50.
    pub memory_bytes: u64,
    /// Its computing power in percent, up to 2^20; usually 100.
    pub core: u32,
    /// How many places for sharers it has, up to 2^20; usually 100.
    pub slots: u32,
    /// Whether new shares may be placed on it; shares that it has stay counted.
    pub healthy: bool,
    /// Whether it may be shared at all; otherwise it is left to whole requests in the vendor's name.
    pub sharing: bool,
    /// What tells it apart from others.
    pub traits: Traits,
}

/// The devices of one node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Inventory {
    /// The devices, in any order.
    pub gpus: Vec<Gpu>,
    /// Bytes of one memory unit on this node; `None` if it serves no units or they are unknown.
    pub unit_bytes: Option<u64>,
    /// Whether devices that are asked for whole in the vendor's name are the ones that are chosen here. Otherwise the
    /// vendor's plugin takes any that it has, and which, is known afterwards only.
    pub serves_vendor: bool,
    /// Devices of other types; `None` if nobody says what the node has, so that nothing can be refused for the lack of it.
    pub classes: Option<Vec<Class>>,
    /// Which sets of GPUs may be given away together; `None` if the node says nothing of that.
    pub partitions: Option<PartitionTable>,
    /// How GPUs are linked with one another.
    pub links: Vec<LinkGroup>,
}

/// Something in an inventory that cannot be used; the rest of it is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InventoryProblem {
    /// Two devices with one UUID; only the one with the lower minor is used.
    #[error("GPU {uuid} is listed twice; the one with minor {minor} is ignored")]
    DuplicateUuid {
        /// The UUID.
        uuid: GpuUuid,
        /// Minor of the device that is left out.
        minor: u32,
    },
    /// Two devices of another type with one ID or one minor; only the first is used.
    #[error("{kind} device {id} (minor {minor}) is listed twice by ID or minor; it is ignored")]
    DuplicateDevice {
        /// Its type.
        kind: DeviceType,
        /// ID of the device that is left out.
        id: DeviceId,
        /// Its minor.
        minor: u32,
    },
    /// Two devices with one minor; only the one with the lower UUID is used.
    #[error("minor {minor} is listed twice; GPU {uuid} is ignored")]
    DuplicateMinor {
        /// UUID of the device that is left out.
        uuid: GpuUuid,
        /// The minor.
        minor: u32,
    },
    /// A device with no memory, or more than any device has.
    #[error("GPU {uuid} has {memory_bytes} bytes of memory, which is not from 1 to 2^50; it is ignored")]
    Memory {
        /// The device, which is left out.
        uuid: GpuUuid,
        /// The memory that it claims.
        memory_bytes: u64,
    },
    /// A device with an absurd core percentage or number of slots.
    #[error("GPU {uuid} has core {core} and {slots} slots, of which one is more than 2^20; it is ignored")]
    Count {
        /// The device, which is left out.
        uuid: GpuUuid,
        /// The core percentage that it claims.
        core: u32,
        /// The slots that it claims.
        slots: u32,
    },
    /// A memory unit of no bytes, or larger than any device; treated as unknown.
    #[error(
        "a memory unit of {unit_bytes} bytes is not from 1 to 2^50; the node's units are taken to be unknown"
    )]
    Unit {
        /// The unit that the node claims.
        unit_bytes: u64,
    },
}

impl Gpu {
    /// Everything that the device has, healthy or not.
    pub fn total(&self) -> Amounts {
        Amounts {
            memory: Memory::from_bytes(self.memory_bytes),
            core: self.core,
            slots: self.slots,
        }
    }

    fn absurdity(&self) -> Option<InventoryProblem> {
        let Self {
            ref uuid,
            memory_bytes,
            core,
            slots,
            ..
        } = *self;
        if !(1..=MAX_MEMORY_BYTES).contains(&memory_bytes) {
            return Some(InventoryProblem::Memory {
                uuid: uuid.clone(),
                memory_bytes,
            });
        }
        (core > MAX_COUNT || slots > MAX_COUNT).then(|| InventoryProblem::Count {
            uuid: uuid.clone(),
            core,
            slots,
        })
    }
}

impl Inventory {
    /// Whether there is any device, usable or not.
    pub fn has_devices(&self) -> bool {
        !self.gpus.is_empty()
            || self
                .classes
                .iter()
                .flatten()
                .any(|class| !class.devices.is_empty())
    }

    /// Orders the devices by minor and takes out what cannot be used.
    pub(crate) fn sift(&mut self) -> Vec<InventoryProblem> {
        let mut problems = Vec::new();
        self.gpus
            .sort_by(|a, b| (a.minor, &a.uuid).cmp(&(b.minor, &b.uuid)));
        let (mut uuids, mut minors) = (BTreeSet::new(), BTreeSet::new());
        self.gpus.retain(|gpu| {
            let problem = gpu.absurdity().or_else(|| {
                let (uuid, minor) = (gpu.uuid.clone(), gpu.minor);
                if uuids.contains(&uuid) {
                    return Some(InventoryProblem::DuplicateUuid { uuid, minor });
                }
                (minors.contains(&minor)).then_some(InventoryProblem::DuplicateMinor { uuid, minor })
            });
            let usable = problem.is_none();
            if usable {
                uuids.insert(gpu.uuid.clone());
                minors.insert(gpu.minor);
            }
            problems.extend(problem);
            usable
        });
        problems.extend(self.classes.iter_mut().flatten().flat_map(Class::sift));
        if let Some(classes) = &mut self.classes {
            classes.sort_by(|a, b| a.kind.cmp(&b.kind));
        }
        if let Some(unit_bytes) = self
            .unit_bytes
            .filter(|unit| !(1..=MAX_MEMORY_BYTES).contains(unit))
        {
            problems.push(InventoryProblem::Unit { unit_bytes });
            self.unit_bytes = None;
        }
        problems
    }
}
