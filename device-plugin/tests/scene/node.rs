//! A node with GPUs and pods, whose plugin serves a directory. There is no API server: tests set the pods.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use daemon::api_server::Connection;
use daemon::events::recorder;
use device_plugin::config::Config;
use device_plugin::devices::device_ids::IdScheme;
use device_plugin::devices::extended_resource::{ExtendedResource, ExtendedResourceNames, Registrations};
use device_plugin::devices::fleet::NodeFleet;
use device_plugin::devices::inventory::{Gpu, NodeInventory, OtherDevice, PciLocation};
use device_plugin::inject::settings::NodeSettings;
use device_plugin::kubelet::registration::{KubeletDir, Registration};
use device_plugin::kubelet::socket_changes::watch_sockets;
use device_plugin::metrics::Metrics;
use device_plugin::node::pods::{NodePod, NodePods};
use device_plugin::start::blocked::BlockedStarts;
use device_plugin::start::node_state::NodeState;
use device_plugin::start::swap::RecordSwaps;
use device_plugin::start::{OnUnplaced, StartChecker, StartContext};
use http::{Request, Response};
use kube::Client;
use kube::client::Body;
use prometheus_client::registry::Registry;
use proto::memory_unit::MemoryUnit;
use proto::quantity::Quantity;
use proto::resource::ResourceNames;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::{Mutex, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::fake_kubelet::FakeKubelet;

pub(crate) const UNITS: &str = "aliyun.com/gpu-mem";
pub(crate) const SHARES: &str = "koordinator.sh/gpu.shared";
pub(crate) const WHOLE: &str = "nvidia.com/gpu";

/// The equipment of a node.
#[derive(Clone)]
pub(crate) struct Equipment {
    pub(crate) n_gpus: u32,
    /// The number of shared ones, from the first.
    pub(crate) n_shared: u32,
    pub(crate) others: Vec<OtherDevice>,
    /// True if whole GPUs are served.
    pub(crate) serves_whole: bool,
    pub(crate) memory_unit: MemoryUnit,
}

impl Default for Equipment {
    fn default() -> Self {
        Self {
            n_gpus: 1,
            n_shared: 1,
            others: Vec::new(),
            serves_whole: false,
            memory_unit: MemoryUnit::GIB,
        }
    }
}

impl Equipment {
    pub(crate) fn fleet(&self) -> NodeFleet {
        let gpus: Vec<Gpu> = (0..self.n_gpus).map(gpu).collect();
        let shared: Vec<Gpu> = (0..self.n_shared).map(gpu).collect();
        let ids = IdScheme::with_numa_nodes(false, &shared, 100, self.memory_unit).unwrap();
        let vendor = "nvidia".to_owned();
        NodeFleet::new(
            NodeInventory {
                gpus,
                others: self.others.clone(),
                excluded: Vec::new(),
                driver_version: None,
                vendor,
                ..NodeInventory::default()
            },
            ids,
        )
    }
}

/// The node; dropping it leaves no files behind.
pub(crate) struct Node {
    pub(crate) fleet: watch::Sender<Arc<NodeFleet>>,
    pub(crate) pods: watch::Sender<NodePods>,
    pub(crate) state: Arc<NodeState>,
    pub(crate) registrations: watch::Sender<Registrations>,
    pub(crate) stop: CancellationToken,
    pub(crate) tasks: JoinSet<()>,
    /// The watch of kubelet's directory, which ends with the process alone.
    _watching: JoinSet<()>,
    dir: TempDir,
}

impl Node {
    /// A node with `n_gpus` GPUs of 16 GiB, in GiB units, served at once; no resource is registered yet.
    pub(crate) fn new(n_gpus: u32) -> Self {
        Self::with(&Equipment {
            n_gpus,
            n_shared: n_gpus,
            ..Equipment::default()
        })
    }

    pub(crate) fn with_unit(n_gpus: u32, memory_unit: MemoryUnit) -> Self {
        Self::with(&Equipment {
            n_gpus,
            n_shared: n_gpus,
            memory_unit,
            ..Equipment::default()
        })
    }

    pub(crate) fn with(equipment: &Equipment) -> Self {
        let (fleet, fleet_seen) = watch::channel(Arc::new(equipment.fleet()));
        let mut known = NodePods::default();
        known.reset([]);
        let (pods, pods_seen) = watch::channel(known);
        let names = ExtendedResourceNames {
            whole: equipment.serves_whole.then(|| WHOLE.to_owned()),
            ..ExtendedResourceNames::default()
        };
        let flags = ["gpushare-device-plugin", "--node-name=n1", "--inject=envvar"];
        let settings = NodeSettings {
            names: names.clone(),
            memory_unit: equipment.memory_unit,
            allocate_wait: Duration::from_millis(200),
            ..Config::parse_from(flags).settings()
        };
        let (dir, mut tasks) = (tempfile::tempdir().unwrap(), JoinSet::new());
        let state = Arc::new(NodeState::new(settings, fleet_seen, pods_seen, dir.path()));
        state.note_existing_pods(&pods.borrow());
        let starts = starts(Arc::clone(&state), pods.clone());
        let (registrations, stop) = (watch::Sender::default(), CancellationToken::new());
        let kubelet_dir = KubeletDir {
            path: dir.path().to_owned(),
            interval: Duration::from_millis(10),
            limit: Duration::from_secs(5),
        };
        let (changes, socket_changes) = watch::channel(());
        let mut watching = JoinSet::new();
        watching.spawn(watch_sockets(
            kubelet_dir.path.clone(),
            kubelet_dir.interval,
            changes,
        ));
        for resource in ExtendedResource::ALL
            .into_iter()
            .filter(|resource| names.of(*resource).is_some())
        {
            let registration = Registration {
                dir: kubelet_dir.clone(),
                resource,
                node: Arc::clone(&state),
                starts: Arc::clone(&starts),
                registrations: registrations.clone(),
                socket_changes: socket_changes.clone(),
            };
            tasks.spawn(registration.keep_offered(stop.clone()));
        }
        Self {
            fleet,
            pods,
            state,
            registrations,
            stop,
            tasks,
            _watching: watching,
            dir,
        }
    }

    pub(crate) fn path(&self) -> &Path {
        self.dir.path()
    }

    /// A kubelet at which both resources are registered.
    pub(crate) async fn kubelet(&self) -> FakeKubelet {
        let mut kubelet = FakeKubelet::start(self.path());
        kubelet.register_both().await;
        kubelet
    }

    /// Writes kubelet's checkpoint of these containers of pod `a` and what they were given.
    pub(crate) fn write_checkpoint(&self, allocated: &[(&str, &str)]) {
        let entry = |(container, resource): &(&str, &str)| json!({"PodUID": "uid-a", "ContainerName": container, "ResourceName": resource, "DeviceIDs": {"-1": ["x"]}});
        let entries: Vec<_> = allocated.iter().map(entry).collect();
        let text = json!({"Data": {"PodDeviceEntries": entries, "RegisteredDevices": {}}, "Checksum": 1})
            .to_string();
        fs::write(self.path().join("kubelet_internal_checkpoint"), text).unwrap();
    }

    /// Shows the plugin a new or changed pod.
    pub(crate) fn show(&self, pod: &Value) {
        let pod = NodePod::from_pod(
            &serde_json::from_value(pod.clone()).unwrap(),
            "n1",
            &ResourceNames::default(),
        )
        .unwrap();
        self.pods.send_if_modified(|pods| pods.apply(pod));
    }

    /// Makes a GPU sick or well.
    pub(crate) fn set_health(&self, minor: u32, is_healthy: bool) {
        self.fleet.send_modify(|fleet| {
            let fleet = Arc::make_mut(fleet);
            let entry = fleet
                .gpus
                .iter_mut()
                .find(|entry| entry.device.minor == minor)
                .unwrap();
            (entry.is_healthy, entry.message) =
                (is_healthy, "the driver reported critical error XID 79".to_owned());
        });
    }
}

/// A check before starts whose API server does not answer.
fn starts(node: Arc<NodeState>, pods: watch::Sender<NodePods>) -> Arc<StartChecker> {
    let (service, _) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
    let connection = Connection::from(Client::new(service, "default"));
    let metrics = Metrics::register(&mut Registry::default());
    let swaps = RecordSwaps::new(&connection, "n1".to_owned(), pods, metrics.clone());
    let context = StartContext {
        node,
        client: connection.client.clone(),
        evicts_mismatched: false,
        unplaced: OnUnplaced::Refuse,
        swaps: Arc::new(Mutex::new(swaps)),
        recorder: recorder(&connection, "gpushare-device-plugin", Some("n1".to_owned())).0,
        metrics,
    };
    Arc::new(StartChecker::new(context, BlockedStarts::default()))
}

pub(crate) fn uuid(minor: u32) -> String {
    format!("GPU-{minor:08x}-aaaa-bbbb-cccc-{minor:012x}")
}

fn gpu(minor: u32) -> Gpu {
    Gpu {
        uuid: uuid(minor).parse().unwrap(),
        minor,
        index: minor,
        memory_bytes: 16 << 30,
        reserved_bytes: 0,
        model: "Tesla T4".to_owned(),
        bus_id: None,
        location: PciLocation::default(),
        labels: BTreeMap::new(),
        device_node: "/dev/null".into(),
    }
}

/// A whole device of a type.
pub(crate) fn device(device_type: &str, minor: u32, nodes: &[&str]) -> OtherDevice {
    OtherDevice {
        device_type: device_type.to_owned(),
        id: format!("0000:{minor:02x}:00.0").parse().unwrap(),
        minor,
        resources: [(
            format!("koordinator.sh/{device_type}"),
            Quantity::from_unsigned(100),
        )]
        .into(),
        labels: BTreeMap::new(),
        bus_id: None,
        location: PciLocation::default(),
        vf_groups: Vec::new(),
        device_nodes: nodes.iter().map(PathBuf::from).collect(),
        function_nodes: BTreeMap::new(),
    }
}

/// A bound pod with one app container for each list of limits.
pub(crate) fn pod(name: &str, containers: &[&[(&str, usize)]], annotations: &Value) -> Value {
    let container = |(idx, limits): (usize, &&[(&str, usize)])| {
        let limits: serde_json::Map<String, Value> = limits
            .iter()
            .map(|(name, n)| ((*name).to_owned(), json!(n.to_string())))
            .collect();
        json!({"name": format!("c{idx}"), "resources": {"limits": limits}})
    };
    json!({
        "metadata": {"name": name, "namespace": "default", "uid": format!("uid-{name}"), "annotations": annotations},
        "spec": {"nodeName": "n1", "containers": containers.iter().enumerate().map(container).collect::<Vec<_>>()},
        "status": {"phase": "Pending"},
    })
}

/// The annotations of the old extender, and of this project's scheduler.
pub(crate) fn gpushare(minor: u32, units: usize, assumed_at: u64) -> Value {
    json!({
        "ALIYUN_COM_GPU_MEM_IDX": minor.to_string(),
        "ALIYUN_COM_GPU_MEM_POD": units.to_string(),
        "ALIYUN_COM_GPU_MEM_DEV": "16",
        "ALIYUN_COM_GPU_MEM_ASSIGNED": "false",
        "ALIYUN_COM_GPU_MEM_ASSUME_TIME": assumed_at.to_string(),
    })
}

/// Koordinator's record of whole devices with these minors.
pub(crate) fn koordinator(minors: &[u32], assumed_at: u64) -> Value {
    let gpus: Vec<_> = minors
        .iter()
        .map(|minor| json!({"minor": minor, "id": uuid(*minor), "resources": {}}))
        .collect();
    json!({
        "scheduling.koordinator.sh/device-allocated": json!({"gpu": gpus}).to_string(),
        "scheduling.koordinator.sh/bind-timestamp": assumed_at.to_string(),
    })
}

/// A pod of whose second container this half is answered for, and one on another GPU that asks for the same units.
pub(crate) async fn in_the_middle_of_a_container(half: (&str, usize)) -> (Node, FakeKubelet) {
    let node = Node::new(2);
    let mut kubelet = node.kubelet().await;
    node.show(&pod(
        "a",
        &[&[(UNITS, 2)], &[(SHARES, 1), (UNITS, 3)]],
        &gpushare(0, 5, 1),
    ));
    node.show(&pod("b", &[&[(UNITS, 3)]], &gpushare(1, 3, 2)));
    for call in [(UNITS, 2), half] {
        kubelet.container(&[call]).await.unwrap();
    }
    node.write_checkpoint(&[("c0", UNITS)]);
    (node, kubelet)
}

/// The GPU of each call's answer.
pub(crate) async fn indices(kubelet: &mut FakeKubelet, n_calls: usize) -> Vec<String> {
    let mut indices = Vec::new();
    for _ in 0..n_calls {
        indices.push(kubelet.container(&[(UNITS, 3)]).await.unwrap()["ALIYUN_COM_GPU_MEM_IDX"].clone());
    }
    indices
}
