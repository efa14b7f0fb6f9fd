//! The device plugin of gpushare: finds the devices of this node, serves them to kubelet, and publishes them with their health.

pub mod api_request;
pub mod application_faults;
pub mod assigned;
pub mod cdi;
pub mod config;
pub mod device_ids;
pub mod enforcement;
pub mod envvar;
pub mod eviction;
pub mod extended_resource;
mod file_version;
pub mod fleet;
pub mod health;
pub mod health_reaction;
pub mod injection;
pub mod inventory;
pub mod kubelet;
pub mod kubelet_checkpoint;
pub mod kubelet_pod_resources;
mod logged_error;
pub mod matching;
pub mod metrics;
pub mod node_gauges;
pub mod node_state;
pub mod pods;
pub mod publish;
pub mod root_dir;
pub mod run;
pub mod runtime_hook;
pub mod settings;
pub mod start;
#[cfg(test)]
mod tests;
pub mod uninstall;
mod unix_channel;
pub mod vendor;
pub mod verify;
