//! Devices that kubelet allocated to containers for resources of other plugins, and those among them that no allocation record of
//! gpushare's scheduler names.

use std::collections::BTreeSet;
use std::fmt;

use proto::kubelet::podresources::{ListPodResourcesResponse, PodResources};
use proto::kubelet_allocations::{KubeletAllocation, KubeletAllocations, physical_id};

use crate::devices::fleet::NodeFleet;
use crate::node::pods::{NodePod, NodePods, PodStage, PodUid};

/// Devices of one resource that kubelet allocated to one container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Allocation {
    pub(crate) pod: PodKey,
    pub(crate) container: String,
    /// The resource; of a claim its DRA driver.
    pub(crate) resource: String,
    pub(crate) device_ids: Vec<String>,
    /// True if the container sees the devices of its pod's allocation record (by a CDI spec), whatever IDs kubelet allocated.
    pub(crate) sees_recorded_devices: bool,
    /// The claim, if a DRA driver serves the devices.
    pub(crate) claim: Option<Claim>,
}

impl Allocation {
    /// An allocation of a device plugin, whose container sees the devices that kubelet allocated.
    pub(super) fn new(pod: PodKey, container: String, resource: String, device_ids: Vec<String>) -> Self {
        Self {
            pod,
            container,
            resource,
            device_ids,
            sees_recorded_devices: false,
            claim: None,
        }
    }

    /// Returns true if the pod of the allocation has ended, so that it holds the devices no longer.
    pub(super) fn has_ended(&self, pods: &NodePods) -> bool {
        let Some(uid) = self.pod.uid(pods) else {
            // kubelet's checkpoint (UIDs) keeps ended pods until the next allocation; its API (names) lists only pods that exist.
            return matches!(self.pod, PodKey::Uid(_));
        };
        let stage = match (pods.get(uid), pods.claimant(uid)) {
            (Some(pod), _) => pod.stage,
            (None, Some(claimant)) => claimant.stage,
            (None, None) => return false,
        };
        stage == PodStage::Terminal
    }

    /// The entry for the Device object's annotation; none if the pod has ended, or if its record names the devices.
    fn unrecorded(&self, pods: &NodePods, fleet: &NodeFleet) -> Option<KubeletAllocation> {
        // Parts of one GPU, such as the replicas of time-slicing, have one name here.
        let mut device_ids = BTreeSet::new();
        for id in &self.device_ids {
            device_ids.insert(device_name(id, fleet));
        }
        if self.has_ended(pods) || device_ids.is_empty() {
            return None;
        }
        let uid = self.pod.uid(pods);
        // The scheduler counts the devices of a record already.
        if let Some(pod) = uid.and_then(|uid| pods.get(uid))
            && (self.sees_recorded_devices && has_recorded_gpus(pod) || is_recorded(pod, &device_ids, fleet))
        {
            return None;
        }
        Some(KubeletAllocation {
            // Without a UID the scheduler cannot find the pod, and counts the devices as used.
            pod_uid: uid.map_or("", PodUid::as_str).to_owned(),
            container_name: self.container.clone(),
            resource_name: self.resource.clone(),
            device_ids: device_ids.into_iter().collect(),
            alloc_resp: None,
        })
    }
}

/// The devices of these resources that kubelet lists. A resource may come in several parts, one for each NUMA node.
pub(super) fn plugin_allocations(
    listed: &ListPodResourcesResponse,
    resources: &BTreeSet<String>,
) -> Vec<Allocation> {
    let mut allocations = Vec::<Allocation>::new();
    for pod in &listed.pod_resources {
        for container in &pod.containers {
            for resource in resources {
                let mut device_ids = Vec::new();
                for devices in &container.devices {
                    if devices.resource_name == *resource {
                        device_ids.extend(devices.device_ids.iter().cloned());
                    }
                }
                if !device_ids.is_empty() {
                    let (pod, name) = (PodKey::of(pod), container.name.clone());
                    allocations.push(Allocation::new(pod, name, resource.clone(), device_ids));
                }
            }
        }
    }
    allocations
}

/// kubelet's name for a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PodKey {
    /// Namespace and name, in the pod-resources API.
    Named { namespace: String, name: String },
    /// The UID, in the checkpoint.
    Uid(PodUid),
}

impl PodKey {
    pub(super) fn of(pod: &PodResources) -> Self {
        Self::Named {
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
        }
    }

    /// The UID of the pod, if the plugin knows the pod: it requests a resource of this plugin or, looked up by name, uses claims.
    pub(crate) fn uid<'a>(&self, pods: &'a NodePods) -> Option<&'a PodUid> {
        let (namespace, name) = match self {
            Self::Uid(uid) => return Some(&pods.get(uid)?.uid),
            Self::Named { namespace, name } => (namespace, name),
        };
        let (mut known, mut claimants) = (pods.iter(), pods.claimants());
        if let Some(pod) = known.find(|pod| pod.name == *name && pod.namespace == *namespace) {
            return Some(&pod.uid);
        }
        let claimant = claimants.find(|other| other.name == *name && other.namespace == *namespace)?;
        Some(&claimant.uid)
    }
}

/// The name of a `ResourceClaim`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ClaimName {
    pub(crate) namespace: String,
    pub(crate) name: String,
}

impl fmt::Display for ClaimName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// A device as its driver publishes it; unique in the cluster.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct DraDevice {
    pub(crate) driver: String,
    /// The pool of the driver, which is the node's name for devices of one node.
    pub(crate) pool: String,
    pub(crate) name: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Claim {
    pub(crate) name: ClaimName,
    pub(crate) device: DraDevice,
    /// True if the device is known to be one of the GPUs, or a part of one. If not, every GPU counts as allocated.
    pub(crate) is_mapped: bool,
}

/// The devices of those `allocations` that no allocation record of gpushare's scheduler names.
pub(crate) fn unrecorded(
    allocations: &[Allocation],
    pods: &NodePods,
    fleet: &NodeFleet,
) -> KubeletAllocations {
    let mut entries = BTreeSet::new();
    for allocation in allocations {
        entries.extend(allocation.unrecorded(pods, fleet));
    }
    KubeletAllocations {
        entries: entries.into_iter().collect(),
    }
}

/// The UUID of the GPU for which a vendor's device ID stands; if that is no known GPU, the physical device's part of the ID.
pub(super) fn device_name(id: &str, fleet: &NodeFleet) -> String {
    let physical = physical_id(id);
    // NVIDIA's plugin may list an index such as `0`, or `0:1` for an instance of that GPU.
    let (index, _) = physical.split_once(':').unwrap_or((physical, ""));
    let mut gpus = fleet.gpus.iter();
    match gpus.find(|entry| index.parse() == Ok(entry.device.index)) {
        Some(entry) => entry.device.uuid.to_string(),
        None => physical.to_owned(),
    }
}

fn has_recorded_gpus(pod: &NodePod) -> bool {
    pod.record().is_some_and(|record| !record.gpus.is_empty())
}

fn is_recorded(pod: &NodePod, device_ids: &BTreeSet<String>, fleet: &NodeFleet) -> bool {
    let Ok(placement) = &pod.placement else {
        return false;
    };
    for id in device_ids {
        let Ok(uuid) = id.parse() else { return false };
        if !fleet.gpu(&uuid).is_some_and(|gpu| placement.has_gpu(gpu)) {
            return false;
        }
    }
    true
}
