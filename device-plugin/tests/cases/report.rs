//! GPUs in the Device object of a node.

use std::fs;
use std::os::unix::fs::symlink;

use chrono::DateTime;
use device_plugin::devices::device_ids::IdScheme;
use device_plugin::devices::fleet::NodeFleet;
use device_plugin::devices::health::HealthReason;
use device_plugin::devices::inventory::{Gpu, NodeInventory, PciLocation, pci};
use device_plugin::publish::device_object::DeviceObjectInputs;
use proto::device::DeviceInfo;
use proto::memory_unit::MemoryUnit;
use proto::node::Node;
use serde_json::{Map, Value, json};

use super::Outcome;

/// A machine's sysfs -> where the GPU sits.
pub(super) fn pci_topology(case: &Value) -> Outcome {
    let (input, expected) = (&case["input"], &case["expected"]);
    let address = input["busID"].as_str().unwrap();
    let sysfs = tempfile::tempdir().unwrap();
    let entries = sysfs.path().join("bus/pci/devices");
    fs::create_dir_all(&entries).unwrap();
    if let Some(target) = input["sysfs_link_target"].as_str() {
        let device = sysfs
            .path()
            .join("devices")
            .join(target.trim_start_matches("<pci devices>").trim_matches('/'));
        fs::create_dir_all(&device).unwrap();
        symlink(&device, entries.join(address)).unwrap();
        if let Some(node) = input["sysfs_numa_node"].as_i64() {
            fs::write(device.join("numa_node"), format!("{node}\n")).unwrap();
        }
    }
    let location = pci::location(sysfs.path(), address);
    let gpu = Gpu {
        bus_id: Some(address.to_owned()),
        location,
        ..gpu("GPU-a", 0, 1)
    };
    let found = published(vec![gpu], |_| None).remove(0).topology;
    if expected["ok"] != true {
        return Outcome::of(&found.is_none(), &true);
    }
    let found = found.map(|at| json!({"nodeID": at.node_id, "pcieID": at.pcie_id, "busID": at.bus_id}));
    let wanted = ["nodeID", "pcieID", "busID"].map(|field| (field.to_owned(), expected[field].clone()));
    Outcome::of(&found, &Some(Value::Object(Map::from_iter(wanted))))
}

/// GPUs, some of which are sick -> conditions of the Device object.
pub(super) fn report_device(case: &Value) -> Outcome {
    let input = &case["input"];
    let gpus = input["gpus"].as_array().unwrap().iter().map(|entry| {
        let number = |field: &str| entry[field].as_u64().unwrap();
        Gpu {
            bus_id: entry["busID"].as_str().map(str::to_owned),
            location: PciLocation {
                numa_node: entry["nodeID"].as_i64().map(|node| i32::try_from(node).unwrap()),
                root: entry["pcie"].as_str().map(str::to_owned),
                switch: None,
            },
            ..gpu(
                entry["id"].as_str().unwrap(),
                u32::try_from(number("minor")).unwrap(),
                number("memory_total"),
            )
        }
    });
    let illness = |bus_id: &str| {
        let entry = input["unhealthy"].get(bus_id)?;
        let xid = entry["errCode"].as_str()?.strip_prefix("Xid")?.parse().ok()?;
        Some((HealthReason::Xid(xid), entry["errMessage"].as_str()?.to_owned()))
    };
    let devices = published(gpus.collect(), illness);
    let is_right = devices.iter().all(|device| {
        let bus_id = device
            .topology
            .as_ref()
            .map(|topology| topology.bus_id.as_str())
            .unwrap();
        device.health == input["unhealthy"].get(bus_id).is_none()
    });
    let found: Map<String, Value> = devices.iter().map(conditions).collect();
    Outcome::of(&is_right, &true)
        .and(|| Outcome::of(&Value::Object(found), &case["expected"]["conditions_by_bus_id"]))
}

/// The conditions of a device without their times, null if there are none.
fn conditions(device: &DeviceInfo) -> (String, Value) {
    let bus_id = device.topology.as_ref().unwrap().bus_id.clone();
    let conditions: Vec<Value> = device
        .conditions
        .iter()
        .map(|condition| {
            json!({
                "type": condition.condition_type, "status": condition.status,
                "reason": condition.reason, "message": condition.message,
            })
        })
        .collect();
    (
        bus_id,
        if conditions.is_empty() {
            Value::Null
        } else {
            Value::Array(conditions)
        },
    )
}

pub(super) fn gpu(id: &str, minor: u32, memory_bytes: u64) -> Gpu {
    Gpu {
        uuid: id.parse().unwrap(),
        minor,
        index: minor,
        memory_bytes,
        reserved_bytes: 0,
        model: String::new(),
        bus_id: None,
        location: PciLocation::default(),
        labels: std::collections::BTreeMap::new(),
        device_node: "/dev/null".into(),
    }
}

/// The devices that are published of these GPUs, of which some have an illness.
fn published(gpus: Vec<Gpu>, illness: impl Fn(&str) -> Option<(HealthReason, String)>) -> Vec<DeviceInfo> {
    let ids = IdScheme::with_numa_nodes(false, &gpus, 100, MemoryUnit::GIB).unwrap();
    let inventory = NodeInventory {
        gpus,
        vendor: "nvidia".to_owned(),
        ..NodeInventory::default()
    };
    let mut fleet = NodeFleet::new(inventory, ids);
    for entry in &mut fleet.gpus {
        if let Some((reason, message)) = entry.device.bus_id.as_deref().and_then(&illness) {
            (entry.is_healthy, entry.reason, entry.message) = (false, Some(reason), message);
        }
    }
    let now = DateTime::from_timestamp(0, 0).unwrap();
    DeviceObjectInputs::default()
        .device(&fleet, &Node::default(), None, now)
        .spec
        .devices
}
