//! Records that do and do not meet the demands of annotations.

use rstest::rstest;
use serde_json::{Value, json};

use super::*;

/// Two adapters with a function each, on switches of their own, and a GPU beside the first.
fn device() -> Device {
    let place = |switch: &str| json!({"socketID": -1, "nodeID": 0, "pcieID": switch});
    let adapter = |minor: i32, switch: &str| {
        json!({"type": "rdma", "id": format!("nic-{minor}"), "minor": minor, "health": true, "labels": {"fabric": switch}, "topology": place(switch),
               "resources": {"koordinator.sh/rdma": "100"},
               "vfGroups": [{"labels": {"type": "general"}, "vfs": [{"minor": 0, "busID": format!("vf-{minor}")}]}]})
    };
    let gpu = json!({"type": "gpu", "id": "GPU-0", "minor": 0, "health": true, "topology": place("a"), "resources": {}});
    let object = json!({"apiVersion": "scheduling.koordinator.sh/v1alpha1", "kind": "Device", "metadata": {"name": "n"},
                        "spec": {"devices": [gpu, adapter(0, "a"), adapter(1, "b")]}});
    serde_json::from_value(object).unwrap()
}

/// A pod that holds these adapters, each with its function if so, beside the GPU.
fn pod(adapters: &[i32], with_functions: bool, annotations: &[(&str, Value)]) -> Pod {
    let entry = |minor: &i32| {
        let vfs = json!({"vfs": [{"minor": 0, "busID": format!("vf-{minor}")}]});
        let extension = if with_functions { vfs } else { Value::Null };
        json!({"minor": minor, "resources": {"koordinator.sh/rdma": "1"}, "id": format!("nic-{minor}"), "extension": extension})
    };
    let record = json!({"rdma": adapters.iter().map(entry).collect::<Vec<_>>(), "gpu": [{"minor": 0, "resources": {}, "id": "GPU-0"}]});
    let mut all = json!({DEVICE_ALLOCATED: record.to_string()});
    for (key, value) in annotations {
        all[*key] = json!(value.to_string());
    }
    serde_json::from_value(json!({"metadata": {"name": "p", "annotations": all}})).unwrap()
}

fn hint(hint: &Value) -> (&'static str, Value) {
    (HINT, json!({"rdma": hint}))
}

#[rstest]
#[case::nothing_demanded(&pod(&[1], false, &[]), 0)]
#[case::label(&pod(&[0], false, &[hint(&json!({"selector": {"matchLabels": {"fabric": "a"}}}))]), 0)]
#[case::other_label(&pod(&[1], false, &[hint(&json!({"selector": {"matchLabels": {"fabric": "a"}}}))]), 1)]
#[case::function(&pod(&[0], true, &[hint(&json!({"vfSelector": {}}))]), 0)]
#[case::no_function(&pod(&[0], false, &[hint(&json!({"vfSelector": {}}))]), 1)]
#[case::function_of_another_kind(
    &pod(&[0], true, &[hint(&json!({"vfSelector": {"matchExpressions": [{"key": "type", "operator": "NotIn", "values": ["general"]}]}}))]), 1)]
#[case::all(&pod(&[0, 1], false, &[hint(&json!({"allocateStrategy": "ApplyForAll"}))]), 0)]
#[case::not_all(&pod(&[0], false, &[hint(&json!({"allocateStrategy": "ApplyForAll"}))]), 1)]
#[case::same_switch(&pod(&[0], false, &[(JOINT, json!({"deviceTypes": ["gpu", "rdma"], "requiredScope": "SamePCIe"}))]), 0)]
#[case::other_switch(&pod(&[1], false, &[(JOINT, json!({"deviceTypes": ["gpu", "rdma"], "requiredScope": "SamePCIe"}))]), 1)]
fn demands(#[case] pod: &Pod, #[case] n_unmet: usize) {
    assert_eq!(
        unmet(pod, &device()).len(),
        n_unmet,
        "{:?}",
        unmet(pod, &device())
    );
}

#[rstest]
#[case::one("rdma", 1, &[1], true)]
#[case::more_than_asked("rdma", 1, &[1, 1], false)]
#[case::whole_ones("rdma", 200, &[100, 100], true)]
#[case::too_few("rdma", 200, &[100], false)]
fn amounts_without_demands(
    #[case] kind: &str,
    #[case] asked: u64,
    #[case] held: &[u64],
    #[case] expected: bool,
) {
    assert_eq!(PodDemands::default().should_hold(kind, asked, held), expected);
}

#[rstest]
#[case::comes_along(&[(JOINT, json!({"deviceTypes": ["gpu", "rdma"]}))], 1, &[1, 1], true)]
#[case::leads(&[(JOINT, json!({"deviceTypes": ["rdma", "gpu"]}))], 1, &[1, 1], false)]
#[case::all(&[hint(&json!({"allocateStrategy": "ApplyForAll"}))], 30, &[30, 30], true)]
#[case::count(&[hint(&json!({"allocateStrategy": "RequestsAsCount"}))], 2, &[1, 1], true)]
#[case::count_of_whole_ones(&[hint(&json!({"allocateStrategy": "RequestsAsCount", "exclusivePolicy": "DeviceLevel"}))], 2, &[100, 100], true)]
#[case::count_of_parts(&[hint(&json!({"allocateStrategy": "RequestsAsCount", "exclusivePolicy": "DeviceLevel"}))], 2, &[1, 1], false)]
fn amounts_with_demands(
    #[case] annotations: &[(&str, Value)],
    #[case] asked: u64,
    #[case] held: &[u64],
    #[case] expected: bool,
) {
    assert_eq!(
        PodDemands::of(&pod(&[], false, annotations)).should_hold("rdma", asked, held),
        expected
    );
}

#[rstest]
#[case::same_function(&pod(&[0], true, &[]), &pod(&[0], true, &[]), 1)]
#[case::same_adapter(&pod(&[0], false, &[]), &pod(&[0], false, &[]), 0)]
#[case::kept_device(&pod(&[0], false, &[hint(&json!({"exclusivePolicy": "DeviceLevel"}))]), &pod(&[0], false, &[]), 1)]
#[case::kept_switch(&pod(&[0], false, &[]), &pod(&[0], false, &[hint(&json!({"exclusivePolicy": "PCIeLevel"}))]), 1)]
#[case::kept_elsewhere(&pod(&[1], false, &[]), &pod(&[0], false, &[hint(&json!({"exclusivePolicy": "PCIeLevel"}))]), 0)]
fn two_pods(#[case] one: &Pod, #[case] other: &Pod, #[case] n_clashes: usize) {
    let found = clashes(&device(), &[("one", one), ("other", other)]);
    assert_eq!(found.len(), n_clashes, "{found:?}");
}
