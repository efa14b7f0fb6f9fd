//! Devices of other types than GPUs: one that nobody compiled in.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use futures::FutureExt;
use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use proto::record::{DEVICE_ALLOCATED, DeviceAllocations};
use serde_json::json;

use super::{Body, World};
use crate::pods::PodSpec;

/// Name, promise, body.
pub(super) const SCENARIOS: &[(&str, &str, Body)] =
    &[("unknown-type", "a type of device that only a Device object knows is scheduled and accounted", unknown_type)];

/// What the made-up type is asked for by; kube-scheduler's configuration has to name it.
pub(super) const NPU: &str = "example.com/npu";
/// Node without our plugin.
pub(super) const NPU_NODE: &str = "npu";

/// Minors and amounts of one type that a pod's record names.
fn held(pod: &Pod, kind: &str, resource: &str) -> Vec<(i32, u64)> {
    let text = pod.annotations().get(DEVICE_ALLOCATED).map_or("{}", String::as_str);
    let record: DeviceAllocations = serde_json::from_str(text).unwrap_or_default();
    let devices = record.get(kind).into_iter().flatten();
    devices.map(|one| (one.minor, one.resources.get(resource).and_then(|amount| amount.unsigned()).unwrap_or(0))).collect()
}

fn unknown_type(world: &mut World) -> BoxFuture<'_, Result<()>> {
    async {
        let device =
            |minor: u32| json!({"type": "npu", "id": format!("npu-{minor}"), "minor": minor, "health": true, "resources": {NPU: "4"}});
        let api = world.cluster()?.api().cluster().clone();
        let object = json!({"metadata": {"name": NPU_NODE}, "spec": {"devices": [device(0), device(1)]}});
        api.create("devices.scheduling.koordinator.sh", object)?;
        api.patch_status("nodes", "", NPU_NODE, &json!({"capacity": {NPU: "8"}, "allocatable": {NPU: "8"}}))?;
        let npu = |name: &str, amount: &str| PodSpec::new(name, &[(NPU, amount)]).on(NPU_NODE);
        let [one, other] = [world.start(npu("three-0", "3")).await?, world.start(npu("three-1", "3")).await?];
        let (one, other) = (held(&one, "npu", NPU), held(&other, "npu", NPU));
        let minors: BTreeSet<i32> = one.iter().chain(&other).map(|(minor, _)| *minor).collect();
        ensure!(one.len() == 1 && other.len() == 1 && minors.len() == 2, "three and three of four each: {one:?} {other:?}");
        // Two are free, but not on one device.
        world.create(npu("two", "2")).await?;
        world.until_refused("two", "devices of another type").await?;
        world.start(npu("one", "1")).await?;
        world.verify().await?;
        world.delete("three-0").await?;
        world.until_running(&["two"]).await?;
        world.verify().await?;
        world.clear().await?;
        api.delete("devices.scheduling.koordinator.sh", "", NPU_NODE, None)?;
        Ok(())
    }
    .boxed()
}
