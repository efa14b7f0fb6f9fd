//! Leader election among replicas: only the leader answers filters and binds.
//!
//! [`Leadership`] is the state that requests check: this replica leads, its Lease is valid for long enough, and it has seen
//! the writes of the previous leader. It compares times itself, so a term ends on time even if the elector's task is late.
//! `election` and `kube_scheduler_lease` decide which replica leads; [`elector`] carries their decisions out.

pub(crate) mod election;
pub mod elector;
mod fence;
mod kube_scheduler_lease;
mod label;
mod lease;
pub(crate) mod version_check;
pub mod watch_barrier;

use std::sync::Arc;
use std::time::{Duration, Instant};

use daemon::events::Subject;
use parking_lot::{Mutex, MutexGuard};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use proto::read_api::PodName;
use tokio::sync::{Notify, watch};

pub use election::BIND_TIMEOUT;
use election::LeaseTimes;
pub(crate) use fence::is_refusal;
pub use label::LABEL;

/// Name of the replicas' Lease, and of the object `SchedulerLeader` that repeats it. RBAC and the admission policy name it too.
pub const LEASE: &str = "gpushare-scheduler";

/// Time for which a takeover waits for the in-flight binds of a leader that did not release its Lease: [`BIND_TIMEOUT`], and a
/// second more, as a binding that was sent at the last moment may still reach the API server.
pub const TAKEOVER_GRACE: Duration = BIND_TIMEOUT.saturating_add(Duration::from_secs(1));

/// The present time by the clock of the runtime, which tests control.
pub(crate) fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// This replica's own pod as the subject of an event.
fn subject(pod: &PodName) -> Subject {
    Subject {
        kind: "Pod",
        namespace: pod.namespace.clone(),
        name: pod.name.clone(),
        // Events need no UID, and a replica knows its own pod by name alone.
        uid: String::new(),
    }
}

/// The reason for which a replica neither filters nor binds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotLeading {
    /// Another replica leads, or no replica does at the moment.
    #[error("not the leader: another replica of gpushare-scheduler decides; ask again")]
    Standby,
    /// Bindings of the previous leader may still reach the API server.
    #[error("starting: binds of an earlier scheduler may be under way; they are waited out and looked for")]
    Starting,
    /// This replica is shutting down.
    #[error("not the leader any more: this replica of gpushare-scheduler ends; ask again")]
    Ending,
}

/// The permission of this replica to filter and to bind. Clones share their state.
#[derive(Clone, Debug)]
pub struct Leadership(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    state: Mutex<LeadershipState>,
    /// The number of binds that have begun and not ended.
    n_binds: watch::Sender<usize>,
    /// A number that changes whenever clients have to connect again, since another replica may lead.
    connection_resets: watch::Sender<u64>,
    /// Metric: the beginnings and ends of terms.
    transitions: Counter,
    /// Metric: bindings that were answered after the Lease had expired.
    overdue: Counter,
    /// Notified when the API server has refused a binding of this replica.
    bind_refused: Notify,
}

#[derive(Debug)]
struct LeadershipState {
    role: Role,
    /// True once the watch of pods has shown all writes of the previous leader.
    is_taken_over: bool,
    may_have_label: bool,
    /// See [`Leadership::refused`].
    refused: Option<String>,
}

/// The role of this replica among all replicas.
#[derive(Clone, Copy, Debug)]
enum Role {
    /// There is no other replica.
    Alone,
    /// Another replica leads, or no replica does at the moment.
    Standby,
    /// Leads, until the last renewal of the Lease is older than the renew deadline.
    Leading { times: LeaseTimes, renewed: Instant },
    /// Led until the shutdown began. Binds in work may still end; no further one begins.
    Ending { times: LeaseTimes, renewed: Instant },
    /// Is shut down: sends no binding any more.
    Ended,
}

/// A bind that has begun. Dropping the value ends it.
#[derive(Debug)]
pub struct BindInWork(Leadership);

impl Leadership {
    /// The state of a replica at the start of the process.
    fn new(role: Role, is_taken_over: bool) -> Self {
        let state = LeadershipState {
            role,
            is_taken_over,
            may_have_label: false,
            refused: None,
        };
        Self(Arc::new(Inner {
            state: Mutex::new(state),
            n_binds: watch::Sender::new(0),
            connection_resets: watch::Sender::new(0),
            transitions: Counter::default(),
            overdue: Counter::default(),
            bind_refused: Notify::new(),
        }))
    }

    /// The only replica, and no earlier scheduler has run: for tests, benchmarks and offline use.
    pub fn alone() -> Self {
        Self::new(Role::Alone, true)
    }

    /// The only replica. It binds nothing before [`Self::end_takeover`], since an earlier process may still be binding.
    pub fn alone_after_takeover() -> Self {
        Self::new(Role::Alone, false)
    }

    /// One replica of several, which does not lead yet.
    pub fn standby() -> Self {
        let leadership = Self::new(Role::Standby, false);
        // An earlier process in the same pod may have led, and left the label on the pod.
        leadership.state().may_have_label = true;
        leadership
    }

    fn state(&self) -> MutexGuard<'_, LeadershipState> {
        self.0.state.lock()
    }

    /// Checks that this replica decides now, so that it may answer filter requests.
    pub fn check(&self, now: Instant) -> Result<(), NotLeading> {
        self.state().check(now)
    }

    /// Begins a bind, which lasts until the result is dropped.
    pub fn begin_bind(&self, now: Instant) -> Result<BindInWork, NotLeading> {
        let state = self.state();
        state.check(now)?;
        // A filter may be answered before the takeover is complete, since it allocates nothing.
        if !state.is_taken_over {
            return Err(NotLeading::Starting);
        }
        // Counted under the lock: `end_binds` changes the role under it, and then waits for every bind that began before.
        self.0.n_binds.send_modify(|n| *n += 1);
        drop(state);
        Ok(BindInWork(self.clone()))
    }

    /// Returns true if this replica decides now.
    pub fn is_leading(&self) -> bool {
        self.check(now()).is_ok()
    }

    /// Returns true if a write that is given up at `deadline` may be sent now, because the Lease is valid until then.
    pub fn covers(&self, now: Instant, deadline: Instant) -> bool {
        match self.state().role {
            Role::Alone => true,
            Role::Leading { times, renewed } => {
                now < renewed + times.renew && deadline <= renewed + times.lease
            }
            // The last binds of a replica that ends may take until the end of the Lease, which it releases after them.
            Role::Ending { times, renewed } => now <= deadline && deadline <= renewed + times.lease,
            Role::Standby | Role::Ended => false,
        }
    }

    /// Returns true if a write that is answered now is overdue: the Lease had expired, so the next leader may not have seen the
    /// write. Counts it in the metrics then.
    pub fn is_overdue(&self, now: Instant) -> bool {
        let is_overdue = match self.state().role {
            Role::Alone => false,
            Role::Leading { times, renewed } | Role::Ending { times, renewed } => now > renewed + times.lease,
            Role::Standby | Role::Ended => true,
        };
        if is_overdue {
            self.0.overdue.inc();
        }
        is_overdue
    }

    /// Returns true if this pod may have the leader label although it does not lead. The Service must not select such a pod.
    pub fn has_stale_label(&self, now: Instant) -> bool {
        let state = self.state();
        // On the leader's own pod, the label is not stale.
        state.may_have_label && state.check(now).is_err()
    }

    /// Ends the connections of clients, so that they connect again, to the leader.
    pub fn reset_connections(&self) {
        // Receivers only look for a change, so the number may wrap around to 0.
        self.0.connection_resets.send_modify(|n| *n = n.wrapping_add(1));
    }

    /// A number that changes whenever clients have to connect again.
    pub fn connection_resets(&self) -> watch::Receiver<u64> {
        self.0.connection_resets.subscribe()
    }

    /// Begins a term if `is_new`, or else prolongs the present one. The Lease was last renewed by a request sent at `renewed`.
    pub(crate) fn lead(&self, times: LeaseTimes, renewed: Instant, is_new: bool) {
        let mut state = self.state();
        // A renewal leaves a finished takeover as it is; a new term begins with one of its own.
        state.is_taken_over &= !is_new;
        state.role = Role::Leading { times, renewed };
        if is_new {
            self.0.transitions.inc();
        }
    }

    /// The reason for which the API server refuses the bindings of this replica although it leads; `None` while it accepts them.
    pub fn refused(&self) -> Option<String> {
        self.state().refused.clone()
    }

    /// Wakes the task that checks that the API server accepts this replica's bindings, because it has refused one.
    pub(crate) fn note_bind_refused(&self) {
        self.0.bind_refused.notify_one();
    }

    /// Allows binds, because the watch of pods has shown all writes of the previous leader.
    pub fn end_takeover(&self) {
        self.state().is_taken_over = true;
    }

    /// Ends the term, and the connections of clients: this replica has lost the Lease.
    fn stand_by(&self) {
        let mut state = self.state();
        state.is_taken_over = false;
        // A replica that does not lead sends no bindings, so a refusal of them is no problem any more.
        state.refused = None;
        state.role = Role::Standby;
        drop(state);
        self.0.transitions.inc();
        self.reset_connections();
    }

    /// Lets no further bind begin, and waits until all binds have ended.
    async fn end_binds(&self) {
        {
            let mut state = self.state();
            state.role = match state.role {
                Role::Leading { times, renewed } => {
                    self.0.transitions.inc();
                    Role::Ending { times, renewed }
                }
                // A replica that does not lead has no binds to end.
                _ => Role::Ended,
            };
        }
        self.reset_connections();
        let mut n_binds = self.0.n_binds.subscribe();
        // The sender lives as long as `self`, so this cannot fail.
        let _ = n_binds.wait_for(|n| *n == 0).await;
    }

    /// Ends this replica's part: from now on it sends no binding, not even of binds that have begun.
    fn end(&self) {
        self.state().role = Role::Ended;
        self.reset_connections();
    }

    /// Registers the metrics of leader election.
    pub fn register(&self, registry: &mut Registry) {
        let help = "How often this replica began or ceased to lead";
        registry.register("leader_transitions", help, self.0.transitions.clone());
        let help = "Bindings that the API server answered when the lease they were sent under had ended";
        registry.register("overdue_bindings", help, self.0.overdue.clone());
        registry.register_collector(Box::new(Gauges(self.clone())));
    }
}

impl LeadershipState {
    /// Checks that this replica may filter: it is alone, or its term has not run out.
    fn check(&self, now: Instant) -> Result<(), NotLeading> {
        match self.role {
            Role::Alone => Ok(()),
            Role::Leading { times, renewed } if now < renewed + times.renew => Ok(()),
            // A term that was not renewed in time has ended, even if the elector has not noticed.
            Role::Leading { .. } | Role::Standby => Err(NotLeading::Standby),
            Role::Ending { .. } | Role::Ended => Err(NotLeading::Ending),
        }
    }
}

impl Drop for BindInWork {
    fn drop(&mut self) {
        self.0.0.n_binds.send_modify(|n| *n -= 1);
    }
}

/// Reads the gauges of leader election at each scrape, so that they cannot differ from what requests see.
#[derive(Debug)]
struct Gauges(Leadership);

impl Collector for Gauges {
    /// Writes whether this replica leads, and whether the API server refuses its bindings.
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let decides = "Whether this replica decides: 1 for the leader, and for a replica without others";
        let refuses =
            "Whether the API server refuses the bindings of this replica although it holds the Lease";
        let (is_leading, is_refused) = (self.0.is_leading(), self.0.refused().is_some());
        for (name, help, value) in [
            ("is_leader", decides, is_leading),
            ("leader_refused", refuses, is_refused),
        ] {
            let metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            ConstGauge::new(i64::from(value)).encode(metric)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
