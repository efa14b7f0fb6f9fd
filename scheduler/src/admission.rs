//! The admission webhooks: [`Rules`] decides about pods and bindings, [`server`] speaks HTTP.
//!
//! Decisions are functions of the request, and of the cluster as far as watches have shown it. [`proto::request`]
//! validates device requests for the webhooks and the filter alike, so both refuse with the same texts.

mod binding;
mod mutate;
mod requested_kinds;
pub mod server;
mod validate;
mod visible_devices;

use k8s_openapi::ByteString;
use proto::admission::{AdmissionRequest, AdmissionResponse, AdmissionStatus, PatchOperation};
use proto::pod::Pod;
use proto::request::RequestError;
use proto::resource::ResourceNames;
use serde::Deserialize;
use serde_json::Value;

use crate::index::{Index, Shared};

/// The rules of both webhooks, as the administrator configured them.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    /// The resource names that the operator of the cluster chooses.
    pub names: ResourceNames,
    /// The scheduler name that pods get which request devices and name no scheduler; `None` to leave them.
    pub scheduler_name: Option<String>,
    /// True if pods may see all devices of their node without holding any.
    pub allow_all_devices: bool,
    /// Namespaces whose containers may select the devices that they see.
    pub unrestricted_namespaces: Vec<String>,
    /// True to refuse pods that share devices and select the devices that they see, or are privileged.
    pub deny_overrides: bool,
    /// The users that may bind pods which request devices; `None` for every user whom RBAC lets bind.
    pub binders: Option<Vec<String>>,
}

/// The decision about a request to the API server.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// The request is allowed, with changes.
    Allowed {
        /// The changes, in the order in which they are made.
        patch: Vec<PatchOperation>,
        /// Warnings that kubectl shows to the user.
        warnings: Vec<String>,
    },
    /// The request is refused.
    Refused(Refusal),
}

/// The reason for which a request is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The object breaks a rule for every user: HTTP 422.
    Invalid(String),
    /// The administrator's rules do not allow the request: HTTP 403.
    Forbidden(String),
}

/// A request whose object is not of the kind that the request names.
#[derive(Debug, thiserror::Error)]
#[error("the {field} of request {uid} is not of the kind that the request names")]
pub struct Unreadable {
    uid: String,
    field: &'static str,
    #[source]
    source: serde_json::Error,
}

impl Verdict {
    /// The verdict by the outcome of all checks: the patch and the warnings, or the refusal.
    fn of(checked: Result<(Vec<PatchOperation>, Vec<String>), Refusal>) -> Self {
        match checked {
            Ok((patch, warnings)) => Self::Allowed { patch, warnings },
            Err(refusal) => Self::Refused(refusal),
        }
    }

    /// The request is allowed, without changes and warnings.
    pub const ALLOWED: Self = Self::Allowed {
        patch: Vec::new(),
        warnings: Vec::new(),
    };

    /// The response with this verdict to the request with this UID.
    pub fn response(self, uid: String) -> AdmissionResponse {
        match self {
            Self::Refused(refusal) => AdmissionResponse {
                uid,
                status: Some(refusal.into()),
                ..AdmissionResponse::default()
            },
            Self::Allowed { patch, warnings } => {
                let patch = if patch.is_empty() {
                    None
                } else {
                    serde_json::to_vec(&patch).ok().map(ByteString)
                };
                let patch_type = patch.is_some().then_some("JSONPatch");
                AdmissionResponse {
                    uid,
                    allowed: true,
                    patch,
                    patch_type,
                    warnings,
                    ..AdmissionResponse::default()
                }
            }
        }
    }
}

/// A request for devices that breaks a rule makes its pod invalid.
impl From<RequestError> for Refusal {
    fn from(error: RequestError) -> Self {
        // The text of the filter, so that a user sees one wording in both places.
        Self::Invalid(error.to_string())
    }
}

impl From<Refusal> for AdmissionStatus {
    fn from(refusal: Refusal) -> Self {
        // The reasons and codes of the API server's own validation and authorization.
        let (message, reason, code) = match refusal {
            Refusal::Invalid(message) => (message, "Invalid", 422),
            Refusal::Forbidden(message) => (message, "Forbidden", 403),
        };
        Self {
            message,
            reason,
            code,
        }
    }
}

impl Rules {
    /// Decides about a request of the mutating webhook.
    pub fn mutate(&self, request: &AdmissionRequest) -> Result<Verdict, Unreadable> {
        mutate::review(self, request)
    }

    /// Decides about a request of the validating webhook.
    pub fn validate(
        &self,
        request: &AdmissionRequest,
        cluster: &Shared<Index>,
    ) -> Result<Verdict, Unreadable> {
        let resource = (
            &*request.resource.group,
            &*request.resource.resource,
            &*request.sub_resource,
        );
        match resource {
            // `bindings` without a pod's name in the path is an older way to bind, which the API server still serves.
            ("", "pods", "binding") | ("", "bindings", "") => binding::review(self, request, cluster),
            ("", "pods", _) => validate::review(self, request, cluster),
            _ => Ok(Verdict::ALLOWED),
        }
    }

    /// The reason for which the filter refuses a pod whose request is valid: it selects devices itself, or overrides limits. The
    /// text is that of the validating webhook. `None` if the rules allow the pod.
    pub(crate) fn refusal_of_filter(&self, pod: &Pod) -> Option<String> {
        let namespace = pod.metadata.namespace.as_deref().unwrap_or("default");
        match validate::check_device_fields(self, None, pod, namespace) {
            Ok(()) => None,
            Err(Refusal::Invalid(message) | Refusal::Forbidden(message)) => Some(message),
        }
    }

    /// Returns true if the containers of this namespace may select the devices that they see.
    fn is_unrestricted(&self, namespace: &str) -> bool {
        self.unrestricted_namespaces.iter().any(|name| name == namespace)
    }
}

/// Reads the object as it is after the operation under review.
fn read<'a, T: Deserialize<'a>>(request: &'a AdmissionRequest) -> Result<T, Unreadable> {
    read_field(request, "object", request.object.as_ref())
}

/// Reads the object as it is before the operation under review.
fn read_old<'a, T: Deserialize<'a>>(request: &'a AdmissionRequest) -> Result<T, Unreadable> {
    read_field(request, "oldObject", request.old_object.as_ref())
}

/// Reads one object of an admission request; an error names the request and the field.
fn read_field<'a, T: Deserialize<'a>>(
    request: &'a AdmissionRequest,
    field: &'static str,
    object: Option<&'a Value>,
) -> Result<T, Unreadable> {
    // An absent object is one of the wrong kind.
    T::deserialize(object.unwrap_or(&Value::Null)).map_err(|source| Unreadable {
        uid: request.uid.clone(),
        field,
        source,
    })
}

#[cfg(test)]
mod tests;
