//! The choice of devices on one node, as functions over its state: fit, look-ahead, order, topology, score, preemption, groups.
//!
//! Nothing here changes a node. The modules build on one another from `gpu_room` to `node_choice`.

pub(crate) mod admit;
pub(crate) mod cost;
pub(crate) mod gpu_room;
pub(crate) mod group;
pub(crate) mod node_choice;
pub(crate) mod order;
pub(crate) mod preempt;
pub(crate) mod simulate;
pub(crate) mod topology;
