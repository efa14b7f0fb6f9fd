//! GPUs that records name, held against what specs ask for.

use placement::{GpuRef, HeldMemory, HeldShare, Holding, Inventory, Memory as EngineMemory, MemoryAsk, Request};
use proto::record::GpushareRecord;

use super::RecordedShare;

/// Shares of GPUs, and what is doubtful about them.
pub(super) struct GpuAccount {
    /// What the pod holds.
    pub(super) holding: Holding,
    /// Why it is counted conservatively.
    pub(super) problem: Option<String>,
}

/// It may be any device of the node.
pub(super) fn anywhere(request: Request, problem: String) -> GpuAccount {
    GpuAccount { holding: Holding::Anywhere(request), problem: Some(problem) }
}

/// A record that names devices, held against the spec: of both the larger amount counts.
pub(super) fn from_shares(shares: &[RecordedShare], request: &Request, inventory: Option<&Inventory>) -> GpuAccount {
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
    GpuAccount { holding: Holding::Shares(held), problem }
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
        (None, _) if share.ratio > 0 && request.memory == MemoryAsk::Bytes(0) => (HeldMemory::Ask(MemoryAsk::Ratio(share.ratio)), None),
        (None, _) => (HeldMemory::Ask(request.memory), None),
    }
}

/// The old extender's record: a minor and units, worth what they were worth when they were written.
pub(super) fn from_gpushare(record: GpushareRecord, request: &Request, inventory: Option<&Inventory>) -> GpuAccount {
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
        return GpuAccount { holding: Holding::Shares(vec![share(memory, false)]), problem: Some(problem) };
    }
    let differs = record.pod_units != 0 && record.pod_units != asked;
    let problem = differs.then(|| format!("its record says {} units, its spec {asked}", record.pod_units));
    GpuAccount { holding: Holding::Shares(vec![share(HeldMemory::Ask(MemoryAsk::Units(units)), !differs)]), problem }
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
pub(super) fn absent(gpu: &GpuRef, inventory: Option<&Inventory>) -> Option<String> {
    let found = inventory?.gpus.iter().any(|device| names(gpu, device));
    (!found).then(|| format!("its record names {}, which the node does not have", name(gpu)))
}

fn name(gpu: &GpuRef) -> String {
    match gpu {
        GpuRef::Uuid(uuid) => format!("GPU {uuid}"),
        GpuRef::Minor(minor) => format!("GPU minor {minor}"),
    }
}
