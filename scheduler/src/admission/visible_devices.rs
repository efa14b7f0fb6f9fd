//! Refuses containers that select the devices that they see, by the fields of a pod that container runtimes read.
//!
//! Two rules. [`check`] holds for every pod outside the namespaces that the operator names, most of all for pods that request no
//! device: on a node whose runtime acts on `NVIDIA_VISIBLE_DEVICES` they would see every GPU, also those that other pods share.
//! [`check_overrides`] is stricter, for pods that share devices in clusters that deny overrides.
//!
//! Only the pod's own fields are known here. A CUDA image's own `NVIDIA_VISIBLE_DEVICES=all` and a value that `envFrom` brings
//! are not known; the device plugin's runtime hook (NRI) replaces such values when the container is created.

use proto::pod::{Container, Pod, Variable};
use proto::record::{DRIVER_MEMORY_LIMIT, DRIVER_MEMORY_REQUEST, VISIBLE_DEVICES};
use proto::resource::{GPU_MEMORY, GPU_SHARED, ResourceNames, VENDOR_GPUS};

use super::Refusal;
use super::requested_kinds::RequestedKinds;

/// Annotations that NVIDIA's NRI plugin reads: this key, and `/pod` and `/container.NAME` below it.
const NRI_DOMAIN: &str = "nvidia.cdi.k8s.io";
/// Annotations that NVIDIA's runtime reads in its mode `cdi`, where CRI-O, or containerd's `pod_annotations`, hands them on.
const CDI_PREFIX: &str = "cdi.k8s.io/";
/// Most characters of a value that a message repeats.
const MAX_SHOWN: usize = 64;
/// Variables that CUDA's multi-process service reads its limits from.
const MPS_PREFIX: &str = "CUDA_MPS_";

/// Variables that NVIDIA's hook reads the driver's limits from.
const LIMIT_VARIABLES: [&str; 2] = [DRIVER_MEMORY_REQUEST, DRIVER_MEMORY_LIMIT];

/// Values that select no device. NVIDIA's runtime acts on an empty one as on `void`.
const NO_DEVICE: [&str; 3] = ["", "none", "void"];

/// All containers of a pod, the ephemeral ones last.
fn containers(pod: &Pod) -> impl Iterator<Item = &Container> {
    pod.spec.all_containers().chain(&pod.spec.ephemeral_containers)
}

/// The ephemeral containers of a pod that were not there before. An existing container cannot be changed.
fn added_containers<'a>(old: &'a Pod, new: &'a Pod) -> impl Iterator<Item = &'a Container> {
    let before = &old.spec.ephemeral_containers;
    let now = new.spec.ephemeral_containers.iter();
    now.filter(|container| before.iter().all(|other| other.name != container.name))
}

/// Returns true if the variable's value selects no device. A value by `valueFrom` is not known, so it may select some.
fn selects_none(variable: &Variable) -> bool {
    variable
        .own_value()
        .is_some_and(|value| NO_DEVICE.contains(&value))
}

/// Refuses a pod in this namespace that selects devices itself, by a variable of a container or an annotation.
pub(super) fn check(pod: &Pod, names: &ResourceNames, namespace: &str) -> Result<(), Refusal> {
    for container in containers(pod) {
        check_container(container, names, namespace)?;
    }
    for (key, value) in pod.metadata.annotations.iter().flatten() {
        check_annotation(key, value, namespace)?;
    }
    Ok(())
}

/// [`check`] for the ephemeral containers that an update adds.
pub(super) fn check_added_containers(
    old: &Pod,
    new: &Pod,
    names: &ResourceNames,
    namespace: &str,
) -> Result<(), Refusal> {
    for container in added_containers(old, new) {
        check_container(container, names, namespace)?;
    }
    Ok(())
}

/// [`check`] for the annotations that an update changes: the runtime reads them when it creates the pod's sandbox, which may be
/// after the update.
pub(super) fn check_changed_annotations(old: &Pod, new: &Pod, namespace: &str) -> Result<(), Refusal> {
    for (key, value) in new.metadata.annotations.iter().flatten() {
        // A pod from before the webhook may have kept such an annotation, and must stay updatable.
        if old.annotation(key) != Some(value) {
            check_annotation(key, value, namespace)?;
        }
    }
    Ok(())
}

/// Refuses a container whose own `NVIDIA_VISIBLE_DEVICES` could show it GPUs that are counted for other pods. Containers that
/// request a share of a GPU are left to the device plugin of their node.
fn check_container(container: &Container, names: &ResourceNames, namespace: &str) -> Result<(), Refusal> {
    // The node's device plugin checks containers that request a share: with CDI the variable has no effect, and in `envvar` mode
    // the same value does no harm.
    if container.asks_for(GPU_SHARED) || container.asks_for(&names.memory) {
        return Ok(());
    }
    let mut variables = container.env.iter();
    let Some(variable) =
        variables.find(|variable| variable.name == VISIBLE_DEVICES && !selects_none(variable))
    else {
        return Ok(());
    };
    let (name, value) = (&container.name, describe_value(variable));
    let fault = format!("container {name:?} sets {VISIBLE_DEVICES} {value}");
    // kubelet puts the pod's own variables after those of a plugin's answer, and the last of two values counts. The vendor's
    // plugin names the container's GPUs in this variable, or by CDI, so the pod's own value replaces them or adds to them. The
    // container needs no value of its own.
    let mut vendor_gpus = VENDOR_GPUS.into_iter();
    let refusal = match vendor_gpus.find(|resource| container.asks_for(resource)) {
        Some(resource) => format!(
            "{fault}, which wins over the GPUs that it is given for {resource} and could show it GPUs that are counted for other pods; take the \
             variable out"
        ),
        None => format!(
            "{fault} but asks for no share of a GPU, so it could see GPUs that are counted for other pods; take the variable out, set it to \
             \"void\", or ask for {GPU_SHARED} and {GPU_MEMORY}, or for {}",
            names.memory
        ),
    };
    Err(Refusal::Forbidden(format!("{refusal}; {}", exemption(namespace))))
}

/// The value of an environment variable, in words for a refusal.
fn describe_value(variable: &Variable) -> String {
    match variable.own_value() {
        // An author who may write an annotation or a ConfigMap may have written "all" there.
        None => "by valueFrom, whose value is not known here,".to_owned(),
        Some(value) => format!("to {:?}", truncate(value)),
    }
}

/// Refuses an annotation by which the container runtime (CDI) would give the pod devices that are not counted for it.
fn check_annotation(key: &str, value: &str, namespace: &str) -> Result<(), Refusal> {
    // An empty value names no device, and a chart's template may leave one behind.
    if !names_devices(key) || value.trim().is_empty() {
        return Ok(());
    }
    Err(Refusal::Forbidden(format!(
        "annotation {key} is {:?}: the container runtime could give the pod devices that are not counted for it; take it out and ask for \
         devices in the limits of containers; {}",
        truncate(value),
        exemption(namespace)
    )))
}

/// Returns true if this is the key of an annotation by which a container runtime gives a pod CDI devices.
fn names_devices(key: &str) -> bool {
    let is_nri_path = |rest: &str| rest.is_empty() || rest.starts_with('/');
    key.starts_with(CDI_PREFIX) || key.strip_prefix(NRI_DOMAIN).is_some_and(is_nri_path)
}

/// The end of a refusal: the flag by which an operator exempts a `DaemonSet` that has to see every GPU, as for metrics.
fn exemption(namespace: &str) -> String {
    format!(
        "an operator lets daemons in namespace {namespace:?} see every GPU by --unrestricted-namespaces of scheduler and device plugins"
    )
}

/// The first characters of a value, for a message.
fn truncate(value: &str) -> String {
    value.chars().take(MAX_SHOWN).collect()
}

/// Refuses a pod that shares devices and has a privileged container, or one that sets variables of NVIDIA's runtime, of its hook
/// for memory limits, or of MPS.
///
/// Holds for containers that request no device too: they run on the same node.
pub(super) fn check_overrides(pod: &Pod, names: &ResourceNames) -> Result<(), Refusal> {
    for container in containers(pod) {
        let kinds = RequestedKinds::of_containers(std::iter::once(container), names);
        check_container_overrides(container, !kinds.is_empty())?;
    }
    Ok(())
}

/// [`check_overrides`] for the ephemeral containers that an update adds.
pub(super) fn check_added_container_overrides(old: &Pod, new: &Pod) -> Result<(), Refusal> {
    for container in added_containers(old, new) {
        // Kubernetes allows an ephemeral container no resources.
        check_container_overrides(container, false)?;
    }
    Ok(())
}

/// Refuses a container of a pod that shares devices if it is privileged or sets a variable that would override its devices or
/// limits.
fn check_container_overrides(container: &Container, requests_devices: bool) -> Result<(), Refusal> {
    if container.security_context.privileged == Some(true) {
        return Err(override_refusal(
            container,
            "is privileged and would see every device of the node",
        ));
    }
    for variable in &container.env {
        let name = variable.name.as_str();
        let is_limit = name.starts_with(MPS_PREFIX) || LIMIT_VARIABLES.contains(&name);
        // `NVIDIA_VISIBLE_DEVICES=void` does no harm in a container that requests no device; in another it would hide the
        // container's own devices.
        let is_selection = name == VISIBLE_DEVICES && (requests_devices || !selects_none(variable));
        if is_limit || is_selection {
            return Err(override_refusal(container, &format!("sets {name}")));
        }
    }
    Ok(())
}

/// The refusal of a container that would override its devices or limits by this fault.
fn override_refusal(container: &Container, fault: &str) -> Refusal {
    let name = &container.name;
    Refusal::Forbidden(format!(
        "container {name:?} {fault}, which is not allowed in a pod that shares devices"
    ))
}
