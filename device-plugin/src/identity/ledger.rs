//! What has been answered, per pod UID and container. Lives as long as the process.

use std::collections::{BTreeMap, BTreeSet};

use crate::pods::{NodePod, Placement, PodUid, Pods, Stage};
use crate::served::Served;

use super::Found;
use super::checkpoint::Allocated;
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
    /// Whether those are known.
    has_inherited: bool,
    /// What kubelet's checkpoint says that a predecessor answered, if it could be read; taken in with the pods.
    before: Option<Vec<Allocated>>,
    /// Whether it could be read: a pod that it does not name has then not been answered for.
    is_recorded: bool,
    /// Pods that it named.
    answered_before: BTreeSet<PodUid>,
    /// What `GetPreferredAllocation` was answered for, until the next answer of a call.
    preferred: Option<Found>,
    /// The latest assume time and arrival of the pods that were answered for.
    latest_assumed: Option<u64>,
    latest_arrival: Option<u64>,
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
    /// Books that begin with what a predecessor answered, as far as kubelet has written it down.
    pub fn after(before: Option<Vec<Allocated>>) -> Self {
        Self { before, ..Self::default() }
    }

    /// Notes the pods that are there when the first complete list arrives; does nothing before or after that.
    pub fn inherit(&mut self, pods: &Pods) {
        if self.has_inherited || !pods.is_synced() {
            return;
        }
        self.has_inherited = true;
        self.inherited = pods.iter().map(|pod| pod.uid.clone()).collect();
        if let Some(before) = self.before.take() {
            self.catch_up(&before, pods);
        }
    }

    /// Whether kubelet may have been answered for a waiting pod without that being in the books.
    pub fn is_unsure(&self, pods: &Pods) -> bool {
        let is_open = |pod: &NodePod| pod.stage == Stage::Bound && !self.is_complete(pod);
        let is_due = |uid: &&PodUid| !self.is_doubtful(uid) && !self.is_refused(uid);
        self.inherited.iter().filter(is_due).filter_map(|uid| pods.get(uid)).any(is_open)
    }

    /// Enters what kubelet has written down of inherited pods. One of which it has written down a part is being admitted.
    pub fn catch_up(&mut self, before: &[Allocated], pods: &Pods) {
        self.is_recorded = true;
        let mut begun = Vec::new();
        for pod in pods.iter() {
            let Some(steps) = self.more_steps(pod, before) else { continue };
            self.steps.insert(pod.uid.clone(), steps);
            self.answered_before.insert(pod.uid.clone());
            self.note_latest(&pod.uid, pods);
            if !self.is_complete(pod) {
                begun.push(pod);
            } else if self.admitting.as_ref() == Some(&pod.uid) {
                self.admitting = None;
            }
        }
        // Of several the latest: kubelet has gone on to it.
        begun.sort_by_key(|pod| (pod.assumed_at(), pods.arrival(&pod.uid)));
        let latest = begun.pop().map(|pod| pod.uid.clone());
        self.doubtful.extend(begun.into_iter().map(|pod| pod.uid.clone()));
        self.admitting = self.admitting.take().or(latest);
    }

    /// All answered calls of an inherited pod, if `before` has any that are not in the books.
    fn more_steps(&self, pod: &NodePod, before: &[Allocated]) -> Option<Vec<Step>> {
        if !self.inherited.contains(&pod.uid) || self.is_doubtful(&pod.uid) {
            return None;
        }
        let known = self.steps(&pod.uid);
        let is_known = |step: &Step| known.iter().any(|known| (known.container, known.resource) == (step.container, step.resource));
        let written = before.iter().filter(|allocated| allocated.pod == pod.uid).filter_map(|allocated| allocated.step(pod));
        let mut steps: Vec<Step> = written.filter(|step| !is_known(step)).collect();
        if steps.is_empty() {
            return None;
        }
        steps.extend(known);
        steps.sort_by_key(|step| (step.container, step.resource));
        Some(steps)
    }

    /// kubelet may have restarted, and then it knows only what it has written down of the admission under way.
    pub fn resume(&mut self, before: &[Allocated], pods: &Pods) {
        self.preferred = None;
        if let Some(uid) = self.admitting.take() {
            self.steps.remove(&uid);
            self.inherited.insert(uid);
        }
        if self.has_inherited {
            self.catch_up(before, pods);
        }
    }

    /// Notes for whom `GetPreferredAllocation` was answered, if it is known.
    pub fn prefer(&mut self, found: Option<Found>) {
        self.preferred = found;
    }

    fn note_latest(&mut self, uid: &PodUid, pods: &Pods) {
        self.latest_assumed = self.latest_assumed.max(pods.get(uid).and_then(NodePod::assumed_at));
        self.latest_arrival = self.latest_arrival.max(pods.arrival(uid));
    }

    /// Enters an answered call.
    pub fn record(&mut self, found: Found, pods: &Pods) {
        let Found { pod: uid, steps, corrects, placement, exchanged_with, .. } = found;
        self.preferred = None;
        self.settle(pods);
        self.note_latest(&uid, pods);
        if let Some(other) = exchanged_with {
            self.settled.insert(other);
            self.exchanged.insert(uid.clone(), placement);
        }
        if let Some(mistaken) = corrects {
            self.steps.remove(&mistaken);
        } else if let Some(before) = self.admitting.take()
            && before != uid
        {
            // kubelet has gone on to another pod, so the admission before is over. What it has written down of that one stands.
            if !self.answered_before.contains(&before) {
                self.steps.remove(&before);
            }
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

    /// Sets aside pods that were admitted before anything was answered that they can have been admitted with.
    fn settle(&mut self, pods: &Pods) {
        for pod in pods.iter().filter(|pod| matches!(pod.stage, Stage::Admitted | Stage::Running)) {
            let own = calls(pod);
            let is_answered = self.unreported.values().any(|calls| *calls == own) || self.n_vacated(&own) > 0;
            if !is_answered && self.expects_answer(&pod.uid) {
                self.settled.insert(pod.uid.clone());
            }
        }
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
    pub fn refuse(&mut self, uid: &PodUid, pods: &Pods) {
        self.reopen(uid);
        self.refused.insert(uid.clone());
        self.note_latest(uid, pods);
        self.observe(pods);
    }

    /// Enters that the pod's answered calls were none of its own.
    pub fn reopen(&mut self, uid: &PodUid) {
        if self.admitting.as_ref() == Some(uid) {
            self.admitting = None;
        }
        self.preferred = None;
        self.steps.remove(uid);
        self.unreported.remove(uid);
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
        for set in [&mut self.doubtful, &mut self.refused, &mut self.inherited, &mut self.answered_before, &mut self.settled] {
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

    /// Whether kubelet had written down answers for the pod before this process began.
    pub(super) fn is_answered_before(&self, pod: &NodePod) -> bool {
        self.answered_before.contains(&pod.uid)
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

    /// The latest assume time of a pod that was answered for.
    pub(super) fn latest_assumed(&self) -> Option<u64> {
        self.latest_assumed
    }

    /// The latest arrival of a pod that was answered for.
    pub(super) fn latest_arrival(&self) -> Option<u64> {
        self.latest_arrival
    }

    pub(super) fn preferred(&self) -> Option<&Found> {
        self.preferred.as_ref()
    }

    /// Whether a predecessor may have answered for the pod, with nobody to tell.
    pub(super) fn is_uncertain(&self, uid: &PodUid) -> bool {
        !self.is_recorded && self.inherited.contains(uid)
    }
}
