//! Pods are refused if their containers could see GPUs that the scheduler does not count for them.

use rstest::rstest;
use serde_json::{Value, json};

use super::{annotated, container, creation, pod, refusal, request as review, validated, with};
use crate::admission::{Rules, Verdict};

/// Environment variables, of which one is `NVIDIA_VISIBLE_DEVICES` with this value.
fn visible(value: &str) -> Value {
    // The API server leaves an empty value out.
    let variable = if value.is_empty() {
        json!({"name": VISIBLE})
    } else {
        json!({"name": VISIBLE, "value": value})
    };
    json!([{"name": "A", "value": "all"}, variable])
}

const VISIBLE: &str = "NVIDIA_VISIBLE_DEVICES";

fn setting(container: Value, value: &str) -> Value {
    with(container, "/env", visible(value))
}

/// A pod with a container in each list, and this one more in `list`.
fn pod_with(list: &str, one: &Value) -> Value {
    let mut pod = pod(&json!({"cpu": "1"}));
    pod["spec"]["initContainers"] = json!([container("first", &json!({}))]);
    pod["spec"]["ephemeralContainers"] = json!([container("debug", &json!({}))]);
    pod["spec"][list].as_array_mut().unwrap().push(one.clone());
    pod
}

fn judged(pod: &Value) -> Verdict {
    validated(&Rules::default(), &creation(pod))
}

#[rstest]
#[case::all("all")]
#[case::index("0")]
#[case::indices("0,1")]
#[case::uuid("GPU-3c2b1a00-1111-2222-3333-444455556666")]
#[case::mig("MIG-1,void")]
#[case::cdi_name("nvidia.com/gpu=0")]
#[case::management("management.nvidia.com/gpu=all")]
#[case::expanded("$(WHICH)")]
#[case::in_capitals("VOID")]
#[case::with_spaces(" ")]
fn values_of_visible_devices_that_may_show_a_gpu_are_refused(#[case] value: &str) {
    for list in ["initContainers", "containers", "ephemeralContainers"] {
        let message = refusal(judged(&pod_with(
            list,
            &setting(container("c2", &json!({})), value),
        )));
        let expected = format!(
            "container \"c2\" sets NVIDIA_VISIBLE_DEVICES to {value:?} but asks for no share of a GPU"
        );
        assert!(message.starts_with(&expected), "{message}");
    }
}

#[rstest]
#[case::void("void")]
#[case::none("none")]
#[case::empty("")]
fn values_of_visible_devices_that_show_no_gpu_are_allowed(#[case] value: &str) {
    for list in ["initContainers", "containers", "ephemeralContainers"] {
        assert_eq!(
            judged(&pod_with(list, &setting(container("c2", &json!({})), value))),
            Verdict::ALLOWED
        );
    }
}

#[test]
fn refusals_name_the_container_and_the_remedy() {
    let unasked = judged(&pod_with(
        "containers",
        &setting(container("c2", &json!({})), "all"),
    ));
    insta::assert_snapshot!(refusal(unasked), @r#"container "c2" sets NVIDIA_VISIBLE_DEVICES to "all" but asks for no share of a GPU, so it could see GPUs that are counted for other pods; take the variable out, set it to "void", or ask for koordinator.sh/gpu.shared and koordinator.sh/gpu-memory, or for aliyun.com/gpu-mem; an operator lets daemons in namespace "default" see every GPU by --unrestricted-namespaces of scheduler and device plugins"#);
    let whole = judged(&pod_with(
        "containers",
        &setting(container("c2", &json!({"nvidia.com/gpu": "1"})), "all"),
    ));
    insta::assert_snapshot!(refusal(whole), @r#"container "c2" sets NVIDIA_VISIBLE_DEVICES to "all", which wins over the GPUs that it is given for nvidia.com/gpu and could show it GPUs that are counted for other pods; take the variable out; an operator lets daemons in namespace "default" see every GPU by --unrestricted-namespaces of scheduler and device plugins"#);
    let from =
        json!([{"name": VISIBLE, "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['x']"}}}]);
    let elsewhere = judged(&pod_with(
        "containers",
        &with(container("c2", &json!({})), "/env", from),
    ));
    insta::assert_snapshot!(refusal(elsewhere), @r#"container "c2" sets NVIDIA_VISIBLE_DEVICES by valueFrom, whose value is not known here, but asks for no share of a GPU, so it could see GPUs that are counted for other pods; take the variable out, set it to "void", or ask for koordinator.sh/gpu.shared and koordinator.sh/gpu-memory, or for aliyun.com/gpu-mem; an operator lets daemons in namespace "default" see every GPU by --unrestricted-namespaces of scheduler and device plugins"#);
    let annotated = judged(&annotated(
        pod(&json!({})),
        "nvidia.cdi.k8s.io/container.c",
        "management.nvidia.com/gpu=all",
    ));
    insta::assert_snapshot!(refusal(annotated), @r#"annotation nvidia.cdi.k8s.io/container.c is "management.nvidia.com/gpu=all": the container runtime could give the pod devices that are not counted for it; take it out and ask for devices in the limits of containers; an operator lets daemons in namespace "default" see every GPU by --unrestricted-namespaces of scheduler and device plugins"#);
}

/// The pod's own value of the variable comes after that of the vendor's plugin, and wins.
#[rstest]
#[case::nothing(json!({}), true)]
#[case::cpu(json!({"cpu": "1"}), true)]
#[case::zero_whole(json!({"nvidia.com/gpu": "0"}), true)]
#[case::whole(json!({"nvidia.com/gpu": "1"}), true)]
#[case::part_of_a_gpu_by_the_vendor(json!({"nvidia.com/mig-1g.5gb": "1"}), true)]
#[case::rdma(json!({"koordinator.sh/rdma": "100"}), true)]
#[case::units(json!({"aliyun.com/gpu-mem": "1"}), false)]
#[case::shares(json!({"koordinator.sh/gpu.shared": "1", "koordinator.sh/gpu-memory": "1Gi"}), false)]
fn the_variable_is_not_checked_on_containers_with_shares(#[case] asked: Value, #[case] refused: bool) {
    let one = pod(&asked);
    assert_eq!(judged(&one), Verdict::ALLOWED, "without the variable");
    let sets = with(one.clone(), "/spec/containers/0/env", visible("all"));
    assert_eq!(judged(&sets) != Verdict::ALLOWED, refused);
    let void = with(one.clone(), "/spec/containers/0/env", visible("void"));
    assert_eq!(judged(&void), Verdict::ALLOWED);
    let beside = with(
        one,
        "/spec/initContainers",
        json!([setting(container("beside", &json!({})), "all")]),
    );
    assert!(
        refusal(judged(&beside)).starts_with("container \"beside\" sets"),
        "beside a container that may"
    );
}

#[test]
fn a_repeated_variable_is_refused_if_any_value_shows_a_gpu() {
    let twice = json!([{"name": VISIBLE, "value": "all"}, {"name": VISIBLE, "value": "void"}]);
    assert!(refusal(judged(&with(pod(&json!({})), "/spec/containers/0/env", twice))).contains("to \"all\""));
}

#[rstest]
#[case::of_a_container("nvidia.cdi.k8s.io/container.c", "nvidia.com/gpu=0", true)]
#[case::of_the_pod("nvidia.cdi.k8s.io/pod", "management.nvidia.com/gpu=all", true)]
#[case::of_all("nvidia.cdi.k8s.io", "nvidia.com/gpu=0", true)]
#[case::of_the_runtime(
    "cdi.k8s.io/whatever_0",
    "k8s.device-plugin.nvidia.com/gpu=GPU-1,nvidia.com/gpu=1",
    true
)]
#[case::of_another_vendor("cdi.k8s.io/x", "example.com/device=0", true)]
#[case::names_none("nvidia.cdi.k8s.io/pod", " ", false)]
#[case::another_domain("my.cdi.k8s.io/pod", "nvidia.com/gpu=0", false)]
#[case::a_longer_domain("nvidia.cdi.k8s.io.example.com/pod", "nvidia.com/gpu=0", false)]
#[case::no_domain("cdi.k8s.io", "nvidia.com/gpu=0", false)]
fn annotations_that_name_cdi_devices_are_refused(
    #[case] key: &str,
    #[case] value: &str,
    #[case] refused: bool,
) {
    for asked in [
        json!({}),
        json!({"nvidia.com/gpu": "1"}),
        json!({"aliyun.com/gpu-mem": "1"}),
    ] {
        let before = pod(&asked);
        let after = annotated(before.clone(), key, value);
        assert_eq!(judged(&after) != Verdict::ALLOWED, refused);
        let change = |old: &Value, new: &Value| {
            validated(&Rules::default(), &review("UPDATE", "pods", "", new, old)) != Verdict::ALLOWED
        };
        assert_eq!(
            change(&before, &after),
            refused,
            "when it is added to a pod that has not started yet"
        );
        assert!(
            !change(&after, &after) && !change(&after, &before),
            "a pod that is there can be changed otherwise"
        );
        let deleting = with(
            after.clone(),
            "/metadata/deletionTimestamp",
            json!("2024-01-01T00:00:00Z"),
        );
        assert!(!change(&before, &deleting));
    }
}

#[test]
fn an_ephemeral_container_that_would_see_every_gpu_is_refused() {
    let debug = |value: &str| json!([setting(json!({"name": "debug"}), value)]);
    let with_debug = |value: &str| with(pod(&json!({})), "/spec/ephemeralContainers", debug(value));
    let add = |old: &Value, new: &Value| {
        validated(
            &Rules::default(),
            &review("UPDATE", "pods", "ephemeralcontainers", new, old),
        )
    };
    assert!(refusal(add(&pod(&json!({})), &with_debug("all"))).starts_with("container \"debug\" sets"));
    assert_eq!(add(&pod(&json!({})), &with_debug("void")), Verdict::ALLOWED);
    assert_eq!(
        add(&with_debug("all"), &with_debug("all")),
        Verdict::ALLOWED,
        "it was there before"
    );
}

/// kubelet runs a static pod, whatever the API server answers about its mirror pod.
#[test]
fn static_pods_are_left_alone() {
    let pod = with(pod(&json!({})), "/spec/containers/0/env", visible("all"));
    assert_eq!(
        judged(&annotated(pod, "kubernetes.io/config.mirror", "x")),
        Verdict::ALLOWED
    );
}
