//! The node side of gpushare: finds the devices of this node and serves them to kubelet.

pub mod health;
pub mod inventory;
