//! Devices of other types than GPUs: one that is not compiled in, and those that the plugin serves.

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use proto::record::{FPGA_DEVICES, RDMA_DEVICES};
use proto::resource::{FPGA, GPU_MEMORY_RATIO, GPU_SHARED, RDMA};
use serde_json::{Value, json};

use super::world::n_healthy;
use super::{DEADLINE, DEVICES, Scenario, World};
use kit::kubelet::Kubelet;
use kit::pod_fields::device_record;
use kit::pods::{Limits, PodBuilder};

pub(super) const SCENARIOS: &[Scenario] = scenarios! { needs "nodes of other kinds", on [Mixed]:
    "unknown-type" => unknown_type,
        "a type of device that only a Device object knows is scheduled and accounted";
    "rdma-and-fpga" => rdma_and_fpga,
        "network adapters and programmable cards, alone and beside a GPU";
};

/// The resource of the made-up type; kube-scheduler's configuration has to name it.
pub(super) const NPU: &str = "example.com/npu";
/// Node without our plugin.
pub(super) const NPU_NODE: &str = "npu";
/// Node with devices of three types.
pub(super) const THREE_TYPES: &str = "three-types";

/// The devices of other types that [`THREE_TYPES`] has.
pub(super) fn others() -> Vec<Value> {
    let device = |kind: &str, id: &str, minor: u32| json!({"type": kind, "id": id, "minor": minor});
    vec![
        device("rdma", "0000:1f:00.0", 0),
        device("rdma", "0000:2f:00.0", 1),
        device("fpga", "0000:3f:00.0", 0),
    ]
}

/// Minors and amounts of one type that a pod's record names.
fn held(pod: &Pod, kind: &str, resource: &str) -> Vec<(i32, u64)> {
    let record = device_record(pod).unwrap_or_default();
    let mut held = Vec::new();
    for device in record.get(kind).into_iter().flatten() {
        let amount = device.resources.get(resource);
        held.push((
            device.minor,
            amount.and_then(|amount| amount.unsigned()).unwrap_or(0),
        ));
    }
    held
}

async fn unknown_type(world: &mut World) -> Result<()> {
    let device = |minor: u32| json!({"type": "npu", "id": format!("npu-{minor}"), "minor": minor, "health": true, "resources": {NPU: "4"}});
    let api = world.cluster()?.api().objects().clone();
    let object = json!({"metadata": {"name": NPU_NODE}, "spec": {"devices": [device(0), device(1)]}});
    api.create(DEVICES, object)?;
    let status = json!({"capacity": {NPU: "8"}, "allocatable": {NPU: "8"}});
    api.patch_status("nodes", "", NPU_NODE, &status)?;
    let npu = |name: &str, amount: &str| PodBuilder::new(name, &[(NPU, amount)]).on(NPU_NODE);
    let one = held(&world.start(npu("three-0", "3")).await?, "npu", NPU);
    let other = held(&world.start(npu("three-1", "3")).await?, "npu", NPU);
    let are_apart = matches!((&*one, &*other), (&[(one, _)], &[(other, _)]) if one != other);
    ensure!(are_apart, "three and three of four each: {one:?} {other:?}");
    // Each of the two devices has 1 of 4 left. kube-scheduler's own check adds them up to 2 and lets the pod pass; only the
    // extender looks at single devices.
    let words = "devices of another type";
    world.create_refused(npu("two", "2"), words).await?;
    world.start(npu("one", "1")).await?;
    world.verify().await?;
    world.delete_for("three-0", "two").await?;
    world.verify().await?;
    world.clear().await?;
    api.delete(DEVICES, "", NPU_NODE, None)?;
    Ok(())
}

async fn rdma_and_fpga(world: &mut World) -> Result<()> {
    let kubelet = world.node(THREE_TYPES)?.kubelet();
    let serves = |kubelet: &Kubelet| n_healthy(kubelet, RDMA) == 200 && n_healthy(kubelet, FPGA) == 100;
    let failure = "the plugin does not serve all types";
    kubelet.expect_until(DEADLINE, failure, serves).await?;
    let pod = |name: &str, limits: &Limits<'_>| PodBuilder::new(name, limits).on(THREE_TYPES);
    let whole = world.start(pod("two-adapters", &[(RDMA, "200")])).await?;
    let whole = held(&whole, "rdma", RDMA);
    ensure!(whole == [(0, 100), (1, 100)], "{whole:?}");
    world.create_waiting(pod("adapter", &[(RDMA, "50")])).await?;
    world.verify().await?;
    world.delete_for("two-adapters", "adapter").await?;
    let all = [
        (GPU_SHARED, "1"),
        (GPU_MEMORY_RATIO, "50"),
        (RDMA, "100"),
        (FPGA, "100"),
    ];
    let beside = world.start(pod("beside", &all)).await?;
    let (adapter, card) = (held(&beside, "rdma", RDMA), held(&beside, "fpga", FPGA));
    let half = held(&world.pod("adapter")?, "rdma", RDMA);
    let is_apart = matches!((&*adapter, &*half), (&[(whole, 100)], &[(part, 50)]) if whole != part);
    ensure!(is_apart && card == [(0, 100)], "{adapter:?} {card:?} {half:?}");
    for again in [false, true] {
        if again {
            world.node(THREE_TYPES)?.restart_plugin().await?;
            world.restart_container(THREE_TYPES, "beside").await?;
        }
        world.ensure_shown("beside", "rdma", RDMA_DEVICES).await?;
        world.ensure_shown("beside", "fpga", FPGA_DEVICES).await?;
        world.ensure_shown("adapter", "rdma", RDMA_DEVICES).await?;
    }
    world.create_waiting(pod("card", &[(FPGA, "1")])).await
}
