//! Access to parts of an untyped object.

use chrono::{DateTime, SecondsFormat, Utc};
use serde_json::{Map, Value};

/// The string at a JSON pointer; empty when absent or not a string.
pub fn text<'a>(value: &'a Value, pointer: &str) -> &'a str {
    value.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
}

pub(crate) fn integer(value: &Value, pointer: &str) -> Option<i64> {
    value.pointer(pointer).and_then(Value::as_i64)
}

/// True if the value at a JSON pointer is `true`.
pub(crate) fn is_true(value: &Value, pointer: &str) -> bool {
    value.pointer(pointer) == Some(&Value::Bool(true))
}

/// True if something other than null is at a JSON pointer.
pub fn is_set(value: &Value, pointer: &str) -> bool {
    !matches!(value.pointer(pointer), None | Some(Value::Null))
}

/// The array at a JSON pointer; empty when absent.
pub(crate) fn array<'a>(value: &'a Value, pointer: &str) -> &'a [Value] {
    match value.pointer(pointer) {
        Some(Value::Array(items)) => items,
        _ => &[],
    }
}

/// The items of the array at a JSON pointer, to change; empty when absent.
pub(crate) fn items_mut<'a>(value: &'a mut Value, pointer: &str) -> &'a mut [Value] {
    match value.pointer_mut(pointer) {
        Some(Value::Array(items)) => items,
        _ => &mut [],
    }
}

/// The app containers of a pod, then its init containers.
pub(crate) fn containers(pod: &Value) -> impl Iterator<Item = &Value> {
    let init = array(pod, "/spec/initContainers");
    array(pod, "/spec/containers").iter().chain(init)
}

pub(crate) fn object<'a>(value: &'a Value, pointer: &str) -> Option<&'a Map<String, Value>> {
    value.pointer(pointer).and_then(Value::as_object)
}

/// The value as an object; a value of another type is replaced by an empty object.
pub(crate) fn make_object(value: &mut Value) -> &mut Map<String, Value> {
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    match value {
        Value::Object(map) => map,
        _ => unreachable!("made an object above"),
    }
}

/// The value as an array; a value of another type is replaced by an empty array.
pub(crate) fn make_array(value: &mut Value) -> &mut Vec<Value> {
    if !value.is_array() {
        *value = Value::Array(Vec::new());
    }
    match value {
        Value::Array(items) => items,
        _ => unreachable!("made an array above"),
    }
}

/// The object under a field, created if there is none.
pub(crate) fn child<'a>(value: &'a mut Value, field: &str) -> &'a mut Map<String, Value> {
    make_object(make_object(value).entry(field).or_insert(Value::Null))
}

/// A copy of an object with the `managedFields` of another state of it.
pub(crate) fn with_managers_of(object: &Value, managed: &Value) -> Value {
    let mut object = object.clone();
    let managers = managed.pointer("/metadata/managedFields").cloned();
    set(meta(&mut object), "managedFields", managers);
    object
}

/// The metadata of an object, created if there is none.
pub(crate) fn meta(value: &mut Value) -> &mut Map<String, Value> {
    child(value, "metadata")
}

/// Sets a field, or removes it for `None`.
pub(crate) fn set(map: &mut Map<String, Value>, field: &str, value: Option<Value>) {
    match value {
        Some(value) => {
            map.insert(field.to_owned(), value);
        }
        None => {
            map.remove(field);
        }
    }
}

/// Inserts a field unless the object has it.
pub(crate) fn default(map: &mut Map<String, Value>, field: &str, value: impl Into<Value>) {
    if !map.contains_key(field) {
        map.insert(field.to_owned(), value.into());
    }
}

/// Removes every null member, as decoding into a Go structure would.
pub(crate) fn strip_nulls(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.retain(|_, v| !v.is_null());
            map.values_mut().for_each(strip_nulls);
        }
        Value::Array(items) => items.iter_mut().for_each(strip_nulls),
        _ => {}
    }
}

/// A time as metadata writes it: UTC, whole seconds.
pub(crate) fn timestamp(at: DateTime<Utc>) -> Value {
    Value::from(at.to_rfc3339_opts(SecondsFormat::Secs, true))
}

/// Parses a time that [`timestamp`] or a client wrote.
pub(crate) fn parse_time(text: &str) -> Option<DateTime<Utc>> {
    Some(DateTime::parse_from_rfc3339(text).ok()?.to_utc())
}

/// Returns true if a deletion of the object has begun.
pub(crate) fn is_deleting(value: &Value) -> bool {
    is_set(value, "/metadata/deletionTimestamp")
}

/// True if the object carries finalizers.
pub(crate) fn has_finalizers(value: &Value) -> bool {
    !array(value, "/metadata/finalizers").is_empty()
}
