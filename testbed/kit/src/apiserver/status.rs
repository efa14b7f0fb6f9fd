//! Errors of the API: HTTP code, reason and message, and the `Status` object that clients get.
//!
//! This file has the wording and form of errors; the rules that raise them are elsewhere.

use std::fmt::Display;

use serde_json::{Value, json};

use super::object;
use crate::pods::set;

/// A refusal of the API, convertible to a `Status` object.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// HTTP status code.
    pub code: u16,
    /// Machine-readable reason such as `NotFound`.
    pub reason: &'static str,
    /// The sentence that people see.
    pub message: String,
    /// The `details` of the Status, where there are any.
    pub details: Option<Box<Value>>,
    /// Seconds after which a client may try again.
    pub retry_after: Option<u32>,
}

/// One rejected field of an invalid object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct InvalidField {
    reason: &'static str,
    field: String,
    message: String,
}

impl InvalidField {
    fn new(reason: &'static str, field: impl Display, message: String) -> Self {
        Self {
            reason,
            field: field.to_string(),
            message,
        }
    }

    /// The error of a value that is not acceptable.
    pub(crate) fn invalid(field: impl Display, value: &str, why: &str) -> Self {
        let message = format!("Invalid value: \"{value}\": {why}");
        Self::new("FieldValueInvalid", field, message)
    }

    pub(crate) fn required(field: impl Display, why: &str) -> Self {
        let colon = if why.is_empty() { "" } else { ": " };
        Self::new("FieldValueRequired", field, format!("Required value{colon}{why}"))
    }

    /// The error of a value that may not be set or changed.
    pub(crate) fn forbidden(field: impl Display, why: &str) -> Self {
        Self::new("FieldValueForbidden", field, format!("Forbidden: {why}"))
    }

    pub(crate) fn duplicate(field: impl Display, value: &str) -> Self {
        Self::new(
            "FieldValueDuplicate",
            field,
            format!("Duplicate value: \"{value}\""),
        )
    }

    pub(crate) fn unsupported(field: impl Display, value: &str, allowed: &[&str]) -> Self {
        let listed = allowed.join("\", \"");
        let message = format!("Unsupported value: \"{value}\": supported values: \"{listed}\"");
        Self::new("FieldValueNotSupported", field, message)
    }
}

impl ApiError {
    /// An error of any HTTP code, with the reason that Kubernetes gives this code.
    pub fn new(code: u16, message: impl Into<String>) -> Self {
        Self {
            code,
            reason: reason_of(code),
            message: message.into(),
            details: None,
            retry_after: None,
        }
    }

    /// 400 for a request that is malformed.
    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, message)
    }

    /// 404 for an object; `resource` is the plural, qualified by its group.
    pub(crate) fn not_found(resource: &str, name: &str) -> Self {
        Self::new(404, format!("{resource} \"{name}\" not found")).with_details_of(resource, name)
    }

    /// 404 for a path that is no resource.
    pub(crate) fn unknown_path() -> Self {
        Self::new(404, "the server could not find the requested resource")
    }

    /// 405 for a verb that the resource does not have.
    pub(crate) fn method_not_allowed(resource: &str, verb: &str) -> Self {
        let message = format!("{verb} is not supported on resources of kind \"{resource}\"");
        Self::new(405, message)
    }

    /// 409 for a name that is taken.
    pub(crate) fn already_exists(resource: &str, name: &str) -> Self {
        let mut error =
            Self::new(409, format!("{resource} \"{name}\" already exists")).with_details_of(resource, name);
        error.reason = "AlreadyExists";
        error
    }

    /// 409 for a write that lost a race or broke a precondition.
    pub(crate) fn conflict(resource: &str, name: &str, why: &str) -> Self {
        let message = format!("Operation cannot be fulfilled on {resource} \"{name}\": {why}");
        Self::new(409, message).with_details_of(resource, name)
    }

    /// 409 for a write based on an old resourceVersion.
    pub(crate) fn modified(resource: &str, name: &str) -> Self {
        let why =
            "the object has been modified; please apply your changes to the latest version and try again";
        Self::conflict(resource, name, why)
    }

    /// 403 for a write that a rule forbids.
    pub fn forbidden(resource: &str, name: &str, why: &str) -> Self {
        Self::new(403, format!("{resource} \"{name}\" is forbidden: {why}")).with_details_of(resource, name)
    }

    /// 410 for a resourceVersion that the event log no longer covers.
    pub(crate) fn expired(asked: u64, oldest: u64) -> Self {
        Self::new(410, format!("too old resource version: {asked} ({oldest})"))
    }

    /// 504 for a resourceVersion that does not exist yet.
    pub(crate) fn too_large_version(asked: u64, current: u64) -> Self {
        let message = format!("Too large resource version: {asked}, current: {current}");
        let mut error = Self::new(504, message);
        let cause = json!({"reason": "ResourceVersionTooLarge", "message": "Too large resource version"});
        error.details = Some(Box::new(json!({"causes": [cause], "retryAfterSeconds": 1})));
        error.retry_after = Some(1);
        error
    }

    /// 422 with the rejected fields.
    pub(crate) fn invalid(kind: &str, group: &str, name: &str, fields: &[InvalidField]) -> Self {
        let lines: Vec<String> = fields
            .iter()
            .map(|error| format!("{}: {}", error.field, error.message))
            .collect();
        let text = match lines.as_slice() {
            [one] => one.clone(),
            many => format!("[{}]", many.join(", ")),
        };
        let qualified = if group.is_empty() {
            kind.to_owned()
        } else {
            format!("{kind}.{group}")
        };
        let mut error = Self::new(422, format!("{qualified} \"{name}\" is invalid: {text}"));
        // kubectl prints the causes only, if there are any.
        let causes: Vec<Value> = fields
            .iter()
            .map(|error| json!({"reason": error.reason, "message": error.message, "field": error.field}))
            .collect();
        error.details = Some(Box::new(
            json!({"name": name, "group": group, "kind": kind, "causes": causes}),
        ));
        error
    }

    /// 500 for a failure that the request did not cause.
    pub(crate) fn internal(why: &str) -> Self {
        let details = json!({"causes": [{"message": why}]});
        Self {
            details: Some(Box::new(details)),
            ..Self::new(500, format!("Internal error occurred: {why}"))
        }
    }

    /// The refusal by a webhook or policy, with the HTTP code and the reason that it gave.
    pub(crate) fn denied(code: u16, reason: &str, message: String) -> Self {
        // [`ApiError`] holds static text, so the reason is looked up among those of Kubernetes; others are dropped.
        let mut known = (400..=504).map(reason_of).chain(["AlreadyExists", "Gone"]);
        Self {
            reason: known.find(|known| *known == reason).unwrap_or_default(),
            ..Self::new(code, message)
        }
    }

    /// Adds the details of a Status: the name of the object, and its resource as `plural` or `plural.group`.
    fn with_details_of(mut self, resource: &str, name: &str) -> Self {
        let (plural, group) = resource.split_once('.').unwrap_or((resource, ""));
        let mut details = json!({"name": name, "kind": plural});
        if !group.is_empty() {
            set(&mut details, "group", Value::from(group));
        }
        self.details = Some(Box::new(details));
        self
    }

    pub(crate) fn to_status(&self) -> Value {
        let mut status = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {},
            "status": "Failure", "message": self.message, "reason": self.reason, "code": self.code,
        });
        if let Some(details) = &self.details {
            set(&mut status, "details", Value::clone(details));
        }
        if let Some(seconds) = self.retry_after {
            // client-go reads the pause from here, other clients from the header.
            object::child(&mut status, "details")
                .insert("retryAfterSeconds".to_owned(), Value::from(seconds));
        }
        status
    }
}

/// The `Success` Status that answers a deletion or a create-only subresource.
pub(crate) fn success(code: u16, details: Option<Value>) -> Value {
    let mut status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"});
    if code != 200 {
        set(&mut status, "code", Value::from(code));
    }
    if let Some(details) = details {
        set(&mut status, "details", details);
    }
    status
}

/// The reason of a Status that has no better one than its HTTP status.
fn reason_of(code: u16) -> &'static str {
    match code {
        400 => "BadRequest",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "NotFound",
        405 => "MethodNotAllowed",
        406 => "NotAcceptable",
        409 => "Conflict",
        410 => "Expired",
        413 => "RequestEntityTooLarge",
        415 => "UnsupportedMediaType",
        422 => "Invalid",
        429 => "TooManyRequests",
        500 => "InternalError",
        503 => "ServiceUnavailable",
        504 => "Timeout",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{ApiError, InvalidField};

    #[test]
    fn each_rejected_field_is_a_cause() {
        let fields = [
            InvalidField::required("spec.containers", ""),
            InvalidField::invalid("metadata.name", "A", "must be lower case"),
        ];
        let error = ApiError::invalid("Pod", "", "A", &fields);
        let text = "Pod \"A\" is invalid: [spec.containers: Required value, metadata.name: Invalid value: \"A\": must be lower case]";
        assert_eq!(error.message, text);
        let expected = json!([
            {"reason": "FieldValueRequired", "message": "Required value", "field": "spec.containers"},
            {"reason": "FieldValueInvalid", "message": "Invalid value: \"A\": must be lower case", "field": "metadata.name"},
        ]);
        assert_eq!(error.to_status()["details"]["causes"], expected);
    }
}
