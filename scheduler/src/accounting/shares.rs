//! Shares of the GPUs in a record, compared with the request of the spec.

use placement::{
    GpuRef, HeldGpus, HeldMemory, HeldShare, Inventory, Memory as EngineMemory, RequestedMemory, ShareRequest,
};
use proto::record::GpushareRecord;

use super::{PluginReport, RecordedShare};

/// The GPU shares that a pod holds, and the doubts about them.
#[derive(Debug)]
pub(super) struct GpuAccount {
    pub(super) holding: HeldGpus,
    /// The reason for which the pod is counted conservatively.
    pub(super) problem: Option<String>,
    /// True if the record names more than the pod requests.
    pub(super) contradicts: bool,
}

/// The shares of a pod whose devices are not known.
pub(super) fn unknown(request: ShareRequest, report: PluginReport, problem: String) -> GpuAccount {
    let holding = match report {
        // The plugin of that node may have allocated any device, and checks no sum.
        PluginReport::Silent => HeldGpus::Unknown(request),
        PluginReport::Pending => HeldGpus::Pending(request),
        PluginReport::NoDevices => HeldGpus::Shares(Vec::new()),
    };
    GpuAccount {
        holding,
        problem: Some(problem),
        contradicts: false,
    }
}

/// The shares of a record, limited by the spec.
pub(super) fn from_shares(
    shares: &[RecordedShare],
    units: Option<GpushareRecord>,
    request: &ShareRequest,
    inventory: Option<&Inventory>,
    report: PluginReport,
) -> GpuAccount {
    let n_shares = u32::try_from(shares.len()).unwrap_or(u32::MAX);
    if n_shares < request.devices {
        return unknown(
            *request,
            report,
            format!(
                "its record names {n_shares} devices, its spec asks for {}",
                request.devices
            ),
        );
    }
    if let Some(problem) = shares.iter().find_map(|share| absent(&share.gpu, inventory)) {
        return unknown(*request, report, problem);
    }
    if let Some(share) = named_twice(shares, inventory) {
        return unknown(
            *request,
            report,
            format!("its record names {} twice", name(&share.gpu)),
        );
    }
    let mut problem = (n_shares > request.devices).then(|| {
        format!(
            "its record names {n_shares} devices, its spec asks for {} only",
            request.devices
        )
    });
    let mut contradicts = problem.is_some();
    let trusted = problem.is_none();
    let n_devices = usize::try_from(request.devices).unwrap_or(usize::MAX);
    let mut held = Vec::with_capacity(shares.len().min(n_devices));
    for share in shares.iter().take(n_devices) {
        let Bounded {
            memory,
            doubt,
            is_more,
        } = bounded(share, units, request, inventory);
        contradicts |= is_more;
        let trusted = trusted && doubt.is_none();
        problem = problem.or(doubt);
        held.push(HeldShare {
            gpu: share.gpu.clone(),
            memory,
            core: request.core,
            slots: request.slots,
            trusted,
        });
    }
    GpuAccount {
        holding: HeldGpus::Shares(held),
        problem,
        contradicts,
    }
}

/// The first share of a device that an earlier share names too.
pub(super) fn named_twice<'a>(
    shares: &'a [RecordedShare],
    inventory: Option<&Inventory>,
) -> Option<&'a RecordedShare> {
    let is_again = |(at, share): &(usize, &RecordedShare)| {
        shares
            .iter()
            .take(*at)
            .any(|other| is_same(&other.gpu, &share.gpu, inventory))
    };
    shares.iter().enumerate().find(is_again).map(|(_, share)| share)
}

/// The memory of one share, limited by the spec.
struct Bounded {
    memory: HeldMemory,
    /// The contradiction between record and spec.
    doubt: Option<String>,
    /// True if the record names more than the spec.
    is_more: bool,
}

/// The memory of a share: that of the spec, unless a unit had another size when the pod was placed.
fn bounded(
    share: &RecordedShare,
    units: Option<GpushareRecord>,
    request: &ShareRequest,
    inventory: Option<&Inventory>,
) -> Bounded {
    let exact = |bytes| HeldMemory::Exact(EngineMemory::from_bytes(bytes));
    let core_is_more = share.core > request.core;
    let core_doubt = || {
        core_is_more.then(|| {
            format!(
                "its record says {} percent of core on {}, its spec {}",
                share.core,
                name(&share.gpu),
                request.core
            )
        })
    };
    let agreed = |memory| Bounded {
        memory,
        doubt: core_doubt(),
        is_more: core_is_more,
    };
    let spec = match request.memory {
        RequestedMemory::Ratio(ratio) if share.ratio > ratio => {
            let doubt = format!(
                "its record says {} percent of {}, its spec {ratio}",
                share.ratio,
                name(&share.gpu)
            );
            return Bounded {
                memory: HeldMemory::Requested(RequestedMemory::Ratio(ratio)),
                doubt: Some(doubt),
                is_more: true,
            };
        }
        RequestedMemory::Ratio(ratio) => return agreed(HeldMemory::Requested(RequestedMemory::Ratio(ratio))),
        RequestedMemory::Bytes(bytes) => Some(bytes),
        RequestedMemory::Units(units) => inventory
            .and_then(|node| node.unit_bytes)
            .map(|unit| units.saturating_mul(unit)),
    };
    let (Some(record), Some(spec)) = (share.bytes, spec) else {
        // Without a unit size only the record has the bytes.
        return agreed(
            share
                .bytes
                .filter(|_| spec.is_none())
                .map_or(HeldMemory::Requested(request.memory), exact),
        );
    };
    let is_of_other_unit = units.is_some_and(|units| {
        let is_all = request.memory == RequestedMemory::Units(units.pod_units);
        is_all && units_of_device(&share.gpu, units, inventory).is_some()
    });
    // Other writers round a share down, which loses less than a byte per device.
    let differs = record.abs_diff(spec) > u64::from(request.devices);
    let doubt = differs.then(|| {
        format!(
            "its record says {record} bytes on {}, its spec {spec}",
            name(&share.gpu)
        )
    });
    let bytes = if is_of_other_unit || !differs {
        record.max(spec)
    } else {
        spec
    };
    let is_more = core_is_more || (differs && record > spec && !is_of_other_unit);
    Bounded {
        memory: exact(bytes),
        doubt: doubt.or_else(core_doubt),
        is_more,
    }
}

/// The share of an old extender's record: a minor and memory units of the size at that time.
pub(super) fn from_gpushare(
    record: GpushareRecord,
    request: &ShareRequest,
    inventory: Option<&Inventory>,
    report: PluginReport,
) -> GpuAccount {
    let gpu = GpuRef::Minor(record.idx);
    if let Some(problem) = absent(&gpu, inventory) {
        return unknown(*request, report, problem);
    }
    let units = match request.memory {
        RequestedMemory::Units(units) => units,
        RequestedMemory::Bytes(_) | RequestedMemory::Ratio(_) => {
            return unknown(
                *request,
                report,
                "its only record is gpushare's, but it does not ask for memory units".to_owned(),
            );
        }
    };
    let contradicts = record.pod_units > units;
    let share = |memory, trusted| HeldShare {
        gpu: gpu.clone(),
        memory,
        core: request.core,
        slots: request.slots,
        trusted,
    };
    if let Some((now, gpu_bytes, unit)) = units_of_device(&gpu, record, inventory) {
        let part = u128::from(gpu_bytes) * u128::from(record.pod_units.min(units));
        let part = u64::try_from(part.div_ceil(u128::from(record.device_units))).unwrap_or(u64::MAX);
        let bytes = part.max(units.saturating_mul(unit));
        let problem = format!(
            "GPU {} had {} units when it was placed and has {now} now",
            record.idx, record.device_units
        );
        let memory = HeldMemory::Exact(EngineMemory::from_bytes(bytes));
        return GpuAccount {
            holding: HeldGpus::Shares(vec![share(memory, false)]),
            problem: Some(problem),
            contradicts,
        };
    }
    let differs = record.pod_units != 0 && record.pod_units != units;
    let problem = differs.then(|| format!("its record says {} units, its spec {units}", record.pod_units));
    GpuAccount {
        holding: HeldGpus::Shares(vec![share(
            HeldMemory::Requested(RequestedMemory::Units(units)),
            !differs,
        )]),
        problem,
        contradicts,
    }
}

/// The current units of the recorded device, its bytes and a unit's bytes, if the number of units has changed since the record.
fn units_of_device(
    gpu: &GpuRef,
    record: GpushareRecord,
    inventory: Option<&Inventory>,
) -> Option<(u64, u64, u64)> {
    let inventory = inventory?;
    let unit = inventory.unit_bytes.filter(|unit| *unit > 0)?;
    let gpu = inventory.gpus.iter().find(|device| names(gpu, device))?;
    let now = gpu.memory_bytes / unit;
    (record.device_units > 0 && record.device_units != now).then_some((now, gpu.memory_bytes, unit))
}

fn names(gpu: &GpuRef, device: &placement::Gpu) -> bool {
    match gpu {
        GpuRef::Uuid(uuid) => device.uuid == *uuid,
        GpuRef::Minor(minor) => device.minor == *minor,
    }
}

/// Returns true if two references name one device, as far as is known.
fn is_same(one: &GpuRef, other: &GpuRef, inventory: Option<&Inventory>) -> bool {
    let device = inventory.and_then(|inventory| inventory.gpus.iter().find(|device| names(one, device)));
    device.map_or(one == other, |device| names(other, device))
}

/// The problem if the node has devices, but not this one.
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
