//! Follows the devices: what the source observes becomes health, and health becomes a new [`Fleet`].
//!
//! Everything that has been observed by the time one observation is read makes one new value, so a
//! node whose GPUs all fail at once sends kubelet one list, not one per device.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, sleep_until};
use tracing::{error, info, warn};

use crate::health::{Health, HealthChange, Observation, ObservationKind};
use crate::inventory::{Inventory, Source};
use crate::plugin::ids::IdScheme;
use crate::watching::one_line;

use super::{Fleet, FleetGpu};

/// How soon a watch that has ended is begun again.
const RETRY: Duration = Duration::from_secs(1);

/// How soon devices that could not be adopted are looked at again.
const LOOK_AGAIN: Duration = Duration::from_secs(30);

/// What makes a fleet of an inventory.
pub type Number = Box<dyn Fn(&Inventory) -> anyhow::Result<IdScheme> + Send + Sync>;

/// Follows the devices of `source` until the task is dropped.
pub async fn watch_devices(source: Source, mut inventory: Inventory, mut health: Health, number: Number, fleet: watch::Sender<Arc<Fleet>>) {
    let began = Instant::now();
    loop {
        match source.watch(&inventory) {
            // The feed goes on with the devices it knows, and so does their health as long as no others are adopted.
            Ok((_feed, mut seen)) => {
                let mut look_at = None;
                loop {
                    let next = tokio::select! {
                        next = take_in(&mut seen, &mut health, began, &fleet) => next,
                        () = at(look_at) => Seen::OtherDevices,
                    };
                    match next {
                        Seen::Health => {}
                        Seen::End => break,
                        Seen::OtherDevices if look_again(&source, &mut inventory, &mut health, &number, &fleet).await => break,
                        Seen::OtherDevices => look_at = Some(Instant::now() + LOOK_AGAIN),
                    }
                }
            }
            Err(error) => {
                warn!(error = one_line(&error), "cannot watch the devices, trying again");
                look_again(&source, &mut inventory, &mut health, &number, &fleet).await;
            }
        }
        sleep(RETRY).await;
    }
}

/// Never, if there is no such moment.
async fn at(moment: Option<Instant>) {
    match moment {
        Some(moment) => sleep_until(moment).await,
        None => std::future::pending().await,
    }
}

/// Adopts the devices that are there now; false if that is not possible.
async fn look_again(
    source: &Source,
    inventory: &mut Inventory,
    health: &mut Health,
    number: &Number,
    fleet: &watch::Sender<Arc<Fleet>>,
) -> bool {
    match discover(source).await {
        Ok(found) => adopt(found, inventory, health, number, fleet),
        Err(error) => {
            warn!(error = %format!("{error:#}"), "cannot look at the devices again, keeping what is known");
            false
        }
    }
}

/// What a feed has told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    Health,
    OtherDevices,
    End,
}

/// Looks at the devices on a thread where that may block.
pub async fn discover(source: &Source) -> anyhow::Result<Inventory> {
    let source = source.clone();
    Ok(spawn_blocking(move || source.discover()).await??)
}

/// Takes in what was observed since.
async fn take_in(seen: &mut mpsc::Receiver<Observation>, health: &mut Health, began: Instant, fleet: &watch::Sender<Arc<Fleet>>) -> Seen {
    let Some(mut observation) = seen.recv().await else { return Seen::End };
    let mut changes = Vec::new();
    let goes_on = loop {
        if observation.kind == ObservationKind::InventoryChanged {
            info!("the devices of this node have changed");
            break Seen::OtherDevices;
        }
        changes.extend(health.observe(began.elapsed(), &observation));
        match seen.try_recv() {
            Ok(next) => observation = next,
            Err(_) => break Seen::Health,
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

/// Goes over to another inventory, and says whether it did: not if kubelet could not be told of it.
/// A device that stays keeps its state.
fn adopt(found: Inventory, inventory: &mut Inventory, health: &mut Health, number: &Number, fleet: &watch::Sender<Arc<Fleet>>) -> bool {
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
    true
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proto::memory_unit::MemoryUnit;
    use serde_json::{Value, json};
    use tokio::time::timeout;

    use super::*;
    use crate::builders;
    use crate::health::{Policy, Reason};
    use crate::inventory::FileSource;

    fn seen(minor: u32, kind: ObservationKind) -> Observation {
        Observation { device: Some(builders::gpu(minor).uuid), kind }
    }

    /// What is seen at once makes one new value.
    #[tokio::test]
    async fn changes_that_come_together_are_one_change() {
        let (fleet, mut changed) = watch::channel(Arc::new(builders::fleet(3)));
        let mut health = Health::new(Policy::default(), (0..3).map(|minor| builders::gpu(minor).uuid));
        let (sender, mut receiver) = mpsc::channel(8);
        for minor in 0..3 {
            sender.try_send(seen(minor, ObservationKind::Lost)).unwrap();
        }
        assert_eq!(take_in(&mut receiver, &mut health, Instant::now(), &fleet).await, Seen::Health);
        assert!(receiver.is_empty());
        let now = changed.borrow_and_update();
        assert!(now.gpus.iter().all(|entry| !entry.is_healthy && entry.reason == Some(Reason::Lost)));
    }

    #[tokio::test]
    async fn no_change_wakes_nobody() {
        let (fleet, changed) = watch::channel(Arc::new(builders::fleet(1)));
        let mut health = Health::new(Policy::default(), [builders::gpu(0).uuid]);
        let (sender, mut receiver) = mpsc::channel(8);
        sender.try_send(seen(0, ObservationKind::Answered)).unwrap();
        assert_eq!(take_in(&mut receiver, &mut health, Instant::now(), &fleet).await, Seen::Health);
        assert!(!changed.has_changed().unwrap());
        drop(sender);
        assert_eq!(take_in(&mut receiver, &mut health, Instant::now(), &fleet).await, Seen::End);
    }

    fn write(path: &std::path::Path, gpus: &Value) {
        fs::write(path, json!({"gpus": gpus}).to_string()).unwrap();
    }

    /// A second GPU appears; the first stays sick.
    #[tokio::test]
    async fn other_devices_are_adopted_and_health_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("gpus.json");
        let sick = json!({"uuid": "GPU-a", "minor": 0, "memory": "4Gi", "health": "Xid 79"});
        write(&path, &json!([sick]));
        let source = Source::File(FileSource { path: path.clone(), node: "n1".to_owned(), interval: Duration::from_millis(20) });
        let inventory = discover(&source).await.unwrap();
        let number: Number = Box::new(|inventory| Ok(IdScheme::new(&inventory.gpus, 100, MemoryUnit::MIB)?));
        let first = Fleet::new(inventory.clone(), number(&inventory).unwrap());
        let health = Health::new(Policy::default(), inventory.gpus.iter().map(|gpu| gpu.uuid.clone()));
        let (sender, mut fleet) = watch::channel(Arc::new(first));
        tokio::spawn(watch_devices(source, inventory, health, number, sender));
        let mut wait = async |is_so: fn(&Arc<Fleet>) -> bool| {
            timeout(Duration::from_secs(20), fleet.wait_for(is_so)).await.expect("no change").unwrap().clone()
        };
        wait(|fleet| !fleet.gpus[0].is_healthy).await;
        write(&path, &json!([sick, {"uuid": "GPU-b", "minor": 1, "memory": "4Gi"}]));
        let now = wait(|fleet| fleet.gpus.len() == 2).await;
        assert_eq!(now.gpus.iter().map(|entry| entry.is_healthy).collect::<Vec<_>>(), [false, true]);
    }

    /// A second GPU cannot be adopted; the trouble of the first is seen all the same.
    #[tokio::test]
    async fn health_goes_on_beside_devices_that_cannot_be_adopted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("gpus.json");
        write(&path, &json!([{"uuid": "GPU-a", "minor": 0, "memory": "4Gi"}]));
        let source = Source::File(FileSource { path: path.clone(), node: "n1".to_owned(), interval: Duration::from_millis(20) });
        let inventory = discover(&source).await.unwrap();
        let number: Number = Box::new(|inventory| Ok(IdScheme::new(&inventory.gpus, 100, MemoryUnit::MIB)?));
        let first = Fleet::new(inventory.clone(), number(&inventory).unwrap());
        let health = Health::new(Policy::default(), inventory.gpus.iter().map(|gpu| gpu.uuid.clone()));
        let (sender, mut fleet) = watch::channel(Arc::new(first));
        tokio::spawn(watch_devices(source, inventory, health, number, sender));
        let huge = json!({"uuid": "GPU-b", "minor": 1, "memory": "4Ti"});
        write(&path, &json!([{"uuid": "GPU-a", "minor": 0, "memory": "4Gi", "health": "Xid 79"}, huge]));
        let sick = timeout(Duration::from_secs(20), fleet.wait_for(|fleet| !fleet.gpus[0].is_healthy)).await;
        assert_eq!(sick.expect("blind").unwrap().gpus.len(), 1);
    }

    #[test]
    fn devices_that_kubelet_could_not_be_told_of_are_not_adopted() {
        let number: Number = Box::new(|inventory| Ok(IdScheme::new(&inventory.gpus, 100, MemoryUnit::MIB)?));
        let of = |gpus| Inventory { gpus, excluded: Vec::new(), driver_version: None, vendor: "nvidia".to_owned() };
        let mut inventory = of(vec![builders::gpu(0)]);
        let (sender, fleet) = watch::channel(Arc::new(builders::fleet(1)));
        let huge = crate::inventory::Gpu { memory_bytes: 1 << 40, ..builders::gpu(1) };
        let mut health = Health::new(Policy::default(), []);
        assert!(!adopt(of(vec![huge]), &mut inventory, &mut health, &number, &sender));
        assert_eq!((inventory.gpus[0].minor, fleet.has_changed().unwrap()), (0, false));
    }
}
