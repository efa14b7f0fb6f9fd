//! One replica, step by step: its next step after each answer to a read and each outcome of a write.

mod simulation;

use std::time::{Duration, Instant};

use rstest::rstest;

use super::{Election, LeaseAction, LeaseRecord, LeaseTimes, TermSource, WriteOutcome};

const TIMES: LeaseTimes = LeaseTimes {
    lease: secs(15),
    renew: secs(10),
    retry: secs(2),
};

const fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn record(holder: &str, seconds: u64, transitions: u64) -> LeaseRecord {
    LeaseRecord {
        holder: holder.to_owned(),
        seconds,
        transitions,
    }
}

/// An answer to a read: the version and the record of the Lease, if it exists.
type Found = Option<(String, LeaseRecord)>;

/// The answer to a read of a Lease that exists.
fn found(version: &str, record: LeaseRecord) -> Found {
    let version = version.to_owned();
    // Not `Some(…)`: clippy refuses a function that never returns `None`.
    [(version, record)].into_iter().next()
}

fn write(version: &str, record: LeaseRecord) -> LeaseAction {
    LeaseAction::Write {
        version: version.to_owned(),
        record,
    }
}

/// A replica `a` and the moment at which it begins.
fn begin() -> (Election, Instant) {
    let now = Instant::now();
    (Election::new("a".to_owned(), TIMES, now), now)
}

/// A replica that leads since version 2, by a write that was sent at the moment.
fn leading() -> (Election, Instant) {
    let (mut election, now) = begin();
    election.read(now, now, found("1", record("", 1, 6)));
    election.written(record("a", 15, 7), now, now, WriteOutcome::Done("2".to_owned()));
    assert!(election.term(now).is_some());
    (election, now)
}

#[test]
fn a_missing_lease_is_created_without_a_holder() {
    let (mut a, now) = begin();
    assert_eq!(a.next(now), LeaseAction::Read);
    a.read(now, now, None);
    assert_eq!(a.next(now), LeaseAction::Create(record("", 15, 0)));
    a.written(record("", 15, 0), now, now, WriteOutcome::Done("1".to_owned()));
    assert_eq!(a.next(now), LeaseAction::Wait(now + secs(2)));
    assert_eq!(a.next(now + secs(2)), LeaseAction::Read);
    a.read(now + secs(14), now + secs(14), found("1", record("", 15, 0)));
    assert_eq!(a.next(now + secs(14)), LeaseAction::Wait(now + secs(15)));
    assert_eq!(a.next(now + secs(15)), write("1", record("a", 15, 1)));
}

#[rstest]
#[case::given_up(record("", 1, 3), 0, true)]
#[case::wiped_out(record("", 15, 3), 15, false)]
#[case::held(record("b", 15, 3), 15, false)]
#[case::held_for_longer(record("b", 40, 3), 40, false)]
#[case::held_for_a_second(record("b", 1, 3), 15, false)]
#[case::held_for_ever(record("b", u64::MAX, 3), 3600, false)]
fn a_lease_is_acquired_when_it_is_free_or_has_expired(
    #[case] there: LeaseRecord,
    #[case] after: u64,
    #[case] is_handed_over: bool,
) {
    let (mut a, now) = begin();
    a.read(now, now, found("1", there));
    let free = now + secs(after);
    if after > 0 {
        assert_eq!(a.next(now), LeaseAction::Wait(now + secs(2)));
        assert_eq!(
            a.next(now + secs(after - 1) + Duration::from_millis(999)),
            LeaseAction::Read
        );
    }
    assert_eq!(a.next(free), write("1", record("a", 15, 4)));
    a.written(
        record("a", 15, 4),
        free,
        free + secs(1),
        WriteOutcome::Done("2".to_owned()),
    );
    let term = a.term(free + secs(1)).unwrap();
    assert_eq!(
        (term.number, term.renewed, term.is_handed_over),
        (1, free, is_handed_over)
    );
}

/// The holder's clock may be wrong, so only the own clock counts.
#[test]
fn a_lease_expires_by_the_time_since_its_version_was_first_read() {
    let (mut a, now) = begin();
    a.read(now, now, found("1", record("b", 15, 3)));
    a.read(now + secs(10), now + secs(10), found("1", record("b", 15, 3)));
    assert_eq!(a.next(now + secs(15)), write("1", record("a", 15, 4)));
    a.read(now + secs(15), now + secs(15), found("2", record("b", 15, 3)));
    assert_eq!(a.next(now + secs(29)), LeaseAction::Read);
    assert_eq!(a.next(now + secs(30)), write("2", record("a", 15, 4)));
}

#[test]
fn a_leader_renews_with_the_same_transition_number() {
    let (mut a, now) = leading();
    for n in 1..5_u32 {
        let sent = now + secs(2) * n;
        assert_eq!(
            a.next(sent.checked_sub(Duration::from_millis(1)).unwrap()),
            LeaseAction::Wait(sent)
        );
        assert_eq!(a.next(sent), write(&(n + 1).to_string(), record("a", 15, 7)));
        a.written(
            record("a", 15, 7),
            sent,
            sent + secs(1),
            WriteOutcome::Done((n + 2).to_string()),
        );
    }
    let term = a.term(now + secs(17)).unwrap();
    assert_eq!((term.number, term.renewed), (1, now + secs(8)));
    assert!(a.term(now + secs(18)).is_none(), "ten seconds after it was sent");
}

#[test]
fn after_an_unknown_write_the_leader_reads_the_lease_and_continues() {
    let (mut a, now) = leading();
    let sent = now + secs(2);
    a.written(record("a", 15, 7), sent, sent + secs(3), WriteOutcome::Unknown);
    assert_eq!(a.next(sent + secs(3)), LeaseAction::Wait(sent + secs(4)));
    assert_eq!(a.next(sent + secs(4)), LeaseAction::Read);
    a.read(sent + secs(4), sent + secs(4), found("3", record("a", 15, 7)));
    assert_eq!(a.next(sent + secs(4)), write("3", record("a", 15, 7)));
    assert_eq!(
        a.term(sent + secs(4)).unwrap().renewed,
        now,
        "what was only read renews nothing"
    );
}

/// Its name is still in the Lease, so no other replica has led: it may lead again, but in a new term.
#[test]
fn a_leader_whose_lease_expired_begins_a_new_term() {
    let (mut a, now) = leading();
    let later = now + secs(60);
    assert!(a.term(later).is_none());
    assert_eq!(a.next(later), write("2", record("a", 15, 7)));
    a.written(
        record("a", 15, 7),
        later,
        later,
        WriteOutcome::Done("3".to_owned()),
    );
    let term = a.term(later).unwrap();
    assert_eq!((term.number, term.is_handed_over), (2, false));
}

#[test]
fn a_lease_is_released_and_the_release_is_repeated_until_it_is_written() {
    let (mut a, now) = leading();
    a.resign(now + secs(1));
    let later = now + secs(1);
    assert!(a.term(later).is_none());
    assert_eq!(a.next(later), write("2", record("", 1, 7)));
    a.written(record("", 1, 7), later, later, WriteOutcome::Unknown);
    assert_eq!(a.next(later + secs(1)), LeaseAction::Read);
    a.read(later + secs(1), later + secs(1), found("2", record("a", 15, 7)));
    assert_eq!(a.next(later + secs(1)), write("2", record("", 1, 7)));
    a.written(
        record("", 1, 7),
        later + secs(1),
        later + secs(1),
        WriteOutcome::Done("3".to_owned()),
    );
    assert_eq!(a.next(later + secs(1)), LeaseAction::End);
}

#[rstest]
#[case::held_by_another(found("1", record("b", 15, 3)))]
#[case::free(found("1", record("", 1, 3)))]
#[case::absent(None)]
fn a_replica_that_does_not_hold_the_lease_ends_without_a_write(#[case] there: Found) {
    let (mut a, now) = begin();
    a.resign(now);
    assert_eq!(a.next(now), LeaseAction::Read);
    a.read(now, now, there);
    assert_eq!(a.next(now + secs(60)), LeaseAction::End);
}
