//! Follows the devices: what the source observes becomes health, and health becomes a new [`Fleet`].
//!
//! Everything that has been observed by the time one observation is read makes one new value, so a
//! node whose GPUs all fail at once sends kubelet one list, not one per device.
//!
//! A call into a driver that hangs cannot be ended. Its thread is left alone and no other is begun in
//! its place; what is known of its devices then does not stay for ever: when nothing has been said of a
//! device for long, it counts as failed until its source speaks again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use daemon::api_server::one_line;
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::{error, info, warn};

use crate::device_ids::IdScheme;
use crate::health::{ApplicationFault, Health, HealthChange};
use crate::inventory::{Inventory, InventoryError, Observation, ObservationKind, PhysicalId, Source};

use super::recall::Recalled;
use super::{Fleet, FleetDevice, FleetGpu};

/// How soon a watch that has ended is begun again.
const RETRY: Duration = Duration::from_secs(1);

/// How soon devices that could not be adopted are looked at again.
const LOOK_AGAIN: Duration = Duration::from_secs(30);

/// How long one such look is waited for; meanwhile no observation is taken in.
const LOOK_LIMIT: Duration = Duration::from_secs(20);

/// What makes a fleet of an inventory.
pub type Number = Box<dyn Fn(&Inventory) -> anyhow::Result<IdScheme> + Send + Sync>;

/// How long after it was due a source may leave us without an observation: opening a session and waking
/// idle GPUs takes NVML seconds for each.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// The ends of the channels that the follower has.
#[derive(Debug)]
pub struct Channels {
    /// The devices and their health.
    pub fleet: watch::Sender<Arc<Fleet>>,
    /// Faults of applications; those for which there is no room are dropped.
    pub faults: mpsc::Sender<ApplicationFault>,
    /// What others know of the devices' health.
    pub corrections: mpsc::Receiver<Correction>,
}

/// A change of health that does not come from the source of the devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Correction {
    /// An operator has cleared a device.
    Cleared(PhysicalId),
    /// The critical errors that an earlier process saw: from now on they are known.
    Recalled(Vec<Recalled>),
}

/// This process must end, so that its container is made again with the library of the driver that the node has now.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{how}; ending, so that this container is made again")]
pub struct DriverReplaced {
    how: String,
}

/// Follows the devices of `source` until the task is dropped or another process is needed for it.
pub async fn watch_devices(
    source: Source,
    inventory: Inventory,
    health: Health,
    number: Number,
    channels: Channels,
) -> DriverReplaced {
    let discovery = Discovery {
        source: source.clone(),
        running: None,
    };
    let mut follower = Follower {
        discovery,
        inventory,
        health,
        number,
        channels,
        began: Instant::now(),
    };
    loop {
        match source.watch(&follower.inventory) {
            // The feed goes on with the devices it knows, and so does their health as long as no others are adopted.
            Ok((_feed, seen)) => {
                if let Err(replaced) = follower
                    .follow(seen, source.probe_interval() + ANSWER_LIMIT)
                    .await
                {
                    return replaced;
                }
            }
            Err(error) => {
                warn!(error = one_line(&error), "cannot watch the devices, trying again");
                while let Ok(correction) = follower.channels.corrections.try_recv() {
                    follower.correct(correction);
                }
                follower.look_again().await;
            }
        }
        sleep(RETRY).await;
    }
}

/// What is known of the devices, and how to look at them again.
struct Follower {
    discovery: Discovery,
    inventory: Inventory,
    health: Health,
    number: Number,
    channels: Channels,
    began: Instant,
}

impl Follower {
    /// Until the feed ends or other devices have been adopted.
    ///
    /// A feed that says nothing of a device for `limit` is waiting for its driver. It is kept: another one would wait too,
    /// and its thread could not be ended either.
    async fn follow(
        &mut self,
        mut seen: mpsc::Receiver<Observation>,
        limit: Duration,
    ) -> Result<(), DriverReplaced> {
        let mut look_at = None;
        let mut silence = Silence::new(limit, self.inventory.ids().cloned());
        loop {
            let silence_ends = silence.ends();
            let next = tokio::select! {
                // What has been said counts before silence.
                biased;
                Some(correction) = self.channels.corrections.recv() => {
                    self.correct(correction);
                    Seen::Health
                }
                next = take_in(&mut seen, &mut self.health, &mut silence, self.began, &self.channels.fleet, &self.channels.faults) => next,
                () = at(look_at) => Seen::OtherDevices,
                () = at(silence_ends) => {
                    self.fail(&silence.over(), limit);
                    Seen::Health
                }
            };
            match next {
                Seen::Health => {}
                Seen::End => return Ok(()),
                Seen::OtherDriver(how) => return Err(DriverReplaced { how }),
                Seen::OtherDevices if self.look_again().await => return Ok(()),
                Seen::OtherDevices => look_at = Some(Instant::now() + LOOK_AGAIN),
            }
        }
    }

    fn correct(&mut self, correction: Correction) {
        let (now, health) = (self.began.elapsed(), &mut self.health);
        match correction {
            Correction::Cleared(device) => tell(&self.channels.fleet, health.clear(now, &device).as_slice()),
            Correction::Recalled(errors) => {
                let recalled = errors
                    .iter()
                    .filter_map(|error| health.load(now, &error.device, error.xid, &error.since));
                let changes: Vec<_> = recalled.collect();
                self.channels.fleet.send_modify(|fleet| {
                    *fleet = Arc::new(Fleet {
                        is_health_loaded: true,
                        ..changed(fleet, &changes)
                    });
                });
            }
        }
    }

    /// The driver of these devices does not answer, so nothing is known of them.
    fn fail(&mut self, devices: &[PhysicalId], silence: Duration) {
        let how = format!("the driver has not answered for {} s", silence.as_secs());
        let (now, health) = (self.began.elapsed(), &mut self.health);
        let failed = |uuid: &PhysicalId| Observation {
            device: Some(uuid.clone()),
            kind: ObservationKind::Failed(how.clone()),
        };
        let changes = devices
            .iter()
            .filter_map(|id| health.observe(now, &failed(id)))
            .collect::<Vec<_>>();
        tell(&self.channels.fleet, &changes);
    }

    /// Adopts the devices that are there now; false if that is not possible.
    async fn look_again(&mut self) -> bool {
        match self.discovery.run().await {
            Ok(found) if found.gpus.is_empty() && !self.inventory.gpus.is_empty() => {
                warn!("no GPU answers now, keeping what is known of the devices");
                false
            }
            Ok(found) => adopt(
                found,
                &mut self.inventory,
                &mut self.health,
                &self.number,
                &self.channels.fleet,
            ),
            Err(error) => {
                warn!(error = %format!("{error:#}"), "cannot look at the devices again, keeping what is known");
                false
            }
        }
    }
}

/// Never, if there is no such moment.
async fn at(moment: Option<Instant>) {
    match moment {
        Some(moment) => sleep_until(moment).await,
        None => std::future::pending().await,
    }
}

/// Looks at the devices one at a time: a look that hangs is waited for again, not begun beside another.
struct Discovery {
    source: Source,
    running: Option<JoinHandle<Result<Inventory, InventoryError>>>,
}

impl Discovery {
    async fn run(&mut self) -> anyhow::Result<Inventory> {
        let source = self.source.clone();
        let running = self
            .running
            .get_or_insert_with(|| spawn_blocking(move || source.discover()));
        let found = timeout(LOOK_LIMIT, &mut *running)
            .await
            .context("the driver does not answer")?;
        self.running = None;
        Ok(found??)
    }
}

/// Since when nothing has been said of each device: one source may hang while another one speaks.
struct Silence {
    limit: Duration,
    heard: BTreeMap<PhysicalId, Instant>,
}

impl Silence {
    fn new(limit: Duration, devices: impl Iterator<Item = PhysicalId>) -> Self {
        let now = Instant::now();
        Self {
            limit,
            heard: devices.map(|device| (device, now)).collect(),
        }
    }

    fn hear(&mut self, observation: &Observation) {
        if let Some(heard) = observation
            .device
            .as_ref()
            .and_then(|device| self.heard.get_mut(device))
        {
            *heard = Instant::now();
        }
    }

    /// When the first device has been silent for too long.
    fn ends(&self) -> Option<Instant> {
        self.heard.values().min().map(|heard| *heard + self.limit)
    }

    /// The devices that have been silent for too long; for each it begins anew.
    fn over(&mut self) -> Vec<PhysicalId> {
        let now = Instant::now();
        let limit = self.limit;
        let silent = self.heard.iter_mut().filter(|(_, heard)| **heard + limit <= now);
        silent
            .map(|(device, heard)| {
                *heard = now;
                device.clone()
            })
            .collect()
    }
}

/// What a feed has told.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Seen {
    Health,
    OtherDevices,
    OtherDriver(String),
    End,
}

/// Looks at the devices on a thread where that may block.
pub async fn discover(source: &Source) -> anyhow::Result<Inventory> {
    let source = source.clone();
    Ok(spawn_blocking(move || source.discover()).await??)
}

/// Takes in what was observed since.
async fn take_in(
    seen: &mut mpsc::Receiver<Observation>,
    health: &mut Health,
    silence: &mut Silence,
    began: Instant,
    fleet: &watch::Sender<Arc<Fleet>>,
    faults: &mpsc::Sender<ApplicationFault>,
) -> Seen {
    let Some(mut observation) = seen.recv().await else {
        return Seen::End;
    };
    let mut changes = Vec::new();
    let goes_on = loop {
        silence.hear(&observation);
        if observation.kind == ObservationKind::InventoryChanged {
            info!("the devices of this node have changed");
            break Seen::OtherDevices;
        }
        if let ObservationKind::DriverReplaced(how) = observation.kind {
            break Seen::OtherDriver(how);
        }
        if let Some(fault) = health.application_fault(&observation) {
            warn!(device = %fault.uuid, xid = fault.xid, "an application has made a mistake on a device");
            let _ = faults.try_send(fault);
        }
        changes.extend(health.observe(began.elapsed(), &observation));
        match seen.try_recv() {
            Ok(next) => observation = next,
            Err(_) => break Seen::Health,
        }
    };
    tell(fleet, &changes);
    goes_on
}

fn tell(fleet: &watch::Sender<Arc<Fleet>>, changes: &[HealthChange]) {
    if !changes.is_empty() {
        fleet.send_modify(|fleet| *fleet = Arc::new(changed(fleet, changes)));
    }
}

/// `fleet` after these changes.
pub fn changed(fleet: &Fleet, changes: &[HealthChange]) -> Fleet {
    let mut fleet = fleet.clone();
    for change in changes {
        if change.is_healthy {
            info!(device = %change.device, reason = %change.reason, message = change.message, "device is healthy again");
        } else {
            error!(device = %change.device, reason = %change.reason, message = change.message, "device is unhealthy");
        }
        let gpus = fleet
            .gpus
            .iter_mut()
            .filter(|entry| entry.gpu.uuid == change.device);
        let gpus = gpus.map(|entry| (&mut entry.is_healthy, &mut entry.reason, &mut entry.message));
        let others = fleet
            .others
            .iter_mut()
            .filter(|entry| entry.device.id == change.device);
        let others = others.map(|entry| (&mut entry.is_healthy, &mut entry.reason, &mut entry.message));
        for (is_healthy, reason, message) in gpus.chain(others) {
            *is_healthy = change.is_healthy;
            *reason = Some(change.reason);
            message.clone_from(&change.message);
        }
    }
    fleet
}

/// Goes over to another inventory, and says whether it did: not if kubelet could not be told of it.
/// A device that stays keeps its state.
fn adopt(
    found: Inventory,
    inventory: &mut Inventory,
    health: &mut Health,
    number: &Number,
    fleet: &watch::Sender<Arc<Fleet>>,
) -> bool {
    if found == *inventory {
        // The change has been undone, and the feed tells of the next one only when begun anew.
        return true;
    }
    let ids = match number(&found) {
        Ok(ids) => ids,
        Err(error) => {
            error!(error = %format!("{error:#}"), "keeping the devices known before");
            return false;
        }
    };
    info!(n_gpus = found.gpus.len(), "serving other devices from now on");
    health.set_devices(found.ids().cloned());
    inventory.clone_from(&found);
    fleet.send_modify(|fleet| {
        let mut new = Fleet {
            is_health_loaded: fleet.is_health_loaded,
            ..Fleet::new(found, ids)
        };
        for entry in &mut new.gpus {
            if let Some(before) = fleet.gpus.iter().find(|before| before.gpu.uuid == entry.gpu.uuid) {
                *entry = FleetGpu {
                    gpu: entry.gpu.clone(),
                    is_shared: entry.is_shared,
                    ..before.clone()
                };
            }
        }
        for entry in &mut new.others {
            if let Some(before) = fleet
                .others
                .iter()
                .find(|before| before.device.id == entry.device.id)
            {
                *entry = FleetDevice {
                    device: entry.device.clone(),
                    ..before.clone()
                };
            }
        }
        *fleet = Arc::new(new);
    });
    true
}

#[cfg(test)]
mod tests;
