//! Builders of pods and devices for tests.

use std::collections::BTreeMap;

use proto::device::TYPE_RDMA;
use proto::memory_unit::MemoryUnit;
use proto::quantity::Quantity;
use proto::record::{DeviceAllocations, GpushareRecord};
use proto::request::{ContainerKind, ContainerRequest};
use proto::resource::RDMA;

use crate::devices::device_ids::IdScheme;
use crate::devices::fleet::{DeviceName, NodeFleet};
use crate::devices::inventory::{Gpu, NodeInventory, OtherDevice, PciLocation};
use crate::node::pods::{NodePod, NodePods, Placement, PodStage, PodUid, RecordedAmounts, Requests};

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
        warning: None,
        hints: BTreeMap::new(),
        variables: [].into(),
        created: Vec::new(),
    }
}

impl NodePod {
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
