//! The pods of this node as the API server tells them, reduced to what identity and accounting need.
//!
//! A set that changes only through [`Pods::apply`], [`Pods::delete`] and [`Pods::reset`]; the watch
//! that feeds it is in `pods/watch.rs`. What a pod's annotations mean is read once, here, when the
//! pod arrives: nothing is parsed while kubelet waits.

mod placement;
mod requests;

pub mod watch;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

use daemon::events::Subject;
use proto::pod::{ALL_DEVICES, Container, Pod, PodSpec, PodStatus, Variable};
use proto::record::{DEVICE_ALLOCATED, DeviceAllocations, MEM_IDX};
use proto::request::hints::HINTS;
use proto::request::{self, ContainerKind, ContainerRequest};
use proto::resource::{HAMI_CORE, ISOLATION_PROVIDER, ResourceNames};

use crate::extended_resource::ExtendedResource;

pub use placement::{DeviceName, Held, Others, Placement, Portion, Unplaced};
pub use requests::{IN_NODE_STATUS, Requests, WHOLE_DEVICE_PERCENT};

/// UID of a pod. Cheap to clone.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodUid(Arc<str>);

impl PodUid {
    /// The UID as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for PodUid {
    fn from(uid: &str) -> Self {
        Self(uid.into())
    }
}

impl fmt::Debug for PodUid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

/// How far kubelet has come with a pod, as far as the API server knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Bound, and kubelet has not reported anything: its admission may be under way.
    Bound,
    /// Pending, and kubelet has reported on it, which it does only after admission.
    Admitted,
    /// Its containers have been started.
    Running,
    /// Its containers have ended for good.
    Terminal,
}

impl Stage {
    /// The stage of a pod whose annotations name devices; `None` if they name none.
    pub(crate) fn of_recorded(pod: &Pod) -> Option<Self> {
        let annotations = pod.metadata.annotations.as_ref()?;
        let is_recorded = [DEVICE_ALLOCATED, MEM_IDX]
            .iter()
            .any(|key| annotations.contains_key(*key));
        is_recorded.then(|| Self::of(&pod.status))
    }

    fn of(status: &PodStatus) -> Self {
        match status.phase.as_deref() {
            Some("Succeeded" | "Failed") => Self::Terminal,
            Some("Running" | "Unknown") => Self::Running,
            _ if status.start_time.is_some() => Self::Admitted,
            _ => Self::Bound,
        }
    }
}

/// One pod of this node.
#[derive(Clone, Debug, PartialEq)]
pub struct NodePod {
    /// Its UID.
    pub uid: PodUid,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// How far kubelet has come with it.
    pub stage: Stage,
    /// Whether its deletion has been asked for.
    pub deleting: bool,
    /// What kubelet will call us for, in kubelet's order.
    pub containers: Vec<ContainerRequest>,
    /// The devices that its annotations name, or why they name none; if it has exchanged its record, what it got.
    pub placement: Result<Placement, Unplaced>,
    /// Whether its label asks for the limits that HAMi-core enforces.
    pub is_limited: bool,
    /// What it asks for of the resources in node status.
    pub requests: Requests,
    /// Whether it is marked as one that shares all GPUs of its node.
    pub sees_all: bool,
    /// How its devices were to be chosen, by annotation; a record that breaks that is none for it.
    pub hints: BTreeMap<&'static str, String>,
    /// The variables that its containers set themselves.
    pub variables: Arc<[OwnVariable]>,
}

/// A variable that the author of a pod sets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnVariable {
    /// Name of the container.
    pub container: String,
    /// Its name.
    pub name: String,
    /// Its value, if that stands in the pod itself.
    pub value: Option<String>,
}

impl From<&NodePod> for Subject {
    fn from(pod: &NodePod) -> Self {
        Self {
            kind: "Pod",
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            uid: pod.uid.as_str().to_owned(),
        }
    }
}

impl NodePod {
    /// Reduces a pod of this node; `None` if it asks for nothing of ours or is bound elsewhere.
    pub fn of(pod: &Pod, node: &str, names: &ResourceNames) -> Option<Self> {
        if pod.spec.node_name.as_deref() != Some(node) {
            return None;
        }
        let containers = request::containers(&pod.spec, names);
        let requests = Requests::of(&pod.spec);
        if containers.is_empty() && requests.is_empty() {
            return None;
        }
        let is_asked =
            |resource: &ExtendedResource| containers.iter().any(|container| resource.count(container) > 0);
        let asked: Vec<ExtendedResource> = ExtendedResource::ALL.into_iter().filter(is_asked).collect();
        let annotations = pod.metadata.annotations.clone().unwrap_or_default();
        Some(Self {
            uid: PodUid::from(pod.metadata.uid.as_deref()?),
            namespace: pod
                .metadata
                .namespace
                .clone()
                .unwrap_or_else(|| "default".to_owned()),
            name: pod.metadata.name.clone()?,
            stage: Stage::of(&pod.status),
            deleting: pod.is_deleting(),
            containers,
            placement: Placement::read(&annotations, &asked),
            is_limited: pod
                .metadata
                .labels
                .as_ref()
                .and_then(|labels| labels.get(ISOLATION_PROVIDER))
                .is_some_and(|by| by == HAMI_CORE),
            requests,
            sees_all: annotations.get(ALL_DEVICES).is_some_and(|mark| mark == "true"),
            hints: HINTS
                .into_iter()
                .filter_map(|hint| Some((hint.key, annotations.get(hint.key)?.clone())))
                .collect(),
            variables: variables(&pod.spec),
        })
    }

    /// When the scheduler assumed it, unix nanoseconds; none without a usable record.
    pub fn assumed_at(&self) -> Option<u64> {
        self.placement.as_ref().ok().map(|placement| placement.assumed_at)
    }

    /// `namespace/name`, for people.
    pub fn display_name(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// Whether both ask for the same amounts of the same number of devices, chosen in the same way, so that either could have the
    /// other's record.
    pub fn asks_like(&self, other: &Self) -> bool {
        let n_gpus = |pod: &Self| pod.placement.as_ref().map_or(0, |placement| placement.gpus.len());
        n_gpus(self) == n_gpus(other)
            && self.portions().eq(other.portions())
            && self.requests == other.requests
            && self.hints == other.hints
            && ExtendedResource::ALL.iter().all(|resource| {
                self.peak(|container| resource.count(container))
                    == other.peak(|container| resource.count(container))
            })
    }

    /// What its record gives it of devices that are no GPUs, whichever devices they are: percent, and virtual functions.
    fn portions(&self) -> impl Iterator<Item = (&'static str, Vec<(u64, usize)>)> {
        let others = self.placement.iter().flat_map(|placement| &placement.others);
        others.map(|(device_type, others)| {
            let mut portions: Vec<_> = others
                .held
                .iter()
                .map(|portion| (portion.percent, portion.functions.len()))
                .collect();
            portions.sort_unstable();
            (*device_type, portions)
        })
    }

    /// Whether it asks for anything of a resource.
    pub fn asks_for(&self, resource: ExtendedResource) -> bool {
        self.containers
            .iter()
            .any(|container| resource.count(container) > 0)
    }

    /// Most memory units that the pod's containers hold at once.
    pub fn memory_units(&self) -> u64 {
        self.peak(|container| container.memory_units)
    }

    /// Most shares that the pod's containers hold at once.
    pub fn shared(&self) -> u64 {
        self.peak(|container| container.shared)
    }

    /// Most whole GPUs that the pod's containers hold at once.
    pub fn whole(&self) -> u64 {
        self.peak(|container| container.whole)
    }

    /// Most that the pod's containers hold at once: an ordinary init container runs beside the sidecars before it.
    fn peak(&self, count: impl Fn(&ContainerRequest) -> u64) -> u64 {
        let (mut lasting, mut peak) = (0_u64, 0);
        for container in &self.containers {
            let now = lasting.saturating_add(count(container));
            peak = now.max(peak);
            if container.kind != ContainerKind::Init {
                lasting = now;
            }
        }
        peak
    }
}

/// A pod of this node that uses resource claims; it may ask for resources of ours too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claimant {
    /// Its UID.
    pub uid: PodUid,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// kubelet's progress with it.
    pub stage: Stage,
}

impl Claimant {
    /// Reduces a pod of this node; `None` if it uses no claims.
    pub fn of(pod: &Pod) -> Option<Self> {
        let (uid, namespace, name) = (
            pod.metadata.uid.as_deref()?,
            pod.metadata.namespace.clone(),
            pod.metadata.name.clone()?,
        );
        let namespace = namespace.unwrap_or_else(|| "default".to_owned());
        pod.uses_claims().then(|| Self {
            uid: PodUid::from(uid),
            namespace,
            name,
            stage: Stage::of(&pod.status),
        })
    }
}

fn variables(spec: &PodSpec) -> Arc<[OwnVariable]> {
    let of_container = |container: &Container| {
        let own = |Variable { name, value }: &Variable| OwnVariable {
            container: container.name.clone(),
            name: name.clone(),
            value: value.clone(),
        };
        container.env.iter().map(own).collect::<Vec<_>>()
    };
    spec.init_containers
        .iter()
        .chain(&spec.containers)
        .flat_map(of_container)
        .collect()
}

/// All pods of this node that ask for anything of ours.
#[derive(Clone, Debug, Default)]
pub struct Pods {
    by_uid: BTreeMap<PodUid, NodePod>,
    /// The place of each pod in the order of arrival.
    arrivals: BTreeMap<PodUid, u64>,
    n_arrived: u64,
    /// How often pods have gone or ended.
    n_left: u64,
    /// The records that pods have exchanged; none as long as nobody has looked.
    exchanged: Option<BTreeMap<PodUid, DeviceAllocations>>,
    /// What the annotations of those pods say.
    told: BTreeMap<PodUid, Result<Placement, Unplaced>>,
    /// What annotations said of pods whose annotations say less since.
    lost: BTreeMap<PodUid, Placement>,
    /// How often annotations of running pods have come to name other devices, or fewer.
    n_altered: u64,
    /// Pods of this node that ask for nothing of ours.
    idle: BTreeSet<PodUid>,
    /// Those of them whose annotations name devices all the same.
    only_recorded: BTreeMap<PodUid, Stage>,
    /// Pods of this node that use resource claims.
    claimants: BTreeMap<PodUid, Claimant>,
    is_synced: bool,
    is_interrupted: bool,
}

impl Pods {
    /// Takes in a new or changed pod; whether it says anything new.
    pub fn apply(&mut self, mut pod: NodePod) -> bool {
        self.number(&pod.uid);
        let mut is_news = false;
        self.note_loss(&pod.uid, self.told(&pod.uid).cloned(), &pod.placement);
        if let Some(record) = self
            .exchanged
            .as_ref()
            .and_then(|exchanged| exchanged.get(&pod.uid))
        {
            let lost = self.lost.get(&pod.uid).cloned().map(Ok);
            let effective = Placement::exchanged(record, lost.as_ref().unwrap_or(&pod.placement));
            let told = std::mem::replace(&mut pod.placement, effective);
            is_news = self.told.get(&pod.uid) != Some(&told);
            self.told.insert(pod.uid.clone(), told);
        }
        let before = self.by_uid.get(&pod.uid);
        is_news |= before != Some(&pod);
        let has_ended =
            pod.stage == Stage::Terminal && before.is_none_or(|before| before.stage != Stage::Terminal);
        self.n_left += u64::from(has_ended);
        self.by_uid.insert(pod.uid.clone(), pod);
        is_news
    }

    /// What a pod's annotations said last, if that could be used.
    fn told(&self, uid: &PodUid) -> Option<&Placement> {
        let told = self
            .told
            .get(uid)
            .or_else(|| self.by_uid.get(uid).map(|pod| &pod.placement));
        told.and_then(|told| told.as_ref().ok())
    }

    /// Keeps what a pod's annotations said if they say less now: somebody has removed some of them, or made them unreadable.
    fn note_loss(&mut self, uid: &PodUid, before: Option<Placement>, now: &Result<Placement, Unplaced>) {
        let is_running = self
            .by_uid
            .get(uid)
            .is_some_and(|pod| pod.stage == Stage::Running);
        let is_altered = |before: &Placement| now.as_ref().map_or(true, |now| !now.has_record_of(before));
        self.n_altered += u64::from(is_running && before.as_ref().is_some_and(is_altered));
        let whole = self.lost.remove(uid).or(before);
        if let Some(whole) = whole.filter(|whole| now.as_ref().map_or(true, |now| now.lacks_of(whole))) {
            self.lost.insert(uid.clone(), whole);
        }
    }

    /// What annotations of this pod said that they do not say any more.
    pub fn lost(&self, uid: &PodUid) -> Option<&Placement> {
        self.lost.get(uid)
    }

    /// Changes whenever annotations of a running pod come to name other devices, or fewer.
    pub fn n_altered(&self) -> u64 {
        self.n_altered
    }

    /// Forgets a pod that is gone.
    pub fn delete(&mut self, uid: &PodUid) {
        self.n_left += 1;
        self.by_uid.remove(uid);
        self.arrivals.remove(uid);
        self.told.remove(uid);
        self.lost.remove(uid);
        self.idle.remove(uid);
        self.only_recorded.remove(uid);
        self.claimants.remove(uid);
    }

    /// Notes a pod of this node that asks for nothing of ours, and its stage if its annotations name devices all the same.
    /// Returns true if that was not known before.
    pub fn note_idle(&mut self, uid: PodUid, recorded: Option<Stage>) -> bool {
        let before = match recorded {
            Some(stage) => self.only_recorded.insert(uid.clone(), stage),
            None => self.only_recorded.remove(&uid),
        };
        self.idle.insert(uid) || before != recorded
    }

    /// The pods that ask for nothing of ours and whose annotations name devices, in the order of UIDs.
    pub fn only_recorded(&self) -> impl Iterator<Item = (&PodUid, Stage)> {
        self.only_recorded.iter().map(|(uid, stage)| (uid, *stage))
    }

    /// Notes a pod that uses resource claims; returns true if it is new or has changed.
    pub fn note_claimant(&mut self, claimant: Claimant) -> bool {
        if self.claimants.get(&claimant.uid) == Some(&claimant) {
            return false;
        }
        self.claimants.insert(claimant.uid.clone(), claimant);
        true
    }

    /// The pods that use resource claims, in the order of UIDs.
    pub fn claimants(&self) -> impl Iterator<Item = &Claimant> {
        self.claimants.values()
    }

    /// The pod with this UID, if it uses resource claims.
    pub fn claimant(&self, uid: &PodUid) -> Option<&Claimant> {
        self.claimants.get(uid)
    }

    /// Returns true if the pod is known to ask for none of this plugin's resources.
    pub fn asks_for_nothing(&self, uid: &PodUid) -> bool {
        self.idle.contains(uid)
    }

    /// Takes in which records have been exchanged.
    pub fn exchange(&mut self, exchanged: BTreeMap<PodUid, DeviceAllocations>) {
        for (uid, told) in std::mem::take(&mut self.told) {
            if let Some(pod) = self.by_uid.get_mut(&uid) {
                pod.placement = told;
            }
        }
        let affected: Vec<NodePod> = exchanged
            .keys()
            .filter_map(|uid| self.by_uid.get(uid))
            .cloned()
            .collect();
        self.exchanged = Some(exchanged);
        for pod in affected {
            self.apply(pod);
        }
    }

    /// The records that have been exchanged; none as long as that is not known.
    pub fn exchanged(&self) -> Option<&BTreeMap<PodUid, DeviceAllocations>> {
        self.exchanged.as_ref()
    }

    /// Pods whose annotations do not say yet what they have got by an exchange.
    pub fn behind(&self) -> impl Iterator<Item = (&NodePod, &DeviceAllocations)> {
        let exchanged = self.exchanged.iter().flatten();
        let is_behind = |uid: &PodUid, record: &DeviceAllocations| {
            self.told
                .get(uid)
                .is_some_and(|told| told.as_ref().map_or(true, |told| told.allocations != *record))
        };
        exchanged
            .filter(move |(uid, record)| is_behind(uid, record))
            .filter_map(|(uid, record)| Some((self.by_uid.get(uid)?, record)))
    }

    /// Replaces everything by a complete list; from then on the set is in step with the API server.
    /// Pods that were not known arrive in the order of the list.
    pub fn reset(&mut self, pods: impl IntoIterator<Item = NodePod>) {
        self.n_left += 1;
        let told: Vec<(PodUid, Placement)> = self
            .by_uid
            .keys()
            .filter_map(|uid| Some((uid.clone(), self.told(uid)?.clone())))
            .collect();
        self.by_uid.clear();
        self.told.clear();
        self.idle.clear();
        self.only_recorded.clear();
        self.claimants.clear();
        for pod in pods {
            self.apply(pod);
        }
        // A pod that is listed again has come to be known anew, but what was lost meanwhile counts.
        for (uid, before) in told {
            if let Some(now) = self
                .by_uid
                .get(&uid)
                .map(|pod| self.told.get(&uid).unwrap_or(&pod.placement).clone())
            {
                self.note_loss(&uid, Some(before), &now);
            }
        }
        self.lost.retain(|uid, _| self.by_uid.contains_key(uid));
        self.arrivals.retain(|uid, _| self.by_uid.contains_key(uid));
        self.is_synced = true;
    }

    fn number(&mut self, uid: &PodUid) {
        if !self.arrivals.contains_key(uid) {
            self.n_arrived += 1;
            self.arrivals.insert(uid.clone(), self.n_arrived);
        }
    }

    /// The pod's place in the order in which pods came to be known.
    pub fn arrival(&self, uid: &PodUid) -> Option<u64> {
        self.arrivals.get(uid).copied()
    }

    /// How many pods have ever come to be known.
    pub fn n_arrived(&self) -> u64 {
        self.n_arrived
    }

    /// Changes whenever a pod has gone or ended.
    pub fn n_left(&self) -> u64 {
        self.n_left
    }

    /// Whether a complete list has been seen.
    pub fn is_synced(&self) -> bool {
        self.is_synced
    }

    /// Whether the set is in step with the API server, as far as is known.
    pub fn is_current(&self) -> bool {
        self.is_synced && !self.is_interrupted
    }

    /// Notes that the set may be out of date, or that it no longer is.
    pub fn set_interrupted(&mut self, is_interrupted: bool) {
        self.is_interrupted = is_interrupted;
    }

    /// The pod with this UID.
    pub fn get(&self, uid: &PodUid) -> Option<&NodePod> {
        self.by_uid.get(uid)
    }

    /// Every pod, in the order of UIDs.
    pub fn iter(&self) -> impl Iterator<Item = &NodePod> {
        self.by_uid.values()
    }
}

#[cfg(test)]
mod tests;
