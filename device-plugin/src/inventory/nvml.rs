//! NVIDIA GPUs through NVML, which is loaded at run time. The only file that uses NVML.
//!
//! Devices are told apart by UUID; NVML's order is neither that of the minor numbers nor stable.
//! A session (library loaded, initialised) sees the devices that were there when it began, and a
//! device that was lost stays lost in it, so a watch begins a new one now and then while it misses a
//! device. GPUs in MIG mode are listed as excluded: sharing their instances is not supported.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use nvml_wrapper::{
    Device, Nvml, bitmasks::event::EventTypes, enums::event::XidError, error::NvmlError,
    event::EventSet,
};
use tokio::sync::mpsc;
use tracing::{info, warn};

use super::{
    ExcludedGpu, Feed, Gpu, GpuUuid, Inventory, InventoryError,
    feed::{Outbox, Over},
    pci,
};
use crate::health::{Observation, ObservationKind};

/// `NVML_DEVICE_MIG_ENABLE`.
const MIG_ENABLED: u32 = 1;

/// Longest wait inside NVML, and so the longest a stopped watch goes on.
const WAIT: Duration = Duration::from_millis(500);

/// The NVIDIA devices of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvmlSource {
    /// The library: a path, or a name that the dynamic loader looks up.
    pub library: PathBuf,
    /// Where sysfs is mounted.
    pub sysfs: PathBuf,
    /// How often a watch probes each device.
    pub probe_interval: Duration,
    /// How often a watch that misses a device begins a new session to look for it.
    pub reopen_interval: Duration,
}

impl Default for NvmlSource {
    fn default() -> Self {
        Self {
            library: PathBuf::from("libnvidia-ml.so.1"),
            sysfs: PathBuf::from("/sys"),
            probe_interval: Duration::from_secs(10),
            reopen_interval: Duration::from_secs(30),
        }
    }
}

impl NvmlSource {
    /// Looks at the devices once, in a session of its own.
    pub(super) fn discover(&self) -> Result<Inventory, InventoryError> {
        let nvml = open(&self.library)?;
        let inventory = self.list(&nvml)?;
        for excluded in &inventory.excluded {
            warn!(index = excluded.index, gpu = ?excluded.uuid, reason = %excluded.reason, "GPU is not shared");
        }
        if inventory.gpus.is_empty() {
            let reasons: Vec<_> = inventory.excluded.iter().map(describe).collect();
            return Err(InventoryError::NothingToShare {
                place: self.library.clone(),
                reasons: reasons.join("; "),
            });
        }
        Ok(inventory)
    }

    fn list(&self, nvml: &Nvml) -> Result<Inventory, InventoryError> {
        let count = nvml.device_count().map_err(|error| failed("count the devices", error))?;
        if count == 0 {
            return Err(InventoryError::NoGpu { place: self.library.clone() });
        }
        let (mut gpus, mut excluded) = (Vec::new(), Vec::new());
        for index in 0..count {
            match self.look_at(nvml, index) {
                Ok(gpu) => gpus.push(gpu),
                Err(reason) => excluded.push(reason),
            }
        }
        gpus.sort_by_key(|gpu| gpu.minor);
        let inventory = Inventory {
            gpus,
            excluded,
            driver_version: nvml.sys_driver_version().ok(),
            vendor: "nvidia".to_owned(),
        };
        inventory.checked(&self.library)
    }

    /// One device, or why it cannot be shared. A sick device does not hide the others.
    fn look_at(&self, nvml: &Nvml, index: u32) -> Result<Gpu, ExcludedGpu> {
        let excluded = |uuid: Option<&GpuUuid>, reason: String| ExcludedGpu { index, uuid: uuid.cloned(), reason };
        let unreadable = |what: &'static str| move |error: NvmlError| format!("its {what} cannot be read: {error}");
        let device = nvml.device_by_index(index).map_err(|error| excluded(None, unreadable("handle")(error)))?;
        let uuid = device.uuid().map_err(|error| excluded(None, unreadable("UUID")(error)))?;
        let uuid: GpuUuid = uuid.parse().map_err(|error: super::InvalidGpuUuid| excluded(None, error.to_string()))?;
        if device.mig_mode().is_ok_and(|mode| mode.current == MIG_ENABLED) {
            return Err(excluded(Some(&uuid), "it is in MIG mode, and sharing MIG instances is not supported".to_owned()));
        }
        self.describe(&device, index, &uuid).map_err(|reason| excluded(Some(&uuid), reason))
    }
}
