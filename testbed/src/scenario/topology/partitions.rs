//! GPUs that can be allocated in partitions only.

use anyhow::{Result, ensure};
use futures::FutureExt;
use futures::future::BoxFuture;
use serde_json::{Value, json};

use super::machines::PARTITIONED;
use super::{APART, Body, PARTITION_SPEC, annotated, minors};
use crate::pods::PodBuilder;
use crate::scenario::World;
use crate::vendor_plugin::NVIDIA_GPU;

/// Name, promise, body.
pub(super) const SCENARIOS: &[(&str, &str, Body)] = &[
    (
        "partitions",
        "GPUs go in the node's partitions, those first that leave it best, and a size that it does not have is refused",
        partitions,
    ),
    (
        "partition-spec",
        "a pod may insist on the best partitions and on bandwidth",
        spec,
    ),
];

fn gpus(name: &str, n_gpus: &str) -> PodBuilder {
    PodBuilder::new(name, &[(NVIDIA_GPU, n_gpus)]).on(PARTITIONED)
}

fn insisting(name: &str, n_gpus: &str, spec: Value) -> PodBuilder {
    annotated(gpus(name, n_gpus), &[(PARTITION_SPEC, spec)])
}

fn partitions(world: &mut World) -> BoxFuture<'_, Result<()>> {
    async {
        world.create(gpus("three", "3")).await?;
        world.until_refused("three", APART).await?;
        let pair = world.start(gpus("pair", "2")).await?;
        ensure!(minors(&pair, "gpu")? == [0, 1], "{:?}", minors(&pair, "gpu")?);
        // The other half of the four that are broken already.
        let next = world.start(gpus("next", "2")).await?;
        ensure!(minors(&next, "gpu")? == [2, 3], "{:?}", minors(&next, "gpu")?);
        let four = world.start(gpus("four", "4")).await?;
        ensure!(
            minors(&four, "gpu")? == [4, 5, 6, 7],
            "{:?}",
            minors(&four, "gpu")?
        );
        world.create(gpus("one", "1")).await?;
        world.until_refused("one", "nodes are available").await?;
        world.verify().await?;
        world.delete("next").await?;
        world.until_running(&["one"]).await
    }
    .boxed()
}

fn spec(world: &mut World) -> BoxFuture<'_, Result<()>> {
    async {
        // The example of the proposal.
        let example = world
            .start(insisting(
                "example",
                "1",
                json!({"allocatePolicy": "Restricted", "ringBusBandwidth": "200Gi"}),
            ))
            .await?;
        ensure!(
            minors(&example, "gpu")?.iter().all(|minor| *minor < 4),
            "{:?}",
            minors(&example, "gpu")?
        );
        world
            .start(insisting("best", "2", json!({"allocatePolicy": "Restricted"})))
            .await?;
        // The remaining pair has the lower score, and half of the bandwidth.
        world
            .create(insisting(
                "restricted",
                "2",
                json!({"allocatePolicy": "Restricted"}),
            ))
            .await?;
        world.until_refused("restricted", APART).await?;
        world
            .create(insisting(
                "fast",
                "2",
                json!({"allocatePolicy": "BestEffort", "ringBusBandwidth": "300Gi"}),
            ))
            .await?;
        world.until_refused("fast", APART).await?;
        let content = world
            .start(insisting(
                "content",
                "2",
                json!({"allocatePolicy": "BestEffort", "ringBusBandwidth": "200Gi"}),
            ))
            .await?;
        ensure!(
            minors(&content, "gpu")?.iter().all(|minor| *minor >= 4),
            "{:?}",
            minors(&content, "gpu")?
        );
        world.verify().await?;
        // It would take the place that becomes free, if its back-off ends first.
        world.delete("fast").await?;
        world.delete("best").await?;
        world.until_running(&["restricted"]).await
    }
    .boxed()
}
