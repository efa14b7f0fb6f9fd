//! Parsing the file, and watching it.

use daemon::api_server::one_line;
use std::{collections::BTreeMap, fmt::Write as _, path::Path};

use proptest::prelude::*;
use rstest::rstest;
use tempfile::TempDir;

use proto::topology::GpuPartitionPolicy;

use super::parse::fill_in_node;
use super::*;
use crate::devices::inventory::{Gpu, Observation, PciLocation};

mod others;

/// Longest wait of a test for an observation.
const DEADLINE: Duration = Duration::from_secs(30);

const T4: &str = r#"{"uuid": "GPU-a", "minor": 0, "memory": "16276Mi", "model": "T4"}"#;

fn document(gpus: &[&str]) -> String {
    format!(r#"{{"gpus": [{}]}}"#, gpus.join(", "))
}

fn read(text: &str) -> Result<SimulatedDevices, InventoryError> {
    parse(Path::new("gpus.json"), "node-1", text.as_bytes())
}

fn device(health: &str) -> String {
    format!(r#"{{"uuid": "GPU-a", "minor": 0, "memory": "1Gi", "health": "{health}"}}"#)
}

#[test]
fn every_field_is_read_and_gpus_are_sorted_by_minor() {
    let second = r#"{"uuid": "GPU-b", "minor": 1, "memory": 1000, "model": "A10", "busId": "0000:3b:00.0",
        "numaNode": 1, "deviceNode": "/tmp/gpu", "health": "Xid 79"}"#;
    let text = format!(r#"{{"driverVersion": "550", "vendor": "acme", "gpus": [{second}, {T4}]}}"#);
    let reading = read(&text).unwrap();
    let gpu_a = Gpu {
        uuid: "GPU-a".parse().unwrap(),
        minor: 0,
        index: 1,
        memory_bytes: 16276 << 20,
        reserved_bytes: 0,
        model: "T4".to_owned(),
        bus_id: None,
        location: PciLocation::default(),
        labels: BTreeMap::new(),
        device_node: PathBuf::from("/dev/nvidia0"),
    };
    let gpu_b = Gpu {
        uuid: "GPU-b".parse().unwrap(),
        minor: 1,
        index: 0,
        memory_bytes: 1000,
        reserved_bytes: 0,
        model: "A10".to_owned(),
        bus_id: Some("0000:3b:00.0".to_owned()),
        location: PciLocation {
            numa_node: Some(1),
            ..PciLocation::default()
        },
        labels: BTreeMap::new(),
        device_node: PathBuf::from("/tmp/gpu"),
    };
    let health = [
        (gpu_b.uuid.clone(), SimulatedHealth::Xid(79)),
        (gpu_a.uuid.clone(), SimulatedHealth::Healthy),
    ];
    assert_eq!(reading.health, health.into());
    let driver_version = Some("550".to_owned());
    let expected = NodeInventory {
        gpus: vec![gpu_a, gpu_b],
        others: Vec::new(),
        excluded: Vec::new(),
        driver_version,
        vendor: "acme".to_owned(),
        ..NodeInventory::default()
    };
    assert_eq!(reading.inventory, expected);
}

/// A machine in full: switches, labels, links and partitions; and one that has no GPU.
#[test]
fn switches_labels_links_and_partitions_are_read() {
    let gpu = r#"{"uuid": "GPU-a", "minor": 0, "memory": "1Gi", "numaNode": -1, "pcieId": "0000:11:00.0", "pcieRoot": "pci0000:10", "labels": {"tier": "high"}}"#;
    let text = format!(
        r#"{{"gpus": [{gpu}], "gpuLinks": [{{"minors": [0, 1], "links": 4}}], "gpuPartitions": {{"1": [{{"minors": [0]}}]}}, "gpuPartitionPolicy": "Honor"}}"#
    );
    let found = read(&text).unwrap().inventory;
    let location = PciLocation {
        numa_node: None,
        root: Some("pci0000:10".to_owned()),
        switch: Some("0000:11:00.0".to_owned()),
    };
    assert_eq!(
        (&found.gpus[0].location, found.gpus[0].labels["tier"].as_str()),
        (&location, "high")
    );
    assert_eq!(
        (found.links[0].links, found.partitions.unwrap()[&1].len()),
        (4, 1)
    );
    assert_eq!(found.partition_policy, Some(GpuPartitionPolicy::Honor));
    let found =
        read(r#"{"gpus": [], "devices": [{"type": "rdma", "id": "a", "minor": 0, "pcieId": "pci0000:10"}]}"#)
            .unwrap()
            .inventory;
    assert_eq!(found.others[0].location.pcie_id(), Some("pci0000:10"));
}

/// Every error names the file, the device, the field and the value.
#[test]
fn errors_name_the_file_the_device_the_field_and_the_value() {
    let other = |from: &str, to: &str| T4.replace(from, to);
    let bad = [
        String::new(),
        "[]".to_owned(),
        r#"{"gpus": [], "gpu": 1}"#.to_owned(),
        document(&[]),
        document(&["7"]),
        r#"{"gpus": [], "gpuPartitions": {"2": [{"minors": [0]}]}}"#.to_owned(),
        r#"{"gpus": [], "gpuPartitionPolicy": "honor"}"#.to_owned(),
        r#"{"gpus": [], "gpuLinks": 7}"#.to_owned(),
        document(&[T4, r#"{"uuid": "GPU-b", "memory": "1Gi"}"#]),
        document(&[&other("}", r#", "healthy": true}"#)]),
        document(&[&other(": 0", ": -1")]),
        document(&[&other(r#""T4""#, "4")]),
        r#"{"vendor": 7, "gpus": []}"#.to_owned(),
        r#"{"driverVersion": "550"}"#.to_owned(),
        r#"{"gpus": {}}"#.to_owned(),
        document(&[&other("GPU-a", "GPU a")]),
        document(&[&other("16276Mi", "16276MB")]),
        document(&[&other("16276Mi", "0")]),
        document(&[&other("16276Mi", "-1Gi")]),
        document(&[&other("16276Mi", "100m")]),
        document(&[&other(r#""16276Mi""#, "[1]")]),
        document(&[T4, &other("0,", "1,")]),
        document(&[T4, &other("GPU-a", "GPU-b")]),
        document(&[&device("Sick")]),
        document(&[&device("Xid seven")]),
    ];
    let mut text_of_all = String::new();
    for text in bad {
        let error = read(&text).expect_err(&text);
        writeln!(text_of_all, "{text}\n  {}", one_line(&error)).unwrap();
    }
    insta::assert_snapshot!(text_of_all);
}

#[rstest]
#[case::short("n1", "GPU-n1-0")]
#[case::long("ip-10-20-30-40.eu-central-1.compute.internal", "GPU-e2a707b575dc4b94-0")]
fn a_uuid_can_name_the_node(#[case] node: &str, #[case] uuid: &str) {
    assert_eq!(fill_in_node(node, "GPU-{node}-0"), uuid);
}

#[test]
fn a_missing_file_means_that_there_is_no_gpu() {
    let source = FileSource {
        path: PathBuf::from("/nonexistent/gpus.json"),
        node: "node-1".to_owned(),
        interval: Duration::ZERO,
    };
    let error = source.discover().unwrap_err();
    assert!(error.is_absence());
    assert_eq!(
        error.to_string(),
        "cannot read the device file /nonexistent/gpus.json"
    );
}

#[rstest]
#[case::no_gpu(&document(&[]), true)]
#[case::broken("{", false)]
fn an_empty_list_is_no_gpu_and_a_malformed_file_an_error(#[case] text: &str, #[case] is_absence: bool) {
    assert_eq!(read(text).unwrap_err().is_absence(), is_absence);
}

proptest! {
    #[test]
    fn no_text_makes_the_reader_panic(text in r#"[\[\]{}":, a-zA-Z0-9-]{0,60}"#) {
        let _ = read(&text);
    }

    #[test]
    fn no_json_makes_the_reader_panic(value in fuzz::damaged_json(vec![serde_json::from_str(&document(&[T4])).unwrap()])) {
        let _ = read(&value.to_string());
    }

    #[test]
    fn exactly_distinct_gpus_with_memory_are_accepted(gpus in prop::collection::vec((0..5_u32, 0..5_u32, 0..4_u64), 1..4)) {
        let entries: Vec<_> = gpus
            .iter()
            .map(|(uuid, minor, memory)| format!(r#"{{"uuid": "GPU-{uuid}", "minor": {minor}, "memory": "{memory}Gi"}}"#))
            .collect();
        let entries: Vec<_> = entries.iter().map(String::as_str).collect();
        let is_fine = gpus.iter().enumerate().all(|(at, (uuid, minor, memory))| {
            *memory > 0 && gpus[..at].iter().all(|(other, other_minor, _)| other != uuid && other_minor != minor)
        });
        prop_assert_eq!(read(&document(&entries)).is_ok(), is_fine);
    }
}

/// A file, and a watch of it with a short interval.
struct Watched {
    folder: TempDir,
    feed: Feed,
    observations: mpsc::Receiver<Observations>,
}

impl Watched {
    fn start(text: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let source = FileSource {
            path: folder.path().join("gpus.json"),
            node: "node-1".to_owned(),
            interval: Duration::from_millis(2),
        };
        fs::write(&source.path, text).unwrap();
        let (feed, observations) = source.watch(&source.discover().unwrap()).unwrap();
        Self {
            folder,
            feed,
            observations,
        }
    }

    /// Replaces the file as an atomic writer does.
    fn write(&self, text: &str) {
        let draft = self.folder.path().join("draft");
        fs::write(&draft, text).unwrap();
        fs::rename(draft, self.folder.path().join("gpus.json")).unwrap();
    }

    /// Reads until the feed reports `kind` for `device`.
    async fn until(&mut self, device: Option<&str>, kind: ObservationKind) {
        let expected = Observation {
            device: device.map(|uuid| uuid.parse().unwrap()),
            kind,
        };
        let read = async {
            while !self
                .observations
                .recv()
                .await
                .expect("the feed has ended")
                .contains(&expected)
            {}
        };
        tokio::time::timeout(DEADLINE, read)
            .await
            .unwrap_or_else(|_| panic!("never saw {expected:?}"));
    }
}

#[tokio::test]
async fn health_follows_the_file() {
    let mut watched = Watched::start(&document(&[&device("Lost")]));
    watched.until(Some("GPU-a"), ObservationKind::Lost).await;
    watched.write(&document(&[&device("Healthy")]));
    watched
        .until(Some("GPU-a"), ObservationKind::AnsweredWithoutFault)
        .await;
    watched.write(&document(&[&device("Xid 79")]));
    watched.until(Some("GPU-a"), ObservationKind::Xid(79)).await;
    watched.write(&document(&[
        &device("Healthy"),
        T4.replace("GPU-a", "GPU-b").replace(": 0", ": 1").as_str(),
    ]));
    watched.until(None, ObservationKind::InventoryChanged).await;
    watched.write(&document(&[T4.replace("GPU-a", "GPU-b").as_str()]));
    watched.until(Some("GPU-a"), ObservationKind::Lost).await;
    watched.feed.stop().unwrap();
}

/// The watch notices a change that keeps length and time of the file; an invalid file changes nothing.
#[tokio::test]
async fn a_broken_file_keeps_the_last_state() {
    let mut watched = Watched::start(&document(&[&device("Xid 79")]));
    watched.until(Some("GPU-a"), ObservationKind::Xid(79)).await;
    for broken in ["{", "", r#"{"gpus": []}"#] {
        watched.write(broken);
        for _ in 0..100 {
            let seen = watched.observations.recv().await.unwrap();
            let kinds: Vec<ObservationKind> = seen.into_iter().map(|observation| observation.kind).collect();
            assert_eq!(
                kinds,
                [ObservationKind::Xid(79), ObservationKind::AnsweredWithoutFault]
            );
        }
    }
    fs::remove_file(watched.folder.path().join("gpus.json")).unwrap();
    watched.until(Some("GPU-a"), ObservationKind::Xid(79)).await;
    watched.write(&document(&[&device("Xid 48")]));
    watched.until(Some("GPU-a"), ObservationKind::Xid(48)).await;
}

#[tokio::test]
async fn a_watch_ends_with_its_reader() {
    let Watched {
        feed,
        observations,
        folder,
    } = Watched::start(&document(&[T4]));
    drop(observations);
    let stopped = tokio::task::spawn_blocking(|| feed.stop());
    tokio::time::timeout(DEADLINE, stopped)
        .await
        .unwrap()
        .unwrap()
        .unwrap();
    drop(folder);
}
