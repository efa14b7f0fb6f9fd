//! Reviews of bindings.

use rstest::rstest;
use serde_json::{Value, json};

use super::{refusal, request};
use crate::admission::binding::requests_devices;
use crate::admission::{Rules, Verdict};
use crate::index::{Index, Shared};
use crate::offline;

/// An index with pods default/p, which requests units, and default/q, which requests nothing.
fn cluster() -> Shared<Index> {
    let pods = [("p", json!({"aliyun.com/gpu-mem": "1"})), ("q", json!({}))];
    indexed(pods.into_iter().map(|(name, amounts)| pod(name, &amounts)))
}

/// An index with these pods and one node with a GPU.
fn indexed(pods: impl Iterator<Item = Value>) -> Shared<Index> {
    let device = json!({"metadata": {"name": "counted"}, "spec": {"devices": [{
        "type": "gpu", "id": "GPU-0", "minor": 0, "health": true, "resources": {"koordinator.sh/gpu-memory": "16Gi"}}]}});
    let node = json!({"metadata": {"name": "counted"}});
    Shared::new(offline::index([node].into_iter(), [device].into_iter(), pods))
}

fn pod(name: &str, amounts: &Value) -> Value {
    json!({
        "metadata": {"name": name, "namespace": "default", "uid": name},
        "spec": {"containers": [{"name": "c", "resources": {"limits": amounts}}]}})
}

/// Rules by which only the user `ours` may bind pods with devices.
fn rules() -> Rules {
    Rules {
        binders: Some(vec!["ours".to_owned()]),
        ..Rules::default()
    }
}

/// The request of a user to bind a pod of this name, with annotations for the pod.
fn binding(user: &str, name: &str, annotations: &Value) -> proto::admission::AdmissionRequest {
    // A client may write such a time, which the API server passes on as it is, and which jiff does not read.
    let time = "10000-01-01T00:00:00Z";
    let metadata = json!({"name": name, "annotations": annotations, "creationTimestamp": time});
    let object = json!({"metadata": metadata, "target": {"kind": "Node", "name": "n1"}});
    let mut request = request("CREATE", "pods", "binding", &object, &Value::Null);
    user.clone_into(&mut request.user_info.username);
    name.clone_into(&mut request.name);
    request
}

#[rstest]
#[case::ours("ours", "p", Value::Null)]
#[case::ours_with_devices("ours", "p", json!({"scheduling.koordinator.sh/device-allocated": "{}"}))]
#[case::pod_without_devices("other", "q", Value::Null)]
#[case::other_annotations("other", "q", json!({"a": "b"}))]
fn the_own_scheduler_and_pods_without_devices_may_be_bound(
    #[case] user: &str,
    #[case] pod: &str,
    #[case] annotations: Value,
) {
    assert_eq!(
        rules()
            .validate(&binding(user, pod, &annotations), &cluster())
            .unwrap(),
        Verdict::ALLOWED
    );
}

#[rstest]
#[case::pod_with_devices("p", Value::Null)]
#[case::brings_devices_itself("q", json!({"scheduling.koordinator.sh/device-allocated": "{}"}))]
fn another_user_may_not_bind_a_pod_with_devices(#[case] pod: &str, #[case] annotations: Value) {
    let message = refusal(
        rules()
            .validate(&binding("other", pod, &annotations), &cluster())
            .unwrap(),
    );
    assert_eq!(
        message,
        format!("pod default/{pod} asks for devices, which \"other\" does not choose; only ours may bind it")
    );
    let mut legacy = binding("other", pod, &annotations);
    legacy.resource.resource = "bindings".to_owned();
    legacy.sub_resource.clear();
    legacy.name.clear();
    assert_eq!(
        refusal(rules().validate(&legacy, &cluster()).unwrap()),
        message,
        "by the other way to bind"
    );
    let off = Rules::default()
        .validate(&binding("other", pod, &annotations), &cluster())
        .unwrap();
    assert_eq!(off, Verdict::ALLOWED, "the guard is off");
}

#[rstest]
#[case::units(json!({"aliyun.com/gpu-mem": "1"}), true, true)]
#[case::shares(json!({"koordinator.sh/gpu.shared": "1", "koordinator.sh/gpu-memory": "1Gi"}), true, true)]
#[case::broken(json!({"koordinator.sh/gpu-memory": "1Gi"}), true, true)]
#[case::vendor(json!({"nvidia.com/gpu": "1"}), true, false)]
#[case::nothing(json!({"cpu": "1", "example.com/thing": "1"}), false, false)]
fn the_index_recognises_pods_that_request_devices(
    #[case] amounts: Value,
    #[case] where_counted: bool,
    #[case] elsewhere: bool,
) {
    let index = indexed([pod("p", &amounts)].into_iter());
    let requests = |namespace, name, node| requests_devices(&index, namespace, name, node);
    assert_eq!(
        (
            requests("default", "p", "counted"),
            requests("default", "p", "elsewhere")
        ),
        (where_counted, elsewhere)
    );
    assert!(!requests("default", "q", "counted") && !requests("other", "p", "counted"));
}
