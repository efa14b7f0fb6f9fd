//! Binds at a steady rate while something else is measured: pods are created, bound by the scheduler, and deleted again.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Result;
use tokio::sync::Semaphore;
use tokio::sync::mpsc::unbounded_channel;
use tokio::time::{MissedTickBehavior, interval};

use super::background::{Background, BackgroundCounts};
use super::{Binder, fleet};
use kit::apiserver::ApiObjects;

const CONCURRENCY: usize = 64;
/// The pause between two bursts of binds; each burst sends all binds that the rate demands by then.
const BEAT: Duration = Duration::from_millis(5);

/// Binds `per_second` pods, to one node after the other; at most four of these pods stay on each.
pub(super) fn start(objects: &ApiObjects, binder: &Binder, n_nodes: u32, per_second: u32) -> Background {
    Background::start("binds in the background", 1, |counts| {
        run(objects.clone(), binder.clone(), n_nodes, per_second, counts)
    })
}

/// Creates pods, has the scheduler bind them at the wanted rate, and deletes the oldest ones.
async fn run(
    objects: ApiObjects,
    binder: Binder,
    n_nodes: u32,
    per_second: u32,
    counts: Arc<BackgroundCounts>,
) -> Result<()> {
    let permits = Arc::new(Semaphore::new(CONCURRENCY));
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
            // A scheduler that cannot keep up gets no endless queue: the rate drops instead, and the result shows it.
            let permit = Arc::clone(&permits).acquire_owned().await?;
            let name = format!("churn-{n_begun:07}");
            let bind = fleet::pending_pod(&objects, &name, n_begun % n_nodes)?;
            n_begun += 1;
            while let Ok(bound) = reported.try_recv() {
                bound_pods.push_back(bound);
            }
            // Without deletion the nodes would fill up, and the filter that is measured would find less and less room.
            while bound_pods.len() > 4 * n_nodes as usize
                && let Some(oldest) = bound_pods.pop_front()
            {
                objects.delete("pods", fleet::NAMESPACE, &oldest, Some(0))?;
            }
            let (binder, counts, report) = (binder.clone(), Arc::clone(&counts), report.clone());
            tokio::spawn(async move {
                if binder.bind(&bind).await.is_ok() {
                    counts.done.fetch_add(1, Ordering::Relaxed);
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
