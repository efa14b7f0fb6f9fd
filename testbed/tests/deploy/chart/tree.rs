//! An object with conditions at the places that differ between combinations of components.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::conditions::{Choice, Condition, Universe};

/// A value under all combinations.
#[derive(Clone, Debug)]
pub(super) enum Tree {
    /// A text, number or the like that is the same everywhere.
    Same(Value),
    Map(Vec<(String, Condition, Tree)>),
    List(Vec<(Condition, Tree)>),
    /// Values that have nothing in common.
    Either(Vec<(Condition, Value)>),
}

impl Tree {
    /// From the value in each combination; `place` is for messages.
    pub(super) fn build(universe: &Universe, values: &[(usize, &Value)], place: &str) -> Self {
        let (_, first) = values[0];
        let has_fields = |value: &Value| value.as_object().is_some_and(|fields| !fields.is_empty());
        let has_items = |value: &Value| value.as_array().is_some_and(|items| !items.is_empty());
        if values.iter().all(|(_, value)| has_fields(value)) {
            return Self::map(universe, values, place);
        }
        if values.iter().all(|(_, value)| has_items(value)) {
            return Self::list(universe, values, place);
        }
        if values.iter().all(|(_, value)| *value == first) {
            return Self::Same(first.clone());
        }
        let among: Vec<usize> = values.iter().map(|(idx, _)| *idx).collect();
        let mut different: Vec<&Value> = Vec::new();
        for (_, value) in values {
            if !different.contains(value) {
                different.push(value);
            }
        }
        let with_condition = |value: &Value| {
            let wanted: Vec<usize> = values
                .iter()
                .filter(|(_, found)| *found == value)
                .map(|(idx, _)| *idx)
                .collect();
            (universe.condition(&among, &wanted), value.clone())
        };
        Self::Either(different.into_iter().map(with_condition).collect())
    }

    fn map(universe: &Universe, values: &[(usize, &Value)], place: &str) -> Self {
        let among: Vec<usize> = values.iter().map(|(idx, _)| *idx).collect();
        let keys: BTreeSet<&String> = values
            .iter()
            .flat_map(|(_, value)| value.as_object().unwrap().keys())
            .collect();
        let mut fields = Vec::new();
        for key in keys {
            let found: Vec<(usize, &Value)> = values
                .iter()
                .filter_map(|(idx, value)| Some((*idx, value.get(key)?)))
                .collect();
            let wanted: Vec<usize> = found.iter().map(|(idx, _)| *idx).collect();
            let condition = universe.condition(&among, &wanted);
            fields.push((
                key.clone(),
                condition,
                Self::build(universe, &found, &format!("{place}/{key}")),
            ));
        }
        Self::Map(fields)
    }

    fn list(universe: &Universe, values: &[(usize, &Value)], place: &str) -> Self {
        let among: Vec<usize> = values.iter().map(|(idx, _)| *idx).collect();
        let lists: Vec<(usize, &Vec<Value>)> = values
            .iter()
            .map(|(idx, value)| (*idx, value.as_array().unwrap()))
            .collect();
        let n_first = lists[0].1.len();
        let is_unnamed = |item: &Value| item.is_object() && item.get("name").is_none();
        // Lists of the same length without names, such as the rules of a network policy, differ within their items.
        let is_by_index = lists
            .iter()
            .all(|(_, list)| list.len() == n_first && list.iter().all(is_unnamed));
        let keys_of = |list: &Vec<Value>| -> Vec<String> {
            list.iter()
                .enumerate()
                .map(|(idx, item)| match item.get("name") {
                    _ if is_by_index => idx.to_string(),
                    Some(name) => name.to_string(),
                    None => item.to_string(),
                })
                .collect()
        };
        let mut order: Vec<String> = Vec::new();
        for (_, list) in &lists {
            let mut at = 0;
            for key in keys_of(list) {
                if let Some(found) = order.iter().position(|known| *known == key) {
                    assert!(found >= at, "{place}: {key} is at different places of the list");
                    at = found + 1;
                } else {
                    order.insert(at, key);
                    at += 1;
                }
            }
        }
        let mut items = Vec::new();
        for key in order {
            let found: Vec<(usize, &Value)> = lists
                .iter()
                .filter_map(|(idx, list)| {
                    let at = keys_of(list).iter().position(|known| *known == key)?;
                    Some((*idx, &list[at]))
                })
                .collect();
            let wanted: Vec<usize> = found.iter().map(|(idx, _)| *idx).collect();
            let condition = universe.condition(&among, &wanted);
            items.push((
                condition,
                Self::build(universe, &found, &format!("{place}/{key}")),
            ));
        }
        Self::List(items)
    }

    /// The value in one combination.
    pub(super) fn evaluate(&self, choice: &Choice) -> Value {
        match self {
            Self::Same(value) => value.clone(),
            Self::Map(fields) => Value::Object(
                fields
                    .iter()
                    .filter(|(_, condition, _)| condition.holds(choice))
                    .map(|(key, _, tree)| (key.clone(), tree.evaluate(choice)))
                    .collect::<Map<_, _>>(),
            ),
            Self::List(items) => items
                .iter()
                .filter(|(condition, _)| condition.holds(choice))
                .map(|(_, tree)| tree.evaluate(choice))
                .collect(),
            Self::Either(values) => {
                let held = values.iter().find(|(condition, _)| condition.holds(choice));
                held.unwrap().1.clone()
            }
        }
    }

    /// A field of an object.
    pub(super) fn get(&self, wanted: &str) -> Option<&Self> {
        let Self::Map(fields) = self else { return None };
        fields
            .iter()
            .find(|(key, _, _)| key == wanted)
            .map(|(_, _, tree)| tree)
    }

    /// A text that is the same everywhere.
    pub(super) fn text(&self) -> Option<&str> {
        match self {
            Self::Same(Value::String(text)) => Some(text),
            _ => None,
        }
    }

    /// The files in a `ConfigMap`.
    pub(super) fn config_map_files(&self) -> BTreeMap<String, String> {
        match self.get("data") {
            Some(Self::Map(files)) => files
                .iter()
                .map(|(file, _, text)| (file.clone(), text.text().unwrap().to_owned()))
                .collect(),
            _ => BTreeMap::new(),
        }
    }
}
