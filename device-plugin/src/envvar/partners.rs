//! Finds the pods that can swap their records, where kubelet admitted equal pods in another order than they were assumed in.
//!
//! A pod that sees the devices of another's record takes that record if the other pod has not started with it.

use std::collections::BTreeSet;

use crate::inventory::PhysicalId;
use crate::pods::{NodePod, PodUid};
use crate::verify::visible::{Visible, VisibleByType, visible_by_answer, visible_to_pods};
use crate::verify::{DevicesByType, StartEvidence, differing_types, fixed_devices};

/// The way to let a pod start that sees the devices of another's record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// The pod swaps its record with this one.
    Swap(PodUid),
    /// kubelet may have allocated for this pod since the snapshot: take another one.
    LookAgain(PodUid),
}

/// The remedy for a pod whose containers see other devices than its record names, if there is one.
pub fn remedy(evidence: &StartEvidence<'_>, pod: &NodePod, seen: &VisibleByType) -> Option<Remedy> {
    let recorded = recorded_devices(evidence, pod)?;
    let fixed = fixed_devices(seen, &recorded).ok()?;
    // A container of the pod that started by its CDI spec sees the devices of its record, which must stay its own.
    if evidence.may_have_started(pod) && has_spec(evidence, pod) {
        return None;
    }
    let (rank, partner) = partner(evidence, pod, &fixed, &recorded)?;
    Some(match rank {
        PartnerRank::MayBeAnswered => Remedy::LookAgain(partner),
        _ => Remedy::Swap(partner),
    })
}

/// True if a container of the pod was given its devices by a CDI spec.
fn has_spec(evidence: &StartEvidence<'_>, pod: &NodePod) -> bool {
    let mut own = evidence.allocated.iter().filter(|entry| entry.pod == pod.uid);
    own.any(|entry| {
        let visible = visible_by_answer(entry.resource, &entry.answer, evidence.fleet);
        visible == Some(Visible::BySpec)
    })
}

/// The suitability of a partner, the best first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum PartnerRank {
    /// It sees the devices of the pod's record.
    SeesOurs,
    /// It sees devices of a third record, or will see those of the record that it has when it starts.
    SeesOthers,
    /// No answer names devices for it.
    NotAnswered,
    /// An answer may name devices for it that is not known yet.
    MayBeAnswered,
}

/// The best pod whose record names the devices that this pod sees, and that does not see them itself.
fn partner(
    evidence: &StartEvidence<'_>,
    pod: &NodePod,
    fixed: &DevicesByType,
    recorded: &DevicesByType,
) -> Option<(PartnerRank, PodUid)> {
    let known = visible_to_pods(evidence.allocated, evidence.fleet);
    let mut candidates = Vec::new();
    for other in evidence.pods.live() {
        if other.uid == pod.uid || !pod.asks_like(other) {
            continue;
        }
        let Some(others) = recorded_devices(evidence, other) else {
            continue;
        };
        if !differing_types(fixed, &others).is_empty() {
            continue;
        }
        let mut worst = Some(PartnerRank::SeesOurs);
        for device_type in differing_types(fixed, recorded) {
            let visible = known.get(&other.uid).and_then(|visible| visible.get(device_type));
            let rank = rank(
                evidence,
                other,
                visible,
                fixed.get(device_type),
                recorded.get(device_type),
            );
            worst = worst.and_then(|worst| rank.map(|rank| worst.max(rank)));
        }
        if let Some(rank) = worst {
            candidates.push((rank, other.assumed_at(), &other.uid));
        }
    }
    let (rank, _, uid) = candidates.into_iter().min()?;
    Some((rank, uid.clone()))
}

/// The devices of a pod's record, if it has a usable one.
fn recorded_devices(evidence: &StartEvidence<'_>, pod: &NodePod) -> Option<DevicesByType> {
    evidence.recorded_devices(pod, pod.record()?).ok()
}

/// The rank of `other`, which sees `visible` of a type, as partner of a pod that sees `seen` and whose record names `recorded`;
/// none if `other` must keep its record.
fn rank(
    evidence: &StartEvidence<'_>,
    other: &NodePod,
    visible: Option<&Visible>,
    seen: Option<&BTreeSet<PhysicalId>>,
    recorded: Option<&BTreeSet<PhysicalId>>,
) -> Option<PartnerRank> {
    match visible {
        Some(Visible::Devices(own)) if Some(own) == seen => None,
        Some(Visible::Devices(own)) if Some(own) == recorded => Some(PartnerRank::SeesOurs),
        Some(Visible::Devices(_)) => Some(PartnerRank::SeesOthers),
        // As far as is known, its containers see the devices of its record.
        _ if evidence.may_have_started(other) => None,
        Some(_) => Some(PartnerRank::SeesOthers),
        None if !evidence.is_checkpoint_known || evidence.log.is_answered_unproven(&other.uid) => {
            Some(PartnerRank::MayBeAnswered)
        }
        None => Some(PartnerRank::NotAnswered),
    }
}
