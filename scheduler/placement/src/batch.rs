//! Evaluation of many nodes for one request, with caches: per equivalence class within one evaluation, and per node between
//! evaluations of equal requests.

pub(crate) mod cache;
pub(crate) mod evaluation;
