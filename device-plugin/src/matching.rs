//! Matches kubelet's Allocate calls with the pending pods of this node by assume timestamp. Pure: no clock, no channel, no API.
//!
//! kubelet does not say for which pod it allocates. It does admit one pod at a time, the containers of a pod in the order of
//! its spec (init containers first), the resources of a container in any order, with exactly one call per container and
//! resource. So a pod of this node is a candidate if the next call that it is due for is this one, and among candidates the
//! order is:
//!
//! 1. the pod whose admission is under way (some of its calls have been answered, not all);
//! 2. pods whose recorded devices are those of the device IDs in the call;
//! 3. pods that came since this process started, then those that it found, unless kubelet's checkpoint can be read: without it
//!    an earlier process may have answered for those;
//! 4. the pod that the scheduler assumed first.
//!
//! The match is the likeliest pod and no proof: the check before a start finds the owner of the container. So no call is
//! refused here, as kubelet fails a pod for good on that. In mode `cdi` the match only pins the preferred device IDs, and in
//! mode `envvar` it also decides the answer.
//!
//! [`AllocateLog`] remembers the answered calls per pod UID and container. A pod that has left Pending is never a candidate.
//! kubelet's checkpoint corrects the log: where it shows that a call was another pod's, the call moves to that pod, and where
//! the two pods ask for the same, each one's further calls are matched with the record of the other, so that no record is used
//! twice. The records themselves are swapped before a container starts.
//!
//! When this process starts, or registers with kubelet again, the log continues from kubelet's checkpoint, which kubelet also
//! writes at each registration and after each container. It is read again as long as a pod that existed before is not fully
//! answered for, so a restart may fall between any two calls.
//!
//! A pod that is being deleted keeps its place: kubelet admits it if it has not seen it before, and if its call were matched
//! with the next pod, that pod's own call would find no candidate. Where kubelet does not admit it, the next equal pod gets its
//! devices, once. As soon as a call was answered for a pod assumed later, or kubelet has reported one as admitted, kubelet has
//! passed the deleted pod over: then it is matched only on the last attempt, if no other pod fits.
//!
//! A pod without a usable record has no assume time, and its place is that of its arrival. If it came before the pod that would
//! be matched, the call is its own. It can be passed over as well.
//!
//! Where two pods are due for the same call, the match can turn out wrong at a later call that the matched pod cannot make. If
//! another pod explains all of the admission's calls and has the same GPUs, nothing has gone wrong and the calls move to it.
//! Otherwise the admission is over (kubelet gave it up), or it was that other pod's, which goes on with the answers that it was
//! given. A pod whose admission seemed over is matched again only on the last attempt, if no other pod fits.

mod allocate_log;
mod swap_plan;
pub mod wait;

use crate::extended_resource::ExtendedResource;
use crate::fleet::DeviceKey;
use crate::pods::{NodePod, NodePods, Placement, PodStage, PodUid};

pub use allocate_log::{AllocateLog, AnsweredCall};

/// A call of kubelet for one container and resource.
#[derive(Clone, Debug)]
pub struct Call<'a> {
    /// The resource whose socket it came over.
    pub resource: ExtendedResource,
    /// The number of its device IDs.
    pub count: u64,
    /// The devices of those IDs; empty if the IDs name none.
    pub devices: &'a [DeviceKey],
}

/// An attempt to match a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatchAttempt {
    /// The caller tries again when the pods change.
    Early,
    /// The caller has waited long enough: doubtful candidates count too.
    Last,
}

/// The container that a call is matched with.
#[derive(Clone, Debug, PartialEq)]
pub struct Match {
    /// The pod.
    pub pod: PodUid,
    /// Index in [`NodePod::containers`].
    pub container: usize,
    /// The record whose devices the answer names; none if the pod has no usable record.
    pub placement: Option<Placement>,
    /// The pod of that record: mostly the same pod.
    record_of: PodUid,
    /// The calls of the pod's admission that are answered, this one included.
    calls: Vec<AnsweredCall>,
    /// The pod that earlier calls of this admission were matched with by mistake.
    corrects: Option<PodUid>,
}

/// The reason that a call cannot be matched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NoMatch {
    /// The pods of this node are not known yet.
    NotSynced,
    /// A pod waits for exactly this, and its record is missing or cannot be used.
    Unplaced {
        /// `namespace/name`.
        pod: String,
    },
    /// An earlier call of this admission was answered for a pod that it cannot have been for, on other GPUs.
    Ambiguous,
    /// No pod of this node waits for this.
    NoPod,
}

/// Finds the container that `call` is for.
///
/// # Errors
/// No container can be named; the caller decides whether to wait for more pods.
pub fn match_call(
    pods: &NodePods,
    log: &AllocateLog,
    call: &Call<'_>,
    attempt: MatchAttempt,
) -> Result<Match, NoMatch> {
    let is_last = attempt == MatchAttempt::Last;
    let admitting = log
        .admitting()
        .and_then(|uid| pods.get(uid))
        .filter(|pod| is_candidate(pod, log));
    if let Some(found) = admitting.and_then(|pod| due(pods, pod, log, call)) {
        return Ok(found);
    }
    let choice = first_due(pods, log, call);
    // An admission that kubelet's checkpoint names is certain.
    let doubtful = admitting.filter(|pod| !log.was_answered_before(&pod.uid));
    // The pod under way cannot make this call: kubelet gave it up, or an earlier call was another pod's.
    if let Some((corrected, is_harmless)) = doubtful.and_then(|pod| correct(pods, log, pod, call)) {
        return match choice {
            // Nothing has gone wrong if the devices are the same, so that is believed first.
            Some(choice) if !is_harmless && is_on_devices_of(pods, &corrected, &choice) => Ok(choice),
            _ if is_harmless || is_last => Ok(corrected),
            _ => Err(NoMatch::Ambiguous),
        };
    }
    if let Some(choice) = choice {
        return match earlier_unplaced(pods, log, call, &choice) {
            Some(unplaced) if is_last => Ok(unplaced),
            Some(unplaced) => Err(no_record(pods, &unplaced)),
            None => Ok(choice),
        };
    }
    if is_last && let Some(found) = last_resort(pods, log, call) {
        return Ok(found);
    }
    if !pods.is_synced() {
        return Err(NoMatch::NotSynced);
    }
    match first_unplaced(pods, pods.iter(), log, call) {
        Some(unplaced) if is_last => Ok(unplaced),
        Some(unplaced) => Err(no_record(pods, &unplaced)),
        None => Err(NoMatch::NoPod),
    }
}

/// The match of the last `GetPreferredAllocation`, if this call is the Allocate that follows it and the pod is still due.
pub fn preferred(pods: &NodePods, log: &AllocateLog, call: &Call<'_>) -> Option<Match> {
    let found = log.preferred()?;
    let answered = found.calls.last()?;
    let is_same_call = answered.resource == call.resource && answered.count == call.count;
    (is_same_call && is_candidate(pods.get(&found.pod)?, log)).then(|| found.clone())
}

/// True if the two pods ask for the same, so that swapping their records changes no device's sums.
fn are_alike(pods: &NodePods, one: &PodUid, other: &PodUid) -> bool {
    match (pods.get(one), pods.get(other)) {
        (Some(one), Some(other)) => one.asks_like(other),
        _ => false,
    }
}

/// The same calls as calls of `pod`, if it can make them.
fn explain(pod: &NodePod, calls: &[AnsweredCall], offered: &[ExtendedResource]) -> Option<Vec<AnsweredCall>> {
    let mut explained = Vec::new();
    for call in calls {
        let repeated = Call {
            resource: call.resource,
            count: call.count,
            devices: &[],
        };
        let container = next_container(pod, &explained, &repeated, offered)?;
        explained.push(AnsweredCall { container, ..*call });
    }
    Some(explained)
}

/// True if calls may be matched with the pod.
fn is_candidate(pod: &NodePod, log: &AllocateLog) -> bool {
    if pod.stage != PodStage::Bound {
        return false;
    }
    match &pod.placement {
        // A pod in the log may have been marked assigned because of the log alone.
        Ok(placement) => !placement.is_assigned() || log.is_answered(&pod.uid),
        Err(_) => true,
    }
}

/// The pod's record if it has one and calls may be matched with it.
fn candidate<'a>(pod: &'a NodePod, log: &AllocateLog) -> Option<&'a Placement> {
    pod.record().filter(|_| is_candidate(pod, log))
}

/// True if kubelet has gone on to later pods without this one, though nothing kept it from admitting it.
fn is_passed_over(pods: &NodePods, pod: &NodePod, log: &AllocateLog) -> bool {
    // kubelet comes to every pod in its turn, unless it was deleted before.
    if pod.assumed_at().is_some() && !pod.deleting {
        return false;
    }
    let mut latest_assumed = log.latest_assumed();
    let mut latest_arrival = log.latest_arrival();
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

/// True if the pod of `found` has the devices of the record of `choice`.
fn is_on_devices_of(pods: &NodePods, found: &Match, choice: &Match) -> bool {
    match (pods.get(&found.pod), &choice.placement) {
        (Some(pod), Some(placement)) => has_devices(pod, placement),
        _ => false,
    }
}

fn has_devices(pod: &NodePod, placement: &Placement) -> bool {
    pod.placement
        .as_ref()
        .is_ok_and(|own| own.is_on_devices_of(placement))
}

/// The match with this pod, if `call` is the one that it is due for.
fn due(pods: &NodePods, pod: &NodePod, log: &AllocateLog, call: &Call<'_>) -> Option<Match> {
    let answered = log.answered_calls(&pod.uid);
    let container = next_container(pod, answered, call, log.offered())?;
    Some(matched(pods, pod, log, container, answered, call))
}

fn matched(
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
    // Where a swap is planned, the answer has the devices that the pod will have afterwards.
    let record_of = log.record_of(&pod.uid).clone();
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

/// The first container that still has calls to come, for resources that kubelet knows, if `call` is one of them.
fn next_container(
    pod: &NodePod,
    answered: &[AnsweredCall],
    call: &Call<'_>,
    offered: &[ExtendedResource],
) -> Option<usize> {
    for (idx, container) in pod.containers.iter().enumerate() {
        let mut is_open = false;
        for resource in offered {
            let count = resource.count(container);
            let is_answered = answered
                .iter()
                .any(|answered| answered.container == idx && answered.resource == *resource);
            if count == 0 || is_answered {
                continue;
            }
            if *resource == call.resource && count == call.count {
                return Some(idx);
            }
            is_open = true;
        }
        // kubelet allocates container by container: no later container is due while this one lacks an answer.
        if is_open {
            return None;
        }
    }
    None
}

/// The best of the pods that no call has been matched with.
fn first_due(pods: &NodePods, log: &AllocateLog, call: &Call<'_>) -> Option<Match> {
    let mut candidates = Vec::new();
    for pod in pods.iter() {
        // kubelet seems to have passed over a doubtful pod: it is matched only if no other pod fits.
        if pod.stage != PodStage::Bound || log.is_answered(&pod.uid) || log.is_doubtful(&pod.uid) {
            continue;
        }
        let Some(placement) = candidate(pod, log) else {
            continue;
        };
        let Some(container) = next_container(pod, &[], call, log.offered()) else {
            continue;
        };
        if !is_passed_over(pods, pod, log) {
            candidates.push((placement, pod, container));
        }
    }
    let (pod, container) = best(candidates, log, call)?;
    Some(matched(pods, pod, log, container, &[], call))
}

/// The pod without a usable record that came before `choice` and is due for the same call.
fn earlier_unplaced(pods: &NodePods, log: &AllocateLog, call: &Call<'_>, choice: &Match) -> Option<Match> {
    let place = |uid: &PodUid| (log.is_uncertain(uid), pods.arrival(uid));
    let earlier = pods.iter().filter(|pod| {
        pod.placement.is_err() && place(&pod.uid) < place(&choice.pod) && !is_passed_over(pods, pod, log)
    });
    // With the answer for `choice` that pod would use devices that are counted for the other.
    first_unplaced(pods, earlier, log, call)
}

/// The first of these pods to arrive that has no usable record and is due for the call.
fn first_unplaced<'a>(
    pods: &NodePods,
    among: impl Iterator<Item = &'a NodePod>,
    log: &AllocateLog,
    call: &Call<'_>,
) -> Option<Match> {
    among
        .filter(|pod| pod.placement.is_err() && is_candidate(pod, log))
        .filter_map(|pod| due(pods, pod, log, call))
        .min_by_key(|found| pods.arrival(&found.pod))
}

fn no_record(pods: &NodePods, unplaced: &Match) -> NoMatch {
    let pod = pods.get(&unplaced.pod).map(NodePod::display_name);
    NoMatch::Unplaced {
        pod: pod.unwrap_or_default(),
    }
}

/// The candidate that comes first, with its further value.
fn best<'a, T>(
    candidates: Vec<(&'a Placement, &'a NodePod, T)>,
    log: &AllocateLog,
    call: &Call<'_>,
) -> Option<(&'a NodePod, T)> {
    let rank = |(placement, pod, _): &(&'a Placement, &'a NodePod, T)| {
        (
            !placement.includes(call.resource, call.devices),
            log.is_uncertain(&pod.uid),
            placement.assumed_at,
            pod.namespace.as_str(),
            pod.name.as_str(),
            pod.uid.as_str(),
        )
    };
    let best = candidates
        .into_iter()
        .min_by(|one, other| rank(one).cmp(&rank(other)));
    best.map(|(_, pod, value)| (pod, value))
}

/// Another pod that explains the calls matched with `mistaken` and this one too, and whether it has the same GPUs.
fn correct(pods: &NodePods, log: &AllocateLog, mistaken: &NodePod, call: &Call<'_>) -> Option<(Match, bool)> {
    let mut explaining = Vec::new();
    let mut harmless = Vec::new();
    for pod in pods.iter() {
        if log.is_answered(&pod.uid) {
            continue;
        }
        let Some(placement) = candidate(pod, log) else {
            continue;
        };
        let Some(found) = explains(pods, log, pod, mistaken, call) else {
            continue;
        };
        if has_devices(mistaken, placement) {
            harmless.push((placement, pod, found));
        } else {
            explaining.push((placement, pod, found));
        }
    }
    if let Some((_, found)) = best(harmless, log, call) {
        return Some((found, true));
    }
    let (_, likeliest) = best(explaining, log, call)?;
    let record_of = log.record_of(&mistaken.uid).clone();
    let placement = pods.get(&record_of).and_then(|pod| pod.record());
    let corrected = Match {
        placement: placement.cloned(),
        record_of,
        ..likeliest
    };
    Some((corrected, false))
}

/// The match with `pod`, if it can have made the calls matched with `mistaken` and makes this one.
fn explains(
    pods: &NodePods,
    log: &AllocateLog,
    pod: &NodePod,
    mistaken: &NodePod,
    call: &Call<'_>,
) -> Option<Match> {
    let calls = explain(pod, log.answered_calls(&mistaken.uid), log.offered())?;
    let container = next_container(pod, &calls, call, log.offered())?;
    Some(Match {
        corrects: Some(mistaken.uid.clone()),
        ..matched(pods, pod, log, container, &calls, call)
    })
}

/// Candidates that are matched only if no other pod fits: a pod whose admission seemed over, one that kubelet seemed to have
/// passed over, and a pod some of whose calls an earlier process may have answered.
fn last_resort(pods: &NodePods, log: &AllocateLog, call: &Call<'_>) -> Option<Match> {
    let (mut doubtful, mut resumed) = (Vec::new(), Vec::new());
    for pod in pods.iter() {
        let Some(placement) = candidate(pod, log) else {
            continue;
        };
        let is_answered = log.is_answered(&pod.uid);
        let is_doubtful = log.is_doubtful(&pod.uid) || (!is_answered && is_passed_over(pods, pod, log));
        if is_doubtful && let Some(found) = due(pods, pod, log, call) {
            doubtful.push((placement, pod, found));
        }
        if !is_answered
            && log.is_uncertain(&pod.uid)
            && let Some(found) = resume(pods, pod, log, call)
        {
            resumed.push((placement, pod, found));
        }
    }
    let found = best(doubtful, log, call).or_else(|| best(resumed, log, call));
    found.map(|(_, found)| found)
}

/// The match with the pod if any of its containers waits for this; the calls of earlier containers count as answered.
fn resume(pods: &NodePods, pod: &NodePod, log: &AllocateLog, call: &Call<'_>) -> Option<Match> {
    let at = pod
        .containers
        .iter()
        .position(|container| call.resource.count(container) == call.count)?;
    let mut answered = Vec::new();
    for (container, earlier) in pod.containers.iter().take(at).enumerate() {
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
    Some(matched(pods, pod, log, at, &answered, call))
}

#[cfg(test)]
mod tests;
