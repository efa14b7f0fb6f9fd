//! Follows the devices: what the source observes becomes health, and health becomes a new [`Fleet`].
//!
//! Everything that has been observed by the time one observation is read makes one new value, so a
//! node whose GPUs all fail at once sends kubelet one list, not one per device.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep};
use tracing::{error, info, warn};

use crate::health::{Health, HealthChange, Observation, ObservationKind};
use crate::inventory::{Inventory, Source};
use crate::plugin::ids::IdScheme;
use crate::watching::one_line;

use super::{Fleet, FleetGpu};

/// How soon a watch that has ended is begun again.
const RETRY: Duration = Duration::from_secs(1);

/// What makes a fleet of an inventory.
pub type Number = Box<dyn Fn(&Inventory) -> anyhow::Result<IdScheme> + Send>;

/// Follows the devices of `source` until the task is dropped.
pub async fn watch_devices(source: Source, mut inventory: Inventory, mut health: Health, number: Number, fleet: watch::Sender<Arc<Fleet>>) {
    let began = Instant::now();
    loop {
        match source.watch(&inventory) {
            Ok((_feed, mut seen)) => while take_in(&mut seen, &mut health, began, &fleet).await {},
            Err(error) => warn!(error = one_line(&error), "cannot watch the devices, trying again"),
        }
        match discover(&source).await {
            Ok(found) => adopt(found, &mut inventory, &mut health, &number, &fleet),
            Err(error) => warn!(error = %format!("{error:#}"), "cannot look at the devices again, keeping what is known"),
        }
        sleep(RETRY).await;
    }
}

/// Looks at the devices on a thread where that may block.
pub async fn discover(source: &Source) -> anyhow::Result<Inventory> {
    let source = source.clone();
    Ok(spawn_blocking(move || source.discover()).await??)
}

/// Takes in what was observed since; false when the devices must be looked at anew.
async fn take_in(seen: &mut mpsc::Receiver<Observation>, health: &mut Health, began: Instant, fleet: &watch::Sender<Arc<Fleet>>) -> bool {
    let Some(mut observation) = seen.recv().await else { return false };
    let mut changes = Vec::new();
    let goes_on = loop {
        if observation.kind == ObservationKind::InventoryChanged {
            info!("the devices of this node have changed");
            break false;
        }
        changes.extend(health.observe(began.elapsed(), &observation));
        match seen.try_recv() {
            Ok(next) => observation = next,
            Err(_) => break true,
        }
    };
    if !changes.is_empty() {
        fleet.send_modify(|fleet| *fleet = Arc::new(changed(fleet, &changes)));
    }
    goes_on
}

fn changed(fleet: &Fleet, changes: &[HealthChange]) -> Fleet {
    let mut fleet = fleet.clone();
    for change in changes {
        if change.healthy {
            info!(gpu = %change.uuid, reason = %change.reason, message = change.message, "GPU is healthy again");
        } else {
            error!(gpu = %change.uuid, reason = %change.reason, message = change.message, "GPU is unhealthy");
        }
        for entry in fleet.gpus.iter_mut().filter(|entry| entry.gpu.uuid == change.uuid) {
            entry.is_healthy = change.healthy;
            entry.reason = Some(change.reason);
            entry.message.clone_from(&change.message);
        }
    }
    fleet
}

/// Goes over to another inventory, unless kubelet could not be told of it. A device that stays keeps its state.
fn adopt(found: Inventory, inventory: &mut Inventory, health: &mut Health, number: &Number, fleet: &watch::Sender<Arc<Fleet>>) {
    if found == *inventory {
        return;
    }
    let ids = match number(&found) {
        Ok(ids) => ids,
        Err(error) => return error!(error = %format!("{error:#}"), "keeping the devices known before"),
    };
    info!(n_gpus = found.gpus.len(), "serving other devices from now on");
    health.retarget(found.gpus.iter().map(|gpu| gpu.uuid.clone()));
    inventory.clone_from(&found);
    fleet.send_modify(|fleet| {
        let mut new = Fleet::new(found, ids);
        for entry in &mut new.gpus {
            if let Some(before) = fleet.gpus.iter().find(|before| before.gpu.uuid == entry.gpu.uuid) {
                *entry = FleetGpu { gpu: entry.gpu.clone(), ..before.clone() };
            }
        }
        *fleet = Arc::new(new);
    });
}
