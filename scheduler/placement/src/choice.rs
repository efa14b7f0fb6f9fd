//! The choice of devices on one node, as functions over its state: fit, look-ahead, order, topology, score, preemption.
//!
//! Nothing here changes a node. The modules build on one another from `fit` to `choose`.

pub(crate) mod admit;
pub(crate) mod choose;
pub(crate) mod cost;
pub(crate) mod fit;
pub(crate) mod order;
pub(crate) mod preempt;
pub(crate) mod simulate;
pub(crate) mod topology;
