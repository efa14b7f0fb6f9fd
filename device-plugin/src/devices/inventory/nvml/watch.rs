//! Watches NVIDIA GPUs: critical errors by NVML's events, everything else by probes.
//!
//! A session (library loaded, initialised) sees the devices that were there when it was opened, and a device that was lost stays
//! lost in it, so a watch opens other sessions, at growing intervals, while one of the known devices is missing.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::event::EventSet;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::sys_exports::field_id::{
    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, NVML_FI_DEV_REMAPPED_FAILURE, NVML_FI_DEV_REMAPPED_PENDING,
};
use nvml_wrapper::{Device, Nvml};
use tracing::{info, warn};

use super::{NvmlSource, is_mig, uuid_of};
use crate::devices::inventory::feed::{Reporter, Stopped};
use crate::devices::inventory::{InventoryError, NodeInventory, ObservationKind, PhysicalId};
use crate::logged_error::LoggedError;

/// `NVML_ERROR_GPU_NOT_FOUND`, which the wrapper has no name for.
const GPU_NOT_FOUND: u32 = 28;

/// The number for a critical error whose XID NVML does not know.
const UNKNOWN_XID: u64 = 999;

/// The highest factor by which the interval between sessions grows while a device stays missing.
const MAX_REOPEN_FACTOR: u32 = 16;

/// Longest wait inside NVML, and so the longest time for which a stopped watch goes on.
const EVENT_WAIT: Duration = Duration::from_secs(5);

/// The state of a watch across its sessions.
pub(super) struct NvmlWatch {
    source: NvmlSource,
    known: NodeInventory,
    /// The length of a session while a device is missing, in units of [`NvmlSource::reopen_interval`].
    reopen_factor: u32,
    logged: LoggedError,
    /// Devices that needed a reset or were lost at their last probe: a device that then answers has been reset.
    awaiting_reset: BTreeSet<PhysicalId>,
}

impl NvmlWatch {
    pub(super) fn new(source: NvmlSource, known: NodeInventory) -> Self {
        Self {
            source,
            known,
            reopen_factor: 1,
            logged: LoggedError::default(),
            awaiting_reset: BTreeSet::new(),
        }
    }

    /// One round of the watch: a session with the driver; if none can be opened, reports every device as failed.
    pub(super) fn run(&mut self, reporter: &Reporter) -> Result<(), Stopped> {
        match self.source.open() {
            Ok(nvml) => self.run_session(&nvml, reporter),
            Err(error) => self.report_no_session(&error, reporter),
        }
    }

    fn report_no_session(&mut self, error: &InventoryError, reporter: &Reporter) -> Result<(), Stopped> {
        let problem = error.to_string();
        let what = "NVML does not work, its devices count as unhealthy";
        self.logged.warn(error, what);
        for gpu in &self.known.gpus {
            reporter.add(Some(&gpu.uuid), ObservationKind::Failed(problem.clone()));
        }
        reporter.send_added()?;
        if matches!(error, InventoryError::DriverReplaced { .. }) {
            // The process ends on this observation: only a new container gets the library of the new driver.
            reporter.send(None, ObservationKind::DriverReplaced(problem))?;
        }
        reporter.pause(self.source.probe_interval)
    }

    /// Watches until it is time for another session because a device is missing in this one.
    fn run_session(&mut self, nvml: &Nvml, reporter: &Reporter) -> Result<(), Stopped> {
        self.logged.clear();
        // The devices may have changed since the caller listed them, or since the last session.
        self.report_changes(nvml, reporter)?;
        let events = self.register_events(nvml);
        // NVML reports events from here on; a probe alone shows earlier trouble.
        let mut is_missing = self.probe_all(nvml, reporter)?;
        let opened = Instant::now();
        let (mut probed, mut compared) = (opened, opened);
        loop {
            let until_probe = self.source.probe_interval.saturating_sub(probed.elapsed());
            let until_compare = self.source.reopen_interval.saturating_sub(compared.elapsed());
            let wait = EVENT_WAIT.min(until_probe).min(until_compare);
            let needs_probe = self.wait(events.as_ref(), wait, reporter)?;
            if needs_probe || probed.elapsed() >= self.source.probe_interval {
                is_missing = self.probe_all(nvml, reporter)?;
                probed = Instant::now();
            }
            if compared.elapsed() >= self.source.reopen_interval {
                // An XID that is reported between two sessions is missed; the probes see its effect on the device.
                if self.decide_to_reopen(is_missing, opened.elapsed()) {
                    return Ok(());
                }
                self.report_changes(nvml, reporter)?;
                compared = Instant::now();
            }
        }
    }

    /// Returns true if a device is missing and this session, which is `age` old, must end; the next session lasts twice as long.
    fn decide_to_reopen(&mut self, is_missing: bool, age: Duration) -> bool {
        let mut excluded = self.known.excluded.iter();
        // A GPU that could not be read may be readable in another session.
        if !is_missing && excluded.all(|gpu| gpu.is_mig) {
            self.reopen_factor = 1;
            return false;
        }
        let is_time = age >= self.source.reopen_interval.saturating_mul(self.reopen_factor);
        if is_time {
            // Events between two sessions are missed, and a dead device makes opening a session slow, so sessions get longer.
            self.reopen_factor = (self.reopen_factor * 2).min(MAX_REOPEN_FACTOR);
        }
        is_time
    }

    /// Reports, once, that the session lists new or changed devices. The probes report a known device that is missing.
    fn report_changes(&mut self, nvml: &Nvml, reporter: &Reporter) -> Result<(), Stopped> {
        // The probes report a driver that does not answer.
        let Ok(now) = self.source.list(nvml) else {
            return Ok(());
        };
        if self.known.is_outdated_by(&now) {
            reporter.announce_change()?;
        }
        Ok(())
    }

    /// Registers for the critical XIDs of every device that can report them; `None` if no device can.
    fn register_events<'nvml>(&self, nvml: &'nvml Nvml) -> Option<EventSet<'nvml>> {
        let mut able = Vec::new();
        for gpu in &self.known.gpus {
            able.extend(with_events(nvml, &gpu.uuid));
        }
        // NVML's crate frees the event set with a failed registration, so each round registers all but the devices that failed.
        'rounds: while !able.is_empty() {
            let mut events = match nvml.create_event_set() {
                Ok(events) => events,
                Err(error) => {
                    warn!(%error, "NVML gives no events, devices are only probed");
                    return None;
                }
            };
            for (position, (uuid, device)) in able.iter().enumerate() {
                match device.register_events(EventTypes::CRITICAL_XID_ERROR, events) {
                    Ok(registered) => events = registered,
                    Err(error) => {
                        info!(gpu = %uuid, error = %error.error, "GPU gives no events, it is only probed");
                        able.remove(position);
                        continue 'rounds;
                    }
                }
            }
            return Some(events);
        }
        None
    }

    /// Waits for an event and reports it. Returns true if every device must be probed now.
    fn wait(
        &mut self,
        events: Option<&EventSet<'_>>,
        timeout: Duration,
        reporter: &Reporter,
    ) -> Result<bool, Stopped> {
        reporter.check()?;
        let Some(events) = events else {
            reporter.pause(timeout)?;
            return Ok(false);
        };
        // A rest below a millisecond would become no wait at all, and the loop would spin until the next probe.
        match events.wait(u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX).max(1)) {
            Ok(event) if event.event_type.contains(EventTypes::CRITICAL_XID_ERROR) => {
                let xid = match event.event_data {
                    Some(XidError::Value(xid)) => xid,
                    Some(XidError::Unknown) | None => UNKNOWN_XID,
                };
                let uuid = uuid_of(&event.device);
                let known = uuid.filter(|uuid| self.known.gpu(uuid).is_some());
                reporter.send(known.as_ref(), ObservationKind::Xid(xid))?;
                // An XID of no known device may concern any device.
                Ok(known.is_none())
            }
            Ok(_) | Err(NvmlError::Timeout) => Ok(false),
            Err(error) => {
                let what = "waiting for NVML events failed, probing every device";
                self.logged.warn(&error, what);
                // A wait that fails at once must not become a busy loop.
                reporter.pause(timeout)?;
                Ok(true)
            }
        }
    }

    /// Probes every known GPU and reports each result. Returns true if a GPU is missing: lost, failed or in MIG mode.
    fn probe_all(&mut self, nvml: &Nvml, reporter: &Reporter) -> Result<bool, Stopped> {
        let mut is_missing = false;
        for gpu in &self.known.gpus {
            let (mut kind, has_pending_rows) = probe(nvml, &gpu.uuid);
            if kind == ObservationKind::Answered && !has_pending_rows && self.awaiting_reset.remove(&gpu.uuid)
            {
                kind = ObservationKind::AnsweredWithoutFault;
            }
            if has_pending_rows || matches!(kind, ObservationKind::Lost | ObservationKind::NeedsReset(_)) {
                self.awaiting_reset.insert(gpu.uuid.clone());
            }
            is_missing |= matches!(
                kind,
                ObservationKind::Lost | ObservationKind::Failed(_) | ObservationKind::MigMode
            );
            reporter.add(Some(&gpu.uuid), kind);
        }
        reporter.send_added()?;
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

/// Asks NVML if a device is in order. The second value is that of [`reset_state`].
fn probe(nvml: &Nvml, uuid: &PhysicalId) -> (ObservationKind, bool) {
    let device = match nvml.device_by_uuid(uuid.as_str()) {
        Ok(device) => device,
        Err(error) => return (failure(&error), false),
    };
    // A cheap call that reaches the device. One that shares its processor's memory does not support it, and answers all the same.
    match device.memory_info() {
        Err(NvmlError::NotSupported) | Ok(_) => {}
        Err(error) => return (failure(&error), false),
    }
    if is_mig(&device) {
        return (ObservationKind::MigMode, false);
    }
    reset_state(&device)
}

fn failure(error: &NvmlError) -> ObservationKind {
    match error {
        // NVML finds no device by the UUID of a GPU that it does not list any more.
        NvmlError::GpuLost | NvmlError::NotFound | NvmlError::UnexpectedVariant(GPU_NOT_FOUND) => {
            ObservationKind::Lost
        }
        NvmlError::ResetRequired => ObservationKind::NeedsReset("every call of NVML says so".to_owned()),
        error => ObservationKind::Failed(error.to_string()),
    }
}

/// Asks the driver if the device must be reset. The second value is true if rows of its memory wait for a reset to be remapped;
/// the device works meanwhile.
fn reset_state(device: &Device<'_>) -> (ObservationKind, bool) {
    let fields = [
        NVML_FI_DEV_GET_GPU_RECOVERY_ACTION,
        NVML_FI_DEV_REMAPPED_FAILURE,
        NVML_FI_DEV_REMAPPED_PENDING,
    ];
    let samples = device.field_values_for(&fields.map(FieldId)).unwrap_or_default();
    let value = |position: usize| whole_number(samples.get(position)?.as_ref().ok()?.value.as_ref().ok()?);
    let (recovery_action, remap_failure, pending_remap) = (value(0), value(1), value(2));
    let kind = match (recovery_action, remap_failure) {
        (Some(action), _) if action > 0 => {
            ObservationKind::NeedsReset(recovery_action_name(action).to_owned())
        }
        // The only sign of drivers before 565, which name no recovery action.
        (_, Some(failed)) if failed > 0 => {
            ObservationKind::NeedsReset("a row of its memory could not be remapped".to_owned())
        }
        (Some(_), _) => ObservationKind::AnsweredWithoutFault,
        (None, _) => ObservationKind::Answered,
    };
    (kind, matches!(pending_remap, Some(1..)))
}

fn whole_number(value: &SampleValue) -> Option<u64> {
    match value {
        SampleValue::U32(value) => Some(u64::from(*value)),
        SampleValue::U64(value) => Some(*value),
        SampleValue::I64(value) => u64::try_from(*value).ok(),
        SampleValue::F64(_) => None,
    }
}

/// The recovery action that the driver asks for, in words; the number is one of `nvmlDeviceGpuRecoveryAction_t`.
fn recovery_action_name(action: u64) -> &'static str {
    match action {
        1 => "its driver asks for a reset of the GPU",
        2 => "its driver asks for a reboot of the node",
        3 => "its driver asks to drain peer-to-peer traffic",
        4 => "its driver asks to drain the GPU and to reset it",
        _ => "its driver asks for a recovery action that NVML has no name for",
    }
}
