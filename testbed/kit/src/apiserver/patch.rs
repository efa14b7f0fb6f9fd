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
    /// The format of a content type without parameters; `None` if it is no patch's.
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
