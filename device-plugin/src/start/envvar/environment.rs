//! Checks that the environment of a container agrees with its pod's record, for answers by the vendor's variable. With a CDI spec
//! that is not necessary: the runtime applies the spec last.
//!
//! kubelet puts the variables of an answer first, then those of the pod's `envFrom`, then those of its `env`; of two values the
//! later one counts. Values from a `ConfigMap` or a Secret are not known here.

use std::collections::BTreeMap;
use std::iter::once;
use std::path::Path;

use proto::device::TYPE_GPU;
use proto::kubelet::deviceplugin::ContainerAllocateResponse;

use crate::devices::extended_resource::ExtendedResource;
use crate::devices::fleet::{DeviceKey, FleetDevice, NodeFleet};
use crate::inject::content::{named_devices, visible_variable};
use crate::inject::enforcement::Enforcements;
use crate::inject::enforcement::limits::{Recipient, is_limit, is_of_driver, limits};
use crate::inject::settings::NodeSettings;
use crate::node::pods::{OwnVariable, PodStage};
use crate::start::verify::StartRefusal;
use crate::start::verify::container::StartingContainer;

/// Checks the device nodes, variables and limits of a container that has passed the verification.
pub(super) fn check_environment(
    starting: &StartingContainer<'_>,
    enforcements: &Enforcements,
    settings: &NodeSettings,
    fleet: &NodeFleet,
) -> Result<(), StartRefusal> {
    let Some(answer) = starting.answer() else {
        return Ok(());
    };
    check_nodes(starting, answer, fleet)?;
    check_own_variables(starting, answer, fleet)?;
    check_limits(starting, answer, enforcements, settings, fleet)
}

/// Checks that the answer's device nodes are those of the record's devices. Those of GPUs are in no answer.
fn check_nodes(
    starting: &StartingContainer<'_>,
    answer: &ContainerAllocateResponse,
    fleet: &NodeFleet,
) -> Result<(), StartRefusal> {
    let resource = starting.resource;
    let Ok(placement) = &starting.pod.placement else {
        return Ok(());
    };
    for given in &answer.devices {
        let path = Path::new(&given.container_path);
        let (mut is_known, mut is_recorded) = (false, false);
        for FleetDevice { device, .. } in fleet.devices_of(resource.device_type()) {
            let functions = device.function_nodes.iter();
            let of_functions = functions.map(|(function, nodes)| (Some(function), nodes));
            for (function, nodes) in once((None, &device.device_nodes)).chain(of_functions) {
                if nodes.iter().any(|node| node == path) {
                    is_known = true;
                    let function = function.map(String::as_str);
                    is_recorded |= placement.gives(resource, &DeviceKey::from(device), function);
                }
            }
        }
        // After a reboot the number of a device node can be that of another device, while kubelet keeps the answer.
        if is_known && !is_recorded {
            return Err(StartRefusal::Mismatch {
                seen: given.container_path.clone(),
                recorded: placement.to_string(),
            });
        }
    }
    Ok(())
}

/// Checks that no variable in the pod's spec contradicts the answer.
fn check_own_variables(
    starting: &StartingContainer<'_>,
    answer: &ContainerAllocateResponse,
    fleet: &NodeFleet,
) -> Result<(), StartRefusal> {
    let StartingContainer { pod, resource, .. } = starting;
    for own in pod.variables.iter() {
        let is_devices = own.name == visible_variable(*resource);
        if !starting.may_be(&own.container) || !(is_devices || is_limit(&own.name)) {
            continue;
        }
        // A variable that the answer does not set overrides nothing.
        let Some(given) = answer.envs.get(&own.name) else {
            continue;
        };
        let (container, variable) = (own.container.clone(), own.name.clone());
        // The driver's limits are refused whatever their value: the words are those of the validating webhook.
        if is_of_driver(&own.name) {
            return Err(StartRefusal::SetsLimit { container, variable });
        }
        // A pod that sees all GPUs is charged for all of them, and may see fewer.
        let may_differ = is_devices && pod.sees_all;
        if !may_differ && !has_value_of_answer(own, given, is_devices.then_some(*resource), fleet) {
            let given = given.clone();
            return Err(StartRefusal::Overridden {
                container,
                variable,
                given,
            });
        }
    }
    Ok(())
}

/// True if the pod's own variable has the value of the answer (`given`), or names the same devices in other words. `devices` is
/// the resource whose devices the variable names, if it names devices.
fn has_value_of_answer(
    own: &OwnVariable,
    given: &str,
    devices: Option<ExtendedResource>,
    fleet: &NodeFleet,
) -> bool {
    let Some(value) = &own.value else {
        return false;
    };
    if value == given {
        return true;
    }
    let Some(resource) = devices else {
        return false;
    };
    let named = named_devices(resource, value, fleet);
    named.is_some() && named == named_devices(resource, given, fleet)
}

/// Checks that the limits in the variables of the answer are those that follow from the record and the container's request.
fn check_limits(
    starting: &StartingContainer<'_>,
    answer: &ContainerAllocateResponse,
    enforcements: &Enforcements,
    settings: &NodeSettings,
    fleet: &NodeFleet,
) -> Result<(), StartRefusal> {
    let StartingContainer { pod, resource, .. } = starting;
    // Of the answers for a container's resources, the one that names its devices has the limits.
    let shown = answer.envs.get(visible_variable(*resource));
    let Some(devices) = shown.and_then(|value| named_devices(*resource, value, fleet)) else {
        return Ok(());
    };
    // A running pod keeps the limits that it started with, whatever has become of its label or of the node's unit.
    if pod.stage == PodStage::Running || resource.device_type() != TYPE_GPU {
        return Ok(());
    }
    let gpus: Vec<_> = devices.iter().filter_map(|uuid| fleet.gpu(uuid)).collect();
    let mut kept: BTreeMap<String, String> = answer.envs.clone().into_iter().collect();
    kept.retain(|name, _| is_limit(name));
    let mut recorded = BTreeMap::new();
    for container in starting.containers() {
        let recipient = Recipient {
            pod,
            container,
            placement: pod.record(),
            enforcements,
        };
        recorded = limits(settings.memory_unit, &recipient, &gpus);
        // An init and an app container can have the same device IDs, each with an answer of its own.
        if kept == recorded {
            return Ok(());
        }
    }
    Err(StartRefusal::Limits {
        kept: limits_as_text(&kept),
        recorded: limits_as_text(&recorded),
    })
}

fn limits_as_text(limits: &BTreeMap<String, String>) -> String {
    if limits.is_empty() {
        return "no limits".to_owned();
    }
    let pairs = limits.iter().map(|(name, value)| format!("{name}={value}"));
    pairs.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests;
