//! Every contract that crosses a process boundary of gpushare, and nothing else.
//!
//! Names, wire formats and how a pod's words are read; no decision, no I/O, no clock.
//! The daemons meet only here: neither depends on the other.

pub mod admission;
pub mod checkpoints;
pub mod device;
pub mod exchange;
pub mod extender;
pub mod host;
#[cfg(feature = "kubelet")]
pub mod kubelet;
pub mod memory_unit;
pub mod node;
#[cfg(feature = "nri")]
pub mod nri;
pub mod plugin_state;
pub mod pod;
pub mod quantity;
pub mod record;
pub mod request;
pub mod requests;
pub mod resource;
pub mod topology;
mod totals;
pub mod without_devices;
