//! `PodGroups`: their pods are bound together or not at all, no two on the same memory, and a group that does not fit keeps no
//! room from other pods.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::scheduling::v1alpha2::PodGroup;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use serde_json::json;
use tokio::time::{Instant, sleep};

use super::{Body, Scenario, World};
use kit::pod_fields::node_of;
use kit::pods::PodBuilder;

pub(super) const SCENARIOS: &[Scenario] = scenarios! {
    needs "two nodes, with five GPUs", on [Waiting], within with_groups(world):
    "gangs" => three_gangs,
        "of three groups in room for two the third waits whole, single pods run beside it, and it runs when one ends";
    "gang-attempts" => attempts_repeated,
        "a group that is asked about again and again before it fits goes to the best nodes all the same";
};

/// The time in which kube-scheduler tries a group that does not fit four times or more.
const SOME_CYCLES: Duration = Duration::from_millis(5500);

/// The longest time that a pod may wait beside a group that does not fit, from its creation until it runs.
const AT_ONCE: Duration = Duration::from_secs(10);

/// kube-scheduler's words about a group that does not fit.
const UNSCHEDULABLE: &str = "pod group is unschedulable";

/// GiB of a pod that has a GPU of 16 or 24 GiB for itself: two such pods fit on neither.
const LARGE: &str = "14";

fn pod_groups(world: &World) -> Api<PodGroup> {
    Api::namespaced(world.client(), &world.namespace)
}

/// Makes a group whose pods are bound when all of them can be, and pods `<group>-0`, `<group>-1` that ask for `gib`;
/// returns their names.
async fn create_gang(world: &World, group: &str, gib: [&str; 2]) -> Result<Vec<String>> {
    let policy = json!({"gang": {"minCount": gib.len()}});
    let object = json!({"metadata": {"name": group}, "spec": {"schedulingPolicy": policy}});
    let object = serde_json::from_value(object)?;
    let created = pod_groups(world).create(&PostParams::default(), &object).await;
    created.context("cannot create a PodGroup")?;
    let mut names = Vec::new();
    for (idx, gib) in gib.into_iter().enumerate() {
        let member = PodBuilder::units(&format!("{group}-{idx}"), gib).member_of(group);
        names.push(world.create(member).await?.name_any());
    }
    Ok(names)
}

/// Runs a scenario, and deletes all `PodGroups` of its namespace.
async fn with_groups(world: &mut World, scenario: Body) -> Result<()> {
    let tried = scenario(world).await;
    let (one, all) = (DeleteParams::default(), ListParams::default());
    let deleted = pod_groups(world).delete_collection(&one, &all).await;
    deleted.context("cannot delete PodGroups")?;
    tried
}

/// The nodes have five GPUs, and each of the six members needs one for itself.
async fn three_gangs(world: &mut World) -> Result<()> {
    let first = create_gang(world, "first", [LARGE, LARGE]).await?;
    let second = create_gang(world, "second", [LARGE, LARGE]).await?;
    world.until_running(&first).await?;
    world.until_running(&second).await?;
    let third = create_gang(world, "third", [LARGE, LARGE]).await?;
    world.until_refused("third-0", UNSCHEDULABLE).await?;
    for nth in 0..2 {
        sleep(SOME_CYCLES).await;
        let (name, created) = (format!("single-{nth}"), Instant::now());
        world.start(PodBuilder::units(&name, LARGE)).await?;
        let waited = created.elapsed();
        ensure!(
            waited < AT_ONCE,
            "a pod waited {waited:?} beside a group that does not fit"
        );
        world.verify().await?;
        world.delete(&name).await?;
    }
    for name in &third {
        let is_bound = node_of(&world.pod(name)?).is_some();
        ensure!(
            !is_bound,
            "{name} is bound, and its group has no room for all of its pods"
        );
    }
    for name in &first {
        world.delete(name).await?;
    }
    world.until_running(&third).await
}

/// The small member fits best beside a pod on `n2`, the large one only where a pod on `n1` is now.
async fn attempts_repeated(world: &mut World) -> Result<()> {
    let (small, most_of_the_largest) = ("8", "20");
    world.start(PodBuilder::units("beside", small).on("n2")).await?;
    let before = PodBuilder::units("before", most_of_the_largest);
    world.start(before).await?;
    let members = create_gang(world, "gang", [small, most_of_the_largest]).await?;
    world.until_refused("gang-0", UNSCHEDULABLE).await?;
    sleep(SOME_CYCLES).await;
    world.delete("before").await?;
    world.until_running(&members).await?;
    let pod = world.pod("gang-0")?;
    let node = node_of(&pod);
    ensure!(
        node == Some("n2"),
        "the small pod is on {node:?}, though n2 has just the room that it wants"
    );
    Ok(())
}
