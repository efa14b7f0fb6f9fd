//! What a pod holds on its node: spec, record, and what kubelet has given it, put together.

use placement::{Exclusion, GpuRef, GpuUuid, HeldMemory, HeldShare, Holding, Holdings, Inventory, Kind, Memory, MemoryAsk, Request};
use proto::pod::ALL_DEVICES;
use proto::request::{Dialect, GpuRequest};

use super::others::others_held;
use super::shares::{GpuAccount, absent, anywhere, from_gpushare, from_shares};
use super::{Account, Ask, PodFacts, Recorded, RecordedShare, Surroundings, per_device};
use crate::given;

/// What a pod is taken to ask for whose request cannot be read: all of a device.
const WHOLE_DEVICE: Request = Request { devices: 1, memory: MemoryAsk::Ratio(100), core: 0, slots: 0 };

impl PodFacts {
    /// What the pod holds if its record says this.
    pub fn account_of(&self, record: &Recorded, around: Surroundings<'_>) -> Account {
        let mut problems = Vec::new();
        let mut holdings = match &self.ask {
            Ask::Invalid(error) => {
                let account = shared(WHOLE_DEVICE, record, around.inventory);
                problems.push(account.problem.unwrap_or_else(|| error.to_string()));
                Holdings::from(account.holding)
            }
            Ask::Request(request) => {
                let (holdings, problem) = match &request.gpus {
                    None => unasked(record, around),
                    Some(request) if request.dialect == Dialect::Vendor => whole(request, record, around),
                    Some(request) if request.dialect == Dialect::AllDevices => match all_devices_doubt(record, around) {
                        None => all(request.devices, record, around.inventory),
                        Some(doubt) => {
                            let account = shared(WHOLE_DEVICE, record, around.inventory);
                            (Holdings::from(account.holding), Some(doubt))
                        }
                    },
                    Some(request) => {
                        let account = shared(per_device(request), record, around.inventory);
                        (Holdings::from(account.holding), account.problem)
                    }
                };
                problems.extend(problem);
                holdings
            }
        };
        let (others, problem) = others_held(self.ask.others(), record, around);
        holdings.others = others;
        holdings.exclusions = self.exclusions(&holdings, record, around);
        problems.extend(problem);
        problems.extend(given::join(&mut holdings, around.given, around.inventory));
        Account { holdings, problem: (!problems.is_empty()).then(|| problems.join("; ")) }
    }

    /// What the pod keeps others from, of types that it holds devices of.
    fn exclusions(&self, holdings: &Holdings, record: &Recorded, around: Surroundings<'_>) -> Vec<(Kind, Exclusion)> {
        let sees_all = self.ask.gpus().is_some_and(|gpus| gpus.dialect == Dialect::AllDevices);
        let holds = |kind: &Kind| match kind {
            // A pod that sees all GPUs has none.
            Kind::Gpu if sees_all && all_devices_doubt(record, around).is_none() => false,
            Kind::Gpu => holdings.unknown_whole > 0 || holdings.gpus != Holding::Shares(Vec::new()),
            Kind::Other(kind) => holdings.others.iter().any(|held| held.kind == *kind),
        };
        let wishes = self.wishes.iter().flatten().flat_map(|wishes| &wishes.by_kind);
        let exclusions = wishes.filter_map(|(kind, wish)| Some((kind.clone(), wish.exclusion?)));
        exclusions.filter(|(kind, _)| holds(kind)).collect()
    }
}

/// Shares, as the record says or, if that does not do, wherever they may be.
fn shared(request: Request, record: &Recorded, inventory: Option<&Inventory>) -> GpuAccount {
    match record {
        Recorded::Missing => anywhere(request, "it has no allocation record".to_owned()),
        Recorded::Unreadable(problem) => anywhere(request, problem.to_string()),
        Recorded::Devices { gpus, .. } if gpus.is_empty() => anywhere(request, "it has no allocation record".to_owned()),
        Recorded::Devices { gpus, .. } => from_shares(gpus, &request, inventory),
        Recorded::Gpushare(record) => from_gpushare(*record, &request, inventory),
    }
}

/// A pod that asks for no GPU, but whose record may name some, which a runtime may have followed.
fn unasked(record: &Recorded, around: Surroundings<'_>) -> (Holdings, Option<String>) {
    let Recorded::Devices { gpus, .. } = record else {
        // Devices of kinds that nobody asks for by a name known here, such as parts of GPUs.
        let is_vendor = !around.given.is_empty();
        return (Holdings { is_vendor, ..Holdings::default() }, None);
    };
    if gpus.is_empty() {
        return (Holdings::default(), None);
    }
    let devices = u32::try_from(gpus.len()).unwrap_or(u32::MAX);
    let request = Request { devices, memory: MemoryAsk::Bytes(0), core: 0, slots: 1 };
    let account = from_shares(gpus, &request, around.inventory);
    let holding = match account.holding {
        Holding::Shares(shares) => Holding::Shares(shares.into_iter().map(|share| HeldShare { trusted: false, ..share }).collect()),
        Holding::Anywhere(_) => Holding::Anywhere(Request { devices, ..WHOLE_DEVICE }),
    };
    (Holdings::from(holding), Some("its record names GPUs, its spec asks for none".to_owned()))
}

/// Whole devices in the vendor's name. Without a record, those count that kubelet has given; the rest may be any.
fn whole(request: &GpuRequest, record: &Recorded, around: Surroundings<'_>) -> (Holdings, Option<String>) {
    let n_given = around.given.iter().filter(|given| is_gpu(&given.id, around.inventory)).count();
    let n_given = u32::try_from(n_given).unwrap_or(u32::MAX);
    let unknown = |problem: Option<String>| {
        let unknown_whole = request.devices.saturating_sub(n_given);
        (Holdings { unknown_whole, is_vendor: true, ..Holdings::default() }, problem.filter(|_| unknown_whole > 0))
    };
    let gpus = match record {
        Recorded::Devices { gpus, .. } if !gpus.is_empty() => gpus,
        Recorded::Unreadable(problem) => return unknown(Some(problem.to_string())),
        _ => return unknown(Some("it is not known which GPUs the vendor's plugin has given it".to_owned())),
    };
    let per_device = Request { slots: 0, ..per_device(request) };
    let account = from_shares(gpus, &per_device, around.inventory);
    let Holding::Shares(shares) = account.holding else { return unknown(account.problem) };
    let agrees = |share: &HeldShare| {
        let named = position(&share.gpu, around.inventory);
        around.given.is_empty() || around.given.iter().any(|given| position(&GpuRef::Uuid((&*given.id).into()), around.inventory) == named)
    };
    let is_contradicted = !shares.iter().all(agrees);
    let shares = shares.into_iter().map(|share| HeldShare {
        memory: HeldMemory::Ask(MemoryAsk::Ratio(100)),
        core: core_of(&share.gpu, around.inventory),
        trusted: share.trusted && !is_contradicted,
        ..share
    });
    let holdings = Holdings { is_vendor: true, ..Holdings::from(Holding::Shares(shares.collect())) };
    let contradiction = is_contradicted.then(|| "kubelet has given it other GPUs than its record names".to_owned());
    (holdings, account.problem.or(contradiction))
}

/// Returns the reason why the mark of a pod to see all devices of its node does not count; `None` if it counts.
///
/// The mark and the record stand in annotations that an author may have written, so both count only where the operator lets
/// pods see everything, and where the record names everything: a pod whose record names one GPU and no amounts would hold
/// that GPU for nothing. Unhealthy GPUs are not asked for, as none is given.
fn all_devices_doubt(record: &Recorded, around: Surroundings<'_>) -> Option<String> {
    if !around.allows_all_devices {
        return Some(format!("annotation {ALL_DEVICES} does not count without --allow-all-devices, so it holds all of what it may see"));
    }
    let gpus: &[RecordedShare] = match record {
        Recorded::Devices { gpus, .. } => gpus,
        _ => &[],
    };
    if gpus.is_empty() {
        return Some(format!("annotation {ALL_DEVICES} counts only with an allocation record that names GPUs"));
    }
    let Some(inventory) = around.inventory else {
        return Some(format!("annotation {ALL_DEVICES} does not count on a node whose GPUs are not known"));
    };
    let is_named = |uuid: &GpuUuid| gpus.iter().any(|share| names_gpu(&share.gpu, uuid, inventory));
    let unnamed = inventory.gpus.iter().find(|gpu| gpu.healthy && !is_named(&gpu.uuid))?;
    let uuid = unnamed.uuid.as_str();
    Some(format!("annotation {ALL_DEVICES} counts only where the record names every GPU of the node, and GPU {uuid} is not in it"))
}

/// Returns true if a reference is to the GPU of this UUID.
fn names_gpu(gpu: &GpuRef, uuid: &GpuUuid, inventory: &Inventory) -> bool {
    position(gpu, Some(inventory)).and_then(|at| inventory.gpus.get(at)).is_some_and(|named| named.uuid == *uuid)
}

/// All devices that the record names, of which the first has the place for sharers, and no amounts.
fn all(slots: u32, record: &Recorded, inventory: Option<&Inventory>) -> (Holdings, Option<String>) {
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
            shares.push(HeldShare { gpu: share.gpu.clone(), memory, core: share.core, slots, trusted: true });
        }
        problem = problem.or(absent);
    }
    (Holdings::from(Holding::Shares(shares)), problem)
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
