//! The node side of gpushare: finds the devices of this node and serves them to kubelet.

pub mod assigned;
#[cfg(test)]
mod builders;
pub mod cdi;
pub mod config;
pub mod eviction;
pub mod exchange;
pub mod extended_resource;
mod file_version;
pub mod fleet;
pub mod gate;
pub mod health;
pub mod health_reaction;
pub mod identity;
pub mod inject;
pub mod injection;
pub mod inventory;
pub mod kubelet_checkpoint;
pub mod metrics;
pub mod node_gauges;
pub mod plugin;
pub mod pods;
pub mod proof;
pub mod publish;
pub mod runtime_hook;
pub mod serve;
pub mod uninstall;
pub mod vendor;
