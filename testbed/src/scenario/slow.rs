//! A scheduler that is stopped, and clients that send slowly: pods are still created and placed in time.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures::stream::{self, StreamExt, TryStreamExt};
use proto::resource::GPU_MEMORY;
use tokio::io::AsyncWriteExt;
use tokio::time::timeout;
use tower::Service;

use super::webhooks::create_within;
use super::{DEADLINE, Scenario, World, breaking};
use kit::parts::{ClusterPart, Need};
use kit::pods::PodBuilder;

pub(super) const SCENARIOS: &[Scenario] = scenarios! { needs "the port of the webhooks", on [Webhooks]:
    "scheduler-hangs" needs [Need::Pause(ClusterPart::Scheduler)] => scheduler_hangs,
        "while the scheduler stands still pods are made within seconds, and others than GPU pods are placed";
    "slow-clients" => slow_clients,
        "clients that send no more than the head of a review keep no pod from being completed";
};

/// GPU pods that wait for the scheduler that stands still.
const N_WAITING: usize = 2;
/// Longest time for creating one of them: the timeouts of two webhooks (2 s each), and a second.
const MADE: Duration = Duration::from_secs(5);
/// Longest time until a pod without GPUs runs: `httpTimeout` (3 s) for each attempt before it, and as much again.
const PLACED: Duration = Duration::from_secs(6 * N_WAITING as u64);
/// Three times as many clients as the webhooks answer at one time, and fewer than they accept connections.
const N_SLOW: usize = 96;
/// Connections that begin at the same time: unfinished TLS handshakes have a quarter of all places.
const N_HANDSHAKES: usize = 16;

async fn scheduler_hangs(world: &mut World) -> Result<()> {
    breaking::pause_scheduler(world).await?;
    let mut waiting = Vec::new();
    for idx in 0..N_WAITING {
        let name = format!("gpu-{idx}");
        create_within(world, MADE, PodBuilder::units(&name, 1)).await?;
        waiting.push(name);
    }
    let began = Instant::now();
    world.start(PodBuilder::new("plain", &[("cpu", "1m")])).await?;
    let took = began.elapsed();
    ensure!(took < PLACED, "a pod without GPUs took {took:?} to run");
    breaking::resume_scheduler(world).await?;
    world.until_running(&waiting).await
}

async fn slow_clients(world: &mut World) -> Result<()> {
    let (connector, url) = world.cluster()?.webhook_connector()?;
    let slow = (0..N_SLOW).map(|_| {
        let (mut connector, url) = (connector.clone(), url.clone());
        async move {
            let mut stream = connector.call(url.parse()?).await?.into_inner();
            let head = "POST /gpushare-scheduler/webhook/mutate HTTP/1.1\r\nhost: webhook\r\ncontent-length: 1000\r\n\r\n{";
            stream.write_all(head.as_bytes()).await?;
            stream.flush().await?;
            anyhow::Ok(stream)
        }
    });
    let slow = stream::iter(slow).buffer_unordered(N_HANDSHAKES);
    let slow = timeout(DEADLINE, slow.try_collect::<Vec<_>>()).await;
    let slow = slow.context("the webhooks take no connections")??;
    // The pod can be placed only if the webhook has completed its request.
    let bare = PodBuilder::new("completed", &[(GPU_MEMORY, "64Mi")]);
    world.start(bare).await?;
    drop(slow);
    Ok(())
}
