//! kube-scheduler extender that shares GPUs per device: watches in, HTTP answers out, one binding written per pod.
//!
//! The `placement` crate decides which devices a pod gets; this crate keeps the state of the cluster for it, speaks HTTP and
//! writes bindings.

pub mod accounting;
pub mod admission;
mod api_server;
pub mod bind;
pub mod certificates;
mod closing_events;
pub mod config;
pub mod extender;
pub mod index;
pub mod inventory;
mod keyed_lock;
pub mod kube_scheduler;
pub mod leader;
pub mod make_room;
pub mod metrics;
mod next_model;
pub mod offline;
pub mod page;
mod pod_group_watch;
pub mod read_api;
pub mod room;
pub mod run;
mod verdict;
pub mod watch;
