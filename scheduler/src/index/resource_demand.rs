//! The demand of a pod for a node: devices, CPU, memory and constraints.

use std::sync::Arc;

use placement::{Constraints, DeviceRequest, DeviceType, HostAmounts, NodeRequest, Policies, RequestedGpus};

/// The demand of a pod for a node.
#[derive(Clone, Debug, Default)]
pub struct ResourceDemand<'a> {
    /// UID of the pod, so that its own hint does not count against it.
    pub uid: &'a str,
    /// The GPUs.
    pub gpus: RequestedGpus,
    /// Devices of other types.
    pub others: Vec<DeviceRequest>,
    /// The constraints on its devices, if there are any.
    pub constraints: Option<Arc<Constraints>>,
    /// True if no amount of GPU memory is in bytes or percent, so that the demand also fits nodes whose memory unit is unknown.
    pub in_units: bool,
    /// The isolation provider that the node must have.
    pub isolation: Option<Box<str>>,
    /// The policies for nodes and devices.
    pub policies: Policies,
    /// CPU and memory, which refuse no node.
    pub host: HostAmounts,
}

impl ResourceDemand<'_> {
    /// Converts the request to the engine's type.
    #[inline]
    pub fn devices(&self) -> NodeRequest<'_> {
        NodeRequest {
            gpus: self.gpus,
            others: &self.others,
            constraints: self.constraints.as_deref(),
            host: self.host,
        }
    }

    /// Returns true if the pod requests devices, and not CPU and memory alone.
    pub fn has_devices(&self) -> bool {
        self.gpus != RequestedGpus::Nothing || !self.others.is_empty()
    }

    /// Returns true if only nodes fit that are known to have devices.
    pub(super) fn needs_known_devices(&self) -> bool {
        // Whole GPUs without constraints may be the vendor plugin's, on nodes of which no Device object says anything.
        let constraints = self.constraints.as_deref();
        matches!(self.gpus, RequestedGpus::Share(_) | RequestedGpus::All { .. })
            || constraints.is_some_and(|constraints| self.demands(constraints))
    }

    /// Returns true if constraints demand properties of requested devices, and do not only prefer some.
    fn demands(&self, constraints: &Constraints) -> bool {
        if constraints.partition.is_some() && self.requests(&DeviceType::Gpu) {
            return true;
        }
        for (kind, _) in &constraints.by_kind {
            if self.requests(kind) {
                return true;
            }
        }
        let mut n_joined = 0;
        for joint in constraints.joint.iter().filter(|joint| joint.same_switch) {
            n_joined += joint.kinds.iter().filter(|kind| self.requests(kind)).count();
        }
        // One device alone is on the same switch as itself.
        n_joined > 1
    }

    /// Returns true if the pod requests devices of this type.
    fn requests(&self, kind: &DeviceType) -> bool {
        match kind {
            DeviceType::Gpu => self.gpus != RequestedGpus::Nothing,
            DeviceType::Other(_) => self.others.iter().any(|request| request.kind == *kind),
        }
    }
}
