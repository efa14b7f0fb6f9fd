//! NVIDIA GPUs through NVML, which is loaded at run time. Only this module uses NVML.
//!
//! Devices are identified by UUID; NVML's order is neither that of the minor numbers nor stable. GPUs in MIG mode are listed
//! as excluded: sharing their instances is not supported.

mod library;
mod watch;

use std::{collections::BTreeMap, fs, path::PathBuf, time::Duration};

use nvml_wrapper::{Device, Nvml, error::NvmlError};
use proto::topology::GpuLinks;
use tracing::warn;

use super::{
    ExcludedGpu, Exclusion, Gpu, InvalidPhysicalId, Inventory, InventoryError, PhysicalId,
    feed::Watcher,
    links::{self, FarEnd},
    pci::{self, Bus, PciLocation},
};
use watch::Watch;

/// `NVML_DEVICE_MIG_ENABLE`.
const MIG_ENABLED: u32 = 1;

/// The reason that a GPU in MIG mode is left out.
pub(super) const MIG: &str = "it is in MIG mode, and sharing MIG instances is not supported";

/// More links than any GPU has.
const MAX_LINKS: u32 = 64;

/// NVIDIA's number in the PCI registry; its switches are bridges.
const NVIDIA: u32 = 0x10de;

/// The NVIDIA devices of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvmlSource {
    /// The library: a path, or a name that the dynamic loader looks up.
    pub library: PathBuf,
    /// Directories that may hold the driver. If there are any, the library comes from the first that has one.
    pub driver_roots: Vec<PathBuf>,
    /// Where sysfs is mounted.
    pub sysfs: PathBuf,
    /// Where procfs is mounted; the driver writes minor numbers there that NVML may not know.
    pub procfs: PathBuf,
    /// Bytes of a GPU whose memory NVML does not know, such as one that shares the memory of its processor.
    pub unknown_memory: Option<u64>,
    /// True if the memory that the driver reserves for itself is left out of what can be shared.
    pub withholds_reserved: bool,
    /// How often a watch probes each device.
    pub probe_interval: Duration,
    /// How often a watch compares the devices with those it knows; one that misses a device begins a
    /// new session for that, and rarer while that does not help.
    pub reopen_interval: Duration,
}

impl Default for NvmlSource {
    fn default() -> Self {
        Self {
            library: PathBuf::from("libnvidia-ml.so.1"),
            driver_roots: Vec::new(),
            sysfs: PathBuf::from("/sys"),
            procfs: PathBuf::from("/proc"),
            unknown_memory: None,
            withholds_reserved: false,
            probe_interval: Duration::from_secs(10),
            reopen_interval: Duration::from_secs(30),
        }
    }
}

impl NvmlSource {
    pub(super) fn discover(&self) -> Result<Inventory, InventoryError> {
        let nvml = self.open()?;
        let mut inventory = self.list(&nvml)?;
        for excluded in &inventory.excluded {
            warn!("GPU is not shared: {excluded}");
        }
        if inventory.gpus.is_empty() {
            let reasons: Vec<_> = inventory.excluded.iter().map(ExcludedGpu::to_string).collect();
            let path = self.library.clone();
            return Err(InventoryError::NothingToShare {
                path,
                reasons: reasons.join("; "),
            });
        }
        inventory.links = links(&nvml, &Bus::read(&self.sysfs), &inventory.gpus);
        Ok(inventory)
    }

    /// What watches the GPUs of `inventory`.
    pub(super) fn watcher(&self, inventory: &Inventory) -> Watcher {
        let mut watch = Watch::new(self.clone(), inventory.clone());
        Box::new(move |outbox| watch.run(outbox))
    }

    /// What this session sees; not an error if nothing of it can be shared.
    fn list(&self, nvml: &Nvml) -> Result<Inventory, InventoryError> {
        let count = nvml
            .device_count()
            .map_err(|error| failed("count the devices", error))?;
        if count == 0 {
            return Err(InventoryError::NoGpu {
                path: self.library.clone(),
            });
        }
        let bus = Bus::read(&self.sysfs);
        let (mut gpus, mut excluded) = (Vec::<Gpu>::new(), Vec::new());
        for index in 0..count {
            let looked = self
                .look_at(nvml, &bus, index)
                .and_then(|gpu| distinct(&gpus, gpu));
            match looked {
                Ok(gpu) => gpus.push(gpu),
                Err(reason) => excluded.push(reason),
            }
        }
        gpus.sort_by_key(|gpu| gpu.minor);
        let driver_version = nvml.sys_driver_version().ok();
        Ok(Inventory {
            gpus,
            excluded,
            needs_driver: true,
            driver_version,
            vendor: "nvidia".to_owned(),
            ..Inventory::default()
        })
    }

    /// One device, or why it cannot be shared: a sick device does not hide the others.
    fn look_at(&self, nvml: &Nvml, bus: &Bus, index: u32) -> Result<Gpu, ExcludedGpu> {
        let nameless = |problem: String| ExcludedGpu {
            index,
            uuid: None,
            exclusion: Exclusion::Unreadable(problem),
        };
        let device = nvml
            .device_by_index(index)
            .map_err(|error| nameless(no("handle", &error)))?;
        let uuid = device.uuid().map_err(|error| nameless(no("UUID", &error)))?;
        let uuid: PhysicalId = uuid
            .parse()
            .map_err(|error: InvalidPhysicalId| nameless(error.to_string()))?;
        let excluded = |exclusion| ExcludedGpu {
            index,
            uuid: Some(uuid.clone()),
            exclusion,
        };
        if is_mig(&device) {
            return Err(excluded(Exclusion::Mig));
        }
        self.describe(&device, bus, index, &uuid)
            .map_err(|problem| excluded(Exclusion::Unreadable(problem)))
    }

    fn describe(&self, device: &Device<'_>, bus: &Bus, index: u32, uuid: &PhysicalId) -> Result<Gpu, String> {
        let bus_id = device.pci_info().ok().and_then(|pci| pci::address(&pci.bus_id));
        let minor = self.minor(device, bus_id.as_deref())?;
        let (memory_bytes, reserved_bytes) = self.memory(device)?;
        let location: PciLocation = bus_id
            .as_deref()
            .map(|address| bus.location(address))
            .unwrap_or_default();
        Ok(Gpu {
            uuid: uuid.clone(),
            minor,
            index,
            memory_bytes,
            reserved_bytes,
            model: device.name().map_err(|error| no("name", &error))?,
            bus_id,
            location,
            labels: BTreeMap::new(),
            device_node: PathBuf::from(format!("/dev/nvidia{minor}")),
        })
    }

    /// The minor number, from the driver's files in procfs where NVML does not know it.
    fn minor(&self, device: &Device<'_>, bus_id: Option<&str>) -> Result<u32, String> {
        let unknown = match device.minor_number() {
            Ok(minor) => return Ok(minor),
            Err(NvmlError::NotSupported) => "NVML does not support it",
            Err(error) => return Err(no("minor number", &error)),
        };
        let Some(bus_id) = bus_id else {
            return Err(format!(
                "its minor number cannot be read: {unknown}, and it has no PCI address"
            ));
        };
        let file = self
            .procfs
            .join("driver/nvidia/gpus")
            .join(bus_id)
            .join("information");
        let text = fs::read_to_string(&file).map_err(|error| {
            format!(
                "its minor number cannot be read: {unknown}, and {} cannot be read: {error}",
                file.display()
            )
        })?;
        let minor = text
            .lines()
            .find_map(|line| line.strip_prefix("Device Minor:")?.trim().parse().ok());
        minor.ok_or_else(|| {
            format!(
                "its minor number cannot be read: {unknown}, and {} does not name it",
                file.display()
            )
        })
    }

    /// Bytes that can be shared, and those besides that the driver reserves and that are left out.
    fn memory(&self, device: &Device<'_>) -> Result<(u64, u64), String> {
        let (total, reserved) = match device.memory_info() {
            Ok(memory) => (memory.total, memory.reserved),
            Err(NvmlError::FailedToLoadSymbol(_)) => {
                return Err("the driver is too old to tell its memory: it needs 510 or newer".to_owned());
            }
            Err(NvmlError::NotSupported) => (0, 0),
            Err(error) => return Err(no("memory", &error)),
        };
        match (total, self.unknown_memory) {
            (0, Some(bytes)) => Ok((bytes, 0)),
            (0, None) => Err("NVML does not know its memory: say with --gpu-memory how much of it pods may share, such as 96Gi".to_owned()),
            _ if self.withholds_reserved => Ok((total.saturating_sub(reserved), reserved.min(total))),
            _ => Ok((total, 0)),
        }
    }
}

/// Returns true if the GPU is in MIG mode. One that cannot do MIG answers with an error.
fn is_mig(device: &Device<'_>) -> bool {
    device.mig_mode().is_ok_and(|mode| mode.current == MIG_ENABLED)
}

/// How the GPUs are linked now. A link that breaks later is not news.
fn links(nvml: &Nvml, bus: &Bus, gpus: &[Gpu]) -> Vec<GpuLinks> {
    let seen = gpus.iter().flat_map(|gpu| {
        far_ends(nvml, bus, gpus, gpu)
            .into_iter()
            .map(|far| (gpu.minor, far))
    });
    links::groups(&seen.collect::<Vec<_>>())
}

/// What is at the other ends of a GPU's active links, as far as it is a switch or one of these GPUs.
fn far_ends(nvml: &Nvml, bus: &Bus, gpus: &[Gpu], gpu: &Gpu) -> Vec<FarEnd> {
    let Ok(device) = nvml.device_by_uuid(gpu.uuid.as_str()) else {
        return Vec::new();
    };
    let links = (0..MAX_LINKS).map(|number| device.link_wrapper_for(number));
    // The first number that is no link's is an error.
    let states = links.map_while(|link| link.is_active().ok().map(|is_active| (link, is_active)));
    let active = states.filter(|(_, is_active)| *is_active);
    active
        .filter_map(|(link, _)| far_end(bus, gpus, &pci::address(&link.remote_pci_info().ok()?.bus_id)?))
        .collect()
}

/// What sits at this address. The wrapper cannot tell GPUs from switches.
fn far_end(bus: &Bus, gpus: &[Gpu], address: &str) -> Option<FarEnd> {
    if let Some(other) = gpus.iter().find(|other| other.bus_id.as_deref() == Some(address)) {
        return Some(FarEnd::Gpu(other.minor));
    }
    // In a virtual machine switches have no function of their own; processors have one of another vendor.
    let is_switch = bus
        .get(address)
        .is_none_or(|function| function.vendor == NVIDIA && function.class >> 16 == pci::BRIDGE);
    is_switch.then_some(FarEnd::Switch)
}

/// `gpu`, unless one of those `before` it has its UUID or minor number.
fn distinct(before: &[Gpu], gpu: Gpu) -> Result<Gpu, ExcludedGpu> {
    let same = |other: &&Gpu| other.uuid == gpu.uuid || other.minor == gpu.minor;
    let Some(other) = before.iter().find(same) else {
        return Ok(gpu);
    };
    let problem = format!(
        "GPU {} has the same UUID or minor number {}",
        other.index, other.minor
    );
    let exclusion = Exclusion::Unreadable(problem);
    Err(ExcludedGpu {
        index: gpu.index,
        uuid: Some(gpu.uuid),
        exclusion,
    })
}

fn no(what: &str, error: &NvmlError) -> String {
    format!("its {what} cannot be read: {error}")
}

fn failed(operation: &str, error: NvmlError) -> InventoryError {
    InventoryError::Nvml {
        operation: operation.to_owned(),
        source: Box::new(error),
    }
}
