//! Devices of a node as its device plugin reports them: GPUs, and devices of other types with named amounts.
//!
//! GPUs have typed, dense amounts, because every request compares with them. The engine knows no other type, and no
//! resource of it, by name.

use std::collections::BTreeMap;

use crate::data::amounts::{Amounts, Memory, NamedAmounts};
use crate::data::ident::{DeviceId, DeviceType, FunctionId, GpuUuid, ResourceName, SwitchId};

/// One GPU.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Gpu {
    /// Its UUID.
    pub uuid: GpuUuid,
    /// Its minor number, unique on its node; for display and to order equals.
    pub minor: u32,
    /// Its memory in bytes, from 1 to 2^50.
    pub memory_bytes: u64,
    /// Its computing power in percent, up to 2^20; usually 100.
    pub core: u32,
    /// Number of pods that can share it, up to 2^20; usually 100.
    pub slots: u32,
    /// False if it takes no new shares; those that it has stay counted.
    pub healthy: bool,
    /// False if it takes no shares at all: it is left to requests for whole GPUs in the vendor's name.
    pub sharing: bool,
    /// Labels, location and virtual functions.
    pub attributes: DeviceAttributes,
}

impl Gpu {
    /// Everything that the GPU has, healthy or not.
    pub fn total(&self) -> Amounts {
        Amounts {
            memory: Memory::from_bytes(self.memory_bytes),
            core: self.core,
            slots: self.slots,
        }
    }

    /// Everything but slots: a request for whole GPUs needs none.
    pub(crate) fn whole(&self) -> Amounts {
        Amounts {
            slots: 0,
            ..self.total()
        }
    }
}

/// One device of a type other than GPU.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Device {
    /// Identifies it among the devices of its type.
    pub id: DeviceId,
    /// Its minor number, unique among those of its type on its node.
    pub minor: u32,
    /// Everything that it has.
    pub resources: NamedAmounts,
    /// False if it takes no new owners; those that it has stay counted.
    pub healthy: bool,
    /// Labels, location and virtual functions.
    pub attributes: DeviceAttributes,
}

/// The devices of one type on one node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DevicesOfType {
    /// The type.
    pub kind: DeviceType,
    /// The devices, in any order.
    pub devices: Vec<Device>,
}

/// How a record identifies a device of a type other than GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceRef {
    /// By its ID, which is exact.
    Id(DeviceId),
    /// By its minor number at the time of the record.
    Minor(u32),
    /// Not at all: the share is charged to each device of the type.
    Any,
}

impl DeviceRef {
    /// Returns true if the record means this device for certain.
    pub(crate) fn identifies(&self, device: &Device) -> bool {
        match self {
            Self::Id(id) => device.id == *id,
            Self::Minor(minor) => device.minor == *minor,
            Self::Any => false,
        }
    }
}

impl DevicesOfType {
    /// The device that a record identifies, if it exists.
    pub fn find(&self, device: &DeviceRef) -> Option<&Device> {
        self.devices.iter().find(|candidate| device.identifies(candidate))
    }

    /// Returns true if a record may mean this device. A minor that no device has may mean any, as minors change with the
    /// devices of a node; an ID that none has means a device that is gone.
    pub(crate) fn may_be(&self, held: &DeviceRef, device: &Device) -> bool {
        held.identifies(device)
            || match held {
                DeviceRef::Id(_) => false,
                DeviceRef::Minor(_) => self.find(held).is_none(),
                DeviceRef::Any => true,
            }
    }

    /// The largest amount of a resource that any one device has.
    pub(crate) fn largest(&self, resource: &ResourceName) -> Option<u64> {
        let amounts = self
            .devices
            .iter()
            .filter_map(|device| device.resources.get(resource));
        amounts.max().copied()
    }
}

/// Labels of a device, or of a group of virtual functions.
pub type Labels = BTreeMap<Box<str>, Box<str>>;

/// The location of a device in its machine, as far as its node reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct DeviceLocation {
    /// NUMA node; `None` if unknown.
    pub numa: Option<u32>,
    /// PCIe switch; `None` if unknown. The same text below two NUMA nodes means two switches.
    pub switch: Option<SwitchId>,
}

/// A virtual function (SR-IOV), which an owner can hold instead of its device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Function {
    /// Identifies it on its node, such as its PCI address.
    pub id: FunctionId,
    /// Its number, for records; -1 if unknown.
    pub minor: i32,
}

/// Virtual functions of one device that share their labels.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct FunctionGroup {
    /// The labels.
    pub labels: Labels,
    /// The functions, in any order.
    pub functions: Vec<Function>,
}

/// The enforcement of memory limits on a GPU, as its node reports it; a later level is stronger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LimitLevel {
    /// Nothing that is known.
    #[default]
    None,
    /// A library in containers that load it.
    Library,
    /// The GPU's driver.
    Driver,
}

/// Distinguishes a device from others of its type, besides its amounts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct DeviceAttributes {
    /// Its labels.
    pub labels: Labels,
    /// Its location; `None` if nothing is known.
    pub location: Option<DeviceLocation>,
    /// Its virtual functions; empty if it has none.
    pub functions: Vec<FunctionGroup>,
    /// The enforcement of memory limits on it.
    pub limits: LimitLevel,
}

impl DeviceAttributes {
    /// All virtual functions, of all groups.
    pub(crate) fn all_functions(&self) -> impl Iterator<Item = &Function> {
        self.functions.iter().flat_map(|group| &group.functions)
    }
}
