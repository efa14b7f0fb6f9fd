//! The pods of this node as the API server shows them, reduced to the parts that are needed to match kubelet's Allocate calls
//! with pods, and to verify a container before it starts.
//!
//! The set changes only through [`NodePods::apply`], `NodePods::delete` and [`NodePods::reset`], which [`watch`] calls, and
//! through `NodePods::set_swapped`. Annotations are parsed when the watch shows a pod, so that nothing is parsed while
//! kubelet waits.

pub mod annotate;
mod placement;
mod requests;
pub mod watch;

use std::collections::BTreeMap;
use std::sync::Arc;

use daemon::events::Subject;
use proto::device::ENFORCEMENT;
use proto::pod::{ALL_DEVICES, Pod, PodSpec, PodStatus};
use proto::pod_group::{GROUP_DOMAIN, GroupWish};
use proto::record::{DEVICE_ALLOCATED, DeviceAllocations, MEM_IDX};
use proto::request::hints::HINTS;
use proto::request::{self, ContainerKind, ContainerRequest, PodRequest};
use proto::resource::{HAMI_CORE, ISOLATION_PROVIDER, ResourceNames};
use tokio::sync::watch::Receiver;

use crate::devices::extended_resource::ExtendedResource;

pub use placement::Placement;
pub(crate) use placement::{RecordedAmounts, Unplaced};
pub(crate) use requests::WHOLE_DEVICE_PERCENT;
pub use requests::{IN_NODE_STATUS, Requests};

/// UID of a pod. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
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

/// kubelet's progress with a pod, by the pod's status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PodStage {
    /// Bound, and kubelet has not reported on the pod: kubelet may be admitting it.
    Bound,
    /// Pending, and kubelet has reported on the pod, so it is admitted.
    Admitted,
    /// The pod's containers have been started.
    Running,
    /// The pod's containers have ended, and kubelet starts none of them again.
    Terminal,
}

impl PodStage {
    /// The stage of the pod, if its annotations have a record of its devices.
    pub(crate) fn of_recorded(pod: &Pod) -> Option<Self> {
        let annotations = pod.metadata.annotations.as_ref()?;
        has_record(annotations).then(|| Self::from_status(&pod.status))
    }

    fn from_status(status: &PodStatus) -> Self {
        match status.phase.as_deref() {
            Some("Succeeded" | "Failed") => Self::Terminal,
            // The phase is unknown when the node has not reported for long; the containers may go on.
            Some("Running" | "Unknown") => Self::Running,
            _ if status.start_time.is_some() => Self::Admitted,
            _ => Self::Bound,
        }
    }
}

/// One pod of this node.
#[derive(Clone, Debug, PartialEq)]
pub struct NodePod {
    pub(crate) uid: PodUid,
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) stage: PodStage,
    pub(crate) deleting: bool,
    /// The containers that request resources for which kubelet calls this plugin, in kubelet's order.
    pub containers: Vec<ContainerRequest>,
    /// The pod's record: that of a swap, else that of its annotations; or the reason that the pod has no usable record.
    pub(crate) placement: Result<Placement, Unplaced>,
    /// True if a label of the pod requests the limits that HAMi-core enforces.
    pub(crate) is_limited: bool,
    /// The pod's requests for resources in node status ([`IN_NODE_STATUS`]), for which kubelet calls no plugin.
    pub(crate) requests: Requests,
    /// True if an annotation asks that the pod sees all GPUs of its node.
    pub(crate) sees_all: bool,
    /// Doubts about the pod's valid request, each with the reason of the event that reports it when the pod starts.
    pub(crate) doubts: Vec<(&'static str, String)>,
    /// The annotations that constrain the choice of the pod's devices.
    pub(crate) constraints: BTreeMap<&'static str, String>,
    /// The environment variables that the pod's spec sets in its containers.
    pub(crate) variables: Arc<[OwnVariable]>,
    /// ID and name of each container that the container runtime has created.
    pub created: Vec<(String, String)>,
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

/// An environment variable in a pod's spec.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OwnVariable {
    pub(crate) container: String,
    pub(crate) name: String,
    /// Value of the variable; none if it comes from elsewhere, such as a `ConfigMap`.
    pub(crate) value: Option<String>,
}

impl NodePod {
    /// Reduces a pod to the parts that the plugin needs; none if it requests no resource of the plugin, or is of another node.
    pub fn from_pod(pod: &Pod, node: &str, names: &ResourceNames) -> Option<Self> {
        if pod.spec.node_name.as_deref() != Some(node) {
            return None;
        }
        let containers = request::containers(&pod.spec, names);
        let requests = Requests::from_spec(&pod.spec);
        // A pod may request only resources in node status, for which kubelet calls no plugin.
        if containers.is_empty() && requests.is_empty() {
            return None;
        }
        let mut requested = ExtendedResource::ALL.to_vec();
        requested.retain(|resource| containers.iter().any(|container| resource.count(container) > 0));
        let labels = pod.metadata.labels.clone().unwrap_or_default();
        let annotations = pod.metadata.annotations.clone().unwrap_or_default();
        let mut constraints = BTreeMap::new();
        for key in HINTS.into_iter().chain([ENFORCEMENT, GROUP_DOMAIN]) {
            constraints.extend(annotations.get(key).map(|value| (key, value.clone())));
        }
        Some(Self {
            uid: PodUid::from(pod.metadata.uid.as_deref()?),
            namespace: namespace(pod),
            name: pod.metadata.name.clone()?,
            stage: PodStage::from_status(&pod.status),
            deleting: pod.is_deleting(),
            containers,
            placement: Placement::read(&annotations, &requested),
            is_limited: labels.get(ISOLATION_PROVIDER).map(String::as_str) == Some(HAMI_CORE),
            requests,
            sees_all: annotations.get(ALL_DEVICES).map(String::as_str) == Some("true"),
            doubts: doubts(pod, names),
            constraints,
            variables: own_variables(&pod.spec),
            created: created_containers(&pod.status),
        })
    }

    pub(crate) fn record(&self) -> Option<&Placement> {
        self.placement.as_ref().ok()
    }

    /// The time at which the scheduler assumed the pod, in unix nanoseconds; none without a usable record.
    pub fn assumed_at(&self) -> Option<u64> {
        Some(self.record()?.assumed_at)
    }

    pub(crate) fn display_name(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// The pod's container with this name, if it requests any of the plugin's resources.
    pub fn container(&self, name: &str) -> Option<&ContainerRequest> {
        self.containers.iter().find(|container| container.name == name)
    }

    /// True if the two pods can swap their records without a change of the amounts that are held of any device.
    pub(crate) fn can_swap_with(&self, other: &Self) -> bool {
        self.n_recorded_gpus() == other.n_recorded_gpus()
            && self.other_device_amounts() == other.other_device_amounts()
            && self.requests == other.requests
            && self.constraints == other.constraints
            && ExtendedResource::ALL
                .iter()
                .all(|resource| self.peak(*resource) == other.peak(*resource))
    }

    fn n_recorded_gpus(&self) -> usize {
        self.record().map_or(0, |placement| placement.gpus.len())
    }

    /// The percent and the number of virtual functions that the record names of each device other than a GPU, by device type.
    fn other_device_amounts(&self) -> BTreeMap<&'static str, Vec<(u64, usize)>> {
        let mut by_type = BTreeMap::new();
        for (device_type, others) in self.placement.iter().flat_map(|placement| &placement.others) {
            let mut amounts = Vec::new();
            for portion in &others.held {
                amounts.push((portion.percent, portion.virtual_functions.len()));
            }
            amounts.sort_unstable();
            by_type.insert(*device_type, amounts);
        }
        by_type
    }

    pub(crate) fn asks_for(&self, resource: ExtendedResource) -> bool {
        let mut containers = self.containers.iter();
        containers.any(|container| resource.count(container) > 0)
    }

    /// The largest amount of a resource that the pod's containers hold at once.
    pub(crate) fn peak(&self, resource: ExtendedResource) -> u64 {
        let (mut running, mut peak) = (0_u64, 0);
        for container in &self.containers {
            let with_this = running.saturating_add(resource.count(container));
            peak = with_this.max(peak);
            // An ordinary init container has ended when the next container starts; sidecars go on.
            if container.kind != ContainerKind::Init {
                running = with_this;
            }
        }
        peak
    }
}

/// A pod of this node that uses resource claims (DRA). It may request the plugin's resources too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Claimant {
    pub(crate) uid: PodUid,
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) stage: PodStage,
}

impl Claimant {
    /// Reduces a pod of this node to its identity and stage; none if it uses no resource claims.
    pub(crate) fn from_pod(pod: &Pod) -> Option<Self> {
        pod.uses_claims().then_some(())?;
        Some(Self {
            uid: PodUid::from(pod.metadata.uid.as_deref()?),
            namespace: namespace(pod),
            name: pod.metadata.name.clone()?,
            stage: PodStage::from_status(&pod.status),
        })
    }
}

fn namespace(pod: &Pod) -> String {
    pod.metadata.namespace.as_deref().unwrap_or("default").to_owned()
}

/// Returns once the API server has sent the pods of this node; never if the watch of them ends before.
pub(crate) async fn until_known(pods: &mut Receiver<NodePods>) {
    if pods.wait_for(NodePods::is_synced).await.is_err() {
        // The end of the watch ends the process, so the caller need not go on.
        std::future::pending::<()>().await;
    }
}

/// True if the annotations have a record, in Koordinator's or gpushare's dialect.
pub(crate) fn has_record(annotations: &BTreeMap<String, String>) -> bool {
    annotations.contains_key(DEVICE_ALLOCATED) || annotations.contains_key(MEM_IDX)
}

/// Doubts about the pod's request; none about amounts that break a rule.
fn doubts(pod: &Pod, names: &ResourceNames) -> Vec<(&'static str, String)> {
    let mut doubts = Vec::new();
    if let Ok(Some(request)) = PodRequest::read(pod, names)
        && let Some(gpus) = request.gpus
        && let Some(text) = gpus.warning()
    {
        doubts.push(("GPUMemoryTiny", text));
    }
    if let Err(error) = GroupWish::read(pod.metadata.annotations.as_ref()) {
        let text = format!(
            "{error}. The pod was placed as with the domain any: correct the annotation and create the pod again."
        );
        doubts.push(("GPUGroupDomainUnknown", text));
    }
    doubts
}

fn created_containers(status: &PodStatus) -> Vec<(String, String)> {
    let mut created = Vec::new();
    let statuses = status.init_container_statuses.iter();
    for container in statuses.chain(&status.container_statuses) {
        if let Some((_, id)) = container.container_id.split_once("://") {
            created.push((id.to_owned(), container.name.clone()));
        }
    }
    created
}

fn own_variables(spec: &PodSpec) -> Arc<[OwnVariable]> {
    let mut variables = Vec::new();
    for container in spec.init_containers.iter().chain(&spec.containers) {
        for variable in &container.env {
            variables.push(OwnVariable {
                container: container.name.clone(),
                name: variable.name.clone(),
                value: variable.own_value().map(str::to_owned),
            });
        }
    }
    variables.into()
}

/// The pods of this node that request the plugin's resources, and a few facts about its other pods.
#[derive(Clone, Debug, Default)]
pub struct NodePods {
    by_uid: BTreeMap<PodUid, NodePod>,
    /// The place of each pod in the order of arrival.
    arrivals: BTreeMap<PodUid, u64>,
    n_arrived: u64,
    n_departed: u64,
    /// The records that pods have got by swaps; none until the plugin has read them from the Device object.
    swapped: Option<BTreeMap<PodUid, DeviceAllocations>>,
    /// The record in the annotations of each pod that has got another record by a swap.
    annotated: BTreeMap<PodUid, Result<Placement, Unplaced>>,
    /// The last complete record of pods whose annotations have lost a part of their record.
    lost: BTreeMap<PodUid, Placement>,
    n_altered: u64,
    /// Pods that request none of the plugin's resources, with their stage if their annotations have a record.
    without_requests: BTreeMap<PodUid, Option<PodStage>>,
    claimants: BTreeMap<PodUid, Claimant>,
    runtime_classes: BTreeMap<PodUid, String>,
    is_synced: bool,
    is_interrupted: bool,
}

impl NodePods {
    /// Adds or replaces a pod. Returns true if that changes anything.
    pub fn apply(&mut self, mut pod: NodePod) -> bool {
        // A known pod keeps its place in the order of arrival.
        if !self.arrivals.contains_key(&pod.uid) {
            self.n_arrived += 1;
            self.arrivals.insert(pod.uid.clone(), self.n_arrived);
        }
        let mut is_changed = false;
        self.note_loss(&pod.uid, self.annotated(&pod.uid).cloned(), &pod.placement);
        // The record that a swap wrote into the Device object counts before that of the annotations: the plugin writes the
        // annotations later, so they may still name the devices from before the swap.
        if let Some(record) = self.swapped.as_ref().and_then(|swapped| swapped.get(&pod.uid)) {
            // A swapped record has no assume time, so that of the annotations counts, also after their loss.
            let lost = self.lost.get(&pod.uid).cloned().map(Ok);
            let effective = Placement::of_device_object(record, lost.as_ref().unwrap_or(&pod.placement));
            let annotated = std::mem::replace(&mut pod.placement, effective);
            is_changed = self.annotated.get(&pod.uid) != Some(&annotated);
            self.annotated.insert(pod.uid.clone(), annotated);
        }
        let before = self.by_uid.get(&pod.uid).map(|before| before.stage);
        is_changed |= self.by_uid.get(&pod.uid) != Some(&pod);
        // A pod that has ended frees its devices as a deleted one does.
        let has_ended = pod.stage == PodStage::Terminal && before != Some(PodStage::Terminal);
        self.n_departed += u64::from(has_ended);
        self.by_uid.insert(pod.uid.clone(), pod);
        is_changed
    }

    fn annotated(&self, uid: &PodUid) -> Option<&Placement> {
        let annotated = match self.annotated.get(uid) {
            Some(annotated) => annotated,
            None => &self.by_uid.get(uid)?.placement,
        };
        annotated.as_ref().ok()
    }

    /// Keeps the record in a pod's former annotations (`before`) if its present ones (`now`) lack a part of it or are unreadable,
    /// and counts a change of a running pod's record in `n_altered`.
    fn note_loss(&mut self, uid: &PodUid, before: Option<Placement>, now: &Result<Placement, Unplaced>) {
        let now = now.as_ref().ok();
        if let Some(pod) = self.by_uid.get(uid)
            && pod.stage == PodStage::Running
            && let Some(before) = &before
            && now.is_none_or(|now| !now.is_complete_copy_of(before))
        {
            self.n_altered += 1;
        }
        // An older record is more complete: annotations may lose their keys one after the other.
        let whole = self.lost.remove(uid).or(before);
        if let Some(whole) = whole
            && now.is_none_or(|now| now.lacks_annotations_of(&whole))
        {
            self.lost.insert(uid.clone(), whole);
        }
    }

    pub(crate) fn lost_record(&self, uid: &PodUid) -> Option<&Placement> {
        self.lost.get(uid)
    }

    /// A number that changes whenever the record in a running pod's annotations names other devices, or loses a part.
    pub(crate) fn n_altered(&self) -> u64 {
        self.n_altered
    }

    pub(crate) fn delete(&mut self, uid: &PodUid) {
        self.n_departed += 1;
        self.by_uid.remove(uid);
        self.arrivals.remove(uid);
        self.annotated.remove(uid);
        self.lost.remove(uid);
        self.without_requests.remove(uid);
        self.claimants.remove(uid);
        self.runtime_classes.remove(uid);
    }

    /// Adds a pod that requests none of the plugin's resources, with its stage if its annotations have a record (`recorded`).
    /// Returns true if that changes anything.
    pub(crate) fn note_without_requests(&mut self, uid: PodUid, recorded: Option<PodStage>) -> bool {
        self.without_requests.insert(uid, recorded) != Some(recorded)
    }

    /// The pods that request none of the plugin's resources although their annotations have a record, in the order of UIDs.
    pub(crate) fn recorded_without_requests(&self) -> impl Iterator<Item = (&PodUid, PodStage)> {
        let pods = self.without_requests.iter();
        pods.filter_map(|(uid, recorded)| Some((uid, (*recorded)?)))
    }

    /// Adds a pod that uses resource claims. Returns true if that changes anything.
    pub(crate) fn note_claimant(&mut self, claimant: Claimant) -> bool {
        let is_changed = self.claimants.get(&claimant.uid) != Some(&claimant);
        self.claimants.insert(claimant.uid.clone(), claimant);
        is_changed
    }

    pub(crate) fn claimants(&self) -> impl Iterator<Item = &Claimant> {
        self.claimants.values()
    }

    pub(crate) fn claimant(&self, uid: &PodUid) -> Option<&Claimant> {
        self.claimants.get(uid)
    }

    /// Adds the `RuntimeClass` of a pod, which never changes.
    pub(crate) fn note_runtime_class(&mut self, uid: PodUid, class: String) {
        self.runtime_classes.insert(uid, class);
    }

    pub(crate) fn runtime_class(&self, uid: &PodUid) -> Option<&str> {
        self.runtime_classes.get(uid).map(String::as_str)
    }

    /// True if the pod is known to request none of the plugin's resources.
    pub(crate) fn asks_for_nothing(&self, uid: &PodUid) -> bool {
        self.without_requests.contains_key(uid)
    }

    /// Replaces the set of records that pods have got by swaps, which count before those in the pods' annotations.
    pub(crate) fn set_swapped(&mut self, swapped: BTreeMap<PodUid, DeviceAllocations>) {
        // Pods that are not among the new ones have the record of their annotations again.
        for (uid, annotated) in std::mem::take(&mut self.annotated) {
            if let Some(pod) = self.by_uid.get_mut(&uid) {
                pod.placement = annotated;
            }
        }
        let pods = swapped.keys().filter_map(|uid| self.by_uid.get(uid));
        let affected: Vec<NodePod> = pods.cloned().collect();
        self.swapped = Some(swapped);
        for pod in affected {
            self.apply(pod);
        }
    }

    pub(crate) fn swapped(&self) -> Option<&BTreeMap<PodUid, DeviceAllocations>> {
        self.swapped.as_ref()
    }

    /// The pods that have got a record by a swap and whose annotations do not have it yet, with that record.
    pub(crate) fn with_old_annotations(&self) -> Vec<(NodePod, DeviceAllocations)> {
        let mut behind = Vec::new();
        for (uid, record) in self.swapped.iter().flatten() {
            let Some((pod, annotated)) = self.by_uid.get(uid).zip(self.annotated.get(uid)) else {
                continue;
            };
            if annotated.as_ref().ok().map(|annotated| &annotated.allocations) != Some(record) {
                behind.push((pod.clone(), record.clone()));
            }
        }
        behind
    }

    /// Replaces all pods by those of a complete list; new ones arrive in the order of the list.
    pub fn reset(&mut self, pods: impl IntoIterator<Item = NodePod>) {
        // Pods may have been deleted while no watch was open.
        self.n_departed += 1;
        let mut before = Vec::new();
        for uid in self.by_uid.keys() {
            if let Some(annotated) = self.annotated(uid) {
                before.push((uid.clone(), annotated.clone()));
            }
        }
        self.by_uid.clear();
        self.annotated.clear();
        self.without_requests.clear();
        self.claimants.clear();
        self.runtime_classes.clear();
        for pod in pods {
            self.apply(pod);
        }
        // Annotations may have been removed while the watch was interrupted.
        for (uid, annotated) in before {
            if let Some(pod) = self.by_uid.get(&uid) {
                let now = self.annotated.get(&uid).unwrap_or(&pod.placement).clone();
                self.note_loss(&uid, Some(annotated), &now);
            }
        }
        self.lost.retain(|uid, _| self.by_uid.contains_key(uid));
        // Pods that are still there keep their place: kubelet has seen them in that order.
        self.arrivals.retain(|uid, _| self.by_uid.contains_key(uid));
        self.is_synced = true;
    }

    pub(crate) fn arrival(&self, uid: &PodUid) -> Option<u64> {
        self.arrivals.get(uid).copied()
    }

    pub(crate) fn n_arrived(&self) -> u64 {
        self.n_arrived
    }

    /// A number that changes whenever a pod has ended or has been deleted, or may have been.
    pub(crate) fn n_departed(&self) -> u64 {
        self.n_departed
    }

    /// True once the API server has sent a complete list of pods.
    pub(crate) fn is_synced(&self) -> bool {
        self.is_synced
    }

    /// True if the set is complete and its watch is not interrupted, so that it is up to date as far as this process knows.
    pub(crate) fn is_current(&self) -> bool {
        self.is_synced && !self.is_interrupted
    }

    pub(crate) fn set_interrupted(&mut self, is_interrupted: bool) {
        self.is_interrupted = is_interrupted;
    }

    /// The pod with this UID.
    pub fn get(&self, uid: &PodUid) -> Option<&NodePod> {
        self.by_uid.get(uid)
    }

    pub(crate) fn get_live(&self, uid: &PodUid) -> Option<&NodePod> {
        self.get(uid).filter(|pod| pod.stage != PodStage::Terminal)
    }

    pub(crate) fn display_name(&self, uid: &PodUid) -> String {
        self.get(uid).map(NodePod::display_name).unwrap_or_default()
    }

    pub(crate) fn live(&self) -> impl Iterator<Item = &NodePod> {
        self.iter().filter(|pod| pod.stage != PodStage::Terminal)
    }

    /// Every pod, in the order of UIDs.
    pub fn iter(&self) -> impl Iterator<Item = &NodePod> {
        self.by_uid.values()
    }
}

#[cfg(test)]
mod tests;
