//! Verifies before a container starts that it will see the devices of its pod's record, and that these devices are healthy and
//! have capacity for the pod. `verify_start` reads the facts of one moment from the node's state; all that it calls is pure.

pub(crate) mod capacity;
pub(crate) mod container;
pub(crate) mod owner;
pub(crate) mod snapshot;

use std::collections::{BTreeMap, BTreeSet};

use proto::device::TYPE_GPU;
use proto::kubelet::deviceplugin::ContainerAllocateResponse;
use proto::memory_unit::MemoryUnit;
use proto::pod::ALL_DEVICES;
use proto::record::VISIBLE_DEVICES;

use crate::devices::extended_resource::ExtendedResource;
use crate::devices::fleet::{NodeFleet, Unavailable, type_name};
use crate::devices::inventory::PhysicalId;
use crate::inject::cdi::device_of;
use crate::inject::content;
use crate::node::kubelet_checkpoint::Allocated;
use crate::node::pods::{NodePod, NodePods, Placement, PodStage, PodUid, Unplaced};
use crate::start::matching::AllocateLog;
use crate::start::node_state::NodeState;

use capacity::NoCapacity;
use container::StartingContainer;
use owner::{KubeletSnapshot, OwnerUnknown};

/// The reason that a container must not start. kubelet tries again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum StartRefusal {
    #[error("{0}; delete the pod to reschedule it")]
    Unplaced(String),
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
    #[error(transparent)]
    NoCapacity(#[from] NoCapacity),
    #[error(
        "kubelet allocated {seen}, but the scheduler assigned {recorded}; delete the pod to reschedule it"
    )]
    Mismatch { seen: String, recorded: String },
    #[error(
        "container {container:?} sets {variable}, which is not allowed in a pod that shares devices: it would override {given:?}, which is \
         counted for it; remove it from the pod, or run this node's plugin with --inject=cdi"
    )]
    Overridden {
        container: String,
        variable: String,
        given: String,
    },
    #[error(
        "container {container:?} sets {variable}, which is not allowed in a pod that shares devices; remove it from the pod"
    )]
    SetsLimit { container: String, variable: String },
    #[error(
        "container {container:?} sets {variable}, and this node's runtime has not been seen reading CDI specs yet: without CDI the variable \
         could show it GPUs that are not counted for it; remove it from the pod"
    )]
    OverridesVoid { container: String, variable: String },
    #[error(
        "annotation {ALL_DEVICES}: this node's device plugin runs without --allow-all-devices, so that no pod sees all GPUs uncounted; remove \
         the annotation and request amounts, or set the flag on the scheduler and its device plugins"
    )]
    AllDevicesForbidden,
    #[error(
        "annotation {ALL_DEVICES} counts only where the record names every healthy GPU of the node: {recorded} is recorded, {unnamed} is not; \
         delete the pod to reschedule it"
    )]
    NotAllDevices { recorded: String, unnamed: PhysicalId },
    #[error("kubelet gave it {kept}, but its record says {recorded}; delete the pod to reschedule it")]
    Limits { kept: String, recorded: String },
    #[error(
        "the devices of the container are not known: no answer that names devices is in kubelet's checkpoint or was given by this process"
    )]
    Unknown,
}

impl StartRefusal {
    pub(crate) fn is_final(&self) -> bool {
        matches!(
            self,
            Self::Mismatch { .. } | Self::Limits { .. } | Self::NotAllDevices { .. }
        )
    }

    pub(crate) fn event_reason(&self) -> &'static str {
        self.event_reason_and_label().0
    }

    /// The reason as a label of the metric `held_containers`.
    pub(crate) fn label(&self) -> &'static str {
        self.event_reason_and_label().1
    }

    fn event_reason_and_label(&self) -> (&'static str, &'static str) {
        match self {
            Self::Unplaced(_) => ("GPUNotPlaced", "unplaced"),
            Self::Unavailable(_) => ("GPUUnavailable", "unavailable"),
            Self::NoCapacity(_) => ("GPUOvercommitted", "no_room"),
            // The record, and an answer or a variable that a container keeps for good, do not agree.
            Self::Mismatch { .. }
            | Self::NotAllDevices { .. }
            | Self::Limits { .. }
            | Self::Overridden { .. }
            | Self::SetsLimit { .. }
            | Self::OverridesVoid { .. } => ("GPUMismatch", "mismatch"),
            Self::AllDevicesForbidden => ("GPUAllDevicesForbidden", "all_devices_forbidden"),
            Self::Unknown => ("GPUNotReady", "unproven"),
        }
    }
}

/// A container that kubelet is about to start, with the result of its verification.
pub(crate) struct CheckedStart<'a> {
    pub(crate) starting: StartingContainer<'a>,
    /// The devices that the pod's containers see, as far as answers to Allocate name them.
    pub(crate) seen: VisibleByType,
    pub(crate) verified: Result<(), StartRefusal>,
    /// True if a CDI spec decides the devices of the container.
    pub(crate) is_by_spec: bool,
    /// True if a container of a running pod starts again with an answer by variable that this process did not give.
    pub(crate) is_inherited: bool,
}

/// Verifies the start of the container of pod `uid` that has these device IDs, with the facts of this moment.
pub(crate) fn verify_start<'a>(
    node: &NodeState,
    snapshot: &'a KubeletSnapshot,
    resource: ExtendedResource,
    ids: &'a [String],
    uid: &PodUid,
) -> Result<CheckedStart<'a>, OwnerUnknown> {
    let (offered, is_young) = (node.offered(), node.is_young());
    let pods = node.pods.borrow();
    let mut log = node.log();
    log.set_offered(offered);
    // kubelet's checkpoint proves which pod has which device IDs, so it corrects the log of Allocate calls before the
    // verification reads that log.
    if let Some(allocated) = &snapshot.allocated {
        log.correct_by_checkpoint(allocated, &pods);
    }
    let pod = pods.get(uid).cloned().ok_or(OwnerUnknown::NotSeen)?;
    let fleet = node.fleet.borrow();
    let allocated = snapshot.entries();
    let logged = log.response(resource, ids).cloned();
    let mut checked = CheckedStart {
        // kubelet has created all containers of a running pod before, and applies the answer of the first start again.
        is_inherited: pod.stage == PodStage::Running && logged.is_none(),
        starting: StartingContainer::find(pod, resource, ids, allocated, logged),
        seen: visible_to_pod(allocated, uid, &fleet),
        verified: Ok(()),
        is_by_spec: false,
    };
    let starting = &checked.starting;
    let answer = starting.answer();
    let own = answer.and_then(|answer| visible_by_answer(resource, answer, &fleet));
    // The answer for one resource of a container may leave the devices to the answer for another one (`names_devices`).
    if own.is_none() && (answer.is_none() || must_name_devices(starting)) {
        checked.verified = Err(StartRefusal::Unknown);
    }
    if resource.device_type() == TYPE_GPU
        && let Err(refusal) = check_all_devices(&starting.pod, &fleet, node.settings.allows_all_devices)
    {
        checked.verified = Err(refusal);
        checked.is_inherited = false;
    }
    if checked.verified.is_err() {
        return Ok(checked);
    }
    checked.is_by_spec = own == Some(Visible::BySpec);
    // No plugin but this one answers with its CDI devices, so such a container did not get its devices from another.
    checked.is_inherited &= !checked.is_by_spec;
    if let Some(own) = own {
        add_visible(&mut checked.seen, resource.device_type(), own);
    }
    let evidence = StartEvidence {
        is_checkpoint_known: snapshot.allocated.is_some(),
        is_young,
        ..StartEvidence::new(&pods, &fleet, &log, allocated, node.settings.memory_unit)
    };
    checked.verified = evidence.verify(&starting.pod, &checked.seen);
    if checked.is_by_spec && checked.verified.is_ok() && !node.is_cdi_proven() {
        checked.verified = check_variable(starting);
    }
    Ok(checked)
}

/// True if the answer for this resource has to name the container's devices, whichever container of the pod is starting.
fn must_name_devices(starting: &StartingContainer<'_>) -> bool {
    let (resource, containers) = (starting.resource, starting.containers());
    for container in &containers {
        if resource.count(container) > 0 && !content::names_devices(resource, container) {
            return false;
        }
    }
    !containers.is_empty()
}

/// Refuses a container for which the pod's spec sets the vendor's variable to anything but no GPU: a runtime that ignores CDI
/// devices would act on the value.
fn check_variable(starting: &StartingContainer<'_>) -> Result<(), StartRefusal> {
    for own in starting.pod.variables.iter() {
        // A value that is not known here (from a `ConfigMap` or a Secret) may name GPUs.
        let shows_none = matches!(own.value.as_deref(), Some("" | "void" | "none"));
        if own.name == VISIBLE_DEVICES && !shows_none && starting.may_be(&own.container) {
            let (container, variable) = (own.container.clone(), own.name.clone());
            return Err(StartRefusal::OverridesVoid { container, variable });
        }
    }
    Ok(())
}

/// Checks a pod whose annotation asks to see all GPUs: its author may have written both annotation and record.
fn check_all_devices(pod: &NodePod, fleet: &NodeFleet, is_allowed: bool) -> Result<(), StartRefusal> {
    if !pod.sees_all {
        return Ok(());
    }
    if !is_allowed {
        return Err(StartRefusal::AllDevicesForbidden);
    }
    // The verification refuses a pod without a usable record, and names the reason.
    let Ok(placement) = &pod.placement else {
        return Ok(());
    };
    // The record need not name an unhealthy GPU: the scheduler assigns none.
    for entry in &fleet.gpus {
        if entry.is_healthy && !placement.has_gpu(&entry.device) {
            return Err(StartRefusal::NotAllDevices {
                recorded: placement.to_string(),
                unnamed: entry.device.uuid.clone(),
            });
        }
    }
    Ok(())
}

pub(crate) type DevicesByType = BTreeMap<&'static str, BTreeSet<PhysicalId>>;

/// The facts that a verification depends on, all of one moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StartEvidence<'a> {
    /// The pods, each with the record that counts for it: that of a swap before that of its annotations.
    pub(crate) pods: &'a NodePods,
    pub(crate) fleet: &'a NodeFleet,
    pub(crate) log: &'a AllocateLog,
    pub(crate) allocated: &'a [Allocated],
    /// False if the checkpoint could not be read: the devices of pods for which an earlier process answered are unknown then.
    pub(crate) is_checkpoint_known: bool,
    /// [`NodeState::is_young`]: the API server may not show yet which pods an earlier process let start.
    pub(crate) is_young: bool,
    pub(crate) unit: MemoryUnit,
}

impl<'a> StartEvidence<'a> {
    /// The evidence of a process that has run for long and reads kubelet's checkpoint.
    pub(crate) fn new(
        pods: &'a NodePods,
        fleet: &'a NodeFleet,
        log: &'a AllocateLog,
        allocated: &'a [Allocated],
        unit: MemoryUnit,
    ) -> Self {
        Self {
            pods,
            fleet,
            log,
            allocated,
            is_checkpoint_known: true,
            is_young: false,
            unit,
        }
    }

    /// Verifies that the devices which a pod's containers see are those of its record, are healthy, and have capacity for it.
    pub(crate) fn verify(&self, pod: &NodePod, seen: &VisibleByType) -> Result<(), StartRefusal> {
        let placement = match &pod.placement {
            Ok(placement) => placement,
            Err(unplaced) => return Err(StartRefusal::Unplaced(unplaced.to_string())),
        };
        // Allocation: no container of the pod may have been given other devices than the record names.
        let recorded = self.recorded_devices(pod, placement)?;
        let mismatch = |seen: String| StartRefusal::Mismatch {
            seen,
            recorded: placement.to_string(),
        };
        let fixed = fixed_devices(seen, &recorded).map_err(mismatch)?;
        if !differing_types(&fixed, &recorded).is_empty() {
            let ids: Vec<&str> = fixed.values().flatten().map(PhysicalId::as_str).collect();
            return Err(mismatch(ids.join(",")));
        }
        // Health: `resolve` fails on a device that is unhealthy or not shared.
        for resource in self.requested(pod) {
            match self.fleet.resolve(resource, placement.names(resource)) {
                // The pod started before the operator took the GPU out of sharing.
                Err(Unavailable::NotShared(_)) if pod.stage == PodStage::Running => {}
                resolved => drop(resolved?),
            }
        }
        // Capacity: the plugin sums up the amounts of all pods itself, since the scheduler may have counted something else.
        Ok(self.check_capacity(&pod.uid)?)
    }

    /// The resources that the pod requests and this plugin serves.
    fn requested(&self, pod: &NodePod) -> impl Iterator<Item = ExtendedResource> {
        let offered = self.log.offered().iter().copied();
        offered.filter(|resource| pod.asks_for(*resource))
    }

    /// The devices that a pod's record names, healthy or not, with their virtual functions, for each type that the pod requests.
    pub(crate) fn recorded_devices(
        &self,
        pod: &NodePod,
        placement: &Placement,
    ) -> Result<DevicesByType, StartRefusal> {
        let mut recorded = DevicesByType::new();
        for resource in self.requested(pod) {
            let names = placement.names(resource);
            if names.is_empty() {
                let unplaced = Unplaced::NoDevice(resource.device_type());
                return Err(StartRefusal::Unplaced(unplaced.to_string()));
            }
            let mut ids = BTreeSet::new();
            for name in names {
                let Some(key) = self.fleet.find(resource, name) else {
                    return Err(StartRefusal::Unplaced(format!(
                        "its record names {placement}, which this node does not have"
                    )));
                };
                ids.insert(key.id);
            }
            ids.extend(placement.virtual_functions(resource).cloned());
            recorded.insert(resource.device_type(), ids);
        }
        Ok(recorded)
    }

    /// Checks that the devices of the pod's record have capacity for it beside the pods that come before it.
    pub(crate) fn check_capacity(&self, uid: &PodUid) -> Result<(), NoCapacity> {
        // Two pods that do not fit together both wait while this process is young: an earlier one may have let either start.
        let may_run =
            |other: &PodUid| self.is_young && other != uid && self.log.answered_before.contains(other);
        let has_started = |other: &PodUid| self.log.started.contains(other) || may_run(other);
        let visible_gpus = |other: &PodUid| self.visible_gpus(other);
        capacity::check(self.pods, self.fleet, self.unit, has_started, visible_gpus, uid)
    }

    fn visible_gpus(&self, uid: &PodUid) -> BTreeSet<PhysicalId> {
        match visible_to_pod(self.allocated, uid, self.fleet).remove(TYPE_GPU) {
            Some(Visible::Devices(gpus)) => gpus,
            _ => BTreeSet::new(),
        }
    }

    /// True if a container of the pod may be running, as far as this process knows.
    pub(crate) fn may_have_started(&self, pod: &NodePod) -> bool {
        pod.stage == PodStage::Running
            || self.log.started.contains(&pod.uid)
            || self.log.answered_before.contains(&pod.uid)
    }
}

/// The devices that answers to Allocate fixed for as long as the pod lives, of the types that its record names; an error if the
/// answers name something that is no device of this node, or contradict each other. A CDI spec fixes none, as it is written for
/// the record.
pub(crate) fn fixed_devices(seen: &VisibleByType, recorded: &DevicesByType) -> Result<DevicesByType, String> {
    let mut fixed = DevicesByType::new();
    for (device_type, visible) in seen {
        match visible {
            // The pod requests no such device of this plugin: another plugin has given it.
            _ if !recorded.contains_key(*device_type) => {}
            Visible::Unclear(problem) => return Err(problem.clone()),
            Visible::Devices(devices) => drop(fixed.insert(device_type, devices.clone())),
            Visible::BySpec => {}
        }
    }
    Ok(fixed)
}

/// The device types of which the pod sees other devices than recorded.
pub(crate) fn differing_types(fixed: &DevicesByType, recorded: &DevicesByType) -> Vec<&'static str> {
    let mut differing = Vec::new();
    for (device_type, devices) in fixed {
        if recorded.get(device_type) != Some(devices) {
            differing.push(*device_type);
        }
    }
    differing
}

/// The devices of one type that a pod's containers see by the answers to Allocate, which kubelet applies as long as they live.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Visible {
    /// The devices that the CDI spec names when the runtime creates the container.
    BySpec,
    /// These devices, and virtual functions of them, for as long as the containers live.
    Devices(BTreeSet<PhysicalId>),
    /// The answers name something that is no device of this node, or contradict each other; with the reason.
    Unclear(String),
}

/// The visible devices by device type; a type has no entry if no answer names devices of it.
pub(crate) type VisibleByType = BTreeMap<&'static str, Visible>;

/// The devices that a container sees by the answer to Allocate for one resource; none if the answer names no devices.
pub(crate) fn visible_by_answer(
    resource: ExtendedResource,
    answer: &ContainerAllocateResponse,
    fleet: &NodeFleet,
) -> Option<Visible> {
    if device_of(answer).is_some() {
        return Some(Visible::BySpec);
    }
    let variable = content::visible_variable(resource);
    let value = answer.envs.get(variable)?;
    let functions = content::functions_variable(resource).and_then(|variable| answer.envs.get(variable));
    let seen = content::named_devices(resource, value, fleet).and_then(|mut devices| {
        for function in functions.iter().flat_map(|value| value.split(',')) {
            devices.push(function.parse().ok()?);
        }
        Some(devices)
    });
    Some(match seen {
        Some(devices) => Visible::Devices(devices.into_iter().collect()),
        None => Visible::Unclear(format!(
            "{variable}={value}, which is not a list of {} devices of this node",
            type_name(resource.device_type())
        )),
    })
}

/// The devices that the containers of a pod see by the answers in kubelet's checkpoint.
pub(crate) fn visible_to_pod(allocated: &[Allocated], uid: &PodUid, fleet: &NodeFleet) -> VisibleByType {
    let mut visible = VisibleByType::new();
    for entry in allocated.iter().filter(|entry| entry.pod == *uid) {
        if let Some(seen) = visible_by_answer(entry.resource, &entry.answer, fleet) {
            add_visible(&mut visible, entry.resource.device_type(), seen);
        }
    }
    visible
}

/// Adds the devices of one more answer to Allocate; devices that differ from those before are [`Visible::Unclear`].
fn add_visible(visible: &mut VisibleByType, device_type: &'static str, seen: Visible) {
    let known = visible.entry(device_type).or_insert(Visible::BySpec);
    // A spec follows the pod's record, so it contradicts no devices that other containers of the pod were given.
    if *known == Visible::BySpec {
        *known = seen;
    } else if seen != Visible::BySpec && *known != seen {
        *known = Visible::Unclear("its containers were given different devices".to_owned());
    }
}
