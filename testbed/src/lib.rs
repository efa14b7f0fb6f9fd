//! A small Kubernetes in one process, in which gpushare's real binaries run unchanged, without a cluster and a GPU.
//!
//! The kit models the programs that the daemons meet: [`apiserver`], [`kube_scheduler`] and [`kubelet`] with its container
//! runtime, each behaving as the original does where gpushare can notice the difference; [`vendor_plugin`],
//! [`second_scheduler`], [`replicas`] and [`installation`] complete a cluster. [`cluster`] starts them together with the daemons as processes
//! ([`daemons`]), [`observer`] shows the API server's objects, and [`invariants`] checks them independently of the daemons.
//!
//! The scenarios use it: [`demo`], [`e2e`] with its [`scenario`]s, [`chaos`] and [`waves`]; [`mod@cli`] has the commands. The
//! crate `laboratory` measures with the same kit. Nothing of either is shipped.

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
pub mod files;
pub mod http_client;
pub mod installation;
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
pub mod replicas;
pub mod scenario;
pub mod second_scheduler;
pub mod vendor_plugin;
pub mod waves;
