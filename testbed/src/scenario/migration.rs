//! A cluster that moves to gpushare while pods run that NVIDIA's plugin or Koordinator gave their GPUs.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use proto::device::Device;
use proto::kubelet_allocations::DEVICES_CHECKPOINTS;
use proto::record::DEVICE_ALLOCATED;
use proto::resource::{GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED};
use serde_json::json;

use super::breaking::until_registered;
use super::vendors::{share, until_offered, whole};
use super::{DEADLINE, DEVICES, Scenario, World};
use kit::invariants;
use kit::pod_fields::node_of;
use kit::pods::PodBuilder;

pub(super) const SCENARIOS: &[Scenario] = scenarios! { needs "nodes of other kinds", on [Mixed]:
    "from-vendor" => from_vendor,
        "installed beside the vendor's plugin while its pods run, then in its place: no GPU is handed out twice";
    "from-koordinator" => from_koordinator,
        "pods of Koordinator, with records that know minors only, keep what they hold";
};

/// Node that starts without our plugin, with three GPUs of 16 GiB.
pub(super) const MOVING: &str = "moving";
/// Node of Koordinator, with two GPUs of 16 GiB.
pub(super) const KOORDINATOR: &str = "koordinator";

/// Waits until the Device object of node [`MOVING`] lists devices that kubelet has allocated to each of the pods `listed`, and
/// none of the pods `unlisted`.
async fn until_listed(world: &World, listed: &[&Pod], unlisted: &[&Pod]) -> Result<()> {
    let uids = |pods: &[&Pod]| -> Vec<String> { pods.iter().filter_map(|pod| pod.uid()).collect() };
    let (listed, unlisted) = (uids(listed), uids(unlisted));
    let agrees = |device: &Device| {
        let text = device.annotations().get(DEVICES_CHECKPOINTS)?;
        let is_there = |uid: &String| text.contains(uid.as_str());
        (listed.iter().all(is_there) && !unlisted.iter().any(is_there)).then_some(())
    };
    let what = "the Device object to list the GPUs of the vendor's pods";
    world.until_device(MOVING, what, agrees).await
}

/// The GPUs that a pod's container `main` sees, by its log.
async fn visible_gpus(world: &World, pod: &str) -> Result<Vec<String>> {
    let log = world.log(pod, "main").await?;
    let pod = world.pod(pod)?;
    let device = node_of(&pod).map(|node| world.device(node)).transpose()?;
    Ok(invariants::seen(&log, device.as_ref()))
}

async fn from_vendor(world: &mut World) -> Result<()> {
    let cluster = world.cluster()?;
    cluster.scheduler.kill().await;
    cluster.start_bare_kube_scheduler().await?;
    cluster.node(MOVING)?.start_vendor_plugin(&[0, 1, 2]).await?;
    until_offered(world, MOVING, 3).await?;
    let theirs = ["theirs-0", "theirs-1"].into_iter();
    world.start_all(theirs.map(|name| whole(name, 1, MOVING))).await?;
    let pods = [world.pod("theirs-0")?, world.pod("theirs-1")?];
    // The order of an installation: scheduler, extender in kube-scheduler's configuration, plugin.
    let cluster = world.cluster()?;
    cluster.scheduler.restart().await?;
    cluster.start_kube_scheduler().await?;
    cluster.node(MOVING)?.start_plugin(&[])?;
    cluster.until_ready(DEADLINE).await?;
    until_listed(world, &[&pods[0], &pods[1]], &[]).await?;
    world.start(share("ours-0", "60", MOVING)).await?;
    world.verify().await?;
    world.create_waiting(share("ours-1", "60", MOVING)).await?;
    world.create_waiting(whole("theirs-2", 1, MOVING)).await?;
    world.delete("theirs-0").await?;
    until_listed(world, &[&pods[1]], &[&pods[0]]).await?;
    // `theirs-2` keeps waiting: the vendor's plugin could give it the GPU that `ours-0` shares.
    world.until_running(&["ours-1"]).await?;
    world.verify().await?;
    replace_vendor_plugin(world).await
}

/// Replaces the vendor's plugin by ours, which serves its resource, while a pod of the vendor's plugin still
/// runs.
async fn replace_vendor_plugin(world: &mut World) -> Result<()> {
    let old = visible_gpus(world, "theirs-1").await?;
    let node = world.node(MOVING)?;
    node.stop_vendor_plugin();
    node.remove_plugin().await;
    until_offered(world, MOVING, 0).await?;
    let node = world.node(MOVING)?;
    node.start_plugin(&["--vendor-resource", "nvidia.com/gpu=ours"])?;
    world.cluster()?.until_ready(DEADLINE).await?;
    until_offered(world, MOVING, 3).await?;
    world.until_running(&["theirs-1", "ours-0", "ours-1"]).await?;
    let restarted = world.restart_container(MOVING, "theirs-1").await;
    restarted.context("a container that the vendor's plugin served")?;
    let now = visible_gpus(world, "theirs-1").await?;
    ensure!(now == old, "it sees {now:?}, and saw {old:?} before");
    // All three GPUs are taken, so `theirs-2` has to wait until a sharing pod goes.
    let is_waiting = node_of(&world.pod("theirs-2")?).is_none();
    ensure!(is_waiting, "a GPU was handed out twice");
    world.delete_for("ours-0", "theirs-2").await?;
    let new = visible_gpus(world, "theirs-2").await?;
    let are_two = old.len() == 1 && new.len() == 1 && old != new;
    ensure!(are_two, "theirs-1 sees {old:?}, theirs-2 {new:?}");
    world.verify().await?;
    world.delete("theirs-1").await?;
    world.start(share("ours-2", "60", MOVING)).await.map(drop)
}

/// A record as Koordinator's scheduler writes it: minor numbers and amounts, no UUIDs.
fn record_without_uuid(minor: i32, ratio: u64) -> String {
    let bytes = (16 << 30) / 100 * ratio;
    let resources = json!({GPU_CORE: ratio.to_string(), GPU_MEMORY_RATIO: ratio.to_string(), GPU_MEMORY: bytes.to_string()});
    json!({"gpu": [{"minor": minor, "resources": resources}]}).to_string()
}

/// Creates the Device object and node amounts that Koordinator's agent publishes for a node.
fn publish_koordinator_node(world: &mut World) -> Result<()> {
    let device = |minor: i32| {
        let resources = json!({GPU_CORE: "100", GPU_MEMORY_RATIO: "100", GPU_MEMORY: "16Gi"});
        json!({"type": "gpu", "id": format!("GPU-{KOORDINATOR}-{minor}"), "minor": minor, "health": true, "resources": resources})
    };
    let api = world.cluster()?.api().objects().clone();
    let object = json!({"metadata": {"name": KOORDINATOR}, "spec": {"devices": [device(0), device(1)]}});
    api.create(DEVICES, object)?;
    let amounts = json!({GPU_SHARED: "200", GPU_CORE: "200", GPU_MEMORY_RATIO: "200", GPU_MEMORY: "32Gi"});
    let status = json!({"capacity": amounts, "allocatable": amounts});
    api.patch_status("nodes", "", KOORDINATOR, &status)?;
    Ok(())
}

async fn from_koordinator(world: &mut World) -> Result<()> {
    publish_koordinator_node(world)?;
    let names = ["koord-0", "koord-1"];
    for (name, minor, ratio) in [(names[0], 0, 50), (names[1], 1, 70)] {
        let amount = &*ratio.to_string();
        let limits = [(GPU_SHARED, "1"), (GPU_MEMORY_RATIO, amount), (GPU_CORE, amount)];
        let spec = PodBuilder::new(name, &limits);
        let spec = spec.annotation(DEVICE_ALLOCATED, &record_without_uuid(minor, ratio));
        world.bind_by_hand(spec, KOORDINATOR).await?;
        // Koordinator's runtime hook would set the container's environment. The testbed lacks the hook, so the containers see no
        // device, and the checks skip these pods.
        world.excused.insert(world.key(name));
    }
    world.until_running(&names).await?;
    world.node(KOORDINATOR)?.start_plugin(&[])?;
    world.cluster()?.until_ready(DEADLINE).await?;
    let run = world.until_running(&names).await;
    run.context("after the plugin has come")?;
    world.node(KOORDINATOR)?.restart_kubelet().await?;
    until_registered(world, KOORDINATOR).await?;
    let run = world.until_running(&names).await;
    run.context("after kubelet has admitted them again")?;
    world.start(share("ours-0", "50", KOORDINATOR)).await?;
    let minors = world.minors("ours-0")?;
    ensure!(
        minors == [0],
        "half of a GPU is free on GPU 0 only, it got {minors:?}"
    );
    world.create_waiting(share("ours-1", "31", KOORDINATOR)).await?;
    world.verify().await?;
    world.delete_for("koord-1", "ours-1").await?;
    world.verify().await?;
    world.clear().await?;
    world.excused.clear();
    Ok(())
}
