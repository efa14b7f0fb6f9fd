//! Room that becomes free without an event that kube-scheduler sees: the refused pod is tried again nevertheless.

use std::time::Duration;

use anyhow::{Result, ensure};
use http::StatusCode;
use serde_json::json;
use tokio::time::sleep;

use super::{NO_ROOM, Scenario, World};
use kit::cluster::SCHEDULER_USER;
use kit::pod_fields::node_of;
use kit::pods::PodBuilder;

pub(super) const SCENARIOS: &[Scenario] = scenarios! {
    needs "a scheduler with other flags, at a known address", on [Waiting]:
    "hint-runs-out" => hint_runs_out,
        "a pod that waits for room kept for another is bound when that time is up, in an idle cluster";
    "decisions-unlisted" => unlisted,
        "room of pods that came and went while the scheduler's watch was down is found by a pod that waits";
};

/// The node on which pods are placed: it has two GPUs.
const NODE: &str = "n2";
/// Memory of one GPU of that node.
const WHOLE: &str = "16";
/// The time for which the scheduler keeps a hint (room for a pod that is not bound yet) in the first scenario.
const HINT_TTL: Duration = Duration::from_secs(3);
/// Longest time from the moment at which room becomes free until the pod that waits for it is bound, on a busy machine.
const SOON: Duration = Duration::from_secs(20);

/// A pod that takes all memory of one GPU of the node.
fn whole(name: &str) -> PodBuilder {
    PodBuilder::units(name, WHOLE).on(NODE)
}

/// Creates a pod and waits until the filter refuses it for want of memory.
async fn create_refused(world: &World, name: &str) -> Result<()> {
    world.create_refused(whole(name), NO_ROOM).await?;
    ensure!(node_of(&world.pod(name)?).is_none(), "the pod is bound already");
    Ok(())
}

/// Waits until a pod is bound whose room becomes free now.
async fn until_bound_soon(world: &World, name: &str) -> Result<()> {
    world.until_part_bound(SOON, &[name.to_owned()], 1).await
}

async fn hint_runs_out(world: &mut World) -> Result<()> {
    let lifetime = format!("{}s", HINT_TTL.as_secs());
    world.add_scheduler_flags(&["--hint-ttl", &lifetime]).await?;
    // A scheduler that has just started makes kube-scheduler retry all refused pods. That retry must be over: else the pod could
    // be bound by it, and not because the hints ran out.
    sleep(HINT_TTL).await;
    for name in ["one", "other"] {
        ask_about_pod(world, name).await?;
    }
    create_refused(world, "late").await?;
    sleep(HINT_TTL).await;
    until_bound_soon(world, "late").await?;
    world.delete("late").await
}

/// Sends the extender a filter request for a pod that does not exist: it keeps room as a hint, and no bind
/// follows.
async fn ask_about_pod(world: &mut World, name: &str) -> Result<()> {
    let mut pod = whole(name).pod()?;
    pod.metadata.namespace = Some(world.namespace.clone());
    pod.metadata.uid = Some(format!("never-bound-{name}"));
    let question = json!({"Pod": pod, "NodeNames": [NODE]});
    let url = format!("{}/gpushare-scheduler/filter", world.cluster()?.scheduler_url());
    let client = world.cluster()?.scheduler_client()?;
    let (status, answer) = client.post(&url, question.to_string()).await?;
    let answer: serde_json::Value = serde_json::from_slice(&answer)?;
    let fits = status == StatusCode::OK && answer.get("NodeNames") == Some(&json!([NODE]));
    ensure!(fits, "{answer}");
    Ok(())
}

async fn unlisted(world: &mut World) -> Result<()> {
    let api = world.cluster()?.api();
    let (faults, objects) = (api.faults().clone(), api.objects().clone());
    let held = faults.hold_watches_of(SCHEDULER_USER, "pods");
    for name in ["one", "other"] {
        world.start(whole(name)).await?;
    }
    for name in ["one", "other"] {
        world.delete(name).await?;
    }
    create_refused(world, "late").await?;
    // The changes are compacted away, so the scheduler cannot resume its watch: it lists all pods and sees no deletion.
    objects.compact();
    faults.drop_watches_of(SCHEDULER_USER, "pods");
    drop(held);
    until_bound_soon(world, "late").await?;
    world.delete("late").await
}
