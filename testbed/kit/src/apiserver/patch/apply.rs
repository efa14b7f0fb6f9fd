//! Server-side apply: merges the fields that a manager declares, and removes fields that it no longer declares.
//!
//! Every apply is forced: it changes the fields of other managers too. Lists are replaced as a whole. `managedFields` has the
//! managers that apply, and no others: other writes neither give nor take ownership.

use serde_json::{Map, Value, json};

use crate::apiserver::object;

/// A manager of fields: its name, and the subresource that it applies, empty for the object itself.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Manager<'a> {
    pub(crate) name: &'a str,
    pub(crate) subresource: &'a str,
}

/// Metadata that only the server changes after an object's creation.
pub(crate) const SERVER_METADATA: [&str; 9] = [
    "name",
    "namespace",
    "generateName",
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "generation",
    "resourceVersion",
];

/// Returns the object after an apply. `live` is none when the apply creates the object.
pub(crate) fn apply(live: Option<&Value>, declared: &Value, manager: Manager<'_>) -> Value {
    let mut merged = live.cloned().unwrap_or_default();
    json_patch::merge(&mut merged, declared);
    let mut entries = object::array(&merged, "/metadata/managedFields").to_vec();
    let is_own = |entry: &Value| {
        object::text(entry, "/manager") == manager.name
            && object::text(entry, "/subresource") == manager.subresource
    };
    let own = entries.iter().position(is_own);
    let wanted = json!({
        "manager": manager.name, "operation": "Apply", "subresource": manager.subresource,
        "apiVersion": object::text(declared, "/apiVersion"),
        "fieldsType": "FieldsV1", "fieldsV1": fields_of(&owned(declared, manager)),
    });
    let mut before = Value::Null;
    if let Some(entry) = own.and_then(|at| entries.get_mut(at)) {
        before = std::mem::replace(entry, wanted);
    } else {
        entries.push(wanted);
    }
    let kept: Vec<&Value> = entries.iter().filter_map(|entry| entry.get("fieldsV1")).collect();
    prune(&mut merged, before.get("fieldsV1").unwrap_or(&Value::Null), &kept);
    object::meta(&mut merged).insert("managedFields".to_owned(), Value::from(entries));
    merged
}

/// The part of a declared object that can have owners: without fields that the server maintains. An apply to the object itself has
/// no say about status, which it may still contain.
fn owned(declared: &Value, manager: Manager<'_>) -> Value {
    let mut owned = declared.clone();
    let map = object::make_object(&mut owned);
    map.remove("apiVersion");
    map.remove("kind");
    if manager.subresource.is_empty() {
        map.remove("status");
    }
    if let Some(Value::Object(meta)) = map.get_mut("metadata") {
        meta.retain(|field, _| !SERVER_METADATA.contains(&field.as_str()));
    }
    owned
}

/// The fields of a value in the form of `FieldsV1`.
fn fields_of(value: &Value) -> Value {
    let mut fields = Map::new();
    for (field, below) in value.as_object().into_iter().flatten() {
        fields.insert(format!("f:{field}"), fields_of(below));
    }
    Value::Object(fields)
}

/// Removes the fields `before` that none of the managers `kept` has, and the objects that become empty by that.
fn prune(value: &mut Value, before: &Value, kept: &[&Value]) {
    let Value::Object(map) = value else { return };
    for (element, below) in before.as_object().into_iter().flatten() {
        let field = element.trim_start_matches("f:");
        let kept: Vec<&Value> = kept.iter().filter_map(|fields| fields.get(element)).collect();
        let Some(child) = map.get_mut(field) else { continue };
        prune(child, below, &kept);
        let is_leaf = *below == json!({});
        if kept.is_empty() && (is_leaf || *child == json!({})) {
            map.remove(field);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Applied by each of two managers in turn: the declared data, and the data afterwards.
    #[test]
    fn a_field_that_no_manager_declares_any_more_is_removed() {
        let mut live = json!({"data": {"updated": "0"}});
        for (name, declared, expected) in [
            (
                "a",
                json!({"mine": "1", "shared": "2"}),
                json!({"updated": "0", "mine": "1", "shared": "2"}),
            ),
            (
                "b",
                json!({"shared": "3"}),
                json!({"updated": "0", "mine": "1", "shared": "3"}),
            ),
            (
                "a",
                json!({"other": "4"}),
                json!({"updated": "0", "shared": "3", "other": "4"}),
            ),
            ("b", json!({}), json!({"updated": "0", "other": "4"})),
        ] {
            let manager = Manager {
                name,
                subresource: "",
            };
            live = apply(Some(&live), &json!({"data": declared}), manager);
            assert_eq!(live["data"], expected, "{name}");
        }
    }
}
