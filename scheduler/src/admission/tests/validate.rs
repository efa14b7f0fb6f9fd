//! Pods and changes of pods that the validating webhook refuses, and the reasons.

use std::time::Duration;

use placement::Policies;
use proto::resource::ResourceNames;
use rstest::rstest;
use serde_json::{Value, json};

use super::{annotated, container, creation, mutated, pod, refusal, request as review, validated, with};
use crate::admission::{Rules, Verdict};
use crate::index::{Index, Shared};
use crate::offline;

#[rstest]
#[case::nothing(json!({"cpu": "1"}))]
#[case::units(json!({"aliyun.com/gpu-mem": "8"}))]
#[case::vendor(json!({"nvidia.com/gpu": "2"}))]
#[case::no_gpu_at_all(json!({"nvidia.com/gpu": "0"}))]
#[case::shares_and_no_whole_gpu(json!({"nvidia.com/gpu": "0", "koordinator.sh/gpu.shared": "1", "koordinator.sh/gpu-memory": "1Gi"}))]
#[case::shares(json!({"koordinator.sh/gpu.shared": "2", "koordinator.sh/gpu-memory-ratio": "100", "koordinator.sh/gpu-core": "50"}))]
fn valid_pods_are_allowed(#[case] asked: Value) {
    assert_eq!(
        validated(
            &Rules {
                deny_overrides: true,
                ..Rules::default()
            },
            &creation(&pod(&asked))
        ),
        Verdict::ALLOWED
    );
}

/// The cluster's largest GPU has 80 GiB, and some node has devices of type npu.
#[rstest]
#[case::other_unit(
    &json!({"aliyun.com/gpu-mem": "8192M"}),
    "{}",
    Err("the pod: aliyun.com/gpu-mem is 8000000 GiB (8192000000 units of 1 MiB), and the largest GPU of the cluster has 80 GiB (81920 units of 1 MiB); the amount is a number of units: did you mean 8192?")
)]
#[case::unknown_type(
    &json!({"nvidia.com/gpu": "1"}),
    r#"{"GPU": {"exclusivePolicy": "DeviceLevel"}}"#,
    Err("annotation scheduling.koordinator.sh/device-allocate-hint: unknown device type \"GPU\"; known are fpga, gpu, npu, rdma; did you mean \"gpu\"?")
)]
#[case::types_that_the_pod_does_not_ask_for(
    &json!({"nvidia.com/gpu": "1"}),
    r#"{"npu": {"exclusivePolicy": "DeviceLevel"}, "fpga": {"exclusivePolicy": "DeviceLevel"}}"#,
    Ok(&[][..])
)]
#[case::tiny(
    &json!({"koordinator.sh/gpu.shared": "1", "koordinator.sh/gpu-memory": "8192"}),
    "{}",
    Ok(&["koordinator.sh/gpu-memory is 8192 bytes; did you mean 8192Mi?"][..])
)]
fn amounts_and_types_are_compared_with_the_cluster(
    #[case] asked: &Value,
    #[case] hint: &str,
    #[case] expected: Result<&[&str], &str>,
) {
    let device = |kind: &str, resource: &str, amount: &str| json!({"type": kind, "id": kind, "minor": 0, "health": true, "resources": {resource: amount}});
    let node = json!({"metadata": {"name": "n", "annotations": {"aliyun.com/gpu-mem-unit": "MiB"}}});
    let devices = json!({"metadata": {"name": "n"}, "spec": {"devices": [
        device("gpu", "koordinator.sh/gpu-memory", "80Gi"), device("npu", "example.com/npu", "1")]}});
    let none = std::iter::empty();
    let index = Shared::new(offline::index([node].into_iter(), [devices].into_iter(), none));
    let pod = annotated(pod(asked), "scheduling.koordinator.sh/device-allocate-hint", hint);
    let verdict = Rules::default().validate(&creation(&pod), &index).unwrap();
    match expected {
        Ok(expected) => {
            let Verdict::Allowed { warnings, .. } = verdict else {
                panic!("{verdict:?}")
            };
            assert_eq!(warnings, expected);
        }
        Err(text) => assert_eq!(refusal(verdict), text),
    }
}

/// Until all nodes are known, no type is unknown for certain.
#[test]
fn a_cluster_that_is_not_known_refuses_nothing() {
    let index = Shared::new(Index::new(
        ResourceNames::default(),
        Policies::default(),
        Duration::ZERO,
    ));
    let pod = annotated(
        pod(&json!({"nvidia.com/gpu": "1"})),
        "scheduling.koordinator.sh/device-allocate-hint",
        r#"{"npu": {"exclusivePolicy": "DeviceLevel"}}"#,
    );
    assert_eq!(
        Rules::default().validate(&creation(&pod), &index).unwrap(),
        Verdict::ALLOWED
    );
}

const SHARE: &str = r#"{"koordinator.sh/gpu.shared": "1", "koordinator.sh/gpu-memory": "1Gi"}"#;

fn share() -> Value {
    pod(&serde_json::from_str(SHARE).unwrap())
}

#[rstest]
#[case::old_name(pod(&json!({"kubernetes.io/gpu": "100"})), "container \"c\" asks for kubernetes.io/gpu, an old name of koordinator.sh/gpu; write koordinator.sh/gpu alone")]
#[case::record(
    annotated(share(), "ALIYUN_COM_GPU_MEM_IDX", "0"),
    "annotation ALIYUN_COM_GPU_MEM_IDX is for the scheduler to write; make the pod without it"
)]
#[case::all_devices(
    annotated(share(), "gpushare/all-devices", "yes"),
    "annotation gpushare/all-devices is \"yes\": neither true nor false"
)]
#[case::hint(
    annotated(share(), "scheduling.koordinator.sh/device-allocate-hint", r#"{"gpu": 1}"#),
    "annotation scheduling.koordinator.sh/device-allocate-hint is '{\"gpu\": 1}': gpu: invalid type: integer `1`, expected a JSON object"
)]
#[case::joint(
    annotated(share(), "scheduling.koordinator.sh/device-joint-allocate", "gpu"),
    "annotation scheduling.koordinator.sh/device-joint-allocate is \"gpu\": expected value at line 1 column 1"
)]
#[case::bandwidth(
    annotated(
        share(),
        "scheduling.koordinator.sh/gpu-partition-spec",
        r#"{"ringBusBandwidth": "fast"}"#
    ),
    "annotation scheduling.koordinator.sh/gpu-partition-spec is '{\"ringBusBandwidth\": \"fast\"}': ringBusBandwidth: \"fast\" is not a quantity"
)]
fn invalid_annotations_and_names_are_refused(#[case] pod: Value, #[case] expected: &str) {
    let message = refusal(validated(&Rules::default(), &creation(&pod)));
    assert!(message.starts_with(expected), "{message}");
}

/// A share in the group `g` of coscheduling, with these annotations.
fn member(annotations: &Value) -> Value {
    let mut pod = with(share(), "/metadata/annotations", annotations.clone());
    pod["metadata"]["labels"] = json!({"scheduling.x-k8s.io/pod-group": "g"});
    pod
}

#[rstest]
#[case::domain(
    json!({"gpushare/group-domain": "rack"}),
    "annotation gpushare/group-domain: \"rack\" is none of any, node, link"
)]
#[case::policy(
    json!({"gpushare/group-domain": "link", "gpushare/group-domain-policy": "always"}),
    "annotation gpushare/group-domain-policy: \"always\" is none of required, preferred"
)]
fn an_unknown_wish_of_a_group_is_refused(#[case] annotations: Value, #[case] expected: &str) {
    let (good, bad) = (
        member(&json!({"gpushare/group-domain": "link"})),
        member(&annotations),
    );
    assert_eq!(refusal(validated(&Rules::default(), &creation(&bad))), expected);
    assert_eq!(refusal(change(&good, &bad)), expected);
    assert_eq!(change(&bad, &bad), Verdict::ALLOWED);
    let worse = member(&json!({"gpushare/group-domain": "zone"}));
    assert_eq!(change(&bad, &worse), Verdict::ALLOWED, "no worse than before");
}

#[test]
fn a_wish_for_a_domain_without_a_group_is_warned_of() {
    let wishes = json!({"gpushare/group-domain": "link", "gpushare/group-domain-policy": "required"});
    let creation_of = |pod: &Value| validated(&Rules::default(), &creation(pod));
    let Verdict::Allowed { warnings, .. } =
        creation_of(&with(share(), "/metadata/annotations", wishes.clone()))
    else {
        panic!("refused")
    };
    insta::assert_snapshot!(warnings.concat(), @"annotation gpushare/group-domain has no effect: the pod is in no group, by spec.schedulingGroup or by the marks of coscheduling or Koordinator");
    assert_eq!(creation_of(&member(&wishes)), Verdict::ALLOWED);
}

#[rstest]
#[case::hint("scheduling.koordinator.sh/device-allocate-hint", r#"{"rdma":{"selector":{"matchLabels":{"type":"fakeW"}},"vfSelector":{"matchExpressions":[{"key":"type","operator":"In","values":["general"]}]},"allocateStrategy":"RequestsAsCount","requiredTopologyScope":"PCIe","exclusivePolicy":"PCIeLevel"}}"#)]
#[case::joint(
    "scheduling.koordinator.sh/device-joint-allocate",
    r#"{"deviceTypes":["gpu","rdma"],"requiredScope":"SamePCIe"}"#
)]
#[case::partition(
    "scheduling.koordinator.sh/gpu-partition-spec",
    r#"{"allocatePolicy":"Restricted","ringBusBandwidth":"200Gi"}"#
)]
#[case::not_ours("example.com/device-allocated", "garbage")]
fn koordinator_s_own_annotations_parse(#[case] key: &str, #[case] value: &str) {
    assert_eq!(
        validated(&Rules::default(), &creation(&annotated(share(), key, value))),
        Verdict::ALLOWED
    );
}

#[test]
fn pods_without_a_device_request_may_have_any_annotation() {
    let pod = annotated(
        pod(&json!({})),
        "scheduling.koordinator.sh/device-allocated",
        "garbage",
    );
    assert_eq!(validated(&Rules::default(), &creation(&pod)), Verdict::ALLOWED);
}

#[test]
fn a_pod_that_sees_all_devices_is_allowed_after_mutation() {
    let rules = Rules {
        allow_all_devices: true,
        ..Rules::default()
    };
    let pod = annotated(pod(&json!({})), "gpushare/all-devices", "true");
    let message = refusal(validated(&rules, &creation(&pod)));
    assert!(
        message.contains("annotation gpushare/all-devices needs koordinator.sh/gpu.shared"),
        "{message}"
    );
    assert_eq!(
        validated(&rules, &creation(&mutated(&rules, &pod))),
        Verdict::ALLOWED
    );
}

#[test]
fn all_devices_are_refused_unless_the_operator_allows_them() {
    let pod = annotated(
        pod(&json!({"koordinator.sh/gpu.shared": "1"})),
        "gpushare/all-devices",
        "true",
    );
    insta::assert_snapshot!(refusal(validated(&Rules::default(), &creation(&pod))), @"annotation gpushare/all-devices is not allowed in this cluster: a pod sees all devices of its node and is charged for none only where gpushare-scheduler and its device plugins run with --allow-all-devices; take the annotation out and ask for amounts");
    assert_eq!(
        validated(
            &Rules {
                allow_all_devices: true,
                ..Rules::default()
            },
            &creation(&pod)
        ),
        Verdict::ALLOWED
    );
}

/// The verdict on an update, where overrides are denied.
fn change(old: &Value, new: &Value) -> Verdict {
    validated(
        &Rules {
            deny_overrides: true,
            ..Rules::default()
        },
        &review("UPDATE", "pods", "", new, old),
    )
}

#[test]
fn updates_of_an_invalid_existing_pod_are_allowed() {
    let broken = pod(&json!({"koordinator.sh/gpu-core": "50", "nvidia.com/gpu": "1"}));
    let broken = annotated(broken, "scheduling.koordinator.sh/device-allocated", "garbage");
    let broken = with(
        broken,
        "/spec/containers/0/securityContext",
        json!({"privileged": true}),
    );
    assert_eq!(change(&broken, &broken), Verdict::ALLOWED);
    let finalized = with(broken.clone(), "/metadata/finalizers", json!([]));
    assert_eq!(
        change(
            &with(broken.clone(), "/metadata/finalizers", json!(["a/b"])),
            &finalized
        ),
        Verdict::ALLOWED
    );
    let other_garbage = annotated(
        broken.clone(),
        "scheduling.koordinator.sh/device-allocated",
        "other garbage",
    );
    assert_eq!(
        change(&broken, &other_garbage),
        Verdict::ALLOWED,
        "no worse than before"
    );
    let mended = annotated(broken.clone(), "scheduling.koordinator.sh/device-allocated", "{}");
    assert_eq!(change(&broken, &mended), Verdict::ALLOWED);
}

/// The exclusive policy of a bound pod would otherwise change under the pods beside it.
#[test]
fn allocation_hints_are_immutable_once_a_pod_is_bound() {
    let key = "scheduling.koordinator.sh/device-allocate-hint";
    let before = annotated(share(), key, "{}");
    let after = annotated(share(), key, r#"{"gpu":{"exclusivePolicy":"PCIeLevel"}}"#);
    assert_eq!(change(&before, &after), Verdict::ALLOWED);
    let placed = |pod: &Value| with(pod.clone(), "/spec/nodeName", json!("n1"));
    let message = refusal(change(&placed(&before), &placed(&after)));
    assert_eq!(
        message,
        format!("annotation {key} counts when a pod is placed; it cannot be changed afterwards")
    );
    assert_eq!(change(&placed(&after), &placed(&after)), Verdict::ALLOWED);
}

#[rstest]
#[case::record(
    "scheduling.koordinator.sh/device-allocated",
    r#"{"gpu":[]}"#,
    "garbage",
    "annotation scheduling.koordinator.sh/device-allocated is \"garbage\""
)]
#[case::index(
    "ALIYUN_COM_GPU_MEM_IDX",
    "0",
    "one",
    "annotation ALIYUN_COM_GPU_MEM_IDX is \"one\""
)]
#[case::hint(
    "scheduling.koordinator.sh/gpu-partition-spec",
    "{}",
    "[]",
    "annotation scheduling.koordinator.sh/gpu-partition-spec is \"[]\": not a JSON object"
)]
#[case::all_devices(
    "gpushare/all-devices",
    "false",
    "true",
    "annotation gpushare/all-devices counts when a pod is made"
)]
fn a_change_for_the_worse_is_refused(
    #[case] key: &str,
    #[case] before: &str,
    #[case] after: &str,
    #[case] expected: &str,
) {
    let (old, new) = (annotated(share(), key, before), annotated(share(), key, after));
    let message = refusal(change(&old, &new));
    assert!(message.starts_with(expected), "{message}");
    assert_eq!(change(&old, &old), Verdict::ALLOWED);
    let deleting = with(new, "/metadata/deletionTimestamp", json!("2024-01-01T00:00:00Z"));
    assert_eq!(change(&old, &deleting), Verdict::ALLOWED);
}

#[rstest]
#[case::status("UPDATE", "pods", "status")]
#[case::delete("DELETE", "pods", "")]
#[case::eviction("CREATE", "pods", "eviction")]
#[case::connect("CONNECT", "pods", "exec")]
#[case::other_kind("CREATE", "deployments", "")]
fn requests_other_than_writes_of_pods_are_allowed(
    #[case] operation: &str,
    #[case] resource: &str,
    #[case] subresource: &str,
) {
    let broken = pod(&json!({"koordinator.sh/gpu-core": "50"}));
    assert_eq!(
        validated(
            &Rules::default(),
            &review(operation, resource, subresource, &broken, &Value::Null)
        ),
        Verdict::ALLOWED
    );
}

#[rstest]
#[case::visible(json!({"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}), "sets NVIDIA_VISIBLE_DEVICES")]
#[case::from_elsewhere(json!({"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]}), "sets NVIDIA_VISIBLE_DEVICES")]
#[case::mps(json!({"env": [{"name": "A"}, {"name": "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "value": "100"}]}), "sets CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")]
#[case::limit(json!({"env": [{"name": "NVIDIA_GPU_MEMORY_LIMIT", "value": "99999"}]}), "sets NVIDIA_GPU_MEMORY_LIMIT")]
#[case::reservation(json!({"env": [{"name": "NVIDIA_GPU_MEMORY_REQUEST", "value": "1"}]}), "sets NVIDIA_GPU_MEMORY_REQUEST")]
#[case::privileged(json!({"securityContext": {"privileged": true}}), "is privileged and would see every device of the node")]
fn overrides_are_refused_if_the_policy_says_so(#[case] what: Value, #[case] expected: &str) {
    let rules = Rules {
        deny_overrides: true,
        ..Rules::default()
    };
    for (list, name) in [
        ("containers", "c"),
        ("containers", "beside"),
        ("initContainers", "first"),
    ] {
        let mut pod = share();
        pod["spec"]["initContainers"] = json!([container("first", &json!({}))]);
        pod["spec"]["containers"]
            .as_array_mut()
            .unwrap()
            .push(container("beside", &json!({})));
        let containers = pod["spec"][list].as_array_mut().unwrap();
        let container = containers
            .iter_mut()
            .find(|container| container["name"] == name)
            .unwrap();
        container
            .as_object_mut()
            .unwrap()
            .extend(what.as_object().unwrap().clone());
        let message = refusal(validated(&rules, &creation(&pod)));
        assert_eq!(
            message,
            format!("container {name:?} {expected}, which is not allowed in a pod that shares devices")
        );
        let still_refused = expected.contains("NVIDIA_VISIBLE_DEVICES") && name != "c";
        assert_eq!(
            validated(&Rules::default(), &creation(&pod)) != Verdict::ALLOWED,
            still_refused,
            "the policy is off"
        );
        let mut vendor = pod.clone();
        vendor["spec"]["containers"][0]["resources"] = json!({"limits": {"nvidia.com/gpu": "1"}});
        let sees_others = expected.contains("NVIDIA_VISIBLE_DEVICES");
        assert_eq!(
            validated(&rules, &creation(&vendor)) != Verdict::ALLOWED,
            sees_others,
            "it has its devices to itself"
        );
    }
}

/// CUDA images show every GPU by default, so a container that requests none must be able to hide them.
#[test]
fn a_container_without_devices_may_hide_all_gpus() {
    let rules = Rules {
        deny_overrides: true,
        ..Rules::default()
    };
    let none = json!([{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]);
    let mut pod = share();
    pod["spec"]["containers"].as_array_mut().unwrap().push(with(
        container("beside", &json!({})),
        "/env",
        none.clone(),
    ));
    assert_eq!(validated(&rules, &creation(&pod)), Verdict::ALLOWED);
    pod["spec"]["containers"][0]["env"] = none;
    assert!(
        refusal(validated(&rules, &creation(&pod))).contains("container \"c\" sets NVIDIA_VISIBLE_DEVICES")
    );
}

#[test]
fn ephemeral_containers_are_checked_when_they_are_added() {
    let rules = Rules {
        deny_overrides: true,
        ..Rules::default()
    };
    let debug = json!([{"name": "debug", "securityContext": {"privileged": true}}]);
    let with_debug = with(share(), "/spec/ephemeralContainers", debug);
    let add = |old: &Value, new: &Value| {
        validated(&rules, &review("UPDATE", "pods", "ephemeralcontainers", new, old))
    };
    assert!(refusal(add(&share(), &with_debug)).starts_with("container \"debug\" is privileged"));
    assert_eq!(add(&with_debug, &with_debug), Verdict::ALLOWED);
    assert_eq!(
        add(
            &pod(&json!({})),
            &with(
                pod(&json!({})),
                "/spec/ephemeralContainers",
                json!([{"name": "d"}])
            )
        ),
        Verdict::ALLOWED
    );
}
