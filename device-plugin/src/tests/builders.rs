//! Builders of pods and devices for tests.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use proto::device::TYPE_RDMA;
use proto::kubelet::deviceplugin::ContainerAllocateResponse;
use proto::memory_unit::MemoryUnit;
use proto::quantity::Quantity;
use proto::record::{DeviceAllocations, GpushareRecord, Record};
use proto::request::{ContainerKind, ContainerRequest};
use proto::resource::{RDMA, ResourceNames};
use serde_json::json;
use tokio::sync::watch;

use crate::devices::device_ids::IdScheme;
use crate::devices::extended_resource::ExtendedResource;
use crate::devices::fleet::{DeviceName, NodeFleet};
use crate::devices::inventory::{Gpu, NodeInventory, OtherDevice, PciLocation};
use crate::inject::cdi::SpecDir;
use crate::inject::cdi::vendor::VendorSpecs;
use crate::inject::enforcement::Enforcements;
use crate::inject::enforcement::limits::Recipient;
use crate::inject::mode::Mode;
use crate::inject::own_container::OwnContainer;
use crate::inject::settings::NodeSettings;
use crate::node::kubelet_checkpoint::Allocated;
use crate::node::pods::{
    NodePod, NodePods, Placement, PodStage, PodUid, RecordedAmounts, Requests, Unplaced,
};
use crate::start::node_state::NodeState;

/// An app container without requests.
fn container(name: String) -> ContainerRequest {
    ContainerRequest {
        name,
        kind: ContainerKind::App,
        memory_units: 0,
        shared: 0,
        whole: 0,
        rdma: 0,
        fpga: 0,
        memory_bytes: 0,
        memory_ratio: 0,
        core: 0,
    }
}

/// A container that requests memory units.
pub(crate) fn units(n: u64) -> ContainerRequest {
    ContainerRequest {
        memory_units: n,
        ..container(format!("u{n}"))
    }
}

/// A container that requests shares.
pub(crate) fn shares(n: u64) -> ContainerRequest {
    ContainerRequest {
        shared: n,
        ..container(format!("s{n}"))
    }
}

/// A container that requests whole GPUs.
pub(crate) fn whole(n: u64) -> ContainerRequest {
    ContainerRequest {
        whole: n,
        ..container(format!("w{n}"))
    }
}

/// A container that requests percent of network adapters.
pub(crate) fn rdma(percent: u64) -> ContainerRequest {
    ContainerRequest {
        rdma: percent,
        ..container(format!("r{percent}"))
    }
}

/// The network adapter of this minor.
pub(crate) fn adapter(minor: u32) -> OtherDevice {
    OtherDevice {
        device_type: TYPE_RDMA.to_owned(),
        id: format!("0000:{minor:02x}:00.0").parse().unwrap(),
        minor,
        resources: [(RDMA.to_owned(), Quantity::from_unsigned(100))].into(),
        labels: BTreeMap::new(),
        bus_id: None,
        location: PciLocation::default(),
        vf_groups: Vec::new(),
        device_nodes: Vec::new(),
        function_nodes: BTreeMap::new(),
    }
}

/// The same container as an ordinary init container.
pub(crate) fn init(container: ContainerRequest) -> ContainerRequest {
    ContainerRequest {
        kind: ContainerKind::Init,
        ..container
    }
}

/// A bound gpushare pod on GPU 0, assumed at `assumed_at`.
pub(crate) fn pod(name: &str, assumed_at: u64, containers: impl Into<Vec<ContainerRequest>>) -> NodePod {
    let gpushare = GpushareRecord {
        idx: 0,
        pod_units: 0,
        device_units: 0,
        assigned: false,
    };
    NodePod {
        uid: PodUid::from(name),
        namespace: "default".to_owned(),
        name: name.to_owned(),
        stage: PodStage::Bound,
        deleting: false,
        containers: containers.into(),
        placement: Ok(Placement {
            gpus: vec![DeviceName::Minor(0)],
            held: vec![RecordedAmounts::default()],
            others: BTreeMap::new(),
            assumed_at,
            gpushare: Some(gpushare),
            allocations: DeviceAllocations::new(),
        }),
        is_limited: false,
        requests: Requests::default(),
        sees_all: false,
        doubts: Vec::new(),
        constraints: BTreeMap::new(),
        variables: [].into(),
        created: Vec::new(),
    }
}

impl NodePod {
    pub(crate) fn at(self, stage: PodStage) -> Self {
        Self { stage, ..self }
    }

    /// The same pod without a record.
    pub(crate) fn unplaced(self) -> Self {
        Self {
            placement: Err(Unplaced::NoDevice("gpu")),
            ..self
        }
    }

    /// The same pod of gpushare's record, assigned or not.
    pub(crate) fn assigned(mut self, is_assigned: bool) -> Self {
        let placement = self.placement.as_mut().unwrap();
        placement.gpushare.as_mut().unwrap().assigned = is_assigned;
        self
    }

    /// The same pod with these allocations in its record.
    pub(crate) fn recorded(self, assumed_at: u64, allocations: serde_json::Value) -> Self {
        let record = Record {
            allocations: serde_json::from_value(allocations).unwrap(),
            assumed_at: Some(assumed_at),
            gpushare: None,
        };
        Self {
            placement: Placement::of_record(record, assumed_at),
            ..self
        }
    }

    /// The same pod with one virtual function of an adapter.
    pub(crate) fn on_function(self, assumed_at: u64, adapter: &OtherDevice, function: &str) -> Self {
        let entry = json!({
            "minor": adapter.minor, "id": adapter.id.to_string(), "resources": {"koordinator.sh/rdma": "1"},
            "extension": {"vfs": [{"minor": 0, "busID": function}]},
        });
        self.recorded(assumed_at, json!({"rdma": [entry]}))
    }

    /// The same pod on other GPUs.
    pub(crate) fn on(mut self, minors: impl IntoIterator<Item = u32>) -> Self {
        if let Ok(placement) = &mut self.placement {
            placement.gpus = minors.into_iter().map(DeviceName::Minor).collect();
            placement.held = vec![RecordedAmounts::default(); placement.gpus.len()];
        }
        self
    }
}

/// A complete set.
pub(crate) fn pods(all: impl IntoIterator<Item = NodePod>) -> NodePods {
    let mut pods = NodePods::default();
    pods.reset(all);
    pods
}

/// The GPU of this minor, of 16 GiB.
pub(crate) fn gpu(minor: u32) -> Gpu {
    Gpu {
        uuid: format!("GPU-{minor:08x}-aaaa-bbbb-cccc-{minor:012x}")
            .parse()
            .unwrap(),
        minor,
        index: minor,
        memory_bytes: 16 << 30,
        reserved_bytes: 0,
        model: "Tesla T4".to_owned(),
        bus_id: Some(format!("0000:{minor:02x}:00.0")),
        location: PciLocation::default(),
        labels: BTreeMap::new(),
        device_node: format!("/dev/nvidia{minor}").into(),
    }
}

/// A fleet of `n_gpus` healthy GPUs, in GiB units.
pub(crate) fn fleet(n_gpus: u32) -> NodeFleet {
    let gpus: Vec<Gpu> = (0..n_gpus).map(gpu).collect();
    let ids = IdScheme::new(&gpus, 100, MemoryUnit::GIB).unwrap();
    let driver_version = Some("550.54.15".to_owned());
    NodeFleet::new(
        NodeInventory {
            gpus,
            driver_version,
            vendor: "nvidia".to_owned(),
            ..NodeInventory::default()
        },
        ids,
    )
}

/// Settings of a plugin that injects by variable (`envvar`), counts in GiB, and does not wait for pods.
pub(crate) fn settings() -> NodeSettings {
    NodeSettings {
        names: ResourceNames::default().into(),
        memory_unit: MemoryUnit::GIB,
        allocate_wait: Duration::ZERO,
        injection_mode: Some(Mode::Envvar),
        specs: SpecDir::new("/var/run/cdi".into()),
        vendor_specs: VendorSpecs::default(),
        host_root: "/".into(),
        sysfs_root: "/nonexistent".into(),
        device_root: "/".into(),
        own_container: OwnContainer::default(),
        has_runtime_hook: false,
        allows_all_devices: false,
        driver_limits: false,
        hami_core: None,
    }
}

/// A node with these settings and without kubelet, whose devices and pods do not change.
pub(crate) fn node_state(fleet: NodeFleet, pods: NodePods) -> NodeState {
    let (fleet, pods) = (watch::channel(Arc::new(fleet)).1, watch::channel(pods).1);
    NodeState::new(settings(), fleet, pods, Path::new("/nonexistent"))
}

/// An answer to Allocate that sets one variable.
pub(crate) fn says(variable: &str, value: &str) -> ContainerAllocateResponse {
    ContainerAllocateResponse {
        envs: [(variable.to_owned(), value.to_owned())].into(),
        ..ContainerAllocateResponse::default()
    }
}

/// An entry of kubelet's checkpoint, for a container that got an empty answer.
pub(crate) fn allocated(pod: &str, container: &str, resource: ExtendedResource, ids: &[&str]) -> Allocated {
    Allocated {
        pod: PodUid::from(pod),
        container: container.to_owned(),
        resource,
        ids: ids.iter().map(|id| (*id).to_owned()).collect(),
        answer: ContainerAllocateResponse::default(),
    }
}

impl Allocated {
    /// The same entry with another answer.
    pub(crate) fn with(self, answer: ContainerAllocateResponse) -> Self {
        Self { answer, ..self }
    }
}

/// The first container of a pod, on a node without enforcement.
pub(crate) fn recipient(pod: &NodePod) -> Recipient<'_> {
    static NO_LEVELS: LazyLock<Enforcements> = LazyLock::new(Enforcements::default);
    Recipient {
        pod,
        container: &pod.containers[0],
        placement: pod.placement.as_ref().ok(),
        enforcements: &NO_LEVELS,
    }
}
