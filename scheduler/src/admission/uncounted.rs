//! Refuses containers that could see GPUs which are counted for no pod: by NVIDIA's variable, or by a CDI annotation.
//!
//! Holds for every pod outside the namespaces that the operator names, most of all for pods that ask for nothing: on a node
//! whose runtime acts on the variable they would see every GPU, those that others share included. Only what the pod itself
//! says is seen here. A CUDA image's own `NVIDIA_VISIBLE_DEVICES=all` and a value that `envFrom` brings are not; the
//! device plugin's runtime hook (NRI) replaces those when the container is made.

use proto::pod::Pod;
use proto::resource::{GPU_MEMORY, GPU_SHARED, ResourceNames, VENDOR_GPUS};

use super::Refusal;
use super::sights::{Container, Sights, VISIBLE_DEVICES, Variable};

/// Annotations that NVIDIA's NRI plugin reads: this key, and `/pod` and `/container.NAME` below it.
const NRI_DOMAIN: &str = "nvidia.cdi.k8s.io";
/// Annotations that NVIDIA's runtime reads in its mode `cdi`, where CRI-O, or containerd's `pod_annotations`, hands them on.
const CDI_PREFIX: &str = "cdi.k8s.io/";
/// Most characters of a value that a message repeats.
const MOST_SHOWN: usize = 64;

/// Returns true if there may be anything to refuse, by the fields that are read of every pod.
pub(super) fn may_concern(pod: &Pod) -> bool {
    let mut containers = pod.spec.init_containers.iter().chain(&pod.spec.containers);
    let mut annotations = pod.metadata.annotations.iter().flatten();
    containers.any(|container| {
        container
            .env
            .iter()
            .any(|variable| variable.name == VISIBLE_DEVICES)
    }) || annotations.any(|(key, _)| names_devices(key))
}

/// Refuses a pod in this namespace that says itself which devices it sees.
pub(super) fn judge(pod: &Sights, names: &ResourceNames, namespace: &str) -> Result<(), Refusal> {
    pod.containers()
        .try_for_each(|container| judge_container(container, names, namespace))?;
    judge_annotations(pod.annotations(), namespace)
}

/// The same for the ephemeral containers that a change brings.
pub(super) fn judge_added(
    old: &Sights,
    new: &Sights,
    names: &ResourceNames,
    namespace: &str,
) -> Result<(), Refusal> {
    new.added(old)
        .try_for_each(|container| judge_container(container, names, namespace))
}

/// The same for the annotations that a change brings: the runtime reads them when it makes the pod's sandbox, which comes later.
pub(super) fn judge_changed(old: &Sights, new: &Sights, namespace: &str) -> Result<(), Refusal> {
    judge_annotations(new.changed_annotations(old), namespace)
}

fn judge_container(container: &Container, names: &ResourceNames, namespace: &str) -> Result<(), Refusal> {
    let request = container.request();
    // The node's plugin judges those: with CDI the variable means nothing, and by variable the same value does no harm.
    if [GPU_SHARED, &names.memory]
        .into_iter()
        .any(|name| request.asks_for(name))
    {
        return Ok(());
    }
    let Some(variable) = container
        .variables()
        .find(|variable| variable.name == VISIBLE_DEVICES && !variable.says_none())
    else {
        return Ok(());
    };
    let sets = format!(
        "container {:?} sets {VISIBLE_DEVICES} {}",
        container.name,
        how(variable)
    );
    // kubelet puts the variables of a plugin's answer first and the pod's own behind them, and the last of two values counts.
    // The vendor's plugin names the container's GPUs in that very variable, or by CDI beside it, so that the pod's own value takes
    // its place or adds to it. The container needs no value of its own, and so loses nothing.
    let refusal = match VENDOR_GPUS
        .into_iter()
        .find(|resource| request.asks_for(resource))
    {
        Some(resource) => format!(
            "{sets}, which wins over the GPUs that it is given for {resource} and could show it GPUs that are counted for other pods; take the \
             variable out"
        ),
        None => format!(
            "{sets} but asks for no share of a GPU, so it could see GPUs that are counted for other pods; take the variable out, set it to \
             \"void\", or ask for {GPU_SHARED} and {GPU_MEMORY}, or for {}",
            names.memory
        ),
    };
    Err(Refusal::Forbidden(format!("{refusal}; {}", exemption(namespace))))
}

fn how(variable: &Variable) -> String {
    match (&variable.value_from, &variable.value) {
        // An author who may write an annotation or a ConfigMap may have written "all" there.
        (Some(_), _) => "by valueFrom, whose value is not known here,".to_owned(),
        (None, value) => format!("to {:?}", shown(value.as_deref().unwrap_or_default())),
    }
}

fn judge_annotations<'a>(
    mut annotations: impl Iterator<Item = (&'a str, &'a str)>,
    namespace: &str,
) -> Result<(), Refusal> {
    let found = annotations.find(|(key, value)| names_devices(key) && !value.trim().is_empty());
    found.map_or(Ok(()), |(key, value)| {
        Err(Refusal::Forbidden(format!(
            "annotation {key} is {:?}: the container runtime could give the pod devices that are not counted for it; take it out and ask for \
             devices in the limits of containers; {}",
            shown(value),
            exemption(namespace)
        )))
    })
}

fn names_devices(key: &str) -> bool {
    let is_below = |rest: &str| rest.is_empty() || rest.starts_with('/');
    key.starts_with(CDI_PREFIX) || key.strip_prefix(NRI_DOMAIN).is_some_and(is_below)
}

/// Names the flag by which an operator exempts a `DaemonSet` that has to see every GPU, such as an exporter of metrics.
fn exemption(namespace: &str) -> String {
    format!(
        "an operator lets daemons in namespace {namespace:?} see every GPU by --unrestricted-namespaces of scheduler and device plugins"
    )
}

fn shown(value: &str) -> String {
    value.chars().take(MOST_SHOWN).collect()
}
