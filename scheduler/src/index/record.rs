//! The allocation record that a binding writes into a pod's annotations.

use std::collections::BTreeMap;

use placement::{Device, Inventory, Placement, Share};
use proto::device::VirtualFunction;
use proto::quantity::Quantity;
use proto::record::{DeviceAllocation, DeviceAllocations, GpushareRecord, Record};
use proto::request::{Dialect, GpuRequest, Memory};
use proto::resource::{GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO};

use super::cluster::Cluster;
use super::node_state::NodeState;
use crate::inventory::record_id;

/// The record of a pod that gets the devices of this placement on a node, and was assumed at this time.
pub(super) fn record(
    cluster: &Cluster,
    request: Option<&GpuRequest>,
    node: &str,
    placement: &Placement,
    assumed_at: u64,
) -> Record {
    let is_unit_unknown = cluster.node(node).is_some_and(NodeState::is_unit_unknown);
    let inventory = cluster.view(node).and_then(placement::NodeView::inventory);
    let mut allocations = DeviceAllocations::new();
    for share in &placement.shares {
        let of_type = allocations.entry(share.kind.as_str().to_owned()).or_default();
        of_type.push(allocation(share, inventory, is_unit_unknown));
    }
    let mut gpushare = None;
    if let Some(share) = placement.gpus().next()
        && let Some(request) = request
        && request.dialect == Dialect::Gpushare
        && let Memory::Units(pod_units) = request.memory
    {
        gpushare = Some(GpushareRecord {
            idx: share.minor,
            pod_units,
            device_units: units_of(share, inventory).unwrap_or_default(),
            // The device plugin sets it when the container starts.
            assigned: false,
        });
    }
    Record {
        allocations,
        assumed_at: Some(assumed_at),
        gpushare,
    }
}

/// Koordinator's entry for one device.
fn allocation(share: &Share, inventory: Option<&Inventory>, is_unit_unknown: bool) -> DeviceAllocation {
    let mut resources = BTreeMap::new();
    let placement::Amounts { memory, core, .. } = share.amounts;
    if core > 0 {
        put(&mut resources, GPU_CORE, core.into());
    }
    // A share of a device of another type has neither memory nor core, nor has that of a pod that sees all GPUs
    // (`RequestedGpus::All`), which takes slots alone.
    if memory > placement::Memory::ZERO || core > 0 {
        // On a node whose unit is unknown the bytes are not real and must not be written.
        if !is_unit_unknown {
            put(&mut resources, GPU_MEMORY, memory.bytes_ceil());
        }
        if let Some(gpu) = gpu_of(share, inventory) {
            let percent = memory.percent_of(gpu.total().memory);
            put(&mut resources, GPU_MEMORY_RATIO, percent.into());
        }
    }
    for (resource, amount) in &share.resources {
        put(&mut resources, resource.as_str(), *amount);
    }
    let mut functions = Vec::new();
    for function in &share.virtual_functions {
        functions.push(VirtualFunction {
            minor: function.minor,
            bus_id: function.id.to_string(),
        });
    }
    DeviceAllocation {
        minor: i32::try_from(share.minor).unwrap_or(i32::MAX),
        resources,
        id: record_id(share.id.as_str()).to_owned(),
        extension: None,
    }
    .with_functions(&functions)
}

fn put(resources: &mut BTreeMap<String, Quantity>, resource: &str, amount: u64) {
    resources.insert(resource.to_owned(), Quantity::from_unsigned(amount));
}

/// The GPU of the inventory that a share is of; `None` for a share of another type.
fn gpu_of<'a>(share: &Share, inventory: Option<&'a Inventory>) -> Option<&'a Device> {
    inventory?.gpus.iter().find(|gpu| gpu.id == share.id)
}

/// The number of whole memory units that the chosen GPU has.
fn units_of(share: &Share, inventory: Option<&Inventory>) -> Option<u64> {
    let gpu = gpu_of(share, inventory)?;
    gpu.memory_bytes.checked_div(inventory?.unit_bytes?)
}
