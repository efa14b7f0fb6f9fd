//! The IDs of virtual devices: kubelet allocates a resource as a count of them, and each is a part of a device, or a whole GPU.
//!
//! The ID of a share is `<GPU UUID>::<n>`, of a whole GPU its UUID, of a percent of another device `<its ID>::<n>`. The ID of a
//! memory unit is `<start of the UUID's hash>-<n>`: there are many, and kubelet accepts no message above 4 MiB. All IDs follow
//! from the devices' own IDs, so they are the same after a restart. The list of a resource is checked against that size.

use std::collections::{BTreeMap, BTreeSet};

use prost::encoding::encoded_len_varint;
use proto::kubelet::MAX_MESSAGE_BYTES;
use proto::memory_unit::MemoryUnit;

use crate::devices::extended_resource::ExtendedResource;
use crate::devices::inventory::{Gpu, NodeInventory, PhysicalId};
use crate::fnv::fnv1a;

/// Possible lengths of a stem, the start of a hash in a memory unit's ID; the shortest that is unique on the node is used.
const STEM_LENGTHS: [usize; 3] = [8, 12, 16];

/// Encoded size, in bytes, of the health `Unhealthy`, the longer of the two words that a list has for the health of a device.
const UNHEALTHY_BYTES: u64 = 2 + proto::kubelet::UNHEALTHY.len() as u64;

/// Encoded size of a device's NUMA node: a message in a message, with a number of [`NUMA_NODES`] in one byte.
const NUMA_NODE_BYTES: u64 = 6;

/// The NUMA nodes that a list may name: their numbers are encoded in one byte.
pub(crate) const NUMA_NODES: std::ops::Range<i32> = 0..128;

/// The IDs of all virtual devices of this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdScheme {
    slots: u32,
    lists_numa_nodes: bool,
    /// The IDs of each device, by resource. A GPU that is not shared has only the ID of a whole GPU.
    by_resource: BTreeMap<ExtendedResource, Vec<NumberedIds>>,
}

/// The IDs of the virtual devices of one device for one resource: a prefix and the numbers from 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NumberedIds {
    pub(crate) device: PhysicalId,
    prefix: String,
    /// The number of IDs; none if the prefix alone is the only ID.
    count: Option<u64>,
    /// Numbers, from `count` on, of memory units that kubelet had allocated before the driver reserved their memory for itself.
    kept: Vec<u64>,
}

impl NumberedIds {
    fn new(device: &PhysicalId, prefix: String, count: Option<u64>) -> Self {
        Self {
            device: device.clone(),
            prefix,
            count,
            kept: Vec::new(),
        }
    }

    /// The IDs of `count` parts of a device, such as shares of a GPU: `<device ID>::<n>`.
    fn parts(device: &PhysicalId, count: u64) -> Self {
        // dcgm-exporter finds the GPU of a share by the text before `::`.
        Self::new(device, format!("{device}::"), Some(count))
    }

    /// Every ID of these virtual devices, in the order of their numbers.
    pub(crate) fn iter(&self) -> impl Iterator<Item = String> + use<> {
        let (prefix, is_alone) = (self.prefix.clone(), self.count.is_none());
        (0..self.count.unwrap_or(1))
            .chain(self.kept.clone())
            .map(move |n| {
                if is_alone {
                    prefix.clone()
                } else {
                    format!("{prefix}{n}")
                }
            })
    }

    fn includes(&self, id: &str) -> bool {
        let Some(number) = id.strip_prefix(&self.prefix) else {
            return false;
        };
        let Some(count) = self.count else {
            return number.is_empty();
        };
        parse_number(number).is_some_and(|n| n < count || self.kept.contains(&n))
    }

    /// Keeps the IDs among `allocated` with numbers from `count` on and below `end`, the count of units in all memory of the GPU.
    fn keep_allocated(&mut self, allocated: &BTreeSet<String>, end: u64) {
        let Some(count) = self.count else { return };
        for id in allocated {
            let number = id.strip_prefix(&self.prefix).and_then(parse_number);
            self.kept.extend(number.filter(|n| (count..end).contains(n)));
        }
        self.kept.sort_unstable();
    }

    /// Encoded size of these entries of a list, if each has `more_bytes` beside its ID and its health.
    fn list_bytes(&self, more_bytes: u64) -> u64 {
        let prefix_bytes = self.prefix.len() as u64;
        match self.count {
            Some(count) => list_bytes(prefix_bytes, count + self.kept.len() as u64, more_bytes),
            None => device_bytes(prefix_bytes, more_bytes),
        }
    }
}

/// The device list of a resource is longer than kubelet accepts.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the texts of the errors say it")]
pub enum TooLong {
    #[error(
        "--memory-unit {unit} makes a device list of {bytes} bytes, and kubelet takes at most {MAX_MESSAGE_BYTES}; the smallest unit that \
         fits the GPUs of this node is --memory-unit {fitting}"
    )]
    Units {
        unit: MemoryUnit,
        bytes: u64,
        fitting: MemoryUnit,
    },
    #[error(
        "the GPUs of this node have more memory than units of any size can list in {MAX_MESSAGE_BYTES} bytes"
    )]
    AnyUnit,
    #[error(
        "--slots {slots} makes a device list of {bytes} bytes, and kubelet takes at most {MAX_MESSAGE_BYTES}; the most that fits the GPUs \
         of this node is --slots {fitting}"
    )]
    Slots { slots: u32, bytes: u64, fitting: u32 },
}

impl IdScheme {
    /// The IDs of shares and memory units of `gpus`, the GPUs that pods may share. If `lists_numa_nodes` is true, lists name the
    /// NUMA node of each device.
    pub fn with_numa_nodes(
        lists_numa_nodes: bool,
        gpus: &[Gpu],
        slots: u32,
        unit: MemoryUnit,
    ) -> Result<Self, TooLong> {
        let mut scheme = Self {
            slots,
            lists_numa_nodes,
            by_resource: BTreeMap::new(),
        };
        let stems = stems(gpus);
        let memory = memory_ids(gpus, &stems, unit);
        // kubelet closes the stream of a list that is too long, and then knows no device of the resource.
        let bytes = scheme.list_bytes(&memory);
        if bytes > MAX_LIST_BYTES {
            let fits = |mib| {
                let Some(unit) = unit_of(mib) else { return false };
                scheme.list_bytes(&memory_ids(gpus, &stems, unit)) <= MAX_LIST_BYTES
            };
            let fitting = first_true(1, MAX_UNIT_MIB, fits).and_then(unit_of);
            let fitting = fitting.ok_or(TooLong::AnyUnit)?;
            return Err(TooLong::Units { unit, bytes, fitting });
        }
        let shares = share_ids(gpus, u64::from(slots));
        let bytes = scheme.list_bytes(&shares);
        if bytes > MAX_LIST_BYTES {
            let is_too_many = |slots| scheme.list_bytes(&share_ids(gpus, slots)) > MAX_LIST_BYTES;
            let first_too_many = first_true(1, u64::from(slots), is_too_many).unwrap_or(1);
            let fitting = u32::try_from(first_too_many - 1).unwrap_or(0);
            return Err(TooLong::Slots {
                slots,
                bytes,
                fitting,
            });
        }
        scheme.by_resource.insert(ExtendedResource::Memory, memory);
        scheme.by_resource.insert(ExtendedResource::Shared, shares);
        Ok(scheme)
    }

    /// The same IDs, with those of whole GPUs and of devices of other types in this inventory.
    #[must_use]
    pub(crate) fn with_inventory(mut self, inventory: &NodeInventory) -> Self {
        let of_shared_gpus = [ExtendedResource::Shared, ExtendedResource::Memory];
        self.by_resource
            .retain(|resource, _| of_shared_gpus.contains(resource));
        for gpu in &inventory.gpus {
            // The form of NVIDIA's own plugin: monitoring tools find the GPU by it.
            let ids = NumberedIds::new(&gpu.uuid, gpu.uuid.to_string(), None);
            let whole = self.by_resource.entry(ExtendedResource::Whole);
            whole.or_default().push(ids);
        }
        for device in &inventory.others {
            if let Some(resource) = ExtendedResource::of_type(&device.device_type)
                && let Some(percent) = device.percent()
            {
                let ids = NumberedIds::parts(&device.id, percent.min(MAX_PARTS));
                self.by_resource.entry(resource).or_default().push(ids);
            }
        }
        self
    }

    /// The same IDs, with `allocated` ones whose memory the driver has reserved since: kubelet refuses a pod whose IDs are gone.
    #[must_use]
    pub(crate) fn with_allocated(
        mut self,
        allocated: &BTreeSet<String>,
        gpus: &[Gpu],
        unit: MemoryUnit,
    ) -> Self {
        let numbered = self.by_resource.get_mut(&ExtendedResource::Memory);
        for ids in numbered.into_iter().flatten() {
            if let Some(gpu) = gpus.iter().find(|gpu| gpu.uuid == ids.device) {
                ids.keep_allocated(allocated, unit.units_in(gpu.memory_with_reserved()));
            }
        }
        self
    }

    pub(crate) fn lists_numa_nodes(&self) -> bool {
        self.lists_numa_nodes
    }

    pub(crate) fn slots(&self) -> u32 {
        self.slots
    }

    /// True if pods may share the GPU with this UUID: it has IDs of shares.
    pub(crate) fn is_shared(&self, uuid: &PhysicalId) -> bool {
        let mut shared = self.numbered(ExtendedResource::Shared).iter();
        shared.any(|ids| ids.device == *uuid)
    }

    /// The IDs of a resource's virtual devices, device by device.
    pub(crate) fn numbered(&self, resource: ExtendedResource) -> &[NumberedIds] {
        self.by_resource.get(&resource).map_or(&[], Vec::as_slice)
    }

    /// The IDs of one device's virtual devices for a resource.
    pub fn ids(&self, resource: ExtendedResource, device: &PhysicalId) -> impl Iterator<Item = String> {
        let mut numbered = self.numbered(resource).iter();
        let ids = numbered.find(|ids| ids.device == *device);
        ids.into_iter().flat_map(NumberedIds::iter)
    }

    /// The device that the virtual device with this ID is a part of.
    pub fn device_of(&self, resource: ExtendedResource, id: &str) -> Option<&PhysicalId> {
        let mut numbered = self.numbered(resource).iter();
        numbered.find(|ids| ids.includes(id)).map(|ids| &ids.device)
    }

    /// True if this node has a virtual device of the resource.
    pub fn has(&self, resource: ExtendedResource) -> bool {
        self.numbered(resource).iter().any(|ids| ids.count != Some(0))
    }

    /// Encoded size of a list of these devices when all of them are unhealthy.
    fn list_bytes(&self, numbered: &[NumberedIds]) -> u64 {
        let more_bytes = if self.lists_numa_nodes { NUMA_NODE_BYTES } else { 0 };
        let mut bytes = 0_u64;
        for ids in numbered {
            bytes = bytes.saturating_add(ids.list_bytes(more_bytes));
        }
        bytes
    }
}

fn parse_number(digits: &str) -> Option<u64> {
    // The parser alone would accept a sign.
    let is_number = digits.as_bytes().iter().all(u8::is_ascii_digit);
    digits.parse().ok().filter(|_| is_number)
}

fn share_ids(gpus: &[Gpu], slots: u64) -> Vec<NumberedIds> {
    let ids = gpus.iter().map(|gpu| NumberedIds::parts(&gpu.uuid, slots));
    ids.collect()
}

/// The IDs of memory units of each GPU; `stems` are the starts of these IDs, one for each GPU in the same order.
fn memory_ids(gpus: &[Gpu], stems: &[String], unit: MemoryUnit) -> Vec<NumberedIds> {
    let mut numbered = Vec::with_capacity(gpus.len());
    for (gpu, stem) in gpus.iter().zip(stems) {
        let count = unit.units_in(gpu.memory_bytes);
        numbered.push(NumberedIds::new(&gpu.uuid, format!("{stem}-"), Some(count)));
    }
    numbered
}

/// Most virtual devices of one device other than a GPU: an absurd amount in an inventory must not make an absurd list.
const MAX_PARTS: u64 = 1000;

const MAX_LIST_BYTES: u64 = MAX_MESSAGE_BYTES as u64;

/// The largest unit, 1 TiB, in MiB.
const MAX_UNIT_MIB: u64 = 1 << 20;

fn unit_of(mib: u64) -> Option<MemoryUnit> {
    MemoryUnit::from_bytes(mib << 20)
}

/// The first number of `low..=high` for which the predicate holds, by bisection: it must hold for all higher numbers too.
fn first_true(mut low: u64, mut high: u64, holds: impl Fn(u64) -> bool) -> Option<u64> {
    if !holds(high) {
        return None;
    }
    while low < high {
        let middle = low.midpoint(high);
        if holds(middle) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    Some(low)
}

/// Encoded size of `count` devices whose IDs are a prefix of this length and the numbers from 0.
fn list_bytes(prefix_bytes: u64, count: u64, more_bytes: u64) -> u64 {
    let mut bytes = 0_u64;
    // IDs whose numbers have equally many digits have the same size, so the loop goes over digits and not over a million IDs.
    let (mut digits, mut start) = (1, 0_u64);
    while start < count {
        let end = 10_u64.saturating_pow(digits).min(count);
        let one_device = device_bytes(prefix_bytes + u64::from(digits), more_bytes);
        bytes = bytes.saturating_add((end - start).saturating_mul(one_device));
        (digits, start) = (digits + 1, end);
    }
    bytes
}

/// Encoded size of one unhealthy device with an ID of this length: each field is a tag, a length and its bytes.
fn device_bytes(id_bytes: u64, more_bytes: u64) -> u64 {
    let fields = 1 + encoded_len_varint(id_bytes) as u64 + id_bytes + UNHEALTHY_BYTES + more_bytes;
    1 + encoded_len_varint(fields) as u64 + fields
}

/// The start of the hash of each GPU's UUID, as long as it is unique: a GPU keeps its IDs when another one is added.
fn stems(gpus: &[Gpu]) -> Vec<String> {
    let hash = |gpu: &Gpu| format!("{:016x}", fnv1a(gpu.uuid.as_str()));
    let hashes: Vec<String> = gpus.iter().map(hash).collect();
    let mut stems = Vec::with_capacity(gpus.len());
    for (gpu, own) in gpus.iter().zip(&hashes) {
        let is_unique = |stem: &&str| hashes.iter().filter(|hash| hash.starts_with(stem)).count() == 1;
        let stem = STEM_LENGTHS
            .map(|len| own.get(..len).unwrap_or(own))
            .into_iter()
            .find(is_unique);
        // Equal hashes of two UUIDs are as good as impossible; the UUIDs themselves differ.
        stems.push(stem.unwrap_or(gpu.uuid.as_str()).to_owned());
    }
    stems
}

#[cfg(test)]
impl IdScheme {
    pub(crate) fn new(gpus: &[Gpu], slots: u32, unit: MemoryUnit) -> Result<Self, TooLong> {
        Self::with_numa_nodes(false, gpus, slots, unit)
    }

    /// Encoded size of the list of all devices of a resource when all of them are unhealthy.
    pub(crate) fn longest_list_bytes(&self, resource: ExtendedResource) -> u64 {
        self.list_bytes(self.numbered(resource))
    }
}

#[cfg(test)]
mod tests;
