//! A Device object -> what node status and labels say.

use std::collections::{BTreeMap, BTreeSet};

use device_plugin::devices::device_ids::IdScheme;
use device_plugin::devices::extended_resource::ExtendedResource;
use device_plugin::devices::fleet::NodeFleet;
use device_plugin::devices::inventory::{Gpu, NodeInventory};
use device_plugin::node::pods::IN_NODE_STATUS;
use device_plugin::publish::node_patches;
use proto::device::{DeviceSpec, TYPE_GPU, TYPE_RDMA};
use proto::memory_unit::MemoryUnit;
use proto::node::Node;
use proto::quantity::Quantity;
use proto::resource::{DEFAULT_SLOTS, GPU_COUNT, GPU_SHARED, RDMA};
use serde_json::{Value, json};

use super::Outcome;
use super::report::gpu;

type Amounts = BTreeMap<String, Quantity>;

pub(super) fn run(case: &Value) -> Outcome {
    let (input, expected) = (&case["input"], &case["expected"]);
    if expected["ok"] != true {
        return Outcome::Skipped(
            "failures of Koordinator's controller to ask its API server, none of a Device object",
        );
    }
    let is_of_others = |value: &Value| {
        value["node_resources"]
            .as_object()
            .is_some_and(|all| all.keys().any(|name| name.starts_with("huawei.com/")))
    };
    if is_of_others(expected) {
        return Outcome::Skipped("another vendor's resources (Huawei)");
    }
    let spec: DeviceSpec = match &input["device"] {
        Value::Null => DeviceSpec::default(),
        device => serde_json::from_value(json!({"devices": device["devices"]})).unwrap(),
    };
    let wanted: Amounts = serde_json::from_value(expected["node_resources"].clone()).unwrap();
    let resources = || Outcome::of(&resources(input, &spec), &wanted);
    // Of the adapters nothing is written into node status, so nothing has to be taken out of it.
    let is_written = input["plugin"] != "rdma";
    let removed = || {
        if is_written {
            removed(&spec)
        } else {
            BTreeSet::new()
        }
    };
    let removed = || Outcome::of(&removed(), &of_node_status(&expected["removed_resources"]));
    let labels = || Outcome::of(&labels_of(&input["device"]["labels"]), &expected["node_labels"]);
    resources().and(removed).and(labels)
}

/// Amounts in the node status, and those that the plugin advertises of the resources that it serves.
fn resources(input: &Value, spec: &DeviceSpec) -> Amounts {
    if input["plugin"] == "rdma" {
        return advertised_rdma(spec);
    }
    let offered = node_patches::offered(&spec.devices);
    let mut amounts: Amounts = offered
        .iter()
        .filter(|(name, amount)| *amount > 0 && *name != GPU_COUNT)
        .map(|(name, amount)| (name.to_owned(), Quantity::from_unsigned(amount)))
        .collect();
    let shares = advertised_shares(spec);
    if input["sync_gpu_shared"] == true && shares > 0 {
        amounts.insert(GPU_SHARED.to_owned(), Quantity::from_unsigned(shares));
    }
    amounts
}

/// Healthy virtual devices in the list that kubelet is sent.
fn advertised_shares(spec: &DeviceSpec) -> u64 {
    let (gpus, are_healthy): (Vec<Gpu>, Vec<bool>) = spec
        .devices
        .iter()
        .filter(|device| device.device_type == TYPE_GPU)
        .map(|device| {
            let minor = u32::try_from(device.minor.unwrap()).unwrap();
            (gpu(&device.id, minor, 1), device.health)
        })
        .unzip();
    let ids = IdScheme::with_numa_nodes(false, &gpus, DEFAULT_SLOTS, MemoryUnit::GIB).unwrap();
    let inventory = NodeInventory {
        gpus,
        ..NodeInventory::default()
    };
    let fleet = NodeFleet::new(inventory, ids);
    let healthy = fleet
        .gpus
        .iter()
        .zip(are_healthy)
        .filter(|(_, is_healthy)| *is_healthy);
    healthy
        .map(|(entry, _)| {
            fleet
                .ids
                .ids(ExtendedResource::Shared, &entry.device.uuid)
                .count() as u64
        })
        .sum()
}

/// Percent of the healthy adapters.
fn advertised_rdma(spec: &DeviceSpec) -> Amounts {
    let healthy = spec
        .devices
        .iter()
        .filter(|device| device.device_type == TYPE_RDMA && device.health);
    let percent: u64 = healthy
        .filter_map(|device| device.resources.get(RDMA)?.unsigned())
        .sum();
    (percent > 0)
        .then(|| (RDMA.to_owned(), Quantity::from_unsigned(percent)))
        .into_iter()
        .collect()
}

/// The resources that the patch removes from a node that has all of them.
fn removed(spec: &DeviceSpec) -> BTreeSet<String> {
    let all: BTreeMap<&str, &str> = IN_NODE_STATUS.into_iter().map(|name| (name, "1")).collect();
    let node: Node =
        serde_json::from_value(json!({"status": {"capacity": all, "allocatable": all}})).unwrap();
    let patch = node_patches::status_amounts(&node, node_patches::offered(&spec.devices)).unwrap_or_default();
    let nulls = |field: &str| -> BTreeSet<String> {
        let fields = patch["status"][field].as_object().into_iter().flatten();
        fields
            .filter(|(name, value)| value.is_null() && *name != GPU_COUNT)
            .map(|(name, _)| name.clone())
            .collect()
    };
    assert_eq!(nulls("capacity"), nulls("allocatable"));
    nulls("capacity")
}

/// The others are the plugin's, which lists no device then, or other vendors'.
fn of_node_status(names: &Value) -> BTreeSet<String> {
    let names = names.as_array().into_iter().flatten().filter_map(Value::as_str);
    names
        .filter(|name| IN_NODE_STATUS.contains(name))
        .map(str::to_owned)
        .collect()
}

/// The labels of a node that had none.
fn labels_of(of_device: &Value) -> Value {
    let of_device: BTreeMap<String, String> = serde_json::from_value(of_device.clone()).unwrap_or_default();
    let patch = node_patches::labels(&Node::default(), &of_device)
        .unwrap_or_else(|| json!({"metadata": {"labels": {}}}));
    patch["metadata"]["labels"].clone()
}
