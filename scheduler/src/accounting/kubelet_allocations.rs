//! Devices that kubelet allocated to pods of other schedulers, from the checkpoints on a node's Device object.

use std::collections::{BTreeMap, BTreeSet};

use placement::{
    Device, DeviceRef, Function, GpuRef, GpuUuid, HeldDevice, HeldGpus, HeldMemory, HeldShare, Holdings,
    Inventory, NamedAmounts, RequestedMemory,
};
use proto::kubelet_allocations::{KubeletAllocation, KubeletAllocations, physical_id};
use proto::resource::{FPGA, GPU_SHARED, RDMA, ResourceNames, VENDOR_GPUS};

/// A device that kubelet allocated to a pod, which counts as used wholly.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct AllocatedDevice {
    /// The device ID, or its UUID or PCI address.
    pub id: Box<str>,
    /// True if the vendor's plugin may allocate it to several pods.
    is_replica: bool,
    /// True if it is certainly a GPU.
    is_gpu: bool,
}

/// The devices of each pod, by UID.
pub type AllocationsByPod = BTreeMap<Box<str>, Vec<AllocatedDevice>>;

/// Reads the annotation of a node, except for the resources that our plugin serves.
pub fn of_checkpoints(checkpoints: &KubeletAllocations, names: &ResourceNames) -> AllocationsByPod {
    let mut by_pod: BTreeMap<Box<str>, BTreeSet<AllocatedDevice>> = BTreeMap::new();
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
            AllocatedDevice {
                id: physical.into(),
                // Replicas of time-slicing share a device, so that several pods may hold it whole.
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

/// Adds allocated devices to holdings, and returns the problem with those that cannot be counted.
pub fn join(
    holdings: &mut Holdings,
    given: &[AllocatedDevice],
    inventory: Option<&Inventory>,
) -> Option<String> {
    let unknown: Vec<&AllocatedDevice> = given
        .iter()
        .filter(|device| !hold(holdings, device, inventory))
        .collect();
    let shown: String = unknown.first()?.id.chars().take(64).collect();
    Some(format!(
        "kubelet has given it {} devices that the node does not have, such as {shown:?}",
        unknown.len()
    ))
}

/// The holdings of a pod of which only its allocations are known, and the problem with those that cannot be counted.
pub fn alone(given: &[AllocatedDevice], inventory: Option<&Inventory>) -> (Holdings, Option<String>) {
    let mut holdings = Holdings {
        is_vendor: true,
        ..Holdings::default()
    };
    let problem = join(&mut holdings, given, inventory);
    let is_unknown =
        |device: &&AllocatedDevice| device.is_gpu && !hold(&mut holdings.clone(), device, inventory);
    holdings.unknown_whole = u32::try_from(given.iter().filter(is_unknown).count()).unwrap_or(u32::MAX);
    (holdings, problem)
}

/// Adds a device to holdings, and returns true if the node has it.
fn hold(holdings: &mut Holdings, given: &AllocatedDevice, inventory: Option<&Inventory>) -> bool {
    let gpu = inventory.map(|inventory| inventory.gpus.iter().find(|gpu| gpu.uuid.as_str() == &*given.id));
    match gpu {
        None if given.is_gpu => hold_gpu(holdings, given, None, 100),
        Some(Some(gpu)) => hold_gpu(holdings, given, Some(gpu.minor), gpu.core),
        None | Some(None) => return hold_other(holdings, given, inventory),
    }
    true
}

fn hold_gpu(holdings: &mut Holdings, given: &AllocatedDevice, minor: Option<u32>, core: u32) {
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

fn hold_other(holdings: &mut Holdings, given: &AllocatedDevice, inventory: Option<&Inventory>) -> bool {
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
    // The part of the device that a virtual function uses is not known.
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

/// The virtual function of a device by its PCI address.
fn function<'a>(device: &'a Device, id: &str) -> Option<&'a Function> {
    device
        .attributes
        .functions
        .iter()
        .flat_map(|group| &group.functions)
        .find(|function| function.id.as_str() == id)
}
