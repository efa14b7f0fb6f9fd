//! Patches: pure functions from an object and a client's patch to the new object. This file has the JSON patch
//! of RFC 6902 and the merge patch of RFC 7386.
//!
//! Preconditions, immutable fields and storage are not checked here.

use serde_json::Value;

use super::object;
use super::status::ApiError;

pub(crate) mod apply;
pub(crate) mod fields;
pub(crate) mod managers;
pub(crate) mod strategic;

/// The patch formats, by content type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PatchFormat {
    Json,
    Merge,
    Strategic,
    Apply,
}

impl PatchFormat {
    /// The format of a content type, parameters already cut off.
    pub(crate) fn of(content_type: &str) -> Option<Self> {
        match content_type {
            "application/json-patch+json" => Some(Self::Json),
            "application/merge-patch+json" => Some(Self::Merge),
            "application/strategic-merge-patch+json" => Some(Self::Strategic),
            "application/apply-patch+yaml" => Some(Self::Apply),
            _ => None,
        }
    }
}

/// Applies a JSON patch (RFC 6902).
pub(crate) fn json_patch(object: &mut Value, patch: Value) -> Result<(), ApiError> {
    let malformed = |why: String| ApiError::bad_request(format!("error decoding patch: {why}"));
    let operations: json_patch::Patch =
        serde_json::from_value(patch).map_err(|e| malformed(e.to_string()))?;
    json_patch::patch(object, &operations).map_err(|e| {
        ApiError::new(
            422,
            format!("the server rejected our request due to an error in our request: {e}"),
        )
    })
}

/// Merges a patch into a target: null removes, objects merge, everything else replaces.
pub(crate) fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    let map = object::make_object(target);
    for (field, change) in patch {
        if change.is_null() {
            map.remove(field);
        } else {
            merge(map.entry(field).or_insert(Value::Null), change);
        }
    }
}

#[cfg(test)]
mod tests;
