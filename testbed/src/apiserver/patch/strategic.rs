//! Strategic merge patch: merge patch that knows list keys and obeys `$` directives.

use serde_json::{Map, Value};

use super::schema::{ListRule, Schema};
use crate::apiserver::object;
use crate::apiserver::status::ApiError;

const PATCH: &str = "$patch";
const RETAIN: &str = "$retainKeys";
const ORDER: &str = "$setElementOrder/";
const DELETE_PRIMITIVE: &str = "$deleteFromPrimitiveList/";

/// Merges a patch into an object of a built-in kind.
pub(crate) fn merge(target: &mut Value, patch: &Value, schema: &Schema) -> Result<(), ApiError> {
    let Value::Object(patch) = patch else {
        return Err(ApiError::bad_request(
            "a strategic merge patch must be a JSON object",
        ));
    };
    merge_map(object::make_object(target), patch, schema, &mut Vec::new())
}

fn directive(patch: &Value) -> Option<&str> {
    patch.get(PATCH).and_then(Value::as_str)
}

fn bad_directive(found: &str) -> ApiError {
    ApiError::bad_request(format!("unknown patch type {found:?} in map"))
}

fn merge_map<'a>(
    target: &mut Map<String, Value>,
    patch: &'a Map<String, Value>,
    schema: &Schema,
    at: &mut Vec<&'a str>,
) -> Result<(), ApiError> {
    match patch.get(PATCH).and_then(Value::as_str) {
        Some("replace") => {
            *target = patch
                .iter()
                .filter(|(k, _)| !k.starts_with('$'))
                .map(|(k, v)| (k.clone(), v.clone()))
                .collect();
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
        at.push(field);
        merge_field(target, field, change, schema, at)?;
        at.pop();
    }
    for (field, change) in patch {
        follow_list_directive(target, field, change, schema, at);
    }
    Ok(())
}

fn merge_field<'a>(
    target: &mut Map<String, Value>,
    field: &str,
    change: &'a Value,
    schema: &Schema,
    at: &mut Vec<&'a str>,
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
            merge_map(object::make_object(slot), map, schema, at)?;
        }
        Value::Array(items) => {
            let slot = target.entry(field).or_insert(Value::Null);
            merge_list(object::make_array(slot), items, schema, at)?;
        }
        scalar => {
            target.insert(field.to_owned(), scalar.clone());
        }
    }
    Ok(())
}

fn merge_list<'a>(
    target: &mut Vec<Value>,
    patch: &'a [Value],
    schema: &Schema,
    at: &mut Vec<&'a str>,
) -> Result<(), ApiError> {
    let replace = patch.iter().any(|item| directive(item) == Some("replace"));
    match schema.list(at) {
        ListRule::Map(keys) if !replace => {
            merge_keyed(target, patch, keys.first().map_or("", String::as_str), schema, at)
        }
        ListRule::Set if !replace => {
            for item in patch {
                if !target.contains(item) {
                    target.push(item.clone());
                }
            }
            Ok(())
        }
        _ => {
            *target = patch
                .iter()
                .filter(|item| directive(item).is_none())
                .cloned()
                .collect();
            Ok(())
        }
    }
}

fn merge_keyed<'a>(
    target: &mut Vec<Value>,
    patch: &'a [Value],
    key: &str,
    schema: &Schema,
    at: &mut Vec<&'a str>,
) -> Result<(), ApiError> {
    for item in patch {
        let (Value::Object(change), Some(identity)) = (item, item.get(key)) else {
            let list = at.join(".");
            return Err(ApiError::bad_request(format!(
                "map: {item} does not contain declared merge key: {key} ({list})"
            )));
        };
        let position = target.iter().position(|t| t.get(key) == Some(identity));
        match (directive(item), position) {
            (Some("delete"), found) => {
                if let Some(place) = found {
                    target.remove(place);
                }
            }
            (Some("merge") | None, found) => {
                let mut merged = found
                    .and_then(|place| target.get_mut(place))
                    .map(Value::take)
                    .unwrap_or_default();
                merge_map(object::make_object(&mut merged), change, schema, at)?;
                match found.and_then(|place| target.get_mut(place)) {
                    Some(slot) => *slot = merged,
                    None => target.push(merged),
                }
            }
            (Some(other), _) => return Err(bad_directive(other)),
        }
    }
    Ok(())
}

fn follow_list_directive<'a>(
    target: &mut Map<String, Value>,
    field: &'a str,
    change: &Value,
    schema: &Schema,
    at: &mut Vec<&'a str>,
) {
    let Value::Array(listed) = change else { return };
    if let Some(list) = field.strip_prefix(DELETE_PRIMITIVE)
        && let Some(items) = target.get_mut(list).and_then(Value::as_array_mut)
    {
        items.retain(|item| !listed.contains(item));
    }
    if let Some(list) = field.strip_prefix(ORDER)
        && let Some(items) = target.get_mut(list).and_then(Value::as_array_mut)
    {
        at.push(list);
        let rule = schema.list(at);
        at.pop();
        items.sort_by_key(|item| place(item, listed, &rule));
    }
}

/// The place of an item in a `$setElementOrder` list; items that it does not name keep their order after the others.
fn place(item: &Value, listed: &[Value], rule: &ListRule) -> usize {
    let same = |wanted: &Value| match rule {
        ListRule::Map(keys) => keys.first().is_some_and(|k| wanted.get(k) == item.get(k)),
        _ => wanted == item,
    };
    listed.iter().position(same).unwrap_or(listed.len())
}
