//! The demand of a pod for a node: devices, CPU, memory and constraints.

use std::sync::Arc;

use placement::{
    Constraints, DeviceRequest, DeviceType, HostAmounts, LimitLevel, NodeRequest, Policies, Reason,
    RequestedGpus, RequestedMemory, ShareRequest,
};
use proto::memory_text::{memory_text, units_text};
use proto::memory_unit::MemoryUnit;
use proto::request::hints::{ALLOCATE_HINT, DemandedEnforcement, JOINT_ALLOCATE, unknown_device_type};
use proto::request::{self, Dialect, GpuRequest, Memory, RequestError};

use super::cluster::Cluster;
use crate::accounting::{self, PodFacts};

/// Bytes below which [`request::refuse_other_unit`] refuses no memory units: a thousand times 1 GiB, the least memory of a GPU.
const LEAST_SUSPICIOUS: u64 = 1000 << 30;

/// The demand of a pod for a node.
#[derive(Clone, Debug, Default)]
pub struct ResourceDemand<'a> {
    /// UID of the pod, so that room that is kept for the pod itself (its hint) does not count as taken.
    pub uid: &'a str,
    /// The GPUs.
    pub gpus: RequestedGpus,
    /// Devices of other types.
    pub others: Vec<DeviceRequest>,
    /// The constraints on its devices, if there are any.
    pub constraints: Option<Arc<Constraints>>,
    /// True if no amount of GPU memory is in bytes or percent, so that the demand also fits nodes whose memory unit is unknown.
    pub in_units: bool,
    /// The size of a memory unit in bytes, if it is the same on all nodes: refusals say amounts of units with it.
    pub unit: Option<u64>,
    /// The isolation provider that the node must have.
    pub isolation: Option<Box<str>>,
    /// The policies for nodes and devices.
    pub policies: Policies,
    /// CPU and memory, which refuse no node.
    pub host: HostAmounts,
}

impl<'a> ResourceDemand<'a> {
    /// The demand of a pod, which is compared with nodes; `None` if the pod requests no device.
    ///
    /// # Errors
    /// The rule that its request breaks on every node.
    pub(super) fn of_pod(
        cluster: &Cluster,
        uid: &'a str,
        facts: &PodFacts,
    ) -> Result<Option<Self>, RequestError> {
        let request = match &facts.request {
            accounting::ParsedRequest::Valid(request) => request,
            accounting::ParsedRequest::Invalid(error, _) => return Err((**error).clone()),
        };
        let gpus = request.gpus.as_ref();
        if !cluster.allows_all_devices && gpus.is_some_and(|gpus| gpus.dialect == Dialect::AllDevices) {
            return Err(RequestError::AllDevicesForbidden);
        }
        let others = cluster.kinds.requests(&request.others);
        if gpus.is_none() && others.is_empty() {
            return Ok(None);
        }
        let mut constraints = facts.constraints.clone().map_err(|error| (*error).clone())?;
        // A bound pod has its devices, so that a request which looks like a mistake refuses nothing.
        if facts.bound.is_none() {
            refuse_other_unit(cluster, gpus)?;
            refuse_unknown_types(cluster, constraints.as_deref())?;
        }
        // A pod with whole GPUs needs no limit, as it shares them with no other.
        let demanded = facts.preference.enforcement_or(cluster.enforcement);
        if demanded == DemandedEnforcement::Driver && gpus.is_some_and(GpuRequest::is_shared) {
            let mut demanding = constraints.as_deref().cloned().unwrap_or_default();
            demanding.limits = LimitLevel::Driver;
            constraints = Some(Arc::new(demanding));
        }
        // On a node whose memory unit is unknown, bytes and percent cannot be compared with the node's amounts.
        let counts_bytes = gpus.is_some_and(|gpus| {
            gpus.dialect == Dialect::Koordinator && !matches!(gpus.memory, Memory::Units(_))
        });
        let gpus = gpus.map(accounting::requested_gpus).unwrap_or_default();
        Ok(Some(Self {
            uid,
            gpus,
            others,
            constraints,
            in_units: !counts_bytes,
            unit: cluster.common_unit(),
            isolation: facts.needed_isolation().map(Into::into),
            policies: facts.preference.or(cluster.policies),
            host: facts.host,
        }))
    }

    /// Returns true if two pods demand the same devices, CPU and memory, by the same policies.
    pub(super) fn is_alike(&self, other: &ResourceDemand<'_>) -> bool {
        self.devices() == other.devices() && self.policies == other.policies
    }

    /// The same demand without the pod's UID, so that no hint counts as its own.
    pub(super) fn for_no_pod(&self) -> ResourceDemand<'static> {
        ResourceDemand {
            uid: "",
            gpus: self.gpus,
            others: self.others.clone(),
            constraints: self.constraints.clone(),
            in_units: self.in_units,
            unit: self.unit,
            isolation: self.isolation.clone(),
            policies: self.policies,
            host: self.host,
        }
    }

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

    /// The text of a refusal by devices, as kube-scheduler and people get it. kube-scheduler counts nodes with equal texts, so
    /// that it has amounts of the request alone, which are the same on every node.
    pub fn refusal(&self, reason: Reason) -> String {
        match self.asked_part(reason) {
            Some(asked) => format!("{reason} (asked: {asked})"),
            None => reason.as_str().to_owned(),
        }
    }

    /// The part of the demand that a reason is about, in words; `None` for a reason that is about no amount.
    fn asked_part(&self, reason: Reason) -> Option<String> {
        match reason {
            Reason::Unhealthy
            | Reason::Closed
            | Reason::Memory
            | Reason::Core
            | Reason::Slots
            | Reason::TooFew
            | Reason::TooLarge
            | Reason::Vendor
            | Reason::Partition
            | Reason::Together
            | Reason::Selected => asked_gpus(self.gpus, self.unit).or_else(|| self.asked_others()),
            Reason::OtherDevices => self.asked_others(),
            Reason::NoIsolationProvider => self.isolation.as_deref().map(str::to_owned),
            Reason::NoDevice
            | Reason::UnitUnknown
            | Reason::PartitionsUnreadable
            | Reason::Unlimited
            | Reason::LimitedByLibrary
            | Reason::PluginAway
            | Reason::InvalidRequest => None,
        }
    }

    /// The devices in words, such as `8 GiB of one GPU`.
    pub fn asked(&self) -> String {
        let asked = asked_gpus(self.gpus, self.unit).or_else(|| self.asked_others());
        asked.unwrap_or_else(|| "no device".to_owned())
    }

    /// The devices of other types than GPU, by their resources; `None` if the demand has none.
    fn asked_others(&self) -> Option<String> {
        let mut parts = Vec::new();
        for request in &self.others {
            for (resource, amount) in &request.amounts {
                parts.push(format!("{amount} of {resource}"));
            }
        }
        (!parts.is_empty()).then(|| parts.join(", "))
    }

    /// Returns true if the pod requests devices, and not CPU and memory alone.
    pub fn has_devices(&self) -> bool {
        self.gpus != RequestedGpus::Nothing || !self.others.is_empty()
    }

    /// Returns true if only a node fits whose devices are known.
    pub(super) fn needs_known_devices(&self) -> bool {
        // Whole GPUs without constraints may be the vendor plugin's, on nodes without a Device object.
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
        let Some(joint) = &constraints.joint else {
            return false;
        };
        // One device alone needs no switch in common with others.
        joint.same_switch && joint.kinds.iter().filter(|kind| self.requests(kind)).count() > 1
    }

    /// The number of GPUs that the pod gets, at least 1.
    pub fn n_gpus(&self) -> u32 {
        self.gpus.n_gpus().unwrap_or(1)
    }

    fn requests(&self, kind: &DeviceType) -> bool {
        match kind {
            DeviceType::Gpu => self.gpus != RequestedGpus::Nothing,
            DeviceType::Other(_) => self.others.iter().any(|request| request.kind == *kind),
        }
    }
}

/// Refuses memory units whose number was probably meant in another unit.
fn refuse_other_unit(cluster: &Cluster, gpus: Option<&GpuRequest>) -> Result<(), RequestError> {
    let Some(Memory::Units(units)) = gpus.map(|gpus| gpus.memory) else {
        return Ok(());
    };
    let unit = cluster.common_unit();
    // Practically all requests end before the look at every GPU below.
    let bytes = units.saturating_mul(unit.unwrap_or(MemoryUnit::MIB.bytes()));
    if bytes < LEAST_SUSPICIOUS {
        return Ok(());
    }
    request::refuse_other_unit(units, cluster.largest_gpu_in_units(), unit, &cluster.names)
}

/// Refuses constraints on device types that Koordinator does not define and no node has.
fn refuse_unknown_types(cluster: &Cluster, constraints: Option<&Constraints>) -> Result<(), RequestError> {
    let Some(constraints) = constraints else {
        return Ok(());
    };
    let known = cluster.kinds.names();
    let by_kind = constraints.by_kind.iter().map(|(kind, _)| (ALLOCATE_HINT, kind));
    let joint = constraints.joint.iter().flat_map(|joint| &joint.kinds);
    for (key, kind) in by_kind.chain(joint.map(|kind| (JOINT_ALLOCATE, kind))) {
        if !known.contains(kind.as_str()) {
            let known = Vec::from_iter(known);
            return Err(unknown_device_type(key, kind.as_str(), &known));
        }
    }
    Ok(())
}

/// The GPUs of a demand in words, such as `8 GiB of one GPU`; `None` if it asks for none.
fn asked_gpus(gpus: RequestedGpus, unit: Option<u64>) -> Option<String> {
    match gpus {
        RequestedGpus::Nothing => None,
        RequestedGpus::All { .. } => Some("sight of all GPUs".to_owned()),
        RequestedGpus::Whole(1) => Some("1 whole GPU".to_owned()),
        RequestedGpus::Whole(n) => Some(format!("{n} whole GPUs")),
        RequestedGpus::Share(share) => {
            let amounts = amounts_of_one(share, unit);
            Some(match share.devices {
                1 => format!("{amounts} of one GPU"),
                n => format!("{amounts} of each of {n} GPUs"),
            })
        }
    }
}

/// The amounts that a share takes of one GPU.
fn amounts_of_one(share: ShareRequest, unit: Option<u64>) -> String {
    let memory = match share.memory {
        RequestedMemory::Bytes(bytes) => memory_text(bytes),
        RequestedMemory::Units(units) => units_text(units, unit),
        RequestedMemory::Ratio(percent) => format!("{percent} % of the memory"),
    };
    match share.core {
        0 => memory,
        core => format!("{memory} and {core} % core"),
    }
}

/// Returns true if a pod requests devices, in a valid request or not.
pub(super) fn requests_devices(cluster: &Cluster, facts: &PodFacts) -> bool {
    // The UID matters only for the pod's own hint, which this check does not read.
    !matches!(ResourceDemand::of_pod(cluster, "", facts), Ok(None))
}
