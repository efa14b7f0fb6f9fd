//! What a pod asks for and holds, from the pod alone: spec and record in the engine's terms.
//!
//! Pure. A pod that is bound and asks for our resources always holds something: where its record says too little,
//! every device it may be on is charged, and the reason is told.

use std::collections::BTreeMap;

use placement::{GpuRef, GpuUuid, HeldMemory, HeldShare, Holding, Inventory, Memory as EngineMemory, MemoryAsk, Reason, Request};
use proto::device::TYPE_GPU;
use proto::pod::Pod;
use proto::quantity::Quantity;
use proto::record::{DeviceAllocation, DeviceAllocations, GpushareRecord, Record};
use proto::request::{Dialect, GpuRequest, Memory, PodRequest, RequestError};
use proto::resource::{GPU, GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED, ResourceNames};

/// What is kept of a pod that asks for our resources; small, as there may be very many.
#[derive(Clone, Debug, PartialEq)]
pub struct PodFacts {
    /// Namespace.
    pub namespace: Box<str>,
    /// Name.
    pub name: Box<str>,
    /// What it asks for.
    pub ask: Ask,
    /// Where it is bound and what its record says; `None` until it is bound.
    pub bound: Option<Box<Bound>>,
}

/// What a pod asks for.
#[derive(Clone, Debug, PartialEq)]
pub enum Ask {
    /// Something that can be compared with devices.
    Request(GpuRequest),
    /// Something that breaks a rule.
    Invalid(Box<RequestError>),
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
    /// Shares of devices.
    Shares(Box<[RecordedShare]>),
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

/// A holding, and what is doubtful about it.
#[derive(Clone, Debug, PartialEq)]
pub struct Account {
    /// What the pod holds.
    pub holding: Holding,
    /// Why the pod is counted conservatively; `None` if all is well.
    pub problem: Option<String>,
}

impl PodFacts {
    /// Reads a pod; `None` if it asks for nothing of ours.
    pub fn of(pod: &Pod, names: &ResourceNames) -> Option<Self> {
        let is_bound = pod.spec.node_name.as_deref().is_some_and(|node| !node.is_empty());
        let request = if is_bound { PodRequest::of(pod, names) } else { PodRequest::of_new(pod, names) };
        let ask = match request.map(|request| request.and_then(|request| request.gpus)) {
            Ok(Some(request)) if matches!(request.dialect, Dialect::Gpushare | Dialect::Koordinator) => Ask::Request(request),
            Ok(_) => return None,
            Err(error) => Ask::Invalid(Box::new(error)),
        };
        // kubelet hands such a pod no device, so it holds none; before it is bound it is refused by its rule.
        if is_bound && asks_for_zero_only(pod, names) {
            return None;
        }
        let text = |text: &Option<String>| text.as_deref().unwrap_or_default().into();
        let bound = pod.spec.node_name.as_deref().filter(|node| !node.is_empty()).map(|node| Box::new(Bound::of(pod, node)));
        Some(Self { namespace: text(&pod.metadata.namespace), name: text(&pod.metadata.name), ask, bound })
    }

    /// What a bound pod holds on a node with this inventory; `None` if it is not bound.
    pub fn account(&self, inventory: Option<&Inventory>) -> Option<Account> {
        Some(self.account_of(&self.bound.as_deref()?.record, inventory))
    }

    /// What the pod holds on a node with this inventory if its record says this.
    pub fn account_of(&self, record: &Recorded, inventory: Option<&Inventory>) -> Account {
        let request = match &self.ask {
            Ask::Request(request) => per_device(request),
            Ask::Invalid(_) => WHOLE_DEVICE,
        };
        let account = match record {
            Recorded::Missing => anywhere(request, "it has no allocation record".to_owned()),
            Recorded::Unreadable(problem) => anywhere(request, problem.to_string()),
            Recorded::Shares(shares) => from_shares(shares, &request, inventory),
            Recorded::Gpushare(record) => from_gpushare(*record, &request, inventory),
        };
        match &self.ask {
            Ask::Invalid(error) => Account { problem: account.problem.or_else(|| Some(error.to_string())), ..account },
            Ask::Request(_) => account,
        }
    }
}

/// Whether every amount of ours that a pod names is zero.
fn asks_for_zero_only(pod: &Pod, names: &ResourceNames) -> bool {
    let containers = pod.spec.init_containers.iter().chain(&pod.spec.containers);
    let ours = [names.memory.as_str(), GPU_MEMORY, GPU_MEMORY_RATIO, GPU_CORE, GPU_SHARED, GPU];
    let amounts = containers.flat_map(|container| {
        let resources = &container.resources;
        ours.iter().filter_map(|resource| resources.limits.get(*resource).or_else(|| resources.requests.get(*resource)))
    });
    let mut amounts = amounts.map(|text| text.quantity().ok().and_then(Quantity::unsigned)).peekable();
    amounts.peek().is_some() && amounts.all(|amount| amount == Some(0))
}

/// What a pod is taken to ask for whose request cannot be read: all of a device.
const WHOLE_DEVICE: Request = Request { devices: 1, memory: MemoryAsk::Ratio(100), core: 0, slots: 0 };

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
        Self { node: node.into(), record, assumed_at }
    }
}

impl Recorded {
    fn of(record: &Record) -> Self {
        match (Self::of_allocations(&record.allocations), record.gpushare) {
            (Self::Missing, Some(gpushare)) => Self::Gpushare(gpushare),
            (recorded, _) => recorded,
        }
    }

    /// What devices of Koordinator's record are taken for.
    pub fn of_allocations(allocations: &DeviceAllocations) -> Self {
        let Some(shares) = allocations.get(TYPE_GPU).filter(|shares| !shares.is_empty()) else { return Self::Missing };
        match shares.iter().map(RecordedShare::of).collect::<Result<Vec<_>, String>>() {
            Ok(shares) => Self::Shares(shares.into()),
            Err(problem) => Self::Unreadable(problem.into()),
        }
    }
}

impl RecordedShare {
    fn of(allocation: &DeviceAllocation) -> Result<Self, String> {
        let amount = |resource: &str| match allocation.resources.get(resource) {
            None => Ok(None),
            Some(quantity) => quantity
                .unsigned()
                .map(Some)
                .ok_or_else(|| format!("the allocation record says {resource} is {quantity}, which is no amount")),
        };
        let percent = |resource: &str| amount(resource).map(|percent| u32::try_from(percent.unwrap_or(0)).unwrap_or(u32::MAX));
        let gpu = if allocation.id.is_empty() {
            let minor = u32::try_from(allocation.minor);
            GpuRef::Minor(minor.map_err(|_| format!("the allocation record names minor {}", allocation.minor))?)
        } else {
            GpuRef::Uuid(GpuUuid::from(allocation.id.as_str()))
        };
        Ok(Self { gpu, bytes: amount(GPU_MEMORY)?, ratio: percent(GPU_MEMORY_RATIO)?, core: percent(GPU_CORE)? })
    }
}

/// The request in the engine's terms: what each of its devices must have.
pub fn per_device(request: &GpuRequest) -> Request {
    let n = u64::from(request.devices.max(1));
    let memory = match request.memory {
        Memory::Units(units) => MemoryAsk::Units(units.div_ceil(n)),
        Memory::Bytes(bytes) => MemoryAsk::Bytes(bytes.div_ceil(n)),
        Memory::Ratio(ratio) => MemoryAsk::Ratio(u32::try_from(ratio.div_ceil(n)).unwrap_or(u32::MAX)),
    };
    let core = u32::try_from(request.core.div_ceil(n)).unwrap_or(u32::MAX);
    // Units are no places for sharers: kubelet counts them by memory alone, and so did the old extender.
    let slots = u32::from(request.dialect == Dialect::Koordinator);
    Request { devices: request.devices, memory, core, slots }
}

/// The reason that a request which breaks a rule is refused with.
pub fn refusal(error: &RequestError) -> Reason {
    match error {
        RequestError::NotServed { .. } => Reason::NotServed,
        RequestError::MixedDialects { .. } => Reason::MixedDialects,
        _ => Reason::InvalidRequest,
    }
}

fn anywhere(request: Request, problem: String) -> Account {
    Account { holding: Holding::Anywhere(request), problem: Some(problem) }
}

/// A record that names devices, held against the spec: of both the larger amount counts.
fn from_shares(shares: &[RecordedShare], request: &Request, inventory: Option<&Inventory>) -> Account {
    let n_shares = u32::try_from(shares.len()).unwrap_or(u32::MAX);
    if n_shares < request.devices {
        return anywhere(*request, format!("its record names {n_shares} devices, its spec asks for {}", request.devices));
    }
    if let Some(problem) = shares.iter().find_map(|share| absent(&share.gpu, inventory)) {
        return anywhere(*request, problem);
    }
    let twice = |(at, share): (usize, &RecordedShare)| shares.iter().take(at).any(|other| is_same(&other.gpu, &share.gpu, inventory));
    if let Some((_, share)) = shares.iter().enumerate().find(|(at, share)| twice((*at, share))) {
        return anywhere(*request, format!("its record names {} twice", name(&share.gpu)));
    }
    let mut problem =
        (n_shares > request.devices).then(|| format!("its record names {n_shares} devices, its spec asks for {} only", request.devices));
    let trusted = problem.is_none();
    let mut held = Vec::with_capacity(shares.len());
    for share in shares {
        let (memory, doubt) = larger(share, request, inventory);
        let trusted = trusted && doubt.is_none();
        problem = problem.or(doubt);
        held.push(HeldShare { gpu: share.gpu.clone(), memory, core: share.core.max(request.core), slots: request.slots, trusted });
    }
    Account { holding: Holding::Shares(held), problem }
}

/// The larger of what record and spec say about memory, and what is wrong if they cannot both be right.
fn larger(share: &RecordedShare, request: &Request, inventory: Option<&Inventory>) -> (HeldMemory, Option<String>) {
    let exact = |bytes| HeldMemory::Exact(EngineMemory::from_bytes(bytes));
    let spec = match request.memory {
        MemoryAsk::Ratio(ratio) => return (HeldMemory::Ask(MemoryAsk::Ratio(ratio.max(share.ratio))), None),
        MemoryAsk::Bytes(bytes) => Some(bytes),
        MemoryAsk::Units(units) => inventory.and_then(|node| node.unit_bytes).map(|unit| units.saturating_mul(unit)),
    };
    match (share.bytes, spec) {
        (Some(record), Some(spec)) => {
            // Other writers round a share down, which loses less than a byte per device.
            let differs = record.abs_diff(spec) > u64::from(request.devices);
            let problem = || format!("its record says {record} bytes on {}, its spec {spec}", name(&share.gpu));
            (exact(record.max(spec)), differs.then(problem))
        }
        (Some(record), None) => (exact(record), None),
        (None, _) => (HeldMemory::Ask(request.memory), None),
    }
}

/// The old extender's record: a minor and units, worth what they were worth when they were written.
fn from_gpushare(record: GpushareRecord, request: &Request, inventory: Option<&Inventory>) -> Account {
    let gpu = GpuRef::Minor(record.idx);
    if let Some(problem) = absent(&gpu, inventory) {
        return anywhere(*request, problem);
    }
    let asked = match request.memory {
        MemoryAsk::Units(units) => units,
        MemoryAsk::Bytes(_) | MemoryAsk::Ratio(_) => {
            return anywhere(*request, "its only record is gpushare's, but it does not ask for memory units".to_owned());
        }
    };
    let units = asked.max(record.pod_units);
    let share = |memory, trusted| HeldShare { gpu, memory, core: request.core, slots: request.slots, trusted };
    if let Some((now, gpu_bytes, unit)) = units_changed(record, inventory) {
        let part = u128::from(gpu_bytes) * u128::from(record.pod_units);
        let part = u64::try_from(part.div_ceil(u128::from(record.device_units))).unwrap_or(u64::MAX);
        let bytes = part.max(units.saturating_mul(unit));
        let problem = format!("GPU {} had {} units when it was placed and has {now} now", record.idx, record.device_units);
        let memory = HeldMemory::Exact(EngineMemory::from_bytes(bytes));
        return Account { holding: Holding::Shares(vec![share(memory, false)]), problem: Some(problem) };
    }
    let differs = record.pod_units != 0 && record.pod_units != asked;
    let problem = differs.then(|| format!("its record says {} units, its spec {asked}", record.pod_units));
    Account { holding: Holding::Shares(vec![share(HeldMemory::Ask(MemoryAsk::Units(units)), !differs)]), problem }
}

/// The units that the recorded device has now, its bytes and a unit's, if the units are others than when the pod was placed.
fn units_changed(record: GpushareRecord, inventory: Option<&Inventory>) -> Option<(u64, u64, u64)> {
    let inventory = inventory?;
    let unit = inventory.unit_bytes.filter(|unit| *unit > 0)?;
    let gpu = inventory.gpus.iter().find(|gpu| gpu.minor == record.idx)?;
    let now = gpu.memory_bytes / unit;
    (record.device_units > 0 && record.device_units != now).then_some((now, gpu.memory_bytes, unit))
}

/// Whether a reference names a device.
fn names(gpu: &GpuRef, device: &placement::Gpu) -> bool {
    match gpu {
        GpuRef::Uuid(uuid) => device.uuid == *uuid,
        GpuRef::Minor(minor) => device.minor == *minor,
    }
}

/// Whether two references name one device, as far as is known.
fn is_same(one: &GpuRef, other: &GpuRef, inventory: Option<&Inventory>) -> bool {
    let device = inventory.and_then(|inventory| inventory.gpus.iter().find(|device| names(one, device)));
    device.map_or(one == other, |device| names(other, device))
}

/// What is wrong if the node has devices, but not this one.
fn absent(gpu: &GpuRef, inventory: Option<&Inventory>) -> Option<String> {
    let found = inventory?.gpus.iter().any(|device| names(gpu, device));
    (!found).then(|| format!("its record names {}, which the node does not have", name(gpu)))
}

fn name(gpu: &GpuRef) -> String {
    match gpu {
        GpuRef::Uuid(uuid) => format!("GPU {uuid}"),
        GpuRef::Minor(minor) => format!("GPU minor {minor}"),
    }
}

#[cfg(test)]
mod tests;
