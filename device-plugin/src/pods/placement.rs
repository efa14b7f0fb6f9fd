//! Which devices a pod's annotations name, read in the terms of either dialect.
//!
//! Knows no inventory: whether the named devices exist is the answerer's business.

use std::collections::BTreeMap;
use std::fmt;

use proto::device::{TYPE_FPGA, TYPE_GPU, TYPE_RDMA};
use proto::memory_unit::MemoryUnit;
use proto::quantity::Quantity;
use proto::record::{
    BIND_TIMESTAMP, DEVICE_ALLOCATED, DeviceAllocation, DeviceAllocations, GpushareRecord, MEM_ASSUME_TIME,
    MEM_IDX, Record, RecordError,
};
use proto::resource::{FPGA, GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO, RDMA};

use crate::extended_resource::ExtendedResource;
use crate::fleet::{DeviceKey, type_name};
use crate::inventory::{Gpu, InvalidPhysicalId, PhysicalId};

/// How an annotation names a device, among those of its type.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DeviceName {
    /// By what identifies it, in records of this project's scheduler.
    Id(PhysicalId),
    /// By minor number, in records of the old gpushare extender.
    Minor(u32),
}

impl DeviceName {
    /// Whether this names the GPU.
    pub fn names(&self, gpu: &Gpu) -> bool {
        self.fits(&gpu.uuid, gpu.minor)
    }

    /// Whether this names the device.
    pub fn is(&self, device: &DeviceKey) -> bool {
        self.fits(&device.id, device.minor)
    }

    fn fits(&self, own: &PhysicalId, own_minor: u32) -> bool {
        match self {
            Self::Id(id) => id == own,
            Self::Minor(minor) => *minor == own_minor,
        }
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Id(id) => id.fmt(f),
            Self::Minor(minor) => write!(f, "minor {minor}"),
        }
    }
}

/// What a pod holds of one device that is no GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Portion {
    /// Percent of it, 0 if the record does not say.
    pub percent: u64,
    /// PCI addresses of the virtual functions that it was given; none if it was given the device itself.
    pub functions: Vec<PhysicalId>,
}

/// The devices of one type that a pod was given, in the record's order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Others {
    /// What they are called.
    pub names: Vec<DeviceName>,
    /// What the pod holds of each, in the same order.
    pub held: Vec<Portion>,
}

/// What a pod holds of one GPU, as far as its record says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Memory in bytes.
    pub bytes: Option<u64>,
    /// Memory in percent of the GPU.
    pub ratio: Option<u64>,
    /// Percent of computing power; 0 if none was asked for.
    pub core: u64,
}

impl Held {
    /// Its memory of a GPU that has so many bytes.
    pub fn bytes_of(&self, total: u64) -> Option<u64> {
        let of_ratio =
            |ratio: u64| u64::try_from(u128::from(total) * u128::from(ratio) / 100).unwrap_or(u64::MAX);
        self.bytes.or_else(|| self.ratio.map(of_ratio))
    }
}

/// The usable record of a pod.
#[derive(Clone, Debug, PartialEq)]
pub struct Placement {
    /// The pod's GPUs, in the record's order; at least one if it asks for any.
    pub gpus: Vec<DeviceName>,
    /// What it holds of each of them, in the same order.
    pub held: Vec<Held>,
    /// Its devices of other types that are served, by type; none of a type without devices.
    pub others: BTreeMap<&'static str, Others>,
    /// The record as it is written, in Koordinator's form; empty on pods that the old gpushare extender placed.
    pub allocations: DeviceAllocations,
    /// When the scheduler assumed the pod, unix nanoseconds.
    pub assumed_at: u64,
    /// gpushare's own annotations, if it has them.
    pub gpushare: Option<GpushareRecord>,
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let others = self
            .others
            .values()
            .flat_map(|others| others.names.iter().zip(&others.held));
        let others = others.flat_map(|(name, portion)| {
            std::iter::once(name.to_string()).chain(portion.functions.iter().map(ToString::to_string))
        });
        let names: Vec<String> = self.gpus.iter().map(ToString::to_string).chain(others).collect();
        f.write_str(&names.join(","))
    }
}

/// Why a pod has no usable record. Shown to the pod's owner.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unplaced {
    /// An annotation that must be there is not.
    #[error("annotation {key} is missing: it was not placed by gpushare-scheduler")]
    Missing {
        /// The annotation.
        key: &'static str,
    },
    /// An annotation does not parse.
    #[error("{0}")]
    Unreadable(RecordError),
    /// The record is JSON of the right form and names no device of a type that the pod asks for.
    #[error("annotation {DEVICE_ALLOCATED} names no {}", type_name(.0))]
    NoDevice(&'static str),
    /// The record names a device by something that cannot be one.
    #[error("annotation {DEVICE_ALLOCATED}: {0}")]
    BadDevice(String),
    /// The two dialects' annotations name different GPUs.
    #[error(
        "annotation {MEM_IDX} is {idx}, which is not the GPU that annotation {DEVICE_ALLOCATED} names (minor {minor})"
    )]
    Contradiction {
        /// What gpushare's annotation says.
        idx: u32,
        /// What Koordinator's says.
        minor: i32,
    },
}

impl Placement {
    /// Reads the annotations of a pod that asks for `asked`, which says also whose annotation is missed when there is none.
    pub(super) fn read(
        annotations: &BTreeMap<String, String>,
        asked: &[ExtendedResource],
    ) -> Result<Self, Unplaced> {
        let missing = |units, other| Unplaced::Missing {
            key: if asked.contains(&ExtendedResource::Memory) {
                units
            } else {
                other
            },
        };
        let record = Record::read(annotations).map_err(Unplaced::Unreadable)?;
        let record = record.ok_or_else(|| missing(MEM_IDX, DEVICE_ALLOCATED))?;
        let assumed_at = record.assumed_at;
        let placement = Self::of_record(record, assumed_at.unwrap_or_default())?;
        if placement.gpus.is_empty() && asked.iter().any(|resource| resource.device_type() == TYPE_GPU) {
            return Err(Unplaced::NoDevice(TYPE_GPU));
        }
        assumed_at
            .map(|_| placement)
            .ok_or_else(|| missing(MEM_ASSUME_TIME, BIND_TIMESTAMP))
    }

    /// What a record says that was assumed then.
    ///
    /// # Errors
    /// It names no device, or something that cannot be one.
    pub fn of_record(record: Record, assumed_at: u64) -> Result<Self, Unplaced> {
        let (gpus, held): (Vec<_>, Vec<_>) = named_gpus(&record)?.into_iter().unzip();
        let mut others = BTreeMap::new();
        for (device_type, resource) in [(TYPE_RDMA, RDMA), (TYPE_FPGA, FPGA)] {
            if let Some(devices) = record
                .allocations
                .get(device_type)
                .filter(|devices| !devices.is_empty())
            {
                others.insert(device_type, Others::read(device_type, resource, devices)?);
            }
        }
        if gpus.is_empty() && others.is_empty() {
            return Err(Unplaced::NoDevice(TYPE_GPU));
        }
        Ok(Self {
            gpus,
            held,
            others,
            assumed_at,
            gpushare: record.gpushare,
            allocations: record.allocations,
        })
    }

    /// The pod's devices that a resource is about.
    pub fn names(&self, resource: ExtendedResource) -> &[DeviceName] {
        match resource.device_type() {
            TYPE_GPU => &self.gpus,
            other => self.others.get(other).map_or(&[], |others| &others.names),
        }
    }

    /// The record that an exchange has given to a pod whose annotations say `told`.
    pub(super) fn exchanged(
        allocations: &DeviceAllocations,
        told: &Result<Self, Unplaced>,
    ) -> Result<Self, Unplaced> {
        let told = told.as_ref().ok();
        let only = allocations
            .get(TYPE_GPU)
            .and_then(|devices| devices.first())
            .and_then(|device| u32::try_from(device.minor).ok());
        let gpushare = told
            .and_then(|told| told.gpushare)
            .zip(only)
            .map(|(record, idx)| GpushareRecord { idx, ..record });
        let assumed_at = told.map(|told| told.assumed_at);
        Self::of_record(
            Record {
                allocations: allocations.clone(),
                assumed_at,
                gpushare,
            },
            assumed_at.unwrap_or_default(),
        )
    }

    /// The record in Koordinator's form, also of a pod that has only gpushare's annotations.
    pub fn to_allocations(&self, memory_unit: MemoryUnit) -> DeviceAllocations {
        let (Some(DeviceName::Minor(minor)), Some(gpushare), true) =
            (self.gpus.first(), self.gpushare, self.allocations.is_empty())
        else {
            return self.allocations.clone();
        };
        let bytes = gpushare.pod_units.saturating_mul(memory_unit.bytes());
        let resources = (bytes > 0).then(|| (GPU_MEMORY.to_owned(), Quantity::from_unsigned(bytes)));
        let device = DeviceAllocation {
            minor: i32::try_from(*minor).unwrap_or(i32::MAX),
            resources: resources.into_iter().collect(),
            ..DeviceAllocation::default()
        };
        [(TYPE_GPU.to_owned(), vec![device])].into()
    }

    /// Whether this names the same devices as an earlier record of the pod, and has everything that the earlier one has.
    pub(super) fn has_record_of(&self, before: &Self) -> bool {
        self.gpus == before.gpus && self.others == before.others && !self.lacks_of(before)
    }

    /// Whether annotations are missing that an earlier record of the pod has.
    pub(super) fn lacks_of(&self, before: &Self) -> bool {
        let is_less = |now: GpushareRecord, before: GpushareRecord| {
            (now.pod_units == 0 && before.pod_units > 0) || (now.device_units == 0 && before.device_units > 0)
        };
        let lacks_gpushare = before
            .gpushare
            .is_some_and(|before| self.gpushare.is_none_or(|now| is_less(now, before)));
        lacks_gpushare || (self.allocations.is_empty() && !before.allocations.is_empty())
    }

    /// The record as it is written.
    pub fn to_record(&self) -> Record {
        Record {
            allocations: self.allocations.clone(),
            assumed_at: Some(self.assumed_at),
            gpushare: self.gpushare,
        }
    }

    /// Whether the devices have been handed over before.
    pub fn is_assigned(&self) -> bool {
        self.gpushare.is_some_and(|gpushare| gpushare.assigned)
    }

    /// The virtual functions that it was given of the devices that a resource is about.
    pub fn functions(&self, resource: ExtendedResource) -> impl Iterator<Item = &PhysicalId> {
        let held = self
            .others
            .get(resource.device_type())
            .into_iter()
            .flat_map(|others| &others.held);
        held.flat_map(|portion| &portion.functions)
    }

    /// Whether both name the same devices, and the same virtual functions of them.
    pub fn is_on_devices_of(&self, other: &Self) -> bool {
        let is_same = |resource| {
            self.names(resource) == other.names(resource)
                && self.functions(resource).eq(other.functions(resource))
        };
        [
            ExtendedResource::Whole,
            ExtendedResource::Rdma,
            ExtendedResource::Fpga,
        ]
        .into_iter()
        .all(is_same)
    }

    /// Whether the pod was given this device, or this virtual function of it.
    pub fn gives(&self, resource: ExtendedResource, device: &DeviceKey, function: Option<&str>) -> bool {
        let Some(at) = self.names(resource).iter().position(|name| name.is(device)) else {
            return false;
        };
        let portion = self
            .others
            .get(resource.device_type())
            .and_then(|others| others.held.get(at));
        let functions = portion.map_or(&[][..], |portion| &portion.functions);
        function.map_or(functions.is_empty(), |function| {
            functions.iter().any(|given| given.as_str() == function)
        })
    }

    /// Whether every one of these devices of a resource is one of the pod's.
    pub fn includes(&self, resource: ExtendedResource, devices: &[DeviceKey]) -> bool {
        devices
            .iter()
            .all(|device| self.names(resource).iter().any(|name| name.is(device)))
    }
}

impl Others {
    fn read(device_type: &str, resource: &str, devices: &[DeviceAllocation]) -> Result<Self, Unplaced> {
        let mut others = Self::default();
        for device in devices {
            let name = device_name(device_type, device)?;
            if others.names.contains(&name) {
                continue;
            }
            // Of a function that the record does not tell, nothing can be handed out: the device itself least of all.
            let bad = |error: InvalidPhysicalId| Unplaced::BadDevice(error.to_string());
            let untold = || {
                Unplaced::BadDevice(format!(
                    "{device_type} minor {} has a function without busID",
                    device.minor
                ))
            };
            let functions = device.functions().into_iter();
            let functions = functions.map(|one| {
                if one.bus_id.is_empty() {
                    Err(untold())
                } else {
                    one.bus_id.parse().map_err(bad)
                }
            });
            let functions: Vec<PhysicalId> = functions.collect::<Result<_, _>>()?;
            let percent = device
                .resources
                .get(resource)
                .and_then(|amount| amount.unsigned())
                .unwrap_or(0);
            others.held.push(Portion { percent, functions });
            others.names.push(name);
        }
        Ok(others)
    }
}

/// What a record calls a device.
fn device_name(device_type: &str, device: &DeviceAllocation) -> Result<DeviceName, Unplaced> {
    if device.id.is_empty() {
        let no_minor =
            |_| Unplaced::BadDevice(format!("minor {} is no {}", device.minor, type_name(device_type)));
        return u32::try_from(device.minor)
            .map(DeviceName::Minor)
            .map_err(no_minor);
    }
    device
        .id
        .parse()
        .map(DeviceName::Id)
        .map_err(|error: InvalidPhysicalId| Unplaced::BadDevice(error.to_string()))
}

fn named_gpus(record: &Record) -> Result<Vec<(DeviceName, Held)>, Unplaced> {
    let Some(allocations) = record
        .allocations
        .get(TYPE_GPU)
        .filter(|allocations| !allocations.is_empty())
    else {
        return Ok(record
            .gpushare
            .map(|gpushare| (DeviceName::Minor(gpushare.idx), Held::default()))
            .into_iter()
            .collect());
    };
    if let (Some(gpushare), [only]) = (record.gpushare, allocations.as_slice())
        && i64::from(gpushare.idx) != i64::from(only.minor)
    {
        return Err(Unplaced::Contradiction {
            idx: gpushare.idx,
            minor: only.minor,
        });
    }
    let mut gpus = Vec::<(DeviceName, Held)>::with_capacity(allocations.len());
    for allocation in allocations {
        let name = device_name(TYPE_GPU, allocation)?;
        if !gpus.iter().any(|(known, _)| *known == name) {
            let amount = |resource: &str| {
                allocation
                    .resources
                    .get(resource)
                    .and_then(|amount| amount.unsigned())
            };
            let held = Held {
                bytes: amount(GPU_MEMORY),
                ratio: amount(GPU_MEMORY_RATIO),
                core: amount(GPU_CORE).unwrap_or(0),
            };
            gpus.push((name, held));
        }
    }
    Ok(gpus)
}
