//! The publisher's writes, and its reaction to errors of the API server.

mod amounts;
mod objects;

use std::collections::BTreeMap;
use std::time::Duration;

use chrono::DateTime;
use kube::ResourceExt;
use serde_json::{Value, json};

use proto::device::{DEVICES_REVISION, DeviceSpec, RawDevice};

use super::*;
use crate::devices::fleet::FleetDevice;
use crate::devices::health::HealthReason;
use crate::devices::inventory::{OtherDevice, PciLocation};
use crate::node::pods::Requests;
use crate::tests::api_server::{self, ApiServer, DueAnswer};
use crate::tests::builders::{fleet, pod, pods, units};
use tokio::time::timeout;

fn node(status: &Value) -> Node {
    let node = json!({"metadata": {"name": "n1", "uid": "node-uid"}, "status": {"capacity": status, "allocatable": status}});
    serde_json::from_value(node).unwrap()
}

fn sick(minor: usize) -> NodeFleet {
    let mut fleet = fleet(2);
    let entry = &mut fleet.gpus[minor];
    (entry.is_healthy, entry.reason, entry.message) = (
        false,
        Some(HealthReason::Xid(79)),
        "the driver reported critical error XID 79".to_owned(),
    );
    fleet
}

fn at(seconds: i64) -> DateTime<Utc> {
    DateTime::from_timestamp(seconds, 0).unwrap()
}

/// The Device object of a fleet of which nothing was said before.
fn object(fleet: &NodeFleet) -> Device {
    DeviceObjectInputs::default().device(fleet, &node(&json!({})), None, at(0))
}

fn offers(fleet: &NodeFleet) -> Requests {
    node_patches::offered(&object(fleet).spec.devices)
}

/// The stored object once `device` is applied.
fn stored(device: &Device) -> StoredDevice {
    StoredDevice::Present(Box::new(RawDevice {
        metadata: device.metadata.clone(),
        spec: json!(device.spec),
    }))
}

/// `reason, since` of the condition of the first device, none if there is none.
fn condition(spec: &DeviceSpec) -> Option<(&str, &str, i64)> {
    let condition = spec.devices[0].conditions.first()?;
    let since = DateTime::parse_from_rfc3339(&condition.last_transition_time)
        .unwrap()
        .timestamp();
    Some((condition.status.as_str(), condition.reason.as_str(), since))
}

fn nic(is_healthy: bool) -> FleetDevice<OtherDevice> {
    let device = OtherDevice {
        device_type: "rdma".to_owned(),
        id: "0000:1f:00.0".parse().unwrap(),
        minor: 3,
        resources: [("koordinator.sh/rdma".to_owned(), "100".parse().unwrap())].into(),
        labels: [("fabric".to_owned(), "a".to_owned())].into(),
        bus_id: Some("0000:1f:00.0".to_owned()),
        location: PciLocation {
            root: Some("pci0000:16".to_owned()),
            ..PciLocation::default()
        },
        vf_groups: Vec::new(),
        device_nodes: vec!["/dev/infiniband/uverbs0".into()],
        function_nodes: BTreeMap::new(),
    };
    FleetDevice {
        device,
        is_shared: true,
        is_healthy,
        reason: (!is_healthy).then_some(HealthReason::Lost),
        message: "gone".to_owned(),
    }
}

/// An API server that answers as the test says, and a publisher that writes to it.
struct Server {
    api: ApiServer,
    fleet: watch::Sender<Arc<NodeFleet>>,
    pods: watch::Sender<NodePods>,
    node: watch::Sender<Option<Node>>,
    device: watch::Sender<StoredDevice>,
    checkpoints: watch::Sender<Option<KubeletAllocations>>,
    overrides: watch::Sender<Arc<NodeOverrides>>,
}

impl Server {
    fn new() -> Self {
        Self::holding(StoredDevice::Absent)
    }

    fn holding(held: StoredDevice) -> Self {
        let (client, api) = ApiServer::new();
        let (fleet, fleet_seen) = watch::channel(Arc::new(fleet(1)));
        let (pods, pods_seen) = watch::channel(pods([]));
        let (node, node_seen) = watch::channel(Some(node(&json!({}))));
        let (device, device_seen) = watch::channel(held);
        let (checkpoints, checkpoints_seen) = watch::channel(None);
        let (overrides, overrides_seen) = watch::channel(Arc::default());
        let inputs = PublisherInputs {
            enforcements: watch::channel(Arc::default()).1,
            fleet: fleet_seen,
            pods: pods_seen,
            node: node_seen,
            device: device_seen,
            kubelet_allocations: checkpoints_seen,
            overrides: overrides_seen,
            injection: watch::channel(None).1,
            pods_without_devices: watch::channel(None).1,
            absence: watch::channel(None).1,
        };
        let settings = PublisherSettings {
            node_name: "n1".to_owned(),
            names: ResourceNames::default(),
            memory_unit: MemoryUnit::GIB,
            device: DeviceObjectInputs::default(),
        };
        let connection = Connection::from(client);
        let (recorder, _) = daemon::events::recorder(&connection, "test", Some("n1".to_owned()));
        tokio::spawn(NodePublisher::new(&connection, recorder, settings, inputs).run());
        Self {
            api,
            fleet,
            pods,
            node,
            device,
            checkpoints,
            overrides,
        }
    }

    async fn next(&mut self) -> (String, Value, DueAnswer) {
        let next = timeout(Duration::from_secs(120), self.api.next()).await;
        next.expect("no request")
    }

    /// Returns true if no request comes for this number of seconds.
    async fn is_silent(&mut self, seconds: u64) -> bool {
        timeout(Duration::from_secs(seconds), self.api.next())
            .await
            .is_err()
    }

    /// Accepts the next request as it is and returns its first line.
    async fn accept(&mut self) -> String {
        let (line, body, answer) = self.next().await;
        let object = if line.starts_with(DEVICE) {
            body
        } else {
            json!(node(&json!({})))
        };
        answer.send(200, &object);
        line
    }

    /// Accepts the next request, which must write the Device object, and returns it.
    async fn written(&mut self) -> Device {
        let (line, body, answer) = self.next().await;
        assert!(line.starts_with(DEVICE), "{line}");
        answer.send(200, &body);
        serde_json::from_value(body).unwrap()
    }

    /// Accepts all requests up to the next one that writes the Device object, and returns the object.
    async fn next_device(&mut self) -> Device {
        loop {
            let (line, body, answer) = self.next().await;
            answer.send(200, &body);
            if line.starts_with(DEVICE) {
                return serde_json::from_value(body).unwrap();
            }
        }
    }

    async fn settle(&mut self) -> [String; 4] {
        [
            self.accept().await,
            self.accept().await,
            self.accept().await,
            self.accept().await,
        ]
    }

    /// Settles, and the node shows everything that was written into it, the revision of the Device object last.
    async fn settle_completely(&mut self) -> Node {
        self.settle().await;
        let held = json!({
            "aliyun.com/gpu-count": "1", "koordinator.sh/gpu": "100", "koordinator.sh/gpu-core": "100",
            "koordinator.sh/gpu-memory": "16Gi", "koordinator.sh/gpu-memory-ratio": "100",
        });
        let mut settled = node(&held);
        settled.metadata.annotations =
            Some([("aliyun.com/gpu-mem-unit".to_owned(), "GiB".to_owned())].into());
        settled.metadata.labels = object(&fleet(1)).metadata.labels;
        self.node.send_replace(Some(settled.clone()));
        self.device.send_replace(stored_as_wanted());
        let (line, body, answer) = self.next().await;
        let revision = body["metadata"]["annotations"][DEVICES_REVISION]
            .as_str()
            .expect(&line)
            .to_owned();
        settled
            .annotations_mut()
            .insert(DEVICES_REVISION.to_owned(), revision);
        self.node.send_replace(Some(settled.clone()));
        answer.send(200, &json!(settled));
        assert!(self.is_silent(60).await);
        settled
    }
}

const DEVICE: &str = "PATCH /apis/scheduling.koordinator.sh/v1alpha1/devices/n1?&force=true&fieldManager=gpushare-device-plugin";

/// The Device object of one GPU as the API server holds it.
fn stored_as_wanted() -> StoredDevice {
    stored(&object(&fleet(1)))
}

fn refuse(answer: DueAnswer, code: u16) {
    answer.send(code, &api_server::failure(code, "Failure", "no"));
}

#[tokio::test(start_paused = true)]
async fn memory_unit_labels_device_object_and_status_are_written_in_this_order() {
    let mut server = Server::new();
    let node = "PATCH /api/v1/nodes/n1";
    assert_eq!(
        server.settle().await,
        [node, node, DEVICE, "PATCH /api/v1/nodes/n1/status"]
    );
}

#[tokio::test(start_paused = true)]
async fn failed_writes_are_repeated() {
    for code in [409, 429, 500] {
        let mut server = Server::new();
        // Each round tries all, whatever becomes of the others.
        for _ in 0..3 {
            for expected in [
                "PATCH /api/v1/nodes/n1",
                "PATCH /api/v1/nodes/n1",
                DEVICE,
                "PATCH /api/v1/nodes/n1/status",
            ] {
                let (line, _, answer) = server.next().await;
                assert_eq!(line, expected);
                refuse(answer, code);
            }
        }
        server.settle().await;
    }
}

/// Time advances only while all tasks wait, so only the timeout of the publisher can end the wait.
#[tokio::test(start_paused = true)]
async fn a_request_without_a_reply_times_out() {
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
async fn a_change_ends_the_pause_after_a_failure() {
    let mut server = Server::new();
    for _ in 0..4 * 10 {
        let (_, _, answer) = server.next().await;
        refuse(answer, 500);
    }
    tokio::task::yield_now().await;
    let began = Instant::now();
    server.fleet.send_replace(Arc::new(fleet(1)));
    server.next().await;
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
}

/// The object is looked at before it is written, so that the times in it are kept.
#[tokio::test(start_paused = true)]
async fn the_device_object_is_read_before_it_is_written() {
    let mut server = Server::holding(StoredDevice::Unknown);
    for _ in 0..3 {
        assert!(!server.accept().await.starts_with(DEVICE));
    }
    let mut before = object(&sick(0));
    before.spec.devices.truncate(1);
    before.spec.devices[0].conditions[0].status = "True".to_owned();
    server.device.send_replace(stored(&before));
    // The node says nothing new, so the unit and the labels are tried again first.
    let written = loop {
        let (line, body, answer) = server.next().await;
        let is_device = line.starts_with(DEVICE);
        answer.send(200, if is_device { &body } else { &Value::Null });
        if is_device {
            break serde_json::from_value::<Device>(body).unwrap();
        }
    };
    assert_eq!(condition(&written.spec), Some(("True", "Xid79", 0)));
}

/// The publisher undoes an invalid write or a deletion of the object, but repeated ones only now and then.
#[tokio::test(start_paused = true)]
async fn foreign_changes_of_the_device_object_are_undone_at_a_limited_rate() {
    let mut server = Server::new();
    server.settle_completely().await;
    let nonsense = || {
        StoredDevice::Present(Box::new(RawDevice {
            spec: json!({"devices": [{"health": "perhaps"}]}),
            ..RawDevice::default()
        }))
    };
    let began = Instant::now();
    server.device.send_replace(nonsense());
    assert_eq!(server.written().await.spec, object(&fleet(1)).spec);
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    for _ in 0..5 {
        server.device.send_replace(nonsense());
        let began = Instant::now();
        server.device.send_replace(StoredDevice::Absent);
        server.written().await;
        assert!(began.elapsed() > Duration::from_secs(9), "{:?}", began.elapsed());
    }
    server.device.send_replace(stored_as_wanted());
    assert!(server.is_silent(60).await);
}

/// The annotation of an earlier process stands until kubelet's allocations are known.
#[tokio::test(start_paused = true)]
async fn the_published_allocations_stay_until_kubelets_are_known() {
    let mut before = object(&fleet(1));
    let text = r#"[{"podUID":"u","resourceName":"nvidia.com/gpu","deviceIDs":["GPU-a"]}]"#;
    before.metadata.annotations = Some([(DEVICES_CHECKPOINTS.to_owned(), text.to_owned())].into());
    let annotation = |device: &Device| {
        device
            .metadata
            .annotations
            .as_ref()
            .and_then(|all| all.get(DEVICES_CHECKPOINTS))
            .cloned()
    };
    let mut server = Server::holding(stored(&before));
    for _ in 0..3 {
        server.accept().await;
    }
    assert_eq!(annotation(&server.written().await).as_deref(), Some(text));
    server.accept().await;
    server
        .checkpoints
        .send_replace(Some(KubeletAllocations::default()));
    assert_eq!(annotation(&server.next_device().await), None);
}

/// The scheduler reads another program's annotation too, so a GPU in it that the node does not have is a problem of the report.
#[tokio::test(start_paused = true)]
async fn a_missing_gpu_in_the_annotation_of_another_program_is_reported() {
    let mut before = object(&fleet(1));
    let text = r#"[{"podUID":"u","resourceName":"nvidia.com/gpu","deviceIDs":["GPU-old"]}]"#;
    before.metadata.annotations =
        Some([("node.koordinator.sh/gpu-checkpoints".to_owned(), text.to_owned())].into());
    let mut server = Server::holding(stored(&before));
    let written = server.next_device().await;
    let conditions = &written.spec.devices[0].conditions;
    let found = conditions
        .iter()
        .find(|found| found.condition_type == "ReportValid")
        .unwrap();
    assert_eq!(
        (found.status.as_str(), found.reason.as_str()),
        ("False", "AllocationOfMissingGPU")
    );
}

#[tokio::test(start_paused = true)]
async fn changed_overrides_are_published() {
    let mut server = Server::new();
    server.settle_completely().await;
    let set = proto::topology::GpuPartition {
        minors: vec![0],
        ..Default::default()
    };
    let overrides = NodeOverrides {
        partitions: Some([(1, vec![set])].into()),
        ..NodeOverrides::default()
    };
    server.overrides.send_replace(Arc::new(overrides));
    let annotations = server.written().await.metadata.annotations.unwrap();
    assert_eq!(
        annotations["scheduling.koordinator.sh/gpu-partitions"],
        r#"{"1":[{"minors":[0]}]}"#
    );
}

#[tokio::test(start_paused = true)]
async fn health_and_pods_and_a_zeroed_node_are_published_again() {
    let mut server = Server::new();
    let settled = server.settle_completely().await;
    let mut sick = fleet(1);
    sick.gpus[0].is_healthy = false;
    server.fleet.send_replace(Arc::new(sick));
    assert!(!server.written().await.spec.devices[0].health);
    let (line, body, answer) = server.next().await;
    assert_eq!(
        (line.as_str(), &body["status"]["capacity"]["koordinator.sh/gpu"]),
        ("PATCH /api/v1/nodes/n1/status", &Value::Null)
    );
    answer.send(200, &json!(settled));

    let mut zeroed = settled.clone();
    zeroed.status = node(&json!({"koordinator.sh/gpu-core": "0"})).status;
    server.node.send_replace(Some(zeroed));
    let mut asking = pod("a", 1, [units(1)]);
    asking.requests = Requests::of_device(1 << 30);
    server.pods.send_if_modified(|pods| pods.apply(asking));
    let (line, body, _) = server.next().await;
    assert_eq!(
        (
            line.as_str(),
            &body["status"]["allocatable"]["koordinator.sh/gpu-memory"]
        ),
        ("PATCH /api/v1/nodes/n1/status", &json!("1Gi"))
    );
}
