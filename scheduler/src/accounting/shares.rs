//! Shares of the GPUs in a record, compared with the request of the spec.

use placement::{
    DeviceRef, DeviceType, HeldMemory, HeldPart, Holdings, Memory as EngineMemory, RequestedMemory,
    ShareRequest,
};
use proto::record::GpushareRecord;

use super::{Account, NodeContext, PluginReport, RecordedPart, device_name};

/// The account of a pod whose shares may be on any GPU of the node, for this problem of its record.
pub(super) fn on_unknown_gpus(request: ShareRequest, context: NodeContext<'_>, problem: String) -> Account {
    let holdings = match context.report {
        // The node's plugin may have allocated any device, and does not check that the device has room.
        PluginReport::Silent => Holdings::from(vec![HeldPart::from(&request)]),
        // The plugin lets no container start on a GPU without room, so the GPUs with the most room are charged.
        PluginReport::Pending => Holdings::pending(request),
        PluginReport::NoDevices => Holdings::default(),
    };
    Account {
        holdings,
        problem: Some(problem),
        contradicts: false,
    }
}

/// The shares of the GPUs that a record names, with the amounts of the spec: a record may name more than the pod asks for. GPUs
/// that the node does not have any more are only counted: the number of these is returned too.
///
/// # Errors
/// The reason for which the record cannot be followed, so that the devices count as unknown.
pub(super) fn named_shares(
    shares: &[RecordedPart],
    units: Option<GpushareRecord>,
    request: &ShareRequest,
    context: NodeContext<'_>,
) -> Result<(Account, u32), String> {
    let n_shares = u32::try_from(shares.len()).unwrap_or(u32::MAX);
    if n_shares < request.devices {
        return Err(format!(
            "its record names {n_shares} devices, its spec asks for {}",
            request.devices
        ));
    }
    let absent = |share: &RecordedPart| context.absent(&share.kind, &share.device);
    let present: Vec<&RecordedPart> = shares.iter().filter(|share| absent(share).is_none()).collect();
    let gone = shares.iter().find_map(absent);
    if let Some(problem) = &gone
        && present.is_empty()
    {
        return Err(problem.clone());
    }
    if let Some(share) = named_twice(shares, context) {
        let device = device_name(&share.kind, &share.device);
        return Err(format!("its record names {device} twice"));
    }
    let n_asked = request.devices;
    let mut contradicts = n_shares > n_asked;
    let mut problem =
        contradicts.then(|| format!("its record names {n_shares} devices, its spec asks for {n_asked} only"));
    let trusted = !contradicts;
    // kubelet allocates no more devices than the spec asks for, whatever the record names.
    let n_devices = usize::try_from(request.devices).unwrap_or(usize::MAX);
    let mut held = Vec::with_capacity(present.len().min(n_devices));
    for share in present.into_iter().take(n_devices) {
        let (memory, doubt, names_more) = bounded(share, units, request, context);
        contradicts |= names_more;
        let trusted = trusted && doubt.is_none();
        problem = problem.or(doubt);
        held.push(HeldPart {
            memory,
            core: request.core,
            slots: request.slots,
            trusted,
            ..HeldPart::new(DeviceType::Gpu, share.device.clone())
        });
    }
    // A container that runs has the GPUs that are left, so that they are charged for the pod, whatever becomes of the others.
    let n_held = u32::try_from(held.len()).unwrap_or(u32::MAX);
    let account = Account {
        holdings: Holdings::from(held),
        problem: gone.or(problem),
        contradicts,
    };
    Ok((account, request.devices.saturating_sub(n_held)))
}

/// The first entry of a record whose GPU an earlier entry names too.
pub(super) fn named_twice<'a>(
    shares: &'a [RecordedPart],
    context: NodeContext<'_>,
) -> Option<&'a RecordedPart> {
    for (at, share) in shares.iter().enumerate() {
        let mut earlier = shares.iter().take(at);
        if earlier.any(|other| is_same(&other.device, &share.device, context)) {
            return Some(share);
        }
    }
    None
}

/// The memory of a share: that of the spec, unless a memory unit had another size when the pod was placed, or both differ by
/// rounding alone; then the larger of record and spec. `units` is the pod's amount in units at its placement, if placed by units.
/// Returns also the contradiction between record and spec, and true if the record names more memory or compute than the spec.
fn bounded(
    share: &RecordedPart,
    units: Option<GpushareRecord>,
    request: &ShareRequest,
    context: NodeContext<'_>,
) -> (HeldMemory, Option<String>, bool) {
    let gpu = device_name(&share.kind, &share.device);
    let names_more_core = share.core > request.core;
    let (recorded, requested) = (share.core, request.core);
    let core_doubt = names_more_core
        .then(|| format!("its record says {recorded} percent of core on {gpu}, its spec {requested}"));
    let spec = match request.memory {
        RequestedMemory::Ratio(ratio) => {
            let recorded = share.ratio;
            let doubt = (recorded > ratio)
                .then(|| format!("its record says {recorded} percent of {gpu}, its spec {ratio}"));
            let names_more = names_more_core || doubt.is_some();
            let memory = HeldMemory::Requested(request.memory);
            return (memory, doubt.or(core_doubt), names_more);
        }
        RequestedMemory::Bytes(bytes) => Some(bytes),
        RequestedMemory::Units(units) => {
            let unit = context.inventory.and_then(|inventory| inventory.unit_bytes);
            unit.map(|unit| units.saturating_mul(unit))
        }
    };
    let (Some(record), Some(spec)) = (share.bytes, spec) else {
        // Without a unit size only the record has the bytes.
        let memory = match share.bytes {
            Some(bytes) => HeldMemory::Exact(EngineMemory::from_bytes(bytes)),
            None => HeldMemory::Requested(request.memory),
        };
        return (memory, core_doubt, names_more_core);
    };
    let is_of_other_unit = units.is_some_and(|units| {
        let is_all = request.memory == RequestedMemory::Units(units.pod_units);
        is_all && units_of_device(&share.device, units, context).is_some()
    });
    // Other writers of records round a share down, which loses less than a byte per device.
    let differs = record.abs_diff(spec) > u64::from(request.devices);
    let doubt = differs.then(|| format!("its record says {record} bytes on {gpu}, its spec {spec}"));
    let bytes = if is_of_other_unit || !differs {
        record.max(spec)
    } else {
        spec
    };
    let memory = HeldMemory::Exact(EngineMemory::from_bytes(bytes));
    let names_more = names_more_core || (differs && record > spec && !is_of_other_unit);
    (memory, doubt.or(core_doubt), names_more)
}

/// The account of a pod whose only record is gpushare-scheduler-extender's: the minor of a GPU, and memory units of the size that
/// a unit had when the pod was placed.
pub(super) fn from_gpushare(
    record: GpushareRecord,
    request: &ShareRequest,
    context: NodeContext<'_>,
) -> Account {
    let gpu = DeviceRef::Minor(record.idx);
    if let Some(problem) = context.absent(&DeviceType::Gpu, &gpu) {
        return on_unknown_gpus(*request, context, problem);
    }
    let RequestedMemory::Units(units) = request.memory else {
        let problem = "its only record is gpushare's, but it does not ask for memory units";
        return on_unknown_gpus(*request, context, problem.to_owned());
    };
    let (memory, problem, trusted) =
        if let Some((now, gpu_bytes, unit)) = units_of_device(&gpu, record, context) {
            let part = u128::from(gpu_bytes) * u128::from(record.pod_units.min(units));
            let part = u64::try_from(part.div_ceil(u128::from(record.device_units))).unwrap_or(u64::MAX);
            let bytes = part.max(units.saturating_mul(unit));
            let problem = format!(
                "GPU {} had {} units when it was placed and has {now} now",
                record.idx, record.device_units
            );
            let memory = HeldMemory::Exact(EngineMemory::from_bytes(bytes));
            (memory, Some(problem), false)
        } else {
            let differs = record.pod_units != 0 && record.pod_units != units;
            let problem =
                differs.then(|| format!("its record says {} units, its spec {units}", record.pod_units));
            (HeldMemory::Requested(request.memory), problem, !differs)
        };
    let part = HeldPart {
        memory,
        core: request.core,
        slots: request.slots,
        trusted,
        ..HeldPart::new(DeviceType::Gpu, gpu)
    };
    Account {
        holdings: Holdings::from(vec![part]),
        problem,
        contradicts: record.pod_units > units,
    }
}

/// The number of memory units that the recorded GPU has now, the bytes of the GPU, and the bytes of a unit. `None` if the record
/// has that number, with or without the driver's own memory, or if it cannot be compared.
fn units_of_device(
    gpu: &DeviceRef,
    record: GpushareRecord,
    context: NodeContext<'_>,
) -> Option<(u64, u64, u64)> {
    let unit = context.inventory?.unit_bytes.filter(|unit| *unit > 0)?;
    let gpu = context.gpu(gpu)?;
    let now = gpu.memory_bytes / unit;
    // Zero is a record without that number. The driver's own memory counted as the pods' when older records were written.
    let is_known = [0, now, gpu.memory_with_reserved() / unit].contains(&record.device_units);
    (!is_known).then_some((now, gpu.memory_bytes, unit))
}

/// Returns true if two references, by UUID or minor, name one GPU, as far as the node's GPUs are known.
fn is_same(one: &DeviceRef, other: &DeviceRef, context: NodeContext<'_>) -> bool {
    match context.gpu(one) {
        Some(gpu) => context.gpu(other) == Some(gpu),
        None => one == other,
    }
}
