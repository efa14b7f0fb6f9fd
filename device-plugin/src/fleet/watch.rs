//! Follows the devices: what the source observes becomes health, and health becomes a new [`Fleet`].
//!
//! Everything that has been observed by the time one observation is read makes one new value, so a
//! node whose GPUs all fail at once sends kubelet one list, not one per device.
//!
//! A call into a driver that hangs cannot be ended. Its thread is left alone and no other is begun in
//! its place; what is known of the devices then does not stay for ever: when a source has been silent
//! for long, all of them count as failed until it speaks again.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tracing::{error, info, warn};

use crate::health::{Health, HealthChange, Observation, ObservationKind};
use crate::inventory::{GpuUuid, Inventory, InventoryError, Source};
use crate::plugin::ids::IdScheme;
use crate::watching::one_line;

use super::{Fleet, FleetGpu};

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

/// Follows the devices of `source` until the task is dropped.
pub async fn watch_devices(source: Source, inventory: Inventory, health: Health, number: Number, fleet: watch::Sender<Arc<Fleet>>) {
    let discovery = Discovery { source: source.clone(), running: None };
    let mut follower = Follower { discovery, inventory, health, number, fleet, began: Instant::now() };
    loop {
        match source.watch(&follower.inventory) {
            // The feed goes on with the devices it knows, and so does their health as long as no others are adopted.
            Ok((_feed, seen)) => follower.follow(seen, source.interval() + ANSWER_LIMIT).await,
            Err(error) => {
                warn!(error = one_line(&error), "cannot watch the devices, trying again");
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
    fleet: watch::Sender<Arc<Fleet>>,
    began: Instant,
}

impl Follower {
    /// Until the feed ends or other devices have been adopted.
    ///
    /// A feed that says nothing for `limit` is waiting for the driver. It is kept: another one would wait too,
    /// and its thread could not be ended either.
    async fn follow(&mut self, mut seen: mpsc::Receiver<Observation>, limit: Duration) {
        let mut look_at = None;
        let mut silent_at = Instant::now() + limit;
        loop {
            let next = tokio::select! {
                // What has been said counts before silence.
                biased;
                next = take_in(&mut seen, &mut self.health, self.began, &self.fleet) => {
                    silent_at = Instant::now() + limit;
                    next
                }
                () = at(look_at) => Seen::OtherDevices,
                () = sleep_until(silent_at) => {
                    silent_at = Instant::now() + limit;
                    self.fail_all(limit);
                    Seen::Health
                }
            };
            match next {
                Seen::Health => {}
                Seen::End => return,
                Seen::OtherDevices if self.look_again().await => return,
                Seen::OtherDevices => look_at = Some(Instant::now() + LOOK_AGAIN),
            }
        }
    }

    /// The driver does not answer, so nothing is known of any device.
    fn fail_all(&mut self, silence: Duration) {
        let how = format!("the driver has not answered for {} s", silence.as_secs());
        let (now, health) = (self.began.elapsed(), &mut self.health);
        let failed = |uuid: &GpuUuid| Observation { device: Some(uuid.clone()), kind: ObservationKind::Failed(how.clone()) };
        let changes = self.inventory.gpus.iter().filter_map(|gpu| health.observe(now, &failed(&gpu.uuid))).collect::<Vec<_>>();
        tell(&self.fleet, &changes);
    }

    /// Adopts the devices that are there now; false if that is not possible.
    async fn look_again(&mut self) -> bool {
        match self.discovery.run().await {
            Ok(found) => adopt(found, &mut self.inventory, &mut self.health, &self.number, &self.fleet),
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
        let running = self.running.get_or_insert_with(|| spawn_blocking(move || source.discover()));
        let found = timeout(LOOK_LIMIT, &mut *running).await.context("the driver does not answer")?;
        self.running = None;
        Ok(found??)
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

    use super::*;
    use crate::builders;
    use crate::health::{Policy, Reason};
    use crate::inventory::FileSource;
    use proto::memory_unit::MemoryUnit;
    use serde_json::{Value, json};

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

    fn follower(discovery: Discovery) -> (Follower, watch::Receiver<Arc<Fleet>>) {
        let inventory = Inventory {
            gpus: vec![builders::gpu(0), builders::gpu(1)],
            excluded: Vec::new(),
            driver_version: None,
            vendor: "v".to_owned(),
        };
        let number: Number = Box::new(|inventory| Ok(IdScheme::new(&inventory.gpus, 100, MemoryUnit::GIB)?));
        let health = Health::new(Policy::default(), inventory.gpus.iter().map(|gpu| gpu.uuid.clone()));
        let (fleet, seen) = watch::channel(Arc::new(Fleet::new(inventory.clone(), number(&inventory).unwrap())));
        (Follower { discovery, inventory, health, number, fleet, began: Instant::now() }, seen)
    }

    fn no_file() -> Source {
        Source::File(FileSource { path: "/nowhere".into(), node: "n1".to_owned(), interval: Duration::from_secs(1) })
    }

    /// The feed hangs in the driver, then goes on.
    #[tokio::test(start_paused = true)]
    async fn silence_fails_all_devices_until_they_answer_again() {
        let (mut follower, mut fleet) = follower(Discovery { source: no_file(), running: None });
        let (sender, receiver) = mpsc::channel(64);
        let began = Instant::now();
        tokio::spawn(async move { follower.follow(receiver, Duration::from_secs(70)).await });
        sleep(Duration::from_secs(50)).await;
        sender.send(seen(0, ObservationKind::Answered)).await.unwrap();
        let failed = fleet.wait_for(|fleet| !fleet.gpus[0].is_healthy).await.unwrap().clone();
        assert_eq!(began.elapsed().as_secs(), 120, "counted from the last observation");
        let told = failed.gpus.iter().map(|entry| (entry.is_healthy, entry.reason, entry.message.as_str()));
        let message = "the device does not answer: the driver has not answered for 70 s";
        assert_eq!(told.collect::<Vec<_>>(), [(false, Some(Reason::ProbeFailed), message); 2]);
        for _ in 0..7 {
            sleep(Duration::from_secs(10)).await;
            for minor in [0, 1] {
                sender.send(seen(minor, ObservationKind::Answered)).await.unwrap();
            }
        }
        let recovered = timeout(Duration::from_secs(1), fleet.wait_for(|fleet| fleet.gpus.iter().all(|entry| entry.is_healthy)));
        assert!(recovered.await.is_ok());
    }

    /// Of a source whose next word is an hour away no more is heard than its first.
    #[tokio::test(start_paused = true)]
    async fn feed_that_is_late_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("gpus.json");
        write(&path, &json!([{"uuid": "GPU-a", "minor": 0, "memory": "4Gi"}]));
        let source = Source::File(FileSource { path, node: "n1".to_owned(), interval: Duration::from_secs(3600) });
        let inventory = source.discover().unwrap();
        let number: Number = Box::new(|inventory| Ok(IdScheme::new(&inventory.gpus, 100, MemoryUnit::GIB)?));
        let health = Health::new(Policy::default(), inventory.gpus.iter().map(|gpu| gpu.uuid.clone()));
        let (sender, mut fleet) = watch::channel(Arc::new(Fleet::new(inventory.clone(), number(&inventory).unwrap())));
        let began = Instant::now();
        tokio::spawn(watch_devices(source, inventory, health, number, sender));
        fleet.wait_for(|fleet| !fleet.gpus[0].is_healthy).await.unwrap();
        assert!(began.elapsed() >= Duration::from_secs(3660), "{:?}", began.elapsed());
    }

    /// However often it is looked, one thread hangs, and the devices stay those that are known.
    #[tokio::test(start_paused = true)]
    async fn look_that_hangs_is_not_begun_again() {
        let (answer, hanging) = std::sync::mpsc::channel::<Inventory>();
        let running = Some(spawn_blocking(move || Ok(hanging.recv().unwrap())));
        let (mut follower, _fleet) = follower(Discovery { source: no_file(), running });
        // The clock stands still for as long as a blocking task runs.
        for _ in 0..3 {
            let mut look = Box::pin(follower.look_again());
            assert!(futures::poll!(&mut look).is_pending());
            tokio::time::advance(LOOK_LIMIT + Duration::from_secs(1)).await;
            assert!(!look.await);
        }
        answer.send(follower.inventory.clone()).unwrap();
        assert!(follower.look_again().await, "the look of before has ended");
        assert!(!follower.look_again().await, "the next one finds no file");
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
