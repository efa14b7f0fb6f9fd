//! Accounting of devices from watched objects: total, used and free amounts.

use placement::{Amounts as EngineAmounts, NamedAmounts};
use proto::pod::Pod;
use proto::quantity::Quantity;
use proto::resource::{GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO};
use scheduler::watch::ObjectStore;
use serde_json::{Value, json};

use super::case::{Case, Outcome};
use super::requests::Amounts;
use super::world::{Allocations, NODE, World, allocations_of, read};

/// Total, held and free amounts of devices, by type and minor.
#[derive(Debug, Default, PartialEq)]
struct DeviceTotals {
    total: Allocations,
    used: Allocations,
    free: Allocations,
}

/// Runs a case of accounting.
pub(crate) fn run(case: &Case<'_>) -> Outcome {
    if let Some(skip) = case.of_other_vendor() {
        return skip;
    }
    let mut world = before(&without_own(case));
    let device = json!({"devices": case.input["devices"]});
    match case.kind {
        "device_add" | "device_update" => world.set_device(&device),
        "device_delete" => world.delete_device(),
        "pod_add" => apply(&mut world, &case.input["pod"]),
        "pod_delete" => {
            apply(&mut world, &case.input["pod"]);
            ObjectStore::<Pod>::delete(&mut world.index, &pod(&case.input["pod"]));
        }
        "pod_update" => return update(case),
        kind => return Outcome::skipped(format!("kind {kind:?} is not understood")),
    }
    let expected = DeviceTotals::of_case(&case.expected["after"]);
    Outcome::equal(&DeviceTotals::of(&world), &expected)
}

/// The state before; without what is used if that is what the pod holds that goes.
fn without_own(case: &Case<'_>) -> Value {
    let mut before = case.input["before"].clone();
    let goes = case.kind == "pod_update" || case.kind == "pod_delete";
    if goes && before["used"] != case.expected["after"]["used"] {
        before["used"] = Value::Null;
    }
    before
}

fn update(case: &Case<'_>) -> Outcome {
    let mut world = before(&without_own(case));
    apply(&mut world, &case.input["old_pod"]);
    let held = world
        .index
        .fleet()
        .held_by(&uid(&case.input["old_pod"]))
        .is_some();
    apply(&mut world, &case.input["pod"]);
    let is_held = world
        .index
        .fleet()
        .held_by(&uid(&case.input["old_pod"]))
        .is_some();
    Outcome::equal(&json!(held && !is_held), &case.expected["old_pod_released"]).and(|| {
        match case.expected.get("after") {
            Some(after) => Outcome::equal(&DeviceTotals::of(&world), &DeviceTotals::of_case(after)),
            None => Outcome::Passed,
        }
    })
}

/// A node as it was: devices with these totals, and a pod for everything that is used.
fn before(totals: &Value) -> World {
    let mut world = World::plain();
    let devices = each(&totals["total"]).map(|(kind, minor, resources)| {
        json!({"type": kind, "minor": minor, "id": format!("{kind}-{minor}"), "health": true, "resources": resources})
    });
    let devices: Vec<Value> = devices.collect();
    if !devices.is_empty() {
        world.set_device(&json!({"devices": devices}));
    }
    for (kind, minor, resources) in each(&totals["used"]) {
        world.hold(&format!("used-{kind}-{minor}"), kind, minor, resources);
    }
    world
}

fn each(by_type: &Value) -> impl Iterator<Item = (&str, i64, &Value)> {
    let by_type = by_type.as_object().into_iter().flatten();
    by_type.flat_map(|(kind, devices)| {
        let devices = devices.as_object().into_iter().flatten();
        devices.map(move |(minor, resources)| (kind.as_str(), minor.parse().unwrap(), resources))
    })
}

fn apply(world: &mut World, given: &Value) {
    world.index.apply(pod(given));
}

fn uid(pod: &Value) -> String {
    format!("uid-of-{}", pod["name"].as_str().unwrap_or_default())
}

fn pod(given: &Value) -> Pod {
    let node = given["node_name"]
        .as_str()
        .map(|node| if node.is_empty() { node } else { NODE });
    read(json!({
        "metadata": {"name": given["name"], "namespace": given["namespace"], "uid": uid(given), "annotations": given["annotations"]},
        "spec": {"nodeName": node, "containers": []}, "status": {"phase": given["phase"]}}))
}

impl DeviceTotals {
    fn of_case(totals: &Value) -> Self {
        let by_minor = |totals: &Value| {
            let list = |kind: &Value| {
                let devices = kind.as_object().into_iter().flatten();
                let entry = |(minor, resources): (&String, &Value)| json!({"minor": minor.parse::<i64>().unwrap(), "resources": resources});
                devices.map(entry).collect::<Value>()
            };
            let kinds = totals.as_object().into_iter().flatten();
            trimmed(allocations_of(
                &kinds
                    .map(|(kind, devices)| (kind.clone(), list(devices)))
                    .collect(),
            ))
        };
        Self {
            total: by_minor(&totals["total"]),
            used: by_minor(&totals["used"]),
            free: by_minor(&totals["free"]),
        }
    }

    fn of(world: &World) -> Self {
        let mut totals = Self::default();
        let fleet = world.index.fleet();
        let Some(view) = fleet.node_id(NODE).and_then(|id| fleet.view(id)) else {
            return totals;
        };
        for gpu in view.gpus() {
            let total = gpu.device.total();
            let put = |into: &mut Allocations, amounts: EngineAmounts| {
                into.entry("gpu".to_owned())
                    .or_default()
                    .insert(gpu.device.minor.into(), resources(amounts, total));
            };
            put(&mut totals.used, gpu.used.plus(gpu.suspect));
            // An unhealthy device has nothing free.
            if gpu.device.healthy {
                put(&mut totals.total, total);
                put(&mut totals.free, gpu.free);
            }
        }
        for device in view.other_devices() {
            let put = |into: &mut Allocations, amounts: &NamedAmounts| {
                into.entry(device.kind.to_string())
                    .or_default()
                    .insert(device.device.minor.into(), named(amounts));
            };
            let used = device
                .device
                .resources
                .iter()
                .map(|(name, all)| (name.clone(), all - device.free_resources.get(name).unwrap_or(&0)));
            put(&mut totals.used, &used.collect());
            if device.device.healthy {
                put(&mut totals.total, &device.device.resources);
                put(&mut totals.free, &device.free_resources);
            }
        }
        Self {
            total: trimmed(totals.total),
            used: trimmed(totals.used),
            free: trimmed(totals.free),
        }
    }
}

/// Amounts of a GPU in Koordinator's words.
fn resources(amounts: EngineAmounts, total: EngineAmounts) -> Amounts {
    let ratio = u64::from(amounts.memory.percent_of(total.memory));
    let all = [
        (GPU_CORE, u64::from(amounts.core)),
        (GPU_MEMORY, amounts.memory.bytes_ceil()),
        (GPU_MEMORY_RATIO, ratio),
    ];
    all.map(|(name, amount)| (name.to_owned(), Quantity::from_unsigned(amount)))
        .into()
}

/// Amounts of a device of another type.
fn named(amounts: &NamedAmounts) -> Amounts {
    amounts
        .iter()
        .map(|(name, amount)| (name.to_string(), Quantity::from_unsigned(*amount)))
        .collect()
}

/// Without zeros, and devices and types that have nothing else.
fn trimmed(mut allocations: Allocations) -> Allocations {
    for devices in allocations.values_mut() {
        for amounts in devices.values_mut() {
            amounts.retain(|_, amount| *amount != Quantity::default());
        }
        devices.retain(|_, amounts| !amounts.is_empty());
    }
    allocations.retain(|_, devices| !devices.is_empty());
    allocations
}
