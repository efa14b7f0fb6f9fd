//! The policy against pods that share devices and decide for themselves which they see.
//!
//! Sees what a pod's spec says: variables that come from a `ConfigMap`, a Secret or the image are not known here.

use proto::resource::ResourceNames;
use serde::Deserialize;
use serde_json::Value;

use super::Refusal;
use super::asks::Asks;

/// Which devices NVIDIA's container runtime shows; a pod's own value wins over the plugin's.
const VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";
/// Variables that CUDA's multi-process service reads its limits from.
const MPS_PREFIX: &str = "CUDA_MPS_";
/// Values by which a container that asks for no device says that it wants none.
const NONE: [&str; 3] = ["", "none", "void"];
/// Namespaces whose pods are not held to the policy; the webhooks are not asked about them at all.
const EXEMPT: [&str; 2] = ["kube-system", "gpushare-system"];

/// The parts of a pod that decide what it sees.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Sights {
    #[serde(default)]
    spec: Spec,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Spec {
    #[serde(default)]
    init_containers: Option<Vec<Container>>,
    #[serde(default)]
    containers: Option<Vec<Container>>,
    #[serde(default)]
    ephemeral_containers: Option<Vec<Container>>,
}

#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Container {
    #[serde(default)]
    name: String,
    #[serde(default)]
    env: Option<Vec<Variable>>,
    #[serde(default)]
    security_context: Option<SecurityContext>,
    #[serde(default)]
    resources: Value,
}

#[derive(Debug, Default, PartialEq, Deserialize)]
struct Variable {
    #[serde(default)]
    name: String,
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

/// The part of a filter's request that decides what the pod sees.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Filter {
    pod: Sights,
}

/// Why a filter finds no node for a pod that shares devices and is in this namespace; `None` if the policy has nothing against it.
pub(crate) fn refusal_of_filter(body: &[u8], namespace: &str, names: &ResourceNames) -> Option<String> {
    if EXEMPT.contains(&namespace) {
        return None;
    }
    let Filter { pod } = serde_json::from_slice(body).ok()?;
    match judge(&pod, names) {
        Ok(()) => None,
        Err(Refusal::Invalid(message) | Refusal::Forbidden(message)) => Some(message),
    }
}

/// Refuses a pod that shares devices and has a container that chooses what it sees. Names the container and what it sets.
///
/// Containers that ask for nothing count too: they run beside those that do, on the same node.
pub(super) fn judge(pod: &Sights, names: &ResourceNames) -> Result<(), Refusal> {
    let spec = &pod.spec;
    let lists = [&spec.init_containers, &spec.containers, &spec.ephemeral_containers];
    let asks = |container: &proto::pod::Container| !Asks::of_container(container, names).is_empty();
    lists.into_iter().flatten().flatten().try_for_each(|container| container.judge(&asks))
}

/// The same for the ephemeral containers that a change brings.
pub(super) fn judge_added(old: &Sights, new: &Sights) -> Result<(), Refusal> {
    let is_new = |container: &&Container| !old.spec.ephemeral_containers.iter().flatten().any(|there| there.name == container.name);
    new.spec.ephemeral_containers.iter().flatten().filter(is_new).try_for_each(|container| container.judge(&|_| false))
}

impl Container {
    fn judge(&self, asks: &impl Fn(&proto::pod::Container) -> bool) -> Result<(), Refusal> {
        let refuse = |what: String| {
            Err(Refusal::Forbidden(format!("container {:?} {what}, which is not allowed in a pod that shares devices", self.name)))
        };
        if self.security_context.as_ref().and_then(|context| context.privileged) == Some(true) {
            return refuse("is privileged and would see every device of the node".to_owned());
        }
        let mut variables = self.env.iter().flatten();
        let variable = variables.find(|variable| variable.name.starts_with(MPS_PREFIX) || self.shows(variable, asks));
        variable.map_or(Ok(()), |variable| refuse(format!("sets {}", variable.name)))
    }

    /// Whether a variable shows devices. A container that asks for none may say so.
    fn shows(&self, variable: &Variable, asks: &impl Fn(&proto::pod::Container) -> bool) -> bool {
        let says_none = variable.value_from.is_none() && NONE.contains(&variable.value.as_deref().unwrap_or_default());
        variable.name == VISIBLE_DEVICES && (!says_none || asks(&self.request()))
    }

    fn request(&self) -> proto::pod::Container {
        let resources = Deserialize::deserialize(&self.resources).unwrap_or_default();
        proto::pod::Container { resources, ..proto::pod::Container::default() }
    }
}
