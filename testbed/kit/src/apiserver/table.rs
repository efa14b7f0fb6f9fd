//! Tables as `kubectl get` prints them: the columns and rows of each kind.
//!
//! Pods, nodes, events and leases have the columns of kube-apiserver that docs and demo show, custom resources those of their
//! definition, and all other kinds NAME and AGE. Rows carry the whole object, as with `includeObject=Object`, by which kubectl sorts.

use chrono::Utc;
use serde_json::{Value, json};

use super::object::{array, integer, is_deleting, is_true, parse_time, text};
use super::resource::Resource;

/// A cell of a row: the name and the priority of its column, and the value.
type Cell = (&'static str, i64, Value);
/// The priority of a column that is shown with and without `-o wide`.
const ALWAYS: i64 = 0;
/// The priority of a column that is shown with `-o wide` only.
const WIDE_ONLY: i64 = 1;

/// The cells that `kubectl get` prints for an object of a built-in kind.
fn cells(resource: &Resource, value: &Value) -> Vec<Cell> {
    let name = ("Name", ALWAYS, text_cell(value, "/metadata/name"));
    let age = ("Age", ALWAYS, age_since(text(value, CREATED)));
    match (resource.group.as_str(), resource.plural.as_str()) {
        ("", "pods") => pod_cells(value),
        ("", "nodes") => node_cells(value),
        ("", "events") => event_cells(value),
        ("coordination.k8s.io", "leases") => vec![
            name,
            ("Holder", ALWAYS, text_cell(value, "/spec/holderIdentity")),
            age,
        ],
        _ => vec![name, age],
    }
}

/// A cell with the text at a JSON pointer; empty if there is none.
fn text_cell(object: &Value, pointer: &str) -> Value {
    Value::from(text(object, pointer))
}

const CREATED: &str = "/metadata/creationTimestamp";

fn node_cells(node: &Value) -> Vec<Cell> {
    let mut conditions = array(node, "/status/conditions").iter();
    let ready = conditions.find(|condition| text(condition, "/type") == "Ready");
    let mut status = match ready.map(|ready| text(ready, "/status")) {
        Some("True") => "Ready".to_owned(),
        Some(_) => "NotReady".to_owned(),
        None => "Unknown".to_owned(),
    };
    // printNode appends `SchedulingDisabled` to the readiness with a comma.
    if is_true(node, "/spec/unschedulable") {
        status.push_str(",SchedulingDisabled");
    }
    vec![
        ("Name", ALWAYS, text_cell(node, "/metadata/name")),
        ("Status", ALWAYS, Value::from(status)),
        ("Age", ALWAYS, age_since(text(node, CREATED))),
        (
            "Version",
            ALWAYS,
            text_cell(node, "/status/nodeInfo/kubeletVersion"),
        ),
    ]
}

fn event_cells(event: &Value) -> Vec<Cell> {
    let times = [
        "/series/lastObservedTime",
        "/lastTimestamp",
        "/eventTime",
        CREATED,
    ];
    let seen = first_text(event, &times);
    let kind = text(event, "/involvedObject/kind").to_lowercase();
    let about = format!("{kind}/{}", text(event, "/involvedObject/name"));
    let source = first_text(event, &["/source/component", "/reportingComponent"]);
    // printEvent: the count of a series, else the event's own; a single event of the newer API has neither.
    let count = event.pointer("/series/count").or(event.get("count"));
    vec![
        ("Last Seen", ALWAYS, age_since(seen)),
        ("Type", ALWAYS, text_cell(event, "/type")),
        ("Reason", ALWAYS, text_cell(event, "/reason")),
        ("Object", ALWAYS, Value::from(about)),
        ("Message", ALWAYS, Value::from(text(event, "/message").trim())),
        ("Source", WIDE_ONLY, Value::from(source)),
        ("Count", WIDE_ONLY, count.cloned().unwrap_or(Value::from(1))),
        ("Name", WIDE_ONLY, text_cell(event, "/metadata/name")),
    ]
}

/// The first text that is not empty at one of these JSON pointers.
fn first_text<'a>(object: &'a Value, pointers: &[&str]) -> &'a str {
    let mut found = pointers.iter().map(|pointer| text(object, pointer));
    found.find(|text| !text.is_empty()).unwrap_or_default()
}

fn or_none(found: &str) -> Value {
    Value::from(if found.is_empty() { "<none>" } else { found })
}

/// A row of the table of a resource.
pub(crate) fn row(resource: &Resource, value: &Value) -> Value {
    let values = if resource.columns.is_empty() {
        let cells = cells(resource, value).into_iter();
        cells.map(|(_, _, cell)| cell).collect()
    } else {
        custom_cells(resource, value)
    };
    json!({"cells": values, "object": value})
}

/// The values of a custom resource's printer columns.
fn custom_cells(resource: &Resource, value: &Value) -> Vec<Value> {
    let mut cells = vec![Value::from(text(value, "/metadata/name"))];
    for column in &resource.columns {
        // JSONPath of a CustomResourceDefinition: the shipped one uses plain field paths only.
        let mut fields = text(column, "/jsonPath").trim_start_matches('.').split('.');
        cells.push(match fields.try_fold(value, |v, field| v.get(field)) {
            Some(Value::String(date)) if text(column, "/type") == "date" => age_since(date),
            Some(simple) if !simple.is_object() && !simple.is_array() => simple.clone(),
            Some(other) => Value::from(other.to_string()),
            None => Value::Null,
        });
    }
    cells
}

/// An entry of the table's `columnDefinitions`.
fn definition(name: &str, kind: &str, priority: i64) -> Value {
    let format = if name == "Name" { "name" } else { "" };
    json!({"name": name, "type": kind, "format": format, "description": "", "priority": priority})
}

/// A whole table. Its rows are its last field, so that a list can be streamed into it.
pub(crate) fn table(resource: &Resource, rows: &[Value], meta: &Value) -> Value {
    let mut columns = Vec::new();
    if resource.columns.is_empty() {
        // The columns are read from the cells of an empty object: headings and types are the same for every object.
        for (name, priority, cell) in cells(resource, &Value::Null) {
            let kind = if cell.is_number() { "integer" } else { "string" };
            columns.push(definition(name, kind, priority));
        }
    } else {
        columns.push(definition("Name", "string", ALWAYS));
        for column in &resource.columns {
            let priority = integer(column, "/priority").unwrap_or(ALWAYS);
            columns.push(definition(text(column, "/name"), text(column, "/type"), priority));
        }
    }
    json!({
        "kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": meta, "columnDefinitions": columns, "rows": rows,
    })
}

/// The time since a timestamp, as `kubectl get` prints ages.
fn age_since(time: &str) -> Value {
    match parse_time(time) {
        Some(time) => Value::from(print_age((Utc::now() - time).num_seconds())),
        None => Value::from("<unknown>"),
    }
}

/// An age as kubectl prints it, such as `5m10s`.
fn print_age(seconds: i64) -> String {
    match seconds.max(0) {
        // HumanDuration of apimachinery: two units where the smaller one still matters, else one.
        s @ 0..120 => format!("{s}s"),
        s @ 120..600 => two_units(s / 60, 'm', s % 60, 's'),
        s @ 600..10_800 => format!("{}m", s / 60),
        s @ 10_800..28_800 => two_units(s / 3600, 'h', s % 3600 / 60, 'm'),
        s @ 28_800..172_800 => format!("{}h", s / 3600),
        s @ 172_800..691_200 => two_units(s / 86_400, 'd', s % 86_400 / 3600, 'h'),
        s => format!("{}d", s / 86_400),
    }
}

/// An age in two units; the smaller one is left out if it is zero.
fn two_units(high: i64, unit: char, low: i64, small: char) -> String {
    if low == 0 {
        format!("{high}{unit}")
    } else {
        format!("{high}{unit}{low}{small}")
    }
}

fn pod_cells(pod: &Value) -> Vec<Cell> {
    let statuses = array(pod, "/status/containerStatuses");
    let (mut n_ready, mut n_restarts) = (0, 0);
    for status in statuses {
        n_ready += usize::from(is_true(status, "/ready"));
        n_restarts += integer(status, "/restartCount").unwrap_or(0);
    }
    let n_containers = array(pod, "/spec/containers").len();
    vec![
        ("Name", ALWAYS, Value::from(text(pod, "/metadata/name"))),
        ("Ready", ALWAYS, Value::from(format!("{n_ready}/{n_containers}"))),
        ("Status", ALWAYS, Value::from(pod_status(pod))),
        ("Restarts", ALWAYS, Value::from(n_restarts.to_string())),
        ("Age", ALWAYS, age_since(text(pod, CREATED))),
        ("IP", WIDE_ONLY, or_none(text(pod, "/status/podIP"))),
        ("Node", WIDE_ONLY, or_none(text(pod, "/spec/nodeName"))),
        (
            "Nominated Node",
            WIDE_ONLY,
            or_none(text(pod, "/status/nominatedNodeName")),
        ),
    ]
}

/// The STATUS that `kubectl get pods` shows, by the rules of kube-apiserver's `printPod` that the testbed's pods meet: without
/// init containers, containers that complete, lost nodes, signals and pods that ended before they were deleted.
fn pod_status(pod: &Value) -> String {
    if is_deleting(pod) {
        return "Terminating".to_owned();
    }
    let mut reasons = array(pod, "/status/containerStatuses")
        .iter()
        .filter_map(waiting_or_end_reason);
    let own = text(pod, "/status/reason");
    let phase = text(pod, "/status/phase");
    match reasons.next() {
        Some(reason) => reason,
        None if !own.is_empty() => own.to_owned(),
        None if phase == "Succeeded" => "Completed".to_owned(),
        None => phase.to_owned(),
    }
}

/// The reason why a container waits or has ended, for the status column of its pod.
fn waiting_or_end_reason(container: &Value) -> Option<String> {
    let waiting = container.pointer("/state/waiting");
    let state = waiting.or_else(|| container.pointer("/state/terminated"))?;
    Some(text(state, "/reason").to_owned()).filter(|reason| !reason.is_empty())
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
        assert_eq!(super::print_age(seconds), expected);
    }
}
