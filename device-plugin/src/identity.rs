//! Which pod and container is this call of kubelet for? Pure: no clock, no channel, no API.
//!
//! kubelet does not say whom it allocates for. It does admit one pod at a time, the containers of a
//! pod in the order of its spec (init containers first), the resources of a container in any order,
//! with exactly one call per container and resource. So a pod of this node is a candidate if the
//! next call that it is due for is this one, and among candidates the order is:
//!
//! 1. the pod whose admission is under way (some of its calls have been answered, not all);
//! 2. pods whose recorded devices are those of the device IDs in the call;
//! 3. pods that came since this process started, then those that it found, unless kubelet's checkpoint
//!    can be read: without it a predecessor may have answered for those;
//! 4. the pod that the scheduler assumed first.
//!
//! This is the likeliest answer and no proof: that comes before a container starts, in [`crate::proof`].
//! Nobody is refused here, as kubelet fails a pod for good on that.
//!
//! [`Ledger`] remembers what has been answered, per pod UID and container. A pod that has left Pending is
//! never a candidate. What kubelet writes down of its answers corrects the books: where a call turns out to
//! have been another pod's, the calls are that one's, and where the two ask for the same each is meant to
//! get the record of the other from then on, so that no record is answered with twice. That is a plan for
//! answers only: the records themselves are exchanged before a container starts.
//!
//! When this process starts, or registers with kubelet anew, the books go on from kubelet's checkpoint,
//! which kubelet also writes at each registration and after each container. It is read again as long as
//! a pod that was there before is not fully answered for, so a restart may fall between any two calls.
//!
//! A pod that is being deleted keeps its place: kubelet admits it if it has not seen it before, and
//! if its call were taken for the next pod's, that one's call would find nobody. Where kubelet does
//! not admit it, the next equal pod gets its devices, once. As soon as a call was answered for a pod
//! assumed later, or kubelet has reported one as admitted, kubelet has passed it over: then it is
//! taken only when, after all the waiting, nobody else fits.
//!
//! A pod without a usable record has no assume time, and its place is that of its arrival. If it came
//! before the pod that would be answered, the call is its own: with the other's answer it would use
//! devices that are counted for that one. It can be passed over as well.
//!
//! Where two pods are due for the same call, the choice can turn out wrong at a later call that the
//! chosen pod cannot make. If another pod explains all of the admission's calls and has the same
//! GPUs, nothing has gone wrong and the calls are accounted to it. Otherwise the admission is over
//! (kubelet gave it up), or it was that other pod's, which goes on to get what it was given before.
//! A pod whose admission seemed over is taken again only when, after all the waiting, nobody else fits.

pub mod checkpoint;
mod ledger;

use crate::extended_resource::ExtendedResource;
use crate::fleet::DeviceKey;
use crate::pods::{NodePod, Placement, PodUid, Pods, Stage};

pub use ledger::{Ledger, Step};

/// What is known of a call.
#[derive(Clone, Debug)]
pub struct Call<'a> {
    /// The resource whose socket it came over.
    pub resource: ExtendedResource,
    /// How many device IDs it is about.
    pub count: u64,
    /// The devices of those IDs; empty if they say nothing.
    pub devices: &'a [DeviceKey],
}

/// Whether more pods may still show up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Patience {
    /// The caller will ask again when the pods change.
    Waiting,
    /// The caller has waited long enough: doubtful candidates count too.
    Over,
}

/// The answer: the call is for this container of this pod.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// The pod.
    pub pod: PodUid,
    /// Index in [`NodePod::containers`].
    pub container: usize,
    /// The devices to answer with; none if the pod has no usable record.
    pub placement: Option<Placement>,
    /// Whose record that is: mostly the pod's own.
    record_of: PodUid,
    /// The calls of the pod's admission that are answered once this one is.
    steps: Vec<Step>,
    /// The pod to which these calls were accounted wrongly.
    corrects: Option<PodUid>,
}

/// Nobody can be told to be the caller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unidentified {
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
    Nobody,
}

/// Finds the container that `call` is for.
///
/// # Errors
/// Why nobody can be named; the caller decides whether to wait for more pods.
pub fn identify(
    pods: &Pods,
    ledger: &Ledger,
    call: &Call<'_>,
    patience: Patience,
) -> Result<Found, Unidentified> {
    let is_over = patience == Patience::Over;
    let admitting = ledger
        .admitting()
        .and_then(|uid| pods.get(uid))
        .filter(|pod| is_candidate(pod, ledger));
    if let Some(found) = admitting.and_then(|pod| due(pods, pod, ledger, call)) {
        return Ok(found);
    }
    let choice = first_due(pods, ledger, call);
    // What kubelet itself has written down is not put right.
    let open_to_doubt = admitting.filter(|pod| !ledger.is_from_before(&pod.uid));
    if let Some((corrected, is_harmless)) =
        open_to_doubt.and_then(|mistaken| correct(pods, ledger, mistaken, call))
    {
        let goes_on = |choice: &Found| {
            let placement = choice.placement.as_ref();
            pods.get(&corrected.pod)
                .zip(placement)
                .is_some_and(|(pod, placement)| has_devices(pod, placement))
        };
        return match choice {
            // Nothing has gone wrong if the devices are the same, so that is believed first.
            Some(choice) if !is_harmless && goes_on(&choice) => Ok(choice),
            _ if is_harmless || is_over => Ok(corrected),
            _ => Err(Unidentified::Ambiguous),
        };
    }
    if let Some(choice) = choice {
        return match first_unplaced(pods, ledger, call, &choice) {
            Some((unplaced, _)) if is_over => Ok(unplaced),
            Some((_, why)) => Err(why),
            None => Ok(choice),
        };
    }
    if is_over && let Some(found) = last_resort(pods, ledger, call) {
        return Ok(found);
    }
    if !pods.is_synced() {
        return Err(Unidentified::NotSynced);
    }
    match unplaced(pods, pods.iter(), ledger, call) {
        Some((found, _)) if is_over => Ok(found),
        Some((_, why)) => Err(why),
        None => Err(Unidentified::Nobody),
    }
}

/// What `GetPreferredAllocation` was answered for last, if this call is the Allocate that follows it and the pod is still due.
pub fn preferred(pods: &Pods, ledger: &Ledger, call: &Call<'_>) -> Option<Found> {
    let found = ledger.preferred().filter(|found| found.answers(call))?;
    let pod = pods.get(&found.pod)?;
    is_candidate(pod, ledger).then(|| found.clone())
}

impl Found {
    /// Whether it was found for a call like this one.
    fn answers(&self, call: &Call<'_>) -> bool {
        self.steps
            .last()
            .is_some_and(|step| step.resource == call.resource && step.count == call.count)
    }
}

/// Whether calls may be accounted to the pod.
fn is_candidate(pod: &NodePod, ledger: &Ledger) -> bool {
    // A pod that is in the books may have been marked assigned on their strength alone.
    let is_open = |placement: &Placement| !placement.is_assigned() || !ledger.steps(&pod.uid).is_empty();
    pod.stage == Stage::Bound && pod.placement.as_ref().map_or(true, is_open)
}

/// The pod's record if it has one and calls may be accounted to it.
fn candidate<'a>(pod: &'a NodePod, ledger: &Ledger) -> Option<&'a Placement> {
    pod.placement.as_ref().ok().filter(|_| is_candidate(pod, ledger))
}

/// Whether kubelet has gone on to later pods without this one, though nothing kept it from it.
fn is_passed_over(pods: &Pods, pod: &NodePod, ledger: &Ledger) -> bool {
    let admitted = || {
        pods.iter()
            .filter(|pod| matches!(pod.stage, Stage::Admitted | Stage::Running))
    };
    if let Some(own) = pod.assumed_at() {
        return pod.deleting
            && admitted()
                .map(NodePod::assumed_at)
                .chain([ledger.latest_assumed()])
                .any(|later| later > Some(own));
    }
    let own = pods.arrival(&pod.uid);
    admitted()
        .map(|pod| pods.arrival(&pod.uid))
        .chain([ledger.latest_arrival()])
        .any(|later| later > own)
}

fn has_devices(pod: &NodePod, placement: &Placement) -> bool {
    pod.placement
        .as_ref()
        .is_ok_and(|own| own.is_on_devices_of(placement))
}

/// The pod as the answer, if `call` is the one that it is due for.
fn due(pods: &Pods, pod: &NodePod, ledger: &Ledger, call: &Call<'_>) -> Option<Found> {
    let steps = ledger.steps(&pod.uid);
    let container = next_container(pod, steps, call, ledger.serves())?;
    Some(found(pods, pod, ledger, container, steps, call))
}

fn found(
    pods: &Pods,
    pod: &NodePod,
    ledger: &Ledger,
    container: usize,
    steps: &[Step],
    call: &Call<'_>,
) -> Found {
    let step = Step {
        container,
        resource: call.resource,
        count: call.count,
    };
    let steps = steps.iter().copied().chain([step]).collect();
    let record_of = ledger.record_of(&pod.uid).clone();
    let placement = pods
        .get(&record_of)
        .unwrap_or(pod)
        .placement
        .as_ref()
        .ok()
        .cloned();
    Found {
        pod: pod.uid.clone(),
        container,
        placement,
        record_of,
        steps,
        corrects: None,
    }
}

/// The first container that still has calls to come, for resources that kubelet knows, if this is one of them.
fn next_container(
    pod: &NodePod,
    steps: &[Step],
    call: &Call<'_>,
    serves: &[ExtendedResource],
) -> Option<usize> {
    let is_answered = |container, resource| {
        steps
            .iter()
            .any(|step| step.container == container && step.resource == resource)
    };
    for (idx, container) in pod.containers.iter().enumerate() {
        let is_open =
            |resource: &ExtendedResource| resource.count(container) > 0 && !is_answered(idx, *resource);
        let mut open = serves.iter().copied().filter(is_open).peekable();
        if open.peek().is_some() {
            return open
                .any(|resource| resource == call.resource && resource.count(container) == call.count)
                .then_some(idx);
        }
    }
    None
}

/// The best of the pods that no call has been accounted to.
fn first_due(pods: &Pods, ledger: &Ledger, call: &Call<'_>) -> Option<Found> {
    let bound = pods.iter().filter(|pod| pod.stage == Stage::Bound);
    let fresh = bound.filter(|pod| ledger.steps(&pod.uid).is_empty() && !ledger.is_doubtful(&pod.uid));
    let fresh = fresh.filter(|pod| !is_passed_over(pods, pod, ledger));
    let due = fresh.filter_map(|pod| {
        Some((
            candidate(pod, ledger)?,
            pod,
            next_container(pod, &[], call, ledger.serves())?,
        ))
    });
    let (pod, container) = best(due, ledger, call)?;
    Some(found(pods, pod, ledger, container, &[], call))
}

/// The pod without a usable record that came before `choice` and is due for the same call.
fn first_unplaced(
    pods: &Pods,
    ledger: &Ledger,
    call: &Call<'_>,
    choice: &Found,
) -> Option<(Found, Unidentified)> {
    let place = |uid: &PodUid| (ledger.is_uncertain(uid), pods.arrival(uid));
    let unplaced_ones = pods.iter().filter(|pod| pod.placement.is_err());
    let earlier = unplaced_ones
        .filter(|pod| place(&pod.uid) < place(&choice.pod) && !is_passed_over(pods, pod, ledger));
    unplaced(pods, earlier, ledger, call)
}

/// The first of these pods that has no usable record and is due for the call, and why it is to be waited for.
fn unplaced<'a>(
    pods: &Pods,
    among: impl Iterator<Item = &'a NodePod>,
    ledger: &Ledger,
    call: &Call<'_>,
) -> Option<(Found, Unidentified)> {
    let waiting = among.filter(|pod| pod.placement.is_err() && is_candidate(pod, ledger));
    let (pod, found) = waiting
        .filter_map(|pod| Some((pod, due(pods, pod, ledger, call)?)))
        .min_by_key(|(pod, _)| pods.arrival(&pod.uid))?;
    Some((
        found,
        Unidentified::Unplaced {
            pod: pod.display_name(),
        },
    ))
}

/// The first of these pods, with what goes with it.
fn best<'a, T>(
    candidates: impl Iterator<Item = (&'a Placement, &'a NodePod, T)>,
    ledger: &Ledger,
    call: &Call<'_>,
) -> Option<(&'a NodePod, T)> {
    let order = |(placement, pod, _): &(&'a Placement, &'a NodePod, T)| {
        let disagrees = !placement.includes(call.resource, call.devices);
        (
            disagrees,
            ledger.is_uncertain(&pod.uid),
            placement.assumed_at,
            &*pod.namespace,
            &*pod.name,
            pod.uid.as_str(),
        )
    };
    candidates
        .min_by(|one, other| order(one).cmp(&order(other)))
        .map(|(_, pod, more)| (pod, more))
}

/// Another pod that explains the calls accounted to `mistaken` and this one too, and whether it has the same GPUs.
fn correct(pods: &Pods, ledger: &Ledger, mistaken: &NodePod, call: &Call<'_>) -> Option<(Found, bool)> {
    let fresh = pods.iter().filter(|pod| ledger.steps(&pod.uid).is_empty());
    let explains = |pod: &'_ NodePod| {
        let steps = explain(pod, ledger.steps(&mistaken.uid), ledger.serves())?;
        let container = next_container(pod, &steps, call, ledger.serves())?;
        Some(Found {
            corrects: Some(mistaken.uid.clone()),
            ..found(pods, pod, ledger, container, &steps, call)
        })
    };
    let explaining: Vec<_> = fresh
        .filter_map(|pod| Some((candidate(pod, ledger)?, pod, explains(pod)?)))
        .collect();
    let harmless = explaining
        .iter()
        .filter(|(placement, ..)| has_devices(mistaken, placement))
        .cloned();
    if let Some((_, found)) = best(harmless, ledger, call) {
        return Some((found, true));
    }
    let (_, likeliest) = best(explaining.into_iter(), ledger, call)?;
    let record_of = ledger.record_of(&mistaken.uid).clone();
    let placement = pods
        .get(&record_of)
        .and_then(|pod| pod.placement.as_ref().ok())
        .cloned();
    Some((
        Found {
            placement,
            record_of,
            ..likeliest
        },
        false,
    ))
}

/// The same calls as calls of `pod`.
fn explain(pod: &NodePod, calls: &[Step], serves: &[ExtendedResource]) -> Option<Vec<Step>> {
    let mut steps = Vec::new();
    for call in calls {
        let again = Call {
            resource: call.resource,
            count: call.count,
            devices: &[],
        };
        let container = next_container(pod, &steps, &again, serves)?;
        steps.push(Step { container, ..*call });
    }
    Some(steps)
}

/// Candidates that are taken only when nobody else comes: a pod whose admission seemed over, one that
/// kubelet seemed to have passed over, and a pod some of whose calls a predecessor of this process may
/// have answered.
fn last_resort(pods: &Pods, ledger: &Ledger, call: &Call<'_>) -> Option<Found> {
    let is_skipped = |pod: &NodePod| ledger.steps(&pod.uid).is_empty() && is_passed_over(pods, pod, ledger);
    let doubtful = pods
        .iter()
        .filter(|pod| ledger.is_doubtful(&pod.uid) || is_skipped(pod));
    let doubtful =
        doubtful.filter_map(|pod| Some((candidate(pod, ledger)?, pod, due(pods, pod, ledger, call)?)));
    if let Some((_, found)) = best(doubtful, ledger, call) {
        return Some(found);
    }
    let inherited = pods
        .iter()
        .filter(|pod| ledger.is_uncertain(&pod.uid) && ledger.steps(&pod.uid).is_empty());
    let inherited =
        inherited.filter_map(|pod| Some((candidate(pod, ledger)?, pod, resumed(pods, pod, ledger, call)?)));
    best(inherited, ledger, call).map(|(_, found)| found)
}

/// The pod as the answer if any of its containers waits for this; what comes before is taken as answered.
fn resumed(pods: &Pods, pod: &NodePod, ledger: &Ledger, call: &Call<'_>) -> Option<Found> {
    let container = pod
        .containers
        .iter()
        .position(|container| call.resource.count(container) == call.count)?;
    let earlier = pod
        .containers
        .iter()
        .take(container)
        .enumerate()
        .flat_map(|(idx, before)| {
            let step = move |resource: ExtendedResource| Step {
                container: idx,
                resource,
                count: resource.count(before),
            };
            ledger
                .serves()
                .iter()
                .copied()
                .map(step)
                .filter(|step| step.count > 0)
        });
    let steps: Vec<_> = earlier.collect();
    Some(found(pods, pod, ledger, container, &steps, call))
}

#[cfg(test)]
mod tests;
