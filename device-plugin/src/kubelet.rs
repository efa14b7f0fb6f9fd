//! kubelet's device plugin API: one gRPC server and registration per resource, and the answers to kubelet's calls.
//!
//! [`registration`] keeps a resource registered, and [`server`] answers kubelet's calls by [`preferred`], [`allocate`] and the
//! check of [`crate::start`], from a [`NodeState`](crate::start::node_state::NodeState) that watches keep up to date. Only
//! `PreStartContainer` waits for requests to the API server. [`socket_changes`] shows restarts of kubelet, [`ended_pods`] makes
//! kubelet free devices, and [`boot`] lists devices after a boot until the plugin's pod runs.

pub mod allocate;
pub mod boot;
pub mod ended_pods;
pub mod preferred;
pub mod registration;
pub mod server;
mod socket;
pub mod socket_changes;
