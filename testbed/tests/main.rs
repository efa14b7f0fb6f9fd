//! All tests of the testbed but `e2e` and `node_kinds`: one program, since most of them wait for processes most of the time.
//!
//! A file or folder here is a group, which its name selects: `cargo test --package testbed --test main lifecycle`.

mod chaos;
#[path = "stand_in/cuda.rs"]
mod cuda;
mod demo;
mod deploy;
mod documents;
mod lifecycle;
mod nvidia_runtime;
mod verdict;
