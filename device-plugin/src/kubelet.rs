//! kubelet's device plugin API: one gRPC server and registration per resource, and the answers to kubelet's calls.
//!
//! [`registration`] keeps a resource registered, and `server` answers kubelet's calls. Only `PreStartContainer` waits for
//! requests to the API server. `ended_pods` makes kubelet free devices, and [`boot`] lists devices after a boot.

mod allocate;
pub mod boot;
pub(crate) mod ended_pods;
mod preferred;
pub mod registration;
mod server;
mod socket;
pub mod socket_changes;
