//! The allocation record that a binding writes into a pod's annotations.

use std::collections::BTreeMap;

use placement::{DeviceType, Inventory, Placement};
use proto::device::VirtualFunction;
use proto::quantity::Quantity;
use proto::record::{DeviceAllocation, DeviceAllocations, GpushareRecord, Record};
use proto::request::{Dialect, GpuRequest, Memory};
use proto::resource::{GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO};

use super::cluster::{Cluster, NodeState};
use crate::inventory::record_id;

/// The record of a pod that gets these devices on a node.
pub(super) fn record(
    cluster: &Cluster,
    request: Option<&GpuRequest>,
    node: &str,
    placement: &Placement,
    stamp: u64,
) -> Record {
    let opaque = cluster.nodes.get(node).is_some_and(NodeState::is_opaque);
    let inventory = cluster.view(node).and_then(placement::NodeView::inventory);
    let mut allocations = DeviceAllocations::new();
    for share in &placement.shares {
        let of_type = allocations.entry(share.kind.as_str().to_owned()).or_default();
        of_type.push(match share.kind {
            DeviceType::Gpu => allocation_of_gpu(share, inventory, opaque),
            DeviceType::Other(_) => allocation_of_other(share),
        });
    }
    let mut gpushare = None;
    if let Some(share) = placement.gpus().next()
        && let Some(request) = request
        && request.dialect == Dialect::Gpushare
        && let Memory::Units(pod_units) = request.memory
    {
        let device_units = inventory.and_then(|inventory| units_of(share, inventory));
        gpushare = Some(GpushareRecord {
            idx: share.minor,
            pod_units,
            device_units: device_units.unwrap_or_default(),
            // The device plugin sets it when the container starts.
            assigned: false,
        });
    }
    Record {
        allocations,
        assumed_at: Some(stamp),
        gpushare,
    }
}

/// Koordinator's entry for one GPU.
fn allocation_of_gpu(
    share: &placement::Share,
    inventory: Option<&Inventory>,
    opaque: bool,
) -> DeviceAllocation {
    let placement::Amounts { memory, core, .. } = share.amounts;
    let is_seen_only = memory == placement::Memory::ZERO && core == 0;
    let mut resources = BTreeMap::new();
    if core > 0 {
        resources.insert(GPU_CORE.to_owned(), Quantity::from_unsigned(core.into()));
    }
    // On a node whose unit is unknown the bytes are not real and must not be written.
    if !opaque && !is_seen_only {
        let bytes = Quantity::from_unsigned(memory.bytes_ceil());
        resources.insert(GPU_MEMORY.to_owned(), bytes);
    }
    let gpu = inventory.and_then(|inventory| inventory.gpus.iter().find(|gpu| gpu.id == share.id));
    if let Some(gpu) = gpu
        && !is_seen_only
    {
        let percent = memory.percent_of(gpu.total().memory);
        resources.insert(
            GPU_MEMORY_RATIO.to_owned(),
            Quantity::from_unsigned(percent.into()),
        );
    }
    DeviceAllocation {
        minor: i32::try_from(share.minor).unwrap_or(i32::MAX),
        resources,
        id: record_id(share.id.as_str()).to_owned(),
        extension: None,
    }
}

/// Koordinator's entry for one device of another type.
fn allocation_of_other(share: &placement::Share) -> DeviceAllocation {
    let mut resources = BTreeMap::new();
    for (resource, amount) in &share.resources {
        resources.insert(resource.to_string(), Quantity::from_unsigned(*amount));
    }
    let mut functions = Vec::with_capacity(share.functions.len());
    for function in &share.functions {
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

/// The number of whole memory units that the chosen GPU has.
fn units_of(share: &placement::Share, inventory: &Inventory) -> Option<u64> {
    let gpu = inventory.gpus.iter().find(|gpu| gpu.id == share.id)?;
    gpu.memory_bytes.checked_div(inventory.unit_bytes?)
}
