//! What a replica may do as time passes and as it begins, ceases and ends to lead.

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

/// A replica that leads and has seen everything, by a renewal sent at the moment.
fn leading() -> (Leadership, Instant) {
    let (leadership, now) = (Leadership::standby(), Instant::now());
    leadership.lead(TIMES, now, true);
    leadership.end_takeover();
    (leadership, now)
}

#[test]
fn nobody_binds_before_everything_has_been_seen() {
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
fn renewals_leave_what_was_seen() {
    let (leadership, now) = leading();
    leadership.lead(TIMES, now + secs(2), false);
    assert!(leadership.begin_bind(now + secs(11)).is_ok());
    assert_eq!(
        leadership.begin_bind(now + secs(12)).unwrap_err(),
        NotLeading::Standby,
        "nobody has to say so"
    );
}

#[rstest]
#[case::long_before(0, 4, true)]
#[case::last_moment(9, 15, true)]
#[case::ends_after_the_lease(9, 16, false)]
#[case::too_late(10, 11, false)]
#[case::after_a_long_pause(100, 14, false)]
fn a_write_is_covered_by_the_whole_lease(#[case] now: u64, #[case] deadline: u64, #[case] expected: bool) {
    let (leadership, began) = leading();
    assert_eq!(
        leadership.covers(began + secs(now), began + secs(deadline)),
        expected
    );
    assert!(!Leadership::standby().covers(began, began));
}

#[test]
fn a_write_that_outlives_the_lease_is_noticed() {
    let (leadership, now) = leading();
    assert!(!leadership.is_overdue(now + secs(15)) && leadership.is_overdue(now + secs(16)));
    leadership.stand_by();
    assert!(leadership.is_overdue(now));
    assert_eq!(leadership.0.overdue.get(), 2);
    assert!(!Leadership::alone().is_overdue(now + secs(1000)));
}

#[test]
fn clients_connect_anew_when_a_leader_steps_down() {
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
fn a_pod_that_may_bear_the_label_and_does_not_lead_is_no_place_for_clients() {
    let (leadership, now) = leading();
    leadership.set_stale_label(true);
    assert!(!leadership.has_stale_label(now) && leadership.has_stale_label(now + secs(10)));
    leadership.set_stale_label(false);
    assert!(!leadership.has_stale_label(now + secs(10)));
    assert!(
        Leadership::standby().has_stale_label(now),
        "an earlier process may have left it"
    );
    assert!(!Leadership::alone_after_takeover().has_stale_label(now));
}

#[tokio::test(start_paused = true)]
async fn the_end_waits_for_binds_in_work_and_lets_none_begin() {
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
