//! Outcomes of a bind when the API server refuses, is slow, fails after the write or hangs. Time is simulated.

use std::time::Duration;

use rstest::rstest;
use serde_json::Value;
use tokio::time::{sleep, timeout};

use crate::api::Fault;
use crate::objects::{on, phase, units};
use crate::world::World;

/// One node, two GPUs of 16,276 MiB.
pub(crate) fn world() -> World {
    World::new()
        .with_node("n1", &[16_276, 16_276])
        .with_node("n2", &[16_276])
}

/// The number of decisions that no watch has shown yet.
pub(crate) fn n_assumed(world: &World) -> u64 {
    world.index.read().snapshot().n_assumed
}

pub(crate) fn stamp(binding: &Value) -> u64 {
    let stamp = &binding["metadata"]["annotations"]["scheduling.koordinator.sh/bind-timestamp"];
    stamp.as_str().unwrap().parse().unwrap()
}

/// Waits, in simulated time, until no decision is open.
pub(crate) async fn settled(world: &World) {
    let done = async {
        while n_assumed(world) > 0 {
            sleep(Duration::from_millis(100)).await;
        }
    };
    timeout(Duration::from_secs(600), done)
        .await
        .expect("the decision should settle");
}

#[tokio::test(start_paused = true)]
async fn a_bound_pod_is_charged_until_the_watch_shows_it() {
    let pod = units("p", 8138);
    let world = world().with_pod(&pod);
    assert_eq!(world.bind(&pod, "n1").await, "");
    assert_eq!((n_assumed(&world), world.used("n1").await), (1, vec![8138, 0]));
    world.see(&pod);
    assert_eq!((n_assumed(&world), world.used("n1").await), (0, vec![8138, 0]));
}

#[rstest]
#[case::uid_of_another(Fault::Status(409), "refused the binding: 409 Conflict: made to fail")]
#[case::not_found(Fault::Status(404), "refused the binding: 404 Not Found: made to fail")]
#[case::gone(Fault::Status(410), "refused the binding: 410 Gone: made to fail")]
#[case::forbidden(Fault::Status(403), "refused the binding: 403 Forbidden: made to fail")]
#[case::invalid(
    Fault::Status(422),
    "refused the binding: 422 Unprocessable Entity: made to fail"
)]
#[tokio::test(start_paused = true)]
async fn a_refused_binding_frees_its_room(#[case] fault: Fault, #[case] expected: &str) {
    let pod = units("p", 8138);
    let world = world().with_pod(&pod);
    world.api.fail_posts([fault]);
    let error = world.bind(&pod, "n1").await;
    assert!(error.contains(expected), "{error}");
    assert_eq!((n_assumed(&world), world.used("n1").await), (0, vec![0, 0]));
    assert_eq!(world.bind(&pod, "n2").await, "", "elsewhere is open at once");
}

#[tokio::test(start_paused = true)]
async fn a_new_pod_of_the_same_name_is_not_bound() {
    let pod = units("p", 8138);
    let world = world().with_pod(&pod);
    let mut successor = pod.clone();
    successor["metadata"]["uid"] = "another".into();
    world.api.put(&successor);
    let error = world.bind(&pod, "n1").await;
    assert!(
        error.contains("there is no pod with UID uid-p any more"),
        "{error}"
    );
    assert_eq!(n_assumed(&world), 0);
    assert!(world.api.pod(&pod)["spec"]["nodeName"].is_null());
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_is_already_on_the_node_counts_as_bound() {
    let pod = units("p", 8138);
    let world = world().with_pod(&pod);
    world.api.put(&on(pod.clone(), "n1"));
    assert_eq!(world.bind(&pod, "n1").await, "");
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_is_already_on_another_node_is_refused() {
    let pod = units("p", 8138);
    let world = world().with_pod(&pod);
    world.api.put(&on(pod.clone(), "n2"));
    let error = world.bind(&pod, "n1").await;
    assert!(
        error.contains("the pod is already bound to node \"n2\""),
        "{error}"
    );
    assert_eq!(n_assumed(&world), 0);
    world.see(&pod);
    let error = world.bind(&pod, "n1").await;
    assert!(
        error.contains("the pod is already bound to node \"n2\""),
        "{error}"
    );
    assert_eq!(
        world.api.bindings().len(),
        1,
        "what the watch has shown is not tried again"
    );
}

#[tokio::test(start_paused = true)]
async fn bind_of_a_bound_pod_writes_nothing() {
    let pod = units("p", 8138);
    let world = world();
    world.place(&pod, "n1").await;
    assert_eq!(world.bind(&pod, "n1").await, "");
    assert_eq!(world.api.bindings().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_busy_api_server_is_retried_at_its_retry_after() {
    let pod = units("p", 8138);
    let world = world().with_pod(&pod);
    world.api.fail_posts([Fault::Busy(1), Fault::Busy(2)]);
    let begun = tokio::time::Instant::now();
    assert_eq!(world.bind(&pod, "n1").await, "");
    assert_eq!(begun.elapsed(), Duration::from_secs(3));
}

#[tokio::test(start_paused = true)]
async fn a_bind_fails_if_the_api_server_is_busy_beyond_its_deadline() {
    let pod = units("p", 8138);
    let world = world().with_pod(&pod);
    world.api.fail_posts([Fault::Busy(60)]);
    let begun = tokio::time::Instant::now();
    let error = world.bind(&pod, "n1").await;
    assert!(
        error.starts_with("nothing is written: the API server is too busy")
            && error.ends_with("429 Too Many Requests: too many requests"),
        "{error}"
    );
    assert!(
        begun.elapsed() < Duration::from_secs(4),
        "there is no use in waiting"
    );
    assert_eq!(
        (n_assumed(&world), world.used("n1").await),
        (0, vec![0, 0]),
        "it says so before it writes"
    );
    assert_eq!(world.api.n_gets(), 0, "there is nothing to find out");
    assert_eq!(world.bind(&pod, "n2").await, "", "elsewhere is open at once");
    let (_, metrics) = world.send("GET", "/metrics", "").await;
    assert!(
        metrics.contains("gpushare_scheduler_refused_binds_total{reason=\"api_server_busy\"} 1"),
        "{metrics}"
    );
}

/// A busy API server does not count against the node.
#[tokio::test(start_paused = true)]
async fn a_busy_api_server_does_not_count_against_the_node() {
    let pod = units("p", 8138);
    let world = world().with_pod(&pod);
    world.api.fail_posts([Fault::Busy(60)]);
    assert_ne!(world.bind(&pod, "n1").await, "");
    assert_eq!(
        world.fitting(&pod, &["n1", "n2"]).await.len(),
        1,
        "a pod whose node failed it is answered with all"
    );
}

/// Only a read of the pod shows the outcome. The scheduler's state follows it, and the answer comes in time.
#[rstest]
#[case::error_though_written(Fault::StatusAfterwards(500), true)]
#[case::error_and_not_written(Fault::Status(500), false)]
#[case::unavailable(Fault::Status(503), false)]
#[case::gateway_timeout_though_written(Fault::StatusAfterwards(504), true)]
#[case::broken_though_written(Fault::BreakAfterwards, true)]
#[case::broken_and_not_written(Fault::Break, false)]
#[case::hangs_though_written(Fault::HangAfterwards, true)]
#[case::hangs_and_not_written(Fault::Hang, false)]
#[tokio::test(start_paused = true)]
async fn lost_answers_are_resolved_by_reading_the_pod(#[case] fault: Fault, #[case] written: bool) {
    let pod = units("p", 8138);
    let world = world().with_pod(&pod);
    world.api.fail_posts([fault]);
    // The first read fails too, so the answer has to say that the outcome is unknown.
    world.api.fail_gets([Fault::Status(500)]);
    let begun = tokio::time::Instant::now();
    let error = world.bind(&pod, "n1").await;
    assert!(begun.elapsed() <= Duration::from_secs(4));
    assert!(error.contains("binding outcome unknown, checking"), "{error}");
    assert_eq!(
        (n_assumed(&world), world.used("n1").await),
        (1, vec![8138, 0]),
        "kept while it is not known"
    );
    sleep(Duration::from_secs(90)).await;
    assert!(world.api.n_gets() >= 2);
    if written {
        assert_eq!(n_assumed(&world), 1, "bound: held until the watch shows it");
        world.see(&pod);
        assert_eq!(world.used("n1").await, [8138, 0]);
    } else {
        assert_eq!(world.used("n1").await, [0, 0]);
    }
    assert_eq!(n_assumed(&world), 0);
}

#[tokio::test(start_paused = true)]
async fn an_error_after_the_write_is_success_if_the_pod_is_bound() {
    let pod = units("p", 8138);
    let world = world().with_pod(&pod);
    world.api.fail_posts([Fault::StatusAfterwards(500)]);
    assert_eq!(world.bind(&pod, "n1").await, "");
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_no_watch_has_shown_is_read() {
    let pod = units("p", 8138);
    let world = world();
    let error = world.bind(&pod, "n1").await;
    assert_eq!(error, "there is no pod default/p with UID uid-p");
    world.api.put(&pod);
    assert_eq!(world.bind(&pod, "n1").await, "");
    assert_eq!(world.used("n1").await, [8138, 0]);
}

#[tokio::test(start_paused = true)]
async fn a_pod_without_a_device_request_is_bound_without_a_record() {
    let pod = crate::objects::pod("p", &serde_json::json!({"cpu": "1"}));
    let world = world();
    world.api.put(&pod);
    assert_eq!(world.bind(&pod, "n1").await, "");
    assert_eq!(
        world.api.bindings()[0]["metadata"]["annotations"],
        serde_json::json!({})
    );
    assert_eq!(n_assumed(&world), 0);
}

#[tokio::test(start_paused = true)]
async fn no_room_and_an_unknown_node_are_named_in_the_error() {
    let (large, small) = (units("large", 16_277), units("small", 1));
    let world = world().with_pod(&large).with_pod(&small);
    assert_eq!(
        world.bind(&large, "n1").await,
        "node \"n1\": request is larger than the node's GPUs even when they are empty (asked: 15.9 GiB (16277 units of 1 MiB) of one GPU)"
    );
    assert_eq!(
        world.bind(&small, "n9").await,
        "node \"n9\": node is not known to gpushare or offers no shareable GPU"
    );
    assert_eq!(world.api.bindings().len(), 0);
}

#[tokio::test(start_paused = true)]
async fn assume_times_exceed_those_of_records() {
    let world = world();
    let seen = chrono::Utc::now().timestamp_nanos_opt().unwrap() + 3_600_000_000_000;
    let old = crate::objects::annotated(
        on(units("old", 1), "n1"),
        "scheduling.koordinator.sh/bind-timestamp",
        &seen.to_string(),
    );
    let old = crate::objects::annotated(old, "ALIYUN_COM_GPU_MEM_IDX", "0");
    world.apply_pod(&old);
    for name in ["a", "b"] {
        world.place(&units(name, 1), "n1").await;
    }
    let stamps: Vec<u64> = world.api.bindings().iter().map(stamp).collect();
    assert!(
        stamps[0] > u64::try_from(seen).unwrap() && stamps[1] > stamps[0],
        "{seen} {stamps:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_finished_pod_frees_its_room_and_a_terminating_one_does_not() {
    let pod = units("p", 8138);
    let world = world();
    world.place(&pod, "n1").await;
    let mut bound = world.api.pod(&pod);
    bound["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
    world.apply_pod(&bound);
    assert_eq!(world.used("n1").await, [8138, 0]);
    world.apply_pod(&phase(bound, "Failed"));
    assert_eq!(world.used("n1").await, [0, 0]);
}

#[tokio::test(start_paused = true)]
async fn an_overflowing_retry_after_ends_the_bind() {
    let pod = units("p", 8138);
    let world = world().with_pod(&pod);
    world.api.fail_posts([Fault::Busy(u64::MAX)]);
    assert!(world.bind(&pod, "n1").await.contains("429"));
}

/// Names that no API server accepts become part of no path, take no room and are not remembered.
#[rstest]
#[case::slash("Bad/ns", "p", "u")]
#[case::another_path("d", "../../../nodes/n1", "u")]
#[case::upper_case("d", "P", "u")]
#[case::endless_name("d", &"p".repeat(254), "u")]
#[case::endless_namespace(&"d".repeat(64), "p", "u")]
#[case::odd_uid("d", "p", "u/u")]
#[case::endless_uid("d", "p", &"u".repeat(129))]
#[tokio::test(start_paused = true)]
async fn invalid_names_are_refused(#[case] namespace: &str, #[case] name: &str, #[case] uid: &str) {
    let mut pod = units("p", 8138);
    pod["metadata"] = serde_json::json!({"namespace": namespace, "name": name, "uid": uid});
    let world = world();
    world.filter(&pod, &["n2"]).await;
    let error = world.bind(&pod, "n2").await;
    assert!(
        error.contains("are not those of a pod") && error.len() <= 500,
        "{error}"
    );
    let snapshot = world.index.read().snapshot();
    assert_eq!(
        (snapshot.n_assumed, snapshot.n_hints, world.api.bindings().len()),
        (0, 0, 0)
    );
}
