//! The two forms of an Event: core/v1, in which events are stored, and events.k8s.io/v1.

use serde_json::Value;

use super::object;

/// (core/v1 field, events.k8s.io/v1 field)
const RENAMED: &[(&str, &str)] = &[
    ("involvedObject", "regarding"),
    ("message", "note"),
    ("reportingComponent", "reportingController"),
    ("source", "deprecatedSource"),
    ("firstTimestamp", "deprecatedFirstTimestamp"),
    ("lastTimestamp", "deprecatedLastTimestamp"),
    ("count", "deprecatedCount"),
];

/// Rewrites an events.k8s.io/v1 Event as core/v1.
pub(crate) fn to_core(event: &mut Value) {
    let map = object::make_object(event);
    for (core, new) in RENAMED {
        if let Some(value) = map.remove(*new) {
            map.insert((*core).to_owned(), value);
        }
    }
    map.insert("apiVersion".to_owned(), Value::from("v1"));
}

/// Rewrites a core/v1 Event as events.k8s.io/v1.
pub(crate) fn to_new(event: &mut Value) {
    let map = object::make_object(event);
    for (core, new) in RENAMED {
        if let Some(value) = map.remove(*core) {
            map.insert((*new).to_owned(), value);
        }
    }
    map.insert("apiVersion".to_owned(), Value::from("events.k8s.io/v1"));
}
