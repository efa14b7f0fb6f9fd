//! A small Kubernetes in one process, in which gpushare's real binaries run unchanged.
//!
//! An API server over HTTP, kubelet's device manager over its sockets and a scheduling loop that calls extenders,
//! each behaving as the original does where gpushare can tell the difference. Nothing of it ships.

pub mod apiserver;
pub mod chaos;
pub mod cli;
pub mod cluster;
pub mod connector;
pub mod console;
pub mod daemons;
pub mod demo;
pub mod dice;
pub mod e2e;
pub mod http_client;
pub mod invariants;
pub mod kube_scheduler;
pub mod kubelet;
pub mod manifests;
pub mod observer;
pub mod parts;
pub mod pods;
pub mod ports;
pub mod printed;
pub mod rbac;
pub mod replicas;
pub mod scenario;
pub mod second_scheduler;
pub mod vendor_plugin;
pub mod waves;
