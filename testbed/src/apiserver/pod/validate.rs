//! Validation of a decoded pod: required fields, names, resources.

use std::collections::HashSet;

use serde_json::Value;

use super::resources;
use crate::apiserver::name;
use crate::apiserver::object;
use crate::apiserver::status::FieldError;

/// The problems of a defaulted pod.
pub(crate) fn check(pod: &Value) -> Vec<FieldError> {
    let mut errors = Vec::new();
    let mut names = HashSet::new();
    if object::array(pod, "/spec/containers").is_empty() {
        errors.push(FieldError::required("spec.containers", ""));
    }
    for list in ["initContainers", "containers"] {
        for (i, container) in object::array(pod, &format!("/spec/{list}")).iter().enumerate() {
            let at = format!("spec.{list}[{i}]");
            check_container(container, &at, &mut names, &mut errors);
        }
    }
    let policy = object::text(pod, "/spec/restartPolicy");
    if !matches!(policy, "Always" | "OnFailure" | "Never") {
        let allowed = ["Always", "OnFailure", "Never"];
        errors.push(FieldError::unsupported("spec.restartPolicy", policy, &allowed));
    }
    let grace = pod
        .pointer("/spec/terminationGracePeriodSeconds")
        .and_then(Value::as_i64);
    if let Some(negative) = grace.filter(|g| *g < 0) {
        let why = "must be greater than or equal to 0";
        errors.push(FieldError::invalid(
            "spec.terminationGracePeriodSeconds",
            &negative.to_string(),
            why,
        ));
    }
    errors
}

fn check_container<'a>(
    container: &'a Value,
    at: &str,
    names: &mut HashSet<&'a str>,
    errors: &mut Vec<FieldError>,
) {
    let found = object::text(container, "/name");
    if found.is_empty() {
        errors.push(FieldError::required(format!("{at}.name"), ""));
    } else if !name::is_label(found) {
        errors.push(FieldError::invalid(
            format!("{at}.name"),
            found,
            "a lowercase RFC 1123 label is required",
        ));
    } else if !names.insert(found) {
        errors.push(FieldError::duplicate(format!("{at}.name"), found));
    }
    if object::text(container, "/image").is_empty() {
        errors.push(FieldError::required(format!("{at}.image"), ""));
    }
    resources::check(container, at, errors);
}
