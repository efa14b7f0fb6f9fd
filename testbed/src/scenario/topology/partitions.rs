//! GPUs that can be allocated in partitions only.

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use super::machines::PARTITIONED;
use super::{APART, PARTITION_SPEC, ScenarioEntry, annotated, ensure_minors, minors};
use crate::scenario::World;
use kit::pods::PodBuilder;
use kit::vendor_plugin::NVIDIA_GPU;

pub(super) const SCENARIOS: &[ScenarioEntry] = scenarios! {
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
fn insisting(name: &str, n_gpus: &str, spec: Value) -> PodBuilder {
    annotated(gpus(name, n_gpus), &[(PARTITION_SPEC, spec)])
}

/// Pods get only GPUs that form a partition, and break up as few partitions as possible.
async fn partitions(world: &mut World) -> Result<()> {
    world.create(gpus("three", "3")).await?;
    world.until_refused("three", APART).await?;
    let pair = world.start(gpus("pair", "2")).await?;
    ensure_minors(&pair, "gpu", &[0, 1])?;
    // The second pair gets the other half of the partition of four that the first pair has broken up.
    let next = world.start(gpus("next", "2")).await?;
    ensure_minors(&next, "gpu", &[2, 3])?;
    let four = world.start(gpus("four", "4")).await?;
    ensure_minors(&four, "gpu", &[4, 5, 6, 7])?;
    world.create(gpus("one", "1")).await?;
    world.until_refused("one", "nodes are available").await?;
    world.verify().await?;
    world.delete("next").await?;
    world.until_running(&["one"]).await
}

/// The annotation about partitions: a pod may insist on the best partition or on a bandwidth.
async fn partition_spec(world: &mut World) -> Result<()> {
    // The example of the proposal.
    let spec = json!({"allocatePolicy": "Restricted", "ringBusBandwidth": "200Gi"});
    let example = world.start(insisting("example", "1", spec)).await?;
    let example = minors(&example, "gpu")?;
    ensure!(example.iter().all(|minor| *minor < 4), "{example:?}");
    let restricted = json!({"allocatePolicy": "Restricted"});
    world.start(insisting("best", "2", restricted.clone())).await?;
    // The remaining partition of two has a lower score, and half of the bandwidth, so that a restricted pod has to wait.
    world.create(insisting("restricted", "2", restricted)).await?;
    world.until_refused("restricted", APART).await?;
    let spec = json!({"allocatePolicy": "BestEffort", "ringBusBandwidth": "300Gi"});
    world.create(insisting("fast", "2", spec)).await?;
    world.until_refused("fast", APART).await?;
    let spec = json!({"allocatePolicy": "BestEffort", "ringBusBandwidth": "200Gi"});
    let content = world.start(insisting("content", "2", spec)).await?;
    let content = minors(&content, "gpu")?;
    ensure!(content.iter().all(|minor| *minor >= 4), "{content:?}");
    world.verify().await?;
    // The pod `fast` waits for the same GPUs and could take them first, so it is deleted before `best`.
    world.delete("fast").await?;
    world.delete("best").await?;
    world.until_running(&["restricted"]).await
}
