//! Without webhooks the filter refuses the same pods, in the same words.

use std::iter;
use std::time::Instant;

use proptest::prelude::*;
use rstest::rstest;
use serde_json::{Value, json};

use super::properties::{NAMES, pod as any_pod};
use super::{annotated, container, creation, pod, unseen, with};
use crate::admission::{Refusal, Rules, Verdict};
use crate::extender::{Extender, filter};
use crate::offline;

/// Strict rules, with two unrestricted namespaces.
fn rules() -> Rules {
    let unrestricted_namespaces = vec!["kube-system".to_owned(), "monitoring".to_owned()];
    Rules {
        deny_overrides: true,
        unrestricted_namespaces,
        ..Rules::default()
    }
}

/// An extender that knows no node, with the runtime of its client, which is never used.
struct World(
    Extender,
    #[expect(dead_code, reason = "the client needs it")] tokio::runtime::Runtime,
);

fn world(rules: &Rules) -> World {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let entered = runtime.enter();
    let index = offline::index(iter::empty(), iter::empty(), iter::empty());
    let index = index.allowing_all_devices(rules.allow_all_devices);
    let mut extender = offline::extender(index);
    extender.rules = rules.clone();
    drop(entered);
    World(extender, runtime)
}

/// The rule by which a filter finds no node for a pod; other reasons are about nodes, of which there are none here.
fn filter_refusal(World(extender, _): &World, pod: &Value) -> Option<String> {
    let body = json!({"Pod": pod, "NodeNames": ["n"]}).to_string();
    let answer = filter::answer(extender, body.as_bytes(), Instant::now()).unwrap();
    let answer: Value = serde_json::from_slice(&answer.json).unwrap();
    answer["FailedAndUnresolvableNodes"]["n"]
        .as_str()
        .map(str::to_owned)
}

fn webhook_refusal(rules: &Rules, pod: &Value) -> Option<String> {
    match rules.validate(&creation(pod), &unseen()).unwrap() {
        Verdict::Refused(Refusal::Invalid(message) | Refusal::Forbidden(message)) => Some(message),
        Verdict::Allowed { .. } => None,
    }
}

const SHARE: &str = r#"{"koordinator.sh/gpu.shared": "1", "koordinator.sh/gpu-memory": "1Gi"}"#;

fn share() -> Value {
    pod(&serde_json::from_str(SHARE).unwrap())
}

/// A pod that shares a GPU, with a second container that requests nothing and has these fields.
fn beside(fields: &Value) -> Value {
    let mut pod = share();
    let mut container = container("beside", &json!({}));
    container
        .as_object_mut()
        .unwrap()
        .extend(fields.as_object().unwrap().clone());
    pod["spec"]["containers"].as_array_mut().unwrap().push(container);
    pod
}

#[rstest]
#[case::vendor_and_shares(pod(&json!({"nvidia.com/gpu": "1", "koordinator.sh/gpu.shared": "1", "koordinator.sh/gpu-memory": "1Gi"})), "the pod asks for both")]
#[case::memory_and_ratio(pod(&json!({"koordinator.sh/gpu.shared": "1", "koordinator.sh/gpu-memory": "1Gi", "koordinator.sh/gpu-memory-ratio": "5"})), "exclude each other")]
#[case::core_alone(pod(&json!({"koordinator.sh/gpu.shared": "1", "koordinator.sh/gpu-core": "50"})), "needs koordinator.sh/gpu-memory")]
#[case::memory_alone(pod(&json!({"koordinator.sh/gpu-memory": "1Gi"})), "but not for koordinator.sh/gpu.shared")]
#[case::indivisible(pod(&json!({"koordinator.sh/gpu.shared": "2", "koordinator.sh/gpu-memory-ratio": "75"})), "does not divide evenly")]
#[case::uneven_rdma(pod(&json!({"koordinator.sh/rdma": "150"})), "must be a multiple of 100")]
#[case::old_name_beside_a_new_one(pod(&json!({"koordinator.sh/gpu.shared": "1", "kubernetes.io/gpu-memory": "1Gi"})), "an old name of")]
#[case::mark(annotated(share(), "gpushare/all-devices", "yes"), "neither true nor false")]
#[case::hint(
    annotated(share(), "scheduling.koordinator.sh/device-allocate-hint", r#"{"gpu": 1}"#),
    "annotation scheduling.koordinator.sh/device-allocate-hint is"
)]
#[case::joint(
    annotated(share(), "scheduling.koordinator.sh/device-joint-allocate", "[]"),
    "not a JSON object"
)]
#[case::joint_of_rdma(annotated(pod(&json!({"koordinator.sh/rdma": "1"})), "scheduling.koordinator.sh/device-joint-allocate", "no"), "expected ident")]
#[case::partition(
    annotated(
        share(),
        "scheduling.koordinator.sh/gpu-partition-spec",
        r#"{"ringBusBandwidth": "fast"}"#
    ),
    "is not a quantity"
)]
#[case::all_devices(annotated(pod(&json!({"koordinator.sh/gpu.shared": "1"})), "gpushare/all-devices", "true"), "not allowed in this cluster")]
#[case::whole_gpu_and_more(
    with(pod(&json!({"nvidia.com/gpu": "1"})), "/spec/containers/0/env", json!([{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}])),
    "wins over the GPUs that it is given for nvidia.com/gpu"
)]
#[case::cdi(
    annotated(share(), "nvidia.cdi.k8s.io/pod", "nvidia.com/gpu=all"),
    "annotation nvidia.cdi.k8s.io/pod is"
)]
#[case::visible(beside(&json!({"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]})), "sets NVIDIA_VISIBLE_DEVICES")]
#[case::mps(beside(&json!({"env": [{"name": "CUDA_MPS_PIPE_DIRECTORY", "value": "/x"}]})), "sets CUDA_MPS_PIPE_DIRECTORY")]
#[case::privileged(beside(&json!({"securityContext": {"privileged": true}})), "is privileged")]
fn both_refuse(#[case] pod: Value, #[case] words: &str) {
    let refusal = webhook_refusal(&rules(), &pod).unwrap();
    assert!(refusal.contains(words), "{refusal}");
    assert_eq!(filter_refusal(&world(&rules()), &pod), Some(refusal));
}

#[rstest]
#[case::a_hint_that_is_read(annotated(
    share(),
    "scheduling.koordinator.sh/device-joint-allocate",
    r#"{"deviceTypes": ["gpu", "rdma"]}"#
))]
#[case::a_bad_hint_on_a_pod_without_devices(annotated(pod(&json!({"cpu": "1", "example.com/x": "1"})), "scheduling.koordinator.sh/gpu-partition-spec", "no"))]
#[case::whole_gpus_privileged(with(pod(&json!({"nvidia.com/gpu": "1"})), "/spec/containers/0/securityContext", json!({"privileged": true})))]
#[case::a_wish_of_a_group(annotated(share(), "gpushare/group-domain", "link"))]
#[case::nothing_to_be_seen(beside(&json!({"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]})))]
fn neither_refuses(#[case] pod: Value) {
    assert_eq!(webhook_refusal(&rules(), &pod), None);
    assert_eq!(filter_refusal(&world(&rules()), &pod), None);
}

/// A pod of a group whose wish cannot be read is placed as one without a wish, where no webhook refuses it.
#[rstest]
#[case::domain("gpushare/group-domain")]
#[case::policy("gpushare/group-domain-policy")]
fn the_webhook_alone_refuses_an_unknown_wish_of_a_group(#[case] key: &str) {
    let pod = annotated(share(), key, "perhaps");
    assert!(webhook_refusal(&rules(), &pod).is_some());
    assert_eq!(filter_refusal(&world(&rules()), &pod), None);
}

/// Webhook and filter admit pods that decide for themselves which devices they see only in the operator's namespaces.
#[rstest]
#[case::privileged(json!({"securityContext": {"privileged": true}}), false)]
#[case::sees_all(json!({"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}), true)]
fn some_namespaces_are_unrestricted(#[case] fields: Value, #[case] always: bool) {
    for (namespace, refused) in [
        ("default", true),
        ("kube-system", false),
        ("monitoring", false),
        ("gpushare-system", true),
    ] {
        let pod = with(beside(&fields), "/metadata/namespace", namespace.into());
        assert_eq!(
            filter_refusal(&world(&rules()), &pod).is_some(),
            refused,
            "{namespace}"
        );
        let review = proto::admission::AdmissionRequest {
            namespace: namespace.to_owned(),
            ..creation(&pod)
        };
        assert_eq!(
            rules().validate(&review, &unseen()).unwrap() != Verdict::ALLOWED,
            refused,
            "{namespace}"
        );
        assert_eq!(
            filter_refusal(&world(&Rules::default()), &pod).is_some(),
            always,
            "--deny-overrides is off"
        );
    }
}

fn annotations() -> impl Strategy<Value = Value> {
    prop::sample::select(vec![
        Value::Null,
        json!({"gpushare/all-devices": "true"}),
        json!({"gpushare/all-devices": "perhaps"}),
        json!({"scheduling.koordinator.sh/device-allocate-hint": "garbage"}),
        json!({"scheduling.koordinator.sh/gpu-partition-spec": "{}"}),
        json!({"cdi.k8s.io/gpu": "nvidia.com/gpu=0"}),
    ])
}

/// Returns true if kube-scheduler asks the extender about a pod, since one of its resources is managed.
fn is_asked_about(pod: &Value) -> bool {
    let lists = ["initContainers", "containers"]
        .iter()
        .flat_map(|list| pod["spec"][list].as_array().unwrap());
    let mut amounts = lists.flat_map(|container| {
        ["limits", "requests"].map(|amounts| container["resources"][amounts].as_object())
    });
    let others = ["cpu", "memory", "example.com/gpu"];
    let is_managed = |name: &String| !others.contains(&name.as_str());
    amounts.any(|amounts| amounts.is_some_and(|amounts| amounts.keys().any(is_managed)))
}

proptest! {
    #[test]
    fn the_filter_and_the_webhook_refuse_the_same_pods(pod in any_pod(&NAMES, annotations())) {
        let world = world(&rules());
        if is_asked_about(&pod) {
            prop_assert_eq!(filter_refusal(&world, &pod), webhook_refusal(&rules(), &pod));
        }
    }
}
