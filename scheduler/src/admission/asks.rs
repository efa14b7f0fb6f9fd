//! The kinds of device resources that a pod requests. A request of zero is none.

use proto::pod::{ALL_DEVICES, Container, Pod};
use proto::record::{
    BIND_TIMESTAMP, DEVICE_ALLOCATED, GPU_MINORS, MEM_ASSIGNED, MEM_ASSUME_TIME, MEM_DEV, MEM_IDX, MEM_POD,
};
use proto::resource::{
    FPGA, GPU, GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED, OLD_NAMES, RDMA, ResourceNames,
    VENDOR_GPUS,
};

/// Annotations that only a scheduler, and the plugin of the pod's node, write.
pub(super) const RECORD: [&str; 8] = [
    DEVICE_ALLOCATED,
    BIND_TIMESTAMP,
    GPU_MINORS,
    MEM_IDX,
    MEM_POD,
    MEM_DEV,
    MEM_ASSIGNED,
    MEM_ASSUME_TIME,
];
/// Koordinator's names of shares of GPUs.
const SHARES: [&str; 5] = [GPU_SHARED, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_CORE, GPU];
/// Annotation of a mirror pod: kubelet runs its static pod whatever the API server answers.
const MIRROR: &str = "kubernetes.io/config.mirror";

/// The kinds of device resources that a pod, or a container, requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "one for each kind of resource, independent of the others"
)]
pub(super) struct Asks {
    /// GPU memory units.
    pub(super) units: bool,
    /// Koordinator's shares of GPUs, also by their old names.
    pub(super) shares: bool,
    /// RDMA or FPGA, also by their old names.
    pub(super) others: bool,
    /// Whole GPUs, by resources of vendors.
    pub(super) vendor: bool,
}

impl Asks {
    pub(super) fn of(pod: &Pod, names: &ResourceNames) -> Self {
        let containers = pod.spec.init_containers.iter().chain(&pod.spec.containers);
        containers
            .map(|container| Self::of_container(container, names))
            .fold(Self::default(), Self::or)
    }

    pub(super) fn of_container(container: &Container, names: &ResourceNames) -> Self {
        let is_old = |wanted: &[&str]| {
            OLD_NAMES
                .iter()
                .any(|(old, new)| wanted.contains(new) && container.asks_for(old))
        };
        let names_one = |wanted: &[&str]| wanted.iter().any(|name| container.asks_for(name));
        Self {
            units: container.asks_for(&names.memory),
            shares: names_one(&SHARES) || is_old(&SHARES),
            others: names_one(&[RDMA, FPGA]) || is_old(&[RDMA, FPGA]),
            vendor: VENDOR_GPUS.iter().any(|name| container.asks_for(name)),
        }
    }

    fn or(self, other: Self) -> Self {
        Self {
            units: self.units || other.units,
            shares: self.shares || other.shares,
            others: self.others || other.others,
            vendor: self.vendor || other.vendor,
        }
    }

    pub(super) fn is_empty(self) -> bool {
        self == Self::default()
    }

    /// Returns true if GPUs are requested in more than one way, which the filter refuses.
    pub(super) fn mixes(self) -> bool {
        [self.units, self.shares, self.vendor]
            .into_iter()
            .filter(|named| *named)
            .count()
            > 1
    }

    /// Returns true if a part of a GPU is requested.
    pub(super) fn shares_devices(self) -> bool {
        self.units || self.shares
    }
}

/// The annotation by which a pod requests to see all devices of its node.
pub(super) fn all_devices(pod: &Pod) -> Option<&str> {
    annotation(pod, ALL_DEVICES)
}

pub(super) fn is_mirror(pod: &Pod) -> bool {
    annotation(pod, MIRROR).is_some()
}

pub(super) fn annotation<'a>(pod: &'a Pod, key: &str) -> Option<&'a str> {
    pod.metadata.annotations.as_ref()?.get(key).map(String::as_str)
}
