//! The rooms that are being made, the last answer about each waiting pod, and the evictions of the last hour.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use super::hold::Hold;
use super::refused_pods::RefusedPods;
use super::writes::WRITE_LIMIT;
use crate::bind::PodId;

/// The time within which the number of evictions is limited.
const HOUR: Duration = Duration::from_secs(3600);

/// Time after which a pod for which no room can be made is looked at again: other pods have their turn meanwhile.
const LOOKED_AT_AGAIN: Duration = Duration::from_secs(30);

/// Time after which a pod is looked at again whose state was changing.
const LOOKED_AT_SOON: Duration = Duration::from_secs(3);

/// Time for which a pod rests whose plan the watch did not show in time: it may show the nomination yet.
const RESTS_FOR: Duration = Duration::from_secs(30);

/// Time for which the answer about a pod is kept that waits, and that filters have not refused again.
const REMEMBERED_FOR: Duration = Duration::from_secs(600);

/// The rooms that are being made, and what is known of the pods that wait for one.
#[derive(Debug, Default)]
pub(crate) struct Rooms {
    pub(crate) held: BTreeMap<Box<str>, Hold>,
    /// The last answer about each waiting pod, by UID, with the time of the answer.
    verdicts: FxHashMap<Box<str>, (Verdict, Instant)>,
    /// True if the last turn was the most important pod's.
    is_by_priority: bool,
    /// The nodes on which the API server refused evictions for a pod when they were tried last, by UID of the pod.
    pub(super) refusing: FxHashMap<Box<str>, BTreeSet<Box<str>>>,
    /// The times since which pods fit on a node without an eviction, at once or when pods have ended that are leaving.
    free_since: FxHashMap<Box<str>, Instant>,
    eviction_times: VecDeque<Instant>,
    /// The evictions that had no answer, by UID of the evicted pod, with the time.
    pub(super) unanswered: BTreeMap<Box<str>, (RoomEviction, Instant)>,
}

#[derive(Clone, Debug)]
pub(super) struct RoomEviction {
    pub(super) victim: PodId,
    pub(super) preemptor: PodId,
    pub(super) priority: i32,
    pub(super) node: Box<str>,
    /// The memory that the victim holds of each GPU, by minor number.
    pub(super) held: BTreeMap<u32, u64>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Verdict {
    /// The outcome as metrics count it; `None` if they do not.
    pub(super) outcome: Option<&'static str>,
    pub(super) text: String,
    pub(super) event: Option<String>,
    /// The time before which no further room is made for the pod.
    pub(super) rests_until: Option<Instant>,
}

impl Verdict {
    pub(super) fn new(outcome: Option<&'static str>, text: impl Into<String>) -> Self {
        Self {
            outcome,
            text: text.into(),
            event: None,
            rests_until: None,
        }
    }

    /// No permitted eviction helps.
    pub(super) fn no_victims(n_searched: usize) -> Self {
        let why = if n_searched == 0 {
            "no node that kube-scheduler asked about last has a pod that may be evicted for it".to_owned()
        } else {
            format!(
                "evictions of pods that may be evicted for it help on none of the {n_searched} nodes that were searched"
            )
        };
        let text = format!("The scheduler makes no room for it: {why}.");
        Self::new(Some("no_victims"), text)
    }

    /// Pods are leaving that make enough room.
    pub(super) fn waits(node: &str) -> Self {
        let text = format!(
            "It fits on {node} as soon as pods have ended that are leaving, so that no pod is evicted for it."
        );
        Self::new(None, text)
    }

    pub(super) fn dropped(why: &'static str) -> Self {
        Self::new(None, format!("A plan to make room for it was dropped: {why}."))
    }

    /// The plan was dropped before an eviction, and the watch has not shown its nomination.
    pub(super) fn withdrawn(why: &'static str, now: Instant) -> Self {
        Self {
            rests_until: Some(now + RESTS_FOR),
            ..Self::dropped(why)
        }
    }
}

impl Rooms {
    pub(crate) fn note_bound(&mut self, uid: &str, now: Instant) {
        if let Some(hold) = self.held.get_mut(uid) {
            hold.bound_at = Some(now);
        }
    }

    /// The node of each hold of another pod, with the pods that free the room.
    pub(crate) fn of_others(&self, uid: &str) -> impl Iterator<Item = (&str, &[placement::OwnerId])> {
        let others = self.held.values().filter(move |hold| hold.pod.uid != uid);
        others.map(|hold| (&*hold.node, &*hold.freeing))
    }

    /// Forgets everything but the evictions of the last hour; returns the UIDs of the pods that room was being made for.
    pub(super) fn clear(&mut self) -> Vec<Box<str>> {
        self.verdicts.clear();
        self.refusing.clear();
        self.free_since.clear();
        std::mem::take(&mut self.held).into_keys().collect()
    }

    /// Keeps the answer about a pod; returns true if it differs from the last one.
    pub(super) fn keep_verdict(&mut self, uid: &str, verdict: Verdict, now: Instant) -> bool {
        let last = self.verdicts.get(uid);
        let differs = last.is_none_or(|(last, _)| *last != verdict);
        self.verdicts.insert(uid.into(), (verdict, now));
        differs
    }

    pub(super) fn reword(&mut self, uid: &str, by: Verdict) {
        if let Some((verdict, _)) = self.verdicts.get_mut(uid) {
            verdict.text = by.text;
        }
    }

    /// Notes that a pod was evicted for another; returns true if it is the first one of a plan.
    pub(super) fn note_first_eviction(&mut self, uid: &str) -> bool {
        let verdict = self.verdicts.get_mut(uid);
        verdict.is_some_and(|(verdict, _)| verdict.outcome.replace("evicted").is_none())
    }

    /// Returns true if the answer about a pod is too new for another search, or the pod rests.
    pub(super) fn has_new_verdict(&self, uid: &str, now: Instant) -> bool {
        let Some((verdict, at)) = self.verdicts.get(uid) else {
            return false;
        };
        // Answers without an outcome are about a state that is changing.
        let lasts = match verdict.outcome {
            Some(_) => LOOKED_AT_AGAIN,
            None => LOOKED_AT_SOON,
        };
        self.is_resting(uid, now) || now.saturating_duration_since(*at) < lasts
    }

    /// Returns true if a plan for the pod has failed such that no other is made for a while.
    pub(super) fn is_resting(&self, uid: &str, now: Instant) -> bool {
        let verdict = self.verdicts.get(uid);
        let until = verdict.and_then(|(verdict, _)| verdict.rests_until);
        until.is_some_and(|until| now < until)
    }

    /// Begins a turn; returns true if it is the most important pod's, and false if it is that of the pod whose last turn is
    /// longest ago.
    pub(super) const fn begin_turn(&mut self) -> bool {
        self.is_by_priority = !self.is_by_priority;
        self.is_by_priority
    }

    pub(super) fn time_of_verdict(&self, uid: &str) -> Option<Instant> {
        Some(self.verdicts.get(uid)?.1)
    }

    /// Forgets the answers about pods that do not wait any more, and that no room is being made for.
    pub(super) fn retain_verdicts(
        &mut self,
        refused: &RefusedPods,
        now: Instant,
        waits: impl Fn(&str) -> bool,
    ) {
        let held = &self.held;
        self.verdicts.retain(|uid, (_, at)| {
            // The answer about a pod that fits for a moment stays, so that the same one is not taken for a new one later.
            let is_new = now.saturating_duration_since(*at) < REMEMBERED_FOR;
            held.contains_key(uid) || ((is_new || refused.contains(uid)) && waits(uid))
        });
        self.refusing.retain(|uid, _| refused.contains(uid));
        self.free_since.retain(|uid, _| refused.contains(uid));
    }

    /// Notes whether a pod needs no eviction; returns for how long it has needed none.
    pub(super) fn free_for(&mut self, uid: &str, is_free: bool, now: Instant) -> Duration {
        if !is_free {
            self.free_since.remove(uid);
            return Duration::ZERO;
        }
        let since = *self.free_since.entry(uid.into()).or_insert(now);
        now.saturating_duration_since(since)
    }

    pub(crate) fn verdict(&self, uid: &str) -> Option<&str> {
        Some(&self.verdicts.get(uid)?.0.text)
    }

    pub(super) fn note_evicted(&mut self, uid: &str, now: Instant) {
        self.unanswered.remove(uid);
        self.eviction_times.push_back(now);
    }

    /// Takes the evictions without an answer that have been carried out, as the watch shows.
    pub(super) fn take_carried_out(&mut self, is_going: impl Fn(&str) -> bool) -> Vec<RoomEviction> {
        let going = self.unanswered.keys().filter(|uid| is_going(uid));
        let going: Vec<Box<str>> = going.cloned().collect();
        let evictions = going.iter().filter_map(|uid| self.unanswered.remove(uid));
        evictions.map(|(eviction, _)| eviction).collect()
    }

    /// The pods whose evictions had no answer and are certainly over, carried out or not.
    pub(super) fn given_up(&self, now: Instant) -> Vec<PodId> {
        let unanswered = self.unanswered.values();
        let over = unanswered.filter(|(_, at)| now.saturating_duration_since(*at) >= WRITE_LIMIT);
        over.map(|(eviction, _)| eviction.victim.clone()).collect()
    }

    /// The number of pods that may still be evicted within this hour. Evictions that are tried again, and those without an
    /// answer, count as if they had been carried out.
    pub(super) fn n_left(&mut self, per_hour: usize, now: Instant) -> usize {
        let is_past = |at: &Instant| now.saturating_duration_since(*at) >= HOUR;
        while self.eviction_times.front().is_some_and(is_past) {
            self.eviction_times.pop_front();
        }
        self.unanswered.retain(|_, (_, at)| !is_past(at));
        let pending = self.held.values().flat_map(|hold| &hold.pending);
        let pending = pending.filter(|victim| !self.unanswered.contains_key(&*victim.pod.uid));
        per_hour.saturating_sub(self.eviction_times.len() + self.unanswered.len() + pending.count())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each of many waiting pods has an answer, and kube-scheduler asks about none of them again.
    #[test]
    fn answers_are_forgotten() {
        let (mut rooms, began) = (Rooms::default(), Instant::now());
        for at in 0..3000 {
            let now = began + Duration::from_secs(at);
            rooms.keep_verdict(&format!("uid-{at}"), Verdict::no_victims(0), now);
            rooms.retain_verdicts(&RefusedPods::default(), now, |_| true);
        }
        assert_eq!(rooms.verdicts.len(), 600);
    }
}
