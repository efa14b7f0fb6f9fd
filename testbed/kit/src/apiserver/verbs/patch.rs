//! The patch verb: computes the patched object and stores it as an update or, for an apply without an object, as a creation.

use serde_json::Value;

use super::create::{create, name_mismatch};
use super::update::commit;
use super::{ApiState, RequestTarget, WriteOptions, Written, WrittenPart, check_kind};
use crate::apiserver::object;
use crate::apiserver::patch::apply::Manager;
use crate::apiserver::patch::{self, PatchFormat};
use crate::apiserver::status::ApiError;

/// The object that a patch leads to, before the rules of an update are checked.
#[derive(Debug)]
pub(crate) enum PatchedObject {
    /// A creation, with the options for it.
    New(Value, WriteOptions),
    /// A change of an existing object.
    Changed {
        new: Value,
        /// True if `new` already has the `managedFields` of this write, as after an apply.
        applied: bool,
    },
}

/// Patches an object or its status.
pub(crate) fn patch(
    state: &mut ApiState,
    target: &RequestTarget,
    format: PatchFormat,
    body: Value,
    options: &WriteOptions,
) -> Result<Written, ApiError> {
    match draft_patch(state, target, format, body, options)? {
        PatchedObject::New(body, options) => create(state, target, body, &options),
        PatchedObject::Changed { new, applied } => commit(state, target, new, options, applied),
    }
}

/// Applies a patch to the target, before any rule is checked.
pub(crate) fn draft_patch(
    state: &ApiState,
    target: &RequestTarget,
    format: PatchFormat,
    body: Value,
    options: &WriteOptions,
) -> Result<PatchedObject, ApiError> {
    if format == PatchFormat::Apply {
        return draft_apply(state, target, body, options);
    }
    let current = state.current(target)?;
    let mut new = Value::clone(&current.value);
    match format {
        PatchFormat::Json => patch::json_patch(&mut new, body)?,
        PatchFormat::Merge if body.is_object() => json_patch::merge(&mut new, &body),
        PatchFormat::Strategic if !target.resource.custom => {
            patch::strategic::merge(&mut new, &body)?;
        }
        // Custom resources have no Go structure whose tags would say how lists merge.
        PatchFormat::Strategic => return Err(unsupported()),
        _ => return Err(ApiError::bad_request("the patch must be a JSON object")),
    }
    check_kind(target, &mut new)?;
    object::strip_nulls(&mut new);
    if object::text(&new, "/metadata/name") != target.name {
        return Err(name_mismatch(object::text(&new, "/metadata/name"), &target.name));
    }
    Ok(PatchedObject::Changed { new, applied: false })
}

/// Computes the object that a server-side apply leads to; without a stored object, the object to create.
fn draft_apply(
    state: &ApiState,
    target: &RequestTarget,
    mut body: Value,
    options: &WriteOptions,
) -> Result<PatchedObject, ApiError> {
    if options.manager.is_empty() {
        return Err(ApiError::bad_request(
            "PatchOptions.meta.k8s.io is invalid: fieldManager: Required value: is required for apply patch",
        ));
    }
    check_kind(target, &mut body)?;
    if object::is_set(&body, "/metadata/managedFields") {
        return Err(ApiError::bad_request("metadata.managedFields must be nil"));
    }
    let named = object::text(&body, "/metadata/name");
    if !named.is_empty() && named != target.name {
        return Err(name_mismatch(named, &target.name));
    }
    object::strip_nulls(&mut body);
    let current = state.store.get(&target.resource.storage, &target.key()).cloned();
    let live = current.as_ref().map(|v| &*v.value);
    if live.is_none() && target.part != WrittenPart::Object {
        return Err(target.not_found());
    }
    let manager = Manager {
        name: &options.manager,
        subresource: target.part.subresource(),
    };
    let new = patch::apply::apply(live, &body, manager, target.resource.custom);
    if live.is_some() {
        return Ok(PatchedObject::Changed { new, applied: true });
    }
    let made_here = WriteOptions {
        is_apply: true,
        ..options.clone()
    };
    Ok(PatchedObject::New(new, made_here))
}

/// The 415 of a patch format that the resource does not support: strategic merge patches need a built-in kind.
fn unsupported() -> ApiError {
    ApiError::new(
        415,
        "the body of the request was in an unknown format - accepted media types include: \
         application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml",
    )
}
