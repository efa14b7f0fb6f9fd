//! What is written, and how the API server's moods are met.

use std::time::Duration;

use chrono::DateTime;
use http::{Method, Request, Response, StatusCode};
use http_body_util::BodyExt;
use insta::assert_json_snapshot;
use kube::client::Body;
use serde_json::json;
use tower_test::mock::{Handle, SendResponse};

use proto::device::{DeviceInfo, DeviceSpec, RawDevice};
use rstest::rstest;

use super::*;
use crate::builders::{fleet, gpu, pod, pods, units};
use crate::fleet::FleetDevice;
use crate::health::Reason;
use crate::inventory::OtherDevice;
use crate::plugin::ids::IdScheme;
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

/// The Device object of a fleet of which nothing was said before.
fn object(fleet: &Fleet) -> Device {
    device_object::device(fleet, &node(&json!({})), &Remarks::default(), None, at(0))
}

fn offers(fleet: &Fleet) -> Requests {
    node_status::offers(&object(fleet).spec.devices)
}

/// What the API server holds once `device` is applied.
fn held(device: &Device) -> Held {
    Held::Object(Box::new(RawDevice { metadata: device.metadata.clone(), spec: json!(device.spec) }))
}

fn nic(is_healthy: bool) -> FleetDevice {
    let device = OtherDevice {
        device_type: "rdma".to_owned(),
        id: "0000:1f:00.0".parse().unwrap(),
        minor: 3,
        resources: [("koordinator.sh/rdma".to_owned(), "100".parse().unwrap())].into(),
        labels: [("fabric".to_owned(), "a".to_owned())].into(),
        bus_id: Some("0000:1f:00.0".to_owned()),
        numa_node: None,
        pcie_root: Some("pci0000:16".to_owned()),
        vf_groups: Vec::new(),
        device_nodes: vec!["/dev/infiniband/uverbs0".into()],
    };
    FleetDevice { device, is_healthy, reason: (!is_healthy).then_some(Reason::Lost), message: "gone".to_owned() }
}

#[test]
fn node_status_of_two_gpus() {
    assert_json_snapshot!(node_status::patch(&node(&json!({})), offers(&fleet(2))));
}

/// What the plugin serves, and what is not shared, is not in node status.
#[test]
fn only_healthy_shared_gpus_are_offered() {
    let mut fleet = sick(0);
    fleet.others = vec![nic(true)];
    assert_eq!(offers(&fleet), offers(&self::fleet(1)));
    let ids = IdScheme::new(&[gpu(0)], 100, MemoryUnit::GIB).unwrap();
    let inventory = crate::inventory::Inventory {
        gpus: vec![gpu(0), gpu(1)],
        others: Vec::new(),
        excluded: Vec::new(),
        driver_version: None,
        vendor: "nvidia".to_owned(),
    };
    let partly = Fleet::new(inventory, ids);
    assert_eq!(offers(&partly), offers(&self::fleet(1)));
    let unshared = &object(&partly).spec.devices[1];
    assert_eq!(unshared.labels, [("gpushare/sharing".to_owned(), "disabled".to_owned())].into());
    assert!(unshared.health && !unshared.resources.contains_key("koordinator.sh/gpu.shared"));
}

#[test]
fn right_status_is_left_alone() {
    let held = json!({
        "aliyun.com/gpu-count": "1", "koordinator.sh/gpu": 100, "koordinator.sh/gpu-core": "100",
        "koordinator.sh/gpu-memory": "17179869184", "koordinator.sh/gpu-memory-ratio": "100",
        "aliyun.com/gpu-mem": "16", "cpu": "4",
    });
    assert_eq!(node_status::patch(&node(&held), offers(&fleet(1))), None);
}

/// A sick device takes no new pods, but those that run must survive kubelet's restart.
#[test]
fn requests_of_pods_outweigh_a_sick_device() {
    let mut asking = NodePod { stage: Stage::Running, ..pod("a", 1, [units(1)]) };
    let spec = json!({"containers": [{"resources": {"requests": {"koordinator.sh/gpu-core": "150"}}}]});
    asking.requests = Requests::of(&serde_json::from_value(spec).unwrap());
    let ended = NodePod { stage: Stage::Terminal, uid: "b".into(), ..asking.clone() };
    let values = offers(&sick(0)).max(node_status::requests(&pods([asking, ended])));
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
    (fleet.gpus[0].gpu.numa_node, fleet.gpus[0].gpu.pcie_root) = (Some(1), Some("pci0000:3a".to_owned()));
    fleet.others = vec![nic(false)];
    let checkpoints = Some(r#"[{"podUID":"u"}]"#.to_owned());
    let remarks = Remarks { checkpoints, serves_vendor: true };
    assert_json_snapshot!(device_object::device(&fleet, &node(&json!({})), &remarks, None, at(0)));
}

/// `reason, since` of the condition of the first device, none if there is none.
fn condition(spec: &DeviceSpec) -> Option<(&str, &str, i64)> {
    let condition = spec.devices[0].conditions.first()?;
    let since = DateTime::parse_from_rfc3339(&condition.last_transition_time).unwrap().timestamp();
    Some((condition.status.as_str(), condition.reason.as_str(), since))
}

/// Healthy, sick, sick for another reason, well again; then another process that only knows the object.
#[test]
fn conditions_say_why_and_since_when() {
    let node = node(&json!({}));
    let after = |fleet: &Fleet, before: &DeviceSpec, second| {
        device_object::device(fleet, &node, &Remarks::default(), Some(before), at(second)).spec
    };
    let healthy = object(&fleet(2)).spec;
    assert_eq!(condition(&healthy), None);
    let mut fleet = sick(0);
    let first = after(&fleet, &healthy, 10);
    assert_eq!(condition(&first), Some(("False", "Xid79", 10)));
    fleet.gpus[0].reason = Some(Reason::Lost);
    let second = after(&fleet, &first, 20);
    assert_eq!(condition(&second), Some(("False", "Lost", 10)));
    (fleet.gpus[0].is_healthy, fleet.gpus[0].reason) = (true, Some(Reason::Recovered));
    let third = after(&fleet, &second, 30);
    assert_eq!(condition(&third), Some(("True", "Recovered", 30)));
    assert_eq!(after(&self::fleet(2), &third, 40), third);
    assert_eq!(condition(&after(&self::fleet(2), &second, 50)), Some(("True", "Healthy", 50)), "what was lost is back");
    assert!(third.devices[1].conditions.is_empty());
}

#[rstest]
#[case::nothing(None, None, None)]
#[case::no_numa(None, Some("pci0000:3a"), Some((0, "pci0000:3a")))]
#[case::numa(Some(1), None, Some((1, "")))]
#[case::both(Some(1), Some("pci0000:3a"), Some((1, "pci0000:3a")))]
fn topology(#[case] numa_node: Option<i32>, #[case] root: Option<&str>, #[case] expected: Option<(i32, &str)>) {
    let mut fleet = fleet(1);
    (fleet.gpus[0].gpu.numa_node, fleet.gpus[0].gpu.pcie_root) = (numa_node, root.map(str::to_owned));
    let topology = object(&fleet).spec.devices[0].topology.clone();
    assert!(topology.iter().all(|topology| topology.socket_id == -1 && topology.bus_id == "0000:00:00.0"));
    assert_eq!(topology.as_ref().map(|topology| (topology.node_id, topology.pcie_id.as_str())), expected);
}

#[test]
fn what_others_add_is_left_alone_and_what_they_change_is_not() {
    let wanted = object(&sick(1));
    let says = |change: fn(&mut RawDevice)| {
        let Held::Object(mut held) = held(&wanted) else { unreachable!() };
        change(&mut held);
        device_object::says(&held, &wanted)
    };
    assert!(says(|_| {}));
    assert!(says(|held| {
        held.metadata.labels.as_mut().unwrap().insert("team".to_owned(), "a".to_owned());
        held.metadata.annotations = Some([("scheduling.koordinator.sh/gpu-partitions".to_owned(), "{}".to_owned())].into());
    }));
    assert!(!says(|held| held.metadata.labels = None));
    assert!(!says(|held| held.metadata.owner_references = None));
    assert!(!says(|held| held.spec["devices"][1]["health"] = json!(true)));
    assert!(!says(|held| held.spec["devices"][0]["resources"]["koordinator.sh/gpu-memory"] = json!("a lot")));
    assert!(!says(|held| held.spec = Value::Null));
}

#[test]
fn labels_are_legal_and_say_nothing_of_mixed_models() {
    let mut mixed = fleet(2);
    mixed.gpus[0].gpu.model = "NVIDIA A100-SXM4-80GB".to_owned();
    let labels = |fleet: &Fleet| object(fleet).metadata.labels.unwrap();
    assert_eq!(labels(&mixed).get("node.koordinator.sh/gpu-model"), None);
    mixed.gpus[1].gpu.model = format!("NVIDIA A100 (PCIe) {}", "x".repeat(80));
    mixed.gpus.remove(0);
    let model = labels(&mixed)["node.koordinator.sh/gpu-model"].clone();
    assert!(model.starts_with("A100--PCIe--x") && model.len() <= 63, "{model}");
    mixed.gpus.clear();
    assert_eq!(labels(&mixed), BTreeMap::new(), "labels go with the devices");
}

#[test]
fn node_bears_the_labels_of_its_devices() {
    let mut node = node(&json!({}));
    let labels = object(&fleet(1)).metadata.labels.unwrap();
    let patch = labels::patch(&node, &labels).unwrap();
    assert_eq!(
        patch,
        json!({"metadata": {"labels": {
            "node.koordinator.sh/gpu-vendor": "nvidia", "node.koordinator.sh/gpu-model": "Tesla-T4",
            "node.koordinator.sh/gpu-driver-version": "550.54.15",
        }}})
    );
    node.metadata.labels = serde_json::from_value(patch["metadata"]["labels"].clone()).unwrap();
    node.metadata.labels.as_mut().unwrap().insert("gpushare".to_owned(), "true".to_owned());
    assert_eq!(labels::patch(&node, &labels), None);
    let gone = json!({"node.koordinator.sh/gpu-vendor": null, "node.koordinator.sh/gpu-model": null, "node.koordinator.sh/gpu-driver-version": null});
    assert_eq!(labels::patch(&node, &BTreeMap::new()), Some(json!({"metadata": {"labels": gone}})));
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
    device: watch::Sender<Held>,
    checkpoints: watch::Sender<Option<DevicesCheckpoints>>,
}

impl Server {
    fn new() -> Self {
        Self::holding(Held::Nothing)
    }

    fn holding(held: Held) -> Self {
        let (service, requests) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
        let client = Client::new(service, "default");
        let (fleet, fleet_seen) = watch::channel(Arc::new(fleet(1)));
        let (pods, pods_seen) = watch::channel(pods([]));
        let (node, node_seen) = watch::channel(Some(node(&json!({}))));
        let (device, device_seen) = watch::channel(held);
        let (checkpoints, checkpoints_seen) = watch::channel(None);
        let sources = Sources { fleet: fleet_seen, pods: pods_seen, node: node_seen, device: device_seen, checkpoints: checkpoints_seen };
        let facts =
            Facts { node_name: "n1".to_owned(), names: ResourceNames::default(), memory_unit: MemoryUnit::GIB, serves_vendor: false };
        tokio::spawn(Publisher::new(&client, facts, sources).run());
        Self { requests, fleet, pods, node, device, checkpoints }
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

    /// Whether nothing is asked for so many seconds.
    async fn is_silent(&mut self, seconds: u64) -> bool {
        timeout(Duration::from_secs(seconds), self.requests.next_request()).await.is_err()
    }

    /// Accepts the next request as it is and returns its first line.
    async fn accept(&mut self) -> String {
        let (line, body, answer) = self.next().await;
        let object = if line.starts_with(DEVICE) { body } else { json!(node(&json!({}))) };
        answer.send_response(response(StatusCode::OK, &object));
        line
    }

    /// Accepts the next request, which must write the Device object, and returns it.
    async fn written(&mut self) -> Device {
        let (line, body, answer) = self.next().await;
        assert!(line.starts_with(DEVICE), "{line}");
        answer.send_response(response(StatusCode::OK, &body));
        serde_json::from_value(body).unwrap()
    }

    async fn settle(&mut self) -> [String; 4] {
        [self.accept().await, self.accept().await, self.accept().await, self.accept().await]
    }

    /// Settles, and the node tells what was written into it.
    async fn come_to_rest(&mut self) -> Node {
        self.settle().await;
        let held = json!({
            "aliyun.com/gpu-count": "1", "koordinator.sh/gpu": "100", "koordinator.sh/gpu-core": "100",
            "koordinator.sh/gpu-memory": "16Gi", "koordinator.sh/gpu-memory-ratio": "100",
        });
        let mut settled = node(&held);
        settled.metadata.annotations = Some([("aliyun.com/gpu-mem-unit".to_owned(), "GiB".to_owned())].into());
        settled.metadata.labels = object(&fleet(1)).metadata.labels;
        self.node.send_replace(Some(settled.clone()));
        self.device.send_replace(held_by_all());
        assert!(self.is_silent(60).await);
        settled
    }
}

const DEVICE: &str = "PATCH /apis/scheduling.koordinator.sh/v1alpha1/devices/n1?&force=true&fieldManager=gpushare-device-plugin";

/// The Device object of one GPU as the API server holds it.
fn held_by_all() -> Held {
    held(&object(&fleet(1)))
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
async fn publishes_unit_labels_device_and_status_in_this_order() {
    let mut server = Server::new();
    let node = "PATCH /api/v1/nodes/n1?";
    assert_eq!(server.settle().await, [node, node, DEVICE, "PATCH /api/v1/nodes/n1/status?"]);
}

#[tokio::test(start_paused = true)]
async fn failures_are_tried_again() {
    for code in [StatusCode::CONFLICT, StatusCode::TOO_MANY_REQUESTS, StatusCode::INTERNAL_SERVER_ERROR] {
        let mut server = Server::new();
        // Each round tries all, whatever becomes of the others.
        for _ in 0..3 {
            for expected in ["PATCH /api/v1/nodes/n1?", "PATCH /api/v1/nodes/n1?", DEVICE, "PATCH /api/v1/nodes/n1/status?"] {
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
    let (_, body, never_answered) = server.next().await;
    for _ in 0..3 {
        server.accept().await;
    }
    let (_, again, _) = server.next().await;
    assert_eq!(again, body, "the one that was not answered");
    drop(never_answered);
}

/// A change cuts the pause short, which would be 30 s by now.
#[tokio::test(start_paused = true)]
async fn pause_ends_with_a_change() {
    let mut server = Server::new();
    for _ in 0..4 * 10 {
        let (_, _, answer) = server.next().await;
        answer.send_response(failure(StatusCode::INTERNAL_SERVER_ERROR));
    }
    tokio::task::yield_now().await;
    let began = Instant::now();
    server.fleet.send_replace(Arc::new(fleet(1)));
    server.next().await;
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
}

/// The object is looked at before it is written, so that the times in it are kept.
#[tokio::test(start_paused = true)]
async fn device_object_is_not_written_before_it_is_known() {
    let mut server = Server::holding(Held::Unknown);
    for _ in 0..3 {
        assert!(!server.accept().await.starts_with(DEVICE));
    }
    let mut before = object(&sick(0));
    before.spec.devices.truncate(1);
    before.spec.devices[0].conditions[0].status = "True".to_owned();
    server.device.send_replace(held(&before));
    // The node says nothing new, so the unit and the labels are tried again first.
    let written = loop {
        let (line, body, answer) = server.next().await;
        let is_device = line.starts_with(DEVICE);
        answer.send_response(response(StatusCode::OK, if is_device { &body } else { &Value::Null }));
        if is_device {
            break serde_json::from_value::<Device>(body).unwrap();
        }
    };
    assert_eq!(condition(&written.spec), Some(("True", "Xid79", 0)));
}

/// Whoever writes nonsense into the object, or deletes it, is put right; whoever does it again and again, now and then.
#[tokio::test(start_paused = true)]
async fn what_others_do_to_the_device_object_is_undone_at_a_pace() {
    let mut server = Server::new();
    server.come_to_rest().await;
    let nonsense = || Held::Object(Box::new(RawDevice { spec: json!({"devices": [{"health": "perhaps"}]}), ..RawDevice::default() }));
    let began = Instant::now();
    server.device.send_replace(nonsense());
    assert_eq!(server.written().await.spec, object(&fleet(1)).spec);
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    for _ in 0..5 {
        server.device.send_replace(nonsense());
        let began = Instant::now();
        server.device.send_replace(Held::Nothing);
        server.written().await;
        assert!(began.elapsed() > Duration::from_secs(9), "{:?}", began.elapsed());
    }
    server.device.send_replace(held_by_all());
    assert!(server.is_silent(60).await);
}

/// What was written before this process began stands until kubelet has told; then that counts.
#[tokio::test(start_paused = true)]
async fn checkpoints_of_before_stand_until_others_are_known() {
    let mut before = object(&fleet(1));
    let text = r#"[{"podUID":"u","resourceName":"nvidia.com/gpu","deviceIDs":["GPU-a"]}]"#;
    before.metadata.annotations = Some([(DEVICES_CHECKPOINTS.to_owned(), text.to_owned())].into());
    let annotation = |device: &Device| device.metadata.annotations.as_ref().and_then(|all| all.get(DEVICES_CHECKPOINTS)).cloned();
    let mut server = Server::holding(held(&before));
    for _ in 0..2 {
        server.accept().await;
    }
    assert_eq!(annotation(&server.written().await).as_deref(), Some(text));
    server.accept().await;
    server.checkpoints.send_replace(Some(DevicesCheckpoints::default()));
    let written = loop {
        let (line, body, answer) = server.next().await;
        answer.send_response(response(StatusCode::OK, &body));
        if line.starts_with(DEVICE) {
            break serde_json::from_value::<Device>(body).unwrap();
        }
    };
    assert_eq!(annotation(&written), None);
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
    let settled = server.come_to_rest().await;
    let mut sick = fleet(1);
    sick.gpus[0].is_healthy = false;
    server.fleet.send_replace(Arc::new(sick));
    assert!(!server.written().await.spec.devices[0].health);
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

/// kubelet as far as node status goes: it admits every pod anew when it restarts, and without its checkpoint zeroes what no plugin serves.
struct Kubelet {
    node: Node,
}

impl Kubelet {
    /// The pods that it would turn away with `OutOf...`, taken in the order in which they are given.
    fn turned_away(&self, pods: &[NodePod]) -> Vec<String> {
        let held = |name: &str| self.node.status.allocatable.get(name).map_or(0, |text| text.quantity().unwrap().unsigned().unwrap());
        let mut admitted = Requests::default();
        let mut refused = Vec::new();
        for pod in pods.iter().filter(|pod| pod.stage != Stage::Terminal) {
            let with = admitted.plus(pod.requests);
            let asked = |name: &str| pod.requests.iter().any(|(other, amount)| other == name && amount > 0);
            if with.iter().all(|(name, amount)| !asked(name) || amount <= held(name)) {
                admitted = with;
            } else {
                refused.push(pod.name.clone());
            }
        }
        refused
    }

    fn lose_checkpoint(&mut self) {
        for amounts in [&mut self.node.status.capacity, &mut self.node.status.allocatable] {
            for amount in amounts.values_mut() {
                *amount = proto::pod::QuantityText::Number(0);
            }
        }
    }

    /// What the API server makes of the publisher's merge patch.
    fn merge(&mut self, patch: Option<Value>) {
        let Some(patch) = patch else { return };
        for (field, amounts) in [("capacity", &mut self.node.status.capacity), ("allocatable", &mut self.node.status.allocatable)] {
            for (name, value) in patch["status"][field].as_object().into_iter().flatten() {
                match value {
                    Value::Null => drop(amounts.remove(name)),
                    value => drop(amounts.insert(name.clone(), serde_json::from_value(value.clone()).unwrap())),
                }
            }
        }
    }
}

fn asking(name: &str, core: u64, memory_bytes: u64, stage: Stage) -> NodePod {
    let requests = Requests::from_fn(|resource| match resource {
        "koordinator.sh/gpu-core" => core,
        "koordinator.sh/gpu-memory" => memory_bytes,
        _ => 0,
    });
    NodePod { stage, requests, ..pod(name, 1, [units(1)]) }
}

proptest::proptest! {
    /// Whatever is sick when kubelet restarts, with or without its checkpoint: no pod that runs is turned away, and once those that
    /// run have ended nothing is offered but what is healthy.
    #[test]
    fn running_pods_survive_sick_gpus_and_restarts_of_kubelet(
        are_healthy in proptest::collection::vec(proptest::bool::ANY, 1..5),
        amounts in proptest::collection::vec((0..150_u64, 0..20_u64, proptest::bool::ANY), 0..6),
        is_checkpoint_lost in proptest::bool::ANY,
    ) {
        let mut fleet = fleet(u32::try_from(are_healthy.len()).unwrap());
        let running: Vec<NodePod> = amounts.iter().enumerate().map(|(at, (core, gib, has_ended))| {
            asking(&at.to_string(), *core, gib << 30, if *has_ended { Stage::Terminal } else { Stage::Running })
        }).collect();
        let mut kubelet = Kubelet { node: node(&json!({})) };
        let publish = |kubelet: &mut Kubelet, fleet: &Fleet, all: &[NodePod]| {
            let values = offers(fleet).max(node_status::requests(&pods(all.iter().cloned())));
            kubelet.merge(node_status::patch(&kubelet.node, values));
        };
        publish(&mut kubelet, &fleet, &running);
        for (entry, is_healthy) in fleet.gpus.iter_mut().zip(&are_healthy) {
            entry.is_healthy = *is_healthy;
        }
        publish(&mut kubelet, &fleet, &running);
        if is_checkpoint_lost {
            kubelet.lose_checkpoint();
            publish(&mut kubelet, &fleet, &running);
        }
        proptest::prop_assert_eq!(kubelet.turned_away(&running), Vec::<String>::new());
        publish(&mut kubelet, &fleet, &[]);
        let left: Vec<String> = offers(&fleet).iter().filter(|(_, amount)| *amount > 0).map(|(name, _)| name.to_owned()).collect();
        let mut held: Vec<String> = kubelet.node.status.capacity.keys().cloned().collect();
        held.sort();
        let mut left = left;
        left.sort();
        proptest::prop_assert_eq!(held, left);
    }
}

/// What a Device object offers does not depend on what nobody knows.
#[test]
fn amounts_that_cannot_be_counted_are_none() {
    let mut device = DeviceInfo { device_type: "gpu".to_owned(), health: true, ..DeviceInfo::default() };
    device.resources.insert("koordinator.sh/gpu-memory".to_owned(), "-1".parse().unwrap());
    device.resources.insert("koordinator.sh/gpu-core".to_owned(), "100m".parse().unwrap());
    assert_eq!(node_status::offers(&[device]), Requests::from_fn(|name| u64::from(name == "aliyun.com/gpu-count")));
}
