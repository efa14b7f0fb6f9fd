//! Turning a choice into a holding, after checking once more that there is room.

use std::collections::BTreeMap;

use crate::amounts::{Amounts, Dimension};
use crate::fleet::{Fleet, NodeId};
use crate::holding::{GpuRef, Holding, Origin, Placement, Share};
use crate::ident::{GpuUuid, OwnerId};
use crate::node::Node;

/// Why a placement cannot be reserved; nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReserveError {
    /// The node has gone since the choice was made.
    #[error("the node is gone")]
    UnknownNode,
    /// The placement has no shares, or one without memory.
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
    pub fn reserve(&mut self, owner: &OwnerId, node: NodeId, placement: &Placement) -> Result<(), ReserveError> {
        let state = self.node(node).ok_or(ReserveError::UnknownNode)?;
        if let Some(before) = self.owners.get(owner).and_then(|&index| self.at(index)) {
            let same = before.held_by(owner.as_str()).is_some_and(|held| state.amounts_to(&held.holding, placement));
            let same = same && before.name == state.name;
            return if same { Ok(()) } else { Err(ReserveError::HoldsOther { node: before.name.to_string() }) };
        }
        state.admit(placement)?;
        self.put(owner, node.index(), Origin::Decision, Holding::from(placement));
        Ok(())
    }
}

impl Node {
    fn admit(&self, placement: &Placement) -> Result<(), ReserveError> {
        if placement.shares.is_empty() || placement.shares.iter().any(|share| share.amounts.memory.hundredths() == 0) {
            return Err(ReserveError::Empty);
        }
        let mut seen: Vec<&GpuUuid> = Vec::with_capacity(placement.shares.len());
        for share in &placement.shares {
            self.admit_share(share)?;
            if seen.contains(&&share.gpu) {
                return Err(ReserveError::SameGpuTwice { gpu: share.gpu.clone() });
            }
            seen.push(&share.gpu);
        }
        Ok(())
    }

    fn admit_share(&self, share: &Share) -> Result<(), ReserveError> {
        let gpu = share.gpu.clone();
        let Some((device, row)) = self.gpus().iter().zip(self.rows.iter()).find(|(device, _)| device.uuid == gpu) else {
            return Err(ReserveError::UnknownGpu { gpu });
        };
        if !device.healthy {
            return Err(ReserveError::Unhealthy { gpu });
        }
        match share.amounts.lacking(row.free).next() {
            Some(dimension) => Err(ReserveError::NoRoom { gpu, dimension, free: row.free, needed: share.amounts }),
            None => Ok(()),
        }
    }

    /// Whether a holding is, beyond doubt, what the placement says.
    fn amounts_to(&self, holding: &Holding, placement: &Placement) -> bool {
        let Some(inventory) = &self.inventory else { return *holding == Holding::from(placement) };
        let (mut held, mut chosen) = (BTreeMap::new(), BTreeMap::new());
        let mut certain = true;
        inventory.charge(holding, &mut |charge| {
            certain &= !charge.suspect && held.insert(charge.row, charge.amounts).is_none();
        });
        for share in &placement.shares {
            let row = inventory.position(&GpuRef::Uuid(share.gpu.clone()));
            certain &= row.is_some_and(|row| chosen.insert(row, share.amounts).is_none());
        }
        certain && held == chosen || *holding == Holding::from(placement)
    }
}
