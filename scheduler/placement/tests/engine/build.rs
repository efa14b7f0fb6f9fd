//! Builders for tests.

use placement::{
    Device, DeviceRef, DeviceType, DeviceView, Evictable, Fleet, HeldMemory, HeldPart, Hints, Holdings,
    Inventory, Memory, NodeId, OwnerId, Placement, Reason, RequestedMemory, ShareRequest,
};

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GIB: u64 = 1 << 30;

pub(crate) fn mib(mib: u64) -> Memory {
    Memory::from_bytes(mib * MIB)
}

/// A healthy GPU named `<node>-<minor>`.
pub(crate) fn gpu(node: &str, minor: u32, memory_bytes: u64) -> Device {
    Device {
        memory_bytes,
        core: 100,
        slots: 100,
        ..Device::new(format!("{node}-{minor}"), minor)
    }
}

/// GPUs with this memory in MiB; one memory unit is a MiB.
pub(crate) fn inventory(node: &str, mib: &[u64]) -> Inventory {
    let gpus = (0..)
        .zip(mib)
        .map(|(minor, mib)| gpu(node, minor, mib * MIB))
        .collect();
    Inventory {
        gpus,
        unit_bytes: Some(MIB),
        ..Inventory::default()
    }
}

/// A pod that may be evicted, without budgets.
pub(crate) fn evictable(owner: &str, priority: i32) -> Evictable {
    Evictable {
        owner: owner.into(),
        priority,
        started: 0,
        is_leaving: false,
        is_forced: false,
        budgets: Vec::new(),
        frees: Vec::new(),
    }
}

/// A fleet of one node, `n`.
pub(crate) fn one_node(mib: &[u64]) -> (Fleet, NodeId) {
    let mut fleet = Fleet::new();
    assert!(fleet.set_inventory("n", inventory("n", mib)).is_empty());
    let id = fleet.node_id("n").unwrap();
    (fleet, id)
}

pub(crate) fn ask(devices: u32, memory: RequestedMemory) -> ShareRequest {
    ShareRequest {
        devices,
        memory,
        core: 0,
        slots: 1,
    }
}

pub(crate) fn units(units: u64) -> ShareRequest {
    ask(1, RequestedMemory::Units(units))
}

pub(crate) fn ratio(percent: u32) -> ShareRequest {
    ask(1, RequestedMemory::Ratio(percent))
}

pub(crate) fn share(gpu: DeviceRef, memory: RequestedMemory) -> HeldPart {
    HeldPart {
        memory: HeldMemory::Requested(memory),
        core: 0,
        slots: 1,
        ..HeldPart::new(DeviceType::Gpu, gpu)
    }
}

pub(crate) fn on_minor(minor: u32, memory: RequestedMemory) -> Holdings {
    Holdings::from(vec![share(DeviceRef::Minor(minor), memory)])
}

/// Sets a fact.
pub(crate) fn hold(fleet: &mut Fleet, owner: &str, node: &str, holding: Holdings) {
    fleet.hold(&owner.into(), node, holding);
}

/// Leaves exactly this memory in MiB free on each GPU of a node.
pub(crate) fn fill(fleet: &mut Fleet, node: &str, free_mib: &[u64]) {
    let id = fleet.node_id(node).unwrap();
    let totals: Vec<(u32, u64)> = gpus(fleet, id)
        .iter()
        .map(|gpu| (gpu.device.minor, gpu.device.memory_bytes / MIB))
        .collect();
    for ((minor, total), free) in totals
        .into_iter()
        .zip(free_mib)
        .filter(|((_, total), free)| total > free)
    {
        hold(
            fleet,
            &format!("filler-{node}-{minor}"),
            node,
            on_minor(minor, RequestedMemory::Units(total - free)),
        );
    }
}

/// Chooses and reserves, by default policy.
pub(crate) fn place(
    fleet: &mut Fleet,
    owner: &str,
    node: NodeId,
    request: &ShareRequest,
) -> Result<Placement, Reason> {
    let placement = fleet.choose_devices(
        node,
        request,
        placement::DevicePolicy::Binpack,
        Hints::RespectOthers(owner),
    )?;
    fleet.reserve(&OwnerId::from(owner), node, &placement).unwrap();
    Ok(placement)
}

pub(crate) fn minors(placement: &Placement) -> Vec<u32> {
    placement.gpus().map(|share| share.minor).collect()
}

pub(crate) fn gpus(fleet: &Fleet, node: NodeId) -> Vec<DeviceView<'_>> {
    fleet.view(node).unwrap().gpus()
}

/// Free memory of each GPU in MiB, rounded down.
pub(crate) fn free_mib(fleet: &Fleet, node: &str) -> Vec<u64> {
    let id = fleet.node_id(node).unwrap();
    gpus(fleet, id)
        .iter()
        .map(|gpu| gpu.free.memory.bytes_floor() / MIB)
        .collect()
}
