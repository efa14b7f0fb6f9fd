//! The NVML source against a stand-in for libnvidia-ml that is loaded as the real library is.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a failed step fails the test"
)]

use std::{
    collections::{BTreeMap, VecDeque},
    fs,
    num::NonZeroU32,
    path::PathBuf,
    time::{Duration, Instant},
};

use super::machine::{Card, LOST, Machine, NEVER, card};
use device_plugin::devices::health::{Health, HealthChange, HealthPolicy, HealthReason};
use device_plugin::devices::inventory::source::{DeviceSource, NvmlSource};
use device_plugin::devices::inventory::{
    ExcludedGpu, Feed, Gpu, InventoryError, NodeInventory, Observation, ObservationKind, Observations,
    PciLocation, PhysicalId,
};
use rstest::rstest;
use tokio::sync::mpsc;

/// Longest wait of a test for an expected event.
const DEADLINE: Duration = Duration::from_secs(30);

/// An interval at which a watch looks again and again during a test.
const OFTEN: Duration = Duration::from_millis(5);

fn uuid(handle: u32) -> PhysicalId {
    format!("GPU-{handle}").parse().unwrap()
}

fn seen(handle: u32, kind: ObservationKind) -> Observation {
    Observation {
        device: Some(uuid(handle)),
        kind,
    }
}

const INVENTORY_CHANGED: Observation = Observation {
    device: None,
    kind: ObservationKind::InventoryChanged,
};

fn lost(handle: u32) -> Card {
    Card {
        code: LOST,
        ..card(handle)
    }
}

/// A running watch and the health that follows from it.
struct Watched {
    feed: Feed,
    observations: mpsc::Receiver<Observations>,
    /// Observations of the last report that were not looked at yet.
    waiting: VecDeque<Observation>,
    health: Health,
    started: Instant,
}

impl Watched {
    fn start(source: &DeviceSource) -> Self {
        let inventory = source.discover().unwrap();
        let (feed, observations) = source.watch(&inventory).unwrap();
        let answers = NonZeroU32::new(3).unwrap();
        let policy = HealthPolicy {
            answers,
            quiet: Duration::ZERO,
            ..HealthPolicy::default()
        };
        let health = Health::new(policy, inventory.gpus.into_iter().map(|gpu| gpu.uuid));
        Self {
            feed,
            observations,
            waiting: VecDeque::new(),
            health,
            started: Instant::now(),
        }
    }

    /// The next observation, and the change of health that it makes.
    async fn next(&mut self) -> (Observation, Option<HealthChange>) {
        while self.waiting.is_empty() {
            let report = tokio::time::timeout(DEADLINE, self.observations.recv()).await;
            let report = report.expect("nothing was observed in time");
            self.waiting.extend(report.expect("the feed has ended"));
        }
        let observation = self.waiting.pop_front().unwrap();
        assert!(
            self.started.elapsed() < DEADLINE,
            "not observed in time; now {observation:?}"
        );
        let change = self.health.observe(self.started.elapsed(), &observation);
        (observation, change)
    }

    /// The next `n` observations.
    async fn take(&mut self, n: usize) -> Vec<Observation> {
        let mut observations = Vec::new();
        while observations.len() < n {
            observations.push(self.next().await.0);
        }
        observations
    }

    /// Reads on until `expected` is observed.
    async fn until(&mut self, expected: &Observation) {
        while self.next().await.0 != *expected {}
    }

    /// Reads on until the health of a device changes.
    async fn change(&mut self) -> HealthChange {
        loop {
            if let (_, Some(change)) = self.next().await {
                return change;
            }
        }
    }
}

fn of_gpus(nvml: NvmlSource) -> DeviceSource {
    DeviceSource::Machine(nvml)
}

/// The source that probes and compares all the time.
fn eager(machine: &Machine) -> DeviceSource {
    of_gpus(NvmlSource {
        reopen_interval: OFTEN,
        ..probing(machine)
    })
}

/// NVML that is probed all the time.
fn probing(machine: &Machine) -> NvmlSource {
    NvmlSource {
        probe_interval: OFTEN,
        ..machine.nvml()
    }
}

fn n_calls(machine: &Machine, call: &str) -> usize {
    machine.calls().iter().filter(|line| *line == call).count()
}

/// NVML's order, the minor numbers and the sizes of devices are three different things, and a device
/// is known by its UUID: the old plugin took the first GPU's memory for all of them.
#[test]
fn unequal_gpus_are_listed_by_minor_number() {
    let first = Card {
        minor: 1,
        memory: 24 << 30,
        model: "RTX 6000".to_owned(),
        ..card(0)
    };
    let second = Card {
        minor: 0,
        memory: 15_843_721_216,
        ..card(1)
    };
    let machine = Machine::new(&[first, second]);
    machine.set_numa_node("0000:3b:00.0", 1);
    machine.set_numa_node("0000:3c:00.0", -1);

    let first = Gpu {
        uuid: uuid(1),
        minor: 0,
        index: 1,
        memory_bytes: 15_843_721_216,
        reserved_bytes: 0,
        model: "Tesla T4".to_owned(),
        bus_id: Some("0000:3c:00.0".to_owned()),
        location: PciLocation::default(),
        labels: BTreeMap::new(),
        device_node: PathBuf::from("/dev/nvidia0"),
    };
    let mut second = Gpu {
        uuid: uuid(0),
        minor: 1,
        index: 0,
        memory_bytes: 24 << 30,
        model: "RTX 6000".to_owned(),
        bus_id: Some("0000:3b:00.0".to_owned()),
        device_node: PathBuf::from("/dev/nvidia1"),
        ..first.clone()
    };
    second.location.numa_node = Some(1);
    let expected = NodeInventory {
        gpus: vec![first, second],
        driver_version: Some("550.54.15".to_owned()),
        vendor: "nvidia".to_owned(),
        needs_driver: true,
        ..NodeInventory::default()
    };
    assert_eq!(machine.source().discover().unwrap(), expected);
    assert_eq!(machine.calls(), ["init 0", "shutdown"]);
}

#[rstest]
#[case::mig(Card { mig: true, ..card(0) }, Some(0), "it is in MIG mode, and sharing MIG instances is not supported")]
#[case::lost(
    lost(0),
    None,
    "its handle cannot be read: device fell off the bus or has otherwise become inacessible"
)]
#[case::no_memory(Card { memory: 0, ..card(0) }, Some(0),
    "NVML does not know its memory: say with --gpu-memory how much of it pods may share, such as 96Gi")]
#[case::same_minor(Card { minor: 1, ..card(0) }, Some(0), "GPU 0 has the same UUID or minor number 1")]
#[case::same_uuid(Card { handle: 0, ..card(1) }, Some(1), "GPU 0 has the same UUID or minor number 1")]
#[case::long_uuid(Card { uuid: "G".repeat(41), ..card(0) }, None,
    "\"GGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGG\" is not the ID of a device: it is longer than 40 characters")]
fn one_unusable_gpu_does_not_hide_another(
    #[case] unusable: Card,
    #[case] named: Option<u32>,
    #[case] problem: &str,
) {
    let inventory = Machine::new(&[card(1), unusable]).source().discover().unwrap();
    assert_eq!(
        inventory.gpus.iter().map(|gpu| &gpu.uuid).collect::<Vec<_>>(),
        [&uuid(1)]
    );
    let [excluded] = inventory.excluded.as_slice() else {
        panic!("{:?}", inventory.excluded)
    };
    assert_eq!((excluded.index, &excluded.uuid), (1, &named.map(uuid)));
    let text = excluded.to_string();
    assert_eq!(
        text.split_once(": ").map(|(_, problem)| problem),
        Some(problem),
        "{text}"
    );
}

#[test]
fn the_error_says_that_no_gpu_can_be_shared() {
    let machine = Machine::new(&[Card { mig: true, ..card(0) }, Card { memory: 0, ..card(1) }]);
    let error = machine.source().discover().unwrap_err();
    assert!(error.is_absence());
    let InventoryError::NothingToShare { reasons, .. } = error else {
        panic!("{error}")
    };
    insta::assert_snapshot!(reasons, @"GPU 0 (GPU-0): it is in MIG mode, and sharing MIG instances is not supported; GPU 1 (GPU-1): NVML does not know its memory: say with --gpu-memory how much of it pods may share, such as 96Gi");
}

#[test]
fn a_missing_library_means_that_there_is_no_gpu() {
    let library = PathBuf::from("/nonexistent/libnvidia-ml.so.1");
    let source = of_gpus(NvmlSource {
        library,
        ..NvmlSource::default()
    });
    let error = source.discover().unwrap_err();
    assert!(error.is_absence());
    assert!(
        error
            .to_string()
            .contains("cannot load the NVIDIA management library"),
        "{error:?}"
    );
    insta::assert_snapshot!(error, @"cannot load the NVIDIA management library /nonexistent/libnvidia-ml.so.1: install the NVIDIA driver on this node, run this container with the NVIDIA runtime so that the library is mounted, or name the driver's directory with --driver-root");
}

/// Neither a text file nor another library is NVML.
#[test]
fn a_file_that_is_no_nvml_library_is_refused() {
    let machine = Machine::new(&[card(0)]);
    fs::write(machine.library(), "not a library").unwrap();
    let other = NvmlSource {
        library: PathBuf::from("libc.so.6"),
        ..machine.nvml()
    };
    for source in [machine.source(), of_gpus(other)] {
        let error = source.discover().unwrap_err();
        assert!(
            error
                .to_string()
                .contains("cannot load the NVIDIA management library"),
            "{error:?}"
        );
    }
}

/// A card that is lost does not hide the processes on the others, and memory that the driver does not know is left out.
#[test]
fn memory_of_processes_on_each_gpu() {
    let machine = Machine::new(&[card(0), card(1)]);
    assert_eq!(machine.source().memory_use().unwrap(), []);
    machine.run_processes(&[(0, 7, 4096), (1, 7, 1), (1, 8, u64::MAX), (0, 9, 5)]);
    let found = machine.source().memory_use().unwrap();
    let found: Vec<_> = found
        .iter()
        .map(|one| (one.gpu.as_str(), one.pid, one.bytes))
        .collect();
    assert_eq!(found, [("GPU-0", 7, 4096), ("GPU-0", 9, 5), ("GPU-1", 7, 1)]);
    let calls = machine.calls();
    assert!(calls.iter().all(|call| call != "set memory limits"), "{calls:?}");
}

/// The devices of an older driver are served all the same.
#[test]
fn a_driver_without_the_list_of_processes() {
    let machine = Machine::new(&[card(0)]);
    machine.downgrade();
    assert_eq!(machine.source().discover().unwrap().gpus.len(), 1);
    let error = machine.source().memory_use().unwrap_err();
    assert!(
        error.to_string().contains("list the processes on a GPU"),
        "{error}"
    );
}

#[test]
fn zero_gpus_means_that_there_is_no_gpu() {
    let error = Machine::new(&[]).source().discover().unwrap_err();
    assert!(error.is_absence());
    assert!(error.to_string().contains("lists no GPU"), "{error:?}");
}

#[rstest]
#[case::driver_not_loaded(9, true, "is present but the NVIDIA kernel driver is not loaded")]
#[case::no_permission(4, false, "NVML: cannot open a session")]
fn a_session_that_nvml_refuses_is_an_error(#[case] code: u32, #[case] is_absence: bool, #[case] text: &str) {
    let machine = Machine::new(&[card(0)]);
    machine.answer_init(code);
    let error = machine.source().discover().unwrap_err();
    assert_eq!(error.is_absence(), is_absence);
    assert!(error.to_string().contains(text), "{error}");
}

/// The old plugin registered once per virtual device and answered one XID with thousands of messages.
#[tokio::test]
async fn an_xid_makes_only_its_device_unhealthy() {
    let machine = Machine::new(&[card(0), card(1)]);
    let mut watched = Watched::start(&machine.source());
    watched.take(2).await;
    machine.xid(1, 79);
    assert_eq!(watched.next().await.0, seen(1, ObservationKind::Xid(79)));
    assert!(watched.health.is_healthy(&uuid(0)));
    assert_eq!(watched.health.trouble(&uuid(1)), Some(HealthReason::Xid(79)));
    for handle in 0..2 {
        assert_eq!(n_calls(&machine, &format!("register GPU-{handle} 8")), 1);
    }
}

/// Others take every GPU of the node away then. Here the devices are asked, long before their next
/// probe would be due, and only the one that does not answer is sick.
#[rstest]
#[case::no_device(-1)]
#[case::unknown_device(100)]
#[tokio::test]
async fn an_event_of_an_unknown_device_makes_all_devices_probed(#[case] handle: i32) {
    let cards = [card(0), card(1), card(2)];
    let machine = Machine::new(&cards);
    let mut watched = Watched::start(&machine.source());
    watched.take(3).await;
    let [first, second, third] = cards;
    machine.insert(&[first, Card { code: LOST, ..second }, third]);
    machine.xid(handle, 79);
    let expected = [
        Observation {
            device: None,
            kind: ObservationKind::Xid(79),
        },
        seen(0, ObservationKind::Answered),
        seen(1, ObservationKind::Lost),
        seen(2, ObservationKind::Answered),
    ];
    assert_eq!(watched.take(4).await, expected);
    let healthy = [0, 1, 2].map(|handle| watched.health.is_healthy(&uuid(handle)));
    assert_eq!(healthy, [true, false, true]);
}

/// NVML keeps a device lost for as long as the session lasts, so this needs a new one.
#[tokio::test]
async fn a_lost_device_recovers() {
    let machine = Machine::new(&[card(0), card(1)]);
    let mut watched = Watched::start(&eager(&machine));
    machine.insert(&[card(0), lost(1)]);
    let lost = watched.change().await;
    assert_eq!(
        (lost.device, lost.is_healthy, lost.reason),
        (uuid(1), false, HealthReason::Lost)
    );
    machine.insert(&[card(0), card(1)]);
    let back = watched.change().await;
    assert_eq!(
        (back.device, back.is_healthy, back.reason),
        (uuid(1), true, HealthReason::Recovered)
    );
    // The new session's events arrive.
    machine.xid(1, 48);
    assert_eq!(watched.change().await.reason, HealthReason::Xid(48));
    watched.feed.stop().unwrap();
    assert_eq!(n_calls(&machine, "init 0"), n_calls(&machine, "shutdown"));
    assert_eq!(n_calls(&machine, "set create"), n_calls(&machine, "set free"));
}

/// A card that was pulled is not listed by the next session.
#[tokio::test]
async fn a_device_that_disappears_is_lost() {
    let machine = Machine::new(&[card(0), card(1)]);
    let mut watched = Watched::start(&eager(&machine));
    machine.insert(&[card(1)]);
    let gone = watched.change().await;
    assert_eq!((gone.device, gone.reason), (uuid(0), HealthReason::Lost));
    watched.take(20).await;
    assert!(watched.health.is_healthy(&uuid(1)));
    assert!(!watched.health.is_healthy(&uuid(0)));
}

#[rstest]
#[case::another_error(999, HealthReason::ProbeFailed, "an internal driver error")]
#[case::reset_required(16, HealthReason::NeedsReset, "the device must be reset")]
#[tokio::test]
async fn a_device_that_fails_a_probe_is_unhealthy_until_it_answers(
    #[case] code: u32,
    #[case] reason: HealthReason,
    #[case] text: &str,
) {
    let machine = Machine::new(&[card(0), card(1)]);
    let mut watched = Watched::start(&eager(&machine));
    machine.insert(&[Card { code, ..card(0) }, card(1)]);
    let sick = watched.change().await;
    assert_eq!((sick.device, sick.reason), (uuid(0), reason));
    assert!(sick.message.contains(text), "{}", sick.message);
    machine.insert(&[card(0), card(1)]);
    assert_eq!(watched.change().await.reason, HealthReason::Recovered);
}

/// The driver is unloaded for an upgrade: every device is sick, and well when it is back.
#[tokio::test]
async fn without_the_driver_all_devices_are_lost() {
    let machine = Machine::new(&[card(0), card(1)]);
    let mut watched = Watched::start(&eager(&machine));
    machine.answer_init(9);
    machine.insert(&[card(0), lost(1)]);
    while watched.health.trouble(&uuid(0)) != Some(HealthReason::ProbeFailed) {
        watched.change().await;
    }
    machine.insert(&[card(0), card(1)]);
    machine.answer_init(0);
    while !(watched.health.is_healthy(&uuid(0)) && watched.health.is_healthy(&uuid(1))) {
        watched.change().await;
    }
}

/// `NOT_SUPPORTED` for events is no illness: the device is probed, and others report their XIDs.
#[rstest]
#[case::not_offered(0, 1)]
#[case::refused_when_registering(2, 2)]
#[tokio::test]
async fn a_device_without_events_is_probed(#[case] events: u32, #[case] n_sets: usize) {
    let without = Card { events, ..card(0) };
    let machine = Machine::new(&[without.clone(), card(1)]);
    let mut watched = Watched::start(&of_gpus(probing(&machine)));
    machine.xid(1, 79);
    watched.until(&seen(1, ObservationKind::Xid(79))).await;
    assert!(watched.health.is_healthy(&uuid(0)));
    assert_eq!(n_calls(&machine, "set create"), n_sets);
    machine.insert(&[
        Card {
            code: LOST,
            ..without
        },
        card(1),
    ]);
    watched.until(&seen(0, ObservationKind::Lost)).await;
}

#[tokio::test]
async fn without_any_events_all_devices_are_probed() {
    let machine = Machine::new(&[Card { events: 2, ..card(0) }]);
    let mut watched = Watched::start(&of_gpus(probing(&machine)));
    let answered = seen(0, ObservationKind::Answered);
    assert_eq!(watched.take(5).await, vec![answered; 5]);
    watched.feed.stop().unwrap();
}

/// A GPU that was unreadable at the start, or was switched to MIG, is news for the plugin.
#[rstest]
#[case::becomes_readable(Card { memory: 0, ..card(1) }, card(1))]
#[case::switched_to_mig(card(1), Card { mig: true, ..card(1) })]
#[case::other_memory(card(1), Card { memory: 1 << 30, ..card(1) })]
#[tokio::test]
async fn new_devices_are_announced_once(#[case] before: Card, #[case] after: Card) {
    let machine = Machine::new(&[card(0), before]);
    let mut watched = Watched::start(&eager(&machine));
    watched.take(10).await;
    machine.insert(&[card(0), after]);
    watched.until(&INVENTORY_CHANGED).await;
    assert!(!watched.take(20).await.contains(&INVENTORY_CHANGED));
}

/// A GPU that was lost when the daemon started is found by a later session.
#[tokio::test]
async fn a_gpu_that_was_missing_at_the_start_is_announced() {
    let machine = Machine::new(&[card(0), lost(1)]);
    let source = eager(&machine);
    let excluded = source.discover().unwrap().excluded;
    assert!(matches!(
        excluded.as_slice(),
        [ExcludedGpu {
            uuid: None,
            is_mig: false,
            ..
        }]
    ));
    let mut watched = Watched::start(&source);
    watched.take(10).await;
    machine.insert(&[card(0), card(1)]);
    watched.until(&INVENTORY_CHANGED).await;
}

/// The old plugin left its watcher behind, blocked on a channel, at every restart.
#[rstest]
#[case::waiting_for_events(NEVER, 1)]
#[case::without_events(NEVER, 0)]
#[case::blocked_on_a_full_channel(Duration::ZERO, 1)]
#[tokio::test]
async fn a_stopped_watch_ends(#[case] probe_interval: Duration, #[case] events: u32) {
    let machine = Machine::new(&[Card { events, ..card(0) }]);
    let nvml = NvmlSource {
        probe_interval,
        ..machine.nvml()
    };
    let mut watched = Watched::start(&of_gpus(nvml));
    watched.take(1).await;
    let stopped = tokio::task::spawn_blocking(|| watched.feed.stop());
    tokio::time::timeout(DEADLINE, stopped)
        .await
        .unwrap()
        .unwrap()
        .unwrap();
    assert_eq!(machine.calls().last().map(String::as_str), Some("shutdown"));
    while watched.observations.try_recv().is_ok() {}
    assert_eq!(
        watched.observations.try_recv(),
        Err(mpsc::error::TryRecvError::Disconnected)
    );
}

#[tokio::test]
async fn a_dropped_watch_ends() {
    let machine = Machine::new(&[card(0)]);
    let Watched {
        feed,
        mut observations,
        ..
    } = Watched::start(&machine.source());
    drop(feed);
    let drained = async { while observations.recv().await.is_some() {} };
    tokio::time::timeout(DEADLINE, drained).await.unwrap();
}

/// Links to each other, to switches in sysfs or not, to a processor, and unconnected ones.
#[rstest]
#[case::none(&[], "[]")]
#[case::pairs(&[(0, "00000000:3C:00.0", true), (0, "00000000:3C:00.0", true), (1, "00000000:3B:00.0", true), (1, "00000000:3B:00.0", true)],
    r#"[{"minors":[0,1],"links":2}]"#)]
#[case::one_is_down(&[(0, "00000000:3C:00.0", false), (0, "00000000:3C:00.0", true), (1, "00000000:3B:00.0", true)],
    r#"[{"minors":[0,1],"links":1}]"#)]
#[case::switches(&[(0, "00000000:C4:00.0", true), (1, "00000000:C4:00.0", true)], r#"[{"minors":[0,1],"links":1}]"#)]
#[case::switches_that_sysfs_does_not_know(&[(0, "00000000:00:00.0", true), (1, "00000000:00:00.0", true)], r#"[{"minors":[0,1],"links":1}]"#)]
#[case::a_processor(&[(0, "00000004:04:00.0", true), (1, "00000004:04:00.0", true)], "[]")]
fn links_between_gpus(#[case] links: &[(u32, &str, bool)], #[case] expected: &str) {
    let machine = Machine::new(&[card(0), card(1)]);
    machine.set_links(links);
    machine.set_kind("0000:c4:00.0", "0x068000", "0x10de");
    machine.set_kind("0004:04:00.0", "0x068000", "0x1014");
    let found = machine.source().discover().unwrap().links;
    assert_eq!(serde_json::to_string(&found).unwrap(), expected);
}

/// A machine that has other devices goes on without its GPUs, and its driver is found when it comes.
#[tokio::test]
async fn a_driver_that_is_installed_later_is_announced() {
    let machine = Machine::new(&[card(0)]);
    machine.answer_init(9);
    machine.set_kind("0000:01:00.0", "0x120000", "0x10ee");
    let source = eager(&machine);
    let found = source.discover().unwrap();
    assert_eq!((found.gpus.len(), found.others.len()), (0, 1));
    let mut watched = Watched::start(&source);
    watched.take(10).await;
    machine.answer_init(0);
    watched.until(&INVENTORY_CHANGED).await;
    let found = source.discover().unwrap();
    assert_eq!((found.gpus.len(), found.others.len()), (1, 1));
}

/// A minor number and a size that NVML does not know, as on GB10, Thor and WSL2.
const UNSUPPORTED: (u32, u64) = (u32::MAX, u64::MAX);

fn procfs(machine: &Machine, minor: &str) {
    let folder = machine.path("proc/driver/nvidia/gpus/0000:3b:00.0");
    fs::create_dir_all(&folder).unwrap();
    fs::write(
        folder.join("information"),
        format!("Model: \t\t NVIDIA GB10\nIRQ:   \t\t 231\nDevice Minor: \t {minor}\n"),
    )
    .unwrap();
}

#[test]
fn minor_and_memory_that_nvml_does_not_report_are_found_elsewhere() {
    let machine = Machine::new(&[Card {
        minor: UNSUPPORTED.0,
        memory: UNSUPPORTED.1,
        ..card(0)
    }]);
    procfs(&machine, "3");
    let source = of_gpus(NvmlSource {
        unknown_memory: Some(96 << 30),
        ..machine.nvml()
    });
    let gpu = source.discover().unwrap().gpus.remove(0);
    assert_eq!(
        (gpu.minor, gpu.memory_bytes, gpu.device_node),
        (3, 96 << 30, PathBuf::from("/dev/nvidia3"))
    );
}

#[rstest]
#[case::no_memory(Card { memory: UNSUPPORTED.1, ..card(0) }, None, "say with --gpu-memory how much of it pods may share")]
#[case::no_minor(Card { minor: UNSUPPORTED.0, ..card(0) }, None, "NVML does not support it, and ")]
#[case::nonsense(Card { minor: UNSUPPORTED.0, ..card(0) }, Some("x"), "information does not name it")]
fn a_gpu_without_minor_or_memory_is_left_out(
    #[case] card: Card,
    #[case] minor: Option<&str>,
    #[case] expected: &str,
) {
    let machine = Machine::new(&[card]);
    if let Some(minor) = minor {
        procfs(&machine, minor);
    }
    let error = machine.source().discover().unwrap_err();
    assert!(
        matches!(error, InventoryError::NothingToShare { .. }) && error.to_string().contains(expected),
        "{error}"
    );
}

/// The flag is for GPUs whose memory is not known; another's is what NVML says.
#[test]
fn known_memory_is_not_replaced() {
    let machine = Machine::new(&[card(0)]);
    let source = of_gpus(NvmlSource {
        unknown_memory: Some(1 << 30),
        ..machine.nvml()
    });
    assert_eq!(source.discover().unwrap().gpus[0].memory_bytes, 16 << 30);
}

/// The memory that the driver reserves changes now and then, and the device stays the same.
#[tokio::test]
async fn reserved_memory_is_withheld_unless_pods_are_to_share_it() {
    let machine = Machine::new(&[card(0)]);
    machine.set("reserved", Some("471859200"));
    let sharing = NvmlSource {
        withholds_reserved: false,
        ..machine.nvml()
    };
    assert_eq!(
        of_gpus(sharing).discover().unwrap().gpus[0].memory_bytes,
        16 << 30
    );
    let withholding = eager(&machine);
    let gpu = withholding.discover().unwrap().gpus.remove(0);
    assert_eq!(
        (gpu.memory_bytes, gpu.reserved_bytes),
        ((16 << 30) - (450 << 20), 450 << 20)
    );
    let mut watched = Watched::start(&withholding);
    machine.set("reserved", Some("481859200"));
    assert!(!watched.take(20).await.contains(&INVENTORY_CHANGED));
}

/// `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`, `NVML_FI_DEV_REMAPPED_PENDING` and `NVML_FI_DEV_REMAPPED_FAILURE`.
const ACTION: u32 = 230;
const PENDING: u32 = 144;
const FAILURE: u32 = 145;

/// A driver that names a recovery action is believed, also when it takes it back.
#[rstest]
#[case::reset(1, "its driver asks for a reset of the GPU")]
#[case::reboot(2, "its driver asks for a reboot of the node")]
#[case::drain(4, "its driver asks to drain the GPU and to reset it")]
#[tokio::test]
async fn a_recovery_action_keeps_a_gpu_unhealthy(#[case] action: u32, #[case] text: &str) {
    let machine = Machine::new(&[card(0), card(1)]);
    machine.set("fields", Some(&format!("0 {ACTION} 0\n1 {ACTION} {action}\n")));
    let mut watched = Watched::start(&eager(&machine));
    let sick = watched.change().await;
    assert_eq!((sick.device, sick.reason), (uuid(1), HealthReason::NeedsReset));
    assert!(sick.message.contains(text), "{}", sick.message);
    watched.take(20).await;
    assert!(!watched.health.is_healthy(&uuid(1)) && watched.health.is_healthy(&uuid(0)));
    machine.set("fields", Some(&format!("0 {ACTION} 0\n1 {ACTION} 0\n")));
    assert_eq!(watched.change().await.reason, HealthReason::Recovered);
}

/// With an older driver an XID that asks for a reset lasts until its rows are remapped, or the GPU was lost and is back.
#[rstest]
#[case::rows_are_remapped(true)]
#[case::lost_and_found(false)]
#[tokio::test]
async fn a_reset_is_detected_without_recovery_actions(#[case] by_rows: bool) {
    let machine = Machine::new(&[card(0)]);
    if by_rows {
        machine.set("fields", Some(&format!("0 {PENDING} 1\n")));
    }
    let mut watched = Watched::start(&eager(&machine));
    watched.take(1).await;
    machine.xid(0, 48);
    assert_eq!(watched.change().await.reason, HealthReason::Xid(48));
    watched.take(20).await;
    assert!(!watched.health.is_healthy(&uuid(0)));
    if by_rows {
        machine.set("fields", None);
    } else {
        machine.insert(&[lost(0)]);
        assert_eq!(watched.change().await.reason, HealthReason::Lost);
        machine.insert(&[card(0)]);
    }
    assert_eq!(watched.change().await.reason, HealthReason::Recovered);
}

#[tokio::test]
async fn failed_row_remapping_needs_a_reset_and_pending_remapping_does_not() {
    let machine = Machine::new(&[card(0), card(1)]);
    machine.set("fields", Some(&format!("0 {PENDING} 1\n1 {FAILURE} 1\n")));
    let mut watched = Watched::start(&eager(&machine));
    let sick = watched.change().await;
    assert_eq!((sick.device, sick.reason), (uuid(1), HealthReason::NeedsReset));
    watched.take(20).await;
    assert!(watched.health.is_healthy(&uuid(0)));
}

/// A GPU that is switched to MIG while it is watched is not shared any more, also if it is the only one.
#[tokio::test]
async fn mig_mode_makes_the_only_gpu_unhealthy() {
    let machine = Machine::new(&[card(0)]);
    let mut watched = Watched::start(&eager(&machine));
    watched.take(1).await;
    machine.insert(&[Card { mig: true, ..card(0) }]);
    let change = watched.change().await;
    assert!(
        !change.is_healthy && change.message.contains("MIG mode"),
        "{}",
        change.message
    );
}

/// Waiting for events fails at once, as it does while a GPU of the set is lost: devices are probed, at a bounded pace.
#[tokio::test]
async fn a_failing_wait_for_events_is_replaced_by_probes() {
    let machine = Machine::new(&[card(0), card(1)]);
    machine.set("wait", Some("15"));
    let nvml = NvmlSource {
        probe_interval: NEVER,
        reopen_interval: NEVER,
        ..machine.nvml()
    };
    let mut watched = Watched::start(&of_gpus(nvml));
    watched.take(2).await;
    machine.insert(&[lost(0), card(1)]);
    watched.until(&seen(0, ObservationKind::Lost)).await;
    assert!(
        n_calls(&machine, "wait 15") < 10,
        "it must not become a busy loop"
    );
}

/// A call that hangs says nothing of its device, and keeps neither the reader nor the end waiting.
#[tokio::test]
async fn a_call_that_hangs_gives_no_observations() {
    let machine = Machine::new(&[card(0)]);
    let mut watched = Watched::start(&eager(&machine));
    watched.take(3).await;
    machine.set("hang", Some(""));
    // Observations from before may still be read.
    let quiet = async {
        while tokio::time::timeout(Duration::from_millis(300), watched.observations.recv())
            .await
            .is_ok()
        {}
    };
    tokio::time::timeout(DEADLINE, quiet).await.unwrap();
    machine.set("hang", None);
    watched.until(&seen(0, ObservationKind::Answered)).await;
}

/// The driver was replaced below the container's library: only a newly created container gets the right one.
#[rstest]
#[case::mismatch(18, None, "of another version than the library")]
#[case::installed_later(0, Some("module/nvidia"), "installed after this container was created")]
fn another_driver_version_ends_the_process(
    #[case] init: u32,
    #[case] module: Option<&str>,
    #[case] expected: &str,
) {
    let machine = Machine::new(&[card(0)]);
    machine.answer_init(init);
    if let Some(module) = module {
        fs::create_dir_all(machine.path("sys").join(module)).unwrap();
        fs::remove_file(machine.library()).unwrap();
    }
    let error = machine.source().discover().unwrap_err();
    assert!(
        matches!(&error, InventoryError::DriverReplaced { .. }),
        "{error:?}"
    );
    assert!(
        !error.is_absence() && error.to_string().contains(expected),
        "{error}"
    );
}

#[tokio::test]
async fn a_driver_that_is_replaced_under_a_watch_is_reported() {
    let machine = Machine::new(&[card(0)]);
    let mut watched = Watched::start(&eager(&machine));
    watched.take(1).await;
    machine.answer_init(18);
    machine.insert(&[lost(0)]);
    loop {
        if let ObservationKind::DriverReplaced(how) = watched.next().await.0.kind {
            assert!(how.contains("another version"), "{how}");
            return;
        }
    }
}

/// A mounted driver root shows the driver that is there now; its links lead to files below it.
#[tokio::test]
async fn a_driver_root_is_followed_when_the_driver_appears_or_changes() {
    let machine = Machine::new(&[card(0)]);
    let (empty, root) = (machine.path("empty-root"), machine.path("root"));
    let (of_links, folder) = (
        root.join("usr/lib/x86_64-linux-gnu"),
        root.join("usr/local/nvidia/lib64"),
    );
    for folder in [&of_links, &folder] {
        fs::create_dir_all(folder).unwrap();
    }
    let target = "/usr/local/nvidia/lib64/libnvidia-ml.so.1";
    std::os::unix::fs::symlink(target, of_links.join("libnvidia-ml.so.1")).unwrap();
    let nvml = NvmlSource {
        driver_roots: vec![empty, root.clone()],
        probe_interval: OFTEN,
        reopen_interval: OFTEN,
        ..machine.nvml()
    };
    let source = of_gpus(nvml);
    let error = source.discover().unwrap_err();
    assert!(
        error.is_absence() && error.to_string().contains("name with --driver-root"),
        "{error}"
    );
    for name in ["devices", "events-queue"] {
        std::os::unix::fs::symlink(machine.path(name), folder.join(name)).unwrap();
    }
    fs::copy(machine.library(), folder.join("libnvidia-ml.so.1")).unwrap();
    assert_eq!(source.discover().unwrap().gpus.len(), 1);
    fs::write(folder.join("init"), "18").unwrap();
    let error = source.discover().unwrap_err();
    assert!(
        error.to_string().contains("is of another version than") && error.is_absence(),
        "{error:?}"
    );
}
