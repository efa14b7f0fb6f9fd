//! JSON merge patch (RFC 7386).

use serde_json::Value;

use crate::apiserver::object;

/// Merges a patch into a target: null removes, objects merge, everything else replaces.
pub(crate) fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    let map = object::make_object(target);
    for (field, change) in patch {
        if change.is_null() {
            map.remove(field);
        } else {
            merge(map.entry(field).or_insert(Value::Null), change);
        }
    }
}
