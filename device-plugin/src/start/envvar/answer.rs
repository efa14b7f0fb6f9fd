//! Answers Allocate by the vendor's variable, with the devices of the pod that the call is matched with.
//!
//! kubelet may know a pod before this plugin's watch does, so a call waits a moment for its pod; if no pod comes, the answer
//! names the devices of the device IDs. The answer sends no request to the API server: kubelet admits no other pod meanwhile,
//! and sets no deadline.

use std::time::Duration;

use proto::kubelet::deviceplugin::ContainerAllocateResponse;
use tracing::debug;

use crate::devices::extended_resource::ExtendedResource;
use crate::devices::fleet::{DeviceKey, NodeFleet};
use crate::inject::content::{AssignedDevices, variable_answer};
use crate::inject::enforcement::limits::Recipient;
use crate::node::pods::{NodePods, Placement};
use crate::start::matching::{Call, Match, preferred};
use crate::start::node_state::NodeState;
use crate::start::pod_of_call::when_matched;

/// Answers kubelet's Allocate call with these device IDs.
pub async fn allocate_by_variable(
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
    {
        let pods = node.pods.borrow();
        // kubelet has just asked for the preferred device IDs of the same container.
        let found = preferred(&pods, &node.log(), &call);
        if let Some(found) = found {
            return answer_match(node, &pods, found, &call, ids);
        }
    }
    let has_waited = node.log().take_waited();
    // `GetPreferredAllocation` has waited for the same pod a moment ago.
    let limit = if has_waited {
        Duration::ZERO
    } else {
        node.pod_wait()
    };
    let answered = when_matched(node, &call, limit, |pods, found| {
        answer_match(node, pods, found, &call, ids)
    });
    match answered.await {
        Ok(response) => response,
        Err(reason) => {
            debug!(
                resource = node.settings.names.of(resource),
                ?reason,
                "allocated before the pod is known"
            );
            let fleet = node.fleet.borrow().clone();
            // Without a pod the answer has the devices of the IDs in place of a record's, and no limits.
            let assigned = assigned_devices(&fleet, None, &call);
            let response = variable_answer(&node.settings, None, resource, &assigned);
            node.log().add_answer(resource, ids, None, response.clone());
            response
        }
    }
}

/// Answers for the matched container, and adds the answer to the log.
fn answer_match(
    node: &NodeState,
    pods: &NodePods,
    found: Match,
    call: &Call<'_>,
    ids: &[String],
) -> ContainerAllocateResponse {
    let enforcements = node.enforcements.borrow().clone();
    let recipient = pods.get(&found.pod).and_then(|pod| {
        Some(Recipient {
            pod,
            container: pod.containers.get(found.container)?,
            placement: found.placement.as_ref(),
            enforcements: &enforcements,
        })
    });
    let fleet = node.fleet.borrow().clone();
    let assigned = assigned_devices(&fleet, found.placement.as_ref(), call);
    let response = variable_answer(&node.settings, recipient.as_ref(), call.resource, &assigned);
    let mut log = node.log();
    log.add_answer(call.resource, ids, Some(found.pod.clone()), response.clone());
    log.record(found, pods);
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
