//! The Lease of the kube-scheduler in the same pod as the source of a replica's terms, decided from reads and the time. A second
//! kube-scheduler asks the extender in its own pod alone, which has to decide exactly while that kube-scheduler holds its Lease.
//!
//! Another kube-scheduler takes the Lease only after it has *seen* no renewal for the Lease's duration. A renewal that a read
//! shows for the first time was written after the read before that was *sent*. A term counts from then, so it ends before another
//! kube-scheduler can hold the Lease.

use std::time::{Duration, Instant};

use super::election::{LeaseAction, LeaseRecord, LeaseTimes, Term, TermSource};

/// Longest host name of a pod, to which kubelet cuts longer pod names.
const MAX_HOST_NAME: usize = 63;

/// The terms of an extender, which leads while the kube-scheduler in the same pod holds this Lease.
#[derive(Clone, Debug)]
pub(super) struct KubeSchedulerLease {
    /// The beginning of the holder identity of a kube-scheduler in this pod.
    holder_prefix: String,
    times: LeaseTimes,
    /// The Lease at the last read; `None` before the first read, and if there was none.
    seen: Option<SeenLease>,
    next_read: Instant,
    term: Option<Term>,
    n_terms: u64,
}

#[derive(Clone, Debug)]
struct SeenLease {
    version: String,
    record: LeaseRecord,
    /// The time at which the last read that showed this version was sent.
    sent: Instant,
}

impl KubeSchedulerLease {
    /// The terms of the extender in the pod of this name, which has not read the Lease yet.
    pub(super) fn new(pod: &str, times: LeaseTimes, now: Instant) -> Self {
        Self {
            holder_prefix: holder_prefix(pod),
            times,
            seen: None,
            next_read: now,
            term: None,
            n_terms: 0,
        }
    }

    /// Pause between two reads. kube-scheduler renews once in a retry period, and a term counts from the read before the one that
    /// shows the renewal, so reads come twice as often.
    fn pause(&self) -> Duration {
        self.times.retry / 2
    }

    fn is_held_in_this_pod(&self, record: &LeaseRecord) -> bool {
        record.holder.starts_with(&self.holder_prefix)
    }

    /// Returns true if the Lease is so short that another kube-scheduler may take it before a term of this replica ends.
    fn is_too_short(&self, record: &LeaseRecord) -> bool {
        Duration::from_secs(record.seconds) < self.times.lease
    }
}

impl TermSource for KubeSchedulerLease {
    fn term(&self, now: Instant) -> Option<Term> {
        self.term.filter(|term| now < term.renewed + self.times.renew)
    }

    fn holder(&self) -> &str {
        self.seen.as_ref().map_or("", |seen| seen.record.holder.as_str())
    }

    /// A Lease of kube-scheduler with too short a duration gives this replica no term.
    fn problem(&self) -> Option<String> {
        let record = &self.seen.as_ref()?.record;
        if !self.is_held_in_this_pod(record) || !self.is_too_short(record) {
            return None;
        }
        Some(format!(
            "kube-scheduler holds its Lease for {} s only: set leaderElection.leaseDuration of its configuration to {} s or more, or \
             --lease-duration here to less",
            record.seconds,
            self.times.lease.as_secs()
        ))
    }

    fn next(&mut self, now: Instant) -> LeaseAction {
        self.term = self.term(now);
        if now < self.next_read {
            LeaseAction::Wait(self.next_read)
        } else {
            LeaseAction::Read
        }
    }

    /// Takes the Lease as a read has shown it. A renewal by the kube-scheduler in this pod begins or prolongs this replica's
    /// term, which counts from the read before.
    fn read(&mut self, sent: Instant, received: Instant, found: Option<(String, LeaseRecord)>) {
        // Ends the term if it has run out.
        self.term = self.term(received);
        self.next_read = received + self.pause();
        let Some((version, record)) = found else {
            // A Lease that is created later may have been held and renewed before this replica reads it.
            (self.seen, self.term) = (None, None);
            return;
        };
        let previous = self.seen.replace(SeenLease {
            version: version.clone(),
            record: record.clone(),
            sent,
        });
        if !self.is_held_in_this_pod(&record) || self.is_too_short(&record) {
            self.term = None;
            return;
        }
        // The same version is no renewal, and the version that the first read shows may have been written long ago.
        let Some(previous) = previous.filter(|previous| previous.version != version) else {
            return;
        };
        // A higher number of transitions means that another kube-scheduler held the Lease between the two reads.
        let is_same_holder =
            previous.record.holder == record.holder && previous.record.transitions == record.transitions;
        if is_same_holder && let Some(term) = &mut self.term {
            term.renewed = previous.sent;
        } else {
            self.n_terms += 1;
            // kube-scheduler releases its Lease without waiting for the binds of its extender, so a release hands nothing over.
            self.term = Some(Term {
                number: self.n_terms,
                renewed: previous.sent,
                is_handed_over: false,
            });
        }
    }

    fn no_answer(&mut self, received: Instant) {
        self.term = self.term(received);
        self.next_read = received + self.pause();
    }
}

/// The beginning of the holder identity of a kube-scheduler in this pod: the host name, which kubelet makes of the pod's name
/// (at most 63 bytes, without a `-` or `.` at the end), and an underscore.
pub(super) fn holder_prefix(pod: &str) -> String {
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

    const TIMES: LeaseTimes = LeaseTimes {
        lease: Duration::from_secs(15),
        renew: Duration::from_secs(10),
        retry: Duration::from_secs(2),
    };

    /// Terms as long as the Lease, so that the test finds a term that is too long by any time.
    const TIGHT: LeaseTimes = LeaseTimes {
        renew: TIMES.lease,
        ..TIMES
    };

    fn after(start: Instant, tenths: u64) -> Instant {
        start + Duration::from_millis(100 * tenths)
    }

    fn record(holder: &str) -> LeaseRecord {
        LeaseRecord {
            holder: holder.to_owned(),
            seconds: 15,
            transitions: 0,
        }
    }

    /// Answers a read, which was sent at `tenths` and takes a tenth of a second.
    fn read(lease: &mut KubeSchedulerLease, start: Instant, tenths: u64, version: &str, record: LeaseRecord) {
        lease.read(
            after(start, tenths),
            after(start, tenths + 1),
            Some((version.to_owned(), record)),
        );
    }

    #[test]
    fn a_term_is_counted_from_the_read_before_the_renewal() {
        let start = Instant::now();
        let mut lease = KubeSchedulerLease::new("a", TIMES, start);
        assert_eq!(lease.next(start), LeaseAction::Read);
        read(&mut lease, start, 0, "1", record("a_1"));
        assert_eq!(lease.term(after(start, 1)), None, "the Lease may be old");
        assert_eq!(lease.next(after(start, 1)), LeaseAction::Wait(after(start, 11)));
        read(&mut lease, start, 11, "1", record("a_1"));
        read(&mut lease, start, 22, "2", record("a_1"));
        let term = lease.term(after(start, 23)).unwrap();
        assert_eq!(
            (term.number, term.renewed, term.is_handed_over),
            (1, after(start, 11), false)
        );
        assert!(
            lease.term(after(start, 110)).is_some() && lease.term(after(start, 111)).is_none(),
            "ends without a renewal"
        );
        read(&mut lease, start, 33, "3", record("a_1"));
        assert_eq!(lease.term(after(start, 34)).unwrap().renewed, after(start, 22));
    }

    #[test]
    fn a_term_ends_with_the_holder() {
        let start = Instant::now();
        let of = |version: &str, record: LeaseRecord| {
            let mut lease = KubeSchedulerLease::new("a", TIMES, start);
            read(&mut lease, start, 0, "1", self::record("a_1"));
            read(&mut lease, start, 11, "2", self::record("a_1"));
            assert_eq!(lease.term(after(start, 12)).map(|term| term.number), Some(1));
            read(&mut lease, start, 22, version, record);
            (
                lease.term(after(start, 23)).map(|term| term.number),
                lease.problem().is_some(),
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
                LeaseRecord {
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
                LeaseRecord {
                    transitions: 2,
                    ..record("a_1")
                }
            ),
            (Some(2), false)
        );
        assert_eq!(
            of(
                "3",
                LeaseRecord {
                    seconds: 5,
                    ..record("a_1")
                }
            ),
            (None, true)
        );
    }

    #[test]
    fn a_long_name_is_cut_as_kubelet_cuts_host_names() {
        assert_eq!(
            holder_prefix("gpushare-scheduler-7d-x"),
            "gpushare-scheduler-7d-x_"
        );
        assert_eq!(
            holder_prefix(&format!("{}-{}", "a".repeat(62), "b".repeat(9))),
            format!("{}_", "a".repeat(62))
        );
        assert_eq!(holder_prefix(&"a".repeat(63)), format!("{}_", "a".repeat(63)));
    }

    #[test]
    fn a_deleted_lease_ends_the_term() {
        let start = Instant::now();
        let mut lease = KubeSchedulerLease::new("a", TIMES, start);
        read(&mut lease, start, 0, "1", record("a_1"));
        read(&mut lease, start, 11, "2", record("a_1"));
        lease.no_answer(after(start, 20));
        assert!(
            lease.term(after(start, 21)).is_some(),
            "one failed read changes nothing"
        );
        lease.read(after(start, 22), after(start, 23), None);
        assert_eq!((lease.term(after(start, 23)), lease.holder()), (None, ""));
        read(&mut lease, start, 33, "9", record("a_1"));
        assert_eq!(lease.term(after(start, 34)), None, "the new Lease may be old");
    }

    /// A Lease that was read: its version, and its record.
    type Read = Option<(String, LeaseRecord)>;

    /// A pod with a kube-scheduler, which contends for the Lease by client-go's rules, and its extender. Times are tenths of a
    /// second.
    #[derive(Clone, Debug)]
    struct Pod {
        /// The version of the Lease, and the time at which this kube-scheduler first saw that version.
        seen: (u64, u64),
        /// The kube-scheduler does nothing before this time.
        stopped_until: u64,
        /// Number of the kube-scheduler's process.
        process: u64,
        lease: KubeSchedulerLease,
        /// A read of the extender that is on its way: time sent, and the answer, which is known at a later time.
        reading: Option<(u64, u64, Read)>,
    }

    impl Pod {
        fn new(name: &str, start: Instant) -> Self {
            Self {
                seen: (0, 0),
                stopped_until: 0,
                process: 0,
                lease: KubeSchedulerLease::new(name, TIGHT, start),
                reading: None,
            }
        }

        /// kube-scheduler acquires or renews the Lease if client-go's rule lets it.
        fn contend(&mut self, name: &str, lease: &mut Option<(u64, LeaseRecord)>, now: u64) {
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
                    LeaseRecord {
                        holder: own,
                        seconds: 15,
                        transitions,
                    },
                ));
                self.seen = (version + 1, now);
            }
        }

        /// The extender receives an answer that is due, or sends a read; `delay` is the time of the answer.
        fn step_extender(
            &mut self,
            lease: Option<&(u64, LeaseRecord)>,
            start: Instant,
            now: u64,
            delay: u64,
        ) {
            match self.reading.take() {
                Some((sent, received, answer)) if received <= now => {
                    self.lease.read(after(start, sent), after(start, now), answer);
                }
                None if self.lease.next(after(start, now)) == LeaseAction::Read => {
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
        fn no_two_extenders_have_a_term_at_the_same_time(steps in prop::collection::vec((0..2_usize, 0..20_u8, 1..200_u64), 1..600)) {
            let start = Instant::now();
            let mut lease: Option<(u64, LeaseRecord)> = None;
            let names = ["a", "b"];
            let mut pods = names.map(|name| Pod::new(name, start));
            let mut now = 0;
            for (idx, fault, length) in steps {
                now += length % 9;
                let (name, pod) = (names[idx], &mut pods[idx]);
                match fault {
                    0 => pod.stopped_until = now + length,
                    1 => (pod.process, pod.seen) = (pod.process + 1, (0, 0)),
                    _ => {}
                }
                if pod.stopped_until <= now {
                    pod.contend(name, &mut lease, now);
                }
                pod.step_extender(lease.as_ref(), start, now, length % 40);
                let holder = lease.as_ref().map_or("", |(_, record)| &record.holder);
                for (name, pod) in names.iter().zip(&pods) {
                    let decides = pod.lease.term(after(start, now)).is_some();
                    prop_assert!(!decides || holder.starts_with(&format!("{name}_")), "{name} decides, and {holder} holds the Lease");
                }
            }
        }
    }
}
