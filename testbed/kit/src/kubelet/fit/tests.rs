//! Tests of pod requests and the fit check.

use k8s_openapi::api::core::v1::Pod;
use rstest::rstest;
use serde_json::json;

use super::{WholeAmounts, fit, is_extended};
use crate::kubelet::pod::KubeletPod;

fn amounts(list: &[(&str, &str)]) -> WholeAmounts {
    let owned: Vec<(String, String)> = list
        .iter()
        .map(|(name, text)| ((*name).to_owned(), (*text).to_owned()))
        .collect();
    WholeAmounts::read(owned.iter().map(|(name, text)| (name, text)))
}

#[rstest]
#[case::whole_cores("2", 2000)]
#[case::thousandths("1500m", 1500)]
#[case::decimal("0.25", 250)]
#[case::finer_than_a_thousandth_counts_as_one("100u", 1)]
fn cpu_is_counted_in_thousandths(#[case] text: &str, #[case] expected: i64) {
    assert_eq!(amounts(&[("cpu", text)]).get("cpu"), expected);
}

#[rstest]
#[case::vendor("koordinator.sh/gpu.shared", true)]
#[case::native("cpu", false)]
#[case::kubernetes_own("kubernetes.io/batch-cpu", false)]
#[case::below_kubernetes_own("x.kubernetes.io/y", false)]
#[case::quota("requests.nvidia.com/gpu", false)]
fn extended_resource_names_are_recognised(#[case] name: &str, #[case] expected: bool) {
    assert_eq!(is_extended(name), expected);
}

#[test]
fn a_pod_asks_for_its_running_containers_or_its_largest_init_step() {
    let asks = |n: u32| json!({"requests": {"cpu": n.to_string()}});
    let pod: Pod = serde_json::from_value(json!({
        "metadata": {"name": "p", "uid": "u"},
        "spec": {
            "overhead": {"cpu": "1"},
            "initContainers": [
                {"name": "before", "resources": asks(6)},
                {"name": "side", "restartPolicy": "Always", "resources": asks(2)},
                {"name": "after", "resources": asks(5)},
            ],
            "containers": [{"name": "a", "resources": asks(1)}, {"name": "b", "resources": {"limits": {"cpu": "3"}}}],
        },
    }))
    .unwrap();
    // Running: 1 + 3 + sidecar 2 = 6; the step after the sidecar: 5 + 2 = 7; overhead 1.
    assert_eq!(KubeletPod::read(&pod).unwrap().requests.get("cpu"), 8000);
}

#[rstest]
#[case::fits(&[("cpu", "1"), ("x.io/y", "2")], None)]
#[case::exactly(&[("cpu", "3"), ("x.io/y", "4")], None)]
#[case::too_much_cpu(&[("cpu", "3001m")], Some("cpu, requested: 3001, used: 1000, capacity: 4000"))]
#[case::too_much_of_an_extended_resource(&[("x.io/y", "5")], Some("x.io/y, requested: 5, used: 6, capacity: 10"))]
#[case::unlisted_extended_resources_are_not_checked(&[("x.io/other", "5")], None)]
#[case::unlisted_native_resources_are_absent(&[("memory", "1")], Some("memory, requested: 1, used: 0, capacity: 0"))]
fn requests_fit_beside_one_other_pod(#[case] asked: &[(&str, &str)], #[case] shortage: Option<&str>) {
    let allocatable = amounts(&[("cpu", "4"), ("pods", "2"), ("x.io/y", "10")]);
    let other = amounts(&[("cpu", "1"), ("x.io/y", "6")]);
    let found = fit(&amounts(asked), [&other], &allocatable)
        .err()
        .map(|shortage| shortage.to_string());
    assert_eq!(
        found,
        shortage.map(|rest| format!("Node didn't have enough resource: {rest}"))
    );
    let full = fit(&amounts(asked), [&other, &other], &allocatable).unwrap_err();
    assert_eq!(full.resource, "pods");
}
