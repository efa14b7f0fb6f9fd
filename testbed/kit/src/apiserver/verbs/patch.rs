//! The patch verb: computes the patched object.

use serde_json::Value;

use super::{RequestTarget, check_body};
use crate::apiserver::object;
use crate::apiserver::patch::apply::Manager;
use crate::apiserver::patch::{self, PatchFormat};
use crate::apiserver::status::ApiError;

/// Applies a patch to the stored object, before the rules of an update are checked. Without a stored object, a server-side apply
/// leads to the object to create.
pub(crate) fn draft_patch(
    target: &RequestTarget,
    live: Option<&Value>,
    format: PatchFormat,
    body: Value,
    manager: &str,
) -> Result<Value, ApiError> {
    if format == PatchFormat::Apply {
        return draft_apply(target, live, body, manager);
    }
    let mut new = live.ok_or_else(|| target.not_found())?.clone();
    match format {
        PatchFormat::Json => patch::json_patch(&mut new, body)?,
        PatchFormat::Merge if body.is_object() => json_patch::merge(&mut new, &body),
        PatchFormat::Strategic => patch::strategic::merge(&mut new, &body)?,
        PatchFormat::Merge | PatchFormat::Apply => {
            return Err(ApiError::bad_request("the patch must be a JSON object"));
        }
    }
    check_body(target, &mut new)?;
    Ok(new)
}

fn draft_apply(
    target: &RequestTarget,
    live: Option<&Value>,
    mut body: Value,
    manager: &str,
) -> Result<Value, ApiError> {
    if manager.is_empty() {
        return Err(ApiError::bad_request(
            "PatchOptions.meta.k8s.io is invalid: fieldManager: Required value: is required for apply patch",
        ));
    }
    check_body(target, &mut body)?;
    if object::is_set(&body, "/metadata/managedFields") {
        return Err(ApiError::bad_request("metadata.managedFields must be nil"));
    }
    if live.is_none() && !target.subresource.is_empty() {
        return Err(target.not_found());
    }
    let manager = Manager {
        name: manager,
        subresource: &target.subresource,
    };
    Ok(patch::apply::apply(live, &body, manager, target.resource.custom))
}
