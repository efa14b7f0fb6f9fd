//! The table of pods, with the STATUS that people know.

use serde_json::Value;

use super::{ColumnSpec, or_none, since};
use crate::apiserver::object::{array, is_deleting, text};

pub(super) const COLUMNS: &[ColumnSpec] = &[
    ("Name", "string", false),
    ("Ready", "string", false),
    ("Status", "string", false),
    ("Restarts", "string", false),
    ("Age", "string", false),
    ("IP", "string", true),
    ("Node", "string", true),
    ("Nominated Node", "string", true),
    ("Readiness Gates", "string", true),
];

pub(super) fn cells(pod: &Value) -> Vec<Value> {
    let statuses = array(pod, "/status/containerStatuses");
    let n_ready = statuses
        .iter()
        .filter(|s| s.get("ready") == Some(&Value::Bool(true)))
        .count();
    let n_containers = array(pod, "/spec/containers").len();
    let n_restarts: i64 = statuses
        .iter()
        .filter_map(|s| s.get("restartCount")?.as_i64())
        .sum();
    vec![
        Value::from(text(pod, "/metadata/name")),
        Value::from(format!("{n_ready}/{n_containers}")),
        Value::from(status(pod)),
        Value::from(n_restarts.to_string()),
        Value::from(since(text(pod, "/metadata/creationTimestamp"))),
        or_none(text(pod, "/status/podIP")),
        or_none(text(pod, "/spec/nodeName")),
        or_none(text(pod, "/status/nominatedNodeName")),
        Value::from("<none>"),
    ]
}

fn status(pod: &Value) -> String {
    if is_deleting(pod) {
        return "Terminating".to_owned();
    }
    if let Some(waiting) = init_status(pod) {
        return waiting;
    }
    let mut reasons = array(pod, "/status/containerStatuses")
        .iter()
        .filter_map(stuck_reason);
    let gated = array(pod, "/status/conditions")
        .iter()
        .any(|c| text(c, "/reason") == "SchedulingGated");
    let own = text(pod, "/status/reason");
    let phase = text(pod, "/status/phase");
    match reasons.next() {
        Some(reason) if reason == "Completed" && is_ready(pod) => "Running".to_owned(),
        Some(reason) => reason,
        None if !own.is_empty() => own.to_owned(),
        None if gated => "SchedulingGated".to_owned(),
        None if phase == "Succeeded" => "Completed".to_owned(),
        None => phase.to_owned(),
    }
}

fn is_ready(pod: &Value) -> bool {
    array(pod, "/status/conditions")
        .iter()
        .any(|c| text(c, "/type") == "Ready" && text(c, "/status") == "True")
}

fn stuck_reason(container: &Value) -> Option<String> {
    let state = ["/state/waiting", "/state/terminated"]
        .into_iter()
        .find_map(|p| container.pointer(p))?;
    let reason = text(state, "/reason");
    match state.get("exitCode").and_then(Value::as_i64) {
        _ if !reason.is_empty() => Some(reason.to_owned()),
        Some(code) => Some(format!("ExitCode:{code}")),
        None => None,
    }
}

fn init_status(pod: &Value) -> Option<String> {
    let specs = array(pod, "/spec/initContainers");
    let is_sidecar = |name: &str| {
        specs
            .iter()
            .any(|s| text(s, "/name") == name && text(s, "/restartPolicy") == "Always")
    };
    for (i, container) in array(pod, "/status/initContainerStatuses").iter().enumerate() {
        let done = container
            .pointer("/state/terminated/exitCode")
            .and_then(Value::as_i64)
            == Some(0);
        let started = container.get("started") == Some(&Value::Bool(true));
        if done || (is_sidecar(text(container, "/name")) && started) {
            continue;
        }
        return Some(match stuck_reason(container) {
            Some(reason) if reason != "PodInitializing" => format!("Init:{reason}"),
            _ => format!("Init:{i}/{}", specs.len()),
        });
    }
    None
}
