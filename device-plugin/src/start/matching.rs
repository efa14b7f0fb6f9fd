//! Matches kubelet's Allocate calls with the pending pods of this node by assume timestamp. Pure: no clock, no channel, no API.
//!
//! kubelet does not name the pod that it allocates for. But it admits one pod at a time, the containers of a pod in the order of
//! its spec (init containers first), the resources of a container in any order, with exactly one call per container and resource.
//! So a pod is a candidate if this call is the next one that kubelet has to make for it. Among candidates the order is:
//!
//! 1. the pod that kubelet is admitting (some of its calls have been answered, not all);
//! 2. pods whose recorded devices are those of the device IDs in the call;
//! 3. if kubelet's checkpoint cannot be read, pods that came since this process started: an earlier process may have answered
//!    for the others;
//! 4. the pod that the scheduler assumed first.
//!
//! The match is the likeliest pod and no proof: the check before a start finds the owner of the container. So no call is refused
//! here, as kubelet fails a pod for good on that. [`AllocateLog`] remembers the answered calls, and kubelet's checkpoint corrects
//! it: a call that was another pod's moves to that pod. If the two pods request the same, the further calls of each are matched
//! with the record of the other; the records themselves are swapped before a container starts.
//!
//! A pod that is being deleted keeps its place, since kubelet admits it if it did not see it before the deletion. A pod without a
//! usable record has the place of its arrival. As soon as kubelet has gone on to a later pod, either is passed over.
//!
//! If several pods wait for the same call, the match can turn out wrong at a later call that kubelet does not make for the
//! matched pod. If all calls so far can be those of another pod with the same devices, the calls move to that pod. Otherwise
//! kubelet has given the matched pod up, or the calls were those of the other pod, which keeps the answers that it was given.
//! Pods that kubelet seemed to have given up or passed over are matched on the last attempt alone, if no other pod fits.

mod allocate_log;
mod swap_plan;

use crate::devices::extended_resource::ExtendedResource;
use crate::devices::fleet::DeviceKey;
use crate::node::pods::{NodePod, NodePods, Placement, PodStage, PodUid};

pub(crate) use allocate_log::{AllocateLog, AnsweredCall};

/// An Allocate or `GetPreferredAllocation` call of kubelet, for one container and resource.
#[derive(Clone, Debug)]
pub(crate) struct Call<'a> {
    /// The resource whose socket the call came over.
    pub(crate) resource: ExtendedResource,
    pub(crate) count: u64,
    /// The devices of the IDs in an Allocate call, or of those that the answer to `GetPreferredAllocation` must include.
    pub(crate) devices: &'a [DeviceKey],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MatchAttempt {
    /// The caller waits and tries again when the pods change.
    Early,
    /// The caller waits no longer: doubtful candidates count too.
    Last,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Match {
    pub(crate) pod: PodUid,
    /// Index in [`NodePod::containers`].
    pub(crate) container: usize,
    /// The record that decides the devices of the call; none if the pod has no usable allocation record.
    pub(crate) placement: Option<Placement>,
    /// The pod whose record `placement` is: the pod of the match, unless the log plans another pod's record for it (`SwapPlan`).
    record_of: PodUid,
    /// The calls that kubelet has made for the pod, this one included.
    calls: Vec<AnsweredCall>,
    /// The pod with which the log has matched the earlier calls in `calls`, if that was a mistake.
    corrects: Option<PodUid>,
}

/// Finds the container that `call` is most likely for: of the pod that kubelet is admitting, else of one that it has made no call
/// for yet; on the last attempt also of a doubtful pod, or of one without usable record.
pub(crate) fn match_call(
    pods: &NodePods,
    log: &AllocateLog,
    call: &Call<'_>,
    attempt: MatchAttempt,
) -> Option<Match> {
    let is_last = attempt == MatchAttempt::Last;
    let admitting = log.admitting.as_ref().and_then(|uid| pods.get(uid));
    let admitting = admitting.filter(|pod| is_candidate(pod, log));
    // kubelet finishes the admission of a pod before it begins with another.
    if let Some(found) = admitting.and_then(|pod| match_if_next(pods, pod, log, call)) {
        return Some(found);
    }
    let choice = match_new_pod(pods, log, call);
    // Calls that kubelet's checkpoint names were for this pod for certain, so they cannot have been another pod's.
    let doubtful = admitting.filter(|pod| !log.answered_before.contains(&pod.uid));
    // The call does not fit the pod that kubelet seemed to admit: kubelet gave that pod up, or the earlier calls were another's.
    if let Some((corrected, is_harmless)) = doubtful.and_then(|pod| find_correction(pods, log, pod, call)) {
        return match choice {
            // The answer by `choice` names the devices in the corrected pod's own record, so it is right for either pod.
            Some(choice) if !is_harmless && is_on_devices_of(pods, &corrected, &choice) => Some(choice),
            // Harmless: the answers so far have named the devices of this pod too.
            _ => (is_harmless || is_last).then_some(corrected),
        };
    }
    if let Some(choice) = choice {
        return match earlier_unplaced(pods, log, call, &choice) {
            Some(unplaced) => is_last.then_some(unplaced),
            None => Some(choice),
        };
    }
    if !is_last {
        return None;
    }
    let doubtful = match_doubtful(pods, log, call);
    // Until the first list of pods is complete, a pod with a record may wait for the call.
    if doubtful.is_some() || !pods.is_synced() {
        return doubtful;
    }
    first_unplaced(pods, pods.iter(), log, call)
}

/// The match of the last `GetPreferredAllocation`, if this call is the Allocate that follows it and the pod is still due.
pub(crate) fn preferred(pods: &NodePods, log: &AllocateLog, call: &Call<'_>) -> Option<Match> {
    let found = log.preferred.as_ref()?;
    let answered = found.calls.last()?;
    // kubelet calls Allocate for the same container right after `GetPreferredAllocation`.
    let is_same_call = answered.resource == call.resource && answered.count == call.count;
    (is_same_call && is_candidate(pods.get(&found.pod)?, log)).then(|| found.clone())
}

/// True if both pods exist and can swap their allocation records without a change of the sum of amounts on any device.
fn are_alike(pods: &NodePods, one: &PodUid, other: &PodUid) -> bool {
    match (pods.get(one), pods.get(other)) {
        (Some(one), Some(other)) => one.can_swap_with(other),
        _ => false,
    }
}

/// The same calls with the containers of `pod`; none if kubelet cannot have made them for this pod, in this order.
fn as_calls_of_pod(
    pod: &NodePod,
    calls: &[AnsweredCall],
    offered: &[ExtendedResource],
) -> Option<Vec<AnsweredCall>> {
    let mut explained = Vec::new();
    for call in calls {
        let repeated = Call {
            resource: call.resource,
            count: call.count,
            // The order of calls does not depend on devices.
            devices: &[],
        };
        let container = next_container(pod, &explained, &repeated, offered)?;
        explained.push(AnsweredCall { container, ..*call });
    }
    Some(explained)
}

/// True if kubelet may still make Allocate calls for the pod.
fn is_candidate(pod: &NodePod, log: &AllocateLog) -> bool {
    // The mark of this process adds nothing to its log of answered calls, with which the caller compares the call.
    let is_marked_before = pod.record().is_some_and(Placement::is_assigned) && !log.is_answered(&pod.uid);
    pod.stage == PodStage::Bound && !is_marked_before
}

/// The record of a pod that kubelet may still make calls for; none if the pod has no usable allocation record.
fn record_of_candidate<'a>(pod: &'a NodePod, log: &AllocateLog) -> Option<&'a Placement> {
    pod.record().filter(|_| is_candidate(pod, log))
}

/// True if kubelet has gone on to later pods without this one, which is being deleted or has no usable allocation record.
fn is_passed_over(pods: &NodePods, pod: &NodePod, log: &AllocateLog) -> bool {
    // kubelet admits every pod in its turn, unless the pod was deleted before.
    if pod.assumed_at().is_some() && !pod.deleting {
        return false;
    }
    let (mut latest_assumed, mut latest_arrival) = (log.latest_assumed, log.latest_arrival);
    for other in pods.iter() {
        if matches!(other.stage, PodStage::Admitted | PodStage::Running) {
            latest_assumed = latest_assumed.max(other.assumed_at());
            latest_arrival = latest_arrival.max(pods.arrival(&other.uid));
        }
    }
    match pod.assumed_at() {
        Some(own) => latest_assumed > Some(own),
        None => latest_arrival > pods.arrival(&pod.uid),
    }
}

/// True if the pod of `found` has an allocation record for the same devices that `choice` would answer with.
fn is_on_devices_of(pods: &NodePods, found: &Match, choice: &Match) -> bool {
    match (pods.get(&found.pod), &choice.placement) {
        (Some(pod), Some(placement)) => has_devices(pod, placement),
        _ => false,
    }
}

/// True if the pod's allocation record names the same devices as this record.
fn has_devices(pod: &NodePod, placement: &Placement) -> bool {
    pod.record().is_some_and(|own| own.is_on_devices_of(placement))
}

/// The match with this pod, if `call` is the next one that kubelet has to make for it.
fn match_if_next(pods: &NodePods, pod: &NodePod, log: &AllocateLog, call: &Call<'_>) -> Option<Match> {
    let answered = log.answered_calls(&pod.uid);
    let container = next_container(pod, answered, call, log.offered())?;
    Some(new_match(pods, pod, log, container, answered, call))
}

/// The match of `call` with a container of this pod, after the calls in `answered`.
fn new_match(
    pods: &NodePods,
    pod: &NodePod,
    log: &AllocateLog,
    container: usize,
    answered: &[AnsweredCall],
    call: &Call<'_>,
) -> Match {
    let mut calls = answered.to_vec();
    calls.push(AnsweredCall {
        container,
        resource: call.resource,
        count: call.count,
    });
    // If a swap of records is planned, the answer has the devices that the pod will have after it.
    let record_of = log.plan.record_of(&pod.uid).clone();
    let holder = pods.get(&record_of).unwrap_or(pod);
    Match {
        pod: pod.uid.clone(),
        container,
        placement: holder.record().cloned(),
        record_of,
        calls,
        corrects: None,
    }
}

/// The container that `call` is for, if it is the next call that kubelet has to make for the pod after those in `answered`.
fn next_container(
    pod: &NodePod,
    answered: &[AnsweredCall],
    call: &Call<'_>,
    offered: &[ExtendedResource],
) -> Option<usize> {
    for (idx, container) in pod.containers.iter().enumerate() {
        let mut lacks_answer = false;
        for resource in offered {
            let count = resource.count(container);
            let mut calls = answered.iter();
            if count == 0 || calls.any(|call| call.container == idx && call.resource == *resource) {
                continue;
            }
            if *resource == call.resource && count == call.count {
                return Some(idx);
            }
            lacks_answer = true;
        }
        // kubelet allocates container by container: no later container is due while this one lacks an answer.
        if lacks_answer {
            return None;
        }
    }
    None
}

/// The match with the best of the pods that kubelet has made no call for yet.
fn match_new_pod(pods: &NodePods, log: &AllocateLog, call: &Call<'_>) -> Option<Match> {
    let mut candidates = Vec::new();
    for pod in pods.iter() {
        // kubelet seems to have passed over a doubtful pod: it is matched only if no other pod fits.
        if pod.stage != PodStage::Bound || log.is_answered(&pod.uid) || log.doubtful.contains(&pod.uid) {
            continue;
        }
        let Some(placement) = record_of_candidate(pod, log) else {
            continue;
        };
        // kubelet begins with the first container of a pod.
        let Some(container) = next_container(pod, &[], call, log.offered()) else {
            continue;
        };
        if !is_passed_over(pods, pod, log) {
            candidates.push((placement, pod, container));
        }
    }
    let (pod, container) = first_candidate(candidates, log, call)?;
    Some(new_match(pods, pod, log, container, &[], call))
}

/// The match with a pod without usable record that came before the pod of `choice` and waits for the same call: with the devices
/// of `choice` that pod would use devices that are counted for another pod.
fn earlier_unplaced(pods: &NodePods, log: &AllocateLog, call: &Call<'_>, choice: &Match) -> Option<Match> {
    let place = |uid: &PodUid| (log.is_uncertain(uid), pods.arrival(uid));
    let is_earlier = |pod: &&NodePod| place(&pod.uid) < place(&choice.pod) && !is_passed_over(pods, pod, log);
    first_unplaced(pods, pods.iter().filter(is_earlier), log, call)
}

/// The match with the first of these pods to arrive that has no usable allocation record and waits for the call.
fn first_unplaced<'a>(
    pods: &NodePods,
    among: impl Iterator<Item = &'a NodePod>,
    log: &AllocateLog,
    call: &Call<'_>,
) -> Option<Match> {
    let mut waiting = Vec::new();
    for pod in among {
        if pod.placement.is_err() && is_candidate(pod, log) {
            waiting.extend(match_if_next(pods, pod, log, call));
        }
    }
    waiting.into_iter().min_by_key(|found| pods.arrival(&found.pod))
}

/// The best candidate in the order of candidates that the head of this file gives, with the value beside it.
fn first_candidate<'a, T>(
    candidates: Vec<(&'a Placement, &'a NodePod, T)>,
    log: &AllocateLog,
    call: &Call<'_>,
) -> Option<(&'a NodePod, T)> {
    let (_, pod, value) = candidates.into_iter().min_by_key(|(placement, pod, _)| {
        (
            !placement.includes(call.resource, call.devices),
            log.is_uncertain(&pod.uid),
            placement.assumed_at,
            // The rest makes the order the same in every process.
            [&pod.namespace, &pod.name, pod.uid.as_str()],
        )
    })?;
    Some((pod, value))
}

/// The match of this call with another pod, for which kubelet can have made the calls that were matched with `mistaken` too. The
/// flag is true if the records of both pods name the same devices.
fn find_correction(
    pods: &NodePods,
    log: &AllocateLog,
    mistaken: &NodePod,
    call: &Call<'_>,
) -> Option<(Match, bool)> {
    let mut explaining = Vec::new();
    let mut harmless = Vec::new();
    for pod in pods.iter() {
        if log.is_answered(&pod.uid) {
            continue;
        }
        let Some(placement) = record_of_candidate(pod, log) else {
            continue;
        };
        let Some(found) = match_as_correction(pods, log, pod, mistaken, call) else {
            continue;
        };
        if has_devices(mistaken, placement) {
            harmless.push((placement, pod, found));
        } else {
            explaining.push((placement, pod, found));
        }
    }
    if let Some((_, found)) = first_candidate(harmless, log, call) {
        return Some((found, true));
    }
    let (_, likeliest) = first_candidate(explaining, log, call)?;
    let record_of = log.plan.record_of(&mistaken.uid).clone();
    let placement = pods.get(&record_of).and_then(NodePod::record);
    let corrected = Match {
        placement: placement.cloned(),
        record_of,
        ..likeliest
    };
    Some((corrected, false))
}

/// The match with `pod`, if kubelet can have made the calls for it that were matched with `mistaken`, and then this one.
fn match_as_correction(
    pods: &NodePods,
    log: &AllocateLog,
    pod: &NodePod,
    mistaken: &NodePod,
    call: &Call<'_>,
) -> Option<Match> {
    let calls = as_calls_of_pod(pod, log.answered_calls(&mistaken.uid), log.offered())?;
    let container = next_container(pod, &calls, call, log.offered())?;
    Some(Match {
        corrects: Some(mistaken.uid.clone()),
        ..new_match(pods, pod, log, container, &calls, call)
    })
}

/// The match with a pod that kubelet seemed to have given up or passed over, else with one of an earlier process.
fn match_doubtful(pods: &NodePods, log: &AllocateLog, call: &Call<'_>) -> Option<Match> {
    let (mut doubtful, mut resumed) = (Vec::new(), Vec::new());
    for pod in pods.iter() {
        let Some(placement) = record_of_candidate(pod, log) else {
            continue;
        };
        let is_answered = log.is_answered(&pod.uid);
        let is_doubtful = log.doubtful.contains(&pod.uid) || (!is_answered && is_passed_over(pods, pod, log));
        if is_doubtful && let Some(found) = match_if_next(pods, pod, log, call) {
            doubtful.push((placement, pod, found));
        }
        // An earlier process may have answered for the first containers of such a pod.
        if !is_answered
            && log.is_uncertain(&pod.uid)
            && let Some(found) = match_any_container(pods, pod, log, call)
        {
            resumed.push((placement, pod, found));
        }
    }
    let first = first_candidate(doubtful, log, call).or_else(|| first_candidate(resumed, log, call));
    first.map(|(_, found)| found)
}

/// The match with the first container of the pod that requests as much; the calls of the containers before it count as answered.
fn match_any_container(pods: &NodePods, pod: &NodePod, log: &AllocateLog, call: &Call<'_>) -> Option<Match> {
    let mut containers = pod.containers.iter();
    let idx = containers.position(|container| call.resource.count(container) == call.count)?;
    let mut answered = Vec::new();
    for (container, earlier) in pod.containers.iter().take(idx).enumerate() {
        for resource in log.offered() {
            let count = resource.count(earlier);
            if count > 0 {
                answered.push(AnsweredCall {
                    container,
                    resource: *resource,
                    count,
                });
            }
        }
    }
    Some(new_match(pods, pod, log, idx, &answered, call))
}

#[cfg(test)]
mod tests;
