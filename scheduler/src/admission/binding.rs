//! Admission of bindings: a pod that requests device resources is bound only by a user that chooses its devices.
//!
//! A binding without devices of a pod that the index does not know is allowed: the pod requests no devices, or is newer than the
//! watch. If it does request devices, the device plugin of its node refuses to start it, since none were chosen.

use std::collections::BTreeMap;

use proto::admission::{AdmissionRequest, Operation};
use proto::record::DEVICE_ALLOCATED;
use proto::request::Dialect;
use serde::Deserialize;

use super::{Refusal, Rules, Unreadable, Verdict, read};
use crate::accounting::{ParsedRequest, PodFacts};
use crate::index::{Index, Shared};

/// Returns true if the pod of this name requests device resources that this scheduler counts on the node; false for an unknown
/// pod.
pub(super) fn requests_devices(cluster: &Shared<Index>, namespace: &str, name: &str, node: &str) -> bool {
    let index = cluster.read();
    let counts_node = index.fleet().node_id(node).is_some();
    // More than one for a moment, if a deleted pod was replaced by one of the same name.
    let mut pods = index.pods_named(namespace, name);
    // On a node that this scheduler does not count, whole GPUs by a vendor's resource are for other schedulers to bind.
    pods.any(|(_, facts)| index.requests_devices(facts) && (counts_node || !requests_vendor_gpus(facts)))
}

/// Returns true if the pod requests whole GPUs by a vendor's resource, such as `nvidia.com/gpu`.
fn requests_vendor_gpus(facts: &PodFacts) -> bool {
    match &facts.request {
        ParsedRequest::Valid(request) => request.gpus.is_some_and(|gpus| gpus.dialect == Dialect::Vendor),
        ParsedRequest::Invalid(..) => false,
    }
}

/// The fields of a `Binding` that the rules need, and no others: a binding that cannot be read is not refused (`failurePolicy` is
/// `Ignore`), and its user may fill the rest with values that `k8s_openapi` does not read, such as a time in the year 10000.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct BindingObject {
    metadata: BindingMetadata,
    target: Target,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Target {
    name: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct BindingMetadata {
    name: String,
    namespace: String,
    annotations: Option<BTreeMap<String, String>>,
}

/// Decides about the creation of a binding.
pub(super) fn review(
    rules: &Rules,
    request: &AdmissionRequest,
    cluster: &Shared<Index>,
) -> Result<Verdict, Unreadable> {
    // Without configured binders, RBAC alone decides who may bind.
    let (Some(binders), Operation::Create) = (&rules.binders, request.operation) else {
        return Ok(Verdict::ALLOWED);
    };
    let user = &request.user_info.username;
    if binders.contains(user) {
        return Ok(Verdict::ALLOWED);
    }
    let BindingObject { metadata, target } = read(request)?;
    // A POST to /namespaces/NS/bindings names the pod only in the Binding object, one to /namespaces/NS/pods/NAME/binding in its
    // URL.
    let namespace = if request.namespace.is_empty() {
        &metadata.namespace
    } else {
        &request.namespace
    };
    let name = if request.name.is_empty() {
        &metadata.name
    } else {
        &request.name
    };
    // The API server writes the annotations of a binding into the pod.
    let annotations = metadata.annotations.unwrap_or_default();
    let brings_devices = annotations.contains_key(DEVICE_ALLOCATED);
    if !brings_devices && !requests_devices(cluster, namespace, name, &target.name) {
        return Ok(Verdict::ALLOWED);
    }
    let message = format!(
        "pod {namespace}/{name} asks for devices, which {user:?} does not choose; only {} may bind it",
        binders.join(" or ")
    );
    Ok(Verdict::Refused(Refusal::Forbidden(message)))
}
