//! Reads and writes the Lease until the process ends, and begins and ends this replica's terms.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::{Duration, Instant};

use daemon::events::Recorder;
use daemon::panics::named;
use kube::Client;
use tokio::task::JoinHandle;
use tokio::time::sleep_until;
use tracing::{info, warn};

use super::election::{Action, Election, Reign, Terms, Written};
use super::fence::{self, Fence};
use super::label::{LabelKeeper, Wanted};
use super::lease::LeaseObject;
use super::neighbour::{self, Neighbour};
use super::term_source::TermSource;
use super::watch_barrier::WatchBarrier;
use super::{Leadership, PodName, now, patience};
use crate::index::{Index, Shared};

/// How often is looked whether everything has been seen.
const LOOK: Duration = Duration::from_millis(100);
/// How long giving the Lease up, and taking the label off, may take.
const GOODBYE: Duration = Duration::from_secs(5);

/// The names and times of this replica's part.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Name of the replicas' Lease, and of the object `SchedulerLeader`.
    pub lease: String,
    /// Name of the Lease of the kube-scheduler in this pod, if this replica leads by that one.
    pub kube_scheduler_lease: Option<String>,
    /// Namespace of all three.
    pub namespace: String,
    /// This replica's pod.
    pub pod: PodName,
    /// The times of the Lease.
    pub terms: Terms,
    /// Longest time that one bind may take.
    pub bind_timeout: Duration,
    /// True if a policy of the API server admits bindings only by the replica that the `SchedulerLeader` object names.
    pub fences_bindings: bool,
}

/// A replica that takes part.
pub struct Campaign {
    settings: Settings,
    leadership: Leadership,
    index: Shared<Index>,
    barrier: WatchBarrier,
    lease: LeaseObject,
    label: LabelKeeper,
    fence: Option<Fence>,
    source: TermSource,
    /// The Lease's fault that was logged last.
    problem: Option<String>,
    /// The reign that has been acted upon.
    reign: Option<Reign>,
    /// Makes ready to bind.
    succession: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for Campaign {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Campaign")
            .field("settings", &self.settings)
            .field("source", &self.source)
            .finish_non_exhaustive()
    }
}

/// Makes the only replica ready to bind, without a Lease: a scheduler before it may have been binding the pods that were
/// pending when it began.
pub async fn succeed_alone(
    leadership: Leadership,
    index: Shared<Index>,
    barrier: WatchBarrier,
    bind_timeout: Duration,
) {
    until_ready(&index).await;
    if index.read().began_with_pending() {
        tokio::time::sleep(patience(bind_timeout)).await;
        barrier.wait_for_new_list().await;
    }
    leadership.clear();
}

async fn until_ready(index: &Shared<Index>) {
    while index.read().ready().is_err() {
        tokio::time::sleep(LOOK).await;
    }
}

impl Campaign {
    /// A replica that has not read the Lease yet.
    pub fn new(
        (client, recorder): (Client, Recorder),
        settings: Settings,
        leadership: Leadership,
        index: Shared<Index>,
        barrier: WatchBarrier,
    ) -> Self {
        // A process that comes after this one in the same pod is another replica.
        let identity = format!(
            "{}_{:016x}",
            settings.pod.name,
            RandomState::new().build_hasher().finish()
        );
        let (lease_name, lease_holder, source) = if let Some(lease) = &settings.kube_scheduler_lease {
            let neighbour = Neighbour::of(&settings.pod.name, settings.terms, now());
            (
                lease,
                neighbour::prefix(&settings.pod.name),
                TermSource::Neighbour(neighbour),
            )
        } else {
            let election = Election::new(identity.clone(), settings.terms, now());
            (&settings.lease, identity.clone(), TermSource::Election(election))
        };
        let lease = LeaseObject::new(client.clone(), &settings.namespace, lease_name);
        let label = LabelKeeper::start(client.clone(), settings.pod.clone(), leadership.clone());
        let fence = settings.fences_bindings.then(|| {
            let fence = fence::Settings {
                namespace: settings.namespace.clone(),
                name: settings.lease.clone(),
                pod: settings.pod.clone(),
                holder: identity,
                lease: lease_name.clone(),
                lease_holder,
            };
            Fence::new((client, recorder), fence, leadership.clone())
        });
        Self {
            settings,
            leadership,
            index,
            barrier,
            lease,
            label,
            fence,
            source,
            problem: None,
            reign: None,
            succession: None,
        }
    }

    /// Takes part until `stop` completes; then an own Lease is given up once all binds have ended.
    pub async fn run(mut self, stop: impl Future<Output = ()>) {
        tokio::pin!(stop);
        tokio::select! {
            // A replica that does not know all pods is of no use as a leader.
            () = until_ready(&self.index) => {}
            () = &mut stop => return self.leadership.end(),
        }
        loop {
            self.act();
            let pause = match self.source.next(now()) {
                Action::Wait(until) => until,
                Action::End => break,
                action => {
                    self.carry_out(action).await;
                    continue;
                }
            };
            tokio::select! {
                () = sleep_until(self.wake(pause).into()) => {}
                () = &mut stop => break,
            }
        }
        self.resign().await;
    }

    /// When to look again, at the latest when the time to lead is over.
    fn wake(&self, pause: Instant) -> Instant {
        self.reign.map_or(pause, |reign| {
            pause.min(reign.renewed + self.settings.terms.renew)
        })
    }

    /// How long a request may take: never longer than the time to lead.
    fn patience(&self) -> Duration {
        let most = self.settings.terms.renew / 2;
        let left = self
            .reign
            .map(|reign| (reign.renewed + self.settings.terms.renew).saturating_duration_since(now()));
        left.map_or(most, |left| left.min(most))
    }

    async fn carry_out(&mut self, action: Action) {
        let (sent, patience) = (now(), self.patience());
        let (record, outcome) = match action {
            Action::Read => {
                let found = self.lease.read(patience).await;
                match found {
                    Ok(found) => self.source.read(sent, now(), found),
                    Err(error) => {
                        warn!(
                            lease = self.lease.name(),
                            error = format!("{error:#}"),
                            "the Lease cannot be read, trying again"
                        );
                        self.source.unread(now());
                    }
                }
                return;
            }
            Action::Create(record) => {
                let outcome = self.lease.create(&record, patience).await;
                (record, outcome)
            }
            Action::Write { version, record } => {
                let outcome = self.lease.write(version, &record, patience).await;
                (record, outcome)
            }
            Action::Wait(_) | Action::End => return,
        };
        if outcome == Written::Overtaken {
            info!(lease = self.lease.name(), "another replica has written the Lease");
        }
        self.source.written(record, sent, now(), outcome);
    }

    /// Begins, goes on or ceases to lead, as the source of terms says.
    fn act(&mut self) {
        let problem = self.source.problem();
        if let Some(problem) = problem.as_ref().filter(|_| problem != self.problem) {
            warn!(lease = self.lease.name(), problem, "this replica cannot lead");
        }
        self.problem = problem;
        let reign = self.source.reign(now());
        let is_new = reign.map(|reign| reign.number) != self.reign.map(|reign| reign.number);
        if is_new && self.reign.is_some() {
            warn!(holder = self.source.holder(), "this replica leads no more");
            self.leadership.stand_by();
            self.end_reign();
        }
        if let Some(reign) = reign {
            self.leadership.lead(self.settings.terms, reign.renewed, is_new);
            if is_new {
                info!(
                    lease = self.lease.name(),
                    is_handed_over = reign.is_handed_over,
                    "this replica leads"
                );
                self.succession = Some(self.succeed(reign));
            }
        }
        self.reign = reign;
    }

    fn end_reign(&mut self) {
        if let Some(succession) = self.succession.take() {
            succession.abort();
        }
        self.label.want(Wanted::Plain);
        self.index.write().end_reign();
    }

    /// Has the API server refuse what the predecessor may still send, waits out what it may be writing, writes the label, and
    /// waits until the watch has shown that, and so all that was written before. Then sees to it that bindings are taken.
    fn succeed(&self, reign: Reign) -> JoinHandle<()> {
        let since = jiff::Timestamp::now().to_string();
        let (leadership, barrier, wanted) =
            (self.leadership.clone(), self.barrier.clone(), self.label.sender());
        let patience = patience(self.settings.bind_timeout);
        let fence = self.fence.clone();
        tokio::spawn(named("takeover", async move {
            if let Some(fence) = &fence {
                fence.take().await;
            }
            if !reign.is_handed_over {
                info!(
                    ?patience,
                    "the leader before did not say goodbye: what it may be writing is waited out"
                );
                tokio::time::sleep(patience).await;
            }
            wanted.send_replace(Wanted::Leader(since.clone()));
            barrier.wait_for_annotation(&since).await;
            if let Some(fence) = &fence {
                fence.until_taken().await;
            }
            leadership.clear();
            info!("ready to bind: everything that was written before has been seen");
            if let Some(fence) = &fence {
                fence.keep().await;
            }
        }))
    }

    /// Lets binds end, gives the Lease up and takes the label off.
    async fn resign(mut self) {
        let led = self.reign.take().is_some();
        self.leadership.end_binds().await;
        if let Some(succession) = self.succession.take() {
            succession.abort();
        }
        if !self.source.is_own() {
            self.source.resign(now());
        } else if led && self.index.read().has_doubts() {
            // Whoever finds an abandoned Lease waits until such a write must have ended.
            warn!("it is not known whether some binding was written: the Lease is left to run out");
        } else if led {
            let given_up = tokio::time::timeout(GOODBYE, self.give_up()).await;
            info!(in_time = given_up.is_ok(), "the Lease is given up");
        }
        self.leadership.end();
        self.label.want(Wanted::Plain);
        if tokio::time::timeout(GOODBYE, self.label.done(&Wanted::Plain))
            .await
            .is_err()
        {
            warn!("the leader's label is left on this pod");
        }
    }

    async fn give_up(&mut self) {
        self.source.resign(now());
        loop {
            match self.source.next(now()) {
                Action::End => return,
                Action::Wait(until) => sleep_until(until.into()).await,
                action => self.carry_out(action).await,
            }
        }
    }
}
