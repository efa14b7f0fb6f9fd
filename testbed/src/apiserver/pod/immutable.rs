//! The parts of a pod's spec that may change after creation: images, the active deadline, added tolerations, removed
//! scheduling gates. Everything else is refused.

use serde_json::{Map, Value};

use crate::apiserver::object;
use crate::apiserver::status::FieldError;

/// The forbidden changes of an update.
pub(crate) fn check_update(old: &Value, new: &Value) -> Vec<FieldError> {
    let (before, after) = (old.get("spec"), new.get("spec"));
    if before == after {
        return Vec::new();
    }
    let mut errors = Vec::new();
    if !keeps_all(
        object::array(old, "/spec/tolerations"),
        object::array(new, "/spec/tolerations"),
    ) {
        errors.push(FieldError::forbidden(
            "spec.tolerations",
            "existing toleration can not be modified except its tolerationSeconds",
        ));
    }
    if !keeps_all(
        object::array(new, "/spec/schedulingGates"),
        object::array(old, "/spec/schedulingGates"),
    ) {
        errors.push(FieldError::forbidden(
            "spec.schedulingGates",
            "only deletion is allowed",
        ));
    }
    let deadline = |pod: &Value| pod.pointer("/spec/activeDeadlineSeconds").and_then(Value::as_i64);
    if let Some(was) = deadline(old)
        && deadline(new).is_none_or(|is| is > was)
    {
        let is = deadline(new).map_or_else(|| "null".to_owned(), |d| d.to_string());
        let why = "must be less than or equal to previous value";
        errors.push(FieldError::invalid("spec.activeDeadlineSeconds", &is, why));
    }
    let gated = !object::array(old, "/spec/schedulingGates").is_empty();
    if frozen(before, gated) != frozen(after, gated) {
        let why = "pod updates may not change fields other than `spec.containers[*].image`,\
            `spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing \
            tolerations),`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)";
        errors.push(FieldError::forbidden("spec", why));
    }
    errors
}

fn keeps_all(kept: &[Value], all: &[Value]) -> bool {
    let same = |a: &Value, b: &Value| without_seconds(a) == without_seconds(b);
    kept.iter().all(|k| all.iter().any(|a| same(k, a)))
}

fn without_seconds(toleration: &Value) -> Value {
    let mut toleration = toleration.clone();
    if let Some(map) = toleration.as_object_mut() {
        map.remove("tolerationSeconds");
    }
    toleration
}

/// The part of a spec that may not change; a gated pod's node selection may still be narrowed.
fn frozen(spec: Option<&Value>, gated: bool) -> Map<String, Value> {
    let mut spec = spec.and_then(Value::as_object).cloned().unwrap_or_default();
    for field in ["activeDeadlineSeconds", "tolerations", "schedulingGates"] {
        spec.remove(field);
    }
    if gated {
        spec.remove("nodeSelector");
        spec.remove("affinity");
    }
    for field in ["containers", "initContainers"] {
        for container in spec
            .get_mut(field)
            .and_then(Value::as_array_mut)
            .into_iter()
            .flatten()
        {
            if let Some(map) = container.as_object_mut() {
                map.remove("image");
            }
        }
    }
    spec
}
