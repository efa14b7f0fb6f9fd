//! Pods as the plugin reads them.

use std::collections::BTreeSet;

use proto::record::{BIND_TIMESTAMP, MEM_ASSUME_TIME, MEM_POD};
use proto::resource::ResourceNames;
use rstest::rstest;
use serde_json::{Value, json};

use super::*;
use crate::devices::fleet::DeviceName;
use crate::inject::cdi::dir::SpecDir;

fn pod(annotations: &Value, containers: &Value, status: &Value) -> Option<NodePod> {
    let pod = json!({
        "metadata": {"name": "p", "namespace": "team", "uid": "u1", "annotations": annotations},
        "spec": {"nodeName": "n1", "containers": containers},
        "status": status,
    });
    NodePod::from_pod(
        &serde_json::from_value(pod).unwrap(),
        "n1",
        &ResourceNames::default(),
    )
}

fn units(n: u64) -> Value {
    json!([{"name": "c", "resources": {"limits": {"aliyun.com/gpu-mem": n.to_string()}}}])
}

fn shares(n: u64) -> Value {
    json!([{"name": "c", "resources": {"limits": {"koordinator.sh/gpu.shared": n, "koordinator.sh/gpu-memory": "1Gi"}}}])
}

const RECORD: &str = r#"{"gpu":[{"minor":1,"id":"GPU-b","resources":{}},{"minor":0,"id":"GPU-a"}]}"#;

#[rstest]
#[case::bound(json!({"phase": "Pending"}), PodStage::Bound)]
#[case::no_phase(json!({}), PodStage::Bound)]
#[case::admitted(json!({"phase": "Pending", "startTime": "2026-01-01T00:00:00Z"}), PodStage::Admitted)]
#[case::running(json!({"phase": "Running"}), PodStage::Running)]
#[case::failed(json!({"phase": "Failed"}), PodStage::Terminal)]
#[case::succeeded(json!({"phase": "Succeeded"}), PodStage::Terminal)]
fn the_stage_of_a_pod_follows_from_its_status(#[case] status: Value, #[case] expected: PodStage) {
    assert_eq!(pod(&json!({}), &units(1), &status).unwrap().stage, expected);
}

#[test]
fn pods_of_another_node_or_without_requests_are_left_out() {
    assert_eq!(pod(&json!({}), &json!([{"name": "c"}]), &json!({})), None);
    let elsewhere =
        json!({"metadata": {"name": "p", "uid": "u"}, "spec": {"nodeName": "n2", "containers": units(1)}});
    assert_eq!(
        NodePod::from_pod(
            &serde_json::from_value(elsewhere).unwrap(),
            "n1",
            &ResourceNames::default()
        ),
        None
    );
}

#[test]
fn the_records_of_both_dialects_are_read() {
    let koordinator = json!({"scheduling.koordinator.sh/device-allocated": RECORD, "scheduling.koordinator.sh/bind-timestamp": "7"});
    let placement = pod(&koordinator, &shares(2), &json!({}))
        .unwrap()
        .placement
        .unwrap();
    assert_eq!(
        placement.gpus,
        [
            DeviceName::Id("GPU-b".parse().unwrap()),
            DeviceName::Id("GPU-a".parse().unwrap())
        ]
    );
    assert_eq!((placement.assumed_at, placement.is_assigned()), (7, false));

    let old = json!({"ALIYUN_COM_GPU_MEM_IDX": "3", "ALIYUN_COM_GPU_MEM_ASSUME_TIME": "9", "ALIYUN_COM_GPU_MEM_ASSIGNED": "true"});
    let placement = pod(&old, &units(2), &json!({})).unwrap().placement.unwrap();
    assert_eq!(
        (
            placement.gpus.as_slice(),
            placement.assumed_at,
            placement.is_assigned()
        ),
        ([DeviceName::Minor(3)].as_slice(), 9, true)
    );
}

#[rstest]
#[case::no_annotation(json!({}), units(1), "annotation ALIYUN_COM_GPU_MEM_IDX is missing: the pod was not placed by gpushare-scheduler")]
#[case::no_koordinator_annotation(json!({}), shares(1), "annotation scheduling.koordinator.sh/device-allocated is missing")]
#[case::no_time(json!({"ALIYUN_COM_GPU_MEM_IDX": "0"}), units(1), "annotation ALIYUN_COM_GPU_MEM_ASSUME_TIME is missing")]
#[case::no_koordinator_time(json!({"scheduling.koordinator.sh/device-allocated": RECORD}), shares(1), "bind-timestamp is missing")]
#[case::unreadable(json!({"ALIYUN_COM_GPU_MEM_IDX": "x"}), units(1), r#"annotation ALIYUN_COM_GPU_MEM_IDX is "x": not the number of a GPU"#)]
#[case::not_json(json!({"scheduling.koordinator.sh/device-allocated": "{"}), shares(1), r#"device-allocated is "{""#)]
#[case::no_gpu(json!({"scheduling.koordinator.sh/device-allocated": r#"{"rdma":[]}"#}), shares(1), "names no GPU")]
#[case::bad_minor(json!({"scheduling.koordinator.sh/device-allocated": r#"{"gpu":[{"minor":-1}]}"#}), shares(1), "minor -1 is no GPU")]
#[case::function_without_address(
    json!({"scheduling.koordinator.sh/device-allocated": r#"{"rdma":[{"minor":1,"extension":{"vfs":[{"minor":2}]}}]}"#}),
    shares(1),
    "rdma minor 1 has a function without busID"
)]
#[case::functions_that_are_no_list(
    json!({"scheduling.koordinator.sh/device-allocated": r#"{"rdma":[{"minor":1,"extension":{"vfs":{"minor":2,"busID":"0000:01:00.2"}}}]}"#}),
    shares(1),
    "rdma minor 1 has a function without busID"
)]
#[case::contradiction(
    json!({"scheduling.koordinator.sh/device-allocated": r#"{"gpu":[{"minor":1,"id":"GPU-b"}]}"#, "ALIYUN_COM_GPU_MEM_IDX": "0"}),
    units(1),
    "ALIYUN_COM_GPU_MEM_IDX is 0, which is not the GPU that annotation scheduling.koordinator.sh/device-allocated names (minor 1)"
)]
fn unusable_records(#[case] annotations: Value, #[case] containers: Value, #[case] expected: &str) {
    let error = pod(&annotations, &containers, &json!({}))
        .unwrap()
        .placement
        .unwrap_err()
        .to_string();
    assert!(error.contains(expected), "{error}");
}

/// Sidecars run beside the init containers that follow them, ordinary init containers run alone.
#[test]
fn requests_of_containers_are_summed_as_kubernetes_does() {
    let container = |name: &str, core: u64, policy: Option<&str>| json!({"name": name, "restartPolicy": policy, "resources": {"requests": {"koordinator.sh/gpu-core": core}}});
    let spec = json!({
        "initContainers": [container("s", 10, Some("Always")), container("i", 50, None)],
        "containers": [container("a", 20, None), container("b", 20, None)],
    });
    let requests = Requests::from_spec(&serde_json::from_value(spec).unwrap());
    assert_eq!(
        requests
            .iter()
            .filter(|(_, amount)| *amount > 0)
            .collect::<Vec<_>>(),
        [("koordinator.sh/gpu-core", 60)]
    );
}

/// A pod that wants a virtual function must not get an adapter, nor one that keeps others away a place beside them.
#[test]
fn pods_with_different_allocation_hints_do_not_swap() {
    let limits = json!([{"name": "c", "resources": {"limits": {"koordinator.sh/rdma": "1"}}}]);
    let of = |extension: &Value, hint: Option<&str>| {
        let entry = json!({"minor": 0, "id": "0000:1f:00.0", "resources": {"koordinator.sh/rdma": "1"}, "extension": extension});
        let mut annotations = json!({"scheduling.koordinator.sh/device-allocated": json!({"rdma": [entry]}).to_string(), "scheduling.koordinator.sh/bind-timestamp": "7"});
        if let Some(hint) = hint {
            annotations["scheduling.koordinator.sh/device-allocate-hint"] = hint.into();
        }
        pod(&annotations, &limits, &json!({})).unwrap()
    };
    let function = json!({"vfs": [{"minor": 0, "busID": "0000:1f:00.1"}]});
    let (adapter, other) = (of(&Value::Null, None), of(&json!({}), None));
    assert!(adapter.can_swap_with(&other));
    assert!(!adapter.can_swap_with(&of(&function, None)));
    let exclusive = r#"{"rdma": {"exclusivePolicy": "PCIeLevel"}}"#;
    assert!(!adapter.can_swap_with(&of(&Value::Null, Some(exclusive))));
    assert!(of(&function, Some(exclusive)).can_swap_with(&of(&function, Some(exclusive))));
}

/// GPUs of a node may have different levels of enforcement, and lie in different link groups.
#[rstest]
#[case::enforcement("gpushare/enforcement", "driver")]
#[case::domain_of_a_group("gpushare/group-domain", "link")]
fn pods_with_different_demands_do_not_swap(#[case] key: &str, #[case] value: &str) {
    let limits = json!([{"name": "c", "resources": {"limits": {"aliyun.com/gpu-mem": "2"}}}]);
    let plain = pod(&json!({}), &limits, &json!({})).unwrap();
    let demanding = pod(&json!({key: value}), &limits, &json!({})).unwrap();
    assert!(!plain.can_swap_with(&demanding));
    assert!(plain.can_swap_with(&plain) && demanding.can_swap_with(&demanding));
}

/// The plugin remembers a removed or unreadable record until it is written again.
#[rstest]
#[case::everything(&["DEVICE", "BIND", "IDX", "TIME"], true)]
#[case::one_dialect(&["DEVICE", "BIND"], true)]
#[case::the_other_dialect(&["IDX", "TIME"], true)]
#[case::the_times(&["BIND", "TIME"], true)]
#[case::units(&["POD"], true)]
#[case::one_time(&["TIME"], false)]
#[case::nothing(&[], false)]
fn removed_annotations(#[case] removed: &[&str], #[case] is_lost: bool) {
    let record = r#"{"gpu":[{"minor":1,"id":"GPU-b","resources":{"koordinator.sh/gpu-memory":"2Gi"}}]}"#;
    let koordinator = [
        ("DEVICE", DEVICE_ALLOCATED, record),
        ("BIND", BIND_TIMESTAMP, "7"),
    ];
    let gpushare = [
        ("IDX", MEM_IDX, "1"),
        ("TIME", MEM_ASSUME_TIME, "7"),
        ("POD", MEM_POD, "2"),
    ];
    let all = [&koordinator[..], &gpushare[..]].concat();
    let having = |removed: &[&str]| {
        let left = all
            .iter()
            .filter(|(word, ..)| !removed.contains(word))
            .map(|(_, key, value)| ((*key).to_owned(), json!(value)));
        pod(
            &Value::Object(left.collect()),
            &units(2),
            &json!({"phase": "Running"}),
        )
        .unwrap()
    };
    let whole = having(&[]);
    let mut pods = NodePods::default();
    pods.reset([whole.clone()]);
    for is_listed in [false, true] {
        if is_listed {
            pods.reset([having(removed)]);
        }
        pods.apply(having(removed));
        // A second change of what is left loses no more.
        pods.apply(having(removed));
        assert_eq!(
            pods.lost_record(&whole.uid),
            whole.placement.as_ref().ok().filter(|_| is_lost)
        );
        assert_eq!(pods.n_altered() > 0, is_lost);
        pods.apply(whole.clone());
        assert_eq!(pods.lost_record(&whole.uid), None, "the record is there again");
    }
}

/// Pods that the previous version placed, with the CDI specs that its plugin wrote for their containers on one node.
#[derive(serde::Deserialize)]
struct PreviousVersion {
    pods: Vec<Pod>,
    specs: BTreeMap<String, String>,
}

/// A plugin that replaces one of the previous version has to know the record of each running pod, and the specs in the directory.
#[test]
fn records_and_specs_of_the_previous_version_are_read() {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../testbed/tests/recorded/previous_version.json"
    );
    let text = std::fs::read_to_string(path).unwrap();
    let previous: PreviousVersion = serde_json::from_str(&text).unwrap();
    let mut recorded = BTreeSet::new();
    for pod in &previous.pods {
        let pod = NodePod::from_pod(pod, "n2", &ResourceNames::default()).unwrap();
        assert_eq!(pod.stage, PodStage::Running, "{}", pod.name);
        let record = pod.record().unwrap();
        let mut uuids: Vec<String> = record.gpus.iter().map(ToString::to_string).collect();
        uuids.sort_unstable();
        recorded.insert(uuids.join(","));
    }
    assert_eq!(recorded.len(), 3, "{recorded:?}");
    let dir = tempfile::tempdir().unwrap();
    for (file, text) in &previous.specs {
        std::fs::write(dir.path().join(file), text).unwrap();
    }
    let specs = SpecDir::new(dir.path().to_owned());
    let mut injected = BTreeSet::new();
    for file in previous.specs.keys().filter(|file| file.contains("-gpu_")) {
        let name = file.split("-gpu_").nth(1).unwrap().trim_end_matches(".json");
        assert!(SpecDir::file(name) == *file && specs.has(name), "{file}");
        injected.extend(specs.env(name).unwrap().remove("GPUSHARE_GPU_DEVICES"));
    }
    assert!(recorded.is_subset(&injected), "{recorded:?} and {injected:?}");
}
