//! The resources of ours that a pod asks for, by the project whose names it uses. A zero asks for nothing.

use proto::pod::{ALL_DEVICES, Container, Pod};
use proto::resource::{
    FPGA, GPU, GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED, OLD_NAMES, RDMA, ResourceNames,
    VENDOR_GPUS,
};

/// Koordinator's names of shares of GPUs.
const SHARES: [&str; 5] = [GPU_SHARED, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_CORE, GPU];
/// Marks the image of a static pod, which kubelet runs whatever the API server says.
const MIRROR: &str = "kubernetes.io/config.mirror";

/// What a pod, or a container, names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "one for each way of asking, independent of the others"
)]
pub(super) struct Asks {
    /// Memory units.
    pub(super) units: bool,
    /// Koordinator's shares of GPUs, also by their old names.
    pub(super) shares: bool,
    /// RDMA or FPGA, also by their old names.
    pub(super) others: bool,
    /// Whole devices in vendors' names.
    pub(super) vendor: bool,
}

impl Asks {
    /// What a pod's containers name.
    pub(super) fn of(pod: &Pod, names: &ResourceNames) -> Self {
        let containers = pod.spec.init_containers.iter().chain(&pod.spec.containers);
        containers
            .map(|container| Self::of_container(container, names))
            .fold(Self::default(), Self::or)
    }

    /// What a container names.
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

    /// Whether nothing is named.
    pub(super) fn is_empty(self) -> bool {
        self == Self::default()
    }

    /// Whether GPUs are asked for in more than one way, which no scheduler of ours places.
    pub(super) fn mixes(self) -> bool {
        [self.units, self.shares, self.vendor]
            .into_iter()
            .filter(|named| *named)
            .count()
            > 1
    }

    /// Whether a part of a device is asked for.
    pub(super) fn shares_devices(self) -> bool {
        self.units || self.shares
    }
}

/// The annotation by which a pod asks for all devices of its node.
pub(super) fn all_devices(pod: &Pod) -> Option<&str> {
    annotation(pod, ALL_DEVICES)
}

/// Whether the pod is the image of a static one.
pub(super) fn is_mirror(pod: &Pod) -> bool {
    annotation(pod, MIRROR).is_some()
}

/// An annotation of a pod.
pub(super) fn annotation<'a>(pod: &'a Pod, key: &str) -> Option<&'a str> {
    pod.metadata.annotations.as_ref()?.get(key).map(String::as_str)
}
