//! Refuses containers that select the devices that they see, by the fields of a pod that container runtimes read.
//!
//! [`check`] holds for every pod outside the namespaces that the operator names; [`check_overrides`] is stricter, for pods that
//! share devices in clusters that deny overrides. A CUDA image's own `NVIDIA_VISIBLE_DEVICES=all` and a value that `envFrom`
//! brings are not known here; the device plugin's runtime hook (NRI) replaces such values when the container is created.

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

/// All containers of a new pod; of an update of the pod `old`, the ephemeral ones that it adds: others cannot be changed.
fn added_containers<'a>(old: Option<&'a Pod>, new: &'a Pod) -> Vec<&'a Container> {
    let Some(old) = old else {
        let containers = new.spec.all_containers();
        return containers.chain(&new.spec.ephemeral_containers).collect();
    };
    let before = &old.spec.ephemeral_containers;
    let mut added = Vec::new();
    for container in &new.spec.ephemeral_containers {
        if before.iter().all(|other| other.name != container.name) {
            added.push(container);
        }
    }
    added
}

/// Returns true if the variable's value selects no device. A value by `valueFrom` is not known, so it may select some.
fn selects_none(variable: &Variable) -> bool {
    let value = variable.own_value();
    value.is_some_and(|value| NO_DEVICE.contains(&value))
}

/// Refuses a pod in this namespace that selects devices itself, by a variable of a container or an annotation; of an update of
/// the pod `old`, what it adds. On a node whose runtime acts on `NVIDIA_VISIBLE_DEVICES`, a pod that requests no device would see
/// every GPU.
pub(super) fn check(
    old: Option<&Pod>,
    new: &Pod,
    names: &ResourceNames,
    namespace: &str,
) -> Result<(), Refusal> {
    for container in added_containers(old, new) {
        check_container(container, names, namespace)?;
    }
    for (key, value) in new.metadata.annotations.iter().flatten() {
        // The runtime reads them when it creates the pod's sandbox, which may be after an update. A pod from before the webhook
        // may have kept such an annotation, and must stay updatable.
        if old.is_none_or(|old| old.annotation(key) != Some(value)) {
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
    let selection = |variable: &&Variable| variable.name == VISIBLE_DEVICES && !selects_none(variable);
    let Some(variable) = container.env.iter().find(selection) else {
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

fn truncate(value: &str) -> String {
    value.chars().take(MAX_SHOWN).collect()
}

/// Refuses a pod that shares devices and has a privileged container, or one that sets variables of NVIDIA's runtime, of its hook
/// for memory limits, or of MPS.
///
/// Holds for containers that request no device too: they run on the same node.
pub(super) fn check_overrides(old: Option<&Pod>, new: &Pod, names: &ResourceNames) -> Result<(), Refusal> {
    for container in added_containers(old, new) {
        let kinds = RequestedKinds::of_containers(std::iter::once(container), names);
        check_container_overrides(container, !kinds.is_empty())?;
    }
    Ok(())
}

/// Refuses a container of a pod that shares devices if it is privileged or sets a variable that would override its devices or
/// limits.
fn check_container_overrides(container: &Container, requests_devices: bool) -> Result<(), Refusal> {
    if container.security_context.privileged == Some(true) {
        let fault = "is privileged and would see every device of the node";
        return Err(override_refusal(container, fault));
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
