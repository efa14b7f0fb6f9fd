//! Evaluation of many nodes for one request, with caches: one result for each equivalence class within an evaluation, and one for
//! each node from an evaluation to the next of an equal request.

pub(crate) mod cache;
pub(crate) mod evaluation;
pub(crate) mod next_model;
