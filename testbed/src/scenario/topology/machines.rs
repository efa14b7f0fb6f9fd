//! The machines of the proposals: the places of their GPUs and network adapters, and their GPU partitions.

use serde_json::{Value, json};

use kit::cluster::{GpuSpec, NodeSetup};

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
    let spec = NodeSetup::new(name, &[16384; 8]);
    let place = |gpu: GpuSpec| {
        let details = [
            ("pcieId", json!(switch(gpu.minor / per_switch))),
            ("numaNode", json!(gpu.minor / 4)),
        ];
        GpuSpec {
            details: details
                .into_iter()
                .map(|(field, value)| (field.to_owned(), value))
                .collect(),
            ..gpu
        }
    };
    let plugin_args = ["--vendor-resource", "nvidia.com/gpu=ours"]
        .map(str::to_owned)
        .to_vec();
    NodeSetup {
        gpus: spec.gpus.into_iter().map(place).collect(),
        plugin_args,
        ..spec
    }
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
    let of_size = |size: u32| -> Vec<Value> {
        let sets = (0..8 / size).map(|at| (at * size..(at + 1) * size).collect::<Vec<u32>>());
        let is_fast = |set: &[u32]| size < 8 && set.iter().all(|minor| *minor < 4);
        let entry = |set: Vec<u32>| {
            let (bandwidth, score) = if is_fast(&set) {
                ("400Gi", 10)
            } else {
                ("200Gi", 5)
            };
            json!({"minors": set, "gpuLinkType": "NVLink", "ringBusBandwidth": bandwidth, "allocationScore": score})
        };
        sets.map(entry).collect()
    };
    json!({"1": of_size(1), "2": of_size(2), "4": of_size(4), "8": of_size(8)})
}
