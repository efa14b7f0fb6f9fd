//! A small Kubernetes in one process, in which gpushare's real binaries run unchanged, without a cluster and a GPU.
//!
//! It models the programs that the daemons meet: [`apiserver`], [`kube_scheduler`] and [`kubelet`] with its container runtime,
//! each behaving as the original does where gpushare can notice the difference, and [`vendor_plugin`]. [`cluster`] starts them
//! together with the daemons as processes ([`daemons`]), [`observer`] shows the API server's objects, and [`invariants`] checks
//! them independently of the daemons. The scenarios are in the crate `testbed`, the measurements in `laboratory`.

pub mod apiserver;
pub mod cluster;
pub mod command;
pub mod connector;
pub mod console;
pub mod daemons;
pub mod dice;
pub mod files;
pub mod http_client;
pub mod invariants;
pub mod kube_scheduler;
pub mod kubelet;
pub mod manifests;
pub mod observer;
pub mod parts;
pub mod pod_fields;
pub mod pods;
pub mod polling;
pub mod ports;
pub mod process_usage;
pub mod rbac;
pub mod vendor_plugin;
