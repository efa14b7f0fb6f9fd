//! The container runtime asks our plugin before it creates a container (NRI): the container gets the GPUs of its pod's record,
//! although the vendor's plugin may have chosen others.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::PostParams;
use proto::kubelet_allocations::KubeletAllocations;
use serde_json::json;

use super::vendors::{until_offered, whole};
use super::{DEADLINE, ScenarioEntry, World};
use kit::invariants::{self, VISIBLE_DEVICES};
use kit::vendor_plugin::NVIDIA_GPU;

pub(super) const SCENARIOS: &[ScenarioEntry] = scenarios! {
    "runtime-hook" => runtime_hook,
        "containers get the GPUs of their records although the vendor's plugin chose others";
};

/// Node whose container runtime calls NRI plugins.
pub(super) const HOOKED: &str = "hooked";

/// Whole GPUs by the vendor's plugin: each container sees the GPUs of its record, though kubelet gave its pod others.
async fn runtime_hook(world: &mut World) -> Result<()> {
    // The vendor's plugin does not know GPU 0, so kubelet gives another GPU to a pod whose record names GPU 0.
    world.node(HOOKED)?.start_vendor_plugin(&[1, 2]).await?;
    until_offered(world, HOOKED, 2).await?;
    until_registered(world, 1).await?;
    let mut n_different = 0;
    for name in ["whole-0", "whole-1"] {
        let pod = world.start(whole(name, 1, HOOKED)).await?;
        n_different += usize::from(allocated_by_kubelet(world, &pod)? != recorded_gpus(&pod)?);
        world.verify().await.with_context(|| format!("with {name}"))?;
    }
    ensure!(
        n_different > 0,
        "kubelet has given each pod what its record says: nothing was tried"
    );
    world.delete("whole-0").await?;
    world.node(HOOKED)?.restart_plugin().await?;
    until_registered(world, 2).await?;
    world.verify().await.context("after a restart")?;
    pinned_by_its_author(world).await
}

/// A pod that was bound by hand and names its GPU in a variable: the Device object lists that GPU, not the one kubelet allocated.
async fn pinned_by_its_author(world: &mut World) -> Result<()> {
    world.excused.insert(world.key("pinned"));
    let pin = world.node(HOOKED)?.gpus().first().context("no GPU")?.uuid.clone();
    let container = json!({
        "name": "main", "image": "x",
        "env": [{"name": VISIBLE_DEVICES, "value": pin}],
        "resources": {"limits": {NVIDIA_GPU: "1"}},
    });
    let pod =
        json!({"metadata": {"name": "pinned"}, "spec": {"nodeName": HOOKED, "containers": [container]}});
    world
        .pods
        .api()
        .create(&PostParams::default(), &serde_json::from_value(pod)?)
        .await?;
    world.until_running(&["pinned"]).await?;
    let pod = world.pod("pinned")?;
    ensure!(
        allocated_by_kubelet(world, &pod)? != [pin.clone()],
        "kubelet cannot have given a GPU that the vendor's plugin does not offer"
    );
    let uid = pod.uid().unwrap_or_default();
    let shows = |snapshot: &kit::observer::ClusterSnapshot| {
        let device = snapshot.devices.get(HOOKED)?;
        let allocations_by_plugin = KubeletAllocations::read(device.annotations()).ok()??;
        allocations_by_plugin
            .entries
            .iter()
            .any(|entry| entry.pod_uid == uid && entry.device_ids == [pin.clone()])
            .then_some(())
    };
    world
        .until("the Device object to show what the pinned pod sees", shows)
        .await?;
    world.delete("pinned").await?;
    world.excused.clear();
    Ok(())
}

/// Waits until our plugin has registered with the container runtime this number of times.
async fn until_registered(world: &mut World, times: usize) -> Result<()> {
    let kubelet = world.node(HOOKED)?.kubelet();
    ensure!(
        kubelet.until_nri_registered(times, DEADLINE).await,
        "the plugin has not come to the container runtime {times} times"
    );
    Ok(())
}

/// The GPUs that kubelet has given to a pod.
fn allocated_by_kubelet(world: &mut World, pod: &Pod) -> Result<Vec<String>> {
    let uid = pod.uid().unwrap_or_default();
    let allocations = world.node(HOOKED)?.kubelet().allocations();
    let own = allocations
        .into_iter()
        .filter(|allocation| allocation.pod_uid == uid && allocation.resource == NVIDIA_GPU);
    Ok(own.flat_map(|allocation| allocation.device_ids).collect())
}

/// The GPUs that a pod's record names.
fn recorded_gpus(pod: &Pod) -> Result<Vec<String>> {
    let record = invariants::record(pod).map_err(anyhow::Error::msg)?;
    Ok(record.into_iter().map(|(_, uuid)| uuid).collect())
}
