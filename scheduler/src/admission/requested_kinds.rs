//! The kinds of device resources that a pod requests. A request of zero is none.

use proto::pod::{Container, MIRROR, Pod};
use proto::record::{
    BIND_TIMESTAMP, DEVICE_ALLOCATED, GPU_MINORS, MEM_ASSIGNED, MEM_ASSUME_TIME, MEM_DEV, MEM_IDX, MEM_POD,
};
use proto::resource::{FPGA, GPU_SHARES, OLD_NAMES, RDMA, ResourceNames, VENDOR_GPUS};

/// The annotations of the allocation record, which only a scheduler and the plugin of the pod's node write.
// A new pod with one of them would be counted for devices that the scheduler has not given it.
pub(super) const RECORD_ANNOTATIONS: [&str; 8] = [
    DEVICE_ALLOCATED,
    BIND_TIMESTAMP,
    GPU_MINORS,
    MEM_IDX,
    MEM_POD,
    MEM_DEV,
    MEM_ASSIGNED,
    MEM_ASSUME_TIME,
];

/// The kinds of device resources that a pod, or a container, requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "one for each kind of resource, independent of the others"
)]
pub(super) struct RequestedKinds {
    pub(super) memory_units: bool,
    /// True for Koordinator's shares of GPUs, also by their old names.
    pub(super) gpu_shares: bool,
    /// True for RDMA or FPGA, also by their old names. Pods request them beside GPUs, or alone.
    pub(super) rdma_or_fpga: bool,
    /// True for whole GPUs, by resources of vendors.
    pub(super) vendor_gpus: bool,
}

impl RequestedKinds {
    /// The kinds of device resources that any of these containers requests.
    pub(super) fn of_containers<'a>(
        containers: impl Iterator<Item = &'a Container>,
        names: &ResourceNames,
    ) -> Self {
        let mut kinds = Self::default();
        for container in containers {
            kinds.memory_units |= container.asks_for(&names.memory);
            kinds.gpu_shares |= requests_any(container, &GPU_SHARES);
            kinds.rdma_or_fpga |= requests_any(container, &[RDMA, FPGA]);
            kinds.vendor_gpus |= requests_any(container, &VENDOR_GPUS);
        }
        kinds
    }

    pub(super) fn of_pod(pod: &Pod, names: &ResourceNames) -> Self {
        Self::of_containers(pod.spec.all_containers(), names)
    }

    pub(super) fn is_empty(self) -> bool {
        self == Self::default()
    }

    /// Returns true if GPUs are requested in more than one way, which the filter refuses.
    pub(super) fn mixes_gpu_requests(self) -> bool {
        // RDMA and FPGA go with any way to request GPUs.
        u8::from(self.memory_units) + u8::from(self.gpu_shares) + u8::from(self.vendor_gpus) > 1
    }

    pub(super) fn shares_devices(self) -> bool {
        self.memory_units || self.gpu_shares
    }
}

/// Returns true if a container requests one of these resources, by its current or its old name.
fn requests_any(container: &Container, resources: &[&str]) -> bool {
    for (old, new) in OLD_NAMES {
        // The mutating webhook renames old resources, but the validating webhook may run without the mutating one.
        if resources.contains(&new) && container.asks_for(old) {
            return true;
        }
    }
    resources.iter().any(|resource| container.asks_for(resource))
}

/// Returns true for a mirror pod: the copy that kubelet writes of a static pod, which runs whatever the API server answers.
pub(super) fn is_mirror(pod: &Pod) -> bool {
    pod.annotation(MIRROR).is_some()
}
