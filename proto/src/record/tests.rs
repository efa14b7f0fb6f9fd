//! Records of this scheduler, of old versions, and of other programs.

use std::collections::BTreeMap;

use proptest::prelude::*;
use rstest::rstest;

use super::{
    BIND_TIMESTAMP, DEVICE_ALLOCATED, DeviceAllocation, GpushareRecord, MEM_ASSIGNED, MEM_ASSUME_TIME,
    MEM_DEV, MEM_IDX, MEM_POD, Record,
};

fn annotations(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs
        .iter()
        .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
        .collect()
}

fn gpushare_record() -> Record {
    let resources = [
        ("koordinator.sh/gpu-memory", "8138Mi"),
        ("koordinator.sh/gpu-memory-ratio", "50"),
    ];
    let allocation = DeviceAllocation {
        minor: 1,
        resources: resources
            .iter()
            .map(|(name, value)| ((*name).to_owned(), value.parse().unwrap()))
            .collect(),
        id: "GPU-1".to_owned(),
        extension: None,
    };
    Record {
        allocations: BTreeMap::from([("gpu".to_owned(), vec![allocation])]),
        assumed_at: Some(1_700_000_000_000_000_001),
        gpushare: Some(GpushareRecord {
            idx: 1,
            pod_units: 8138,
            device_units: 16276,
            assigned: false,
        }),
    }
}

#[test]
fn a_gpushare_pod_carries_both_records() {
    insta::assert_json_snapshot!(gpushare_record().annotations(), @r#"
    {
      "ALIYUN_COM_GPU_MEM_ASSIGNED": "false",
      "ALIYUN_COM_GPU_MEM_ASSUME_TIME": "1700000000000000001",
      "ALIYUN_COM_GPU_MEM_DEV": "16276",
      "ALIYUN_COM_GPU_MEM_IDX": "1",
      "ALIYUN_COM_GPU_MEM_POD": "8138",
      "scheduling.koordinator.sh/bind-timestamp": "1700000000000000001",
      "scheduling.koordinator.sh/device-allocated": "{\"gpu\":[{\"minor\":1,\"resources\":{\"koordinator.sh/gpu-memory\":\"8138Mi\",\"koordinator.sh/gpu-memory-ratio\":\"50\"},\"id\":\"GPU-1\"}]}",
      "scheduling.koordinator.sh/gpu-minors": "1"
    }
    "#);
}

#[test]
fn a_written_record_is_read_back() {
    assert_eq!(
        Record::read(&gpushare_record().annotations()).unwrap(),
        Some(gpushare_record())
    );
    assert_eq!(Record::read(&BTreeMap::new()).unwrap(), None);
}

#[test]
fn a_record_of_the_old_extender_is_understood() {
    let old = annotations(&[
        (MEM_IDX, "0"),
        (MEM_POD, "3"),
        (MEM_DEV, "14"),
        (MEM_ASSIGNED, "true"),
        (MEM_ASSUME_TIME, "1537426400000000000"),
    ]);
    let record = Record::read(&old).unwrap().unwrap();
    assert!(record.allocations.is_empty());
    assert_eq!(record.assumed_at, Some(1_537_426_400_000_000_000));
    assert_eq!(
        record.gpushare,
        Some(GpushareRecord {
            idx: 0,
            pod_units: 3,
            device_units: 14,
            assigned: true
        })
    );
}

/// Koordinator writes no timestamp by default, and has fields that gpushare passes through.
#[test]
fn a_record_of_koordinator_is_understood() {
    let text = r#"{"gpu":[{"minor":0,"resources":{"koordinator.sh/gpu-core":"100","koordinator.sh/gpu-memory":"16Gi"},"id":"GPU-8c25ea37"}],
        "rdma":[{"minor":0,"resources":{"koordinator.sh/rdma":"1"},"id":"0000:01:00.0","extension":{"vfs":[{"minor":-1,"busID":"0000:01:00.2"}]}}]}"#;
    let record = Record::read(&annotations(&[(DEVICE_ALLOCATED, text)]))
        .unwrap()
        .unwrap();
    assert_eq!(record.assumed_at, None);
    assert_eq!(
        record.allocations["gpu"][0].resources["koordinator.sh/gpu-memory"].unsigned(),
        Some(16 << 30)
    );
    let again = Record::read(&record.annotations()).unwrap().unwrap();
    assert_eq!(again, record);
}

/// The first proposal's names, its own misspelling, bare numbers, no IDs.
#[test]
fn a_record_in_deprecated_words_is_understood() {
    let text = r#"{"gpu":[{"minor":1,"resouurces":{"kubernetes.io/gpu-core":100,"kubernetes.io/gpu-mem-ratio":100,"kubernetes.io/gpu-mem":"16Gi"}}],
        "rdma":[{"minor":0,"resources":{"kubernetes.io/rdma":"50"}}],"fpga":[{"minor":0,"resources":null}]}"#;
    let record = Record::read(&annotations(&[(DEVICE_ALLOCATED, text)]))
        .unwrap()
        .unwrap();
    let amounts = |kind: &str| {
        let resources = &record.allocations[kind][0].resources;
        resources
            .iter()
            .map(|(name, amount)| format!("{name}={amount}"))
            .collect::<Vec<_>>()
            .join(" ")
    };
    assert_eq!(
        amounts("gpu"),
        "koordinator.sh/gpu-core=100 koordinator.sh/gpu-memory=16Gi koordinator.sh/gpu-memory-ratio=100"
    );
    assert_eq!(
        (amounts("rdma").as_str(), amounts("fpga").as_str()),
        ("koordinator.sh/rdma=50", "")
    );
    assert_eq!(
        (
            record.allocations["gpu"][0].minor,
            record.allocations["gpu"][0].id.as_str()
        ),
        (1, "")
    );
}

#[rstest]
#[case::not_json(
    DEVICE_ALLOCATED,
    "gpu 0",
    "annotation scheduling.koordinator.sh/device-allocated is \"gpu 0\""
)]
#[case::wrong_shape(
    DEVICE_ALLOCATED,
    r#"{"gpu":0}"#,
    "annotation scheduling.koordinator.sh/device-allocated"
)]
#[case::bad_quantity(
    DEVICE_ALLOCATED,
    r#"{"gpu":[{"minor":0,"resources":{"m":"8GiB"}}]}"#,
    "is not a quantity"
)]
#[case::negative_idx(
    MEM_IDX,
    "-1",
    "annotation ALIYUN_COM_GPU_MEM_IDX is \"-1\": not the number of a GPU"
)]
#[case::units(
    MEM_POD,
    "3GiB",
    "annotation ALIYUN_COM_GPU_MEM_POD is \"3GiB\": not a whole number"
)]
#[case::assigned(
    MEM_ASSIGNED,
    "yes",
    "annotation ALIYUN_COM_GPU_MEM_ASSIGNED is \"yes\": neither true nor false"
)]
#[case::timestamp(
    BIND_TIMESTAMP,
    "today",
    "annotation scheduling.koordinator.sh/bind-timestamp is \"today\""
)]
fn an_unreadable_annotation_is_named(#[case] key: &str, #[case] value: &str, #[case] words: &str) {
    let mut all = annotations(&[(MEM_IDX, "0"), (MEM_POD, "3")]);
    all.insert(key.to_owned(), value.to_owned());
    let message = Record::read(&all).unwrap_err().to_string();
    assert!(message.contains(words), "{message}");
}

/// A manifest can have such annotations, which a binding cannot remove.
#[test]
fn unrelated_gpushare_annotations_do_not_invalidate_a_record() {
    let mut all = gpushare_record().annotations();
    all.insert(MEM_IDX.to_owned(), "x".to_owned());
    let record = Record::read(&all).unwrap().unwrap();
    assert_eq!(
        (record.gpushare, record.allocations),
        (None, gpushare_record().allocations)
    );
}

#[test]
fn an_oversized_record_is_refused_without_quoting_it() {
    let message = Record::read(&annotations(&[(DEVICE_ALLOCATED, &"x".repeat(300 * 1024))]))
        .unwrap_err()
        .to_string();
    assert!(message.len() < 250, "{message}");
}

proptest! {
    #[test]
    fn no_annotation_panics(key in 0..7_usize, value in "\\PC{0,60}") {
        let keys = [DEVICE_ALLOCATED, BIND_TIMESTAMP, MEM_IDX, MEM_POD, MEM_DEV, MEM_ASSIGNED, MEM_ASSUME_TIME];
        let mut all = gpushare_record().annotations();
        all.insert(keys[key].to_owned(), value);
        let _ = Record::read(&all);
    }

    /// JSON of the right outline with any values: read and written back, or refused.
    #[test]
    fn no_record_panics(kind in "[a-z]{0,5}", minor in any::<i64>(), name in "(kubernetes.io/gpu-core|[a-z./]{0,9})", amount in prop_oneof![
        any::<i64>().prop_map(serde_json::Value::from), any::<f64>().prop_map(serde_json::Value::from),
        "[-+0-9.eEGiMnk]{0,24}".prop_map(serde_json::Value::from), Just(serde_json::Value::Null),
    ]) {
        let text = serde_json::json!({kind: [{"minor": minor, "resources": {name: amount}}]}).to_string();
        if let Ok(Some(record)) = Record::read(&annotations(&[(DEVICE_ALLOCATED, &text)])) {
            prop_assert_eq!(Record::read(&record.annotations()).unwrap(), Some(record));
        }
    }
}
