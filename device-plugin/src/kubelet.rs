//! kubelet's device plugin API: one gRPC server and registration per resource, and the answers to kubelet's calls.
//!
//! A call reads [`NodeState`](crate::node_state::NodeState), which watches keep up to date; no call waits for the API server
//! except `PreStartContainer`.

pub mod allocate;
pub mod boot;
pub mod ended_pods;
pub mod preferred;
pub mod registration;
pub mod server;
mod socket;
