//! The devices that a pod requests and holds, in the engine's terms: by its spec, its allocation record (the annotations that
//! name its devices), and the reports of its node's plugin. Pure.
//!
//! A bound pod that requests devices holds what it requests, and never more on account of its record. If the record names too
//! little, every device that the pod may use is charged; on a node whose plugin lets no container start on a device without room,
//! only as many GPUs as it requests: those with the most room. It holds nothing if such a plugin reports it without devices.

use std::collections::BTreeMap;
use std::sync::Arc;

use placement::{
    Constraints, Device, DevicePolicy, DeviceRef, DeviceType, Holdings, HostAmounts, Inventory, NamedAmounts,
    NodePolicy, Policies, RequestedGpus, RequestedMemory, ShareRequest,
};
use proto::device::VirtualFunction;
use proto::pod::{Container, Pod, QuantityText};
use proto::quantity::Quantity;
use proto::record::{DeviceAllocation, DeviceAllocations, GpushareRecord, Record};
use proto::request::hints::{self, DemandedEnforcement};
use proto::request::{Dialect, GpuRequest, Memory, PodRequest, RequestError};
use proto::resource::{
    FPGA, GPU, GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED, HAMI_CORE, HAMI_NODE, ISOLATION_PROVIDER,
    RDMA, ResourceNames, WHOLE_PERCENT, canonical, is_gpu_resource,
};
use proto::totals::HostResources;

pub mod constraints;
pub(crate) mod hold;
pub(crate) mod kubelet_allocations;
mod others;
mod shares;

use crate::accounting::kubelet_allocations::AllocatedDevice;
use crate::inventory::device_types::DeviceTypes;

/// The fields that the scheduler keeps of a pod that requests devices. They are small, as a cluster has very many pods.
#[derive(Clone, Debug, PartialEq)]
pub struct PodFacts {
    /// Namespace.
    pub namespace: Box<str>,
    /// Name.
    pub name: Box<str>,
    pub(crate) request: ParsedRequest,
    /// The constraints of the pod's annotations on its devices; `None` without any, an error if they cannot be read.
    pub(crate) constraints: Result<Option<Arc<Constraints>>, Arc<RequestError>>,
    pub(crate) host: HostAmounts,
    pub(crate) preference: Preference,
    /// The provider of limits at run time that the pod's label [`ISOLATION_PROVIDER`] names, if the pod requests GPUs.
    pub(crate) isolation: Option<Box<str>>,
    /// `None` until the pod is bound.
    pub(crate) bound: Option<Box<Bound>>,
}

/// The policies for nodes and devices, and the enforcement of limits, that a pod's own annotations ask for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Preference {
    node: Option<NodePolicy>,
    device: Option<DevicePolicy>,
    enforcement: Option<DemandedEnforcement>,
}

/// The request of a pod for devices.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ParsedRequest {
    /// A valid request, which is empty if only the record of the pod names devices. Also that of a bound pod with invalid amounts
    /// of RDMA or FPGA, which counts as a whole device of each.
    Valid(PodRequest),
    /// An invalid request, and the amounts in it.
    Invalid(Box<RequestError>, UpperBounds),
}

/// The GPU amounts of an invalid request, summed up over its containers: memory in memory units, in bytes and in percent of a
/// GPU, compute in percent, and the number of shared GPUs. kubelet cannot allocate more than these.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct UpperBounds {
    /// True if every amount could be read, and none is of whole GPUs.
    is_known: bool,
    units: u64,
    bytes: u64,
    ratio: u64,
    core: u64,
    shared: u64,
}

/// A bound pod's node and record.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Bound {
    pub(crate) node: Box<str>,
    pub(crate) record: Recorded,
    /// The assume time in the record, in unix nanoseconds.
    pub(crate) assumed_at: Option<u64>,
}

/// The allocation record in a pod's annotations.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Recorded {
    Missing,
    /// A record that cannot be parsed, with the reason.
    Unreadable(Box<str>),
    Devices {
        /// The parts, those of GPUs first.
        parts: Box<[RecordedPart]>,
        /// The pod's amount in memory units at its placement, if it was placed by units.
        units: Option<GpushareRecord>,
    },
    /// Only the annotations of gpushare-scheduler-extender: one GPU by minor, and an amount in memory units.
    Gpushare(GpushareRecord),
}

/// The part of one device that a record gives to its pod.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RecordedPart {
    kind: DeviceType,
    device: DeviceRef,
    /// Memory of a GPU in bytes, if the record names it.
    bytes: Option<u64>,
    /// Memory in percent of a GPU.
    ratio: u32,
    /// Compute in percent of a GPU.
    core: u32,
    /// Amounts of the named resources of a device of another type.
    resources: NamedAmounts,
    /// Virtual functions (SR-IOV) of a device of another type.
    functions: Box<[VirtualFunction]>,
}

/// The facts about a pod's node that decide, together with the pod's own, which devices the pod holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NodeContext<'a> {
    /// `None` while it is not known.
    pub(crate) inventory: Option<&'a Inventory>,
    pub(crate) kinds: &'a DeviceTypes,
    /// The devices that kubelet allocated to the pod, if another scheduler placed it.
    pub(crate) allocated: &'a [AllocatedDevice],
    /// True if pods may see all devices of their node without holding any.
    pub(crate) allows_all_devices: bool,
    pub(crate) report: PluginReport,
}

impl<'a> NodeContext<'a> {
    /// The GPU of the node that a record identifies by UUID or minor; `None` if the node is not known to have it.
    fn gpu(&self, gpu: &DeviceRef) -> Option<&'a Device> {
        self.inventory?.find(&DeviceType::Gpu, gpu)
    }

    /// The problem of a record that names a device which the node does not have; `None` if the node has the device, or if the
    /// devices of its type are not known.
    fn absent(&self, kind: &DeviceType, device: &DeviceRef) -> Option<String> {
        let inventory = self.inventory?;
        // As long as the node reports no devices of other types, the record cannot be wrong about them.
        let is_reported = *kind == DeviceType::Gpu || inventory.other_devices.is_some();
        if !is_reported || inventory.find(kind, device).is_some() {
            return None;
        }
        let device = device_name(kind, device);
        Some(format!("its record names {device}, which the node does not have"))
    }
}

/// The standing of a pod in the list of pods without devices that its node's plugin reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum PluginReport {
    /// The plugin of the node reports no pods without devices at all: it is another project's, or an old version of ours.
    #[default]
    Silent,
    /// The plugin reports pods without devices, and not this one. It lets no container start on a device without room.
    Pending,
    /// The pod was allocated no device.
    NoDevices,
}

/// The devices that a pod holds, and the doubts about them.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Account {
    pub(crate) holdings: Holdings,
    /// The reason for which the pod is counted conservatively, or the fault of its record.
    pub(crate) problem: Option<String>,
    /// True if its record names more than it requests, or other devices than kubelet allocated.
    pub(crate) contradicts: bool,
}

impl PodFacts {
    /// Reads a pod; `None` if it neither requests nor holds devices.
    pub fn of(pod: &Pod, names: &ResourceNames) -> Option<Self> {
        let node = pod.spec.node_name.as_deref().filter(|node| !node.is_empty());
        let bound = node.map(|node| Box::new(Bound::read(node, pod.metadata.annotations.as_ref())));
        // A bound pod may have been admitted under older rules; refusing its request would not stop it.
        let request = if bound.is_some() {
            PodRequest::read(pod, names)
        } else {
            PodRequest::read_new(pod, names)
        };
        // A pod without a request may still hold the devices of its record, if another project's runtime hook has injected them.
        let record = bound.as_ref().map(|bound| &bound.record);
        let is_recorded = matches!(record, Some(Recorded::Devices { .. }));
        let request = match request {
            Ok(None) if !is_recorded => return None,
            Ok(request) => ParsedRequest::Valid(request.unwrap_or_default()),
            Err(_) if bound.is_some() && gpu_amounts(pod, names).next().is_none() => {
                ParsedRequest::Valid(whole_others(pod))
            }
            Err(error) => ParsedRequest::Invalid(Box::new(error), UpperBounds::read(pod, names)),
        };
        let labels = pod.metadata.labels.as_ref().filter(|_| request.gpus().is_some());
        let isolation = labels.and_then(|labels| labels.get(ISOLATION_PROVIDER));
        let constraints = if bound.is_some() {
            Ok(constraints::read_placed(pod))
        } else {
            constraints::read(pod)
        };
        Some(Self {
            namespace: pod.metadata.namespace.as_deref().unwrap_or_default().into(),
            name: pod.metadata.name.as_deref().unwrap_or_default().into(),
            request,
            constraints,
            host: host_amounts(HostResources::of_pod(pod)),
            preference: Preference::read(pod),
            isolation: isolation.map(|provider| provider.as_str().into()),
            bound,
        })
    }

    /// [`Self::isolation`], if the pod shares GPUs: whole GPUs need no limits.
    pub(crate) fn needed_isolation(&self) -> Option<&str> {
        let is_shared = self.request.gpus().is_some_and(GpuRequest::is_shared);
        self.isolation.as_deref().filter(|_| is_shared)
    }

    /// The labels by which other projects find a pod on this node.
    pub fn labels_on(&self, node: &str) -> BTreeMap<String, String> {
        let mut labels = BTreeMap::new();
        // HAMi's monitor finds the pods of its node by this label.
        if self.isolation.as_deref() == Some(HAMI_CORE) {
            labels.insert(HAMI_NODE.to_owned(), node.to_owned());
        }
        labels
    }
}

impl Preference {
    /// Reads the annotations of a pod. Values that name no policy or enforcement are ignored here: the parser of the request
    /// (`PodRequest::read_new`) refuses a new pod that asks for GPUs, RDMA or FPGA with such a value.
    fn read(pod: &Pod) -> Self {
        let node = pod.annotation(hints::NODE_POLICY);
        let device = pod.annotation(hints::DEVICE_POLICY);
        Self {
            node: node.and_then(|name| name.parse().ok()),
            device: device.and_then(|name| name.parse().ok()),
            enforcement: hints::enforcement(pod),
        }
    }

    pub(crate) fn enforcement_or(self, cluster: DemandedEnforcement) -> DemandedEnforcement {
        self.enforcement.unwrap_or(cluster)
    }

    /// These policies, or else those of the cluster.
    pub(crate) fn or(self, cluster: Policies) -> Policies {
        Policies {
            node: self.node.unwrap_or(cluster.node),
            device: self.device.unwrap_or(cluster.device),
        }
    }
}

impl ParsedRequest {
    pub(crate) fn gpus(&self) -> Option<&GpuRequest> {
        match self {
            Self::Valid(request) => request.gpus.as_ref(),
            Self::Invalid(..) => None,
        }
    }

    /// Amounts of resources other than GPUs.
    pub(crate) fn others(&self) -> &[(String, u64)] {
        match self {
            Self::Valid(request) => &request.others,
            Self::Invalid(..) => &[],
        }
    }
}

/// The amounts of GPU resources in all containers of a pod, init containers included.
fn gpu_amounts<'a>(
    pod: &'a Pod,
    names: &'a ResourceNames,
) -> impl Iterator<Item = (&'a String, &'a QuantityText)> {
    let amounts = pod.spec.all_containers().flat_map(Container::quantities);
    amounts.filter(|(name, _)| is_gpu_resource(name, names))
}

impl UpperBounds {
    /// Sums up the GPU amounts of all containers: with init containers the sum may be more than the pod holds at one time.
    fn read(pod: &Pod, names: &ResourceNames) -> Self {
        let mut sums = Self {
            is_known: true,
            ..Self::default()
        };
        for (name, text) in gpu_amounts(pod, names) {
            let Some(amount) = text.quantity().ok().and_then(Quantity::unsigned) else {
                sums.is_known = false;
                continue;
            };
            let sum = match canonical(name) {
                GPU_MEMORY => &mut sums.bytes,
                GPU_MEMORY_RATIO => &mut sums.ratio,
                GPU_CORE => &mut sums.core,
                GPU_SHARED => &mut sums.shared,
                GPU => {
                    // Koordinator's resource for both: as many percent of memory as of computing power.
                    sums.core = sums.core.saturating_add(amount);
                    &mut sums.ratio
                }
                name if name == names.memory => &mut sums.units,
                _ => {
                    sums.is_known &= amount == 0;
                    continue;
                }
            };
            *sum = sum.saturating_add(amount);
        }
        sums
    }

    /// The request that the pod counts as: the sums divided among its shared GPUs, or one whole GPU if not all amounts are known.
    pub(crate) fn request(self, inventory: Option<&Inventory>) -> ShareRequest {
        let devices = u32::try_from(self.shared.max(1)).unwrap_or(u32::MAX);
        let n = u64::from(devices);
        let memory = match (self.units, self.bytes, self.ratio) {
            _ if !self.is_known => return WHOLE_DEVICE,
            (0, bytes, 0) => RequestedMemory::Bytes(bytes.div_ceil(n)),
            (units, 0, 0) => RequestedMemory::Units(units.div_ceil(n)),
            (0, 0, ratio) => RequestedMemory::Ratio(percent(ratio.div_ceil(n))),
            // Units, bytes and percent are added up in bytes, by the node's unit and its largest GPU.
            (units, bytes, ratio) => {
                let Some(inventory) = inventory else {
                    return WHOLE_DEVICE;
                };
                let largest = inventory.gpus.iter().map(|gpu| gpu.memory_bytes).max();
                let (Some(unit), Some(largest)) = (inventory.unit_bytes, largest) else {
                    return WHOLE_DEVICE;
                };
                let by_ratio = u128::from(largest) * u128::from(ratio) / 100;
                let by_ratio = u64::try_from(by_ratio).unwrap_or(u64::MAX);
                let by_units = units.saturating_mul(unit);
                let sum = by_units.saturating_add(bytes).saturating_add(by_ratio);
                RequestedMemory::Bytes(sum.div_ceil(n))
            }
        };
        ShareRequest {
            devices,
            memory,
            core: percent(self.core.div_ceil(n)),
            slots: u32::from(self.shared > 0),
        }
    }
}

/// A whole GPU: the request that a pod counts as if the amounts of its own request cannot be read.
const WHOLE_DEVICE: ShareRequest = ShareRequest {
    devices: 1,
    memory: RequestedMemory::Ratio(100),
    core: 0,
    slots: 0,
};

/// The request that a pod with invalid amounts of RDMA or FPGA counts as: a whole device of each type that it names.
fn whole_others(pod: &Pod) -> PodRequest {
    let mut others = Vec::new();
    for resource in [FPGA, RDMA] {
        let mut amounts = pod.spec.all_containers().flat_map(Container::quantities);
        if amounts.any(|(name, _)| name == resource) {
            others.push((resource.to_owned(), WHOLE_PERCENT));
        }
    }
    PodRequest { gpus: None, others }
}

impl Bound {
    pub(crate) fn read(node: &str, annotations: Option<&BTreeMap<String, String>>) -> Self {
        let (record, assumed_at) = match annotations.map(Record::read) {
            None | Some(Ok(None)) => (Recorded::Missing, None),
            Some(Ok(Some(record))) => (Recorded::of(&record), record.assumed_at),
            Some(Err(error)) => (Recorded::Unreadable(error.to_string().into()), None),
        };
        Self {
            node: node.into(),
            record,
            assumed_at,
        }
    }
}

impl Recorded {
    fn parts(&self) -> &[RecordedPart] {
        match self {
            Self::Devices { parts, .. } => parts,
            Self::Missing | Self::Unreadable(_) | Self::Gpushare(_) => &[],
        }
    }

    fn gpus(&self) -> &[RecordedPart] {
        let parts = self.parts();
        // `Self::devices` has sorted them, GPUs first.
        let n_gpus = parts.partition_point(|part| part.kind == DeviceType::Gpu);
        parts.split_at(n_gpus).0
    }

    /// The GPUs of the record that the node does not have, by UUID, or by minor where the record has no UUID.
    pub(crate) fn gone_gpus(&self, inventory: &Inventory) -> Vec<String> {
        let mut devices: Vec<DeviceRef> = self.gpus().iter().map(|part| part.device.clone()).collect();
        if let Self::Gpushare(record) = self {
            devices.push(DeviceRef::Minor(record.idx));
        }
        devices.retain(|device| inventory.find(&DeviceType::Gpu, device).is_none());
        devices.iter().map(device_text).collect()
    }

    /// Takes the two forms of a record together: the devices in Koordinator's annotation, and the GPU and memory units in those
    /// of gpushare-scheduler-extender, which count alone if the first names no GPU.
    fn of(record: &Record) -> Self {
        match (Self::of_allocations(&record.allocations), record.gpushare) {
            (recorded @ (Self::Missing | Self::Devices { .. }), Some(gpushare))
                if recorded.gpus().is_empty() =>
            {
                Self::Gpushare(gpushare)
            }
            (Self::Devices { parts, .. }, units) => Self::Devices { parts, units },
            (recorded, _) => recorded,
        }
    }

    /// The same record, with the memory units of the pod's own record: a record that the plugin has swapped names none.
    #[must_use]
    pub(crate) fn with_units_of(mut self, own: &Self) -> Self {
        if let (Self::Devices { units, .. }, Self::Devices { units: own_units, .. }) = (&mut self, own) {
            *units = *own_units;
        }
        self
    }

    pub(crate) fn of_allocations(allocations: &DeviceAllocations) -> Self {
        if allocations.values().all(Vec::is_empty) {
            return Self::Missing;
        }
        Self::devices(allocations).unwrap_or_else(|problem| Self::Unreadable(problem.into()))
    }

    /// Reads the devices of all types in Koordinator's record; an error is the problem of one device, for people.
    fn devices(allocations: &DeviceAllocations) -> Result<Self, String> {
        let mut parts = Vec::new();
        for (kind, devices) in allocations {
            for device in devices {
                parts.push(RecordedPart::read(kind.as_str().into(), device)?);
            }
        }
        // GPUs come before all other types.
        parts.sort_by(|one, other| one.kind.cmp(&other.kind));
        Ok(Self::Devices {
            parts: parts.into(),
            units: None,
        })
    }
}

impl RecordedPart {
    /// Reads the entry of one device: memory and compute of a GPU, or all amounts and virtual functions of a device of another
    /// type.
    fn read(kind: DeviceType, allocation: &DeviceAllocation) -> Result<Self, String> {
        let mut part = Self {
            device: device_ref(allocation)?,
            bytes: None,
            ratio: 0,
            core: 0,
            resources: NamedAmounts::new(),
            functions: Box::default(),
            kind,
        };
        let is_gpu = part.kind == DeviceType::Gpu;
        if !is_gpu {
            part.functions = allocation.functions().into();
        }
        for (resource, quantity) in &allocation.resources {
            match resource.as_str() {
                GPU_MEMORY if is_gpu => part.bytes = Some(amount(resource, *quantity)?),
                GPU_MEMORY_RATIO if is_gpu => part.ratio = percent(amount(resource, *quantity)?),
                GPU_CORE if is_gpu => part.core = percent(amount(resource, *quantity)?),
                _ if is_gpu => {}
                name => {
                    part.resources.insert(name.into(), amount(name, *quantity)?);
                }
            }
        }
        Ok(part)
    }
}

/// A percentage; one that is too large for the type is its maximum.
fn percent(amount: u64) -> u32 {
    u32::try_from(amount).unwrap_or(u32::MAX)
}

/// An amount of a record as a whole number; an error names the resource.
fn amount(resource: &str, quantity: Quantity) -> Result<u64, String> {
    let amount = quantity.unsigned();
    amount.ok_or_else(|| format!("the allocation record says {resource} is {quantity}, which is no amount"))
}

/// The device that an entry of a record names. Records of other writers may have its minor alone.
fn device_ref(allocation: &DeviceAllocation) -> Result<DeviceRef, String> {
    let DeviceAllocation { id, minor, .. } = allocation;
    if !id.is_empty() {
        return Ok(DeviceRef::Id(id.as_str().into()));
    }
    match u32::try_from(*minor) {
        Ok(minor) => Ok(DeviceRef::Minor(minor)),
        Err(_) => Err(format!("the allocation record names minor {minor}")),
    }
}

/// A device of a record, in words for a problem.
fn device_name(kind: &DeviceType, device: &DeviceRef) -> String {
    let noun = match kind {
        DeviceType::Gpu => kind.to_string(),
        DeviceType::Other(_) => format!("{kind} device"),
    };
    format!("{noun} {}", device_text(device))
}

/// The UUID or minor by which a record names a device; empty for `Any`, which is in no record.
fn device_text(device: &DeviceRef) -> String {
    match device {
        DeviceRef::Id(id) => id.to_string(),
        DeviceRef::Minor(minor) => format!("minor {minor}"),
        DeviceRef::Any => String::new(),
    }
}

pub(crate) fn host_amounts(resources: HostResources) -> HostAmounts {
    let HostResources { cpu_milli, memory } = resources;
    HostAmounts { cpu_milli, memory }
}

pub(crate) fn requested_gpus(request: &GpuRequest) -> RequestedGpus {
    match request.dialect {
        Dialect::Gpushare | Dialect::Koordinator => RequestedGpus::Share(per_device(request)),
        Dialect::Vendor => RequestedGpus::Whole(request.devices),
        Dialect::AllDevices => RequestedGpus::All {
            slots: request.devices,
        },
    }
}

/// The request with the amounts of each GPU, rounded up: a pod requests the amounts of all its GPUs together.
pub fn per_device(request: &GpuRequest) -> ShareRequest {
    let n = u64::from(request.devices.max(1));
    let memory = match request.memory {
        Memory::Units(units) => RequestedMemory::Units(units.div_ceil(n)),
        Memory::Bytes(bytes) => RequestedMemory::Bytes(bytes.div_ceil(n)),
        Memory::Ratio(ratio) => RequestedMemory::Ratio(percent(ratio.div_ceil(n))),
    };
    let core = percent(request.core.div_ceil(n));
    // Memory units need no slot: kubelet and gpushare-scheduler-extender count them by memory alone. Whole devices are not
    // shared.
    let slots = u32::from(request.dialect == Dialect::Koordinator);
    ShareRequest {
        devices: request.devices,
        memory,
        core,
        slots,
    }
}

#[cfg(test)]
mod tests;
