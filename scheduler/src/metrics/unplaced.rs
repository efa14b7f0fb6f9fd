//! Pods that kube-scheduler has asked about and that are not bound yet: the time since, and the reason of the last refusal.
//!
//! Only the leader answers kube-scheduler, so the other replicas know of no such pods.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustc_hash::FxHashMap;

/// Time for which a pod that the index does not know is remembered: its first filter may come before its watch event.
const GRACE: Duration = Duration::from_secs(60);
const MAX_PODS: usize = 100_000;
/// Stands for a reason for pods that fit and are being bound.
const FITS: &str = "fits";

#[derive(Clone, Copy, Debug)]
struct UnplacedPod {
    first_asked: Instant,
    /// The reason of its last refusal, or [`FITS`].
    reason: &'static str,
}

/// The pods that are not bound yet, by UID. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct UnplacedPods(Arc<Mutex<FxHashMap<Arc<str>, UnplacedPod>>>);

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct UnplacedSummary {
    /// The number of pods by the reason of their last refusal.
    pub(super) by_reason: BTreeMap<&'static str, u64>,
    /// Time since the first filter of the pod that has waited longest.
    pub(super) oldest: Duration,
}

impl UnplacedPods {
    /// Notes the result of a pod's filter; `refusal` is the label of the reason for which no node fits.
    pub(super) fn note_filter(&self, uid: &str, refusal: Option<&'static str>, now: Instant) {
        let reason = refusal.unwrap_or(FITS);
        let mut pods = self.0.lock();
        if let Some(pod) = pods.get_mut(uid) {
            pod.reason = reason;
        } else if pods.len() < MAX_PODS {
            let first_asked = now;
            pods.insert(uid.into(), UnplacedPod { first_asked, reason });
        }
    }

    /// Forgets a bound pod; returns the time since its first filter.
    pub(super) fn note_bound(&self, uid: &str, now: Instant) -> Option<Duration> {
        let pod = self.0.lock().remove(uid)?;
        Some(now.duration_since(pod.first_asked))
    }

    /// The pods, each with the time since its first filter.
    pub(super) fn ages(&self, now: Instant) -> Vec<(Arc<str>, Duration)> {
        let mut ages = Vec::new();
        for (uid, pod) in &*self.0.lock() {
            ages.push((Arc::clone(uid), now.duration_since(pod.first_asked)));
        }
        ages
    }

    pub(super) fn forget(&self, gone: &[Arc<str>]) {
        let mut pods = self.0.lock();
        for uid in gone {
            pods.remove(uid);
        }
    }

    pub(super) fn summarize(&self, now: Instant) -> UnplacedSummary {
        let mut summary = UnplacedSummary::default();
        // Always there, so that a graph shows 0 and not a gap.
        summary.by_reason.insert(FITS, 0);
        for pod in self.0.lock().values() {
            *summary.by_reason.entry(pod.reason).or_default() += 1;
            summary.oldest = summary.oldest.max(now.duration_since(pod.first_asked));
        }
        summary
    }

    /// Returns true if a pod that the index does not know may still be on its way there.
    pub(super) fn is_new(age: Duration) -> bool {
        age < GRACE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_counts_from_the_first_filter_and_the_last_reason_is_shown() {
        let pods = UnplacedPods::default();
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        pods.note_filter("a", Some("memory"), at(0));
        pods.note_filter("a", Some("core"), at(10));
        pods.note_filter("b", Some("memory"), at(20));
        pods.note_filter("c", None, at(25));
        let summary = pods.summarize(at(30));
        assert_eq!(
            summary.by_reason,
            [("core", 1), ("fits", 1), ("memory", 1)].into()
        );
        assert_eq!(summary.oldest, Duration::from_secs(30));
        assert_eq!(pods.note_bound("a", at(40)), Some(Duration::from_secs(40)));
        assert_eq!(
            pods.note_bound("a", at(41)),
            None,
            "a repeated bind is not a second placement"
        );
        let ages = pods.ages(at(41));
        assert_eq!(ages.len(), 2);
        assert!(ages.contains(&("b".into(), Duration::from_secs(21))));
        pods.forget(&["b".into()]);
        let summary = pods.summarize(at(41));
        assert_eq!(summary.by_reason, [("fits", 1)].into());
        assert_eq!(summary.oldest, Duration::from_secs(16));
    }
}
