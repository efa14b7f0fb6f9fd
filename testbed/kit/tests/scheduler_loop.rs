//! The scheduling loop against the API server and a scripted extender: its calls, and its reaction
//! to every kind of answer.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "the rig is part of the tests"
)]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::post;
use kit::apiserver::{ApiServer, Fault, Matching};
use kit::kube_scheduler::{
    KubeScheduler, Options, SchedulerConfiguration, SchedulingAttempt, SchedulingOutcome,
};
use kit::polling;
use kube::Client;
use rstest::rstest;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

const RESOURCE: &str = "example.com/shares";
const DEADLINE: Duration = Duration::from_secs(20);

type Answer = Arc<dyn Fn(&str, &Value) -> (u16, Value) + Send + Sync>;

#[derive(Clone)]
struct Extender {
    answer: Answer,
    asked: Arc<Mutex<Vec<(String, Value)>>>,
}

async fn handle(
    State(extender): State<Extender>,
    Path(verb): Path<String>,
    body: Bytes,
) -> (StatusCode, String) {
    let body: Value = serde_json::from_slice(&body).unwrap();
    let (status, answer) = (extender.answer)(&verb, &body);
    extender.asked.lock().unwrap().push((verb, body));
    (StatusCode::from_u16(status).unwrap(), answer.to_string())
}

/// An API server, an extender and a loop.
struct Rig {
    api: ApiServer,
    attempts: mpsc::UnboundedReceiver<SchedulingAttempt>,
    asked: Arc<Mutex<Vec<(String, Value)>>>,
    _loop: KubeScheduler,
    _extender: AbortOnDropHandle<()>,
}

impl Rig {
    async fn start(
        more: &str,
        answer: impl Fn(&str, &Value) -> (u16, Value) + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let extender = Extender {
            answer: Arc::new(answer),
            asked: Arc::default(),
        };
        let asked = Arc::clone(&extender.asked);
        let app = axum::Router::new()
            .route("/x/{verb}", post(handle))
            .with_state(extender);
        let serving = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        let text = format!(
            "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\npodMaxBackoffSeconds: 1\nextenders:\n\
             - urlPrefix: http://{address}/x\n  filterVerb: filter\n  nodeCacheCapable: true\n  managedResources: [{{name: {RESOURCE}}}]\n{more}"
        );
        let configuration: SchedulerConfiguration = text.parse().unwrap();
        let api = ApiServer::start().await.unwrap();
        let client = Client::try_from(kube::Config::new(api.url().parse().unwrap())).unwrap();
        let (journal, attempts) = mpsc::unbounded_channel();
        for (name, shares) in [("a", "4"), ("b", "8"), ("c", "8")] {
            let amounts = json!({"pods": "10", "cpu": "4", RESOURCE: shares});
            let node =
                json!({"metadata": {"name": name}, "status": {"allocatable": amounts, "capacity": amounts}});
            api.objects().create("nodes", node).unwrap();
        }
        let running = KubeScheduler::start(
            &client,
            &configuration,
            Options {
                seed: None,
                journal: Some(journal),
            },
        )
        .unwrap();
        Self {
            api,
            attempts,
            asked,
            _loop: running,
            _extender: AbortOnDropHandle::new(serving),
        }
    }

    fn create(&self, name: &str, shares: &str) {
        self.create_with(name, shares, &Value::Null);
    }

    fn create_with(&self, name: &str, shares: &str, group: &Value) {
        let limits = json!({RESOURCE: shares});
        let container =
            json!({"name": "c", "image": "i", "resources": {"limits": limits, "requests": limits}});
        let spec = json!({"containers": [container], "schedulingGroup": group});
        self.api
            .objects()
            .create("pods", json!({"metadata": {"name": name}, "spec": spec}))
            .unwrap();
    }

    async fn attempt(&mut self) -> SchedulingAttempt {
        tokio::time::timeout(DEADLINE, self.attempts.recv())
            .await
            .expect("an attempt in time")
            .unwrap()
    }

    fn node_of(&self, pod: &str) -> Value {
        self.api.objects().get("pods", "default", pod).unwrap()["spec"]["nodeName"].clone()
    }

    /// Waits until a pod satisfies a condition.
    async fn until(&self, pod: &str, condition: impl Fn(&Value) -> bool) {
        let objects = self.api.objects();
        let meets = async || condition(&objects.get("pods", "default", pod).unwrap());
        polling::until(DEADLINE, "the pod is late", meets).await.unwrap();
    }

    fn questions(&self, verb: &str) -> Vec<Value> {
        self.asked
            .lock()
            .unwrap()
            .iter()
            .filter(|(asked, _)| asked == verb)
            .map(|(_, body)| body.clone())
            .collect()
    }
}

fn passing(names: &[&str]) -> Value {
    json!({"Nodes": null, "NodeNames": names, "FailedNodes": {}, "FailedAndUnresolvableNodes": {}, "Error": ""})
}

#[tokio::test]
async fn an_extender_gets_names_in_order_and_its_node_is_bound() {
    let mut rig = Rig::start("", |_, _| (200, passing(&["c"]))).await;
    rig.create("p", "5");
    let attempt = rig.attempt().await;
    assert_eq!(attempt.outcome, SchedulingOutcome::Bound("c".to_owned()));
    assert_eq!(
        attempt.diagnosis.refusals["a"].reasons,
        ["Insufficient example.com/shares"]
    );
    let question = &rig.questions("filter")[0];
    assert_eq!(
        question["NodeNames"],
        json!(["b", "c"]),
        "a fails the aggregate fit"
    );
    assert_eq!(question["Nodes"], Value::Null);
    assert_eq!(question["Pod"]["metadata"]["name"], "p");
    assert_eq!(rig.node_of("p"), "c");
}

/// kube-apiserver notes the gate in the condition, and kube-scheduler goes on with the next pod.
#[tokio::test]
async fn a_pod_with_a_scheduling_gate_is_not_tried() {
    let mut rig = Rig::start("", |_, _| (200, passing(&["c"]))).await;
    let spec = json!({"containers": [{"name": "c", "image": "i"}], "schedulingGates": [{"name": "example.com/quota"}]});
    let gated = json!({"metadata": {"name": "gated"}, "spec": spec});
    rig.api.objects().create("pods", gated).unwrap();
    rig.create("p", "5");
    let attempt = rig.attempt().await;
    assert_eq!(attempt.outcome, SchedulingOutcome::Bound("c".to_owned()));
    let gated = rig.api.objects().get("pods", "default", "gated").unwrap();
    assert_eq!(gated["spec"]["nodeName"], Value::Null);
    assert_eq!(gated["status"]["conditions"][0]["reason"], "SchedulingGated");
}

#[tokio::test]
async fn reasons_of_an_extender_are_in_the_condition_and_decide_preemption() {
    let answer = json!({"NodeNames": [], "FailedNodes": {"a": "no room", "b": "no room"}, "FailedAndUnresolvableNodes": {"c": "no device"}, "Error": ""});
    let mut rig = Rig::start("", move |_, _| (200, answer.clone())).await;
    rig.create("p", "1");
    let attempt = rig.attempt().await;
    assert_eq!(attempt.outcome, SchedulingOutcome::NoFit);
    assert_eq!(attempt.diagnosis.preemption_candidates(), ["a", "b"]);
    let message = "0/3 nodes are available: 1 no device, 2 no room. no new claims to deallocate, \
                   preemption: 0/3 nodes are available: 1 Preemption is not helpful for scheduling, 2 No preemption victims found for incoming pod.";
    rig.until("p", |pod| {
        let conditions = pod["status"]["conditions"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        conditions.iter().any(|c| {
            c["type"] == "PodScheduled"
                && c["status"] == "False"
                && c["reason"] == "Unschedulable"
                && c["message"] == message
        })
    })
    .await;
}

#[rstest]
#[case::error_in_the_answer(200, json!({"NodeNames": null, "Error": "out of order"}), "out of order")]
#[case::status_500(500, json!({}), "code 500")]
#[case::unknown_node(200, json!({"NodeNames": ["z"], "Error": ""}), "claims a filtered node \"z\"")]
#[case::not_its_json(200, json!([]), "invalid")]
#[tokio::test]
async fn an_error_fails_the_attempt_and_the_pod_is_tried_again(
    #[case] status: u16,
    #[case] bad: Value,
    #[case] message: &str,
) {
    let n_asked = std::sync::atomic::AtomicUsize::new(0);
    let answer = move |_: &str, _: &Value| match n_asked.fetch_add(1, std::sync::atomic::Ordering::SeqCst) {
        0 => (status, bad.clone()),
        _ => (200, passing(&["b"])),
    };
    let mut rig = Rig::start("", answer).await;
    rig.create("p", "1");
    let first = rig.attempt().await.outcome;
    assert!(
        matches!(&first, SchedulingOutcome::Error(text) if text.contains(message)),
        "{first:?}"
    );
    assert_eq!(
        rig.attempt().await.outcome,
        SchedulingOutcome::Bound("b".to_owned())
    );
}

/// kube-scheduler 1.36 writes the first event, another one since the pod's condition has changed, and then a series.
#[tokio::test]
async fn failures_of_an_unchanged_pod_are_a_series() {
    let n_asked = std::sync::atomic::AtomicUsize::new(0);
    let answer = move |_: &str, _: &Value| match n_asked.fetch_add(1, std::sync::atomic::Ordering::SeqCst) {
        0..3 => (200, json!({"NodeNames": null, "Error": "out of order"})),
        _ => (200, passing(&["b"])),
    };
    let mut rig = Rig::start("", answer).await;
    rig.create("p", "1");
    while !matches!(rig.attempt().await.outcome, SchedulingOutcome::Bound(_)) {}
    // Reports are written in order, so that those of the failures come before the one of the binding.
    let objects = rig.api.objects();
    let is_bound = async || {
        let events = objects.list("events", None).unwrap();
        events.iter().any(|event| event["reason"] == "Scheduled")
    };
    polling::until(DEADLINE, "the event is late", is_bound)
        .await
        .unwrap();
    let events = rig.api.objects().list("events", None).unwrap();
    let failures = events
        .iter()
        .filter(|event| event["reason"] == "FailedScheduling");
    let counts: Vec<&Value> = failures.map(|event| &event["series"]["count"]).collect();
    // Attempts see the pod before or after an earlier one's condition is on it, so that either event may have the series.
    assert!(counts.len() < 3, "fewer events than failures: {counts:?}");
    assert!(counts.contains(&&json!(2)), "{counts:?}");
}

#[tokio::test]
async fn scores_of_an_extender_are_weighted_against_those_of_plugins() {
    let answer = |verb: &str, _: &Value| match verb {
        "filter" => (200, passing(&["a", "b", "c"])),
        _ => (
            200,
            json!([{"Host": "a", "Score": 1}, {"Host": "b", "Score": 7}, {"Host": "c", "Score": 3}]),
        ),
    };
    let mut rig = Rig::start("  prioritizeVerb: prioritize\n  weight: 1", answer).await;
    rig.create("p", "1");
    assert_eq!(
        rig.attempt().await.outcome,
        SchedulingOutcome::Bound("b".to_owned())
    );
}

/// The extender gets the UID, and another pod is scheduled while it binds: the first pod's share is taken already.
#[tokio::test]
async fn a_binding_runs_beside_the_next_scheduling_cycle() {
    let rig = Rig::start("  bindVerb: bind\n  httpTimeout: 2s", |verb, body| match verb {
        "filter" => (200, json!({"NodeNames": body["NodeNames"], "Error": ""})),
        _ => (200, json!({"Error": "not today"})),
    });
    let mut rig = rig.await;
    rig.create("first", "8");
    rig.create("second", "8");
    let (one, two) = (rig.attempt().await, rig.attempt().await);
    assert!(
        [&one, &two]
            .iter()
            .all(|a| a.outcome == SchedulingOutcome::Error("not today".to_owned())),
        "{one:?} {two:?}"
    );
    let bound = rig.questions("bind");
    let node = |pod: &str| bound.iter().find(|b| b["PodName"] == pod).unwrap()["Node"].clone();
    assert_ne!(
        node("first"),
        node("second"),
        "the share of the first was assumed"
    );
    let uid = rig.api.objects().get("pods", "default", "first").unwrap()["metadata"]["uid"].clone();
    assert_eq!(
        bound.iter().find(|b| b["PodName"] == "first").unwrap()["PodUID"],
        uid
    );
    // Forgotten after the failure, the share can be taken again.
    assert!(matches!(rig.attempt().await.outcome, SchedulingOutcome::Error(_)));
}

#[tokio::test]
async fn an_unschedulable_pod_is_tried_when_room_is_freed() {
    let mut rig = Rig::start("", |_, body| {
        (200, json!({"NodeNames": body["NodeNames"], "Error": ""}))
    })
    .await;
    for name in ["one", "two"] {
        rig.create(name, "8");
        assert!(matches!(rig.attempt().await.outcome, SchedulingOutcome::Bound(_)));
    }
    rig.create("waits", "8");
    assert_eq!(rig.attempt().await.outcome, SchedulingOutcome::NoFit);
    rig.api
        .objects()
        .delete("pods", "default", "one", Some(0))
        .unwrap();
    let last = loop {
        let attempt = rig.attempt().await;
        if attempt.outcome != SchedulingOutcome::NoFit {
            break attempt;
        }
    };
    assert_eq!(
        (last.pod.as_str(), last.outcome),
        ("default/waits", SchedulingOutcome::Bound("b".to_owned()))
    );
}

#[tokio::test]
async fn a_lost_reply_to_a_binding_causes_no_second_attempt() {
    let mut rig = Rig::start("", |_, _| (200, passing(&["b"]))).await;
    let on_bind = Matching::requests("create", "pods/binding").times(1);
    let lost = rig.api.faults().inject(on_bind, Fault::DropReply);
    rig.create("p", "1");
    rig.until("p", |pod| pod["spec"]["nodeName"] == "b").await;
    rig.create("next", "1");
    // With or without a reported error, the pod stays where it is and the next one is placed.
    while rig.attempt().await.pod != "default/next" {}
    assert_eq!((rig.node_of("p"), lost.hits()), (json!("b"), 1));
}

#[tokio::test]
async fn the_extender_is_not_called_for_other_schedulers_or_resources() {
    let mut rig = Rig::start("", |_, _| (200, passing(&["c"]))).await;
    let pod = |name: &str, scheduler: &str| json!({"metadata": {"name": name}, "spec": {"schedulerName": scheduler, "containers": [{"name": "c", "image": "i"}]}});
    rig.api.objects().create("pods", pod("other", "another")).unwrap();
    rig.api
        .objects()
        .create("pods", pod("plain", "default-scheduler"))
        .unwrap();
    let attempt = rig.attempt().await;
    assert_eq!(
        (attempt.pod.as_str(), attempt.outcome),
        ("default/plain", SchedulingOutcome::Bound("a".to_owned()))
    );
    assert!(rig.questions("filter").is_empty());
}

impl Rig {
    /// A pod of this priority; with a node it is there already.
    fn put(&self, name: &str, shares: &str, priority: i32, node: Option<&str>) -> String {
        let limits = json!({RESOURCE: shares});
        let container =
            json!({"name": "c", "image": "i", "resources": {"limits": limits, "requests": limits}});
        let mut spec = json!({"containers": [container], "priority": priority});
        if let Some(node) = node {
            spec["nodeName"] = node.into();
        }
        let pod = self
            .api
            .objects()
            .create("pods", json!({"metadata": {"name": name}, "spec": spec}))
            .unwrap();
        pod["metadata"]["uid"].as_str().unwrap().to_owned()
    }

    fn is_deleted(&self, name: &str) -> bool {
        self.api
            .objects()
            .get("pods", "default", name)
            .is_ok_and(|pod| pod["metadata"]["deletionTimestamp"].is_string())
    }
}

const PREEMPTS: &str = "  preemptVerb: preempt";

/// Every node is full; the extender takes another victim, on one node alone.
#[tokio::test]
async fn victims_are_proposed_and_those_of_the_extender_are_evicted() {
    let uids: Arc<Mutex<Vec<String>>> = Arc::default();
    let chosen = Arc::clone(&uids);
    let answer = move |verb: &str, question: &Value| match verb {
        "preempt" => (
            200,
            json!({"NodeNameToMetaVictims": {"b": {"Pods": [{"UID": chosen.lock().unwrap()[1]}], "NumPDBViolations": 0}}}),
        ),
        _ => (200, passing(&[question["NodeNames"][0].as_str().unwrap()])),
    };
    let mut rig = Rig::start(PREEMPTS, answer).await;
    *uids.lock().unwrap() = vec![
        rig.put("a1", "4", 5, Some("a")),
        rig.put("b1", "4", 3, Some("b")),
        rig.put("b2", "4", 2, Some("b")),
        rig.put("c1", "8", 10, Some("c")),
    ];
    rig.put("p", "3", 10, None);
    let attempt = rig.attempt().await;
    assert_eq!(attempt.outcome, SchedulingOutcome::NoFit);
    let question = &rig.questions("preempt")[0];
    let uids = uids.lock().unwrap().clone();
    let proposed = json!({
        "a": {"Pods": [{"UID": uids[0]}], "NumPDBViolations": 0}, "b": {"Pods": [{"UID": uids[2]}], "NumPDBViolations": 0},
    });
    assert_eq!(
        question["NodeNameToMetaVictims"], proposed,
        "the least important of b, and none of c"
    );
    rig.until("p", |pod| pod["status"]["nominatedNodeName"] == "b")
        .await;
    assert!(rig.is_deleted("b1") && !rig.is_deleted("b2") && !rig.is_deleted("a1"));
    let evicted = rig.api.objects().get("pods", "default", "b1").unwrap();
    assert_eq!(
        evicted["status"]["conditions"][0]["reason"],
        "PreemptionByScheduler"
    );
}

/// One pod that is not there fails the round, as does a node without victims.
#[rstest]
#[case::unknown(json!({"b": {"Pods": [{"UID": "unheard-of"}], "NumPDBViolations": 0}}))]
#[case::without_victims(json!({"b": {"Pods": [], "NumPDBViolations": 0}}))]
#[case::no_candidate(json!({}))]
#[tokio::test]
async fn invalid_preemption_answers_evict_no_pod(#[case] answer: Value) {
    let answer = move |verb: &str, _: &Value| match verb {
        "preempt" => (200, json!({"NodeNameToMetaVictims": answer})),
        _ => (200, passing(&["b"])),
    };
    let mut rig = Rig::start(PREEMPTS, answer).await;
    for (name, node) in [("a1", "a"), ("b1", "b"), ("c1", "c")] {
        rig.put(name, if node == "a" { "4" } else { "8" }, 0, Some(node));
    }
    rig.put("p", "3", 10, None);
    assert_eq!(rig.attempt().await.outcome, SchedulingOutcome::NoFit);
    assert_eq!(rig.questions("preempt").len(), 1);
    assert!(!["a1", "b1", "c1"].into_iter().any(|name| rig.is_deleted(name)));
}

/// The extender refuses a nominated pod, and the sums of all nodes have room for it. A less important pod on a resolvable node is
/// a victim that is not needed, which is an error and keeps the nomination.
#[rstest]
#[case::resolvable_with_a_less_important_pod("FailedNodes", 0, true)]
#[case::resolvable_without_one("FailedNodes", 10, false)]
#[case::unresolvable("FailedAndUnresolvableNodes", 0, false)]
#[tokio::test]
async fn an_error_alone_keeps_the_nomination_of_a_refused_pod(
    #[case] list: &'static str,
    #[case] priority: i32,
    #[case] is_kept: bool,
) {
    let answer = move |_: &str, question: &Value| {
        let names = question["NodeNames"].as_array().unwrap().iter();
        let is_nominated = question["Pod"]["status"]["nominatedNodeName"] == "b";
        let text = if is_nominated {
            "refused as a nominee"
        } else {
            "refused"
        };
        let texts: serde_json::Map<String, Value> = names
            .map(|name| (name.as_str().unwrap().to_owned(), text.into()))
            .collect();
        let mut answer = passing(&[]);
        answer[list] = texts.into();
        (200, answer)
    };
    let mut rig = Rig::start(PREEMPTS, answer).await;
    rig.put("other", "1", priority, Some("b"));
    rig.put("p", "3", 10, None);
    assert_eq!(rig.attempt().await.outcome, SchedulingOutcome::NoFit);
    let message = |pod: &Value| pod["status"]["conditions"][0]["message"].to_string();
    rig.until("p", |pod| message(pod).contains("refused")).await;
    rig.api
        .objects()
        .patch_status("pods", "default", "p", &json!({"nominatedNodeName": "b"}))
        .unwrap();
    // The condition and the nomination are written together. A pod whose nomination is cleared is refused as any other a moment
    // later.
    let is_over = |pod: &Value| {
        let is_nominated = pod["status"]["nominatedNodeName"] == "b";
        is_nominated == is_kept && (!is_kept || message(pod).contains("as a nominee"))
    };
    rig.until("p", is_over).await;
    assert!(
        rig.questions("filter")
            .iter()
            .any(|question| question["Pod"]["status"]["nominatedNodeName"] == "b")
    );
}

fn first_of(question: &Value) -> Value {
    passing(&[question["NodeNames"][0].as_str().unwrap()])
}

/// As recorded on kube-scheduler 1.36.2 with `GenericWorkload` and `GangScheduling`: every member is asked about before one is
/// bound, and in each cycle again; after the first of them the members' conditions say so, and never change.
#[tokio::test]
async fn members_of_a_pod_group_are_bound_together_or_not_at_all() {
    let mut rig = Rig::start("", |_, question| (200, first_of(question))).await;
    let policy = json!({"gang": {"minCount": 2}});
    let group =
        json!({"metadata": {"name": "g", "namespace": "default"}, "spec": {"schedulingPolicy": policy}});
    rig.api.objects().create("podgroups", group).unwrap();
    let member = json!({"podGroupName": "g"});
    rig.create_with("g-0", "8", &member);
    rig.create("single", "8");
    let single = rig.attempt().await;
    assert_eq!(
        (single.pod.as_str(), single.outcome),
        ("default/single", SchedulingOutcome::Bound("b".to_owned())),
        "g is not complete"
    );

    rig.create_with("g-1", "8", &member);
    for pod in ["default/g-0", "default/g-1"] {
        let attempt = rig.attempt().await;
        assert_eq!(
            (attempt.pod.as_str(), attempt.outcome),
            (pod, SchedulingOutcome::NoFit)
        );
    }
    // Nothing happens in the cluster, and the group is tried again.
    assert_eq!(rig.attempt().await.outcome, SchedulingOutcome::NoFit);
    let asked: Vec<Value> = rig
        .questions("filter")
        .iter()
        .map(|question| question["Pod"].clone())
        .collect();
    let names: Vec<&str> = asked
        .iter()
        .map(|pod| pod["metadata"]["name"].as_str().unwrap())
        .collect();
    assert_eq!(
        names,
        ["single", "g-0", "g-0"],
        "no node has room for g-1 beside g-0"
    );
    assert_eq!(asked[1]["status"]["conditions"], Value::Null);
    assert_eq!(
        asked[2]["status"]["conditions"][0]["message"],
        "pod group is unschedulable, waiting for minCount pods from a gang to be scheduled, one or more plugins asked to wait and no \
         plugin rejected pod"
    );

    rig.api
        .objects()
        .delete("pods", "default", "single", Some(0))
        .unwrap();
    let mut bound = Vec::new();
    while bound.len() < 2 {
        let attempt = rig.attempt().await;
        if let SchedulingOutcome::Bound(node) = attempt.outcome {
            bound.push((attempt.pod, node));
        }
    }
    bound.sort();
    assert_eq!(
        bound,
        [
            ("default/g-0".to_owned(), "b".to_owned()),
            ("default/g-1".to_owned(), "c".to_owned())
        ]
    );
}

/// As in the code of kube-scheduler 1.36 with `TopologyAwareWorkloadScheduling`: the extender is asked about all members among
/// the nodes of one rack after the other, and not again about those of the rack that is chosen, the fuller one.
#[rstest]
#[case::both_have_room("1", &["d", "d", "e f", "e f"], ["d", "d"], "d")]
#[case::one_has_room("8", &["d", "e f", "f"], ["e", "f"], "e f")]
#[tokio::test]
async fn members_of_a_pod_group_are_tried_in_one_rack_after_the_other(
    #[case] shares: &str,
    #[case] asked: &[&str],
    #[case] bound_to: [&str; 2],
    #[case] asked_later: &str,
) {
    let mut rig = Rig::start("", |_, question| (200, first_of(question))).await;
    for (name, rack) in [("d", "x"), ("e", "y"), ("f", "y")] {
        let amounts = json!({"pods": "10", "cpu": "4", RESOURCE: "8"});
        let node = json!({"metadata": {"name": name, "labels": {"rack": rack}}, "status": {"allocatable": amounts, "capacity": amounts}});
        rig.api.objects().create("nodes", node).unwrap();
    }
    let spec = json!({"schedulingPolicy": {"gang": {"minCount": 2}}, "schedulingConstraints": {"topology": [{"key": "rack"}]}});
    let group = json!({"metadata": {"name": "g", "namespace": "default"}, "spec": spec});
    rig.api.objects().create("podgroups", group).unwrap();
    let member = json!({"podGroupName": "g"});
    let nodes_asked = |rig: &Rig| -> Vec<String> {
        let questions = rig.questions("filter");
        let names = questions
            .iter()
            .map(|question| question["NodeNames"].as_array().unwrap().clone());
        names
            .map(|names| {
                names
                    .iter()
                    .map(|name| name.as_str().unwrap())
                    .collect::<Vec<_>>()
                    .join(" ")
            })
            .collect()
    };
    for name in ["g-0", "g-1"] {
        rig.create_with(name, shares, &member);
    }
    let mut bound = Vec::new();
    for _ in 0..2 {
        let attempt = rig.attempt().await;
        let SchedulingOutcome::Bound(node) = attempt.outcome else {
            panic!("{attempt:?}");
        };
        bound.push(node);
    }
    bound.sort();
    assert_eq!(bound, bound_to);
    assert_eq!(nodes_asked(&rig), asked);
    // The rack of the members that are bound is the only placement.
    rig.create_with("g-2", "0", &member);
    rig.attempt().await;
    assert_eq!(nodes_asked(&rig)[asked.len()..], [asked_later]);
}
