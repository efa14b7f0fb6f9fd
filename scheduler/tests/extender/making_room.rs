//! Room that the leader makes by evictions, for pods that no single GPU takes although the sums of a node have room.

use std::sync::Arc;
use std::time::Duration;

use daemon::events;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use rstest::rstest;
use scheduler::make_room::{RoomMaker, RoomSettings};
use scheduler::metrics::RoomMetrics;
use scheduler::watch::ObjectStore;
use serde_json::{Value, json};
use tokio::time::advance;

use crate::api::{Fault, show_budget};
use crate::objects::{phase, placed_by_old_extender, units};
use crate::read_api::{api_of, read};
use crate::world::World;

/// The time from the first refusal to the first eviction.
pub(crate) const AFTER: Duration = Duration::from_secs(10);

/// The time for which room is kept, besides grace periods of 30 s.
pub(crate) const HOLD: Duration = Duration::from_secs(300);

/// A world with a maker of room for its extender.
pub(crate) struct Making {
    pub(crate) world: World,
    maker: RoomMaker,
    registry: Registry,
}

impl Making {
    /// A node of two GPUs of 80 units, with five pods of 10 on each: 30 are free on each GPU, and 60 in sum.
    pub(crate) fn hole(evicts: bool) -> Self {
        let mut world = World::making_room().with_node("n1", &[80, 80]);
        for at in 0..10 {
            world = world.with_pod(&running(&format!("low{at}"), "n1", at / 5, 10, 0));
        }
        Self::of(world, evicts, 60)
    }

    /// A node with one GPU of 80 units, half of which the pod `first` of priority 5 holds, and half the pod `second` of priority
    /// 3.
    pub(crate) fn of_two_pods() -> Self {
        let world = World::making_room().with_node("n1", &[80]);
        let world = world
            .with_pod(&running("first", "n1", 0, 40, 5))
            .with_pod(&running("second", "n1", 0, 40, 3));
        Self::of(world, true, 60)
    }

    pub(crate) fn of(world: World, evicts: bool, per_hour: usize) -> Self {
        world.api.show_to(Some(world.index.clone()));
        let settings = RoomSettings {
            evicts,
            after: AFTER,
            per_hour,
            below: 1_000_000,
            hold: HOLD,
        };
        let (maker, registry) = maker(&world, settings);
        Self {
            world,
            maker,
            registry,
        }
    }

    /// A pod of high priority that `filter` has refused on these nodes, with kube-scheduler's condition.
    pub(crate) async fn refuse(&self, pod: &Value, nodes: &[&str]) {
        self.world.api.put(pod);
        self.world.apply_pod(pod);
        assert_eq!(self.world.fitting(pod, nodes).await, Vec::<String>::new());
    }

    /// The pod `high` of 40 units, refused on the node `n1` for as long as it takes until room is made.
    pub(crate) async fn high(&self) -> Value {
        self.refused(40, &["n1"]).await
    }

    /// The pod `high` of these units, refused on these nodes for as long as it takes until room is made.
    pub(crate) async fn refused(&self, n_units: u64, nodes: &[&str]) -> Value {
        let pod = important("high", n_units, 1000);
        self.refuse(&pod, nodes).await;
        advance(AFTER).await;
        pod
    }

    pub(crate) async fn tick(&self) {
        self.world.api.begin_decision();
        self.maker.tick().await;
        // The events are written by another task.
        tokio::time::sleep(Duration::from_millis(1)).await;
        self.world.check();
    }

    /// Ends a pod: the API server forgets it, and the watch shows that.
    pub(crate) fn end(&self, name: &str) {
        let pod = running(name, "n1", 0, 10, 0);
        let pod = self.world.api.pod(&pod);
        self.world.api.remove(&pod);
        self.world.delete_pod(&pod);
    }

    /// The explanation of the pod `high`.
    pub(crate) async fn explained(&self) -> String {
        let path = "/v1/pods/default/high/explain";
        let api = api_of(&self.world, false);
        read(&self.world, &api, path).await.to_string()
    }

    pub(crate) fn nominated(&self, pod: &Value) -> Value {
        self.world.api.pod(pod)["status"]["nominatedNodeName"].clone()
    }

    pub(crate) fn metric(&self, name: &str) -> String {
        let mut text = String::new();
        encode(&mut text, &self.registry).unwrap();
        let found = text
            .lines()
            .find_map(|line| line.strip_prefix(&format!("gpushare_scheduler_{name} ")));
        found.unwrap_or("0").to_owned()
    }

    pub(crate) fn outcome(&self, outcome: &str) -> String {
        self.metric(&format!("make_room_total{{outcome=\"{outcome}\"}}"))
    }
}

fn maker(world: &World, settings: RoomSettings) -> (RoomMaker, Registry) {
    let mut registry = Registry::with_prefix("gpushare_scheduler");
    let metrics = RoomMetrics::register(&mut registry);
    let (recorder, writer) = events::recorder(&world.api.client().into(), "gpushare-scheduler", None);
    tokio::spawn(writer.run());
    let clients = (world.api.client(), recorder);
    let maker = RoomMaker::new(Arc::clone(&world.extender), clients, metrics, settings);
    (maker, registry)
}

/// A pod of a `ReplicaSet` on a GPU of 80 units.
pub(crate) fn running(name: &str, node: &str, gpu: u64, units_held: u64, priority: i32) -> Value {
    let pod = placed_by_old_extender(units(name, units_held), node, gpu, units_held, 80);
    let mut pod = phase(pod, "Running");
    pod["spec"]["priority"] = priority.into();
    pod["status"]["startTime"] = "2026-01-01T00:00:00Z".into();
    pod["metadata"]["ownerReferences"] =
        json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true}]);
    pod
}

pub(crate) fn important(name: &str, units_asked: u64, priority: i32) -> Value {
    let mut pod = units(name, units_asked);
    pod["spec"]["priority"] = priority.into();
    let condition =
        json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no"});
    pod["status"]["conditions"] = json!([condition]);
    pod
}

/// One pod goes, its room is kept for the pod that it was evicted for, and the pod is bound there.
#[tokio::test(start_paused = true)]
async fn the_hole_is_filled() {
    let making = Making::hole(true);
    let pod = making.high().await;
    making.tick().await;
    let evicted = making.world.api.evicted();
    assert_eq!(evicted.len(), 1, "{evicted:?}");
    assert_eq!(making.nominated(&pod), "n1");
    assert_eq!(
        (making.outcome("evicted"), making.metric("make_room_pending")),
        ("1".into(), "1".into())
    );
    assert_eq!(making.metric("make_room_victims_total"), "1");
    let events = making.world.api.events();
    let high = (
        "MakingRoom".to_owned(),
        "high".to_owned(),
        "evicted 1 pod with 10 MiB on GPU 1 of n1".to_owned(),
    );
    assert!(
        events.iter().any(|event| event.0 == high.0
            && event.1 == high.1
            && event.2.starts_with("evicted 1 pod with ")),
        "{events:?}"
    );
    let victim = (
        "EvictedForRoom",
        "evicted to make room for the pod default/high of priority 1000",
    );
    assert!(
        events
            .iter()
            .any(|(reason, name, text)| (&**reason, &**text) == victim && *name == evicted[0]),
        "{events:?}"
    );

    // While the victim is leaving, the node is resolvable, so that kube-scheduler keeps the nomination.
    let shown = making.world.api.pod(&pod);
    let refused = making.world.filter(&shown, &["n1"]).await;
    assert!(
        refused["FailedNodes"]["n1"]
            .as_str()
            .unwrap()
            .contains("have not ended"),
        "{refused}"
    );
    making.end(&evicted[0]);
    let replacement = units("replacement", 40);
    assert_eq!(
        making.world.fitting(&replacement, &["n1"]).await,
        Vec::<String>::new(),
        "the room is promised"
    );
    assert_eq!(making.world.fitting(&shown, &["n1"]).await, ["n1"]);
    assert_eq!(making.world.bind(&pod, "n1").await, "");
    making.world.see(&pod);
    making.tick().await;
    assert_eq!(making.metric("make_room_pending"), "0");
    assert_eq!(making.metric("make_room_seconds_count"), "1");
    assert_eq!(making.world.api.evicted().len(), 1);
}

/// `report` says which pods could go, once, and writes nothing but events.
#[tokio::test(start_paused = true)]
async fn a_report_evicts_nothing() {
    let making = Making::hole(false);
    let pod = making.high().await;
    for _ in 0..100 {
        making.tick().await;
        advance(Duration::from_secs(1)).await;
    }
    assert_eq!(
        (making.world.api.evicted().len(), making.world.api.n_nominations()),
        (0, 0)
    );
    assert_eq!(making.nominated(&pod), Value::Null);
    let events = making.world.api.events();
    assert_eq!(events.len(), 1, "once for each change of the answer: {events:?}");
    assert_eq!((&*events[0].0, &*events[0].1), ("RoomPossible", "high"));
    assert_eq!(making.outcome("reported"), "1");
}

/// The pod fits on the nodes of a sample, and kube-scheduler refuses it there: the answer about the others is the same as before.
#[tokio::test(start_paused = true)]
async fn an_answer_is_not_new_after_a_sample_that_fits() {
    let world = World::making_room().with_node("n1", &[80]).with_node("n2", &[80]);
    let world = world.with_pod(&running("a", "n1", 0, 50, 0));
    let making = Making::of(world, false, 60);
    let pod = making.high().await;
    for _ in 0..3 {
        making.tick().await;
        assert_eq!(making.world.fitting(&pod, &["n2"]).await, ["n2"]);
        making.tick().await;
        making.refuse(&pod, &["n1"]).await;
        advance(AFTER * 4).await;
    }
    making.tick().await;
    assert_eq!(
        (making.world.api.events().len(), making.outcome("reported")),
        (1, "1".to_owned())
    );
}

#[tokio::test(start_paused = true)]
async fn nothing_is_evicted_before_the_wait_is_over() {
    let making = Making::hole(true);
    let pod = important("high", 40, 1000);
    making.refuse(&pod, &["n1"]).await;
    advance(AFTER.saturating_sub(Duration::from_secs(1))).await;
    making.tick().await;
    assert_eq!(making.world.api.evicted().len(), 0);
    advance(Duration::from_secs(1)).await;
    making.tick().await;
    assert_eq!(making.world.api.evicted().len(), 1);
}

/// kube-scheduler asks about a pod before the watch shows it: the pod is remembered for half a minute.
#[rstest]
#[case::in_time(29, 1)]
#[case::too_late(30, 0)]
#[tokio::test(start_paused = true)]
async fn a_pod_that_no_watch_shows_is_forgotten(#[case] shown_after: u64, #[case] n_evicted: usize) {
    let making = Making::hole(true);
    let pod = important("high", 40, 1000);
    making.world.api.put(&pod);
    assert!(making.world.fitting(&pod, &["n1"]).await.is_empty());
    advance(Duration::from_secs(shown_after)).await;
    making.tick().await;
    making.world.apply_pod(&pod);
    advance(AFTER).await;
    making.tick().await;
    assert_eq!(making.world.api.evicted().len(), n_evicted);
}

/// The changes of a pod that keep it from being evicted.
#[rstest]
#[case::as_it_is(&[], 1)]
#[case::priority_equal(&[("/spec/priority", json!(1000))], 0)]
#[case::no_controller(&[("/metadata/ownerReferences", json!([]))], 0)]
#[case::another_owner(&[("/metadata/ownerReferences", json!([{"kind": "Workflow", "name": "w", "uid": "w", "apiVersion": "v1"}]))], 0)]
#[case::daemon_set(&[("/metadata/ownerReferences", json!([{"kind": "DaemonSet", "name": "d", "uid": "d", "apiVersion": "apps/v1", "controller": true}]))], 0)]
#[case::forbidden(&[("/metadata/annotations/gpushare~1evict", json!("false"))], 0)]
#[case::allowed(&[("/metadata/annotations/gpushare~1evict", json!("true"))], 1)]
#[case::of_the_cluster(&[("/metadata/namespace", json!("kube-system"))], 0)]
#[case::negative_priority(&[("/spec/priority", json!(-10))], 1)]
#[tokio::test(start_paused = true)]
async fn pods_that_may_go(#[case] changes: &[(&str, Value)], #[case] n_evicted: usize) {
    let mut low = running("low", "n1", 0, 50, 0);
    for (pointer, value) in changes {
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        low.pointer_mut(parent).unwrap()[key.replace("~1", "/")] = value.clone();
    }
    let world = World::making_room().with_node("n1", &[80]).with_pod(&low);
    let making = Making::of(world, true, 60);
    making.high().await;
    making.tick().await;
    assert_eq!(making.world.api.evicted().len(), n_evicted);
    assert_eq!(making.outcome("no_victims"), (1 - n_evicted).to_string());
    let text = making.explained().await;
    let reason = "no node that kube-scheduler asked about last has a pod that may be evicted for it";
    assert_eq!(text.contains(reason), n_evicted == 0, "{text}");
}

/// The changes of the refused pod after which no room is made for it.
#[rstest]
#[case::as_it_is("/spec/priority", json!(1000), 1)]
#[case::equal("/spec/priority", json!(0), 0)]
#[case::negative("/spec/priority", json!(-5), 0)]
#[case::missing("/spec/priority", json!(null), 0)]
#[case::never("/spec/preemptionPolicy", json!("Never"), 0)]
#[case::untried("/status/conditions", json!([]), 0)]
#[case::gated("/spec/schedulingGates", json!([{"name": "example.com/quota"}]), 0)]
#[case::in_a_group("/metadata/labels", json!({"scheduling.x-k8s.io/pod-group": "g"}), 0)]
#[tokio::test(start_paused = true)]
async fn pods_that_room_is_made_for(#[case] field: &str, #[case] value: Value, #[case] n_evicted: usize) {
    let making = Making::hole(true);
    let mut pod = important("high", 40, 1000);
    let (parent, key) = field.rsplit_once('/').unwrap();
    pod.pointer_mut(parent).unwrap()[key] = value;
    making.refuse(&pod, &["n1"]).await;
    for _ in 0..20 {
        advance(Duration::from_secs(1)).await;
        making.tick().await;
    }
    assert_eq!(making.world.api.evicted().len(), n_evicted);
    assert_eq!(making.world.api.n_nominations(), n_evicted);
}

/// No GPU is large enough, so that the end of no pod helps: the pod takes no turn.
#[tokio::test(start_paused = true)]
async fn a_pod_that_no_node_can_serve_takes_no_turn() {
    let making = Making::hole(true);
    making.refused(100, &["n1"]).await;
    for _ in 0..20 {
        making.tick().await;
        advance(Duration::from_secs(1)).await;
    }
    assert_eq!(making.outcome("no_victims"), "0");
    let text = making.explained().await;
    assert!(
        text.contains("remembers no request of kube-scheduler in which nodes refused it"),
        "{text}"
    );
}

/// kube-scheduler's own filters refuse the other node, which filter requests therefore do not name.
#[tokio::test(start_paused = true)]
async fn only_nodes_of_the_last_request_are_searched() {
    let world = World::making_room().with_node("n1", &[80]).with_node("n2", &[80]);
    let world = world
        .with_pod(&running("a", "n1", 0, 50, 0))
        .with_pod(&running("b", "n2", 0, 50, -5));
    let making = Making::of(world, true, 60);
    making.high().await;
    making.tick().await;
    assert_eq!(
        making.world.api.evicted(),
        ["a"],
        "the pod on n2 would be the better victim"
    );
}

/// Of several nodes the best by kube-scheduler's order is chosen, then the first by name.
#[rstest]
#[case::priority(&[("a", 5, 50), ("b", 4, 50)], "b")]
#[case::sum_of_priorities(&[("a", 5, 25), ("a2", 5, 25), ("b", 5, 50)], "b")]
#[case::name(&[("b", 5, 50), ("a", 5, 50)], "a")]
#[tokio::test(start_paused = true)]
async fn the_best_node_is_chosen(#[case] pods: &[(&str, i32, u64)], #[case] expected: &str) {
    let mut world = World::making_room().with_node("na", &[80]).with_node("nb", &[80]);
    for (name, priority, units_held) in pods {
        let node = format!("n{}", &name[..1]);
        world = world.with_pod(&running(name, &node, 0, *units_held, *priority));
    }
    let making = Making::of(world, true, 60);
    making.refused(80, &["na", "nb"]).await;
    making.tick().await;
    assert_eq!(making.world.api.evicted(), [expected]);
}

/// Each of 64 nodes has one pod that may not go, and another node two that may.
#[tokio::test(start_paused = true)]
async fn pods_that_may_not_go_hide_no_node() {
    let mut world = World::making_room().with_node("n99", &[80]);
    let mut names = vec!["n99".to_owned()];
    for at in 0..64 {
        let name = format!("n{at:02}");
        let mut pod = running(&format!("alone{at}"), &name, 0, 50, 0);
        pod["metadata"]["ownerReferences"] = json!([]);
        world = world.with_node(&name, &[80]).with_pod(&pod);
        names.push(name);
    }
    let world = world
        .with_pod(&running("a", "n99", 0, 40, 0))
        .with_pod(&running("b", "n99", 0, 40, 0));
    let making = Making::of(world, true, 60);
    let nodes: Vec<&str> = names.iter().map(String::as_str).collect();
    making.refused(40, &nodes).await;
    making.tick().await;
    assert_eq!(making.world.api.evicted().len(), 1);
}

pub(crate) fn with_app(mut pod: Value, app: &str) -> Value {
    pod["metadata"]["labels"]["app"] = app.into();
    pod
}

/// The Eviction API would refuse the eviction, so the next node is taken, or none.
#[rstest]
#[case::no_other_node(&["n1"], &[])]
#[case::another_node(&["n1", "n2"], &["b"])]
#[tokio::test(start_paused = true)]
async fn budgets_are_never_violated(#[case] nodes: &[&str], #[case] expected: &[&str]) {
    let world = World::making_room().with_node("n1", &[80]).with_node("n2", &[80]);
    let world = world
        .with_pod(&with_app(running("a", "n1", 0, 50, 0), "a"))
        .with_pod(&running("b", "n2", 0, 50, 7));
    show_budget(&world.index, ("app", "a"), 0);
    let making = Making::of(world, true, 60);
    making.refused(40, nodes).await;
    making.tick().await;
    assert_eq!(making.world.api.evicted(), expected);
}

/// The empty selector of a budget selects no pod for kube-scheduler, and every pod of the namespace for the Eviction API.
#[rstest]
#[case::none_may_go(0)]
#[case::one_may_go(1)]
#[tokio::test(start_paused = true)]
async fn a_budget_of_all_pods_is_not_violated(#[case] allowed: i64) {
    let making = Making::of_two_pods();
    let budget = json!({
        "metadata": {"name": "all", "namespace": "default"},
        "spec": {"selector": {}},
        "status": {"disruptionsAllowed": allowed, "currentHealthy": 1, "desiredHealthy": 1, "expectedPods": 1},
    });
    let budget: PodDisruptionBudget = serde_json::from_value(budget).unwrap();
    making.world.index.write().apply(budget);
    making.refused(80, &["n1"]).await;
    making.tick().await;
    assert_eq!(making.outcome("no_victims"), "1");
    assert_eq!(making.world.api.n_writes(), 0, "two pods would have to go");
}

/// The index does not know the budget, or a node's budget is used up in the meantime: a dry run shows it, before any write.
#[tokio::test(start_paused = true)]
async fn a_refused_dry_run_drops_the_node() {
    let world = World::making_room().with_node("n1", &[80]).with_node("n2", &[80]);
    let world = world
        .with_pod(&with_app(running("a", "n1", 0, 50, 0), "a"))
        .with_pod(&running("b", "n2", 0, 50, 7));
    world.api.set_budget("a", 0);
    let making = Making::of(world, true, 60);
    let pod = making.refused(40, &["n1", "n2"]).await;
    making.tick().await;
    assert_eq!(making.world.api.evicted(), ["b"]);
    assert_eq!(making.nominated(&pod), "n2");
    assert_eq!(making.world.api.n_nominations(), 1, "nothing was nominated to n1");
}

/// The Eviction API answers 500 for a pod that two budgets select, so the next node is taken.
#[rstest]
#[case::the_index_knows_both(true)]
#[case::a_dry_run_fails(false)]
#[tokio::test(start_paused = true)]
async fn pods_under_two_budgets_stay(#[case] shown: bool) {
    let world = World::making_room().with_node("n1", &[80]).with_node("n2", &[80]);
    let mut both = with_app(running("a", "n1", 0, 50, 0), "a");
    both["metadata"]["labels"]["tier"] = "t".into();
    let world = world.with_pod(&both).with_pod(&running("b", "n2", 0, 50, 7));
    if shown {
        show_budget(&world.index, ("app", "a"), 5);
        show_budget(&world.index, ("tier", "t"), 5);
    } else {
        world.api.fail_evictions([Some(Fault::Status(500))]);
    }
    let making = Making::of(world, true, 60);
    making.refused(40, &["n1", "n2"]).await;
    making.tick().await;
    assert_eq!(making.world.api.evicted(), ["b"]);
    let n_dry_runs = if shown { 1 } else { 2 };
    assert_eq!(making.world.api.n_writes(), n_dry_runs + 2);
}

#[tokio::test(start_paused = true)]
async fn three_refused_plans_are_enough() {
    let mut world = World::making_room();
    for at in 0..5 {
        let (node, pod) = (format!("n{at}"), format!("p{at}"));
        world = world.with_node(&node, &[80]);
        world = world.with_pod(&running(&pod, &node, 0, 50, 0));
    }
    let making = Making::of(world, true, 60);
    making.world.api.fail_evictions([Some(Fault::Status(429)); 5]);
    making.refused(40, &["n0", "n1", "n2", "n3", "n4"]).await;
    making.tick().await;
    assert_eq!(
        (making.world.api.evicted().len(), making.world.api.n_nominations()),
        (0, 0)
    );
    assert_eq!(making.outcome("refused"), "1");
    making.world.api.fail_evictions([None]);
    advance(Duration::from_secs(30)).await;
    making.tick().await;
    assert_eq!(
        making.outcome("refused"),
        "1",
        "two further dry runs were refused, then one was not"
    );
    assert_eq!(making.world.api.evicted().len(), 1);
}

/// A webhook denies the evictions on the three best nodes for ever: the next best one has its turn.
#[tokio::test(start_paused = true)]
async fn nodes_whose_evictions_are_refused_hide_no_other_node() {
    let mut world = World::making_room();
    for at in 0..4 {
        let (node, name) = (format!("n{at}"), format!("p{at}"));
        let pod = running(&name, &node, 0, 50, i32::from(at == 3));
        let pod = if at < 3 { with_app(pod, "denied") } else { pod };
        world = world.with_node(&node, &[80]).with_pod(&pod);
    }
    let making = Making::of(world, true, 60);
    making.world.api.set_budget("denied", 0);
    making.refused(40, &["n0", "n1", "n2", "n3"]).await;
    making.tick().await;
    assert_eq!(making.world.api.evicted(), Vec::<String>::new());
    advance(Duration::from_secs(30)).await;
    making.tick().await;
    assert_eq!(making.world.api.evicted(), ["p3"]);
}

/// The first eviction is refused after its dry run: the next node is taken, and the nomination goes there.
#[tokio::test(start_paused = true)]
async fn a_refused_first_eviction_drops_the_node() {
    let world = World::making_room().with_node("n1", &[80]).with_node("n2", &[80]);
    let world = world
        .with_pod(&running("a", "n1", 0, 50, 0))
        .with_pod(&running("b", "n2", 0, 50, 7));
    let making = Making::of(world, true, 60);
    making.world.api.fail_evictions([None, Some(Fault::Status(429))]);
    let pod = making.refused(40, &["n1", "n2"]).await;
    making.tick().await;
    assert_eq!(making.world.api.evicted(), ["b"]);
    assert_eq!(making.nominated(&pod), "n2");
    assert_eq!(making.world.api.n_nominations(), 3, "to n1, to none, and to n2");
}

/// Two pods have to go, and the budget of the second is used up between its dry run and its eviction.
pub(crate) async fn half_evicted() -> (Making, Value) {
    let world = World::making_room().with_node("n1", &[80]);
    let world = world
        .with_pod(&running("first", "n1", 0, 40, 5))
        .with_pod(&with_app(running("second", "n1", 0, 40, 3), "a"));
    let making = Making::of(world, true, 60);
    let pod = making.refused(80, &["n1"]).await;
    // Two dry runs, and the eviction of the first.
    making
        .world
        .api
        .fail_evictions([None, None, None, Some(Fault::Status(429))]);
    making.world.api.set_budget("a", 1);
    making.tick().await;
    making.world.api.set_budget("a", 0);
    assert_eq!(making.world.api.evicted(), ["first"]);
    (making, pod)
}

#[tokio::test(start_paused = true)]
async fn the_rest_goes_on_if_a_pod_has_gone() {
    let (making, pod) = half_evicted().await;
    advance(Duration::from_secs(5)).await;
    making.tick().await;
    making.world.api.set_budget("a", 1);
    advance(Duration::from_secs(5)).await;
    making.tick().await;
    assert_eq!(making.world.api.evicted(), ["first", "second"]);
    making.tick().await;
    for name in ["first", "second"] {
        making.end(name);
        let small = units("small", 10);
        assert_eq!(
            making.world.fitting(&small, &["n1"]).await,
            Vec::<String>::new(),
            "parts are kept too"
        );
    }
    let pod = making.world.api.pod(&pod);
    assert_eq!(making.world.fitting(&pod, &["n1"]).await, ["n1"]);
    assert_eq!(making.outcome("refused"), "0");
}

#[tokio::test(start_paused = true)]
async fn a_budget_that_stays_used_up_ends_the_evictions_and_not_the_hold() {
    let (making, pod) = half_evicted().await;
    making.end("first");
    for _ in 0..40 {
        advance(Duration::from_secs(1)).await;
        making.tick().await;
    }
    assert_eq!(making.outcome("refused"), "1");
    assert_eq!(
        (making.nominated(&pod), making.world.api.evicted().len()),
        (json!("n1"), 1)
    );
    let small = units("small", 10);
    assert_eq!(
        making.world.fitting(&small, &["n1"]).await,
        Vec::<String>::new(),
        "the freed room is kept"
    );
    advance(HOLD + Duration::from_secs(30)).await;
    making.tick().await;
    assert_eq!(
        (making.nominated(&pod), making.outcome("late")),
        (Value::Null, "1".to_owned())
    );
    assert_eq!(
        making.world.fitting(&small, &["n1"]).await,
        ["n1"],
        "and free again when time is up"
    );
}

/// A victim with a finalizer, or of a node that is away: no other plan is made, until time is up.
#[tokio::test(start_paused = true)]
async fn a_victim_that_does_not_go_causes_no_second_plan() {
    let making = Making::hole(true);
    let pod = making.high().await;
    making.tick().await;
    assert_eq!(making.world.api.evicted().len(), 1);
    for _ in 0..328 {
        advance(Duration::from_secs(1)).await;
        making.tick().await;
    }
    assert_eq!(
        (making.world.api.evicted().len(), making.outcome("late")),
        (1, "0".to_owned())
    );
    advance(Duration::from_secs(2)).await;
    making.tick().await;
    assert_eq!(
        (making.nominated(&pod), making.outcome("late")),
        (Value::Null, "1".to_owned())
    );
}

#[tokio::test(start_paused = true)]
async fn evictions_within_an_hour_are_limited() {
    let world = World::making_room().with_node("n1", &[80]);
    let world = world
        .with_pod(&running("a", "n1", 0, 40, 0))
        .with_pod(&running("b", "n1", 0, 40, 0));
    let making = Making::of(world, true, 1);
    making.refused(80, &["n1"]).await;
    making.tick().await;
    assert_eq!(
        (making.world.api.evicted().len(), making.outcome("over_budget")),
        (0, "1".to_owned())
    );
}

/// The pod of 40 units has 30 free ones beside its victim, which a replacement of 10 must not take.
#[tokio::test(start_paused = true)]
async fn the_free_part_of_the_room_is_kept_too() {
    let making = Making::hole(true);
    let pod = making.high().await;
    making.tick().await;
    let victim = making.world.api.evicted().remove(0);
    for at in 0..3 {
        let replacement = units(&format!("replacement{at}"), 10);
        making.world.place(&replacement, "n1").await;
    }
    let last = units("last", 10);
    assert_eq!(
        making.world.fitting(&last, &["n1"]).await,
        Vec::<String>::new(),
        "the other GPU is full"
    );
    making.end(&victim);
    let shown = making.world.api.pod(&pod);
    assert_eq!(making.world.fitting(&shown, &["n1"]).await, ["n1"]);
}

/// Steps at which the pod is deleted, or bound.
#[rstest]
#[case::before_the_decision(0, 0)]
#[case::after_the_eviction(1, 1)]
#[tokio::test(start_paused = true)]
async fn the_room_of_a_deleted_pod_is_free(#[case] n_ticks: usize, #[case] n_evicted: usize) {
    let making = Making::hole(true);
    let pod = making.high().await;
    for _ in 0..n_ticks {
        making.tick().await;
    }
    making.world.api.remove(&pod);
    making.world.delete_pod(&pod);
    making.tick().await;
    let evicted = making.world.api.evicted();
    assert_eq!(
        (evicted.len(), making.metric("make_room_pending")),
        (n_evicted, "0".to_owned())
    );
    for name in &evicted {
        making.end(name);
        let replacement = units("replacement", 40);
        assert_eq!(making.world.fitting(&replacement, &["n1"]).await, ["n1"]);
    }
}

/// The API server has no pod of that UID any more, although the watch shows it yet.
#[tokio::test(start_paused = true)]
async fn nothing_is_evicted_for_a_pod_that_is_gone() {
    let making = Making::hole(true);
    let pod = making.high().await;
    making.world.api.remove(&pod);
    making.tick().await;
    assert_eq!(
        (making.world.api.evicted().len(), making.world.api.n_nominations()),
        (0, 0)
    );
}

/// kube-scheduler has nominated the pod elsewhere: its nomination wins.
#[tokio::test(start_paused = true)]
async fn a_nomination_of_kube_scheduler_wins() {
    let making = Making::hole(true);
    let pod = making.high().await;
    making.world.api.show_to(None);
    making.world.api.nominate(&pod, &json!("n9"));
    making.tick().await;
    assert_eq!(
        (making.world.api.evicted().len(), making.world.api.n_nominations()),
        (0, 0)
    );
    making.world.see(&pod);
    making.world.api.show_to(Some(making.world.index.clone()));
    advance(Duration::from_secs(60)).await;
    making.tick().await;
    assert_eq!(making.nominated(&pod), "n9");
    making.world.api.nominate(&pod, &Value::Null);
    advance(Duration::from_secs(60)).await;
    making.tick().await;
    assert_eq!(making.world.api.evicted().len(), 1);
    making.world.api.nominate(&pod, &json!("n9"));
    making.tick().await;
    assert_eq!(
        (making.nominated(&pod), making.metric("make_room_pending")),
        (json!("n9"), "0".to_owned())
    );
}

/// kube-scheduler removes nominations after errors of its own; the room stays kept, and the pod is nominated again.
#[tokio::test(start_paused = true)]
async fn an_error_of_kube_scheduler_does_not_end_the_room() {
    let making = Making::hole(true);
    let pod = making.high().await;
    making.tick().await;
    let victim = making.world.api.evicted().remove(0);
    making.end(&victim);
    making.world.api.nominate(&pod, &Value::Null);
    let replacement = units("replacement", 40);
    assert_eq!(
        making.world.fitting(&replacement, &["n1"]).await,
        Vec::<String>::new()
    );
    making.tick().await;
    assert_eq!(making.nominated(&pod), "n1");
    assert_eq!(
        making.world.fitting(&replacement, &["n1"]).await,
        Vec::<String>::new()
    );
    assert_eq!(making.world.api.evicted().len(), 1);
}

/// While the leader makes room for a pod, `preempt` names no victims for it.
#[tokio::test(start_paused = true)]
async fn preempt_names_no_victims_meanwhile() {
    let making = Making::hole(true);
    let pod = making.high().await;
    making.tick().await;
    let proposal = json!({"n1": {"Pods": [{"UID": "uid-low9"}], "NumPDBViolations": 0}});
    let body = json!({"Pod": making.world.api.pod(&pod), "NodeNameToMetaVictims": proposal}).to_string();
    let (_, text) = making
        .world
        .send("POST", "/gpushare-scheduler/preempt", body)
        .await;
    assert_eq!(text, r#"{"NodeNameToMetaVictims":{}}"#);
}

/// The watch does not show the nomination within 5 s: the plan may rest on old facts, and is dropped.
#[tokio::test(start_paused = true)]
async fn nothing_is_evicted_on_old_facts() {
    let making = Making::hole(true);
    let pod = making.high().await;
    making.world.api.show_to(None);
    making.tick().await;
    assert_eq!(making.world.api.evicted().len(), 0);
    assert_eq!(making.nominated(&pod), Value::Null);
    assert_eq!(making.world.api.n_nominations(), 2, "nominated, and taken back");
    // The watch shows the nomination now, and a while later that it was taken back.
    let fields = json!({"f:status": {"f:nominatedNodeName": {}}});
    let mut shown = pod.clone();
    shown["status"]["nominatedNodeName"] = "n1".into();
    shown["metadata"]["managedFields"] = json!([{"manager": "gpushare-make-room", "operation": "Apply", "subresource": "status", "fieldsType": "FieldsV1", "fieldsV1": fields}]);
    making.world.apply_pod(&shown);
    for _ in 0..5 {
        making.tick().await;
        assert_eq!(making.metric("make_room_pending"), "0");
        let text = making.explained().await;
        assert!(!text.contains("Another replica"), "{text}");
        advance(Duration::from_secs(1)).await;
    }
    making.world.see(&pod);
    for _ in 0..5 {
        making.tick().await;
        advance(Duration::from_secs(1)).await;
    }
    assert_eq!(making.world.api.n_nominations(), 2, "no second plan at once");
}

/// 200 pods want a GPU each, and ten GPUs have pods that may go.
#[tokio::test(start_paused = true)]
async fn many_pods_get_the_room_that_there_is() {
    let mut world = World::making_room();
    let mut nodes = Vec::new();
    for at in 0..20 {
        let (node, pod) = (format!("n{at:02}"), format!("p{at:02}"));
        world = world.with_node(&node, &[80]);
        let mut pod = running(&pod, &node, 0, 80, 0);
        if at >= 10 {
            pod["metadata"]["ownerReferences"] = json!([]);
        }
        world = world.with_pod(&pod);
        nodes.push(node);
    }
    let nodes: Vec<&str> = nodes.iter().map(String::as_str).collect();
    let making = Making::of(world, true, 60);
    for at in 0..200 {
        making
            .refuse(&important(&format!("high{at:03}"), 80, 1000), &nodes)
            .await;
    }
    advance(AFTER).await;
    for _ in 0..210 {
        making.tick().await;
        advance(Duration::from_secs(1)).await;
    }
    assert_eq!(making.world.api.evicted().len(), 10);
    assert_eq!(making.outcome("evicted"), "10");
    assert_eq!(making.outcome("no_victims"), "190");
}

/// The leader ends between nomination and eviction, or between two evictions: the next one keeps the room as long as pods are
/// leaving, evicts nothing for that plan, and makes one of its own afterwards.
#[rstest]
#[case::before_the_evictions(&[], 0)]
#[case::between_the_evictions(&["first"], 1)]
#[tokio::test(start_paused = true)]
async fn another_leader_goes_on(#[case] gone: &[&str], #[case] n_evicted: usize) {
    let making = Making::of_two_pods();
    let pod = making.refused(80, &["n1"]).await;
    // The evictions after these are never answered, and the maker is dropped with its memory.
    let dry_runs = [None, None];
    let evictions = gone.iter().map(|_| None);
    making
        .world
        .api
        .fail_evictions(dry_runs.into_iter().chain(evictions).chain([Some(Fault::Hang)]));
    let _ = tokio::time::timeout(Duration::from_millis(500), making.maker.tick()).await;
    assert_eq!(
        (making.nominated(&pod), making.world.api.evicted()),
        (json!("n1"), gone.iter().map(|name| (*name).to_owned()).collect())
    );

    let mut world = World::making_room().with_node("n1", &[80]);
    world.api = making.world.api.clone();
    let next = Making::of(world, true, 60);
    for name in ["first", "second"] {
        next.world.see(&running(name, "n1", 0, 40, 0));
    }
    next.world.see(&pod);
    next.tick().await;
    assert_eq!(next.world.api.evicted().len(), n_evicted);
    let text = next.explained().await;
    assert!(
        text.contains("Another replica has begun to make room for it on n1."),
        "{text}"
    );
    let shown = next.world.api.pod(&pod);
    let refused = next.world.filter(&shown, &["n1"]).await;
    assert!(
        refused["FailedNodes"]["n1"].is_string(),
        "the nomination survives: {refused}"
    );
    for name in gone {
        next.end(name);
    }
    for _ in 0..12 {
        advance(Duration::from_secs(1)).await;
        next.tick().await;
    }
    assert_eq!(
        (next.nominated(&pod), next.world.api.evicted().len()),
        (Value::Null, n_evicted)
    );
    let shown = next.world.api.pod(&pod);
    next.world.filter(&shown, &["n1"]).await;
    for _ in 0..12 {
        advance(Duration::from_secs(1)).await;
        next.tick().await;
    }
    assert_eq!(next.world.api.evicted().len(), 2, "a plan of its own");
}
