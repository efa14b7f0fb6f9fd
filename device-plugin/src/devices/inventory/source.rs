//! The source of a node's devices: this machine, or a file. It lists devices and watches them from threads of its own; the module
//! `health` decides whether a device is healthy.

use std::time::Duration;

use memory_limits::CgroupMemory;
use tokio::sync::mpsc;
use tracing::info;

use super::sysfs;
use super::{CgroupOnGpu, Feed, InventoryError, NodeInventory, Observations, ProcessMemory};

pub use super::file::FileSource;
pub use super::nvml::NvmlSource;

/// The source of a node's devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceSource {
    /// This machine: its GPUs through NVML, its other devices through the same sysfs, at the same interval.
    Machine(NvmlSource),
    /// A file that describes simulated devices.
    File(FileSource),
}

impl DeviceSource {
    /// The interval at which a watch reports each device.
    pub fn probe_interval(&self) -> Duration {
        match self {
            Self::Machine(machine) => machine.probe_interval,
            Self::File(file) => file.interval,
        }
    }

    /// The version of the loaded kernel driver of this machine's GPUs, empty if it names none; `None` for simulated devices.
    pub(crate) fn loaded_driver(&self) -> Option<String> {
        match self {
            Self::Machine(machine) => machine.loaded_driver(),
            Self::File(_) => None,
        }
    }

    /// Lists the devices once. Blocks: NVML may take seconds to wake a GPU.
    pub fn discover(&self) -> Result<NodeInventory, InventoryError> {
        match self {
            Self::Machine(machine) => discover_machine(machine),
            Self::File(file) => file.discover(),
        }
    }

    /// The memory that each process uses on each GPU, as far as the source shows it. Blocks.
    pub fn memory_use(&self) -> Result<Vec<ProcessMemory>, InventoryError> {
        match self {
            Self::Machine(machine) => machine.memory_use(),
            Self::File(file) => file.memory_use(),
        }
    }

    /// The memory of each of these cgroups on a GPU as the driver knows it, in the order of `cgroups`, and the first failure. One
    /// that cannot be read counts as not limited. Blocks.
    pub(crate) fn cgroup_memory(
        &self,
        cgroups: &[CgroupOnGpu],
    ) -> Result<(Vec<CgroupMemory>, Option<InventoryError>), InventoryError> {
        match self {
            Self::Machine(machine) => machine.cgroup_memory(cgroups),
            // Simulated processes have no cgroups.
            Self::File(_) => Ok((vec![CgroupMemory::NotLimited; cgroups.len()], None)),
        }
    }

    /// Starts to watch the devices of `inventory` from threads of its own.
    ///
    /// The watch probes every device immediately and then at the source's interval. When the devices themselves change (a GPU
    /// appears, or its memory differs), it reports `InventoryChanged` once; the caller discovers again and starts another watch.
    pub fn watch(
        &self,
        inventory: &NodeInventory,
    ) -> Result<(Feed, mpsc::Receiver<Observations>), InventoryError> {
        match self {
            // One thread each, so that a driver that hangs hides nothing of the other devices.
            Self::Machine(machine) => Feed::start(vec![
                machine.watcher(inventory),
                sysfs::watcher(machine.sysfs.clone(), machine.probe_interval, inventory),
            ]),
            Self::File(file) => file.watch(inventory),
        }
    }
}

/// Lists the devices of this machine; one without GPUs serves its other devices.
fn discover_machine(machine: &NvmlSource) -> Result<NodeInventory, InventoryError> {
    // The other devices come first: they are served also if the GPU driver fails.
    let others = sysfs::list(&machine.sysfs);
    match machine.discover() {
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
