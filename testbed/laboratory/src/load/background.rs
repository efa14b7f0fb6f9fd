//! Load that goes on beside a measurement: requests that are sent again and again, and counted.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use anyhow::Result;
use tokio::task::JoinSet;

#[derive(Debug)]
pub(super) struct Background {
    counts: Arc<BackgroundCounts>,
    began: Instant,
    _running: JoinSet<()>,
}

#[derive(Debug, Default)]
pub(super) struct BackgroundCounts {
    pub(super) done: AtomicU64,
    pub(super) failed: AtomicU64,
    pub(super) bytes: AtomicU64,
}

impl Background {
    /// Starts `n_tasks` tasks; `what` names their requests in the log.
    pub(super) fn start<F>(
        what: &'static str,
        n_tasks: u32,
        task: impl Fn(Arc<BackgroundCounts>) -> F,
    ) -> Self
    where
        F: Future<Output = Result<()>> + Send + 'static,
    {
        let counts = Arc::<BackgroundCounts>::default();
        let mut running = JoinSet::new();
        for _ in 0..n_tasks {
            let task = task(Arc::clone(&counts));
            running.spawn(async move {
                if let Err(error) = task.await {
                    tracing::error!(%error, "{what} have ended");
                }
            });
        }
        Self {
            counts,
            began: Instant::now(),
            _running: running,
        }
    }

    pub(super) fn per_second(&self) -> f64 {
        float(&self.counts.done) / self.began.elapsed().as_secs_f64()
    }

    pub(super) fn n_failed(&self) -> u64 {
        self.counts.failed.load(Ordering::Relaxed)
    }

    pub(super) fn mib_of_answer(&self) -> f64 {
        float(&self.counts.bytes) / float(&self.counts.done).max(1.0) / f64::from(1 << 20)
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
fn float(count: &AtomicU64) -> f64 {
    count.load(Ordering::Relaxed) as f64
}
