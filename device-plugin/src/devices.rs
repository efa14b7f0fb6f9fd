//! The devices of this node: their discovery, their health, one snapshot of both, and their IDs for kubelet.
//!
//! Knows neither pods nor containers.

pub mod device_ids;
pub mod extended_resource;
pub mod fleet;
pub mod health;
pub mod inventory;
