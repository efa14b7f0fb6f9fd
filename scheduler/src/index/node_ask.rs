//! The request of a pod for nodes, and the best nodes for it.

use std::sync::Arc;

use placement::{Constraints, DeviceKind, DeviceRequest, HostAmounts, NodeRequest, Policies, RequestedGpus};

/// The request of a pod for nodes.
#[derive(Clone, Debug, Default)]
pub struct NodeAsk<'a> {
    /// UID of the pod, so that its own hint does not count against it.
    pub uid: &'a str,
    /// The GPUs.
    pub gpus: RequestedGpus,
    /// Devices of other types.
    pub others: Vec<DeviceRequest>,
    /// The constraints on its devices, if there are any.
    pub wishes: Option<Arc<Constraints>>,
    /// True if it does not depend on the size of a memory unit.
    pub in_units: bool,
    /// The isolation provider that the node must have.
    pub isolation: Option<Box<str>>,
    /// The policies for nodes and devices.
    pub policies: Policies,
    /// CPU and memory, which refuse no node.
    pub host: HostAmounts,
}

/// One of the best nodes for a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leader {
    /// The node.
    pub name: Box<str>,
    /// What it scores, from 0 to 10.
    pub tenths: u8,
    /// The terms of what it costs to place the pod there, in thousandths of a GPU, where the policy is one that looks ahead: less
    /// that pods to come would fill, more that is useless to them, less that whole idle GPUs are worth.
    pub cost: Option<[i64; 3]>,
}

impl NodeAsk<'_> {
    /// Converts the request to the engine's type.
    #[inline]
    pub fn devices(&self) -> NodeRequest<'_> {
        NodeRequest {
            gpus: self.gpus,
            others: &self.others,
            constraints: self.wishes.as_deref(),
            host: self.host,
        }
    }

    /// Returns true if it requests devices, and not CPU and memory alone.
    pub fn asks_for_devices(&self) -> bool {
        self.gpus != RequestedGpus::Nothing || !self.others.is_empty()
    }

    /// Returns true if only nodes fit that are known to have devices.
    pub(super) fn needs_known_devices(&self) -> bool {
        matches!(self.gpus, RequestedGpus::Share(_) | RequestedGpus::All { .. })
            || self.wishes.as_deref().is_some_and(|wishes| self.demands(wishes))
    }

    /// Returns true if constraints demand properties of requested devices, and do not only prefer some.
    fn demands(&self, wishes: &Constraints) -> bool {
        let is_asked_for = |kind: &DeviceKind| match kind {
            DeviceKind::Gpu => self.gpus != RequestedGpus::Nothing,
            DeviceKind::Other(kind) => self.others.iter().any(|request| request.kind == *kind),
        };
        let joined = wishes
            .joint
            .iter()
            .filter(|joint| joint.same_switch)
            .flat_map(|joint| &joint.kinds);
        wishes.by_kind.iter().any(|(kind, _)| is_asked_for(kind))
            || (wishes.partition.is_some() && is_asked_for(&DeviceKind::Gpu))
            || joined.filter(|kind| is_asked_for(kind)).count() > 1
    }
}
