//! Room that becomes free without an event that kube-scheduler sees: the refused pod is tried again nevertheless.

use std::time::Duration;

use anyhow::{Result, ensure};
use futures::FutureExt;
use futures::future::BoxFuture;
use http::StatusCode;
use proto::resource::GPU_MEM;
use serde_json::json;
use tokio::time::sleep;

use super::{Body, DEADLINE, World};
use crate::cluster::SCHEDULER_USER;
use crate::observer::ClusterSnapshot;
use crate::pod_fields::node_of;
use crate::pods::PodBuilder;

/// Name, promise, body.
pub(super) const SCENARIOS: &[(&str, &str, Body)] = &[
    (
        "hint-runs-out",
        "a pod that waits for room kept for another is bound when that time is up, in an idle cluster",
        hint_runs_out,
    ),
    (
        "decisions-unlisted",
        "room of pods that came and went while the scheduler's watch was down is found by a pod that waits",
        unlisted,
    ),
];

/// The node on which pods are placed: it has two GPUs.
const NODE: &str = "n2";
/// Memory of one of them.
const WHOLE: &str = "16";
/// The time for which the scheduler of the first scenario keeps room.
const HINT: Duration = Duration::from_secs(3);
/// Longest time from the opening of room until the pod that waits for it is bound, on a busy machine.
const SOON: Duration = Duration::from_secs(20);

fn whole(name: &str) -> PodBuilder {
    PodBuilder::new(name, &[(GPU_MEM, WHOLE)]).on(NODE)
}

/// Creates a pod that finds no room.
async fn refused(world: &World, name: &str) -> Result<()> {
    world.create(whole(name)).await?;
    world
        .until_refused(name, "not enough free GPU memory on any one GPU")
        .await?;
    ensure!(node_of(&world.pod(name)?).is_none(), "the pod is bound already");
    Ok(())
}

/// Waits until a pod is bound for which room opens now.
async fn bound_soon(world: &World, name: &str) -> Result<()> {
    let key = world.key(name);
    let is_bound = |snapshot: &ClusterSnapshot| snapshot.pods.get(&key).and_then(node_of).map(drop);
    world
        .until_within(SOON, "the pod to be bound for which room has opened", is_bound)
        .await
}

fn hint_runs_out(world: &mut World) -> BoxFuture<'_, Result<()>> {
    async {
        let usual = world.cluster()?.scheduler.invocation().clone();
        let mut hasty = usual.clone();
        hasty
            .args
            .extend(["--hint-ttl".to_owned(), format!("{}s", HINT.as_secs())]);
        world.cluster()?.scheduler.restart_as(hasty).await?;
        world.cluster()?.until_scheduler_ready(DEADLINE).await?;
        let tried = wait_for_hints(world).await;
        world.cluster()?.scheduler.restart_as(usual).await?;
        world.cluster()?.until_scheduler_ready(DEADLINE).await?;
        tried
    }
    .boxed()
}

/// Room is kept for two pods that are never bound, and a third waits for it.
async fn wait_for_hints(world: &mut World) -> Result<()> {
    // The scheduler announces its own beginning, which must be over.
    sleep(HINT).await;
    for name in ["one", "other"] {
        ask(world, name).await?;
    }
    refused(world, "late").await?;
    sleep(HINT).await;
    bound_soon(world, "late").await?;
    world.delete("late").await
}

/// Asks the extender about a pod as kube-scheduler does, which comes to nothing.
async fn ask(world: &mut World, name: &str) -> Result<()> {
    let limits = json!({GPU_MEM: WHOLE});
    let containers =
        json!([{"name": "main", "image": "none", "resources": {"limits": limits, "requests": limits}}]);
    let metadata = json!({"name": name, "namespace": world.namespace, "uid": format!("never-bound-{name}")});
    let question =
        json!({"Pod": {"metadata": metadata, "spec": {"containers": containers}}, "NodeNames": [NODE]});
    let url = format!("{}/gpushare-scheduler/filter", world.cluster()?.scheduler_url());
    let (status, answer) = world
        .cluster()?
        .scheduler_client()?
        .post(&url, question.to_string())
        .await?;
    let answer: serde_json::Value = serde_json::from_slice(&answer)?;
    ensure!(
        status == StatusCode::OK && answer.get("NodeNames") == Some(&json!([NODE])),
        "{answer}"
    );
    Ok(())
}

fn unlisted(world: &mut World) -> BoxFuture<'_, Result<()>> {
    async {
        let api = world.cluster()?.api();
        let (faults, objects) = (api.faults().clone(), api.objects().clone());
        let held = faults.hold_watches_of(SCHEDULER_USER, "pods");
        for name in ["one", "other"] {
            world.start(whole(name)).await?;
        }
        for name in ["one", "other"] {
            world.delete(name).await?;
        }
        refused(world, "late").await?;
        // The watch cannot go on from where it was, so that the scheduler lists all pods.
        objects.compact();
        faults.drop_watches_of(SCHEDULER_USER, "pods");
        drop(held);
        bound_soon(world, "late").await?;
        world.delete("late").await
    }
    .boxed()
}
