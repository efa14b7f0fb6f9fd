//! Watches NVIDIA GPUs: critical errors by NVML's events, all else by probes.
//!
//! A session (library loaded, initialised) sees the devices that were there when it began, and a device that was lost stays
//! lost in it, so a watch begins a new session now and then while it misses a device.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use nvml_wrapper::{
    Device, Nvml,
    bitmasks::event::EventTypes,
    enums::{device::SampleValue, event::XidError},
    error::NvmlError,
    event::EventSet,
    structs::device::FieldId,
    sys_exports::field_id::{
        NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, NVML_FI_DEV_REMAPPED_FAILURE, NVML_FI_DEV_REMAPPED_PENDING,
    },
};
use tracing::{info, warn};

use super::{MIG, NvmlSource, is_mig};
use crate::health::ObservationKind;
use crate::inventory::{
    ExcludedGpu, Exclusion, Inventory, InventoryError, PhysicalId,
    feed::{Outbox, Over},
};

/// `NVML_ERROR_GPU_NOT_FOUND`, which the wrapper has no name for.
const GPU_NOT_FOUND: u32 = 28;

/// The XID that NVML reports when it does not know which.
const UNKNOWN_XID: u64 = 999;

/// Highest factor by which new sessions become rarer while they find nothing.
const MAX_PATIENCE: u32 = 16;

/// Longest wait inside NVML, and so the longest a stopped watch goes on.
const WAIT: Duration = Duration::from_millis(500);

/// The state of a watch across its sessions.
pub(super) struct Watch {
    source: NvmlSource,
    /// The devices that are watched.
    known: Inventory,
    /// True once the watch has reported that the devices have changed.
    announced: bool,
    /// The number of the source's intervals that a session lasts in which a device is missing.
    patience: u32,
    /// The last failure that was logged.
    complaint: Option<String>,
    /// Devices that needed a reset or were lost when they were last probed: one that answers again has been reset.
    awaiting: BTreeSet<PhysicalId>,
}

impl Watch {
    /// A watch of the GPUs of `known`.
    pub(super) fn new(source: NvmlSource, known: Inventory) -> Self {
        Self {
            source,
            known,
            announced: false,
            patience: 1,
            complaint: None,
            awaiting: BTreeSet::new(),
        }
    }

    pub(super) fn run(&mut self, outbox: &Outbox) -> Over {
        loop {
            let over = match self.source.open() {
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
        if matches!(error, InventoryError::DriverReplaced { .. }) {
            outbox.send(None, ObservationKind::DriverReplaced(problem))?;
        }
        outbox.pause(self.source.probe_interval)
    }

    /// Watches until a new session is wanted because this one misses a device.
    ///
    /// The watch misses an XID that is reported between two sessions; its probes see the effect on
    /// the device.
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

    /// Returns true if it is time to look for a missing device in a new session. As events can be
    /// missed meanwhile and a dead device makes it slow, it becomes rarer while that does not help.
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
        let Ok(now) = self.source.list(nvml) else {
            return Ok(());
        };
        if self.announced || !self.known.is_outdated_by(&now) {
            return Ok(());
        }
        self.announced = true;
        outbox.send(None, ObservationKind::InventoryChanged)
    }

    /// Asks for critical XIDs of every physical device, once; `None` if no device can report them.
    ///
    /// NVML frees the set with a failed registration, so it begins again without that device.
    fn register<'nvml>(&self, nvml: &'nvml Nvml) -> Option<EventSet<'nvml>> {
        let mut able: Vec<_> = self
            .known
            .gpus
            .iter()
            .filter_map(|gpu| with_events(nvml, &gpu.uuid))
            .collect();
        while !able.is_empty() {
            let set = nvml
                .create_event_set()
                .inspect_err(|error| warn!(%error, "NVML gives no events, devices are only probed"))
                .ok()?;
            let all = able.iter().enumerate().try_fold(set, |set, (at, (_, device))| {
                device
                    .register_events(EventTypes::CRITICAL_XID_ERROR, set)
                    .map_err(|error| (at, error))
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
    fn wait(
        &mut self,
        events: Option<&EventSet<'_>>,
        timeout: Duration,
        outbox: &Outbox,
    ) -> Result<bool, Over> {
        outbox.check()?;
        let Some(events) = events else {
            return outbox.pause(timeout).map(|()| false);
        };
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
                let problem = error.to_string();
                if self.complaint.as_ref() != Some(&problem) {
                    warn!(error = %problem, "waiting for NVML events failed, probing every device");
                    self.complaint = Some(problem);
                }
                // A wait that fails at once must not become a busy loop.
                outbox.pause(timeout).map(|()| true)
            }
        }
    }

    /// Probes every device; true if one is missing.
    fn probe(&mut self, nvml: &Nvml, outbox: &Outbox) -> Result<bool, Over> {
        let mut is_missing = false;
        for gpu in &self.known.gpus {
            let Checkup {
                kind,
                has_pending_rows,
            } = probe(nvml, &gpu.uuid);
            let kind = match kind {
                ObservationKind::Answered if !has_pending_rows && self.awaiting.remove(&gpu.uuid) => {
                    ObservationKind::Sound
                }
                kind => kind,
            };
            if has_pending_rows || matches!(kind, ObservationKind::Lost | ObservationKind::NeedsReset(_)) {
                self.awaiting.insert(gpu.uuid.clone());
            }
            is_missing |= matches!(kind, ObservationKind::Lost | ObservationKind::Failed(_));
            outbox.send(Some(&gpu.uuid), kind)?;
        }
        Ok(is_missing)
    }
}

fn with_events<'nvml>(nvml: &'nvml Nvml, uuid: &PhysicalId) -> Option<(PhysicalId, Device<'nvml>)> {
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

/// A device's answer to a probe.
struct Checkup {
    kind: ObservationKind,
    /// True if rows of its memory wait for a reset to be remapped. It can be used meanwhile.
    has_pending_rows: bool,
}

impl From<ObservationKind> for Checkup {
    fn from(kind: ObservationKind) -> Self {
        Self {
            kind,
            has_pending_rows: false,
        }
    }
}

fn probe(nvml: &Nvml, uuid: &PhysicalId) -> Checkup {
    let device = match nvml.device_by_uuid(uuid.as_str()) {
        Ok(device) => device,
        Err(error) => return trouble(&error).into(),
    };
    match device.memory_info() {
        Err(NvmlError::NotSupported) | Ok(_) => {}
        Err(error) => return trouble(&error).into(),
    }
    if is_mig(&device) {
        return ObservationKind::Failed(MIG.to_owned()).into();
    }
    recovery(&device)
}

fn trouble(error: &NvmlError) -> ObservationKind {
    match error {
        NvmlError::GpuLost | NvmlError::NotFound | NvmlError::UnexpectedVariant(GPU_NOT_FOUND) => {
            ObservationKind::Lost
        }
        NvmlError::ResetRequired => ObservationKind::NeedsReset("every call of NVML says so".to_owned()),
        error => ObservationKind::Failed(error.to_string()),
    }
}

/// Asks the driver if the device must be reset. Drivers before 565 name no recovery action; with those, only rows of memory
/// that could not be remapped show it.
fn recovery(device: &Device<'_>) -> Checkup {
    let fields = [
        NVML_FI_DEV_GET_GPU_RECOVERY_ACTION,
        NVML_FI_DEV_REMAPPED_FAILURE,
        NVML_FI_DEV_REMAPPED_PENDING,
    ];
    let samples = device.field_values_for(&fields.map(FieldId)).unwrap_or_default();
    let value = |at: usize| whole(samples.get(at)?.as_ref().ok()?.value.as_ref().ok()?);
    let kind = match (value(0), value(1)) {
        (Some(action), _) if action > 0 => ObservationKind::NeedsReset(action_name(action).to_owned()),
        (_, Some(failed)) if failed > 0 => {
            ObservationKind::NeedsReset("a row of its memory could not be remapped".to_owned())
        }
        (Some(_), _) => ObservationKind::Sound,
        (None, _) => ObservationKind::Answered,
    };
    Checkup {
        kind,
        has_pending_rows: value(2).is_some_and(|pending| pending > 0),
    }
}

fn whole(value: &SampleValue) -> Option<u64> {
    match value {
        SampleValue::U32(value) => Some(u64::from(*value)),
        SampleValue::U64(value) => Some(*value),
        SampleValue::I64(value) => u64::try_from(*value).ok(),
        SampleValue::F64(_) => None,
    }
}

/// The names of `nvmlDeviceGpuRecoveryAction_t`.
fn action_name(action: u64) -> &'static str {
    match action {
        1 => "its driver asks for a reset of the GPU",
        2 => "its driver asks for a reboot of the node",
        3 => "its driver asks to drain peer-to-peer traffic",
        4 => "its driver asks to drain the GPU and to reset it",
        _ => "its driver asks for a recovery action that NVML has no name for",
    }
}
