//! Pods on their way in: defaults, validation, immutability.
//!
//! Pure functions over untyped pods.

pub(crate) mod immutable;
pub(crate) mod resources;
pub(crate) mod validate;

use chrono::{DateTime, Utc};
use serde_json::{Map, Value, json};

use super::object;

/// Fills in what a new pod leaves out, and resets its status.
pub(crate) fn default_new(pod: &mut Value, now: DateTime<Utc>) {
    default_spec(pod);
    let qos = resources::qos_class(pod);
    let gated = !object::array(pod, "/spec/schedulingGates").is_empty();
    let status = object::child(pod, "status");
    status.clear();
    status.insert("phase".to_owned(), Value::from("Pending"));
    status.insert("qosClass".to_owned(), Value::from(qos));
    if gated {
        let condition = json!({
            "type": "PodScheduled", "status": "False", "reason": "SchedulingGated",
            "message": "Scheduling is blocked due to non-empty scheduling gates",
            "lastTransitionTime": object::timestamp(now),
        });
        status.insert("conditions".to_owned(), json!([condition]));
    }
}

/// Fills in what a pod's spec leaves out, as on every write.
pub(crate) fn default_spec(pod: &mut Value) {
    let spec = object::child(pod, "spec");
    object::default(spec, "restartPolicy", "Always");
    object::default(spec, "terminationGracePeriodSeconds", 30);
    object::default(spec, "dnsPolicy", "ClusterFirst");
    object::default(spec, "schedulerName", "default-scheduler");
    object::default(spec, "enableServiceLinks", true);
    object::default(spec, "preemptionPolicy", "PreemptLowerPriority");
    object::default(spec, "priority", 0);
    object::default(spec, "securityContext", json!({}));
    object::default(spec, "serviceAccountName", "default");
    let account = spec.get("serviceAccountName").cloned().unwrap_or_default();
    object::default(spec, "serviceAccount", account);
    for field in ["containers", "initContainers"] {
        for container in spec
            .get_mut(field)
            .and_then(Value::as_array_mut)
            .into_iter()
            .flatten()
        {
            default_container(container);
        }
    }
    tolerate_unreachable(spec);
}

fn default_container(container: &mut Value) {
    let image = object::text(container, "/image");
    let tag = image
        .rsplit_once('/')
        .map_or(image, |(_, name)| name)
        .split_once(':')
        .map(|(_, tag)| tag);
    let pull = if image.contains('@') || tag.is_some_and(|t| t != "latest") {
        "IfNotPresent"
    } else {
        "Always"
    };
    let map = object::make_object(container);
    object::default(map, "imagePullPolicy", pull);
    object::default(map, "terminationMessagePath", "/dev/termination-log");
    object::default(map, "terminationMessagePolicy", "File");
    object::default(map, "resources", json!({}));
    for port in map
        .get_mut("ports")
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
    {
        object::default(object::make_object(port), "protocol", "TCP");
    }
    resources::default_requests(container);
}

fn tolerate_unreachable(spec: &mut Map<String, Value>) {
    let tolerations = object::make_array(spec.entry("tolerations").or_insert(Value::Null));
    for key in ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"] {
        let tolerated = |t: &Value| {
            let effect = object::text(t, "/effect");
            matches!(object::text(t, "/key"), found if found == key || found.is_empty())
                && matches!(effect, "" | "NoExecute")
        };
        if !tolerations.iter().any(tolerated) {
            tolerations.push(
                json!({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300}),
            );
        }
    }
}

/// Sets a condition, keeping its transition time unless its status changes.
pub(crate) fn set_condition(pod: &mut Value, condition: Value) {
    let conditions = object::make_array(
        object::child(pod, "status")
            .entry("conditions")
            .or_insert(Value::Null),
    );
    let kind = condition.get("type").cloned();
    match conditions.iter_mut().find(|c| c.get("type") == kind.as_ref()) {
        Some(found) => *found = condition,
        None => conditions.push(condition),
    }
}

/// True if the pod's containers have all ended for good.
pub(crate) fn is_terminal(pod: &Value) -> bool {
    matches!(object::text(pod, "/status/phase"), "Succeeded" | "Failed")
}

/// The grace period of a deletion: zero for pods that run nowhere.
pub(crate) fn grace(pod: &Value, asked: Option<i64>) -> i64 {
    if object::text(pod, "/spec/nodeName").is_empty() || is_terminal(pod) {
        return 0;
    }
    let own = pod
        .pointer("/spec/terminationGracePeriodSeconds")
        .and_then(Value::as_i64);
    match asked.or(own).unwrap_or(30) {
        negative if negative < 0 => 1,
        seconds => seconds,
    }
}
