//! Verifies before a container starts that it will see the devices of its pod's record, and that they are healthy and have
//! capacity for it.
//!
//! Allocate is answered before it is known for which pod. Before a container starts kubelet calls with its exact device IDs, and
//! kubelet's own data ([`snapshot`]) shows whose they are ([`owner`]): that is proof. All but [`snapshot`], which
//! asks kubelet, is pure.

pub mod capacity;
pub mod owner;
pub mod snapshot;
pub mod visible;

use std::collections::{BTreeMap, BTreeSet};

use proto::device::TYPE_GPU;
use proto::memory_unit::MemoryUnit;
use proto::pod::ALL_DEVICES;

use crate::extended_resource::ExtendedResource;
use crate::fleet::{NodeFleet, Unavailable};
use crate::inventory::PhysicalId;
use crate::kubelet_checkpoint::Allocated;
use crate::matching::AllocateLog;
use crate::pods::{NodePod, NodePods, Placement, PodStage, PodUid, Unplaced};

use capacity::NoCapacity;
use visible::{Visible, VisibleByType, visible_to_pod};

/// The reason that a container must not start. kubelet tries again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StartRefusal {
    /// The pod has no usable record.
    #[error("{0}")]
    Unplaced(String),
    /// The record names a device that the pod cannot have.
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
    /// A device of the record has no capacity for the pod.
    #[error(transparent)]
    NoCapacity(#[from] NoCapacity),
    /// The pod sees other devices than its record names, for as long as it lives.
    #[error(
        "kubelet allocated {seen}, but the scheduler assigned {recorded}; delete the pod to reschedule it"
    )]
    Mismatch {
        /// The devices that the pod sees.
        seen: String,
        /// The devices of its record.
        recorded: String,
    },
    /// The pod's author sets a variable that contradicts the record and overrides the answer to Allocate.
    #[error(
        "container {container:?} sets {variable}, which is not allowed in a pod that shares devices: it would override {given:?}, which is \
         counted for it; remove it from the pod, or run this node's plugin with --inject=cdi"
    )]
    Overridden {
        /// The container.
        container: String,
        /// The variable.
        variable: String,
        /// The value that is counted for the container.
        given: String,
    },
    /// The pod's author sets a variable by which the driver limits containers.
    #[error("container {container:?} sets {variable}, which is not allowed in a pod that shares devices")]
    SetsLimit {
        /// The container.
        container: String,
        /// The variable.
        variable: String,
    },
    /// The pod's author sets the vendor's variable, and the runtime has not been seen to act on CDI devices.
    #[error(
        "container {container:?} sets {variable}, and this node's runtime has not been seen reading CDI specs yet: without CDI the variable \
         could show it GPUs that are not counted for it; remove it from the pod"
    )]
    OverridesVoid {
        /// The container.
        container: String,
        /// The variable.
        variable: String,
    },
    /// The pod is marked to see all GPUs, which the operator has not allowed.
    #[error(
        "annotation {ALL_DEVICES}: this node's device plugin runs without --allow-all-devices, so that no pod sees all GPUs uncounted; remove \
         the annotation and request amounts, or set the flag on the scheduler and its device plugins"
    )]
    AllDevicesForbidden,
    /// The pod is marked to see all GPUs, and its record names fewer: it would see the others without being charged for them.
    #[error(
        "annotation {ALL_DEVICES} counts only where the record names every healthy GPU of the node: {recorded} is recorded, {unnamed} is not; \
         delete the pod to reschedule it"
    )]
    NotAllDevices {
        /// The devices of the record.
        recorded: String,
        /// The first GPU that the record does not name.
        unnamed: PhysicalId,
    },
    /// The pod has other limits than its record, for as long as it lives.
    #[error("kubelet gave it {kept}, but its record says {recorded}; delete the pod to reschedule it")]
    Limits {
        /// The limits of the answer to Allocate.
        kept: String,
        /// The limits of the record.
        recorded: String,
    },
    /// The devices that the container would see are not known.
    #[error(
        "the devices of the container are not known: no answer that names devices is in kubelet's checkpoint or was given by this process"
    )]
    Unknown,
}

impl StartRefusal {
    /// True if another try cannot succeed.
    pub fn is_final(&self) -> bool {
        matches!(
            self,
            Self::Mismatch { .. } | Self::Limits { .. } | Self::NotAllDevices { .. }
        )
    }

    /// The reason of the pod's event.
    pub fn event_reason(&self) -> &'static str {
        match self {
            Self::Unplaced(_) => "GPUNotPlaced",
            Self::Unavailable(_) => "GPUUnavailable",
            Self::NoCapacity(_) => "GPUOvercommitted",
            Self::Mismatch { .. }
            | Self::NotAllDevices { .. }
            | Self::Limits { .. }
            | Self::Overridden { .. }
            | Self::SetsLimit { .. }
            | Self::OverridesVoid { .. } => "GPUMismatch",
            Self::AllDevicesForbidden => "GPUAllDevicesForbidden",
            Self::Unknown => "GPUNotReady",
        }
    }
}

/// Checks a pod that is marked to see all GPUs of its node against the operator's setting and its record. Both mark and record
/// are annotations, which the pod's author may have written.
///
/// # Errors
/// The pod may not see all GPUs.
pub fn check_all_devices(pod: &NodePod, fleet: &NodeFleet, is_allowed: bool) -> Result<(), StartRefusal> {
    if !pod.sees_all {
        return Ok(());
    }
    if !is_allowed {
        return Err(StartRefusal::AllDevicesForbidden);
    }
    // A pod without a usable record is refused for that.
    let Ok(placement) = &pod.placement else {
        return Ok(());
    };
    for entry in fleet.gpus.iter().filter(|entry| entry.is_healthy) {
        if !placement.has_gpu(&entry.gpu) {
            return Err(StartRefusal::NotAllDevices {
                recorded: placement.to_string(),
                unnamed: entry.gpu.uuid.clone(),
            });
        }
    }
    Ok(())
}

/// Device IDs by device type.
pub type DevicesByType = BTreeMap<&'static str, BTreeSet<PhysicalId>>;

/// Everything that a verification depends on.
#[derive(Clone, Copy, Debug)]
pub struct StartEvidence<'a> {
    /// The pods with their effective records.
    pub pods: &'a NodePods,
    /// The devices.
    pub fleet: &'a NodeFleet,
    /// The answered Allocate calls.
    pub log: &'a AllocateLog,
    /// kubelet's checkpoint.
    pub allocated: &'a [Allocated],
    /// False if the checkpoint could not be read: then the devices of pods that this process has not answered for are unknown.
    pub is_checkpoint_known: bool,
    /// True if this process has begun only now, so that the API server may not show yet which pods an earlier one let start.
    pub is_young: bool,
    /// Bytes of a memory unit.
    pub unit: MemoryUnit,
}

impl StartEvidence<'_> {
    /// Verifies that the pod, whose containers see `seen` as far as the answers for them say, sees the devices of its record, and
    /// that these are healthy and have capacity for it.
    ///
    /// # Errors
    /// No container of the pod may start.
    pub fn verify(&self, pod: &NodePod, seen: &VisibleByType) -> Result<(), StartRefusal> {
        let placement = pod
            .placement
            .as_ref()
            .map_err(|unplaced| StartRefusal::Unplaced(unplaced.to_string()))?;
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
        for resource in self.requested(pod) {
            match self.fleet.resolve(resource, placement.names(resource)) {
                // The pod started before the operator took the GPU out of sharing.
                Err(Unavailable::NotShared(_)) if pod.stage == PodStage::Running => {}
                resolved => drop(resolved?),
            }
        }
        self.check_capacity(&pod.uid)?;
        Ok(())
    }

    /// The resources of the plugin that the pod requests.
    fn requested(&self, pod: &NodePod) -> impl Iterator<Item = ExtendedResource> {
        let offered = self.log.offered().iter().copied();
        offered.filter(|resource| pod.asks_for(*resource))
    }

    /// The devices of a pod's record, of the types that it requests, unhealthy ones included, with their virtual functions.
    ///
    /// # Errors
    /// The record names none of a type, or one that is not on this node.
    pub fn recorded_devices(
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
            ids.extend(placement.functions(resource).cloned());
            recorded.insert(resource.device_type(), ids);
        }
        Ok(recorded)
    }

    /// Checks that the devices of the pod's record have capacity for it beside the pods that come before it.
    ///
    /// # Errors
    /// The first device without capacity.
    pub fn check_capacity(&self, uid: &PodUid) -> Result<(), NoCapacity> {
        let has_started = |other: &PodUid| {
            let may_run = self.is_young && other != uid && self.log.was_answered_before(other);
            self.log.has_started(other) || may_run
        };
        let visible_gpus = |other: &PodUid| {
            let mut seen = visible_to_pod(self.allocated, other, self.fleet);
            match seen.remove(TYPE_GPU) {
                Some(Visible::Devices(gpus)) => gpus,
                _ => BTreeSet::new(),
            }
        };
        capacity::check(self.pods, self.fleet, self.unit, has_started, visible_gpus, uid)
    }

    /// True if a container of the pod may be running, as far as this process knows.
    pub fn may_have_started(&self, pod: &NodePod) -> bool {
        pod.stage == PodStage::Running
            || self.log.has_started(&pod.uid)
            || self.log.was_answered_before(&pod.uid)
    }
}

/// The devices that the pod's containers see for as long as they live, of the types that its record names.
///
/// # Errors
/// The answers name no devices of this node, or different ones.
pub fn fixed_devices(seen: &VisibleByType, recorded: &DevicesByType) -> Result<DevicesByType, String> {
    let mut fixed = DevicesByType::new();
    for (device_type, visible) in seen {
        match visible {
            _ if !recorded.contains_key(*device_type) => {}
            Visible::Unclear(problem) => return Err(problem.clone()),
            Visible::Devices(devices) => drop(fixed.insert(device_type, devices.clone())),
            Visible::BySpec => {}
        }
    }
    Ok(fixed)
}

/// The types of which the two name other devices.
pub fn differing_types(fixed: &DevicesByType, recorded: &DevicesByType) -> Vec<&'static str> {
    let differing = fixed
        .iter()
        .filter(|(device_type, devices)| recorded.get(*device_type) != Some(*devices));
    differing.map(|(device_type, _)| *device_type).collect()
}
