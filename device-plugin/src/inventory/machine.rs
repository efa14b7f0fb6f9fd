//! The devices of a real machine: GPUs through NVML, and what sysfs tells of besides.
//!
//! Each kind has a thread of its own, so that a driver that hangs hides nothing of the others. A machine without GPUs is
//! fine as long as it has something else; its driver is looked for all the time.

use tracing::info;

use super::{Feed, Inventory, InventoryError, NvmlSource, SysfsSource};
use crate::health::Observation;
use tokio::sync::mpsc;

/// Where the devices of a machine come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineSource {
    /// GPUs, if they are looked for.
    pub gpus: Option<NvmlSource>,
    /// All others.
    pub others: SysfsSource,
}

impl MachineSource {
    /// NVIDIA's GPUs alone.
    pub fn of_gpus(gpus: NvmlSource) -> Self {
        let others = SysfsSource::nothing(gpus.sysfs.clone());
        Self {
            gpus: Some(gpus),
            others,
        }
    }

    pub(super) fn discover(&self) -> Result<Inventory, InventoryError> {
        let others = self.others.list();
        let gpus = self
            .gpus
            .as_ref()
            .map_or_else(|| Ok(Inventory::default()), NvmlSource::discover);
        match gpus {
            Ok(found) if found.gpus.is_empty() && others.is_empty() => Err(InventoryError::NoDevice {
                path: self.others.root.clone(),
            }),
            Ok(found) => Ok(Inventory { others, ..found }),
            Err(error) if error.is_absence() && !others.is_empty() => {
                info!(%error, "serving the devices that this node has besides GPUs");
                Ok(Inventory {
                    others,
                    ..Inventory::default()
                })
            }
            Err(error) => Err(error),
        }
    }

    pub(super) fn watch(
        &self,
        inventory: &Inventory,
    ) -> Result<(Feed, mpsc::Receiver<Observation>), InventoryError> {
        let gpus = self.gpus.iter().map(|nvml| nvml.watcher(inventory));
        let others = self.others.is_wanted().then(|| self.others.watcher(inventory));
        Feed::start(gpus.chain(others).collect())
    }
}
