//! What the webhooks decide about pods and bindings, as functions of the request alone.
//!
//! Knows no HTTP, clock or API server. What a pod may ask for is [`proto::request`]'s business: a webhook and the filter
//! refuse it in the same words.

mod annotations;
mod asks;
mod binding;
mod draft;
mod mutate;
mod overrides;
mod sights;
mod uncounted;
mod validate;

use proto::admission::{AdmissionRequest, AdmissionResponse, AdmissionStatus, PatchOperation};
use proto::pod::Pod;
use proto::resource::ResourceNames;
use serde::Deserialize;
use serde_json::Value;

pub use binding::Bindings;

/// What the administrator has decided.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    /// Resource names that are the cluster's choice.
    pub names: ResourceNames,
    /// Scheduler that pods asking for devices are sent to, if they name none of their own.
    pub scheduler_name: Option<String>,
    /// True if pods may see all devices of their node and be charged for none.
    pub allow_all_devices: bool,
    /// Namespaces whose containers may decide for themselves which devices they see.
    pub unrestricted_namespaces: Vec<String>,
    /// Whether pods that share devices are refused if they set what decides which devices they see.
    pub deny_overrides: bool,
    /// Users that may bind pods with our resources; `None` if everybody may who may bind.
    pub binders: Option<Vec<String>>,
}

/// What becomes of a request.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// It goes on, changed by this.
    Allowed {
        /// Changes, in order.
        patch: Vec<PatchOperation>,
        /// Told to the user.
        warnings: Vec<String>,
    },
    /// It does not go on.
    Refused(Refusal),
}

/// Why a request does not go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The object breaks a rule.
    Invalid(String),
    /// The administrator does not want it.
    Forbidden(String),
}

/// A request that is about something else than it says.
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
    /// The request goes on as it is.
    pub const ALLOWED: Self = Self::Allowed {
        patch: Vec::new(),
        warnings: Vec::new(),
    };

    /// The answer to the request of this UID.
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
    /// What the mutating webhook says.
    ///
    /// # Errors
    /// If the object is not what the request calls it.
    pub fn mutate(&self, request: &AdmissionRequest) -> Result<Verdict, Unreadable> {
        mutate::verdict(self, request)
    }

    /// What the validating webhook says; `bindings` knows which pods ask for our resources.
    ///
    /// # Errors
    /// If an object is not what the request calls it.
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
        // The second is how pods were bound in the API's first days, and still can be.
        if matches!(about, ("", "pods", "binding") | ("", "bindings", "")) {
            return binding::verdict(self, request, bindings);
        }
        validate::verdict(self, request)
    }

    /// Returns the reason why the filter finds no node for a pod whose request is valid, in the validating webhook's words;
    /// `body` is a JSON object that has the pod in it as the filter's request has. `None` if its containers decide nothing
    /// for themselves.
    pub(crate) fn refusal_of_filter(&self, body: &[u8], pod: &Pod) -> Option<String> {
        validate::refusal_of_filter(self, body, pod)
    }

    /// Returns true if containers in this namespace may decide for themselves which devices they see.
    fn is_unrestricted(&self, namespace: &str) -> bool {
        self.unrestricted_namespaces
            .iter()
            .any(|unrestricted| unrestricted == namespace)
    }
}

/// Reads an object of a request.
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
