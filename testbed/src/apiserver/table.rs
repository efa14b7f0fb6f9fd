//! Tables, as `kubectl get` prints them: columns and rows per kind.
//!
//! Kinds without rows of their own get NAME and AGE, custom resources the columns of their definition.

use chrono::Utc;
use serde_json::{Value, json};

use super::object::{array, is_deleting, parse_time, text};
use super::render::{RowObject, metadata_only, shown};
use super::resource::Resource;

/// Name, type, and whether only `-o wide` shows it.
type ColumnSpec = (&'static str, &'static str, bool);

const NAME: ColumnSpec = ("Name", "string", false);
const AGE: ColumnSpec = ("Age", "string", false);

fn columns(resource: &Resource) -> Vec<ColumnSpec> {
    match (resource.group.as_str(), resource.plural.as_str()) {
        ("", "pods") => COLUMNS.to_vec(),
        ("", "nodes") => vec![
            NAME,
            ("Status", "string", false),
            ("Roles", "string", false),
            AGE,
            ("Version", "string", false),
            ("Internal-IP", "string", true),
            ("OS-Image", "string", true),
            ("Container-Runtime", "string", true),
        ],
        ("" | "events.k8s.io", "events") => vec![
            ("Last Seen", "string", false),
            ("Type", "string", false),
            ("Reason", "string", false),
            ("Object", "string", false),
            ("Message", "string", false),
            ("Source", "string", true),
            ("Count", "integer", true),
            ("Name", "string", true),
        ],
        ("", "namespaces") => vec![NAME, ("Status", "string", false), AGE],
        ("", "configmaps" | "secrets") => vec![NAME, ("Data", "integer", false), AGE],
        ("coordination.k8s.io", "leases") => vec![NAME, ("Holder", "string", false), AGE],
        ("apps", "deployments" | "daemonsets") => {
            vec![
                NAME,
                ("Ready", "string", false),
                ("Desired", "integer", false),
                AGE,
            ]
        }
        ("apiextensions.k8s.io", _) => vec![NAME, ("Created At", "date", false)],
        _ => vec![NAME, AGE],
    }
}

fn cells(resource: &Resource, value: &Value) -> Vec<Value> {
    let name = || Value::from(text(value, "/metadata/name"));
    let age = || Value::from(since(text(value, "/metadata/creationTimestamp")));
    let at = |pointer: &str| Value::from(text(value, pointer));
    let number = |pointer: &str| value.pointer(pointer).cloned().unwrap_or_else(|| Value::from(0));
    match (resource.group.as_str(), resource.plural.as_str()) {
        ("", "pods") => pod_cells(value),
        ("", "nodes") => node_cells(value),
        ("" | "events.k8s.io", "events") => event_cells(value),
        ("", "namespaces") => vec![name(), at("/status/phase"), age()],
        ("", "configmaps" | "secrets") => {
            let n_entries = value
                .get("data")
                .and_then(Value::as_object)
                .map_or(0, serde_json::Map::len);
            vec![name(), Value::from(n_entries), age()]
        }
        ("coordination.k8s.io", "leases") => vec![name(), at("/spec/holderIdentity"), age()],
        ("apps", "deployments") => {
            vec![
                name(),
                Value::from(number("/status/readyReplicas").to_string()),
                number("/spec/replicas"),
                age(),
            ]
        }
        ("apps", "daemonsets") => {
            let (ready, desired) = (
                number("/status/numberReady"),
                number("/status/desiredNumberScheduled"),
            );
            vec![name(), Value::from(ready.to_string()), desired, age()]
        }
        ("apiextensions.k8s.io", _) => vec![name(), at("/metadata/creationTimestamp")],
        _ => vec![name(), age()],
    }
}

fn node_cells(node: &Value) -> Vec<Value> {
    let ready = array(node, "/status/conditions")
        .iter()
        .find(|c| text(c, "/type") == "Ready");
    let mut status = match ready.map(|c| text(c, "/status")) {
        Some("True") => "Ready".to_owned(),
        Some(_) => "NotReady".to_owned(),
        None => "Unknown".to_owned(),
    };
    if node.pointer("/spec/unschedulable") == Some(&Value::Bool(true)) {
        status.push_str(",SchedulingDisabled");
    }
    let labels = node.pointer("/metadata/labels").and_then(Value::as_object);
    let roles: Vec<&str> = labels
        .into_iter()
        .flatten()
        .filter_map(|(k, _)| k.strip_prefix("node-role.kubernetes.io/"))
        .collect();
    let address = array(node, "/status/addresses")
        .iter()
        .find(|a| text(a, "/type") == "InternalIP");
    vec![
        Value::from(text(node, "/metadata/name")),
        Value::from(status),
        or_none(&roles.join(",")),
        Value::from(since(text(node, "/metadata/creationTimestamp"))),
        Value::from(text(node, "/status/nodeInfo/kubeletVersion")),
        or_none(address.map_or("", |a| text(a, "/address"))),
        or_unknown(text(node, "/status/nodeInfo/osImage")),
        or_unknown(text(node, "/status/nodeInfo/containerRuntimeVersion")),
    ]
}

fn event_cells(event: &Value) -> Vec<Value> {
    let first = |pointers: &[&str]| {
        pointers
            .iter()
            .map(|p| text(event, p))
            .find(|t| !t.is_empty())
            .unwrap_or_default()
    };
    let seen = first(&[
        "/series/lastObservedTime",
        "/lastTimestamp",
        "/eventTime",
        "/metadata/creationTimestamp",
    ]);
    let kind = text(event, "/involvedObject/kind").to_lowercase();
    vec![
        Value::from(since(seen)),
        Value::from(text(event, "/type")),
        Value::from(text(event, "/reason")),
        Value::from(format!("{kind}/{}", text(event, "/involvedObject/name"))),
        Value::from(text(event, "/message").trim()),
        Value::from(first(&["/source/component", "/reportingComponent"])),
        event.get("count").cloned().unwrap_or_else(|| Value::from(1)),
        Value::from(text(event, "/metadata/name")),
    ]
}

fn or_none(found: &str) -> Value {
    Value::from(if found.is_empty() { "<none>" } else { found })
}

fn or_unknown(found: &str) -> Value {
    Value::from(if found.is_empty() { "<unknown>" } else { found })
}

/// A row of the table of a resource.
pub(crate) fn row(resource: &Resource, value: &Value, include: RowObject) -> Value {
    let cells = if resource.columns.is_empty() {
        cells(resource, value)
    } else {
        custom_cells(resource, value)
    };
    match include {
        RowObject::None => json!({"cells": cells}),
        RowObject::Metadata => json!({"cells": cells, "object": metadata_only(value)}),
        RowObject::Object => json!({"cells": cells, "object": shown(resource, value)}),
    }
}

fn custom_cells(resource: &Resource, value: &Value) -> Vec<Value> {
    let mut cells = vec![Value::from(text(value, "/metadata/name"))];
    for column in &resource.columns {
        let found = column
            .path
            .trim_start_matches('.')
            .split('.')
            .try_fold(value, |v, field| v.get(field));
        cells.push(match found {
            Some(Value::String(date)) if column.kind == "date" => Value::from(since(date)),
            Some(simple) if !simple.is_object() && !simple.is_array() => simple.clone(),
            Some(other) => Value::from(other.to_string()),
            None => Value::Null,
        });
    }
    cells
}

/// A whole table. Its rows are its last field, so that a list can be streamed into it.
pub(crate) fn table(resource: &Resource, rows: &[Value], meta: &Value) -> Value {
    let definition = |name: &str, kind: &str, priority: i64| {
        let format = if name == "Name" { "name" } else { "" };
        json!({"name": name, "type": kind, "format": format, "description": "", "priority": priority})
    };
    let columns: Vec<Value> = if resource.columns.is_empty() {
        columns(resource)
            .into_iter()
            .map(|(name, kind, wide)| definition(name, kind, i64::from(wide)))
            .collect()
    } else {
        let own = resource
            .columns
            .iter()
            .map(|c| definition(&c.name, &c.kind, c.priority));
        std::iter::once(definition("Name", "string", 0))
            .chain(own)
            .collect()
    };
    json!({
        "kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": meta, "columnDefinitions": columns, "rows": rows,
    })
}

/// The age of an object, as `kubectl get` prints it.
fn since(time: &str) -> String {
    parse_time(time).map_or_else(|| "<unknown>".to_owned(), |t| age((Utc::now() - t).num_seconds()))
}

fn age(seconds: i64) -> String {
    let pair = |high: i64, unit: char, low: i64, small: char| {
        if low == 0 {
            format!("{high}{unit}")
        } else {
            format!("{high}{unit}{low}{small}")
        }
    };
    match seconds.max(0) {
        s @ 0..120 => format!("{s}s"),
        s @ 120..600 => pair(s / 60, 'm', s % 60, 's'),
        s @ 600..10_800 => format!("{}m", s / 60),
        s @ 10_800..28_800 => pair(s / 3600, 'h', s % 3600 / 60, 'm'),
        s @ 28_800..172_800 => format!("{}h", s / 3600),
        s @ 172_800..691_200 => pair(s / 86_400, 'd', s % 86_400 / 3600, 'h'),
        s => format!("{}d", s / 86_400),
    }
}

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

fn pod_cells(pod: &Value) -> Vec<Value> {
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

#[cfg(test)]
mod tests {
    use rstest::rstest;

    #[rstest]
    #[case::seconds(119, "119s")]
    #[case::minutes_and_seconds(125, "2m5s")]
    #[case::minutes(3600, "60m")]
    #[case::hours_and_minutes(3 * 3600 + 60, "3h1m")]
    #[case::days(9 * 86_400, "9d")]
    #[case::clocks_disagree(-5, "0s")]
    fn ages_are_printed_as_kubectl_does(#[case] seconds: i64, #[case] expected: &str) {
        assert_eq!(super::age(seconds), expected);
    }
}
