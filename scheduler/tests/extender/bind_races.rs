//! Concurrent binds: repeats, other pods and nodes, filters, a start, and decisions that no watch shows. Time is simulated.

use std::sync::Arc;
use std::time::Duration;

use daemon::api_server::Contact;
use http::{Request, Response};
use kube::client::Body;
use kube::{Api, Client};
use rstest::rstest;
use scheduler::extender::bind::sweep_unseen;
use scheduler::leader::Leadership;
use scheduler::leader::elector::take_over_alone;
use scheduler::leader::watch_barrier::WatchBarrier;
use scheduler::watch::watch;
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};

use crate::api::Fault;
use crate::bind_outcomes::{n_assumed, settled, stamp, world};
use crate::objects::{device, node, old_node, on, shared, units};
use crate::world::World;

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
    assert_eq!(
        n_assumed(&world),
        1,
        "the first one's search does not take back the second one's success"
    );
    world.see(&pod);
    assert_eq!(world.used("n1").await, [2048, 2048]);
}

#[rstest]
#[case::forbidden(Fault::Status(403))]
#[case::busy(Fault::Busy(60))]
#[tokio::test(start_paused = true)]
async fn a_refused_repeat_does_not_release_a_decision_that_may_be_written(#[case] refusal: Fault) {
    let pod = units("p", 8138);
    let world = world().with_pod(&pod);
    world.api.fail_posts([Fault::HangAfterwards, refusal]);
    world.api.fail_gets([Fault::Status(500), Fault::Status(500)]);
    assert_ne!(world.bind(&pod, "n1").await, "");
    assert_ne!(world.bind(&pod, "n1").await, "");
    assert_eq!(world.used("n1").await, [8138, 0]);
    world.see(&pod);
    assert_eq!((n_assumed(&world), world.used("n1").await), (0, vec![8138, 0]));
}

#[tokio::test(start_paused = true)]
async fn a_bind_to_another_node_waits_for_the_outcome_of_the_first() {
    let pod = units("p", 8138);
    let world = world().with_pod(&pod);
    world.api.fail_posts([Fault::Hang]);
    assert_ne!(world.bind(&pod, "n1").await, "");
    let error = world.bind(&pod, "n2").await;
    assert_eq!(
        error,
        "an earlier bind of the pod to node \"n1\" is not settled yet"
    );
    settled(&world).await;
    assert_eq!(world.bind(&pod, "n2").await, "");
    assert_eq!(
        (world.used("n1").await, world.used("n2").await),
        (vec![0, 0], vec![8138])
    );
}

#[tokio::test(start_paused = true)]
async fn a_bind_waits_for_a_late_write_of_the_same_pod() {
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

/// kubelet sees pods in the order of the writes, and the plugin matches them in the order of assume times.
#[tokio::test(start_paused = true)]
async fn writes_of_one_node_are_in_the_order_of_assume_times() {
    let pods = [units("a", 1), units("b", 1), units("c", 1)];
    let world = pods.iter().fold(world(), World::with_pod);
    world.api.fail_posts([
        Fault::Slow(Duration::from_millis(300)),
        Fault::Slow(Duration::from_millis(100)),
    ]);
    let begun = tokio::time::Instant::now();
    let errors = futures::future::join_all(pods.iter().map(|pod| world.bind(pod, "n1"))).await;
    assert_eq!(errors, ["", "", ""]);
    assert!(
        begun.elapsed() >= Duration::from_millis(400),
        "no write begins before the one before it is done"
    );
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
    assert!(
        timeout(Duration::from_secs(1), world.bind(&pod, "n1"))
            .await
            .is_err()
    );
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

/// The pod of a written binding was deleted while the watch was down; its room is freed.
#[tokio::test(start_paused = true)]
async fn written_bindings_that_no_watch_shows_are_checked() {
    let pod = units("p", 8138);
    let world = world().with_pod(&pod);
    tokio::spawn(sweep_unseen(Arc::clone(&world.extender)));
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

/// The decision names a minor and units; the new plugin reports UUIDs and bytes. The pod holds the same room all along.
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

/// The API server times out with the bind, and the room of a late write is kept for much longer.
#[tokio::test(start_paused = true)]
async fn writes_beyond_the_deadline_are_cancelled_and_checked() {
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

/// A bind is answered in time, and writes nothing after its deadline.
#[tokio::test(start_paused = true)]
async fn one_deadline_covers_all_that_a_bind_waits_for() {
    let pod = units("p", 8138);
    let world = world();
    world.api.put(&pod);
    world.api.fail_gets([Fault::Slow(Duration::from_millis(3900))]);
    world.api.fail_posts([Fault::Hang]);
    let begun = tokio::time::Instant::now();
    let (one, other) = tokio::join!(world.bind(&pod, "n1"), world.bind(&pod, "n1"));
    assert!(one.contains("binding outcome unknown"), "{one}");
    assert_eq!(
        other,
        "nothing is written: there is no time left after waiting for the pod's other bind"
    );
    assert_eq!(
        (begun.elapsed(), world.api.bindings().len()),
        (Duration::from_secs(4), 1)
    );
}

/// One task resolves the outcome of a bind, however often the bind is repeated.
#[tokio::test(start_paused = true)]
async fn repeats_do_not_multiply_tasks() {
    let pod = units("p", 8138);
    let world = world().with_pod(&pod);
    world.api.fail_posts(std::iter::repeat_n(Fault::Status(500), 40));
    world.api.fail_gets(std::iter::repeat_n(Fault::Status(500), 1000));
    for _ in 0..20 {
        assert_ne!(world.bind(&pod, "n1").await, "");
    }
    let before = world.api.n_gets();
    sleep(Duration::from_secs(100)).await;
    assert!(
        world.api.n_gets() - before <= 15,
        "{}",
        world.api.n_gets() - before
    );
}

/// A read of the pod that hangs holds up no bind of the pod.
#[tokio::test(start_paused = true)]
async fn a_hanging_read_does_not_hold_up_the_repeat() {
    let pod = units("p", 8138);
    let world = world().with_pod(&pod);
    world.api.fail_posts([Fault::Break]);
    world.api.fail_gets([Fault::Status(500), Fault::Hang]);
    assert_ne!(world.bind(&pod, "n1").await, "");
    sleep(Duration::from_secs(1)).await;
    let begun = tokio::time::Instant::now();
    assert_eq!(
        (world.bind(&pod, "n1").await.as_str(), begun.elapsed()),
        ("", Duration::ZERO)
    );
}

/// The room of an open decision is its own pod's: `filter` returns that node, so that the bind is repeated.
#[tokio::test(start_paused = true)]
async fn filter_returns_the_node_of_the_open_decision() {
    let pod = units("p", 16_276);
    let world = world().with_pod(&pod);
    world.api.fail_posts([Fault::Break]);
    assert_ne!(world.bind(&pod, "n2").await, "");
    assert_eq!(world.fitting(&pod, &["n1", "n2"]).await, ["n2"]);
    let nodes = [node("n1", "MiB"), node("n2", "MiB")];
    let whole = world.filter_whole(&pod, &nodes).await;
    assert_eq!(whole["Nodes"]["items"].as_array().unwrap().len(), 1);
    assert_eq!(whole["Nodes"]["items"][0]["metadata"]["name"], "n2");
    assert_eq!(
        world.fitting(&pod, &["n1"]).await,
        ["n1"],
        "without that node the others are judged as ever"
    );
    assert_eq!(world.bind(&pod, "n2").await, "");
}

/// An earlier scheduler bound the pod to the same node, and to other devices.
#[tokio::test(start_paused = true)]
async fn the_record_of_another_scheduler_on_the_same_node_is_kept() {
    let pod = units("p", 8138);
    let world = world().with_pod(&pod);
    world.api.put(&crate::objects::placed_by_old_extender(
        pod.clone(),
        "n1",
        1,
        8138,
        16_276,
    ));
    assert_eq!(world.bind(&pod, "n1").await, "");
    assert_eq!((n_assumed(&world), world.used("n1").await), (1, vec![0, 8138]));
    world.see(&pod);
    assert_eq!((n_assumed(&world), world.used("n1").await), (0, vec![0, 8138]));
}

/// An API server that lists one pod, and sends no event.
fn lister(pod: Value) -> Client {
    let server = move |request: Request<Body>| {
        let is_watch = request
            .uri()
            .query()
            .is_some_and(|query| query.contains("watch=true"));
        let list = json!({"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": [pod]});
        async move {
            if is_watch {
                std::future::pending::<()>().await;
            }
            Ok::<_, std::convert::Infallible>(Response::new(Body::from(list.to_string().into_bytes())))
        }
    };
    Client::new(tower::service_fn(server), "default")
}

/// An earlier scheduler may have writes under way for the pods that were pending when this one started.
#[rstest]
#[case::pending(units("old", 1), true)]
#[case::bound(on(units("old", 1), "n1"), false)]
#[case::not_ours(crate::objects::pod("old", &serde_json::json!({"cpu": "1"})), false)]
#[tokio::test(start_paused = true)]
async fn binds_wait_after_a_start(#[case] listed: Value, #[case] waits: bool) {
    let pod = units("p", 1);
    let leadership = Leadership::alone_after_takeover();
    let world = World::with_leadership(&scheduler::config::Serving::default(), leadership.clone());
    world.list::<proto::node::Node>(&[node("n1", "MiB")]);
    world.list::<scheduler::index::RawDevice>(&[device("n1", &[16_276])]);
    let world = world.with_pod(&pod);
    let barrier = WatchBarrier::new(None);
    let (following, index) = (barrier.clone(), world.index.clone());
    let pods = watch("pods", Api::all(lister(listed)), &Contact::default());
    tokio::spawn(async move { following.follow(pods, index).await });
    tokio::spawn(take_over_alone(leadership, world.index.clone(), barrier));
    sleep(Duration::from_millis(2900)).await;
    assert_eq!(world.fitting(&pod, &["n1"]).await, ["n1"]);
    assert_eq!(world.bind(&pod, "n1").await.starts_with("starting: "), waits);
    sleep(Duration::from_millis(300)).await;
    assert_eq!(world.bind(&pod, "n1").await, "");
}

/// The list that follows shows at once that the pod was deleted while the watch was down.
#[tokio::test(start_paused = true)]
async fn a_written_binding_that_a_list_leaves_out_is_checked() {
    let pod = units("p", 8138);
    let world = world().with_pod(&pod);
    tokio::spawn(sweep_unseen(Arc::clone(&world.extender)));
    assert_eq!(world.bind(&pod, "n1").await, "");
    world.api.remove(&pod);
    world.list::<proto::pod::Pod>(&[]);
    assert_eq!(n_assumed(&world), 1, "the list may be older than the pod");
    sleep(Duration::from_millis(10)).await;
    let snapshot = world.index.read().snapshot();
    assert_eq!(
        (snapshot.n_assumed, snapshot.n_pending, snapshot.n_pods),
        (0, 0, 0)
    );
}

/// Binds that hang hold up no filter.
#[tokio::test(start_paused = true)]
async fn filters_do_not_wait_for_binds() {
    let pods = [units("a", 1), units("b", 1)];
    let serving = scheduler::config::Serving {
        concurrency: 1,
        ..scheduler::config::Serving::default()
    };
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
    let (_, (fitting, taken), second) =
        tokio::join!(world.bind(&pods[0], "n1"), filter, world.bind(&pods[1], "n1"));
    assert_eq!((fitting, taken), (vec!["n1".to_owned()], Duration::ZERO));
    assert!(
        second.starts_with("nothing is written: there is no time left"),
        "{second}"
    );
}
