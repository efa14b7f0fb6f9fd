//! The gain of joining free memory: plans of `join` on the cluster as it is when it is first nearly full.

use serde::Serialize;

/// Percent of all GPUs that are allocated when plans are made.
pub const NEARLY_FULL: f64 = 95.0;

#[derive(Clone, Copy, Debug, Serialize)]
pub struct JoinGain {
    pub most: usize,
    pub restarts: u32,
    /// Bytes by which the largest free blocks of the nodes grow in sum.
    pub bytes: u64,
}
