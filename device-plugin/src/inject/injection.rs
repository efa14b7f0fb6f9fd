//! The decision on the injection mode.
//!
//! The mode follows from facts seen on the node, never from a version: [`decide()`] is a pure function of them, and [`detect`]
//! finds them, keeps the driver's CDI device in step with the vendor's specs, and publishes the decision. The decision may change
//! while the process runs: each answer to Allocate is complete in the mode in which it was made.

mod decide;
pub mod detect;
mod runtime_files;

pub use decide::{Cdi, Driver, InjectionFacts, VariableFacts, VariableSupport, decide, exposure, variable};
pub use runtime_files::ConfiguredRuntime;
