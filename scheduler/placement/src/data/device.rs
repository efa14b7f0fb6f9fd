//! Devices of a node as its device plugin reports them. One model serves all types: a device has an ID, a minor number, amounts,
//! health, and attributes that bear on the choice.
//!
//! Amounts come in two forms. GPUs have memory, computing power and slots, which are dense numbers, because every request
//! of a scheduling cycle compares with them. All other types have named resources, which Device objects define: the engine
//! knows none of them by name.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use crate::data::amounts::{Amounts, Memory, NamedAmounts};
use crate::data::ident::{DeviceId, DeviceType, FunctionId, SwitchId};

/// One device.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Device {
    /// Identifies the device among those of its type: the UUID of a GPU, the PCI address of another device.
    pub id: DeviceId,
    /// Its minor number, unique among those of its type on its node; for display and to order equals.
    pub minor: u32,
    /// Memory of a GPU in bytes, from 1 to 2^50; 0 for other types.
    pub memory_bytes: u64,
    /// Memory of a GPU in bytes that its driver keeps for itself, beside `memory_bytes`. No request gets this memory. Owners that
    /// were placed before the node reported it may hold it, which is not counted as oversubscription.
    pub reserved_bytes: u64,
    /// Computing power of a GPU in percent, up to 2^20 and usually 100; 0 for other types.
    pub core: u32,
    /// Number of pods that can share a GPU, up to 2^20 and usually 100; 0 for other types.
    pub slots: u32,
    /// Amounts of named resources; empty for a GPU.
    pub resources: NamedAmounts,
    /// False if the device takes no new owners; its present owners stay counted.
    pub healthy: bool,
    /// True if an operator has closed the device for maintenance: it takes no new owners, and its present owners stay counted.
    pub closed: bool,
    /// False for a GPU that takes no shares at all: it is left to requests for whole GPUs by the vendor's resource name.
    pub sharing: bool,
    /// Labels, location, virtual functions and enforcement of memory limits.
    pub attributes: DeviceAttributes,
}

impl Device {
    /// A healthy device without amounts and attributes, which the caller adds.
    pub fn new(id: impl Into<DeviceId>, minor: u32) -> Self {
        Self {
            id: id.into(),
            minor,
            memory_bytes: 0,
            reserved_bytes: 0,
            core: 0,
            slots: 0,
            resources: NamedAmounts::new(),
            healthy: true,
            closed: false,
            sharing: true,
            attributes: DeviceAttributes::default(),
        }
    }

    /// Returns true if the device takes new owners, as far as it has room.
    pub const fn is_open(&self) -> bool {
        self.healthy && !self.closed
    }

    /// All memory of a GPU in bytes, that of its driver included.
    pub const fn memory_with_reserved(&self) -> u64 {
        self.memory_bytes.saturating_add(self.reserved_bytes)
    }

    /// Memory, computing power and slots that the device has, healthy or not.
    pub fn total(&self) -> Amounts {
        Amounts {
            memory: Memory::from_bytes(self.memory_bytes),
            core: self.core,
            slots: self.slots,
        }
    }

    /// The amounts that a request for this GPU as a whole takes: all but slots.
    pub(crate) fn whole(&self) -> Amounts {
        Amounts {
            slots: 0,
            ..self.total()
        }
    }
}

/// The devices of one type on one node.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DevicesOfType {
    /// The type.
    pub kind: DeviceType,
    /// The devices, in any order.
    pub devices: Devices,
}

/// The devices of one type on one node. Clones share them until one of them is changed.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct Devices(Arc<[Device]>);

impl From<Vec<Device>> for Devices {
    fn from(devices: Vec<Device>) -> Self {
        Self(devices.into())
    }
}

impl FromIterator<Device> for Devices {
    fn from_iter<I: IntoIterator<Item = Device>>(devices: I) -> Self {
        Self(devices.into_iter().collect())
    }
}

impl Deref for Devices {
    type Target = [Device];

    fn deref(&self) -> &[Device] {
        &self.0
    }
}

/// Copies the devices first if a clone shares them.
impl DerefMut for Devices {
    fn deref_mut(&mut self) -> &mut [Device] {
        Arc::make_mut(&mut self.0)
    }
}

impl<'a> IntoIterator for &'a Devices {
    type Item = &'a Device;
    type IntoIter = std::slice::Iter<'a, Device>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

impl fmt::Debug for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// The way in which a record identifies a device of a known type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceRef {
    /// By the device's ID, which is exact.
    Id(DeviceId),
    /// By the device's minor number at the time when the record was written.
    Minor(u32),
    /// Not at all: the held part is charged to each device of the type.
    Any,
}

impl DeviceRef {
    /// Returns true if the record means this device for certain.
    pub fn identifies(&self, device: &Device) -> bool {
        match self {
            Self::Id(id) => device.id == *id,
            Self::Minor(minor) => device.minor == *minor,
            Self::Any => false,
        }
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
pub struct VirtualFunction {
    /// Identifies the function on its node: its PCI address.
    pub id: FunctionId,
    /// Its number, for records; -1 if unknown.
    pub minor: i32,
}

/// Virtual functions of one device that share their labels.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct FunctionGroup {
    /// The labels.
    pub labels: Labels,
    /// The virtual functions, in any order.
    pub functions: Vec<VirtualFunction>,
}

/// The enforcement of memory limits on a GPU, as its node reports it; a later level is stronger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LimitLevel {
    /// The node reports no enforcement.
    #[default]
    None,
    /// A library (`HAMi-core`), in containers that load it.
    Library,
    /// The GPU's driver.
    Driver,
}

/// The properties of a device by which requests choose among devices of its type, besides amounts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct DeviceAttributes {
    /// Its labels.
    pub labels: Labels,
    /// Its location; `None` if nothing is known.
    pub location: Option<DeviceLocation>,
    /// Its virtual functions, grouped by their labels; empty if it has none.
    pub function_groups: Vec<FunctionGroup>,
    /// The enforcement of memory limits on the device, if it is a GPU.
    pub limits: LimitLevel,
}

impl DeviceAttributes {
    /// All virtual functions, of all groups.
    pub fn all_functions(&self) -> impl Iterator<Item = &VirtualFunction> {
        self.function_groups.iter().flat_map(|group| &group.functions)
    }
}
