//! A cluster so large that kube-scheduler asks about a sample of its nodes, and takes the refusal of the sample for one of all.
//!
//! All nodes but the testbed's own are objects only, and have no GPU with room.

use anyhow::{Result, ensure};
use proto::resource::{GPU_CORE, GPU_COUNT, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED};
use serde_json::{Value, json};

use super::old_nodes::{has_gpus, until_extender_shows};
use super::{DEVICES, Scenario, World};
use kit::apiserver::ApiObjects;
use kit::kube_scheduler::SchedulingOutcome;
use kit::pod_fields::node_of;
use kit::pods::PodBuilder;

pub(super) const SCENARIOS: &[Scenario] = scenarios! { needs "nodes that are objects only", on [Second]:
    "sampled-nodes" => sampled_nodes,
        "a pod that one of 502 nodes has room for is tried again until kube-scheduler asks about that node";
};

/// Nodes without room: kube-scheduler looks for 230 of 502 that fit, so the pod's node, the last but one by name, is in the
/// third sample. Its first refusal changes the pod's condition, and that change makes kube-scheduler try again.
const N_FULL: u32 = 500;
/// The refusals of the first two samples.
const N_REFUSALS: usize = 2;

const GPUS_OF_FULL: u32 = 8;
const GIB_OF_FULL: u32 = 4;
/// The pod's memory: more than one GPU of a full node has, and less than all its GPUs have together, so that
/// kube-scheduler's own filters let the pod pass.
const ASKED: &str = "20Gi";

fn full_node_name(idx: u32) -> String {
    format!("full-{idx:03}")
}

/// A Node object whose GPUs, by node status, are large in sum; each one is small.
fn full_node(name: &str) -> Value {
    let percents = (100 * GPUS_OF_FULL).to_string();
    let amounts = json!({
        "cpu": "64", "memory": "256Gi", "pods": "100", GPU_COUNT: GPUS_OF_FULL.to_string(),
        GPU_SHARED: percents, GPU_MEMORY_RATIO: percents, GPU_CORE: percents,
        GPU_MEMORY: format!("{}Gi", GPUS_OF_FULL * GIB_OF_FULL),
    });
    let status = json!({"capacity": amounts, "allocatable": amounts, "conditions": [{"type": "Ready", "status": "True"}]});
    json!({"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}, "status": status})
}

/// The Device object of such a node.
fn full_device(name: &str) -> Value {
    let resources = json!({GPU_MEMORY: format!("{GIB_OF_FULL}Gi"), GPU_CORE: "100", GPU_MEMORY_RATIO: "100"});
    let gpu = |minor: u32| json!({"type": "gpu", "id": format!("GPU-{name}-{minor}"), "minor": minor, "health": true, "resources": resources});
    json!({"metadata": {"name": name}, "spec": {"devices": (0..GPUS_OF_FULL).map(gpu).collect::<Vec<_>>()}})
}

/// Creates the nodes without room, and waits until the extender knows all of them.
async fn create_full_nodes(world: &mut World) -> Result<()> {
    for idx in 0..N_FULL {
        let name = full_node_name(idx);
        let objects = world.cluster()?.api().objects();
        objects.create("nodes", full_node(&name))?;
        objects.create(DEVICES, full_device(&name))?;
    }
    // Watches show objects in the order of their creation: with the last node, the extender knows all.
    until_extender_shows(world, &full_node_name(N_FULL - 1), "all nodes", has_gpus).await
}

/// Removes the nodes without room that are there.
pub(super) fn remove_full_nodes(objects: &ApiObjects) {
    for idx in 0..N_FULL {
        for kind in ["nodes", DEVICES] {
            // The object may be gone already, or was never made.
            let _ = objects.delete(kind, "", &full_node_name(idx), Some(0));
        }
    }
}

async fn sampled_nodes(world: &mut World) -> Result<()> {
    create_full_nodes(world).await?;
    world.cluster()?.start_sampling_kube_scheduler().await?;
    world.cluster()?.past_attempts();
    let limits = [(GPU_SHARED, "1"), (GPU_MEMORY, ASKED)];
    world.start(PodBuilder::new("large", &limits)).await?;
    let pod = world.pod("large")?;
    let node = node_of(&pod);
    ensure!(
        node == Some("n1"),
        "only n1 has a GPU of {ASKED}, the pod is on {node:?}"
    );
    let mut messages = Vec::new();
    for attempt in world.cluster()?.past_attempts() {
        if attempt.outcome == SchedulingOutcome::NoFit {
            messages.push(attempt.diagnosis.message());
        }
    }
    let has_sampled = messages.len() >= N_REFUSALS;
    ensure!(has_sampled, "kube-scheduler looked at all nodes: {messages:?}");
    // A node that changes while the scenario runs, as the plugins' nodes may, is an event too, and would hide this.
    let mut different = messages.clone();
    different.dedup();
    ensure!(
        different == messages,
        "two refusals in a row have one text, so the pod waits for an event: {messages:?}"
    );
    world.delete("large").await?;
    remove_full_nodes(world.cluster()?.api().objects());
    world.cluster()?.start_kube_scheduler().await
}
