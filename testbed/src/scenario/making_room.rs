//! A pod of high priority that no single GPU takes although the node has enough memory in sum: the scheduler evicts one pod for it.
//!
//! Users of every scheduler that shares GPUs have met such pods, such as `HAMi` (#1494) and `volcano` (#4863).

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kube::api::DeleteParams;
use serde_json::json;

use super::preemption::{BUDGET, is_staying, protect, with_classes};
use super::{Body, NO_ROOM, Scenario, World};
use kit::manifests;
use kit::pod_fields::node_of;
use kit::pods::PodBuilder;
use proto::resource::{GPU_MEMORY, GPU_SHARED};

pub(super) const SCENARIOS: &[Scenario] = scenarios! {
    needs "a scheduler with other flags, at a known address", on [MakingRoom], within with_rights(world):
    "make-room" => least_important_goes,
        "where two GPUs have room in sum and none alone (HAMi #1494), the least important pod is evicted for an important one";
    "make-room-two-resources" => one_goes_that_asks_by_another_resource,
        "where an important pod asks for GPU memory and the one in its way for a percentage (volcano #4863), that one is evicted";
    "make-room-hole" => one_small_pod_goes,
        "where each GPU lacks a little, one small pod is evicted for an important one, and no other";
    "make-room-killed" => another_process_goes_on,
        "a scheduler that is killed after an eviction for another pod evicts no further pod when it is back";
};

/// On another cluster than the others: the scheduler looks again after half a minute at a pod for which it could make no room.
pub(super) const WITH_BUDGET: &[Scenario] = scenarios! {
    needs "a scheduler with other flags, at a known address", on [Plain], within with_rights(world):
    "make-room-budget" => budget_is_kept,
        "no pod is evicted for another one if a PodDisruptionBudget has no room for that";
};

const IMPORTANT: i32 = 1000;

/// The `PriorityClass` of pods of that priority.
const CLASS: &str = "gpushare-e2e-room";

/// The `PriorityClass` of pods that are a little more important than those without one, and their priority.
const LOW: (&str, i32) = ("gpushare-e2e-room-low", 100);

/// The node on which pods are placed: it has two GPUs of 16 units.
const NODE: &str = "n2";

/// The flags of the component `make-room`, with a short wait.
const FLAGS: [&str; 2] = ["--make-room=evict", "--make-room-after=2s"];

/// The time in which a pod would have been evicted.
const LONG_ENOUGH: Duration = Duration::from_secs(8);

/// Runs a scenario with the rights and policies of the component `make-room`, and with classes of pods.
async fn with_rights(world: &mut World, scenario: Body) -> Result<()> {
    let component = world.cluster()?.deploy().join("components/make-room");
    for file in ["rbac.yaml", "admission.yaml"] {
        manifests::apply_file(&world.client(), &component.join(file)).await?;
    }
    with_classes(world, &[(CLASS, IMPORTANT), LOW], scenario).await
}

/// Creates a pod of a `ReplicaSet` on the node.
async fn create_low(world: &World, pod: PodBuilder) -> Result<()> {
    let owner =
        json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true}]);
    let pod = pod.on(NODE).labelled("app", "low");
    world.create(pod.at("/metadata/ownerReferences", owner)).await?;
    Ok(())
}

/// Fills both GPUs of the node by pods of 10 units, so that 6 are free on each. The first pod is the more important one.
async fn fill(world: &World) -> Result<Vec<String>> {
    let names = ["low-0", "low-1"].map(str::to_owned).to_vec();
    let (class, priority) = LOW;
    create_low(world, PodBuilder::units("low-0", 10).priority(class, priority)).await?;
    create_low(world, PodBuilder::units("low-1", 10)).await?;
    world.until_running(&names).await?;
    Ok(names)
}

/// The important pod of most scenarios: it fits neither GPU that [`fill`] has filled, though 12 units are free in sum.
fn important() -> PodBuilder {
    as_important(PodBuilder::units("high", 12))
}

fn as_important(pod: PodBuilder) -> PodBuilder {
    pod.on(NODE).priority(CLASS, IMPORTANT)
}

/// The number of these pods that are there and stay there.
fn n_staying(world: &World, names: &[String]) -> usize {
    names.iter().filter(|name| is_staying(world, name)).count()
}

/// Gives the scheduler the flags while the important pod `high` waits: one pod goes and it runs.
async fn one_goes_for(world: &mut World, low: &[String]) -> Result<()> {
    world.add_scheduler_flags(&FLAGS).await?;
    world.until_running(&["high"]).await?;
    tokio::time::sleep(LONG_ENOUGH).await;
    let n_gone = low.len() - n_staying(world, low);
    ensure!(n_gone == 1, "one pod had to go, and {n_gone} have");
    Ok(())
}

/// Two pods leave too little of each GPU: the one of lower priority goes, and none does while the scheduler lacks the flags.
async fn least_important_goes(world: &mut World) -> Result<()> {
    let low = fill(world).await?;
    world.create_refused(important(), NO_ROOM).await?;
    tokio::time::sleep(LONG_ENOUGH).await;
    let is_waiting = node_of(&world.pod("high")?).is_none();
    ensure!(
        is_waiting && n_staying(world, &low) == low.len(),
        "without the flags the pod has to wait, and no other has to go"
    );
    one_goes_for(world, &low).await?;
    ensure!(is_staying(world, "low-0"), "the least important pod had to go");
    Ok(())
}

/// The important pod asks for bytes, and the pod in its way has a percentage of a GPU.
async fn one_goes_that_asks_by_another_resource(world: &mut World) -> Result<()> {
    // Of the two GPUs of the node one alone can become free.
    let other = as_important(PodBuilder::share("other", 100));
    world.create(other).await?;
    create_low(world, PodBuilder::share("low", 60)).await?;
    let low = ["low".to_owned()];
    world.until_running(&["other", "low"]).await?;
    let limits = [(GPU_SHARED, "1"), (GPU_MEMORY, "10Gi")];
    let high = as_important(PodBuilder::new("high", &limits));
    world.create_refused(high, NO_ROOM).await?;
    one_goes_for(world, &low).await
}

/// Each GPU has 6 units free, and the important pod asks for 8: one pod of 2 units goes.
async fn one_small_pod_goes(world: &mut World) -> Result<()> {
    let names: Vec<String> = (0..16).map(|at| format!("low-{at:02}")).collect();
    for name in &names {
        create_low(world, PodBuilder::units(name, 2)).await?;
    }
    world.until_running(&names).await?;
    // Five of the eight pods of each GPU stay.
    let (mut low, mut by_gpu) = (Vec::new(), BTreeMap::new());
    for name in names {
        let n_on_gpu: &mut usize = by_gpu.entry(world.minors(&name)?).or_default();
        *n_on_gpu += 1;
        if *n_on_gpu <= 5 {
            low.push(name);
        } else {
            world.delete(&name).await?;
        }
    }
    let high = as_important(PodBuilder::units("high", 8));
    world.create_refused(high, NO_ROOM).await?;
    one_goes_for(world, &low).await
}

async fn budget_is_kept(world: &mut World) -> Result<()> {
    world.add_scheduler_flags(&FLAGS).await?;
    let low = fill(world).await?;
    let budgets = protect(world, json!({"matchLabels": {"app": "low"}}), low.len()).await?;
    world.create_refused(important(), NO_ROOM).await?;
    tokio::time::sleep(LONG_ENOUGH).await;
    let n_stay = n_staying(world, &low);
    budgets.delete(BUDGET, &DeleteParams::default()).await?;
    ensure!(n_stay == 2, "a pod went although its budget forbids it");
    // Without the budget one of them may go.
    world.until_running(&["high"]).await
}

async fn another_process_goes_on(world: &mut World) -> Result<()> {
    world.add_scheduler_flags(&FLAGS).await?;
    let low = fill(world).await?;
    world.create(important()).await?;
    let nominated = |pod: &Pod| pod.status.as_ref()?.nominated_node_name.clone();
    world.until_pod("high", "to be nominated", nominated).await?;
    let flags = world.cluster()?.scheduler.invocation().clone();
    world.restart_scheduler_as(flags).await?;
    world.until_running(&["high"]).await?;
    tokio::time::sleep(LONG_ENOUGH).await;
    ensure!(n_staying(world, &low) == 1, "one of the two pods had to go");
    Ok(())
}
