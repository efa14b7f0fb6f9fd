//! The decision on the injection mode.
//!
//! The mode follows from what is seen on the node, never from a version: [`decide()`] is a pure function of facts, and [`detect`]
//! finds these, keeps the driver's CDI device in step with the vendor's specs, and publishes the decision. The decision may change
//! while the process runs: each answer to Allocate is complete in its own mode.

mod decide;
pub mod detect;
mod runtime_files;

pub use decide::{Cdi, Driver, InjectionFacts, VariableFacts, VariableSupport, decide, exposure, variable};
pub use runtime_files::ConfiguredRuntime;
