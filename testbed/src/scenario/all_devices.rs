//! Pods that see all GPUs of their node and are charged nothing, such as monitors (annotation `gpushare/all-devices`).

use anyhow::{Result, ensure};
use proto::device::TYPE_GPU;
use proto::pod::ALL_DEVICES;
use proto::resource::GPU_SHARED;
use serde_json::Value;

use super::{GpuNode, Scenario, World};
use kit::invariants;
use kit::pods::PodBuilder;

pub(super) const SCENARIOS: &[Scenario] = scenarios! { needs "daemons with other flags", on [Faults, Webhooks]:
    "all-devices-off" needs [] => forbidden_by_default,
        "unless the operator allows it no pod sees all GPUs, in the same words with webhooks and without";
    "all-devices" => all_devices,
        "where scheduler and plugin allow it, a pod marked so sees every GPU of its node, beside pods that fill them, and is charged nothing";
};

/// Flag of the scheduler and of a node's plugin that allows pods to see all devices.
const FLAG: &str = "--allow-all-devices";

/// A pod marked to see all devices. With webhooks the mark is enough: the mutating webhook adds the resource.
fn monitor(world: &World, name: &str) -> PodBuilder {
    let mut limits = Vec::new();
    if !world.has_webhooks {
        limits.push((GPU_SHARED, "1"));
    }
    PodBuilder::new(name, &limits).annotation(ALL_DEVICES, "true")
}

/// Tries monitors with [`FLAG`] on the scheduler, which keeps it until the scenario ends. [`try_monitors`] gives the flag to the
/// plugin too, and the plugin loses it here.
async fn all_devices(world: &mut World) -> Result<()> {
    let node = world.gpu_node(2)?;
    world.add_scheduler_flags(&[FLAG]).await?;
    let tried = try_monitors(world, &node).await;
    let node = world.node(&node.name)?;
    // The next scenarios need the plugin with its usual flags, also if this one has failed.
    let restarted = node.restart_plugin_as(|usual| usual).await;
    tried.and(restarted)
}

/// A monitor waits until the plugin of its node allows it; then it sees every GPU, and takes room from none of the other pods.
async fn try_monitors(world: &mut World, node: &GpuNode) -> Result<()> {
    world.start_units("before", "1", &node.name).await?;
    world.create(monitor(world, "monitor").on(&node.name)).await?;
    let reason = "GPUAllDevicesForbidden";
    world.until_pod_event("monitor", reason, FLAG).await?;
    let plugin = world.node(&node.name)?;
    plugin.restart_plugin_as(|usual| usual.args([FLAG])).await?;
    world.until_running(&["monitor"]).await?;
    let device = world.device(&node.name)?;
    let gpus = device
        .spec
        .devices
        .iter()
        .filter(|info| info.device_type == TYPE_GPU);
    let mut all: Vec<&String> = gpus.map(|info| &info.id).collect();
    all.sort();
    let log = world.log("monitor", "main").await?;
    let seen = invariants::seen(&log, Some(&device));
    ensure!(seen.iter().eq(all.iter().copied()), "it sees {seen:?} of {all:?}");
    world.verify().await?;
    check_inspect(world, &node.name).await?;
    // Nothing is charged for the monitor: pods can still fill every GPU.
    world.delete("before").await?;
    world.fill_gpus("full", node, 0).await?;
    world.start(monitor(world, "late").on(&node.name)).await?;
    world.verify().await?;
    // The monitors are deleted before the flag is removed: without the flag the scheduler would count them as holders of
    // every GPU.
    world.delete("late").await?;
    world.delete("monitor").await
}

/// Checks that the scheduler's `inspect` shows the monitor on every GPU of its node.
async fn check_inspect(world: &mut World, node: &str) -> Result<()> {
    let cluster = world.cluster()?;
    let url = format!("{}/gpushare-scheduler/inspect/{node}", cluster.scheduler_url());
    let (_, body) = cluster.scheduler_client()?.get(&url).await?;
    let answer: Value = serde_json::from_slice(&body)?;
    let gpus = answer.pointer("/nodes/0/devs").and_then(Value::as_array);
    let shows = |gpu: &Value| {
        let mut pods = gpu["pods"].as_array().into_iter().flatten();
        pods.any(|pod| pod["name"] == "monitor")
    };
    let is_shown = gpus.is_some_and(|gpus| !gpus.is_empty() && gpus.iter().all(shows));
    ensure!(is_shown, "inspect does not show the pod on every GPU: {answer}");
    Ok(())
}

async fn forbidden_by_default(world: &mut World) -> Result<()> {
    let words = "device plugins run with --allow-all-devices";
    world.ensure_is_refused(monitor(world, "monitor"), words).await
}
