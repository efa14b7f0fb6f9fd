//! Finds pods that can swap their records: kubelet may admit equal pods in another order than the scheduler assumed them in, and
//! answers by variable then name the devices of other pods' records.
//!
//! A pod that sees the devices of another pod's record (the annotations that name them) takes that record, unless the other pod
//! has started with it.

use std::collections::BTreeSet;

use crate::devices::inventory::PhysicalId;
use crate::inject::cdi::device_of;
use crate::node::pods::{NodePod, PodUid};
use crate::start::verify::{
    DevicesByType, StartEvidence, StartRefusal, Visible, VisibleByType, differing_types, fixed_devices,
    visible_to_pod,
};

/// The result of verifying a pod whose containers may have got their devices by the vendor's variable.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Verification {
    Passed,
    Refused(StartRefusal),
    /// The pod's containers see the devices of this other pod's allocation record, and the two pods can swap their records.
    Swap(PodUid),
    /// As for `Swap`, but kubelet may have allocated devices to the other pod since the snapshot, which has to be taken again.
    LookAgain(PodUid),
}

/// Verifies a pod whose containers see `seen`, and looks for a swap if these are the devices of another pod's allocation record.
pub(crate) fn verify_or_swap(
    evidence: &StartEvidence<'_>,
    pod: &NodePod,
    seen: &VisibleByType,
) -> Verification {
    match evidence.verify(pod, seen) {
        Ok(()) => Verification::Passed,
        Err(refusal) => swap_or_refusal(evidence, pod, seen, refusal),
    }
}

/// Returns a swap that lets a refused pod start, if there is one, else the refusal.
pub(super) fn swap_or_refusal(
    evidence: &StartEvidence<'_>,
    pod: &NodePod,
    seen: &VisibleByType,
    refusal: StartRefusal,
) -> Verification {
    if !matches!(refusal, StartRefusal::Mismatch { .. }) {
        return Verification::Refused(refusal);
    }
    match find_partner(evidence, pod, seen) {
        Some((PartnerRank::MayBeAnswered, other)) => Verification::LookAgain(other),
        Some((_, partner)) => Verification::Swap(partner),
        None => Verification::Refused(refusal),
    }
}

/// Finds an equal pod that can start only with the record of `pod`, which starts by a CDI spec and so with either record: an
/// answer by variable, from before the node's mode changed to `cdi`, has fixed the other pod's devices.
pub(super) fn pod_in_need(evidence: &StartEvidence<'_>, pod: &NodePod) -> Option<PodUid> {
    if evidence.may_have_started(pod) {
        return None;
    }
    for other in evidence.pods.live() {
        if other.uid == pod.uid || evidence.may_have_started(other) || !pod.can_swap_with(other) {
            continue;
        }
        let seen = visible_to_pod(evidence.allocated, &other.uid, evidence.fleet);
        let is_fixed = seen
            .values()
            .any(|visible| matches!(visible, Visible::Devices(_)));
        if is_fixed && verify_or_swap(evidence, other, &seen) == Verification::Swap(pod.uid.clone()) {
            return Some(other.uid.clone());
        }
    }
    None
}

/// The most suitable pod to swap records with, for a pod whose containers see other devices than its allocation record names.
/// The record of that pod names exactly the devices that `pod` sees for good, and its own containers do not see them.
fn find_partner(
    evidence: &StartEvidence<'_>,
    pod: &NodePod,
    seen: &VisibleByType,
) -> Option<(PartnerRank, PodUid)> {
    let recorded = recorded_devices(evidence, pod)?;
    let fixed = fixed_devices(seen, &recorded).ok()?;
    // A container of the pod that started by its CDI spec sees the devices of its record, which must stay its own.
    let mut own = evidence.allocated.iter().filter(|entry| entry.pod == pod.uid);
    if evidence.may_have_started(pod) && own.any(|entry| device_of(&entry.answer).is_some()) {
        return None;
    }
    let mut candidates = Vec::new();
    for other in evidence.pods.live() {
        // Equal pods alone can swap: then no sum of a device changes, whatever the scheduler decides meanwhile.
        if other.uid == pod.uid || !pod.can_swap_with(other) {
            continue;
        }
        let Some(recorded_for_other) = recorded_devices(evidence, other) else {
            continue;
        };
        // Only the record of exactly these devices lets the pod start.
        if !differing_types(&fixed, &recorded_for_other).is_empty() {
            continue;
        }
        let visible = visible_to_pod(evidence.allocated, &other.uid, evidence.fleet);
        // A record is swapped whole, so the type of device that fits worst decides.
        let mut worst = Some(PartnerRank::SeesOurs);
        for device_type in differing_types(&fixed, &recorded) {
            let (own_seen, own_recorded) = (fixed.get(device_type), recorded.get(device_type));
            let rank = rank(evidence, other, visible.get(device_type), own_seen, own_recorded);
            worst = worst.zip(rank).map(|(worst, rank)| worst.max(rank));
        }
        if let Some(rank) = worst {
            candidates.push((rank, other.assumed_at(), &other.uid));
        }
    }
    let (rank, _, uid) = candidates.into_iter().min()?;
    Some((rank, uid.clone()))
}

/// The suitability of another pod for a swap with the refused pod, the best first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum PartnerRank {
    /// The other pod sees the devices of the refused pod's allocation record: the swap puts both right.
    SeesOurs,
    /// The other pod sees devices of a third record, or starts by a CDI spec, which follows its allocation record.
    SeesOthers,
    /// No answer to Allocate names devices for the other pod.
    NotAnswered,
    /// An answer to Allocate that is not known yet may name devices for the other pod.
    MayBeAnswered,
}

fn recorded_devices(evidence: &StartEvidence<'_>, pod: &NodePod) -> Option<DevicesByType> {
    evidence.recorded_devices(pod, pod.record()?).ok()
}

/// The rank of `other`, which sees `visible`, by one type of device, of which the refused pod sees `seen` and its record names
/// `recorded`; none if `other` must keep its record.
fn rank(
    evidence: &StartEvidence<'_>,
    other: &NodePod,
    visible: Option<&Visible>,
    seen: Option<&BTreeSet<PhysicalId>>,
    recorded: Option<&BTreeSet<PhysicalId>>,
) -> Option<PartnerRank> {
    match visible {
        // `other` sees the devices of its own record, so it must keep that record.
        Some(Visible::Devices(own)) if Some(own) == seen => None,
        Some(Visible::Devices(own)) if Some(own) == recorded => Some(PartnerRank::SeesOurs),
        Some(Visible::Devices(_)) => Some(PartnerRank::SeesOthers),
        // As far as is known, the containers of `other` run with the devices of its record.
        _ if evidence.may_have_started(other) => None,
        Some(_) => Some(PartnerRank::SeesOthers),
        None if !evidence.is_checkpoint_known || evidence.log.is_answered_unproven(&other.uid) => {
            Some(PartnerRank::MayBeAnswered)
        }
        None => Some(PartnerRank::NotAnswered),
    }
}
