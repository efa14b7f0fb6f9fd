//! A pod of high priority that no single GPU takes although the node has enough memory in sum: the scheduler evicts one pod for it.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::scheduling::v1::PriorityClass;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use serde_json::json;

use super::{Body, ScenarioEntry, World};
use kit::manifests;
use kit::observer::ClusterSnapshot;
use kit::pods::PodBuilder;

pub(super) const SCENARIOS: &[ScenarioEntry] = scenarios! { within with_flag(world):
    "make-room" => one_pod_goes,
        "where a node's sums have room and no GPU has, one pod is evicted for an important one, and no other";
    "make-room-budget" => budget_is_kept,
        "no pod is evicted for another one if a PodDisruptionBudget has no room for that";
    "make-room-killed" => another_process_goes_on,
        "a scheduler that is killed after an eviction for another pod evicts no further pod when it is back";
};

const IMPORTANT: i32 = 1000;

/// The `PriorityClass` of pods of that priority.
const CLASS: &str = "gpushare-e2e-room";

/// The node on which pods are placed: it has two GPUs of 16 units.
const NODE: &str = "n2";

/// The flags of the component `make-room`, with a short wait.
const FLAGS: [&str; 2] = ["--make-room=evict", "--make-room-after=2s"];

/// The time in which a pod would have been evicted.
const LONG_ENOUGH: Duration = Duration::from_secs(8);

/// Runs a scenario with the component `make-room`.
async fn with_flag(world: &mut World, scenario: Body) -> Result<()> {
    let component = world.cluster()?.deploy().join("components/make-room");
    for file in ["rbac.yaml", "admission.yaml"] {
        manifests::apply_file(&world.client.0, &component.join(file)).await?;
    }
    let classes: Api<PriorityClass> = Api::all(world.client.0.clone());
    let class = serde_json::from_value(json!({"metadata": {"name": CLASS}, "value": IMPORTANT}))?;
    let created = classes.create(&PostParams::default(), &class).await;
    created.context("cannot create a PriorityClass")?;
    let usual = world.add_scheduler_flags(&FLAGS).await?;
    let tried = scenario(world).await;
    world.restart_scheduler_as(usual).await?;
    let deleted = classes.delete(CLASS, &DeleteParams::default()).await;
    deleted.context("cannot delete a PriorityClass")?;
    tried
}

/// Fills both GPUs of the node by pods of 10 units, so that 6 are free on each.
async fn fill(world: &World) -> Result<Vec<String>> {
    let names = ["low-0", "low-1"].map(str::to_owned).to_vec();
    let owner =
        json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true}]);
    for name in &names {
        let pod = PodBuilder::units(name, 10).on(NODE).labelled("app", "low");
        world
            .create(pod.at("/metadata/ownerReferences", owner.clone()))
            .await?;
    }
    world.until_all_run(&names).await?;
    Ok(names)
}

fn important() -> PodBuilder {
    PodBuilder::units("high", 12).on(NODE).priority(CLASS, IMPORTANT)
}

/// The number of these pods that are there and stay there.
fn n_staying(world: &World, names: &[String]) -> usize {
    let pods = names.iter().filter_map(|name| world.pod(name).ok());
    pods.filter(|pod| pod.metadata.deletion_timestamp.is_none())
        .count()
}

async fn one_pod_goes(world: &mut World) -> Result<()> {
    let low = fill(world).await?;
    world.create(important()).await?;
    world.until_running(&["high"]).await?;
    tokio::time::sleep(LONG_ENOUGH).await;
    ensure!(n_staying(world, &low) == 1, "one of the two pods had to go");
    Ok(())
}

async fn budget_is_kept(world: &mut World) -> Result<()> {
    let low = fill(world).await?;
    let budgets: Api<PodDisruptionBudget> = Api::namespaced(world.client.0.clone(), &world.namespace);
    let spec = json!({"selector": {"matchLabels": {"app": "low"}}, "maxUnavailable": 0});
    let budget = serde_json::from_value(json!({"metadata": {"name": "low"}, "spec": spec}))?;
    budgets.create(&PostParams::default(), &budget).await?;
    // No disruption controller runs in the testbed, so the test itself fills in the budget's status.
    let status =
        json!({"disruptionsAllowed": 0, "currentHealthy": 2, "desiredHealthy": 2, "expectedPods": 2});
    let patch = Patch::Merge(json!({"status": status}));
    budgets
        .patch_status("low", &PatchParams::default(), &patch)
        .await?;
    world.create(important()).await?;
    world
        .until_refused("high", "not enough free GPU memory on any one GPU")
        .await?;
    tokio::time::sleep(LONG_ENOUGH).await;
    let n_stay = n_staying(world, &low);
    budgets.delete("low", &DeleteParams::default()).await?;
    ensure!(n_stay == 2, "a pod went although its budget forbids it");
    // Without the budget one of them may go.
    world.until_running(&["high"]).await
}

async fn another_process_goes_on(world: &mut World) -> Result<()> {
    let low = fill(world).await?;
    world.create(important()).await?;
    let key = world.key("high");
    let is_nominated = |snapshot: &ClusterSnapshot| {
        let status = snapshot.pods.get(&key).and_then(|pod| pod.status.as_ref())?;
        status.nominated_node_name.as_ref().map(drop)
    };
    world.until("the pod to be nominated", is_nominated).await?;
    let flags = world.cluster()?.scheduler.invocation().clone();
    world.restart_scheduler_as(flags).await?;
    world.until_running(&["high"]).await?;
    tokio::time::sleep(LONG_ENOUGH).await;
    ensure!(n_staying(world, &low) == 1, "one of the two pods had to go");
    Ok(())
}
