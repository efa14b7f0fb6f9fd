//! The proposal's fourth story: a pod that sees all GPUs of its node and is charged nothing.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures::FutureExt;
use futures::future::BoxFuture;
use proto::pod::ALL_DEVICES;
use proto::resource::{GPU_MEM, GPU_SHARED};
use serde_json::Value;

use super::{Body, DEADLINE, GpuNode, World};
use crate::invariants;
use crate::pods::{Limits, PodBuilder};

/// Name, promise, body. They start the daemons in another way.
pub(super) const SCENARIOS: &[(&str, &str, Body)] = &[
    (
        "all-devices-off",
        "unless the operator allows it no pod sees all GPUs, in the same words with webhooks and without",
        off,
    ),
    (
        "all-devices",
        "where scheduler and plugin allow it, a pod marked so sees every GPU of its node, beside pods that fill them, and is charged nothing",
        all_devices,
    ),
];

/// Flag of the scheduler and of a node's plugin that allows pods to see all devices.
const FLAG: &str = "--allow-all-devices";

/// A pod that is marked; with webhooks it need not say more.
fn monitor(world: &World, name: &str) -> PodBuilder {
    let share: &Limits<'_> = if world.has_webhooks {
        &[]
    } else {
        &[(GPU_SHARED, "1")]
    };
    PodBuilder::new(name, share).annotated(&BTreeMap::from([(ALL_DEVICES.to_owned(), "true".to_owned())]))
}

fn all_devices(world: &mut World) -> BoxFuture<'_, Result<()>> {
    async {
        let node = world.gpu_node(2)?;
        let usual = world.cluster()?.scheduler.invocation().clone();
        let mut allowing = usual.clone();
        allowing.args.push(FLAG.to_owned());
        world.cluster()?.scheduler.restart_as(allowing).await?;
        world.cluster()?.until_scheduler_ready(DEADLINE).await?;
        let tried = try_monitors(world, &node).await;
        world
            .node(&node.name)?
            .restart_plugin_flagged(FLAG, false)
            .await?;
        world.cluster()?.scheduler.restart_as(usual).await?;
        world.cluster()?.until_scheduler_ready(DEADLINE).await?;
        tried
    }
    .boxed()
}

async fn try_monitors(world: &mut World, node: &GpuNode) -> Result<()> {
    world.start_units("before", "1", &node.name).await?;
    world.create(monitor(world, "monitor").on(&node.name)).await?;
    until_held(world, "monitor", "GPUAllDevicesForbidden", FLAG).await?;
    world.node(&node.name)?.restart_plugin_flagged(FLAG, true).await?;
    world.until_running(&["monitor"]).await?;
    let device = world
        .observer
        .now()
        .devices
        .get(&node.name)
        .cloned()
        .context("the node has no Device object")?;
    let mut all: Vec<String> = device
        .spec
        .devices
        .iter()
        .filter(|info| info.device_type == "gpu")
        .map(|info| info.id.clone())
        .collect();
    all.sort();
    let log = world.log("monitor", "main").await?;
    let seen = invariants::seen(&log, Some(&device));
    ensure!(seen == all, "it sees {seen:?} of {all:?}");
    world.verify().await?;
    show(world, &node.name).await?;
    // Nothing is charged: all that there is can still be had.
    world.delete("before").await?;
    for (idx, units) in node.units.iter().enumerate() {
        world
            .start(PodBuilder::new(&format!("full-{idx}"), &[(GPU_MEM, &units.to_string())]).on(&node.name))
            .await?;
    }
    world.start(monitor(world, "late").on(&node.name)).await?;
    world.verify().await?;
    // Without the flag they would count as holders of all that they see.
    world.delete("late").await?;
    world.delete("monitor").await
}

/// Waits for an event of this reason and with these words about a pod that does not start.
pub(super) async fn until_held(world: &mut World, name: &str, reason: &str, words: &str) -> Result<()> {
    let api = world.cluster()?.api().objects().clone();
    let namespace = world.namespace.clone();
    let is_it = |event: &Value| {
        let text = |pointer: &str| event.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
        text("/reason") == reason && text("/involvedObject/name") == name && text("/message").contains(words)
    };
    let found = async {
        while !api
            .list("events", Some(&namespace))?
            .iter()
            .any(|event| is_it(event))
        {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        anyhow::Ok(())
    };
    tokio::time::timeout(DEADLINE, found)
        .await
        .with_context(|| format!("no event {reason} with {words:?} on {name}"))?
}

/// `inspect` shows the pod on every GPU; only the testbed's scheduler can be asked.
async fn show(world: &mut World, node: &str) -> Result<()> {
    if world.cluster.is_none() {
        return Ok(());
    }
    let url = format!(
        "{}/gpushare-scheduler/inspect/{node}",
        world.cluster()?.scheduler_url()
    );
    let (_, body) = world.cluster()?.scheduler_client()?.get(&url).await?;
    let answer: Value = serde_json::from_slice(&body)?;
    let gpus = answer
        .pointer("/nodes/0/devs")
        .and_then(Value::as_array)
        .cloned()
        .unwrap_or_default();
    let shows = |gpu: &Value| {
        gpu.get("pods")
            .and_then(Value::as_array)
            .is_some_and(|pods| pods.iter().any(|pod| pod["name"] == "monitor"))
    };
    ensure!(
        !gpus.is_empty() && gpus.iter().all(shows),
        "inspect does not show the pod on every GPU: {answer}"
    );
    Ok(())
}

fn off(world: &mut World) -> BoxFuture<'_, Result<()>> {
    async {
        world
            .until_breaks_rule(
                monitor(world, "monitor"),
                "device plugins run with --allow-all-devices",
            )
            .await
    }
    .boxed()
}
