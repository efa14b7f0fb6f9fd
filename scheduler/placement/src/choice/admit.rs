//! Admission of a placement: the last check, right before its reservation, that the node still has room for it.

use crate::choice::gpu_room::fit_whole;
use crate::data::amounts::{Amounts, Memory};
use crate::data::constraints::widest_exclusion;
use crate::data::device::Device;
use crate::data::holding::{Hints, Placement, Share};
use crate::data::ident::FunctionId;
use crate::data::inventory::GPUS;
use crate::state::node::Node;
use crate::state::occupancy::{Occupancy, permits};

/// Why a placement cannot be reserved; nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ReserveError(pub(crate) String);

/// Checks that a node has room for a placement; hints do not count.
pub(crate) fn admit(node: &Node, placement: &Placement) -> Result<(), ReserveError> {
    let Placement {
        shares,
        n_unknown_gpus,
        is_vendor,
        ..
    } = placement;
    let takes_gpus_only = placement.others().next().is_none();
    let takes_no_amounts = placement.gpus().all(|share| share.amounts == Amounts::ZERO);
    // Slots alone are an amount: a pod that sees all GPUs takes nothing else.
    let is_empty = takes_gpus_only && takes_no_amounts && *n_unknown_gpus == 0;
    // No container can use computing power without memory, so a share without memory is a mistake of the caller.
    let lacks_memory =
        |share: &Share| share.amounts.memory == Memory::ZERO && (share.amounts.core > 0 || *is_vendor);
    if is_empty || placement.gpus().any(lacks_memory) {
        return Err(ReserveError("the placement takes nothing".to_owned()));
    }
    // Binds may come long after the choice, so everything is checked again, and hints of other pods do not count.
    if *n_unknown_gpus > 0 {
        fit_whole(node, *n_unknown_gpus, Hints::Ignore)
            .map_err(|reason| ReserveError(format!("whole GPUs: {reason}")))?;
    }
    for (at, share) in shares.iter().enumerate() {
        admit_share(node, share, *is_vendor)?;
        // Two shares of one device may fit one by one, and not together.
        let mut earlier = shares.iter().take(at);
        if earlier.any(|other| (&other.kind, &other.id) == (&share.kind, &share.id)) {
            let (kind, id) = (&share.kind, &share.id);
            return Err(ReserveError(format!("{kind} {id} is chosen twice")));
        }
    }
    admit_by_rules(node, placement)
}

/// Checks that the device of a share exists, is healthy, is not closed and has room.
fn admit_share(node: &Node, share: &Share, is_vendor: bool) -> Result<(), ReserveError> {
    let (kind, id) = (&share.kind, &share.id);
    let inventory = node.inventory.as_ref();
    let found = inventory.and_then(|inventory| inventory.device(kind, id));
    let Some((type_at, at, device)) = found else {
        return Err(ReserveError(format!("{kind} {id} is gone")));
    };
    if !device.healthy {
        return Err(ReserveError(format!("{kind} {id} is unhealthy")));
    }
    if device.closed {
        return Err(ReserveError(format!("{kind} {id} is closed for maintenance")));
    }
    if type_at == GPUS {
        return admit_share_of_gpu(node, at, device, share, is_vendor);
    }
    let free = node.free_of_type(type_at).get(at);
    for (resource, needed) in &share.resources {
        let free = free.and_then(|free| free.get(resource)).copied().unwrap_or(0);
        if *needed > free {
            return Err(ReserveError(format!(
                "{kind} {id} has too little {resource} free: {free} for {needed}"
            )));
        }
    }
    Ok(())
}

/// Checks that the amounts of a share are free on its GPU.
fn admit_share_of_gpu(
    node: &Node,
    at: usize,
    gpu: &Device,
    share: &Share,
    is_vendor: bool,
) -> Result<(), ReserveError> {
    let flags = node.flags.get(at).copied().unwrap_or_default();
    let row = node.rows.get(at).copied().unwrap_or_default();
    let inventory = node.inventory.as_ref();
    let is_for_vendor = inventory.is_some_and(|inventory| inventory.is_for_vendor(gpu));
    // A GPU that takes no shares can still be allocated whole; the free amounts in its row are those for shares.
    let free = if is_vendor && !flags.is_occupied && is_for_vendor {
        gpu.whole()
    } else {
        row.free
    };
    match share.amounts.lacking(free) {
        Some(dimension) => Err(ReserveError(format!(
            "GPU {} has too little {dimension} free: {free} for {}",
            gpu.id, share.amounts
        ))),
        None => Ok(()),
    }
}

/// Checks that exclusive use, of this pod and of others, allows each device, and that the virtual functions exist and are free.
fn admit_by_rules(node: &Node, placement: &Placement) -> Result<(), ReserveError> {
    let mut shares = placement.shares.iter();
    let has_functions = shares.any(|share| !share.virtual_functions.is_empty());
    // Most placements have nothing to do with rules, and occupancy takes allocations to compute.
    if !node.has_rules && placement.exclusions.is_empty() && !has_functions {
        return Ok(());
    }
    let (Some(inventory), Some(hardware)) = (&node.inventory, &node.hardware) else {
        return Ok(());
    };
    let occupancy = Occupancy::new(node, Hints::Ignore);
    let mut taken: Vec<&FunctionId> = Vec::new();
    for share in &placement.shares {
        // `admit_share` has found every device already.
        let Some((type_at, at, device)) = inventory.device(&share.kind, &share.id) else {
            continue;
        };
        let exclusion = widest_exclusion(&placement.exclusions, &share.kind);
        let (locations, uses) = (hardware.locations.of_type(type_at), occupancy.of_type(type_at));
        if !permits(exclusion, at, locations, uses) {
            let (kind, id) = (&share.kind, &share.id);
            return Err(ReserveError(format!(
                "{kind} {id}: exclusive use does not allow it"
            )));
        }
        for function in &share.virtual_functions {
            let mut known = device.attributes.all_functions();
            let exists = known.any(|known| known.id == function.id);
            let is_held = occupancy.held_functions_of(type_at).contains(&&function.id);
            if !exists || is_held || taken.contains(&&function.id) {
                let function = &function.id;
                return Err(ReserveError(format!(
                    "virtual function {function} is gone or taken"
                )));
            }
            // Two shares of one placement must not take the same virtual function either.
            taken.push(&function.id);
        }
    }
    Ok(())
}
