//! The node side of gpushare: finds the devices of this node and serves them to kubelet.

pub mod assigned;
#[cfg(test)]
mod builders;
pub mod config;
pub mod fleet;
pub mod health;
pub mod identity;
pub mod inject;
pub mod inventory;
pub mod kubelet_checkpoint;
pub mod plugin;
pub mod pods;
pub mod publish;
pub mod serve;
pub mod served;
pub mod stop;
pub mod vendor;
pub mod watching;
