//! Two or three replicas and one Lease, with messages that come late, twice the wrong way round or not at all, clocks that
//! differ, processes that are paused or die, and people who meddle: never do two believe to lead at once.

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

/// What becomes of one request.
#[derive(Clone, Copy, Debug)]
struct Fate {
    /// Milliseconds until the process goes on after it has decided what to send.
    pause: u64,
    /// Milliseconds to the server; may be longer than the replica waits.
    there: u64,
    is_lost: bool,
    /// Milliseconds back.
    back: u64,
    is_answer_lost: bool,
}

/// What happens besides.
#[derive(Clone, Copy, Debug)]
enum Incident {
    /// A user deletes the Lease.
    Delete,
    /// A user removes the holder's name from it.
    Wipe,
    /// A process dies; another takes its place.
    Kill(usize),
    /// A process ends on SIGTERM; another takes its place.
    Stop(usize),
    /// A process stands still.
    Pause(usize, u64),
}

#[derive(Clone, Debug)]
struct Run {
    /// Clock of each replica: milliseconds ahead, and its speed in percent.
    clocks: Vec<(u64, u64)>,
    fates: Vec<Fate>,
    incidents: Vec<(u64, Incident)>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// Index into the run's incidents.
    Incident(usize),
    /// A replica looks what to do, if it is still this process.
    Wake(usize, u64),
    /// Index of a request.
    Arrives(usize),
    /// A request's answer, or the timeout of the request.
    Answered(usize),
}

#[derive(Clone, Debug)]
struct Request {
    replica: usize,
    process: u64,
    action: LeaseAction,
    sent: Instant,
    fate: Fate,
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

struct World {
    run: Run,
    base: Instant,
    now: u64,
    lease: Option<(u64, LeaseRecord)>,
    version: u64,
    replicas: Vec<Replica>,
    requests: Vec<Request>,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    n_events: u64,
    n_processes: u64,
    /// For each replica, until when it may have promised that a bind would have ended.
    promised: Vec<u64>,
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
            promised: vec![0; n],
            leaders: BTreeSet::new(),
            run,
        };
        for replica in 0..n {
            let fresh = world.process(replica);
            world.replicas.push(fresh);
            world.at(0, Event::Wake(replica, world.replicas[replica].process));
        }
        for (idx, (time, _)) in world.run.incidents.clone().into_iter().enumerate() {
            world.at(time, Event::Incident(idx));
        }
        world
    }

    fn process(&mut self, replica: usize) -> Replica {
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

    /// What a replica's clock shows.
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

    fn at(&mut self, time: u64, event: Event) {
        self.n_events += 1;
        self.events.push(Reverse((time, self.n_events, event)));
    }

    fn go(&mut self) {
        while let Some(Reverse((time, _, event))) = self.events.pop() {
            if time > END {
                return;
            }
            self.now = time;
            match event {
                Event::Incident(idx) => self.happen(self.run.incidents[idx].1),
                Event::Wake(replica, process) => self.wake(replica, process),
                Event::Arrives(idx) => self.serve(idx),
                Event::Answered(idx) => self.answered(idx),
            }
            self.check();
        }
    }

    fn happen(&mut self, incident: Incident) {
        let n = self.replicas.len();
        match incident {
            Incident::Delete => self.lease = None,
            Incident::Wipe => {
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
                // All that it had promised is done.
                self.promised[replica] = 0;
                self.at(self.now, Event::Wake(replica, self.replicas[replica].process));
            }
            Incident::Pause(replica, time) => self.replicas[replica % n].paused_until = self.now + time,
        }
    }

    fn replace(&mut self, replica: usize) {
        self.replicas[replica] = self.process(replica);
        self.at(self.now, Event::Wake(replica, self.replicas[replica].process));
    }

    /// Whether a replica runs; if not, the event comes again when it does.
    fn runs(&mut self, replica: usize, event: Event) -> bool {
        let until = self.replicas[replica].paused_until;
        if until > self.now {
            self.at(until, event);
        }
        until <= self.now
    }

    fn wake(&mut self, replica: usize, process: u64) {
        if self.replicas[replica].process != process
            || !self.runs(replica, Event::Wake(replica, process))
            || self.replicas[replica].is_busy
        {
            return;
        }
        let sent = self.clock(replica);
        let action = self.replicas[replica].election.next(sent);
        match action {
            LeaseAction::Wait(until) => {
                let time = self.time_of(replica, until).max(self.now + 1);
                self.at(time, Event::Wake(replica, process));
            }
            LeaseAction::End => self.replace(replica),
            action => {
                let fate = self.run.fates[self.requests.len() % self.run.fates.len()];
                let idx = self.requests.len();
                let leaves = self.now + fate.pause;
                if !fate.is_lost {
                    self.at(leaves + fate.there, Event::Arrives(idx));
                }
                let comes = !fate.is_lost && !fate.is_answer_lost && fate.there + fate.back < TIMEOUT;
                self.at(
                    leaves + if comes { fate.there + fate.back } else { TIMEOUT },
                    Event::Answered(idx),
                );
                self.requests.push(Request {
                    replica,
                    process,
                    action,
                    sent,
                    fate,
                    answer: None,
                    is_over: false,
                });
                self.replicas[replica].is_busy = true;
            }
        }
    }

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
        let comes = !request.fate.is_answer_lost && !request.is_over;
        request.answer = comes.then_some(answer);
    }

    fn put(&mut self, may: bool, record: LeaseRecord) -> WriteOutcome {
        if !may {
            return WriteOutcome::Overtaken;
        }
        self.version += 1;
        self.lease = Some((self.version, record));
        WriteOutcome::Done(self.version.to_string())
    }

    fn answered(&mut self, idx: usize) {
        let request = self.requests[idx].clone();
        if self.replicas[request.replica].process != request.process
            || !self.runs(request.replica, Event::Answered(idx))
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
        self.at(self.now, Event::Wake(request.replica, request.process));
    }

    fn check(&mut self) {
        let reigns: Vec<_> = (0..self.replicas.len())
            .map(|n| self.replicas[n].election.term(self.clock(n)))
            .collect();
        let leading: Vec<usize> = (0..reigns.len()).filter(|n| reigns[*n].is_some()).collect();
        assert!(
            leading.len() <= 1,
            "at {} ms {leading:?} believe to lead",
            self.now
        );
        let even = self.run.clocks.iter().all(|(_, percent)| *percent == 100);
        for (n, term) in reigns.into_iter().enumerate() {
            let Some(term) = term else { continue };
            assert!(!self.replicas[n].is_stopping, "a stopping replica does not lead");
            self.leaders.insert(self.replicas[n].process);
            let others = (0..self.promised.len()).filter(|other| *other != n && even);
            let latest = others.map(|other| self.promised[other]).max().unwrap_or(0);
            assert!(
                latest <= self.now,
                "at {} ms {n} leads and another may bind until {latest} ms",
                self.now
            );
            self.promised[n] = self.promised[n].max(self.time_of(n, term.renewed + TIMES.lease));
        }
    }
}

fn fate() -> impl Strategy<Value = Fate> {
    let delay = || prop_oneof![6 => 0..50_u64, 2 => 0..3000_u64, 1 => 0..30_000_u64];
    let pause = prop_oneof![8 => Just(0_u64), 1 => 0..25_000_u64];
    (
        pause,
        delay(),
        prop::bool::weighted(0.1),
        delay(),
        prop::bool::weighted(0.1),
    )
        .prop_map(|(pause, there, is_lost, back, is_answer_lost)| Fate {
            pause,
            there,
            is_lost,
            back,
            is_answer_lost,
        })
}

fn incident() -> impl Strategy<Value = Incident> {
    prop_oneof![
        1 => Just(Incident::Delete),
        1 => Just(Incident::Wipe),
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
    (clocks, prop::collection::vec(fate(), 1..60), incidents).prop_map(|(clocks, fates, incidents)| Run {
        clocks,
        fates,
        incidents,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn no_two_replicas_lead_at_the_same_time(run in run()) {
        World::new(run).go();
    }

    /// Where messages arrive there is a leader in the end, whatever happened before.
    #[test]
    fn one_replica_leads_in_the_end(clocks in prop::collection::vec((0..100_000_u64, 95..105_u64), 2..=3), incidents in prop::collection::vec((0..END / 2, incident()), 0..12)) {
        let fate = Fate { pause: 0, there: 5, is_lost: false, back: 5, is_answer_lost: false };
        let mut world = World::new(Run { clocks, fates: vec![fate], incidents });
        world.go();
        let leading = (0..world.replicas.len()).filter(|n| world.replicas[*n].election.term(world.clock(*n)).is_some()).count();
        prop_assert_eq!(leading, 1, "{:?}", world.lease);
        prop_assert!(!world.leaders.is_empty());
    }
}
