//! The log of answered Allocate calls, per pod UID and container. It is kept in memory for the life of the process.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use proto::kubelet::deviceplugin::ContainerAllocateResponse;

use crate::devices::extended_resource::ExtendedResource;
use crate::node::kubelet_checkpoint::Allocated;
use crate::node::pods::{NodePod, NodePods, PodStage, PodUid};

use super::swap_plan::SwapPlan;
use super::{Match, are_alike, as_calls_of_pod};

/// Most answers that the log keeps: kubelet runs a few hundred pods.
const MAX_ANSWERS: usize = 16_384;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AnsweredCall {
    /// Index in [`NodePod::containers`].
    pub(crate) container: usize,
    pub(crate) resource: ExtendedResource,
    pub(crate) count: u64,
}

#[derive(Clone, Debug)]
struct LoggedAnswer {
    /// The pod that the call was matched with, if any.
    pod: Option<PodUid>,
    response: ContainerAllocateResponse,
}

/// Values by resource and sorted device IDs. Nested, so that a look-up copies no ID: a container may have thousands.
type ByIds<T> = BTreeMap<ExtendedResource, HashMap<Vec<String>, T>>;

/// The answered calls of this node's pods, the answers, and all that follows from them for the next calls.
#[derive(Clone, Debug, Default)]
pub struct AllocateLog {
    /// The answered calls of each pod, by matches of this process or by kubelet's checkpoint, in kubelet's order.
    calls: BTreeMap<PodUid, Vec<AnsweredCall>>,
    /// The pod of the latest answered call, as long as kubelet has further calls to make for it.
    pub(super) admitting: Option<PodUid>,
    /// Pods that kubelet seems to have given up before it made all Allocate calls for them.
    pub(super) doubtful: BTreeSet<PodUid>,
    /// Pods for which an earlier process, or this one at an earlier registration, may have answered: those of the first complete
    /// list of pods, and those that kubelet was admitting when a registration ended. None until that list.
    existing: Option<BTreeSet<PodUid>>,
    /// True if kubelet's checkpoint could be read: a pod in `existing` that it does not name has got no answer.
    is_checkpoint_loaded: bool,
    /// Pods in `existing` that the checkpoint names: an earlier process answered for them, or this one before that list, and they
    /// may have started since.
    pub(crate) answered_before: BTreeSet<PodUid>,
    /// The match of the last `GetPreferredAllocation`, for the Allocate that follows it: until the next answered call.
    pub(crate) preferred: Option<Match>,
    /// True after a `GetPreferredAllocation` that waited without success: the Allocate that follows it need not wait again.
    pub(crate) has_waited: bool,
    pub(super) latest_assumed: Option<u64>,
    pub(super) latest_arrival: Option<u64>,
    /// The last answer of this process about each set of device IDs.
    answers: ByIds<LoggedAnswer>,
    /// The number of answers that were ever added.
    n_added: u64,
    /// The pods whose further calls are matched with another pod's allocation record.
    pub(super) plan: SwapPlan,
    /// Pods for which kubelet's checkpoint confirms an answer of this process.
    proven: BTreeSet<PodUid>,
    /// Pods one of whose containers this process has let start.
    pub(crate) started: BTreeSet<PodUid>,
    /// Containers that this process has let start with the device IDs of its last answer.
    started_containers: ByIds<()>,
    /// The resources that kubelet calls for, once they are known.
    offered: Option<Vec<ExtendedResource>>,
    /// The checkpoint that the log was last corrected by.
    corrected_by: Option<Arc<Vec<Allocated>>>,
    /// At the last correction by a checkpoint, the numbers of answers, of pods that had come, and of pods that had left.
    corrected_state: (u64, u64, u64),
}

impl AllocateLog {
    pub(crate) fn set_offered(&mut self, resources: Vec<ExtendedResource>) {
        self.offered = Some(resources);
    }

    /// The resources that kubelet calls for; until they are known, those of every node.
    pub(crate) fn offered(&self) -> &[ExtendedResource] {
        self.offered.as_deref().unwrap_or(&ExtendedResource::ALWAYS)
    }

    /// Notes the pods of the first complete list of pods, once. Returns true if kubelet's checkpoint has to be loaded for them.
    pub(crate) fn note_existing_pods(&mut self, pods: &NodePods) -> bool {
        let is_first = self.existing.is_none() && pods.is_synced();
        if is_first {
            self.existing = Some(pods.iter().map(|pod| pod.uid.clone()).collect());
        }
        is_first
    }

    /// True if an earlier process may have answered for a waiting pod, and the log does not show that.
    pub(crate) fn needs_checkpoint(&self, pods: &NodePods) -> bool {
        let mut existing = self.existing.iter().flatten().filter_map(|uid| pods.get(uid));
        let doubtful = &self.doubtful;
        existing
            .any(|pod| pod.stage == PodStage::Bound && !doubtful.contains(&pod.uid) && !self.is_complete(pod))
    }

    /// Adds the calls of existing pods that kubelet's checkpoint names; a pod that lacks some of its calls is being admitted.
    pub(crate) fn load(&mut self, allocated: &[Allocated], pods: &NodePods) {
        self.is_checkpoint_loaded = true;
        let existing = self.existing.clone().unwrap_or_default();
        let mut by_pod = HashMap::<&PodUid, Vec<&Allocated>>::new();
        for entry in allocated {
            by_pod.entry(&entry.pod).or_default().push(entry);
        }
        let mut begun = Vec::new();
        for uid in &existing {
            let (Some(pod), Some(entries)) = (pods.get(uid), by_pod.get(uid)) else {
                continue;
            };
            let Some(calls) = self.with_missing_calls(pod, entries) else {
                continue;
            };
            self.calls.insert(pod.uid.clone(), calls);
            self.answered_before.insert(pod.uid.clone());
            self.note_latest(&pod.uid, pods);
            if !self.is_complete(pod) {
                begun.push(pod);
            } else if self.admitting.as_ref() == Some(&pod.uid) {
                self.admitting = None;
            }
        }
        // kubelet admits one pod at a time: it is admitting the latest of these, and has given up the others.
        begun.sort_by_key(|pod| (pod.assumed_at(), pods.arrival(&pod.uid)));
        let latest = begun.pop().map(|pod| pod.uid.clone());
        for pod in begun {
            self.doubtful.insert(pod.uid.clone());
        }
        self.admitting = self.admitting.take().or(latest);
    }

    /// The answered calls of an existing pod by log and checkpoint; none if its entries in the checkpoint add no call to the log.
    fn with_missing_calls(&self, pod: &NodePod, entries: &[&Allocated]) -> Option<Vec<AnsweredCall>> {
        if self.doubtful.contains(&pod.uid) {
            return None;
        }
        let known = self.answered_calls(&pod.uid);
        let mut calls = Vec::new();
        for entry in entries {
            if let Some(call) = answered_call(entry, pod)
                && !contains(known, call)
            {
                calls.push(call);
            }
        }
        if calls.is_empty() {
            return None;
        }
        calls.extend(known);
        calls.sort_by_key(|call| (call.container, call.resource));
        Some(calls)
    }

    /// Prepares for another registration with kubelet, which may have restarted.
    pub(crate) fn resume(&mut self, allocated: &[Allocated], pods: &NodePods) {
        self.preferred = None;
        // A kubelet that has restarted remembers of the admission under way only what its checkpoint names.
        if let Some(uid) = self.admitting.take() {
            self.calls.remove(&uid);
            if let Some(existing) = &mut self.existing {
                existing.insert(uid);
            }
        }
        if self.existing.is_some() {
            self.load(allocated, pods);
        }
    }

    /// Adds the answer to an Allocate call. [`Self::record`] adds the call itself to those of its pod.
    pub(crate) fn add_answer(
        &mut self,
        resource: ExtendedResource,
        ids: &[String],
        pod: Option<PodUid>,
        response: ContainerAllocateResponse,
    ) {
        // kubelet names the IDs of a container in any order.
        let mut ids = ids.to_vec();
        ids.sort_unstable();
        self.n_added += 1;
        self.started_containers.entry(resource).or_default().remove(&ids);
        // An earlier answer about these IDs is out of date even if there is no room for this one.
        self.answers.entry(resource).or_default().remove(&ids);
        // Answers without a pod are removed first: no event shows when they are out of date.
        if len(&self.answers) >= MAX_ANSWERS {
            for answers in self.answers.values_mut() {
                answers.retain(|_, answer| answer.pod.is_some());
            }
        }
        if len(&self.answers) < MAX_ANSWERS {
            let answers = self.answers.entry(resource).or_default();
            answers.insert(ids, LoggedAnswer { pod, response });
        }
    }

    /// The answer of this process about these device IDs, sorted.
    pub(crate) fn response(
        &self,
        resource: ExtendedResource,
        ids: &[String],
    ) -> Option<&ContainerAllocateResponse> {
        let answer = self.answers.get(&resource)?.get(ids)?;
        Some(&answer.response)
    }

    /// The device IDs of a resource that this process has answered for, without those of pods that have ended.
    pub(crate) fn ids_in_use<'a>(&'a self, resource: ExtendedResource, pods: &NodePods) -> HashSet<&'a str> {
        let mut in_use = HashSet::new();
        for (ids, answer) in self.answers.get(&resource).into_iter().flatten() {
            // An answer without a pod may be that of any pod.
            if answer.pod.as_ref().is_none_or(|uid| pods.get_live(uid).is_some()) {
                in_use.extend(ids.iter().map(String::as_str));
            }
        }
        in_use
    }

    /// Records the call of this match as the latest of its pod. A correction (`corrects`) first moves the calls of the other pod.
    pub(crate) fn record(&mut self, found: Match, pods: &NodePods) {
        let Match {
            pod: uid,
            calls,
            corrects,
            record_of,
            ..
        } = found;
        self.preferred = None;
        self.note_latest(&uid, pods);
        if let Some(mistaken) = corrects {
            self.correct(&mistaken, &uid, record_of, pods);
        } else if let Some(before) = self.admitting.take()
            && before != uid
        {
            // kubelet has gone on to another pod, so the admission before is over. Calls that the checkpoint names stay.
            if !self.answered_before.contains(&before) {
                self.calls.remove(&before);
            }
            self.doubtful.insert(before);
        }
        self.doubtful.remove(&uid);
        self.calls.insert(uid.clone(), calls);
        self.admitting = Some(uid);
        self.end_admission(pods);
        self.forget_gone(pods);
    }

    /// Moves the calls of `mistaken` to the pod `uid`, whose further calls are answered with the same record as the moved ones.
    fn correct(&mut self, mistaken: &PodUid, uid: &PodUid, record_of: PodUid, pods: &NodePods) {
        self.admitting = None;
        self.calls.remove(mistaken);
        self.swap_answers(mistaken, uid);
        if record_of == *self.plan.record_of(uid) {
            return;
        }
        if are_alike(pods, mistaken, uid) {
            self.plan.swap(mistaken, uid);
        } else {
            // The check before a start refuses the pod, but its containers must not see more than one pod's devices.
            self.plan.set(uid, record_of);
        }
    }

    /// Exchanges two pods in the logged answers: those that were matched with one count for the other from now on.
    fn swap_answers(&mut self, one: &PodUid, other: &PodUid) {
        for answer in self.answers.values_mut().flat_map(HashMap::values_mut) {
            match &mut answer.pod {
                Some(uid) if uid == one => uid.clone_from(other),
                Some(uid) if uid == other => uid.clone_from(one),
                _ => {}
            }
        }
    }

    /// Corrects the log by kubelet's checkpoint, unless checkpoint, log and pods are as at the last correction.
    pub(crate) fn correct_by_checkpoint(&mut self, allocated: &Arc<Vec<Allocated>>, pods: &NodePods) {
        let state = (self.n_added, pods.n_arrived(), pods.n_departed());
        // Called at every start, and the checkpoint of a full node has thousands of IDs.
        if let Some(last) = &self.corrected_by
            && Arc::ptr_eq(last, allocated)
            && self.corrected_state == state
        {
            return;
        }
        for entry in allocated.iter() {
            self.correct_by_entry(entry, pods);
        }
        (self.corrected_by, self.corrected_state) = (Some(Arc::clone(allocated)), state);
    }

    /// Corrects the log by one entry of kubelet's checkpoint, which proves to which pod an answer belongs.
    fn correct_by_entry(&mut self, entry: &Allocated, pods: &NodePods) {
        let answers = self.answers.get_mut(&entry.resource);
        let Some(answer) = answers.and_then(|answers| answers.get_mut(&entry.ids)) else {
            return;
        };
        let matched = answer.pod.get_or_insert_with(|| entry.pod.clone()).clone();
        if matched == entry.pod {
            self.add_call(entry, pods);
            self.proven.insert(matched);
            return;
        }
        // A proven match stays: kubelet removes the entries of ended pods late.
        if self.proven.contains(&matched) || self.proven.contains(&entry.pod) {
            return;
        }
        if let Some(real) = pods.get_live(&entry.pod)
            && let Some(call) = answered_call(entry, real)
        {
            self.exchange_calls(&matched, &entry.pod, call, pods);
            self.proven.insert(entry.pod.clone());
        }
    }

    /// Adds the call of this entry to its pod: it may have been answered before the pod was known.
    fn add_call(&mut self, entry: &Allocated, pods: &NodePods) {
        let Some(call) = pods.get(&entry.pod).and_then(|pod| answered_call(entry, pod)) else {
            return;
        };
        let calls = self.calls.entry(entry.pod.clone()).or_default();
        if !contains(calls, call) {
            calls.push(call);
        }
    }

    /// Corrects the log after kubelet's checkpoint has proved that `call`, logged for `mistaken`, was for `real`. Each pod gets
    /// the other's calls and answers, as far as kubelet can have made them for it: nothing proves that the calls of `real` were
    /// for `mistaken`, but that is as likely as anything else. Alike pods use each other's record from then on.
    fn exchange_calls(&mut self, mistaken: &PodUid, real: &PodUid, call: AnsweredCall, pods: &NodePods) {
        // The preferred match was chosen by the log before this correction.
        self.preferred = None;
        let moved = self.calls.remove(mistaken).unwrap_or_default();
        let back = self.calls.remove(real).unwrap_or_default();
        let mut moved = self.as_calls_of(real, &moved, pods);
        let back = self.as_calls_of(mistaken, &back, pods);
        if !contains(&moved, call) {
            // Not all of the calls can have been those of `real`, but kubelet's checkpoint proves `call`.
            moved = vec![call];
        }
        self.calls.insert(real.clone(), moved);
        if !back.is_empty() {
            self.calls.insert(mistaken.clone(), back);
        }
        self.swap_answers(mistaken, real);
        if are_alike(pods, mistaken, real) {
            self.plan.swap(mistaken, real);
        }
        // The checkpoint names the pod, so kubelet has not given it up.
        self.doubtful.remove(real);
        if self.admitting.as_ref() == Some(mistaken) {
            self.admitting = Some(real.clone());
        }
        self.end_admission(pods);
    }

    /// The calls as calls of this pod; empty if the pod cannot have made them.
    fn as_calls_of(&self, uid: &PodUid, calls: &[AnsweredCall], pods: &NodePods) -> Vec<AnsweredCall> {
        pods.get(uid)
            .and_then(|pod| as_calls_of_pod(pod, calls, self.offered()))
            .unwrap_or_default()
    }

    /// Clears `admitting` if all calls of that pod are answered, or the pod is gone.
    fn end_admission(&mut self, pods: &NodePods) {
        let admitting = self.admitting.as_ref().and_then(|uid| pods.get(uid));
        if admitting.is_none_or(|pod| self.is_complete(pod)) {
            self.admitting = None;
        }
    }

    pub(crate) fn note_swap(&mut self, one: &PodUid, other: &PodUid) {
        self.plan.note_swap(one, other);
    }

    /// Matches the further calls of each of the two pods with the other's record until their records are swapped.
    pub(crate) fn plan_swap(&mut self, one: &PodUid, other: &PodUid) {
        self.preferred = None;
        // A pod whose calls are matched with another record by now keeps that plan.
        if self.plan.record_of(one) == one && self.plan.record_of(other) == other {
            self.plan.swap(one, other);
        }
    }

    /// Notes that the pod's container with these device IDs (sorted) may start.
    pub fn note_start(&mut self, uid: &PodUid, resource: ExtendedResource, ids: &[String]) {
        self.started.insert(uid.clone());
        if len(&self.started_containers) < MAX_ANSWERS {
            let containers = self.started_containers.entry(resource).or_default();
            containers.insert(ids.to_vec(), ());
        }
    }

    /// True if a container of the pod has started, and the pod has not ended.
    pub(crate) fn is_started(&self, pod: &NodePod) -> bool {
        pod.stage == PodStage::Running || (pod.stage != PodStage::Terminal && self.started.contains(&pod.uid))
    }

    /// True if this process has let the container start to which this entry of kubelet's checkpoint belongs.
    pub(crate) fn has_started_container(&self, entry: &Allocated) -> bool {
        let started = self.started_containers.get(&entry.resource);
        started.is_some_and(|containers| containers.contains_key(&entry.ids))
    }

    /// Forgets the starts of containers that are not in kubelet's checkpoint any more.
    pub(crate) fn forget_starts(&mut self, allocated: &[Allocated]) {
        // A set, as each start is looked up in it: the checkpoint of a full node has thousands of entries.
        let mut kept = HashSet::<(ExtendedResource, &[String])>::new();
        for entry in allocated {
            kept.insert((entry.resource, &entry.ids));
        }
        for (resource, containers) in &mut self.started_containers {
            containers.retain(|ids, ()| kept.contains(&(*resource, ids.as_slice())));
        }
    }

    pub(crate) fn is_answered(&self, uid: &PodUid) -> bool {
        !self.answered_calls(uid).is_empty()
    }

    /// True if calls were matched with the pod, none of which kubelet's checkpoint confirms.
    pub(crate) fn is_answered_unproven(&self, uid: &PodUid) -> bool {
        self.is_answered(uid) && !self.proven.contains(uid) && !self.answered_before.contains(uid)
    }

    /// Removes everything about pods that the API server does not have any more.
    pub(crate) fn forget_gone(&mut self, pods: &NodePods) {
        let is_there = |uid: &PodUid| pods.get(uid).is_some();
        self.calls.retain(|uid, _| is_there(uid));
        for answers in self.answers.values_mut() {
            answers.retain(|_, answer| answer.pod.as_ref().is_none_or(is_there));
        }
        let sets = [
            &mut self.doubtful,
            &mut self.answered_before,
            &mut self.proven,
            &mut self.started,
        ];
        for set in sets.into_iter().chain(&mut self.existing) {
            set.retain(is_there);
        }
        self.plan.forget_gone(|uid| pods.get_live(uid).is_some());
    }

    /// True if all calls that kubelet makes for the pod have been answered.
    pub(super) fn is_complete(&self, pod: &NodePod) -> bool {
        let answered = self.answered_calls(&pod.uid);
        for (idx, container) in pod.containers.iter().enumerate() {
            for resource in self.offered() {
                let call = AnsweredCall {
                    container: idx,
                    resource: *resource,
                    count: resource.count(container),
                };
                if call.count > 0 && !contains(answered, call) {
                    return false;
                }
            }
        }
        !answered.is_empty()
    }

    /// The answered calls of a pod, in kubelet's order.
    pub(super) fn answered_calls(&self, uid: &PodUid) -> &[AnsweredCall] {
        self.calls.get(uid).map_or(&[], Vec::as_slice)
    }

    /// True if an earlier process may have answered for the pod, and kubelet's checkpoint, which would show that, cannot be read.
    pub(super) fn is_uncertain(&self, uid: &PodUid) -> bool {
        !self.is_checkpoint_loaded && self.existing.as_ref().is_some_and(|pods| pods.contains(uid))
    }

    /// Raises `latest_assumed` and `latest_arrival` to those of this pod, which calls were answered for.
    fn note_latest(&mut self, uid: &PodUid, pods: &NodePods) {
        let assumed_at = pods.get(uid).and_then(NodePod::assumed_at);
        self.latest_assumed = self.latest_assumed.max(assumed_at);
        self.latest_arrival = self.latest_arrival.max(pods.arrival(uid));
    }
}

/// The call of this entry of kubelet's checkpoint, if the pod has a container of that name which requests the resource.
fn answered_call(entry: &Allocated, pod: &NodePod) -> Option<AnsweredCall> {
    let mut containers = pod.containers.iter();
    let idx = containers.position(|container| container.name == entry.container)?;
    let count = entry.resource.count(pod.containers.get(idx)?);
    (count > 0).then_some(AnsweredCall {
        container: idx,
        resource: entry.resource,
        count,
    })
}

/// True if one of these calls is for the same container and resource.
fn contains(calls: &[AnsweredCall], call: AnsweredCall) -> bool {
    let mut calls = calls.iter();
    calls.any(|known| known.container == call.container && known.resource == call.resource)
}

fn len<T>(by_ids: &ByIds<T>) -> usize {
    by_ids.values().map(HashMap::len).sum()
}
