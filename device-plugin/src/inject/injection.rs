//! The decision on the injection mode.
//!
//! The mode follows from facts seen on the node, never from a version: `decide` is a pure function of them, and [`detect`] finds
//! them. The decision may change while the process runs: each answer to Allocate is complete in the mode in which it was made.

mod decide;
pub(crate) mod detect;
mod runtime_files;
