//! Pods that kube-scheduler has decided on and does not bind for a long time: their devices are kept for them.

use std::time::Duration;

use anyhow::{Result, ensure};
use tokio::time::sleep;

use super::{NO_ROOM, Scenario, World};
use kit::kube_scheduler::{NO_NOMINATION, PERMIT_WAIT, VOLUME_WAIT};
use kit::pod_fields::node_of;
use kit::pods::PodBuilder;

pub(super) const SCENARIOS: &[Scenario] = scenarios! {
    needs "a kube-scheduler that waits on command", on [Waiting]:
    "volume-wait" => volume_wait,
        "a pod whose volumes are bound slowly keeps its GPU against later pods, and is bound";
    "permit-wait" => permit_wait,
        "a pod that waits in Permit keeps its GPU for as long as it is nominated to the node";
};

/// The time for which the scheduler of these scenarios keeps a hint: room for a pod that is not bound yet.
const HINT_TTL: Duration = Duration::from_secs(1);

/// The milliseconds that the first pod waits.
const WAIT: &str = "5000";

/// A pod that asks for `gib` of memory of the node `n2`, which has two GPUs of 16 GiB.
fn asking(name: &str, gib: &str) -> PodBuilder {
    PodBuilder::units(name, gib).on("n2")
}

/// A pod that fits only one GPU of the node, beside 8 GiB on the other; by the node's sums two such pods would fit.
fn large(name: &str) -> PodBuilder {
    asking(name, "12")
}

async fn volume_wait(world: &mut World) -> Result<()> {
    let waiting = large("waiting")
        .annotation(VOLUME_WAIT, WAIT)
        .annotation(NO_NOMINATION, "");
    keeps_its_gpu(world, waiting.storing("data")).await
}

async fn permit_wait(world: &mut World) -> Result<()> {
    keeps_its_gpu(world, large("waiting").annotation(PERMIT_WAIT, WAIT)).await
}

/// A pod waits for its binding for longer than the scheduler keeps a hint. A later pod must not get its GPU, and runs once
/// the first is gone.
async fn keeps_its_gpu(world: &mut World, waiting: PodBuilder) -> Result<()> {
    let lifetime = format!("{}s", HINT_TTL.as_secs());
    world.add_scheduler_flags(&["--hint-ttl", &lifetime]).await?;
    world.start(asking("first", "8")).await?;
    world.create(waiting).await?;
    // By now the hint has run out, and only the nomination or the bound claim can keep the GPU for the pod.
    sleep(HINT_TTL * 2).await;
    ensure!(node_of(&world.pod("waiting")?).is_none(), "the pod does not wait");
    world.create(large("later")).await?;
    // On a busy machine the waiting pod may be bound before kube-scheduler tries this one: the reason is the same.
    world.until_refused("later", NO_ROOM).await?;
    world.until_running(&["waiting"]).await?;
    ensure!(node_of(&world.pod("later")?).is_none(), "two pods have one GPU");
    world.delete_for("waiting", "later").await
}
