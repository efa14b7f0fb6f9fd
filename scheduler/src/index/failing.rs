//! Nodes whose kubelet refuses pods again and again after the scheduler has chosen them: they rank behind all others for a
//! while. kubelet refuses a pod for good, so its controller creates another, and the best node would be the same once more.
//!
//! If the next pod fails there too, the time doubles, up to a limit; failures that are long ago are forgotten. Watches bring no
//! time: a failure that they show counts from the next [`FailingNodes::advance`] on.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use proto::pod::{Pod, is_refusal_of_kubelet};
use rustc_hash::FxHashMap;

/// The number of pods that must have failed on a node before it ranks last.
const FAILURES: usize = 3;

/// The time within which failures count together.
const WINDOW: Duration = Duration::from_secs(10 * 60);

/// The time for which a node ranks last at first.
const FIRST_PAUSE: Duration = Duration::from_secs(60);

const LONGEST_PAUSE: Duration = Duration::from_secs(16 * 60);

/// The time after a node's latest failure, or after it last ranked behind others, at which its failures are forgotten.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(60 * 60);

#[derive(Debug, Default)]
pub(super) struct FailingNodes {
    nodes: FxHashMap<Box<str>, Failing>,
    /// Failures that watches have shown and that do not count yet: the node, and the UID of the pod.
    uncounted: Vec<(Box<str>, Box<str>)>,
    pub(super) n_ranking_last: usize,
    /// The first time at which one of `nodes` no longer ranks last, or may be forgotten.
    next: Option<Instant>,
}

#[derive(Debug, Default)]
struct Failing {
    /// The pods that failed, by UID, and when.
    failures: VecDeque<(Box<str>, Instant)>,
    /// The time until which the node ranks last; `None` if it ranks as others.
    last_until: Option<Instant>,
    /// The length of the time for which the node ranks last, or did the last time; `None` if it never did.
    pause: Option<Duration>,
    /// The time of the latest failure, or of the end of the last time for which the node ranked last.
    latest: Option<Instant>,
}

/// Returns true if kubelet refused this pod: it has failed at admission, without having been started.
pub(super) fn is_refused_by_kubelet(pod: &Pod) -> bool {
    let reason = pod.status.reason.as_deref().unwrap_or_default();
    pod.status.phase.as_deref() == Some("Failed") && is_refusal_of_kubelet(reason)
}

impl FailingNodes {
    /// Notes a failed pod, whose time is that of the next [`Self::advance`].
    pub(super) fn note_failure(&mut self, node: &str, uid: &str) {
        self.uncounted.push((node.into(), uid.into()));
    }

    /// Counts the failure of a pod at the time `now`. A node with enough of them ranks last from now on.
    pub(super) fn count_failure(&mut self, node: &str, uid: &str, now: Instant) {
        let failing = self.nodes.entry(node.into()).or_default();
        // The watch shows a failed pod once more with each change of its object.
        if failing.failures.iter().any(|(failed, _)| **failed == *uid) {
            return;
        }
        let failures = &mut failing.failures;
        failures.retain(|(_, at)| now.saturating_duration_since(*at) < WINDOW);
        failures.push_back((uid.into(), now));
        if failures.len() > FAILURES {
            failures.pop_front();
        }
        failing.latest = Some(now);
        // A node that ranked last before does so again by its next failure.
        if failing.last_until.is_none() && (failing.failures.len() >= FAILURES || failing.pause.is_some()) {
            let pause = failing.pause.map_or(FIRST_PAUSE, |pause| pause * 2);
            let pause = pause.min(LONGEST_PAUSE);
            (failing.pause, failing.last_until) = (Some(pause), now.checked_add(pause));
            tracing::warn!(node, pause = ?pause, "kubelet refuses pods on this node again and again: it ranks last for a while");
        }
        self.end_pauses(now);
    }

    pub(super) fn remove(&mut self, node: &str) {
        if let Some(failing) = self.nodes.remove(node) {
            self.n_ranking_last -= usize::from(failing.last_until.is_some());
        }
    }

    /// Returns true if [`Self::advance`] has something to do.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        !self.uncounted.is_empty() || self.next.is_some_and(|next| next <= now)
    }

    /// Counts the failures that watches have shown since the last call, and ends the time to rank last where it is over.
    pub(super) fn advance(&mut self, now: Instant) {
        for (node, uid) in std::mem::take(&mut self.uncounted) {
            self.count_failure(&node, &uid, now);
        }
        if self.next.is_some_and(|next| next <= now) {
            self.end_pauses(now);
        }
    }

    /// Ends the time for which nodes rank last where it is over, and forgets nodes without failures for long.
    fn end_pauses(&mut self, now: Instant) {
        for failing in self.nodes.values_mut() {
            if failing.last_until.is_some_and(|until| until <= now) {
                failing.last_until = None;
                failing.failures.clear();
                failing.latest = Some(now);
            }
        }
        let is_recent = |latest| now.saturating_duration_since(latest) < FORGOTTEN_AFTER;
        self.nodes
            .retain(|_, failing| failing.last_until.is_some() || failing.latest.is_some_and(is_recent));
        (self.n_ranking_last, self.next) = (0, None);
        for failing in self.nodes.values() {
            self.n_ranking_last += usize::from(failing.last_until.is_some());
            let forgotten = failing.latest.and_then(|at| at.checked_add(FORGOTTEN_AFTER));
            let next = [self.next, failing.last_until.or(forgotten)];
            self.next = next.into_iter().flatten().min();
        }
    }

    #[inline]
    pub(super) fn ranks_last(&self, node: &str) -> bool {
        // Filters ask about every node, and in most clusters none fails.
        if self.n_ranking_last == 0 {
            return false;
        }
        let failing = self.nodes.get(node);
        failing.is_some_and(|failing| failing.last_until.is_some())
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::json;

    use super::*;

    #[test]
    fn a_failing_node_is_ranked_last_for_longer_each_time() {
        let (mut failing, start) = (FailingNodes::default(), Instant::now());
        for uid in ["a", "a", "b"] {
            failing.count_failure("n1", uid, start);
        }
        assert!(!failing.ranks_last("n1"), "the same pod counts once");
        failing.note_failure("n1", "c");
        assert!(failing.is_due(start));
        failing.advance(start);
        assert!(failing.ranks_last("n1") && !failing.ranks_last("n2"));
        assert_eq!(failing.n_ranking_last, 1);
        let back = start + FIRST_PAUSE;
        assert!(!failing.is_due(back.checked_sub(Duration::from_secs(1)).unwrap()) && failing.is_due(back));
        failing.advance(back);
        assert!(!failing.ranks_last("n1"));
        failing.count_failure("n1", "d", back);
        failing.advance(back + FIRST_PAUSE);
        assert!(failing.ranks_last("n1"), "twice as long");
        failing.advance(back + FIRST_PAUSE * 2);
        assert!(!failing.ranks_last("n1"));
    }

    #[test]
    fn failures_long_ago_are_forgotten() {
        let (mut failing, start) = (FailingNodes::default(), Instant::now());
        for (nth, uid) in ["a", "b", "c", "d"].into_iter().enumerate() {
            failing.count_failure("n1", uid, start + WINDOW * u32::try_from(nth).unwrap() / 2);
        }
        assert_eq!(failing.n_ranking_last, 0, "never three in a window");
        failing.advance(start + WINDOW * 2 + FORGOTTEN_AFTER);
        assert!(failing.nodes.is_empty() && failing.next.is_none());
        for uid in ["a", "b", "c"] {
            failing.count_failure("n1", uid, start);
        }
        failing.remove("n1");
        assert_eq!(failing.n_ranking_last, 0);
    }

    #[rstest]
    #[case("Failed", "UnexpectedAdmissionError", true)]
    #[case("Failed", "OutOfaliyun.com/gpu-mem", true)]
    #[case("Failed", "TopologyAffinityError", true)]
    #[case("Failed", "Evicted", false)]
    #[case("Running", "UnexpectedAdmissionError", false)]
    fn reasons_of_kubelet_admission_count_as_failures(
        #[case] phase: &str,
        #[case] reason: &str,
        #[case] expected: bool,
    ) {
        let pod: Pod = serde_json::from_value(json!({"status": {"phase": phase, "reason": reason}})).unwrap();
        assert_eq!(is_refused_by_kubelet(&pod), expected);
    }
}
