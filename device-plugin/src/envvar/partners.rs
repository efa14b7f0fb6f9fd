//! Finds the pods that can swap their records, where kubelet admitted equal pods in another order than they were assumed in.
//!
//! A pod that sees the devices of another's record takes that record if the other pod has not started with it. One write to the
//! API server names all swaps of the node, so further pods whose devices are known swap in the same write.

use std::collections::{BTreeMap, BTreeSet};

use crate::inventory::PhysicalId;
use crate::pods::{NodePod, PodUid};
use crate::verify::visible::{Visible, VisibleByType, visible_by_answer, visible_to_pods};
use crate::verify::{DevicesByType, Evidence, differing_types, fixed_devices};

/// The way to let a pod start that sees the devices of another's record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// The pod swaps its record with `partner`; in the same write the pairs `beside` swap theirs.
    Swap {
        /// The pod with the record.
        partner: PodUid,
        /// Pairs that nothing else names.
        beside: Vec<(PodUid, PodUid)>,
    },
    /// kubelet may have allocated for this pod since the snapshot: take another one.
    LookAgain(PodUid),
}

/// The remedy for a pod whose containers see other devices than its record names, if there is one.
pub fn remedy(evidence: &Evidence<'_>, pod: &NodePod, seen: &VisibleByType) -> Option<Remedy> {
    let recorded = recorded_devices(evidence, pod)?;
    let fixed = fixed_devices(seen, &recorded).ok()?;
    // A container of the pod that started by its CDI spec sees the devices of its record, which must stay its own.
    if evidence.may_have_started(pod) && has_spec(evidence, pod) {
        return None;
    }
    let (rank, partner) = partner(evidence, pod, &fixed, &recorded)?;
    Some(match rank {
        Rank::MayBeAnswered => Remedy::LookAgain(partner),
        _ => Remedy::Swap {
            beside: pairs_beside(evidence, pod, &partner),
            partner,
        },
    })
}

/// True if a container of the pod was given its devices by a CDI spec.
fn has_spec(evidence: &Evidence<'_>, pod: &NodePod) -> bool {
    let mut own = evidence.allocated.iter().filter(|entry| entry.pod == pod.uid);
    own.any(|entry| {
        let visible = visible_by_answer(entry.resource, &entry.answer, evidence.fleet);
        visible == Some(Visible::BySpec)
    })
}

/// The suitability of a partner, the best first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
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
    evidence: &Evidence<'_>,
    pod: &NodePod,
    fixed: &DevicesByType,
    recorded: &DevicesByType,
) -> Option<(Rank, PodUid)> {
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
        let mut worst = Some(Rank::SeesOurs);
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
fn recorded_devices(evidence: &Evidence<'_>, pod: &NodePod) -> Option<DevicesByType> {
    evidence.recorded_devices(pod, pod.record()?).ok()
}

/// The rank of `other`, which sees `visible` of a type, as partner of a pod that sees `seen` and whose record names `recorded`;
/// none if `other` must keep its record.
fn rank(
    evidence: &Evidence<'_>,
    other: &NodePod,
    visible: Option<&Visible>,
    seen: Option<&BTreeSet<PhysicalId>>,
    recorded: Option<&BTreeSet<PhysicalId>>,
) -> Option<Rank> {
    match visible {
        Some(Visible::Devices(own)) if Some(own) == seen => None,
        Some(Visible::Devices(own)) if Some(own) == recorded => Some(Rank::SeesOurs),
        Some(Visible::Devices(_)) => Some(Rank::SeesOthers),
        // As far as is known, its containers see the devices of its record.
        _ if evidence.may_have_started(other) => None,
        Some(_) => Some(Rank::SeesOthers),
        None if !evidence.is_checkpoint_known || evidence.log.is_answered_unproven(&other.uid) => {
            Some(Rank::MayBeAnswered)
        }
        None => Some(Rank::NotAnswered),
    }
}

/// The pairs that can swap in the same write: pods that ask for the same, have not started, and whose devices kubelet's
/// checkpoint names.
fn pairs_beside(evidence: &Evidence<'_>, pod: &NodePod, partner: &PodUid) -> Vec<(PodUid, PodUid)> {
    let known = visible_to_pods(evidence.allocated, evidence.fleet);
    let mut numbers = BTreeMap::<DevicesByType, usize>::new();
    let mut number = |devices: DevicesByType| {
        let next = numbers.len();
        *numbers.entry(devices).or_insert(next)
    };
    let mut candidates = Vec::new();
    for other in evidence.pods.live() {
        if other.uid == pod.uid
            || other.uid == *partner
            || evidence.may_have_started(other)
            || !pod.asks_like(other)
        {
            continue;
        }
        let Some(recorded) = recorded_devices(evidence, other) else {
            continue;
        };
        if let Some(seen) = all_fixed(known.get(&other.uid), &recorded) {
            candidates.push(Candidate {
                pod: other.uid.clone(),
                sees: number(seen),
                recorded: number(recorded),
            });
        }
    }
    pairs_among(candidates)
}

/// The devices that a pod sees, if those of each type of its record are fixed.
fn all_fixed(visible: Option<&VisibleByType>, recorded: &DevicesByType) -> Option<DevicesByType> {
    let mut seen = DevicesByType::new();
    for device_type in recorded.keys() {
        match visible?.get(device_type)? {
            Visible::Devices(devices) => drop(seen.insert(device_type, devices.clone())),
            Visible::BySpec | Visible::Unclear(_) => return None,
        }
    }
    Some(seen)
}

/// A pod that can swap; equal numbers are equal devices.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Candidate {
    pod: PodUid,
    /// The devices that it sees.
    sees: usize,
    /// The devices that its record names.
    recorded: usize,
}

impl Candidate {
    fn is_wrong(&self) -> bool {
        self.sees != self.recorded
    }
}

/// Swaps of two records each. Each makes a pod right, none takes part that is right, and none twice: the log of Allocate calls
/// follows one swap per pod at a time.
fn pairs_among(mut candidates: Vec<Candidate>) -> Vec<(PodUid, PodUid)> {
    candidates.retain(Candidate::is_wrong);
    let mut pairs = Vec::new();
    let mut alone = Vec::new();
    // First those that are both right afterwards.
    while let Some(one) = candidates.pop() {
        let partner = candidates
            .iter()
            .position(|other| other.recorded == one.sees && other.sees == one.recorded);
        match partner {
            Some(at) => pairs.push((one.pod, candidates.swap_remove(at).pod)),
            None => alone.push(one),
        }
    }
    let mut without_partner = Vec::new();
    while let Some(one) = alone.pop() {
        match take_recorded(&mut alone, one.sees).or_else(|| take_recorded(&mut without_partner, one.sees)) {
            Some(other) => pairs.push((one.pod, other.pod)),
            None => without_partner.push(one),
        }
    }
    pairs
}

/// Takes the first candidate with this record out of the list.
fn take_recorded(candidates: &mut Vec<Candidate>, recorded: usize) -> Option<Candidate> {
    let at = candidates.iter().position(|other| other.recorded == recorded)?;
    Some(candidates.swap_remove(at))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn candidates(pairs: &[(usize, usize)]) -> Vec<Candidate> {
        let candidate = |(at, &(sees, recorded)): (usize, &(usize, usize))| Candidate {
            pod: PodUid::from(&*at.to_string()),
            sees,
            recorded,
        };
        pairs.iter().enumerate().map(candidate).collect()
    }

    #[test]
    fn pairs_swap_at_once_and_longer_cycles_in_several_steps() {
        assert_eq!(
            pairs_among(candidates(&[(1, 0), (0, 1), (3, 2), (2, 3)])).len(),
            2
        );
        assert_eq!(pairs_among(candidates(&[(1, 0), (2, 1), (0, 2)])).len(), 1);
        assert_eq!(
            pairs_among(candidates(&[(1, 0), (2, 1)])).len(),
            1,
            "the partner need not be right afterwards"
        );
    }

    proptest! {
        #[test]
        fn each_swap_makes_one_right_and_none_wrong(pairs in prop::collection::vec((0..4_usize, 0..4_usize), 0..12)) {
            let before: BTreeMap<PodUid, Candidate> = candidates(&pairs).into_iter().map(|candidate| (candidate.pod.clone(), candidate)).collect();
            let mut rest = before.clone();
            for (one, other) in pairs_among(candidates(&pairs)) {
                // Removed, so that no pod takes part twice.
                let (one, other) = (rest.remove(&one).unwrap(), rest.remove(&other).unwrap());
                prop_assert!(one.is_wrong() && other.is_wrong());
                prop_assert!(one.sees == other.recorded);
            }
            let open: Vec<&Candidate> = rest.values().filter(|candidate| candidate.is_wrong()).collect();
            prop_assert!(!open.iter().any(|one| open.iter().any(|other| other.recorded == one.sees)), "no pair is left");
        }
    }
}
