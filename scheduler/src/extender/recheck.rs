//! Recheck of refusals that may come from a stale cache.
//!
//! kube-scheduler tries a refused pod again when its own watches show a change, and then leaves the pod alone until the next
//! change, or for five minutes. Its watches can be a moment ahead of this process's: a pod that is refused in that moment
//! would wait although it fits. So `filter` holds a refusal back for a moment, and evaluates once more, if kube-scheduler must
//! have seen a change that this process has not: no room has opened here since the pod's last refusal, or the watch has not
//! even shown the pod, and so perhaps not the end of other pods before it.

use std::time::{Duration, Instant};

use tokio::time::{MissedTickBehavior, interval, timeout};

use super::recent_pods::RecentPods;
use crate::index::{Index, Shared};

/// The longest time that a refusal is held back. kube-scheduler schedules one pod at a time, and waits.
pub(super) const HOLD: Duration = Duration::from_millis(50);

/// Time between two looks at the index.
const POLL: Duration = Duration::from_millis(1);

/// The time without rechecks after one in vain: kube-scheduler, which waits for each, loses a twentieth of its time at most.
const PAUSE: Duration = Duration::from_secs(1);

/// The refusal of a pod on all nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PodRefusal {
    pub(super) uid: Box<str>,
    /// True if no watch has shown the pod yet.
    pub(super) is_unseen: bool,
    /// The number of times that room had opened on any node when the pod was refused.
    pub(super) n_openings: u64,
}

/// Decides which refusals are rechecked.
#[derive(Debug, Default)]
pub(super) struct Recheck {
    /// The number of times room had opened at the last refusal of each pod.
    n_openings: RecentPods<u64>,
    paused_until: Option<Instant>,
}

impl Recheck {
    /// Notes a refusal, and returns true if it has to be rechecked.
    pub(super) fn should_recheck(&mut self, refusal: &PodRefusal, now: Instant) -> bool {
        // kube-scheduler has tried a refused pod again, and no room has opened here since. A first attempt needs no such cause.
        let is_repeated =
            self.n_openings.insert(&refusal.uid, refusal.n_openings) == Some(refusal.n_openings);
        (refusal.is_unseen || is_repeated) && self.paused_until.is_none_or(|until| until <= now)
    }

    /// Forgets pods that are gone: see [`RecentPods::sweep`].
    pub(super) fn sweep(&mut self, is_shown: impl Fn(&str) -> bool) {
        self.n_openings.sweep(is_shown);
    }

    /// Notes a recheck that has ended: with this refusal, if any, and with or without an update before its second evaluation.
    pub(super) fn finish(&mut self, refusal: Option<&PodRefusal>, is_updated: bool, now: Instant) {
        if let Some(refusal) = refusal {
            self.n_openings.insert(&refusal.uid, refusal.n_openings);
        }
        // The watch is not behind, or is too far behind: the next refusals would be held back for nothing too.
        if !is_updated {
            self.paused_until = Some(now + PAUSE);
        }
    }
}

/// Waits until a watch shows something that the refusal did not take into account; returns false if none does in time.
pub(super) async fn wait_for_update(index: &Shared<Index>, refusal: &PodRefusal) -> bool {
    let mut polls = interval(POLL);
    polls.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // Polling is simple, and costs nothing where refusals are rechecked once a second at most.
    let polling = async {
        while !is_outdated(&index.read(), refusal) {
            polls.tick().await;
        }
    };
    timeout(HOLD, polling).await.is_ok()
}

/// Returns true if the index has changed since the refusal so that another evaluation may find room: it shows the pod that it did
/// not show before, or room has opened.
fn is_outdated(index: &Index, refusal: &PodRefusal) -> bool {
    if refusal.is_unseen {
        index.is_shown(&refusal.uid)
    } else {
        index.openings().all != refusal.n_openings
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(uid: &str, n_openings: u64) -> PodRefusal {
        PodRefusal {
            uid: uid.into(),
            is_unseen: false,
            n_openings,
        }
    }

    #[test]
    fn a_refusal_is_rechecked_if_no_room_has_opened_or_the_pod_is_unseen() {
        let (mut recheck, now) = (Recheck::default(), Instant::now());
        assert!(!recheck.should_recheck(&refusal("a", 1), now), "the first");
        assert!(
            recheck.should_recheck(&refusal("a", 1), now),
            "no room has opened"
        );
        assert!(!recheck.should_recheck(&refusal("a", 2), now), "room has opened");
        assert!(!recheck.should_recheck(&refusal("b", 2), now), "another pod");
        let unseen = PodRefusal {
            is_unseen: true,
            ..refusal("c", 2)
        };
        assert!(recheck.should_recheck(&unseen, now));
    }

    #[test]
    fn a_recheck_without_an_update_pauses_the_others() {
        let (mut recheck, now) = (Recheck::default(), Instant::now());
        recheck.should_recheck(&refusal("a", 1), now);
        recheck.finish(Some(&refusal("a", 1)), true, now);
        assert!(recheck.should_recheck(&refusal("a", 1), now), "an update came");
        recheck.finish(Some(&refusal("a", 1)), false, now);
        assert!(!recheck.should_recheck(&refusal("a", 1), now + PAUSE / 2));
        assert!(recheck.should_recheck(&refusal("a", 1), now + PAUSE));
    }
}
