//! The machines of the proposals: the places of their GPUs and network adapters, and their GPU partitions.

use serde_json::{Map, Value, json};

use kit::cluster::NodeSetup;

/// Node of two NUMA nodes with four PCIe switches each, and on each switch a GPU and an adapter with virtual functions.
pub(in crate::scenario) const PAIRED: &str = "paired";
/// A node like [`PAIRED`] with one adapter only, on the switch of GPU 5.
pub(in crate::scenario) const LONE: &str = "lone-adapter";
/// Node of four PCIe switches with two GPUs each, which are allocated in partitions only.
pub(in crate::scenario) const PARTITIONED: &str = "partitioned";
/// Node of four PCIe switches with two GPUs each, without partitions.
pub(in crate::scenario) const COUPLED: &str = "coupled";

/// The number of virtual functions of every network adapter.
pub(super) const FUNCTIONS_PER_ADAPTER: u32 = 2;

/// The nodes of all these machines.
pub(in crate::scenario) fn nodes() -> Vec<NodeSetup> {
    let adapters = (0..8).map(|at| adapter(at, at)).collect();
    let machine = [
        ("gpuPartitions".to_owned(), partitions()),
        ("gpuPartitionPolicy".to_owned(), json!("Honor")),
    ];
    vec![
        NodeSetup {
            others: adapters,
            ..eight(PAIRED, 1)
        },
        NodeSetup {
            others: vec![adapter(0, 5)],
            ..eight(LONE, 1)
        },
        NodeSetup {
            machine: machine.into_iter().collect(),
            ..eight(PARTITIONED, 2)
        },
        eight(COUPLED, 2),
    ]
}

/// Eight GPUs on two NUMA nodes, `per_switch` on each PCIe switch; the plugin also serves whole GPUs as `nvidia.com/gpu`.
fn eight(name: &str, per_switch: u32) -> NodeSetup {
    let mut spec = NodeSetup::new(name, &[16384; 8]);
    for gpu in &mut spec.gpus {
        let pcie_id = switch(gpu.minor / per_switch);
        gpu.details.insert("pcieId".to_owned(), json!(pcie_id));
        gpu.details.insert("numaNode".to_owned(), json!(gpu.minor / 4));
    }
    spec.plugin_args = ["--vendor-resource", "nvidia.com/gpu=ours"]
        .map(str::to_owned)
        .into();
    spec
}

/// The PCI address of a switch.
fn switch(at: u32) -> String {
    format!("0000:{at}0:00.0")
}

/// An RDMA adapter at a PCIe switch, with its virtual functions.
fn adapter(minor: u32, at_switch: u32) -> Value {
    let vfs: Vec<Value> = (0..FUNCTIONS_PER_ADAPTER)
        .map(|vf| json!({"minor": vf, "busID": format!("0000:{at_switch}f:00.{}", vf + 1)}))
        .collect();
    let id = format!("0000:{at_switch}f:00.0");
    json!({
        "type": "rdma", "id": id, "busId": id, "minor": minor, "numaNode": at_switch / 4, "pcieId": switch(at_switch),
        "labels": {"fabric": if at_switch < 4 { "a" } else { "b" }},
        "vfGroups": [{"labels": {"type": "general"}, "vfs": vfs}],
    })
}

/// All partitions of 1, 2, 4 and 8 GPUs; those in the first half have twice the bandwidth and the higher allocation score.
fn partitions() -> Value {
    let mut by_size = Map::new();
    for size in [1, 2, 4, 8] {
        let mut sets = Vec::new();
        for first in (0..8_u32).step_by(size) {
            let is_fast = size < 8 && first < 4;
            let (bandwidth, score) = if is_fast { ("400Gi", 10) } else { ("200Gi", 5) };
            let minors: Vec<u32> = (first..).take(size).collect();
            sets.push(json!({
                "minors": minors, "gpuLinkType": "NVLink", "ringBusBandwidth": bandwidth, "allocationScore": score,
            }));
        }
        by_size.insert(size.to_string(), Value::Array(sets));
    }
    Value::Object(by_size)
}
