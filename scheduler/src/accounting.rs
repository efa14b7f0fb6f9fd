//! What a pod asks for and holds, from the pod alone: spec and record in the engine's terms.
//!
//! Pure. A pod that is bound and asks for our resources holds what it asks for, and never more for what its record says:
//! where that names too little, every device it may be on is charged, or one where the node's plugin sees to it that no device
//! is given away twice. A pod holds nothing that was given nothing, as such a plugin reports.

use std::collections::BTreeMap;
use std::sync::Arc;

use placement::{
    Constraints, DevicePolicy, DeviceRef, DeviceType, GpuRef, GpuUuid, Holdings, HostAmounts, Inventory,
    NamedAmounts, NodePolicy, Policies, RequestedGpus, RequestedMemory, ResourceName, ShareRequest,
};
use proto::device::TYPE_GPU;
use proto::pod::{Pod, QuantityText};
use proto::quantity::Quantity;
use proto::record::{DeviceAllocation, DeviceAllocations, GpushareRecord, Record};
use proto::request::hints;
use proto::request::{Dialect, GpuRequest, Memory, PodRequest, RequestError};
use proto::resource::{
    FPGA, GPU, GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED, HAMI_CORE, HAMI_NODE, ISOLATION_PROVIDER,
    RDMA, ResourceNames, WHOLE_PERCENT, canonical, is_gpu_resource,
};
use proto::totals::HostResources;

mod hold;
mod others;
mod shares;

use crate::given::Given;
use crate::kinds::Kinds;
use crate::wishes;

/// What is kept of a pod that asks for our resources; small, as there may be very many.
#[derive(Clone, Debug, PartialEq)]
pub struct PodFacts {
    /// Namespace.
    pub namespace: Box<str>,
    /// Name.
    pub name: Box<str>,
    /// What it asks for.
    pub ask: Ask,
    /// How its devices are to be chosen, if it says so; or why that cannot be read.
    pub wishes: Result<Option<Arc<Constraints>>, Arc<RequestError>>,
    /// What it asks of a node's CPU and memory.
    pub host: HostAmounts,
    /// By which policies it is placed, where it does not leave that to the cluster.
    pub preference: Preference,
    /// What is to limit its containers at run time, if it says so.
    pub isolation: Option<Box<str>>,
    /// Where it is bound and what its record says; `None` until it is bound.
    pub bound: Option<Box<Bound>>,
}

/// Policies that a pod names itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Preference {
    node: Option<NodePolicy>,
    device: Option<DevicePolicy>,
}

/// What a pod asks for.
#[derive(Clone, Debug, PartialEq)]
pub enum Ask {
    /// Something that can be compared with devices; nothing at all, if only its record speaks of devices.
    Request(PodRequest),
    /// Something that breaks a rule, and the amounts that it names all the same.
    Invalid(Box<RequestError>, Bounds),
}

/// The amounts of GPUs that a pod names, whatever rule they break: more than these it cannot be given.
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
    /// What its annotations say.
    pub record: Recorded,
    /// When it was assumed, by its record: unix nanoseconds.
    pub assumed_at: Option<u64>,
}

/// What a pod's annotations say about its devices.
#[derive(Clone, Debug, PartialEq)]
pub enum Recorded {
    /// Nothing.
    Missing,
    /// Something that does not parse; why.
    Unreadable(Box<str>),
    /// Parts of devices.
    Devices {
        /// Of GPUs.
        gpus: Box<[RecordedShare]>,
        /// Of devices of other types.
        others: Box<[RecordedDevice]>,
        /// The pod's amount in units at the time of its placement, if it was placed by units.
        units: Option<GpushareRecord>,
    },
    /// gpushare's own annotations only: the old extender placed it.
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
    /// Its PCI address; empty if the record does not say.
    bus_id: Box<str>,
    minor: i32,
}

/// What besides the pod itself says what it holds.
#[derive(Clone, Copy, Debug)]
pub struct Surroundings<'a> {
    /// The devices of its node, as far as they are known.
    pub inventory: Option<&'a Inventory>,
    /// Which type of device has which resource.
    pub kinds: &'a Kinds,
    /// The devices that kubelet has given it, where somebody else placed it.
    pub given: &'a [Given],
    /// True if pods may see all devices of their node and be charged for none.
    pub allows_all_devices: bool,
    /// The report that the plugin of its node gives on the pod.
    pub report: Report,
}

/// A report by the plugin of a node on a pod that may hold nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Report {
    /// The node has no plugin that reports such pods: another project's, or an old one.
    #[default]
    Silent,
    /// Nothing of this pod. The plugin reports such pods, and lets no container start on a device without room.
    Pending,
    /// The pod was given no device.
    GivenNothing,
}

/// What a pod holds, and what is doubtful about it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Account {
    /// What the pod holds.
    pub holdings: Holdings,
    /// The reason for which the pod is counted conservatively, or the fault of its record; `None` if all is well.
    pub problem: Option<String>,
    /// True if its record says more than it asks for.
    pub contradicts: bool,
}

impl PodFacts {
    /// Reads a pod; `None` if it asks for nothing that a device might have, and holds nothing.
    pub fn of(pod: &Pod, names: &ResourceNames) -> Option<Self> {
        let bound = pod
            .spec
            .node_name
            .as_deref()
            .filter(|node| !node.is_empty())
            .map(|node| Box::new(Bound::of(pod, node)));
        let request = if bound.is_some() {
            PodRequest::read(pod, names)
        } else {
            PodRequest::read_new(pod, names)
        };
        // A runtime of another project may have followed a record whatever the pod asks for.
        let is_recorded = bound
            .as_ref()
            .is_some_and(|bound| matches!(bound.record, Recorded::Devices { .. }));
        let ask = match request {
            Ok(None) if !is_recorded => return None,
            Ok(request) => Ask::Request(request.unwrap_or_default()),
            Err(_) if bound.is_some() && !asks_for_gpus(pod, names) => Ask::Request(whole_others(pod)),
            Err(error) => Ask::Invalid(Box::new(error), Bounds::of(pod, names)),
        };
        let isolation = pod
            .metadata
            .labels
            .as_ref()
            .and_then(|labels| labels.get(ISOLATION_PROVIDER));
        let isolation = isolation
            .filter(|_| ask.gpus().is_some())
            .map(|provider| provider.as_str().into());
        let text = |text: &Option<String>| text.as_deref().unwrap_or_default().into();
        let (namespace, name) = (text(&pod.metadata.namespace), text(&pod.metadata.name));
        let wishes = if bound.is_some() {
            Ok(wishes::of_placed(pod))
        } else {
            wishes::of(pod)
        };
        Some(Self {
            namespace,
            name,
            ask,
            wishes,
            host: host_amounts(HostResources::of_pod(pod)),
            preference: Preference::of(pod),
            isolation,
            bound,
        })
    }

    /// What must limit its containers on any node that takes it: GPUs that it has to itself need no limit.
    pub fn needs_isolation(&self) -> Option<&str> {
        self.isolation
            .as_deref()
            .filter(|_| self.ask.gpus().is_some_and(GpuRequest::is_shared))
    }

    /// The labels by which others look for a pod on this node.
    pub fn labels_on(&self, node: &str) -> BTreeMap<String, String> {
        let is_watched = self.isolation.as_deref() == Some(HAMI_CORE);
        is_watched
            .then(|| (HAMI_NODE.to_owned(), node.to_owned()))
            .into_iter()
            .collect()
    }

    /// What a bound pod holds; `None` if it is not bound.
    pub fn account(&self, around: Surroundings<'_>) -> Option<Account> {
        Some(self.account_of(&self.bound.as_deref()?.record, around))
    }
}

impl Preference {
    /// Names that do not exist are refused with the request, and passed over here.
    fn of(pod: &Pod) -> Self {
        let parsed = |name: &str| name.parse().ok();
        Self {
            node: hints::node_policy(pod).and_then(parsed),
            device: hints::device_policy(pod).and_then(|name| name.parse().ok()),
        }
    }

    /// The policies that count, where the cluster has these.
    pub fn or(self, cluster: Policies) -> Policies {
        Policies {
            node: self.node.unwrap_or(cluster.node),
            device: self.device.unwrap_or(cluster.device),
        }
    }
}

impl Ask {
    /// The GPUs that are asked for, if that can be understood.
    pub fn gpus(&self) -> Option<&GpuRequest> {
        match self {
            Self::Request(request) => request.gpus.as_ref(),
            Self::Invalid(..) => None,
        }
    }

    /// Amounts of resources other than GPUs.
    pub fn others(&self) -> &[(String, u64)] {
        match self {
            Self::Request(request) => &request.others,
            Self::Invalid(..) => &[],
        }
    }
}

/// Every amount that a pod names of resources that are known without looking at any device.
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
    /// Sums over all containers: of init containers it may be more than they hold at once.
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

    /// The request that it is counted as: never more than a whole device, if that is all that can be said.
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

/// The request that counts for a pod of whose own nothing can be read: all of a device.
const WHOLE_DEVICE: ShareRequest = ShareRequest {
    devices: 1,
    memory: RequestedMemory::Ratio(100),
    core: 0,
    slots: 0,
};

fn asks_for_gpus(pod: &Pod, names: &ResourceNames) -> bool {
    amounts(pod, names).any(|(name, _)| is_gpu_resource(name, names))
}

/// What a pod is taken to hold whose amounts of other devices break a rule: a whole device of each type.
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

    /// What a pod on this node with these annotations is taken for.
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
    fn of(record: &Record) -> Self {
        match (Self::of_allocations(&record.allocations), record.gpushare) {
            (Self::Missing, Some(gpushare)) => Self::Gpushare(gpushare),
            (Self::Devices { gpus, .. }, Some(gpushare)) if gpus.is_empty() => Self::Gpushare(gpushare),
            (Self::Devices { gpus, others, .. }, units) => Self::Devices { gpus, others, units },
            (recorded, _) => recorded,
        }
    }

    /// The same, with the units of another record of the pod where this one names none.
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

    /// What devices of Koordinator's record are taken for.
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

/// CPU and memory in the engine's terms.
pub fn host_amounts(resources: HostResources) -> HostAmounts {
    let HostResources { cpu_milli, memory } = resources;
    HostAmounts { cpu_milli, memory }
}

/// The request in the engine's terms.
pub fn gpu_ask(request: &GpuRequest) -> RequestedGpus {
    match request.dialect {
        Dialect::Gpushare | Dialect::Koordinator => RequestedGpus::Share(per_device(request)),
        Dialect::Vendor => RequestedGpus::Whole(request.devices),
        Dialect::AllDevices => RequestedGpus::All {
            slots: request.devices,
        },
    }
}

/// What each of a request's devices must have.
pub fn per_device(request: &GpuRequest) -> ShareRequest {
    let n = u64::from(request.devices.max(1));
    let memory = match request.memory {
        Memory::Units(units) => RequestedMemory::Units(units.div_ceil(n)),
        Memory::Bytes(bytes) => RequestedMemory::Bytes(bytes.div_ceil(n)),
        Memory::Ratio(ratio) => RequestedMemory::Ratio(u32::try_from(ratio.div_ceil(n)).unwrap_or(u32::MAX)),
    };
    let core = u32::try_from(request.core.div_ceil(n)).unwrap_or(u32::MAX);
    // Units are no places for sharers: kubelet counts them by memory alone, and so did the old extender. Whole devices are
    // shared with nobody.
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
