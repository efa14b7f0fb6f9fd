//! Decisions of the webhooks on pods and bindings.

mod bindings;
mod filter;
mod mutate;
mod properties;
mod uncounted;
mod validate;

use std::time::Duration;

use placement::Policies;
use proto::admission::AdmissionRequest;
use proto::resource::ResourceNames;
use serde_json::{Value, json};

use super::{Refusal, Rules, Verdict};
use crate::index::{Index, Shared};

/// A cluster of which no watch has shown anything yet, so that requests alone decide.
fn unseen() -> Shared<Index> {
    Shared::new(Index::new(
        ResourceNames::default(),
        Policies::default(),
        Duration::ZERO,
    ))
}

fn request(
    operation: &str,
    resource: &str,
    subresource: &str,
    object: &Value,
    old: &Value,
) -> AdmissionRequest {
    let review = json!({
        "uid": "u", "operation": operation, "resource": {"group": "", "version": "v1", "resource": resource},
        "subResource": subresource, "namespace": "default", "name": "p", "userInfo": {"username": "somebody"},
        "object": object, "oldObject": old, "dryRun": false, "options": {"kind": "CreateOptions"}});
    serde_json::from_value(review).unwrap()
}

fn creation(pod: &Value) -> AdmissionRequest {
    request("CREATE", "pods", "", pod, &Value::Null)
}

/// A pod with one app container, which has these limits and the same requests.
fn pod(amounts: &Value) -> Value {
    json!({"metadata": {"name": "p"}, "spec": {"schedulerName": "default-scheduler", "containers": [container("c", amounts)]}})
}

fn container(name: &str, amounts: &Value) -> Value {
    json!({"name": name, "image": "i", "resources": {"limits": amounts, "requests": amounts}})
}

/// The object with this value at a JSON pointer.
fn with(mut object: Value, pointer: &str, value: Value) -> Value {
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    object.pointer_mut(parent).unwrap()[key] = value;
    object
}

fn annotated(pod: Value, key: &str, value: &str) -> Value {
    with(pod, "/metadata/annotations", json!({key: value}))
}

/// The pod as the mutating webhook leaves it, by another library's application of the patch.
fn mutated(rules: &Rules, pod: &Value) -> Value {
    let Verdict::Allowed { patch, .. } = rules.mutate(&creation(pod)).unwrap() else {
        panic!("refused: {pod}")
    };
    let patch: json_patch::Patch = serde_json::from_value(serde_json::to_value(patch).unwrap()).unwrap();
    let mut mutated = pod.clone();
    json_patch::patch(&mut mutated, &patch).unwrap();
    mutated
}

fn refusal(verdict: Verdict) -> String {
    match verdict {
        Verdict::Refused(Refusal::Invalid(message) | Refusal::Forbidden(message)) => message,
        Verdict::Allowed { .. } => panic!("allowed"),
    }
}

/// The verdict of the validating webhook, in a cluster of which nothing is known.
fn validated(rules: &Rules, request: &AdmissionRequest) -> Verdict {
    rules.validate(request, &unseen()).unwrap()
}
