//! The scheduling queue: the order of pods, and the times at which pods that failed are tried again.
//!
//! Pure: the caller passes the time. As in kube-scheduler, a pod that fits no node waits for an event and then until its back-off
//! has passed; since 1.33 an idle kube-scheduler does not wait for the back-off. After an error a pod waits for its back-off
//! alone. For a pod that an extender refused, any change of the pod is an event, even one of its condition.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use tokio::time::Instant;

use super::preemption::priority;

/// The longest time that a pod waits for an event.
const FLUSH_AFTER: Duration = Duration::from_secs(5 * 60);

/// The part of kube-scheduler's queue that has a pod, or `InFlight` during an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QueuePosition {
    Active,
    Backoff { until: Instant, is_error: bool },
    Unschedulable { since: Instant },
    InFlight,
}

#[derive(Debug)]
struct QueuedPod {
    pod: Arc<Pod>,
    position: QueuePosition,
    attempts: u32,
    /// True if an extender refused a node in the last attempt.
    is_by_extender: bool,
    /// The order among pods of equal priority: the time of arrival or of the last failure, and a serial number.
    turn: (Instant, u64),
    arrival: (Instant, u64),
}

/// Pods without a node, by UID.
#[derive(Debug)]
pub(super) struct Queue {
    entries: HashMap<String, QueuedPod>,
    /// The first and the longest back-off.
    backoff: (Duration, Duration),
    turns: u64,
}

impl Queue {
    pub(super) fn new(initial_backoff: Duration, max_backoff: Duration) -> Self {
        Self {
            entries: HashMap::new(),
            backoff: (initial_backoff, max_backoff),
            turns: 0,
        }
    }

    /// Adds a pod that arrived at `now`, or updates it. A changed spec or metadata wakes the pod; a changed
    /// status only wakes a pod that an extender refused.
    pub(super) fn put(&mut self, uid: &str, pod: Arc<Pod>, now: Instant) {
        let turn = self.next_turn(now);
        let Some(entry) = self.entries.get_mut(uid) else {
            let entry = QueuedPod {
                pod,
                position: QueuePosition::Active,
                attempts: 0,
                is_by_extender: false,
                turn,
                arrival: turn,
            };
            self.entries.insert(uid.to_owned(), entry);
            return;
        };
        // kube-scheduler ignores changes of status, except of a pod that an extender refused: it cannot know what
        // the extender looks at, as extenders name no events that they wait for.
        let changed =
            is_changed(&entry.pod, &pod) || (entry.is_by_extender && entry.pod.status != pod.status);
        entry.pod = pod;
        if changed {
            entry.wake(self.backoff, now);
        }
    }

    pub(super) fn remove(&mut self, uid: &str) {
        self.entries.remove(uid);
    }

    pub(super) fn get(&self, uid: &str) -> Option<&Arc<Pod>> {
        self.entries.get(uid).map(|entry| &entry.pod)
    }

    /// The pod to try now: highest priority first, then the one that waits longest.
    pub(super) fn pop(&mut self, now: Instant) -> Option<(String, Arc<Pod>)> {
        self.activate_due(now);
        let mut positions = self.entries.values().map(|entry| entry.position);
        let is_any_active = positions.any(|position| position == QueuePosition::Active);
        let ready = self.entries.iter_mut().filter(|(_, entry)| match entry.position {
            QueuePosition::Active => true,
            // Since 1.33 (SchedulerPopFromBackoffQ) an idle kube-scheduler does not wait out the back-off of pods that found
            // no node. After an error it does, to spare the API server.
            QueuePosition::Backoff { is_error, .. } => !is_any_active && !is_error,
            QueuePosition::Unschedulable { .. } | QueuePosition::InFlight => false,
        });
        let (uid, entry) = ready.min_by_key(|(_, entry)| (-priority(&entry.pod), entry.turn))?;
        entry.position = QueuePosition::InFlight;
        entry.attempts += 1;
        Some((uid.clone(), Arc::clone(&entry.pod)))
    }

    /// Begins an attempt for each of the pods `uids` that is in no attempt yet; returns these pods by priority and arrival.
    pub(super) fn start_all(&mut self, uids: &[String]) -> Vec<(String, Arc<Pod>)> {
        let mut taken = Vec::new();
        for uid in uids {
            if let Some(entry) = self.entries.get_mut(uid)
                && entry.position != QueuePosition::InFlight
            {
                entry.position = QueuePosition::InFlight;
                entry.attempts += 1;
                let order = (-priority(&entry.pod), entry.arrival);
                taken.push((order, (uid.clone(), Arc::clone(&entry.pod))));
            }
        }
        taken.sort_by_key(|(order, _)| *order);
        taken.into_iter().map(|(_, pod)| pod).collect()
    }

    /// Puts a popped pod back to wait for an event, without counting an attempt.
    pub(super) fn gate(&mut self, uid: &str, now: Instant) {
        if let Some(entry) = self.entries.get_mut(uid) {
            // `pop` has counted an attempt that does not take place.
            entry.attempts = entry.attempts.saturating_sub(1);
            entry.position = QueuePosition::Unschedulable { since: now };
        }
    }

    /// The pods that are not bound, and their UIDs.
    pub(super) fn pods(&self) -> impl Iterator<Item = (&String, &Arc<Pod>)> {
        self.entries.iter().map(|(uid, entry)| (uid, &entry.pod))
    }

    /// Puts a pod that fits no node back, to wait for an event.
    pub(super) fn park(&mut self, uid: &str, is_by_extender: bool, now: Instant) {
        let turn = self.next_turn(now);
        if let Some(entry) = self.entries.get_mut(uid) {
            // AddUnschedulableIfNotPresent renews the timestamp: the pod goes behind others of its priority
            // that arrived meanwhile.
            entry.is_by_extender = is_by_extender;
            entry.position = QueuePosition::Unschedulable { since: now };
            entry.turn = turn;
        }
    }

    /// Puts a pod back after an error, to be tried again after its back-off without an event.
    pub(super) fn retry(&mut self, uid: &str, now: Instant) {
        let turn = self.next_turn(now);
        if let Some(entry) = self.entries.get_mut(uid) {
            entry.position = QueuePosition::Backoff {
                until: now + entry.backoff(self.backoff),
                is_error: true,
            };
            entry.turn = turn;
        }
    }

    pub(super) fn wake_all(&mut self, now: Instant) {
        for entry in self.entries.values_mut() {
            entry.wake(self.backoff, now);
        }
    }

    /// Wakes the pods that an extender refused, after an event that no filter of kube-scheduler itself waits for.
    pub(super) fn wake_refused_by_extenders(&mut self, now: Instant) {
        for entry in self.entries.values_mut().filter(|entry| entry.is_by_extender) {
            entry.wake(self.backoff, now);
        }
    }

    /// The time at which the next pod becomes ready without an event.
    pub(super) fn next_change(&self) -> Option<Instant> {
        let times = self.entries.values().filter_map(|entry| match entry.position {
            QueuePosition::Backoff { until, .. } => Some(until),
            // Even without an event kube-scheduler tries unschedulable pods again after a few minutes.
            QueuePosition::Unschedulable { since } => Some(since + FLUSH_AFTER),
            QueuePosition::Active | QueuePosition::InFlight => None,
        });
        times.min()
    }

    fn activate_due(&mut self, now: Instant) {
        for entry in self.entries.values_mut() {
            let is_due = match entry.position {
                QueuePosition::Backoff { until, .. } => until <= now,
                QueuePosition::Unschedulable { since } => since + FLUSH_AFTER <= now,
                QueuePosition::Active | QueuePosition::InFlight => false,
            };
            if is_due {
                entry.position = QueuePosition::Active;
            }
        }
    }

    /// The turn behind all pods of equal priority that wait now.
    fn next_turn(&mut self, now: Instant) -> (Instant, u64) {
        self.turns += 1;
        (now, self.turns)
    }
}

impl QueuedPod {
    /// The pause before the next attempt, which doubles with each attempt up to a maximum.
    fn backoff(&self, (initial, max): (Duration, Duration)) -> Duration {
        // calculateBackoffDuration: from podInitialBackoffSeconds up to podMaxBackoffSeconds.
        let doublings = self.attempts.saturating_sub(1).min(16);
        initial.saturating_mul(1 << doublings).min(max)
    }

    /// Moves an unschedulable pod to the active pods, or to the back-off if that has not run out.
    fn wake(&mut self, backoff: (Duration, Duration), now: Instant) {
        if let QueuePosition::Unschedulable { since } = self.position {
            // The back-off counts from the failed attempt, so a late event activates the pod at once.
            let until = since + self.backoff(backoff);
            self.position = if until <= now {
                QueuePosition::Active
            } else {
                QueuePosition::Backoff {
                    until,
                    is_error: false,
                }
            };
        }
    }
}

/// Returns true if a pod has changed in a way that may make it schedulable.
fn is_changed(old: &Pod, new: &Pod) -> bool {
    let (before, after) = (&old.metadata, &new.metadata);
    old.spec != new.spec
        || before.labels != after.labels
        || before.annotations != after.annotations
        || before.owner_references != after.owner_references
        || before.finalizers != after.finalizers
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn pod(name: &str, priority: i32) -> Arc<Pod> {
        let spec = json!({"containers": [], "priority": priority});
        Arc::new(serde_json::from_value(json!({"metadata": {"name": name}, "spec": spec})).unwrap())
    }

    fn queue_of(names: &[&str]) -> (Queue, Instant) {
        let (mut queue, now) = (Queue::new(SECOND, 10 * SECOND), Instant::now());
        for name in names {
            queue.put(name, pod(name, 0), now);
        }
        (queue, now)
    }

    fn popped(queue: &mut Queue, now: Instant) -> Option<String> {
        queue.pop(now).map(|(uid, _)| uid)
    }

    #[test]
    fn pods_are_popped_by_priority_then_arrival() {
        let (mut queue, now) = queue_of(&["b", "a"]);
        queue.put("c", pod("c", 7), now);
        let order: Vec<_> = std::iter::from_fn(|| popped(&mut queue, now)).collect();
        assert_eq!(order, ["c", "b", "a"]);
    }

    /// kube-scheduler's watches bring pods while it places another one, which may take seconds if an extender hangs.
    #[test]
    fn a_pod_that_arrived_during_an_attempt_goes_before_the_one_that_failed() {
        let (mut queue, now) = queue_of(&["a"]);
        popped(&mut queue, now);
        queue.retry("a", now + 3 * SECOND);
        queue.put("b", pod("b", 0), now + SECOND);
        let order: Vec<_> = std::iter::from_fn(|| popped(&mut queue, now + 10 * SECOND)).collect();
        assert_eq!(order, ["b", "a"]);
    }

    #[test]
    fn an_unschedulable_pod_waits_for_an_event_and_its_backoff() {
        let (mut queue, now) = queue_of(&["p"]);
        popped(&mut queue, now);
        queue.park("p", false, now);
        assert_eq!(popped(&mut queue, now + 60 * SECOND), None, "no event");
        queue.wake_all(now);
        queue.put("q", pod("q", 0), now);
        assert_eq!(queue.next_change(), Some(now + SECOND));
        let order = [
            popped(&mut queue, now),
            popped(&mut queue, now),
            popped(&mut queue, now),
        ];
        assert_eq!(
            order,
            [Some("q".to_owned()), Some("p".to_owned()), None],
            "back-off is not waited out for nothing"
        );
    }

    #[test]
    fn a_pod_with_an_error_waits_for_its_backoff_even_if_the_queue_is_empty() {
        let (mut queue, now) = queue_of(&["p"]);
        popped(&mut queue, now);
        queue.retry("p", now);
        assert_eq!(
            [popped(&mut queue, now), popped(&mut queue, now + SECOND)],
            [None, Some("p".to_owned())]
        );
    }

    #[test]
    fn an_event_after_the_backoff_activates_a_pod_at_once() {
        let (mut queue, now) = queue_of(&["p"]);
        popped(&mut queue, now);
        queue.park("p", false, now);
        queue.wake_all(now + 2 * SECOND);
        assert_eq!(popped(&mut queue, now + 2 * SECOND), Some("p".to_owned()));
    }

    #[test]
    fn an_unschedulable_pod_is_tried_again_after_five_minutes() {
        let (mut queue, now) = queue_of(&["p"]);
        popped(&mut queue, now);
        queue.park("p", false, now);
        assert_eq!(queue.next_change(), Some(now + FLUSH_AFTER));
        assert_eq!(popped(&mut queue, now + FLUSH_AFTER), Some("p".to_owned()));
    }

    #[test]
    fn backoff_doubles_up_to_its_limit() {
        let (mut queue, mut now) = queue_of(&["p"]);
        let mut waits = Vec::new();
        for _ in 0..6 {
            popped(&mut queue, now).unwrap();
            queue.retry("p", now);
            let until = queue.next_change().unwrap();
            waits.push((until - now).as_secs());
            now = until;
        }
        assert_eq!(waits, [1, 2, 4, 8, 10, 10]);
    }

    /// The extender's pseudo-plugin takes every event of a pod for one that may help, the condition that the loop writes itself
    /// included; it does not wake a pod that other plugins refused.
    #[test]
    fn a_status_update_activates_a_pod_that_an_extender_refused() {
        for (is_by_extender, expected) in [(true, Some("p".to_owned())), (false, None)] {
            let (mut queue, now) = queue_of(&["p"]);
            popped(&mut queue, now);
            queue.park("p", is_by_extender, now);
            let mut next = Pod::clone(&pod("p", 0));
            queue.put("p", Arc::new(next.clone()), now);
            assert_eq!(popped(&mut queue, now + 2 * SECOND), None, "the same again");
            let condition = json!({"type": "PodScheduled", "status": "False", "message": "m"});
            next.status = Some(serde_json::from_value(json!({"conditions": [condition]})).unwrap());
            queue.put("p", Arc::new(next), now);
            assert_eq!(popped(&mut queue, now + 2 * SECOND), expected);
        }
    }

    /// The pseudo-plugin of extenders is registered for every kind of event.
    #[test]
    fn any_event_activates_pods_that_extenders_refused() {
        for (is_by_extender, expected) in [(true, Some("p".to_owned())), (false, None)] {
            let (mut queue, now) = queue_of(&["p"]);
            popped(&mut queue, now);
            queue.park("p", is_by_extender, now);
            queue.wake_refused_by_extenders(now + 2 * SECOND);
            assert_eq!(popped(&mut queue, now + 2 * SECOND), expected);
        }
    }

    #[test]
    fn only_a_spec_update_activates_pods_that_other_plugins_refused() {
        let (mut queue, now) = queue_of(&["p"]);
        let later = now + 2 * SECOND;
        popped(&mut queue, now);
        queue.park("p", false, now);
        let mut next = Pod::clone(&pod("p", 0));
        next.status = Some(
            serde_json::from_value(json!({"conditions": [{"type": "PodScheduled", "status": "False"}]}))
                .unwrap(),
        );
        queue.put("p", Arc::new(next.clone()), later);
        assert_eq!(popped(&mut queue, later), None);
        next.metadata.labels = Some([("a".to_owned(), "b".to_owned())].into());
        queue.put("p", Arc::new(next), later);
        assert_eq!(popped(&mut queue, later), Some("p".to_owned()));
    }
}
