//! kubelet's device plugin API: one gRPC server and registration per resource, and the answers to kubelet's calls.
//!
//! kubelet's calls are answered from [`NodeState`](crate::start::node_state::NodeState), which watches keep up to date. Only
//! `PreStartContainer` waits for requests to the API server.

pub mod allocate;
pub mod boot;
pub mod ended_pods;
pub mod preferred;
pub mod registration;
pub mod server;
mod socket;
pub mod socket_changes;
