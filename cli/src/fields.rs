//! Fields of Kubernetes objects that are read as JSON. An absent field is empty.

use serde_json::Value;

/// The label of nodes that share their GPUs, by which the `DaemonSet` of the device plugin selects them.
pub(crate) const NODE_LABEL: &str = "gpushare";

pub(crate) fn text<'a>(object: &'a Value, pointer: &str) -> &'a str {
    object
        .pointer(pointer)
        .and_then(Value::as_str)
        .unwrap_or_default()
}

pub(crate) fn name(object: &Value) -> &str {
    text(object, "/metadata/name")
}

pub(crate) fn label<'a>(object: &'a Value, key: &str) -> &'a str {
    let value = object
        .pointer("/metadata/labels")
        .and_then(|labels| labels.get(key));
    value.and_then(Value::as_str).unwrap_or_default()
}

pub(crate) fn array<'a>(object: &'a Value, pointer: &str) -> &'a [Value] {
    object
        .pointer(pointer)
        .and_then(Value::as_array)
        .map_or(&[], Vec::as_slice)
}

pub(crate) fn number(object: &Value, pointer: &str) -> u64 {
    object
        .pointer(pointer)
        .and_then(Value::as_u64)
        .unwrap_or_default()
}

pub(crate) fn images(object: &Value, containers: &str) -> Vec<String> {
    let containers = array(object, containers);
    containers
        .iter()
        .map(|container| text(container, "/image").to_owned())
        .collect()
}

pub(crate) fn is_named(name: &str, objects: &[Value]) -> bool {
    objects.iter().any(|object| self::name(object) == name)
}

/// Returns true if a condition of an object has the status `True`.
pub(crate) fn has_condition(object: &Value, conditions: &str, kind: &str) -> bool {
    let mut conditions = array(object, conditions).iter();
    conditions.any(|condition| text(condition, "/type") == kind && text(condition, "/status") == "True")
}
