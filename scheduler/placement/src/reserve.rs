//! Turning a choice into a holding, after checking once more that there is room.

use std::collections::BTreeMap;

use crate::amounts::{Amounts, Dimension};
use crate::class::DeviceShare;
use crate::fit::Hints;
use crate::fleet::{Fleet, NodeId};
use crate::holding::{GpuRef, Holdings, Origin, Placement, Share};
use crate::ident::{DeviceId, DeviceType, FunctionId, GpuUuid, OwnerId};
use crate::memory::Memory;
use crate::node::Node;
use crate::reason::Reason;
use crate::wishes::Kind;

/// Why a placement cannot be reserved; nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReserveError {
    /// The node has gone since the choice was made.
    #[error("the node is gone")]
    UnknownNode,
    /// The placement takes nothing, or computing power without memory.
    #[error("the placement takes nothing")]
    Empty,
    /// The device has gone since the choice was made.
    #[error("GPU {gpu} is gone")]
    UnknownGpu {
        /// The device.
        gpu: GpuUuid,
    },
    /// The device has fallen sick since the choice was made.
    #[error("GPU {gpu} is unhealthy")]
    Unhealthy {
        /// The device.
        gpu: GpuUuid,
    },
    /// A device of another type has gone or fallen sick, or too little of it is free.
    #[error("{kind} device {id} has no room for the pod")]
    NoRoomOnDevice {
        /// Its type.
        kind: DeviceType,
        /// The device.
        id: DeviceId,
    },
    /// Too few whole GPUs are left, or they are not kept apart from shared ones.
    #[error("whole GPUs: {reason}")]
    NoWhole {
        /// Why.
        reason: Reason,
    },
    /// Two shares of one device.
    #[error("GPU {gpu} is chosen twice")]
    SameGpuTwice {
        /// The device.
        gpu: GpuUuid,
    },
    /// Too little is free.
    #[error("GPU {gpu} has too little {dimension} free: {free} for {needed}")]
    NoRoom {
        /// The device.
        gpu: GpuUuid,
        /// The first dimension that is short.
        dimension: Dimension,
        /// What is free.
        free: Amounts,
        /// What the share takes.
        needed: Amounts,
    },
    /// A device that somebody has to itself, or that others use while the placement would have it to itself.
    #[error("{kind} {device}: exclusive use does not allow it")]
    Exclusive {
        /// Its type.
        kind: Kind,
        /// What identifies it.
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
        /// Where.
        node: String,
    },
}

impl Fleet {
    /// Reserves what was chosen; hints of others do not count, the owner's own one is used up.
    ///
    /// Reserving what the owner already holds changes nothing and succeeds.
    ///
    /// # Errors
    /// If it would oversubscribe a device in any dimension, a device is sick or gone, or the owner holds something else.
    pub fn reserve(
        &mut self,
        owner: &OwnerId,
        node: NodeId,
        placement: &Placement,
    ) -> Result<(), ReserveError> {
        let state = self.node(node).ok_or(ReserveError::UnknownNode)?;
        if let Some(before) = self.owners.get(owner).and_then(|&index| self.at(index)) {
            let same = before
                .held_by(owner.as_str())
                .is_some_and(|held| state.amounts_to(&held.holdings, placement));
            let same = same && before.name == state.name;
            return if same {
                Ok(())
            } else {
                Err(ReserveError::HoldsOther {
                    node: before.name.to_string(),
                })
            };
        }
        state.admit(placement)?;
        self.put(owner, node.index(), Origin::Decision, Holdings::from(placement));
        Ok(())
    }
}

impl Node {
    fn admit(&self, placement: &Placement) -> Result<(), ReserveError> {
        let Placement {
            shares,
            unknown_whole,
            is_vendor,
            others,
            ..
        } = placement;
        let lacks_memory =
            |share: &Share| share.amounts.memory == Memory::ZERO && (share.amounts.core > 0 || *is_vendor);
        let is_nothing = shares.iter().all(|share| share.amounts == Amounts::ZERO)
            && *unknown_whole == 0
            && others.is_empty();
        if is_nothing || shares.iter().any(lacks_memory) {
            return Err(ReserveError::Empty);
        }
        if *unknown_whole > 0 {
            self.fit_whole(*unknown_whole, Hints::Ignore)
                .map_err(|reason| ReserveError::NoWhole { reason })?;
        }
        let mut seen: Vec<&GpuUuid> = Vec::with_capacity(shares.len());
        for share in shares {
            self.admit_share(share, *is_vendor)?;
            if seen.contains(&&share.gpu) {
                return Err(ReserveError::SameGpuTwice {
                    gpu: share.gpu.clone(),
                });
            }
            seen.push(&share.gpu);
        }
        let full = |(at, share): &(usize, &DeviceShare)| {
            let same = |other: &DeviceShare| other.kind == share.kind && other.id == share.id;
            others.iter().take(*at).any(same) || !self.admits_device(share)
        };
        match others.iter().enumerate().find(full) {
            Some((_, share)) => Err(ReserveError::NoRoomOnDevice {
                kind: share.kind.clone(),
                id: share.id.clone(),
            }),
            None => self.admit_by_rules(placement),
        }
    }

    fn admit_share(&self, share: &Share, is_vendor: bool) -> Result<(), ReserveError> {
        let gpu = share.gpu.clone();
        let found = self
            .gpus()
            .iter()
            .zip(self.rows.iter())
            .zip(self.marks.iter())
            .find(|((device, _), _)| device.uuid == gpu);
        let Some(((device, row), mark)) = found else {
            return Err(ReserveError::UnknownGpu { gpu });
        };
        if !device.healthy {
            return Err(ReserveError::Unhealthy { gpu });
        }
        // A GPU that takes no shares may be had whole; what is free of it in a row is for shares.
        let is_free = is_vendor
            && !mark.is_held
            && self
                .inventory
                .as_ref()
                .is_some_and(|inventory| inventory.is_for_vendor(device));
        let free = if is_free { device.whole() } else { row.free };
        match share.amounts.lacking(free).next() {
            Some(dimension) => Err(ReserveError::NoRoom {
                gpu,
                dimension,
                free,
                needed: share.amounts,
            }),
            None => Ok(()),
        }
    }

    /// Whether holdings are, beyond doubt, what the placement says.
    fn amounts_to(&self, holdings: &Holdings, placement: &Placement) -> bool {
        let expected = Holdings::from(placement);
        if *holdings == expected {
            return true;
        }
        let Some(inventory) = &self.inventory else {
            return false;
        };
        let (mut held, mut chosen) = (BTreeMap::new(), BTreeMap::new());
        let mut certain =
            holdings.others == expected.others && holdings.unknown_whole == expected.unknown_whole;
        inventory.charge(&holdings.gpus, &mut |charge| {
            certain &= !charge.suspect && held.insert(charge.row, charge.amounts).is_none();
        });
        for share in &placement.shares {
            let row = inventory.position(&GpuRef::Uuid(share.gpu.clone()));
            certain &= row.is_some_and(|row| chosen.insert(row, share.amounts).is_none());
        }
        certain && held == chosen
    }
}
