//! Valid files, and the errors of invalid ones.

use daemon::api_server::one_line;
use std::fmt::Write as _;

use proptest::prelude::*;
use proto::device::VirtualFunction;
use tempfile::TempDir;

use super::*;

fn files(labels: &str, partitions: &str) -> (TempDir, OverrideFiles) {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        fs::write(&path, text).unwrap();
        Some(path)
    };
    let files = OverrideFiles {
        labels: file("labels.yaml", labels),
        partitions: file("partitions.json", partitions),
    };
    (dir, files)
}

fn labels(text: &str) -> DeviceLabels {
    NodeOverrides::read(&files(text, "").1).unwrap().labels
}

fn of(pairs: &[(&str, &str)]) -> Labels {
    pairs
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
        .collect()
}

#[test]
fn a_more_specific_label_wins() {
    let labels = labels(
        r#"
devices:
  rdma: {fabric: a, rail: "0"}
  "0000:1F:00.0": {fabric: b}
  gpu: {tier: low}
  GPU-a: {tier: high}
"#,
    );
    assert_eq!(
        labels.of_device("rdma", "0000:1f:00.0", Some("0000:1f:00.0")),
        of(&[("fabric", "b"), ("rail", "0")])
    );
    assert_eq!(
        labels.of_device("rdma", "0000:20:00.0", None),
        of(&[("fabric", "a"), ("rail", "0")])
    );
    assert_eq!(
        labels.of_device("gpu", "GPU-a", Some("0000:1f:00.0")),
        of(&[("fabric", "b"), ("tier", "high")])
    );
    assert_eq!(labels.of_device("fpga", "x", None), of(&[]));
}

#[test]
fn virtual_functions_are_grouped_by_their_labels() {
    let labels =
        labels(r#"{"virtualFunctions": {"rdma": {"type": "general"}, "0000:1f:00.2": {"type": "fast"}}}"#);
    let vf = |n: i32| VirtualFunction {
        minor: n,
        bus_id: format!("0000:1f:00.{n}"),
    };
    let group = |labels: &[(&str, &str)], numbers: &[i32]| VirtualFunctionGroup {
        labels: of(labels),
        vfs: numbers.iter().map(|n| vf(*n)).collect(),
    };
    let before = [group(&[], &[1, 2, 3]), group(&[("own", "x")], &[4])];
    let expected = [
        group(&[("type", "general")], &[1, 3]),
        group(&[("type", "fast")], &[2]),
        group(&[("own", "x"), ("type", "general")], &[4]),
    ];
    assert_eq!(labels.regroup("rdma", "0000:1f:00.0", &before), expected);
    assert_eq!(
        DeviceLabels::default().regroup("rdma", "0000:1f:00.0", &before),
        before
    );
}

#[test]
fn missing_and_empty_files_override_nothing() {
    assert_eq!(
        NodeOverrides::read(&OverrideFiles::default()).unwrap(),
        NodeOverrides::default()
    );
    let absent = OverrideFiles {
        labels: Some("/nowhere/labels.yaml".into()),
        partitions: Some("/nowhere/p.json".into()),
    };
    assert_eq!(NodeOverrides::read(&absent).unwrap(), NodeOverrides::default());
    assert_eq!(
        NodeOverrides::read(&files("", "").1).unwrap(),
        NodeOverrides::default()
    );
    let table = NodeOverrides::read(&files("", r#"{"1": [{"minors": [0], "ringBusBandwidth": "400Gi"}]}"#).1)
        .unwrap()
        .partitions
        .unwrap();
    assert_eq!(table[&1][0].minors, [0]);
}

#[test]
fn errors_name_the_file_and_the_field() {
    let bad_labels = [
        "devices: 7",
        "device: {}",
        "devices: {rdma: {rail: [0]}}",
        "devices: {rdma: {gpushare/pcie-root: x}}",
        "devices: {rdma: {'a b': x}}",
        "devices: {rdma: {a: 'x/y'}}",
        "virtualFunctions: {rdma: {a/b/c: x}}",
        "devices: {",
    ];
    let bad_tables = ["7", r#"{"2": [{"minors": [0]}]}"#, r#"{"x": []}"#];
    let cases = bad_labels
        .iter()
        .map(|text| (*text, ""))
        .chain(bad_tables.iter().map(|text| ("", *text)));
    let mut text = String::new();
    for (labels, table) in cases {
        let (dir, files) = files(labels, table);
        let error = match NodeOverrides::read(&files) {
            Ok(overrides) => overrides.partitions_problem.unwrap(),
            Err(error) => one_line(error.as_ref()),
        };
        let error = error.replace(&dir.path().display().to_string(), "DIR");
        writeln!(text, "{labels}{table}\n  {error}").unwrap();
    }
    insta::assert_snapshot!(text);
}

/// The reader gets each valid change; after an invalid one the last valid contents stand.
#[tokio::test(start_paused = true)]
async fn changed_files_are_read_again() {
    let (_dir, files) = files("devices: {rdma: {a: b}}", "");
    let path = files.labels.clone().unwrap();
    let (sender, mut overrides) = watch::channel(Arc::new(NodeOverrides::read(&files).unwrap()));
    let reading = tokio::spawn(watch_node_overrides(files, Duration::from_secs(10), sender));
    fs::write(&path, "devices: {").unwrap();
    sleep(Duration::from_secs(60)).await;
    assert!(!overrides.has_changed().unwrap());
    fs::write(&path, "devices: {rdma: {a: c}}").unwrap();
    overrides.changed().await.unwrap();
    assert_eq!(
        overrides.borrow_and_update().labels.of_device("rdma", "x", None),
        of(&[("a", "c")])
    );
    fs::remove_file(&path).unwrap();
    overrides.changed().await.unwrap();
    assert_eq!(**overrides.borrow_and_update(), NodeOverrides::default());
    reading.abort();
}

/// The plugin starts without a table that cannot be read; of a file that changes the last valid table stands, with the mistake.
#[tokio::test(start_paused = true)]
async fn a_broken_table_is_reported_and_the_last_valid_one_stands() {
    let (_dir, files) = files("", "{");
    let path = files.partitions.clone().unwrap();
    let at_start = NodeOverrides::read(&files).unwrap();
    assert_eq!(at_start.partitions, None);
    assert!(at_start.partitions_problem.is_some());
    let (sender, mut overrides) = watch::channel(Arc::new(at_start));
    let reading = tokio::spawn(watch_node_overrides(files, Duration::from_secs(10), sender));
    let mut after = async |text: &str| {
        fs::write(&path, text).unwrap();
        overrides.changed().await.unwrap();
        let now = overrides.borrow_and_update();
        (now.partitions.is_some(), now.partitions_problem.is_some())
    };
    assert_eq!(after(r#"{"1": [{"minors": [0]}]}"#).await, (true, false));
    assert_eq!(after(r#"{"1": [{"minors": [0, 1]}]}"#).await, (true, true));
    assert_eq!(after(r#"{"1": [{"minors": [1]}]}"#).await, (true, false));
    reading.abort();
}

proptest! {
    #[test]
    fn no_text_panics(labels in "\\PC{0,40}", table in "\\PC{0,40}") {
        let _ = NodeOverrides::read(&files(&labels, &table).1);
    }

    /// As Kubernetes itself checks the parts of a label.
    #[test]
    fn accepted_labels_are_valid(name in "[a-z./_-]{0,8}", value in "[a-zA-Z0-9._-]{0,5}") {
        let is_word = |text: &str| !text.is_empty() && !text.starts_with(['.', '_', '-']) && !text.ends_with(['.', '_', '-']);
        if broken_rule(&name, &value).is_none() {
            prop_assert!(value.is_empty() || is_word(&value));
            prop_assert!(name.split('/').all(is_word) && name.split('/').count() <= 2);
        }
    }
}
