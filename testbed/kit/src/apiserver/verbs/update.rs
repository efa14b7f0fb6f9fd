//! Update of an object: preconditions, separation of status, immutable fields, generations, finalizers.

use std::sync::Arc;

use serde_json::Value;

use super::create::{name_mismatch, refuse};
use super::delete::remove_object;
use super::{ApiState, RequestTarget, WriteOptions, Written, WrittenPart, check_kind, settle_types};
use crate::apiserver::patch::apply::SERVER_METADATA;
use crate::apiserver::resource::{CRD_GROUP, CRD_PLURAL, Resource};
use crate::apiserver::status::{ApiError, InvalidField};
use crate::apiserver::store::ObjectVersion;
use crate::apiserver::{name, object, pod};

/// Replaces an object, or its status, by `body`.
pub(crate) fn update(
    state: &mut ApiState,
    target: &RequestTarget,
    body: Value,
    options: &WriteOptions,
) -> Result<Written, ApiError> {
    let new = draft_update(state, target, body)?;
    commit(state, target, new, options, false)
}

/// Reads the new object from a request body; the rules of an update are checked later, by [`settle`].
pub(crate) fn draft_update(
    state: &ApiState,
    target: &RequestTarget,
    mut body: Value,
) -> Result<Value, ApiError> {
    check_kind(target, &mut body)?;
    object::strip_nulls(&mut body);
    let named = object::text(&body, "/metadata/name");
    if !named.is_empty() && named != target.name {
        return Err(name_mismatch(named, &target.name));
    }
    let resource = &target.resource;
    state.current(target)?;
    // AllowUnconditionalUpdate is false for custom resources.
    if resource.custom && object::text(&body, "/metadata/resourceVersion").is_empty() {
        let missing =
            InvalidField::invalid("metadata.resourceVersion", "0", "must be specified for an update");
        refuse(resource, &target.name, &[missing])?;
    }
    Ok(body)
}

/// Stores `new` in place of the target if the rules allow it. `applied` is true if `new` has its new `managedFields` already,
/// as after an apply; the stored ones stay otherwise.
pub(crate) fn commit(
    state: &mut ApiState,
    target: &RequestTarget,
    new: Value,
    options: &WriteOptions,
    applied: bool,
) -> Result<Written, ApiError> {
    let settled = settle(state, target, new, applied)?;
    store_settled(state, target, settled, options)
}

/// Checks the rules of an update, and computes the object to store.
pub(crate) fn settle(
    state: &ApiState,
    target: &RequestTarget,
    mut new: Value,
    applied: bool,
) -> Result<Settled, ApiError> {
    let current = state.current(target)?;
    let old = &*current.value;
    let resource = &target.resource;
    check_preconditions(target, old, &new)?;
    restore_unwritten_parts(target, old, &mut new);
    restore_server_metadata(old, &mut new);
    settle_types(resource, &mut new)?;
    if resource.is_pod() {
        pod::default_spec(&mut new);
    }
    if !applied {
        let managers = old.pointer("/metadata/managedFields").cloned();
        object::set(object::meta(&mut new), "managedFields", managers);
    }
    // GuaranteedUpdate does not write an unchanged object, so its resourceVersion stays and no watch sees it.
    if *old == new {
        return Ok(Settled {
            before: current,
            new: None,
        });
    }
    refuse(resource, &target.name, &invalid_changes(target, old, &new))?;
    raise_generation(resource, old, &mut new);
    Ok(Settled {
        before: current,
        new: Some(new),
    })
}

/// Stores the result of [`settle`], unless another write has changed the object since.
pub(crate) fn store_settled(
    state: &mut ApiState,
    target: &RequestTarget,
    settled: Settled,
    options: &WriteOptions,
) -> Result<Written, ApiError> {
    // Webhooks were called without the lock, and another write may have come in between.
    if state.current(target)?.rv != settled.before.rv {
        return Err(ApiError::modified(&target.resource.qualified(), &target.name));
    }
    let Some(new) = settled.new else {
        return Ok(Written {
            version: settled.before,
            created: false,
        });
    };
    // A changed definition is served at once; a real server takes a moment.
    if target.resource.is(CRD_GROUP, CRD_PLURAL) && !options.dry_run {
        state.registry.define(&new);
    }
    // The update that removes the last finalizer of a deleted object removes the object.
    let version = if may_be_removed(&new) && !options.dry_run {
        remove_object(state, target, new)
    } else {
        state.store_unless_dry_run(target, new, options.dry_run)
    };
    Ok(Written {
        version,
        created: false,
    })
}

/// An update that the rules allow and that is not stored yet.
#[derive(Debug, Clone)]
pub(crate) struct Settled {
    pub(crate) before: Arc<ObjectVersion>,
    /// The object to store; `None` if nothing changes.
    new: Option<Value>,
}

impl Settled {
    /// The object as it would be stored.
    pub(crate) fn after(&self) -> &Value {
        self.new.as_ref().unwrap_or(&self.before.value)
    }
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
    if !asked.is_empty() && asked != found {
        let why = format!("Precondition failed: UID in precondition: {asked}, UID in object meta: {found}");
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
    let status = |of: &Value| of.get("status").cloned();
    if target.part == WrittenPart::Resize {
        *new = pod::resized(old, new);
    } else if target.part == WrittenPart::EphemeralContainers {
        *new = pod::with_ephemeral_containers(old, new);
    } else if target.part == WrittenPart::Status {
        let written = status(new);
        let mut result = object::with_managers_of(old, new);
        // The status strategies of built-in kinds reset the spec alone, that of custom resources everything but status.
        if !resource.custom {
            for field in ["labels", "annotations"] {
                let value = new.pointer(&format!("/metadata/{field}")).cloned();
                object::set(object::meta(&mut result), field, value);
            }
        }
        object::set(object::make_object(&mut result), "status", written);
        *new = result;
    } else if resource.status {
        object::set(object::make_object(new), "status", status(old));
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
    match target.part {
        WrittenPart::Object if target.resource.is_pod() => errors.extend(pod::check_update(old, new)),
        WrittenPart::Resize => errors.extend(pod::check_resize(old, new)),
        WrittenPart::EphemeralContainers => errors.extend(pod::check_ephemeral_containers(old, new)),
        WrittenPart::Object | WrittenPart::Status => {}
    }
    errors
}

/// Raises `metadata.generation`, of a kind that has one, if anything but metadata and the status subresource has changed.
fn raise_generation(resource: &Resource, old: &Value, new: &mut Value) {
    if !resource.counts_generations() {
        return;
    }
    let compared_fields = |of: &Value| {
        let mut fields = of.as_object().cloned().unwrap_or_default();
        fields.remove("metadata");
        if resource.status {
            fields.remove("status");
        }
        fields
    };
    if compared_fields(old) != compared_fields(new) {
        let generation = object::integer(old, "/metadata/generation").unwrap_or(0);
        object::meta(new).insert("generation".to_owned(), Value::from(generation + 1));
    }
}
