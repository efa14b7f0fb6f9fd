//! The write verbs: the rules by which a request changes an object.
//!
//! Everything here runs synchronously: under the lock of the state where it gets the state.

use std::sync::Arc;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Event, Node, Pod};
use serde::Deserialize;
use serde_json::Value;

use super::admission::ParamInformers;
use super::resource::{Registry, Resource};
use super::status::ApiError;
use super::store::{Key, ObjectVersion, Store};
use super::{object, pod};

pub(crate) mod binding;
pub(crate) mod create;
pub(crate) mod delete;
pub(crate) mod patch;
pub(crate) mod update;

/// The state of the server: its objects, and the resources that it serves.
#[derive(Debug)]
pub(crate) struct ApiState {
    pub(crate) store: Store,
    pub(crate) registry: Registry,
    pub(crate) params: ParamInformers,
}

/// The object (or, with an empty name, the collection) that a request is about.
#[derive(Debug, Clone)]
pub(crate) struct RequestTarget {
    pub(crate) resource: Arc<Resource>,
    /// Empty for cluster-scoped resources, and for a collection in all namespaces.
    pub(crate) namespace: String,
    pub(crate) name: String,
    /// Empty for the object itself.
    pub(crate) subresource: String,
}

impl RequestTarget {
    pub(crate) fn key(&self) -> Key {
        Key::new(self.namespace.clone(), self.name.clone())
    }

    pub(crate) fn not_found(&self) -> ApiError {
        ApiError::not_found(&self.resource.qualified(), &self.name)
    }
}

impl ApiState {
    /// The stored version of a target, if there is one.
    pub(crate) fn find(&self, target: &RequestTarget) -> Option<Arc<ObjectVersion>> {
        self.store.get(&target.resource.storage, &target.key()).cloned()
    }

    /// The stored version of a target.
    pub(crate) fn current(&self, target: &RequestTarget) -> Result<Arc<ObjectVersion>, ApiError> {
        self.find(target).ok_or_else(|| target.not_found())
    }

    /// Stores an object. A dry run only returns the version that would have been stored.
    fn store_unless_dry_run(
        &mut self,
        target: &RequestTarget,
        value: Value,
        dry_run: bool,
    ) -> Arc<ObjectVersion> {
        if dry_run {
            return self.unstored(value);
        }
        self.store.put(&target.resource.storage, target.key(), value)
    }

    /// The version that answers a request which stores nothing.
    fn unstored(&self, value: Value) -> Arc<ObjectVersion> {
        Arc::new(ObjectVersion {
            rv: self.store.revision(),
            bytes: value.to_string().into(),
            value: Arc::new(value),
        })
    }
}

/// Checks that a body is an object of the target's kind and name, and drops its nulls. Built-in kinds may leave `kind` and
/// `apiVersion` out, as typed decoding knows what to expect.
pub(crate) fn check_body(target: &RequestTarget, body: &mut Value) -> Result<(), ApiError> {
    if !body.is_object() {
        return Err(ApiError::bad_request("the request body must be a JSON object"));
    }
    let (expected, wanted) = (target.resource.api_version(), &target.resource.kind);
    if !target.resource.custom {
        let map = object::make_object(body);
        object::default(map, "apiVersion", expected.clone());
        object::default(map, "kind", wanted.clone());
    }
    let (kind, version) = (object::text(body, "/kind"), object::text(body, "/apiVersion"));
    if kind.is_empty() {
        return Err(ApiError::bad_request(
            "Object 'Kind' is missing in the request body",
        ));
    }
    if version != expected || kind != wanted {
        return Err(ApiError::bad_request(format!(
            "the API version in the data ({version}, Kind={kind}) does not match the expected API version \
             ({expected}, Kind={wanted})"
        )));
    }
    if object::is_set(body, "/metadata") && object::object(body, "/metadata").is_none() {
        return Err(ApiError::bad_request("metadata must be a JSON object"));
    }
    check_string_maps(body)?;
    object::strip_nulls(body);
    let (named, name) = (object::text(body, "/metadata/name"), &target.name);
    if !name.is_empty() && !named.is_empty() && named != name {
        return Err(ApiError::bad_request(format!(
            "the name of the object ({named}) does not match the name on the URL ({name})"
        )));
    }
    Ok(())
}

/// Checks that labels and annotations have strings as values, and that finalizers are strings.
fn check_string_maps(body: &Value) -> Result<(), ApiError> {
    for field in ["labels", "annotations"] {
        let pointer = format!("/metadata/{field}");
        let has_strings =
            object::object(body, &pointer).is_some_and(|map| map.values().all(Value::is_string));
        if object::is_set(body, &pointer) && !has_strings {
            let why = format!("metadata.{field} must be a map of strings to strings");
            return Err(ApiError::bad_request(why));
        }
    }
    let finalizers = body.pointer("/metadata/finalizers").unwrap_or(&Value::Null);
    match finalizers {
        Value::Null => Ok(()),
        Value::Array(items) if items.iter().all(Value::is_string) => Ok(()),
        _ => Err(ApiError::bad_request(
            "metadata.finalizers must be a list of strings",
        )),
    }
}

/// The text of a precondition that is not met; an empty one asks for nothing.
fn unmet_precondition(field: &str, asked: &str, found: &str) -> Option<String> {
    let is_unmet = !asked.is_empty() && asked != found;
    is_unmet.then(|| {
        format!("Precondition failed: {field} in precondition: {asked}, {field} in object meta: {found}")
    })
}

/// Converts amounts to the form in which they are stored, and refuses an object that does not decode as its kind.
fn settle_types(resource: &Resource, body: &mut Value) -> Result<(), ApiError> {
    if resource.is_pod() {
        pod::normalize_pod(body);
    } else if resource.is("", "nodes") {
        pod::normalize_node(body);
    }
    // Four kinds are decoded with the types of k8s-openapi, so that a malformed object is refused here as by kube-apiserver.
    // Other kinds are taken as they are.
    let failure = match (resource.group.as_str(), resource.plural.as_str()) {
        ("", "pods") => decode_error::<Pod>(body).or_else(|| bad_quantity(body)),
        ("", "nodes") => decode_error::<Node>(body),
        ("", "events") => decode_error::<Event>(body),
        ("coordination.k8s.io", "leases") => decode_error::<Lease>(body),
        _ => None,
    };
    let Some(why) = failure else { return Ok(()) };
    let (kind, version) = (&resource.kind, &resource.version);
    Err(ApiError::bad_request(format!(
        "{kind} in version \"{version}\" cannot be handled as a {kind}: {why}"
    )))
}

/// The error of decoding a body as this type; `None` if it decodes.
fn decode_error<'a, T: Deserialize<'a>>(body: &'a Value) -> Option<String> {
    T::deserialize(body).err().map(|error| error.to_string())
}

/// The error text of the first amount of a pod that does not parse.
fn bad_quantity(pod: &Value) -> Option<String> {
    let text = pod::first_unparsable(pod)?;
    Some(format!(
        "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$': {text}"
    ))
}
