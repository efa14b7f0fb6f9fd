//! The devices that a pod holds on its node: spec, record and kubelet's allocations combined.

use placement::{
    DeviceRef, DeviceType, Exclusion, HeldMemory, HeldPart, Holdings, Memory, RequestedMemory, ShareRequest,
};
use proto::pod::ALL_DEVICES;
use proto::request::{Dialect, GpuRequest};

use crate::inventory::is_certainly_absent;

use super::kubelet_allocations::{self, AllocatedDevice};
use super::others::others_held;
use super::shares::{from_gpushare, named_shares, named_twice, on_unknown_gpus};
use super::{
    Account, NodeContext, ParsedRequest, PluginReport, PodFacts, Recorded, WHOLE_DEVICE, per_device,
};

/// The compute of a whole GPU, in percent.
const WHOLE_CORE: u32 = 100;

/// The devices that the pod holds with this record: GPUs, devices of other types, and those that kubelet allocated to it.
pub(crate) fn account_of(facts: &PodFacts, record: &Recorded, context: NodeContext<'_>) -> Account {
    let gpus = match context.report {
        PluginReport::NoDevices => without_devices(record),
        PluginReport::Silent | PluginReport::Pending => gpus_held(&facts.request, record, context),
    };
    let mut holdings = gpus.holdings;
    let (others, problem) = others_held(facts.request.others(), record, context);
    holdings.parts.extend(others);
    // After the devices: exclusive use counts only for types of which the pod holds some.
    holdings.exclusions = exclusions(facts, &holdings, record, context);
    let absent = kubelet_allocations::add_allocated(&mut holdings, context.allocated, context.inventory);
    let problems: Vec<String> = [gpus.problem, problem, absent].into_iter().flatten().collect();
    Account {
        holdings,
        problem: (!problems.is_empty()).then(|| problems.join("; ")),
        contradicts: gpus.contradicts,
    }
}

/// The GPUs that the pod holds with this record, by the kind of its request: shares, whole GPUs of a vendor's resource, the
/// sight of all GPUs, or none. An invalid request counts as the most that its amounts could mean.
fn gpus_held(request: &ParsedRequest, record: &Recorded, context: NodeContext<'_>) -> Account {
    let request = match request {
        ParsedRequest::Invalid(error, bounds) => {
            let mut account = shared_gpus(bounds.request(context.inventory), record, context);
            account.problem = Some(match account.problem {
                None => error.to_string(),
                Some(problem) => format!("{error}; {problem}"),
            });
            return account;
        }
        ParsedRequest::Valid(request) => request.gpus.as_ref(),
    };
    match request {
        None => unrequested_gpus(record, context),
        Some(request) if request.dialect == Dialect::Vendor => whole_gpus(request, record, context),
        Some(request) if request.dialect == Dialect::AllDevices => match all_devices_doubt(record, context) {
            None => all_gpus_seen(request.devices, record, context),
            Some(doubt) => Account {
                problem: Some(doubt),
                ..shared_gpus(WHOLE_DEVICE, record, context)
            },
        },
        Some(request) => shared_gpus(per_device(request), record, context),
    }
}

/// The pod's demands to be alone on devices (exclusive policies), for the types that it holds devices of.
fn exclusions(
    facts: &PodFacts,
    holdings: &Holdings,
    record: &Recorded,
    context: NodeContext<'_>,
) -> Vec<(DeviceType, Exclusion)> {
    let gpus = facts.request.gpus();
    let sees_all = gpus.is_some_and(|gpus| gpus.dialect == Dialect::AllDevices);
    // A pod that only sees all GPUs keeps no other pod off them.
    let sees_only = sees_all && all_devices_doubt(record, context).is_none();
    let mut exclusions = Vec::new();
    let constraints = facts.constraints.iter().flatten();
    for (kind, constraint) in constraints.flat_map(|constraints| &constraints.by_kind) {
        if let Some(exclusion) = constraint.exclusion
            && holdings.has(kind)
            && !(sees_only && *kind == DeviceType::Gpu)
        {
            exclusions.push((kind.clone(), exclusion));
        }
    }
    exclusions
}

/// The GPUs of a pod to which kubelet allocated no device, as its node's plugin reports: none, whatever the record names.
fn without_devices(record: &Recorded) -> Account {
    let names_gpus = matches!(record, Recorded::Gpushare(_)) || !record.gpus().is_empty();
    let problem = "its record names GPUs, and the plugin of its node reports that it was given none";
    Account {
        problem: names_gpus.then(|| problem.to_owned()),
        contradicts: names_gpus,
        ..Account::default()
    }
}

/// Shares of the GPUs in the record, or of any GPU of the node if the record is not usable.
fn shared_gpus(request: ShareRequest, record: &Recorded, context: NodeContext<'_>) -> Account {
    match record {
        Recorded::Devices { units, .. } if !record.gpus().is_empty() => {
            let (mut account, n_gone) = match named_shares(record.gpus(), *units, &request, context) {
                Ok(named) => named,
                Err(problem) => return on_unknown_gpus(request, context, problem),
            };
            // In place of each GPU that is gone, the pod may be on any other GPU.
            if n_gone > 0 {
                let gone = ShareRequest {
                    devices: n_gone,
                    ..request
                };
                let gone = on_unknown_gpus(gone, context, String::new()).holdings;
                account.holdings.parts.extend(gone.parts);
                account.holdings.pending = gone.pending;
            }
            account
        }
        // A record by gpushare-scheduler-extender: its annotations name one GPU by minor, and memory units.
        Recorded::Gpushare(record) => from_gpushare(*record, &request, context),
        Recorded::Unreadable(problem) => on_unknown_gpus(request, context, problem.to_string()),
        Recorded::Missing | Recorded::Devices { .. } => {
            on_unknown_gpus(request, context, "it has no allocation record".to_owned())
        }
    }
}

/// The GPUs of a pod that requests none, but whose record may name some.
///
/// On a node with our plugin neither kubelet nor the runtime hook gives such a pod a device, and it holds nothing. The runtime
/// hook of another project may have followed the record, as far as the node has the devices in it.
fn unrequested_gpus(record: &Recorded, context: NodeContext<'_>) -> Account {
    if !matches!(record, Recorded::Devices { .. }) {
        let mut account = Account::default();
        // kubelet allocated devices of resources that are not known here, such as parts of GPUs.
        account.holdings.is_vendor = !context.allocated.is_empty();
        return account;
    }
    let gpus = record.gpus();
    if gpus.is_empty() {
        return Account::default();
    }
    let may_be_followed = context.report == PluginReport::Silent && named_twice(gpus, context).is_none();
    let mut held = Vec::new();
    for share in gpus {
        if !may_be_followed || context.absent(&share.kind, &share.device).is_some() {
            continue;
        }
        let memory = match (share.bytes, share.ratio) {
            (Some(bytes), _) => RequestedMemory::Bytes(bytes),
            (None, 0) => RequestedMemory::Bytes(0),
            (None, ratio) => RequestedMemory::Ratio(ratio),
        };
        held.push(HeldPart {
            memory: HeldMemory::Requested(memory),
            core: share.core,
            // The pod may run on the device, so others see one pod more there; nothing proves the amounts.
            slots: 1,
            trusted: false,
            ..HeldPart::new(DeviceType::Gpu, share.device.clone())
        });
    }
    Account {
        holdings: Holdings::from(held),
        problem: Some("its record names GPUs, its spec asks for none".to_owned()),
        contradicts: true,
    }
}

/// The whole GPUs of a pod with a vendor's resource: those of its record, or without a usable record [`unknown_whole_gpus`].
fn whole_gpus(request: &GpuRequest, record: &Recorded, context: NodeContext<'_>) -> Account {
    let per_device = ShareRequest {
        // A whole GPU is shared with no other pod, so it takes no slot.
        slots: 0,
        ..per_device(request)
    };
    let named = match record {
        Recorded::Devices { units, .. } if !record.gpus().is_empty() => {
            named_shares(record.gpus(), *units, &per_device, context)
        }
        Recorded::Unreadable(problem) => Err(problem.to_string()),
        _ => Err("it is not known which GPUs the vendor's plugin has given it".to_owned()),
    };
    let (mut account, n_gone) = match named {
        Ok(named) => named,
        Err(problem) => return unknown_whole_gpus(request.devices, &[], Some(problem), context),
    };
    let mut allocated = Vec::new();
    for device in context.allocated {
        allocated.push(context.gpu(&DeviceRef::Id((&*device.id).into())));
    }
    let is_other = |part: &HeldPart| !allocated.contains(&context.gpu(&part.device));
    let is_contradicted = !allocated.is_empty() && account.holdings.parts.iter().any(is_other);
    for part in &mut account.holdings.parts {
        part.memory = HeldMemory::Requested(RequestedMemory::Ratio(100));
        part.core = context.gpu(&part.device).map_or(WHOLE_CORE, |gpu| gpu.core);
        part.trusted &= !is_contradicted;
    }
    if is_contradicted {
        let contradiction = "kubelet has given it other GPUs than its record names";
        account.problem.get_or_insert(contradiction.to_owned());
        account.contradicts = true;
    }
    // In place of the GPUs of the record that the node does not have any more, the pod may hold any others.
    let gone = unknown_whole_gpus(n_gone, &account.holdings.parts, None, context).holdings;
    account.holdings.pending = gone.pending;
    account.holdings.n_unknown_gpus = gone.n_unknown_gpus;
    account.holdings.is_vendor = true;
    account
}

/// The account of the whole GPUs that a pod has by its request and of which only the number is known. GPUs that kubelet reports
/// besides the `held` ones are not among them, since [`kubelet_allocations::add_allocated`] adds those later.
fn unknown_whole_gpus(
    n_requested: u32,
    held: &[HeldPart],
    problem: Option<String>,
    context: NodeContext<'_>,
) -> Account {
    let mut missing = n_requested;
    for AllocatedDevice { id, .. } in context.allocated {
        let is_other = match (context.gpu(&DeviceRef::Id((&**id).into())), context.inventory) {
            (Some(gpu), _) => !held.iter().any(|part| part.device.identifies(gpu)),
            // The allocation of a GPU that the node certainly does not have takes none of its GPUs.
            (None, Some(inventory)) => is_certainly_absent(id, inventory),
            (None, None) => true,
        };
        missing = missing.saturating_sub(is_other.into());
    }
    let our_plugin_serves = context.report == PluginReport::Pending
        && context.inventory.is_some_and(|inventory| inventory.serves_vendor);
    let mut holdings = Holdings {
        is_vendor: true,
        ..Holdings::default()
    };
    // Our plugin lets the pod start on free GPUs alone; the vendor's plugin may have allocated any.
    if !our_plugin_serves {
        holdings.n_unknown_gpus = missing;
    } else if missing > 0 {
        holdings.pending = Some(ShareRequest {
            devices: missing,
            core: WHOLE_CORE,
            ..WHOLE_DEVICE
        });
    }
    Account {
        holdings,
        problem: problem.filter(|_| missing > 0),
        contradicts: false,
    }
}

/// The reason for which the annotation of a pod to see all devices does not count; `None` if it counts.
///
/// The author of a pod may have written the annotation and the record. So both count only where the operator allows it, and where
/// the record names every healthy GPU: with one GPU and no amounts it would give the pod that GPU without a charge.
fn all_devices_doubt(record: &Recorded, context: NodeContext<'_>) -> Option<String> {
    if !context.allows_all_devices {
        return Some(format!(
            "annotation {ALL_DEVICES} does not count without --allow-all-devices, so it holds all of what it may see"
        ));
    }
    if record.gpus().is_empty() {
        return Some(format!(
            "annotation {ALL_DEVICES} counts only with an allocation record that names GPUs"
        ));
    }
    let Some(inventory) = context.inventory else {
        return Some(format!(
            "annotation {ALL_DEVICES} does not count on a node whose GPUs are not known"
        ));
    };
    let mut gpus = inventory.gpus.iter();
    let named = record.gpus().iter().map(|share| context.gpu(&share.device));
    let named: Vec<_> = named.collect();
    let uuid = &gpus.find(|gpu| gpu.healthy && !named.contains(&Some(gpu)))?.id;
    Some(format!(
        "annotation {ALL_DEVICES} counts only where the record names every GPU of the node, and GPU {uuid} is not in it"
    ))
}

/// The GPUs of a pod that sees all GPUs of its node: those in its record with the amounts there, which are normally none. The
/// first GPU counts the slots.
fn all_gpus_seen(slots: u32, record: &Recorded, context: NodeContext<'_>) -> Account {
    let mut problem = None;
    let mut parts: Vec<HeldPart> = Vec::with_capacity(record.gpus().len());
    for share in record.gpus() {
        let absent = context.absent(&share.kind, &share.device);
        if absent.is_none() && parts.iter().all(|held| held.device != share.device) {
            parts.push(HeldPart {
                memory: HeldMemory::Exact(Memory::from_bytes(share.bytes.unwrap_or(0))),
                core: share.core,
                slots: if parts.is_empty() { slots } else { 0 },
                ..HeldPart::new(DeviceType::Gpu, share.device.clone())
            });
        }
        problem = problem.or(absent);
    }
    Account {
        holdings: Holdings::from(parts),
        problem,
        contradicts: false,
    }
}
