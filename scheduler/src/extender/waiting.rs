//! Refused pods that wait for room, and the times at which kube-scheduler has to be informed that room has opened.
//!
//! Pure: the caller brings the time and the number of openings.
//!
//! kube-scheduler tries a refused pod again when it sees an event. Room that opens without one is announced as soon as a pod
//! was refused before it opened. Whatever opens room, a pod that was refused before is asked about again within its back-off of
//! 10 s; one that is not has missed the event, as when the watch of this process was behind, and the room is announced too.

use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;

use crate::index::Openings;

/// Most pods that have an entry of their own.
const MOST_PODS: usize = 4096;

/// Least time between two announcements.
const SPACING: Duration = Duration::from_secs(1);

/// The time within which kube-scheduler asks about a refused pod after an event: its longest back-off, and some more.
const ASKED_WITHIN: Duration = Duration::from_secs(15);

/// The refusal of a pod, or the first refusal of a pod without an entry of its own.
#[derive(Clone, Copy, Debug)]
struct Refused {
    /// The openings that the refusal had taken into account.
    at: Openings,
    /// The time at which room was first found to have opened since.
    behind_since: Option<Instant>,
}

/// Refused pods that were not bound since, and the announcements for them.
#[derive(Debug)]
pub(super) struct Waiting {
    pods: FxHashMap<Box<str>, Refused>,
    /// The first refusal of a pod without an entry of its own.
    others: Option<Refused>,
    /// True until the first announcement: pods may have been refused by another process, whose hints are lost.
    is_new: bool,
    /// The time before which nothing is announced.
    rests_until: Option<Instant>,
}

impl Default for Waiting {
    fn default() -> Self {
        Self {
            pods: FxHashMap::default(),
            others: None,
            is_new: true,
            rests_until: None,
        }
    }
}

impl Refused {
    /// Returns true if the pod would not be tried again in time without an announcement.
    fn is_due(&mut self, openings: Openings, now: Instant) -> bool {
        if self.at.silent < openings.silent {
            return true;
        }
        if self.at.all < openings.all {
            let since = *self.behind_since.get_or_insert(now);
            return now.saturating_duration_since(since) >= ASKED_WITHIN;
        }
        false
    }
}

impl Waiting {
    /// Notes the refusal of a pod by a state in which room had opened this number of times.
    pub(super) fn refuse(&mut self, uid: &str, at: Openings) {
        let refused = Refused {
            at,
            behind_since: None,
        };
        if let Some(known) = self.pods.get_mut(uid) {
            *known = refused;
        } else if self.pods.len() < MOST_PODS {
            self.pods.insert(uid.into(), refused);
        } else {
            self.others.get_or_insert(refused);
        }
    }

    /// Forgets a pod that is bound.
    pub(super) fn end(&mut self, uid: &str) {
        self.pods.remove(uid);
    }

    /// Forgets all pods, as another replica decides.
    pub(super) fn stand_by(&mut self) {
        *self = Self {
            rests_until: self.rests_until,
            ..Self::default()
        };
    }

    /// Returns true if an announcement is to be made now.
    pub(super) fn is_due(&mut self, openings: Openings, now: Instant) -> bool {
        let refused = self.pods.values_mut().chain(&mut self.others);
        // Every refusal that is behind takes note of the time, whether another is due or not.
        let n_due = refused
            .map(|refused| usize::from(refused.is_due(openings, now)))
            .sum::<usize>();
        (self.is_new || n_due > 0) && self.rests_until.is_none_or(|until| until <= now)
    }

    /// Forgets the pods that were refused before these openings, which are announced: kube-scheduler tries them again.
    pub(super) fn announced(&mut self, openings: Openings, now: Instant) {
        self.pods.retain(|_, refused| !refused.at.is_before(openings));
        self.others.take_if(|refused| refused.at.is_before(openings));
        self.is_new = false;
        self.rest(SPACING, now);
    }

    /// Announces nothing for a while.
    pub(super) fn rest(&mut self, time: Duration, now: Instant) {
        self.rests_until = now.checked_add(time.max(SPACING));
    }
}

#[cfg(test)]
mod tests;
