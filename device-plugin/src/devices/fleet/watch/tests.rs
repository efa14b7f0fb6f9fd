//! Feeds that report, end, change their devices or hang.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use super::*;
use crate::devices::fleet::sharing::SharedDevices;
use crate::devices::fleet::watch::EarlierXid;
use crate::devices::health::{HealthPolicy, HealthReason};
use crate::devices::inventory::source::FileSource;
use crate::tests::builders;
use std::num::NonZeroU32;

use proto::memory_unit::MemoryUnit;
use serde_json::{Value, json};

fn seen(minor: u32, kind: ObservationKind) -> Observations {
    vec![Observation {
        device: Some(builders::gpu(minor).uuid),
        kind,
    }]
}

/// Without a reader of faults, and without corrections.
fn sharing(memory_unit: MemoryUnit) -> Sharing {
    Sharing {
        devices: SharedDevices::All,
        slots: NonZeroU32::new(100).unwrap(),
        memory_unit,
        has_numa_hints: false,
        allocated: BTreeSet::new(),
    }
}

fn channels(fleet: watch::Sender<Arc<NodeFleet>>) -> FleetChannels {
    FleetChannels {
        fleet,
        faults: mpsc::channel(1).0,
        corrections: mpsc::channel(1).1,
    }
}

/// Observations that wait together make one new value.
#[tokio::test]
async fn simultaneous_changes_are_published_once() {
    let (mut fleet_watch, mut changed) = fleet_watch();
    let mut silence = Silence::new(Duration::from_secs(70), std::iter::empty());
    let (sender, mut receiver) = mpsc::channel(8);
    sender.try_send(seen(1, ObservationKind::Lost)).unwrap();
    let first = seen(0, ObservationKind::Lost);
    assert_eq!(
        fleet_watch.observe_all(first, &mut receiver, &mut silence),
        Ok(false)
    );
    assert!(receiver.is_empty());
    let now = changed.borrow_and_update();
    assert!(
        now.gpus
            .iter()
            .all(|entry| !entry.is_healthy && entry.reason == Some(HealthReason::Lost))
    );
}

#[tokio::test]
async fn observations_without_a_change_wake_no_reader() {
    let (mut fleet_watch, changed) = fleet_watch();
    let mut silence = Silence::new(Duration::from_secs(70), std::iter::empty());
    let (sender, mut receiver) = mpsc::channel(8);
    let first = seen(0, ObservationKind::Answered);
    assert_eq!(
        fleet_watch.observe_all(first, &mut receiver, &mut silence),
        Ok(false)
    );
    assert!(!changed.has_changed().unwrap());
    drop(sender);
    assert_eq!(
        fleet_watch.read_feed(receiver, Duration::from_secs(70)).await,
        Ok(())
    );
}

fn write(path: &Path, gpus: &Value) {
    fs::write(path, json!({"gpus": gpus}).to_string()).unwrap();
}

fn file(path: &Path, interval: Duration) -> DeviceSource {
    DeviceSource::File(FileSource {
        path: path.to_owned(),
        node: "n1".to_owned(),
        interval,
    })
}

/// A watch of these devices, which does not run yet, and their fleet.
fn watch_of(
    source: DeviceSource,
    inventory: NodeInventory,
    unit: MemoryUnit,
) -> (FleetWatch, watch::Receiver<Arc<NodeFleet>>) {
    let sharing = sharing(unit);
    let health = Health::new(
        HealthPolicy::default(),
        inventory.gpus.iter().map(|gpu| gpu.uuid.clone()),
    );
    let first = NodeFleet::new(inventory.clone(), sharing.id_scheme(&inventory).unwrap());
    let (sender, fleet) = watch::channel(Arc::new(first));
    (
        FleetWatch::new(source, inventory, health, sharing, channels(sender)),
        fleet,
    )
}

/// The fleet of a file that is watched.
fn watched(path: &Path, interval: Duration, unit: MemoryUnit) -> watch::Receiver<Arc<NodeFleet>> {
    let source = file(path, interval);
    let inventory = source.discover().unwrap();
    let (watch, fleet) = watch_of(source, inventory, unit);
    tokio::spawn(watch.run());
    fleet
}

fn health_of(fleet: &NodeFleet) -> Vec<bool> {
    fleet.gpus.iter().map(|entry| entry.is_healthy).collect()
}

/// A second GPU appears; the first stays unhealthy.
#[tokio::test]
async fn other_devices_are_adopted_and_health_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("gpus.json");
    let sick = json!({"uuid": "GPU-a", "minor": 0, "memory": "4Gi", "health": "Xid 79"});
    write(&path, &json!([sick]));
    let mut fleet = watched(&path, Duration::from_millis(20), MemoryUnit::MIB);
    let mut wait = async |is_so: fn(&Arc<NodeFleet>) -> bool| {
        timeout(Duration::from_secs(20), fleet.wait_for(is_so))
            .await
            .expect("no change")
            .unwrap()
            .clone()
    };
    wait(|fleet| !fleet.gpus[0].is_healthy).await;
    write(
        &path,
        &json!([sick, {"uuid": "GPU-b", "minor": 1, "memory": "4Gi"}]),
    );
    let now = wait(|fleet| fleet.gpus.len() == 2).await;
    assert_eq!(health_of(&now), [false, true]);
}

/// A second GPU cannot be adopted; the watch still reports the trouble of the first.
#[tokio::test]
async fn health_is_updated_while_new_devices_cannot_be_adopted() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("gpus.json");
    write(&path, &json!([{"uuid": "GPU-a", "minor": 0, "memory": "4Gi"}]));
    let mut fleet = watched(&path, Duration::from_millis(20), MemoryUnit::MIB);
    let huge = json!({"uuid": "GPU-b", "minor": 1, "memory": "4Ti"});
    write(
        &path,
        &json!([{"uuid": "GPU-a", "minor": 0, "memory": "4Gi", "health": "Xid 79"}, huge]),
    );
    let sick = timeout(
        Duration::from_secs(20),
        fleet.wait_for(|fleet| !fleet.gpus[0].is_healthy),
    )
    .await;
    assert_eq!(sick.expect("blind").unwrap().gpus.len(), 1);
}

fn fleet_watch() -> (FleetWatch, watch::Receiver<Arc<NodeFleet>>) {
    let inventory = NodeInventory {
        gpus: vec![builders::gpu(0), builders::gpu(1)],
        vendor: "v".to_owned(),
        ..NodeInventory::default()
    };
    watch_of(
        file(Path::new("/nowhere"), Duration::from_secs(1)),
        inventory,
        MemoryUnit::GIB,
    )
}

/// The feed hangs in the driver, then goes on.
#[tokio::test(start_paused = true)]
async fn without_observations_all_devices_are_unhealthy_until_they_answer() {
    let (mut fleet_watch, mut fleet) = fleet_watch();
    let (sender, receiver) = mpsc::channel(64);
    let began = Instant::now();
    tokio::spawn(async move { fleet_watch.read_feed(receiver, Duration::from_secs(70)).await });
    sleep(Duration::from_secs(50)).await;
    sender.send(seen(0, ObservationKind::Answered)).await.unwrap();
    let failed = fleet
        .wait_for(|fleet| !fleet.gpus[0].is_healthy)
        .await
        .unwrap()
        .clone();
    assert_eq!(
        began.elapsed().as_secs(),
        120,
        "counted from the last observation"
    );
    let states = failed
        .gpus
        .iter()
        .map(|entry| (entry.is_healthy, entry.reason, entry.message.as_str()));
    let message = "the device does not answer: the driver has not answered for 70 s; if that lasts, see the node's kernel log; it \
        is healthy again after 3 probes and 60 s without trouble";
    assert_eq!(
        states.collect::<Vec<_>>(),
        [(false, Some(HealthReason::ProbeFailed), message); 2]
    );
    for _ in 0..7 {
        sleep(Duration::from_secs(10)).await;
        for minor in [0, 1] {
            sender.send(seen(minor, ObservationKind::Answered)).await.unwrap();
        }
    }
    let recovered = timeout(
        Duration::from_secs(1),
        fleet.wait_for(|fleet| fleet.gpus.iter().all(|entry| entry.is_healthy)),
    );
    assert!(recovered.await.is_ok());
}

/// One source speaks all the time, and the other one hangs.
#[tokio::test(start_paused = true)]
async fn a_device_without_observations_is_unhealthy_although_others_answer() {
    let (mut fleet_watch, mut fleet) = fleet_watch();
    let (sender, receiver) = mpsc::channel(64);
    let began = Instant::now();
    tokio::spawn(async move { fleet_watch.read_feed(receiver, Duration::from_secs(70)).await });
    tokio::spawn(async move {
        loop {
            sleep(Duration::from_secs(10)).await;
            sender.send(seen(0, ObservationKind::Answered)).await.unwrap();
        }
    });
    let failed = fleet
        .wait_for(|fleet| fleet.gpus.iter().any(|entry| !entry.is_healthy))
        .await
        .unwrap()
        .clone();
    assert_eq!(began.elapsed().as_secs(), 70);
    assert_eq!(health_of(&failed), [true, false]);
}

/// A source with a very long interval reports once, and its devices fail when the next report is late.
#[tokio::test(start_paused = true)]
async fn observations_that_arrive_late_are_reported() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("gpus.json");
    write(&path, &json!([{"uuid": "GPU-a", "minor": 0, "memory": "4Gi"}]));
    let began = Instant::now();
    let mut fleet = watched(&path, Duration::from_secs(3600), MemoryUnit::GIB);
    fleet.wait_for(|fleet| !fleet.gpus[0].is_healthy).await.unwrap();
    assert!(
        began.elapsed() >= Duration::from_secs(3660),
        "{:?}",
        began.elapsed()
    );
}

/// One thread hangs however often the watch lists the devices again, and the known devices stay.
#[tokio::test(start_paused = true)]
async fn a_probe_that_hangs_is_not_started_again() {
    let (answer, hanging) = std::sync::mpsc::channel::<NodeInventory>();
    let (mut fleet_watch, _fleet) = fleet_watch();
    fleet_watch.listing = Some(spawn_blocking(move || Ok(hanging.recv().unwrap())));
    // The clock stands still for as long as a blocking task runs.
    for _ in 0..3 {
        let mut look = Box::pin(fleet_watch.discover_again());
        assert!(futures::poll!(&mut look).is_pending());
        tokio::time::advance(DISCOVERY_LIMIT + Duration::from_secs(1)).await;
        assert!(!look.await);
    }
    answer.send(fleet_watch.inventory.clone()).unwrap();
    assert!(fleet_watch.discover_again().await, "the look of before has ended");
    assert!(!fleet_watch.discover_again().await, "the next one finds no file");
}

#[tokio::test]
async fn devices_with_a_list_that_kubelet_would_refuse_are_not_adopted() {
    let (mut fleet_watch, fleet) = fleet_watch();
    fleet_watch.sharing = sharing(MemoryUnit::MIB);
    let huge = crate::devices::inventory::Gpu {
        memory_bytes: 1 << 40,
        ..builders::gpu(1)
    };
    let known = fleet_watch.inventory.clone();
    let found = NodeInventory {
        gpus: vec![huge],
        vendor: "nvidia".to_owned(),
        ..NodeInventory::default()
    };
    assert!(!fleet_watch.replace_inventory(found));
    assert_eq!(
        (fleet_watch.inventory, fleet.has_changed().unwrap()),
        (known, false)
    );
}

/// A driver that this container was not created with ends the watch, whatever else it has observed.
#[tokio::test(start_paused = true)]
async fn a_change_of_the_driver_version_ends_the_watch() {
    let (mut fleet_watch, _fleet) = fleet_watch();
    let (sender, receiver) = mpsc::channel(8);
    sender.try_send(seen(0, ObservationKind::Lost)).unwrap();
    let replaced = ObservationKind::DriverReplaced("the driver is another one".to_owned());
    sender
        .try_send(vec![Observation {
            device: None,
            kind: replaced,
        }])
        .unwrap();
    let ended = fleet_watch
        .read_feed(receiver, Duration::from_secs(70))
        .await
        .unwrap_err();
    assert_eq!(
        ended,
        "the driver is another one; ending, so that this container is created again"
    );
}

#[tokio::test(start_paused = true)]
async fn a_cleared_device_is_healthy() {
    let (mut fleet_watch, mut fleet) = fleet_watch();
    let (correct, corrections) = mpsc::channel(1);
    fleet_watch.channels.corrections = corrections;
    let (sender, receiver) = mpsc::channel(8);
    tokio::spawn(async move { fleet_watch.read_feed(receiver, Duration::from_secs(70)).await });
    sender.send(seen(0, ObservationKind::Xid(48))).await.unwrap();
    fleet.wait_for(|fleet| !fleet.gpus[0].is_healthy).await.unwrap();
    correct
        .send(Correction::Cleared(builders::gpu(0).uuid))
        .await
        .unwrap();
    let well = fleet.wait_for(|fleet| fleet.gpus[0].is_healthy).await.unwrap();
    assert_eq!(well.gpus[0].reason, Some(HealthReason::Cleared));
}

/// Until the errors of an earlier process are loaded, the plugin neither writes the Device object nor starts a container.
#[tokio::test(start_paused = true)]
async fn errors_of_an_earlier_process_are_part_of_the_fleet() {
    let (mut fleet_watch, mut fleet) = fleet_watch();
    fleet_watch
        .channels
        .fleet
        .send_modify(|fleet| Arc::make_mut(fleet).is_health_loaded = false);
    let (correct, corrections) = mpsc::channel(1);
    fleet_watch.channels.corrections = corrections;
    let (_sender, receiver) = mpsc::channel(8);
    tokio::spawn(async move { fleet_watch.read_feed(receiver, Duration::from_secs(70)).await });
    let error = EarlierXid {
        device: builders::gpu(0).uuid,
        xid: 48,
        since: "then".to_owned(),
    };
    correct.send(Correction::Loaded(vec![error])).await.unwrap();
    let sick = fleet.wait_for(|fleet| fleet.is_health_loaded).await.unwrap();
    assert_eq!(
        (sick.gpus[0].is_healthy, sick.gpus[0].reason),
        (false, Some(HealthReason::Xid(48)))
    );
}
