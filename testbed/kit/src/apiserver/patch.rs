//! Patches: pure functions from an object and a client's patch to the new object.
//!
//! Preconditions, immutable fields and storage are not checked here.

use serde_json::Value;

use super::status::ApiError;

pub(crate) mod apply;
pub(crate) mod strategic;

/// The format of a patch, by the content type of its request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PatchFormat {
    Json,
    Merge,
    Strategic,
    Apply,
}

impl PatchFormat {
    /// The format of a content type without parameters, for a custom or built-in resource.
    pub(crate) fn of(content_type: &str, is_custom: bool) -> Result<Self, ApiError> {
        match content_type {
            "application/json-patch+json" => Ok(Self::Json),
            "application/merge-patch+json" => Ok(Self::Merge),
            // Custom resources have no Go structure whose tags would say how lists merge.
            "application/strategic-merge-patch+json" if !is_custom => Ok(Self::Strategic),
            "application/apply-patch+yaml" => Ok(Self::Apply),
            _ => Err(ApiError::new(
                415,
                "the body of the request was in an unknown format - accepted media types include: \
                 application/json-patch+json, application/merge-patch+json, application/apply-patch+yaml",
            )),
        }
    }
}

/// Applies a JSON patch (RFC 6902).
pub(crate) fn json_patch(object: &mut Value, patch: Value) -> Result<(), ApiError> {
    let operations: json_patch::Patch = serde_json::from_value(patch)
        .map_err(|error| ApiError::bad_request(format!("error decoding patch: {error}")))?;
    let patched = json_patch::patch(object, &operations);
    patched.map_err(|error| {
        let why = format!("the server rejected our request due to an error in our request: {error}");
        ApiError::new(422, why)
    })
}
