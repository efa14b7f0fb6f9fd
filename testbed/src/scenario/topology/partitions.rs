//! GPUs that can be allocated in partitions only.

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use super::machines::PARTITIONED;
use super::{APART, PARTITION_SPEC, ensure_minors, minors};
use crate::scenario::{Scenario, World};
use kit::pods::PodBuilder;
use kit::vendor_plugin::NVIDIA_GPU;

pub(in crate::scenario) const SCENARIOS: &[Scenario] = scenarios! { needs "machines of known topologies", on [Topology]:
    "partitions" => partitions,
        "GPUs go in the node's partitions, those first that leave it best, and a size that it does not have is refused";
    "partition-spec" => partition_spec,
        "a pod may insist on the best partitions and on bandwidth";
};

/// A pod that asks for whole GPUs of the node [`PARTITIONED`].
fn gpus(name: &str, n_gpus: &str) -> PodBuilder {
    PodBuilder::new(name, &[(NVIDIA_GPU, n_gpus)]).on(PARTITIONED)
}

/// A pod that asks for whole GPUs and has the annotation about partitions.
fn insisting(name: &str, n_gpus: &str, spec: &Value) -> PodBuilder {
    gpus(name, n_gpus).annotation(PARTITION_SPEC, &spec.to_string())
}

async fn partitions(world: &mut World) -> Result<()> {
    world.create_refused(gpus("three", "3"), APART).await?;
    let pair = world.start(gpus("pair", "2")).await?;
    ensure_minors(&pair, "gpu", &[0, 1])?;
    // The second pair gets the other half of the partition of four that the first pair has broken up.
    let next = world.start(gpus("next", "2")).await?;
    ensure_minors(&next, "gpu", &[2, 3])?;
    let four = world.start(gpus("four", "4")).await?;
    ensure_minors(&four, "gpu", &[4, 5, 6, 7])?;
    world.create_waiting(gpus("one", "1")).await?;
    world.verify().await?;
    world.delete_for("next", "one").await
}

async fn partition_spec(world: &mut World) -> Result<()> {
    // The example of the proposal.
    let example = json!({"allocatePolicy": "Restricted", "ringBusBandwidth": "200Gi"});
    let restricted = json!({"allocatePolicy": "Restricted"});
    let fast = json!({"allocatePolicy": "BestEffort", "ringBusBandwidth": "300Gi"});
    let slow = json!({"allocatePolicy": "BestEffort", "ringBusBandwidth": "200Gi"});
    let example = world.start(insisting("example", "1", &example)).await?;
    let example = minors(&example, "gpu")?;
    ensure!(example.iter().all(|minor| *minor < 4), "{example:?}");
    world.start(insisting("best", "2", &restricted)).await?;
    // The remaining partition of two has a lower score, and half of the bandwidth, so that a restricted pod has to wait.
    world
        .create_refused(insisting("restricted", "2", &restricted), APART)
        .await?;
    world.create_refused(insisting("fast", "2", &fast), APART).await?;
    let content = world.start(insisting("content", "2", &slow)).await?;
    let content = minors(&content, "gpu")?;
    ensure!(content.iter().all(|minor| *minor >= 4), "{content:?}");
    world.verify().await?;
    // The pod `fast` waits for the same GPUs and could take them first, so it is deleted before `best`.
    world.delete("fast").await?;
    world.delete_for("best", "restricted").await
}
