//! A pod of high priority among many of low priority: as few of them are evicted as make room on one GPU, and none in vain.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::scheduling::v1::PriorityClass;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use super::{Body, Scenario, World};
use kit::cluster::SCHEDULER_USER;
use kit::invariants;
use kit::observer::ClusterSnapshot;
use kit::parts::Need;
use kit::pod_fields::node_of;
use kit::pods::PodBuilder;

pub(super) const SCENARIOS: &[Scenario] = scenarios! {
    needs "a watch that is late on command", on [Waiting], within with_class(world):
    "preemption" needs [Need::Evict] => one_gpu_is_freed,
        "a full cluster makes room for an important pod: the pods of one GPU go, and it runs there";
    "preemption-behind" => watch_is_behind,
        "with the scheduler's watch five seconds behind, no pod goes in vain";
    "preemption-budget" needs [Need::Evict] => budget_is_kept,
        "pods that a PodDisruptionBudget protects stay where others can go";
    "preemption-in-vain" needs [Need::Evict] => nothing_helps,
        "where no GPU can be freed, no pod goes";
};

/// The time for which the scheduler's watch shows nothing.
const BEHIND: Duration = Duration::from_secs(5);

const IMPORTANT: i32 = 1000;

/// The `PriorityClass` of pods of that priority.
const CLASS: &str = "gpushare-e2e-important";

/// The budget of protected pods.
pub(super) const BUDGET: &str = "protected";

/// A pod of a percentage of one GPU; it has the class of important pods if its priority is theirs.
fn share(name: &str, percent: u32, priority: i32) -> PodBuilder {
    let spec = PodBuilder::share(name, percent);
    if priority == IMPORTANT {
        spec.priority(CLASS, priority)
    } else {
        spec
    }
}

/// Runs a scenario with the class of important pods.
async fn with_class(world: &mut World, scenario: Body) -> Result<()> {
    with_classes(world, &[(CLASS, IMPORTANT)], scenario).await
}

/// Runs a scenario with a `PriorityClass` for each name and value, and removes them.
pub(super) async fn with_classes(world: &mut World, wanted: &[(&str, i32)], scenario: Body) -> Result<()> {
    let classes: Api<PriorityClass> = Api::all(world.client());
    for (name, value) in wanted {
        let class = serde_json::from_value(json!({"metadata": {"name": name}, "value": value}))?;
        let created = classes.create(&PostParams::default(), &class).await;
        created.context("cannot create a PriorityClass")?;
    }
    let tried = scenario(world).await;
    for (name, _) in wanted {
        let deleted = classes.delete(name, &DeleteParams::default()).await;
        deleted.context("cannot delete a PriorityClass")?;
    }
    tried
}

/// Creates the budget [`BUDGET`], which lets none of the `n_pods` pods go that the selector matches.
pub(super) async fn protect(
    world: &World,
    selector: Value,
    n_pods: usize,
) -> Result<Api<PodDisruptionBudget>> {
    let budgets: Api<PodDisruptionBudget> = Api::namespaced(world.client(), &world.namespace);
    let spec = json!({"selector": selector, "maxUnavailable": 0});
    let budget = serde_json::from_value(json!({"metadata": {"name": BUDGET}, "spec": spec}))?;
    budgets.create(&PostParams::default(), &budget).await?;
    // No disruption controller runs in the testbed, so the test itself fills in the budget's status.
    let status = json!({"disruptionsAllowed": 0, "currentHealthy": n_pods, "desiredHealthy": n_pods, "expectedPods": n_pods});
    let patch = Patch::Merge(json!({"status": status}));
    budgets
        .patch_status(BUDGET, &PatchParams::default(), &patch)
        .await?;
    Ok(budgets)
}

/// The number of the cluster's GPUs.
fn n_gpus(world: &World) -> usize {
    world.held_amounts().gpus.len()
}

/// Fills every GPU with pods of a quarter; returns their names.
async fn fill_all_gpus(world: &World) -> Result<Vec<String>> {
    let quarter = |idx| {
        let name = format!("low-{idx:02}");
        share(&name, 25, 0).labelled("name", &name)
    };
    world.start_all((0..4 * n_gpus(world)).map(quarter)).await
}

/// The node of a pod, and the minor number of its first GPU.
type Place = (String, i32);

/// The name of each pod, with its place; `None` for a pod without a record.
fn places(world: &World, names: &[String]) -> Vec<(String, Option<Place>)> {
    let with_place = |name: &String| (name.clone(), place_of(world, name));
    names.iter().map(with_place).collect()
}

fn place_of(world: &World, name: &str) -> Option<Place> {
    let pod = world.pod(name).ok()?;
    let node = node_of(&pod)?.to_owned();
    Some((node, invariants::record(&pod).ok()?.first()?.0))
}

/// True if a pod is there and stays there.
pub(super) fn is_staying(world: &World, name: &str) -> bool {
    world
        .pod(name)
        .is_ok_and(|pod| pod.metadata.deletion_timestamp.is_none())
}

/// Waits until the important pod runs on a GPU that `n_gone` evicted pods held, and checks that no other pods were evicted.
async fn until_one_gpu_has_changed_hands(
    world: &World,
    before: &[(String, Option<Place>)],
    n_gone: usize,
) -> Result<()> {
    world.until_running(&["high"]).await?;
    let high = place_of(world, "high").context("the pod has no record")?;
    let mut gone = before.to_vec();
    gone.retain(|(name, _)| !is_staying(world, name));
    ensure!(
        gone.len() == n_gone,
        "{} pods have gone, {n_gone} had to: {gone:?}",
        gone.len()
    );
    ensure!(
        gone.iter().all(|(_, place)| place.as_ref() == Some(&high)),
        "the pod is on {high:?}, and these have gone: {gone:?}"
    );
    Ok(())
}

/// Every GPU is full of pods of a quarter: the important pod asks for half a GPU, so two pods of one GPU must go.
async fn one_gpu_is_freed(world: &mut World) -> Result<()> {
    let low = places(world, &fill_all_gpus(world).await?);
    world.create(share("high", 50, IMPORTANT)).await?;
    until_one_gpu_has_changed_hands(world, &low, 2).await
}

/// The scheduler's watch is late: kube-scheduler sees the victims end and calls the filter while the scheduler counts them.
async fn watch_is_behind(world: &mut World) -> Result<()> {
    let names = fill_all_gpus(world).await?;
    let low = places(world, &names);
    let faults = world.cluster()?.api().faults();
    let held = faults.hold_watches_of(SCHEDULER_USER, "pods");
    world.create(share("high", 50, IMPORTANT)).await?;
    let keys: Vec<String> = names.iter().map(|name| world.key(name)).collect();
    let two_ended = |snapshot: &ClusterSnapshot| {
        let ended = keys.iter().filter(|key| !snapshot.pods.contains_key(*key));
        (ended.count() >= 2).then_some(())
    };
    world.until("two pods to end", two_ended).await?;
    tokio::time::sleep(BEHIND).await;
    drop(held);
    until_one_gpu_has_changed_hands(world, &low, 2).await
}

/// A budget protects all pods but those of one GPU, and one pod of each other GPU: only on that one GPU can enough pods go.
async fn budget_is_kept(world: &mut World) -> Result<()> {
    let low = places(world, &fill_all_gpus(world).await?);
    let (_, free) = low.last().context("there are no pods")?;
    let (mut one_of_each, mut unprotected) = (BTreeMap::new(), BTreeSet::new());
    for (name, place) in &low {
        one_of_each.insert(place, name);
        if place == free {
            unprotected.insert(name);
        }
    }
    unprotected.extend(one_of_each.into_values());
    let protected = json!([{"key": "name", "operator": "NotIn", "values": unprotected}]);
    let budgets = protect(world, json!({"matchExpressions": protected}), low.len()).await?;
    world.create(share("high", 75, IMPORTANT)).await?;
    let freed = until_one_gpu_has_changed_hands(world, &low, 3).await;
    budgets.delete(BUDGET, &DeleteParams::default()).await?;
    freed?;
    let high = place_of(world, "high");
    ensure!(
        high == *free,
        "the pod is on {high:?}, and only on {free:?} could enough pods go"
    );
    Ok(())
}

/// Sixty percent of each GPU is held by a pod of the preemptor's own priority: without the less important pods a node has enough
/// memory in sum, but no single GPU has.
async fn nothing_helps(world: &mut World) -> Result<()> {
    let n_gpus = n_gpus(world);
    // One pod of each priority on every GPU: a pod of sixty percent keeps the next pod of sixty off its GPU.
    let peers = (0..n_gpus).map(|idx| share(&format!("peer-{idx}"), 60, IMPORTANT));
    world.start_all(peers).await?;
    let low = (0..n_gpus).map(|idx| share(&format!("low-{idx}"), 40, 0));
    let low = world.start_all(low).await?;
    // kube-scheduler evicts victims before it writes the condition, so by now they would be gone.
    world.create_waiting(share("high", 70, IMPORTANT)).await?;
    let stay = low.iter().all(|name| is_staying(world, name));
    ensure!(stay, "a pod was evicted although that helps no other pod");
    Ok(())
}
