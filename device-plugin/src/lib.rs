//! The device plugin of gpushare: finds the devices of this node, serves them to kubelet, and publishes them with their health.
//!
//! The folders stand above each other, and each uses only those below it: `run`; `config` and `kubelet`; `publish`; `start`;
//! `inject`; `node`; `devices`.

pub mod config;
pub mod devices;
mod directory_events;
mod file_version;
mod fnv;
pub mod inject;
pub mod kubelet;
mod logged_error;
pub mod metrics;
pub mod node;
pub mod publish;
mod root_dir;
pub mod run;
pub mod start;
#[cfg(test)]
mod tests;
