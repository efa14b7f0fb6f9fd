//! Will the environment of a container say what its pod's record says? Of answers by variable only: what a CDI spec says
//! comes last and wins.
//!
//! kubelet puts the variables of an answer first, then those of the pod's `envFrom`, then those of its `env`; of two values
//! the later wins. What comes from a `ConfigMap` or a Secret is not known here.

use std::collections::BTreeMap;
use std::path::Path;

use proto::device::TYPE_GPU;
use proto::kubelet::deviceplugin::ContainerAllocateResponse;

use crate::extended_resource::ExtendedResource;
use crate::fleet::{DeviceKey, Fleet};
use crate::inject::{self, is_limit};
use crate::inventory::{Gpu, PhysicalId};
use crate::plugin::Settings;
use crate::pods::{NodePod, OwnVariable, Stage};

use super::sight::named_in_order;
use super::verdict::Refusal;

/// A container that is to start with what kubelet keeps for it.
#[derive(Clone, Copy, Debug)]
pub struct Kept<'a> {
    /// Its pod, whose record names the devices of the answer.
    pub pod: &'a NodePod,
    /// Those of the pod's containers that it may be.
    pub containers: &'a [&'a str],
    /// The resource that it starts for.
    pub resource: ExtendedResource,
    /// The answer.
    pub answer: &'a ContainerAllocateResponse,
}

impl Kept<'_> {
    /// Whether nothing but the record decides what the container sees and which limits it has; its variable names the right
    /// devices.
    ///
    /// # Errors
    /// What else does.
    pub fn check(&self, settings: &Settings, fleet: &Fleet) -> Result<(), Refusal> {
        self.check_nodes(fleet)?;
        self.check_own(settings, fleet)?;
        self.check_limits(settings, fleet)
    }

    /// The answer's device nodes must be those of the record's devices. After a reboot the number of a node can be another
    /// device's, while kubelet keeps the answer.
    fn check_nodes(&self, fleet: &Fleet) -> Result<(), Refusal> {
        let nodes = nodes(fleet, self.resource);
        let holders = |path: &str| {
            nodes
                .iter()
                .filter(|node| node.path == Path::new(path))
                .collect::<Vec<_>>()
        };
        let is_recorded = |node: &&Node<'_>| {
            self.pod
                .placement
                .as_ref()
                .is_ok_and(|placement| placement.gives(self.resource, &node.device, node.function))
        };
        let is_strange = |path: &&str| {
            let holders = holders(path);
            !holders.is_empty() && !holders.iter().any(is_recorded)
        };
        let Some(strange) = self
            .answer
            .devices
            .iter()
            .map(|node| &*node.container_path)
            .find(is_strange)
        else {
            return Ok(());
        };
        let recorded = self
            .pod
            .placement
            .as_ref()
            .map(ToString::to_string)
            .unwrap_or_default();
        Err(Refusal::Mismatch {
            seen: strange.to_owned(),
            recorded,
        })
    }

    /// The pod's own variables must not say anything else than the answer. A pod that sees all GPUs may see fewer.
    fn check_own(&self, settings: &Settings, fleet: &Fleet) -> Result<(), Refusal> {
        let shown = inject::variable(&settings.visible_devices_env, self.resource);
        let devices = |value: &str| named_in_order(self.resource, value, fleet);
        let differs = |own: &&OwnVariable| {
            let Some(given) = self
                .answer
                .envs
                .get(&own.name)
                .filter(|_| own.name == shown || is_limit(&own.name))
            else {
                return false;
            };
            let is_same_devices = |value: &str| {
                own.name == shown && devices(value).is_some_and(|own| Some(own) == devices(given))
            };
            let is_same = own
                .value
                .as_deref()
                .is_some_and(|value| value == given || is_same_devices(value));
            !(is_same || own.name == shown && self.pod.sees_all)
        };
        let own = self
            .pod
            .variables
            .iter()
            .filter(|own| self.containers.contains(&&*own.container));
        let Some(found) = own.into_iter().find(differs) else {
            return Ok(());
        };
        let given = self.answer.envs.get(&found.name).cloned().unwrap_or_default();
        Err(Refusal::Overridden {
            container: found.container.clone(),
            variable: found.name.clone(),
            given,
        })
    }

    /// The limits of the answer must be those of the record. A pod that runs has been let start with its own, and goes on with
    /// them whatever has become of its label or of the node's unit.
    fn check_limits(&self, settings: &Settings, fleet: &Fleet) -> Result<(), Refusal> {
        let shown = self
            .answer
            .envs
            .get(inject::variable(&settings.visible_devices_env, self.resource));
        let Some(devices) = shown.and_then(|value| named_in_order(self.resource, value, fleet)) else {
            return Ok(());
        };
        if self.pod.stage == Stage::Running || self.resource.device_type() != TYPE_GPU {
            return Ok(());
        }
        let gpu = |uuid: &PhysicalId| {
            fleet
                .gpus
                .iter()
                .map(|entry| &entry.gpu)
                .find(|gpu| gpu.uuid == *uuid)
        };
        let gpus: Vec<&Gpu> = devices.iter().filter_map(gpu).collect();
        let recorded = inject::limits(settings, self.pod, self.pod.placement.as_ref().ok(), &gpus);
        let kept = self.answer.envs.iter().filter(|(name, _)| is_limit(name));
        let kept: BTreeMap<String, String> =
            kept.map(|(name, value)| (name.clone(), value.clone())).collect();
        if kept == recorded {
            Ok(())
        } else {
            Err(Refusal::Limits {
                kept: in_words(&kept),
                recorded: in_words(&recorded),
            })
        }
    }
}

/// A device node, and what it is of.
struct Node<'a> {
    device: DeviceKey,
    /// The virtual function of the device, if it is not of the device itself.
    function: Option<&'a str>,
    path: &'a Path,
}

/// The device nodes of every device that a resource is about.
fn nodes(fleet: &Fleet, resource: ExtendedResource) -> Vec<Node<'_>> {
    if resource.device_type() == TYPE_GPU {
        let gpus = fleet.gpus.iter().map(|entry| &entry.gpu);
        return gpus
            .map(|gpu| Node {
                device: DeviceKey::from(gpu),
                function: None,
                path: &gpu.device_node,
            })
            .collect();
    }
    let others = fleet
        .devices_of(resource.device_type())
        .map(|entry| &entry.device);
    others
        .flat_map(|device| {
            let own = device.device_nodes.iter().map(|path| (None, path));
            let of_functions = device
                .function_nodes
                .iter()
                .flat_map(|(function, paths)| paths.iter().map(|path| (Some(&**function), path)));
            own.chain(of_functions).map(move |(function, path)| Node {
                device: DeviceKey::from(device),
                function,
                path,
            })
        })
        .collect()
}

fn in_words(limits: &BTreeMap<String, String>) -> String {
    let pairs: Vec<String> = limits
        .iter()
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    if pairs.is_empty() {
        "no limits".to_owned()
    } else {
        pairs.join(" ")
    }
}

#[cfg(test)]
mod tests;
