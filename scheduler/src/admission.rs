//! The admission webhooks: [`Rules`] decides about pods and bindings, [`server`] speaks HTTP.
//!
//! Decisions are functions of the request alone. [`proto::request`] validates device requests, for the webhooks and the filter
//! alike, so both refuse with the same texts.

mod asks;
mod binding;
mod mutate;
pub mod server;
mod validate;
mod visible_devices;

use proto::admission::{AdmissionRequest, AdmissionResponse, AdmissionStatus, PatchOperation};
use proto::pod::Pod;
use proto::resource::ResourceNames;
use serde::Deserialize;
use serde_json::Value;

pub use binding::Bindings;

/// The rules, as the administrator configured them.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    /// Resource names that are the cluster's choice.
    pub names: ResourceNames,
    /// Scheduler name for pods that request devices and name no scheduler.
    pub scheduler_name: Option<String>,
    /// True if pods may see all devices of their node without holding any.
    pub allow_all_devices: bool,
    /// Namespaces whose containers may select devices themselves.
    pub unrestricted_namespaces: Vec<String>,
    /// True if pods that share devices are refused if they select devices themselves.
    pub deny_overrides: bool,
    /// Users that may bind pods that request devices; `None` for every user that may bind.
    pub binders: Option<Vec<String>>,
}

/// The answer to a review.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// The request is allowed, with changes.
    Allowed {
        /// Changes, in order.
        patch: Vec<PatchOperation>,
        /// Shown to the user.
        warnings: Vec<String>,
    },
    /// The request is refused.
    Refused(Refusal),
}

/// The reason for which a request is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The object breaks a rule.
    Invalid(String),
    /// The administrator does not allow it.
    Forbidden(String),
}

/// A request with an object of another kind than it names.
#[derive(Debug, thiserror::Error)]
#[error("the {field} of request {uid} is no {kind}")]
pub struct Unreadable {
    uid: String,
    field: &'static str,
    kind: &'static str,
    #[source]
    source: serde_json::Error,
}

impl Verdict {
    /// Allowed without changes.
    pub const ALLOWED: Self = Self::Allowed {
        patch: Vec::new(),
        warnings: Vec::new(),
    };

    /// The response to the request of this UID.
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
                    serde_json::to_vec(&patch).ok().map(k8s_openapi::ByteString)
                };
                let patch_type = patch.as_ref().map(|_| "JSONPatch");
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

impl From<Result<(), Refusal>> for Verdict {
    fn from(judged: Result<(), Refusal>) -> Self {
        judged.map_or_else(Self::Refused, |()| Self::ALLOWED)
    }
}

impl From<Refusal> for AdmissionStatus {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::Invalid(message) => Self {
                message,
                reason: "Invalid",
                code: 422,
            },
            Refusal::Forbidden(message) => Self {
                message,
                reason: "Forbidden",
                code: 403,
            },
        }
    }
}

impl Rules {
    /// Reviews a request of the mutating webhook.
    ///
    /// # Errors
    /// The object is not of the kind that the request names.
    pub fn mutate(&self, request: &AdmissionRequest) -> Result<Verdict, Unreadable> {
        mutate::review(self, request)
    }

    /// Reviews a request of the validating webhook.
    ///
    /// # Errors
    /// An object is not of the kind that the request names.
    pub fn validate(
        &self,
        request: &AdmissionRequest,
        bindings: &impl Bindings,
    ) -> Result<Verdict, Unreadable> {
        let about = (
            request.resource.group.as_str(),
            request.resource.resource.as_str(),
            request.sub_resource.as_str(),
        );
        // The second is an older way to bind a pod, which the API server still serves.
        if matches!(about, ("", "pods", "binding") | ("", "bindings", "")) {
            return binding::review(self, request, bindings);
        }
        validate::review(self, request)
    }

    /// The reason for which the filter refuses a pod whose request is valid, with the text of the validating webhook; `None` if its
    /// containers select no devices. `body` is the filter request of the pod.
    pub(crate) fn refusal_of_filter(&self, body: &[u8], pod: &Pod) -> Option<String> {
        validate::refusal_of_filter(self, body, pod)
    }

    fn is_unrestricted(&self, namespace: &str) -> bool {
        self.unrestricted_namespaces
            .iter()
            .any(|unrestricted| unrestricted == namespace)
    }
}

fn read<'a, T: Deserialize<'a>>(
    request: &'a AdmissionRequest,
    field: &'static str,
    kind: &'static str,
    object: Option<&'a Value>,
) -> Result<T, Unreadable> {
    let unreadable = |source| Unreadable {
        uid: request.uid.clone(),
        field,
        kind,
        source,
    };
    T::deserialize(object.unwrap_or(&Value::Null)).map_err(unreadable)
}

#[cfg(test)]
mod tests;
