//! The devices of this node together with their health: one immutable value per moment.
//!
//! [`watch`] makes a new value at each change; kubelet's device lists, the Device object and node status are functions of the
//! latest one.

pub mod sharing;
pub mod watch;

use std::collections::BTreeMap;
use std::fmt;

use proto::device::TYPE_GPU;
use proto::topology::{GpuLinks, GpuPartitionPolicy, GpuPartitionTable};

use crate::devices::device_ids::IdScheme;
use crate::devices::extended_resource::{ExtendedResource, ExtendedResourceNames};
use crate::devices::health::{HealthChange, HealthReason};
use crate::devices::inventory::{Gpu, NodeInventory, OtherDevice, PciLocation, PhysicalId};

/// The message of a device whose health has never changed.
const NO_TROUBLE: &str = "no trouble has been reported";

/// One device and its health: a [`Gpu`], or an [`OtherDevice`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetDevice<D> {
    /// The device.
    pub device: D,
    /// True if pods may share the device; a GPU that is not shared is left to pods that take whole GPUs.
    pub is_shared: bool,
    /// True if pods may be placed on the device.
    pub is_healthy: bool,
    /// The reason of the last change of the device's health; none before the first change.
    pub reason: Option<HealthReason>,
    /// The reason in a sentence for people.
    pub message: String,
}

impl<D> FleetDevice<D> {
    fn healthy(device: D, is_shared: bool) -> Self {
        Self {
            device,
            is_shared,
            is_healthy: true,
            reason: None,
            message: NO_TROUBLE.to_owned(),
        }
    }

    fn set_health(&mut self, is_healthy: bool, reason: Option<HealthReason>, message: &str) {
        (self.is_healthy, self.reason) = (is_healthy, reason);
        message.clone_into(&mut self.message);
    }
}

/// The devices of this node and their health at one moment.
#[derive(Clone, Debug)]
pub struct NodeFleet {
    /// Every GPU, in the order of the inventory.
    pub gpus: Vec<FleetDevice<Gpu>>,
    /// Devices of other types, sorted by type and minor number.
    pub others: Vec<FleetDevice<OtherDevice>>,
    /// The IDs of virtual devices that the plugin lists to kubelet.
    pub ids: IdScheme,
    /// The links between GPUs, as far as the source reports them.
    pub links: Vec<GpuLinks>,
    pub(crate) partitions: Option<GpuPartitionTable>,
    pub(crate) partition_policy: Option<GpuPartitionPolicy>,
    /// True if containers need the vendor's driver to use the GPUs.
    pub needs_driver: bool,
    /// Version of the driver, if the source reports it.
    pub driver_version: Option<String>,
    /// The vendor of the GPUs.
    pub vendor: String,
    /// False until the XIDs that an earlier process observed are loaded from the Device object; starts of containers wait for it.
    pub(crate) is_health_loaded: bool,
}

impl NodeFleet {
    /// The devices of an inventory, all healthy, with no XIDs to load. `ids` are those of shares and memory units; pods may share
    /// the GPUs that have some.
    pub fn new(inventory: NodeInventory, ids: IdScheme) -> Self {
        let ids = ids.with_inventory(&inventory);
        let mut gpus = Vec::with_capacity(inventory.gpus.len());
        for gpu in inventory.gpus {
            let is_shared = ids.is_shared(&gpu.uuid);
            gpus.push(FleetDevice::healthy(gpu, is_shared));
        }
        // Pods share each device of another type by percent; no flag excludes one.
        let others = inventory.others.into_iter();
        let others = others.map(|device| FleetDevice::healthy(device, true)).collect();
        Self {
            gpus,
            others,
            ids,
            links: inventory.links,
            partitions: inventory.partitions,
            partition_policy: inventory.partition_policy,
            needs_driver: inventory.needs_driver,
            driver_version: inventory.driver_version,
            vendor: inventory.vendor,
            is_health_loaded: true,
        }
    }

    /// The fleet with the devices of another inventory in place of its own. A device that is in both keeps its health.
    #[must_use]
    pub(crate) fn with_inventory(&self, inventory: NodeInventory, ids: IdScheme) -> Self {
        let mut fleet = Self {
            // XIDs of an earlier process are loaded once, into the devices that are there at that time.
            is_health_loaded: self.is_health_loaded,
            ..Self::new(inventory, ids)
        };
        for known in self.all_entries() {
            fleet.set_health(&known.key.id, known.is_healthy, known.reason, known.message);
        }
        fleet
    }

    /// Applies a change of one device's health.
    pub fn apply(&mut self, change: &HealthChange) {
        let reason = Some(change.reason);
        self.set_health(&change.device, change.is_healthy, reason, &change.message);
    }

    fn set_health(&mut self, id: &PhysicalId, is_healthy: bool, reason: Option<HealthReason>, message: &str) {
        for entry in &mut self.gpus {
            if entry.device.uuid == *id {
                entry.set_health(is_healthy, reason, message);
            }
        }
        for entry in &mut self.others {
            if entry.device.id == *id {
                entry.set_health(is_healthy, reason, message);
            }
        }
    }

    /// The GPU with this UUID.
    pub fn gpu(&self, uuid: &PhysicalId) -> Option<&Gpu> {
        let entry = self.gpus.iter().find(|entry| entry.device.uuid == *uuid)?;
        Some(&entry.device)
    }

    pub(crate) fn gpu_named(&self, name: &DeviceName) -> Option<&Gpu> {
        let entry = self.gpus.iter().find(|entry| name.names(&entry.device))?;
        Some(&entry.device)
    }

    pub(crate) fn devices_of(&self, device_type: &str) -> impl Iterator<Item = &FleetDevice<OtherDevice>> {
        let others = self.others.iter();
        others.filter(move |entry| entry.device.device_type == device_type)
    }

    /// Every device, GPUs first.
    pub(crate) fn all_entries(&self) -> impl Iterator<Item = FleetEntry<'_>> {
        let gpus = self.gpus.iter().map(FleetEntry::from);
        gpus.chain(self.others.iter().map(FleetEntry::from))
    }

    /// The devices of a type, GPUs included.
    pub(crate) fn entries<'a>(&'a self, device_type: &'a str) -> impl Iterator<Item = FleetEntry<'a>> {
        self.all_entries()
            .filter(move |entry| entry.device_type == device_type)
    }

    /// The device that a pod's record names so for a resource, healthy or not.
    pub(crate) fn find(&self, resource: ExtendedResource, name: &DeviceName) -> Option<DeviceKey> {
        let mut entries = self.entries(resource.device_type());
        Some(entries.find(|entry| name.is(&entry.key))?.key)
    }

    /// Returns true if the plugin advertises a resource to kubelet: shares and memory units on every node, even without GPUs.
    pub fn advertises(&self, resource: ExtendedResource, names: &ExtendedResourceNames) -> bool {
        match resource {
            ExtendedResource::Shared | ExtendedResource::Memory => true,
            ExtendedResource::Whole => names.whole.is_some(),
            ExtendedResource::Rdma | ExtendedResource::Fpga => self.ids.has(resource),
        }
    }

    /// The devices that a pod's record names for a resource, without duplicates, if the pod may get all of them.
    pub(crate) fn resolve(
        &self,
        resource: ExtendedResource,
        names: &[DeviceName],
    ) -> Result<Vec<PhysicalId>, Unavailable> {
        let device_type = resource.device_type();
        let is_sharing = matches!(resource, ExtendedResource::Shared | ExtendedResource::Memory);
        let mut found = Vec::<PhysicalId>::with_capacity(names.len());
        for name in names {
            let Some(entry) = self.entries(device_type).find(|entry| name.is(&entry.key)) else {
                let name = match name {
                    DeviceName::Id(id) => id.to_string(),
                    DeviceName::Minor(minor) => format!("with minor {minor}"),
                };
                return Err(Unavailable::Unknown { device_type, name });
            };
            let id = entry.key.id;
            // A record may name a GPU that pods shared until the operator changed `--shared-devices`.
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
            // A record may name one device twice, and holds it once then.
            if !found.contains(&id) {
                found.push(id);
            }
        }
        Ok(found)
    }
}

/// The name of a device type in texts for people.
pub(crate) fn type_name(device_type: &str) -> &str {
    if device_type == TYPE_GPU {
        "GPU"
    } else {
        device_type
    }
}

/// The two names that records of pods may have for a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceKey {
    pub(crate) id: PhysicalId,
    /// The minor number, unique among the devices of a type.
    pub(crate) minor: u32,
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

/// The name of a device in the record of a pod, among those of its type.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum DeviceName {
    /// The device's ID, in records of this project's scheduler.
    Id(PhysicalId),
    /// The device's minor number, in records of the old gpushare extender.
    Minor(u32),
}

impl DeviceName {
    pub(crate) fn names(&self, gpu: &Gpu) -> bool {
        self.is(&DeviceKey::from(gpu))
    }

    pub(crate) fn is(&self, device: &DeviceKey) -> bool {
        match self {
            Self::Id(id) => *id == device.id,
            Self::Minor(minor) => *minor == device.minor,
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

/// A device of any type and its health.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FleetEntry<'a> {
    pub(crate) device_type: &'a str,
    pub(crate) key: DeviceKey,
    pub(crate) is_shared: bool,
    pub(crate) is_healthy: bool,
    pub(crate) reason: Option<HealthReason>,
    pub(crate) message: &'a str,
    pub(crate) bus_id: Option<&'a str>,
    pub(crate) location: &'a PciLocation,
    pub(crate) labels: &'a BTreeMap<String, String>,
}

impl<'a> From<&'a FleetDevice<Gpu>> for FleetEntry<'a> {
    fn from(entry: &'a FleetDevice<Gpu>) -> Self {
        Self {
            device_type: TYPE_GPU,
            key: DeviceKey::from(&entry.device),
            is_shared: entry.is_shared,
            is_healthy: entry.is_healthy,
            reason: entry.reason,
            message: &entry.message,
            bus_id: entry.device.bus_id.as_deref(),
            location: &entry.device.location,
            labels: &entry.device.labels,
        }
    }
}

impl<'a> From<&'a FleetDevice<OtherDevice>> for FleetEntry<'a> {
    fn from(entry: &'a FleetDevice<OtherDevice>) -> Self {
        Self {
            device_type: &entry.device.device_type,
            key: DeviceKey::from(&entry.device),
            is_shared: entry.is_shared,
            is_healthy: entry.is_healthy,
            reason: entry.reason,
            message: &entry.message,
            bus_id: entry.device.bus_id.as_deref(),
            location: &entry.device.location,
            labels: &entry.device.labels,
        }
    }
}

/// The reason that a pod cannot have a device that its record names.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the texts of the errors say it")]
pub enum Unavailable {
    #[error(
        "{} {name} is not on this node; delete the pod to reschedule it",
        type_name(device_type)
    )]
    Unknown { device_type: &'static str, name: String },
    #[error(
        "{} {id} of this node is unhealthy: {message}; the container starts once it is healthy, or delete the pod to reschedule it",
        type_name(device_type)
    )]
    Unhealthy {
        device_type: &'static str,
        id: PhysicalId,
        message: String,
    },
    #[error(
        "GPU {0} of this node is not shared: --shared-devices of its plugin leaves it to pods that take whole GPUs; delete the pod to \
         reschedule it"
    )]
    NotShared(PhysicalId),
}
