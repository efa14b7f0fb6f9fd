//! Admission of bindings: a pod that requests device resources is bound only by a user that chooses its devices.
//!
//! Allows what is not known to be wrong. A pod that the index does not know, and whose binding names no devices, requests none or
//! is newer than the watch. The device plugin of its node refuses it if no devices were chosen.

use std::collections::BTreeMap;

use proto::admission::{AdmissionRequest, Operation};
use proto::record::DEVICE_ALLOCATED;
use proto::request::Dialect;
use serde::Deserialize;

use super::{Refusal, Rules, Unreadable, Verdict, read};
use crate::accounting::{ParsedRequest, PodFacts};
use crate::index::{Index, Shared};

/// Knowledge of the pods that request device resources.
pub trait Bindings {
    /// Returns true if the pod requests device resources that this scheduler counts on the node; false for an unknown pod.
    fn asks(&self, namespace: &str, name: &str, node: &str) -> bool;
}

impl Bindings for Shared<Index> {
    fn asks(&self, namespace: &str, name: &str, node: &str) -> bool {
        let index = self.read();
        let is_counted = index.fleet().node_id(node).is_some();
        let mut pods = index.pods_named(namespace, name);
        pods.any(|(_, facts)| index.concerns(facts) && (is_counted || !asks_vendor(facts)))
    }
}

/// Returns true if the pod requests whole GPUs by a vendor's resource: other schedulers may bind it to nodes that only the vendor's
/// plugin serves.
fn asks_vendor(facts: &PodFacts) -> bool {
    match &facts.request {
        ParsedRequest::Valid(request) => request
            .gpus
            .as_ref()
            .is_some_and(|gpus| gpus.dialect == Dialect::Vendor),
        ParsedRequest::Invalid(..) => false,
    }
}

#[derive(Debug, Default, Deserialize)]
struct BindingObject {
    #[serde(default)]
    metadata: BindingMetadata,
    #[serde(default)]
    target: Target,
}

#[derive(Debug, Default, Deserialize)]
struct Target {
    #[serde(default)]
    name: String,
}

#[derive(Debug, Default, Deserialize)]
struct BindingMetadata {
    #[serde(default)]
    name: String,
    #[serde(default)]
    namespace: String,
    #[serde(default)]
    annotations: Option<BTreeMap<String, String>>,
}

pub(super) fn review(
    rules: &Rules,
    request: &AdmissionRequest,
    bindings: &impl Bindings,
) -> Result<Verdict, Unreadable> {
    let Some(binders) = rules
        .binders
        .as_ref()
        .filter(|_| request.operation == Operation::Create)
    else {
        return Ok(Verdict::ALLOWED);
    };
    let user = &request.user_info.username;
    if binders.contains(user) {
        return Ok(Verdict::ALLOWED);
    }
    let binding: BindingObject = read(request, "object", "Binding", request.object.as_ref())?;
    let meta = &binding.metadata;
    let first = |one: &str, other: &str| {
        if one.is_empty() {
            other.to_owned()
        } else {
            one.to_owned()
        }
    };
    let (namespace, name) = (
        first(&request.namespace, &meta.namespace),
        first(&request.name, &meta.name),
    );
    let brings_devices = meta
        .annotations
        .as_ref()
        .is_some_and(|annotations| annotations.contains_key(DEVICE_ALLOCATED));
    if !brings_devices && !bindings.asks(&namespace, &name, &binding.target.name) {
        return Ok(Verdict::ALLOWED);
    }
    let message = format!(
        "pod {namespace}/{name} asks for devices, which {user:?} does not choose; only {} may bind it",
        binders.join(" or ")
    );
    Ok(Verdict::Refused(Refusal::Forbidden(message)))
}
