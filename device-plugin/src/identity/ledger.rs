//! What has been answered, per pod UID and container. Lives as long as the process.

mod answers;
mod plan;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use proto::kubelet::deviceplugin::ContainerAllocateResponse;

use crate::extended_resource::ExtendedResource;
use crate::pods::{NodePod, PodUid, Pods, Stage};

use super::checkpoint::Allocated;
use super::{Found, explain};
use answers::{Answer, Answers, MAX_ANSWERS};
use plan::Plan;

/// One answered call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Index in [`NodePod::containers`].
    pub container: usize,
    /// The resource.
    pub resource: ExtendedResource,
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
    /// The answers by the device IDs that they were about.
    answers: Answers,
    /// How many were kept.
    n_kept: u64,
    /// Whose record each pod is answered with.
    plan: Plan,
    /// Pods of which kubelet has written down that an answer was theirs.
    proven: BTreeSet<PodUid>,
    /// Pods one of whose containers was let start.
    confirmed: BTreeSet<PodUid>,
    /// Device IDs whose container this process has let start since they were given to it.
    started: BTreeSet<(ExtendedResource, Vec<String>)>,
    /// The resources that kubelet asks for.
    serves: Serves,
    /// How many pods had left when it was seen last which of those in the books are there; none if it is to be seen again.
    seen_left: Option<u64>,
    /// What was learnt last.
    learnt: Option<Learnt>,
}

/// What kubelet has written down, and what was known when it was taken in.
#[derive(Clone, Debug)]
struct Learnt {
    written: Arc<Vec<Allocated>>,
    known: Known,
}

/// Answers, pods that have come, and pods that have left, each by number.
type Known = (u64, u64, u64);

/// What kubelet asks for: in any case what every node has.
#[derive(Clone, Debug)]
struct Serves(Vec<ExtendedResource>);

impl Default for Serves {
    fn default() -> Self {
        Self(ExtendedResource::ALWAYS.to_vec())
    }
}

impl Ledger {
    /// Books that begin with what a predecessor answered, as far as kubelet has written it down.
    pub fn after(before: Option<Vec<Allocated>>) -> Self {
        Self {
            before,
            ..Self::default()
        }
    }

    /// From now on kubelet asks for these resources.
    pub fn serve(&mut self, resources: Vec<ExtendedResource>) {
        self.serves = Serves(resources);
    }

    /// The resources that kubelet asks for.
    pub fn serves(&self) -> &[ExtendedResource] {
        &self.serves.0
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
        let is_due = |uid: &&PodUid| !self.is_doubtful(uid);
        self.inherited
            .iter()
            .filter(is_due)
            .filter_map(|uid| pods.get(uid))
            .any(is_open)
    }

    /// Enters what kubelet has written down of inherited pods. One of which it has written down a part is being admitted.
    pub fn catch_up(&mut self, before: &[Allocated], pods: &Pods) {
        self.is_recorded = true;
        if self.inherited.is_empty() {
            return;
        }
        let mut written = HashMap::<&PodUid, Vec<&Allocated>>::new();
        for entry in before {
            written.entry(&entry.pod).or_default().push(entry);
        }
        let mut begun = Vec::new();
        for pod in self.inherited.clone().iter().filter_map(|uid| pods.get(uid)) {
            let Some(steps) = written
                .get(&pod.uid)
                .and_then(|written| self.more_steps(pod, written))
            else {
                continue;
            };
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

    /// All answered calls of an inherited pod, if kubelet has written down any for it that are not in the books.
    fn more_steps(&self, pod: &NodePod, written: &[&Allocated]) -> Option<Vec<Step>> {
        if self.is_doubtful(&pod.uid) {
            return None;
        }
        let known = self.steps(&pod.uid);
        let is_known = |step: &Step| {
            known
                .iter()
                .any(|known| (known.container, known.resource) == (step.container, step.resource))
        };
        let written = written.iter().filter_map(|allocated| allocated.step(pod));
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
        self.latest_assumed = self
            .latest_assumed
            .max(pods.get(uid).and_then(NodePod::assumed_at));
        self.latest_arrival = self.latest_arrival.max(pods.arrival(uid));
    }

    /// Keeps an answer about these device IDs, for a call that was or was not found to be somebody's.
    pub fn keep(
        &mut self,
        resource: ExtendedResource,
        ids: &[String],
        pod: Option<PodUid>,
        response: ContainerAllocateResponse,
    ) {
        let ids = sorted(ids);
        self.n_kept += 1;
        self.started.remove(&(resource, ids.clone()));
        self.answers.put(resource, ids, Answer { pod, response });
    }

    /// Device IDs of a resource that this process has answered for, and whose pod may live.
    pub fn given<'a>(&'a self, resource: ExtendedResource, pods: &Pods) -> HashSet<&'a str> {
        let may_live = |answer: &Answer| {
            let Some(uid) = &answer.pod else { return true };
            pods.get(uid).is_some_and(|pod| pod.stage != Stage::Terminal)
        };
        let of_resource = self.answers.of(resource).filter(|(_, answer)| may_live(answer));
        of_resource
            .flat_map(|(ids, _)| ids.iter().map(String::as_str))
            .collect()
    }

    /// What a call about these device IDs, sorted, was answered by this process.
    pub fn response(&self, resource: ExtendedResource, ids: &[String]) -> Option<&ContainerAllocateResponse> {
        self.answers.get(resource, ids).map(|answer| &answer.response)
    }

    /// Enters an answered call.
    pub fn record(&mut self, found: Found, pods: &Pods) {
        let Found {
            pod: uid,
            steps,
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
            // kubelet has gone on to another pod, so the admission before is over. What it has written down of that one stands.
            if !self.answered_before.contains(&before) {
                self.steps.remove(&before);
            }
            self.doubtful.insert(before);
        }
        self.doubtful.remove(&uid);
        self.steps.insert(uid.clone(), steps);
        self.admitting = pods.get(&uid).filter(|pod| !self.is_complete(pod)).map(|_| uid);
        self.observe(pods);
    }

    /// The calls accounted to `mistaken` are the pod's, which goes on with the record that they were answered with.
    fn correct(&mut self, mistaken: &PodUid, uid: &PodUid, record_of: PodUid, pods: &Pods) {
        self.admitting = None;
        self.seen_left = None;
        self.steps.remove(mistaken);
        self.account_answers_anew(mistaken, uid);
        if record_of == *self.plan.record_of(uid) {
            return;
        }
        if are_alike(pods, mistaken, uid) {
            self.plan.swap(mistaken, uid);
        } else {
            // It cannot be helped before its containers start, but they must not see more than one pod's devices.
            self.plan.set(uid, record_of);
        }
    }

    fn account_answers_anew(&mut self, one: &PodUid, other: &PodUid) {
        for owner in self.answers.values_mut().filter_map(|answer| answer.pod.as_mut()) {
            if owner == one {
                owner.clone_from(other);
            } else if owner == other {
                owner.clone_from(one);
            }
        }
    }

    /// Takes in for whom kubelet has written down the answers that are in the books, unless nothing has come since to learn
    /// more from the same.
    pub fn learn_from(&mut self, written: &Arc<Vec<Allocated>>, pods: &Pods) {
        let known = (self.n_kept, pods.n_arrived(), pods.n_left());
        if self
            .learnt
            .as_ref()
            .is_some_and(|learnt| Arc::ptr_eq(&learnt.written, written) && learnt.known == known)
        {
            return;
        }
        self.learn(written, pods);
        self.learnt = Some(Learnt {
            written: Arc::clone(written),
            known,
        });
    }

    /// Takes in for whom kubelet has written down the answers that are in the books.
    pub fn learn(&mut self, written: &[Allocated], pods: &Pods) {
        for entry in written {
            let Some(answer) = self.answers.get_mut(entry.resource, &entry.ids) else {
                continue;
            };
            let accounted = answer.pod.get_or_insert_with(|| entry.pod.clone()).clone();
            if accounted == entry.pod {
                self.enter(entry, pods);
                if !self.proven.contains(&accounted) {
                    self.proven.insert(accounted);
                }
                continue;
            }
            // What is proven once stays so: kubelet clears away late what it has written down of pods that have ended.
            if self.proven.contains(&accounted) || self.proven.contains(&entry.pod) {
                continue;
            }
            let real = pods.get(&entry.pod).filter(|pod| pod.stage != Stage::Terminal);
            if let Some(step) = real.and_then(|pod| entry.step(pod)) {
                self.transpose(&accounted, &entry.pod, step, pods);
                self.proven.insert(entry.pod.clone());
            }
        }
    }

    /// Enters a call that was answered before its pod was known.
    fn enter(&mut self, entry: &Allocated, pods: &Pods) {
        let Some(step) = pods.get(&entry.pod).and_then(|pod| entry.step(pod)) else {
            return;
        };
        let steps = self.steps.entry(entry.pod.clone()).or_default();
        if !steps
            .iter()
            .any(|known| (known.container, known.resource) == (step.container, step.resource))
        {
            steps.push(step);
        }
    }

    /// The calls that were accounted to `mistaken` were those of `real`; the other way round is as likely as anything.
    fn transpose(&mut self, mistaken: &PodUid, real: &PodUid, step: Step, pods: &Pods) {
        self.preferred = None;
        self.seen_left = None;
        let (moved, back) = (
            self.steps.remove(mistaken).unwrap_or_default(),
            self.steps.remove(real).unwrap_or_default(),
        );
        let explained = |uid: &PodUid, steps: &[Step]| {
            pods.get(uid)
                .and_then(|pod| explain(pod, steps, self.serves()))
                .unwrap_or_default()
        };
        let (mut moved, back) = (explained(real, &moved), explained(mistaken, &back));
        if !moved
            .iter()
            .any(|known| (known.container, known.resource) == (step.container, step.resource))
        {
            moved = vec![step];
        }
        self.steps.insert(real.clone(), moved);
        if !back.is_empty() {
            self.steps.insert(mistaken.clone(), back);
        }
        self.account_answers_anew(mistaken, real);
        if are_alike(pods, mistaken, real) {
            self.plan.swap(mistaken, real);
        }
        self.doubtful.remove(real);
        let admitting = self
            .admitting
            .take()
            .map(|uid| if uid == *mistaken { real.clone() } else { uid });
        self.admitting = admitting.filter(|uid| pods.get(uid).is_some_and(|pod| !self.is_complete(pod)));
    }

    /// The two pods have exchanged their records.
    pub fn exchanged(&mut self, one: &PodUid, other: &PodUid) {
        self.seen_left = None;
        self.plan.exchanged(one, other);
    }

    /// Until the two have exchanged their records, neither may be answered with its own.
    pub fn plan_exchange(&mut self, one: &PodUid, other: &PodUid) {
        self.preferred = None;
        self.seen_left = None;
        if self.plan.record_of(one) == one && self.plan.record_of(other) == other {
            self.plan.swap(one, other);
        }
    }

    /// One of the pod's containers is let start, so all its calls have been answered.
    pub fn confirm(&mut self, uid: &PodUid) {
        self.confirmed.insert(uid.clone());
    }

    /// The container that holds these IDs, sorted, is let start.
    pub fn start(&mut self, resource: ExtendedResource, ids: &[String]) {
        if self.started.len() < MAX_ANSWERS {
            self.started.insert((resource, ids.to_vec()));
        }
    }

    /// Whether this process has let the container start that holds these IDs.
    pub fn has_let_start(&self, entry: &Allocated) -> bool {
        self.started.contains(&(entry.resource, entry.ids.clone()))
    }

    /// Forgets starts of containers that kubelet has not written down any more.
    pub fn forget_starts(&mut self, written: &[Allocated]) {
        let kept: BTreeSet<(ExtendedResource, &[String])> = written
            .iter()
            .map(|entry| (entry.resource, entry.ids.as_slice()))
            .collect();
        self.started
            .retain(|(resource, ids)| kept.contains(&(*resource, ids.as_slice())));
    }

    /// Whether one of the pod's containers was let start.
    pub fn is_confirmed(&self, uid: &PodUid) -> bool {
        self.confirmed.contains(uid)
    }

    /// Whether a call was accounted to the pod.
    pub fn is_answered(&self, uid: &PodUid) -> bool {
        !self.steps(uid).is_empty()
    }

    /// Whether the pod has been answered for, as far as this process can tell, and kubelet has not said that it was this pod.
    pub fn is_answered_unproven(&self, uid: &PodUid) -> bool {
        !self.steps(uid).is_empty() && !self.proven.contains(uid) && !self.answered_before.contains(uid)
    }

    /// Whether kubelet had written down answers for the pod before this process began, which may have let it start since.
    pub fn is_from_before(&self, uid: &PodUid) -> bool {
        self.answered_before.contains(uid)
    }

    /// Takes in what has become of pods.
    pub fn observe(&mut self, pods: &Pods) {
        if self.seen_left.replace(pods.n_left()) == Some(pods.n_left()) {
            return;
        }
        let is_there = |uid: &PodUid| pods.get(uid).is_some();
        self.steps.retain(|uid, _| is_there(uid));
        self.answers
            .retain(|answer| answer.pod.as_ref().is_none_or(is_there));
        for set in [
            &mut self.doubtful,
            &mut self.inherited,
            &mut self.answered_before,
            &mut self.proven,
            &mut self.confirmed,
        ] {
            set.retain(is_there);
        }
        self.plan
            .forget_gone(|uid| pods.get(uid).is_some_and(|pod| pod.stage != Stage::Terminal));
    }

    /// Whether every call that the pod is due for has been answered.
    pub fn is_complete(&self, pod: &NodePod) -> bool {
        let steps = self.steps(&pod.uid);
        let is_answered = |container, resource| {
            steps
                .iter()
                .any(|step| step.container == container && step.resource == resource)
        };
        let mut due = pod.containers.iter().enumerate().flat_map(|(idx, container)| {
            let asked = self
                .serves()
                .iter()
                .copied()
                .filter(|resource| resource.count(container) > 0);
            asked.map(move |resource| (idx, resource))
        });
        !steps.is_empty() && due.all(|(idx, resource)| is_answered(idx, resource))
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

    /// Whose record the pod is to be answered with.
    pub(super) fn record_of<'a>(&'a self, uid: &'a PodUid) -> &'a PodUid {
        self.plan.record_of(uid)
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

/// Whether two pods ask for the same, so that exchanging their records changes no device's sums.
fn are_alike(pods: &Pods, one: &PodUid, other: &PodUid) -> bool {
    pods.get(one)
        .zip(pods.get(other))
        .is_some_and(|(one, other)| one.asks_like(other))
}

fn sorted(ids: &[String]) -> Vec<String> {
    let mut ids = ids.to_vec();
    ids.sort_unstable();
    ids
}
