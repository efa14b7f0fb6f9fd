//! The inventory of one node: its devices by type, how GPUs are linked, and which sets of GPUs may be allocated together.

use std::collections::BTreeSet;

use crate::data::amounts::Memory;
use crate::data::device::{Device, DeviceRef, Devices, DevicesOfType};
use crate::data::ident::{DeviceId, DeviceType};
use crate::data::indices_where;

/// Most memory that a GPU may have: 1 PiB. In hundredths of a byte that is far from the end of 64 bits.
const MAX_MEMORY_BYTES: u64 = 1 << 50;
/// Most percent of computing power, and most slots, that a GPU may have.
const MAX_COUNT: u32 = 1 << 20;

/// Index of GPUs among the device types of an inventory: they come first, whether the node has any or not.
pub(crate) const GPUS: usize = 0;

/// The devices of one node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Inventory {
    /// The GPUs, in any order. They are apart from other types, because units, partitions and links refer to them.
    pub gpus: Devices,
    /// Bytes of one memory unit (`aliyun.com/gpu-mem`) on this node; `None` if it serves no units or their size is unknown.
    pub unit_bytes: Option<u64>,
    /// True if gpushare's plugin serves the vendor's resource (`nvidia.com/gpu`): a pod gets exactly the whole GPUs that the
    /// engine chooses. Otherwise the vendor's plugin takes any, and its choice becomes known only afterwards.
    pub serves_vendor: bool,
    /// Devices of other types; `None` if they are not known, as without a Device object: the engine then refuses no request for
    /// them.
    pub other_devices: Option<Vec<DevicesOfType>>,
    /// The sets of GPUs that may be allocated together; `None` if the node reports none.
    pub partitions: Option<PartitionTable>,
    /// True if the node has a partition table that cannot be read. `partitions` then has no set.
    pub has_unreadable_partitions: bool,
    /// Links between GPUs.
    pub links: Vec<LinkGroup>,
}

/// GPUs of which every two are linked (`NVLink`) directly, or through switches of their own.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LinkGroup {
    /// Minors of the GPUs.
    pub minors: Vec<u32>,
    /// Number of links between any two of the GPUs.
    pub n_links: u32,
}

/// A set of GPUs that may be allocated together.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Partition {
    /// Minor numbers of the GPUs in the set.
    pub minors: Vec<u32>,
    /// Bandwidth of a ring through these GPUs, in bytes per second; `None` if unknown.
    pub bandwidth: Option<u64>,
    /// The score of the partition in the node's table; a higher score is better.
    pub score: i64,
}

/// All sets of GPUs of a node that may be allocated together.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct PartitionTable {
    /// True if whole GPUs are allocated in these sets only; otherwise the sets are preferred.
    pub is_binding: bool,
    /// The partitions, in the order of the node's table.
    pub partitions: Vec<Partition>,
}

/// The model of a node's GPUs, as far as it decides which part of a GPU a typical pod takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct GpuModel {
    /// Memory of one GPU.
    pub(crate) memory: Memory,
    /// Bytes of one memory unit.
    pub(crate) unit_bytes: Option<u64>,
}

impl Inventory {
    /// Returns true if there is any device, usable or not.
    pub fn has_devices(&self) -> bool {
        self.types().any(|(_, devices)| !devices.is_empty())
    }

    /// Every device type with its devices, in the order of type indices: GPUs first.
    pub fn types(&self) -> impl Iterator<Item = (&DeviceType, &[Device])> {
        let gpus = (&DeviceType::Gpu, &*self.gpus);
        let others = self.other_devices.as_deref().unwrap_or_default();
        std::iter::once(gpus).chain(others.iter().map(|of_type| (&of_type.kind, &*of_type.devices)))
    }

    /// Number of device types, GPUs included.
    pub(crate) fn n_types(&self) -> usize {
        1 + self.other_devices.as_ref().map_or(0, Vec::len)
    }

    /// The devices of the type at an index; empty if the node has no such type.
    pub(crate) fn devices(&self, type_at: usize) -> &[Device] {
        if type_at == GPUS {
            return &self.gpus;
        }
        let others = self.other_devices.as_deref().unwrap_or_default();
        // The list of other types begins after the index of GPUs.
        others.get(type_at - 1).map_or(&[], |of_type| &of_type.devices)
    }

    /// The index of a device type, if the node reports it.
    pub(crate) fn type_index(&self, kind: &DeviceType) -> Option<usize> {
        // Most requests and holdings are of GPUs, which need no comparison of names.
        if *kind == DeviceType::Gpu {
            return Some(GPUS);
        }
        let others = self.other_devices.as_deref()?;
        let at = others.iter().position(|of_type| of_type.kind == *kind)?;
        Some(at + 1)
    }

    /// The device of a type with this ID: the index of the type, its own index among the type's, and the device.
    pub(crate) fn device(&self, kind: &DeviceType, id: &DeviceId) -> Option<(usize, usize, &Device)> {
        let type_at = self.type_index(kind)?;
        let mut devices = self.devices(type_at).iter().enumerate();
        let (at, device) = devices.find(|(_, device)| device.id == *id)?;
        Some((type_at, at, device))
    }

    /// The device of a type that a record identifies, if it exists.
    pub fn find(&self, kind: &DeviceType, device: &DeviceRef) -> Option<&Device> {
        let mut devices = self.devices(self.type_index(kind)?).iter();
        devices.find(|candidate| device.identifies(candidate))
    }

    /// Indices of the GPUs with these minors, each once; minors that no GPU has are left out.
    pub(crate) fn indices_of(&self, minors: &[u32]) -> BTreeSet<usize> {
        indices_where(&self.gpus, |gpu| minors.contains(&gpu.minor)).collect()
    }

    /// Returns true if the node allocates whole GPUs in the sets of its partition table only.
    pub(crate) fn has_binding_partitions(&self) -> bool {
        self.partitions.as_ref().is_some_and(|table| table.is_binding)
    }

    /// The model of the node's GPUs: that of the largest GPU. `None` without GPUs.
    pub(crate) fn model(&self) -> Option<GpuModel> {
        // Nodes rarely have GPUs of several models; the largest one decides which pods fit at all.
        let memory = self.gpus.iter().map(|gpu| gpu.total().memory).max()?;
        Some(GpuModel {
            memory,
            unit_bytes: self.unit_bytes,
        })
    }

    /// Returns true if a request for whole GPUs by the vendor's resource name may get this GPU.
    pub(crate) fn is_for_vendor(&self, gpu: &Device) -> bool {
        // The vendor's plugin is configured to serve the GPUs that are marked as not shared; all, if none is marked.
        self.serves_vendor || !gpu.sharing || self.gpus.iter().all(|gpu| gpu.sharing)
    }

    /// Indices of the GPUs that a request for whole GPUs by the vendor's resource name may get.
    pub(crate) fn for_vendor(&self) -> impl Iterator<Item = (usize, &Device)> + Clone {
        let gpus = self.gpus.iter().enumerate();
        gpus.filter(|(_, gpu)| self.is_for_vendor(gpu))
    }

    /// Returns true if a GPU takes no shares while `n_unknown` whole GPUs are in use whose UUIDs are not known.
    pub(crate) fn is_withheld(&self, gpu: &Device, n_unknown: u32) -> bool {
        // Any GPU that the vendor's plugin may take could be one of the GPUs in use.
        !gpu.sharing || (n_unknown > 0 && self.is_for_vendor(gpu))
    }

    /// Orders devices by minor, and types by name; removes and reports devices, and a memory unit, that cannot be used.
    pub(crate) fn normalize(&mut self) -> Vec<String> {
        let mut problems = remove_unusable(&DeviceType::Gpu, &mut self.gpus);
        if let Some(types) = &mut self.other_devices {
            for of_type in types.iter_mut() {
                problems.extend(remove_unusable(&of_type.kind, &mut of_type.devices));
            }
            // Sorted, so that equal hardware gives equal inventories, whatever the order of the report.
            types.sort_by(|a, b| a.kind.cmp(&b.kind));
        }
        if let Some(unit_bytes) = self.unit_bytes.filter(|unit| !is_possible_memory(*unit)) {
            problems.push(format!(
                "a memory unit of {unit_bytes} bytes is not from 1 to 2^50; the node's units are taken to be unknown"
            ));
            // Requests in bytes and percent are served nevertheless.
            self.unit_bytes = None;
        }
        problems
    }
}

/// Returns true if a GPU or a memory unit may have this size.
fn is_possible_memory(bytes: u64) -> bool {
    (1..=MAX_MEMORY_BYTES).contains(&bytes)
}

/// Orders the devices of one type by minor and removes those that cannot be used.
fn remove_unusable(kind: &DeviceType, devices: &mut Devices) -> Vec<String> {
    let mut problems = Vec::new();
    // Sorted by minor, then ID: of two devices with one minor the same one is kept, whatever the order of the report.
    let order = |a: &Device, b: &Device| (a.minor, &a.id).cmp(&(b.minor, &b.id));
    // Devices that are in order are not touched, so that they stay shared with the report.
    if !devices.is_sorted_by(|a, b| order(a, b).is_le()) {
        devices.sort_by(order);
    }
    let mut kept: Vec<&Device> = Vec::with_capacity(devices.len());
    // Only devices that are kept claim their ID and minor.
    let mut ids = BTreeSet::new();
    for device in &*devices {
        let is_minor_taken = kept.last().is_some_and(|last| last.minor == device.minor);
        if let Some(problem) = problem_of(kind, device, ids.contains(&device.id), is_minor_taken) {
            problems.push(problem);
            continue;
        }
        ids.insert(&device.id);
        kept.push(device);
    }
    if !problems.is_empty() {
        *devices = kept.into_iter().cloned().collect();
    }
    problems
}

/// The reason for which a device cannot be used.
fn problem_of(kind: &DeviceType, device: &Device, is_id_taken: bool, is_minor_taken: bool) -> Option<String> {
    let Device {
        ref id,
        minor,
        memory_bytes,
        core,
        slots,
        ..
    } = *device;
    // A GPU's own amounts come first: such a fault does not depend on the other devices of the node.
    if *kind == DeviceType::Gpu && !is_possible_memory(memory_bytes) {
        Some(format!(
            "GPU {id} has {memory_bytes} bytes of memory, which is not from 1 to 2^50; it is ignored"
        ))
    } else if *kind == DeviceType::Gpu && (core > MAX_COUNT || slots > MAX_COUNT) {
        Some(format!(
            "GPU {id} has core {core} and {slots} slots, of which one is more than 2^20; it is ignored"
        ))
    } else if is_id_taken {
        Some(format!(
            "{kind} {id} is listed twice; the one with minor {minor} is ignored"
        ))
    } else if is_minor_taken {
        Some(format!("minor {minor} is listed twice; {kind} {id} is ignored"))
    } else {
        None
    }
}
