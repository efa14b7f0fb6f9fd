//! Answers Allocate by the vendor's variable, with the devices of the pod that the call is matched with. A call waits a moment
//! for its pod, and is else answered with the devices of its IDs, without a request to the API server: kubelet admits no other
//! pod meanwhile, and sets no deadline.

use std::time::Duration;

use proto::kubelet::deviceplugin::ContainerAllocateResponse;

use crate::devices::extended_resource::ExtendedResource;
use crate::devices::fleet::{DeviceKey, NodeFleet};
use crate::inject::content::{AssignedDevices, variable_answer};
use crate::inject::enforcement::limits::Recipient;
use crate::node::pods::Placement;
use crate::start::matching::{Call, Match, preferred};
use crate::start::node_state::NodeState;
use crate::start::pod_of_call::wait_for_match;

/// Answers kubelet's Allocate call with these device IDs.
pub(crate) async fn allocate_by_variable(
    node: &NodeState,
    resource: ExtendedResource,
    ids: &[String],
) -> ContainerAllocateResponse {
    let devices = node.devices_of(resource, ids);
    let call = Call {
        resource,
        count: ids.len() as u64,
        devices: &devices,
    };
    // kubelet has just asked for the preferred device IDs of the same container.
    let mut found = preferred(&node.pods.borrow(), &node.log(), &call);
    if found.is_none() {
        // `GetPreferredAllocation` has waited for the same pod a moment ago.
        let has_waited = std::mem::take(&mut node.log().has_waited);
        let limit = if has_waited {
            Duration::ZERO
        } else {
            node.pod_wait()
        };
        found = wait_for_match(node, &call, limit).await;
    }
    answer(node, found, &call, ids)
}

/// The answer for the matched container, which is added to the log. Without a match it names the devices of the IDs in place of a
/// record's, and has no limits.
fn answer(
    node: &NodeState,
    found: Option<Match>,
    call: &Call<'_>,
    ids: &[String],
) -> ContainerAllocateResponse {
    let (fleet, enforcements) = (node.fleet.borrow().clone(), node.enforcements.borrow().clone());
    let pods = node.pods.borrow();
    let placement = found.as_ref().and_then(|found| found.placement.as_ref());
    let mut recipient = None;
    if let Some(found) = &found
        && let Some(pod) = pods.get(&found.pod)
        && let Some(container) = pod.containers.get(found.container)
    {
        recipient = Some(Recipient {
            pod,
            container,
            placement,
            enforcements: &enforcements,
        });
    }
    let assigned = assigned_devices(&fleet, placement, call);
    let response = variable_answer(&node.settings, recipient.as_ref(), call.resource, &assigned);
    let mut log = node.log();
    let pod = found.as_ref().map(|found| found.pod.clone());
    log.add_answer(call.resource, ids, pod, response.clone());
    if let Some(found) = found {
        log.record(found, &pods);
    }
    response
}

/// The devices of the pod's allocation record (`placement`), if all are on this node; else those of the call's IDs.
fn assigned_devices<'a>(
    fleet: &'a NodeFleet,
    placement: Option<&Placement>,
    call: &Call<'_>,
) -> AssignedDevices<'a> {
    let names = placement.map_or(&[][..], |placement| placement.names(call.resource));
    let recorded: Option<Vec<DeviceKey>> = names.iter().map(|name| fleet.find(call.resource, name)).collect();
    if let Some(keys) = recorded.filter(|keys| !keys.is_empty()) {
        return AssignedDevices::find(fleet, call.resource, &keys);
    }
    let keys = match call.devices {
        // Memory units of a container are of one GPU, even if kubelet took IDs of several.
        [first, ..] if call.resource == ExtendedResource::Memory => std::slice::from_ref(first),
        all => all,
    };
    AssignedDevices::find(fleet, call.resource, keys)
}
