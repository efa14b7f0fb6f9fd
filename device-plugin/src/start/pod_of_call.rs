//! Matches calls with the pods and the log of this node: waits for the pod of a call, since kubelet may know a pod before this
//! plugin's watch shows it, or logs an answer that does not depend on the pod.

use std::time::Duration;

use proto::kubelet::deviceplugin::ContainerAllocateResponse;
use tokio::time::{Instant, timeout_at};

use crate::devices::extended_resource::ExtendedResource;
use crate::node::pods::NodePods;
use crate::start::node_state::NodeState;

use super::matching::{AllocateLog, Call, Match, MatchAttempt, match_call, preferred};

/// Longest checkpoint, in bytes, that early attempts load.
pub(crate) const SHORT_CHECKPOINT: u64 = 256 << 10;

/// The match of `call`, as soon as there is one, or after `limit` the best match of the last attempt.
pub(crate) async fn wait_for_match(node: &NodeState, call: &Call<'_>, limit: Duration) -> Option<Match> {
    let until = Instant::now() + limit;
    let mut pods = node.pods.clone();
    let mut attempt = MatchAttempt::Early;
    loop {
        let found = attempt_match(node, &pods.borrow_and_update(), &mut node.log(), call, attempt);
        if found.is_some() || attempt == MatchAttempt::Last {
            return found;
        }
        if limit.is_zero() || !matches!(timeout_at(until, pods.changed()).await, Ok(Ok(()))) {
            attempt = MatchAttempt::Last;
        }
    }
}

/// Logs an answer that does not depend on its pod, as an answer for the likeliest pod.
pub(crate) fn log_answer(
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
    log.has_waited = false;
    // The pod that `GetPreferredAllocation` was matched with, else a match without doubt, else a doubtful one.
    let mut found = preferred(&pods, &log, &call);
    for attempt in [MatchAttempt::Early, MatchAttempt::Last] {
        found = found.or_else(|| attempt_match(node, &pods, &mut log, &call, attempt));
    }
    let pod = found.as_ref().map(|found| found.pod.clone());
    log.add_answer(resource, ids, pod, response.clone());
    if let Some(found) = found {
        log.record(found, &pods);
    }
}

/// Loads kubelet's checkpoint into the log, and then matches the call. Early attempts, which are repeated while kubelet waits,
/// skip a long checkpoint that is not needed at once.
fn attempt_match(
    node: &NodeState,
    pods: &NodePods,
    log: &mut AllocateLog,
    call: &Call<'_>,
    attempt: MatchAttempt,
) -> Option<Match> {
    let max_bytes = match attempt {
        MatchAttempt::Early => SHORT_CHECKPOINT,
        MatchAttempt::Last => u64::MAX,
    };
    node.load_checkpoint(log, pods, max_bytes);
    match_call(pods, log, call, attempt)
}
