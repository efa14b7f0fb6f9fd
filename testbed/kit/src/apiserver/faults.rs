//! Faults that tests inject into the HTTP layer: requests that are delayed, refused or lost, and watches that
//! are cut or held back.
//!
//! In-process callers ([`super::ApiObjects`]) meet no faults.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rand::RngExt;
use rand::rngs::StdRng;
use tokio::sync::{broadcast, watch};

use super::access::UsedAccess;
use super::status::ApiError;
use crate::dice::dice;

/// The effect of a fault on a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The request is handled after a delay.
    Delay(Duration),
    /// The request is refused with this HTTP status.
    Refuse(u16),
    /// The request is refused with this HTTP status and a Retry-After in seconds.
    RefuseUntil(u16, u32),
    /// The connection closes before the request is handled.
    DropConnection,
    /// The request is handled and the connection closes instead of a reply.
    DropReply,
}

/// Selects the requests that a fault meets. Every condition that is set has to hold; an empty text accepts everything.
#[derive(Clone, Debug, Default)]
pub struct Matching {
    user: String,
    verb: String,
    resource: String,
    name: String,
    percent: Option<u8>,
    /// The number of requests that the fault still meets.
    times: Option<u64>,
}

/// Returns true if a condition accepts this text.
fn accepts(wanted: &str, found: &str) -> bool {
    wanted.is_empty() || wanted == found
}

impl Matching {
    /// Every request for any resource; the other methods narrow the selection.
    pub fn anything() -> Self {
        Self::default()
    }

    /// Requests with this RBAC verb for a resource in RBAC's words, such as `pods`, `pods/binding`, or `*` for any.
    pub fn requests(verb: &str, resource: &str) -> Self {
        Self {
            verb: verb.to_owned(),
            resource: resource.trim_matches('*').to_owned(),
            ..Self::default()
        }
    }

    /// Only the requests of this user.
    #[must_use]
    pub fn user(mut self, name: &str) -> Self {
        name.clone_into(&mut self.user);
        self
    }

    /// Only requests for the object of this name.
    #[must_use]
    pub fn name(mut self, name: &str) -> Self {
        name.clone_into(&mut self.name);
        self
    }

    /// Only a random part of the requests that the other conditions select.
    #[must_use]
    pub fn percent(mut self, percent: u8) -> Self {
        self.percent = Some(percent);
        self
    }

    /// Only the first `times` matching requests.
    #[must_use]
    pub fn times(mut self, times: u64) -> Self {
        self.times = Some(times);
        self
    }

    /// Returns true if a rule with these conditions may apply to a request for the object of this name.
    fn accepts(&self, request: &UsedAccess, name: &str) -> bool {
        let resource = match request.subresource.as_str() {
            "" => request.resource.clone(),
            subresource => format!("{}/{subresource}", request.resource),
        };
        accepts(&self.user, &request.user)
            && accepts(&self.verb, &request.verb)
            && accepts(&self.resource, &resource)
            && accepts(&self.name, name)
    }
}

/// An injected fault, and the requests that it meets.
#[derive(Debug)]
struct FaultRule {
    matching: Matching,
    fault: Fault,
    n_hits: Arc<AtomicU64>,
    dice: StdRng,
}

impl FaultRule {
    /// Returns true if the fault meets a request: by chance where only a percentage of the requests is selected.
    fn meets(&mut self, request: &UsedAccess, name: &str) -> bool {
        let percent = self.matching.percent.unwrap_or(100);
        self.matching.times != Some(0)
            && self.matching.accepts(request, name)
            && self.dice.random_range(0..100) < percent
    }
}

/// A handle to an injected fault, which stays until [`Self::remove`] or [`Faults::clear`].
#[derive(Debug)]
pub struct Injected {
    id: u64,
    faults: Faults,
    n_hits: Arc<AtomicU64>,
}

impl Injected {
    /// The number of requests that the fault has met.
    pub fn hits(&self) -> u64 {
        self.n_hits.load(Ordering::Acquire)
    }

    /// Ends the fault.
    pub fn remove(self) {
        self.faults.0.rules.lock().remove(&self.id);
    }
}

/// Holds back the events of watches until it is dropped.
#[derive(Debug)]
pub struct HeldWatches {
    watches: WatchSelection,
    faults: Faults,
}

/// Selects the watches that a fault meets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WatchSelection {
    /// Plural resource name; empty for all resources.
    resource: String,
    /// Name of the user; empty for all users.
    user: String,
}

impl WatchSelection {
    /// Returns true if a watch of this resource by this user is selected.
    pub(crate) fn includes(&self, resource: &str, user: &str) -> bool {
        accepts(&self.resource, resource) && accepts(&self.user, user)
    }
}

/// An order to the running watches that it selects. Watches that begin later do not follow it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WatchOrder {
    /// The connection of the watch ends.
    Cut,
    /// From now on the watch sends bookmarks only, often.
    Mute,
}

impl Drop for HeldWatches {
    fn drop(&mut self) {
        self.faults.0.held.send_modify(|held| {
            if let Some(at) = held.iter().position(|one| *one == self.watches) {
                held.swap_remove(at);
            }
        });
    }
}

/// All faults of one server; clones share them.
#[derive(Debug, Clone)]
pub struct Faults(Arc<FaultState>);

#[derive(Debug)]
struct FaultState {
    rules: Mutex<BTreeMap<u64, FaultRule>>,
    next_id: AtomicU64,
    held: watch::Sender<Vec<WatchSelection>>,
    orders: broadcast::Sender<(WatchSelection, WatchOrder)>,
    n_cut: AtomicU64,
    n_late: AtomicU64,
}

impl Faults {
    pub(crate) fn new() -> Self {
        Self(Arc::new(FaultState {
            rules: Mutex::new(BTreeMap::new()),
            next_id: AtomicU64::new(0),
            held: watch::Sender::new(Vec::new()),
            // A watch that is more than 16 orders behind misses the oldest of them.
            orders: broadcast::Sender::new(16),
            n_cut: AtomicU64::new(0),
            n_late: AtomicU64::new(0),
        }))
    }

    /// Makes matching requests meet the fault from now on. Of several faults that match, the oldest applies.
    pub fn inject(&self, matching: Matching, fault: Fault) -> Injected {
        let n_hits = Arc::new(AtomicU64::new(0));
        let id = self.0.next_id.fetch_add(1, Ordering::Relaxed);
        let rule = FaultRule {
            matching,
            fault,
            n_hits: Arc::clone(&n_hits),
            dice: dice(id, &["fault"]),
        };
        self.0.rules.lock().insert(id, rule);
        Injected {
            id,
            faults: self.clone(),
            n_hits,
        }
    }

    /// Ends all injected faults.
    pub fn clear(&self) {
        self.0.rules.lock().clear();
    }

    /// Cuts the connections of one user's watches on a resource (plural); an empty text stands for all.
    pub fn drop_watches_of(&self, user: &str, resource: &str) {
        self.order(user, resource, WatchOrder::Cut);
    }

    /// Lets the running watches of one user on a resource send bookmarks only, until they end.
    pub fn mute_watches_of(&self, user: &str, resource: &str) {
        self.order(user, resource, WatchOrder::Mute);
    }

    fn order(&self, user: &str, resource: &str, order: WatchOrder) {
        let watches = WatchSelection {
            resource: resource.to_owned(),
            user: user.to_owned(),
        };
        // Without a running watch there is no receiver.
        let _ = self.0.orders.send((watches, order));
    }

    /// Holds back the events of one user's watches on a resource until the result is dropped; an empty text stands for all.
    pub fn hold_watches_of(&self, user: &str, resource: &str) -> HeldWatches {
        let watches = WatchSelection {
            resource: resource.to_owned(),
            user: user.to_owned(),
        };
        self.0.held.send_modify(|held| held.push(watches.clone()));
        HeldWatches {
            watches,
            faults: self.clone(),
        }
    }

    /// Returns the fault that meets a request, if any, and counts the hit.
    pub(crate) fn take_fault(&self, request: &UsedAccess, name: &str) -> Option<Fault> {
        let mut rules = self.0.rules.lock();
        for rule in rules.values_mut() {
            if rule.meets(request, name) {
                if let Some(times) = &mut rule.matching.times {
                    *times -= 1;
                }
                rule.n_hits.fetch_add(1, Ordering::AcqRel);
                return Some(rule.fault);
            }
        }
        None
    }

    /// The number of watches that have been cut.
    pub fn n_cut(&self) -> u64 {
        self.0.n_cut.load(Ordering::Acquire)
    }

    /// The number of times that a released watch has sent events which were held back before.
    pub fn n_late(&self) -> u64 {
        self.0.n_late.load(Ordering::Acquire)
    }

    pub(crate) fn note_cut(&self) {
        self.0.n_cut.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn note_late(&self) {
        self.0.n_late.fetch_add(1, Ordering::AcqRel);
    }

    /// The watches that are held back now, with a signal of changes.
    pub(crate) fn held(&self) -> watch::Receiver<Vec<WatchSelection>> {
        self.0.held.subscribe()
    }

    /// Receives the orders that tests give to running watches.
    pub(crate) fn orders(&self) -> broadcast::Receiver<(WatchSelection, WatchOrder)> {
        self.0.orders.subscribe()
    }
}

/// The error with which the server refuses a request because a fault demands it.
pub(crate) fn refusal(code: u16, retry_after: Option<u32>) -> ApiError {
    let text = match code {
        409 => "the object has been modified; please apply your changes to the latest version and try again",
        410 => "the requested resource version is too old",
        429 => "too many requests, please try again later",
        503 => "the server is currently unable to handle the request",
        504 => "the request did not complete within the allotted timeout",
        _ => "internal error",
    };
    ApiError {
        retry_after,
        ..ApiError::new(code, text)
    }
}
