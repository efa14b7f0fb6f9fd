//! `AdmissionReview` v1, the question of the API server to a webhook and its answer; and the namespaces that are exempt.
//!
//! Objects stay JSON, as a patch has to name places in them. Decides nothing.

use k8s_openapi::ByteString;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// `apiVersion` of question and answer.
pub const API_VERSION: &str = "admission.k8s.io/v1";
/// `kind` of question and answer.
pub const KIND: &str = "AdmissionReview";

/// Default namespaces, separated by commas, whose pods may choose themselves which GPUs they see. The scheduler's webhook and
/// the plugin's runtime hook must agree on them.
pub const UNRESTRICTED_NAMESPACES: &str = "kube-system,gpu-operator,gpushare-system";

/// A question.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AdmissionQuestion {
    /// [`API_VERSION`].
    pub api_version: String,
    /// [`KIND`].
    pub kind: String,
    /// The request that waits for the answer.
    pub request: AdmissionRequest,
}

/// A request to the API server that is being admitted.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AdmissionRequest {
    /// Repeated in the answer.
    pub uid: String,
    /// What kind of object it is about, by plural name.
    #[serde(default)]
    pub resource: GroupVersionResource,
    /// Empty for the object itself.
    #[serde(default, deserialize_with = "crate::pod::null_as_default")]
    pub sub_resource: String,
    /// The object's name; empty while the API server has not made one up.
    #[serde(default, deserialize_with = "crate::pod::null_as_default")]
    pub name: String,
    /// The object's namespace.
    #[serde(default, deserialize_with = "crate::pod::null_as_default")]
    pub namespace: String,
    /// What is done to the object.
    pub operation: Operation,
    /// Who does it.
    #[serde(default)]
    pub user_info: UserInfo,
    /// The object as it will be.
    #[serde(default)]
    pub object: Option<Value>,
    /// The object as it is.
    #[serde(default)]
    pub old_object: Option<Value>,
}

/// A kind of object by its place in the API.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct GroupVersionResource {
    /// Empty for the core group.
    #[serde(default)]
    pub group: String,
    /// Such as `v1`.
    #[serde(default)]
    pub version: String,
    /// Plural name.
    #[serde(default)]
    pub resource: String,
}

/// What is done to an object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Operation {
    /// It is made.
    Create,
    /// It is changed.
    Update,
    /// It is deleted.
    Delete,
    /// Anything else.
    #[default]
    #[serde(other)]
    Connect,
}

/// Who makes a request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct UserInfo {
    /// Such as `system:serviceaccount:kube-system:replicaset-controller`.
    #[serde(default)]
    pub username: String,
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AdmissionAnswer {
    /// [`API_VERSION`].
    pub api_version: &'static str,
    /// [`KIND`].
    pub kind: &'static str,
    /// The verdict.
    pub response: AdmissionResponse,
}

/// A verdict on a request.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AdmissionResponse {
    /// That of the request.
    pub uid: String,
    /// Whether the request may go on.
    pub allowed: bool,
    /// Why not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<AdmissionStatus>,
    /// A list of [`PatchOperation`]s in JSON.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub patch: Option<ByteString>,
    /// `JSONPatch` where there is a patch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub patch_type: Option<&'static str>,
    /// Shown to the user beside the outcome.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// Why a request is refused.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct AdmissionStatus {
    /// For the user.
    pub message: String,
    /// Machine-readable, such as `Invalid`.
    pub reason: &'static str,
    /// HTTP status that the user gets.
    pub code: u16,
}

/// A change of an object (RFC 6902).
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "op", rename_all = "lowercase")]
pub enum PatchOperation {
    /// Sets a field, whether it is there or not.
    Add {
        /// JSON pointer.
        path: String,
        /// The field's value.
        value: Value,
    },
    /// Removes a field that is there.
    Remove {
        /// JSON pointer.
        path: String,
    },
}

impl AdmissionAnswer {
    /// The answer that holds this verdict.
    pub fn new(response: AdmissionResponse) -> Self {
        Self {
            api_version: API_VERSION,
            kind: KIND,
            response,
        }
    }
}
