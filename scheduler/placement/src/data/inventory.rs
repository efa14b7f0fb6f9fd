//! The inventory of one node: its devices, how they are linked, and which sets of them may be allocated together.

use std::collections::BTreeSet;

use crate::data::amounts::Memory;
use crate::data::device::{DevicesOfType, Gpu};
use crate::data::holding::GpuRef;
use crate::data::ident::{DeviceId, DeviceType, GpuUuid};

/// Most memory that a GPU may have: 1 PiB.
const MAX_MEMORY_BYTES: u64 = 1 << 50;
/// Most core percent, and most slots, that a GPU may have.
const MAX_COUNT: u32 = 1 << 20;

/// The devices of one node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Inventory {
    /// The GPUs, in any order.
    pub gpus: Vec<Gpu>,
    /// Bytes of one memory unit on this node; `None` if it serves no units or they are unknown.
    pub unit_bytes: Option<u64>,
    /// True if the node gives a pod exactly the whole GPUs that the engine chooses. Otherwise the vendor's plugin takes
    /// any, and its choice becomes known only afterwards.
    pub serves_vendor: bool,
    /// Devices of other types; `None` if the node reports none of its types, so that no request is refused for them.
    pub other_devices: Option<Vec<DevicesOfType>>,
    /// The sets of GPUs that may be allocated together; `None` if the node reports none.
    pub partitions: Option<PartitionTable>,
    /// Links between GPUs.
    pub links: Vec<LinkGroup>,
}

/// GPUs of which every two are linked directly, or through switches of their own.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LinkGroup {
    /// Minors of the GPUs.
    pub minors: Vec<u32>,
    /// Number of links between any two of them.
    pub n_links: u32,
}

/// A set of GPUs that may be allocated together.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Partition {
    /// Minors of its GPUs.
    pub minors: Vec<u32>,
    /// Bandwidth of a ring through them, in bytes per second; `None` if unknown.
    pub bandwidth: Option<u64>,
    /// Its allocation score; higher is better.
    pub score: i64,
}

/// All sets of GPUs of a node that may be allocated together.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct PartitionTable {
    /// True if whole GPUs are allocated in these sets only; otherwise the sets are preferred.
    pub is_binding: bool,
    /// The sets, in the order of the table.
    pub partitions: Vec<Partition>,
}

/// The model of a node's GPUs, as far as amounts of typical pods depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct GpuModel {
    /// Memory of one GPU.
    pub(crate) memory: Memory,
    /// Bytes of one memory unit.
    pub(crate) unit_bytes: Option<u64>,
}

/// A part of an inventory that cannot be used; the rest of it is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InventoryProblem {
    /// Two GPUs with one UUID; only the one with the lower minor is used.
    #[error("GPU {uuid} is listed twice; the one with minor {minor} is ignored")]
    DuplicateUuid {
        /// The UUID.
        uuid: GpuUuid,
        /// Minor of the GPU that is ignored.
        minor: u32,
    },
    /// Two devices of another type with one ID or one minor; only the first is used.
    #[error("{kind} device {id} (minor {minor}) is listed twice by ID or minor; it is ignored")]
    DuplicateDevice {
        /// Its type.
        kind: DeviceType,
        /// ID of the device that is ignored.
        id: DeviceId,
        /// Its minor.
        minor: u32,
    },
    /// Two GPUs with one minor; only the one with the lower UUID is used.
    #[error("minor {minor} is listed twice; GPU {uuid} is ignored")]
    DuplicateMinor {
        /// UUID of the GPU that is ignored.
        uuid: GpuUuid,
        /// The minor.
        minor: u32,
    },
    /// A GPU with no memory, or more than any GPU has.
    #[error("GPU {uuid} has {memory_bytes} bytes of memory, which is not from 1 to 2^50; it is ignored")]
    Memory {
        /// The GPU, which is ignored.
        uuid: GpuUuid,
        /// Its reported memory.
        memory_bytes: u64,
    },
    /// A GPU with an absurd core percentage or number of slots.
    #[error("GPU {uuid} has core {core} and {slots} slots, of which one is more than 2^20; it is ignored")]
    Count {
        /// The GPU, which is ignored.
        uuid: GpuUuid,
        /// Its reported core percentage.
        core: u32,
        /// Its reported slots.
        slots: u32,
    },
    /// A memory unit of no bytes, or larger than any GPU; treated as unknown.
    #[error(
        "a memory unit of {unit_bytes} bytes is not from 1 to 2^50; the node's units are taken to be unknown"
    )]
    Unit {
        /// The reported unit.
        unit_bytes: u64,
    },
}

impl Inventory {
    /// Returns true if there is any device, usable or not.
    pub fn has_devices(&self) -> bool {
        !self.gpus.is_empty() || self.types().iter().any(|of_type| !of_type.devices.is_empty())
    }

    /// Devices of other types; empty if the node reports none.
    pub(crate) fn types(&self) -> &[DevicesOfType] {
        self.other_devices.as_deref().unwrap_or_default()
    }

    /// Index of the GPU with this UUID.
    pub(crate) fn index_of(&self, uuid: &GpuUuid) -> Option<usize> {
        self.gpus.iter().position(|gpu| gpu.uuid == *uuid)
    }

    /// Index of a GPU that a record identifies.
    pub(crate) fn position(&self, gpu: &GpuRef) -> Option<usize> {
        self.gpus.iter().position(|candidate| match gpu {
            GpuRef::Uuid(uuid) => candidate.uuid == *uuid,
            GpuRef::Minor(minor) => candidate.minor == *minor,
        })
    }

    /// The GPU that a record identifies.
    pub fn gpu(&self, gpu: &GpuRef) -> Option<&Gpu> {
        self.gpus.get(self.position(gpu)?)
    }

    /// Indices of the GPUs with these minors, each once; minors that no GPU has are left out.
    pub(crate) fn indices_of(&self, minors: &[u32]) -> BTreeSet<usize> {
        let mut indices = BTreeSet::new();
        for (at, gpu) in self.gpus.iter().enumerate() {
            if minors.contains(&gpu.minor) {
                indices.insert(at);
            }
        }
        indices
    }

    /// Returns true if the node allocates whole GPUs in the sets of its partition table only.
    pub(crate) fn has_binding_partitions(&self) -> bool {
        self.partitions.as_ref().is_some_and(|table| table.is_binding)
    }

    /// The model of the GPUs: that of the largest. `None` without GPUs.
    pub(crate) fn model(&self) -> Option<GpuModel> {
        let memory = self.gpus.iter().map(|gpu| gpu.total().memory).max()?;
        Some(GpuModel {
            memory,
            unit_bytes: self.unit_bytes,
        })
    }

    /// Returns true if a request for whole GPUs in the vendor's name may get this GPU.
    ///
    /// Where the vendor's plugin chooses, its GPUs are those that are marked as not shared; all, if none is marked.
    pub(crate) fn is_for_vendor(&self, gpu: &Gpu) -> bool {
        self.serves_vendor || !gpu.sharing || self.gpus.iter().all(|gpu| gpu.sharing)
    }

    /// Indices of the GPUs that a request for whole GPUs in the vendor's name may get.
    pub(crate) fn for_vendor(&self) -> impl Iterator<Item = (usize, &Gpu)> + Clone {
        self.gpus
            .iter()
            .enumerate()
            .filter(|(_, gpu)| self.is_for_vendor(gpu))
    }

    /// Returns true if a GPU takes no shares while `n_unknown` whole GPUs are in use whose UUIDs are not known.
    pub(crate) fn is_withheld(&self, gpu: &Gpu, n_unknown: u32) -> bool {
        !gpu.sharing || (n_unknown > 0 && self.is_for_vendor(gpu))
    }

    /// Orders devices by minor, and types by name; removes and reports those that cannot be used.
    pub(crate) fn normalize(&mut self) -> Vec<InventoryProblem> {
        let mut problems = Vec::new();
        self.gpus
            .sort_by(|a, b| (a.minor, &a.uuid).cmp(&(b.minor, &b.uuid)));
        let mut gpus: Vec<Gpu> = Vec::with_capacity(self.gpus.len());
        let mut seen = BTreeSet::new();
        // Sorted by minor, then UUID: of two GPUs with one minor the same one is kept, whatever the order of the report.
        for gpu in std::mem::take(&mut self.gpus) {
            let is_minor_taken = gpus.last().is_some_and(|last| last.minor == gpu.minor);
            if let Some(problem) = gpu_problem(&gpu, seen.contains(&gpu.uuid), is_minor_taken) {
                problems.push(problem);
                continue;
            }
            seen.insert(gpu.uuid.clone());
            gpus.push(gpu);
        }
        self.gpus = gpus;
        if let Some(types) = &mut self.other_devices {
            for of_type in types.iter_mut() {
                problems.extend(remove_duplicates(of_type));
            }
            types.sort_by(|a, b| a.kind.cmp(&b.kind));
        }
        if let Some(unit_bytes) = self.unit_bytes.filter(|unit| !is_possible_memory(*unit)) {
            problems.push(InventoryProblem::Unit { unit_bytes });
            self.unit_bytes = None;
        }
        problems
    }
}

fn is_possible_memory(bytes: u64) -> bool {
    (1..=MAX_MEMORY_BYTES).contains(&bytes)
}

fn gpu_problem(gpu: &Gpu, is_uuid_taken: bool, is_minor_taken: bool) -> Option<InventoryProblem> {
    let Gpu {
        ref uuid,
        minor,
        memory_bytes,
        core,
        slots,
        ..
    } = *gpu;
    let uuid = || uuid.clone();
    if !is_possible_memory(memory_bytes) {
        Some(InventoryProblem::Memory {
            uuid: uuid(),
            memory_bytes,
        })
    } else if core > MAX_COUNT || slots > MAX_COUNT {
        Some(InventoryProblem::Count {
            uuid: uuid(),
            core,
            slots,
        })
    } else if is_uuid_taken {
        Some(InventoryProblem::DuplicateUuid { uuid: uuid(), minor })
    } else if is_minor_taken {
        Some(InventoryProblem::DuplicateMinor { uuid: uuid(), minor })
    } else {
        None
    }
}

/// Orders devices by minor and removes those whose ID or minor is taken.
fn remove_duplicates(of_type: &mut DevicesOfType) -> Vec<InventoryProblem> {
    of_type
        .devices
        .sort_by(|a, b| (a.minor, &a.id).cmp(&(b.minor, &b.id)));
    let (mut ids, mut minors, mut problems) = (BTreeSet::new(), BTreeSet::new(), Vec::new());
    of_type.devices.retain(|device| {
        // A device that is removed claims neither its ID nor its minor.
        let is_new = !ids.contains(&device.id) && !minors.contains(&device.minor);
        if is_new {
            ids.insert(device.id.clone());
            minors.insert(device.minor);
        } else {
            problems.push(InventoryProblem::DuplicateDevice {
                kind: of_type.kind.clone(),
                id: device.id.clone(),
                minor: device.minor,
            });
        }
        is_new
    });
    problems
}
