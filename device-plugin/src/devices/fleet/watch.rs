//! Watches the devices: observations of the source become changes of health, and these a new [`NodeFleet`]. All observations that
//! wait make one new fleet, so a node whose GPUs all fail at once sends kubelet one list.
//!
//! A call into a driver that hangs cannot be ended. The plugin lets its thread hang and starts no other in its place. A device
//! without any observation for a minute beyond the probe interval has failed, as if a probe had.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use daemon::api_server::one_line;
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::{error, info, warn};

use crate::devices::health::{ApplicationFault, Health, HealthChange};
use crate::devices::inventory::source::DeviceSource;
use crate::devices::inventory::{
    InventoryError, NodeInventory, Observation, ObservationKind, Observations, PhysicalId,
};

use super::NodeFleet;
use super::sharing::Sharing;

/// Delay before a watch that has ended is started again.
const RESTART_DELAY: Duration = Duration::from_secs(1);

/// Delay before the plugin lists the devices again after it could not list them, or could not serve the listed ones.
const DISCOVERY_RETRY: Duration = Duration::from_secs(30);

/// Longest wait for the list of devices; the plugin applies no observation meanwhile.
const DISCOVERY_LIMIT: Duration = Duration::from_secs(20);

/// Time by which a probe may be late: opening an NVML session and waking an idle GPU take seconds for each GPU.
const OBSERVATION_DELAY: Duration = Duration::from_secs(60);

/// A change of health that does not come from a watch of the devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Correction {
    Cleared(PhysicalId),
    /// The critical errors that an earlier process observed; empty if there are none. Sent once.
    Loaded(Vec<EarlierXid>),
}

/// A critical error that an earlier process observed on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EarlierXid {
    pub(crate) device: PhysicalId,
    pub(crate) xid: u64,
    /// The time since which the device is unhealthy, in the text of the Device object.
    pub(crate) since: String,
}

/// The channels of a [`FleetWatch`].
#[derive(Debug)]
pub(crate) struct FleetChannels {
    pub(crate) fleet: watch::Sender<Arc<NodeFleet>>,
    /// Sends faults of applications; a fault for which the channel has no room is dropped.
    pub(crate) faults: mpsc::Sender<ApplicationFault>,
    /// Receives changes of health that do not come from the source of the devices.
    pub(crate) corrections: mpsc::Receiver<Correction>,
}

pub(crate) async fn discover(source: &DeviceSource) -> anyhow::Result<NodeInventory> {
    let source = source.clone();
    Ok(spawn_blocking(move || source.discover()).await??)
}

#[derive(Debug)]
pub(crate) struct FleetWatch {
    source: DeviceSource,
    /// The call that lists the devices, while it runs.
    listing: Option<JoinHandle<Result<NodeInventory, InventoryError>>>,
    inventory: NodeInventory,
    health: Health,
    sharing: Sharing,
    channels: FleetChannels,
    /// The time that counts as zero for [`Health`].
    started: Instant,
}

impl FleetWatch {
    pub(crate) fn new(
        source: DeviceSource,
        inventory: NodeInventory,
        health: Health,
        sharing: Sharing,
        channels: FleetChannels,
    ) -> Self {
        Self {
            source,
            listing: None,
            inventory,
            health,
            sharing,
            channels,
            started: Instant::now(),
        }
    }

    /// Watches until the task is dropped, or until the driver has been replaced, with the reason for which the process must end.
    pub(crate) async fn run(mut self) -> String {
        let source = self.source.clone();
        loop {
            match source.watch(&self.inventory) {
                // The feed must live while its channel is read: dropping it stops its threads.
                Ok((_feed, observations)) => {
                    let limit = source.probe_interval() + OBSERVATION_DELAY;
                    if let Err(replaced) = self.read_feed(observations, limit).await {
                        return replaced;
                    }
                }
                Err(error) => {
                    warn!(error = one_line(&error), "cannot watch the devices, trying again");
                    // Nothing else reads this channel while there is no feed, and containers start only after `Loaded`.
                    while let Ok(correction) = self.channels.corrections.try_recv() {
                        self.apply_correction(correction);
                    }
                    self.discover_again().await;
                }
            }
            // A source that fails at once must not become a busy loop.
            sleep(RESTART_DELAY).await;
        }
    }

    /// Reads one feed until it ends, or until the devices have been listed again because they have changed. A device without an
    /// observation for `limit` has failed.
    async fn read_feed(
        &mut self,
        mut observations: mpsc::Receiver<Observations>,
        limit: Duration,
    ) -> Result<(), String> {
        let mut discover_at = None;
        let mut silence = Silence::new(limit, self.inventory.ids().cloned());
        loop {
            let silence_ends = silence.deadline();
            let has_changed = tokio::select! {
                // Observations that have arrived count before silence.
                biased;
                Some(correction) = self.channels.corrections.recv() => {
                    self.apply_correction(correction);
                    false
                }
                first = observations.recv() => match first {
                    Some(first) => self.observe_all(first, &mut observations, &mut silence)?,
                    None => return Ok(()),
                },
                () = sleep_until_some(discover_at) => true,
                () = sleep_until_some(silence_ends) => {
                    // The feed waits for its driver. Another feed would wait too, and the thread of this feed could not be ended.
                    self.mark_silent(&silence.take_silent(), limit);
                    false
                }
            };
            if has_changed {
                if self.discover_again().await {
                    return Ok(());
                }
                // The feed reports a change once, so nothing else would ask for another attempt.
                discover_at = Some(Instant::now() + DISCOVERY_RETRY);
            }
        }
    }

    /// Applies `first` and the observations that wait behind it, up to a change of the inventory. Returns true if there is one.
    fn observe_all(
        &mut self,
        first: Observations,
        waiting: &mut mpsc::Receiver<Observations>,
        silence: &mut Silence,
    ) -> Result<bool, String> {
        let mut changes = Vec::new();
        let mut observations = first;
        // All that wait are applied together, so that the readers of the fleet wake once.
        while let Ok(more) = waiting.try_recv() {
            observations.extend(more);
        }
        let mut result = Ok(false);
        for observation in observations {
            silence.record(&observation);
            if observation.kind == ObservationKind::InventoryChanged {
                info!("the devices of this node have changed");
                result = Ok(true);
                break;
            }
            if let ObservationKind::DriverReplaced(how) = observation.kind {
                result = Err(format!("{how}; ending, so that this container is created again"));
                break;
            }
            if let Some(fault) = self.health.application_fault(&observation) {
                warn!(device = %fault.uuid, xid = fault.xid, "an application has caused an error on a device");
                // A fault leads only to events, so it may be lost while the channel is full.
                let _ = self.channels.faults.try_send(fault);
            }
            changes.extend(self.health.observe(self.started.elapsed(), &observation));
        }
        self.apply(&changes);
        result
    }

    fn apply_correction(&mut self, correction: Correction) {
        let now = self.started.elapsed();
        match correction {
            Correction::Cleared(device) => {
                let change = self.health.clear(now, &device);
                self.apply(change.as_slice());
            }
            Correction::Loaded(errors) => {
                for error in errors {
                    let change = self.health.load(now, &error.device, error.xid, &error.since);
                    self.apply(change.as_slice());
                }
                let fleet = &self.channels.fleet;
                fleet.send_modify(|fleet| Arc::make_mut(fleet).is_health_loaded = true);
            }
        }
    }

    fn mark_silent(&mut self, devices: &[PhysicalId], silence: Duration) {
        let how = format!("the driver has not answered for {} s", silence.as_secs());
        let mut changes = Vec::new();
        for device in devices {
            let observation = Observation {
                device: Some(device.clone()),
                kind: ObservationKind::Failed(how.clone()),
            };
            changes.extend(self.health.observe(self.started.elapsed(), &observation));
        }
        self.apply(&changes);
    }

    /// Logs each of these changes of health, and sends the readers of the fleet a new one; without changes it sends none.
    fn apply(&self, changes: &[HealthChange]) {
        if changes.is_empty() {
            return;
        }
        for change in changes {
            let (device, reason, message) = (&change.device, change.reason, &change.message);
            if change.is_healthy {
                info!(%device, %reason, message, "device is healthy again");
            } else {
                error!(%device, %reason, message, "device is unhealthy");
            }
        }
        // Readers may still hold the last fleet, which must not change under them: `make_mut` copies it then.
        self.channels.fleet.send_modify(|fleet| {
            let fleet = Arc::make_mut(fleet);
            for change in changes {
                fleet.apply(change);
            }
        });
    }

    /// Lists the devices again and serves them from now on. Returns false if it keeps the known ones and has to try again.
    async fn discover_again(&mut self) -> bool {
        match self.list_devices().await {
            // NVML lists no GPU while the driver is replaced, and pods that run on them must not lose their device IDs.
            Ok(found) if found.gpus.is_empty() && !self.inventory.gpus.is_empty() => {
                warn!("no GPU answers now, keeping the known devices");
                false
            }
            Ok(found) => self.replace_inventory(found),
            Err(error) => {
                warn!(error = %format!("{error:#}"), "cannot list the devices again, keeping the known ones");
                false
            }
        }
    }

    /// Lists the devices of the source on a thread that may block, and waits at most [`DISCOVERY_LIMIT`].
    async fn list_devices(&mut self) -> anyhow::Result<NodeInventory> {
        let source = self.source.clone();
        // A call that hangs cannot be ended: the next attempt waits for it, instead of starting another beside it.
        let listing = self
            .listing
            .get_or_insert_with(|| spawn_blocking(move || source.discover()));
        let found = timeout(DISCOVERY_LIMIT, &mut *listing).await;
        let found = found.context("the driver does not answer")?;
        self.listing = None;
        // The outer error means that the thread panicked, the inner one is of the source.
        Ok(found??)
    }

    /// Replaces the inventory. Returns false, and keeps the old one, if kubelet could not accept the list of the new device IDs.
    fn replace_inventory(&mut self, found: NodeInventory) -> bool {
        if found == self.inventory {
            // The change has been undone. Another feed must start, because this one reports only its first change.
            return true;
        }
        let ids = match self.sharing.id_scheme(&found) {
            Ok(ids) => ids,
            Err(error) => {
                error!(%error, "keeping the known devices");
                return false;
            }
        };
        info!(n_gpus = found.gpus.len(), "serving other devices from now on");
        self.health.set_devices(found.ids().cloned());
        self.inventory.clone_from(&found);
        let fleet = &self.channels.fleet;
        fleet.send_modify(|fleet| *fleet = Arc::new(fleet.with_inventory(found, ids)));
        true
    }
}

/// Waits until this moment; without one it never returns.
pub(crate) async fn sleep_until_some(moment: Option<Instant>) {
    match moment {
        Some(moment) => sleep_until(moment).await,
        None => std::future::pending().await,
    }
}

/// The time of the last observation of each device. It is kept by device, since NVML may hang while sysfs is read.
struct Silence {
    limit: Duration,
    last_observed: BTreeMap<PhysicalId, Instant>,
}

impl Silence {
    fn new(limit: Duration, devices: impl Iterator<Item = PhysicalId>) -> Self {
        // Each device counts as observed now, so that the source has the whole limit for its first observation.
        let now = Instant::now();
        let last_observed = devices.map(|device| (device, now)).collect();
        Self { limit, last_observed }
    }

    fn record(&mut self, observation: &Observation) {
        if let Some(device) = &observation.device
            && let Some(last) = self.last_observed.get_mut(device)
        {
            *last = Instant::now();
        }
    }

    /// The time at which the first device will have been silent for too long.
    fn deadline(&self) -> Option<Instant> {
        let earliest = self.last_observed.values().min()?;
        Some(*earliest + self.limit)
    }

    /// The devices that have been silent for too long. Their silence counts from now again, so that each limit reports them once.
    fn take_silent(&mut self) -> Vec<PhysicalId> {
        let now = Instant::now();
        let mut silent = Vec::new();
        for (device, last) in &mut self.last_observed {
            if *last + self.limit <= now {
                *last = now;
                silent.push(device.clone());
            }
        }
        silent
    }
}

#[cfg(test)]
mod tests;
