//! The devices of this node together with their health: one immutable value per moment.
//!
//! [`watch_devices`](watch::watch_devices) makes a new value when something changes; kubelet's
//! streams, the Device object and node status are functions of the latest one.

pub mod clear;
pub mod recall;
pub mod sharing;
pub mod watch;

use proto::device::TYPE_GPU;
use proto::topology::{GpuLinks, GpuPartitionPolicy, GpuPartitionTable};

use crate::device_ids::IdScheme;
use crate::extended_resource::{ExtendedResource, ExtendedResourceNames};
use crate::health::HealthReason;
use crate::inventory::{Gpu, Inventory, OtherDevice, PhysicalId};
use crate::pods::DeviceName;

/// One GPU and the state it is in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetGpu {
    /// What it is.
    pub gpu: Gpu,
    /// Whether pods may share it; else it is left to whole-device pods.
    pub is_shared: bool,
    /// Whether pods may be placed on it.
    pub is_healthy: bool,
    /// Why it is in this state; none for a device of which nothing was heard.
    pub reason: Option<HealthReason>,
    /// The same for a person.
    pub message: String,
}

/// One device of another type and the state it is in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetDevice {
    /// What it is.
    pub device: OtherDevice,
    /// Whether pods may be placed on it.
    pub is_healthy: bool,
    /// Why it is in this state; none for a device of which nothing was heard.
    pub reason: Option<HealthReason>,
    /// The same for a person.
    pub message: String,
}

/// The devices of this node at one moment.
#[derive(Clone, Debug)]
pub struct Fleet {
    /// Every GPU, in the order of the inventory.
    pub gpus: Vec<FleetGpu>,
    /// Devices of other types, sorted by type and minor number.
    pub others: Vec<FleetDevice>,
    /// How the virtual devices are called.
    pub ids: IdScheme,
    /// How the GPUs are linked with each other, as far as that is known.
    pub links: Vec<GpuLinks>,
    /// The partitions of the GPUs that the source of the devices tells.
    pub partitions: Option<GpuPartitionTable>,
    /// What they are for, if the source tells.
    pub partition_policy: Option<GpuPartitionPolicy>,
    /// True if containers need the vendor's driver to use the GPUs.
    pub needs_driver: bool,
    /// Version of the driver, if known.
    pub driver_version: Option<String>,
    /// Who makes the devices.
    pub vendor: String,
    /// False while the errors that an earlier process saw on the devices are not known yet.
    pub is_health_loaded: bool,
}

/// What devices of a type are called before people.
pub fn type_name(device_type: &str) -> &str {
    if device_type == TYPE_GPU {
        "GPU"
    } else {
        device_type
    }
}

/// What records name a device by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceKey {
    /// What identifies it.
    pub id: PhysicalId,
    /// Its minor number, unique among the devices of its type.
    pub minor: u32,
}

impl From<&Gpu> for DeviceKey {
    fn from(gpu: &Gpu) -> Self {
        Self {
            id: gpu.uuid.clone(),
            minor: gpu.minor,
        }
    }
}

impl From<&OtherDevice> for DeviceKey {
    fn from(device: &OtherDevice) -> Self {
        Self {
            id: device.id.clone(),
            minor: device.minor,
        }
    }
}

/// A device of any type and the state it is in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetEntry<'a> {
    /// What it is called.
    pub key: DeviceKey,
    /// Whether pods may share it.
    pub is_shared: bool,
    /// Whether pods may be placed on it.
    pub is_healthy: bool,
    /// Why it is in this state.
    pub message: &'a str,
    /// The NUMA node it hangs on, where that is known.
    pub numa_node: Option<i32>,
}

/// A record names a device that the pod cannot have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unavailable {
    /// It is not in this node.
    #[error("{} {name} is not on this node", type_name(device_type))]
    Unknown {
        /// The type that it is said to be of.
        device_type: &'static str,
        /// What the record calls it.
        name: String,
    },
    /// It is sick.
    #[error("{} {id} of this node is unhealthy: {message}", type_name(device_type))]
    Unhealthy {
        /// Its type.
        device_type: &'static str,
        /// The device.
        id: PhysicalId,
        /// What is wrong with it.
        message: String,
    },
    /// It is for pods that take whole devices.
    #[error(
        "GPU {0} of this node is not shared: --shared-devices of its plugin leaves it to pods that take whole GPUs"
    )]
    NotShared(PhysicalId),
}

impl Fleet {
    /// The devices of an inventory, all healthy until something is heard of them. The GPUs that `ids` knows are shared.
    pub fn new(inventory: Inventory, ids: IdScheme) -> Self {
        let ids = ids.with(&inventory);
        let message = || "no trouble has been reported".to_owned();
        let gpu = |gpu: Gpu| FleetGpu {
            is_shared: ids.knows(&gpu.uuid),
            gpu,
            is_healthy: true,
            reason: None,
            message: message(),
        };
        let other = |device| FleetDevice {
            device,
            is_healthy: true,
            reason: None,
            message: message(),
        };
        let Inventory {
            gpus,
            others,
            links,
            partitions,
            partition_policy,
            needs_driver,
            driver_version,
            vendor,
            ..
        } = inventory;
        let (gpus, others) = (
            gpus.into_iter().map(gpu).collect(),
            others.into_iter().map(other).collect(),
        );
        Self {
            gpus,
            others,
            ids,
            links,
            partitions,
            partition_policy,
            needs_driver,
            driver_version,
            vendor,
            is_health_loaded: true,
        }
    }

    /// The devices of a type other than GPUs, such as `rdma`, by minor number.
    pub fn devices_of(&self, device_type: &str) -> impl Iterator<Item = &FleetDevice> {
        self.others
            .iter()
            .filter(move |entry| entry.device.device_type == device_type)
    }

    /// The devices of a type, GPUs included.
    pub fn entries<'a>(&'a self, device_type: &'a str) -> impl Iterator<Item = FleetEntry<'a>> {
        let gpu = |entry: &'a FleetGpu| FleetEntry {
            key: DeviceKey::from(&entry.gpu),
            is_shared: entry.is_shared,
            is_healthy: entry.is_healthy,
            message: &entry.message,
            numa_node: entry.gpu.location.numa_node,
        };
        let other = |entry: &'a FleetDevice| FleetEntry {
            key: DeviceKey::from(&entry.device),
            is_shared: true,
            is_healthy: entry.is_healthy,
            message: &entry.message,
            numa_node: entry.device.location.numa_node,
        };
        let gpus = self.gpus.iter().filter(move |_| device_type == TYPE_GPU).map(gpu);
        gpus.chain(
            self.others
                .iter()
                .filter(move |entry| entry.device.device_type == device_type)
                .map(other),
        )
    }

    /// The device of a resource that a record names so, sick or not.
    pub fn find(&self, resource: ExtendedResource, name: &DeviceName) -> Option<DeviceKey> {
        self.entries(resource.device_type())
            .map(|entry| entry.key)
            .find(|key| name.is(key))
    }

    /// Whether kubelet is told of a resource.
    pub fn offers(&self, resource: ExtendedResource, names: &ExtendedResourceNames) -> bool {
        match resource {
            ExtendedResource::Shared | ExtendedResource::Memory => true,
            ExtendedResource::Whole => names.whole.is_some(),
            ExtendedResource::Rdma | ExtendedResource::Fpga => self.ids.has(resource),
        }
    }

    /// The healthy devices that `names` name and that a pod may be given of a resource, without duplicates.
    ///
    /// # Errors
    /// The first name that stands for no device of this node, for a sick one, or for one that is not shared.
    pub fn resolve(
        &self,
        resource: ExtendedResource,
        names: &[DeviceName],
    ) -> Result<Vec<PhysicalId>, Unavailable> {
        let device_type = resource.device_type();
        let is_sharing = matches!(resource, ExtendedResource::Shared | ExtendedResource::Memory);
        let mut found = Vec::<PhysicalId>::with_capacity(names.len());
        for name in names {
            let entry = self.entries(device_type).find(|entry| name.is(&entry.key));
            let entry = entry.ok_or_else(|| Unavailable::Unknown {
                device_type,
                name: match name {
                    DeviceName::Id(id) => id.to_string(),
                    DeviceName::Minor(minor) => format!("with minor {minor}"),
                },
            })?;
            let id = entry.key.id;
            if is_sharing && !entry.is_shared {
                return Err(Unavailable::NotShared(id));
            }
            if !entry.is_healthy {
                return Err(Unavailable::Unhealthy {
                    device_type,
                    id,
                    message: entry.message.to_owned(),
                });
            }
            if !found.contains(&id) {
                found.push(id);
            }
        }
        Ok(found)
    }
}
