//! Server-side apply: merges the fields that a manager declares, removes fields that it no longer declares, and
//! refuses changes of other managers' fields.

use serde_json::{Value, json};

use super::fields::{FieldSet, differing, elements, lookup, lookup_item};
use super::managers::{self, FieldWriter, Manager, ManagerOperation};
use super::strategic::{ListRule, Schema};
use crate::apiserver::object;
use crate::apiserver::status::ApiError;

/// Returns the object after an apply. `live` is none when the apply creates the object.
pub(crate) fn apply(
    live: Option<&Value>,
    declared: &Value,
    writer: FieldWriter<'_>,
    force: bool,
    schema: &Schema,
) -> Result<Value, ApiError> {
    let mut wanted = FieldSet::of(&managers::contents(declared), schema);
    if writer.subresource.is_empty() {
        // An apply to the object itself has no say about status, which it may still contain.
        wanted.remove(&["status"]);
    }
    let mut merged = live.cloned().unwrap_or(Value::Null);
    merge(&mut merged, declared, schema, &mut Vec::new());
    let mut others = recorded(live, writer, schema);
    let own = others
        .iter()
        .position(|m| m.is(writer, ManagerOperation::Apply))
        .map(|at| others.remove(at));
    // Only a field whose value changes can conflict: two managers may own a field with the same value.
    if let Some(live) = live {
        settle_conflicts(&mut others, &wanted, live, &merged, force, schema)?;
    }
    let mut dropped = own.map(|m| m.fields).unwrap_or_default();
    dropped.subtract(&wanted);
    let mut kept = wanted.clone();
    for other in &others {
        kept.union(&other.fields);
    }
    let mut pruning = Pruning {
        kept: &kept,
        schema,
        path: Vec::new(),
        names: Vec::new(),
    };
    pruning.prune(&mut merged, &dropped);
    let unchanged = live.is_some_and(|l| managers::contents(l) == managers::contents(&merged));
    let mut entry = Manager::new(writer, ManagerOperation::Apply, wanted);
    let before = live.map(managers::read).unwrap_or_default();
    if let Some(old) = before.iter().find(|m| m.is(writer, ManagerOperation::Apply))
        && unchanged
        && old.fields == entry.fields
    {
        // An apply that changes nothing keeps its time, so that it writes no new version.
        entry.time = old.time.clone();
    }
    others.insert(0, entry);
    managers::write(&mut merged, &others);
    Ok(merged)
}

/// The managers that an object records. An object without any is owned by `before-first-apply`, as in Kubernetes.
fn recorded(live: Option<&Value>, writer: FieldWriter<'_>, schema: &Schema) -> Vec<Manager> {
    let Some(live) = live else { return Vec::new() };
    let managers = managers::read(live);
    if managers.is_empty() {
        vec![managers::before_first_apply(live, writer, schema)]
    } else {
        managers
    }
}

/// Takes contested fields away from other managers if the apply is forced, else refuses the apply with a 409. Contested
/// are fields that the apply changes and another manager owns.
fn settle_conflicts(
    others: &mut [Manager],
    wanted: &FieldSet,
    live: &Value,
    merged: &Value,
    force: bool,
    schema: &Schema,
) -> Result<(), ApiError> {
    let changed = differing(wanted, live, merged, schema);
    let mut conflicts = Vec::new();
    for other in others {
        let contested = other.fields.intersection(&changed);
        if contested.is_empty() {
            continue;
        }
        if force {
            other.fields.subtract(&contested);
        } else {
            let whose = format!("\"{}\" using {}", describe(other), other.api_version);
            conflicts.push((whose, contested.paths()));
        }
    }
    if conflicts.is_empty() {
        Ok(())
    } else {
        Err(conflict(&conflicts))
    }
}

/// A manager as conflict messages name it; the caller writes the quotes around it.
fn describe(manager: &Manager) -> String {
    if manager.subresource.is_empty() {
        manager.name.clone()
    } else {
        format!("{}\" with subresource \"{}", manager.name, manager.subresource)
    }
}

/// The 409 of an apply: a message and a cause for each field that another manager owns.
fn conflict(conflicts: &[(String, Vec<String>)]) -> ApiError {
    let n_conflicts: usize = conflicts.iter().map(|(_, paths)| paths.len()).sum();
    let (mut parts, mut causes) = (Vec::new(), Vec::new());
    for (whose, paths) in conflicts {
        parts.push(match paths.as_slice() {
            [one] => format!("conflict with {whose}: {one}"),
            many => format!("conflicts with {whose}:\n- {}", many.join("\n- ")),
        });
        for path in paths {
            let message = format!("conflict with {whose}");
            causes.push(json!({"reason": "FieldManagerConflict", "message": message, "field": path}));
        }
    }
    let plural = if n_conflicts == 1 { "" } else { "s" };
    let parts = parts.join("\n");
    let message = format!("Apply failed with {n_conflicts} conflict{plural}: {parts}");
    let mut error = ApiError::new(409, message);
    error.details = Some(Box::new(json!({"causes": causes})));
    error
}

/// Writes the declared fields into the object, and leaves its other fields alone.
fn merge<'a>(target: &mut Value, declared: &'a Value, schema: &Schema, path: &mut Vec<&'a str>) {
    match declared {
        Value::Object(fields) if !schema.is_atomic_map(path) => {
            let map = object::make_object(target);
            for (field, value) in fields {
                path.push(field);
                merge(map.entry(field).or_insert(Value::Null), value, schema, path);
                path.pop();
            }
        }
        Value::Array(items) => match schema.list(path) {
            ListRule::Atomic => *target = declared.clone(),
            rule => merge_items(object::make_array(target), items, &rule, schema, path),
        },
        _ => *target = declared.clone(),
    }
}

/// Merges declared items into a list: an item with the same key is merged, any other is appended.
fn merge_items<'a>(
    target: &mut Vec<Value>,
    items: &'a [Value],
    rule: &ListRule,
    schema: &Schema,
    path: &mut Vec<&'a str>,
) {
    for (element, item) in elements(items, rule) {
        match position(target, &element, rule).and_then(|at| target.get_mut(at)) {
            Some(slot) => merge(slot, item, schema, path),
            None => target.push(item.clone()),
        }
    }
}

/// Removes fields that a manager no longer declares and no other manager owns, and the lists and objects that
/// become empty by that.
struct Pruning<'a> {
    kept: &'a FieldSet,
    schema: &'a Schema,
    path: Vec<String>,
    names: Vec<String>,
}

impl Pruning<'_> {
    /// Removes the fields that the manager no longer declares, unless another manager owns something in them.
    fn prune(&mut self, value: &mut Value, dropped: &FieldSet) {
        for (element, child) in &dropped.children {
            let field = element.strip_prefix("f:");
            let names: Vec<&str> = self.names.iter().map(String::as_str).collect();
            let rule = self.schema.list(&names);
            self.path.push(element.clone());
            self.names.extend(field.map(str::to_owned));
            if child.member && !self.kept.touches(&self.path) {
                remove(value, element, &rule);
            } else if let Some(inner) = lookup_mut(value, element, &rule) {
                self.prune(inner, child);
                let is_empty = inner == &json!({}) || inner == &json!([]);
                if is_empty && !self.kept.touches(&self.path) {
                    remove(value, element, &rule);
                }
            }
            self.path.pop();
            if field.is_some() {
                self.names.pop();
            }
        }
    }
}

/// The index of the list item that a path element names.
fn position(items: &[Value], element: &str, rule: &ListRule) -> Option<usize> {
    let found = lookup_item(items, element, rule)?;
    items.iter().position(|item| std::ptr::eq(item, found))
}

/// The child of a value under a path element, to be changed.
fn lookup_mut<'a>(value: &'a mut Value, element: &str, rule: &ListRule) -> Option<&'a mut Value> {
    lookup(value, element, rule)?;
    match (value, element.strip_prefix("f:")) {
        (Value::Object(map), Some(field)) => map.get_mut(field),
        (Value::Array(items), None) => position(items, element, rule).and_then(|at| items.get_mut(at)),
        _ => None,
    }
}

/// Removes the child of a value under a path element.
fn remove(value: &mut Value, element: &str, rule: &ListRule) {
    match (value, element.strip_prefix("f:")) {
        (Value::Object(map), Some(field)) => {
            map.remove(field);
        }
        (Value::Array(items), None) => {
            if let Some(at) = position(items, element, rule) {
                items.remove(at);
            }
        }
        _ => {}
    }
}
