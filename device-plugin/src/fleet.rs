//! The devices of this node together with their health: one immutable value per moment.
//!
//! [`watch_devices`](watch::watch_devices) makes a new value when something changes; kubelet's
//! streams, the Device object and node status are functions of the latest one.

pub mod recall;
pub mod sharing;
pub mod watch;

use crate::health::Reason;
use crate::inventory::{Gpu, GpuUuid, Inventory, OtherDevice};
use crate::plugin::ids::IdScheme;
use crate::pods::GpuName;

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
    pub reason: Option<Reason>,
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
    pub reason: Option<Reason>,
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
    /// How the virtual devices of the GPUs that are shared are called.
    pub ids: IdScheme,
    /// Version of the driver, if known.
    pub driver_version: Option<String>,
    /// Who makes the devices.
    pub vendor: String,
}

/// A record names a GPU that the pod cannot have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unavailable {
    /// It is not in this node.
    #[error("GPU {0} is not on this node")]
    Unknown(String),
    /// It is sick.
    #[error("GPU {uuid} of this node is unhealthy: {message}")]
    Unhealthy {
        /// The GPU.
        uuid: GpuUuid,
        /// What is wrong with it.
        message: String,
    },
}

impl Fleet {
    /// The devices of an inventory, all healthy until something is heard of them. The GPUs that `ids` knows are shared.
    pub fn new(inventory: Inventory, ids: IdScheme) -> Self {
        let message = || "no trouble has been reported".to_owned();
        let gpu = |gpu: Gpu| FleetGpu { is_shared: ids.knows(&gpu.uuid), gpu, is_healthy: true, reason: None, message: message() };
        let other = |device| FleetDevice { device, is_healthy: true, reason: None, message: message() };
        let Inventory { gpus, others, driver_version, vendor, .. } = inventory;
        let (gpus, others) = (gpus.into_iter().map(gpu).collect(), others.into_iter().map(other).collect());
        Self { gpus, others, ids, driver_version, vendor }
    }

    /// The devices of a type other than GPUs, such as `rdma`, by minor number.
    pub fn devices_of(&self, device_type: &str) -> impl Iterator<Item = &FleetDevice> {
        self.others.iter().filter(move |entry| entry.device.device_type == device_type)
    }

    /// The healthy GPUs that `names` name, without duplicates.
    ///
    /// # Errors
    /// The first name that stands for no GPU of this node, or for a sick one.
    pub fn resolve(&self, names: &[GpuName]) -> Result<Vec<&Gpu>, Unavailable> {
        let mut found = Vec::<&Gpu>::with_capacity(names.len());
        for name in names {
            let entry = self.gpus.iter().find(|entry| name.names(&entry.gpu)).ok_or_else(|| {
                Unavailable::Unknown(match name {
                    GpuName::Uuid(uuid) => uuid.to_string(),
                    GpuName::Minor(minor) => format!("with minor {minor}"),
                })
            })?;
            if !entry.is_healthy {
                return Err(Unavailable::Unhealthy { uuid: entry.gpu.uuid.clone(), message: entry.message.clone() });
            }
            if !found.iter().any(|gpu| gpu.uuid == entry.gpu.uuid) {
                found.push(&entry.gpu);
            }
        }
        Ok(found)
    }
}
