//! The injection of devices into containers, with their limits: by CDI, by the vendor's variable (`NVIDIA_VISIBLE_DEVICES`), or
//! not at all.
//!
//! [`injection`] decides on the injection mode, [`enforcement`] on each GPU's level of memory limits, both by facts of the node.
//! [`content`] makes answers to Allocate and the content of CDI specs, [`cdi`] writes the specs, and [`runtime_hook`] adjusts
//! containers that the container runtime creates. Beside them are the operator's [`settings`], the decided [`mode`], and two
//! sources of facts: the operator's HAMi-core library ([`hami_core`]) and this plugin's [own container](own_container).

pub mod cdi;
pub mod content;
pub mod enforcement;
pub mod hami_core;
pub mod injection;
pub mod mode;
pub mod own_container;
pub mod runtime_hook;
pub mod settings;
