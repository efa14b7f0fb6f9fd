//! The rights of a replica before, during and after its terms.

use std::time::{Duration, Instant};

use rstest::rstest;

use super::election::LeaseTimes;
use super::{Leadership, NotLeading};

const TIMES: LeaseTimes = LeaseTimes {
    lease: secs(15),
    renew: secs(10),
    retry: secs(2),
};

const fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

/// A replica that leads by a renewal that was sent now, and has completed its takeover.
fn leading() -> (Leadership, Instant) {
    let (leadership, now) = (Leadership::standby(), Instant::now());
    leadership.lead(TIMES, now, true);
    leadership.end_takeover();
    (leadership, now)
}

#[test]
fn a_new_leader_binds_only_after_its_watches_are_complete() {
    let now = Instant::now();
    let standby = Leadership::standby();
    assert_eq!(standby.begin_bind(now).unwrap_err(), NotLeading::Standby);
    standby.end_takeover();
    standby.lead(TIMES, now, true);
    assert_eq!(standby.check(now), Ok(()));
    assert_eq!(
        standby.begin_bind(now).unwrap_err(),
        NotLeading::Starting,
        "what was seen in another term does not count"
    );
    let alone = Leadership::alone_after_takeover();
    assert_eq!(
        (alone.check(now), alone.begin_bind(now).unwrap_err()),
        (Ok(()), NotLeading::Starting)
    );
    alone.end_takeover();
    assert!(alone.begin_bind(now).is_ok() && alone.covers(now, now + secs(1000)));
}

#[test]
fn a_renewal_does_not_repeat_the_takeover() {
    let (leadership, now) = leading();
    leadership.lead(TIMES, now + secs(2), false);
    assert!(leadership.begin_bind(now + secs(11)).is_ok());
    assert_eq!(
        leadership.begin_bind(now + secs(12)).unwrap_err(),
        NotLeading::Standby,
        "the lease expires without any call"
    );
}

#[rstest]
#[case::long_before(0, 4, true)]
#[case::last_moment(9, 15, true)]
#[case::ends_after_the_lease(9, 16, false)]
#[case::too_late(10, 11, false)]
#[case::after_a_long_pause(100, 14, false)]
fn a_write_is_covered_if_its_deadline_lies_within_the_lease(
    #[case] now: u64,
    #[case] deadline: u64,
    #[case] expected: bool,
) {
    let (leadership, began) = leading();
    assert_eq!(
        leadership.covers(began + secs(now), began + secs(deadline)),
        expected
    );
    assert!(!Leadership::standby().covers(began, began));
}

#[test]
fn a_write_that_ends_after_the_lease_is_counted() {
    let (leadership, now) = leading();
    assert!(!leadership.is_overdue(now + secs(15)) && leadership.is_overdue(now + secs(16)));
    leadership.stand_by();
    assert!(leadership.is_overdue(now));
    assert_eq!(leadership.0.overdue.get(), 2);
    assert!(!Leadership::alone().is_overdue(now + secs(1000)));
}

#[test]
fn connections_are_closed_when_a_leader_steps_down() {
    let (leadership, _) = leading();
    let mut connection_resets = leadership.connection_resets();
    assert!(!connection_resets.has_changed().unwrap());
    leadership.stand_by();
    assert!(connection_resets.has_changed().unwrap());
    connection_resets.mark_unchanged();
    leadership.reset_connections();
    assert!(connection_resets.has_changed().unwrap());
}

#[test]
fn a_pod_with_a_stale_leader_label_is_not_ready() {
    let (leadership, now) = leading();
    leadership.state().may_have_label = true;
    assert!(!leadership.has_stale_label(now) && leadership.has_stale_label(now + secs(10)));
    leadership.state().may_have_label = false;
    assert!(!leadership.has_stale_label(now + secs(10)));
    assert!(
        Leadership::standby().has_stale_label(now),
        "an earlier process may have left it"
    );
    assert!(!Leadership::alone_after_takeover().has_stale_label(now));
}

#[tokio::test(start_paused = true)]
async fn shutdown_waits_for_running_binds_and_starts_none() {
    let (leadership, now) = leading();
    let binds = [
        leadership.begin_bind(now).unwrap(),
        leadership.begin_bind(now).unwrap(),
    ];
    let ending = tokio::spawn({
        let leadership = leadership.clone();
        async move { leadership.end_binds().await }
    });
    tokio::time::sleep(secs(1)).await;
    assert!(!ending.is_finished());
    assert_eq!(leadership.begin_bind(now).unwrap_err(), NotLeading::Ending);
    assert!(
        leadership.covers(now + secs(11), now + secs(15)),
        "what began may end"
    );
    drop(binds);
    ending.await.unwrap();
    leadership.end();
    assert!(!leadership.covers(now, now));
}
