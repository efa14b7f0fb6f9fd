//! Changes of pods by the mutating webhook.

use rstest::rstest;
use serde_json::{Value, json};

use super::{annotated, container, creation, mutated, pod, refusal, request, with};
use crate::admission::{Rules, Verdict};

/// The limits of the container at a JSON pointer, which must be equal to its requests.
fn amounts(pod: &Value, pointer: &str) -> Value {
    let resources = &pod.pointer(pointer).unwrap()["resources"];
    assert_eq!(resources["limits"], resources["requests"], "{resources}");
    resources["limits"].clone()
}

#[rstest]
#[case::memory(json!({"koordinator.sh/gpu-memory": "8Gi"}), "1")]
#[case::part_of_a_device(json!({"koordinator.sh/gpu-memory-ratio": "50"}), "1")]
#[case::one_device(json!({"koordinator.sh/gpu-memory-ratio": "100"}), "1")]
#[case::three_devices(json!({"koordinator.sh/gpu-memory-ratio": "300"}), "3")]
#[case::no_multiple(json!({"koordinator.sh/gpu-memory-ratio": "150"}), "1")]
#[case::ratio_before_core(json!({"koordinator.sh/gpu-memory-ratio": "50", "koordinator.sh/gpu-core": "200"}), "1")]
#[case::core_without_ratio(json!({"koordinator.sh/gpu-memory": "8Gi", "koordinator.sh/gpu-core": "200"}), "2")]
#[case::core_that_is_no_multiple(json!({"koordinator.sh/gpu-memory": "8Gi", "koordinator.sh/gpu-core": "250"}), "1")]
#[case::bare_number(json!({"koordinator.sh/gpu-memory-ratio": 200}), "2")]
#[case::other_notation(json!({"koordinator.sh/gpu-memory-ratio": "0.2k"}), "2")]
#[case::nonsense(json!({"koordinator.sh/gpu-memory-ratio": "many"}), "1")]
#[case::zero_beside_it(json!({"koordinator.sh/gpu-memory": "8Gi", "koordinator.sh/gpu-memory-ratio": "0", "koordinator.sh/gpu-core": "200"}), "2")]
#[case::core_alone(json!({"koordinator.sh/gpu-core": "50"}), "1")]
fn the_number_of_devices_is_added_where_it_is_missing(#[case] asked: Value, #[case] devices: &str) {
    let mutated = mutated(&Rules::default(), &pod(&asked));
    let expected = with(
        json!({"all": asked}),
        "/all/koordinator.sh~1gpu.shared",
        Value::Null,
    );
    let mut expected = expected["all"].as_object().unwrap().clone();
    expected.remove("koordinator.sh~1gpu.shared");
    expected.insert("koordinator.sh/gpu.shared".to_owned(), devices.into());
    assert_eq!(amounts(&mutated, "/spec/containers/0"), Value::Object(expected));
}

/// Charts write a zero where a pod is to have no GPU.
#[rstest]
#[case::ratio(json!({"koordinator.sh/gpu-memory-ratio": "0"}))]
#[case::gpu(json!({"koordinator.sh/gpu": "0"}))]
#[case::old_name(json!({"kubernetes.io/gpu": 0}))]
#[case::units(json!({"aliyun.com/gpu-mem": "0"}))]
fn a_request_for_zero_is_left_alone(#[case] asked: Value) {
    let rules = Rules {
        scheduler_name: Some("gpushare".to_owned()),
        ..Rules::default()
    };
    let pod = pod(&asked);
    assert_eq!(mutated(&rules, &pod), pod);
}

#[rstest]
#[case::one("100", "1")]
#[case::two("200", "2")]
#[case::part("50", "1")]
fn koordinators_gpu_becomes_core_and_memory_ratio(#[case] asked: &str, #[case] devices: &str) {
    let mutated = mutated(
        &Rules::default(),
        &pod(&json!({"koordinator.sh/gpu": asked, "cpu": "1"})),
    );
    let expected = json!({
        "koordinator.sh/gpu-core": asked, "koordinator.sh/gpu-memory-ratio": asked, "koordinator.sh/gpu.shared": devices, "cpu": "1"});
    assert_eq!(amounts(&mutated, "/spec/containers/0"), expected);
}

#[test]
fn a_given_number_of_devices_stays() {
    let asked = json!({"koordinator.sh/gpu": "100", "koordinator.sh/gpu.shared": "4"});
    let expected = json!({
        "koordinator.sh/gpu-core": "100", "koordinator.sh/gpu-memory-ratio": "100", "koordinator.sh/gpu.shared": "4"});
    assert_eq!(
        amounts(&mutated(&Rules::default(), &pod(&asked)), "/spec/containers/0"),
        expected
    );
}

#[rstest]
#[case::gpu("kubernetes.io/gpu", json!({
    "koordinator.sh/gpu-core": "100", "koordinator.sh/gpu-memory-ratio": "100", "koordinator.sh/gpu.shared": "1"}))]
#[case::core("kubernetes.io/gpu-core", json!({"koordinator.sh/gpu-core": "100", "koordinator.sh/gpu.shared": "1"}))]
#[case::memory("kubernetes.io/gpu-memory", json!({"koordinator.sh/gpu-memory": "100", "koordinator.sh/gpu.shared": "1"}))]
#[case::ratio("kubernetes.io/gpu-memory-ratio", json!({"koordinator.sh/gpu-memory-ratio": "100", "koordinator.sh/gpu.shared": "1"}))]
#[case::rdma("kubernetes.io/rdma", json!({"koordinator.sh/rdma": "100"}))]
#[case::fpga("kubernetes.io/fpga", json!({"koordinator.sh/fpga": "100"}))]
fn deprecated_resource_names_are_replaced(#[case] old: &str, #[case] expected: Value) {
    assert_eq!(
        amounts(
            &mutated(&Rules::default(), &pod(&json!({old: "100"}))),
            "/spec/containers/0"
        ),
        expected
    );
    // Kubernetes does not fill requests in from limits, nor limits at all, for a name that it does not take for an extended one.
    for only in ["limits", "requests"] {
        let half = with(
            pod(&json!({})),
            "/spec/containers/0/resources",
            json!({only: {old: "100"}}),
        );
        assert_eq!(
            amounts(&mutated(&Rules::default(), &half), "/spec/containers/0"),
            expected,
            "{only}"
        );
    }
}

#[rstest]
#[case::limits(json!({"limits": {"koordinator.sh/gpu-memory": "1Gi"}}))]
#[case::requests(json!({"requests": {"koordinator.sh/gpu-memory": "1Gi"}}))]
#[case::null(json!({"limits": {"koordinator.sh/gpu-memory": "1Gi"}, "requests": null}))]
fn limits_or_requests_alone_become_both(#[case] resources: Value) {
    let mutated = mutated(
        &Rules::default(),
        &with(pod(&json!({})), "/spec/containers/0/resources", resources),
    );
    for amounts in ["limits", "requests"] {
        assert_eq!(
            mutated["spec"]["containers"][0]["resources"][amounts]["koordinator.sh/gpu.shared"], "1",
            "{mutated}"
        );
    }
}

#[test]
fn init_containers_are_mutated_too() {
    let asked = with(
        pod(&json!({})),
        "/spec/initContainers",
        json!([container("i", &json!({"koordinator.sh/gpu-memory": "1Gi"}))]),
    );
    let mutated = mutated(&Rules::default(), &asked);
    assert_eq!(
        amounts(&mutated, "/spec/initContainers/0"),
        json!({"koordinator.sh/gpu-memory": "1Gi", "koordinator.sh/gpu.shared": "1"})
    );
    assert_eq!(
        amounts(&mutated, "/spec/containers/0"),
        json!({}),
        "it asks for nothing"
    );
}

#[rstest]
#[case::nothing(json!({"cpu": "1", "example.com/gpu": "1", "kubernetes.io/batch-cpu": "1"}))]
#[case::vendor(json!({"nvidia.com/gpu": "2"}))]
#[case::units(json!({"aliyun.com/gpu-mem": "8"}))]
#[case::mixed(json!({"aliyun.com/gpu-mem": "8", "koordinator.sh/gpu": "100"}))]
#[case::mixed_with_vendor(json!({"nvidia.com/gpu": "1", "koordinator.sh/gpu-memory": "1Gi"}))]
#[case::complete(json!({"koordinator.sh/gpu-memory": "1Gi", "koordinator.sh/gpu.shared": "1"}))]
#[case::rdma(json!({"koordinator.sh/rdma": "1"}))]
fn other_resources_are_left_alone(#[case] asked: Value) {
    let pod = pod(&asked);
    assert_eq!(mutated(&Rules::default(), &pod), pod);
}

/// The validating webhook and the filter then say which of the two is too many.
#[test]
fn koordinators_gpu_beside_core_or_ratio_is_left_alone() {
    let asked = json!({"koordinator.sh/gpu": "100", "koordinator.sh/gpu-core": "50", "koordinator.sh/gpu.shared": "1"});
    assert_eq!(mutated(&Rules::default(), &pod(&asked)), pod(&asked));
}

#[rstest]
#[case::update("UPDATE", "pods", "")]
#[case::delete("DELETE", "pods", "")]
#[case::subresource("CREATE", "pods", "eviction")]
#[case::other_kind("CREATE", "replicationcontrollers", "")]
fn only_the_creation_of_pods_is_mutated(
    #[case] operation: &str,
    #[case] resource: &str,
    #[case] subresource: &str,
) {
    let request = request(
        operation,
        resource,
        subresource,
        &pod(&json!({"koordinator.sh/gpu": "100"})),
        &Value::Null,
    );
    assert_eq!(Rules::default().mutate(&request).unwrap(), Verdict::ALLOWED);
}

#[test]
fn static_pods_are_left_alone() {
    let pod = annotated(
        pod(&json!({"koordinator.sh/gpu": "100"})),
        "kubernetes.io/config.mirror",
        "x",
    );
    assert_eq!(mutated(&Rules::default(), &pod), pod);
}

#[test]
fn a_pod_that_shares_all_devices_gets_a_slot_in_each_app_container() {
    let mut pod = annotated(pod(&json!({})), "gpushare/all-devices", "true");
    pod["spec"]["containers"] =
        json!([{"name": "a"}, {"name": "b", "resources": {"claims": [{"name": "x"}]}}]);
    pod["spec"]["initContainers"] = json!([{"name": "i", "resources": {}}]);
    let mutated = mutated(
        &Rules {
            allow_all_devices: true,
            ..Rules::default()
        },
        &pod,
    );
    let slot = json!({"koordinator.sh/gpu.shared": "1"});
    assert_eq!(
        mutated["spec"]["containers"][0]["resources"],
        json!({"limits": slot, "requests": slot})
    );
    assert_eq!(
        mutated["spec"]["containers"][1]["resources"],
        json!({"limits": slot, "requests": slot, "claims": [{"name": "x"}]})
    );
    assert_eq!(mutated["spec"]["initContainers"], pod["spec"]["initContainers"]);
    let refused = refusal(Rules::default().mutate(&creation(&pod)).unwrap());
    assert!(
        refused.starts_with("annotation gpushare/all-devices is not allowed in this cluster"),
        "{refused}"
    );
}

#[rstest]
#[case::said_no("false", json!({}), json!({}))]
#[case::one_container_has_said_so("true", json!({"koordinator.sh/gpu.shared": "1"}), json!({"koordinator.sh/gpu.shared": "1"}))]
fn no_slot_is_added_if_a_container_has_one_or_the_annotation_is_false(
    #[case] value: &str,
    #[case] asked: Value,
    #[case] expected: Value,
) {
    let pod = annotated(pod(&asked), "gpushare/all-devices", value);
    let pod = with(pod, "/spec/initContainers", json!([container("i", &json!({}))]));
    let mutated = mutated(
        &Rules {
            allow_all_devices: true,
            ..Rules::default()
        },
        &pod,
    );
    assert_eq!(
        (
            amounts(&mutated, "/spec/containers/0"),
            amounts(&mutated, "/spec/initContainers/0")
        ),
        (expected, json!({}))
    );
}

#[rstest]
#[case::default_name("default-scheduler", "", "ours")]
#[case::empty("", "", "ours")]
#[case::another("theirs", "", "theirs")]
#[case::bound("default-scheduler", "n1", "default-scheduler")]
fn the_scheduler_name_replaces_the_default_one_only(
    #[case] named: &str,
    #[case] node: &str,
    #[case] expected: &str,
) {
    let rules = Rules {
        scheduler_name: Some("ours".to_owned()),
        ..Rules::default()
    };
    for asked in [
        "koordinator.sh/gpu-memory",
        "aliyun.com/gpu-mem",
        "kubernetes.io/rdma",
        "nvidia.com/gpu",
    ] {
        let pod = with(pod(&json!({asked: "1"})), "/spec/schedulerName", named.into());
        let pod = with(pod, "/spec/nodeName", node.into());
        assert_eq!(mutated(&rules, &pod)["spec"]["schedulerName"], expected);
    }
    for other in [json!({"cpu": "1"}), json!({"nvidia.com/gpu": "0"})] {
        assert_eq!(mutated(&rules, &pod(&other)), pod(&other));
    }
}

#[test]
fn a_copied_record_is_removed_with_a_warning() {
    let pod = with(
        pod(&json!({"aliyun.com/gpu-mem": "8"})),
        "/metadata/annotations",
        json!({"ALIYUN_COM_GPU_MEM_IDX": "0", "scheduling.koordinator.sh/device-allocated": "{}", "mine": "x"}),
    );
    assert_eq!(
        mutated(&Rules::default(), &pod)["metadata"]["annotations"],
        json!({"mine": "x"})
    );
    let Verdict::Allowed { warnings, .. } = Rules::default().mutate(&creation(&pod)).unwrap() else {
        panic!()
    };
    assert_eq!(
        warnings,
        [
            "annotation scheduling.koordinator.sh/device-allocated was removed: only the scheduler writes it",
            "annotation ALIYUN_COM_GPU_MEM_IDX was removed: only the scheduler writes it",
        ]
    );
}
