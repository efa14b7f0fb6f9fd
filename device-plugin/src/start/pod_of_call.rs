//! Matches calls with the pods and the log of this node: waits for the pod of a call, since kubelet may know a pod before this
//! plugin's watch shows it, or logs an answer that does not depend on the pod.

use std::time::Duration;

use proto::kubelet::deviceplugin::ContainerAllocateResponse;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use crate::devices::extended_resource::ExtendedResource;
use crate::node::pods::NodePods;
use crate::start::node_state::NodeState;

use super::matching::{AllocateLog, Call, Match, MatchAttempt, NoMatch, match_call, preferred};

/// Longest checkpoint, in bytes, that early attempts load.
pub const SHORT_CHECKPOINT: u64 = 256 << 10;

/// Calls `act` with the match of `call`, as soon as there is one, or after `limit` with the best match of the last attempt. The
/// pods stay locked meanwhile, so that `act` sees the pods that were matched.
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

/// Logs an answer that does not depend on its pod, as an answer for the likeliest pod.
pub fn log_answer(
    node: &NodeState,
    resource: ExtendedResource,
    ids: &[String],
    response: &ContainerAllocateResponse,
) {
    let devices = node.devices_of(resource, ids);
    let call = Call {
        resource,
        count: ids.len() as u64,
        devices: &devices,
    };
    let pods = node.pods.borrow();
    let mut log = node.log();
    // Only `allocate_by_variable` reads the mark of an unsuccessful wait, which must not stay for the next call.
    log.take_waited();
    // The pod that `GetPreferredAllocation` was matched with, else a match without doubt, else a doubtful one.
    let mut found = preferred(&pods, &log, &call);
    for attempt in [MatchAttempt::Early, MatchAttempt::Last] {
        found = found.or_else(|| attempt_match(node, &mut log, &pods, &call, attempt).ok());
    }
    let pod = found.as_ref().map(|found| found.pod.clone());
    log.add_answer(resource, ids, pod, response.clone());
    if let Some(found) = found {
        log.record(found, &pods);
    }
}

/// Attempts to match a call once, and calls `act` with the match.
fn try_match<T>(
    node: &NodeState,
    pods: &mut watch::Receiver<NodePods>,
    call: &Call<'_>,
    attempt: MatchAttempt,
    act: impl Fn(&NodePods, Match) -> T,
) -> Result<T, NoMatch> {
    let pods = pods.borrow_and_update();
    // The lock of the log ends with this statement, since `act` takes it again.
    let found = attempt_match(node, &mut node.log(), &pods, call, attempt)?;
    Ok(act(&pods, found))
}

/// Loads kubelet's checkpoint into the log, and then matches the call. Early attempts, which are repeated while kubelet waits,
/// skip a long checkpoint that is not needed at once.
fn attempt_match(
    node: &NodeState,
    log: &mut AllocateLog,
    pods: &NodePods,
    call: &Call<'_>,
    attempt: MatchAttempt,
) -> Result<Match, NoMatch> {
    let max_bytes = match attempt {
        MatchAttempt::Early => SHORT_CHECKPOINT,
        MatchAttempt::Last => u64::MAX,
    };
    node.load_checkpoint(log, pods, max_bytes);
    match_call(pods, log, call, attempt)
}
