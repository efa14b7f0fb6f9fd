//! Recheck of refusals that may come from a stale cache.
//!
//! kube-scheduler tries a refused pod again when its own watches show a change, which can be a moment ahead of this process's; a
//! pod that is refused in that moment would wait for five minutes although it fits. So `filter` holds a refusal back for a
//! moment, and evaluates once more, if kube-scheduler must have seen a change that this process has not.

use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::index::{Index, Shared};

/// The longest time that a refusal is held back. kube-scheduler schedules one pod at a time, and waits.
pub(super) const HOLD: Duration = Duration::from_millis(50);

/// Time between two looks at the index.
const POLL: Duration = Duration::from_millis(1);

/// The time without rechecks after one in vain: kube-scheduler, which waits for each, loses a twentieth of its time at most.
pub(super) const PAUSE: Duration = Duration::from_secs(1);

/// The refusal of a pod on all nodes.
#[derive(Debug)]
pub(super) struct PodRefusal {
    pub(super) uid: Box<str>,
    /// True if no watch has shown the pod yet.
    pub(super) is_unseen: bool,
    /// The number of times that room had opened on any node when the pod was refused.
    pub(super) n_openings: u64,
}

impl PodRefusal {
    /// Returns true if another evaluation may find room: the pod is shown now and was not before, or room has opened.
    fn is_outdated(&self, index: &Index) -> bool {
        if self.is_unseen {
            index.is_shown(&self.uid)
        } else {
            index.openings().all != self.n_openings
        }
    }
}

/// Waits until a watch shows something that the refusal did not take into account; returns false if none does in time.
pub(super) async fn wait_for_update(index: &Shared<Index>, refusal: &PodRefusal) -> bool {
    let mut polls = interval(POLL);
    polls.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // Polling is simple, and costs nothing where refusals are rechecked once a second at most.
    let polling = async {
        while !refusal.is_outdated(&index.read()) {
            polls.tick().await;
        }
    };
    timeout(HOLD, polling).await.is_ok()
}
