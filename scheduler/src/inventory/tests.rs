//! Device objects and capacities, good, bad and old.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use proto::node::Node;
use proto::resource::ResourceNames;
use rstest::rstest;
use serde_json::{Value, json};

use super::{DeviceReport, NodeReport, of_template, report, trim};

fn node(annotation: Option<&str>, capacity: &Value) -> Node {
    let mut node: Node =
        serde_json::from_value(json!({"metadata": {"name": "n1"}, "status": {"capacity": capacity}}))
            .unwrap();
    node.metadata.annotations =
        annotation.map(|unit| [("aliyun.com/gpu-mem-unit".to_owned(), unit.to_owned())].into());
    node
}

fn read(node: &Node, devices: Option<&Value>) -> Option<NodeReport> {
    let names = ResourceNames::default();
    let device =
        devices.map(|devices| DeviceReport::of(&ObjectMeta::default(), &json!({"devices": devices})));
    let whole = report(node, device.as_ref(), &names);
    assert_eq!(
        report(&trim(node, &names), device.as_ref(), &names),
        whole,
        "what is trimmed away is not read"
    );
    whole
}

fn gpu(minor: i32) -> Value {
    json!({"type": "gpu", "id": format!("GPU-{minor}"), "minor": minor, "health": true, "resources": {"koordinator.sh/gpu-memory": "16Gi"}})
}

/// `gpu` with another field.
fn with(field: &str, value: Value) -> Value {
    let mut gpu = gpu(0);
    gpu[field] = value;
    gpu
}

#[test]
fn a_device_object_is_read_with_and_without_optional_amounts() {
    let mut rich = gpu(3);
    rich["resources"] = json!({"koordinator.sh/gpu-memory": "83201216Ki", "koordinator.sh/gpu-core": "100", "koordinator.sh/gpu-memory-ratio": "100", "koordinator.sh/gpu.shared": 10});
    rich["health"] = false.into();
    let nic = json!({"type": "rdma", "id": "0000:09:00.0", "minor": 1, "health": true});
    let report = read(
        &node(Some("256Mi"), &json!({})),
        Some(&json!([gpu(0), rich, nic])),
    )
    .unwrap();
    assert_eq!(report.problems, Vec::<String>::new());
    assert_eq!(
        (report.is_unit_unknown, report.inventory.unit_bytes),
        (false, Some(256 << 20))
    );
    let shown: Vec<_> = report
        .inventory
        .gpus
        .iter()
        .map(|gpu| {
            (
                gpu.minor,
                gpu.memory_bytes >> 10,
                gpu.core,
                gpu.slots,
                gpu.healthy,
            )
        })
        .collect();
    assert_eq!(
        shown,
        [(0, 16 << 20, 100, 100, true), (3, 83_201_216, 100, 10, false)]
    );
}

/// The report names the entry and its field.
#[rstest]
#[case::no_object(json!("gpu"), "spec.devices[1]: invalid type: string \"gpu\"")]
#[case::no_minor(with("minor", Value::Null), "spec.devices[1]: minor is missing")]
#[case::negative_minor(with("minor", json!(-1)), "spec.devices[1]: minor is -1")]
#[case::no_memory(with("resources", json!({})), "spec.devices[1]: resources has no koordinator.sh/gpu-memory")]
#[case::odd_memory(with("resources", json!({"koordinator.sh/gpu-memory": "16GB"})), "is not a quantity")]
#[case::negative_memory(with("resources", json!({"koordinator.sh/gpu-memory": "-1"})), "koordinator.sh/gpu-memory is -1, not a whole number")]
#[case::absurd_core(with("resources", json!({"koordinator.sh/gpu-memory": "1", "koordinator.sh/gpu-core": "9999999999"})), "koordinator.sh/gpu-core is 9999999999, which is absurd")]
#[case::labels_in_mass(with("labels", json!({"a": "x".repeat(4096)})), "spec.devices[1]: labels have 4097 bytes, more than 4096")]
#[case::labels_of_functions_in_mass(
    with("vfGroups", json!([{"labels": {"a": "x".repeat(4000)}}, {"labels": {"b": "x".repeat(100)}}])),
    "spec.devices[1]: labels have 4102 bytes, more than 4096"
)]
#[case::health_is_text(with("health", json!("yes")), "expected a boolean")]
fn a_malformed_device_is_reported_and_leaves_the_others_alone(#[case] entry: Value, #[case] expected: &str) {
    let report = read(&node(None, &json!({})), Some(&json!([gpu(7), entry]))).unwrap();
    assert_eq!(report.inventory.gpus.len(), 1);
    assert!(
        report.problems.len() == 1 && report.problems[0].contains(expected),
        "{:?}",
        report.problems
    );
}

#[rstest]
#[case::absent(None, None, None)]
#[case::good(Some("GiB"), Some(1 << 30), None)]
#[case::misspelt(
    Some("Gib"),
    None,
    Some("node annotation aliyun.com/gpu-mem-unit: \"Gib\" is no memory unit")
)]
fn the_memory_unit_is_read_from_the_node(
    #[case] annotation: Option<&str>,
    #[case] bytes: Option<u64>,
    #[case] problem: Option<&str>,
) {
    let report = read(&node(annotation, &json!({})), Some(&json!([gpu(0)]))).unwrap();
    assert_eq!(report.inventory.unit_bytes, bytes);
    match problem {
        None => assert_eq!(report.problems, Vec::<String>::new()),
        Some(problem) => assert!(report.problems[0].starts_with(problem), "{:?}", report.problems),
    }
}

/// Nodes of the old plugin: equal parts, rounded down; without a unit a unit counts as 1 MiB.
#[rstest]
#[case::gib(Some("GiB"), json!({"aliyun.com/gpu-mem": "31", "aliyun.com/gpu-count": "2"}), Some((2, 15 << 30, false)))]
#[case::unknown_unit(None, json!({"aliyun.com/gpu-mem": "31", "aliyun.com/gpu-count": "2"}), Some((2, 15 << 20, true)))]
#[case::bad_unit(Some("Gib"), json!({"aliyun.com/gpu-mem": "31", "aliyun.com/gpu-count": "2"}), Some((2, 15 << 20, true)))]
#[case::no_units_yet(None, json!({"aliyun.com/gpu-mem": "0", "aliyun.com/gpu-count": "2"}), Some((0, 0, true)))]
#[case::less_than_one_each(None, json!({"aliyun.com/gpu-mem": "1", "aliyun.com/gpu-count": "2"}), Some((0, 0, true)))]
#[case::no_gpus(None, json!({"aliyun.com/gpu-mem": "0", "aliyun.com/gpu-count": "0"}), None)]
#[case::absurd_count(None, json!({"aliyun.com/gpu-mem": "9", "aliyun.com/gpu-count": "9000000000"}), None)]
#[case::negative_count(None, json!({"aliyun.com/gpu-mem": "9", "aliyun.com/gpu-count": "-1"}), None)]
#[case::no_count(None, json!({"aliyun.com/gpu-mem": "9"}), None)]
#[case::cpu_only(None, json!({"cpu": "8"}), None)]
#[case::our_plugin_before_its_device_object(Some("GiB"), json!({"aliyun.com/gpu-mem": "31", "aliyun.com/gpu-count": "2", "koordinator.sh/gpu-memory": "31Gi"}), None)]
fn a_node_of_the_old_plugin_has_equal_gpus_from_its_capacity(
    #[case] annotation: Option<&str>,
    #[case] capacity: Value,
    #[case] expected: Option<(usize, u64, bool)>,
) {
    let node = node(annotation, &capacity);
    let shown = |report: NodeReport| {
        let bytes = report.inventory.gpus.first().map_or(0, |gpu| gpu.memory_bytes);
        (report.inventory.gpus.len(), bytes, report.is_unit_unknown)
    };
    assert_eq!(read(&node, None).map(shown), expected);
    assert_eq!(
        read(&node, Some(&json!([]))),
        None,
        "a Device object without GPUs says that there are none"
    );
}

#[rstest]
#[case::count(json!({"koordinator.sh/gpu-memory": "32Gi", "aliyun.com/gpu-count": "2"}), Some((2, 16 << 30)))]
#[case::core(json!({"koordinator.sh/gpu-memory": "32Gi", "koordinator.sh/gpu-core": "400"}), Some((4, 8 << 30)))]
#[case::shared(json!({"koordinator.sh/gpu-memory": "32Gi", "koordinator.sh/gpu.shared": "100"}), Some((1, 32 << 30)))]
#[case::unknown_count(json!({"koordinator.sh/gpu-memory": "32Gi"}), None)]
#[case::old(json!({"aliyun.com/gpu-mem": "31", "aliyun.com/gpu-count": "2"}), Some((2, 15 << 20)))]
fn a_node_template_has_gpus_from_its_capacity(
    #[case] capacity: Value,
    #[case] expected: Option<(usize, u64)>,
) {
    let report = of_template(&node(None, &capacity), &ResourceNames::default());
    assert_eq!(
        report.map(|report| (report.inventory.gpus.len(), report.inventory.gpus[0].memory_bytes)),
        expected
    );
}
