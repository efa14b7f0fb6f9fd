//! Fields of Pod objects, as the scenarios, the checks and the models read them.
//!
//! Almost every field of the typed objects is optional, and an absent one means the same as an empty one.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, ContainerStatus, Pod, PodCondition};
use kube::ResourceExt;
use proto::record::{DEVICE_ALLOCATED, DeviceAllocations};

/// A pod's phase.
pub fn phase(pod: &Pod) -> &str {
    let status = pod.status.as_ref();
    status
        .and_then(|status| status.phase.as_deref())
        .unwrap_or("Unknown")
}

/// True if the pod's containers have ended for good, so that it holds nothing.
pub fn has_ended(pod: &Pod) -> bool {
    matches!(phase(pod), "Succeeded" | "Failed")
}

/// True if all containers of a pod have started.
pub fn is_running(pod: &Pod) -> bool {
    let mut statuses = container_statuses(pod).peekable();
    phase(pod) == "Running"
        && statuses.peek().is_some()
        && statuses.all(|status| status.started == Some(true) || status.ready)
}

/// The node that a pod is bound to.
pub fn node_of(pod: &Pod) -> Option<&str> {
    let name = pod.spec.as_ref()?.node_name.as_deref()?;
    (!name.is_empty()).then_some(name)
}

/// The init containers and the app containers.
pub fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    let specs = pod.spec.iter();
    specs.flat_map(|spec| spec.init_containers.iter().flatten().chain(&spec.containers))
}

/// The statuses of the app containers.
pub fn container_statuses(pod: &Pod) -> impl Iterator<Item = &ContainerStatus> {
    pod.status
        .iter()
        .flat_map(|status| status.container_statuses.iter().flatten())
}

/// The statuses of the init containers.
pub fn init_container_statuses(pod: &Pod) -> impl Iterator<Item = &ContainerStatus> {
    pod.status
        .iter()
        .flat_map(|status| status.init_container_statuses.iter().flatten())
}

/// The condition of this type.
pub fn condition<'a>(pod: &'a Pod, kind: &str) -> Option<&'a PodCondition> {
    let mut conditions = pod.status.as_ref()?.conditions.iter().flatten();
    conditions.find(|condition| condition.type_ == kind)
}

/// The message of a pod's `PodScheduled` condition while it is false.
pub fn unscheduled_because(pod: &Pod) -> Option<&str> {
    let scheduled = condition(pod, "PodScheduled")?;
    if scheduled.status == "False" {
        scheduled.message.as_deref()
    } else {
        None
    }
}

/// The record of the pod's devices in Koordinator's annotation; empty without one.
pub fn device_record(pod: &Pod) -> Result<DeviceAllocations, serde_json::Error> {
    match pod.annotations().get(DEVICE_ALLOCATED) {
        Some(text) => serde_json::from_str(text),
        None => Ok(BTreeMap::new()),
    }
}
