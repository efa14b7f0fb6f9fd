//! Which pod and container is this call of kubelet for? Pure: no clock, no channel, no API.
//!
//! kubelet does not say whom it allocates for. It does admit one pod at a time, the containers of a
//! pod in the order of its spec (init containers first), the resources of a container in any order,
//! with exactly one call per container and resource. So a pod of this node is a candidate if the
//! next call that it is due for is this one, and among candidates the order is:
//!
//! 1. the pod whose admission is under way (some of its calls have been answered, not all);
//! 2. pods whose recorded GPUs are those of the device IDs in the call;
//! 3. pods that came since this process started, then those that it found, unless kubelet's checkpoint
//!    can be read: without it a predecessor may have answered for those;
//! 4. the pod that the scheduler assumed first.
//!
//! [`Ledger`] remembers what has been answered, per pod UID and container. A pod that has left
//! Pending, or whose call was refused, is never a candidate.
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
//! before the pod that would be answered, the call is its own and is refused with its reason, for
//! it would use devices that are counted for the other. It can be passed over as well.
//!
//! Where kubelet admits equal pods in another order than they were assumed, an answer goes to another
//! pod than it was meant for. It shows when kubelet reports a pod as admitted that was never
//! answered for: its answer was accounted to a pod that kubelet has not reported. When that one's
//! call comes, it gets the devices that are left over, those of the first: the two have changed
//! places, and no later pod is drawn in. That their records then name the other's devices is logged.
//!
//! Where two pods are due for the same call, the choice can turn out wrong at a later call that the
//! chosen pod cannot make. If another pod explains all of the admission's calls and has the same
//! GPUs, nothing has gone wrong and the calls are accounted to it. Otherwise the admission is over
//! (kubelet gave it up, or the choice was wrong), and that pod is taken again only when, after all
//! the waiting, nobody else fits.

pub mod checkpoint;
mod displaced;
mod ledger;

use crate::inventory::Gpu;
use crate::pods::{NodePod, Placement, PodUid, Pods, Stage};
use crate::served::Served;

pub use ledger::{Ledger, Step};

/// What is known of a call.
#[derive(Clone, Debug)]
pub struct Call<'a> {
    /// The resource whose socket it came over.
    pub resource: Served,
    /// How many device IDs it is about.
    pub count: u64,
    /// The GPUs of those IDs; empty if they say nothing.
    pub gpus: &'a [Gpu],
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
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The pod.
    pub pod: PodUid,
    /// Index in [`NodePod::containers`].
    pub container: usize,
    /// The devices: those of the pod's record, or of the pod that it has changed places with.
    pub placement: Placement,
    /// The pod that it changes places with.
    exchanged_with: Option<PodUid>,
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
        /// The pod.
        uid: PodUid,
        /// `namespace/name`.
        pod: String,
        /// What is wrong with its record.
        reason: String,
    },
    /// An earlier call of this admission was answered for a pod that it cannot have been for, on other GPUs.
    Ambiguous {
        /// The pod that the admission turns out to be of.
        pod: PodUid,
        /// The pod whose devices the earlier call was answered with.
        mistaken_for: PodUid,
    },
    /// No pod of this node waits for this.
    Nobody,
}

/// Finds the container that `call` is for.
///
/// # Errors
/// Why nobody can be named; the caller decides whether to wait for more pods.
pub fn identify(pods: &Pods, ledger: &Ledger, call: &Call<'_>, patience: Patience) -> Result<Found, Unidentified> {
    let admitting = ledger.admitting().and_then(|uid| pods.get(uid)).filter(|pod| candidate(pod, ledger).is_some());
    if let Some(found) = admitting.and_then(|pod| due(pod, ledger, call)) {
        return Ok(found);
    }
    let choice = earlier_assumed(pods, displaced::find(pods, ledger, call), first_due(pods, ledger, call));
    // What kubelet itself has written down is not put right.
    let open_to_doubt = admitting.filter(|pod| !ledger.is_answered_before(pod));
    if let Some(corrected) = open_to_doubt.and_then(|mistaken| correct(pods, ledger, mistaken, call)) {
        let goes_on = |pod: &PodUid, choice: &Found| pods.get(pod).is_some_and(|pod| has_gpus(pod, &choice.placement));
        match (corrected, choice) {
            // Nothing has gone wrong if the devices are the same, so that is believed first.
            (Err(Unidentified::Ambiguous { pod, .. }), Some(choice)) if goes_on(&pod, &choice) => return Ok(choice),
            (corrected, _) => return corrected,
        }
    }
    if let Some(choice) = choice {
        return first_unplaced(pods, ledger, call, &choice).map_or(Ok(choice), Err);
    }
    if patience == Patience::Over
        && let Some(found) = last_resort(pods, ledger, call)
    {
        return Ok(found);
    }
    Err(explain(pods, ledger, call))
}

/// What `GetPreferredAllocation` was answered for last, if this call is the Allocate that follows it and the pod is still due.
pub fn preferred(pods: &Pods, ledger: &Ledger, call: &Call<'_>) -> Option<Found> {
    let found = ledger.preferred().filter(|found| found.answers(call))?;
    let pod = pods.get(&found.pod)?;
    candidate(pod, ledger)?;
    Some(found.clone())
}

impl Found {
    /// Whether it was found for a call like this one.
    fn answers(&self, call: &Call<'_>) -> bool {
        self.steps.last().is_some_and(|step| step.resource == call.resource && step.count == call.count)
    }
}

/// The pod's placement if calls may be accounted to it.
fn candidate<'a>(pod: &'a NodePod, ledger: &Ledger) -> Option<&'a Placement> {
    let placement = pod.placement.as_ref().ok()?;
    // A pod that is in the books may have been marked assigned on their strength alone.
    let is_open = !placement.is_assigned() || !ledger.steps(&pod.uid).is_empty();
    (is_waiting(pod, ledger) && is_open).then_some(placement)
}

fn is_waiting(pod: &NodePod, ledger: &Ledger) -> bool {
    pod.stage == Stage::Bound && !ledger.is_refused(&pod.uid)
}

/// Whether kubelet has gone on to later pods without this one, though nothing kept it from it.
fn is_passed_over(pods: &Pods, pod: &NodePod, ledger: &Ledger) -> bool {
    let admitted = || pods.iter().filter(|pod| matches!(pod.stage, Stage::Admitted | Stage::Running));
    if let Some(own) = pod.assumed_at() {
        return pod.deleting && admitted().map(NodePod::assumed_at).chain([ledger.latest_assumed()]).any(|later| later > Some(own));
    }
    let own = pods.arrival(&pod.uid);
    admitted().map(|pod| pods.arrival(&pod.uid)).chain([ledger.latest_arrival()]).any(|later| later > own)
}

fn has_gpus(pod: &NodePod, placement: &Placement) -> bool {
    pod.placement.as_ref().is_ok_and(|own| own.gpus == placement.gpus)
}

/// The pod as the answer, if `call` is the one that it is due for.
fn due(pod: &NodePod, ledger: &Ledger, call: &Call<'_>) -> Option<Found> {
    let steps = ledger.steps(&pod.uid);
    let container = next_container(pod, steps, call)?;
    let placement = ledger.exchanged(&pod.uid).or(pod.placement.as_ref().ok())?;
    Some(found(pod, placement, container, steps, call))
}

fn found(pod: &NodePod, placement: &Placement, container: usize, steps: &[Step], call: &Call<'_>) -> Found {
    let step = Step { container, resource: call.resource, count: call.count };
    let steps = steps.iter().copied().chain([step]).collect();
    Found { pod: pod.uid.clone(), container, placement: placement.clone(), exchanged_with: None, steps, corrects: None }
}

/// The first container that still has calls to come, if this is one of them.
fn next_container(pod: &NodePod, steps: &[Step], call: &Call<'_>) -> Option<usize> {
    let is_answered = |container, resource| steps.iter().any(|step| step.container == container && step.resource == resource);
    for (idx, container) in pod.containers.iter().enumerate() {
        let mut open = Served::ALL.into_iter().filter(|resource| resource.count(container) > 0 && !is_answered(idx, *resource)).peekable();
        if open.peek().is_some() {
            return open.any(|resource| resource == call.resource && resource.count(container) == call.count).then_some(idx);
        }
    }
    None
}

/// The best of the pods that no call has been accounted to.
fn first_due(pods: &Pods, ledger: &Ledger, call: &Call<'_>) -> Option<Found> {
    let fresh = pods.iter().filter(|pod| ledger.steps(&pod.uid).is_empty() && !ledger.is_doubtful(&pod.uid));
    let fresh = fresh.filter(|pod| !is_passed_over(pods, pod, ledger));
    best(fresh.filter_map(|pod| Some((candidate(pod, ledger)?, pod, due(pod, ledger, call)?))), ledger, call)
}

/// The refusal of a pod without a usable record that came before `choice` and is due for the same call.
fn first_unplaced(pods: &Pods, ledger: &Ledger, call: &Call<'_>, choice: &Found) -> Option<Unidentified> {
    let place = |uid: &PodUid| (ledger.is_uncertain(uid), pods.arrival(uid));
    let earlier = pods.iter().filter(|pod| place(&pod.uid) < place(&choice.pod) && !is_passed_over(pods, pod, ledger));
    unplaced(pods, earlier, ledger, call)
}

/// The refusal of the first of these pods that has no usable record and is due for the call.
fn unplaced<'a>(pods: &Pods, among: impl Iterator<Item = &'a NodePod>, ledger: &Ledger, call: &Call<'_>) -> Option<Unidentified> {
    let waiting = among.filter(|pod| is_waiting(pod, ledger) && next_container(pod, &[], call).is_some());
    let (pod, reason) =
        waiting.filter_map(|pod| Some((pod, pod.placement.as_ref().err()?))).min_by_key(|(pod, _)| pods.arrival(&pod.uid))?;
    Some(Unidentified::Unplaced { uid: pod.uid.clone(), pod: pod.display_name(), reason: reason.to_string() })
}

fn best<'a>(candidates: impl Iterator<Item = (&'a Placement, &'a NodePod, Found)>, ledger: &Ledger, call: &Call<'_>) -> Option<Found> {
    let order = |(placement, pod, _): &(&'a Placement, &'a NodePod, Found)| {
        let disagrees = !placement.includes(call.gpus);
        (disagrees, ledger.is_uncertain(&pod.uid), placement.assumed_at, &*pod.namespace, &*pod.name, pod.uid.as_str())
    };
    candidates.min_by(|one, other| order(one).cmp(&order(other))).map(|(_, _, found)| found)
}

/// kubelet's order is mostly that of the assume times, so the earlier pod is the likelier caller.
fn earlier_assumed(pods: &Pods, displaced: Option<Found>, fresh: Option<Found>) -> Option<Found> {
    let assumed_at = |found: &Found| pods.get(&found.pod).and_then(NodePod::assumed_at);
    match (displaced, fresh) {
        (Some(displaced), Some(fresh)) if assumed_at(&fresh) < assumed_at(&displaced) => Some(fresh),
        (displaced, fresh) => displaced.or(fresh),
    }
}

/// Another pod that explains the calls accounted to `mistaken` and this one too.
fn correct(pods: &Pods, ledger: &Ledger, mistaken: &NodePod, call: &Call<'_>) -> Option<Result<Found, Unidentified>> {
    let fresh = pods.iter().filter(|pod| ledger.steps(&pod.uid).is_empty());
    let explains = |pod: &'_ NodePod| {
        let mut steps = Vec::new();
        for step in ledger.steps(&mistaken.uid) {
            let earlier = Call { resource: step.resource, count: step.count, gpus: &[] };
            let container = next_container(pod, &steps, &earlier)?;
            steps.push(Step { container, ..*step });
        }
        let container = next_container(pod, &steps, call)?;
        let placement = pod.placement.as_ref().ok()?;
        Some(Found { corrects: Some(mistaken.uid.clone()), ..found(pod, placement, container, &steps, call) })
    };
    let explaining: Vec<_> = fresh.filter_map(|pod| Some((candidate(pod, ledger)?, pod, explains(pod)?))).collect();
    let same_gpus = |placement: &Placement| mistaken.placement.as_ref().is_ok_and(|mistaken| mistaken.gpus == placement.gpus);
    let harmless = explaining.iter().filter(|(placement, ..)| same_gpus(placement)).cloned();
    if let Some(found) = best(harmless, ledger, call) {
        return Some(Ok(found));
    }
    let likeliest = best(explaining.into_iter(), ledger, call)?;
    Some(Err(Unidentified::Ambiguous { pod: likeliest.pod, mistaken_for: mistaken.uid.clone() }))
}

/// Candidates that are taken only when nobody else comes: a pod whose admission seemed over, one that
/// kubelet seemed to have passed over, and a pod some of whose calls a predecessor of this process may
/// have answered.
fn last_resort(pods: &Pods, ledger: &Ledger, call: &Call<'_>) -> Option<Found> {
    let is_skipped = |pod: &NodePod| ledger.steps(&pod.uid).is_empty() && is_passed_over(pods, pod, ledger);
    let doubtful = pods.iter().filter(|pod| ledger.is_doubtful(&pod.uid) || is_skipped(pod));
    let doubtful = doubtful.filter_map(|pod| Some((candidate(pod, ledger)?, pod, due(pod, ledger, call)?)));
    if let Some(found) = best(doubtful, ledger, call) {
        return Some(found);
    }
    let inherited = pods.iter().filter(|pod| ledger.is_uncertain(&pod.uid) && ledger.steps(&pod.uid).is_empty());
    best(inherited.filter_map(|pod| Some((candidate(pod, ledger)?, pod, resumed(pod, call)?))), ledger, call)
}

/// The pod as the answer if any of its containers waits for this; what comes before is taken as answered.
fn resumed(pod: &NodePod, call: &Call<'_>) -> Option<Found> {
    let container = pod.containers.iter().position(|container| call.resource.count(container) == call.count)?;
    let earlier = pod.containers.iter().take(container).enumerate().flat_map(|(idx, before)| {
        let step = move |resource: Served| Step { container: idx, resource, count: resource.count(before) };
        Served::ALL.into_iter().map(step).filter(|step| step.count > 0)
    });
    let steps: Vec<_> = earlier.collect();
    Some(found(pod, pod.placement.as_ref().ok()?, container, &steps, call))
}

fn explain(pods: &Pods, ledger: &Ledger, call: &Call<'_>) -> Unidentified {
    if !pods.is_synced() {
        return Unidentified::NotSynced;
    }
    unplaced(pods, pods.iter(), ledger, call).unwrap_or(Unidentified::Nobody)
}

#[cfg(test)]
mod tests;
