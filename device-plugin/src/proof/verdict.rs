//! May the container start? By what it will see, its pod's record and the records of the other pods of the node.
//!
//! Where the two differ and the answer of Allocate stands, two pods that ask for the same may exchange their records: no
//! device's sums change. The other pod must not see the devices that it would give away. Longer permutations are resolved
//! by exchanges of two, each of which makes at least one pod right.

use std::collections::{BTreeMap, BTreeSet};

use proto::device::TYPE_GPU;
use proto::memory_unit::MemoryUnit;
use proto::pod::ALL_DEVICES;

use crate::extended_resource::ExtendedResource;
use crate::fleet::{Fleet, Unavailable};
use crate::identity::Ledger;
use crate::identity::checkpoint::Allocated;
use crate::inventory::{Gpu, PhysicalId};
use crate::pods::{NodePod, Placement, PodUid, Pods, Stage, Unplaced};

use super::exchanges::{self, Seat};
use super::room::{self, NoRoom};
use super::sight::{self, Sight, Sights};

/// What is to be done.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// The container sees, or will see, what the record says.
    Confirm,
    /// The pod exchanges its record with this one; then it is judged again.
    Exchange(PodUid),
    /// kubelet may have answered for the other pod since the look: look again.
    LookAgain(PodUid),
    /// The container must not start now.
    Refuse(Refusal),
}

/// Why a container does not start. kubelet tries again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The pod has no usable record.
    #[error("{0}")]
    Unplaced(String),
    /// Its record names a device that it cannot have.
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
    /// There is no room for it.
    #[error(transparent)]
    NoRoom(#[from] NoRoom),
    /// It sees other devices than its record names, for as long as it lives.
    #[error(
        "kubelet has given it {seen}, but {recorded} is counted for it, and no other pod of this node can change places with it; delete it to have it placed anew"
    )]
    Mismatch {
        /// What it sees.
        seen: String,
        /// What its record says.
        recorded: String,
    },
    /// Its author says something else than what is counted for it, and wins.
    #[error(
        "container {container:?} sets {variable}, which is not allowed in a pod that shares devices: it would win over {given:?}, which is \
         counted for it; take it out of the pod, or let this node's plugin run with --inject=cdi"
    )]
    Overridden {
        /// The container.
        container: String,
        /// What it sets.
        variable: String,
        /// The value that is counted for it.
        given: String,
    },
    /// Its author sets the vendor's variable, and whether the runtime acts on CDI devices is not known yet.
    #[error(
        "container {container:?} sets {variable}, and this node's runtime has not been seen reading CDI specs yet: without CDI the variable \
         could show it GPUs that are not counted for it; take it out of the pod"
    )]
    OverridesVoid {
        /// The container.
        container: String,
        /// The variable.
        variable: String,
    },
    /// It is marked to see all GPUs, which the operator has not allowed.
    #[error(
        "annotation {ALL_DEVICES}: this node's device plugin runs without --allow-all-devices, so that no pod sees all GPUs uncounted; take the \
         annotation out and ask for amounts, or turn it on for the scheduler and its device plugins"
    )]
    AllDevicesForbidden,
    /// It is marked to see all GPUs, and its record names fewer: it would see the others without being charged for them.
    #[error(
        "annotation {ALL_DEVICES} counts only where the record names every healthy GPU of the node: {recorded} is recorded, {unnamed} is not; \
         delete it to have it placed anew"
    )]
    NotAllDevices {
        /// The devices that its record names.
        recorded: String,
        /// The first GPU that it does not name.
        unnamed: PhysicalId,
    },
    /// It has other limits than its record, for as long as it lives.
    #[error("kubelet has given it {kept}, but its record says {recorded}; delete it to have it placed anew")]
    Limits {
        /// What it has.
        kept: String,
        /// What it should have.
        recorded: String,
    },
    /// Nobody can tell what it would see.
    #[error(
        "what kubelet has given it is not known: no answer that names devices is in kubelet's checkpoint or was given by this process"
    )]
    Unknown,
}

impl Refusal {
    /// Whether trying again cannot help.
    pub fn is_final(&self) -> bool {
        matches!(
            self,
            Self::Mismatch { .. } | Self::Limits { .. } | Self::NotAllDevices { .. }
        )
    }
}

/// Checks that a pod may see all GPUs of its node if it is marked so, by the operator's setting and the GPUs that its record
/// names. Both mark and record are annotations, which its author may have written.
///
/// # Errors
/// The pod may not see all GPUs.
pub fn check_all_devices(pod: &NodePod, fleet: &Fleet, is_allowed: bool) -> Result<(), Refusal> {
    if !pod.sees_all {
        return Ok(());
    }
    if !is_allowed {
        return Err(Refusal::AllDevicesForbidden);
    }
    // Without a usable record it is refused for that.
    let Ok(placement) = &pod.placement else {
        return Ok(());
    };
    let is_named = |gpu: &&Gpu| placement.gpus.iter().any(|name| name.names(gpu));
    let unnamed = fleet
        .gpus
        .iter()
        .filter(|entry| entry.is_healthy)
        .map(|entry| &entry.gpu)
        .find(|gpu| !is_named(gpu));
    unnamed.map_or(Ok(()), |gpu| {
        Err(Refusal::NotAllDevices {
            recorded: placement.to_string(),
            unnamed: gpu.uuid.clone(),
        })
    })
}

/// Everything that a verdict is reached by.
#[derive(Clone, Copy, Debug)]
pub struct Evidence<'a> {
    /// The pods with their effective records.
    pub pods: &'a Pods,
    /// The devices.
    pub fleet: &'a Fleet,
    /// What has been answered.
    pub ledger: &'a Ledger,
    /// What kubelet has written down.
    pub written: &'a [Allocated],
    /// Whether that could be read: else nobody can tell what pods see that this process has not answered for.
    pub is_written_known: bool,
    /// Whether this process has begun only now, so that the API server may not tell yet what its predecessor let start.
    pub is_young: bool,
    /// The variable that names a container's GPUs.
    pub variable: &'a str,
    /// Bytes of a memory unit.
    pub unit: MemoryUnit,
}

/// Devices by type.
type DevicesByType = BTreeMap<&'static str, BTreeSet<PhysicalId>>;

impl Evidence<'_> {
    /// Judges the start of a container of this pod, whose containers see `seen`, as far as the answers for them say.
    pub fn judge(&self, pod: &NodePod, seen: &Sights) -> Verdict {
        self.try_judge(pod, seen).unwrap_or_else(Verdict::Refuse)
    }

    fn try_judge(&self, pod: &NodePod, seen: &Sights) -> Result<Verdict, Refusal> {
        let placement = pod
            .placement
            .as_ref()
            .map_err(|unplaced| Refusal::Unplaced(unplaced.to_string()))?;
        let recorded = self.recorded(pod, placement)?;
        let mismatch = |seen: String| Refusal::Mismatch {
            seen,
            recorded: placement.to_string(),
        };
        let mut certain = DevicesByType::new();
        for (device_type, sight) in seen
            .iter()
            .filter(|(device_type, _)| recorded.contains_key(*device_type))
        {
            match sight {
                Sight::Unclear(problem) => return Err(mismatch(problem.clone())),
                Sight::Devices(devices) => drop(certain.insert(*device_type, devices.clone())),
                Sight::Spec => {}
            }
        }
        if certain
            .iter()
            .any(|(device_type, devices)| recorded.get(device_type) != Some(devices))
        {
            let ids = || {
                certain
                    .values()
                    .flatten()
                    .map(PhysicalId::as_str)
                    .collect::<Vec<_>>()
                    .join(",")
            };
            // A container of it that started by its spec sees the devices of its record, which must stay its own.
            let is_bound_to_record = self.may_have_started(pod) && self.has_spec(pod);
            let partner = (!is_bound_to_record)
                .then(|| self.partner(pod, &certain, &recorded))
                .flatten();
            return partner.ok_or_else(|| mismatch(ids()));
        }
        for resource in self.asked(pod) {
            match self.fleet.resolve(resource, placement.names(resource)) {
                // It was before the operator chose otherwise.
                Err(Unavailable::NotShared(_)) if pod.stage == Stage::Running => {}
                resolved => drop(resolved?),
            }
        }
        let may_run = |uid: &PodUid| self.is_young && *uid != pod.uid && self.ledger.is_from_before(uid);
        let is_started = |uid: &PodUid| self.ledger.is_confirmed(uid) || may_run(uid);
        let seen = |uid: &PodUid| match sight::of_pod(self.written, uid, self.variable, self.fleet)
            .remove(TYPE_GPU)
        {
            Some(Sight::Devices(gpus)) => gpus,
            _ => BTreeSet::new(),
        };
        room::check(self.pods, self.fleet, self.unit, is_started, seen, &pod.uid)?;
        Ok(Verdict::Confirm)
    }

    /// What kubelet asks this plugin for on behalf of the pod.
    fn asked(&self, pod: &NodePod) -> impl Iterator<Item = ExtendedResource> {
        self.ledger
            .serves()
            .iter()
            .copied()
            .filter(|resource| pod.asks_for(*resource))
    }

    /// The devices of a pod's record of the types that it asks for, sick ones included, with their virtual functions.
    ///
    /// # Errors
    /// It names none of a type, or one that is not on this node.
    fn recorded(&self, pod: &NodePod, placement: &Placement) -> Result<DevicesByType, Refusal> {
        let mut recorded = DevicesByType::new();
        for resource in self.asked(pod) {
            let names = placement.names(resource);
            if names.is_empty() {
                return Err(Refusal::Unplaced(
                    Unplaced::NoDevice(resource.device_type()).to_string(),
                ));
            }
            let ids: Option<BTreeSet<PhysicalId>> = names
                .iter()
                .map(|name| self.fleet.find(resource, name).map(|key| key.id))
                .collect();
            let absent = || {
                Refusal::Unplaced(format!(
                    "its record names {placement}, which this node does not have"
                ))
            };
            let mut ids = ids.ok_or_else(absent)?;
            ids.extend(placement.functions(resource).cloned());
            recorded.insert(resource.device_type(), ids);
        }
        Ok(recorded)
    }

    /// Whether a container of the pod was given its devices by a CDI spec.
    fn has_spec(&self, pod: &NodePod) -> bool {
        let is_by_spec = |entry: &&Allocated| {
            sight::of_answer(entry.resource, &entry.answer, self.variable, self.fleet) == Some(Sight::Spec)
        };
        self.written
            .iter()
            .filter(|entry| entry.pod == pod.uid)
            .any(|entry| is_by_spec(&entry))
    }

    /// Whether a container of the pod may be running, by what this process knows.
    fn may_have_started(&self, pod: &NodePod) -> bool {
        pod.stage == Stage::Running
            || self.ledger.is_confirmed(&pod.uid)
            || self.ledger.is_from_before(&pod.uid)
    }

    /// Whom the pod can change places with: one whose record is what this one sees and that does not see it itself; best
    /// one that sees what this one's record says.
    fn partner(&self, pod: &NodePod, seen: &DevicesByType, recorded: &DevicesByType) -> Option<Verdict> {
        let is_alike =
            |other: &&NodePod| other.uid != pod.uid && other.stage != Stage::Terminal && pod.asks_like(other);
        let has_record = |other: &&NodePod| {
            let others = other
                .placement
                .as_ref()
                .ok()
                .and_then(|placement| self.recorded(other, placement).ok());
            others.is_some_and(|others| {
                seen.iter()
                    .all(|(device_type, devices)| others.get(device_type) == Some(devices))
            })
        };
        let known = sight::by_pod(self.written, self.variable, self.fleet);
        let unknown = Sights::new();
        let wrong = || {
            seen.iter()
                .filter(|(device_type, devices)| recorded.get(*device_type) != Some(*devices))
        };
        let others = self
            .pods
            .iter()
            .filter(is_alike)
            .filter(has_record)
            .filter_map(|other| {
                let sights = known.get(&other.uid).unwrap_or(&unknown);
                let rank = |(device_type, devices): (&&'static str, &BTreeSet<PhysicalId>)| match sights
                    .get(*device_type)
                {
                    Some(Sight::Devices(own)) if own == devices => None,
                    Some(Sight::Devices(own)) if Some(own) == recorded.get(device_type) => Some(0),
                    Some(Sight::Devices(_)) => Some(1),
                    // Its containers see the devices of its record, for all that is known.
                    _ if self.may_have_started(other) => None,
                    Some(_) => Some(1),
                    None if !self.is_written_known || self.ledger.is_answered_unproven(&other.uid) => Some(3),
                    None => Some(2),
                };
                let ranks: Option<Vec<u8>> = wrong().map(rank).collect();
                Some((ranks?.into_iter().max()?, other.assumed_at(), &other.uid))
            });
        let (rank, _, uid) = others.min()?;
        Some(if rank == 3 {
            Verdict::LookAgain(uid.clone())
        } else {
            Verdict::Exchange(uid.clone())
        })
    }

    /// What can be exchanged beside the records of these two: among pods that ask for the same, have not started, and of
    /// which kubelet has written down what they will see.
    pub fn exchanges_beside(&self, pod: &NodePod, other: &PodUid) -> Vec<(PodUid, PodUid)> {
        let is_free = |one: &&NodePod| {
            one.uid != pod.uid
                && one.uid != *other
                && one.stage != Stage::Terminal
                && !self.may_have_started(one)
                && pod.asks_like(one)
        };
        let known = sight::by_pod(self.written, self.variable, self.fleet);
        let mut sets = Vec::<DevicesByType>::new();
        let mut number = |set: DevicesByType| {
            sets.iter().position(|known| *known == set).unwrap_or_else(|| {
                sets.push(set);
                sets.len() - 1
            })
        };
        let candidates = self.pods.iter().filter(is_free).filter_map(|one| {
            let recorded = self.recorded(one, one.placement.as_ref().ok()?).ok()?;
            let sight: Option<DevicesByType> = recorded
                .keys()
                .map(|device_type| match known.get(&one.uid)?.get(device_type)? {
                    Sight::Devices(devices) => Some((*device_type, devices.clone())),
                    Sight::Spec | Sight::Unclear(_) => None,
                })
                .collect();
            Some(Seat {
                pod: one.uid.clone(),
                sees: number(sight?),
                recorded: number(recorded),
            })
        });
        exchanges::among(candidates.collect())
    }
}

#[cfg(test)]
mod tests;
