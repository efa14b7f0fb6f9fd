//! A node that still runs the old gpushare plugin, and pods with broken annotations.
//!
//! Such a node has no Device object; it is a Node object only, its pods are bound and never start.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, PostParams};
use proto::record::{DEVICE_ALLOCATED, MEM_ASSIGNED, MEM_ASSUME_TIME, MEM_DEV, MEM_IDX, MEM_POD};
use proto::resource::{GPU_COUNT, GPU_MEM};
use serde_json::{Value, json};

use super::{DEADLINE, NO_ROOM, Scenario, World};
use kit::pod_fields::node_of;
use kit::pods::PodBuilder;

const OLD: &str = "old-node";

pub(super) const SCENARIOS: &[Scenario] = scenarios! { needs "a node without kubelet", on [Faults]:
    "old-node" => old_node,
        "a node of the old plugin and pods of the old extender are understood";
    "annotation-nonsense" => annotation_nonsense,
        "a pod with an unreadable record is counted conservatively";
};

/// Creates a node with two GPUs of 16 memory units each, as the old plugin reports it, and waits until the scheduler shows it.
async fn create_old_node(world: &mut World) -> Result<()> {
    let amounts = json!({"cpu": "64", "memory": "256Gi", "pods": "100", GPU_MEM: "32", GPU_COUNT: "2"});
    let node = json!({
        "metadata": {"name": OLD, "labels": {"kubernetes.io/hostname": OLD, "gpushare": "true"}},
        "status": {"capacity": amounts, "allocatable": amounts, "conditions": [{"type": "Ready", "status": "True"}]},
    });
    let nodes: Api<Node> = Api::all(world.client());
    let node: Node = serde_json::from_value(node)?;
    let params = PostParams::default();
    let created = nodes.create(&params, &node).await;
    let mut created = created.context("cannot create a node")?;
    created.status = node.status;
    let written = nodes.replace_status(OLD, &params, &created).await;
    written.context("cannot write its status")?;
    until_extender_shows(world, OLD, "the node", has_gpus).await
}

/// Returns true if the scheduler's view of a node (`inspect`) has GPU memory: the scheduler knows the node.
pub(super) fn has_gpus(node: &Value) -> bool {
    let total = node.get("totalGPU").and_then(Value::as_u64);
    total.is_some_and(|total| total > 0)
}

/// Waits until the scheduler's view of a node (`inspect`) meets a condition. A pod that a stale view refuses would wait for
/// the next event of any pod or node: an extender cannot wake kube-scheduler.
pub(super) async fn until_extender_shows(
    world: &mut World,
    node: &str,
    what: &str,
    condition: impl Fn(&Value) -> bool,
) -> Result<()> {
    let cluster = world.cluster()?;
    cluster
        .until_scheduler_shows(node, what, DEADLINE, condition)
        .await
}

/// Units that pods hold on the node, as `inspect` shows.
fn used_units(node: &Value) -> u64 {
    node.get("usedGPU").and_then(Value::as_u64).unwrap_or(0)
}

/// Removes the node and its pods if they are there.
pub(super) async fn remove_old_node(world: &mut World) -> Result<()> {
    // No kubelet ends these pods.
    world.pods.delete_all_now().await?;
    world.clear().await?;
    let nodes: Api<Node> = Api::all(world.client());
    world.excused.clear();
    match nodes.delete(OLD, &DeleteParams::default()).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(error) => Err(error).context("cannot delete a node"),
    }
}

/// A pod with the annotations that the old scheduler extender writes: the GPU's index and the pod's units.
fn placed(name: &str, idx: &str, units: &str) -> PodBuilder {
    PodBuilder::units(name, units)
        .annotation(MEM_IDX, idx)
        .annotation(MEM_POD, units)
        .annotation(MEM_DEV, "16")
        .annotation(MEM_ASSIGNED, "true")
        .annotation(MEM_ASSUME_TIME, "1700000000000000000")
}

async fn old_node(world: &mut World) -> Result<()> {
    create_old_node(world).await?;
    world.bind_by_hand(placed("placed-0", "0", "10"), OLD).await?;
    world.bind_by_hand(placed("placed-1", "1", "4"), OLD).await?;
    until_extender_shows(world, OLD, "both pods", |node| used_units(node) == 14).await?;
    world.create(PodBuilder::units("new-8", 8).on(OLD)).await?;
    world.until_bound("new-8").await?;
    let pod = world.pod("new-8")?;
    let idx = pod.annotations().get(MEM_IDX).map(String::as_str);
    // The record is there as soon as the pod is bound: a wait for it would hide that it comes later.
    ensure!(idx == Some("1"), "8 units fit GPU 1 only, it got {idx:?}");
    world
        .create_refused(PodBuilder::units("new-7", 7).on(OLD), NO_ROOM)
        .await?;
    remove_old_node(world).await
}

async fn annotation_nonsense(world: &mut World) -> Result<()> {
    create_old_node(world).await?;
    let nonsense = placed("nonsense", "1", "4").annotation(DEVICE_ALLOCATED, "{\"gpu\":[{\"minor\":");
    world.excused.insert(world.key("nonsense"));
    world.bind_by_hand(nonsense, OLD).await?;
    until_extender_shows(world, OLD, "the pod", |node| used_units(node) > 0).await?;
    // The record does not parse, so the 4 units may be on either GPU: the scheduler must count neither as empty.
    world.create_waiting_units("whole", 16, OLD).await?;
    let is_bound = node_of(&world.pod("whole")?).is_some();
    ensure!(!is_bound, "a whole GPU was given away");
    remove_old_node(world).await
}
