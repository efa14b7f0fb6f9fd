//! NVIDIA GPUs through NVML, which is loaded at run time. The only file that uses NVML.
//!
//! Devices are told apart by UUID; NVML's order is neither that of the minor numbers nor stable. A
//! session (library loaded, initialised) sees the devices that were there when it began, and a
//! device that was lost stays lost in it, so a watch begins a new one now and then while it misses
//! a device. GPUs in MIG mode are listed as excluded: sharing their instances is not supported.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use nvml_wrapper::{Device, Nvml, bitmasks::event::EventTypes, enums::event::XidError, error::NvmlError, event::EventSet};
use proto::topology::GpuLinks;
use tracing::{info, warn};

use super::{
    ExcludedGpu, Exclusion, Gpu, GpuUuid, InvalidGpuUuid, Inventory, InventoryError,
    feed::{Outbox, Over, Watcher},
    links::{self, FarEnd},
    pci::{self, Bus, Place},
};
use crate::health::ObservationKind;

/// `NVML_DEVICE_MIG_ENABLE`.
const MIG_ENABLED: u32 = 1;

/// `NVML_ERROR_GPU_NOT_FOUND`, which the wrapper has no name for.
const GPU_NOT_FOUND: u32 = 28;

/// The XID that NVML reports when it does not know which.
const UNKNOWN_XID: u64 = 999;

/// More links than any GPU has.
const MAX_LINKS: u32 = 64;

/// NVIDIA's number in the PCI registry; its switches are bridges.
const NVIDIA: u32 = 0x10de;

/// How much rarer new sessions become while they find nothing.
const MAX_PATIENCE: u32 = 16;

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
    /// How often a watch compares the devices with those it knows; one that misses a device begins a
    /// new session for that, and rarer while that does not help.
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
    pub(super) fn discover(&self) -> Result<Inventory, InventoryError> {
        let nvml = open(&self.library)?;
        let mut inventory = self.list(&nvml)?;
        for excluded in &inventory.excluded {
            warn!("GPU is not shared: {excluded}");
        }
        if inventory.gpus.is_empty() {
            let reasons: Vec<_> = inventory.excluded.iter().map(ExcludedGpu::to_string).collect();
            let place = self.library.clone();
            return Err(InventoryError::NothingToShare { place, reasons: reasons.join("; ") });
        }
        inventory.links = links(&nvml, &Bus::read(&self.sysfs), &inventory.gpus);
        Ok(inventory)
    }

    /// What watches the GPUs of `inventory`.
    pub(super) fn watcher(&self, inventory: &Inventory) -> Watcher {
        let mut watch = Watch { source: self.clone(), known: inventory.clone(), announced: false, patience: 1, complaint: None };
        Box::new(move |outbox| watch.run(outbox))
    }

    /// What this session sees; not an error if nothing of it can be shared.
    fn list(&self, nvml: &Nvml) -> Result<Inventory, InventoryError> {
        let count = nvml.device_count().map_err(|error| failed("count the devices", error))?;
        if count == 0 {
            return Err(InventoryError::NoGpu { place: self.library.clone() });
        }
        let bus = Bus::read(&self.sysfs);
        let (mut gpus, mut excluded) = (Vec::<Gpu>::new(), Vec::new());
        for index in 0..count {
            let looked = look_at(nvml, &bus, index).and_then(|gpu| distinct(&gpus, gpu));
            match looked {
                Ok(gpu) => gpus.push(gpu),
                Err(reason) => excluded.push(reason),
            }
        }
        gpus.sort_by_key(|gpu| gpu.minor);
        let driver_version = nvml.sys_driver_version().ok();
        Ok(Inventory { gpus, excluded, needs_driver: true, driver_version, vendor: "nvidia".to_owned(), ..Inventory::default() })
    }
}

/// One device, or why it cannot be shared: a sick device does not hide the others.
fn look_at(nvml: &Nvml, bus: &Bus, index: u32) -> Result<Gpu, ExcludedGpu> {
    let nameless = |problem: String| ExcludedGpu { index, uuid: None, exclusion: Exclusion::Unreadable(problem) };
    let device = nvml.device_by_index(index).map_err(|error| nameless(no("handle", &error)))?;
    let uuid = device.uuid().map_err(|error| nameless(no("UUID", &error)))?;
    let uuid: GpuUuid = uuid.parse().map_err(|error: InvalidGpuUuid| nameless(error.to_string()))?;
    let excluded = |exclusion| ExcludedGpu { index, uuid: Some(uuid.clone()), exclusion };
    // GPUs that cannot do MIG answer with an error.
    if device.mig_mode().is_ok_and(|mode| mode.current == MIG_ENABLED) {
        return Err(excluded(Exclusion::Mig));
    }
    describe(&device, bus, index, &uuid).map_err(|problem| excluded(Exclusion::Unreadable(problem)))
}

fn describe(device: &Device<'_>, bus: &Bus, index: u32, uuid: &GpuUuid) -> Result<Gpu, String> {
    let minor = device.minor_number().map_err(|error| no("minor number", &error))?;
    let memory_bytes = match device.memory_info() {
        Ok(memory) if memory.total > 0 => memory.total,
        Ok(_) => return Err("it reports no memory".to_owned()),
        Err(NvmlError::FailedToLoadSymbol(_)) => {
            return Err("the driver is too old to tell its memory: it needs 510 or newer".to_owned());
        }
        Err(error) => return Err(no("memory", &error)),
    };
    let bus_id = device.pci_info().ok().and_then(|pci| pci::address(&pci.bus_id));
    let place: Place = bus_id.as_deref().map(|address| bus.place(address)).unwrap_or_default();
    Ok(Gpu {
        uuid: uuid.clone(),
        minor,
        index,
        memory_bytes,
        model: device.name().map_err(|error| no("name", &error))?,
        bus_id,
        place,
        labels: BTreeMap::new(),
        device_node: PathBuf::from(format!("/dev/nvidia{minor}")),
    })
}

/// How the GPUs are linked now. A link that breaks later is not news.
fn links(nvml: &Nvml, bus: &Bus, gpus: &[Gpu]) -> Vec<GpuLinks> {
    let seen = gpus.iter().flat_map(|gpu| far_ends(nvml, bus, gpus, gpu).into_iter().map(|far| (gpu.minor, far)));
    links::groups(&seen.collect::<Vec<_>>())
}

/// What is at the other ends of a GPU's active links, as far as it is a switch or one of these GPUs.
fn far_ends(nvml: &Nvml, bus: &Bus, gpus: &[Gpu], gpu: &Gpu) -> Vec<FarEnd> {
    let Ok(device) = nvml.device_by_uuid(gpu.uuid.as_str()) else { return Vec::new() };
    let links = (0..MAX_LINKS).map(|number| device.link_wrapper_for(number));
    // The first number that is no link's is an error.
    let states = links.map_while(|link| link.is_active().ok().map(|is_active| (link, is_active)));
    let active = states.filter(|(_, is_active)| *is_active);
    active.filter_map(|(link, _)| far_end(bus, gpus, &pci::address(&link.remote_pci_info().ok()?.bus_id)?)).collect()
}

/// What sits at this address. The wrapper cannot tell GPUs from switches.
fn far_end(bus: &Bus, gpus: &[Gpu], address: &str) -> Option<FarEnd> {
    if let Some(other) = gpus.iter().find(|other| other.bus_id.as_deref() == Some(address)) {
        return Some(FarEnd::Gpu(other.minor));
    }
    // In a virtual machine switches have no function of their own; processors have one of another vendor.
    let is_switch = bus.get(address).is_none_or(|function| function.vendor == NVIDIA && function.class >> 16 == pci::BRIDGE);
    is_switch.then_some(FarEnd::Switch)
}

/// `gpu`, unless one of those `before` it has its UUID or minor number.
fn distinct(before: &[Gpu], gpu: Gpu) -> Result<Gpu, ExcludedGpu> {
    let same = |other: &&Gpu| other.uuid == gpu.uuid || other.minor == gpu.minor;
    let Some(other) = before.iter().find(same) else { return Ok(gpu) };
    let problem = format!("GPU {} has the same UUID or minor number {}", other.index, other.minor);
    let exclusion = Exclusion::Unreadable(problem);
    Err(ExcludedGpu { index: gpu.index, uuid: Some(gpu.uuid), exclusion })
}

fn no(what: &str, error: &NvmlError) -> String {
    format!("its {what} cannot be read: {error}")
}

fn failed(operation: &str, error: NvmlError) -> InventoryError {
    InventoryError::Nvml { operation: operation.to_owned(), source: Box::new(error) }
}

/// Begins a session.
fn open(library: &Path) -> Result<Nvml, InventoryError> {
    Nvml::builder().lib_path(library.as_os_str()).init().map_err(|error| {
        let library = library.to_owned();
        match error {
            NvmlError::LibloadingError(_) | NvmlError::FailedToLoadSymbol(_) => {
                InventoryError::LibraryMissing { library, source: Box::new(error) }
            }
            NvmlError::DriverNotLoaded => InventoryError::DriverNotLoaded { library },
            error => failed("begin a session", error),
        }
    })
}

/// The state of a watch across its sessions.
struct Watch {
    source: NvmlSource,
    /// The devices that are watched.
    known: Inventory,
    /// Whether the reader has been told that the devices are others now.
    announced: bool,
    /// How many of the source's intervals a session lasts in which a device is missing.
    patience: u32,
    /// The last failure that was logged.
    complaint: Option<String>,
}

impl Watch {
    fn run(&mut self, outbox: &Outbox) -> Over {
        loop {
            let over = match open(&self.source.library) {
                Ok(nvml) => self.session(&nvml, outbox),
                Err(error) => self.without_session(&error, outbox),
            };
            if let Err(over) = over {
                return over;
            }
        }
    }

    /// The driver itself is away, so no device can be used; tries again later.
    fn without_session(&mut self, error: &InventoryError, outbox: &Outbox) -> Result<(), Over> {
        let problem = error.to_string();
        if self.complaint.as_ref() != Some(&problem) {
            warn!(error = %problem, "NVML does not work, its devices count as unhealthy");
            self.complaint = Some(problem.clone());
        }
        for gpu in &self.known.gpus {
            outbox.send(Some(&gpu.uuid), ObservationKind::Failed(problem.clone()))?;
        }
        outbox.pause(self.source.probe_interval)
    }

    /// Watches until a new session is wanted because this one misses a device.
    ///
    /// An XID that is reported between two sessions is not seen; what it does to the device is, by
    /// the probes.
    fn session(&mut self, nvml: &Nvml, outbox: &Outbox) -> Result<(), Over> {
        self.complaint = None;
        self.compare(nvml, outbox)?;
        let events = self.register(nvml);
        let mut is_missing = self.probe(nvml, outbox)?;
        let opened = Instant::now();
        let (mut probed, mut compared) = (opened, opened);
        loop {
            let until_probe = self.source.probe_interval.saturating_sub(probed.elapsed());
            let until_compare = self.source.reopen_interval.saturating_sub(compared.elapsed());
            let wait = WAIT.min(until_probe).min(until_compare);
            let is_suspicious = self.wait(events.as_ref(), wait, outbox)?;
            if is_suspicious || probed.elapsed() >= self.source.probe_interval {
                is_missing = self.probe(nvml, outbox)?;
                probed = Instant::now();
            }
            if compared.elapsed() >= self.source.reopen_interval {
                if self.wants_other_session(is_missing, opened.elapsed()) {
                    return Ok(());
                }
                self.compare(nvml, outbox)?;
                compared = Instant::now();
            }
        }
    }

    /// Whether to look for a missing device in a new session. As events can be missed meanwhile and
    /// a dead device makes it slow, it becomes rarer while that does not help.
    fn wants_other_session(&mut self, is_missing: bool, age: Duration) -> bool {
        let unreadable = |excluded: &ExcludedGpu| matches!(excluded.exclusion, Exclusion::Unreadable(_));
        if !is_missing && !self.known.excluded.iter().any(unreadable) {
            self.patience = 1;
            return false;
        }
        let is_time = age >= self.source.reopen_interval.saturating_mul(self.patience);
        if is_time {
            self.patience = (self.patience * 2).min(MAX_PATIENCE);
        }
        is_time
    }

    /// Says once when the devices are not the known ones any more. One that is merely missing is
    /// left to the probes.
    fn compare(&mut self, nvml: &Nvml, outbox: &Outbox) -> Result<(), Over> {
        let Ok(now) = self.source.list(nvml) else { return Ok(()) };
        if self.announced || !self.known.is_outdated_by(&now) {
            return Ok(());
        }
        self.announced = true;
        outbox.send(None, ObservationKind::InventoryChanged)
    }

    /// Asks for critical XIDs of every physical device, once; `None` if no device can tell.
    ///
    /// NVML frees the set with a failed registration, so it begins again without that device.
    fn register<'nvml>(&self, nvml: &'nvml Nvml) -> Option<EventSet<'nvml>> {
        let mut able: Vec<_> = self.known.gpus.iter().filter_map(|gpu| with_events(nvml, &gpu.uuid)).collect();
        while !able.is_empty() {
            let set = nvml.create_event_set().inspect_err(|error| warn!(%error, "NVML gives no events, devices are only probed")).ok()?;
            let all = able.iter().enumerate().try_fold(set, |set, (at, (_, device))| {
                device.register_events(EventTypes::CRITICAL_XID_ERROR, set).map_err(|error| (at, error))
            });
            match all {
                Ok(set) => return Some(set),
                Err((at, error)) => {
                    let (uuid, _) = able.remove(at);
                    info!(gpu = %uuid, %error, "GPU gives no events, it is only probed");
                }
            }
        }
        None
    }

    /// Waits for an event and passes it on; true if every device is to be probed now.
    fn wait(&self, events: Option<&EventSet<'_>>, timeout: Duration, outbox: &Outbox) -> Result<bool, Over> {
        outbox.check()?;
        let Some(events) = events else { return outbox.pause(timeout).map(|()| false) };
        match events.wait(u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX).max(1)) {
            Ok(event) if event.event_type.contains(EventTypes::CRITICAL_XID_ERROR) => {
                let xid = match event.event_data {
                    Some(XidError::Value(xid)) => xid,
                    Some(XidError::Unknown) | None => UNKNOWN_XID,
                };
                let uuid = event.device.uuid().ok().and_then(|uuid| uuid.parse().ok());
                let ours = uuid.filter(|uuid| self.known.gpu(uuid).is_some());
                outbox.send(ours.as_ref(), ObservationKind::Xid(xid))?;
                Ok(ours.is_none())
            }
            Ok(_) | Err(NvmlError::Timeout) => Ok(false),
            Err(error) => {
                warn!(%error, "waiting for NVML events failed, probing every device");
                // A wait that fails at once must not become a busy loop.
                outbox.pause(timeout).map(|()| true)
            }
        }
    }

    /// Probes every device; true if one is missing.
    fn probe(&self, nvml: &Nvml, outbox: &Outbox) -> Result<bool, Over> {
        let mut is_missing = false;
        for gpu in &self.known.gpus {
            let kind = probe(nvml, &gpu.uuid);
            is_missing |= kind != ObservationKind::Answered;
            outbox.send(Some(&gpu.uuid), kind)?;
        }
        Ok(is_missing)
    }
}

fn with_events<'nvml>(nvml: &'nvml Nvml, uuid: &GpuUuid) -> Option<(GpuUuid, Device<'nvml>)> {
    let device = nvml.device_by_uuid(uuid.as_str()).ok()?;
    match device.supported_event_types() {
        Ok(types) if types.contains(EventTypes::CRITICAL_XID_ERROR) => Some((uuid.clone(), device)),
        Ok(_) | Err(NvmlError::NotSupported) => {
            info!(gpu = %uuid, "GPU does not report XIDs, it is only probed");
            None
        }
        Err(error) => {
            info!(gpu = %uuid, %error, "GPU does not say which events it reports, it is only probed");
            None
        }
    }
}

fn probe(nvml: &Nvml, uuid: &GpuUuid) -> ObservationKind {
    match nvml.device_by_uuid(uuid.as_str()).and_then(|device| device.memory_info()) {
        Ok(_) => ObservationKind::Answered,
        Err(NvmlError::GpuLost | NvmlError::NotFound | NvmlError::UnexpectedVariant(GPU_NOT_FOUND)) => ObservationKind::Lost,
        Err(error) => ObservationKind::Failed(error.to_string()),
    }
}
