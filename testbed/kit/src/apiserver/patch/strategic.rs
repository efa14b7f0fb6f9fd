//! Strategic merge patch, a merge patch that knows the keys of list items. Of its directives only `$patch: delete` is obeyed.
//! `$retainKeys` and `$setElementOrder` are passed over: new items stand at the end.
//!
//! A table by field name stands for the tags of the Go structures of built-in kinds. Lists without a rule are atomic, as in
//! Kubernetes.

use serde_json::{Map, Value};

use crate::apiserver::object;
use crate::apiserver::status::ApiError;

/// Merges a patch into an object of a built-in kind.
pub(crate) fn merge(target: &mut Value, patch: &Value) -> Result<(), ApiError> {
    let Value::Object(patch) = patch else {
        return Err(ApiError::bad_request(
            "a strategic merge patch must be a JSON object",
        ));
    };
    merge_map(object::make_object(target), patch, &mut Vec::new())
}

/// Returns true if a patch deletes the field or list item that it is for.
fn deletes(patch: &Value) -> Result<bool, ApiError> {
    match patch.get("$patch") {
        None => Ok(false),
        Some(directive) if directive == "delete" => Ok(true),
        Some(other) => Err(ApiError::bad_request(format!(
            "unknown patch type {other} in map"
        ))),
    }
}

/// Merges a patch into the map at `field_path`.
fn merge_map<'a>(
    target: &mut Map<String, Value>,
    patch: &'a Map<String, Value>,
    field_path: &mut Vec<&'a str>,
) -> Result<(), ApiError> {
    for (field, change) in patch.iter().filter(|(field, _)| !field.starts_with('$')) {
        field_path.push(field);
        merge_field(target, field, change, field_path)?;
        field_path.pop();
    }
    Ok(())
}

/// Merges one field of a patch: null removes it, maps and lists are merged, any other value replaces it.
fn merge_field<'a>(
    target: &mut Map<String, Value>,
    field: &str,
    change: &'a Value,
    field_path: &mut Vec<&'a str>,
) -> Result<(), ApiError> {
    match change {
        Value::Null => {
            target.remove(field);
        }
        Value::Object(_) if deletes(change)? => {
            target.remove(field);
        }
        Value::Object(map) => {
            let slot = target.entry(field).or_insert(Value::Null);
            merge_map(object::make_object(slot), map, field_path)?;
        }
        Value::Array(items) => {
            let slot = target.entry(field).or_insert(Value::Null);
            merge_list(object::make_array(slot), items, field_path)?;
        }
        scalar => {
            target.insert(field.to_owned(), scalar.clone());
        }
    }
    Ok(())
}

/// Merges a list by the rule of its field: by a key, as a set, or as a whole.
fn merge_list<'a>(
    target: &mut Vec<Value>,
    patch: &'a [Value],
    field_path: &mut Vec<&'a str>,
) -> Result<(), ApiError> {
    match list_rule(field_path) {
        ListRule::Map(keys) => {
            let key = keys.first().copied().unwrap_or_default();
            return merge_keyed(target, patch, key, field_path);
        }
        ListRule::Set => {
            for item in patch {
                if !target.contains(item) {
                    target.push(item.clone());
                }
            }
        }
        ListRule::Atomic => *target = patch.to_vec(),
    }
    Ok(())
}

/// Merges a list whose items are found by a key; each patch item changes, adds or deletes one.
fn merge_keyed<'a>(
    target: &mut Vec<Value>,
    patch: &'a [Value],
    key: &str,
    field_path: &mut Vec<&'a str>,
) -> Result<(), ApiError> {
    for item in patch {
        let (Value::Object(change), Some(identity)) = (item, item.get(key)) else {
            let list = field_path.join(".");
            let why = format!("map: {item} does not contain declared merge key: {key} ({list})");
            return Err(ApiError::bad_request(why));
        };
        if deletes(item)? {
            target.retain(|old| old.get(key) != Some(identity));
            continue;
        }
        if let Some(old) = target.iter_mut().find(|old| old.get(key) == Some(identity)) {
            merge_map(object::make_object(old), change, field_path)?;
        } else {
            let mut new = Map::new();
            merge_map(&mut new, change, field_path)?;
            target.push(Value::Object(new));
        }
    }
    Ok(())
}

/// The way in which a patch merges a list.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ListRule {
    /// Replaced as a whole.
    Atomic,
    /// A set of scalars.
    Set,
    /// Items are objects that these fields identify.
    Map(&'static [&'static str]),
}

/// The key of the items of a list of objects, by the list's field.
const KEYS: &[(&str, &[&str])] = &[
    ("ownerReferences", &["uid"]),
    ("conditions", &["type"]),
    ("addresses", &["type"]),
    ("volumeMounts", &["mountPath"]),
];
/// Lists whose items are identified by their field `name`.
const NAMED: [&str; 14] = [
    "containers",
    "initContainers",
    "ephemeralContainers",
    "env",
    "volumes",
    "imagePullSecrets",
    "secrets",
    "schedulingGates",
    "resourceClaims",
    "claims",
    "volumeClaimTemplates",
    "webhooks",
    "matchConditions",
    "variables",
];

/// The merge rule of a list in a built-in kind, by the names of the fields that lead to it.
pub(super) fn list_rule(field_path: &[&str]) -> ListRule {
    let Some((field, parents)) = field_path.split_last() else {
        return ListRule::Atomic;
    };
    if NAMED.contains(field) {
        return ListRule::Map(&["name"]);
    }
    if let Some((_, keys)) = KEYS.iter().find(|(list, _)| list == field) {
        return ListRule::Map(keys);
    }
    match (parents.last().copied(), *field) {
        (Some("containers" | "initContainers"), "ports") => ListRule::Map(&["containerPort", "protocol"]),
        (Some("spec"), "ports") => ListRule::Map(&["port", "protocol"]),
        (_, "finalizers") => ListRule::Set,
        _ => ListRule::Atomic,
    }
}
