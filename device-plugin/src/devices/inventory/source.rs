//! The source of a node's devices: this machine, or a file.
//!
//! A [`DeviceSource`] lists the devices ([`DeviceSource::discover`]) and watches them from threads of its own
//! ([`DeviceSource::watch`]). It reports [`Observations`] and decides nothing: the module `health` decides whether a device is
//! healthy. It knows neither kubelet nor the API server.

use std::time::Duration;

use memory_limits::CgroupMemory;
use tokio::sync::mpsc;
use tracing::info;

use super::sysfs::SysfsSource;
use super::{CgroupOnGpu, Feed, InventoryError, NodeInventory, Observations, ProcessMemory};

pub use super::file::FileSource;
pub use super::nvml::NvmlSource;

/// The source of a node's devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceSource {
    /// This machine: the NVIDIA management library, loaded at run time, and sysfs.
    Machine(MachineSource),
    /// A file that describes simulated devices.
    File(FileSource),
}

impl DeviceSource {
    /// The interval at which a watch reports each device.
    pub fn probe_interval(&self) -> Duration {
        match self {
            Self::Machine(machine) => machine.gpus.probe_interval,
            Self::File(file) => file.interval,
        }
    }

    /// The version of the loaded kernel driver of this machine's GPUs, empty if it names none; `None` for simulated devices.
    pub fn loaded_driver(&self) -> Option<String> {
        match self {
            Self::Machine(machine) => machine.gpus.loaded_driver(),
            Self::File(_) => None,
        }
    }

    /// Lists the devices once. Blocks: NVML may take seconds to wake a GPU.
    pub fn discover(&self) -> Result<NodeInventory, InventoryError> {
        match self {
            Self::Machine(machine) => machine.discover(),
            Self::File(file) => file.discover(),
        }
    }

    /// The memory that each process uses on each GPU, as far as the source shows it. Blocks.
    ///
    /// # Errors
    /// The driver cannot be asked, or does not know.
    pub fn memory_use(&self) -> Result<Vec<ProcessMemory>, InventoryError> {
        match self {
            Self::Machine(machine) => machine.gpus.memory_use(),
            Self::File(file) => file.memory_use(),
        }
    }

    /// The memory of each of these cgroups on a GPU as the driver knows it, in the order of `cgroups`, and the first failure. One
    /// that cannot be read counts as not limited. Blocks.
    ///
    /// # Errors
    /// The driver cannot be asked.
    pub fn cgroup_memory(
        &self,
        cgroups: &[CgroupOnGpu],
    ) -> Result<(Vec<CgroupMemory>, Option<InventoryError>), InventoryError> {
        match self {
            Self::Machine(machine) => machine.gpus.cgroup_memory(cgroups),
            // Simulated processes have no cgroups.
            Self::File(_) => Ok((vec![CgroupMemory::NotLimited; cgroups.len()], None)),
        }
    }

    /// Starts to watch the devices of `inventory` from threads of its own.
    ///
    /// The watch probes every device immediately and then at the source's interval: the feed reports trouble that was there from
    /// the start, and its regular observations are all that the module `health` needs to see a recovery. When the devices
    /// themselves change (a GPU appears, or its memory differs) the feed reports `InventoryChanged` once and goes on with the
    /// devices of its start; the caller discovers the devices again and starts another watch.
    pub fn watch(
        &self,
        inventory: &NodeInventory,
    ) -> Result<(Feed, mpsc::Receiver<Observations>), InventoryError> {
        match self {
            Self::Machine(machine) => machine.watch(inventory),
            Self::File(file) => file.watch(inventory),
        }
    }
}

/// A real machine: its GPUs through NVML, its other devices through sysfs.
///
/// A watch reads NVML and sysfs on a thread each, so that a driver that hangs hides nothing of the other devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineSource {
    gpus: NvmlSource,
    others: SysfsSource,
}

impl MachineSource {
    /// A machine with these GPUs; its other devices are read from the same sysfs, at the same interval.
    pub fn new(gpus: NvmlSource) -> Self {
        let others = SysfsSource {
            root: gpus.sysfs.clone(),
            interval: gpus.probe_interval,
        };
        Self { gpus, others }
    }

    /// Lists the devices of this machine; one without GPUs serves its other devices.
    fn discover(&self) -> Result<NodeInventory, InventoryError> {
        // The other devices come first: they are served also if the GPU driver fails.
        let others = self.others.list();
        match self.gpus.discover() {
            Ok(found) => Ok(NodeInventory { others, ..found }),
            // The watch goes on looking for the driver, and reports GPUs that come later.
            Err(error) if error.is_absence() && !others.is_empty() => {
                info!(%error, "this node has no GPU that can be shared; serving its other devices");
                Ok(NodeInventory {
                    others,
                    ..NodeInventory::default()
                })
            }
            Err(error) => Err(error),
        }
    }

    /// Starts one thread that watches the GPUs of the inventory, and one that watches its other devices.
    fn watch(
        &self,
        inventory: &NodeInventory,
    ) -> Result<(Feed, mpsc::Receiver<Observations>), InventoryError> {
        Feed::start(vec![self.gpus.watcher(inventory), self.others.watcher(inventory)])
    }
}
