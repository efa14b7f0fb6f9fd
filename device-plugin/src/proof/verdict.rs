//! May the container start? By what it will see, its pod's record and the records of the other pods of the node.
//!
//! Where the two differ and the answer of Allocate stands, two pods that ask for the same may exchange their records: no
//! device's sums change. The other pod must not see the devices that it would give away. Longer permutations are resolved
//! by exchanges of two, each of which makes at least one pod right.

use std::collections::BTreeSet;

use proto::memory_unit::MemoryUnit;

use crate::fleet::{Fleet, Unavailable};
use crate::identity::Ledger;
use crate::identity::checkpoint::Allocated;
use crate::inventory::GpuUuid;
use crate::pods::{NodePod, PodUid, Pods, Stage};

use super::room::{self, NoRoom};
use super::sight::{self, Sight};

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
    /// Its record names a GPU that it cannot have.
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
    /// Nobody can tell what it would see.
    #[error("what kubelet has given it is not known: it is neither in kubelet's checkpoint nor was it given by this process")]
    Unknown,
}

impl Refusal {
    /// Whether trying again cannot help.
    pub fn is_final(&self) -> bool {
        matches!(self, Self::Mismatch { .. })
    }
}

/// Everything that a verdict is reached by.
#[derive(Clone, Copy, Debug)]
pub struct Evidence<'a> {
    /// The pods with their effective records.
    pub pods: &'a Pods,
    /// The GPUs.
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

impl Evidence<'_> {
    /// Judges the start of a container of this pod that sees `seen`, if the answer for it says anything of devices.
    pub fn judge(&self, pod: &NodePod, seen: Option<&Sight>) -> Verdict {
        self.try_judge(pod, seen).unwrap_or_else(Verdict::Refuse)
    }

    fn try_judge(&self, pod: &NodePod, seen: Option<&Sight>) -> Result<Verdict, Refusal> {
        let placement = pod.placement.as_ref().map_err(|unplaced| Refusal::Unplaced(unplaced.to_string()))?;
        let recorded: BTreeSet<GpuUuid> =
            self.gpus(pod).ok_or_else(|| Refusal::Unplaced(format!("its record names {placement}, which this node does not have")))?;
        let verdict = match seen {
            None | Some(Sight::Spec) => Verdict::Confirm,
            Some(Sight::Gpus(seen)) if *seen == recorded => Verdict::Confirm,
            Some(Sight::Unclear(problem)) => {
                return Err(Refusal::Mismatch { seen: problem.clone(), recorded: placement.to_string() });
            }
            Some(Sight::Gpus(seen)) => self.partner(pod, seen, &recorded).ok_or_else(|| Refusal::Mismatch {
                seen: seen.iter().map(GpuUuid::as_str).collect::<Vec<_>>().join(","),
                recorded: placement.to_string(),
            })?,
        };
        if verdict == Verdict::Confirm {
            self.fleet.resolve(&placement.gpus)?;
            let may_run = |uid: &PodUid| self.is_young && *uid != pod.uid && self.ledger.is_from_before(uid);
            let is_started = |uid: &PodUid| self.ledger.is_confirmed(uid) || may_run(uid);
            room::check(self.pods, self.fleet, self.unit, is_started, &pod.uid)?;
        }
        Ok(verdict)
    }

    /// The GPUs of a pod's record, sick ones included; none if one of them is not on this node.
    fn gpus(&self, pod: &NodePod) -> Option<BTreeSet<GpuUuid>> {
        let placement = pod.placement.as_ref().ok()?;
        let named =
            |name: &crate::pods::GpuName| self.fleet.gpus.iter().find(|entry| name.names(&entry.gpu)).map(|entry| entry.gpu.uuid.clone());
        placement.gpus.iter().map(named).collect()
    }

    /// Whether a container of the pod may be running, by what this process knows.
    fn may_have_started(&self, pod: &NodePod) -> bool {
        pod.stage == Stage::Running || self.ledger.is_confirmed(&pod.uid) || self.ledger.is_from_before(&pod.uid)
    }

    /// Whom the pod can change places with: one whose record is what this one sees and that does not see it itself; best
    /// one that sees what this one's record says.
    fn partner(&self, pod: &NodePod, seen: &BTreeSet<GpuUuid>, recorded: &BTreeSet<GpuUuid>) -> Option<Verdict> {
        let is_alike = |other: &&NodePod| other.uid != pod.uid && other.stage != Stage::Terminal && pod.asks_like(other);
        let has_record = |other: &&NodePod| self.gpus(other).as_ref() == Some(seen);
        let others = self.pods.iter().filter(is_alike).filter(has_record).filter_map(|other| {
            let sight = sight::of_pod(self.written, &other.uid, self.variable, self.fleet);
            let rank = match &sight {
                Some(Sight::Gpus(own)) if own == seen => return None,
                Some(Sight::Gpus(own)) if own == recorded => 0,
                Some(Sight::Gpus(_)) => 1,
                // Its containers see the devices of its record, for all that is known.
                _ if self.may_have_started(other) => return None,
                Some(_) => 1,
                None if !self.is_written_known || self.ledger.is_answered_unproven(&other.uid) => 3,
                None => 2,
            };
            Some((rank, other.assumed_at(), &other.uid))
        });
        let (rank, _, uid) = others.min()?;
        Some(if rank == 3 { Verdict::LookAgain(uid.clone()) } else { Verdict::Exchange(uid.clone()) })
    }
}

#[cfg(test)]
mod tests;
