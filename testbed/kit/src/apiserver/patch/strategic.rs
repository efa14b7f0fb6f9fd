//! Strategic merge patch, a merge patch that knows the keys of list items and obeys the directives `$patch`, `$retainKeys` and
//! `$setElementOrder`. `$deleteFromPrimitiveList` is left out.
//!
//! A table by field name stands for the tags of the Go structures of built-in kinds. Lists without a rule are atomic, as in
//! Kubernetes.

use serde_json::{Map, Value};

use crate::apiserver::object;
use crate::apiserver::status::ApiError;

const PATCH: &str = "$patch";
const RETAIN: &str = "$retainKeys";
const ORDER: &str = "$setElementOrder/";

/// Merges a patch into an object of a built-in kind.
pub(crate) fn merge(target: &mut Value, patch: &Value) -> Result<(), ApiError> {
    let Value::Object(patch) = patch else {
        return Err(ApiError::bad_request(
            "a strategic merge patch must be a JSON object",
        ));
    };
    merge_map(object::make_object(target), patch, &mut Vec::new())
}

/// The directive `$patch` of a patch, such as `delete`.
fn directive(patch: &Value) -> Option<&str> {
    patch.get(PATCH).and_then(Value::as_str)
}

/// The 400 of an unknown `$patch`.
fn bad_directive(found: &str) -> ApiError {
    ApiError::bad_request(format!("unknown patch type {found:?} in map"))
}

/// Merges a patch into the map at `field_path`; the directives `$patch` and `$retainKeys` apply first.
fn merge_map<'a>(
    target: &mut Map<String, Value>,
    patch: &'a Map<String, Value>,
    field_path: &mut Vec<&'a str>,
) -> Result<(), ApiError> {
    match patch.get(PATCH).and_then(Value::as_str) {
        Some("replace") => {
            target.clone_from(patch);
            target.retain(|field, _| !field.starts_with('$'));
            return Ok(());
        }
        Some("delete") => {
            target.clear();
            return Ok(());
        }
        Some("merge") | None => {}
        Some(other) => return Err(bad_directive(other)),
    }
    if let Some(kept) = patch.get(RETAIN).and_then(Value::as_array) {
        target.retain(|field, _| kept.iter().any(|k| k.as_str() == Some(field)));
    }
    for (field, change) in patch.iter().filter(|(field, _)| !field.starts_with('$')) {
        field_path.push(field);
        merge_field(target, field, change, field_path)?;
        field_path.pop();
    }
    // The order comes after the fields: it sorts the list that the patch has just merged.
    for (field, listed) in patch {
        if let (Some(list), Value::Array(listed)) = (field.strip_prefix(ORDER), listed) {
            sort_list(target, list, listed, field_path);
        }
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
        Value::Object(_) if directive(change) == Some("delete") => {
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
    // One item with `$patch: replace` is enough to replace the whole list, wherever the item stands.
    let replace = patch.iter().any(|item| directive(item) == Some("replace"));
    match list_rule(field_path) {
        ListRule::Map(keys) if !replace => {
            let key = keys.first().copied().unwrap_or_default();
            return merge_keyed(target, patch, key, field_path);
        }
        ListRule::Set if !replace => {
            for item in patch {
                if !target.contains(item) {
                    target.push(item.clone());
                }
            }
        }
        _ => {
            *target = patch.to_vec();
            target.retain(|item| directive(item).is_none());
        }
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
        let position = target.iter().position(|t| t.get(key) == Some(identity));
        match (directive(item), position) {
            (Some("delete"), found) => {
                if let Some(place) = found {
                    target.remove(place);
                }
            }
            (Some("merge") | None, found) => {
                let place = found.unwrap_or(target.len());
                // A key that no item of the list has makes a new item.
                if place == target.len() {
                    target.push(Value::Null);
                }
                if let Some(slot) = target.get_mut(place) {
                    merge_map(object::make_object(slot), change, field_path)?;
                }
            }
            (Some(other), _) => return Err(bad_directive(other)),
        }
    }
    Ok(())
}

/// Sorts a list of the target in the order of a `$setElementOrder`.
fn sort_list<'a>(
    target: &mut Map<String, Value>,
    list: &'a str,
    listed: &[Value],
    field_path: &mut Vec<&'a str>,
) {
    if let Some(items) = target.get_mut(list).and_then(Value::as_array_mut) {
        field_path.push(list);
        let rule = list_rule(field_path);
        field_path.pop();
        items.sort_by_key(|item| order_in(item, listed, &rule));
    }
}

/// The place of an item in a `$setElementOrder` list; items that it does not name keep their order after the others.
fn order_in(item: &Value, listed: &[Value], rule: &ListRule) -> usize {
    let same = |wanted: &Value| match rule {
        ListRule::Map(keys) => keys.first().is_some_and(|k| wanted.get(k) == item.get(k)),
        _ => wanted == item,
    };
    listed.iter().position(same).unwrap_or(listed.len())
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

/// Lists of objects: names of parent fields (empty for any parent), name of the list's field, merge keys.
const KEYED: &[(&[&str], &str, &[&str])] = &[
    (&[], "ownerReferences", &["uid"]),
    (&[], "conditions", &["type"]),
    (&[], "volumeMounts", &["mountPath"]),
    (&[], "volumeDevices", &["devicePath"]),
    (&[], "hostAliases", &["ip"]),
    (&[], "podIPs", &["ip"]),
    (&[], "hostIPs", &["ip"]),
    (
        &[],
        "topologySpreadConstraints",
        &["topologyKey", "whenUnsatisfiable"],
    ),
    (
        &["containers", "initContainers"],
        "ports",
        &["containerPort", "protocol"],
    ),
    (&["spec"], "ports", &["port", "protocol"]),
    (&["spec"], "variables", &["name"]),
    (&["status"], "addresses", &["type"]),
    (&["resources"], "claims", &["name"]),
];
/// Lists whose items are identified by their field `name`.
const NAMED: &str = "containers initContainers ephemeralContainers env volumes volumeClaimTemplates imagePullSecrets \
    secrets schedulingGates resourceClaims webhooks matchConditions";

fn is_listed(words: &str, field: &str) -> bool {
    words.split_whitespace().any(|word| word == field)
}

/// The merge rule of a list in a built-in kind, by the names of the fields that lead to it.
pub(super) fn list_rule(field_path: &[&str]) -> ListRule {
    let Some((field, parents)) = field_path.split_last() else {
        return ListRule::Atomic;
    };
    let parent = parents.last().copied().unwrap_or_default();
    if is_listed(NAMED, field) {
        return ListRule::Map(&["name"]);
    }
    for (under, name, keys) in KEYED {
        if name == field && (under.is_empty() || under.contains(&parent)) {
            return ListRule::Map(keys);
        }
    }
    match (parent, *field) {
        (_, "finalizers") | ("spec", "podCIDRs" | "loadBalancerSourceRanges") => ListRule::Set,
        _ => ListRule::Atomic,
    }
}
