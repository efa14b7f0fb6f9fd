//! Prewarms the score caches for a refreshed workload model before the model counts, so that no request waits for it.

use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval};

use crate::index::{Index, Shared};

/// Pause between two checks for a refreshed model.
const POLL: Duration = Duration::from_millis(100);

/// Pause between two steps of a prewarm. A step takes a fraction of the pause, so that most of the time is for requests.
const STEP: Duration = Duration::from_millis(1);

/// Prewarms for each refreshed model, then makes the index use the model, until the task is dropped.
pub async fn prewarm(index: Shared<Index>) {
    let mut polls = every(POLL);
    let mut steps = every(STEP);
    loop {
        polls.tick().await;
        let Some(mut pending) = index.read().fleet().prewarm() else {
            continue;
        };
        while index.read().fleet().prewarm_step(&mut pending) {
            steps.tick().await;
        }
        index.write().finish_workload_refresh();
    }
}

/// A timer that never ticks twice at once to make up for a delay.
fn every(period: Duration) -> tokio::time::Interval {
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

#[cfg(test)]
mod tests;
