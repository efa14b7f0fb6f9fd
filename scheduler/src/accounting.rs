//! The devices that a pod requests and holds, as the engine counts them: from its spec, its allocation record, and the reports of
//! its node.
//!
//! Pure. A bound pod that requests devices holds what it requests, and never more on account of its record. Where the record names
//! too little, every device that the pod may use is charged, or one where the node's plugin lets no container start on a device
//! without room. A pod holds nothing if such a plugin reports that it was allocated nothing.

use std::collections::BTreeMap;
use std::sync::Arc;

use placement::{
    Constraints, DevicePolicy, DeviceRef, DeviceType, Gpu, GpuRef, GpuUuid, Holdings, HostAmounts, Inventory,
    NamedAmounts, NodePolicy, Policies, RequestedGpus, RequestedMemory, ResourceName, ShareRequest,
};
use proto::device::TYPE_GPU;
use proto::pod::{Pod, QuantityText};
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
mod hold;
pub mod kubelet_allocations;
mod others;
mod shares;

use crate::accounting::kubelet_allocations::AllocatedDevice;
use crate::inventory::device_types::Kinds;

/// The parts of a pod that requests devices that the scheduler keeps; small, as a cluster has very many.
#[derive(Clone, Debug, PartialEq)]
pub struct PodFacts {
    /// Namespace.
    pub namespace: Box<str>,
    /// Name.
    pub name: Box<str>,
    /// Its request for devices.
    pub request: ParsedRequest,
    /// The constraints of its annotations, if there are any, or the reason for which they cannot be read.
    pub constraints: Result<Option<Arc<Constraints>>, Arc<RequestError>>,
    /// Its requests for CPU and memory.
    pub host: HostAmounts,
    /// The policies that it names itself.
    pub preference: Preference,
    /// The provider that has to limit its containers at run time, if it names one.
    pub isolation: Option<Box<str>>,
    /// Its node and record; `None` until it is bound.
    pub bound: Option<Box<Bound>>,
}

/// Policies that a pod names itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Preference {
    node: Option<NodePolicy>,
    device: Option<DevicePolicy>,
    enforcement: Option<DemandedEnforcement>,
}

/// The request of a pod for devices.
#[derive(Clone, Debug, PartialEq)]
pub enum ParsedRequest {
    /// A valid request; empty if only the record of the pod names devices.
    Valid(PodRequest),
    /// An invalid request, and the amounts in it.
    Invalid(Box<RequestError>, Bounds),
}

/// The GPU amounts of an invalid request: kubelet cannot allocate more than these.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
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
pub struct Bound {
    /// The node.
    pub node: Box<str>,
    /// Its allocation record.
    pub record: Recorded,
    /// The assume time in its record, in unix nanoseconds.
    pub assumed_at: Option<u64>,
}

/// The allocation record in a pod's annotations.
#[derive(Clone, Debug, PartialEq)]
pub enum Recorded {
    /// There is none.
    Missing,
    /// A record that cannot be parsed, with the reason.
    Unreadable(Box<str>),
    /// Parts of devices.
    Devices {
        /// Of GPUs.
        gpus: Box<[RecordedShare]>,
        /// Of devices of other types.
        others: Box<[RecordedDevice]>,
        /// The pod's amount in memory units at its placement, if it was placed by units.
        units: Option<GpushareRecord>,
    },
    /// Only the annotations of the old extender.
    Gpushare(GpushareRecord),
}

/// One device of a record.
#[derive(Clone, Debug, PartialEq)]
pub struct RecordedShare {
    gpu: GpuRef,
    bytes: Option<u64>,
    ratio: u32,
    core: u32,
}

/// One device of another type, of a record.
#[derive(Clone, Debug, PartialEq)]
pub struct RecordedDevice {
    kind: DeviceType,
    device: DeviceRef,
    amounts: NamedAmounts,
    functions: Box<[RecordedFunction]>,
}

/// One virtual function, of a record.
#[derive(Clone, Debug, PartialEq)]
pub struct RecordedFunction {
    /// Its PCI address; empty if the record has none.
    bus_id: Box<str>,
    minor: i32,
}

/// The facts besides the pod itself that decide what it holds.
#[derive(Clone, Copy, Debug)]
pub struct NodeContext<'a> {
    /// The devices of its node, as far as they are known.
    pub inventory: Option<&'a Inventory>,
    /// The device type of each resource.
    pub kinds: &'a Kinds,
    /// The devices that kubelet allocated to it, if another scheduler placed it.
    pub given: &'a [AllocatedDevice],
    /// True if pods may see all devices of their node without holding any.
    pub allows_all_devices: bool,
    /// The report of its node's plugin on the pod.
    pub report: PluginReport,
}

impl<'a> NodeContext<'a> {
    /// The GPU that a record identifies, if the node is known to have it.
    fn gpu(&self, gpu: &GpuRef) -> Option<&'a Gpu> {
        self.inventory?.gpu(gpu)
    }
}

/// A report by the plugin of a node on a pod that may hold nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PluginReport {
    /// The plugin of the node reports no such pods: it is another project's, or an old one.
    #[default]
    Silent,
    /// The plugin reports such pods, and not this one. It lets no container start on a device without room.
    Pending,
    /// The pod was allocated no device.
    NoDevices,
}

/// The devices that a pod holds, and the doubts about them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Account {
    /// The devices.
    pub holdings: Holdings,
    /// The reason for which the pod is counted conservatively, or the fault of its record.
    pub problem: Option<String>,
    /// True if its record names more than it requests.
    pub contradicts: bool,
}

impl PodFacts {
    /// Reads a pod; `None` if it neither requests nor holds devices.
    pub fn of(pod: &Pod, names: &ResourceNames) -> Option<Self> {
        let bound = pod
            .spec
            .node_name
            .as_deref()
            .filter(|node| !node.is_empty())
            .map(|node| Box::new(Bound::of(pod, node)));
        // A bound pod may have been admitted under older rules; refusing its request would not stop it.
        let request = if bound.is_some() {
            PodRequest::read(pod, names)
        } else {
            PodRequest::read_new(pod, names)
        };
        // The runtime hook of another project may have followed a record that the pod does not request.
        let is_recorded = bound
            .as_ref()
            .is_some_and(|bound| matches!(bound.record, Recorded::Devices { .. }));
        let request = match request {
            Ok(None) if !is_recorded => return None,
            Ok(request) => ParsedRequest::Valid(request.unwrap_or_default()),
            Err(_) if bound.is_some() && !asks_for_gpus(pod, names) => {
                ParsedRequest::Valid(whole_others(pod))
            }
            Err(error) => ParsedRequest::Invalid(Box::new(error), Bounds::of(pod, names)),
        };
        let isolation = pod
            .metadata
            .labels
            .as_ref()
            .and_then(|labels| labels.get(ISOLATION_PROVIDER));
        let isolation = isolation
            .filter(|_| request.gpus().is_some())
            .map(|provider| provider.as_str().into());
        let text = |text: &Option<String>| text.as_deref().unwrap_or_default().into();
        let (namespace, name) = (text(&pod.metadata.namespace), text(&pod.metadata.name));
        let constraints = if bound.is_some() {
            Ok(constraints::of_placed(pod))
        } else {
            constraints::of(pod)
        };
        Some(Self {
            namespace,
            name,
            request,
            constraints,
            host: host_amounts(HostResources::of_pod(pod)),
            preference: Preference::of(pod),
            isolation,
            bound,
        })
    }

    /// The provider that must limit its containers; `None` for whole GPUs, which need no limit.
    pub fn needs_isolation(&self) -> Option<&str> {
        self.isolation
            .as_deref()
            .filter(|_| self.request.gpus().is_some_and(GpuRequest::is_shared))
    }

    /// The labels by which other projects find a pod on this node.
    pub fn labels_on(&self, node: &str) -> BTreeMap<String, String> {
        let is_watched = self.isolation.as_deref() == Some(HAMI_CORE);
        is_watched
            .then(|| (HAMI_NODE.to_owned(), node.to_owned()))
            .into_iter()
            .collect()
    }

    /// The devices that a bound pod holds; `None` if it is not bound.
    pub fn account(&self, context: NodeContext<'_>) -> Option<Account> {
        Some(self.account_of(&self.bound.as_deref()?.record, context))
    }
}

impl Preference {
    /// Unknown names are refused with the request, and ignored here.
    fn of(pod: &Pod) -> Self {
        let parsed = |name: &str| name.parse().ok();
        Self {
            node: pod.annotation(hints::NODE_POLICY).and_then(parsed),
            device: pod
                .annotation(hints::DEVICE_POLICY)
                .and_then(|name| name.parse().ok()),
            enforcement: hints::enforcement(pod),
        }
    }

    /// The enforcement of memory limits that the pod demands, or else that of the cluster.
    pub fn enforcement_or(self, cluster: DemandedEnforcement) -> DemandedEnforcement {
        self.enforcement.unwrap_or(cluster)
    }

    /// These policies, or else those of the cluster.
    pub fn or(self, cluster: Policies) -> Policies {
        Policies {
            node: self.node.unwrap_or(cluster.node),
            device: self.device.unwrap_or(cluster.device),
        }
    }
}

impl ParsedRequest {
    /// The request for GPUs, if it is valid.
    pub fn gpus(&self) -> Option<&GpuRequest> {
        match self {
            Self::Valid(request) => request.gpus.as_ref(),
            Self::Invalid(..) => None,
        }
    }

    /// Amounts of resources other than GPUs.
    pub fn others(&self) -> &[(String, u64)] {
        match self {
            Self::Valid(request) => &request.others,
            Self::Invalid(..) => &[],
        }
    }
}

/// The amounts of a pod's device resources, of types that are known without a Device object.
fn amounts<'a>(
    pod: &'a Pod,
    names: &'a ResourceNames,
) -> impl Iterator<Item = (&'a String, &'a QuantityText)> {
    let containers = pod.spec.init_containers.iter().chain(&pod.spec.containers);
    let amounts = containers.flat_map(|container| {
        let resources = &container.resources;
        let unlimited = resources
            .requests
            .iter()
            .filter(|(name, _)| !resources.limits.contains_key(*name));
        resources.limits.iter().chain(unlimited)
    });
    amounts.filter(|(name, _)| is_gpu_resource(name, names) || *name == RDMA || *name == FPGA)
}

impl Bounds {
    /// Sums over all containers: with init containers this may be more than the pod holds at one time.
    fn of(pod: &Pod, names: &ResourceNames) -> Self {
        let mut sums = Self {
            is_known: true,
            units: 0,
            bytes: 0,
            ratio: 0,
            core: 0,
            shared: 0,
        };
        for (name, text) in amounts(pod, names).filter(|(name, _)| is_gpu_resource(name, names)) {
            let Some(amount) = text.quantity().ok().and_then(Quantity::unsigned) else {
                sums.is_known = false;
                continue;
            };
            let add = |sum: &mut u64| *sum = sum.saturating_add(amount);
            match canonical(name) {
                GPU_MEMORY => add(&mut sums.bytes),
                GPU_MEMORY_RATIO => add(&mut sums.ratio),
                GPU_CORE => add(&mut sums.core),
                GPU_SHARED => add(&mut sums.shared),
                GPU => {
                    add(&mut sums.ratio);
                    add(&mut sums.core);
                }
                name if name == names.memory => add(&mut sums.units),
                _ => sums.is_known = sums.is_known && amount == 0,
            }
        }
        sums
    }

    /// The request that it counts as: a whole device if the amounts are not known.
    pub(crate) fn request(self, inventory: Option<&Inventory>) -> ShareRequest {
        let Self {
            is_known,
            units,
            bytes,
            ratio,
            core,
            shared,
        } = self;
        let devices = u32::try_from(shared.max(1)).unwrap_or(u32::MAX);
        let each = |sum: u64| sum.div_ceil(u64::from(devices));
        let unit = inventory.and_then(|inventory| inventory.unit_bytes);
        let largest = inventory.and_then(|inventory| inventory.gpus.iter().map(|gpu| gpu.memory_bytes).max());
        let of_ratio =
            |largest: u64| u64::try_from(u128::from(largest) * u128::from(ratio) / 100).unwrap_or(u64::MAX);
        let memory = match (units, bytes, ratio) {
            _ if !is_known => None,
            (0, bytes, 0) => Some(RequestedMemory::Bytes(each(bytes))),
            (units, 0, 0) => Some(RequestedMemory::Units(each(units))),
            (0, 0, ratio) => Some(RequestedMemory::Ratio(
                u32::try_from(each(ratio)).unwrap_or(u32::MAX),
            )),
            _ => unit.zip(largest).map(|(unit, largest)| {
                RequestedMemory::Bytes(each(
                    units
                        .saturating_mul(unit)
                        .saturating_add(bytes)
                        .saturating_add(of_ratio(largest)),
                ))
            }),
        };
        let Some(memory) = memory else { return WHOLE_DEVICE };
        let core = u32::try_from(each(core)).unwrap_or(u32::MAX);
        ShareRequest {
            devices,
            memory,
            core,
            slots: u32::from(shared > 0),
        }
    }
}

/// The request of a pod whose own one cannot be read.
const WHOLE_DEVICE: ShareRequest = ShareRequest {
    devices: 1,
    memory: RequestedMemory::Ratio(100),
    core: 0,
    slots: 0,
};

fn asks_for_gpus(pod: &Pod, names: &ResourceNames) -> bool {
    amounts(pod, names).any(|(name, _)| is_gpu_resource(name, names))
}

/// The holdings of a pod whose amounts of other devices are invalid: a whole device of each type.
fn whole_others(pod: &Pod) -> PodRequest {
    let names = ResourceNames::default();
    let asked = |resource: &&str| amounts(pod, &names).any(|(name, _)| name == resource);
    let others = [FPGA, RDMA]
        .into_iter()
        .filter(asked)
        .map(|resource| (resource.to_owned(), WHOLE_PERCENT));
    PodRequest {
        gpus: None,
        others: others.collect(),
    }
}

impl Bound {
    fn of(pod: &Pod, node: &str) -> Self {
        Self::read(node, pod.metadata.annotations.as_ref())
    }

    /// Reads the annotations of a pod on this node.
    pub fn read(node: &str, annotations: Option<&BTreeMap<String, String>>) -> Self {
        let record = annotations.map(Record::read).transpose();
        let (record, assumed_at) = match record.map(Option::flatten) {
            Ok(None) => (Recorded::Missing, None),
            Ok(Some(record)) => (Recorded::of(&record), record.assumed_at),
            Err(error) => (Recorded::Unreadable(error.to_string().into()), None),
        };
        Self {
            node: node.into(),
            record,
            assumed_at,
        }
    }
}

impl Recorded {
    /// The shares of GPUs in a readable record of devices.
    fn gpus(&self) -> &[RecordedShare] {
        match self {
            Self::Devices { gpus, .. } => gpus,
            Self::Missing | Self::Unreadable(_) | Self::Gpushare(_) => &[],
        }
    }

    fn of(record: &Record) -> Self {
        match (Self::of_allocations(&record.allocations), record.gpushare) {
            (Self::Missing, Some(gpushare)) => Self::Gpushare(gpushare),
            (Self::Devices { gpus, .. }, Some(gpushare)) if gpus.is_empty() => Self::Gpushare(gpushare),
            (Self::Devices { gpus, others, .. }, units) => Self::Devices { gpus, others, units },
            (recorded, _) => recorded,
        }
    }

    /// The same record, with the units of another record of the pod if this one has none.
    #[must_use]
    pub fn or_units_of(self, other: &Self) -> Self {
        match (self, other) {
            (
                Self::Devices {
                    gpus,
                    others,
                    units: None,
                },
                Self::Devices { units, .. },
            ) => Self::Devices {
                gpus,
                others,
                units: *units,
            },
            (record, _) => record,
        }
    }

    /// Reads the devices of Koordinator's record.
    pub fn of_allocations(allocations: &DeviceAllocations) -> Self {
        if allocations.values().all(Vec::is_empty) {
            return Self::Missing;
        }
        let gpus = allocations
            .get(TYPE_GPU)
            .into_iter()
            .flatten()
            .map(RecordedShare::of)
            .collect::<Result<Vec<_>, String>>();
        let kinds = allocations.iter().filter(|(kind, _)| *kind != TYPE_GPU);
        let others =
            kinds.flat_map(|(kind, devices)| devices.iter().map(|device| RecordedDevice::of(kind, device)));
        match (gpus, others.collect::<Result<Vec<_>, String>>()) {
            (Ok(gpus), Ok(others)) => Self::Devices {
                gpus: gpus.into(),
                others: others.into(),
                units: None,
            },
            (Err(problem), _) | (_, Err(problem)) => Self::Unreadable(problem.into()),
        }
    }
}

impl RecordedShare {
    fn of(allocation: &DeviceAllocation) -> Result<Self, String> {
        let amount = |resource: &str| {
            allocation
                .resources
                .get(resource)
                .map(|quantity| amount(resource, *quantity))
                .transpose()
        };
        let percent = |resource: &str| {
            amount(resource).map(|percent| u32::try_from(percent.unwrap_or(0)).unwrap_or(u32::MAX))
        };
        let gpu = if allocation.id.is_empty() {
            GpuRef::Minor(minor(allocation)?)
        } else {
            GpuRef::Uuid(GpuUuid::from(allocation.id.as_str()))
        };
        Ok(Self {
            gpu,
            bytes: amount(GPU_MEMORY)?,
            ratio: percent(GPU_MEMORY_RATIO)?,
            core: percent(GPU_CORE)?,
        })
    }
}

impl RecordedDevice {
    fn of(kind: &str, allocation: &DeviceAllocation) -> Result<Self, String> {
        let device = if allocation.id.is_empty() {
            DeviceRef::Minor(minor(allocation)?)
        } else {
            DeviceRef::Id(allocation.id.as_str().into())
        };
        let amounts = allocation.resources.iter();
        let amounts = amounts.map(|(resource, quantity)| {
            Ok((
                ResourceName::from(resource.as_str()),
                amount(resource, *quantity)?,
            ))
        });
        let functions = allocation.functions().into_iter();
        let functions = functions.map(|function| RecordedFunction {
            bus_id: function.bus_id.into(),
            minor: function.minor,
        });
        Ok(Self {
            kind: kind.into(),
            device,
            amounts: amounts.collect::<Result<_, String>>()?,
            functions: functions.collect(),
        })
    }
}

fn amount(resource: &str, quantity: Quantity) -> Result<u64, String> {
    quantity
        .unsigned()
        .ok_or_else(|| format!("the allocation record says {resource} is {quantity}, which is no amount"))
}

fn minor(allocation: &DeviceAllocation) -> Result<u32, String> {
    u32::try_from(allocation.minor)
        .map_err(|_| format!("the allocation record names minor {}", allocation.minor))
}

/// Converts CPU and memory to the engine's type.
pub fn host_amounts(resources: HostResources) -> HostAmounts {
    let HostResources { cpu_milli, memory } = resources;
    HostAmounts { cpu_milli, memory }
}

/// Converts a request to the engine's type.
pub fn requested_gpus(request: &GpuRequest) -> RequestedGpus {
    match request.dialect {
        Dialect::Gpushare | Dialect::Koordinator => RequestedGpus::Share(per_device(request)),
        Dialect::Vendor => RequestedGpus::Whole(request.devices),
        Dialect::AllDevices => RequestedGpus::All {
            slots: request.devices,
        },
    }
}

/// The request for each of its devices.
pub fn per_device(request: &GpuRequest) -> ShareRequest {
    let n = u64::from(request.devices.max(1));
    let memory = match request.memory {
        Memory::Units(units) => RequestedMemory::Units(units.div_ceil(n)),
        Memory::Bytes(bytes) => RequestedMemory::Bytes(bytes.div_ceil(n)),
        Memory::Ratio(ratio) => RequestedMemory::Ratio(u32::try_from(ratio.div_ceil(n)).unwrap_or(u32::MAX)),
    };
    let core = u32::try_from(request.core.div_ceil(n)).unwrap_or(u32::MAX);
    // Memory units need no slot: kubelet and the old extender count them by memory alone. Whole devices are not shared.
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
