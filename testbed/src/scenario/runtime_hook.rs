//! The container runtime asks our plugin before it creates a container (NRI): the container gets the GPUs of its pod's record,
//! although the vendor's plugin may have chosen others.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use proto::device::Device;
use proto::kubelet_allocations::KubeletAllocations;
use serde_json::json;

use super::expected::visible;
use super::vendors::{until_offered, whole};
use super::{DEADLINE, Scenario, World};
use kit::invariants;
use kit::pods::PodBuilder;
use kit::vendor_plugin::NVIDIA_GPU;

pub(super) const SCENARIOS: &[Scenario] = scenarios! { needs "nodes of other kinds", on [Mixed]:
    "runtime-hook" => runtime_hook,
        "containers get the GPUs of their records although the vendor's plugin chose others";
};

/// Node whose container runtime calls NRI plugins.
pub(super) const HOOKED: &str = "hooked";

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
    let pinned = PodBuilder::new("pinned", &[(NVIDIA_GPU, "1")])
        .at("/spec/nodeName", json!(HOOKED))
        .with("env", visible(&pin));
    let pod = world.start(pinned).await?;
    ensure!(
        allocated_by_kubelet(world, &pod)? != [pin.clone()],
        "kubelet cannot have given a GPU that the vendor's plugin does not offer"
    );
    let uid = pod.uid().unwrap_or_default();
    let shows = |device: &Device| {
        let by_plugin = KubeletAllocations::read(device.annotations()).ok()??;
        let mut own = by_plugin.entries.iter().filter(|entry| entry.pod_uid == uid);
        own.any(|entry| entry.device_ids == [pin.clone()]).then_some(())
    };
    let what = "the Device object to show what the pinned pod sees";
    world.until_device(HOOKED, what, shows).await?;
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
    let mut own = world.node(HOOKED)?.kubelet().allocations();
    own.retain(|allocation| allocation.pod_uid == uid && allocation.resource == NVIDIA_GPU);
    Ok(own
        .into_iter()
        .flat_map(|allocation| allocation.device_ids)
        .collect())
}

/// The GPUs that a pod's record names.
fn recorded_gpus(pod: &Pod) -> Result<Vec<String>> {
    let record = invariants::record(pod).map_err(anyhow::Error::msg)?;
    Ok(record.into_iter().map(|(_, uuid)| uuid).collect())
}
