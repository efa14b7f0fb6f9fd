//! Who may bind pods that ask for our resources: only those who choose devices for them.
//!
//! Refuses what is known to be wrong. A pod that the index does not know, and whose binding names no devices, asks for
//! none or is younger than the watch; its node's plugin refuses it if nobody chose devices for it.

use std::collections::BTreeMap;

use proto::admission::{AdmissionRequest, Operation};
use proto::record::DEVICE_ALLOCATED;
use proto::request::Dialect;
use serde::Deserialize;

use super::{Refusal, Rules, Unreadable, Verdict, read};
use crate::accounting::{Ask, PodFacts};
use crate::index::{Index, Shared};

/// Knows which pods ask for our resources.
pub trait Bindings {
    /// Whether a pod does, or asks for whole devices in a vendor's name of a node whose devices are counted here; `false` also
    /// if nobody knows.
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

/// Whether a pod asks for whole devices in a vendor's name: others may bind it to nodes of which only the vendor's plugin knows.
fn asks_vendor(facts: &PodFacts) -> bool {
    match &facts.ask {
        Ask::Request(request) => request
            .gpus
            .as_ref()
            .is_some_and(|gpus| gpus.dialect == Dialect::Vendor),
        Ask::Invalid(..) => false,
    }
}

#[derive(Debug, Default, Deserialize)]
struct Binding {
    #[serde(default)]
    metadata: Metadata,
    #[serde(default)]
    target: Target,
}

#[derive(Debug, Default, Deserialize)]
struct Target {
    #[serde(default)]
    name: String,
}

#[derive(Debug, Default, Deserialize)]
struct Metadata {
    #[serde(default)]
    name: String,
    #[serde(default)]
    namespace: String,
    #[serde(default)]
    annotations: Option<BTreeMap<String, String>>,
}

/// What becomes of a binding.
pub(super) fn verdict(
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
    let binding: Binding = read(request, "object", "Binding", request.object.as_ref())?;
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
