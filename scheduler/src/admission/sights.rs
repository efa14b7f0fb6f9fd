//! The parts of a pod that decide which devices its containers see, whatever was counted for it.
//!
//! Only what the pod itself says: variables of the image, and those that `envFrom` brings, are not known here.

use std::collections::BTreeMap;

use proto::resource::ResourceNames;
use serde::Deserialize;
use serde_json::Value;

use super::asks::Asks;

/// The variable that selects the devices NVIDIA's container runtime shows; a pod's own value wins over the plugin's.
pub(super) const VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";
/// Values by which a container says that it wants no device; an empty one counts as set.
const NONE: [&str; 3] = ["", "none", "void"];

/// The parts of a pod that decide what it sees.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Sights {
    #[serde(default)]
    metadata: Metadata,
    #[serde(default)]
    spec: Spec,
}

#[derive(Debug, Default, Deserialize)]
struct Metadata {
    #[serde(default)]
    annotations: Option<BTreeMap<String, String>>,
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

/// The parts of a container that decide what it sees.
#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Container {
    /// Its name.
    #[serde(default)]
    pub(super) name: String,
    #[serde(default)]
    env: Option<Vec<Variable>>,
    #[serde(default)]
    security_context: Option<SecurityContext>,
    #[serde(default)]
    resources: Value,
}

/// A variable that a container sets itself.
#[derive(Debug, Default, PartialEq, Deserialize)]
pub(super) struct Variable {
    /// Its name.
    #[serde(default)]
    pub(super) name: String,
    /// Its value, if that stands in the pod itself; the API server leaves an empty one out.
    #[serde(default)]
    pub(super) value: Option<String>,
    /// Where else its value comes from.
    #[serde(default, rename = "valueFrom")]
    pub(super) value_from: Option<Value>,
}

#[derive(Debug, Default, PartialEq, Deserialize)]
struct SecurityContext {
    #[serde(default)]
    privileged: Option<bool>,
}

impl Sights {
    /// All containers, ephemeral ones last.
    pub(super) fn containers(&self) -> impl Iterator<Item = &Container> {
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
    pub(super) fn added<'a>(&'a self, old: &'a Self) -> impl Iterator<Item = &'a Container> {
        let is_new = |container: &&Container| {
            !old.spec
                .ephemeral_containers
                .iter()
                .flatten()
                .any(|there| there.name == container.name)
        };
        self.spec.ephemeral_containers.iter().flatten().filter(is_new)
    }

    /// The annotations, in order of their keys.
    pub(super) fn annotations(&self) -> impl Iterator<Item = (&str, &str)> {
        self.metadata
            .annotations
            .iter()
            .flatten()
            .map(|(key, value)| (key.as_str(), value.as_str()))
    }

    /// The annotations that are new or have another value than before.
    pub(super) fn changed_annotations<'a>(
        &'a self,
        old: &'a Self,
    ) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.annotations()
            .filter(|(key, value)| !old.annotations().any(|there| there == (*key, *value)))
    }
}

impl Container {
    /// The variables that it sets itself.
    pub(super) fn variables(&self) -> impl Iterator<Item = &Variable> {
        self.env.iter().flatten()
    }

    /// Returns true if it runs privileged.
    pub(super) fn is_privileged(&self) -> bool {
        self.security_context
            .as_ref()
            .and_then(|context| context.privileged)
            == Some(true)
    }

    /// Our resources that it names.
    pub(super) fn asks(&self, names: &ResourceNames) -> Asks {
        Asks::of_container(&self.request(), names)
    }

    /// The resources that it asks for; none if they cannot be read.
    pub(super) fn request(&self) -> proto::pod::Container {
        let resources = Deserialize::deserialize(&self.resources).unwrap_or_default();
        proto::pod::Container {
            resources,
            ..proto::pod::Container::default()
        }
    }
}

impl Variable {
    /// Returns true if it says that no device is to be shown. A value from elsewhere may be anything.
    pub(super) fn says_none(&self) -> bool {
        self.value_from.is_none() && NONE.contains(&self.value.as_deref().unwrap_or_default())
    }
}
