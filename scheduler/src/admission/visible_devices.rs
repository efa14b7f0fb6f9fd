//! Refuses containers that select the devices they see, by the fields of a pod that container runtimes read.
//!
//! Two rules. [`check`] holds for every pod outside the namespaces that the operator names, most of all for pods that ask for
//! nothing: on a node whose runtime acts on `NVIDIA_VISIBLE_DEVICES` they would see every GPU, those that others share included.
//! [`check_overrides`] is stricter, for pods that share devices in clusters that deny overrides.
//!
//! Only the pod's own fields are known here. A CUDA image's own `NVIDIA_VISIBLE_DEVICES=all` and a value that `envFrom` brings
//! are not; the device plugin's runtime hook (NRI) replaces those when the container is created.

use std::collections::BTreeMap;

use proto::pod::Pod;
use proto::record::VISIBLE_DEVICES;
use proto::record::{DRIVER_MEMORY_LIMIT, DRIVER_MEMORY_REQUEST};
use proto::resource::{GPU_MEMORY, GPU_SHARED, ResourceNames, VENDOR_GPUS};
use serde::Deserialize;
use serde_json::Value;

use super::Refusal;
use super::asks::Asks;

/// Annotations that NVIDIA's NRI plugin reads: this key, and `/pod` and `/container.NAME` below it.
const NRI_DOMAIN: &str = "nvidia.cdi.k8s.io";
/// Annotations that NVIDIA's runtime reads in its mode `cdi`, where CRI-O, or containerd's `pod_annotations`, hands them on.
const CDI_PREFIX: &str = "cdi.k8s.io/";
/// Most characters of a value that a message repeats.
const MOST_SHOWN: usize = 64;
/// Variables that CUDA's multi-process service reads its limits from.
const MPS_PREFIX: &str = "CUDA_MPS_";

/// Variables that NVIDIA's hook reads the driver's limits from.
const LIMIT_VARIABLES: [&str; 2] = [DRIVER_MEMORY_REQUEST, DRIVER_MEMORY_LIMIT];

/// Values that select no device; an empty one counts as set.
const NONE: [&str; 3] = ["", "none", "void"];

/// The fields of a pod that select the devices that its containers see.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct DeviceFields {
    #[serde(default)]
    metadata: MetadataFields,
    #[serde(default)]
    spec: SpecFields,
}

#[derive(Debug, Default, Deserialize)]
struct MetadataFields {
    #[serde(default)]
    annotations: Option<BTreeMap<String, String>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SpecFields {
    #[serde(default)]
    init_containers: Option<Vec<ContainerFields>>,
    #[serde(default)]
    containers: Option<Vec<ContainerFields>>,
    #[serde(default)]
    ephemeral_containers: Option<Vec<ContainerFields>>,
}

/// The fields of a container that select the devices that it sees.
#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ContainerFields {
    #[serde(default)]
    name: String,
    #[serde(default)]
    env: Option<Vec<VariableFields>>,
    #[serde(default)]
    security_context: Option<SecurityContext>,
    #[serde(default)]
    resources: Value,
}

/// A variable that a container sets itself.
#[derive(Debug, Default, PartialEq, Deserialize)]
struct VariableFields {
    #[serde(default)]
    name: String,
    /// The value, if the pod itself has it; the API server leaves an empty one out.
    #[serde(default)]
    value: Option<String>,
    #[serde(default, rename = "valueFrom")]
    value_from: Option<Value>,
}

#[derive(Debug, Default, PartialEq, Deserialize)]
struct SecurityContext {
    #[serde(default)]
    privileged: Option<bool>,
}

impl DeviceFields {
    /// All containers, ephemeral ones last.
    fn containers(&self) -> impl Iterator<Item = &ContainerFields> {
        let spec = &self.spec;
        [
            &spec.init_containers,
            &spec.containers,
            &spec.ephemeral_containers,
        ]
        .into_iter()
        .flatten()
        .flatten()
    }

    /// The ephemeral containers that were not there before.
    fn added<'a>(&'a self, old: &'a Self) -> impl Iterator<Item = &'a ContainerFields> {
        let is_new = |container: &&ContainerFields| {
            !old.spec
                .ephemeral_containers
                .iter()
                .flatten()
                .any(|there| there.name == container.name)
        };
        self.spec.ephemeral_containers.iter().flatten().filter(is_new)
    }

    /// The annotations, in order of their keys.
    fn annotations(&self) -> impl Iterator<Item = (&str, &str)> {
        self.metadata
            .annotations
            .iter()
            .flatten()
            .map(|(key, value)| (key.as_str(), value.as_str()))
    }

    /// The annotations that are new or have another value than before.
    fn changed_annotations<'a>(&'a self, old: &'a Self) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.annotations()
            .filter(|(key, value)| !old.annotations().any(|there| there == (*key, *value)))
    }
}

impl ContainerFields {
    fn variables(&self) -> impl Iterator<Item = &VariableFields> {
        self.env.iter().flatten()
    }

    fn is_privileged(&self) -> bool {
        self.security_context
            .as_ref()
            .and_then(|context| context.privileged)
            == Some(true)
    }

    fn asks(&self, names: &ResourceNames) -> Asks {
        Asks::of_container(&self.request(), names)
    }

    /// The resources that it requests; none if they cannot be read.
    fn request(&self) -> proto::pod::Container {
        let resources = Deserialize::deserialize(&self.resources).unwrap_or_default();
        proto::pod::Container {
            resources,
            ..proto::pod::Container::default()
        }
    }
}

impl VariableFields {
    /// Returns true if the value selects no device. A value from elsewhere may be anything.
    fn selects_none(&self) -> bool {
        self.value_from.is_none() && NONE.contains(&self.value.as_deref().unwrap_or_default())
    }
}

/// Returns true if a rule may refuse the pod, by the fields that are read of every pod.
pub(super) fn may_select_devices(pod: &Pod) -> bool {
    let mut containers = pod.spec.init_containers.iter().chain(&pod.spec.containers);
    let mut annotations = pod.metadata.annotations.iter().flatten();
    containers.any(|container| {
        container
            .env
            .iter()
            .any(|variable| variable.name == VISIBLE_DEVICES)
    }) || annotations.any(|(key, _)| names_devices(key))
}

/// Refuses a pod in this namespace that selects devices itself.
pub(super) fn check(pod: &DeviceFields, names: &ResourceNames, namespace: &str) -> Result<(), Refusal> {
    pod.containers()
        .try_for_each(|container| check_container(container, names, namespace))?;
    check_annotations(pod.annotations(), namespace)
}

/// [`check`] for the ephemeral containers that an update adds.
pub(super) fn check_added(
    old: &DeviceFields,
    new: &DeviceFields,
    names: &ResourceNames,
    namespace: &str,
) -> Result<(), Refusal> {
    new.added(old)
        .try_for_each(|container| check_container(container, names, namespace))
}

/// [`check`] for the annotations that an update changes: the runtime reads them when it creates the pod's sandbox, which comes
/// later.
pub(super) fn check_changed_annotations(
    old: &DeviceFields,
    new: &DeviceFields,
    namespace: &str,
) -> Result<(), Refusal> {
    check_annotations(new.changed_annotations(old), namespace)
}

fn check_container(
    container: &ContainerFields,
    names: &ResourceNames,
    namespace: &str,
) -> Result<(), Refusal> {
    let request = container.request();
    // The node's device plugin checks those: with CDI the variable has no effect, and in `envvar` mode the same value does no harm.
    if [GPU_SHARED, &names.memory]
        .into_iter()
        .any(|name| request.asks_for(name))
    {
        return Ok(());
    }
    let Some(variable) = container
        .variables()
        .find(|variable| variable.name == VISIBLE_DEVICES && !variable.selects_none())
    else {
        return Ok(());
    };
    let sets = format!(
        "container {:?} sets {VISIBLE_DEVICES} {}",
        container.name,
        describe_value(variable)
    );
    // kubelet puts the pod's own variables after those of a plugin's answer, and the last of two values counts. The vendor's plugin
    // names the container's GPUs in this variable, or by CDI, so the pod's own value replaces them or adds to them. The container
    // needs no value of its own.
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

fn describe_value(variable: &VariableFields) -> String {
    match (&variable.value_from, &variable.value) {
        // An author who may write an annotation or a ConfigMap may have written "all" there.
        (Some(_), _) => "by valueFrom, whose value is not known here,".to_owned(),
        (None, value) => format!("to {:?}", truncate(value.as_deref().unwrap_or_default())),
    }
}

fn check_annotations<'a>(
    mut annotations: impl Iterator<Item = (&'a str, &'a str)>,
    namespace: &str,
) -> Result<(), Refusal> {
    let found = annotations.find(|(key, value)| names_devices(key) && !value.trim().is_empty());
    found.map_or(Ok(()), |(key, value)| {
        Err(Refusal::Forbidden(format!(
            "annotation {key} is {:?}: the container runtime could give the pod devices that are not counted for it; take it out and ask for \
             devices in the limits of containers; {}",
            truncate(value),
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

fn truncate(value: &str) -> String {
    value.chars().take(MOST_SHOWN).collect()
}

/// Refuses a pod that shares devices and has a privileged container, or one that sets variables of NVIDIA's runtime, of its hook for
/// memory limits, or of MPS.
///
/// Holds for containers that request no device too: they run on the same node.
pub(super) fn check_overrides(pod: &DeviceFields, names: &ResourceNames) -> Result<(), Refusal> {
    pod.containers()
        .try_for_each(|container| check_container_overrides(container, !container.asks(names).is_empty()))
}

/// [`check_overrides`] for the ephemeral containers that an update adds.
pub(super) fn check_added_overrides(old: &DeviceFields, new: &DeviceFields) -> Result<(), Refusal> {
    new.added(old)
        .try_for_each(|container| check_container_overrides(container, false))
}

fn check_container_overrides(container: &ContainerFields, asks: bool) -> Result<(), Refusal> {
    let refuse = |what: String| {
        Err(Refusal::Forbidden(format!(
            "container {:?} {what}, which is not allowed in a pod that shares devices",
            container.name
        )))
    };
    if container.is_privileged() {
        return refuse("is privileged and would see every device of the node".to_owned());
    }
    // A container that requests no device may select none.
    let shows =
        |variable: &VariableFields| variable.name == VISIBLE_DEVICES && (!variable.selects_none() || asks);
    let limits = |name: &str| name.starts_with(MPS_PREFIX) || LIMIT_VARIABLES.contains(&name);
    let variable = container
        .variables()
        .find(|variable| limits(&variable.name) || shows(variable));
    variable.map_or(Ok(()), |variable| refuse(format!("sets {}", variable.name)))
}
