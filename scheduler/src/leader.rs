//! Whether this replica may decide: it leads, its lease is valid for long enough, and it has seen what its predecessor wrote.
//!
//! [`Leadership`] is what everybody asks; a time that is over is noticed by whoever asks, whatever the others are doing. Who
//! leads is decided in [`election`], and acted upon in [`campaign`].

pub mod campaign;
pub mod election;
mod fence;
pub mod kube_scheduler;
mod label;
mod lease;
pub mod neighbour;
mod term_source;
pub mod watch_barrier;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use daemon::events::Subject;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use tokio::sync::{Notify, watch};

use election::Terms;
pub(crate) use fence::is_refusal;
pub use label::LABEL;

/// How long, besides the time of a bind, writes of an earlier scheduler are waited for.
const AFTER_BIND: Duration = Duration::from_secs(1);

/// How long writes of a predecessor that did not say goodbye are waited for.
pub fn patience(bind_timeout: Duration) -> Duration {
    bind_timeout + AFTER_BIND
}

/// The present, by the clock that tests can pause.
fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// A pod by its names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodName {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
}

impl From<&PodName> for Subject {
    fn from(pod: &PodName) -> Self {
        Self {
            kind: "Pod",
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            uid: String::new(),
        }
    }
}

/// Why a replica decides nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotLeading {
    /// Another does.
    #[error("not the leader: another replica of gpushare-scheduler decides; ask again")]
    Standby,
    /// Not yet.
    #[error("starting: binds of an earlier scheduler may be under way; they are waited out and looked for")]
    Starting,
    /// No more.
    #[error("not the leader any more: this replica of gpushare-scheduler ends; ask again")]
    Ending,
}

/// What this replica may do, shared by everybody who asks and those who know.
#[derive(Clone, Debug)]
pub struct Leadership(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    state: Mutex<State>,
    /// How many binds are in work.
    binding: watch::Sender<usize>,
    /// Changes whenever clients shall connect anew.
    hangups: watch::Sender<u64>,
    /// How often this replica began or ceased to lead.
    transitions: Counter,
    /// Bindings that were answered after the lease had ended.
    overdue: Counter,
    /// Told when the API server has refused a binding.
    bind_refused: Notify,
}

#[derive(Debug)]
struct State {
    standing: Standing,
    /// Whether what a predecessor wrote has been seen.
    is_cleared: bool,
    /// Whether this replica's pod may bear the leader's label although it does not lead.
    is_stray: bool,
    /// The reason for which the API server refuses bindings by this replica although it leads.
    refused: Option<String>,
}

#[derive(Clone, Copy, Debug)]
enum Standing {
    /// There are no others.
    Alone,
    /// Another leads, or nobody.
    Standby,
    /// Leads, as long as the time allows.
    Leading { terms: Terms, renewed: Instant },
    /// Led, and lets its binds end.
    Ending { terms: Terms, renewed: Instant },
    /// Takes no part any more.
    Ended,
}

/// A bind in work, until dropped.
#[derive(Debug)]
pub struct Binding(Leadership);

impl Leadership {
    fn new(standing: Standing, is_cleared: bool) -> Self {
        let state = State {
            standing,
            is_cleared,
            is_stray: false,
            refused: None,
        };
        Self(Arc::new(Inner {
            state: Mutex::new(state),
            binding: watch::Sender::new(0),
            hangups: watch::Sender::new(0),
            transitions: Counter::default(),
            overdue: Counter::default(),
            bind_refused: Notify::new(),
        }))
    }

    /// For the only replica there is, with nobody before it.
    pub fn alone() -> Self {
        Self::new(Standing::Alone, true)
    }

    /// For the only replica there is, until [`Self::clear`] is said.
    pub fn alone_after_another() -> Self {
        Self::new(Standing::Alone, false)
    }

    /// For one replica of several.
    pub fn standby() -> Self {
        let leadership = Self::new(Standing::Standby, false);
        // An earlier process in the same pod may have led.
        leadership.state().is_stray = true;
        leadership
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this replica is the one that decides.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self, now: Instant) -> Result<(), NotLeading> {
        self.state().check(now)
    }

    /// Begins a bind, which counts until the result is dropped.
    ///
    /// # Errors
    /// Why this replica must not bind.
    pub fn begin_bind(&self, now: Instant) -> Result<Binding, NotLeading> {
        let state = self.state();
        state.check(now)?;
        if !state.is_cleared {
            return Err(NotLeading::Starting);
        }
        // Counted under the lock, so that whoever waits for the last one misses none.
        self.0.binding.send_modify(|n| *n += 1);
        drop(state);
        Ok(Binding(self.clone()))
    }

    /// Whether a write that ends at `deadline` may be sent now: the lease is valid for longer.
    pub fn covers(&self, now: Instant, deadline: Instant) -> bool {
        match self.state().standing {
            Standing::Alone => true,
            Standing::Leading { terms, renewed } => {
                now < renewed + terms.renew && deadline <= renewed + terms.lease
            }
            Standing::Ending { terms, renewed } => now <= deadline && deadline <= renewed + terms.lease,
            Standing::Standby | Standing::Ended => false,
        }
    }

    /// Takes note of a write that was answered now; whether the lease had ended by then, so that a successor may not know
    /// of it.
    pub fn is_overdue(&self, now: Instant) -> bool {
        let is_overdue = match self.state().standing {
            Standing::Alone => false,
            Standing::Leading { terms, renewed } | Standing::Ending { terms, renewed } => {
                now > renewed + terms.lease
            }
            Standing::Standby | Standing::Ended => true,
        };
        if is_overdue {
            self.0.overdue.inc();
        }
        is_overdue
    }

    /// Whether the pod may bear the leader's label and does not lead, so that nobody must be sent to it.
    pub fn is_stray(&self, now: Instant) -> bool {
        let state = self.state();
        state.is_stray && state.check(now).is_err()
    }

    /// Has clients connect anew: to the leader, wherever he is.
    pub fn hang_up(&self) {
        self.0.hangups.send_modify(|n| *n = n.wrapping_add(1));
    }

    /// Changes whenever clients shall connect anew.
    pub fn hangups(&self) -> watch::Receiver<u64> {
        self.0.hangups.subscribe()
    }

    /// Leads, by a renewal that was sent then; `is_new` if it did not lead before.
    pub(crate) fn lead(&self, terms: Terms, renewed: Instant, is_new: bool) {
        let mut state = self.state();
        state.is_cleared &= !is_new;
        state.standing = Standing::Leading { terms, renewed };
        if is_new {
            self.0.transitions.inc();
        }
    }

    /// The reason for which the API server refuses bindings by this replica although it leads; `None` while it takes them.
    pub fn refused(&self) -> Option<String> {
        self.state().refused.clone()
    }

    fn set_refused(&self, refused: Option<String>) {
        self.state().refused = refused;
    }

    /// Takes note that the API server has refused a binding, by whatever rule.
    pub(crate) fn note_bind_refused(&self) {
        self.0.bind_refused.notify_one();
    }

    /// Returns when the API server has refused a binding since this was asked last.
    async fn bind_refused(&self) {
        self.0.bind_refused.notified().await;
    }

    /// What a predecessor wrote has been seen.
    pub fn clear(&self) {
        self.state().is_cleared = true;
    }

    /// Leads no more.
    fn stand_by(&self) {
        let mut state = self.state();
        state.is_cleared = false;
        state.refused = None;
        state.standing = Standing::Standby;
        drop(state);
        self.0.transitions.inc();
        self.hang_up();
    }

    /// Lets binds begin no more and waits until those in work have ended.
    async fn end_binds(&self) {
        {
            let mut state = self.state();
            state.standing = match state.standing {
                Standing::Leading { terms, renewed } => {
                    self.0.transitions.inc();
                    Standing::Ending { terms, renewed }
                }
                _ => Standing::Ended,
            };
        }
        self.hang_up();
        let mut binding = self.0.binding.subscribe();
        // The sender lives as long as this.
        let _ = binding.wait_for(|n| *n == 0).await;
    }

    /// Sends nothing more, whatever the time.
    fn end(&self) {
        self.state().standing = Standing::Ended;
        self.hang_up();
    }

    fn set_stray(&self, is_stray: bool) {
        self.state().is_stray = is_stray;
    }

    /// Registers what Prometheus is told.
    pub fn register(&self, registry: &mut Registry) {
        registry.register(
            "leader_transitions",
            "How often this replica began or ceased to lead",
            self.0.transitions.clone(),
        );
        let help = "Bindings that the API server answered when the lease they were sent under had ended";
        registry.register("overdue_bindings", help, self.0.overdue.clone());
        registry.register_collector(Box::new(IsLeader(self.clone())));
        registry.register_collector(Box::new(IsRefused(self.clone())));
    }
}

impl State {
    fn check(&self, now: Instant) -> Result<(), NotLeading> {
        match self.standing {
            Standing::Alone => Ok(()),
            Standing::Leading { terms, renewed } if now < renewed + terms.renew => Ok(()),
            Standing::Leading { .. } | Standing::Standby => Err(NotLeading::Standby),
            Standing::Ending { .. } | Standing::Ended => Err(NotLeading::Ending),
        }
    }
}

impl Drop for Binding {
    fn drop(&mut self) {
        self.0.0.binding.send_modify(|n| *n -= 1);
    }
}

/// Reads at scrape time whether this replica leads.
#[derive(Debug)]
struct IsLeader(Leadership);

impl Collector for IsLeader {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let is_leader = self.0.check(tokio::time::Instant::now().into_std()).is_ok();
        let help = "Whether this replica decides: 1 for the leader, and for a replica without others";
        ConstGauge::new(i64::from(is_leader)).encode(encoder.encode_descriptor(
            "is_leader",
            help,
            None,
            MetricType::Gauge,
        )?)
    }
}

/// Reads at scrape time whether this replica leads in vain.
#[derive(Debug)]
struct IsRefused(Leadership);

impl Collector for IsRefused {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let is_refused = self.0.refused().is_some();
        let help = "Whether the API server refuses the bindings of this replica although it holds the Lease";
        ConstGauge::new(i64::from(is_refused)).encode(encoder.encode_descriptor(
            "leader_refused",
            help,
            None,
            MetricType::Gauge,
        )?)
    }
}

#[cfg(test)]
mod tests;
