//! Gets answers ready, a little at a time, before what has been learnt of pods counts: no request waits for it.
//!
//! What is put to the nodes, and what comes of it, is the engine's business.

use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval};

use crate::index::{Index, Shared};

/// How often it is seen whether something has been learnt.
const LOOK: Duration = Duration::from_millis(100);

/// How often a stretch of a rehearsal is gone through. One takes a fraction of this, so that most of the time is for requests.
const BEAT: Duration = Duration::from_millis(1);

/// Rehearses whatever the index learns, and has it take that on, until the process ends.
pub async fn rehearse(index: Shared<Index>) {
    let mut looks = every(LOOK);
    let mut beats = every(BEAT);
    loop {
        looks.tick().await;
        let Some(mut rehearsal) = index.read().fleet().prewarm() else {
            continue;
        };
        while index.read().fleet().prewarm_step(&mut rehearsal) {
            beats.tick().await;
        }
        index.write().end_learning();
    }
}

fn every(period: Duration) -> tokio::time::Interval {
    let mut ticks = interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

#[cfg(test)]
mod tests;
