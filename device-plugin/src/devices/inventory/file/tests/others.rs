//! Devices of other types than GPUs.

use daemon::api_server::one_line;
use std::fmt::Write as _;
use std::path::Path;

use proptest::prelude::*;

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
