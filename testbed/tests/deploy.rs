//! `deploy/` against the code: it renders, and names nothing that the code does not know.
//!
//! Needs no cluster, no kubectl and no network. Starts the daemons' own binaries to ask them about their flags.

#![expect(
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    reason = "a test that finds nothing has failed"
)]

mod access;
mod admission;
mod chart;
mod crd;
mod daemons;
mod fields;
mod flow;
mod images;
mod install;
mod leader;
mod records;
mod render;
mod samples;
mod scheduler_configuration;
mod scrape;
mod webhooks;
mod which_node;
mod workloads;

use std::path::PathBuf;

use serde_json::Value;

/// The folder `deploy/` of the repository.
fn deploy() -> PathBuf {
    repository().join("deploy")
}

fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap()
        .to_owned()
}

/// A text of a file under `deploy/`.
fn read(path: &str) -> String {
    let path = deploy().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The one object of this kind and name.
fn find<'a>(objects: &'a [Value], kind: &str, name: &str) -> &'a Value {
    let mut found = objects
        .iter()
        .filter(|object| object["kind"] == kind && object["metadata"]["name"] == name);
    let object = found
        .next()
        .unwrap_or_else(|| panic!("there is no {kind} {name}"));
    assert!(found.next().is_none(), "there are several {kind} {name}");
    object
}

/// All objects of a kind.
fn all<'a>(objects: &'a [Value], kind: &str) -> Vec<&'a Value> {
    objects.iter().filter(|object| object["kind"] == kind).collect()
}

/// The items of a list; none if there is no list.
fn items(list: &Value) -> &[Value] {
    list.as_array().map_or(&[], Vec::as_slice)
}

/// The item of a list with this name.
fn named<'a>(list: &'a Value, name: &str) -> &'a Value {
    let found = items(list).iter().find(|item| item["name"] == name);
    found.unwrap_or_else(|| panic!("{name} is not in {list}"))
}

/// The texts of a list.
fn texts(list: &Value) -> Vec<&str> {
    items(list).iter().map(|text| text.as_str().unwrap()).collect()
}

/// All Deployments and `DaemonSets`.
fn workloads(objects: &[Value]) -> Vec<&Value> {
    [all(objects, "Deployment"), all(objects, "DaemonSet")].concat()
}

/// The spec of a workload's pods.
fn pod(workload: &Value) -> &Value {
    &workload["spec"]["template"]["spec"]
}

/// The value of a container's flag.
fn flag<'a>(container: &'a Value, name: &str) -> Option<&'a str> {
    let mut args = texts(&container["args"]).into_iter();
    args.find_map(|arg| arg.strip_prefix(name)?.strip_prefix('='))
}
