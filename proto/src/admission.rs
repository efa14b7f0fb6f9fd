//! `AdmissionReview` of `admission.k8s.io/v1`: the API server's request to a webhook, and the webhook's response.
//!
//! Objects stay JSON, as patches name places in them. `kube`'s own types refuse reviews with unknown or missing fields.

use k8s_openapi::ByteString;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// `apiVersion` of request and response.
pub const API_VERSION: &str = "admission.k8s.io/v1";
/// `kind` of request and response.
pub const KIND: &str = "AdmissionReview";

/// Default of `--unrestricted-namespaces`, whose pods may choose the GPUs that they see. The scheduler's webhook and the plugin's
/// runtime hook must agree on it.
pub const UNRESTRICTED_NAMESPACES: &str = "kube-system,gpushare-system";

/// A review with a request.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AdmissionReview {
    /// Always [`API_VERSION`].
    pub api_version: String,
    /// Always [`KIND`].
    pub kind: String,
    /// The request of a user to the API server.
    pub request: AdmissionRequest,
}

/// A request of a user to the API server, which waits for the webhook.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AdmissionRequest {
    // Go leaves empty texts out, and other clients write them as null.
    /// Identifies the request; the response repeats it.
    pub uid: String,
    /// The resource of the request, such as `pods`.
    #[serde(default)]
    pub resource: GroupVersionResource,
    /// The subresource of the request, such as `binding`; empty for the object itself.
    #[serde(default, deserialize_with = "crate::pod::null_as_default")]
    pub sub_resource: String,
    /// The object's name; empty until the API server has generated one.
    #[serde(default, deserialize_with = "crate::pod::null_as_default")]
    pub name: String,
    /// The object's namespace; empty for an object of the cluster.
    #[serde(default, deserialize_with = "crate::pod::null_as_default")]
    pub namespace: String,
    /// The operation on the object.
    pub operation: Operation,
    /// The user of the request.
    #[serde(default)]
    pub user_info: UserInfo,
    /// The object after the operation; absent for a deletion.
    // JSON, since a patch has to name fields that no type here knows.
    #[serde(default)]
    pub object: Option<Value>,
    /// The object before the operation; absent for a creation.
    #[serde(default)]
    pub old_object: Option<Value>,
}

/// A resource of the API.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct GroupVersionResource {
    /// The API group; empty for the core group.
    pub group: String,
    /// The version of the API group, such as `v1`.
    pub version: String,
    /// Plural name, such as `pods`.
    pub resource: String,
}

/// An operation on an object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Operation {
    /// The request creates the object.
    Create,
    /// The request changes the object.
    Update,
    /// The request deletes the object.
    Delete,
    /// The request connects to the object, as `exec` does; or any other operation.
    // An operation that a later Kubernetes adds must not make the review unreadable.
    #[default]
    #[serde(other)]
    Connect,
}

/// A user of the API server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct UserInfo {
    /// The user's name, such as `system:serviceaccount:kube-system:replicaset-controller`.
    #[serde(default)]
    pub username: String,
}

/// A review with a response.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AdmissionReviewReply {
    /// Always [`API_VERSION`].
    pub api_version: &'static str,
    /// Always [`KIND`].
    pub kind: &'static str,
    /// The response to the request of the review.
    pub response: AdmissionResponse,
}

/// The webhook's response to a request.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AdmissionResponse {
    /// The UID of the request.
    pub uid: String,
    /// True to admit the request.
    pub allowed: bool,
    /// The reason of a refusal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<AdmissionStatus>,
    /// A list of [`PatchOperation`]s as JSON, which the review carries in base64.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub patch: Option<ByteString>,
    /// `JSONPatch` where there is a patch.
    #[serde(skip_serializing_if = "Option::is_none")]
    // The API server refuses a patch without a type, and a type without a patch.
    pub patch_type: Option<&'static str>,
    /// Warnings for the user.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// The reason of a refusal, as a `metav1.Status`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct AdmissionStatus {
    /// The sentence that kubectl and controllers show.
    pub message: String,
    /// Machine-readable, such as `Invalid`.
    pub reason: &'static str,
    /// HTTP status of the API server's answer to the user, such as 422.
    pub code: u16,
}

/// A change of an object, as JSON Patch (RFC 6902) has it. The webhook needs no other operations: `add` replaces what is there.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "op", rename_all = "lowercase")]
pub enum PatchOperation {
    /// Adds a field, or replaces its value.
    Add {
        /// JSON pointer to the field.
        path: String,
        /// The field's value.
        value: Value,
    },
    /// Removes a field, which must exist.
    Remove {
        /// JSON pointer to the field.
        path: String,
    },
}

impl AdmissionReviewReply {
    /// The review that carries a response.
    pub fn new(response: AdmissionResponse) -> Self {
        Self {
            api_version: API_VERSION,
            kind: KIND,
            response,
        }
    }
}
