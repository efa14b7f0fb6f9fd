//! The election of a leader by a Lease that the replicas write, decided from reads, writes and the time, without I/O or a clock.
//!
//! Safe whatever the replicas' clocks say, as long as they run at about the same speed: the leader counts from the moment at
//! which it *sent* a renewal, every other replica from the moment at which it *received* what it read, which is always later.
//! No replica writes over a version of the Lease that it has not read.

use std::fmt;
use std::time::{Duration, Instant};

/// Longest time of one bind; must be below the extender's `httpTimeout` in kube-scheduler's configuration (3 s as shipped).
pub const BIND_TIMEOUT: Duration = Duration::from_secs(2);

/// The times of a Lease, as in client-go's leader election. Each replica goes by the times of its own flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LeaseTimes {
    /// `leaseDuration`: time after which other replicas take a Lease that is not renewed. Whole seconds, at least two, since one
    /// second means that the Lease is released.
    pub lease: Duration,
    /// `renewDeadline`: time for which a leader that cannot renew goes on; shorter than the lease.
    pub renew: Duration,
    /// `retryPeriod`: pause between two renewals, or reads.
    pub retry: Duration,
}

impl LeaseTimes {
    /// The times for a Lease of this duration: by default (15 s) those of client-go.
    pub(crate) fn new(lease: Duration) -> Self {
        // The last bind of a leader that cannot renew must end before another replica may take the Lease.
        let renew = (lease * 2 / 3).min(lease.saturating_sub(BIND_TIMEOUT));
        Self {
            lease,
            renew,
            // Four renewals in a row may fail before the leader gives up.
            retry: renew / 5,
        }
    }
}

/// The fields of a Lease that the election depends on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct LeaseRecord {
    /// `holderIdentity`; empty if no replica holds the Lease.
    pub holder: String,
    /// `leaseDurationSeconds`.
    pub seconds: u64,
    /// `leaseTransitions`.
    pub transitions: u64,
}

impl LeaseRecord {
    /// Returns true if the last holder has released the Lease.
    fn is_released(&self) -> bool {
        // client-go writes a duration of one second with the empty holder. An operator who removes the holder's name leaves the
        // duration, and the former holder may still be binding.
        self.holder.is_empty() && self.seconds == 1
    }
}

/// The next step of a replica in the election.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LeaseAction {
    Wait(Instant),
    /// Read the Lease, from the API server itself and not from a cache.
    Read,
    Create(LeaseRecord),
    /// Replace this version of the Lease, and no other version.
    Write {
        /// The `resourceVersion` to replace.
        version: String,
        record: LeaseRecord,
    },
    /// Take no further part in the election.
    End,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum WriteOutcome {
    /// The Lease is written, and has this `resourceVersion` now.
    Done(String),
    /// The Lease is not written: it has another version, or was deleted.
    Overtaken,
    /// The Lease may have been written: there was no answer, or an error.
    Unknown,
}

/// A time during which a replica leads without a gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Term {
    /// The number of the term, which differs from that of every other term of this process.
    pub number: u64,
    /// The time at which the last renewal that is known to be written was sent.
    pub renewed: Instant,
    /// True if the previous leader released the Lease, after its last bind.
    pub is_handed_over: bool,
}

/// The state of the Lease as far as a replica knows it.
#[derive(Clone, Debug)]
enum Known {
    /// Nothing, so the Lease has to be read.
    Nothing,
    Absent,
    /// The Lease exists, with the `version` and the `record` of [`Election`].
    Exists,
}

/// The election by a Lease of the replicas' own, from the side of one replica.
#[derive(Clone, Debug)]
pub(super) struct Election {
    identity: String,
    times: LeaseTimes,
    known: Known,
    /// The `resourceVersion` of the Lease that was last read or written.
    version: String,
    record: LeaseRecord,
    /// The time at which this replica first saw the version.
    version_seen: Instant,
    next_step: Instant,
    term: Option<Term>,
    n_terms: u64,
    /// True once the replica takes no further part, except that it releases the Lease.
    is_resigning: bool,
}

/// The Lease by which a replica leads: one that the replicas contend for, or that of the kube-scheduler in the same pod.
pub(super) trait TermSource: fmt::Debug + Send {
    fn term(&self, now: Instant) -> Option<Term>;

    /// The holder of the Lease when it was last read or written; empty if it had none.
    fn holder(&self) -> &str;

    /// The reason for which this replica cannot lead although the holder of the Lease says that it should.
    fn problem(&self) -> Option<String> {
        None
    }

    /// The next step. Before the call, the outcome of the last request was reported by `read`, `written` or `no_answer`.
    fn next(&mut self, now: Instant) -> LeaseAction;

    /// Takes the answer to a read: the Lease's version and record, if it exists.
    fn read(&mut self, sent: Instant, received: Instant, found: Option<(String, LeaseRecord)>);

    /// Takes note of a request to which no answer, or an error, came at `received`.
    fn no_answer(&mut self, received: Instant);

    /// Takes the outcome of a write of `record`. A source that asks for no write has none.
    fn written(&mut self, _: LeaseRecord, _sent: Instant, _received: Instant, _: WriteOutcome) {}

    /// Ends this replica's part; the next steps release a Lease of its own. All binds must have ended.
    fn resign(&mut self, _now: Instant) {}
}

impl Election {
    /// A replica that has not read the Lease yet. No other process may ever have had this identity.
    pub(super) fn new(identity: String, times: LeaseTimes, now: Instant) -> Self {
        Self {
            identity,
            times,
            known: Known::Nothing,
            version: String::new(),
            record: LeaseRecord::default(),
            version_seen: now,
            next_step: now,
            term: None,
            n_terms: 0,
            is_resigning: false,
        }
    }

    /// Prolongs the term, or begins one with this `is_handed_over`, after a write of the Lease that was sent at `sent`.
    fn renew(&mut self, sent: Instant, is_handed_over: bool) {
        if let Some(term) = self.term.as_mut() {
            term.renewed = sent;
        } else if !self.is_resigning {
            // Also if the last term ran out before this renewal, since another replica may have led in between.
            self.n_terms += 1;
            self.term = Some(Term {
                number: self.n_terms,
                renewed: sent,
                is_handed_over,
            });
        }
    }

    /// The time from which on this replica may take the Lease from its holder.
    fn free_at(&self) -> Instant {
        if self.record.is_released() {
            return self.version_seen;
        }
        // The holder may be configured with another duration than this replica; an absurd one counts as an hour.
        let holders_lease = Duration::from_secs(self.record.seconds.min(3600));
        self.version_seen + self.times.lease.max(holders_lease)
    }

    /// Returns true if the Lease, as it was last read or written, names this replica as its holder.
    fn is_holder(&self) -> bool {
        self.record.holder == self.identity
    }

    fn own_record(&self) -> LeaseRecord {
        LeaseRecord {
            holder: self.identity.clone(),
            seconds: self.times.lease.as_secs(),
            transitions: self.record.transitions + u64::from(!self.is_holder()),
        }
    }

    /// The step that writes this content over the version that was last read or written.
    fn write(&self, record: LeaseRecord) -> LeaseAction {
        LeaseAction::Write {
            version: self.version.clone(),
            record,
        }
    }
}

impl TermSource for Election {
    fn term(&self, now: Instant) -> Option<Term> {
        self.term.filter(|term| now < term.renewed + self.times.renew)
    }

    fn holder(&self) -> &str {
        &self.record.holder
    }

    /// The next step: to wait, or to read, create, take, renew or release the Lease, by what is known of the Lease.
    fn next(&mut self, now: Instant) -> LeaseAction {
        // Ends the term if it has run out.
        self.term = self.term(now);
        if now < self.next_step {
            return LeaseAction::Wait(self.next_step);
        }
        match self.known {
            Known::Absent if self.is_resigning => LeaseAction::End,
            // Without a holder, every replica waits for the Lease's duration, as for one that is held. A replica that led by a
            // Lease that was deleted stops within that time.
            Known::Absent => LeaseAction::Create(LeaseRecord {
                seconds: self.times.lease.as_secs(),
                ..LeaseRecord::default()
            }),
            Known::Exists if self.is_resigning && self.is_holder() => self.write(LeaseRecord {
                holder: String::new(),
                seconds: 1,
                transitions: self.record.transitions,
            }),
            Known::Exists if self.is_resigning => LeaseAction::End,
            Known::Exists if self.is_holder() || now >= self.free_at() => self.write(self.own_record()),
            Known::Nothing | Known::Exists => LeaseAction::Read,
        }
    }

    fn resign(&mut self, now: Instant) {
        self.is_resigning = true;
        self.term = None;
        self.next_step = now;
    }

    /// Takes the Lease as a read has shown it. A change of its version restarts the time after which this replica may take it.
    fn read(&mut self, _sent: Instant, received: Instant, found: Option<(String, LeaseRecord)>) {
        self.term = self.term(received);
        let Some((version, record)) = found else {
            self.term = None;
            self.known = Known::Absent;
            self.next_step = received;
            return;
        };
        // The Lease counts as held from the moment at which this replica saw it change, whatever the holder's clock says.
        if version != self.version {
            self.version_seen = received;
        }
        (self.version, self.record, self.known) = (version, record, Known::Exists);
        if self.is_holder() || self.is_resigning {
            // The replica reads its own Lease only after a request without an answer, so it must renew or release it at once.
            self.next_step = received;
        } else {
            self.term = None;
            // The read at that time shows if the holder has renewed the Lease meanwhile.
            self.next_step = self.free_at().min(received + self.times.retry).max(received);
        }
    }

    fn no_answer(&mut self, received: Instant) {
        self.term = self.term(received);
        // If it was a write, it may have got through, so the next step reads the version that is there.
        self.known = Known::Nothing;
        self.next_step = received + self.times.retry / 2;
    }

    /// Takes the outcome of a write. A successful write as the holder begins or prolongs this replica's term.
    fn written(&mut self, record: LeaseRecord, sent: Instant, received: Instant, outcome: WriteOutcome) {
        self.term = self.term(received);
        match outcome {
            WriteOutcome::Done(version) => {
                // `self.record` is still the one before this write: the former holder may have released the Lease.
                let is_handed_over = self.record.is_released();
                (self.version, self.record, self.version_seen, self.known) =
                    (version, record, received, Known::Exists);
                if self.is_holder() {
                    self.renew(sent, is_handed_over);
                    self.next_step = sent + self.times.retry;
                } else {
                    // The Lease was created without a holder, or released.
                    self.next_step = received + self.times.retry;
                }
            }
            WriteOutcome::Overtaken => {
                // Another replica has written the Lease, so the next step is to read it.
                self.known = Known::Nothing;
                self.next_step = received;
            }
            WriteOutcome::Unknown => self.no_answer(received),
        }
        if self.is_resigning {
            // The end of the process waits for the release of the Lease. Only an API server that does not answer gets a pause.
            self.next_step = match self.known {
                Known::Exists => received,
                Known::Nothing | Known::Absent => self.next_step.min(received + self.times.retry / 2),
            };
        }
    }
}

#[cfg(test)]
mod tests;
