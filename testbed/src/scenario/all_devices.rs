//! The proposal's fourth story: a pod that sees all GPUs of its node and is charged nothing.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use futures::FutureExt;
use futures::future::BoxFuture;
use proto::pod::ALL_DEVICES;
use proto::resource::{GPU_MEM, GPU_SHARED};
use serde_json::Value;

use super::{Body, DEADLINE, World};
use crate::invariants;
use crate::pods::{Limits, PodSpec};

/// Name, promise, body.
pub(super) const SCENARIOS: &[(&str, &str, Body)] =
    &[("all-devices", "a pod marked so sees every GPU of its node, beside pods that fill them, and is charged nothing", all_devices)];

/// Those that start the scheduler in another way.
pub(super) const BREAKING: &[(&str, &str, Body)] =
    &[("all-devices-forbidden", "a switch forbids such pods in the whole cluster, in the same words with webhooks and without", forbidden)];

/// A pod that is marked; with webhooks it need not say more.
fn monitor(world: &World, name: &str) -> PodSpec {
    let share: &Limits<'_> = if world.has_webhooks { &[] } else { &[(GPU_SHARED, "1")] };
    PodSpec::new(name, share).annotated(&BTreeMap::from([(ALL_DEVICES.to_owned(), "true".to_owned())]))
}

fn all_devices(world: &mut World) -> BoxFuture<'_, Result<()>> {
    async {
        let node = world.gpu_node(2)?;
        world.start(PodSpec::new("before", &[(GPU_MEM, "1")]).on(&node.name)).await?;
        world.start(monitor(world, "monitor").on(&node.name)).await?;
        let device = world.observer.now().devices.get(&node.name).cloned().context("the node has no Device object")?;
        let mut all: Vec<String> =
            device.spec.devices.iter().filter(|info| info.device_type == "gpu").map(|info| info.id.clone()).collect();
        all.sort();
        let log = world.log("monitor", "main").await?;
        let seen = invariants::seen(&log, Some(&device));
        ensure!(seen == all, "it sees {seen:?} of {all:?}");
        world.verify().await?;
        show(world, &node.name).await?;
        // Nothing is charged: all that there is can still be had.
        world.delete("before").await?;
        for (idx, units) in node.units.iter().enumerate() {
            world.start(PodSpec::new(&format!("full-{idx}"), &[(GPU_MEM, &units.to_string())]).on(&node.name)).await?;
        }
        world.start(monitor(world, "late").on(&node.name)).await.map(|_| ())
    }
    .boxed()
}

/// `inspect` shows the pod on every GPU; only the testbed's scheduler can be asked.
async fn show(world: &mut World, node: &str) -> Result<()> {
    if world.cluster.is_none() {
        return Ok(());
    }
    let url = format!("{}/gpushare-scheduler/inspect/{node}", world.cluster()?.scheduler_url());
    let (_, body) = world.cluster()?.scheduler_client()?.get(&url).await?;
    let answer: Value = serde_json::from_slice(&body)?;
    let gpus = answer.pointer("/nodes/0/devs").and_then(Value::as_array).cloned().unwrap_or_default();
    let shows = |gpu: &Value| gpu.get("pods").and_then(Value::as_array).is_some_and(|pods| pods.iter().any(|pod| pod["name"] == "monitor"));
    ensure!(!gpus.is_empty() && gpus.iter().all(shows), "inspect does not show the pod on every GPU: {answer}");
    Ok(())
}

fn forbidden(world: &mut World) -> BoxFuture<'_, Result<()>> {
    async {
        let usual = world.cluster()?.scheduler.invocation().clone();
        let mut strict = usual.clone();
        strict.args.push("--forbid-all-devices".to_owned());
        world.cluster()?.scheduler.restart_as(strict).await?;
        world.cluster()?.until_scheduler_ready(DEADLINE).await?;
        let refused = world.until_breaks_rule(monitor(world, "monitor"), "no pod may share all devices of its node in this cluster").await;
        world.cluster()?.scheduler.restart_as(usual).await?;
        world.cluster()?.until_scheduler_ready(DEADLINE).await?;
        refused
    }
    .boxed()
}
