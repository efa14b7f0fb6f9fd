//! Leads by the Lease of the kube-scheduler that runs in the same pod: decided from what was read, and the time.
//!
//! A second kube-scheduler asks the extender in its own pod alone, so that extender has to decide exactly while its neighbour
//! holds kube-scheduler's Lease. Reads that Lease and never writes it. Does no I/O and reads no clock.
//!
//! kube-scheduler leaves a holder alone for the Lease's duration from the moment at which it *sees* a renewal. A version of
//! the Lease that one read shows and the read before did not was written after that earlier read was *sent*; a term counts
//! from then, so it always ends before another kube-scheduler can hold the Lease.

use std::time::{Duration, Instant};

use super::election::{Action, Record, Reign, Terms};

/// Longest host name of a pod.
const MAX_HOST_NAME: usize = 63;

/// The part of one extender beside a kube-scheduler.
#[derive(Clone, Debug)]
pub struct Neighbour {
    /// Prefix of the names under which a kube-scheduler of this pod holds the Lease.
    prefix: String,
    terms: Terms,
    seen: Option<Seen>,
    /// The Lease is not read before.
    due: Instant,
    reign: Option<Reign>,
    n_reigns: u64,
    has_ended: bool,
}

/// The Lease as it was read last.
#[derive(Clone, Debug)]
struct Seen {
    version: String,
    record: Record,
    /// The time at which the last read was sent that showed this version.
    sent: Instant,
}

impl Neighbour {
    /// Beside the kube-scheduler of the pod of this name.
    pub fn of(pod: &str, terms: Terms, now: Instant) -> Self {
        Self {
            prefix: prefix(pod),
            terms,
            seen: None,
            due: now,
            reign: None,
            n_reigns: 0,
            has_ended: false,
        }
    }

    /// The term of this extender, if there is one now.
    pub fn reign(&self, now: Instant) -> Option<Reign> {
        self.reign.filter(|reign| now < reign.renewed + self.terms.renew)
    }

    /// The holder of the Lease when it was read last; empty if it had none.
    pub fn holder(&self) -> &str {
        self.seen.as_ref().map_or("", |seen| seen.record.holder.as_str())
    }

    /// The reason for which the Lease is of no use although the pod's own kube-scheduler holds it, for people.
    pub fn problem(&self) -> Option<String> {
        let record = &self.seen.as_ref()?.record;
        (self.is_own(record) && self.is_short(record)).then(|| {
            format!(
                "kube-scheduler holds its Lease for {} s only: set leaderElection.leaseDuration of its configuration to {} s or more, or \
                 --lease-duration here to less",
                record.seconds,
                self.terms.lease.as_secs()
            )
        })
    }

    /// The next action: a read, or a wait.
    pub fn next(&mut self, now: Instant) -> Action {
        self.reign = self.reign(now);
        match self.has_ended {
            true => Action::End,
            false if now < self.due => Action::Wait(self.due),
            false => Action::Read,
        }
    }

    /// Ends the part: the Lease is not read again.
    pub fn resign(&mut self) {
        self.reign = None;
        self.has_ended = true;
    }

    /// The Lease was read by a request that was sent at `sent` and answered at `received`: its version and record, if there is
    /// a Lease.
    pub fn read(&mut self, sent: Instant, received: Instant, found: Option<(String, Record)>) {
        self.reign = self.reign(received);
        self.due = received + self.pause();
        let Some((version, record)) = found else {
            (self.seen, self.reign) = (None, None);
            return;
        };
        let before = self.seen.replace(Seen {
            version: version.clone(),
            record: record.clone(),
            sent,
        });
        if !self.is_own(&record) || self.is_short(&record) {
            self.reign = None;
            return;
        }
        // A version that the first read shows is of unknown age.
        let Some(before) = before.filter(|before| before.version != version) else {
            return;
        };
        let is_same_holder =
            before.record.holder == record.holder && before.record.transitions == record.transitions;
        if let Some(reign) = self.reign.as_mut().filter(|_| is_same_holder) {
            reign.renewed = before.sent;
        } else {
            self.n_reigns += 1;
            // kube-scheduler gives its Lease up without waiting for the binds of its extender.
            self.reign = Some(Reign {
                number: self.n_reigns,
                renewed: before.sent,
                is_handed_over: false,
            });
        }
    }

    /// The Lease could not be read, which was known at `received`.
    pub fn unread(&mut self, received: Instant) {
        self.reign = self.reign(received);
        self.due = received + self.pause();
    }

    /// Half of the period in which kube-scheduler renews by default, so that a term is renewed in time.
    fn pause(&self) -> Duration {
        self.terms.retry / 2
    }

    fn is_own(&self, record: &Record) -> bool {
        record.holder.starts_with(&self.prefix)
    }

    fn is_short(&self, record: &Record) -> bool {
        Duration::from_secs(record.seconds) < self.terms.lease
    }
}

/// The beginning of the names under which a kube-scheduler in this pod holds a Lease: the host name, which kubelet makes of the
/// pod's name (at most 63 bytes, without a `-` or `.` at the end), and an underscore.
pub(super) fn prefix(pod: &str) -> String {
    let host = match pod.get(..MAX_HOST_NAME) {
        Some(beginning) if pod.len() > MAX_HOST_NAME => beginning.trim_end_matches(['-', '.']),
        _ => pod,
    };
    format!("{host}_")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TERMS: Terms = Terms {
        lease: Duration::from_secs(15),
        renew: Duration::from_secs(10),
        retry: Duration::from_secs(2),
    };

    /// As long as the Lease: any time that a term counts too much is seen.
    const TIGHT: Terms = Terms {
        renew: TERMS.lease,
        ..TERMS
    };

    fn after(start: Instant, tenths: u64) -> Instant {
        start + Duration::from_millis(100 * tenths)
    }

    fn record(holder: &str) -> Record {
        Record {
            holder: holder.to_owned(),
            seconds: 15,
            transitions: 0,
        }
    }

    fn read(neighbour: &mut Neighbour, start: Instant, tenths: u64, version: &str, record: Record) {
        neighbour.read(
            after(start, tenths),
            after(start, tenths + 1),
            Some((version.to_owned(), record)),
        );
    }

    #[test]
    fn a_term_counts_from_the_read_before_the_renewal() {
        let start = Instant::now();
        let mut neighbour = Neighbour::of("a", TERMS, start);
        assert_eq!(neighbour.next(start), Action::Read);
        read(&mut neighbour, start, 0, "1", record("a_1"));
        assert_eq!(neighbour.reign(after(start, 1)), None, "the Lease may be old");
        assert_eq!(neighbour.next(after(start, 1)), Action::Wait(after(start, 11)));
        read(&mut neighbour, start, 11, "1", record("a_1"));
        read(&mut neighbour, start, 22, "2", record("a_1"));
        let reign = neighbour.reign(after(start, 23)).unwrap();
        assert_eq!(
            (reign.number, reign.renewed, reign.is_handed_over),
            (1, after(start, 11), false)
        );
        assert!(
            neighbour.reign(after(start, 110)).is_some() && neighbour.reign(after(start, 111)).is_none(),
            "ends without a renewal"
        );
        read(&mut neighbour, start, 33, "3", record("a_1"));
        assert_eq!(
            neighbour.reign(after(start, 34)).unwrap().renewed,
            after(start, 22)
        );
    }

    #[test]
    fn a_term_ends_with_the_holder() {
        let start = Instant::now();
        let of = |version: &str, record: Record| {
            let mut neighbour = Neighbour::of("a", TERMS, start);
            read(&mut neighbour, start, 0, "1", self::record("a_1"));
            read(&mut neighbour, start, 11, "2", self::record("a_1"));
            assert_eq!(
                neighbour.reign(after(start, 12)).map(|reign| reign.number),
                Some(1)
            );
            read(&mut neighbour, start, 22, version, record);
            (
                neighbour.reign(after(start, 23)).map(|reign| reign.number),
                neighbour.problem().is_some(),
            )
        };
        assert_eq!(of("2", record("a_1")), (Some(1), false), "not renewed yet");
        assert_eq!(of("3", record("b_1")), (None, false));
        assert_eq!(
            of("3", record("ab_1")),
            (None, false),
            "another pod, whose name begins alike"
        );
        assert_eq!(
            of(
                "3",
                Record {
                    holder: String::new(),
                    seconds: 1,
                    transitions: 0
                }
            ),
            (None, false),
            "given up"
        );
        assert_eq!(
            of("3", record("a_2")),
            (Some(2), false),
            "kube-scheduler was restarted, another may have led meanwhile"
        );
        assert_eq!(
            of(
                "3",
                Record {
                    transitions: 2,
                    ..record("a_1")
                }
            ),
            (Some(2), false)
        );
        assert_eq!(
            of(
                "3",
                Record {
                    seconds: 5,
                    ..record("a_1")
                }
            ),
            (None, true)
        );
    }

    #[test]
    fn a_long_name_is_cut_as_kubelet_cuts_host_names() {
        assert_eq!(prefix("gpushare-scheduler-7d-x"), "gpushare-scheduler-7d-x_");
        assert_eq!(
            prefix(&format!("{}-{}", "a".repeat(62), "b".repeat(9))),
            format!("{}_", "a".repeat(62))
        );
        assert_eq!(prefix(&"a".repeat(63)), format!("{}_", "a".repeat(63)));
    }

    #[test]
    fn a_lease_that_is_gone_ends_the_term() {
        let start = Instant::now();
        let mut neighbour = Neighbour::of("a", TERMS, start);
        read(&mut neighbour, start, 0, "1", record("a_1"));
        read(&mut neighbour, start, 11, "2", record("a_1"));
        neighbour.unread(after(start, 20));
        assert!(
            neighbour.reign(after(start, 21)).is_some(),
            "one failed read changes nothing"
        );
        neighbour.read(after(start, 22), after(start, 23), None);
        assert_eq!(
            (neighbour.reign(after(start, 23)), neighbour.holder()),
            (None, "")
        );
        read(&mut neighbour, start, 33, "9", record("a_1"));
        assert_eq!(
            neighbour.reign(after(start, 34)),
            None,
            "the new Lease may be old"
        );
        neighbour.resign();
        assert_eq!(neighbour.next(after(start, 60)), Action::End);
    }

    /// A Lease that was read: its version, and its record.
    type Read = Option<(String, Record)>;

    /// One kube-scheduler per pod, as client-go elects them, each beside an extender.
    #[derive(Clone, Debug)]
    struct Pod {
        /// Version of the Lease and the time at which this kube-scheduler first saw it.
        seen: (u64, u64),
        /// The kube-scheduler does nothing before, as if stopped.
        stopped_until: u64,
        /// Number of the kube-scheduler's process.
        process: u64,
        neighbour: Neighbour,
        /// A read of the extender that is on its way: time sent, and the answer, which is known at a later time.
        reading: Option<(u64, u64, Read)>,
    }

    impl Pod {
        fn new(name: &str, start: Instant) -> Self {
            Self {
                seen: (0, 0),
                stopped_until: 0,
                process: 0,
                neighbour: Neighbour::of(name, TIGHT, start),
                reading: None,
            }
        }

        /// kube-scheduler acquires or renews the Lease if client-go's rule lets it.
        fn contend(&mut self, name: &str, lease: &mut Option<(u64, Record)>, now: u64) {
            let own = format!("{name}_{}", self.process);
            let version = lease.as_ref().map_or(0, |(version, _)| *version);
            if self.seen.0 != version {
                self.seen = (version, now);
            }
            let is_free = lease
                .as_ref()
                .is_none_or(|(_, record)| record.holder == own || now > self.seen.1 + 10 * record.seconds);
            if is_free {
                let transitions = lease.as_ref().map_or(0, |(_, record)| {
                    record.transitions + u64::from(record.holder != own)
                });
                *lease = Some((
                    version + 1,
                    Record {
                        holder: own,
                        seconds: 15,
                        transitions,
                    },
                ));
                self.seen = (version + 1, now);
            }
        }

        /// The extender receives an answer that is due, or sends a read; `delay` is the time of the answer.
        fn look(&mut self, lease: Option<&(u64, Record)>, start: Instant, now: u64, delay: u64) {
            match self.reading.take() {
                Some((sent, received, answer)) if received <= now => {
                    self.neighbour.read(after(start, sent), after(start, now), answer);
                }
                None if self.neighbour.next(after(start, now)) == Action::Read => {
                    let answer = lease.map(|(version, record)| (version.to_string(), record.clone()));
                    self.reading = Some((now, now + delay, answer));
                }
                reading => self.reading = reading,
            }
        }
    }

    proptest! {
        /// Whatever stops, restarts or is slow, no extender has a term while another pod's kube-scheduler holds the Lease. A
        /// Lease that its holder gives up is not part of this: the former extender sees so a read later, and until then the
        /// API server refuses its bindings.
        #[test]
        fn no_two_decide(steps in prop::collection::vec((0..2_usize, 0..20_u8, 1..200_u64), 1..600)) {
            let start = Instant::now();
            let mut lease: Option<(u64, Record)> = None;
            let names = ["a", "b"];
            let mut pods = names.map(|name| Pod::new(name, start));
            let mut now = 0;
            for (which, fault, length) in steps {
                now += length % 9;
                let (name, pod) = (names[which], &mut pods[which]);
                match fault {
                    0 => pod.stopped_until = now + length,
                    1 => (pod.process, pod.seen) = (pod.process + 1, (0, 0)),
                    _ => {}
                }
                if pod.stopped_until <= now {
                    pod.contend(name, &mut lease, now);
                }
                pod.look(lease.as_ref(), start, now, length % 40);
                let holder = lease.as_ref().map_or("", |(_, record)| &record.holder);
                for (name, pod) in names.iter().zip(&pods) {
                    let decides = pod.neighbour.reign(after(start, now)).is_some();
                    prop_assert!(!decides || holder.starts_with(&format!("{name}_")), "{name} decides, and {holder} holds the Lease");
                }
            }
        }
    }
}
