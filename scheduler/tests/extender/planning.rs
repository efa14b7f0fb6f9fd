//! `POST plan`: moves that filter and bind would make, pods that stay with the reason, and access as for `fit`.

use std::convert::Infallible;
use std::sync::Arc;

use axum::body::Body;
use futures::FutureExt;
use futures::channel::mpsc;
use http::{Request, StatusCode};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use proto::read_api::{PlanAnswer, PlanGoal, PlanLimits, PlanRequest};
use rstest::rstest;
use scheduler::read_api::{PlanRequestError, ReadApi, plan, router};
use scheduler::watch::ObjectStore;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use crate::objects::{annotated, device, node, units};
use crate::read_api::api_of;
use crate::world::World;

/// A day after the start of [`running`] pods.
const NOW: u64 = 1_767_225_600 + 86_400;

/// A pod of a `ReplicaSet` that has run for a day.
fn running(name: &str, held: u64) -> Value {
    let mut pod = units(name, held);
    pod["metadata"]["ownerReferences"] = json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web", "uid": "r", "controller": true}]);
    pod["metadata"]["labels"] = json!({"app": name});
    pod["status"] = json!({"phase": "Running", "startTime": "2026-01-01T00:00:00Z"});
    pod
}

fn empty_node(name: &str) -> PlanGoal {
    PlanGoal::EmptyNode {
        node: name.to_owned(),
    }
}

impl World {
    fn plan(&self, goal: PlanGoal) -> PlanAnswer {
        self.try_plan(goal).unwrap()
    }

    fn try_plan(&self, goal: PlanGoal) -> Result<PlanAnswer, String> {
        let request = PlanRequest {
            goal,
            limits: PlanLimits::default(),
        };
        plan(&self.index, &request, NOW, &|| false, || {}).map_err(|error| error.to_string())
    }

    /// The plan that empties n1, with these volumes of the pod `uid-a`.
    fn plan_with(&self, volumes: &Value) -> PlanAnswer {
        let limits = json!({"volumes": {"uid-a": volumes}});
        let request = json!({"goal": {"kind": "empty-node", "node": "n1"}, "limits": limits});
        plan(
            &self.index,
            &serde_json::from_value(request).unwrap(),
            NOW,
            &|| false,
            || {},
        )
        .unwrap()
    }

    /// The only reason for which a pod stays on n1.
    fn reason(&self) -> String {
        let answer = self.plan(empty_node("n1"));
        assert_eq!((answer.moves.len(), answer.left.len()), (0, 1), "{answer:?}");
        answer.left[0].reason.clone()
    }
}

async fn world_with(pod: &Value) -> World {
    let world = World::new().with_node("n1", &[100]).with_node("n2", &[100]);
    world.place(pod, "n1").await;
    world
}

#[tokio::test(start_paused = true)]
async fn a_plan_empties_a_node() {
    let world = World::new()
        .with_node("n1", &[100, 100])
        .with_node("n2", &[100])
        .with_node("n3", &[100]);
    for name in ["a", "b", "c"] {
        world
            .place(&running(name, 60), if name == "c" { "n3" } else { "n1" })
            .await;
    }
    let answer = world.plan(empty_node("n1"));
    assert!(!answer.reached);
    assert_eq!(answer.moves.len(), 1, "n2 has room for one pod: {answer:?}");
    let one = &answer.moves[0];
    assert_eq!(
        (one.from.as_str(), one.to.as_str(), one.to_gpus.as_slice()),
        ("n1", "n2", &[0][..])
    );
    assert_eq!(
        (answer.left.len(), answer.left[0].reason.as_str()),
        (1, "no other place has room for it")
    );
    assert_eq!((answer.gain, answer.price.restarts), (60 << 20, 1));
    assert!(
        (answer.price.gib_hours - 1.41).abs() < 0.01,
        "60 MiB for 24 hours: {answer:?}"
    );
    assert_eq!(answer.generation, answer.generation_after);
    assert_eq!(world.plan(empty_node("n1")), answer, "the same plan twice");
    world.apply_device(&device("n2", &[100, 100]));
    let answer = world.plan(empty_node("n1"));
    assert!(
        answer.reached && answer.moves.len() == 2 && answer.left.is_empty(),
        "{answer:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn plans_know_gpus_free_memory_and_joining() {
    let world = World::new().with_node("n1", &[100, 100]).with_node("n2", &[100]);
    world.place(&running("a", 40), "n1").await;
    world.place(&running("b", 40), "n2").await;
    let gpus = (world.used("n1").await)
        .iter()
        .position(|used| *used == 40)
        .unwrap();
    let held = u32::try_from(gpus).unwrap();
    let answer = world.plan(PlanGoal::EmptyGpus {
        node: "n1".to_owned(),
        gpus: vec![held],
    });
    assert!(
        answer.reached && answer.moves.len() == 1 && answer.moves[0].from_gpus == [held],
        "{answer:?}"
    );
    let free = |gpus, nodes| PlanGoal::Free {
        bytes: 100 << 20,
        gpus,
        nodes,
    };
    assert_eq!(world.plan(free(1, None)).moves.len(), 0, "one GPU is empty");
    assert_eq!(world.plan(free(2, None)).moves.len(), 1);
    let on_n2 = world.plan(free(1, Some(vec!["n2".to_owned()])));
    assert!(on_n2.reached && on_n2.moves[0].from == "n2", "{on_n2:?}");
    assert_eq!(world.plan(PlanGoal::Join {}).gain, 40 << 20);
}

/// No pod that waits gets memory of a node that takes none.
#[rstest]
#[case::cordoned("/spec", json!({"unschedulable": true}))]
#[case::unreachable("/spec", json!({"taints": [{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}]}))]
#[case::plugin_away("/metadata/annotations/gpushare~1device-plugin", json!(r#"{"serving": false, "since": "2026-01-01T00:00:00Z"}"#))]
#[tokio::test(start_paused = true)]
async fn free_memory_of_a_node_that_takes_no_pods_does_not_count(#[case] field: &str, #[case] value: Value) {
    let world = World::new().with_node("n1", &[100, 100]).with_node("n2", &[100]);
    world.place(&running("a", 40), "n1").await;
    world.place(&running("b", 40), "n2").await;
    world.place(&running("c", 70), "n1").await;
    let free = |nodes| PlanGoal::Free {
        bytes: 100 << 20,
        gpus: 1,
        nodes,
    };
    let on_n2 = || free(Some(vec!["n2".to_owned()]));
    assert!(world.plan(on_n2()).reached, "b joins a");
    assert_eq!(world.plan(PlanGoal::Join {}).gain, 10 << 20);

    world.apply_node(&changed_n2(field, value));
    assert!(!world.plan(on_n2()).reached);
    assert_eq!(world.plan(PlanGoal::Join {}).gain, 0);
    world.delete_pod(&running("b", 40));
    let answer = world.plan(free(None));
    assert!(!answer.reached, "n2 is empty: {answer:?}");
}

/// The node n2 with a plugin that serves, and one field changed.
fn changed_n2(field: &str, value: Value) -> Value {
    let mut changed = annotated(
        node("n2", "MiB"),
        "gpushare/device-plugin",
        r#"{"serving": true, "since": "2025-01-01T00:00:00Z"}"#,
    );
    let (parent, key) = field.rsplit_once('/').unwrap();
    changed.pointer_mut(parent).unwrap()[key.replace("~1", "/")] = value;
    changed
}

#[rstest]
#[case::no_controller("/metadata/ownerReferences", json!(null), "it has no controller that would create a successor")]
#[case::daemon_set("/metadata/ownerReferences/0/kind", json!("DaemonSet"), "its controller (DaemonSet) creates no successor on another node")]
#[case::static_pod("/metadata/ownerReferences/0/kind", json!("Node"), "its controller (Node) creates no successor on another node")]
#[case::annotation("/metadata/annotations", json!({"gpushare/evict": "false"}), "its annotation forbids the eviction")]
#[case::volume("/spec/volumes", json!([{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]), "it may be bound to its node by a volume")]
#[case::young("/status/startTime", json!("2026-01-01T23:59:00Z"), "it has run for less than --min-runtime")]
#[case::not_started("/status/startTime", json!(null), "it has run for less than --min-runtime")]
#[case::selector("/spec/nodeSelector", json!({"only": "here"}), "no other place has room for it")]
#[tokio::test(start_paused = true)]
async fn a_pod_is_left_with_its_reason(#[case] field: &str, #[case] value: Value, #[case] expected: &str) {
    let mut pod = running("a", 60);
    assert_eq!(world_with(&pod).await.plan(empty_node("n1")).moves.len(), 1);
    let (parent, key) = field.rsplit_once('/').unwrap();
    pod.pointer_mut(parent).unwrap()[key] = value;
    assert_eq!(world_with(&pod).await.reason(), expected);
}

/// A pod with claims goes where its volumes can be used, once the client has read them.
#[rstest]
#[case::network_storage(json!([]), None)]
#[case::of_both_nodes(json!([{"nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a", "b"]}]}]}]), None)]
#[case::of_its_node(json!([{"nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]}]), Some("its volumes and its other rules leave it no other node"))]
#[case::one_of_two(json!([{"nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "Exists"}]}]}, {"nodeSelectorTerms": []}]), Some("its volumes and its other rules leave it no other node"))]
#[tokio::test(start_paused = true)]
async fn a_pod_moves_within_the_reach_of_its_volumes(#[case] volumes: Value, #[case] expected: Option<&str>) {
    let mut pod = running("a", 60);
    pod["metadata"]["uid"] = json!("uid-a");
    pod["spec"]["volumes"] = json!([{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]);
    let world = world_with(&pod).await;
    for (name, zone) in [("n1", "a"), ("n2", "b")] {
        let mut node = node(name, "MiB");
        node["metadata"]["labels"] = json!({"zone": zone});
        world.apply_node(&node);
    }
    let unread = world.plan(empty_node("n1"));
    assert!(unread.moves.is_empty() && unread.left[0].volumes, "{unread:?}");
    let answer = world.plan_with(&volumes);
    let reason = answer.left.first().map(|left| left.reason.as_str());
    assert_eq!(
        (reason, answer.moves.len()),
        (expected, usize::from(expected.is_none())),
        "{answer:?}"
    );
}

/// Such a pod does not wait for room in its budget, as it can never move.
#[tokio::test(start_paused = true)]
async fn a_pod_that_its_volume_binds_waits_for_no_budget() {
    let mut pod = running("a", 60);
    pod["metadata"]["uid"] = json!("uid-a");
    pod["spec"]["volumes"] = json!([{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]);
    let world = world_with(&pod).await;
    let budget = json!({
        "metadata": {"name": "web", "namespace": "default"},
        "spec": {"selector": {"matchLabels": {"app": "a"}}},
        "status": {"disruptionsAllowed": 0, "currentHealthy": 1, "desiredHealthy": 1, "expectedPods": 1},
    });
    let budget: PodDisruptionBudget = serde_json::from_value(budget).unwrap();
    world.index.write().apply(budget);
    assert!(world.plan_with(&json!([])).left[0].temporary);
    let answer = world.plan_with(&json!([{"nodeSelectorTerms": []}]));
    assert!(!answer.left[0].temporary, "{answer:?}");
}

/// Each part of the node affinity is compared with all nodes.
#[rstest]
#[case::values(1, json!([{"nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": vec!["a"; 253]}]}]}]), None)]
#[case::too_many_values(1, json!([{"nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": vec!["a"; 254]}]}]}]), Some(
    "volumes: the node affinity of pod \"uid-0\" has 257 selectors, terms, requirements and values, and at most 256 may be"
))]
#[case::too_many_requirements(1, json!([{"nodeSelectorTerms": [{"matchExpressions": vec![json!({"key": "a", "operator": "DoesNotExist"}); 255]}]}]), Some(
    "volumes: the node affinity of pod \"uid-0\" has 257 selectors, terms, requirements and values, and at most 256 may be"
))]
#[case::too_many_pods(1001, json!([]), Some("volumes: 1001 pods are more than 1000, the most of one plan"))]
#[tokio::test(start_paused = true)]
async fn volumes_that_take_long_are_refused(
    #[case] n_pods: usize,
    #[case] volumes: Value,
    #[case] expected: Option<&str>,
) {
    let world = world_with(&running("a", 60)).await;
    let volumes: serde_json::Map<String, Value> = (0..n_pods)
        .map(|at| (format!("uid-{at}"), volumes.clone()))
        .collect();
    let request = json!({"goal": {"kind": "empty-node", "node": "n1"}, "limits": {"volumes": volumes}});
    let answer = plan(
        &world.index,
        &serde_json::from_value(request).unwrap(),
        NOW,
        &|| false,
        || {},
    );
    assert_eq!(answer.err().map(|error| error.to_string()).as_deref(), expected);
}

/// The read of the index stops, and with it the plan.
#[tokio::test(start_paused = true)]
async fn a_plan_ends_once_its_caller_has_left() {
    let world = world_with(&running("a", 60)).await;
    let request = PlanRequest {
        goal: empty_node("n1"),
        limits: PlanLimits::default(),
    };
    let ended = plan(&world.index, &request, NOW, &|| true, || {});
    assert_eq!(ended, Err(PlanRequestError::CallerLeft));
}

#[rstest]
#[case::no_room(0, "disruption budget web allows 0 evictions")]
#[case::negative(-1, "disruption budget web allows -1 evictions")]
#[tokio::test(start_paused = true)]
async fn a_budget_without_room_keeps_a_pod(#[case] allowed: i32, #[case] expected: &str) {
    let world = world_with(&running("a", 60)).await;
    let apply = |allowed: i32| {
        let budget = json!({
            "metadata": {"name": "web", "namespace": "default"},
            "spec": {"selector": {"matchLabels": {"app": "a"}}},
            "status": {"disruptionsAllowed": allowed, "currentHealthy": 1, "desiredHealthy": 1, "expectedPods": 1},
        });
        let budget: PodDisruptionBudget = serde_json::from_value(budget).unwrap();
        world.index.write().apply(budget);
    };
    apply(allowed);
    assert_eq!(world.reason(), expected);
    apply(1);
    assert_eq!(world.plan(empty_node("n1")).moves.len(), 1);
}

/// The Eviction API knows the empty selector, and refuses a pod that two budgets select.
#[tokio::test(start_paused = true)]
async fn budgets_count_as_the_eviction_api_counts_them() {
    let world = world_with(&running("a", 60)).await;
    let apply = |name: &str, allowed: i32| {
        let budget = json!({
            "metadata": {"name": name, "namespace": "default"},
            "spec": {"selector": {}},
            "status": {"disruptionsAllowed": allowed, "currentHealthy": 1, "desiredHealthy": 1, "expectedPods": 1},
        });
        let budget: PodDisruptionBudget = serde_json::from_value(budget).unwrap();
        world.index.write().apply(budget);
    };
    apply("every", 0);
    assert_eq!(world.reason(), "disruption budget every allows 0 evictions");
    apply("every", 1);
    assert_eq!(world.plan(empty_node("n1")).moves.len(), 1);
    apply("other", 1);
    assert_eq!(
        world.reason(),
        "several disruption budgets select it, which the Eviction API does not support"
    );
}

/// The filter would refuse its successor on all nodes but that of the other members.
#[rstest]
#[case::required("node", "required", 0)]
#[case::preferred("node", "preferred", 2)]
#[case::any("any", "required", 2)]
#[tokio::test(start_paused = true)]
async fn a_group_that_must_stay_together_stays(
    #[case] domain: &str,
    #[case] policy: &str,
    #[case] n_moves: usize,
) {
    let world = World::new().with_node("n1", &[100]).with_node("n2", &[100]);
    for name in ["a", "b"] {
        let mut pod = annotated(running(name, 30), "gpushare/group-domain", domain);
        pod = annotated(pod, "gpushare/group-domain-policy", policy);
        pod = annotated(pod, "gang.scheduling.koordinator.sh/name", "group");
        pod = annotated(pod, "gang.scheduling.koordinator.sh/min-available", "2");
        world.place(&pod, "n1").await;
    }
    let answer = world.plan(empty_node("n1"));
    assert_eq!(answer.moves.len(), n_moves, "{answer:?}");
    if n_moves == 0 {
        assert_eq!(
            answer.left[0].reason,
            "its group has to stay together, and other members are bound"
        );
    }
}

/// Cordoned, tainted and closed nodes, and nodes whose plugin is away, take no successor.
#[rstest]
#[case::cordoned("/spec", json!({"unschedulable": true}))]
#[case::tainted("/spec", json!({"taints": [{"key": "k", "effect": "NoSchedule"}]}))]
#[case::closed("/metadata/annotations/gpushare~1closed-gpus", json!("all"))]
#[case::plugin_away("/metadata/annotations/gpushare~1device-plugin", json!(r#"{"serving": false, "since": "2026-01-01T00:00:00Z"}"#))]
#[tokio::test(start_paused = true)]
async fn a_node_takes_no_successor(#[case] field: &str, #[case] value: Value) {
    let world = world_with(&running("a", 60)).await;
    world.apply_node(&changed_n2(field, value));
    assert_eq!(world.reason(), "no other place has room for it");
}

#[rstest]
#[case::no_node(
    empty_node("n7"),
    r#"there is no node "n7" with GPUs; those with GPUs are n1, n2"#
)]
#[case::no_gpu(PlanGoal::EmptyGpus { node: "n1".into(), gpus: vec![0, 5] }, "the node has no GPU 5: its GPUs are [0]")]
#[case::no_gpus(PlanGoal::EmptyGpus { node: "n1".into(), gpus: vec![] }, "no GPU is named: those of the node are [0]")]
#[case::no_bytes(PlanGoal::Free { bytes: 0, gpus: 1, nodes: None }, "0 bytes or 0 GPUs are asked for: the largest GPU has 100 MiB")]
#[case::too_large(PlanGoal::Free { bytes: 1 << 30, gpus: 1, nodes: None }, "1 GiB is more than any GPU has: the largest has 100 MiB")]
#[case::too_many(PlanGoal::Free { bytes: 1 << 20, gpus: 2, nodes: None }, "no node has 2 GPUs of 1 MiB: the most is 1")]
#[case::nodes_without_gpus(PlanGoal::Free { bytes: 1 << 20, gpus: 1, nodes: Some(vec![]) }, "no node with GPUs is selected; those with GPUs are n1, n2")]
#[tokio::test(start_paused = true)]
async fn an_impossible_goal_is_refused_with_what_there_is(#[case] goal: PlanGoal, #[case] expected: &str) {
    let world = world_with(&running("a", 60)).await;
    assert_eq!(world.try_plan(goal).unwrap_err(), expected);
}

#[tokio::test]
async fn plans_follow_the_rights_of_fit() {
    let world = world_with(&running("a", 60)).await;
    let api = Arc::new(ReadApi::new(
        Arc::clone(&world.extender),
        None,
        CancellationToken::new(),
    ));
    let body =
        || Body::from(r#"{"goal": {"kind": "empty-node", "node": "n1"}, "limits": {"minRunSeconds": 0}}"#);
    let open = router(&api, "", false);
    let (status, text) = world.send_to(&open, "POST", "/v1/plan", body()).await;
    assert_eq!(status, StatusCode::OK, "{text}");
    let answer: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(answer["moves"][0]["name"], "a");
    for (request, expected) in [
        (
            r#"{"goal": {"kind": "empty-node", "node": "n9"}}"#,
            "there is no node",
        ),
        (
            r#"{"goal": {"kind": "empty-nodes", "node": "n1"}}"#,
            "plan request: unknown variant",
        ),
        (
            r#"{"goal": {"kind": "join"}, "limits": {"maxMoves": 1001}}"#,
            "maxMoves: 1001 is more than 1000",
        ),
        ("{", "plan request: EOF"),
    ] {
        let (status, text) = world
            .send_to(&open, "POST", "/v1/plan", Body::from(request))
            .await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{text}");
        assert!(text.starts_with(expected), "{text}");
    }
    let closed = router(&api, "", true);
    let (status, _) = world.send_to(&closed, "POST", "/v1/plan", body()).await;
    assert_eq!(status, StatusCode::UNAUTHORIZED);
}

/// Two plans wait for the index, which they read once their requests are complete.
#[tokio::test]
async fn a_third_plan_at_one_time_is_refused() {
    let world = world_with(&running("a", 60)).await;
    let router = api_of(&world, false);
    let (mut bodies, mut answers) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        let (sender, body) = mpsc::unbounded::<Result<&str, Infallible>>();
        let mut answer = Box::pin(world.send_to(&router, "POST", "/v1/plan", Body::from_stream(body)));
        // A request is let in only while the index can be read.
        assert!(answer.as_mut().now_or_never().is_none());
        bodies.push(sender);
        answers.push(answer);
    }
    let mut early = Vec::new();
    {
        let _busy = world.extender.index().write();
        for (body, answer) in bodies.into_iter().zip(&mut answers) {
            body.unbounded_send(Ok(r#"{"goal": {"kind": "join"}}"#)).unwrap();
            drop(body);
            early.push(answer.as_mut().now_or_never());
        }
    }
    let (status, text) = early.pop().unwrap().expect("the third is refused at once");
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{text}");
    assert!(text.starts_with("2 plans are being made"), "{text}");
    assert_eq!(early, [None, None]);
    answers.pop();
    for answer in answers {
        let (status, text) = answer.await;
        assert_eq!(status, StatusCode::OK, "{text}");
    }
}

/// A client that may not list pods gets the UIDs of those that move and stay.
#[tokio::test]
async fn names_that_a_client_may_not_see_are_hidden() {
    let world = world_with(&running("a", 60)).await;
    let path = "/gpushare-scheduler/inspect";
    world.api.add_user("of-reader", "reader", Some(path));
    let router = api_of(&world, true);
    for (min_run_seconds, list) in [(0, "moves"), (u64::MAX, "left")] {
        let body = json!({"goal": {"kind": "empty-node", "node": "n1"}, "limits": {"minRunSeconds": min_run_seconds}});
        let request = Request::post("/v1/plan")
            .header("authorization", "Bearer of-reader")
            .header("content-type", "application/json")
            .body(Body::from(body.to_string()));
        let reply = router.clone().oneshot(request.unwrap()).await.unwrap();
        assert_eq!(reply.status(), StatusCode::OK);
        let body = axum::body::to_bytes(reply.into_body(), usize::MAX).await.unwrap();
        let answer: Value = serde_json::from_slice(&body).unwrap();
        let pod = &answer[list][0];
        assert_eq!(
            (&pod["uid"], &pod["name"], &pod["namespace"]),
            (&json!("uid-a"), &json!(null), &json!(null))
        );
    }
}

#[tokio::test]
async fn a_change_while_a_plan_is_made_shows_in_the_generation() {
    let world = world_with(&running("a", 60)).await;
    let request = PlanRequest {
        goal: PlanGoal::Join {},
        limits: PlanLimits::default(),
    };
    for is_changed in [false, true] {
        let change = || {
            if is_changed {
                world.apply_device(&device("n2", &[100, 100]));
            }
            false
        };
        let answer = plan(&world.index, &request, NOW, &change, || {}).unwrap();
        assert_eq!(
            answer.generation != answer.generation_after,
            is_changed,
            "{answer:?}"
        );
    }
}
