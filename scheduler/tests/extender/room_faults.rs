//! Room that the leader makes by evictions while other pods want it too, requests fail, and kube-scheduler acts meanwhile.

use std::time::Duration;

use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use proto::pod::Pod;
use rstest::rstest;
use serde_json::{Value, json};
use tokio::time::{Instant, advance, sleep};

use crate::api::{Fault, show_budget};
use crate::making_room::{AFTER, HOLD, Making, half_evicted, important, running, with_app};
use crate::objects::{device, units};
use crate::read_api::{api_of, read};
use crate::world::World;

/// A moment within a request that takes a second.
const MEANWHILE: Duration = Duration::from_millis(300);

/// A node of one GPU of 80 units with five pods of 10: 30 units are free.
fn one_gpu() -> Making {
    let mut world = World::making_room().with_node("n1", &[80]);
    for at in 0..5 {
        world = world.with_pod(&running(&format!("low{at}"), "n1", 0, 10, 0));
    }
    Making::of(world, true, 60)
}

/// The answer of `preempt` for a pod, by kube-scheduler's proposal of these victims on `n1`.
async fn victims(making: &Making, pod: &Value, proposed: &[&str]) -> Value {
    let uid = |name: &&str| json!({"UID": format!("uid-{name}")});
    let uids: Vec<Value> = proposed.iter().map(uid).collect();
    let proposal = json!({"n1": {"Pods": uids, "NumPDBViolations": 0}});
    let body = json!({"Pod": pod, "NodeNameToMetaVictims": proposal}).to_string();
    let (_, text) = making
        .world
        .send("POST", "/gpushare-scheduler/preempt", body)
        .await;
    let answer: Value = serde_json::from_str(&text).unwrap();
    answer["NodeNameToMetaVictims"]["n1"]["Pods"].clone()
}

/// Each of two pods gets 40 units of its own, although the second is the more important one.
#[tokio::test(start_paused = true)]
async fn two_rooms_on_one_gpu_are_two_rooms() {
    let making = one_gpu();
    let first = making.high().await;
    making.tick().await;
    assert_eq!(making.world.api.evicted().len(), 1);
    let second = important("higher", 40, 2000);
    making.refuse(&second, &["n1"]).await;
    advance(AFTER).await;
    let mut n_ended = 0;
    for _ in 0..40 {
        making.tick().await;
        advance(Duration::from_secs(1)).await;
        let evicted = making.world.api.evicted();
        for name in evicted.iter().skip(n_ended) {
            making.end(name);
        }
        n_ended = evicted.len();
    }
    assert_eq!(n_ended, 5);
    for pod in [&first, &second] {
        let shown = making.world.api.pod(pod);
        assert_eq!(making.world.fitting(&shown, &["n1"]).await, ["n1"]);
        assert_eq!(making.world.bind(&shown, "n1").await, "");
        making.world.see(pod);
    }
}

/// The hint of a less important pod is as much in the way of the pod as one of its own priority.
#[tokio::test(start_paused = true)]
async fn room_that_is_kept_for_another_pod_is_not_counted_on() {
    let world = World::making_room().with_node("n1", &[80, 80]);
    let world = world
        .with_pod(&running("a", "n1", 0, 50, 0))
        .with_pod(&running("b", "n1", 1, 80, 3));
    let making = Making::of(world, true, 60);
    let mut nominee = important("nominee", 30, 10);
    nominee["status"]["nominatedNodeName"] = "n1".into();
    making.world.api.put(&nominee);
    making.world.apply_pod(&nominee);
    let pod = making.refused(60, &["n1"]).await;
    making.tick().await;
    assert_eq!(
        making.world.api.evicted(),
        ["b"],
        "without `a` 50 units would be free"
    );
    making.end("b");
    for pod in [&pod, &nominee] {
        let shown = making.world.api.pod(pod);
        assert_eq!(making.world.fitting(&shown, &["n1"]).await, ["n1"]);
    }
}

/// kube-scheduler evicts pods on the node for a more important pod, and removes the nomination of the less important one.
#[tokio::test(start_paused = true)]
async fn a_preemption_for_a_more_important_pod_ends_the_room() {
    let making = one_gpu();
    let pod = making.high().await;
    making.tick().await;
    let first = making.world.api.evicted().remove(0);
    let more_important = important("higher", 40, 2000);
    making.refuse(&more_important, &["n1"]).await;
    let proposed = if first == "low0" { "low1" } else { "low0" };
    let named = victims(&making, &more_important, &[proposed]).await;
    assert_eq!(named.as_array().map(Vec::len), Some(1), "{named}");
    making.world.api.nominate(&pod, &Value::Null);
    making.world.api.nominate(&more_important, &json!("n1"));
    making.end(&first);
    making.end(named[0]["UID"].as_str().unwrap().trim_start_matches("uid-"));
    making.tick().await;
    let shown = making.world.api.pod(&more_important);
    assert_eq!(making.world.fitting(&shown, &["n1"]).await, ["n1"]);
    assert_eq!(making.nominated(&pod), Value::Null);
}

/// The API server refuses the binding, and the pod waits again: its room stays kept.
#[tokio::test(start_paused = true)]
async fn a_failed_bind_does_not_lose_the_room() {
    let making = Making::hole(true);
    let pod = making.high().await;
    making.tick().await;
    making.end(&making.world.api.evicted().remove(0));
    let shown = making.world.api.pod(&pod);
    assert_eq!(making.world.fitting(&shown, &["n1"]).await, ["n1"]);
    making.world.api.fail_posts([Fault::Status(403)]);
    assert_ne!(making.world.bind(&pod, "n1").await, "");
    let replacement = units("replacement", 40);
    assert_eq!(
        making.world.fitting(&replacement, &["n1"]).await,
        Vec::<String>::new()
    );
    making.tick().await;
    assert_eq!(making.metric("make_room_pending"), "1");
    assert_eq!(making.world.fitting(&shown, &["n1"]).await, ["n1"]);
}

/// A decision falls into the time in which the binding is written.
#[tokio::test(start_paused = true)]
async fn a_binding_under_way_does_not_end_the_room() {
    let making = Making::hole(true);
    let pod = making.high().await;
    making.tick().await;
    making.end(&making.world.api.evicted().remove(0));
    making.world.api.fail_posts([Fault::Slow(Duration::from_secs(1))]);
    let decide = async {
        sleep(MEANWHILE).await;
        making.tick().await;
        assert_eq!(making.metric("make_room_pending"), "1");
    };
    let (failure, ()) = tokio::join!(making.world.bind(&pod, "n1"), decide);
    assert_eq!(failure, "");
    making.world.see(&pod);
    making.tick().await;
    assert_eq!(making.metric("make_room_seconds_count"), "1");
    assert_eq!(making.metric("make_room_pending"), "0");
}

/// An error of kube-scheduler removes the nomination between two evictions: the second pod still goes, as the first has.
#[tokio::test(start_paused = true)]
async fn a_nomination_lost_between_two_evictions_does_not_end_them() {
    let making = Making::of_two_pods();
    let pod = making.refused(80, &["n1"]).await;
    let slow = Some(Fault::Slow(Duration::from_secs(1)));
    making.world.api.fail_evictions([None, None, slow]);
    let lose = async {
        sleep(MEANWHILE).await;
        making.world.api.nominate(&pod, &Value::Null);
    };
    tokio::join!(making.tick(), lose);
    for _ in 0..3 {
        making.tick().await;
        advance(Duration::from_secs(1)).await;
    }
    assert_eq!(making.world.api.evicted(), ["first", "second"]);
    assert_eq!(making.nominated(&pod), "n1");
}

/// Between the choice of the victims and the nomination kube-scheduler is given one of them for another pod.
#[tokio::test(start_paused = true)]
async fn a_victim_that_preempt_has_named_meanwhile_is_not_counted_on() {
    let world = World::making_room().with_node("n1", &[80]);
    let world = world.with_pod(&running("a", "n1", 0, 50, 0));
    let making = Making::of(world, true, 60);
    let pod = making.high().await;
    let other = important("higher", 40, 2000);
    making.world.api.put(&other);
    making.world.apply_pod(&other);
    let slow = Some(Fault::Slow(Duration::from_secs(1)));
    making.world.api.fail_evictions([slow]);
    let preempt = async {
        sleep(MEANWHILE).await;
        victims(&making, &other, &["a"]).await
    };
    let ((), named) = tokio::join!(making.tick(), preempt);
    assert_eq!(named, json!([{"UID": "uid-a"}]));
    assert_eq!(making.world.api.evicted(), Vec::<String>::new());
    assert_eq!(making.nominated(&pod), Value::Null);
}

/// The changes after which an eviction is not tried again, though the watch does not show them yet.
#[rstest]
#[case::none(|_: &Making, _: &Value| {}, 2)]
#[case::the_pod_is_deleted(|making: &Making, pod: &Value| making.world.api.remove(pod), 1)]
#[case::the_pod_is_bound(|making: &Making, pod: &Value| {
    let mut pod = making.world.api.pod(pod);
    pod["spec"]["nodeName"] = "n9".into();
    making.world.api.put(&pod);
}, 1)]
#[case::the_eviction_is_forbidden(|making: &Making, _: &Value| {
    let mut second = making.world.api.pod(&running("second", "n1", 0, 40, 3));
    second["metadata"]["annotations"]["gpushare/evict"] = "false".into();
    making.world.api.put(&second);
}, 1)]
#[tokio::test(start_paused = true)]
async fn evictions_are_not_tried_again_on_old_facts(
    #[case] change: fn(&Making, &Value),
    #[case] n_evicted: usize,
) {
    let (making, pod) = half_evicted().await;
    making.world.api.show_to(None);
    change(&making, &pod);
    making.world.api.set_budget("a", 1);
    making.tick().await;
    assert_eq!(making.world.api.evicted().len(), n_evicted);
}

/// The API server does not answer, or answers that the pod has changed, when time is up.
#[rstest]
#[case::no_answer(Fault::Break, 2)]
#[case::a_conflict(Fault::Status(409), 1)]
#[tokio::test(start_paused = true)]
async fn room_is_free_when_time_is_up(#[case] fault: Fault, #[case] n_faults: usize) {
    let making = Making::hole(true);
    let pod = making.high().await;
    making.tick().await;
    let victim = making.world.api.evicted().remove(0);
    making.end(&victim);
    making.world.api.fail_nominations(vec![Some(fault); n_faults]);
    advance(HOLD + Duration::from_secs(30)).await;
    making.tick().await;
    assert_eq!(making.nominated(&pod), "n1", "the request has failed");
    let replacement = units("replacement", 40);
    assert_eq!(making.world.fitting(&replacement, &["n1"]).await, ["n1"]);
    for _ in 0..n_faults {
        advance(Duration::from_secs(1)).await;
        making.tick().await;
    }
    assert_eq!(
        (making.nominated(&pod), making.outcome("late")),
        (Value::Null, "1".to_owned())
    );
    assert_eq!(making.metric("make_room_pending"), "0");
}

/// The watch shows the removal of a nomination late: it is not taken for one of an earlier leader.
#[tokio::test(start_paused = true)]
async fn a_late_watch_does_not_bring_back_a_room() {
    let making = Making::hole(true);
    let pod = making.high().await;
    making.tick().await;
    making.world.api.show_to(None);
    advance(HOLD + Duration::from_secs(30)).await;
    for _ in 0..10 {
        making.tick().await;
        advance(Duration::from_secs(1)).await;
    }
    assert_eq!(
        (making.nominated(&pod), making.outcome("late")),
        (Value::Null, "1".to_owned())
    );
    assert_eq!(making.world.api.n_nominations(), 2);
    making.world.see(&pod);
    making.tick().await;
    assert_eq!(making.metric("make_room_pending"), "0");
}

/// Another replica begins to lead, and `preempt` is asked before its first decision. A replica that only reports takes no room
/// over.
#[rstest]
#[case::evicts(true)]
#[case::reports(false)]
#[tokio::test(start_paused = true)]
async fn preempt_names_no_victims_before_a_new_leader_takes_over(#[case] evicts: bool) {
    let making = one_gpu();
    let pod = making.high().await;
    making.tick().await;
    let first = making.world.api.evicted().remove(0);
    let mut world = World::making_room_by(evicts).with_node("n1", &[80]);
    world.api = making.world.api.clone();
    let next = Making::of(world, evicts, 60);
    next.world.list::<Pod>(&next.world.api.all());
    let proposed = if first == "low0" { "low1" } else { "low0" };
    let named = victims(&next, &next.world.api.pod(&pod), &[proposed]).await;
    assert_eq!(named.is_null(), evicts, "{named}");
}

/// A victim with a finalizer outlasts the room: `preempt` serves the pod again.
#[tokio::test(start_paused = true)]
async fn preempt_serves_a_pod_whose_room_was_late() {
    let making = one_gpu();
    let pod = making.high().await;
    making.tick().await;
    let first = making.world.api.evicted().remove(0);
    advance(HOLD + Duration::from_secs(30)).await;
    making.tick().await;
    assert_eq!(making.nominated(&pod), Value::Null);
    let proposed = if first == "low0" { "low1" } else { "low0" };
    let named = victims(&making, &making.world.api.pod(&pod), &[proposed]).await;
    assert_ne!(named, Value::Null);
}

/// Five pods have to go, and the API server answers no eviction.
#[tokio::test(start_paused = true)]
async fn an_api_server_that_does_not_answer_holds_up_no_other_room() {
    let mut world = World::making_room().with_node("n1", &[80]);
    for at in 0..5 {
        world = world.with_pod(&running(&format!("low{at}"), "n1", 0, 16, 0));
    }
    let making = Making::of(world, true, 60);
    making.refused(80, &["n1"]).await;
    let dry_runs = [None; 5];
    let faults = dry_runs.into_iter().chain([Some(Fault::Hang); 10]);
    making.world.api.fail_evictions(faults);
    for _ in 0..2 {
        let began = Instant::now();
        making.tick().await;
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    }
    assert_eq!(making.outcome("evicted"), "0");
    assert_eq!(making.world.api.events(), Vec::new(), "no pod was evicted");
    making.world.api.heal();
    making.tick().await;
    assert_eq!(making.world.api.evicted().len(), 5);
    assert_eq!(making.outcome("evicted"), "1");
    let events = making.world.api.events();
    let making_room = events.iter().find(|event| event.0 == "MakingRoom").unwrap();
    assert_eq!(making_room.2, "evicted 5 pods with 80 MiB on GPU 0 of n1");
}

/// An eviction is carried out and gets no answer: it counts as any other, as soon as the watch shows it.
#[rstest]
#[case::while_the_pod_is_leaving(Fault::HangAfterwards, false)]
#[case::once_the_pod_has_ended(Fault::StatusAfterwards(500), true)]
#[tokio::test(start_paused = true)]
async fn an_eviction_without_an_answer_is_counted(#[case] fault: Fault, #[case] has_ended: bool) {
    let making = Making::hole(true);
    making.world.api.fail_evictions([None, Some(fault)]);
    making.high().await;
    making.tick().await;
    let evicted = making.world.api.evicted();
    assert_eq!(evicted.len(), 1);
    assert_eq!(making.metric("make_room_victims_total"), "0");
    if has_ended {
        making.end(&evicted[0]);
    }
    for _ in 0..3 {
        making.tick().await;
        advance(Duration::from_secs(1)).await;
    }
    assert_eq!(making.world.api.evicted().len(), 1);
    assert_eq!(
        (
            making.metric("make_room_victims_total"),
            making.outcome("evicted")
        ),
        ("1".into(), "1".into())
    );
    let events = making.world.api.events();
    let texts = |reason| events.iter().filter(move |event| event.0 == reason);
    assert_eq!(texts("EvictedForRoom").count(), 1, "{events:?}");
    let making_room: Vec<&str> = texts("MakingRoom").map(|event| &*event.2).collect();
    assert_eq!(making_room.len(), 1);
    assert!(
        making_room[0].starts_with("evicted 1 pod with 10 MiB on GPU "),
        "{making_room:?}"
    );
}

/// The eviction of a second pod for `high` is tried again, or got no answer, when the next pod has its turn.
#[rstest]
#[case::refused(Fault::Status(429))]
#[case::without_an_answer(Fault::HangAfterwards)]
#[tokio::test(start_paused = true)]
async fn evictions_under_way_count_for_the_limit_of_an_hour(#[case] fault: Fault) {
    let world = World::making_room().with_node("n1", &[80]).with_node("n2", &[80]);
    let world = world
        .with_pod(&running("first", "n1", 0, 40, 5))
        .with_pod(&running("second", "n1", 0, 40, 3))
        .with_pod(&running("third", "n2", 0, 80, 3));
    let making = Making::of(world, true, 2);
    making.refuse(&important("high", 80, 1000), &["n1"]).await;
    making.refuse(&important("other", 80, 1000), &["n2"]).await;
    advance(AFTER).await;
    let faults = [None, None, None].into_iter().chain([Some(fault); 9]);
    making.world.api.fail_evictions(faults);
    for _ in 0..4 {
        making.tick().await;
        advance(Duration::from_secs(1)).await;
    }
    assert_eq!(making.outcome("over_budget"), "1");
    assert!(!making.world.api.evicted().contains(&"third".to_owned()));
}

/// Two plans that evict pods of equal memory on one GPU are two plans.
#[tokio::test(start_paused = true)]
async fn each_plan_is_counted() {
    let world = World::making_room().with_node("n1", &[80]);
    let world = world.with_pod(&running("a", "n1", 0, 50, 0));
    let making = Making::of(world, true, 60);
    let pod = making.high().await;
    making.tick().await;
    making.world.api.nominate(&pod, &json!("n9"));
    making.end("a");
    making.tick().await;
    let again = running("b", "n1", 0, 50, 0);
    making.world.api.put(&again);
    making.world.apply_pod(&again);
    making.world.api.nominate(&pod, &Value::Null);
    let shown = making.world.api.pod(&pod);
    making.refuse(&shown, &["n1"]).await;
    advance(AFTER * 4).await;
    making.tick().await;
    assert_eq!(making.world.api.evicted(), ["a", "b"]);
    assert_eq!(making.outcome("evicted"), "2");
}

/// The last pod ends by itself, so that no eviction was given up.
#[tokio::test(start_paused = true)]
async fn a_pod_that_fits_by_itself_is_not_counted_as_refused() {
    let (making, _) = half_evicted().await;
    making.end("first");
    making.end("second");
    for _ in 0..40 {
        advance(Duration::from_secs(1)).await;
        making.tick().await;
    }
    assert_eq!(making.outcome("refused"), "0");
}

/// The event names the pods that were evicted, and their memory.
#[tokio::test(start_paused = true)]
async fn an_event_counts_the_evicted_pods_alone() {
    let (making, _) = half_evicted().await;
    let texts = || -> Vec<String> {
        let events = making.world.api.events().into_iter();
        events
            .filter(|event| event.0 == "MakingRoom")
            .map(|event| event.2)
            .collect()
    };
    assert_eq!(texts(), ["evicted 1 pod with 40 MiB on GPU 0 of n1"]);
}

/// The API server is away for three minutes. Meanwhile a GPU becomes free, which the watch does not show at once.
#[tokio::test(start_paused = true)]
async fn nothing_is_evicted_after_an_outage_on_old_facts() {
    let making = Making::hole(true);
    let pod = making.high().await;
    let api = &making.world.api;
    api.show_to(None);
    api.fail_evictions([Some(Fault::Break); 200]);
    api.fail_nominations([Some(Fault::Break); 200]);
    api.fail_gets([Fault::Break; 200]);
    for _ in 0..180 {
        making.tick().await;
        advance(Duration::from_secs(1)).await;
    }
    api.heal();
    for at in 5..10 {
        api.remove(&running(&format!("low{at}"), "n1", 0, 10, 0));
    }
    for _ in 0..4 {
        making.tick().await;
        advance(Duration::from_secs(1)).await;
    }
    assert_eq!(making.nominated(&pod), Value::Null);
    assert!(api.n_nominations() >= 2, "nominated, and taken back");
    api.show_to(Some(making.world.index.clone()));
    making.world.list::<Pod>(&api.all());
    for _ in 0..10 {
        making.tick().await;
        advance(Duration::from_secs(1)).await;
    }
    assert_eq!(api.evicted(), Vec::<String>::new());
    let shown = api.pod(&pod);
    assert_eq!(making.world.fitting(&shown, &["n1"]).await, ["n1"]);
}

/// The API server is away for 8 s while an eviction is tried again. Meanwhile a GPU becomes free, which the watch does not show
/// at once.
#[tokio::test(start_paused = true)]
async fn evictions_are_not_tried_again_after_an_outage() {
    let world = World::making_room().with_node("n1", &[80, 80]);
    let important = running("important", "n1", 1, 80, 2000);
    let world = world
        .with_pod(&running("first", "n1", 0, 40, 5))
        .with_pod(&running("second", "n1", 0, 40, 3))
        .with_pod(&important);
    let making = Making::of(world, true, 60);
    making.refused(80, &["n1"]).await;
    let api = &making.world.api;
    api.fail_evictions([None, None, None, Some(Fault::Status(429))]);
    making.tick().await;
    assert_eq!(api.evicted(), ["first"]);
    api.show_to(None);
    api.fail_gets([Fault::Break; 100]);
    for _ in 0..8 {
        making.tick().await;
        advance(Duration::from_secs(1)).await;
    }
    api.remove(&important);
    api.heal();
    for _ in 0..3 {
        making.tick().await;
        advance(Duration::from_secs(1)).await;
    }
    assert_eq!(api.evicted(), ["first"]);
    assert_eq!(making.outcome("refused"), "1");
}

/// No plan is made before the first list of budgets, which a cluster may withhold: then the leader waits for it for a while.
#[rstest]
#[case::listed_late(true, Duration::from_secs(1))]
#[case::withheld(false, Duration::from_secs(20))]
#[tokio::test(start_paused = true)]
async fn plans_wait_for_the_list_of_budgets(#[case] is_listed: bool, #[case] later: Duration) {
    let world = World::making_room_before_budgets().with_node("n1", &[80]);
    let making = Making::of(world.with_pod(&running("a", "n1", 0, 50, 0)), true, 60);
    making.high().await;
    making.tick().await;
    assert_eq!(making.world.api.evicted(), Vec::<String>::new());
    if is_listed {
        making.world.list::<PodDisruptionBudget>(&[]);
    }
    advance(later).await;
    making.tick().await;
    assert_eq!(making.world.api.evicted(), ["a"]);
}

/// Two nodes that are full of a pod each: that of n0 has no controller, so that it never goes.
fn full_nodes() -> Making {
    let mut alone = running("alone", "n0", 0, 80, 0);
    alone["metadata"]["ownerReferences"] = json!([]);
    let world = World::making_room().with_node("n0", &[80]).with_node("n1", &[80]);
    let world = world.with_pod(&alone).with_pod(&running("a", "n1", 0, 50, 0));
    Making::of(world, true, 60)
}

/// 31 pods for which no room can be made do not keep a less important one from its turn.
#[tokio::test(start_paused = true)]
async fn each_pod_has_its_turn() {
    let making = full_nodes();
    for at in 0..31 {
        let pod = important(&format!("higher{at}"), 40, 2000);
        making.refuse(&pod, &["n0"]).await;
    }
    making.high().await;
    for _ in 0..40 {
        making.tick().await;
        advance(Duration::from_secs(1)).await;
    }
    assert_eq!(making.world.api.evicted(), ["a"]);
}

/// A plan was dropped: the pod has its next turn seconds later, and not after all less important ones.
#[tokio::test(start_paused = true)]
async fn less_important_pods_do_not_put_off_a_turn() {
    let making = full_nodes();
    for at in 0..40 {
        let pod = important(&format!("low{at}"), 40, 100);
        making.refuse(&pod, &["n0"]).await;
    }
    making.high().await;
    making.world.api.fail_nominations([Some(Fault::Status(409))]);
    making.tick().await;
    assert_eq!(making.outcome("evicted"), "0", "the nomination was refused");
    for _ in 0..6 {
        making.tick().await;
        advance(Duration::from_secs(1)).await;
    }
    assert_eq!(making.world.api.evicted(), ["a"]);
}

/// Pods of the priority that the flag names, and more important ones, stay even if the waiting pod is more important still.
#[rstest]
#[case::below(999_999, 1)]
#[case::at_the_limit(1_000_000, 0)]
#[case::above(1_500_000, 0)]
#[tokio::test(start_paused = true)]
async fn pods_from_the_limit_on_stay(#[case] priority: i32, #[case] n_evicted: usize) {
    let world = World::making_room().with_node("n1", &[80]);
    let world = world.with_pod(&running("a", "n1", 0, 50, priority));
    let making = Making::of(world, true, 60);
    let pod = important("high", 40, 2_000_000);
    making.refuse(&pod, &["n1"]).await;
    advance(AFTER).await;
    making.tick().await;
    assert_eq!(making.world.api.evicted().len(), n_evicted);
}

/// Another node has room, and kube-scheduler does not ask about it: its own filters refuse it, or it is in no sample.
#[tokio::test(start_paused = true)]
async fn the_refusal_by_a_sample_counts_for_its_nodes() {
    let names: Vec<String> = (0..101).map(|at| format!("n{at:03}")).collect();
    let mut world = World::making_room();
    for (at, name) in names.iter().enumerate() {
        world = world.with_node(name, &[if [0, 100].contains(&at) { 80 } else { 10 }]);
    }
    let world = world.with_pod(&running("a", "n000", 0, 50, 0));
    let making = Making::of(world, true, 60);
    let sample: Vec<&str> = names.iter().take(100).map(String::as_str).collect();
    making.refuse(&important("high", 40, 1000), &sample).await;
    advance(AFTER).await;
    making.tick().await;
    assert_eq!(making.world.api.evicted(), ["a"]);
}

/// The devices of another pod become free while an eviction is tried again: that room is kept, and no further pod goes.
#[tokio::test(start_paused = true)]
async fn room_on_another_gpu_is_kept_instead() {
    let world = World::making_room().with_node("n1", &[80, 80]);
    let world = world
        .with_pod(&running("first", "n1", 0, 40, 5))
        .with_pod(&running("second", "n1", 0, 40, 3))
        .with_pod(&running("important", "n1", 1, 80, 2000));
    let making = Making::of(world, true, 60);
    let pod = making.refused(80, &["n1"]).await;
    let refused = Some(Fault::Status(429));
    making
        .world
        .api
        .fail_evictions([None, None, None, refused, refused]);
    making.tick().await;
    assert_eq!(making.world.api.evicted(), ["first"]);
    making.end("important");
    let n_before = making.world.index.read().openings().silent;
    for _ in 0..3 {
        making.tick().await;
        advance(Duration::from_secs(1)).await;
    }
    let n_announced = making.world.index.read().openings().silent - n_before;
    assert_eq!(n_announced, 1, "kube-scheduler may have seen the end first");
    assert_eq!(making.world.api.evicted(), ["first"]);
    let replacement = units("replacement", 60);
    let fitting = making.world.fitting(&replacement, &["n1"]).await;
    assert_eq!(fitting, Vec::<String>::new());
    let shown = making.world.api.pod(&pod);
    assert_eq!(making.world.fitting(&shown, &["n1"]).await, ["n1"]);
}

/// The GPU that was made free is lost, and kube-scheduler removes each nomination, as no less important pod is on the node.
#[tokio::test(start_paused = true)]
async fn a_room_that_is_lost_is_given_up() {
    let world = World::making_room().with_node("n1", &[80]);
    let world = world.with_pod(&running("a", "n1", 0, 80, 0));
    let making = Making::of(world, true, 60);
    let pod = making.high().await;
    making.tick().await;
    making.end("a");
    making.world.apply_device(&device("n1", &[10]));
    for _ in 0..30 {
        if making.nominated(&pod) == "n1" {
            making.world.api.nominate(&pod, &Value::Null);
        }
        making.tick().await;
        advance(Duration::from_secs(1)).await;
    }
    assert!(making.world.api.n_nominations() < 15);
    assert_eq!(
        (making.metric("make_room_pending"), making.nominated(&pod)),
        ("0".into(), Value::Null)
    );
}

/// The changes of a pod by which no room is made for it, and the reason in its explanation.
#[rstest]
#[case::policy("/spec/preemptionPolicy", json!("Never"), "its preemptionPolicy is Never")]
#[case::priority("/spec/priority", json!(-1), "the pod has no priority, or a negative one")]
#[case::gate("/spec/schedulingGates", json!([{"name": "example.com/quota"}]), "it has a scheduling gate")]
#[case::nomination("/status/nominatedNodeName", json!("n9"), "kube-scheduler has nominated it to a node")]
#[case::no_attempt("/status/conditions", json!([]), "no node that kube-scheduler asked about last has refused it")]
#[tokio::test(start_paused = true)]
async fn explanations_say_why_no_room_is_made(#[case] field: &str, #[case] value: Value, #[case] text: &str) {
    let making = Making::hole(true);
    let mut pod = important("high", 40, 1000);
    let (parent, key) = field.rsplit_once('/').unwrap();
    pod.pointer_mut(parent).unwrap()[key] = value;
    making.world.api.put(&pod);
    making.world.apply_pod(&pod);
    let path = "/v1/pods/default/high/explain";
    let api = api_of(&making.world, false);
    for _ in 0..2 {
        let explained = read(&making.world, &api, path).await.to_string();
        assert!(explained.contains(text), "{explained}");
        making.world.filter(&pod, &["n1"]).await;
        advance(AFTER).await;
        making.tick().await;
    }
}

/// An explanation says what is done for a waiting pod, before its turn, after it, and if kube-scheduler has nominated it.
#[tokio::test(start_paused = true)]
async fn explanations_say_what_is_done() {
    let making = Making::hole(true);
    let pod = making.high().await;
    assert!(
        making.explained().await.contains("--make-room-after"),
        "{}",
        making.explained().await
    );
    making.tick().await;
    let text = making.explained().await;
    assert!(text.contains("it evicts 1 pod with 10 MiB on GPU"), "{text}");
    making.world.api.nominate(&pod, &json!("n9"));
    making.tick().await;
    let text = making.explained().await;
    assert!(
        text.contains("kube-scheduler has nominated it to a node"),
        "{text}"
    );
    making.world.api.nominate(&pod, &Value::Null);
    let text = making.explained().await;
    assert!(text.contains("A plan to make room for it was dropped"), "{text}");
    // After a change of the leader no request is remembered.
    let mut world = World::making_room().with_node("n1", &[80]);
    world.api = making.world.api.clone();
    let next = Making::of(world, true, 60);
    next.world.see(&pod);
    let text = next.explained().await;
    assert!(text.contains("this replica remembers no request"), "{text}");
}

/// Another scheduler takes each GPU that is made free: one pod is evicted for each hold, and not one each few seconds.
#[tokio::test(start_paused = true)]
async fn a_room_that_is_taken_causes_no_second_plan_before_its_time_is_up() {
    let world = World::making_room().with_node("n1", &[80, 80]);
    let world = world
        .with_pod(&running("a", "n1", 0, 80, 0))
        .with_pod(&running("b", "n1", 1, 80, 0));
    let making = Making::of(world, true, 60);
    let pod = making.high().await;
    making.tick().await;
    let first = making.world.api.evicted().remove(0);
    making.end(&first);
    let taken = running("taker", "n1", u64::from(first == "b"), 80, 2000);
    making.world.api.put(&taken);
    making.world.apply_pod(&taken);
    let ticks = async |n_ticks: u64| {
        for _ in 0..n_ticks {
            making.tick().await;
            advance(Duration::from_secs(1)).await;
        }
        making.world.api.evicted().len()
    };
    assert_eq!(ticks(HOLD.as_secs()).await, 1);
    assert_eq!(
        (making.nominated(&pod), making.outcome("late")),
        (Value::Null, "1".into())
    );
    assert_eq!(ticks(60).await, 2);
}

/// An eviction has no answer and is not carried out, and the room is not needed any more. The pod ends minutes later by itself.
#[tokio::test(start_paused = true)]
async fn an_eviction_that_was_not_carried_out_is_not_counted_later() {
    let world = World::making_room().with_node("n1", &[80]);
    let world = world.with_pod(&running("a", "n1", 0, 50, 0));
    let making = Making::of(world, true, 60);
    making.world.api.fail_evictions([None, Some(Fault::Hang)]);
    let pod = making.high().await;
    making.tick().await;
    making.world.api.nominate(&pod, &json!("n9"));
    for _ in 0..10 {
        making.tick().await;
        advance(Duration::from_secs(1)).await;
    }
    making.end("a");
    making.tick().await;
    assert_eq!(making.metric("make_room_victims_total"), "0");
    assert_eq!(making.world.api.events(), Vec::new());
}

/// An evicted pod never ends, by a finalizer: once time is up, and the waiting pod has waited for it once more, others go
/// instead.
#[tokio::test(start_paused = true)]
async fn a_pod_that_never_ends_does_not_block_its_node() {
    let world = World::making_room().with_node("n1", &[80, 80]);
    let world = world
        .with_pod(&running("a", "n1", 0, 50, 0))
        .with_pod(&running("b", "n1", 1, 50, 5));
    let making = Making::of(world, true, 60);
    making.high().await;
    let ticks = async |n_ticks: u64| {
        for _ in 0..n_ticks {
            making.tick().await;
            advance(Duration::from_secs(1)).await;
        }
        making.world.api.evicted()
    };
    assert_eq!(ticks(HOLD.as_secs() + 60).await, ["a"]);
    let text = making.explained().await;
    assert!(
        text.contains("as soon as pods have ended that are leaving"),
        "{text}"
    );
    assert_eq!(ticks(HOLD.as_secs()).await, ["a", "b"]);
    assert_eq!(making.outcome("no_victims"), "0");
}

/// A pod has waited for long when another begins to leave: it waits for that one, and nothing is evicted for it once it fits.
#[tokio::test(start_paused = true)]
async fn a_pod_that_has_waited_for_long_waits_for_pods_that_leave() {
    let world = World::making_room().with_node("n1", &[80, 80]);
    let mut leaving = running("important", "n1", 0, 80, 2000);
    let world = world
        .with_pod(&leaving)
        .with_pod(&with_app(running("b", "n1", 1, 50, 5), "b"));
    let making = Making::of(world, true, 60);
    show_budget(&making.world.index, ("app", "b"), 0);
    making.high().await;
    let ticks = async |n_ticks: u64| {
        for _ in 0..n_ticks {
            making.tick().await;
            advance(Duration::from_secs(1)).await;
        }
    };
    ticks(HOLD.as_secs() + 60).await;
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
    making.world.apply_pod(&leaving);
    show_budget(&making.world.index, ("app", "b"), 1);
    ticks(60).await;
    let text = making.explained().await;
    assert!(
        text.contains("as soon as pods have ended that are leaving"),
        "{text}"
    );
    making.end("important");
    ticks(HOLD.as_secs() + 60).await;
    let text = making.explained().await;
    assert!(
        text.contains("It fits on n1, so that no pod is evicted for it"),
        "{text}"
    );
    assert_eq!(making.world.api.evicted(), Vec::<String>::new());
    assert_eq!(making.outcome("no_victims"), "1");
}
