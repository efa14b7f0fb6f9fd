//! Events and evictions as devices and pods change.

use std::path::Path;

use serde_json::json;

use crate::node::pods::PodStage;
use crate::tests::api_server::ApiServer;
use crate::tests::builders::{fleet, pod, pods, settings, units};

use super::*;

const FIRST: &str = "GPU-00000000-aaaa-bbbb-cccc-000000000000";

fn evicting() -> HealthTracker {
    HealthTracker {
        evicts: true,
        ..HealthTracker::default()
    }
}

fn with(healthy: &[(bool, &str)]) -> NodeFleet {
    let mut fleet = fleet(u32::try_from(healthy.len()).unwrap());
    for (entry, (is_healthy, message)) in fleet.gpus.iter_mut().zip(healthy) {
        (entry.is_healthy, entry.message) = (*is_healthy, (*message).to_owned());
    }
    fleet
}

fn shown(actions: &[HealthAction]) -> Vec<String> {
    let show = |action: &HealthAction| match action {
        HealthAction::NodeEvent(weight, reason, text) => format!("node {weight:?} {reason}: {text}"),
        HealthAction::PodEvent(uid, reason, text) => format!("{} {reason}: {text}", uid.as_str()),
        HealthAction::Evict(uid) => format!("evict {}", uid.as_str()),
    };
    actions
        .iter()
        .map(|action| show(action).replace(FIRST, "GPU-0"))
        .collect()
}

#[test]
fn each_change_makes_one_event_also_on_pods_that_come_later() {
    let mut tracker = HealthTracker::default();
    let now = Instant::now();
    let a = || pod("a", 1, [units(2)]);
    let others = || pod("b", 1, [units(2)]).on([1]);
    let (well, sick) = (
        [(true, "fine"), (true, "fine")],
        [(false, "XID 79"), (true, "fine")],
    );
    assert!(
        tracker
            .update(&with(&well), &pods([a(), others()]), now)
            .is_empty(),
        "nothing is new at first"
    );
    let actions = tracker.update(&with(&sick), &pods([a(), others()]), now);
    assert_eq!(
        shown(&actions),
        [
            "node Warning GPUUnhealthy: GPU GPU-0 is unhealthy: XID 79",
            "a GPUUnhealthy: GPU GPU-0, which this pod holds, is unhealthy: XID 79. Delete the pod to reschedule it."
        ]
    );
    assert!(
        tracker
            .update(&with(&sick), &pods([a(), others()]), now)
            .is_empty()
    );
    let late = pod("late", 2, [units(2)]);
    assert_eq!(
        shown(&tracker.update(&with(&sick), &pods([a(), late]), now)),
        [
            "late GPUUnhealthy: GPU GPU-0, which this pod holds, is unhealthy: XID 79. Delete the pod to reschedule it."
        ]
    );
    let actions = tracker.update(&with(&well), &pods([a()]), now);
    assert_eq!(
        shown(&actions),
        ["node Normal GPUHealthy: GPU GPU-0 is healthy again: fine"]
    );
}

#[test]
fn a_lost_and_a_recovered_device_make_one_event_each() {
    let mut tracker = HealthTracker::default();
    let (now, here) = (
        Instant::now(),
        pods([pod("a", 1, [units(2)]), pod("ended", 1, [units(2)])]),
    );
    let mut here = here;
    here.apply(NodePod {
        stage: PodStage::Terminal,
        ..pod("ended", 1, [units(2)])
    });
    tracker.update(&with(&[(true, "fine")]), &here, now);
    let actions = tracker.update(&with(&[]), &here, now);
    assert_eq!(
        shown(&actions),
        [
            "node Warning GPUGone: GPU GPU-0 is no longer on this node",
            "a GPUUnhealthy: GPU GPU-0, which this pod holds, is no longer on this node. Delete the pod to reschedule it."
        ]
    );
    assert!(tracker.update(&with(&[]), &here, now).is_empty());
    assert_eq!(
        shown(&tracker.update(&with(&[(true, "fine")]), &here, now)),
        ["node Normal GPUHealthy: GPU GPU-0 is healthy again: fine"]
    );
    let actions = tracker.update(&with(&[(true, "fine"), (true, "fine")]), &here, now);
    assert_eq!(actions.len(), 1, "another one: {actions:?}");
}

/// A GPU that was taken out before this process started is in no list of devices, only in records of pods.
#[test]
fn pods_of_gpus_that_an_earlier_process_had_get_one_event() {
    let mut tracker = evicting();
    let now = Instant::now();
    let here = pods([pod("a", 1, [units(2)]).on([3]), pod("b", 1, [units(2)]).on([0])]);
    let one = || with(&[(true, "fine")]);
    let expected = "a GPUUnhealthy: GPU minor 3, which this pod holds, is no longer on this node. Delete the pod to reschedule it.";
    assert_eq!(shown(&tracker.update(&one(), &here, now)), [expected]);
    assert_eq!(tracker.update(&one(), &here, now), []);
    let back = with(&[(true, "fine"), (true, "fine"), (true, "fine"), (true, "fine")]);
    tracker.update(&back, &here, now);
    let actions = tracker.update(&one(), &here, now);
    let of_pods = actions
        .iter()
        .filter(|action| matches!(action, HealthAction::PodEvent(..)));
    assert_eq!(of_pods.count(), 1, "a device of this process: {actions:?}");
}

/// Only if the operator wants it; not before the trouble has lasted; again after a refusal, but with a delay.
#[test]
fn pods_are_evicted_if_enabled_after_a_delay_and_again_after_a_refusal() {
    let sick = || with(&[(false, "XID 79")]);
    let evictions = |actions: Vec<HealthAction>| {
        actions
            .into_iter()
            .filter(|action| matches!(action, HealthAction::Evict(_)))
            .count()
    };
    let now = Instant::now();
    let here = pods([pod("a", 1, [units(2)])]);
    let mut never = HealthTracker::default();
    never.update(&sick(), &here, now);
    assert_eq!(
        (
            evictions(never.update(&sick(), &here, now + 2 * EVICTION_GRACE)),
            never.next_eviction(now)
        ),
        (0, None)
    );
    let mut tracker = evicting();
    assert_eq!(evictions(tracker.update(&sick(), &here, now)), 0);
    assert_eq!(tracker.next_eviction(now), Some(now + EVICTION_GRACE));
    assert_eq!(evictions(tracker.update(&sick(), &here, now + EVICTION_GRACE)), 1);
    assert_eq!(
        evictions(tracker.update(&sick(), &here, now + EVICTION_GRACE + EVICTION_RETRY / 2)),
        0
    );
    assert_eq!(
        evictions(tracker.update(&sick(), &here, now + EVICTION_GRACE + EVICTION_RETRY)),
        1
    );
    let leaving = pods([NodePod {
        deleting: true,
        ..pod("a", 1, [units(2)])
    }]);
    assert_eq!(
        evictions(tracker.update(&sick(), &leaving, now + 2 * EVICTION_GRACE)),
        0
    );
}

/// The API server refuses as long as a disruption budget does not allow it.
#[tokio::test(start_paused = true)]
async fn pods_of_an_unhealthy_device_are_evicted_as_the_api_server_allows() {
    let (client, mut server) = ApiServer::new();
    let (_health, fleet) = watch::channel(Arc::new(with(&[(false, "XID 79"), (true, "fine")])));
    let (_pods, pods) = watch::channel(pods([
        pod("a", 1, [units(2)]),
        pod("well", 2, [units(2)]).on([1]),
    ]));
    let (recorder, _writer) = daemon::events::recorder(&client.clone().into(), "test", Some("n1".to_owned()));
    let began = Instant::now();
    let node = NodeState::new(settings(), fleet, pods, Path::new("/nonexistent"));
    let task = tokio::spawn(react_to_health(Arc::new(node), client, recorder, true));
    for (answer, after) in [(429, EVICTION_GRACE), (201, EVICTION_GRACE + EVICTION_RETRY)] {
        let (line, said, response) = server.next().await;
        assert_eq!(line, "POST /api/v1/namespaces/default/pods/a/eviction");
        assert!(
            began.elapsed() >= after && began.elapsed() < after + EVICTION_RETRY,
            "after {:?}",
            began.elapsed()
        );
        assert_eq!(said["deleteOptions"]["preconditions"]["uid"], "a");
        let word = if answer == 201 { "Success" } else { "Failure" };
        let status = json!({"kind": "Status", "apiVersion": "v1", "status": word, "code": answer, "message": "a budget", "reason": "no"});
        response.send(answer, &status);
    }
    task.abort();
}
