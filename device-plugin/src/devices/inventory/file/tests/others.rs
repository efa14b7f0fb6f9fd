//! Devices of other types than GPUs.

use daemon::api_server::one_line;
use std::fmt::Write as _;
use std::path::Path;

use proptest::prelude::*;
use proto::quantity::Quantity;
use serde_json::{Value, json};

use super::*;

fn read(devices: &Value) -> Result<SimulatedDevices, InventoryError> {
    let text =
        json!({"gpus": [{"uuid": "GPU-a", "minor": 0, "memory": "1Gi"}], "devices": devices}).to_string();
    parse(Path::new("gpus.json"), "node-1", text.as_bytes())
}

fn rdma() -> Value {
    json!({"type": "rdma", "id": "0000:1f:00.0", "minor": 0})
}

fn with(field: &str, value: Value) -> Value {
    let mut device = rdma();
    device[field] = value;
    device
}

#[test]
fn every_field_is_read_and_devices_are_sorted() {
    let nic = json!({
        "type": "rdma", "id": "0000:1f:00.0", "minor": 1, "resources": {"koordinator.sh/rdma": "50"}, "labels": {"fabric": "a"},
        "health": "Lost", "busId": "0000:1f:00.0", "numaNode": 1, "pcieId": "pci0000:16", "deviceNodes": ["/dev/infiniband/uverbs1"],
        "vfGroups": [{"labels": {"type": "general"}, "vfs": [{"minor": 2, "busID": "0000:1f:00.2"}]}],
    });
    let reading =
        read(&json!([nic, rdma_of("0000:20:00.0", 0), {"type": "npu", "id": "NPU-{node}", "minor": 0, "resources": {"a.b/c": 4}}]))
            .unwrap();
    let listed: Vec<_> = reading
        .inventory
        .others
        .iter()
        .map(|other| (other.device_type.as_str(), other.minor, other.id.as_str()))
        .collect();
    assert_eq!(
        listed,
        [
            ("npu", 0, "NPU-node-1"),
            ("rdma", 0, "0000:20:00.0"),
            ("rdma", 1, "0000:1f:00.0")
        ]
    );
    let nic = &reading.inventory.others[2];
    assert_eq!(
        nic.resources,
        [("koordinator.sh/rdma".to_owned(), Quantity::from_unsigned(50))].into()
    );
    assert_eq!(
        (
            nic.location.numa_node,
            nic.location.root.as_deref(),
            nic.bus_id.as_deref()
        ),
        (Some(1), Some("pci0000:16"), Some("0000:1f:00.0"))
    );
    assert_eq!(
        (nic.vf_groups[0].vfs[0].minor, nic.device_nodes.as_slice()),
        (2, [PathBuf::from("/dev/infiniband/uverbs1")].as_slice())
    );
    assert_eq!(
        reading.inventory.others[1].resources,
        [("koordinator.sh/rdma".to_owned(), Quantity::from_unsigned(100))].into()
    );
    let health: Vec<_> = reading
        .health
        .iter()
        .map(|(id, health)| (id.as_str(), *health))
        .collect();
    assert!(
        health.contains(&("0000:1f:00.0", SimulatedHealth::Lost))
            && health.contains(&("GPU-a", SimulatedHealth::Healthy)),
        "{health:?}"
    );
}

fn rdma_of(id: &str, minor: u32) -> Value {
    json!({"type": "rdma", "id": id, "minor": minor})
}

#[test]
fn errors_name_the_device_and_the_field() {
    let bad = [
        json!({}),
        json!([7]),
        json!([{"type": "rdma", "minor": 0}]),
        json!([with("type", json!("gpu"))]),
        json!([with("type", json!("NPU"))]),
        json!([with("type", json!("npu"))]),
        json!([with("id", json!("GPU-a"))]),
        json!([with("id", json!("a b"))]),
        json!([with("minor", json!(-1))]),
        json!([with("resources", json!({}))]),
        json!([with("resources", json!({"a.b/c": "-1"}))]),
        json!([with("resources", json!({"a.b/c": "many"}))]),
        json!([with("health", json!("Xid 79"))]),
        json!([with("labels", json!({"a": 1}))]),
        json!([with("deviceNodes", json!(["dev/x"]))]),
        json!([with("vfGroups", json!([{"vfs": 1}]))]),
        json!([with("memory", json!("1Gi"))]),
        json!([rdma(), rdma_of("0000:1f:00.0", 1)]),
        json!([rdma(), rdma_of("0000:20:00.0", 0)]),
    ];
    let mut text_of_all = String::new();
    for devices in bad {
        let error = read(&devices).expect_err(&devices.to_string());
        writeln!(text_of_all, "{devices}\n  {}", one_line(&error)).unwrap();
    }
    insta::assert_snapshot!(text_of_all);
}

proptest! {
    #[test]
    fn exactly_distinct_devices_are_accepted(devices in prop::collection::vec((0..3_usize, 0..4_u32, 0..3_u32), 0..5)) {
        let types = ["rdma", "fpga", "npu"];
        let entry = |(kind, id, minor): &(usize, u32, u32)| json!({"type": types[*kind], "id": format!("d{id}"), "minor": minor, "resources": {"a.b/c": 1}});
        let is_fine = devices.iter().enumerate().all(|(at, (kind, id, minor))| {
            devices[..at].iter().all(|(other_kind, other_id, other_minor)| other_id != id && (other_kind, other_minor) != (kind, minor))
        });
        prop_assert_eq!(read(&json!(devices.iter().map(entry).collect::<Vec<_>>())).is_ok(), is_fine);
    }

    #[test]
    fn no_text_makes_the_reader_panic(kind in ".{0,5}", id in ".{0,5}", resource in ".{0,5}", amount in ".{0,5}", node in ".{0,5}") {
        let _ = read(&json!([{"type": kind, "id": id, "minor": 0, "resources": {resource: amount}, "deviceNodes": [node]}]));
    }
}
