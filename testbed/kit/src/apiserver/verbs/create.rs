//! Creation: names, system fields, defaults and validation of a new object.

use std::sync::Arc;

use chrono::Utc;
use serde_json::{Value, json};

use super::{ApiState, RequestTarget, check_body, settle_types};
use crate::apiserver::resource::{CRD_GROUP, CRD_PLURAL, NAMESPACES, Resource, established};
use crate::apiserver::status::{ApiError, InvalidField};
use crate::apiserver::store::{Key, ObjectVersion};
use crate::apiserver::{name, object, pod};

/// Creates the object in `body`. The target's name may be empty: the body then names the object.
pub(crate) fn create(
    state: &mut ApiState,
    target: &RequestTarget,
    body: Value,
) -> Result<Arc<ObjectVersion>, ApiError> {
    let (target, draft) = draft_new(state, target, body)?;
    check_new(&target, &draft)?;
    store_new(state, &target, draft, false)
}

/// The new object with its name, system fields and defaults, not validated.
pub(crate) fn draft_new(
    state: &ApiState,
    target: &RequestTarget,
    mut body: Value,
) -> Result<(RequestTarget, Value), ApiError> {
    check_body(target, &mut body)?;
    let target = set_name_and_namespace(target, &mut body)?;
    check_namespace(state, &target)?;
    let resource = &target.resource;
    set_system_fields(resource, &mut body);
    settle_types(resource, &mut body)?;
    set_defaults(resource, &mut body);
    Ok((target, body))
}

/// Stores an object that has been checked, unless its name is taken.
pub(crate) fn store_new(
    state: &mut ApiState,
    target: &RequestTarget,
    body: Value,
    dry_run: bool,
) -> Result<Arc<ObjectVersion>, ApiError> {
    let resource = &target.resource;
    if state.find(target).is_some() {
        return Err(ApiError::already_exists(&resource.qualified(), &target.name));
    }
    if resource.is(CRD_GROUP, CRD_PLURAL) && !dry_run {
        state.registry.define(&body);
    }
    Ok(state.store_unless_dry_run(target, body, dry_run))
}

/// Refuses a new object whose namespace does not exist or is being deleted.
fn check_namespace(state: &ApiState, target: &RequestTarget) -> Result<(), ApiError> {
    if !target.resource.namespaced {
        return Ok(());
    }
    let key = Key::new("", target.namespace.clone());
    let Some(namespace) = state.store.get(NAMESPACES, &key) else {
        return Err(ApiError::not_found("namespaces", &target.namespace));
    };
    if object::is_deleting(&namespace.value) {
        let why = format!(
            "unable to create new content in namespace {} because it is being terminated",
            target.namespace
        );
        return Err(ApiError::forbidden(
            &target.resource.qualified(),
            &target.name,
            &why,
        ));
    }
    Ok(())
}

/// Refuses a new object that breaks a rule.
pub(crate) fn check_new(target: &RequestTarget, draft: &Value) -> Result<(), ApiError> {
    let mut errors = name::check_metadata(draft);
    if target.resource.is_pod() {
        errors.extend(pod::validate(draft));
    }
    refuse(&target.resource, &target.name, &errors)
}

/// Refuses an object with rejected fields.
pub(super) fn refuse(resource: &Resource, name: &str, errors: &[InvalidField]) -> Result<(), ApiError> {
    if errors.is_empty() {
        Ok(())
    } else {
        Err(ApiError::invalid(&resource.kind, &resource.group, name, errors))
    }
}

/// Sets the namespace and name of a new object; returns the target with the name.
fn set_name_and_namespace(target: &RequestTarget, body: &mut Value) -> Result<RequestTarget, ApiError> {
    let mut target = target.clone();
    let text = |pointer: &str| object::text(body, pointer).to_owned();
    let (body_namespace, body_name) = (text("/metadata/namespace"), text("/metadata/name"));
    let prefix = text("/metadata/generateName");
    let meta = object::meta(body);
    if target.resource.namespaced {
        if !body_namespace.is_empty() && body_namespace != target.namespace {
            return Err(ApiError::bad_request(
                "the namespace of the provided object does not match the namespace sent on the request",
            ));
        }
        meta.insert("namespace".to_owned(), Value::from(target.namespace.clone()));
    } else {
        meta.remove("namespace");
    }
    if target.name.is_empty() {
        target.name = if body_name.is_empty() && !prefix.is_empty() {
            name::generated(&prefix)
        } else {
            body_name
        };
    }
    meta.insert("name".to_owned(), Value::from(target.name.clone()));
    if target.name.is_empty() {
        let missing = InvalidField::required("metadata.name", "name or generateName is required");
        refuse(&target.resource, "", &[missing])?;
    }
    let illegal = name::check_name(&target.resource, &target.name);
    refuse(&target.resource, &target.name, illegal.as_slice())?;
    Ok(target)
}

/// Sets the metadata that the server alone decides: UID, creation time and generation.
fn set_system_fields(resource: &Resource, body: &mut Value) {
    let meta = object::meta(body);
    for field in [
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "selfLink",
        "generation",
        "resourceVersion",
    ] {
        meta.remove(field);
    }
    // FillObjectMetaSystemFields: a client that sends these fields does not choose them.
    meta.insert("uid".to_owned(), Value::from(name::uid()));
    meta.insert("creationTimestamp".to_owned(), object::timestamp(Utc::now()));
    if resource.counts_generations() {
        meta.insert("generation".to_owned(), Value::from(1));
    }
}

/// Sets the defaults of each kind, and drops the fields that its create strategy drops.
fn set_defaults(resource: &Resource, body: &mut Value) {
    if resource.is_pod() {
        pod::default_new(body);
    } else if resource.is("", "namespaces") {
        object::child(body, "spec").insert("finalizers".to_owned(), json!(["kubernetes"]));
        object::make_object(body).insert("status".to_owned(), json!({"phase": "Active"}));
        let own = object::text(body, "/metadata/name").to_owned();
        let labels = object::make_object(object::meta(body).entry("labels").or_insert(Value::Null));
        labels.insert("kubernetes.io/metadata.name".to_owned(), Value::from(own));
    } else if resource.is(CRD_GROUP, CRD_PLURAL) {
        let status = established(body);
        object::make_object(body).insert("status".to_owned(), status);
    } else if resource.is("", "secrets") {
        object::default(object::make_object(body), "type", "Opaque");
    } else if resource.status && !resource.is("", "nodes") {
        // A kubelet registers its node together with the node's status.
        object::make_object(body).remove("status");
    }
}
