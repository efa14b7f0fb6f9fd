//! Checks that the environment of a container agrees with its pod's record, for answers by variable: a CDI spec comes last and
//! overrides the rest.
//!
//! kubelet puts the variables of an answer first, then those of the pod's `envFrom`, then those of its `env`; of two values the
//! later wins. Values from a `ConfigMap` or a Secret are not known here.

use std::collections::BTreeMap;
use std::path::Path;

use proto::device::TYPE_GPU;
use proto::kubelet::deviceplugin::ContainerAllocateResponse;

use crate::enforcement::Enforcements;
use crate::enforcement::limits::{is_limit, is_of_driver, limits};
use crate::extended_resource::ExtendedResource;
use crate::fleet::{DeviceKey, FleetDevice, FleetGpu, NodeFleet};
use crate::injection::content::variable;
use crate::injection::recipient::Recipient;
use crate::pods::{NodePod, OwnVariable, PodStage};
use crate::settings::NodeSettings;
use crate::verify::StartRefusal;
use crate::verify::visible::named_devices;

/// A container that is to start with the answer that kubelet keeps for it.
#[derive(Clone, Copy, Debug)]
pub struct ByVariable<'a> {
    /// Its pod, whose record names the devices of the answer.
    pub pod: &'a NodePod,
    /// Those of the pod's containers that it may be.
    pub containers: &'a [&'a str],
    /// The resource that it starts for.
    pub resource: ExtendedResource,
    /// The answer.
    pub answer: &'a ContainerAllocateResponse,
    /// The enforcement levels of this node's GPUs.
    pub enforcements: &'a Enforcements,
}

impl ByVariable<'_> {
    /// Checks device nodes, variables and limits.
    ///
    /// # Errors
    /// Something else than the record decides the devices or limits of the container.
    pub fn check(&self, settings: &NodeSettings, fleet: &NodeFleet) -> Result<(), StartRefusal> {
        self.check_nodes(fleet)?;
        self.check_own_variables(fleet)?;
        self.check_limits(settings, fleet)
    }

    /// The answer's device nodes must be those of the record's devices.
    fn check_nodes(&self, fleet: &NodeFleet) -> Result<(), StartRefusal> {
        let Ok(placement) = &self.pod.placement else {
            return Ok(());
        };
        let nodes = device_nodes(fleet, self.resource);
        for given in &self.answer.devices {
            let (mut is_known, mut is_recorded) = (false, false);
            for (device, function, path) in &nodes {
                if *path == Path::new(&given.container_path) {
                    is_known = true;
                    is_recorded |= placement.gives(self.resource, device, *function);
                }
            }
            // After a reboot the number of a node can be another device's, while kubelet keeps the answer.
            if is_known && !is_recorded {
                return Err(StartRefusal::Mismatch {
                    seen: given.container_path.clone(),
                    recorded: placement.to_string(),
                });
            }
        }
        Ok(())
    }

    /// The pod's own variables must not contradict the answer. A pod that sees all GPUs may see fewer.
    fn check_own_variables(&self, fleet: &NodeFleet) -> Result<(), StartRefusal> {
        let visible = variable(self.resource);
        for own in self.pod.variables.iter() {
            let is_devices = own.name == visible;
            if !self.containers.contains(&own.container.as_str()) || !(is_devices || is_limit(&own.name)) {
                continue;
            }
            let Some(given) = self.answer.envs.get(&own.name) else {
                continue;
            };
            // The driver's limits are refused whatever their value: the words are those of the validating webhook.
            if is_of_driver(&own.name) {
                return Err(StartRefusal::SetsLimit {
                    container: own.container.clone(),
                    variable: own.name.clone(),
                });
            }
            let may_differ = is_devices && self.pod.sees_all;
            if !may_differ && !self.is_same(own, given, is_devices, fleet) {
                return Err(StartRefusal::Overridden {
                    container: own.container.clone(),
                    variable: own.name.clone(),
                    given: given.clone(),
                });
            }
        }
        Ok(())
    }

    /// True if the pod's own variable has the value of the answer, or names the same devices in other words.
    fn is_same(&self, own: &OwnVariable, given: &str, is_devices: bool, fleet: &NodeFleet) -> bool {
        let Some(value) = &own.value else {
            return false;
        };
        if value == given {
            return true;
        }
        let devices = named_devices(self.resource, value, fleet);
        is_devices && devices.is_some() && devices == named_devices(self.resource, given, fleet)
    }

    /// The limits of the answer must be those of the record.
    fn check_limits(&self, settings: &NodeSettings, fleet: &NodeFleet) -> Result<(), StartRefusal> {
        let visible = variable(self.resource);
        let shown = self.answer.envs.get(visible);
        let Some(devices) = shown.and_then(|value| named_devices(self.resource, value, fleet)) else {
            return Ok(());
        };
        // A running pod keeps the limits that it started with, whatever has become of its label or of the node's unit.
        if self.pod.stage == PodStage::Running || self.resource.device_type() != TYPE_GPU {
            return Ok(());
        }
        let mut gpus = Vec::new();
        for uuid in &devices {
            gpus.extend(fleet.gpu(uuid));
        }
        let mut kept = BTreeMap::new();
        for (name, value) in self.answer.envs.iter().filter(|(name, _)| is_limit(name)) {
            kept.insert(name.clone(), value.clone());
        }
        let mut recorded = BTreeMap::new();
        for container in &self.pod.containers {
            if !self.containers.contains(&container.name.as_str()) {
                continue;
            }
            let recipient = Recipient {
                pod: self.pod,
                container,
                placement: self.pod.record(),
                enforcements: self.enforcements,
            };
            recorded = limits(settings.memory_unit, &recipient, &gpus);
            // An init and an app container can have the same device IDs, each with an answer of its own.
            if kept == recorded {
                return Ok(());
            }
        }
        Err(StartRefusal::Limits {
            kept: in_words(&kept),
            recorded: in_words(&recorded),
        })
    }
}

/// A device, its virtual function if the node is of one, and the device node.
type DeviceNode<'a> = (DeviceKey, Option<&'a str>, &'a Path);

/// The device nodes of every device of a resource's type.
fn device_nodes(fleet: &NodeFleet, resource: ExtendedResource) -> Vec<DeviceNode<'_>> {
    let mut nodes = Vec::new();
    if resource.device_type() == TYPE_GPU {
        for FleetGpu { gpu, .. } in &fleet.gpus {
            nodes.push((DeviceKey::from(gpu), None, gpu.device_node.as_path()));
        }
    }
    for FleetDevice { device, .. } in fleet.devices_of(resource.device_type()) {
        let key = DeviceKey::from(device);
        for path in &device.device_nodes {
            nodes.push((key.clone(), None, path.as_path()));
        }
        for (function, paths) in &device.function_nodes {
            for path in paths {
                nodes.push((key.clone(), Some(function.as_str()), path));
            }
        }
    }
    nodes
}

fn in_words(limits: &BTreeMap<String, String>) -> String {
    if limits.is_empty() {
        return "no limits".to_owned();
    }
    let pairs = limits.iter().map(|(name, value)| format!("{name}={value}"));
    pairs.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests;
