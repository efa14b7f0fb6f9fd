//! Server-side apply: merges the fields that a manager declares, and removes those that no manager declares any more.
//!
//! Every apply is treated as one with `force`, as the plugin and the testbed itself send it: there are no conflicts of managers.
//! `managedFields` has the managers that apply, and no others: other writes neither give nor take ownership, unless they send the
//! field itself. Lists of built-in kinds merge by the keys of [`list_rule`]; in custom resources only those of the metadata do,
//! and `x-kubernetes-list-type` is not known. Maps are merged by field, also those that are atomic in kube-apiserver, such as
//! `nodeSelector`.

use serde_json::{Map, Value, json};

use super::strategic::{ListRule, list_rule};
use crate::apiserver::object;

/// A manager of fields: its name, and the subresource that it applies to, empty for the object itself.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Manager<'a> {
    pub(crate) name: &'a str,
    pub(crate) subresource: &'a str,
}

impl Manager<'_> {
    /// Returns true if an entry of `managedFields` is this manager's.
    fn has(&self, entry: &Value) -> bool {
        object::text(entry, "/manager") == self.name
            && object::text(entry, "/subresource") == self.subresource
    }
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

/// Returns the object after an apply. `live` is the stored object; `None` if the apply creates it.
pub(crate) fn apply(live: Option<&Value>, declared: &Value, manager: Manager<'_>, is_custom: bool) -> Value {
    let place = Place {
        is_custom,
        fields: Vec::new(),
    };
    let mut merged = live.cloned().unwrap_or_default();
    merge(&mut merged, declared, &place);
    let mut entries = object::array(&merged, "/metadata/managedFields").to_vec();
    let fields = fields_of(&ownable_part(declared, manager), &place);
    let entry_after = json!({
        "manager": manager.name, "operation": "Apply", "subresource": manager.subresource,
        "apiVersion": object::text(declared, "/apiVersion"), "fieldsType": "FieldsV1", "fieldsV1": fields,
    });
    let mut entry_before = Value::Null;
    if let Some(entry) = entries.iter_mut().find(|entry| manager.has(entry)) {
        entry_before = std::mem::replace(entry, entry_after);
    } else {
        entries.push(entry_after);
    }
    let owned: Vec<&Value> = entries.iter().filter_map(|entry| entry.get("fieldsV1")).collect();
    prune(
        &mut merged,
        entry_before.get("fieldsV1").unwrap_or(&Value::Null),
        &owned,
        &place,
    );
    object::meta(&mut merged).insert("managedFields".to_owned(), Value::from(entries));
    merged
}

/// The part of a declared object that its manager comes to own: without fields that the server maintains, and without the status,
/// which only an apply to the subresource `status` sets.
fn ownable_part(declared: &Value, manager: Manager<'_>) -> Value {
    let mut ownable = declared.clone();
    let map = object::make_object(&mut ownable);
    map.remove("apiVersion");
    map.remove("kind");
    if manager.subresource.is_empty() {
        map.remove("status");
    }
    if let Some(Value::Object(meta)) = map.get_mut("metadata") {
        meta.retain(|field, _| !SERVER_METADATA.contains(&field.as_str()));
    }
    ownable
}

/// A place in an object: the names of the fields that lead there. An item of a list is at the place of the list.
#[derive(Clone)]
struct Place<'a> {
    is_custom: bool,
    fields: Vec<&'a str>,
}

impl<'a> Place<'a> {
    /// The place below an element of `FieldsV1` (`f:name` for a field), or below a plain field name.
    fn below(&self, element: &'a str) -> Self {
        let mut place = self.clone();
        if !is_item(element) {
            place.fields.push(element.trim_start_matches("f:"));
        }
        place
    }

    fn rule(&self) -> ListRule {
        if self.is_custom && self.fields.first() != Some(&"metadata") {
            return ListRule::Atomic;
        }
        list_rule(&self.fields)
    }

    /// The name of a list's item in `FieldsV1`; none for items of a list that is replaced as a whole.
    fn item_name(&self, item: &Value) -> Option<String> {
        match self.rule() {
            ListRule::Atomic => None,
            ListRule::Set => Some(format!("v:{item}")),
            ListRule::Map(keys) => {
                let mut key_fields = Map::new();
                for key in keys {
                    let value = item.get(key).cloned();
                    // `protocol` of a port, the one key with a default.
                    let value = value.or_else(|| (*key == "protocol").then(|| "TCP".into()))?;
                    key_fields.insert((*key).to_owned(), value);
                }
                Some(format!("k:{}", Value::Object(key_fields)))
            }
        }
    }
}

/// Returns true if an element of `FieldsV1` is an item of a list, by its key or its value.
fn is_item(element: &str) -> bool {
    element.starts_with("k:") || element.starts_with("v:")
}

/// Writes the declared fields into an object, and leaves its other fields alone.
fn merge(target: &mut Value, declared: &Value, place: &Place<'_>) {
    match declared {
        Value::Object(fields) => {
            let map = object::make_object(target);
            for (field, value) in fields {
                merge(
                    map.entry(field).or_insert(Value::Null),
                    value,
                    &place.below(field),
                );
            }
        }
        Value::Array(items) if place.rule() != ListRule::Atomic => {
            let list = object::make_array(target);
            for item in items {
                let name = place.item_name(item);
                let same = |old: &&mut Value| name.is_some() && place.item_name(old) == name;
                match list.iter_mut().find(same) {
                    Some(slot) => merge(slot, item, place),
                    None => list.push(item.clone()),
                }
            }
        }
        _ => *target = declared.clone(),
    }
}

/// The fields of a value in the form of `FieldsV1`.
fn fields_of(value: &Value, place: &Place<'_>) -> Value {
    let mut fields = Map::new();
    match value {
        Value::Object(map) => {
            for (field, below) in map {
                fields.insert(format!("f:{field}"), fields_of(below, &place.below(field)));
            }
        }
        Value::Array(items) => {
            for item in items {
                if let Some(name) = place.item_name(item) {
                    fields.insert(name, fields_of(item, place));
                }
            }
        }
        _ => {}
    }
    Value::Object(fields)
}

/// Removes from `value` the fields that a manager owned `before` and that no `FieldsV1` in `owned` has now, with parents that
/// become empty by that.
fn prune(value: &mut Value, before: &Value, owned: &[&Value], place: &Place<'_>) {
    for (element, below) in before.as_object().into_iter().flatten() {
        let owned: Vec<&Value> = owned.iter().filter_map(|fields| fields.get(element)).collect();
        let place_below = place.below(element);
        let is_dropped = |child: &Value| {
            // A field without fields below and an item of a list belong to the manager as a whole, others only by what is below.
            let is_whole = *below == json!({}) || is_item(element);
            owned.is_empty() && (is_whole || *child == json!({}) || *child == json!([]))
        };
        match value {
            Value::Object(map) => {
                let field = element.trim_start_matches("f:");
                let Some(child) = map.get_mut(field) else { continue };
                prune(child, below, &owned, &place_below);
                if is_dropped(child) {
                    map.remove(field);
                }
            }
            Value::Array(items) => items.retain_mut(|item| {
                if place.item_name(item).as_ref() != Some(element) {
                    return true;
                }
                prune(item, below, &owned, &place_below);
                !is_dropped(item)
            }),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn by(name: &str) -> Manager<'_> {
        Manager {
            name,
            subresource: "",
        }
    }

    /// Each case is an apply by one of two managers: the declared data, and the object's data afterwards.
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
            live = apply(Some(&live), &json!({"data": declared}), by(name), false);
            assert_eq!(live["data"], expected, "{name}");
        }
    }

    #[test]
    fn lists_merge_by_their_keys() {
        let webhooks = |webhooks: Value| json!({"metadata": {"finalizers": ["x"]}, "webhooks": webhooks});
        let live = json!({"webhooks": [{"name": "old", "timeoutSeconds": 3}]});
        let two = webhooks(json!([{"name": "old", "failurePolicy": "Fail"}, {"name": "new"}]));
        let live = apply(Some(&live), &two, by("a"), false);
        let merged = json!([{"name": "old", "timeoutSeconds": 3, "failurePolicy": "Fail"}, {"name": "new"}]);
        assert_eq!(live["webhooks"], merged);
        let other = json!({"metadata": {"finalizers": ["y"]}, "webhooks": [{"name": "old"}]});
        let live = apply(Some(&live), &other, by("b"), false);
        assert_eq!(live["metadata"]["finalizers"], json!(["x", "y"]));
        let live = apply(Some(&live), &webhooks(json!([{"name": "new"}])), by("a"), false);
        assert_eq!(
            live["webhooks"],
            json!([{"name": "old", "timeoutSeconds": 3}, {"name": "new"}])
        );
        let live = apply(Some(&live), &json!({}), by("b"), false);
        assert_eq!(live["webhooks"], json!([{"name": "new"}]), "with all its fields");
        assert_eq!(live["metadata"]["finalizers"], json!(["x"]));
        let custom = json!({"webhooks": merged});
        let custom = apply(Some(&custom), &other, by("b"), true);
        assert_eq!(custom["webhooks"], json!([{"name": "old"}]));
    }
}
