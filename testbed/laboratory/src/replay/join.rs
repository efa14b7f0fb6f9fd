//! The gain of joining free memory: plans of `join` on the cluster as it is when it is first nearly full.

use serde::Serialize;

use super::portion::{portion, real};
use super::summary::Summary;
use kit::console::table;

/// Percent of all GPUs that are allocated when plans are made.
pub const NEARLY_FULL: f64 = 95.0;
const GIB: i64 = 1 << 30;

#[derive(Clone, Copy, Debug, Serialize)]
pub struct JoinGain {
    pub most: usize,
    pub restarts: u32,
    /// Bytes by which the largest free blocks of the nodes grow in sum.
    pub bytes: u64,
}

/// A table with a line for each summary and each number of moves: means over the runs that became nearly full.
pub fn render(summaries: &[Summary], most_moves: &[usize]) -> String {
    let mut results = table("PODS,POLICY,COND,MOVES AT MOST,PLANS,RESTARTS,GiB,GiB/RESTART".split(','));
    for summary in summaries {
        for most in most_moves {
            let runs = summary.runs.iter().flat_map(|run| &run.joins);
            let gains: Vec<&JoinGain> = runs.filter(|gain| gain.most == *most).collect();
            let n = i64::try_from(gains.len()).unwrap_or(0);
            let restarts: i64 = gains.iter().map(|gain| i64::from(gain.restarts)).sum();
            let bytes: u64 = gains.iter().map(|gain| gain.bytes).sum();
            let gib = portion(i64::try_from(bytes).unwrap_or(i64::MAX), GIB);
            results.add_row([
                summary.list.clone(),
                summary.policy.clone(),
                summary.conditions.clone(),
                most.to_string(),
                n.to_string(),
                format!("{:.1}", portion(restarts, n)),
                format!("{:.1}", gib / real(n.max(1))),
                format!("{:.2}", gib / real(restarts.max(1))),
            ]);
        }
    }
    results.to_string()
}
