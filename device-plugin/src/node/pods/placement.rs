//! The record in a pod's annotations: its devices and amounts, in Koordinator's or gpushare's dialect.
//!
//! Knows no inventory: the record may name devices that the node does not have.

use std::collections::BTreeMap;
use std::fmt;

use proto::device::{TYPE_FPGA, TYPE_GPU, TYPE_RDMA};
use proto::memory_unit::MemoryUnit;
use proto::quantity::Quantity;
use proto::record::{
    BIND_TIMESTAMP, DEVICE_ALLOCATED, DeviceAllocation, DeviceAllocations, GpushareRecord, MEM_ASSUME_TIME,
    MEM_IDX, Record,
};
use proto::resource::{FPGA, GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO, RDMA};

use crate::devices::extended_resource::ExtendedResource;
use crate::devices::fleet::{DeviceKey, DeviceName, type_name};
use crate::devices::inventory::{Gpu, PhysicalId};

/// The part of one device other than a GPU that a pod holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Portion {
    /// Percent of the device; 0 if the record names no percentage.
    pub(crate) percent: u64,
    /// PCI addresses of the virtual functions that the pod was given; none if it was given the device itself.
    pub(crate) virtual_functions: Vec<PhysicalId>,
}

/// The devices of one type other than GPUs that a pod was given, in the record's order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Others {
    pub names: Vec<DeviceName>,
    /// The part that the pod holds of each device, in the order of `names`.
    pub held: Vec<Portion>,
}

/// The amounts that a pod holds of one GPU, as far as its record names them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RecordedAmounts {
    pub(crate) bytes: Option<u64>,
    pub(crate) ratio: Option<u64>,
    /// Percent of computing power; 0 if the pod requested none.
    pub(crate) core: u64,
}

impl RecordedAmounts {
    /// The memory in bytes of a GPU that has `total` bytes; none if the record names no amount of memory.
    pub(crate) fn bytes_of(&self, total: u64) -> Option<u64> {
        if self.bytes.is_some() {
            return self.bytes;
        }
        // In 128 bits, as bytes times percent may overflow 64.
        let bytes = u128::from(total) * u128::from(self.ratio?) / 100;
        Some(u64::try_from(bytes).unwrap_or(u64::MAX))
    }
}

/// The usable record of a pod.
#[derive(Clone, Debug, PartialEq)]
pub struct Placement {
    /// The pod's GPUs, in the record's order; at least one if it asks for any.
    pub(crate) gpus: Vec<DeviceName>,
    /// The amounts that the pod holds of each GPU, in the order of `gpus`.
    pub(crate) held: Vec<RecordedAmounts>,
    /// The pod's devices of other types that the plugin serves, by type; a type without devices has no entry.
    pub(crate) others: BTreeMap<&'static str, Others>,
    /// The record in Koordinator's form; empty if the old gpushare extender placed the pod.
    pub(crate) allocations: DeviceAllocations,
    /// The time at which the scheduler assumed the pod, unix nanoseconds.
    pub(crate) assumed_at: u64,
    /// The annotations of the old gpushare extender, if the pod has them.
    pub(crate) gpushare: Option<GpushareRecord>,
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut names: Vec<String> = self.gpus.iter().map(ToString::to_string).collect();
        for others in self.others.values() {
            for (name, portion) in others.names.iter().zip(&others.held) {
                names.push(name.to_string());
                names.extend(portion.virtual_functions.iter().map(ToString::to_string));
            }
        }
        f.write_str(&names.join(","))
    }
}

/// The reason that a pod has no usable record, for events of the pod.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unplaced {
    #[error("annotation {key} is missing: the pod was not placed by gpushare-scheduler")]
    Missing { key: &'static str },
    /// The record parses and names no device of a type that the pod requests.
    #[error("annotation {DEVICE_ALLOCATED} names no {}", type_name(.0))]
    NoDevice(&'static str),
    /// The record does not parse, names what cannot be a device, or contradicts itself.
    #[error("{0}")]
    Unusable(String),
}

impl Placement {
    /// Reads the record in the annotations of a pod that requests these resources.
    pub(super) fn read(
        annotations: &BTreeMap<String, String>,
        requested: &[ExtendedResource],
    ) -> Result<Self, Unplaced> {
        // Only an error needs these keys: it names the missing annotation in the dialect of the pod's requests.
        let (record_key, time_key) = if requested.contains(&ExtendedResource::Memory) {
            (MEM_IDX, MEM_ASSUME_TIME)
        } else {
            (DEVICE_ALLOCATED, BIND_TIMESTAMP)
        };
        let record = Record::read(annotations).map_err(|error| Unplaced::Unusable(error.to_string()))?;
        let record = record.ok_or(Unplaced::Missing { key: record_key })?;
        let assumed_at = record.assumed_at;
        let placement = Self::of_record(record, assumed_at.unwrap_or_default())?;
        let mut types = requested.iter().copied().map(ExtendedResource::device_type);
        if placement.gpus.is_empty() && types.any(|device_type| device_type == TYPE_GPU) {
            return Err(Unplaced::NoDevice(TYPE_GPU));
        }
        match assumed_at {
            Some(_) => Ok(placement),
            None => Err(Unplaced::Missing { key: time_key }),
        }
    }

    /// Reads a record of a pod that the scheduler assumed at this time, in unix nanoseconds.
    pub(crate) fn of_record(record: Record, assumed_at: u64) -> Result<Self, Unplaced> {
        let (gpus, held): (Vec<_>, Vec<_>) = named_gpus(&record)?.into_iter().unzip();
        let mut others = BTreeMap::new();
        for (device_type, resource) in [(TYPE_RDMA, RDMA), (TYPE_FPGA, FPGA)] {
            if let Some(devices) = record.allocations.get(device_type)
                && !devices.is_empty()
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

    pub(crate) fn has_gpu(&self, gpu: &Gpu) -> bool {
        self.gpus.iter().any(|name| name.names(gpu))
    }

    pub(crate) fn names(&self, resource: ExtendedResource) -> &[DeviceName] {
        match resource.device_type() {
            TYPE_GPU => &self.gpus,
            other => self.others.get(other).map_or(&[], |others| &others.names),
        }
    }

    /// The record that a swap wrote into the Device object, with the assume time and the memory units of the annotations.
    pub(super) fn of_device_object(
        allocations: &DeviceAllocations,
        annotated: &Result<Self, Unplaced>,
    ) -> Result<Self, Unplaced> {
        let annotated = annotated.as_ref().ok();
        let mut gpushare = None;
        if let Some(annotated) = annotated
            && let Some(record) = annotated.gpushare
            && let Some(first) = allocations.get(TYPE_GPU).and_then(|devices| devices.first())
            && let Ok(idx) = u32::try_from(first.minor)
        {
            // The memory units stay, as only pods with equal requests swap.
            gpushare = Some(GpushareRecord { idx, ..record });
        }
        let assumed_at = annotated.map(|annotated| annotated.assumed_at);
        Self::of_record(
            Record {
                allocations: allocations.clone(),
                assumed_at,
                gpushare,
            },
            assumed_at.unwrap_or_default(),
        )
    }

    /// The record in Koordinator's form, also of a pod that has only the annotations of the old gpushare extender.
    pub(crate) fn to_allocations(&self, memory_unit: MemoryUnit) -> DeviceAllocations {
        let (Some(DeviceName::Minor(minor)), Some(gpushare), true) =
            (self.gpus.first(), self.gpushare, self.allocations.is_empty())
        else {
            return self.allocations.clone();
        };
        // The old extender's record names one GPU by its minor number, and an amount in memory units.
        let bytes = gpushare.pod_units.saturating_mul(memory_unit.bytes());
        let resources = (bytes > 0).then(|| (GPU_MEMORY.to_owned(), Quantity::from_unsigned(bytes)));
        let device = DeviceAllocation {
            minor: i32::try_from(*minor).unwrap_or(i32::MAX),
            resources: resources.into_iter().collect(),
            ..DeviceAllocation::default()
        };
        [(TYPE_GPU.to_owned(), vec![device])].into()
    }

    /// True if this record names the devices of an earlier record of the pod, and lacks no annotation of that record.
    pub(super) fn is_complete_copy_of(&self, before: &Self) -> bool {
        self.gpus == before.gpus && self.others == before.others && !self.lacks_annotations_of(before)
    }

    /// True if this record lacks an annotation that an earlier record of the pod has.
    pub(super) fn lacks_annotations_of(&self, before: &Self) -> bool {
        let lacks_gpushare = match (before.gpushare, self.gpushare) {
            (Some(before), Some(now)) => {
                // An amount whose annotation is missing is read as 0.
                (now.pod_units == 0 && before.pod_units > 0)
                    || (now.device_units == 0 && before.device_units > 0)
            }
            (before, now) => before.is_some() && now.is_none(),
        };
        lacks_gpushare || (self.allocations.is_empty() && !before.allocations.is_empty())
    }

    pub(crate) fn to_record(&self) -> Record {
        Record {
            allocations: self.allocations.clone(),
            assumed_at: Some(self.assumed_at),
            gpushare: self.gpushare,
        }
    }

    /// True if the annotation of the old gpushare extender marks the pod assigned: a plugin has given it its devices.
    pub(crate) fn is_assigned(&self) -> bool {
        self.gpushare.is_some_and(|gpushare| gpushare.assigned)
    }

    /// The virtual functions of devices of a resource's device type that the pod was given.
    pub(crate) fn virtual_functions(&self, resource: ExtendedResource) -> impl Iterator<Item = &PhysicalId> {
        let others = self.others.get(resource.device_type());
        let held = others.map_or(&[][..], |others| &others.held);
        held.iter().flat_map(|portion| &portion.virtual_functions)
    }

    pub(crate) fn is_on_devices_of(&self, other: &Self) -> bool {
        for resource in [ExtendedResource::Rdma, ExtendedResource::Fpga] {
            let own_functions = self.virtual_functions(resource);
            let are_equal = own_functions.eq(other.virtual_functions(resource));
            if !are_equal || self.names(resource) != other.names(resource) {
                return false;
            }
        }
        self.gpus == other.gpus
    }

    /// The part that the pod holds of a device other than a GPU; none if the record does not name the device.
    pub(crate) fn portion(&self, resource: ExtendedResource, device: &DeviceKey) -> Option<&Portion> {
        let others = self.others.get(resource.device_type())?;
        let at = others.names.iter().position(|name| name.is(device))?;
        others.held.get(at)
    }

    pub(crate) fn has_device(&self, resource: ExtendedResource, device: &DeviceKey) -> bool {
        self.names(resource).iter().any(|name| name.is(device))
    }

    /// True if the record gives the pod this device, or this virtual function of it.
    pub(crate) fn gives(
        &self,
        resource: ExtendedResource,
        device: &DeviceKey,
        function: Option<&str>,
    ) -> bool {
        if !self.has_device(resource, device) {
            return false;
        }
        let portion = self.portion(resource, device);
        let functions = portion.map_or(&[][..], |portion| &portion.virtual_functions);
        match function {
            Some(function) => functions.iter().any(|given| given.as_str() == function),
            // A pod that was given virtual functions may not use the device itself.
            None => functions.is_empty(),
        }
    }

    pub(crate) fn includes(&self, resource: ExtendedResource, devices: &[DeviceKey]) -> bool {
        devices.iter().all(|device| self.has_device(resource, device))
    }
}

impl Others {
    /// Reads the devices of one type from a record; `resource` is the resource that counts percent of these devices.
    fn read(device_type: &str, resource: &str, devices: &[DeviceAllocation]) -> Result<Self, Unplaced> {
        let mut others = Self::default();
        for device in devices {
            let name = device_name(device_type, device)?;
            // A device that is listed twice is held once.
            if others.names.contains(&name) {
                continue;
            }
            let mut functions = Vec::new();
            for function in device.functions() {
                // Without its address the virtual function cannot be given to the container, and the whole device must not be.
                if function.bus_id.is_empty() {
                    let problem = format!(
                        "{device_type} minor {} has a function without busID",
                        device.minor
                    );
                    return Err(bad_device(&problem));
                }
                functions.push(parse_id(&function.bus_id)?);
            }
            others.held.push(Portion {
                percent: amount(device, resource).unwrap_or(0),
                virtual_functions: functions,
            });
            others.names.push(name);
        }
        Ok(others)
    }
}

/// The recorded amount of a resource of one device; none if it is missing or no whole number.
fn amount(device: &DeviceAllocation, resource: &str) -> Option<u64> {
    device.resources.get(resource)?.unsigned()
}

fn bad_device(problem: &str) -> Unplaced {
    Unplaced::Unusable(format!("annotation {DEVICE_ALLOCATED}: {problem}"))
}

fn parse_id(id: &str) -> Result<PhysicalId, Unplaced> {
    id.parse().map_err(|error: String| bad_device(&error))
}

/// The name by which a record means a device: the ID, or the minor number if the record has no ID of it.
fn device_name(device_type: &str, device: &DeviceAllocation) -> Result<DeviceName, Unplaced> {
    if !device.id.is_empty() {
        return parse_id(&device.id).map(DeviceName::Id);
    }
    let Ok(minor) = u32::try_from(device.minor) else {
        let problem = format!("minor {} is no {}", device.minor, type_name(device_type));
        return Err(bad_device(&problem));
    };
    Ok(DeviceName::Minor(minor))
}

/// The GPUs that a record names, in Koordinator's or gpushare's dialect, with the amounts that the pod holds of each.
fn named_gpus(record: &Record) -> Result<Vec<(DeviceName, RecordedAmounts)>, Unplaced> {
    let allocations = record.allocations.get(TYPE_GPU).map_or(&[][..], Vec::as_slice);
    if allocations.is_empty() {
        // Pods that the old extender placed have its annotations alone.
        let Some(gpushare) = record.gpushare else {
            return Ok(Vec::new());
        };
        return Ok(vec![(
            DeviceName::Minor(gpushare.idx),
            RecordedAmounts::default(),
        )]);
    }
    if let (Some(gpushare), [only]) = (record.gpushare, allocations)
        && i64::from(gpushare.idx) != i64::from(only.minor)
    {
        let (idx, minor) = (gpushare.idx, only.minor);
        return Err(Unplaced::Unusable(format!(
            "annotation {MEM_IDX} is {idx}, which is not the GPU that annotation {DEVICE_ALLOCATED} names (minor {minor})"
        )));
    }
    let mut gpus = Vec::<(DeviceName, RecordedAmounts)>::with_capacity(allocations.len());
    for allocation in allocations {
        let name = device_name(TYPE_GPU, allocation)?;
        // A GPU that is listed twice is held once.
        if !gpus.iter().any(|(known, _)| *known == name) {
            let held = RecordedAmounts {
                bytes: amount(allocation, GPU_MEMORY),
                ratio: amount(allocation, GPU_MEMORY_RATIO),
                core: amount(allocation, GPU_CORE).unwrap_or(0),
            };
            gpus.push((name, held));
        }
    }
    Ok(gpus)
}
