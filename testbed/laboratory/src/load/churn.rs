//! Binds at a steady rate while something else is measured: pods are created, bound by the scheduler, and
//! deleted again.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::Value;
use tokio::sync::Semaphore;
use tokio::sync::mpsc::unbounded_channel;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::task::AbortOnDropHandle;

use super::fleet;
use kit::apiserver::ApiObjects;
use kit::http_client::HttpClient;

/// Most binds under way at one time.
const CONCURRENCY: usize = 64;

/// The pause between two bursts of binds; each burst sends all binds that the rate demands by then.
const BEAT: Duration = Duration::from_millis(5);

/// Binds in the background; they end when this is dropped.
#[derive(Debug)]
pub(super) struct Churn {
    counts: Arc<ChurnCounts>,
    began: Instant,
    _running: AbortOnDropHandle<()>,
}

#[derive(Debug, Default)]
struct ChurnCounts {
    bound: AtomicU64,
    failed: AtomicU64,
}

impl Churn {
    /// Binds `per_second` pods, to one node after the other; at most four of these pods stay on each.
    pub(super) fn start(objects: ApiObjects, scheduler: &str, n_nodes: u32, per_second: u32) -> Self {
        let counts = Arc::new(ChurnCounts::default());
        let url = format!("{scheduler}/gpushare-scheduler/bind");
        let running = run(objects, url, n_nodes, per_second, Arc::clone(&counts));
        let running = tokio::spawn(async move {
            if let Err(error) = running.await {
                tracing::error!(%error, "binds in the background have ended");
            }
        });
        Self {
            counts,
            began: Instant::now(),
            _running: AbortOnDropHandle::new(running),
        }
    }

    /// Successful binds per second so far, and the number of failed ones.
    pub(super) fn rate(&self) -> (f64, u64) {
        let bound = u32::try_from(self.counts.bound.load(Ordering::Relaxed)).unwrap_or(u32::MAX);
        (
            f64::from(bound) / self.began.elapsed().as_secs_f64(),
            self.counts.failed.load(Ordering::Relaxed),
        )
    }
}

/// Creates pods, has the scheduler bind them at the wanted rate, and deletes the oldest ones.
async fn run(
    objects: ApiObjects,
    url: String,
    n_nodes: u32,
    per_second: u32,
    counts: Arc<ChurnCounts>,
) -> Result<()> {
    let (client, permits) = (HttpClient::new(), Arc::new(Semaphore::new(CONCURRENCY)));
    let mut bound_pods: VecDeque<String> = VecDeque::new();
    let (report, mut reported) = unbounded_channel();
    let mut beats = interval(BEAT);
    // A late tick sends all binds that are due, so that missed ticks need no repetition.
    beats.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let began = Instant::now();
    let mut n_begun = 0;
    loop {
        beats.tick().await;
        let due = began.elapsed().as_secs_f64() * f64::from(per_second);
        while f64::from(n_begun) < due {
            // A scheduler that cannot keep up gets no endless queue: the rate drops instead, and the result
            // shows it.
            let permit = Arc::clone(&permits).acquire_owned().await?;
            let name = format!("churn-{n_begun:07}");
            let bind = fleet::pending_pod(&objects, &name, n_begun % n_nodes)?;
            n_begun += 1;
            while let Ok(bound) = reported.try_recv() {
                bound_pods.push_back(bound);
            }
            // Without deletion the nodes would fill up, and the filter that is measured would find less and
            // less room.
            while bound_pods.len() > 4 * n_nodes as usize
                && let Some(oldest) = bound_pods.pop_front()
            {
                objects.delete("pods", fleet::NAMESPACE, &oldest, Some(0))?;
            }
            let (client, url, counts, report) =
                (client.clone(), url.clone(), Arc::clone(&counts), report.clone());
            tokio::spawn(async move {
                if is_bound(&client, &url, &bind).await {
                    counts.bound.fetch_add(1, Ordering::Relaxed);
                    // The receiver is gone once the measurement is over.
                    report.send(name).ok();
                } else {
                    counts.failed.fetch_add(1, Ordering::Relaxed);
                }
                drop(permit);
            });
        }
    }
}

/// Sends a bind to the scheduler; returns true if its answer has no error.
async fn is_bound(client: &HttpClient, url: &str, bind: &Value) -> bool {
    let answer = client.post(url, bind.to_string()).await;
    let answer: Option<Value> = answer
        .ok()
        .and_then(|(_, answer)| serde_json::from_slice(&answer).ok());
    answer.is_some_and(|answer| answer.get("Error") == Some(&Value::from("")))
}
