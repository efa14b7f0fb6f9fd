//! The record on a pod: read, written, and what a bind and adapters for device plugins put beside it.
//!
//! This project always writes what Koordinator writes when its gate for device plugins is on.

use std::collections::BTreeMap;

use proto::pod::Pod;
use proto::quantity::Quantity;
use proto::record::{BIND_TIMESTAMP, DEVICE_ALLOCATED, Record};
use proto::resource::{GPU_MEMORY, GPU_MEMORY_RATIO, ResourceNames};
use scheduler::accounting::PodFacts;
use serde_json::{Map, Value, json};

use super::allocate::device;
use super::case::{Case, Outcome};
use super::requests::{Amounts, amounts};
use super::world::{NODE, World, pod, read};

/// Runs a case of annotations.
pub(crate) fn run(case: &Case<'_>) -> Outcome {
    if let Some(skip) = case.of_other_vendor() {
        return skip;
    }
    match case.kind {
        "parse_device_allocated" => parse(case),
        "render_device_allocated" => render(case),
        "prebind" => bind(case, &case.input["allocations"]),
        kind => Outcome::skipped(format!("kind {kind:?} is not understood")),
    }
}

/// Runs a case of adapters for device plugins.
pub(crate) fn adapt(case: &Case<'_>) -> Outcome {
    if let Some(skip) = case.of_other_vendor() {
        return skip;
    }
    match case.kind {
        "adapt" => alone(case),
        "adapt_on_bind" if case.input["node"]["name"] != case.input["node_name"] => absent_node(case),
        "adapt_on_bind" => bind(case, &case.input["allocations"]),
        kind => Outcome::skipped(format!("kind {kind:?} is not understood")),
    }
}

/// The adapter that a pod with these GPUs gets, bound or not.
fn alone(case: &Case<'_>) -> Outcome {
    let gpus = &case.input["allocation"];
    let gpus = if gpus.as_array().is_some_and(Vec::is_empty) {
        &Value::Null
    } else {
        gpus
    };
    let allocations = if gpus.is_null() {
        json!({})
    } else {
        json!({"gpu": gpus})
    };
    let record = Record {
        allocations: serde_json::from_value(allocations.clone()).unwrap(),
        assumed_at: Some(1),
        ..Record::default()
    };
    let node = [&case.input["node_name"], &case.input["node"]["name"]]
        .into_iter()
        .filter_map(Value::as_str)
        .find(|name| !name.is_empty());
    let pod: Pod = read(pod(&asked(&allocations), &case.input["object"]["labels"]));
    let facts = PodFacts::of(&pod, &ResourceNames::default());
    let labels = facts
        .map(|facts| facts.labels_on(node.unwrap_or(NODE)))
        .unwrap_or_default();
    compare(&record.annotations(), &case.expected["object"]["annotations"]).and(|| {
        compare_labels(
            &labels,
            &case.input["object"]["labels"],
            &case.expected["object"]["labels"],
        )
    })
}

fn parse(case: &Case<'_>) -> Outcome {
    let annotations: BTreeMap<String, String> =
        serde_json::from_value(case.input["annotations"].clone()).unwrap_or_default();
    match (Record::read(&annotations), case.is_ok()) {
        (Ok(record), true) => {
            let got = record.map(|record| json!(record.allocations));
            Outcome::equal(
                &got.map(|record| by_value(&record)),
                &Some(&case.expected["allocations"])
                    .filter(|v| !v.is_null())
                    .map(by_value),
            )
        }
        (Ok(record), false) => Outcome::Failed(format!("read as {record:?}")),
        (Err(error), true) => Outcome::Failed(error.to_string()),
        (Err(_), false) => Outcome::Passed,
    }
}

fn render(case: &Case<'_>) -> Outcome {
    let record = Record {
        allocations: serde_json::from_value(case.input["allocations"].clone()).unwrap(),
        ..Record::default()
    };
    compare(&record.annotations(), &case.expected["annotations"])
}

/// Binds a pod that gets these very devices, and compares what is written.
fn bind(case: &Case<'_>, allocations: &Value) -> Outcome {
    let mut world = World::plain();
    let is_told = case
        .device()
        .is_some_and(|device| device.get("devices").is_some());
    world.set_device(&if is_told {
        only(device(case), allocations)
    } else {
        bare(allocations)
    });
    let expected = if case.expected["object"].is_null() {
        &case.expected["annotations"]
    } else {
        &case.expected["object"]["annotations"]
    };
    let given = [&case.input["pod_labels"], &case.input["object"]["labels"]]
        .into_iter()
        .find(|labels| labels.is_object());
    let given = given.unwrap_or(&Value::Null);
    match (world.place(&pod(&asked(allocations), given)), case.is_ok()) {
        (Ok(placed), true) => {
            // Here the node has always the same name.
            let named = |label: String| {
                if label == NODE {
                    str_of(&case.input["node_name"])
                } else {
                    label
                }
            };
            let labels = placed
                .labels
                .into_iter()
                .map(|(key, label)| (key, named(label)))
                .collect();
            compare(&placed.annotations, expected)
                .and(|| compare_labels(&labels, given, &case.expected["object"]["labels"]))
        }
        (Ok(placed), false) => Outcome::Failed(format!("wrote {:?}", placed.annotations)),
        (Err(refused), true) => Outcome::Failed(refused.to_string()),
        (Err(_), false) => Outcome::Passed,
    }
}

fn str_of(text: &Value) -> String {
    text.as_str().unwrap_or_default().to_owned()
}

/// Compares the labels that a pod has with those that it brought and those that were added.
fn compare_labels(added: &BTreeMap<String, String>, brought: &Value, expected: &Value) -> Outcome {
    if expected.is_null() && added.is_empty() {
        return Outcome::Passed;
    }
    let mut all: BTreeMap<String, String> = serde_json::from_value(brought.clone()).unwrap_or_default();
    all.extend(added.clone());
    let expected: BTreeMap<String, String> = serde_json::from_value(expected.clone()).unwrap_or_default();
    Outcome::equal(&all, &expected)
}

/// A node that is not there takes no pod, and nothing is written.
fn absent_node(case: &Case<'_>) -> Outcome {
    let mut world = World::plain();
    let pod = pod(&asked(&case.input["allocations"]), &Value::Null);
    match (world.place_on("absent", &pod), case.is_ok()) {
        (Ok(placed), false) => Outcome::Failed(format!("wrote {:?}", placed.annotations)),
        (Err(_), false) => Outcome::Passed,
        (_, true) => Outcome::Failed("success is expected of a node that is not there".to_owned()),
    }
}

/// The requests of a pod that gets all this: whole GPUs by the vendor's resource name.
fn asked(allocations: &Value) -> Value {
    let mut asked: BTreeMap<String, u64> = BTreeMap::new();
    for (kind, list) in allocations.as_object().into_iter().flatten() {
        for allocation in list.as_array().unwrap() {
            let held = amounts(&allocation["resources"]);
            let whole = held
                .get(GPU_MEMORY_RATIO)
                .is_none_or(|ratio| ratio.unsigned() == Some(100));
            if kind == "gpu" && whole {
                *asked.entry("nvidia.com/gpu".to_owned()).or_default() += 1;
                continue;
            }
            for (name, amount) in held.into_iter().filter(|(name, _)| name != GPU_MEMORY) {
                *asked.entry(name).or_default() += amount.unsigned().unwrap();
            }
        }
    }
    json!(asked)
}

/// Devices of which nothing but an allocation is known.
fn bare(allocations: &Value) -> Value {
    let entry = |kind: &String, allocation: &Value| {
        let mut resources = json!({"koordinator.sh/gpu-core": "100", "koordinator.sh/gpu-memory": "16Gi", "koordinator.sh/gpu-memory-ratio": "100"});
        if kind != "gpu" {
            resources = json!({format!("koordinator.sh/{kind}"): "100"});
        }
        json!({"type": kind, "minor": allocation["minor"], "id": allocation["id"].as_str().unwrap_or_default(), "health": true, "resources": resources})
    };
    let by_type = allocations.as_object().into_iter().flatten();
    let entries = by_type.flat_map(|(kind, list)| {
        list.as_array()
            .into_iter()
            .flatten()
            .map(move |allocation| entry(kind, allocation))
    });
    let device = json!({"devices": entries.collect::<Vec<_>>()});
    only(device, allocations)
}

/// The devices, of which only those of an allocation are well, with the memory that it says a whole one has.
fn only(mut device: Value, allocations: &Value) -> Value {
    for entry in device["devices"].as_array_mut().unwrap() {
        let kind = entry["type"].as_str().unwrap().to_owned();
        let list = allocations[&kind].as_array().into_iter().flatten();
        let Some(allocation) = list
            .into_iter()
            .find(|allocation| allocation["minor"] == entry["minor"])
        else {
            entry["health"] = json!(false);
            continue;
        };
        let held = amounts(&allocation["resources"]);
        let ratio = held
            .get(GPU_MEMORY_RATIO)
            .and_then(|ratio| ratio.unsigned())
            .unwrap_or(100);
        if let Some(bytes) = held.get(GPU_MEMORY).and_then(|bytes| bytes.unsigned()) {
            entry["resources"][GPU_MEMORY] = json!(Quantity::from_unsigned(bytes * 100 / ratio));
        }
    }
    device
}

/// Compares annotations: records by value, timestamps by being such, everything else to the letter.
fn compare(got: &BTreeMap<String, String>, expected: &Value) -> Outcome {
    for (key, value) in expected.as_object().into_iter().flatten() {
        let Some(got) = got.get(key) else {
            return Outcome::Failed(format!("annotation {key} is missing: {got:?}"));
        };
        let outcome = match key.as_str() {
            DEVICE_ALLOCATED => Outcome::equal(&parsed(got), &parsed(value.as_str().unwrap())),
            BIND_TIMESTAMP => Outcome::equal(&got.parse::<u64>().is_ok(), &true),
            _ => Outcome::equal(&json!(got), value),
        };
        if outcome != Outcome::Passed {
            return outcome;
        }
    }
    Outcome::Passed
}

fn parsed(record: &str) -> Value {
    by_value(&serde_json::from_str(record).unwrap())
}

/// A record whose quantities are written in one form, and whose lists are in order.
fn by_value(record: &Value) -> Value {
    let device = |device: &Value| {
        let mut device = device.as_object().unwrap().clone();
        let resources: Amounts = amounts(device.get("resources").unwrap_or(&Value::Null));
        device.insert("resources".to_owned(), json!(resources));
        Value::Object(device)
    };
    let kinds = record.as_object().into_iter().flatten();
    let kinds: Map<String, Value> = kinds
        .map(|(kind, devices)| {
            (
                kind.clone(),
                devices.as_array().into_iter().flatten().map(device).collect(),
            )
        })
        .collect();
    Value::Object(kinds)
}
