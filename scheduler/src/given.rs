//! Which devices kubelet has given to pods that somebody else placed: the checkpoints on a node's Device object, as far as
//! they concern devices that are counted here.

use std::collections::{BTreeMap, BTreeSet};

use placement::{
    Device, DeviceRef, Function, GpuRef, GpuUuid, HeldDevice, HeldGpus, HeldMemory, HeldShare, Holdings,
    Inventory, NamedAmounts, RequestedMemory,
};
use proto::kubelet_allocations::{KubeletAllocation, KubeletAllocations, physical_id};
use proto::resource::{FPGA, GPU_SHARED, RDMA, ResourceNames, VENDOR_GPUS};

/// A device that a pod has been given, and that it is taken to use wholly.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Given {
    /// What identifies it.
    pub id: Box<str>,
    /// Whether the vendor's plugin may have given it to several pods.
    is_replica: bool,
    /// Whether it is certainly a GPU.
    is_gpu: bool,
}

/// The devices of each pod, by UID.
pub type GivenByPod = BTreeMap<Box<str>, Vec<Given>>;

/// What checkpoints say, but for resources that this project's own plugin serves.
pub fn of_checkpoints(checkpoints: &KubeletAllocations, names: &ResourceNames) -> GivenByPod {
    let mut by_pod: BTreeMap<Box<str>, BTreeSet<Given>> = BTreeMap::new();
    let ours = [GPU_SHARED, RDMA, FPGA, &names.memory];
    for KubeletAllocation {
        pod_uid,
        resource_name,
        device_ids,
        ..
    } in &checkpoints.entries
    {
        if ours.contains(&resource_name.as_str()) {
            continue;
        }
        let is_gpu = VENDOR_GPUS.contains(&resource_name.as_str());
        let given = device_ids.iter().map(|id| {
            let physical = physical_id(id);
            Given {
                id: physical.into(),
                is_replica: physical.len() != id.len(),
                is_gpu,
            }
        });
        by_pod.entry(pod_uid.as_str().into()).or_default().extend(given);
    }
    by_pod
        .into_iter()
        .map(|(uid, given)| (uid, given.into_iter().collect()))
        .collect()
}

/// Adds devices that were given to what is held anyway; what cannot be counted, for people.
pub fn join(holdings: &mut Holdings, given: &[Given], inventory: Option<&Inventory>) -> Option<String> {
    let unknown: Vec<&Given> = given
        .iter()
        .filter(|device| !hold(holdings, device, inventory))
        .collect();
    let shown: String = unknown.first()?.id.chars().take(64).collect();
    Some(format!(
        "kubelet has given it {} devices that the node does not have, such as {shown:?}",
        unknown.len()
    ))
}

/// What a pod holds of which nothing is known but what it was given, and what of that cannot be counted, for people.
pub fn alone(given: &[Given], inventory: Option<&Inventory>) -> (Holdings, Option<String>) {
    let mut holdings = Holdings {
        is_vendor: true,
        ..Holdings::default()
    };
    let problem = join(&mut holdings, given, inventory);
    let is_unknown = |device: &&Given| device.is_gpu && !hold(&mut holdings.clone(), device, inventory);
    holdings.unknown_whole = u32::try_from(given.iter().filter(is_unknown).count()).unwrap_or(u32::MAX);
    (holdings, problem)
}

/// Counts a device as used, if the node has it.
fn hold(holdings: &mut Holdings, given: &Given, inventory: Option<&Inventory>) -> bool {
    let gpu = inventory.map(|inventory| inventory.gpus.iter().find(|gpu| gpu.uuid.as_str() == &*given.id));
    match gpu {
        None if given.is_gpu => hold_gpu(holdings, given, None, 100),
        Some(Some(gpu)) => hold_gpu(holdings, given, Some(gpu.minor), gpu.core),
        None | Some(None) => return hold_other(holdings, given, inventory),
    }
    true
}

fn hold_gpu(holdings: &mut Holdings, given: &Given, minor: Option<u32>, core: u32) {
    let HeldGpus::Shares(shares) = &mut holdings.gpus else {
        return;
    };
    let gpu = GpuRef::Uuid(GpuUuid::from(&*given.id));
    let is_held =
        |share: &HeldShare| share.gpu == gpu || minor.is_some_and(|minor| share.gpu == GpuRef::Minor(minor));
    if !shares.iter().any(is_held) {
        let memory = HeldMemory::Requested(RequestedMemory::Ratio(100));
        shares.push(HeldShare {
            gpu,
            memory,
            core,
            slots: 0,
            trusted: !given.is_replica,
        });
    }
}

fn hold_other(holdings: &mut Holdings, given: &Given, inventory: Option<&Inventory>) -> bool {
    let classes = inventory
        .and_then(|inventory| inventory.other_devices.as_deref())
        .unwrap_or_default();
    let mut devices = classes
        .iter()
        .flat_map(|class| class.devices.iter().map(|device| (&class.kind, device)));
    let named = |device: &Device| device.id.as_str() == &*given.id;
    let Some((kind, device)) =
        devices.find(|(_, device)| named(device) || function(device, &given.id).is_some())
    else {
        return false;
    };
    let reference = DeviceRef::Id(device.id.clone());
    // Of a virtual function nobody says how much of its device it uses.
    let (amounts, functions) = match function(device, &given.id) {
        Some(function) if !named(device) => (NamedAmounts::new(), vec![function.id.clone()]),
        _ => (device.resources.clone(), Vec::new()),
    };
    let is_held = |held: &HeldDevice| {
        let is_same = held.kind == *kind && held.device == reference;
        is_same
            && functions
                .iter()
                .all(|function| held.functions.is_empty() || held.functions.contains(function))
    };
    if !holdings.others.iter().any(is_held) {
        holdings.others.push(HeldDevice {
            kind: kind.clone(),
            device: reference,
            amounts,
            functions,
            trusted: !given.is_replica,
        });
    }
    true
}

/// The virtual function of a device that is identified so.
fn function<'a>(device: &'a Device, id: &str) -> Option<&'a Function> {
    device
        .attributes
        .functions
        .iter()
        .flat_map(|group| &group.functions)
        .find(|function| function.id.as_str() == id)
}
