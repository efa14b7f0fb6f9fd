//! What has been answered, per pod UID and container. Lives as long as the process.

use std::collections::{BTreeMap, BTreeSet};

use crate::pods::{NodePod, Placement, PodUid, Pods, Stage};
use crate::served::Served;

use super::Found;
use super::displaced::{Calls, calls};

/// One answered call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Index in [`NodePod::containers`].
    pub container: usize,
    /// The resource.
    pub resource: Served,
    /// How many device IDs it was about.
    pub count: u64,
}

/// The answered calls of every pod of this node.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    steps: BTreeMap<PodUid, Vec<Step>>,
    /// The pod of the latest answered call, as long as it has calls to come.
    admitting: Option<PodUid>,
    /// Pods whose admission ended, or seemed to end, before all calls came.
    doubtful: BTreeSet<PodUid>,
    /// Pods that were told an error: kubelet has failed them for good.
    refused: BTreeSet<PodUid>,
    /// Pods that were bound before this process began to keep books.
    inherited: BTreeSet<PodUid>,
    /// Pods that were given another pod's devices, with that pod's record.
    exchanged: BTreeMap<PodUid, Placement>,
    /// Pods that were admitted with another pod's answer, which is accounted for.
    settled: BTreeSet<PodUid>,
    /// Pods all of whose calls are answered and that kubelet has not reported yet.
    unreported: BTreeMap<PodUid, Calls>,
    /// How many pods of such calls went while they were unreported.
    vacated: BTreeMap<Calls, usize>,
}

impl Ledger {
    /// Notes the pods that are there when the first complete list arrives.
    pub fn inherit(&mut self, pods: &Pods) {
        self.inherited = pods.iter().map(|pod| pod.uid.clone()).collect();
    }

    /// Enters an answered call.
    pub fn record(&mut self, found: Found, pods: &Pods) {
        let Found { pod: uid, steps, corrects, placement, exchanged_with, .. } = found;
        if let Some(other) = exchanged_with {
            self.settled.insert(other);
            self.exchanged.insert(uid.clone(), placement);
        }
        if let Some(mistaken) = corrects {
            self.steps.remove(&mistaken);
        } else if let Some(before) = self.admitting.take()
            && before != uid
        {
            // kubelet has gone on to another pod, so the admission before is over.
            self.steps.remove(&before);
            self.doubtful.insert(before);
        }
        self.doubtful.remove(&uid);
        self.steps.insert(uid.clone(), steps);
        let is_complete = |pod: &&NodePod| self.is_complete(pod);
        match pods.get(&uid).filter(is_complete).map(calls) {
            Some(calls) => drop(self.unreported.insert(uid, calls)),
            None => self.admitting = pods.get(&uid).map(|_| uid),
        }
        self.observe(pods);
    }

    /// Takes in what has become of pods.
    pub fn observe(&mut self, pods: &Pods) {
        let stage = |uid: &PodUid| pods.get(uid).map(|pod| pod.stage);
        let vacated = &mut self.vacated;
        self.unreported.retain(|uid, calls| match stage(uid) {
            Some(Stage::Bound) => true,
            Some(Stage::Admitted | Stage::Running) => false,
            Some(Stage::Terminal) | None => {
                *vacated.entry(calls.clone()).or_default() += 1;
                false
            }
        });
        self.forget_gone(pods);
    }

    /// Enters that the pod's call was answered with an error.
    pub fn refuse(&mut self, uid: &PodUid) {
        self.reopen(uid);
        self.refused.insert(uid.clone());
    }

    /// Enters that the pod's answered calls were none of its own.
    pub fn reopen(&mut self, uid: &PodUid) {
        if self.admitting.as_ref() == Some(uid) {
            self.admitting = None;
        }
        self.steps.remove(uid);
    }

    /// Whether every call that the pod is due for has been answered.
    pub fn is_complete(&self, pod: &NodePod) -> bool {
        let steps = self.steps(&pod.uid);
        let is_answered = |container, resource| steps.iter().any(|step| step.container == container && step.resource == resource);
        let mut due = pod.containers.iter().enumerate().flat_map(|(idx, container)| {
            let asked = Served::ALL.into_iter().filter(|resource| resource.count(container) > 0);
            asked.map(move |resource| (idx, resource))
        });
        !steps.is_empty() && due.all(|(idx, resource)| is_answered(idx, resource))
    }

    /// Drops what is known of pods that no longer exist.
    fn forget_gone(&mut self, pods: &Pods) {
        self.steps.retain(|uid, _| pods.get(uid).is_some());
        self.exchanged.retain(|uid, _| pods.get(uid).is_some());
        for set in [&mut self.doubtful, &mut self.refused, &mut self.inherited, &mut self.settled] {
            set.retain(|uid| pods.get(uid).is_some());
        }
    }

    pub(super) fn steps(&self, uid: &PodUid) -> &[Step] {
        self.steps.get(uid).map_or(&[], Vec::as_slice)
    }

    pub(super) fn admitting(&self) -> Option<&PodUid> {
        self.admitting.as_ref()
    }

    pub(super) fn is_doubtful(&self, uid: &PodUid) -> bool {
        self.doubtful.contains(uid)
    }

    pub(super) fn is_refused(&self, uid: &PodUid) -> bool {
        self.refused.contains(uid)
    }

    /// The record whose devices the pod was given in place of its own.
    pub(super) fn exchanged(&self, uid: &PodUid) -> Option<&Placement> {
        self.exchanged.get(uid)
    }

    /// Whether an admitted pod must have been answered for, and the answer is not in the books.
    pub(super) fn expects_answer(&self, uid: &PodUid) -> bool {
        let is_accounted = [&self.inherited, &self.settled, &self.doubtful, &self.refused].iter().any(|set| set.contains(uid));
        self.steps(uid).is_empty() && !is_accounted
    }

    /// How many pods of these calls went before kubelet reported them.
    pub(super) fn n_vacated(&self, calls: &Calls) -> usize {
        self.vacated.get(calls).copied().unwrap_or(0)
    }

    pub(super) fn is_inherited(&self, uid: &PodUid) -> bool {
        self.inherited.contains(uid)
    }
}
