//! Two or three replicas and one Lease, with messages that come late, in another order or not at all, clocks that differ,
//! processes that are paused or end, and users who change the Lease: two replicas never lead at the same time.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::super::{Election, LeaseAction, LeaseRecord, LeaseTimes, TermSource, WriteOutcome};

const TIMES: LeaseTimes = LeaseTimes {
    lease: Duration::from_secs(15),
    renew: Duration::from_secs(10),
    retry: Duration::from_secs(2),
};
/// Milliseconds after which a replica does not wait for an answer any more.
const TIMEOUT: u64 = 5000;
/// Milliseconds that a run lasts.
const END: u64 = 300_000;

/// The delays and losses of one request.
#[derive(Clone, Copy, Debug)]
struct Delivery {
    /// Milliseconds for which the process stands still before it sends the request.
    pause: u64,
    /// Milliseconds from the replica to the server; may be longer than the replica waits.
    to_server: u64,
    is_lost: bool,
    /// Milliseconds from the server to the replica.
    to_replica: u64,
    is_answer_lost: bool,
}

/// An event that is no message: a user changes the Lease, or a process ends or stands still. Replicas are named by index.
#[derive(Clone, Copy, Debug)]
enum Incident {
    /// A user deletes the Lease.
    Delete,
    /// A user removes the holder's name from the Lease.
    RemoveHolder,
    /// A process ends without a signal; another takes its place.
    Kill(usize),
    /// A process ends on SIGTERM; another takes its place.
    Stop(usize),
    /// A process stands still for this number of milliseconds.
    Pause(usize, u64),
}

/// Everything that is chosen at random for one run.
#[derive(Clone, Debug)]
struct Run {
    /// Clock of each replica: milliseconds ahead, and its speed in percent.
    clocks: Vec<(u64, u64)>,
    /// The deliveries of the requests in their order; the first follows the last.
    deliveries: Vec<Delivery>,
    /// Incidents, each with its time in milliseconds.
    incidents: Vec<(u64, Incident)>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// Index into the run's incidents.
    Incident(usize),
    /// A replica, by index, takes its next step if it still has the process of this number.
    Wake(usize, u64),
    /// A request, by index, arrives at the server.
    Arrives(usize),
    /// A request, by index, is answered at the replica, or its timeout ends.
    Answered(usize),
}

#[derive(Clone, Debug)]
struct Request {
    replica: usize,
    process: u64,
    action: LeaseAction,
    sent: Instant,
    delivery: Delivery,
    answer: Option<Answer>,
    is_over: bool,
}

#[derive(Clone, Debug)]
enum Answer {
    Read(Option<(String, LeaseRecord)>),
    WriteOutcome(WriteOutcome),
}

struct Replica {
    process: u64,
    election: Election,
    paused_until: u64,
    is_busy: bool,
    is_stopping: bool,
}

/// The server with its Lease, the replicas, and the events that are still to come. Times are milliseconds.
struct World {
    run: Run,
    /// The beginning of the run on all clocks.
    base: Instant,
    now: u64,
    /// The Lease, with its version.
    lease: Option<(u64, LeaseRecord)>,
    /// The last version that was given to the Lease.
    version: u64,
    replicas: Vec<Replica>,
    requests: Vec<Request>,
    /// Events by time, and at one time in the order in which they were added.
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    n_events: u64,
    n_processes: u64,
    /// For each replica, the end of the Lease by which it last led: its binds may last until then.
    binds_until: Vec<u64>,
    /// The numbers of the processes that have led.
    leaders: BTreeSet<u64>,
}

impl World {
    fn new(run: Run) -> Self {
        let n = run.clocks.len();
        let mut world = Self {
            base: Instant::now(),
            now: 0,
            lease: None,
            version: 0,
            replicas: Vec::new(),
            requests: Vec::new(),
            events: BinaryHeap::new(),
            n_events: 0,
            n_processes: 0,
            binds_until: vec![0; n],
            leaders: BTreeSet::new(),
            run,
        };
        for replica in 0..n {
            let fresh = world.new_process(replica);
            world.replicas.push(fresh);
            world.schedule(0, Event::Wake(replica, world.replicas[replica].process));
        }
        for (idx, (time, _)) in world.run.incidents.clone().into_iter().enumerate() {
            world.schedule(time, Event::Incident(idx));
        }
        world
    }

    /// A replica with a process that has just started.
    fn new_process(&mut self, replica: usize) -> Replica {
        self.n_processes += 1;
        let election = Election::new(
            format!("process-{}", self.n_processes),
            TIMES,
            self.clock(replica),
        );
        Replica {
            process: self.n_processes,
            election,
            paused_until: 0,
            is_busy: false,
            is_stopping: false,
        }
    }

    /// The time that a replica's clock shows.
    fn clock(&self, replica: usize) -> Instant {
        let (ahead, percent) = self.run.clocks[replica];
        self.base + Duration::from_millis(ahead + self.now * percent / 100)
    }

    /// The time at which a replica's clock shows this, or a little later.
    fn time_of(&self, replica: usize, shown: Instant) -> u64 {
        let (ahead, percent) = self.run.clocks[replica];
        let shown = u64::try_from((shown - self.base).as_millis()).unwrap();
        (shown.saturating_sub(ahead) * 100).div_ceil(percent)
    }

    /// Adds an event at a time.
    fn schedule(&mut self, time: u64, event: Event) {
        self.n_events += 1;
        self.events.push(Reverse((time, self.n_events, event)));
    }

    /// Lets all events happen until the end of the run, and checks the replicas after each.
    fn run_to_end(&mut self) {
        while let Some(Reverse((time, _, event))) = self.events.pop() {
            if time > END {
                return;
            }
            self.now = time;
            match event {
                Event::Incident(idx) => self.apply_incident(self.run.incidents[idx].1),
                Event::Wake(replica, process) => self.wake(replica, process),
                Event::Arrives(idx) => self.serve(idx),
                Event::Answered(idx) => self.answered(idx),
            }
            self.check();
        }
    }

    fn apply_incident(&mut self, incident: Incident) {
        let n = self.replicas.len();
        match incident {
            Incident::Delete => self.lease = None,
            Incident::RemoveHolder => {
                self.version += 1;
                if let Some((version, record)) = self.lease.as_mut() {
                    *version = self.version;
                    record.holder.clear();
                }
            }
            Incident::Kill(replica) => self.replace(replica % n),
            Incident::Stop(replica) => {
                let (replica, clock) = (replica % n, self.clock(replica % n));
                let one = &mut self.replicas[replica];
                one.is_stopping = true;
                one.election.resign(clock);
                // It has waited for its last bind.
                self.binds_until[replica] = 0;
                self.schedule(self.now, Event::Wake(replica, self.replicas[replica].process));
            }
            Incident::Pause(replica, time) => self.replicas[replica % n].paused_until = self.now + time,
        }
    }

    /// Replaces the process of a replica.
    fn replace(&mut self, replica: usize) {
        self.replicas[replica] = self.new_process(replica);
        self.schedule(self.now, Event::Wake(replica, self.replicas[replica].process));
    }

    /// Returns true if a replica is not paused; if it is, puts the event off until the end of the pause.
    fn runs_or_waits(&mut self, replica: usize, event: Event) -> bool {
        let until = self.replicas[replica].paused_until;
        if until > self.now {
            self.schedule(until, event);
        }
        until <= self.now
    }

    /// Lets a replica take its next step, unless it waits for an answer.
    fn wake(&mut self, replica: usize, process: u64) {
        if self.replicas[replica].process != process
            || !self.runs_or_waits(replica, Event::Wake(replica, process))
            || self.replicas[replica].is_busy
        {
            return;
        }
        let sent = self.clock(replica);
        let action = self.replicas[replica].election.next(sent);
        match action {
            LeaseAction::Wait(until) => {
                let time = self.time_of(replica, until).max(self.now + 1);
                self.schedule(time, Event::Wake(replica, process));
            }
            LeaseAction::End => self.replace(replica),
            action => {
                let delivery = self.run.deliveries[self.requests.len() % self.run.deliveries.len()];
                let idx = self.requests.len();
                let leaves = self.now + delivery.pause;
                if !delivery.is_lost {
                    self.schedule(leaves + delivery.to_server, Event::Arrives(idx));
                }
                let round_trip = delivery.to_server + delivery.to_replica;
                let comes = !delivery.is_lost && !delivery.is_answer_lost && round_trip < TIMEOUT;
                self.schedule(
                    leaves + if comes { round_trip } else { TIMEOUT },
                    Event::Answered(idx),
                );
                self.requests.push(Request {
                    replica,
                    process,
                    action,
                    sent,
                    delivery,
                    answer: None,
                    is_over: false,
                });
                self.replicas[replica].is_busy = true;
            }
        }
    }

    /// Lets the server carry out a request.
    fn serve(&mut self, idx: usize) {
        let answer = match self.requests[idx].action.clone() {
            LeaseAction::Read => Answer::Read(
                self.lease
                    .as_ref()
                    .map(|(version, record)| (version.to_string(), record.clone())),
            ),
            LeaseAction::Create(record) => Answer::WriteOutcome(self.put(self.lease.is_none(), record)),
            LeaseAction::Write { version, record } => {
                let is_same = self
                    .lease
                    .as_ref()
                    .is_some_and(|(there, _)| there.to_string() == version);
                Answer::WriteOutcome(self.put(is_same, record))
            }
            LeaseAction::Wait(_) | LeaseAction::End => unreachable!("not a request"),
        };
        let request = &mut self.requests[idx];
        let comes = !request.delivery.is_answer_lost && !request.is_over;
        request.answer = comes.then_some(answer);
    }

    /// Writes the Lease if it has the expected version, or is absent as expected.
    fn put(&mut self, is_expected: bool, record: LeaseRecord) -> WriteOutcome {
        if !is_expected {
            return WriteOutcome::Overtaken;
        }
        self.version += 1;
        self.lease = Some((self.version, record));
        WriteOutcome::Done(self.version.to_string())
    }

    /// Hands an answer, or its absence, to the replica that sent the request.
    fn answered(&mut self, idx: usize) {
        let request = self.requests[idx].clone();
        if self.replicas[request.replica].process != request.process
            || !self.runs_or_waits(request.replica, Event::Answered(idx))
        {
            return;
        }
        self.requests[idx].is_over = true;
        let received = self.clock(request.replica);
        let replica = &mut self.replicas[request.replica];
        replica.is_busy = false;
        match (request.action, request.answer) {
            (_, Some(Answer::Read(found))) => replica.election.read(received, received, found),
            (
                LeaseAction::Create(record) | LeaseAction::Write { record, .. },
                Some(Answer::WriteOutcome(outcome)),
            ) => {
                replica.election.written(record, request.sent, received, outcome);
            }
            (LeaseAction::Create(record) | LeaseAction::Write { record, .. }, None) => {
                replica
                    .election
                    .written(record, request.sent, received, WriteOutcome::Unknown);
            }
            _ => replica.election.no_answer(received),
        }
        self.schedule(self.now, Event::Wake(request.replica, request.process));
    }

    /// Checks that at most one replica leads, and only after the binds of every other replica must have ended.
    fn check(&mut self) {
        let terms: Vec<_> = (0..self.replicas.len())
            .map(|n| self.replicas[n].election.term(self.clock(n)))
            .collect();
        let leading: Vec<usize> = (0..terms.len()).filter(|n| terms[*n].is_some()).collect();
        assert!(
            leading.len() <= 1,
            "at {} ms the replicas {leading:?} lead",
            self.now
        );
        // A Lease is long enough for binds only if the clocks run at one speed.
        let have_one_speed = self.run.clocks.iter().all(|(_, percent)| *percent == 100);
        for (n, term) in terms.into_iter().enumerate() {
            let Some(term) = term else { continue };
            assert!(!self.replicas[n].is_stopping, "a stopping replica does not lead");
            self.leaders.insert(self.replicas[n].process);
            let others = (0..self.binds_until.len()).filter(|other| *other != n && have_one_speed);
            let latest = others.map(|other| self.binds_until[other]).max().unwrap_or(0);
            assert!(
                latest <= self.now,
                "at {} ms {n} leads and another may bind until {latest} ms",
                self.now
            );
            self.binds_until[n] = self.binds_until[n].max(self.time_of(n, term.renewed + TIMES.lease));
        }
    }
}

fn delivery() -> impl Strategy<Value = Delivery> {
    let delay = || prop_oneof![6 => 0..50_u64, 2 => 0..3000_u64, 1 => 0..30_000_u64];
    let pause = prop_oneof![8 => Just(0_u64), 1 => 0..25_000_u64];
    (
        pause,
        delay(),
        prop::bool::weighted(0.1),
        delay(),
        prop::bool::weighted(0.1),
    )
        .prop_map(
            |(pause, to_server, is_lost, to_replica, is_answer_lost)| Delivery {
                pause,
                to_server,
                is_lost,
                to_replica,
                is_answer_lost,
            },
        )
}

fn incident() -> impl Strategy<Value = Incident> {
    prop_oneof![
        1 => Just(Incident::Delete),
        1 => Just(Incident::RemoveHolder),
        2 => (0..3_usize).prop_map(Incident::Kill),
        2 => (0..3_usize).prop_map(Incident::Stop),
        3 => (0..3_usize, 0..40_000_u64).prop_map(|(replica, time)| Incident::Pause(replica, time)),
    ]
}

fn run() -> impl Strategy<Value = Run> {
    let speeds = prop_oneof![Just(vec![100_u64; 3]), prop::collection::vec(92..108_u64, 3)];
    let clocks = (prop::collection::vec(0..100_000_u64, 2..=3), speeds)
        .prop_map(|(aheads, speeds)| aheads.into_iter().zip(speeds).collect::<Vec<_>>());
    let incidents = prop::collection::vec((0..END, incident()), 0..12);
    (clocks, prop::collection::vec(delivery(), 1..60), incidents).prop_map(
        |(clocks, deliveries, incidents)| Run {
            clocks,
            deliveries,
            incidents,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn no_two_replicas_lead_at_the_same_time(run in run()) {
        World::new(run).run_to_end();
    }

    /// If all messages arrive, one replica leads at the end, whatever incidents there were before.
    #[test]
    fn one_replica_leads_in_the_end(clocks in prop::collection::vec((0..100_000_u64, 95..105_u64), 2..=3), incidents in prop::collection::vec((0..END / 2, incident()), 0..12)) {
        let delivery = Delivery { pause: 0, to_server: 5, is_lost: false, to_replica: 5, is_answer_lost: false };
        let mut world = World::new(Run { clocks, deliveries: vec![delivery], incidents });
        world.run_to_end();
        let leading = (0..world.replicas.len()).filter(|n| world.replicas[*n].election.term(world.clock(*n)).is_some()).count();
        prop_assert_eq!(leading, 1, "{:?}", world.lease);
        prop_assert!(!world.leaders.is_empty());
    }
}
