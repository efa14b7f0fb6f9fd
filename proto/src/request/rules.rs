//! Rules that hold across resources and containers, and how a broken one is told.

use super::{AMOUNTS, RequestError, sees_all_devices};
use crate::pod::{ALL_DEVICES, Container, Pod, PodSpec, QuantityText};
use crate::resource::{
    FPGA, GPU, GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED, OLD_NAMES, RDMA, ResourceNames,
    VENDOR_GPUS, is_gpu_resource,
};

/// A rule that the pod as a whole breaks.
pub(super) fn of_pod(rule: String) -> RequestError {
    RequestError::Rule {
        place: "the pod".to_owned(),
        rule,
    }
}

/// A rule that one container breaks.
pub(super) fn of_container(container: &Container, rule: String) -> RequestError {
    RequestError::Rule {
        place: format!("container {:?}", container.name),
        rule,
    }
}

/// Memory units, Koordinator's names and each vendor's name exclude one another.
pub(super) fn refuse_mixed_dialects(spec: &PodSpec, names: &ResourceNames) -> Result<(), RequestError> {
    let containers = || spec.init_containers.iter().chain(&spec.containers);
    let of = |resource: &str, value: &QuantityText| format!("{resource} ({})", shown(value));
    let asks = |resource: &str| {
        containers()
            .find_map(|container| text(container, resource))
            .map(|value| of(resource, value))
    };
    let koordinator = [GPU_SHARED, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_CORE, GPU]
        .into_iter()
        .find_map(asks);
    let vendors = VENDOR_GPUS.into_iter().filter_map(|name| {
        let container = containers().find(|container| container.asks_for(name))?;
        Some(of(name, text(container, name)?))
    });
    let mut present = [asks(&names.memory), koordinator]
        .into_iter()
        .flatten()
        .chain(vendors);
    match (present.next(), present.next()) {
        (Some(one), Some(other)) => Err(RequestError::MixedDialects { one, other }),
        _ => Ok(()),
    }
}

/// Whether a container names a resource that is a device's without looking at any, in the words of today.
pub(super) fn asks_for_ours(spec: &PodSpec, names: &ResourceNames) -> bool {
    let mut containers = spec.init_containers.iter().chain(&spec.containers);
    containers.any(|container| {
        let resources = &container.resources;
        resources
            .limits
            .keys()
            .chain(resources.requests.keys())
            .any(|name| is_gpu_resource(name, names) || name == RDMA || name == FPGA)
    })
}

/// Names of the proposals' first version are no extended resources: no node has them, and no extender is asked.
pub(super) fn refuse_old_names(spec: &PodSpec) -> Result<(), RequestError> {
    for container in spec.init_containers.iter().chain(&spec.containers) {
        if let Some((old, new)) = OLD_NAMES
            .into_iter()
            .find(|(old, _)| text(container, old).is_some())
        {
            let container = container.name.clone();
            return Err(RequestError::OldName { container, old, new });
        }
    }
    Ok(())
}

/// kubelet calls a plugin only for resources that the plugin serves: amounts alone would bring a container no device.
pub(super) fn refuse_unserved(pod: &Pod, names: &ResourceNames) -> Result<(), RequestError> {
    let containers = || pod.spec.init_containers.iter().chain(&pod.spec.containers);
    for container in containers() {
        let asked = AMOUNTS
            .into_iter()
            .find_map(|name| Some((name, text(container, name)?)));
        let is_served = [GPU_SHARED, &names.memory]
            .into_iter()
            .any(|name| text(container, name).is_some());
        if let (Some((resource, value)), false) = (asked, is_served) {
            let (container, resource) = (container.name.clone(), resource.to_owned());
            return Err(RequestError::NotServed {
                container,
                resource,
                value: shown(value),
            });
        }
    }
    if sees_all_devices(pod)? && !containers().any(|container| text(container, GPU_SHARED).is_some()) {
        return Err(of_pod(format!(
            "annotation {ALL_DEVICES} needs {GPU_SHARED} in the container that is to see the devices"
        )));
    }
    Ok(())
}

/// The amount of a resource that a container requests; `None` for a zero.
fn text<'a>(container: &'a Container, resource: &str) -> Option<&'a QuantityText> {
    let text = container
        .resources
        .limits
        .get(resource)
        .or_else(|| container.resources.requests.get(resource));
    text.filter(|text| !text.is_zero())
}

fn shown(text: &QuantityText) -> String {
    let shown = match text {
        QuantityText::Text(text) => text.clone(),
        QuantityText::Number(number) => number.to_string(),
        QuantityText::Other(value) => value.to_string(),
    };
    shown.chars().take(64).collect()
}
