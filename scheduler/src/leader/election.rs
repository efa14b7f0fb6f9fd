//! The election of a leader by a Lease that the replicas write, decided from reads, writes and the time.
//!
//! Does no I/O and reads no clock. Safe whatever the replicas' clocks say, as long as they run at about the same speed: a
//! replica compares only its own times. The leader counts from the moment at which it *sent* a renewal, every other replica from
//! the moment at which it *received* what it read, which is always later. No replica writes over a version of the Lease that it
//! has not read.

use std::fmt;
use std::time::{Duration, Instant};

/// The times of a Lease, as in client-go's leader election; each replica uses its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseTimes {
    /// `leaseDuration`: time after which other replicas take a Lease that is not renewed.
    pub lease: Duration,
    /// `renewDeadline`: time for which a leader that cannot renew goes on; shorter than the lease.
    pub renew: Duration,
    /// `retryPeriod`: pause between two renewals, or reads.
    pub retry: Duration,
}

/// The fields of a Lease that the election depends on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeaseRecord {
    /// `holderIdentity`; empty if no replica holds it.
    pub holder: String,
    /// `leaseDurationSeconds`.
    pub seconds: u64,
    /// `leaseTransitions`.
    pub transitions: u64,
}

impl LeaseRecord {
    /// Returns true if the holder has released it: no holder, for one second. An operator who removes the holder's name has
    /// not released it.
    fn is_released(&self) -> bool {
        self.holder.is_empty() && self.seconds == 1
    }
}

/// The next step of a replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseAction {
    /// Do nothing until then.
    Wait(Instant),
    /// Read the Lease, from the API server itself and not from a cache.
    Read,
    /// Create the Lease.
    Create(LeaseRecord),
    /// Replace this version, and no other.
    Write {
        /// The version.
        version: String,
        /// The new content.
        record: LeaseRecord,
    },
    /// Take no further part.
    End,
}

/// The outcome of a write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WriteOutcome {
    /// Written; the Lease has this version now.
    Done(String),
    /// Not written: the Lease has another version, or is gone.
    Overtaken,
    /// It may have been written.
    Unknown,
}

/// A time for which a replica leads without a gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Term {
    /// Differs from term to term.
    pub number: u64,
    /// Time at which the last renewal was sent that is known to be written.
    pub renewed: Instant,
    /// True if the previous leader released the Lease, after its last bind.
    pub is_handed_over: bool,
}

/// The replica's knowledge of the Lease.
#[derive(Clone, Debug)]
enum Known {
    /// It has to be read.
    Nothing,
    /// There was none.
    Absent,
    /// It was as `version` and `record` say.
    There,
}

/// One replica in the election.
#[derive(Clone, Debug)]
pub struct Election {
    identity: String,
    times: LeaseTimes,
    known: Known,
    version: String,
    record: LeaseRecord,
    /// Time at which this replica first saw the version.
    since: Instant,
    /// Time of the next step.
    due: Instant,
    term: Option<Term>,
    n_terms: u64,
    is_resigning: bool,
}

/// The Lease by which a replica leads: one that the replicas contend for, or that of the kube-scheduler in the same pod.
pub trait TermSource: fmt::Debug + Send {
    /// Returns true if the replica writes the Lease itself, and can release it.
    fn is_own(&self) -> bool;

    /// The term of this replica, if it leads now.
    fn term(&self, now: Instant) -> Option<Term>;

    /// The holder of the Lease when it was last read or written; empty if it had none.
    fn holder(&self) -> &str;

    /// The reason for which this replica cannot lead although it could by the holder of the Lease.
    fn problem(&self) -> Option<String>;

    /// The next step. After each step but [`LeaseAction::Wait`] its outcome comes first.
    fn next(&mut self, now: Instant) -> LeaseAction;

    /// Takes the answer to a read that was sent at `sent` and answered at `received`: version and record, if there is a Lease.
    fn read(&mut self, sent: Instant, received: Instant, found: Option<(String, LeaseRecord)>);

    /// Takes a read that failed at `received`.
    fn unread(&mut self, received: Instant);

    /// Takes the outcome of a write that was sent at `sent`, known at `received`.
    fn written(&mut self, record: LeaseRecord, sent: Instant, received: Instant, outcome: WriteOutcome);

    /// Takes no further part; a Lease of its own that this replica holds is released. All binds must have ended.
    fn resign(&mut self, now: Instant);
}

impl Election {
    /// A replica that has read nothing yet. No other process may ever have had its identity.
    pub fn new(identity: String, times: LeaseTimes, now: Instant) -> Self {
        Self {
            identity,
            times,
            known: Known::Nothing,
            version: String::new(),
            record: LeaseRecord::default(),
            since: now,
            due: now,
            term: None,
            n_terms: 0,
            is_resigning: false,
        }
    }

    fn renew(&mut self, sent: Instant, is_handed_over: bool) {
        if let Some(term) = self.term.as_mut() {
            term.renewed = sent;
        } else if !self.is_resigning {
            // A renewal after the term has run out begins another: binds in between were refused.
            self.n_terms += 1;
            self.term = Some(Term {
                number: self.n_terms,
                renewed: sent,
                is_handed_over,
            });
        }
    }

    /// Time from which this replica may take the Lease from its holder.
    fn free_at(&self) -> Instant {
        if self.record.is_released() {
            return self.since;
        }
        // The holder may be configured with another duration than this replica.
        self.since
            + self
                .times
                .lease
                .max(Duration::from_secs(self.record.seconds.min(3600)))
    }

    fn is_holder(&self) -> bool {
        self.record.holder == self.identity
    }

    fn own_record(&self) -> LeaseRecord {
        let transitions = self.record.transitions + u64::from(!self.is_holder());
        LeaseRecord {
            holder: self.identity.clone(),
            seconds: self.seconds(),
            transitions,
        }
    }

    fn write(&self, record: LeaseRecord) -> LeaseAction {
        LeaseAction::Write {
            version: self.version.clone(),
            record,
        }
    }

    fn seconds(&self) -> u64 {
        // One second means released.
        self.times
            .lease
            .as_millis()
            .div_ceil(1000)
            .try_into()
            .unwrap_or(u64::MAX)
            .max(2)
    }
}

impl TermSource for Election {
    fn is_own(&self) -> bool {
        true
    }

    fn problem(&self) -> Option<String> {
        None
    }

    fn term(&self, now: Instant) -> Option<Term> {
        self.term.filter(|term| now < term.renewed + self.times.renew)
    }

    fn holder(&self) -> &str {
        &self.record.holder
    }

    fn next(&mut self, now: Instant) -> LeaseAction {
        self.term = self.term(now);
        if now < self.due {
            return LeaseAction::Wait(self.due);
        }
        match self.known {
            Known::Absent if self.is_resigning => LeaseAction::End,
            // Without a holder, every replica waits for the Lease's duration, as for one that is held. A replica that led by a
            // Lease that was deleted stops within that time.
            Known::Absent => LeaseAction::Create(LeaseRecord {
                seconds: self.seconds(),
                ..LeaseRecord::default()
            }),
            Known::There if self.is_resigning && self.is_holder() => self.write(LeaseRecord {
                holder: String::new(),
                seconds: 1,
                transitions: self.record.transitions,
            }),
            Known::There if self.is_resigning => LeaseAction::End,
            Known::There if self.is_holder() || now >= self.free_at() => self.write(self.own_record()),
            Known::Nothing | Known::There => LeaseAction::Read,
        }
    }

    fn resign(&mut self, now: Instant) {
        self.is_resigning = true;
        self.term = None;
        self.due = now;
    }

    fn read(&mut self, _sent: Instant, received: Instant, found: Option<(String, LeaseRecord)>) {
        self.term = self.term(received);
        let Some((version, record)) = found else {
            self.term = None;
            self.known = Known::Absent;
            self.due = received;
            return;
        };
        // The Lease counts as held from the moment at which this replica saw it change, whatever the holder's clock says.
        if version != self.version {
            self.since = received;
        }
        (self.version, self.record, self.known) = (version, record, Known::There);
        if self.is_holder() || self.is_resigning {
            self.due = received;
        } else {
            self.term = None;
            self.due = self.free_at().min(received + self.times.retry).max(received);
        }
    }

    fn unread(&mut self, received: Instant) {
        // The write may have got through, so the next one needs the version that is there.
        self.term = self.term(received);
        self.known = Known::Nothing;
        self.due = received + self.times.retry / 2;
    }

    fn written(&mut self, record: LeaseRecord, sent: Instant, received: Instant, outcome: WriteOutcome) {
        self.term = self.term(received);
        match outcome {
            WriteOutcome::Done(version) => {
                let is_handed_over = self.record.is_released();
                (self.version, self.record, self.since, self.known) =
                    (version, record, received, Known::There);
                if self.is_holder() {
                    self.renew(sent, is_handed_over);
                    self.due = sent + self.times.retry;
                } else {
                    self.due = received + self.times.retry;
                }
            }
            WriteOutcome::Overtaken => {
                self.known = Known::Nothing;
                self.due = received;
            }
            WriteOutcome::Unknown => self.unread(received),
        }
        if self.is_resigning {
            self.due = self.due.min(received + self.times.retry / 2);
        }
    }
}

#[cfg(test)]
mod tests;
