//! What becomes of a bind when the API server refuses, hesitates, lies or hangs. Time is simulated.

use std::sync::Arc;
use std::time::Duration;

use rstest::rstest;
use serde_json::Value;
use tokio::time::{sleep, timeout};

use crate::api::Fault;
use crate::objects::{device, node, old_node, on, phase, shared, units};
use crate::world::World;

/// One node, two GPUs of 16,276 MiB.
fn world() -> World {
    World::new().with_node("n1", &[16_276, 16_276]).with_node("n2", &[16_276])
}

/// Number of pods that are decided and not yet seen.
fn n_assumed(world: &World) -> u64 {
    world.index.read().census().n_assumed
}

fn stamp(binding: &Value) -> u64 {
    let stamp = &binding["metadata"]["annotations"]["scheduling.koordinator.sh/bind-timestamp"];
    stamp.as_str().unwrap().parse().unwrap()
}

/// Waits, in simulated time, until nothing is assumed any more.
async fn settled(world: &World) {
    let done = async {
        while n_assumed(world) > 0 {
            sleep(Duration::from_millis(100)).await;
        }
    };
    timeout(Duration::from_secs(600), done).await.expect("the decision should settle");
}

#[tokio::test(start_paused = true)]
async fn success_holds_until_the_watch_shows_it() {
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
#[case::invalid(Fault::Status(422), "refused the binding: 422 Unprocessable Entity: made to fail")]
#[tokio::test(start_paused = true)]
async fn refusal_gives_the_room_back(#[case] fault: Fault, #[case] expected: &str) {
    let pod = units("p", 8138);
    let world = world().with_pod(&pod);
    world.api.fail_posts([fault]);
    let error = world.bind(&pod, "n1").await;
    assert!(error.contains(expected), "{error}");
    assert_eq!((n_assumed(&world), world.used("n1").await), (0, vec![0, 0]));
    assert_eq!(world.bind(&pod, "n2").await, "", "elsewhere is open at once");
}

#[tokio::test(start_paused = true)]
async fn successor_of_the_same_name_is_not_bound() {
    let pod = units("p", 8138);
    let world = world().with_pod(&pod);
    let mut successor = pod.clone();
    successor["metadata"]["uid"] = "another".into();
    world.api.put(&successor);
    let error = world.bind(&pod, "n1").await;
    assert!(error.contains("there is no pod with UID uid-p any more"), "{error}");
    assert_eq!(n_assumed(&world), 0);
    assert!(world.api.pod(&pod)["spec"]["nodeName"].is_null());
}

#[tokio::test(start_paused = true)]
async fn already_on_that_node_is_success() {
    let pod = units("p", 8138);
    let world = world().with_pod(&pod);
    world.api.put(&on(pod.clone(), "n1"));
    assert_eq!(world.bind(&pod, "n1").await, "");
}

#[tokio::test(start_paused = true)]
async fn already_on_another_node_is_refused() {
    let pod = units("p", 8138);
    let world = world().with_pod(&pod);
    world.api.put(&on(pod.clone(), "n2"));
    let error = world.bind(&pod, "n1").await;
    assert!(error.contains("the pod is already bound to node \"n2\""), "{error}");
    assert_eq!(n_assumed(&world), 0);
    world.see(&pod);
    let error = world.bind(&pod, "n1").await;
    assert!(error.contains("the pod is already bound to node \"n2\""), "{error}");
    assert_eq!(world.api.bindings().len(), 1, "what the watch has shown is not tried again");
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
async fn busy_server_is_asked_again_when_it_says() {
    let pod = units("p", 8138);
    let world = world().with_pod(&pod);
    world.api.fail_posts([Fault::Busy(1), Fault::Busy(2)]);
    let begun = tokio::time::Instant::now();
    assert_eq!(world.bind(&pod, "n1").await, "");
    assert_eq!(begun.elapsed(), Duration::from_secs(3));
}

#[tokio::test(start_paused = true)]
async fn server_busy_for_longer_than_the_bind_may_take() {
    let pod = units("p", 8138);
    let world = world().with_pod(&pod);
    world.api.fail_posts([Fault::Busy(60)]);
    let begun = tokio::time::Instant::now();
    let error = world.bind(&pod, "n1").await;
    assert!(error.contains("429"), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(4), "there is no use in waiting");
    settled(&world).await;
    assert_eq!(world.used("n1").await, [0, 0]);
}

/// The write is known only by looking: bound in the end or not, the books agree, and the answer comes in time.
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
async fn lost_answers_are_found_out(#[case] fault: Fault, #[case] written: bool) {
    let pod = units("p", 8138);
    let world = world().with_pod(&pod);
    world.api.fail_posts([fault]);
    // The first look fails too, so the answer must be an honest "not known".
    world.api.fail_gets([Fault::Status(500)]);
    let begun = tokio::time::Instant::now();
    let error = world.bind(&pod, "n1").await;
    assert!(begun.elapsed() <= Duration::from_secs(4));
    assert!(error.contains("it is not known whether the binding was written"), "{error}");
    assert_eq!((n_assumed(&world), world.used("n1").await), (1, vec![8138, 0]), "kept while it is not known");
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
async fn an_error_after_the_write_is_success_if_a_look_says_so() {
    let pod = units("p", 8138);
    let world = world().with_pod(&pod);
    world.api.fail_posts([Fault::StatusAfterwards(500)]);
    assert_eq!(world.bind(&pod, "n1").await, "");
}

#[tokio::test(start_paused = true)]
async fn repeated_bind_writes_the_same_devices_and_time() {
    let pod = shared("p", 2, 4096);
    let world = world().with_pod(&pod);
    world.api.fail_posts([Fault::Hang]);
    assert_ne!(world.bind(&pod, "n1").await, "");
    assert_eq!(world.bind(&pod, "n1").await, "");
    let bindings = world.api.bindings();
    assert_eq!(bindings.len(), 2);
    assert_eq!(bindings[0], bindings[1]);
    sleep(Duration::from_secs(60)).await;
    assert_eq!(n_assumed(&world), 1, "the first one's search does not take back the second one's success");
    world.see(&pod);
    assert_eq!(world.used("n1").await, [2048, 2048]);
}

#[tokio::test(start_paused = true)]
async fn refusal_of_a_repeat_does_not_take_back_what_may_be_written() {
    let pod = units("p", 8138);
    let world = world().with_pod(&pod);
    world.api.fail_posts([Fault::HangAfterwards, Fault::Status(403)]);
    world.api.fail_gets([Fault::Status(500), Fault::Status(500)]);
    assert_ne!(world.bind(&pod, "n1").await, "");
    assert_ne!(world.bind(&pod, "n1").await, "");
    assert_eq!(world.used("n1").await, [8138, 0]);
    world.see(&pod);
    assert_eq!((n_assumed(&world), world.used("n1").await), (0, vec![8138, 0]));
}

#[tokio::test(start_paused = true)]
async fn another_node_waits_until_the_first_is_known() {
    let pod = units("p", 8138);
    let world = world().with_pod(&pod);
    world.api.fail_posts([Fault::Hang]);
    assert_ne!(world.bind(&pod, "n1").await, "");
    let error = world.bind(&pod, "n2").await;
    assert_eq!(error, "an earlier bind of the pod to node \"n1\" is not settled yet");
    settled(&world).await;
    assert_eq!(world.bind(&pod, "n2").await, "");
    assert_eq!((world.used("n1").await, world.used("n2").await), (vec![0, 0], vec![8138]));
}

#[tokio::test(start_paused = true)]
async fn a_late_write_is_waited_for() {
    let pod = units("p", 8138);
    let world = world().with_pod(&pod);
    world.api.fail_posts([Fault::Hang]);
    assert_ne!(world.bind(&pod, "n1").await, "");
    // The pod is still unbound to every look so soon after; then the write, which was under way, lands.
    sleep(Duration::from_secs(2)).await;
    assert!(world.api.n_gets() > 0);
    assert_eq!(n_assumed(&world), 1);
    let mut bound = on(pod.clone(), "n1");
    bound["metadata"]["annotations"] = world.api.bindings()[0]["metadata"]["annotations"].clone();
    world.api.put(&bound);
    sleep(Duration::from_secs(60)).await;
    assert_eq!((n_assumed(&world), world.used("n1").await), (1, vec![8138, 0]));
}

#[tokio::test(start_paused = true)]
async fn concurrent_binds_of_one_pod_are_one_decision() {
    let pod = units("p", 8138);
    let world = world().with_pod(&pod);
    world.api.fail_posts([Fault::Slow(Duration::from_secs(1))]);
    let (one, other) = tokio::join!(world.bind(&pod, "n1"), world.bind(&pod, "n1"));
    assert_eq!((one.as_str(), other.as_str()), ("", ""));
    assert_eq!(world.used("n1").await, [8138, 0]);
    let stamps: Vec<u64> = world.api.bindings().iter().map(stamp).collect();
    assert!(stamps.iter().all(|time| *time == stamps[0]), "{stamps:?}");
}

#[tokio::test(start_paused = true)]
async fn binds_of_other_pods_do_not_wait() {
    let (slow, quick) = (units("slow", 1), units("quick", 1));
    let world = world().with_pod(&slow).with_pod(&quick);
    world.api.fail_posts([Fault::Slow(Duration::from_secs(3))]);
    let begun = tokio::time::Instant::now();
    let quick = async {
        tokio::task::yield_now().await;
        let error = world.bind(&quick, "n1").await;
        (error, begun.elapsed())
    };
    let (slow, (quick, taken)) = tokio::join!(world.bind(&slow, "n1"), quick);
    assert_eq!((slow.as_str(), quick.as_str()), ("", ""));
    assert!(taken < Duration::from_secs(1), "{taken:?}");
}

/// kubelet sees pods in the order of the writes, and is answered in the order of the stamps: the two must agree.
#[tokio::test(start_paused = true)]
async fn writes_of_one_node_are_in_the_order_of_their_stamps() {
    let pods = [units("a", 1), units("b", 1), units("c", 1)];
    let world = pods.iter().fold(world(), World::with_pod);
    world.api.fail_posts([Fault::Slow(Duration::from_millis(300)), Fault::Slow(Duration::from_millis(100))]);
    let begun = tokio::time::Instant::now();
    let errors = futures::future::join_all(pods.iter().map(|pod| world.bind(pod, "n1"))).await;
    assert_eq!(errors, ["", "", ""]);
    assert!(begun.elapsed() >= Duration::from_millis(400), "no write begins before the one before it is done");
    let written = world.api.bindings();
    let stamps: Vec<u64> = written.iter().map(stamp).collect();
    assert!(written.len() == 3 && stamps.is_sorted(), "{stamps:?}");
}

/// kube-scheduler hangs up after its own timeout; the decision must still come to an end.
#[tokio::test(start_paused = true)]
async fn bind_runs_on_when_the_caller_hangs_up() {
    let pod = units("p", 8138);
    let world = world().with_pod(&pod);
    world.api.fail_posts([Fault::Slow(Duration::from_secs(2))]);
    assert!(timeout(Duration::from_secs(1), world.bind(&pod, "n1")).await.is_err());
    sleep(Duration::from_secs(2)).await;
    assert_eq!(world.api.pod(&pod)["spec"]["nodeName"], "n1");
    world.see(&pod);
    assert_eq!((n_assumed(&world), world.used("n1").await), (0, vec![8138, 0]));
}

#[tokio::test(start_paused = true)]
async fn deletion_during_a_bind_leaves_nothing() {
    let pod = units("p", 8138);
    let world = world().with_pod(&pod);
    world.api.fail_posts([Fault::Hang]);
    assert_ne!(world.bind(&pod, "n1").await, "");
    world.api.remove(&pod);
    world.delete_pod(&pod);
    sleep(Duration::from_secs(60)).await;
    assert_eq!((n_assumed(&world), world.used("n1").await), (0, vec![0, 0]));
}

/// A bind that succeeded and is never seen, as its pod was deleted while the watch was down, does not leak.
#[tokio::test(start_paused = true)]
async fn decisions_that_nobody_sees_are_looked_for() {
    let pod = units("p", 8138);
    let world = world().with_pod(&pod);
    tokio::spawn(Arc::clone(&world.extender).sweep());
    assert_eq!(world.bind(&pod, "n1").await, "");
    world.api.remove(&pod);
    sleep(Duration::from_secs(200)).await;
    assert_eq!(n_assumed(&world), 1);
    settled(&world).await;
    assert_eq!(world.used("n1").await, [0, 0]);
}

#[tokio::test(start_paused = true)]
async fn a_list_older_than_the_pod_does_not_drop_its_decision() {
    let pod = units("p", 8138);
    let world = world();
    world.api.put(&pod);
    world.filter(&pod, &["n1"]).await;
    assert_eq!(world.bind(&pod, "n1").await, "");
    world.list::<proto::pod::Pod>(&[]);
    assert_eq!((n_assumed(&world), world.used("n1").await), (1, vec![8138, 0]));
    world.see(&pod);
    assert_eq!((n_assumed(&world), world.used("n1").await), (0, vec![8138, 0]));
}

#[tokio::test(start_paused = true)]
async fn pod_that_nobody_has_shown_is_read() {
    let pod = units("p", 8138);
    let world = world();
    let error = world.bind(&pod, "n1").await;
    assert_eq!(error, "there is no pod default/p with UID uid-p");
    world.api.put(&pod);
    assert_eq!(world.bind(&pod, "n1").await, "");
    assert_eq!(world.used("n1").await, [8138, 0]);
}

#[tokio::test(start_paused = true)]
async fn pod_that_asks_for_nothing_is_bound_without_a_record() {
    let pod = crate::objects::pod("p", &serde_json::json!({"cpu": "1"}));
    let world = world();
    world.api.put(&pod);
    assert_eq!(world.bind(&pod, "n1").await, "");
    assert_eq!(world.api.bindings()[0]["metadata"]["annotations"], serde_json::json!({}));
    assert_eq!(n_assumed(&world), 0);
}

#[tokio::test(start_paused = true)]
async fn no_room_and_unknown_node_say_so() {
    let (large, small) = (units("large", 16_277), units("small", 1));
    let world = world().with_pod(&large).with_pod(&small);
    assert_eq!(world.bind(&large, "n1").await, "node \"n1\": request is larger than the node's GPUs even when they are empty");
    assert_eq!(world.bind(&small, "n9").await, "node \"n9\": node is not known to gpushare or offers no shareable GPU");
    assert_eq!(world.api.bindings().len(), 0);
}

#[tokio::test(start_paused = true)]
async fn stamps_grow_beyond_what_records_say() {
    let world = world();
    let seen = chrono::Utc::now().timestamp_nanos_opt().unwrap() + 3_600_000_000_000;
    let old = crate::objects::annotated(on(units("old", 1), "n1"), "scheduling.koordinator.sh/bind-timestamp", &seen.to_string());
    let old = crate::objects::annotated(old, "ALIYUN_COM_GPU_MEM_IDX", "0");
    world.apply_pod(&old);
    for name in ["a", "b"] {
        world.place(&units(name, 1), "n1").await;
    }
    let stamps: Vec<u64> = world.api.bindings().iter().map(stamp).collect();
    assert!(stamps[0] > u64::try_from(seen).unwrap() && stamps[1] > stamps[0], "{seen} {stamps:?}");
}

#[tokio::test(start_paused = true)]
async fn terminal_pod_frees_its_room_and_a_deleting_one_does_not() {
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

/// The decision names a minor and units; the new plugin knows UUIDs and bytes. The pod takes the same room all along.
#[tokio::test(start_paused = true)]
async fn the_plugin_is_replaced_while_a_bind_is_under_way() {
    let pod = units("p", 8);
    let world = World::new().with_pod(&pod);
    world.apply_node(&old_node("n", 2, 32));
    assert_eq!(world.bind(&pod, "n").await, "");
    assert_eq!(world.used("n").await, [8, 0]);
    world.apply_node(&node("n", "GiB"));
    world.apply_device(&device("n", &[16_384, 16_384]));
    assert_eq!((n_assumed(&world), world.used("n").await), (1, vec![8, 0]));
    world.see(&pod);
    assert_eq!((n_assumed(&world), world.used("n").await), (0, vec![8, 0]));
}

/// The server gives up when the bind does, and room that a late write may still take is kept for far longer.
#[tokio::test(start_paused = true)]
async fn late_writes_are_cut_off_and_waited_out() {
    let (pod, other) = (units("p", 16_276), units("other", 16_276));
    let world = world().with_pod(&pod).with_pod(&other);
    world.api.fail_posts([Fault::Hang]);
    assert_ne!(world.bind(&pod, "n2").await, "");
    assert_eq!(world.api.queries(), ["timeout=4s"]);
    sleep(Duration::from_secs(50)).await;
    assert_ne!(world.bind(&other, "n2").await, "", "the first write may land yet");
    settled(&world).await;
    assert_eq!(world.bind(&other, "n2").await, "");
}

#[tokio::test(start_paused = true)]
async fn pauses_beyond_the_end_of_time_are_not_waited_for() {
    let pod = units("p", 8138);
    let world = world().with_pod(&pod);
    world.api.fail_posts([Fault::Busy(u64::MAX)]);
    assert!(world.bind(&pod, "n1").await.contains("429"));
}

/// Names that no API server gives out stand in no path, take no room and are not remembered.
#[rstest]
#[case::slash("Bad/ns", "p", "u")]
#[case::upper_case("d", "P", "u")]
#[case::endless_name("d", &"p".repeat(254), "u")]
#[case::endless_namespace(&"d".repeat(64), "p", "u")]
#[case::odd_uid("d", "p", "u/u")]
#[case::endless_uid("d", "p", &"u".repeat(129))]
#[tokio::test(start_paused = true)]
async fn impossible_names_are_refused(#[case] namespace: &str, #[case] name: &str, #[case] uid: &str) {
    let mut pod = units("p", 8138);
    pod["metadata"] = serde_json::json!({"namespace": namespace, "name": name, "uid": uid});
    let world = world();
    world.filter(&pod, &["n2"]).await;
    let error = world.bind(&pod, "n2").await;
    assert!(error.contains("are those of no pod") && error.len() <= 500, "{error}");
    let census = world.index.read().census();
    assert_eq!((census.n_assumed, census.n_hints, world.api.bindings().len()), (0, 0, 0));
}

/// Whatever a bind waits for, it is answered in time, and nothing is written once time is up.
#[tokio::test(start_paused = true)]
async fn one_deadline_covers_all_that_a_bind_waits_for() {
    let pod = units("p", 8138);
    let world = world();
    world.api.put(&pod);
    world.api.fail_gets([Fault::Slow(Duration::from_millis(3900))]);
    world.api.fail_posts([Fault::Hang]);
    let begun = tokio::time::Instant::now();
    let (one, other) = tokio::join!(world.bind(&pod, "n1"), world.bind(&pod, "n1"));
    assert!(one.contains("it is not known whether"), "{one}");
    assert_eq!(other, "nothing is written: there is no time left after waiting for the pod's other bind");
    assert_eq!((begun.elapsed(), world.api.bindings().len()), (Duration::from_secs(4), 1));
}

/// However often a bind is repeated, one search goes on for it.
#[tokio::test(start_paused = true)]
async fn repeats_do_not_multiply_searches() {
    let pod = units("p", 8138);
    let world = world().with_pod(&pod);
    world.api.fail_posts(std::iter::repeat_n(Fault::Status(500), 40));
    world.api.fail_gets(std::iter::repeat_n(Fault::Status(500), 1000));
    for _ in 0..20 {
        assert_ne!(world.bind(&pod, "n1").await, "");
    }
    let before = world.api.n_gets();
    sleep(Duration::from_secs(100)).await;
    assert!(world.api.n_gets() - before <= 15, "{}", world.api.n_gets() - before);
}

/// A search that hangs holds up no bind of its pod.
#[tokio::test(start_paused = true)]
async fn a_search_does_not_hold_up_the_repeat() {
    let pod = units("p", 8138);
    let world = world().with_pod(&pod);
    world.api.fail_posts([Fault::Break]);
    world.api.fail_gets([Fault::Status(500), Fault::Hang]);
    assert_ne!(world.bind(&pod, "n1").await, "");
    sleep(Duration::from_secs(1)).await;
    let begun = tokio::time::Instant::now();
    assert_eq!((world.bind(&pod, "n1").await.as_str(), begun.elapsed()), ("", Duration::ZERO));
}

/// The room that an open decision holds is its own pod's: the filter leads back to that node, so that the bind is repeated.
#[tokio::test(start_paused = true)]
async fn filter_leads_a_retry_to_the_node_of_the_open_decision() {
    let pod = units("p", 16_276);
    let world = world().with_pod(&pod);
    world.api.fail_posts([Fault::Break]);
    assert_ne!(world.bind(&pod, "n2").await, "");
    assert_eq!(world.fitting(&pod, &["n1", "n2"]).await, ["n2"]);
    let nodes = [node("n1", "MiB"), node("n2", "MiB")];
    let whole = world.filter_whole(&pod, &nodes).await;
    assert_eq!(whole["Nodes"]["items"].as_array().unwrap().len(), 1);
    assert_eq!(whole["Nodes"]["items"][0]["metadata"]["name"], "n2");
    assert_eq!(world.fitting(&pod, &["n1"]).await, ["n1"], "without that node the others are judged as ever");
    assert_eq!(world.bind(&pod, "n2").await, "");
}

/// An earlier scheduler bound the pod to the same node, and to other devices.
#[tokio::test(start_paused = true)]
async fn record_of_another_scheduler_on_the_same_node_is_believed() {
    let pod = units("p", 8138);
    let world = world().with_pod(&pod);
    world.api.put(&crate::objects::placed_by_old_extender(pod.clone(), "n1", 1, 8138, 16_276));
    assert_eq!(world.bind(&pod, "n1").await, "");
    assert_eq!((n_assumed(&world), world.used("n1").await), (1, vec![0, 8138]));
    world.see(&pod);
    assert_eq!((n_assumed(&world), world.used("n1").await), (0, vec![0, 8138]));
}

/// Writes of the scheduler before this one may be under way for the pods that were pending when this one began.
#[rstest]
#[case::pending(units("old", 1), true)]
#[case::bound(on(units("old", 1), "n1"), false)]
#[case::not_ours(crate::objects::pod("old", &serde_json::json!({"cpu": "1"})), false)]
#[tokio::test(start_paused = true)]
async fn binds_wait_after_a_start(#[case] listed: Value, #[case] waits: bool) {
    let pod = units("p", 1);
    let world = World::unsynced(&scheduler::offline::serving());
    world.list::<proto::node::Node>(&[node("n1", "MiB")]);
    world.list::<scheduler::index::RawDevice>(&[device("n1", &[16_276])]);
    world.list::<proto::pod::Pod>(&[listed]);
    let world = world.with_pod(&pod);
    assert_eq!(world.fitting(&pod, &["n1"]).await, ["n1"]);
    sleep(Duration::from_millis(4900)).await;
    assert_eq!(world.bind(&pod, "n1").await.starts_with("starting: "), waits);
    sleep(Duration::from_millis(100)).await;
    assert_eq!(world.bind(&pod, "n1").await, "");
}

/// A pod that was bound and deleted while the watch was down is missed at once.
#[tokio::test(start_paused = true)]
async fn written_decision_that_a_list_leaves_out_is_looked_for() {
    let pod = units("p", 8138);
    let world = world().with_pod(&pod);
    tokio::spawn(Arc::clone(&world.extender).sweep());
    assert_eq!(world.bind(&pod, "n1").await, "");
    world.api.remove(&pod);
    world.list::<proto::pod::Pod>(&[]);
    assert_eq!(n_assumed(&world), 1, "the list may be older than the pod");
    sleep(Duration::from_secs(10)).await;
    let census = world.index.read().census();
    assert_eq!((census.n_assumed, census.n_pending, census.n_pods), (0, 0, 0));
}

/// Binds that hang hold up no filter.
#[tokio::test(start_paused = true)]
async fn filters_do_not_wait_for_binds() {
    let pods = [units("a", 1), units("b", 1)];
    let mut serving = scheduler::offline::serving();
    serving.concurrency = 1;
    let world = World::unsynced(&serving);
    world.list::<proto::node::Node>(&[node("n1", "MiB")]);
    world.list::<scheduler::index::RawDevice>(&[device("n1", &[16_276])]);
    world.list::<proto::pod::Pod>(&[]);
    let world = pods.iter().fold(world, World::with_pod);
    world.api.fail_posts([Fault::Hang]);
    let begun = tokio::time::Instant::now();
    let filter = async {
        while world.api.bindings().is_empty() {
            tokio::task::yield_now().await;
        }
        (world.fitting(&pods[1], &["n1"]).await, begun.elapsed())
    };
    let (_, (fitting, taken), second) = tokio::join!(world.bind(&pods[0], "n1"), filter, world.bind(&pods[1], "n1"));
    assert_eq!((fitting, taken), (vec!["n1".to_owned()], Duration::ZERO));
    assert!(second.starts_with("nothing is written: there is no time left"), "{second}");
}
