//! Every contract that crosses a process boundary of gpushare, and nothing else.
//!
//! Names, wire formats, and the readers and writers of annotations; no decision, no I/O, no clock. The two daemons meet only
//! here: neither depends on the other.

pub mod admission;
pub mod annotation;
pub mod closed_gpus;
pub mod device;
mod excerpt;
pub mod extender;
#[cfg(feature = "kubelet")]
pub mod kubelet;
pub mod kubelet_allocations;
pub mod memory_overrun;
pub mod memory_text;
pub mod memory_unit;
pub mod node;
#[cfg(feature = "nri")]
pub mod nri;
pub mod plugin_reports;
pub mod pod;
pub mod pod_group;
pub mod quantity;
pub mod read_api;
pub mod record;
pub mod request;
pub mod resource;
pub mod topology;
pub mod totals;
