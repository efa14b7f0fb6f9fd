//! Sets of field paths in the `FieldsV1` form that `managedFields` uses.
//!
//! A set is a trie. Its keys are path elements in Kubernetes' spelling: a field `f:name`, a list item by its
//! keys `k:{"name":"x"}`, and a scalar item `v:"x"`.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::strategic::{ListRule, Schema, item_key};

/// A set of field paths.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct FieldSet {
    /// True if the path that ends here belongs to the set.
    pub(crate) member: bool,
    /// Longer paths.
    pub(crate) children: BTreeMap<String, FieldSet>,
}

impl FieldSet {
    /// A set with one field: the value itself, without anything below it.
    fn leaf() -> Self {
        Self {
            member: true,
            children: BTreeMap::new(),
        }
    }

    /// The set of all fields of a value.
    pub(crate) fn of(value: &Value, schema: &Schema) -> Self {
        fields_of(value, schema, &mut Vec::new())
    }

    pub(crate) fn is_empty(&self) -> bool {
        !self.member && self.children.values().all(Self::is_empty)
    }

    /// Adds another set.
    pub(crate) fn union(&mut self, other: &Self) {
        self.member |= other.member;
        for (element, theirs) in &other.children {
            self.children.entry(element.clone()).or_default().union(theirs);
        }
    }

    /// Takes another set's members away.
    pub(crate) fn subtract(&mut self, other: &Self) {
        self.member &= !other.member;
        for (element, theirs) in &other.children {
            if let Some(ours) = self.children.get_mut(element) {
                ours.subtract(theirs);
            }
        }
        self.children.retain(|_, child| !child.is_empty());
    }

    /// The members that both sets have.
    pub(crate) fn intersection(&self, other: &Self) -> Self {
        let mut both = Self {
            member: self.member && other.member,
            children: BTreeMap::new(),
        };
        for (element, ours) in &self.children {
            if let Some(theirs) = other.children.get(element) {
                let common = ours.intersection(theirs);
                if !common.is_empty() {
                    both.children.insert(element.clone(), common);
                }
            }
        }
        both
    }

    /// True if the set has this path or a longer one.
    pub(crate) fn touches(&self, path: &[String]) -> bool {
        match path.split_first() {
            None => !self.is_empty(),
            Some((first, rest)) => self.children.get(first).is_some_and(|c| c.touches(rest)),
        }
    }

    /// Removes a path given by field names, with all longer paths.
    pub(crate) fn remove(&mut self, path: &[&str]) {
        match path.split_first() {
            None => *self = Self::default(),
            Some((first, rest)) => {
                let element = format!("f:{first}");
                if let Some(child) = self.children.get_mut(&element) {
                    child.remove(rest);
                    if child.is_empty() {
                        self.children.remove(&element);
                    }
                }
            }
        }
    }

    /// Every member as a readable path such as `.spec.containers[name="x"].image`.
    pub(crate) fn paths(&self) -> Vec<String> {
        let mut paths = Vec::new();
        self.collect_paths("", &mut paths);
        paths
    }

    /// Adds the readable paths of all fields in the set, each with the prefix before it.
    fn collect_paths(&self, prefix: &str, paths: &mut Vec<String>) {
        if self.member {
            paths.push(prefix.to_owned());
        }
        for (element, child) in &self.children {
            child.collect_paths(&format!("{prefix}{}", readable_element(element)), paths);
        }
    }

    /// The set in `FieldsV1` form.
    pub(crate) fn to_value(&self) -> Value {
        let mut map = Map::new();
        if self.member && !self.children.is_empty() {
            map.insert(".".to_owned(), Value::Object(Map::new()));
        }
        for (element, child) in &self.children {
            map.insert(element.clone(), child.to_value());
        }
        Value::Object(map)
    }

    /// Reads the `FieldsV1` form.
    pub(crate) fn from_value(value: &Value) -> Self {
        let Value::Object(map) = value else {
            return Self::default();
        };
        let mut set = Self {
            member: map.is_empty() || map.contains_key("."),
            children: BTreeMap::new(),
        };
        for (element, child) in map.iter().filter(|(element, _)| *element != ".") {
            set.children.insert(element.clone(), Self::from_value(child));
        }
        set
    }

    /// Reads the `FieldsV1` form of a whole object, which is a set of fields and never itself a member.
    pub(crate) fn from_root(value: &Value) -> Self {
        let mut set = Self::from_value(value);
        set.member = false;
        set
    }
}

/// A path element as error messages write it: `.field`, `[key=value]` or `[=value]`.
fn readable_element(element: &str) -> String {
    if let Some(field) = element.strip_prefix("f:") {
        return format!(".{field}");
    }
    if let Some(key) = element.strip_prefix("k:") {
        let parsed: Map<String, Value> = serde_json::from_str(key).unwrap_or_default();
        let parts: Vec<String> = parsed.iter().map(|(k, v)| format!("{k}={v}")).collect();
        return format!("[{}]", parts.join(","));
    }
    format!("[={}]", element.strip_prefix("v:").unwrap_or(element))
}

/// The set of all fields that a value has. Atomic maps and lists count as one field each.
fn fields_of<'a>(value: &'a Value, schema: &Schema, path: &mut Vec<&'a str>) -> FieldSet {
    let mut set = FieldSet::default();
    match value {
        Value::Object(map) if !map.is_empty() && !schema.is_atomic_map(path) => {
            for (field, child) in map {
                path.push(field);
                set.children
                    .insert(format!("f:{field}"), fields_of(child, schema, path));
                path.pop();
            }
        }
        Value::Array(items) if !items.is_empty() => {
            for (element, item) in elements(items, &schema.list(path)) {
                let mut child = if item.is_object() {
                    fields_of(item, schema, path)
                } else {
                    FieldSet::leaf()
                };
                child.member = true;
                set.children.insert(element, child);
            }
            if set.children.is_empty() {
                return FieldSet::leaf();
            }
        }
        _ => return FieldSet::leaf(),
    }
    set
}

/// The items of a list with their path elements; none for an atomic list, whose items have no owners of their
/// own.
pub(crate) fn elements<'a>(items: &'a [Value], rule: &ListRule) -> Vec<(String, &'a Value)> {
    match rule {
        ListRule::Atomic => Vec::new(),
        ListRule::Set => items.iter().map(|item| (format!("v:{item}"), item)).collect(),
        ListRule::Map(keys) => items
            .iter()
            .filter_map(|item| Some((format!("k:{}", item_key(item, keys)?), item)))
            .collect(),
    }
}

/// The value at a path element of a value, if it is there.
pub(crate) fn lookup<'a>(value: &'a Value, element: &str, rule: &ListRule) -> Option<&'a Value> {
    match (value, element.strip_prefix("f:")) {
        (Value::Object(map), Some(field)) => map.get(field),
        (Value::Array(items), None) => lookup_item(items, element, rule),
        _ => None,
    }
}

/// The item of a list at a path element.
pub(crate) fn lookup_item<'a>(items: &'a [Value], element: &str, rule: &ListRule) -> Option<&'a Value> {
    let mut elements = elements(items, rule).into_iter();
    elements.find_map(|(found, item)| (found == element).then_some(item))
}

/// The members of `set` whose values differ between two objects; a member with longer paths below it, such as an item of a list,
/// never differs itself.
pub(crate) fn differing(set: &FieldSet, old: &Value, new: &Value, schema: &Schema) -> FieldSet {
    differing_at(set, Some(old), Some(new), schema, &mut Vec::new())
}

/// The fields of the set whose values differ between the old and the new object.
fn differing_at(
    set: &FieldSet,
    old: Option<&Value>,
    new: Option<&Value>,
    schema: &Schema,
    path: &mut Vec<String>,
) -> FieldSet {
    if old == new {
        // Equal values, which most of an object is, need no walk.
        return FieldSet::default();
    }
    let mut result = FieldSet {
        member: set.member && set.children.is_empty(),
        children: BTreeMap::new(),
    };
    let names: Vec<&str> = path.iter().map(String::as_str).collect();
    let rule = schema.list(&names);
    for (element, child) in &set.children {
        let field = element.strip_prefix("f:");
        path.extend(field.map(str::to_owned));
        let at = |value: Option<&'_ Value>| value.and_then(|v| lookup(v, element, &rule)).cloned();
        let found = differing_at(child, at(old).as_ref(), at(new).as_ref(), schema, path);
        if field.is_some() {
            path.pop();
        }
        if !found.is_empty() {
            result.children.insert(element.clone(), found);
        }
    }
    result
}
