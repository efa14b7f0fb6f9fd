//! The allocation record that a binding writes into a pod's annotations.

use std::collections::BTreeMap;

use placement::{DeviceShare, Inventory, Placement};
use proto::device::{TYPE_GPU, VirtualFunction};
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
    let state = cluster.nodes.get(node);
    let opaque = state.is_some_and(NodeState::is_opaque);
    let inventory = cluster.view(node).and_then(placement::NodeView::inventory);
    let mut allocations = DeviceAllocations::new();
    for share in &placement.shares {
        allocations
            .entry(TYPE_GPU.to_owned())
            .or_default()
            .push(allocation(share, inventory, opaque));
    }
    for share in &placement.others {
        allocations
            .entry(share.kind.to_string())
            .or_default()
            .push(allocation_of_other(share));
    }
    let memory = request.map(|request| (request.dialect, request.memory));
    let gpushare = match (memory, placement.shares.first()) {
        (Some((Dialect::Gpushare, Memory::Units(pod_units))), Some(share)) => Some(GpushareRecord {
            idx: share.minor,
            pod_units,
            device_units: inventory
                .and_then(|inventory| units_of(share, inventory))
                .unwrap_or_default(),
            assigned: false,
        }),
        _ => None,
    };
    Record {
        allocations,
        assumed_at: Some(stamp),
        gpushare,
    }
}

/// Koordinator's entry for one device.
fn allocation(share: &placement::Share, inventory: Option<&Inventory>, opaque: bool) -> DeviceAllocation {
    let mut resources = BTreeMap::new();
    let is_seen_only = share.amounts.memory == placement::Memory::ZERO && share.amounts.core == 0;
    let mut put =
        |resource: &str, amount: u64| resources.insert(resource.to_owned(), Quantity::from_unsigned(amount));
    if share.amounts.core > 0 {
        put(GPU_CORE, share.amounts.core.into());
    }
    // On a node whose unit is unknown the bytes are not real and must not be written.
    if !opaque && !is_seen_only {
        put(GPU_MEMORY, share.amounts.memory.bytes_ceil());
    }
    let gpu = inventory.and_then(|inventory| inventory.gpus.iter().find(|gpu| gpu.uuid == share.gpu));
    if let Some(gpu) = gpu.filter(|_| !is_seen_only) {
        put(
            GPU_MEMORY_RATIO,
            share.amounts.memory.percent_of(gpu.total().memory).into(),
        );
    }
    DeviceAllocation {
        minor: i32::try_from(share.minor).unwrap_or(i32::MAX),
        resources,
        id: record_id(share.gpu.as_str()).to_owned(),
        extension: None,
    }
}

/// Koordinator's entry for one device of another type.
fn allocation_of_other(share: &DeviceShare) -> DeviceAllocation {
    let amounts = share.amounts.iter();
    let functions = share.functions.iter();
    let functions = functions.map(|function| VirtualFunction {
        minor: function.minor,
        bus_id: function.id.to_string(),
    });
    DeviceAllocation {
        minor: i32::try_from(share.minor).unwrap_or(i32::MAX),
        resources: amounts
            .map(|(resource, amount)| (resource.to_string(), Quantity::from_unsigned(*amount)))
            .collect(),
        id: record_id(share.id.as_str()).to_owned(),
        extension: None,
    }
    .with_functions(&functions.collect::<Vec<_>>())
}

/// Whole units of the node on the chosen device.
fn units_of(share: &placement::Share, inventory: &Inventory) -> Option<u64> {
    let gpu = inventory.gpus.iter().find(|gpu| gpu.uuid == share.gpu)?;
    gpu.memory_bytes.checked_div(inventory.unit_bytes?)
}
