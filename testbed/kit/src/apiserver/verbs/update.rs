//! Update of an object: preconditions, separation of status, immutable fields, generations, finalizers.

use std::sync::Arc;

use serde_json::Value;

use super::create::refuse;
use super::delete::remove_object;
use super::{ApiState, RequestTarget, check_body, settle_types, unmet_precondition};
use crate::apiserver::patch::apply::SERVER_METADATA;
use crate::apiserver::resource::{CRD_GROUP, CRD_PLURAL, Resource};
use crate::apiserver::status::{ApiError, InvalidField};
use crate::apiserver::store::ObjectVersion;
use crate::apiserver::{name, object, pod};

/// Reads the new object from a request body; the rules of an update are checked later, by [`settle`].
pub(crate) fn draft_update(
    target: &RequestTarget,
    live: Option<&Value>,
    mut body: Value,
) -> Result<Value, ApiError> {
    check_body(target, &mut body)?;
    if live.is_none() {
        return Err(target.not_found());
    }
    let resource = &target.resource;
    // AllowUnconditionalUpdate is false for custom resources.
    if resource.custom && object::text(&body, "/metadata/resourceVersion").is_empty() {
        let missing =
            InvalidField::invalid("metadata.resourceVersion", "0", "must be specified for an update");
        refuse(resource, &target.name, &[missing])?;
    }
    Ok(body)
}

/// Checks the rules of an update, and computes the object to store.
pub(crate) fn settle(target: &RequestTarget, old: &Value, mut new: Value) -> Result<Value, ApiError> {
    let resource = &target.resource;
    check_preconditions(target, old, &new)?;
    restore_unwritten_parts(target, old, &mut new);
    restore_server_metadata(old, &mut new);
    settle_types(resource, &mut new)?;
    if resource.is_pod() {
        pod::default_spec(&mut new);
    }
    // A client that sends no `managedFields` keeps the stored ones; an apply has computed its own.
    if !object::is_set(&new, "/metadata/managedFields") {
        let managers = old.pointer("/metadata/managedFields").cloned();
        object::set(object::meta(&mut new), "managedFields", managers);
    }
    if *old != new {
        refuse(resource, &target.name, &invalid_changes(target, old, &new))?;
        raise_generation(resource, old, &mut new);
    }
    Ok(new)
}

/// Stores the result of [`settle`], unless another write has changed the object since.
pub(crate) fn store_settled(
    state: &mut ApiState,
    target: &RequestTarget,
    before: Arc<ObjectVersion>,
    new: Value,
    dry_run: bool,
) -> Result<Arc<ObjectVersion>, ApiError> {
    // Webhooks were called without the lock, and another write may have come in between.
    if state.current(target)?.rv != before.rv {
        return Err(ApiError::modified(&target.resource.qualified(), &target.name));
    }
    // GuaranteedUpdate does not write an unchanged object, so its resourceVersion stays and no watch sees it.
    if *before.value == new {
        return Ok(before);
    }
    // A changed definition is served at once; a real server takes a moment.
    if target.resource.is(CRD_GROUP, CRD_PLURAL) && !dry_run {
        state.registry.define(&new);
    }
    // The update that removes the last finalizer of a deleted object removes the object.
    if may_be_removed(&new) && !dry_run {
        return Ok(remove_object(state, target, new));
    }
    Ok(state.store_unless_dry_run(target, new, dry_run))
}

/// Returns true if a deletion has begun and nothing delays the removal any more.
fn may_be_removed(object: &Value) -> bool {
    let grace = object::integer(object, "/metadata/deletionGracePeriodSeconds").unwrap_or(0);
    let is_namespace_in_use =
        object::text(object, "/kind") == "Namespace" && !object::array(object, "/spec/finalizers").is_empty();
    object::is_deleting(object) && !object::has_finalizers(object) && grace == 0 && !is_namespace_in_use
}

/// Refuses an update that names another UID or `resourceVersion` than the stored object has.
fn check_preconditions(target: &RequestTarget, old: &Value, new: &Value) -> Result<(), ApiError> {
    let (plural, name) = (target.resource.qualified(), &target.name);
    let asked = object::text(new, "/metadata/uid");
    let found = object::text(old, "/metadata/uid");
    if let Some(why) = unmet_precondition("UID", asked, found) {
        return Err(ApiError::conflict(&plural, name, &why));
    }
    let asked = object::text(new, "/metadata/resourceVersion");
    // Without a resourceVersion the write is unconditional.
    if !matches!(asked, "" | "0") && asked != object::text(old, "/metadata/resourceVersion") {
        return Err(ApiError::modified(&plural, name));
    }
    Ok(())
}

/// A write to the object leaves status alone; a write to status leaves everything else alone, but for the labels
/// and annotations of built-in kinds; a resize leaves everything but containers' resources alone, and a write to ephemeral
/// containers everything but these.
fn restore_unwritten_parts(target: &RequestTarget, old: &Value, new: &mut Value) {
    let resource = &target.resource;
    match target.subresource.as_str() {
        "resize" => *new = pod::resized(old, new),
        "ephemeralcontainers" => *new = pod::with_ephemeral_containers(old, new),
        "status" => {
            let mut result = object::with_managers_of(old, new);
            // The status strategies of built-in kinds reset the spec alone, that of custom resources everything but status.
            if !resource.custom {
                for field in ["labels", "annotations"] {
                    let value = new.pointer(&format!("/metadata/{field}")).cloned();
                    object::set(object::meta(&mut result), field, value);
                }
            }
            object::set(
                object::make_object(&mut result),
                "status",
                new.get("status").cloned(),
            );
            *new = result;
        }
        _ if resource.status => {
            object::set(object::make_object(new), "status", old.get("status").cloned());
        }
        _ => {}
    }
}

/// Takes the metadata that only the server writes from the stored object, whatever the client sent.
fn restore_server_metadata(old: &Value, new: &mut Value) {
    for field in ["apiVersion", "kind"] {
        object::set(object::make_object(new), field, old.get(field).cloned());
    }
    let before = old.get("metadata");
    let meta = object::meta(new);
    for field in SERVER_METADATA {
        object::set(meta, field, before.and_then(|m| m.get(field)).cloned());
    }
    meta.remove("selfLink");
}

/// Lists the changes that the rules of the kind forbid.
fn invalid_changes(target: &RequestTarget, old: &Value, new: &Value) -> Vec<InvalidField> {
    let mut errors = name::check_metadata(new);
    let finalizers = object::array(old, "/metadata/finalizers");
    let added = object::array(new, "/metadata/finalizers")
        .iter()
        .find(|f| !finalizers.contains(f));
    if let Some(added) = added.filter(|_| object::is_deleting(old)) {
        let why = format!(
            "no new finalizers can be added if the object is being deleted, found new finalizers {added}"
        );
        errors.push(InvalidField::forbidden("metadata.finalizers", &why));
    }
    match target.subresource.as_str() {
        "" if target.resource.is_pod() => errors.extend(pod::check_update(old, new)),
        "resize" => errors.extend(pod::check_resize(old, new)),
        "ephemeralcontainers" => errors.extend(pod::check_ephemeral_containers(old, new)),
        _ => {}
    }
    errors
}

/// Raises `metadata.generation`, of a kind that has one, if anything but metadata and the status subresource has changed.
fn raise_generation(resource: &Resource, old: &Value, new: &mut Value) {
    if !resource.counts_generations() {
        return;
    }
    let (mut before, mut after) = (old.clone(), new.clone());
    for object in [&mut before, &mut after] {
        let fields = object::make_object(object);
        fields.remove("metadata");
        if resource.status {
            fields.remove("status");
        }
    }
    if before != after {
        let generation = object::integer(old, "/metadata/generation").unwrap_or(0);
        object::meta(new).insert("generation".to_owned(), Value::from(generation + 1));
    }
}
