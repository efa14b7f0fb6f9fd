//! Admission of a placement: the last check, right before its reservation, that the node still has room for it.

use crate::choice::gpu_room::fit_whole;
use crate::data::amounts::{Amounts, Memory};
use crate::data::constraints::widest_exclusion;
use crate::data::device::{Device, VirtualFunction};
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
        exclusions,
    } = placement;
    let takes_gpus_only = placement.others().next().is_none();
    let (mut takes_amounts, mut lacks_memory) = (false, false);
    for Share { amounts, .. } in placement.gpus() {
        // Slots alone are an amount: a pod that sees all GPUs takes nothing else.
        takes_amounts |= *amounts != Amounts::ZERO;
        // No container can use computing power without memory, so a share without memory is a mistake of the caller.
        lacks_memory |= amounts.memory == Memory::ZERO && (amounts.core > 0 || *is_vendor);
    }
    let is_empty = takes_gpus_only && !takes_amounts && *n_unknown_gpus == 0;
    if is_empty || lacks_memory {
        return Err(ReserveError("the placement takes nothing".to_owned()));
    }
    // Binds may come long after the choice, so everything is checked again, and hints of other pods do not count.
    if *n_unknown_gpus > 0
        && let Err(reason) = fit_whole(node, *n_unknown_gpus, Hints::Ignore)
    {
        return Err(ReserveError(format!("whole GPUs: {reason}")));
    }
    let has_functions = shares.iter().any(|share| !share.virtual_functions.is_empty());
    // Most placements have nothing to do with rules, and occupancy takes allocations to compute.
    let needs_rules = node.has_rules || !exclusions.is_empty() || has_functions;
    let occupancy = needs_rules.then(|| Occupancy::new(node, Hints::Ignore));
    let mut functions: Vec<&FunctionId> = Vec::new();
    for (at, share) in shares.iter().enumerate() {
        let (kind, id) = (&share.kind, &share.id);
        let (type_at, device_at, device) = admit_share(node, share, *is_vendor)?;
        // Two shares of one device may fit one by one, and not together.
        let mut earlier = shares.iter().take(at);
        if earlier.any(|other| (&other.kind, &other.id) == (kind, id)) {
            return Err(ReserveError(format!("{kind} {id} is chosen twice")));
        }
        let Some((occupancy, hardware)) = occupancy.as_ref().zip(node.hardware.as_ref()) else {
            continue;
        };
        let exclusion = widest_exclusion(exclusions, kind);
        let (locations, uses) = (hardware.locations_of(type_at), occupancy.of_type(type_at));
        if !permits(exclusion, device_at, locations, uses) {
            let text = format!("{kind} {id}: exclusive use does not allow it");
            return Err(ReserveError(text));
        }
        for VirtualFunction { id: function, .. } in &share.virtual_functions {
            let mut known = device.attributes.all_functions();
            let is_held = occupancy.held_functions_of(type_at).contains(&function);
            // Two shares of one placement must not take the same virtual function either.
            if is_held || functions.contains(&function) || !known.any(|known| known.id == *function) {
                let text = format!("virtual function {function} is gone or taken");
                return Err(ReserveError(text));
            }
            functions.push(function);
        }
    }
    Ok(())
}

/// Checks that the device of a share exists, takes new owners and has room; returns the indices of its type and its own.
fn admit_share<'n>(
    node: &'n Node,
    share: &Share,
    is_vendor: bool,
) -> Result<(usize, usize, &'n Device), ReserveError> {
    let (kind, id) = (&share.kind, &share.id);
    let Some((type_at, at, device)) = node.inventory.device(kind, id) else {
        return Err(ReserveError(format!("{kind} {id} is gone")));
    };
    if !device.healthy {
        return Err(ReserveError(format!("{kind} {id} is unhealthy")));
    }
    if device.closed {
        return Err(ReserveError(format!("{kind} {id} is closed for maintenance")));
    }
    if type_at == GPUS {
        let flags = node.flags.get(at).copied().unwrap_or_default();
        // A GPU that takes no shares can still be allocated whole; the free amounts in its row are those for shares.
        let free = if is_vendor && !flags.is_occupied && node.inventory.is_for_vendor(device) {
            device.whole()
        } else {
            node.rows.get(at).copied().unwrap_or_default().free
        };
        if let Some(lacking) = share.amounts.lacking(free) {
            let (lacking, needed) = (lacking.label(), share.amounts);
            let text = format!("GPU {id} has too little {lacking} free: {free} for {needed}");
            return Err(ReserveError(text));
        }
        return Ok((type_at, at, device));
    }
    let free = node.free_of_type(type_at).get(at);
    for (resource, needed) in &share.resources {
        let free = free.and_then(|free| free.get(resource)).copied().unwrap_or(0);
        if *needed > free {
            let text = format!("{kind} {id} has too little {resource} free: {free} for {needed}");
            return Err(ReserveError(text));
        }
    }
    Ok((type_at, at, device))
}
