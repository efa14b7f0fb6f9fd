//! IDs of virtual devices: those of each device, the device of each ID, and the size of their list on the wire.
//!
//! A share is `<GPU UUID>::<n>`, a whole GPU its UUID, a percent of another device `<its ID>::<n>`. A memory unit is
//! `<start of the UUID's hash>-<n>`: there are many of them, and kubelet takes no message above 4 MiB. All are functions of
//! what identifies the node's devices, so they are the same after a restart.

use std::collections::{BTreeMap, HashMap};

use proto::kubelet::MAX_MESSAGE_BYTES;
use proto::memory_unit::MemoryUnit;

use crate::cdi::fnv1a;
use crate::extended_resource::ExtendedResource;
use crate::inventory::{Gpu, Inventory, OtherDevice, PhysicalId};

/// Numbers of digits of a UUID's hash that may begin a memory unit's ID; the shortest that is unique is used.
const STEM_LENGTHS: [usize; 3] = [8, 12, 16];

/// Size on the wire of a device's health, the longer word.
const UNHEALTHY_BYTES: u64 = 2 + proto::kubelet::UNHEALTHY.len() as u64;

/// Size on the wire of a device's NUMA node: a message in a message, with a number below [`NUMA_NODES`] in it.
const NUMA_NODE_BYTES: u64 = 6;

/// NUMA nodes that a list may name.
pub const NUMA_NODES: std::ops::Range<i32> = 0..128;

/// The IDs of every virtual device of this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdScheme {
    slots: u32,
    /// True if lists name the NUMA node of each device.
    lists_numa_nodes: bool,
    /// The GPUs that are shared.
    gpus: Vec<GpuIds>,
    /// Every GPU: as a whole it can be given to a pod whether it is shared or not.
    whole: Vec<PhysicalId>,
    /// The devices of other types, with their resource and its amount.
    others: Vec<(ExtendedResource, PhysicalId, u64)>,
    /// The device of each prefix of IDs: kubelet shows every free ID when it asks for the preferred ones.
    by_prefix: BTreeMap<ExtendedResource, HashMap<String, Prefixed>>,
}

/// The device and IDs of a prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Prefixed {
    device: PhysicalId,
    /// The number of IDs with this prefix; none if the prefix is the whole ID.
    count: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct GpuIds {
    uuid: PhysicalId,
    /// The beginning of the IDs of its memory units.
    stem: String,
    units: u64,
}

/// The virtual devices of one device for one resource.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Numbered<'a> {
    /// The device.
    pub device: &'a PhysicalId,
    /// Their IDs.
    pub ids: NumberedIds,
}

/// The IDs of one device: a prefix and the numbers from 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumberedIds {
    prefix: String,
    /// The number of IDs; none if the only one is the prefix alone.
    count: Option<u64>,
}

impl<'a> Numbered<'a> {
    fn percent(device: &'a PhysicalId, count: u64) -> Self {
        Self {
            device,
            ids: NumberedIds {
                prefix: format!("{device}::"),
                count: Some(count),
            },
        }
    }
}

impl NumberedIds {
    /// Every ID.
    pub fn iter(&self) -> impl Iterator<Item = String> + use<> {
        let (prefix, is_alone) = (self.prefix.clone(), self.count.is_none());
        (0..self.count.unwrap_or(1)).map(move |n| {
            if is_alone {
                prefix.clone()
            } else {
                format!("{prefix}{n}")
            }
        })
    }

    /// Size of their list if each entry has `besides` bytes besides its ID and its health.
    fn list_bytes(&self, besides: u64) -> u64 {
        let prefix = self.prefix.len() as u64;
        self.count.map_or_else(
            || device_bytes(prefix, besides),
            |count| list_bytes(prefix, count, besides),
        )
    }
}

/// The list of a resource's devices is longer than kubelet accepts.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TooLong {
    /// There are too many memory units.
    #[error(
        "--memory-unit {unit} makes a device list of {bytes} bytes, and kubelet takes at most {MAX_MESSAGE_BYTES}; the smallest unit that \
         fits the GPUs of this node is --memory-unit {fitting}"
    )]
    Units {
        /// The configured unit.
        unit: MemoryUnit,
        /// Size of the list.
        bytes: u64,
        /// The smallest unit that can be used.
        fitting: MemoryUnit,
    },
    /// There are too many memory units, whatever the unit.
    #[error(
        "the GPUs of this node have more memory than units of any size can list in {MAX_MESSAGE_BYTES} bytes"
    )]
    AnyUnit,
    /// There are too many shares.
    #[error(
        "--slots {slots} makes a device list of {bytes} bytes, and kubelet takes at most {MAX_MESSAGE_BYTES}; the most that fits the GPUs \
         of this node is --slots {fitting}"
    )]
    Slots {
        /// The configured number.
        slots: u32,
        /// Size of the list.
        bytes: u64,
        /// The largest number that can be used.
        fitting: u32,
    },
}

impl IdScheme {
    /// Names the virtual devices of `gpus`, which are shared.
    ///
    /// # Errors
    /// The longest list, in which all of them are unhealthy, is longer than kubelet accepts.
    pub fn new(gpus: &[Gpu], slots: u32, unit: MemoryUnit) -> Result<Self, TooLong> {
        Self::with_numa_nodes(false, gpus, slots, unit)
    }

    /// The same for a list that names the NUMA node of each device, if it `lists_numa_nodes`.
    ///
    /// # Errors
    /// As above; such a list is longer.
    pub fn with_numa_nodes(
        lists_numa_nodes: bool,
        gpus: &[Gpu],
        slots: u32,
        unit: MemoryUnit,
    ) -> Result<Self, TooLong> {
        let stems = stems(gpus);
        let with = |slots: u32, unit: MemoryUnit| {
            let named = gpus.iter().zip(&stems);
            let ids = |(gpu, stem): (&Gpu, &String)| GpuIds {
                uuid: gpu.uuid.clone(),
                stem: stem.clone(),
                units: unit.units_in(gpu.memory_bytes),
            };
            let gpus = named.map(ids).collect();
            Self {
                slots,
                lists_numa_nodes,
                gpus,
                whole: Vec::new(),
                others: Vec::new(),
                by_prefix: BTreeMap::new(),
            }
        };
        let mut scheme = with(slots, unit);
        let bytes = scheme.longest_list_bytes(ExtendedResource::Memory);
        if bytes > LIMIT {
            let fits = |mib| {
                unit_of(mib).is_some_and(|unit| {
                    with(slots, unit).longest_list_bytes(ExtendedResource::Memory) <= LIMIT
                })
            };
            let fitting = first_true(1, MAX_UNIT_MIB, fits)
                .and_then(unit_of)
                .ok_or(TooLong::AnyUnit)?;
            return Err(TooLong::Units { unit, bytes, fitting });
        }
        let bytes = scheme.longest_list_bytes(ExtendedResource::Shared);
        if bytes > LIMIT {
            let too_many = |slots| {
                with(u32::try_from(slots).unwrap_or(u32::MAX), unit)
                    .longest_list_bytes(ExtendedResource::Shared)
                    > LIMIT
            };
            let first_too_many = first_true(1, u64::from(slots), too_many).unwrap_or(1);
            let fitting = u32::try_from(first_too_many - 1).unwrap_or(0);
            return Err(TooLong::Slots {
                slots,
                bytes,
                fitting,
            });
        }
        scheme.index();
        Ok(scheme)
    }

    /// Indexes the prefixes of all IDs.
    fn index(&mut self) {
        let prefixes = |resource| {
            let of_device = |Numbered { device, ids }: Numbered<'_>| {
                (
                    ids.prefix,
                    Prefixed {
                        device: device.clone(),
                        count: ids.count,
                    },
                )
            };
            self.numbered(resource).map(of_device).collect()
        };
        self.by_prefix = ExtendedResource::ALL
            .into_iter()
            .map(|resource| (resource, prefixes(resource)))
            .collect();
    }

    /// The same with the IDs of whole GPUs and of devices of other types.
    #[must_use]
    pub fn with(mut self, inventory: &Inventory) -> Self {
        let other = |device: &OtherDevice| {
            let resource = ExtendedResource::of_type(&device.device_type)?;
            Some((resource, device.id.clone(), device.percent()?.min(MOST_OF_ONE)))
        };
        self.whole = inventory.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
        self.others = inventory.others.iter().filter_map(other).collect();
        self.index();
        self
    }

    /// True if lists name the NUMA node of each device.
    pub fn lists_numa_nodes(&self) -> bool {
        self.lists_numa_nodes
    }

    /// Shares of each GPU.
    pub fn slots(&self) -> u32 {
        self.slots
    }

    /// True if this GPU is shared.
    pub fn knows(&self, uuid: &PhysicalId) -> bool {
        self.gpus.iter().any(|gpu| gpu.uuid == *uuid)
    }

    /// The virtual devices of a resource, device by device.
    pub fn numbered(&self, resource: ExtendedResource) -> impl Iterator<Item = Numbered<'_>> {
        let shared = self.gpus.iter().filter_map(move |gpu| match resource {
            ExtendedResource::Shared => Some(Numbered::percent(&gpu.uuid, u64::from(self.slots))),
            ExtendedResource::Memory => Some(Numbered {
                device: &gpu.uuid,
                ids: NumberedIds {
                    prefix: format!("{}-", gpu.stem),
                    count: Some(gpu.units),
                },
            }),
            ExtendedResource::Whole | ExtendedResource::Rdma | ExtendedResource::Fpga => None,
        });
        let whole = self
            .whole
            .iter()
            .filter(move |_| resource == ExtendedResource::Whole);
        let whole = whole.map(|uuid| Numbered {
            device: uuid,
            ids: NumberedIds {
                prefix: uuid.to_string(),
                count: None,
            },
        });
        let others = self.others.iter().filter(move |(other, ..)| *other == resource);
        shared
            .chain(whole)
            .chain(others.map(|(_, id, amount)| Numbered::percent(id, *amount)))
    }

    /// The IDs of one device's virtual devices.
    pub fn ids(&self, resource: ExtendedResource, device: &PhysicalId) -> impl Iterator<Item = String> {
        self.numbered(resource)
            .find(|numbered| numbered.device == device)
            .into_iter()
            .flat_map(|numbered| numbered.ids.iter())
    }

    /// The device whose virtual device this is.
    pub fn device_of(&self, resource: ExtendedResource, id: &str) -> Option<&PhysicalId> {
        let by_prefix = self.by_prefix.get(&resource)?;
        if let Some(Prefixed { device, count: None }) = by_prefix.get(id) {
            return Some(device);
        }
        let prefix = id.trim_end_matches(|letter: char| letter.is_ascii_digit());
        let Prefixed { device, count } = by_prefix.get(prefix)?;
        let number = id.get(prefix.len()..)?.parse::<u64>().ok()?;
        count.is_some_and(|count| number < count).then_some(device)
    }

    /// True if there is a virtual device of a resource.
    pub fn has(&self, resource: ExtendedResource) -> bool {
        self.numbered(resource)
            .any(|numbered| numbered.ids.count != Some(0))
    }

    /// Size of the list of all devices when all of them are unhealthy.
    pub fn longest_list_bytes(&self, resource: ExtendedResource) -> u64 {
        let besides = if self.lists_numa_nodes { NUMA_NODE_BYTES } else { 0 };
        self.numbered(resource)
            .map(|numbered| numbered.ids.list_bytes(besides))
            .fold(0, u64::saturating_add)
    }
}

/// Most virtual devices of one device that are listed: an absurd amount in an inventory must not make an absurd list.
const MOST_OF_ONE: u64 = 1000;

const LIMIT: u64 = MAX_MESSAGE_BYTES as u64;

/// The largest unit, 1 TiB, in MiB.
const MAX_UNIT_MIB: u64 = 1 << 20;

fn unit_of(mib: u64) -> Option<MemoryUnit> {
    MemoryUnit::from_bytes(mib << 20)
}

/// The first of `low..=high` for which a monotone predicate holds.
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

/// Size of `count` devices whose IDs are a prefix and the numbers from 0.
fn list_bytes(prefix: u64, count: u64, besides: u64) -> u64 {
    let mut bytes = 0_u64;
    let (mut digits, mut start) = (1, 0_u64);
    while start < count {
        let end = 10_u64.saturating_pow(digits).min(count);
        bytes = bytes
            .saturating_add((end - start).saturating_mul(device_bytes(prefix + u64::from(digits), besides)));
        (digits, start) = (digits + 1, end);
    }
    bytes
}

/// Size of one unhealthy device with an ID of `id` bytes: each field is a tag, a length and its bytes.
fn device_bytes(id: u64, besides: u64) -> u64 {
    let fields = 1 + varint_bytes(id) + id + UNHEALTHY_BYTES + besides;
    1 + varint_bytes(fields) + fields
}

fn varint_bytes(value: u64) -> u64 {
    u64::from(value.max(1).ilog2() / 7 + 1)
}

/// The unique stem of each GPU of the node: the start of its UUID's hash, longer only where two are alike. The hash is of the UUID
/// alone, so that a GPU keeps its IDs when another GPU is added.
fn stems(gpus: &[Gpu]) -> Vec<String> {
    let hashes: Vec<String> = gpus
        .iter()
        .map(|gpu| format!("{:016x}", fnv1a(gpu.uuid.as_str())))
        .collect();
    let stem = |own: &String| {
        let alone = |len: &usize| {
            hashes
                .iter()
                .filter(|other| start(other, *len) == start(own, *len))
                .count()
                == 1
        };
        STEM_LENGTHS
            .into_iter()
            .find(alone)
            .map(|len| start(own, len).to_owned())
    };
    let stems = gpus
        .iter()
        .zip(&hashes)
        .map(|(gpu, hash)| stem(hash).unwrap_or_else(|| gpu.uuid.to_string()));
    stems.collect()
}

fn start(text: &str, len: usize) -> &str {
    text.get(..len).unwrap_or(text)
}

#[cfg(test)]
mod tests;
