//! Waits for the pod of a call: kubelet may know a pod before this plugin's watch shows it.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use crate::node_state::NodeState;
use crate::pods::NodePods;

use super::{AllocateLog, Call, Match, MatchAttempt, NoMatch, match_call};

/// Longest checkpoint, in bytes, that is loaded at each attempt while kubelet waits; a longer one is loaded only on the last attempt.
pub const SHORT_CHECKPOINT: u64 = 256 << 10;

/// Calls `act` with the match of `call`, as soon as there is one, or after `limit` with the best match of the last attempt. The pods
/// stay locked meanwhile, so that `act` sees the pods that were matched.
///
/// # Errors
/// No pod matches within the limit.
pub async fn when_matched<T>(
    node: &NodeState,
    call: &Call<'_>,
    limit: Duration,
    act: impl Fn(&NodePods, Match) -> T,
) -> Result<T, NoMatch> {
    let until = Instant::now() + limit;
    let mut pods = node.pods.clone();
    loop {
        if let Ok(result) = try_match(node, &mut pods, call, MatchAttempt::Early, &act) {
            return Ok(result);
        }
        if limit.is_zero() || !matches!(timeout_at(until, pods.changed()).await, Ok(Ok(()))) {
            return try_match(node, &mut pods, call, MatchAttempt::Last, &act);
        }
    }
}

/// The best match for a call, found without any wait.
pub fn try_last_match(
    node: &NodeState,
    log: &mut AllocateLog,
    pods: &NodePods,
    call: &Call<'_>,
) -> Option<Match> {
    for attempt in [MatchAttempt::Early, MatchAttempt::Last] {
        node.load_checkpoint(log, pods, max_bytes(attempt));
        if let Ok(found) = match_call(pods, log, call, attempt) {
            return Some(found);
        }
    }
    None
}

fn try_match<T>(
    node: &NodeState,
    pods: &mut watch::Receiver<NodePods>,
    call: &Call<'_>,
    attempt: MatchAttempt,
    act: impl Fn(&NodePods, Match) -> T,
) -> Result<T, NoMatch> {
    let pods = pods.borrow_and_update();
    let found = {
        let mut log = node.log();
        node.load_checkpoint(&mut log, &pods, max_bytes(attempt));
        match_call(&pods, &log, call, attempt)?
    };
    Ok(act(&pods, found))
}

fn max_bytes(attempt: MatchAttempt) -> u64 {
    match attempt {
        MatchAttempt::Early => SHORT_CHECKPOINT,
        MatchAttempt::Last => u64::MAX,
    }
}
