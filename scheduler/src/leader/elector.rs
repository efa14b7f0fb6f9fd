//! The elector reads and writes the Lease until the process ends, and begins and ends the terms of this replica.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::{Duration, Instant};

use daemon::events::Recorder;
use daemon::panics::named;
use kube::Client;
use tokio::task::JoinHandle;
use tokio::time::{sleep, sleep_until, timeout};
use tracing::{info, warn};

use super::election::{Election, LeaseAction, Term, TermSource, WriteOutcome};
use super::fence::Fence;
use super::kube_scheduler_lease::{KubeSchedulerLease, holder_prefix};
use super::label::LabelKeeper;
use super::lease::LeaseObject;
use super::watch_barrier::WatchBarrier;
use super::{LEASE, Leadership, PodName, TAKEOVER_GRACE, now};
use crate::config::LeaderElection;
use crate::index::{Index, Shared, assumption};

/// Pause between two checks that the first lists of all watches are complete.
const READY_POLL: Duration = Duration::from_millis(100);
/// Longest time for each of the two steps at the end: to release the Lease, and to remove the leader label.
const RESIGN_TIMEOUT: Duration = Duration::from_secs(5);

/// The election as one replica takes part in it.
#[expect(missing_debug_implementations, reason = "a client of the API server has none")]
pub struct Elector {
    election: LeaderElection,
    leadership: Leadership,
    index: Shared<Index>,
    barrier: WatchBarrier,
    lease: LeaseObject,
    label: LabelKeeper,
    fence: Option<Fence>,
    /// Decides from reads and writes of `lease` when this replica leads.
    source: Box<dyn TermSource>,
    /// The reason for which this replica cannot lead, as it was last logged; `None` while it can.
    problem: Option<String>,
    /// The term that `leadership` has; `None` while this replica does not lead.
    term: Option<Term>,
    /// The task that makes this replica ready to bind in its term, and keeps it so.
    takeover: Option<JoinHandle<()>>,
}

/// Makes the only replica ready to bind.
///
/// An earlier process may have sent bindings that reach the API server later. They can only be of pods that were pending at the
/// start, so without such a pod nothing is waited for.
pub async fn take_over_alone(leadership: Leadership, index: Shared<Index>, barrier: WatchBarrier) {
    wait_until_ready(&index).await;
    if index.read().began_with_pending {
        sleep(TAKEOVER_GRACE).await;
        barrier.wait_for_new_list().await;
    }
    leadership.end_takeover();
}

/// Waits until the first lists of all watches are complete.
async fn wait_until_ready(index: &Shared<Index>) {
    // Polled, since that happens once in the life of the process.
    while index.read().ready().is_err() {
        sleep(READY_POLL).await;
    }
}

impl Elector {
    /// The elector of a replica that has not read the Lease yet.
    pub fn new(
        (client, recorder): (Client, Recorder),
        (election, pod): (LeaderElection, PodName),
        leadership: Leadership,
        index: Shared<Index>,
        barrier: WatchBarrier,
    ) -> Self {
        // The random part differs after a restart: the next process in the same pod must not take the Lease for its own.
        let identity = format!("{}_{:016x}", pod.name, RandomState::new().build_hasher().finish());
        // This replica leads by the Lease of the kube-scheduler in its pod, or by the replicas' own.
        let (lease, lease_holder, source): (_, _, Box<dyn TermSource>) =
            if let Some(lease) = &election.kube_scheduler_lease {
                let source = KubeSchedulerLease::new(&pod.name, election.times, now());
                (lease.clone(), holder_prefix(&pod.name), Box::new(source))
            } else {
                let source = Election::new(identity.clone(), election.times, now());
                (LEASE.to_owned(), identity.clone(), Box::new(source))
            };
        let label = LabelKeeper::start(client.clone(), pod.clone(), leadership.clone());
        let object = LeaseObject::new(client.clone(), &pod.namespace, &lease);
        let fence = election.fences_bindings.then(|| Fence {
            client,
            recorder,
            leadership: leadership.clone(),
            pod,
            holder: identity,
            lease,
            lease_holder,
        });
        Self {
            election,
            leadership,
            index,
            barrier,
            lease: object,
            label,
            fence,
            source,
            problem: None,
            term: None,
            takeover: None,
        }
    }

    /// Takes part in the election until `stop` completes; then ends all binds and releases the Lease.
    pub async fn run(mut self, stop: impl Future<Output = ()>) {
        tokio::pin!(stop);
        tokio::select! {
            // A leader that does not know all pods could bind none, so it leaves the Lease to a replica that does.
            () = wait_until_ready(&self.index) => {}
            () = &mut stop => return self.leadership.end(),
        }
        loop {
            self.follow_term();
            let until = match self.source.next(now()) {
                LeaseAction::Wait(until) => self.term_end().map_or(until, |end| until.min(end)),
                LeaseAction::End => break,
                action => {
                    self.carry_out(action).await;
                    continue;
                }
            };
            tokio::select! {
                () = sleep_until(until.into()) => {}
                () = &mut stop => break,
            }
        }
        self.resign().await;
    }

    /// The time at which the present term ends unless the Lease is renewed; `None` while this replica does not lead.
    fn term_end(&self) -> Option<Instant> {
        Some(self.term?.renewed + self.election.times.renew)
    }

    /// Longest time of a request: half the renew deadline, so that a second attempt fits into it, and at most the rest of the
    /// term.
    fn request_timeout(&self) -> Duration {
        let longest = self.election.times.renew / 2;
        match self.term_end() {
            Some(end) => longest.min(end.saturating_duration_since(now())),
            None => longest,
        }
    }

    /// Sends the request of an action, and reports the outcome to the source of terms.
    async fn carry_out(&mut self, action: LeaseAction) {
        let (sent, timeout) = (now(), self.request_timeout());
        let (record, outcome) = match action {
            LeaseAction::Wait(_) | LeaseAction::End => return,
            LeaseAction::Read => match self.lease.read(timeout).await {
                Ok(found) => return self.source.read(sent, now(), found),
                Err(error) => {
                    let (lease, error) = (&self.lease.name, format!("{error:#}"));
                    warn!(lease, error, "the Lease cannot be read, trying again");
                    return self.source.no_answer(now());
                }
            },
            LeaseAction::Create(record) => {
                let outcome = self.lease.create(&record, timeout).await;
                (record, outcome)
            }
            LeaseAction::Write { version, record } => {
                let outcome = self.lease.write(version, &record, timeout).await;
                (record, outcome)
            }
        };
        if outcome == WriteOutcome::Overtaken {
            info!(lease = self.lease.name, "another replica has written the Lease");
        }
        self.source.written(record, sent, now(), outcome);
    }

    /// Begins, prolongs or ends the term in `leadership`, as the source of terms says.
    fn follow_term(&mut self) {
        // A problem is logged when it begins, not at each of the reads that show it.
        let problem = self.source.problem();
        if problem != self.problem
            && let Some(problem) = &problem
        {
            warn!(lease = self.lease.name, problem, "this replica cannot lead");
        }
        self.problem = problem;
        let term = self.source.term(now());
        let has_changed = term.map(|term| term.number) != self.term.map(|term| term.number);
        if has_changed && self.term.is_some() {
            warn!(
                holder = self.source.holder(),
                "this replica does not lead any more"
            );
            self.leadership.stand_by();
            self.end_term();
        }
        if let Some(term) = term {
            self.leadership
                .lead(self.election.times, term.renewed, has_changed);
            // A renewal prolongs the term, whose takeover goes on or has ended.
            if has_changed {
                info!(
                    lease = self.lease.name,
                    is_handed_over = term.is_handed_over,
                    "this replica leads"
                );
                self.takeover = Some(self.take_over(term));
            }
        }
        self.term = term;
    }

    /// Ends the takeover of a lost term, removes the leader label, and keeps the bindings of the term from being written again.
    fn end_term(&mut self) {
        // A takeover that goes on would allow binds in a term that is over.
        if let Some(takeover) = self.takeover.take() {
            takeover.abort();
        }
        // The Service must not send clients to a replica that does not lead.
        self.label.wanted.send_replace(None);
        assumption::end_term(&mut self.index.write());
    }

    /// Takes over from the previous leader, then keeps the API server accepting this replica's bindings.
    fn take_over(&self, term: Term) -> JoinHandle<()> {
        let since = jiff::Timestamp::now().to_string();
        let (leadership, barrier) = (self.leadership.clone(), self.barrier.clone());
        let (label, fence) = (self.label.wanted.clone(), self.fence.clone());
        tokio::spawn(named("takeover", async move {
            // Before the grace, since from here on the API server refuses further bindings of the previous leader.
            if let Some(fence) = &fence {
                fence.name_this_replica().await;
            }
            // Bindings in flight arrive during the grace. A leader that releases the Lease has waited for its last bind.
            if !term.is_handed_over {
                info!(
                    grace = ?TAKEOVER_GRACE,
                    "previous leader did not release the Lease; waiting for its in-flight binds"
                );
                sleep(TAKEOVER_GRACE).await;
            }
            // With the label this pod gets an annotation: once the watch shows that write, it has shown every earlier one.
            label.send_replace(Some(since.clone()));
            barrier.wait_for_annotation(&since).await;
            if let Some(fence) = &fence {
                fence.wait_until_accepted().await;
            }
            leadership.end_takeover();
            info!("ready to bind: every write of the previous leader has been seen");
            if let Some(fence) = &fence {
                fence.keep().await;
            }
        }))
    }

    /// Ends binds, releases the Lease and removes the label.
    async fn resign(mut self) {
        // Only a replica that leads until now releases the Lease: after a lost term another one may hold it.
        let has_led = self.term.take().is_some();
        // Before the release of the Lease, after which the next leader waits for no bind of this one.
        self.leadership.end_binds().await;
        // Otherwise the end of the takeover would allow binds again.
        if let Some(takeover) = self.takeover.take() {
            takeover.abort();
        }
        // kube-scheduler releases its Lease itself.
        let has_to_release = has_led && self.election.kube_scheduler_lease.is_none();
        if has_to_release && self.index.read().has_unknown_outcomes() {
            // The next leader waits for in-flight binds only if the Lease was not released.
            warn!("the outcome of a binding is unknown: the Lease is left to expire");
        } else if has_to_release {
            let released = timeout(RESIGN_TIMEOUT, self.release()).await;
            if released.is_ok() {
                info!("the Lease is released");
            } else {
                warn!("the Lease cannot be released, and expires: the API server does not answer");
            }
        }
        self.leadership.end();
        // The Service must not send clients to a pod that ends.
        self.label.wanted.send_replace(None);
        let removed = timeout(RESIGN_TIMEOUT, self.label.wait_until_removed()).await;
        if removed.is_err() {
            warn!("the leader label is still on this pod");
        }
    }

    /// Releases the Lease, with further attempts while the API server does not answer.
    async fn release(&mut self) {
        self.source.resign(now());
        loop {
            match self.source.next(now()) {
                LeaseAction::End => return,
                LeaseAction::Wait(until) => sleep_until(until.into()).await,
                action => self.carry_out(action).await,
            }
        }
    }
}
