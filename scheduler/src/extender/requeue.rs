//! Makes kube-scheduler try refused pods again when it sees no event that could help them: without one it keeps a refused pod
//! aside for five minutes. Two cases:
//!
//! - **The pod was refused for a sample** (`percentageOfNodesToScore`), although another node may have room: the texts of its
//!   refusals alternate (`SampleRetries`).
//! - **Room opens without an event**, as when a hint (room kept for a pod that is not bound yet) expires or a Device object
//!   changes: it is announced by a write to an object that kube-scheduler watches ([`Room`]), if a pod was refused before it
//!   opened (`WaitingPods`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use tokio::time::{MissedTickBehavior, interval};
use tracing::{debug, warn};

use super::recent_pods::RecentPods;
use super::{Extender, now, recheck};
use crate::index::Openings;
use crate::room::{AnnounceError, Room};

/// The most refused pods whose texts alternate. When one of them is bound, kube-scheduler sees that event and tries all others.
const MAX_RETRIED: usize = 64;

/// A pod that was not tried again for as long gives way to others: back-offs are 10 s at most unless configured otherwise.
const RETRIED_WITHIN: Duration = Duration::from_secs(60);

/// The least number of nodes in a sample: kube-scheduler asks about all nodes if there are fewer.
pub(super) const MIN_SAMPLE: usize = 100;

/// Suffixes of one node's text, in turn.
const SUFFIXES: [&str; 2] = [
    " (a node that was not asked about has room: trying again)",
    " (a node that was not asked about has room: trying once more)",
];

/// The most waiting pods that are tracked one by one.
const MAX_WAITING: usize = 4096;

/// The least time between two announcements.
const ANNOUNCEMENT_INTERVAL: Duration = Duration::from_secs(1);

/// The time within which kube-scheduler tries a refused pod again after an event: its longest back-off, and a margin.
const TRIED_WITHIN: Duration = Duration::from_secs(15);

/// The time within which a watch shows a change that kube-scheduler has seen, also on a machine under load.
const SHOWN_WITHIN: Duration = Duration::from_secs(5);

/// Time between two looks at whether room has opened.
const POLL: Duration = Duration::from_millis(250);

/// Pods that were refused for a sample of the nodes and that another node has room for.
///
/// kube-scheduler writes the text of a refusal into the pod's condition, sees that update as an event of the pod, and tries the
/// pod again after its back-off; if the condition has that text already, it writes nothing. kube-scheduler 1.33 and later does
/// not wait for the back-off while it has nothing else to do, and may try a pod fifty times a second. That finds the node that
/// samples missed, and must end: after a number of refusals in a row the text is constant until room opens.
#[derive(Debug, Default)]
pub(super) struct SampleRetries {
    pods: FxHashMap<Box<str>, Retry>,
    /// A hash of the nodes of each pod's last refusal.
    pub(super) samples: RecentPods<u64>,
}

/// The last refusal of a pod for a sample.
#[derive(Clone, Copy, Debug)]
struct Retry {
    at: Instant,
    /// Selects one of the two suffixes.
    is_odd: bool,
    /// The number of such refusals in a row, this one included.
    n_in_row: usize,
    /// The number of times room had opened at the refusal.
    n_openings: u64,
}

impl SampleRetries {
    /// The number of refusals in a row after which the text stays constant: twice as many as it takes to go through all nodes,
    /// and a few more, since searches for other pods move the beginning of the next sample too.
    pub(super) fn limit(n_nodes: usize, n_asked: usize) -> usize {
        2 * n_nodes.div_ceil(n_asked.max(1)) + 8
    }

    /// Notes a refusal for a sample after room has opened `n_openings` times. Returns the suffix of the refusal's text, unless
    /// there have been `limit` of them in a row, or too many other pods have one.
    pub(super) fn refuse(
        &mut self,
        uid: &str,
        limit: usize,
        n_openings: u64,
        now: Instant,
    ) -> Option<&'static str> {
        let is_recent = |retry: &Retry| now.saturating_duration_since(retry.at) < RETRIED_WITHIN;
        let last = self.pods.get(uid).copied();
        if last.is_none() && self.pods.len() >= MAX_RETRIED {
            // Deletions of pods are not reported here, so old entries give way.
            self.pods.retain(|_, retry| is_recent(retry));
            if self.pods.len() >= MAX_RETRIED {
                return None;
            }
        }
        // After room has opened, or after a long time, kube-scheduler had a cause of its own to try the pod: the count restarts.
        let n_in_row = match last {
            Some(last) if last.n_openings == n_openings && is_recent(&last) => last.n_in_row + 1,
            _ => 1,
        };
        let retry = Retry {
            at: now,
            is_odd: last.is_some_and(|last| !last.is_odd),
            n_in_row,
            n_openings,
        };
        self.pods.insert(uid.into(), retry);
        let [even, odd] = SUFFIXES;
        // Beyond the limit the text stays the same, so that kube-scheduler writes no condition and leaves the pod alone.
        (n_in_row <= limit).then_some(if retry.is_odd { odd } else { even })
    }

    /// Forgets a pod that is bound, or that no node has room for.
    pub(super) fn forget(&mut self, uid: &str) {
        self.pods.remove(uid);
    }

    /// Returns true if the nodes of a refusal may be a sample. The same nodes twice in a row are all that pass
    /// kube-scheduler's own filters, because a sample begins where the last one ended.
    pub(super) fn is_sample(&mut self, uid: &str, hash_of_nodes: u64) -> bool {
        self.samples.insert(uid, hash_of_nodes) != Some(hash_of_nodes)
    }
}

/// A refused pod, or the first one of those that are not tracked one by one.
#[derive(Clone, Copy, Debug)]
struct WaitingPod {
    /// The openings that the refusal had taken into account.
    seen: Openings,
    at: Instant,
    /// True if kube-scheduler tried the pod for no cause that this process knows: between its last two refusals no room opened,
    /// and none was announced.
    is_early: bool,
    n_announced: u64,
    /// The time at which the poll first found that room had opened after the refusal.
    behind_since: Option<Instant>,
    /// True if a sweep has found the pod and no watch had shown it.
    is_unshown: bool,
}

/// Refused pods that are not bound yet, and the announcements for them.
#[derive(Debug, Default)]
pub(super) struct WaitingPods {
    pods: FxHashMap<Box<str>, WaitingPod>,
    /// The first of the pods that are not tracked one by one.
    others: Option<WaitingPod>,
    n_announced: u64,
    paused_until: Option<Instant>,
}

impl WaitingPods {
    /// Notes a refusal of a pod that took these openings into account. Returns true if no room has opened since its last refusal.
    pub(super) fn refuse(&mut self, uid: &str, seen: Openings, now: Instant) -> bool {
        let n_announced = self.n_announced;
        let (mut is_repeated, mut is_early) = (false, false);
        if let Some(last) = self.pods.get(uid) {
            is_repeated = last.seen.all == seen.all;
            // The evaluation after a recheck belongs to the same attempt.
            let is_recheck = now.saturating_duration_since(last.at) <= 2 * recheck::HOLD;
            is_early = (last.is_early || !is_recheck) && (last.seen, last.n_announced) == (seen, n_announced);
        }
        let waiting = WaitingPod {
            seen,
            at: now,
            is_early,
            n_announced,
            behind_since: None,
            is_unshown: false,
        };
        if let Some(known) = self.pods.get_mut(uid) {
            *known = waiting;
        } else if self.pods.len() < MAX_WAITING {
            self.pods.insert(uid.into(), waiting);
        } else {
            // Room has opened most often since the first of these refusals, so that it stands for all of them.
            self.others.get_or_insert(waiting);
        }
        is_repeated
    }

    pub(super) fn forget(&mut self, uid: &str) {
        self.pods.remove(uid);
    }

    /// Forgets the pods that two sweeps in a row have found and no watch shows: they are gone, and no room is announced for them.
    pub(super) fn sweep(&mut self, is_shown: impl Fn(&str) -> bool) {
        self.pods.retain(|uid, waiting| {
            let was_unshown = std::mem::replace(&mut waiting.is_unshown, !is_shown(uid));
            !(was_unshown && waiting.is_unshown)
        });
    }

    /// Forgets all pods, since another replica leads.
    fn clear(&mut self) {
        *self = Self {
            paused_until: self.paused_until,
            ..Self::default()
        };
    }

    fn is_due(&mut self, openings: Openings, now: Instant) -> bool {
        // A new leader announces once without a cause: the hints of the leader before, for which pods were refused, are gone.
        let mut is_due = self.n_announced == 0;
        for waiting in self.pods.values_mut().chain(&mut self.others) {
            // Not `any`: each pod notes the time at which it first was behind, also if another is due.
            is_due |= waiting.is_due(openings, now);
        }
        is_due && self.paused_until.is_none_or(|until| until <= now)
    }

    /// Notes an announcement, and forgets the pods that were refused before its openings: kube-scheduler tries them again.
    fn announced(&mut self, openings: Openings, now: Instant) {
        self.pods.retain(|_, waiting| !waiting.seen.is_before(openings));
        self.others.take_if(|waiting| waiting.seen.is_before(openings));
        self.n_announced += 1;
        self.pause(ANNOUNCEMENT_INTERVAL, now);
    }

    /// Announces nothing for this time, and for `ANNOUNCEMENT_INTERVAL` at least.
    fn pause(&mut self, time: Duration, now: Instant) {
        self.paused_until = now.checked_add(time.max(ANNOUNCEMENT_INTERVAL));
    }
}

impl WaitingPod {
    /// Returns true if kube-scheduler will not try the pod again soon without an announcement: room has opened without an event,
    /// or the pod was not tried in time after room opened.
    fn is_due(&mut self, openings: Openings, now: Instant) -> bool {
        // kube-scheduler sees no event for this room, and does not try the pod by itself.
        if self.seen.silent < openings.silent {
            return true;
        }
        if self.seen.all < openings.all {
            let since = *self.behind_since.get_or_insert(now);
            // An attempt without a cause that this process knows, seconds before the room, was most likely made for that room.
            let was_tried_for_it = self.is_early && since.saturating_duration_since(self.at) < SHOWN_WITHIN;
            // Not tried in time: kube-scheduler saw the event, and tried the pod, before the watch here had shown the room.
            return was_tried_for_it || now.saturating_duration_since(since) >= TRIED_WITHIN;
        }
        false
    }
}

/// Announces room while this replica leads, until the process ends. Ends expired hints too, since the room of these opens even
/// if no request comes.
pub async fn announce_room(extender: Arc<Extender>, room: Room) {
    let mut polls = interval(POLL);
    polls.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut failure = None;
    loop {
        polls.tick().await;
        // Without filter requests no other code ends expired hints.
        if extender.index.read().is_due(now()) {
            extender.index.write().tick(now());
        }
        // This replica does not lead: the one that does refuses the pods now, and announces room to them.
        if extender.leadership().check(now()).is_err() {
            extender.memory().waiting.clear();
            continue;
        }
        // Openings that come after this are for the next announcement.
        let openings = {
            let index = extender.index.read();
            index.ready().map(|()| index.openings())
        };
        let Ok(openings) = openings else { continue };
        if !extender.memory().waiting.is_due(openings, now()) {
            continue;
        }
        match room.announce().await {
            Ok(()) => {
                extender.memory().waiting.announced(openings, now());
                extender.metrics.count_announcement();
                debug!(openings.all, openings.silent, "announced that room has opened");
                failure = None;
            }
            Err(error) => {
                extender.memory().waiting.pause(error.pause(), now());
                report(&error, &mut failure);
            }
        }
    }
}

/// Logs a failure, unless the last announcement failed for the same reason.
fn report(error: &AnnounceError, last: &mut Option<String>) {
    let text = error.to_string();
    if last.as_ref() != Some(&text) {
        warn!(
            error = text,
            "refused pods may wait for up to five minutes for room that opens without an event"
        );
        *last = Some(text);
    }
}

#[cfg(test)]
mod tests;
