//! When a refusal is thought over, because kube-scheduler may know of something that is still on its way to us.
//!
//! kube-scheduler tries a refused pod again when its own watches show a change, and then leaves it alone until the next
//! change, or for five minutes. Its watches can be a moment ahead of ours: a pod refused in that moment would wait for
//! nothing. So a refusal is held back, shortly and seldom, if kube-scheduler had no reason that we know of to ask:
//! nothing has changed since the pod was refused last, or our watch has not even shown the pod, and whatever ended before
//! the pod came will be shown before it.

use std::time::{Duration, Instant};

use tokio::time::{MissedTickBehavior, interval, timeout};

use super::filter::RefusedPod;
use super::remembered::Remembered;
use crate::index::{Index, Shared};

/// Longest time that an answer is held back. kube-scheduler decides on one pod at a time, and waits.
const HOLD: Duration = Duration::from_millis(50);

/// Time between two looks at whether there is news.
const GLANCE: Duration = Duration::from_millis(1);

/// Time in which no answer is held back after one was in vain, so that kube-scheduler loses a twentieth of its time at most.
const REST: Duration = Duration::from_secs(1);

/// Who was refused when.
#[derive(Debug, Default)]
pub(super) struct Patience {
    /// How often room had been made when a pod was refused last. A pod that is forgotten is answered at once.
    refused: Remembered<u64>,
    rests_until: Option<Instant>,
}

impl Patience {
    /// Whether a refusal may come too early.
    pub(super) fn is_early(&mut self, refused: &RefusedPod, now: Instant) -> bool {
        let was_refused_by_this = self.note(refused) == Some(refused.n_openings);
        (refused.is_unseen || was_refused_by_this) && self.rests_until.is_none_or(|rest| rest <= now)
    }

    /// A refusal was held back; what it is now, and whether anything had come in meanwhile.
    pub(super) fn thought_over(&mut self, refused: Option<&RefusedPod>, has_news: bool, now: Instant) {
        if let Some(refused) = refused {
            self.note(refused);
        }
        if !has_news {
            self.rests_until = Some(now + REST);
        }
    }

    /// Remembers a refusal; what was remembered of the pod before.
    fn note(&mut self, refused: &RefusedPod) -> Option<u64> {
        self.refused.put(&refused.uid, refused.n_openings)
    }
}

/// Waits until a watch shows what a refusal has not taken into account; whether one did in time.
pub(super) async fn news(index: &Shared<Index>, refused: &RefusedPod) -> bool {
    let is_news = || {
        let index = index.read();
        if refused.is_unseen {
            index.is_shown(&refused.uid)
        } else {
            index.fleet().n_openings() != refused.n_openings
        }
    };
    let mut glances = interval(GLANCE);
    glances.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let glancing = async {
        while !is_news() {
            glances.tick().await;
        }
    };
    timeout(HOLD, glancing).await.is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(uid: &str, n_openings: u64) -> RefusedPod {
        RefusedPod {
            uid: uid.into(),
            is_unseen: false,
            n_openings,
        }
    }

    #[test]
    fn only_a_refusal_for_the_same_reasons_is_early() {
        let (mut patience, now) = (Patience::default(), Instant::now());
        assert!(!patience.is_early(&refused("a", 1), now), "the first");
        assert!(patience.is_early(&refused("a", 1), now), "nothing has changed");
        assert!(!patience.is_early(&refused("a", 2), now), "something has");
        assert!(!patience.is_early(&refused("b", 2), now), "another pod");
        assert!(
            patience.is_early(
                &RefusedPod {
                    is_unseen: true,
                    ..refused("c", 2)
                },
                now
            ),
            "not shown yet"
        );
    }

    #[test]
    fn after_waiting_in_vain_nobody_waits_for_a_while() {
        let (mut patience, now) = (Patience::default(), Instant::now());
        patience.is_early(&refused("a", 1), now);
        patience.thought_over(Some(&refused("a", 1)), true, now);
        assert!(patience.is_early(&refused("a", 1), now), "that was not in vain");
        patience.thought_over(Some(&refused("a", 1)), false, now);
        assert!(!patience.is_early(&refused("a", 1), now + REST / 2));
        assert!(patience.is_early(&refused("a", 1), now + REST));
    }
}
