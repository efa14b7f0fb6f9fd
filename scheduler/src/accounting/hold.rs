//! The devices that a pod holds on its node: spec, record and kubelet's allocations combined.

use placement::{
    DeviceKind, Exclusion, GpuRef, GpuUuid, HeldGpus, HeldMemory, HeldShare, Holdings, Inventory, Memory,
    RequestedMemory, ShareRequest,
};
use proto::pod::ALL_DEVICES;
use proto::request::{Dialect, GpuRequest};

use super::kubelet_allocations;
use super::others::others_held;
use super::shares::{GpuAccount, absent, from_gpushare, from_shares, named_twice, unknown};
use super::{
    Account, Ask, NodeContext, PluginReport, PodFacts, Recorded, RecordedShare, WHOLE_DEVICE, per_device,
};

/// The core percentage of a whole GPU.
const WHOLE_PERCENT: u32 = 100;

impl PodFacts {
    /// The devices that the pod holds with this record.
    pub fn account_of(&self, record: &Recorded, around: NodeContext<'_>) -> Account {
        let Gpus {
            mut holdings,
            problem,
            contradicts,
        } = match around.report {
            PluginReport::NoDevices => without_devices(record),
            PluginReport::Silent | PluginReport::Pending => self.gpus_held(record, around),
        };
        let mut problems: Vec<String> = problem.into_iter().collect();
        let (others, problem) = others_held(self.ask.others(), record, around);
        holdings.others = others;
        holdings.exclusions = self.exclusions(&holdings, record, around);
        problems.extend(problem);
        problems.extend(kubelet_allocations::join(
            &mut holdings,
            around.given,
            around.inventory,
        ));
        Account {
            holdings,
            problem: (!problems.is_empty()).then(|| problems.join("; ")),
            contradicts,
        }
    }

    fn gpus_held(&self, record: &Recorded, around: NodeContext<'_>) -> Gpus {
        match &self.ask {
            Ask::Invalid(error, bounds) => {
                let gpus = Gpus::from(shared(bounds.request(around.inventory), record, around));
                let problem = gpus
                    .problem
                    .as_ref()
                    .map_or_else(|| error.to_string(), |problem| format!("{error}; {problem}"));
                Gpus {
                    problem: Some(problem),
                    ..gpus
                }
            }
            Ask::Request(request) => match &request.gpus {
                None => unasked(record, around),
                Some(request) if request.dialect == Dialect::Vendor => whole(request, record, around),
                Some(request) if request.dialect == Dialect::AllDevices => {
                    match all_devices_doubt(record, around) {
                        None => all(request.devices, record, around.inventory),
                        Some(doubt) => Gpus {
                            problem: Some(doubt),
                            ..Gpus::from(shared(WHOLE_DEVICE, record, around))
                        },
                    }
                }
                Some(request) => Gpus::from(shared(per_device(request), record, around)),
            },
        }
    }

    /// The exclusions of the pod, for the types that it holds devices of.
    fn exclusions(
        &self,
        holdings: &Holdings,
        record: &Recorded,
        around: NodeContext<'_>,
    ) -> Vec<(DeviceKind, Exclusion)> {
        let sees_all = self
            .ask
            .gpus()
            .is_some_and(|gpus| gpus.dialect == Dialect::AllDevices);
        let holds = |kind: &DeviceKind| match kind {
            // A pod that sees all GPUs holds none.
            DeviceKind::Gpu if sees_all && all_devices_doubt(record, around).is_none() => false,
            DeviceKind::Gpu => holdings.unknown_whole > 0 || holdings.gpus != HeldGpus::Shares(Vec::new()),
            DeviceKind::Other(kind) => holdings.others.iter().any(|held| held.kind == *kind),
        };
        let wishes = self.wishes.iter().flatten().flat_map(|wishes| &wishes.by_kind);
        let exclusions = wishes.filter_map(|(kind, wish)| Some((kind.clone(), wish.exclusion?)));
        exclusions.filter(|(kind, _)| holds(kind)).collect()
    }
}

/// The GPUs that a pod holds, whole ones included.
#[derive(Default)]
struct Gpus {
    holdings: Holdings,
    problem: Option<String>,
    contradicts: bool,
}

impl From<GpuAccount> for Gpus {
    fn from(account: GpuAccount) -> Self {
        let GpuAccount {
            holding,
            problem,
            contradicts,
        } = account;
        Self {
            holdings: Holdings::from(holding),
            problem,
            contradicts,
        }
    }
}

/// A pod to which kubelet allocated no device.
fn without_devices(record: &Recorded) -> Gpus {
    let is_named = matches!(record, Recorded::Gpushare(_))
        || matches!(record, Recorded::Devices { gpus, .. } if !gpus.is_empty());
    let problem = is_named.then(|| {
        "its record names GPUs, and the plugin of its node reports that it was given none".to_owned()
    });
    Gpus {
        problem,
        contradicts: is_named,
        ..Gpus::default()
    }
}

/// Shares of the devices in the record, or of any device if the record is not usable.
fn shared(request: ShareRequest, record: &Recorded, around: NodeContext<'_>) -> GpuAccount {
    let NodeContext {
        inventory, report, ..
    } = around;
    match record {
        Recorded::Missing => unknown(request, report, "it has no allocation record".to_owned()),
        Recorded::Unreadable(problem) => unknown(request, report, problem.to_string()),
        Recorded::Devices { gpus, .. } if gpus.is_empty() => {
            unknown(request, report, "it has no allocation record".to_owned())
        }
        Recorded::Devices { gpus, units, .. } => from_shares(gpus, *units, &request, inventory, report),
        Recorded::Gpushare(record) => from_gpushare(*record, &request, inventory, report),
    }
}

/// A pod that requests no GPU, but whose record may name some.
///
/// On a node with our plugin neither kubelet nor the runtime hook gives such a pod a device, and it holds nothing. The runtime hook
/// of another project may have followed the record, as far as the node has the devices in it.
fn unasked(record: &Recorded, around: NodeContext<'_>) -> Gpus {
    let Recorded::Devices { gpus, .. } = record else {
        // Devices of resources that are not known here, such as parts of GPUs.
        let is_vendor = !around.given.is_empty();
        return Gpus {
            holdings: Holdings {
                is_vendor,
                ..Holdings::default()
            },
            ..Gpus::default()
        };
    };
    if gpus.is_empty() {
        return Gpus::default();
    }
    let is_followed = around.report == PluginReport::Silent && named_twice(gpus, around.inventory).is_none();
    let held = gpus
        .iter()
        .filter(|share| is_followed && absent(&share.gpu, around.inventory).is_none())
        .map(|share| {
            let of_ratio = Some(RequestedMemory::Ratio(share.ratio)).filter(|_| share.ratio > 0);
            let memory = share
                .bytes
                .map(RequestedMemory::Bytes)
                .or(of_ratio)
                .unwrap_or(RequestedMemory::Bytes(0));
            HeldShare {
                gpu: share.gpu.clone(),
                memory: HeldMemory::Requested(memory),
                core: share.core,
                slots: 1,
                trusted: false,
            }
        });
    let holdings = Holdings::from(HeldGpus::Shares(held.collect()));
    Gpus {
        holdings,
        problem: Some("its record names GPUs, its spec asks for none".to_owned()),
        contradicts: true,
    }
}

/// Whole GPUs by a vendor's resource. Without a record those count that kubelet allocated; the rest may be any.
fn whole(request: &GpuRequest, record: &Recorded, around: NodeContext<'_>) -> Gpus {
    let n_given = around
        .given
        .iter()
        .filter(|given| is_gpu(&given.id, around.inventory))
        .count();
    let n_given = u32::try_from(n_given).unwrap_or(u32::MAX);
    let is_served = around.report == PluginReport::Pending
        && around.inventory.is_some_and(|inventory| inventory.serves_vendor);
    let unknown = |problem: Option<String>| {
        let missing = request.devices.saturating_sub(n_given);
        let problem = problem.filter(|_| missing > 0);
        // Our plugin serves them there; the vendor's plugin allocates any GPU.
        let holding = if is_served && missing > 0 {
            HeldGpus::Pending(ShareRequest {
                devices: missing,
                core: WHOLE_PERCENT,
                ..WHOLE_DEVICE
            })
        } else {
            HeldGpus::Shares(Vec::new())
        };
        let unknown_whole = if is_served { 0 } else { missing };
        Gpus {
            holdings: Holdings {
                unknown_whole,
                is_vendor: true,
                ..Holdings::from(holding)
            },
            problem,
            contradicts: false,
        }
    };
    let (gpus, units) = match record {
        Recorded::Devices { gpus, units, .. } if !gpus.is_empty() => (gpus, *units),
        Recorded::Unreadable(problem) => return unknown(Some(problem.to_string())),
        _ => {
            return unknown(Some(
                "it is not known which GPUs the vendor's plugin has given it".to_owned(),
            ));
        }
    };
    let per_device = ShareRequest {
        slots: 0,
        ..per_device(request)
    };
    let account = from_shares(gpus, units, &per_device, around.inventory, around.report);
    let HeldGpus::Shares(shares) = account.holding else {
        return unknown(account.problem);
    };
    let agrees = |share: &HeldShare| {
        let named = position(&share.gpu, around.inventory);
        around.given.is_empty()
            || around
                .given
                .iter()
                .any(|given| position(&GpuRef::Uuid((&*given.id).into()), around.inventory) == named)
    };
    let is_contradicted = !shares.iter().all(agrees);
    let shares = shares.into_iter().map(|share| HeldShare {
        memory: HeldMemory::Requested(RequestedMemory::Ratio(100)),
        core: core_of(&share.gpu, around.inventory),
        trusted: share.trusted && !is_contradicted,
        ..share
    });
    let holdings = Holdings {
        is_vendor: true,
        ..Holdings::from(HeldGpus::Shares(shares.collect()))
    };
    let contradiction =
        is_contradicted.then(|| "kubelet has given it other GPUs than its record names".to_owned());
    Gpus {
        holdings,
        problem: account.problem.or(contradiction),
        contradicts: account.contradicts || is_contradicted,
    }
}

/// The reason for which the annotation of a pod to see all devices does not count; `None` if it counts.
///
/// The author of a pod may have written the annotation and the record. So both count only where the operator allows it and where
/// the record names every GPU: a record with one GPU and no amounts would hold that GPU without a charge. Unhealthy GPUs need not
/// be in it, as none is allocated.
fn all_devices_doubt(record: &Recorded, around: NodeContext<'_>) -> Option<String> {
    if !around.allows_all_devices {
        return Some(format!(
            "annotation {ALL_DEVICES} does not count without --allow-all-devices, so it holds all of what it may see"
        ));
    }
    let gpus: &[RecordedShare] = match record {
        Recorded::Devices { gpus, .. } => gpus,
        _ => &[],
    };
    if gpus.is_empty() {
        return Some(format!(
            "annotation {ALL_DEVICES} counts only with an allocation record that names GPUs"
        ));
    }
    let Some(inventory) = around.inventory else {
        return Some(format!(
            "annotation {ALL_DEVICES} does not count on a node whose GPUs are not known"
        ));
    };
    let is_named = |uuid: &GpuUuid| gpus.iter().any(|share| names_gpu(&share.gpu, uuid, inventory));
    let unnamed = inventory
        .gpus
        .iter()
        .find(|gpu| gpu.healthy && !is_named(&gpu.uuid))?;
    let uuid = unnamed.uuid.as_str();
    Some(format!(
        "annotation {ALL_DEVICES} counts only where the record names every GPU of the node, and GPU {uuid} is not in it"
    ))
}

fn names_gpu(gpu: &GpuRef, uuid: &GpuUuid, inventory: &Inventory) -> bool {
    position(gpu, Some(inventory))
        .and_then(|at| inventory.gpus.get(at))
        .is_some_and(|named| named.uuid == *uuid)
}

/// All devices in the record, without amounts; the first holds the slots.
fn all(slots: u32, record: &Recorded, inventory: Option<&Inventory>) -> Gpus {
    let gpus: &[RecordedShare] = match record {
        Recorded::Devices { gpus, .. } => gpus,
        _ => &[],
    };
    let mut problem = None;
    let mut shares: Vec<HeldShare> = Vec::with_capacity(gpus.len());
    for share in gpus {
        let absent = absent(&share.gpu, inventory);
        if absent.is_none() && shares.iter().all(|held| held.gpu != share.gpu) {
            let memory = HeldMemory::Exact(Memory::from_bytes(share.bytes.unwrap_or(0)));
            let slots = if shares.is_empty() { slots } else { 0 };
            shares.push(HeldShare {
                gpu: share.gpu.clone(),
                memory,
                core: share.core,
                slots,
                trusted: true,
            });
        }
        problem = problem.or(absent);
    }
    Gpus {
        holdings: Holdings::from(HeldGpus::Shares(shares)),
        problem,
        contradicts: false,
    }
}

fn position(gpu: &GpuRef, inventory: Option<&Inventory>) -> Option<usize> {
    inventory?.gpus.iter().position(|device| match gpu {
        GpuRef::Uuid(uuid) => device.uuid == *uuid,
        GpuRef::Minor(minor) => device.minor == *minor,
    })
}

fn core_of(gpu: &GpuRef, inventory: Option<&Inventory>) -> u32 {
    let found = position(gpu, inventory).and_then(|at| inventory?.gpus.get(at));
    found.map_or(100, |gpu| gpu.core)
}

fn is_gpu(id: &str, inventory: Option<&Inventory>) -> bool {
    inventory.is_none_or(|inventory| inventory.gpus.iter().any(|gpu| gpu.uuid.as_str() == id))
}
