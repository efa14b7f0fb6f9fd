//! Room kept for pods that a filter left one node for, until they are bound or the hint has grown old.
//!
//! kube-scheduler binds in the background, so the next pod is filtered before this one is bound.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use placement::{Hints, NodeId, OwnerId};
use rustc_hash::FxHashMap;

use super::{Index, NodeAsk};

/// Most hints that are out at one time.
const MAX_HINTS: usize = 4096;

/// When hints end.
#[derive(Debug)]
pub(super) struct HintQueue {
    ttl: Duration,
    ends: FxHashMap<OwnerId, Instant>,
    /// In the order in which they end; an entry that `ends` does not bear out is of a hint that is gone.
    queue: VecDeque<(Instant, OwnerId)>,
}

impl HintQueue {
    pub(super) fn new(ttl: Duration) -> Self {
        Self { ttl, ends: FxHashMap::default(), queue: VecDeque::new() }
    }

    /// Forgets when a hint ends; the fleet forgets the hint itself when the pod is bound or gone.
    pub(super) fn remove(&mut self, uid: &str) {
        self.ends.remove(uid);
    }

    fn insert(&mut self, owner: OwnerId, end: Instant) {
        self.ends.insert(owner.clone(), end);
        self.queue.push_back((end, owner));
    }

    /// Takes out the first hint if it has ended by `now`, or there are too many.
    fn pop(&mut self, now: Instant) -> Option<OwnerId> {
        loop {
            let (end, owner) = self.queue.front()?;
            let is_live = self.ends.get(owner) == Some(end);
            if is_live && *end > now && self.ends.len() < MAX_HINTS {
                return None;
            }
            let (_, owner) = self.queue.pop_front()?;
            if is_live {
                self.ends.remove(&owner);
                return Some(owner);
            }
        }
    }
}

impl Index {
    /// Whether hints have grown old.
    pub fn has_expired_hints(&self, now: Instant) -> bool {
        self.hints.queue.front().is_some_and(|(end, _)| *end <= now)
    }

    /// Whether this pod has a hint.
    pub fn is_hinted(&self, uid: &str) -> bool {
        self.hints.ends.contains_key(uid)
    }

    /// Forgets hints that have grown old.
    pub fn expire_hints(&mut self, now: Instant) {
        while let Some(owner) = self.hints.pop(now) {
            self.fleet.unhint(owner.as_str());
        }
    }

    /// Keeps room for a pod on the only node that it fits.
    pub fn hint(&mut self, node: NodeId, ask: &NodeAsk<'_>, now: Instant) {
        self.unhint(ask.uid);
        self.expire_hints(now);
        let choice = self.fleet.choose(node, &ask.request, self.policies.device, Hints::RespectOthers(ask.uid));
        let (Ok(placement), Some(end)) = (choice, now.checked_add(self.hints.ttl)) else { return };
        let owner = self.owner(ask.uid);
        if self.fleet.hint(&owner, node, placement) {
            self.hints.insert(owner, end);
        }
    }

    /// Forgets a pod's hint.
    pub fn unhint(&mut self, uid: &str) {
        self.hints.remove(uid);
        self.fleet.unhint(uid);
    }
}
