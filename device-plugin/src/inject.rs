//! The injection of devices into containers, with their limits: by CDI or by the vendor's environment variable, or not at all.
//!
//! [`injection`] decides on the injection mode, [`enforcement`] on each GPU's level of memory limits, both by facts of the node.
//! [`content`] makes answers to Allocate and the content of CDI specs, [`cdi`] writes the specs, and [`runtime_hook`] adjusts
//! containers that the container runtime creates.

pub mod cdi;
pub mod content;
pub mod enforcement;
pub mod hami_core;
pub mod injection;
pub mod mode;
pub mod own_container;
pub mod runtime_hook;
pub mod settings;
