//! What is written, and how the API server's moods are met.

use std::time::Duration;

use chrono::DateTime;
use http::{Method, Request, Response, StatusCode};
use http_body_util::BodyExt;
use insta::assert_json_snapshot;
use kube::client::Body;
use serde_json::json;
use tower_test::mock::{Handle, SendResponse};

use super::*;
use crate::builders::{fleet, pod, pods, units};
use crate::health::Reason;
use crate::pods::{NodePod, Stage};

fn node(status: &Value) -> Node {
    let node = json!({"metadata": {"name": "n1", "uid": "node-uid"}, "status": {"capacity": status, "allocatable": status}});
    serde_json::from_value(node).unwrap()
}

fn sick(minor: usize) -> Fleet {
    let mut fleet = fleet(2);
    let entry = &mut fleet.gpus[minor];
    (entry.is_healthy, entry.reason, entry.message) =
        (false, Some(Reason::Xid(79)), "the driver reported critical error XID 79".to_owned());
    fleet
}

fn at(seconds: i64) -> DateTime<Utc> {
    DateTime::from_timestamp(seconds, 0).unwrap()
}

#[test]
fn node_status_of_two_gpus() {
    assert_json_snapshot!(node_status::patch(&node(&json!({})), fleet(2).offers()));
}

#[test]
fn right_status_is_left_alone() {
    let held = json!({
        "aliyun.com/gpu-count": "1", "koordinator.sh/gpu": 100, "koordinator.sh/gpu-core": "100",
        "koordinator.sh/gpu-memory": "17179869184", "koordinator.sh/gpu-memory-ratio": "100",
        "aliyun.com/gpu-mem": "16", "cpu": "4",
    });
    assert_eq!(node_status::patch(&node(&held), fleet(1).offers()), None);
}

/// A sick device takes no new pods, but those that run must survive kubelet's restart.
#[test]
fn requests_of_pods_outweigh_a_sick_device() {
    let mut asking = NodePod { stage: Stage::Running, ..pod("a", 1, [units(1)]) };
    let spec = json!({"containers": [{"resources": {"requests": {"koordinator.sh/gpu-core": "150"}}}]});
    asking.requests = Requests::of(&serde_json::from_value(spec).unwrap());
    let ended = NodePod { stage: Stage::Terminal, uid: "b".into(), ..asking.clone() };
    let values = sick(0).offers().max(node_status::requests(&pods([asking, ended])));
    let patch = node_status::patch(&node(&json!({})), values).unwrap();
    assert_eq!(patch["status"]["capacity"]["koordinator.sh/gpu-core"], "150");
    assert_eq!(patch["status"]["allocatable"]["koordinator.sh/gpu-memory-ratio"], "100");
}

#[test]
fn nothing_left_is_removed_not_zeroed() {
    let held = json!({"koordinator.sh/gpu-core": "100", "koordinator.sh/gpu.shared": "100"});
    let patch = node_status::patch(&node(&held), Requests::default()).unwrap();
    assert_eq!(patch, json!({"status": {"capacity": {"koordinator.sh/gpu-core": null}, "allocatable": {"koordinator.sh/gpu-core": null}}}));
    assert_eq!(node_status::patch(&node(&json!({})), Requests::default()), None);
}

#[test]
fn device_object() {
    let mut fleet = sick(1);
    fleet.gpus[0].gpu.numa_node = Some(1);
    assert_json_snapshot!(device_object::device(&fleet, &node(&json!({})), None, at(0)));
}

#[test]
fn times_of_unchanged_conditions_are_kept() {
    let node = node(&json!({}));
    let first = device_object::device(&fleet(2), &node, None, at(0));
    let second = device_object::device(&sick(1), &node, Some(&first), at(60));
    let times: Vec<_> = second.spec.devices.iter().map(|device| device.conditions[0].last_transition_time.as_str()).collect();
    assert_eq!(times, ["1970-01-01T00:00:00Z", "1970-01-01T00:01:00Z"]);
    assert!(device_object::is_same(&second, &device_object::device(&sick(1), &node, Some(&second), at(90))));
    assert!(!device_object::is_same(&first, &second));
}

#[test]
fn labels_are_legal_and_say_nothing_of_mixed_models() {
    let mut mixed = fleet(2);
    mixed.gpus[0].gpu.model = "NVIDIA A100-SXM4-80GB".to_owned();
    let node = node(&json!({}));
    let labels = |fleet: &Fleet| device_object::device(fleet, &node, None, at(0)).metadata.labels.unwrap();
    assert_eq!(labels(&mixed).get("node.koordinator.sh/gpu-model"), None);
    mixed.gpus[1].gpu.model = format!("NVIDIA A100 (PCIe) {}", "x".repeat(80));
    mixed.gpus.remove(0);
    let model = labels(&mixed)["node.koordinator.sh/gpu-model"].clone();
    assert!(model.starts_with("A100--PCIe--x") && model.len() <= 63, "{model}");
}

#[test]
fn unit_is_annotated_once() {
    let names = ResourceNames::default();
    let mut node = node(&json!({}));
    let patch = unit::patch(&node, &names, MemoryUnit::GIB).unwrap();
    assert_eq!(patch, json!({"metadata": {"annotations": {"aliyun.com/gpu-mem-unit": "GiB"}}}));
    node.metadata.annotations = serde_json::from_value(patch["metadata"]["annotations"].clone()).unwrap();
    assert_eq!(unit::patch(&node, &names, MemoryUnit::GIB), None);
    assert!(unit::patch(&node, &names, MemoryUnit::MIB).is_some());
}

/// An API server that answers as the test says, and a publisher that writes to it.
struct Server {
    requests: Handle<Request<Body>, Response<Body>>,
    fleet: watch::Sender<Arc<Fleet>>,
    pods: watch::Sender<Pods>,
    node: watch::Sender<Option<Node>>,
}

impl Server {
    fn new() -> Self {
        let (service, requests) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
        let client = Client::new(service, "default");
        let (fleet, fleet_seen) = watch::channel(Arc::new(fleet(1)));
        let (pods, pods_seen) = watch::channel(pods([]));
        let (node, node_seen) = watch::channel(Some(node(&json!({}))));
        let sources = Sources { fleet: fleet_seen, pods: pods_seen, node: node_seen };
        let publisher = Publisher::new(&client, "n1".to_owned(), ResourceNames::default(), MemoryUnit::GIB, sources);
        tokio::spawn(publisher.run());
        Self { requests, fleet, pods, node }
    }

    /// The next request: method, path with query, body.
    async fn next(&mut self) -> (String, Value, SendResponse<Response<Body>>) {
        let next = timeout(Duration::from_secs(120), self.requests.next_request()).await;
        let (request, answer) = next.expect("no request").expect("the publisher has ended");
        let line = format!("{} {}", request.method(), request.uri());
        let is_get = request.method() == Method::GET;
        let body = request.into_body().collect().await.unwrap().to_bytes();
        (line, if is_get { Value::Null } else { serde_json::from_slice(&body).unwrap() }, answer)
    }

    /// Answers the next request with success and returns its first line.
    async fn accept(&mut self, object: &Value) -> String {
        let (line, _, answer) = self.next().await;
        answer.send_response(response(StatusCode::OK, object));
        line
    }

    async fn settle(&mut self) -> [String; 4] {
        let device = json!(device_object::device(&fleet(1), &node(&json!({})), None, at(0)));
        let node = json!(node(&json!({})));
        [self.accept(&node).await, self.not_found().await, self.accept(&device).await, self.accept(&node).await]
    }

    async fn not_found(&mut self) -> String {
        let (line, _, answer) = self.next().await;
        answer.send_response(failure(StatusCode::NOT_FOUND));
        line
    }
}

fn response(code: StatusCode, body: &Value) -> Response<Body> {
    Response::builder().status(code).body(Body::from(body.to_string().into_bytes())).unwrap()
}

fn failure(code: StatusCode) -> Response<Body> {
    let reason = if code == StatusCode::NOT_FOUND { "NotFound" } else { "Failure" };
    response(
        code,
        &json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "no", "reason": reason, "code": code.as_u16()}),
    )
}

#[tokio::test(start_paused = true)]
async fn publishes_unit_device_and_status_in_this_order() {
    let mut server = Server::new();
    assert_eq!(
        server.settle().await,
        [
            "PATCH /api/v1/nodes/n1?",
            "GET /apis/scheduling.koordinator.sh/v1alpha1/devices/n1",
            "PATCH /apis/scheduling.koordinator.sh/v1alpha1/devices/n1?&force=true&fieldManager=gpushare-device-plugin",
            "PATCH /api/v1/nodes/n1/status?",
        ]
    );
}

#[tokio::test(start_paused = true)]
async fn failures_are_tried_again() {
    for code in [StatusCode::CONFLICT, StatusCode::TOO_MANY_REQUESTS, StatusCode::INTERNAL_SERVER_ERROR] {
        let mut server = Server::new();
        // Each round tries all three, whatever becomes of the others.
        for _ in 0..3 {
            for expected in ["PATCH /api/v1/nodes/n1?", "GET /apis/", "PATCH /api/v1/nodes/n1/status?"] {
                let (line, _, answer) = server.next().await;
                assert!(line.starts_with(expected), "{line}");
                answer.send_response(failure(code));
            }
        }
        server.settle().await;
    }
}

/// Time stands still except while everybody waits, so only the publisher's own limit can end the wait.
#[tokio::test(start_paused = true)]
async fn silence_is_not_waited_out() {
    let mut server = Server::new();
    let (_, _, never_answered) = server.next().await;
    assert!(server.not_found().await.starts_with("GET /apis/"));
    let device = json!(device_object::device(&fleet(1), &node(&json!({})), None, at(0)));
    server.accept(&device).await;
    server.accept(&json!(node(&json!({})))).await;
    assert_eq!(server.accept(&json!(node(&json!({})))).await, "PATCH /api/v1/nodes/n1?", "the one that was not answered");
    drop(never_answered);
}

/// A change cuts the pause short, which would be 30 s by now.
#[tokio::test(start_paused = true)]
async fn pause_ends_with_a_change() {
    let mut server = Server::new();
    for _ in 0..3 * 10 {
        let (_, _, answer) = server.next().await;
        answer.send_response(failure(StatusCode::INTERNAL_SERVER_ERROR));
    }
    tokio::task::yield_now().await;
    let began = Instant::now();
    server.fleet.send_replace(Arc::new(fleet(1)));
    server.next().await;
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
}

/// What kubelet has not admitted, and cannot, must not make room for itself.
#[test]
fn requests_of_pods_that_cannot_be_admitted_do_not_count() {
    let asking = |name: &str, stage| NodePod { stage, requests: Requests::of_device(1), ..pod(name, 1, [units(1)]) };
    let unplaced = NodePod { placement: Err(crate::pods::Unplaced::NoGpu), ..asking("c", Stage::Bound) };
    let all =
        [asking("a", Stage::Bound), asking("b", Stage::Running), asking("d", Stage::Admitted), unplaced, asking("e", Stage::Terminal)];
    let three = (0..3).fold(Requests::default(), |sum, _| sum.plus(Requests::of_device(1)));
    assert_eq!(node_status::requests(&pods(all)), three);
}

#[tokio::test(start_paused = true)]
async fn health_and_pods_and_a_zeroed_node_are_published_again() {
    let mut server = Server::new();
    server.settle().await;
    let held = json!({
        "aliyun.com/gpu-count": "1", "koordinator.sh/gpu": "100", "koordinator.sh/gpu-core": "100",
        "koordinator.sh/gpu-memory": "16Gi", "koordinator.sh/gpu-memory-ratio": "100",
    });
    let mut settled = node(&held);
    settled.metadata.annotations = Some([("aliyun.com/gpu-mem-unit".to_owned(), "GiB".to_owned())].into());
    server.node.send_replace(Some(settled.clone()));

    let mut sick = fleet(1);
    sick.gpus[0].is_healthy = false;
    server.fleet.send_replace(Arc::new(sick));
    let (line, body, answer) = server.next().await;
    assert!(line.starts_with("PATCH /apis/scheduling.koordinator.sh/v1alpha1/devices/n1?"), "{line}");
    assert_eq!(body["spec"]["devices"][0]["health"], false);
    answer.send_response(response(StatusCode::OK, &body));
    let (line, body, answer) = server.next().await;
    assert_eq!((line.as_str(), &body["status"]["capacity"]["koordinator.sh/gpu"]), ("PATCH /api/v1/nodes/n1/status?", &Value::Null));
    answer.send_response(response(StatusCode::OK, &json!(settled)));

    let mut zeroed = settled.clone();
    zeroed.status = node(&json!({"koordinator.sh/gpu-core": "0"})).status;
    server.node.send_replace(Some(zeroed));
    let mut asking = pod("a", 1, [units(1)]);
    asking.requests = Requests::of_device(1 << 30);
    server.pods.send_modify(|pods| pods.apply(asking));
    let (line, body, _) = server.next().await;
    assert_eq!(
        (line.as_str(), &body["status"]["allocatable"]["koordinator.sh/gpu-memory"]),
        ("PATCH /api/v1/nodes/n1/status?", &json!("1Gi"))
    );
}
