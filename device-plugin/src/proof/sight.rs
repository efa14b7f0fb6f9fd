//! What a container will see: read off the answer to Allocate, which kubelet keeps as long as the container lives.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use proto::device::TYPE_GPU;
use proto::kubelet::deviceplugin::ContainerAllocateResponse;

use crate::extended_resource::ExtendedResource;
use crate::fleet::{Fleet, type_name};
use crate::identity::checkpoint::Allocated;
use crate::inject;
use crate::inventory::PhysicalId;
use crate::pods::PodUid;

/// What the containers of one pod see of the devices of one type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sight {
    /// Whatever the CDI spec says when the container is created.
    Spec,
    /// These devices, and virtual functions of them, for as long as they live.
    Devices(BTreeSet<PhysicalId>),
    /// Something that is no device of this node, or one container other devices than another.
    Unclear(String),
}

/// The same by type; nothing of types that no answer says anything of.
pub type Sights = BTreeMap<&'static str, Sight>;

/// What one answer about a resource makes its container see; none if it says nothing of devices. `variable`
/// is the one that names GPUs.
pub fn of_answer(
    resource: ExtendedResource,
    answer: &ContainerAllocateResponse,
    variable: &str,
    fleet: &Fleet,
) -> Option<Sight> {
    if answer
        .cdi_devices
        .iter()
        .any(|device| crate::cdi::name_of(&device.name).is_some())
    {
        return Some(Sight::Spec);
    }
    let variable = inject::variable(variable, resource);
    let value = answer.envs.get(variable)?;
    let strange = || {
        format!(
            "{variable}={value}, which is not a list of {} devices of this node",
            type_name(resource.device_type())
        )
    };
    let functions = inject::functions_variable(resource).and_then(|variable| answer.envs.get(variable));
    let functions: Option<Vec<PhysicalId>> = functions
        .into_iter()
        .flat_map(|value| value.split(','))
        .map(|name| name.parse().ok())
        .collect();
    let seen = named(resource, value, fleet)
        .zip(functions)
        .map(|(mut devices, functions)| {
            devices.extend(functions);
            devices
        });
    Some(seen.map_or_else(|| Sight::Unclear(strange()), Sight::Devices))
}

/// The devices that a value of a resource's variable names, GPUs also by index; none if one of them is not on this node.
pub fn named(resource: ExtendedResource, value: &str, fleet: &Fleet) -> Option<BTreeSet<PhysicalId>> {
    named_in_order(resource, value, fleet).map(BTreeSet::from_iter)
}

/// The same in the value's order, which is that of the devices in the container.
pub fn named_in_order(resource: ExtendedResource, value: &str, fleet: &Fleet) -> Option<Vec<PhysicalId>> {
    let device_type = resource.device_type();
    let device = |name: &str| {
        let by_index = |index: u32| {
            fleet
                .gpus
                .iter()
                .find(|entry| entry.gpu.index == index)
                .map(|entry| entry.gpu.uuid.clone())
        };
        let by_id = fleet
            .entries(device_type)
            .map(|entry| entry.key.id)
            .find(|id| id.as_str() == name);
        by_id.or_else(|| {
            name.parse()
                .ok()
                .filter(|_| device_type == TYPE_GPU)
                .and_then(by_index)
        })
    };
    value.split(',').map(device).collect()
}

/// What the containers of a pod see by kubelet's checkpoint.
pub fn of_pod(written: &[Allocated], uid: &PodUid, variable: &str, fleet: &Fleet) -> Sights {
    let mut sights = Sights::new();
    for entry in written.iter().filter(|entry| entry.pod == *uid) {
        let Some(sight) = of_answer(entry.resource, &entry.answer, variable, fleet) else {
            continue;
        };
        add(&mut sights, entry.resource.device_type(), sight);
    }
    sights
}

/// The same of every pod that the checkpoint names.
pub fn by_pod<'a>(written: &'a [Allocated], variable: &str, fleet: &Fleet) -> HashMap<&'a PodUid, Sights> {
    let mut by_pod = HashMap::<&PodUid, Sights>::new();
    for entry in written {
        let sights = by_pod.entry(&entry.pod).or_default();
        if let Some(sight) = of_answer(entry.resource, &entry.answer, variable, fleet) {
            add(sights, entry.resource.device_type(), sight);
        }
    }
    by_pod
}

/// Adds what one more container of the pod sees.
pub fn add(sights: &mut Sights, device_type: &'static str, sight: Sight) {
    let seen = sights.entry(device_type).or_insert(Sight::Spec);
    // A container with a spec sees whatever the others do, once that is written.
    if *seen == Sight::Spec {
        *seen = sight;
    } else if sight != Sight::Spec && *seen != sight {
        *seen = Sight::Unclear("its containers were given different devices".to_owned());
    }
}
