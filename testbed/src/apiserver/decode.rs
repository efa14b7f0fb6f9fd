//! Checks that an untyped object decodes as the built-in type it claims to be.
//!
//! Only kinds whose writers this testbed exists for are held to their types; the others are stored as they come.

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Event, Node, Pod};
use serde::Deserialize;
use serde_json::Value;

use super::object;
use super::pod::resources;
use super::resource::Resource;
use super::status::ApiError;

/// Refuses an object that does not decode.
pub(crate) fn check(resource: &Resource, body: &Value) -> Result<(), ApiError> {
    let failure = match (resource.group.as_str(), resource.plural.as_str()) {
        ("", "pods") => failure::<Pod>(body).or_else(|| bad_quantity(body)),
        ("", "nodes") => failure::<Node>(body),
        ("", "configmaps") => failure::<ConfigMap>(body),
        ("" | "events.k8s.io", "events") => failure::<Event>(body),
        ("coordination.k8s.io", "leases") => failure::<Lease>(body),
        _ => None,
    };
    let Some(why) = failure else { return Ok(()) };
    let (kind, version) = (&resource.kind, &resource.version);
    Err(ApiError::bad_request(format!(
        "{kind} in version \"{version}\" cannot be handled as a {kind}: {why}"
    )))
}

fn failure<'a, T: Deserialize<'a>>(body: &'a Value) -> Option<String> {
    T::deserialize(body).err().map(|error| error.to_string())
}

fn bad_quantity(pod: &Value) -> Option<String> {
    let mut containers = ["/spec/containers", "/spec/initContainers"]
        .into_iter()
        .flat_map(|p| object::array(pod, p));
    let text = containers.find_map(resources::unparsable)?;
    Some(format!(
        "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$': {text}"
    ))
}
