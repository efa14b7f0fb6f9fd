//! Room kept for pods that a filter left one node for, until they are bound or the hint has grown old.
//!
//! kube-scheduler binds in the background, so the next pod is filtered before this one is bound.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use placement::{Hints, NodeId, OwnerId, Placement};
use rustc_hash::FxHashMap;

use super::{Index, NodeAsk};

/// Most hints that are out at one time.
const MAX_HINTS: usize = 4096;

/// When hints end.
#[derive(Debug)]
pub(super) struct HintQueue {
    ttl: Duration,
    ends: FxHashMap<OwnerId, Instant>,
    /// Pods whose hint grew old, and from when on they may have another.
    resting: FxHashMap<OwnerId, Instant>,
    /// In the order in which they began; an entry that `resting` does not bear out has been overtaken.
    rest_queue: VecDeque<(Instant, OwnerId)>,
    /// In the order in which they end; an entry that `ends` does not bear out is of a hint that is gone.
    queue: VecDeque<(Instant, OwnerId)>,
}

impl HintQueue {
    pub(super) fn new(ttl: Duration) -> Self {
        Self { ttl, ends: FxHashMap::default(), queue: VecDeque::new(), resting: FxHashMap::default(), rest_queue: VecDeque::new() }
    }

    /// Forgets when a hint ends; the fleet forgets the hint itself when the pod is bound or gone.
    pub(super) fn remove(&mut self, uid: &str) {
        self.ends.remove(uid);
    }

    fn insert(&mut self, owner: OwnerId, end: Instant, is_renewed: bool) {
        self.ends.insert(owner.clone(), end);
        // A renewed hint has its place in the queue already.
        if !is_renewed {
            self.queue.push_back((end, owner));
        }
    }

    /// When a hint that is put or renewed now ends: a renewed one no later than it would have; `None` if it may not be.
    fn end_of(&self, uid: &str, now: Instant) -> Option<Instant> {
        match self.ends.get(uid) {
            Some(end) => Some(*end),
            None if self.resting.get(uid).is_some_and(|until| *until > now) => None,
            None => now.checked_add(self.ttl),
        }
    }

    /// A pod whose hint has grown old has had its chance: the room is for others for as long again.
    fn rest(&mut self, owner: OwnerId, now: Instant) {
        while let Some((until, _)) = self.rest_queue.front()
            && (*until <= now || self.rest_queue.len() >= MAX_HINTS)
            && let Some((until, owner)) = self.rest_queue.pop_front()
        {
            if self.resting.get(&owner) == Some(&until) {
                self.resting.remove(&owner);
            }
        }
        if let Some(until) = now.checked_add(self.ttl) {
            self.resting.insert(owner.clone(), until);
            self.rest_queue.push_back((until, owner));
        }
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
                if self.ends.remove(&owner).is_some_and(|end| end <= now) {
                    self.rest(owner.clone(), now);
                }
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
        self.expire_hints(now);
        let end = self.hints.end_of(ask.uid, now);
        let is_renewed = self.is_hinted(ask.uid);
        self.unhint(ask.uid);
        let choice = self.fleet.choose(node, ask.devices(), ask.policies.device, Hints::RespectOthers(ask.uid));
        let (Ok(placement), Some(end)) = (choice, end) else { return };
        if placement == Placement::default() {
            return;
        }
        let owner = self.owner(ask.uid);
        if self.fleet.hint(&owner, node, placement) {
            self.hints.insert(owner, end, is_renewed);
        }
    }

    /// Forgets a pod's hint.
    pub fn unhint(&mut self, uid: &str) {
        self.hints.remove(uid);
        self.fleet.unhint(uid);
    }
}
