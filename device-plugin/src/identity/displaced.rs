//! Pods whose calls were answered, though not to them: an equal pod was admitted with the answer.
//!
//! Deduces that from what kubelet reports; guesses nothing where the reports leave it open.

use std::collections::BTreeMap;

use proto::request::ContainerKind;

use crate::pods::{NodePod, Pods, Stage};

use super::{Call, Found, Ledger, candidate, found, next_container};

/// What kubelet's calls for a pod look like: pods of equal calls can be mistaken for one another.
pub(super) type Calls = Vec<(ContainerKind, u64, u64)>;

/// The calls that kubelet makes for a pod.
pub(super) fn calls(pod: &NodePod) -> Calls {
    pod.containers.iter().map(|container| (container.kind, container.memory_units, container.shared)).collect()
}

/// The earliest such pod that `call` may be for; it gets the devices of the pod that was admitted in its place.
pub(super) fn find(pods: &Pods, ledger: &Ledger, call: &Call<'_>) -> Option<Found> {
    let admitted = admitted_without_answer(pods, ledger);
    let displaced = pods.iter().filter_map(|pod| {
        // Of inherited pods kubelet's own checkpoint says that the answer was theirs.
        let placement = candidate(pod, ledger).filter(|_| ledger.is_complete(pod) && !ledger.is_answered_before(pod))?;
        let container = next_container(pod, &[], call)?;
        let (other, record) = admitted.get(&calls(pod)).and_then(|equals| equals.first())?;
        let found = Found { exchanged_with: Some(other.uid.clone()), ..found(pod, record, container, &[], call) };
        Some((placement.assumed_at, found))
    });
    displaced.min_by(|one, other| (one.0, &one.1.pod).cmp(&(other.0, &other.1.pod))).map(|(_, found)| found)
}

/// Pods that kubelet reports as admitted and that nobody was answered for, by their calls, earliest first.
fn admitted_without_answer<'a>(pods: &'a Pods, ledger: &'a Ledger) -> BTreeMap<Calls, Vec<(&'a NodePod, &'a crate::pods::Placement)>> {
    let is_admitted = |pod: &&NodePod| matches!(pod.stage, Stage::Admitted | Stage::Running);
    let mut by_calls = BTreeMap::<Calls, Vec<_>>::new();
    for pod in pods.iter().filter(is_admitted).filter(|pod| ledger.expects_answer(&pod.uid)) {
        if let Ok(placement) = &pod.placement {
            by_calls.entry(calls(pod)).or_default().push((pod, placement));
        }
    }
    for (calls, equals) in &mut by_calls {
        equals.sort_by_key(|(pod, placement)| (placement.assumed_at, &pod.uid));
        // A pod that went before kubelet reported it may be the one whose answer was used.
        equals.drain(..ledger.n_vacated(calls).min(equals.len()));
    }
    by_calls
}
