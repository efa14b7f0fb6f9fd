//! Pods that kube-scheduler has decided on and does not bind for a long time: their devices are kept for them.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Result, ensure};
use futures::FutureExt;
use futures::future::BoxFuture;
use proto::resource::GPU_MEM;
use tokio::time::sleep;

use super::{Body, DEADLINE, World};
use crate::kube_scheduler::{NO_NOMINATION, PERMIT_WAIT, VOLUME_WAIT};
use crate::pod_fields::node_of;
use crate::pods::PodBuilder;

/// Name, promise, body.
pub(super) const SCENARIOS: &[(&str, &str, Body)] = &[
    (
        "volume-wait",
        "a pod whose volumes are bound slowly keeps its GPU against later pods, and is bound",
        volume_wait,
    ),
    (
        "permit-wait",
        "a pod that waits in Permit keeps its GPU for as long as it is nominated to the node",
        permit_wait,
    ),
];

/// The time for which the scheduler of these scenarios keeps room for a pod that does not wait.
const HINT: Duration = Duration::from_secs(1);

/// The milliseconds that the first pod waits.
const WAIT: &str = "5000";

/// A pod that asks for `gib` of memory of the node `n2`, which has two GPUs of 16 GiB.
fn asking(name: &str, gib: &str) -> PodBuilder {
    PodBuilder::new(name, &[(GPU_MEM, gib)]).on("n2")
}

/// As much memory as only one GPU has left beside 8 GiB on the other; the sums of the node would let in two such pods.
fn large(name: &str) -> PodBuilder {
    asking(name, "12")
}

fn volume_wait(world: &mut World) -> BoxFuture<'_, Result<()>> {
    async {
        let annotations = BTreeMap::from([
            (VOLUME_WAIT.to_owned(), WAIT.to_owned()),
            (NO_NOMINATION.to_owned(), String::new()),
        ]);
        keeps_its_gpu(world, large("waiting").annotated(&annotations).storing("data")).await
    }
    .boxed()
}

fn permit_wait(world: &mut World) -> BoxFuture<'_, Result<()>> {
    async {
        let annotations = BTreeMap::from([(PERMIT_WAIT.to_owned(), WAIT.to_owned())]);
        keeps_its_gpu(world, large("waiting").annotated(&annotations)).await
    }
    .boxed()
}

/// A pod waits for the last GPU of a node, for longer than room is usually kept; another that comes later gets it afterwards.
async fn keeps_its_gpu(world: &mut World, waiting: PodBuilder) -> Result<()> {
    let usual = world.cluster()?.scheduler.invocation().clone();
    let mut hasty = usual.clone();
    hasty
        .args
        .extend(["--hint-ttl".to_owned(), format!("{}s", HINT.as_secs())]);
    world.cluster()?.scheduler.restart_as(hasty).await?;
    world.cluster()?.until_scheduler_ready(DEADLINE).await?;
    let tried = try_pods(world, waiting).await;
    world.cluster()?.scheduler.restart_as(usual).await?;
    world.cluster()?.until_scheduler_ready(DEADLINE).await?;
    tried
}

async fn try_pods(world: &World, waiting: PodBuilder) -> Result<()> {
    world.start(asking("first", "8")).await?;
    world.create(waiting).await?;
    sleep(HINT * 2).await;
    ensure!(node_of(&world.pod("waiting")?).is_none(), "the pod does not wait");
    world.create(large("later")).await?;
    // On a busy machine the first pod may be bound before this one is looked at: the refusal says then that no room is left.
    world
        .until_refused("later", "not enough free GPU memory on any one GPU")
        .await?;
    world.until_running(&["waiting"]).await?;
    ensure!(node_of(&world.pod("later")?).is_none(), "two pods have one GPU");
    world.delete("waiting").await?;
    world.until_running(&["later"]).await
}
