//! Who leads: what to read from and write to one Lease, decided from what was read, what was written, and the time.
//!
//! Does no I/O and reads no clock. Safe whatever the replicas' clocks say, as long as they run at about the same speed: a
//! replica compares only times of its own. A leader counts from the moment at which it *sent* a renewal; everybody else
//! from the moment at which he *received* what he read, so he always ends later. No write is ever made over a version of
//! the Lease that was not read.

use std::time::{Duration, Instant};

/// For how long what holds; every replica keeps to its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// How long the others leave a holder alone that does not renew.
    pub lease: Duration,
    /// How long a leader that cannot renew goes on: shorter than the lease.
    pub renew: Duration,
    /// How often is renewed, or looked.
    pub retry: Duration,
}

/// What a Lease says, as far as it matters here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// Who holds it; empty for nobody.
    pub holder: String,
    /// How long the holder wants to be left alone, in seconds.
    pub seconds: u64,
    /// How often it changed hands.
    pub transitions: u64,
}

impl Record {
    /// How it looks once its holder has given it up: nobody, for a second. That somebody wiped out the holder's name is
    /// not enough.
    fn is_given_up(&self) -> bool {
        self.holder.is_empty() && self.seconds == 1
    }
}

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Nothing before this.
    Wait(Instant),
    /// Read the Lease, from the API server itself and not from a cache.
    Read,
    /// Make the Lease.
    Create(Record),
    /// Write over this version, and no other.
    Write {
        /// The version.
        version: String,
        /// What it is to say.
        record: Record,
    },
    /// It is over.
    End,
}

/// What became of a write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Written {
    /// The Lease has this version now.
    Done(String),
    /// Nothing was written: there is another version, or none.
    Overtaken,
    /// Nobody knows.
    Unknown,
}

/// A time of leading without a gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reign {
    /// Counts them.
    pub number: u64,
    /// When the last renewal was sent that is known to have been written.
    pub renewed: Instant,
    /// Whether the one before gave the Lease up, after its last write.
    pub is_handed_over: bool,
}

/// What is known of the Lease.
#[derive(Clone, Debug)]
enum Known {
    /// Not enough: it has to be read.
    Nothing,
    /// There is none.
    Absent,
    /// It was so when it was last looked at.
    There,
}

/// One replica's part in the election.
#[derive(Clone, Debug)]
pub struct Election {
    identity: String,
    terms: Terms,
    known: Known,
    version: String,
    record: Record,
    /// When this version was first seen here.
    since: Instant,
    /// Nothing is done before.
    due: Instant,
    reign: Option<Reign>,
    n_reigns: u64,
    is_resigning: bool,
}

impl Election {
    /// A replica that has seen nothing yet. No other may ever have had its identity, its own earlier processes included.
    pub fn new(identity: String, terms: Terms, now: Instant) -> Self {
        Self {
            identity,
            terms,
            known: Known::Nothing,
            version: String::new(),
            record: Record::default(),
            since: now,
            due: now,
            reign: None,
            n_reigns: 0,
            is_resigning: false,
        }
    }

    /// Whether, and since which renewal, this replica leads.
    pub fn reign(&self, now: Instant) -> Option<Reign> {
        self.reign.filter(|reign| now < reign.renewed + self.terms.renew)
    }

    /// Who held the Lease when it was last looked at.
    pub fn holder(&self) -> &str {
        &self.record.holder
    }

    /// What to do now. After whatever is not [`Action::Wait`], say how it went before asking again.
    pub fn next(&mut self, now: Instant) -> Action {
        self.reign = self.reign(now);
        if now < self.due {
            return Action::Wait(self.due);
        }
        match self.known {
            Known::Absent if self.is_resigning => Action::End,
            // Naming nobody, it has to be left alone for as long as one that somebody holds: whoever led by a Lease that
            // was deleted finds out before.
            Known::Absent => Action::Create(Record {
                seconds: self.seconds(),
                ..Record::default()
            }),
            Known::There if self.is_resigning && self.is_holder() => self.write(Record {
                holder: String::new(),
                seconds: 1,
                transitions: self.record.transitions,
            }),
            Known::There if self.is_resigning => Action::End,
            Known::There if self.is_holder() || now >= self.free_at() => self.write(self.own_record()),
            Known::Nothing | Known::There => Action::Read,
        }
    }

    /// Gives the Lease up, if it is held, and takes no further part. All that is done on the strength of leading must have
    /// ended.
    pub fn resign(&mut self, now: Instant) {
        self.is_resigning = true;
        self.reign = None;
        self.due = now;
    }

    /// The Lease was read: its version and what it says, if there is one. The answer came at `received`.
    pub fn read(&mut self, received: Instant, found: Option<(String, Record)>) {
        self.reign = self.reign(received);
        let Some((version, record)) = found else {
            self.reign = None;
            self.known = Known::Absent;
            self.due = received;
            return;
        };
        if version != self.version {
            self.since = received;
        }
        (self.version, self.record, self.known) = (version, record, Known::There);
        if self.is_holder() || self.is_resigning {
            self.due = received;
        } else {
            self.reign = None;
            self.due = self.free_at().min(received + self.terms.retry).max(received);
        }
    }

    /// The Lease could not be read.
    pub fn unread(&mut self, received: Instant) {
        self.reign = self.reign(received);
        self.known = Known::Nothing;
        self.due = received + self.terms.retry / 2;
    }

    /// What became of a write that was sent at `sent`; this was known at `received`.
    pub fn written(&mut self, record: Record, sent: Instant, received: Instant, outcome: Written) {
        self.reign = self.reign(received);
        match outcome {
            Written::Done(version) => {
                let is_handed_over = self.record.is_given_up();
                (self.version, self.record, self.since, self.known) =
                    (version, record, received, Known::There);
                if self.is_holder() {
                    self.renew(sent, is_handed_over);
                    self.due = sent + self.terms.retry;
                } else {
                    self.due = received + self.terms.retry;
                }
            }
            Written::Overtaken => {
                self.known = Known::Nothing;
                self.due = received;
            }
            Written::Unknown => self.unread(received),
        }
        if self.is_resigning {
            self.due = self.due.min(received + self.terms.retry / 2);
        }
    }

    fn renew(&mut self, sent: Instant, is_handed_over: bool) {
        if let Some(reign) = self.reign.as_mut() {
            reign.renewed = sent;
        } else if !self.is_resigning {
            self.n_reigns += 1;
            self.reign = Some(Reign {
                number: self.n_reigns,
                renewed: sent,
                is_handed_over,
            });
        }
    }

    /// When the Lease may be taken from whoever is named in it.
    fn free_at(&self) -> Instant {
        if self.record.is_given_up() {
            return self.since;
        }
        // The holder may have been told another duration than this replica.
        self.since
            + self
                .terms
                .lease
                .max(Duration::from_secs(self.record.seconds.min(3600)))
    }

    fn is_holder(&self) -> bool {
        self.record.holder == self.identity
    }

    fn own_record(&self) -> Record {
        let transitions = self.record.transitions + u64::from(!self.is_holder());
        Record {
            holder: self.identity.clone(),
            seconds: self.seconds(),
            transitions,
        }
    }

    fn write(&self, record: Record) -> Action {
        Action::Write {
            version: self.version.clone(),
            record,
        }
    }

    fn seconds(&self) -> u64 {
        // More than one, which would say that it is given up.
        self.terms
            .lease
            .as_millis()
            .div_ceil(1000)
            .try_into()
            .unwrap_or(u64::MAX)
            .max(2)
    }
}

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
