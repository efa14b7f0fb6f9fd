//! Admission of a placement: the last check, right before a reservation, that there is still room for it.

use std::collections::BTreeMap;

use crate::choice::fit::fit_whole;
use crate::data::amounts::{Amounts, Dimension, Memory, is_within};
use crate::data::constraints::{DeviceKind, widest};
use crate::data::holding::{DeviceShare, Hints, Holdings, Placement, Share};
use crate::data::ident::{DeviceId, DeviceType, FunctionId, GpuUuid};
use crate::data::reason::Reason;
use crate::state::charges::charges;
use crate::state::node::Node;
use crate::state::occupancy::{Occupancy, permits};

/// Why a placement cannot be reserved; nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReserveError {
    /// The node has gone since the choice was made.
    #[error("the node is gone")]
    UnknownNode,
    /// The placement takes nothing, or computing power without memory.
    #[error("the placement takes nothing")]
    Empty,
    /// The GPU has gone since the choice was made.
    #[error("GPU {gpu} is gone")]
    UnknownGpu {
        /// The GPU.
        gpu: GpuUuid,
    },
    /// The GPU has become unhealthy since the choice was made.
    #[error("GPU {gpu} is unhealthy")]
    Unhealthy {
        /// The GPU.
        gpu: GpuUuid,
    },
    /// A device that is not a GPU is gone or unhealthy, or too little of it is free.
    #[error("{kind} device {id} has no room for the pod")]
    NoRoomOnDevice {
        /// Its type.
        kind: DeviceType,
        /// The device.
        id: DeviceId,
    },
    /// Too few whole GPUs are left, or they are not separate from shared ones.
    #[error("whole GPUs: {reason}")]
    NoWhole {
        /// The reason.
        reason: Reason,
    },
    /// Two shares of one GPU.
    #[error("GPU {gpu} is chosen twice")]
    SameGpuTwice {
        /// The GPU.
        gpu: GpuUuid,
    },
    /// Too little is free.
    #[error("GPU {gpu} has too little {dimension} free: {free} for {needed}")]
    NoRoom {
        /// The GPU.
        gpu: GpuUuid,
        /// The first dimension that is short.
        dimension: Dimension,
        /// The free amounts.
        free: Amounts,
        /// The amounts of the share.
        needed: Amounts,
    },
    /// Another owner has exclusive use of a device, or uses one of which the placement would have exclusive use.
    #[error("{kind} {device}: exclusive use does not allow it")]
    Exclusive {
        /// Its type.
        kind: DeviceKind,
        /// Identifies the device.
        device: String,
    },
    /// A virtual function is gone or held.
    #[error("virtual function {function} is gone or taken")]
    FunctionTaken {
        /// The function.
        function: FunctionId,
    },
    /// The owner holds something else.
    #[error("the pod already holds other shares on node {node}")]
    HoldsOther {
        /// The node's name.
        node: String,
    },
}

/// Checks that a node has room for a placement; hints do not count.
pub(crate) fn admit(node: &Node, placement: &Placement) -> Result<(), ReserveError> {
    let Placement {
        shares,
        unknown_whole,
        is_vendor,
        others,
        ..
    } = placement;
    let is_empty =
        shares.iter().all(|share| share.amounts == Amounts::ZERO) && *unknown_whole == 0 && others.is_empty();
    let lacks_memory =
        |share: &Share| share.amounts.memory == Memory::ZERO && (share.amounts.core > 0 || *is_vendor);
    if is_empty || shares.iter().any(lacks_memory) {
        return Err(ReserveError::Empty);
    }
    // Binds may come long after the choice, so everything is checked again, and hints of other pods do not count.
    if *unknown_whole > 0 {
        fit_whole(node, *unknown_whole, Hints::Ignore).map_err(|reason| ReserveError::NoWhole { reason })?;
    }
    for (at, share) in shares.iter().enumerate() {
        admit_share(node, share, *is_vendor)?;
        if shares.iter().take(at).any(|other| other.gpu == share.gpu) {
            let gpu = share.gpu.clone();
            return Err(ReserveError::SameGpuTwice { gpu });
        }
    }
    for (at, share) in others.iter().enumerate() {
        let is_same = |other: &DeviceShare| other.kind == share.kind && other.id == share.id;
        if others.iter().take(at).any(is_same) || !has_room(node, share) {
            return Err(ReserveError::NoRoomOnDevice {
                kind: share.kind.clone(),
                id: share.id.clone(),
            });
        }
    }
    admit_by_rules(node, placement)
}

fn admit_share(node: &Node, share: &Share, is_vendor: bool) -> Result<(), ReserveError> {
    let gpu = share.gpu.clone();
    let found = node.inventory.as_ref().and_then(|inventory| {
        let at = inventory.index_of(&gpu)?;
        Some((
            inventory,
            inventory.gpus.get(at)?,
            node.rows.get(at)?,
            node.flags.get(at)?,
        ))
    });
    let Some((inventory, device, row, flags)) = found else {
        return Err(ReserveError::UnknownGpu { gpu });
    };
    if !device.healthy {
        return Err(ReserveError::Unhealthy { gpu });
    }
    // A GPU that takes no shares can be had whole; the free amounts of its row are for shares.
    let is_free_whole = is_vendor && !flags.is_occupied && inventory.is_for_vendor(device);
    let free = if is_free_whole { device.whole() } else { row.free };
    match share.amounts.lacking(free) {
        Some(dimension) => Err(ReserveError::NoRoom {
            gpu,
            dimension,
            free,
            needed: share.amounts,
        }),
        None => Ok(()),
    }
}

/// Returns true if a device of another type exists, is healthy and has room for a share.
fn has_room(node: &Node, share: &DeviceShare) -> bool {
    let Some((_, of_type, free)) = node.type_at(&share.kind) else {
        return false;
    };
    let mut devices = of_type.devices.iter().zip(free);
    devices.any(|(device, free)| device.id == share.id && device.healthy && is_within(&share.amounts, free))
}

/// Checks exclusive use and virtual functions.
fn admit_by_rules(node: &Node, placement: &Placement) -> Result<(), ReserveError> {
    let has_functions = placement.others.iter().any(|share| !share.functions.is_empty());
    // Most placements have nothing to do with rules, and occupancy takes allocations to compute.
    if !node.has_rules && placement.exclusions.is_empty() && !has_functions {
        return Ok(());
    }
    let (Some(inventory), Some(hardware)) = (&node.inventory, &node.hardware) else {
        return Ok(());
    };
    let occupancy = Occupancy::of(node, Hints::Ignore);
    let exclusion = widest(&placement.exclusions, &DeviceKind::Gpu);
    for share in &placement.shares {
        let at = inventory.index_of(&share.gpu);
        if !at.is_some_and(|at| permits(exclusion, at, &hardware.locations.gpus, &occupancy.gpus)) {
            return Err(ReserveError::Exclusive {
                kind: DeviceKind::Gpu,
                device: share.gpu.to_string(),
            });
        }
    }
    let mut taken: Vec<&FunctionId> = Vec::new();
    for share in &placement.others {
        let Some((type_at, of_type, _)) = node.type_at(&share.kind) else {
            continue;
        };
        let kind = DeviceKind::Other(share.kind.clone());
        let exclusion = widest(&placement.exclusions, &kind);
        let (locations, uses) = (hardware.locations.of_type(type_at), occupancy.of_type(type_at));
        let at = of_type.devices.iter().position(|device| device.id == share.id);
        let device = at.filter(|at| permits(exclusion, *at, locations, uses));
        let Some(device) = device.and_then(|at| of_type.devices.get(at)) else {
            return Err(ReserveError::Exclusive {
                kind,
                device: share.id.to_string(),
            });
        };
        for function in &share.functions {
            let exists = device
                .attributes
                .all_functions()
                .any(|known| known.id == function.id);
            let is_held = occupancy.functions_of(type_at).contains(&&function.id);
            if !exists || is_held || taken.contains(&&function.id) {
                return Err(ReserveError::FunctionTaken {
                    function: function.id.clone(),
                });
            }
            taken.push(&function.id);
        }
    }
    Ok(())
}

/// Returns true if holdings are, beyond doubt, those of the placement.
pub(crate) fn is_placement(node: &Node, holdings: &Holdings, placement: &Placement) -> bool {
    let expected = Holdings::from(placement);
    if *holdings == expected {
        return true;
    }
    let Some(inventory) = &node.inventory else {
        return false;
    };
    if holdings.others != expected.others || holdings.unknown_whole != expected.unknown_whole {
        return false;
    }
    // A watch may state in units, or by minor, what the placement states in bytes and by UUID.
    let (mut held, mut chosen) = (BTreeMap::new(), BTreeMap::new());
    for charge in charges(inventory, &holdings.gpus) {
        if charge.suspect || held.insert(charge.gpu, charge.amounts).is_some() {
            return false;
        }
    }
    for share in &placement.shares {
        let Some(at) = inventory.index_of(&share.gpu) else {
            return false;
        };
        if chosen.insert(at, share.amounts).is_some() {
            return false;
        }
    }
    held == chosen
}
