//! The devices that a container sees, read from the answer to Allocate, which kubelet keeps as long as the container lives.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use proto::device::TYPE_GPU;
use proto::kubelet::deviceplugin::ContainerAllocateResponse;

use crate::cdi::name_of;
use crate::extended_resource::ExtendedResource;
use crate::fleet::{NodeFleet, type_name};
use crate::injection::content;
use crate::inventory::PhysicalId;
use crate::kubelet_checkpoint::Allocated;
use crate::pods::PodUid;

/// The devices of one type that the containers of one pod see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Visible {
    /// Those of the CDI spec at the time when the container is created.
    BySpec,
    /// These devices, and virtual functions of them, for as long as the containers live.
    Devices(BTreeSet<PhysicalId>),
    /// Something that is no device of this node, or one container other devices than another.
    Unclear(String),
}

/// The visible devices by type; no entry for types that no answer names devices of.
pub type VisibleByType = BTreeMap<&'static str, Visible>;

/// The devices that the container of one answer about a resource sees; none if the answer names no devices.
pub fn visible_by_answer(
    resource: ExtendedResource,
    answer: &ContainerAllocateResponse,
    fleet: &NodeFleet,
) -> Option<Visible> {
    if answer
        .cdi_devices
        .iter()
        .any(|device| name_of(&device.name).is_some())
    {
        return Some(Visible::BySpec);
    }
    let variable = content::variable(resource);
    let value = answer.envs.get(variable)?;
    let functions = content::functions_variable(resource).and_then(|variable| answer.envs.get(variable));
    let seen = named_devices(resource, value, fleet).and_then(|mut devices| {
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

/// The devices that a value of a resource's variable names, GPUs also by index, in the value's order, which is that of the devices
/// in the container; none if one of them is not on this node.
pub fn named_devices(resource: ExtendedResource, value: &str, fleet: &NodeFleet) -> Option<Vec<PhysicalId>> {
    value
        .split(',')
        .map(|name| named_device(resource, name, fleet))
        .collect()
}

fn named_device(resource: ExtendedResource, name: &str, fleet: &NodeFleet) -> Option<PhysicalId> {
    let device_type = resource.device_type();
    if let Some(entry) = fleet
        .entries(device_type)
        .find(|entry| entry.key.id.as_str() == name)
    {
        return Some(entry.key.id);
    }
    if device_type != TYPE_GPU {
        return None;
    }
    // NVIDIA's runtime takes indices too.
    let index: u32 = name.parse().ok()?;
    let entry = fleet.gpus.iter().find(|entry| entry.gpu.index == index)?;
    Some(entry.gpu.uuid.clone())
}

/// The devices that the containers of a pod see by kubelet's checkpoint.
pub fn visible_to_pod(allocated: &[Allocated], uid: &PodUid, fleet: &NodeFleet) -> VisibleByType {
    let mut visible = VisibleByType::new();
    for entry in allocated.iter().filter(|entry| entry.pod == *uid) {
        if let Some(seen) = visible_by_answer(entry.resource, &entry.answer, fleet) {
            add_visible(&mut visible, entry.resource.device_type(), seen);
        }
    }
    visible
}

/// The same of every pod that the checkpoint names.
pub fn visible_to_pods<'a>(
    allocated: &'a [Allocated],
    fleet: &NodeFleet,
) -> HashMap<&'a PodUid, VisibleByType> {
    let mut by_pod = HashMap::<&PodUid, VisibleByType>::new();
    for entry in allocated {
        let visible = by_pod.entry(&entry.pod).or_default();
        if let Some(seen) = visible_by_answer(entry.resource, &entry.answer, fleet) {
            add_visible(visible, entry.resource.device_type(), seen);
        }
    }
    by_pod
}

/// Adds the devices that one more container of the pod sees.
pub fn add_visible(visible: &mut VisibleByType, device_type: &'static str, seen: Visible) {
    let known = visible.entry(device_type).or_insert(Visible::BySpec);
    // A spec follows the pod's record, so it gets the devices that the other containers see.
    if *known == Visible::BySpec {
        *known = seen;
    } else if seen != Visible::BySpec && *known != seen {
        *known = Visible::Unclear("its containers were given different devices".to_owned());
    }
}
