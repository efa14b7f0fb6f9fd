//! Devices that a pod gets, or the refusal.
//!
//! A refusal must be for want of room; whether preemption could help is not compared: kube-scheduler would choose victims by
//! node and not by device, so that every such refusal says that it cannot.

use std::collections::BTreeMap;

use proto::quantity::Quantity;
use serde_json::{Map, Value, json};

use super::case::{Case, Outcome};
use super::requests::{Amounts, amounts};
use super::scoring::{policies, weights};
use super::world::{Allocations, Refused, World, allocations_of, annotated, functions_of, pod};

/// The annotation with hints by type of device.
pub(crate) const HINT: &str = "scheduling.koordinator.sh/device-allocate-hint";

/// Inputs that are understood; a case with another would be run without what it is about.
const UNDERSTOOD: &[&str] = &[
    "device_ref",
    "device",
    "device_labels",
    "device_annotations",
    "node_labels",
    "pod_labels",
    "gpu_shared",
    "used",
    "preemptible",
    "pod",
    "scoring",
    "gpu_shared_resource_templates",
];

/// Runs a case of allocation.
pub(crate) fn run(case: &Case<'_>) -> Outcome {
    if let Some(skip) = out_of_scope(case) {
        return skip;
    }
    let scoring = &case.input["scoring"];
    let mut world = World::new(&case.input["node_labels"], policies(scoring), weights(scoring));
    world.set_device(&device(case));
    let victims = fill(&mut world, &case.input["used"], &case.input["preemptible"]);
    for victim in victims {
        scheduler::watch::ObjectStore::delete(&mut world.index, &victim);
    }
    let asked = if case.input["gpu_shared"].is_null() {
        requests(&case.input["pod"])
    } else {
        shared(&case.input["gpu_shared"])
    };
    let placed = world.place(&annotated(
        pod(&asked, &case.input["pod_labels"]),
        &case.input["pod"]["annotations"],
    ));
    match (placed, case.is_ok()) {
        (Ok(placed), true) => match case.expected.get("allocations") {
            Some(expected) => Outcome::equal(&placed.allocations, &allocations_of(expected))
                .and(|| Outcome::equal(&placed.functions, &functions_of(expected, |entry| &entry["vfs"]))),
            None => Outcome::Passed,
        },
        (Ok(placed), false) => Outcome::Failed(format!("placed on {:?}", placed.allocations)),
        (Err(Refused::NoRoom(_)), false) => Outcome::Passed,
        (Err(refused), _) => Outcome::Failed(refused.to_string()),
    }
}

fn out_of_scope(case: &Case<'_>) -> Option<Outcome> {
    if let Some(skip) = case.of_other_vendor() {
        return Some(skip);
    }
    let input = case.input;
    if input.get("designated").is_some() {
        return Some(Outcome::skipped(
            "a record on a pod that is not bound yet is not followed: it comes with copies of other pods, and the webhook removes it",
        ));
    }
    if case.device().is_none() && input["gpu_shared"].is_null() && case.is_ok() {
        return Some(Outcome::skipped(
            "a node without a Device object: here no pod gets a share of unreported devices",
        ));
    }
    let unknown = input
        .as_object()?
        .keys()
        .find(|key| !UNDERSTOOD.contains(&key.as_str()))?;
    Some(Outcome::skipped(format!("input {unknown:?} is not understood")))
}

/// The Device object with the labels and annotations that the case adds; one GPU where the case is about a label only.
pub(crate) fn device(case: &Case<'_>) -> Value {
    let gpu = json!({"type": "gpu", "minor": 0, "id": "GPU-0", "health": true, "resources": {
        "koordinator.sh/gpu-core": "100", "koordinator.sh/gpu-memory": "16Gi", "koordinator.sh/gpu-memory-ratio": "100"}});
    let gpus = if case.input["gpu_shared"].is_null() {
        json!([])
    } else {
        json!([gpu])
    };
    let mut device = case.device().cloned().unwrap_or_else(|| json!({"devices": gpus}));
    for (own, added) in [("labels", "device_labels"), ("annotations", "device_annotations")] {
        let mut all = device[own].as_object().cloned().unwrap_or_default();
        all.extend(case.input[added].as_object().cloned().unwrap_or_default());
        device[own] = Value::Object(all);
    }
    device
}

/// Pods that hold what is used, one for each device; those whose amounts are preemptible are returned.
pub(crate) fn fill(world: &mut World, used: &Value, preemptible: &Value) -> Vec<proto::pod::Pod> {
    let mut victims = Vec::new();
    for (kind, devices) in used.as_object().into_iter().flatten() {
        for device in devices.as_array().unwrap() {
            let minor = device["minor"].as_i64().unwrap();
            let leaving = &preemptible[kind][minor.to_string()];
            let staying = less(&amounts(&device["resources"]), &amounts(leaving));
            if !leaving.is_null() {
                victims.push(world.hold(&format!("victim-{kind}-{minor}"), kind, minor, leaving));
            }
            if staying.values().any(|amount| *amount > Quantity::default()) {
                world.hold_functions(
                    &format!("used-{kind}-{minor}"),
                    kind,
                    minor,
                    &json!(staying),
                    &device["vfs"],
                );
            }
        }
    }
    victims
}

fn less(amounts: &Amounts, taken: &Amounts) -> Amounts {
    let left = |(name, amount): (&String, &Quantity)| {
        let taken = taken.get(name).copied().unwrap_or_default().unsigned().unwrap();
        (
            name.clone(),
            Quantity::from_unsigned(amount.unsigned().unwrap() - taken),
        )
    };
    amounts.iter().map(left).collect()
}

/// The requests of the pod's container. Normalised requests may state memory both ways; a pod says it in one.
pub(crate) fn requests(pod: &Value) -> Value {
    let by_type = pod["normalized_requests"].as_object().into_iter().flatten();
    let mut all: Map<String, Value> = by_type
        .flat_map(|(_, requests)| requests.as_object().unwrap().clone())
        .collect();
    all.extend(pod["requests"].as_object().cloned().unwrap_or_default());
    if all.contains_key("koordinator.sh/gpu-memory-ratio") {
        all.remove("koordinator.sh/gpu-memory");
    }
    Value::Object(all)
}

/// A pod that shares a GPU, or has one to itself.
fn shared(shared: &Value) -> Value {
    let percent = if *shared == json!(true) { "50" } else { "100" };
    json!({"koordinator.sh/gpu-core": percent, "koordinator.sh/gpu-memory-ratio": percent})
}

/// A request for devices of one type: how many of them, and what of each.
pub(crate) fn count(case: &Case<'_>) -> Outcome {
    let mut world = World::plain();
    world.set_device(&device(case));
    let kind = case.input["device_type"].as_str().unwrap();
    let asking = pod(&case.input["requests"], &Value::Null);
    let asking = match &case.input["hint"] {
        Value::Null => asking,
        hint => annotated(asking, &json!({HINT: {kind: hint}})),
    };
    match (world.place(&asking), case.is_ok()) {
        (Ok(placed), true) => {
            let devices = placed.allocations.get(kind).cloned().unwrap_or_default();
            let each: BTreeMap<i64, Amounts> = devices
                .keys()
                .map(|minor| (*minor, amounts(&case.expected["per_device"])))
                .collect();
            Outcome::equal(&json!(devices.len()), &case.expected["count"])
                .and(|| Outcome::equal(&placed.allocations, &Allocations::from([(kind.to_owned(), each)])))
        }
        (Ok(placed), false) => Outcome::Failed(format!("placed on {:?}", placed.allocations)),
        (Err(refused), true) => Outcome::Failed(refused.to_string()),
        (Err(_), false) => Outcome::Passed,
    }
}
