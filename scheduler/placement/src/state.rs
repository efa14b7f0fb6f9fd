//! The state of all nodes, and everything that changes it: inventories, holdings, room that is kept for pods that are not bound
//! yet (hints), CPU and memory.
//!
//! Values derived from these (free amounts, occupancy, equivalence classes) are kept beside them and updated with every change.

pub(crate) mod charges;
pub(crate) mod equivalence;
pub(crate) mod hardware;
pub(crate) mod node;
pub(crate) mod nodes;
pub(crate) mod occupancy;
pub(crate) mod value_cache;
