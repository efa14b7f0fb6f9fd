//! Container resources: defaults, the rules for requests and limits, and the quality-of-service class.

use proto::quantity::Quantity;
use serde_json::{Map, Value};

use crate::apiserver::object;
use crate::apiserver::status::FieldError;

/// Copies limits into requests that are not given.
pub(crate) fn default_requests(container: &mut Value) {
    let Some(limits) = object::object(container, "/resources/limits").cloned() else {
        return;
    };
    let resources = object::child(container, "resources");
    let requests = object::make_object(resources.entry("requests").or_insert(Value::Null));
    for (name, limit) in limits {
        requests.entry(name).or_insert(limit);
    }
}

/// Writes amounts given as JSON numbers as strings, the form in which the API keeps quantities.
pub(crate) fn normalize(amounts: Option<&mut Value>) {
    for amount in amounts
        .and_then(Value::as_object_mut)
        .into_iter()
        .flat_map(Map::values_mut)
    {
        if let Value::Number(number) = amount {
            *amount = Value::from(number.to_string());
        }
    }
}

/// The same for every container of a pod.
pub(crate) fn normalize_pod(pod: &mut Value) {
    for list in ["/spec/containers", "/spec/initContainers"] {
        for container in pod
            .pointer_mut(list)
            .and_then(Value::as_array_mut)
            .into_iter()
            .flatten()
        {
            normalize(container.pointer_mut("/resources/limits"));
            normalize(container.pointer_mut("/resources/requests"));
        }
    }
}

/// The same for a node.
pub(crate) fn normalize_node(node: &mut Value) {
    normalize(node.pointer_mut("/status/capacity"));
    normalize(node.pointer_mut("/status/allocatable"));
}

/// True if a resource is neither native nor of the `kubernetes.io` domain.
pub(crate) fn is_extended(name: &str) -> bool {
    name.contains('/') && !name.contains("kubernetes.io/") && !name.starts_with("requests.")
}

fn is_overcommittable(name: &str) -> bool {
    !is_extended(name) && !name.starts_with("hugepages-")
}

fn text_of(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn amount(value: &Value) -> Option<Quantity> {
    text_of(value).parse().ok()
}

/// Checks one container's resources; `at` is the path of the container.
pub(crate) fn check(container: &Value, at: &str, errors: &mut Vec<FieldError>) {
    let empty = Map::new();
    let limits = object::object(container, "/resources/limits").unwrap_or(&empty);
    let requests = object::object(container, "/resources/requests").unwrap_or(&empty);
    for (list, amounts) in [("limits", limits), ("requests", requests)] {
        for (name, value) in amounts {
            check_amount(&format!("{at}.resources.{list}"), name, value, errors);
        }
    }
    let field = format!("{at}.resources.requests");
    for (name, request) in requests {
        let Some(limit) = limits.get(name) else {
            if !is_overcommittable(name) {
                let why = "Limit must be set for non overcommitable resources";
                errors.push(FieldError::required(format!("{at}.resources.limits"), why));
            }
            continue;
        };
        let (Some(asked), Some(allowed)) = (amount(request), amount(limit)) else {
            continue;
        };
        let (asked_text, limit_text) = (text_of(request), text_of(limit));
        if !is_overcommittable(name) && asked != allowed {
            let why = format!("must be equal to {name} limit of {limit_text}");
            errors.push(FieldError::invalid(&field, &asked_text, &why));
        } else if asked > allowed {
            let why = format!("must be less than or equal to {name} limit of {limit_text}");
            errors.push(FieldError::invalid(&field, &asked_text, &why));
        }
    }
}

fn check_amount(list: &str, name: &str, value: &Value, errors: &mut Vec<FieldError>) {
    let field = format!("{list}[{name}]");
    let text = text_of(value);
    if !name.contains('/') && !is_native(name) {
        errors.push(FieldError::invalid(
            &field,
            name,
            "must be a standard resource type or fully qualified",
        ));
    }
    match amount(value) {
        Some(found) if text.starts_with('-') && found < Quantity::from_integer(0) => {
            errors.push(FieldError::invalid(
                &field,
                &text,
                "must be greater than or equal to 0",
            ));
        }
        Some(found) if is_extended(name) && found.integer().is_none() => {
            errors.push(FieldError::invalid(&field, &text, "must be an integer"));
        }
        _ => {}
    }
}

fn is_native(name: &str) -> bool {
    matches!(name, "cpu" | "memory" | "ephemeral-storage") || name.starts_with("hugepages-")
}

/// The first amount that is no quantity, as text.
pub(crate) fn unparsable(container: &Value) -> Option<String> {
    let lists = ["/resources/limits", "/resources/requests"];
    let mut amounts = lists
        .iter()
        .filter_map(|list| object::object(container, list))
        .flat_map(Map::values);
    amounts.find(|value| amount(value).is_none()).map(text_of)
}

/// Guaranteed, Burstable or `BestEffort`, by the cpu and memory of all containers.
pub(crate) fn qos_class(pod: &Value) -> &'static str {
    let mut any = false;
    let mut guaranteed = true;
    let containers = ["/spec/containers", "/spec/initContainers"]
        .into_iter()
        .flat_map(|p| object::array(pod, p));
    for container in containers {
        for name in ["cpu", "memory"] {
            let of = |list: &str| {
                let value = container.pointer(&format!("/resources/{list}/{name}"));
                value.and_then(amount).filter(|q| *q > Quantity::from_integer(0))
            };
            let (request, limit) = (of("requests"), of("limits"));
            any |= request.is_some() || limit.is_some();
            guaranteed &= limit.is_some() && (request.is_none() || request == limit);
        }
    }
    match (any, guaranteed) {
        (false, _) => "BestEffort",
        (true, true) => "Guaranteed",
        (true, false) => "Burstable",
    }
}
