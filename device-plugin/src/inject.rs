//! The injection of devices into containers, with their limits: by CDI, by the vendor's variable (`NVIDIA_VISIBLE_DEVICES`), or
//! not at all.
//!
//! `injection` decides on the injection mode, [`enforcement`] on each GPU's level of memory limits, both by facts of the node.
//! `content` makes answers to Allocate and the content of CDI specs, `cdi` writes the specs, and `runtime_hook` adjusts
//! containers that the container runtime creates.

pub(crate) mod cdi;
pub(crate) mod content;
pub mod enforcement;
pub(crate) mod hami_core;
pub(crate) mod injection;
pub(crate) mod mode;
pub(crate) mod own_container;
pub(crate) mod runtime_hook;
pub mod settings;
