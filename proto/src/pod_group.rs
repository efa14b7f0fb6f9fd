//! Groups of pods that are placed together: their wish for one node or one link, and the objects that have their size.
//!
//! Reads `PodGroup`s of Kubernetes and of coscheduling. Koordinator's own object is not read: its groups have their size on their
//! pods.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::str::FromStr;

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::annotation::AnnotationError;
use crate::excerpt::quoted;
use crate::pod::group::n_members;

/// Annotation of a `PodGroup` or of its members: the [`GroupDomain`] in which all members are to be.
pub const GROUP_DOMAIN: &str = "gpushare/group-domain";
/// Annotation of a `PodGroup` or of its members: the [`DomainPolicy`].
pub const GROUP_DOMAIN_POLICY: &str = "gpushare/group-domain-policy";

/// The plural name of `PodGroup`s in each of their APIs.
pub const POD_GROUPS: &str = "podgroups";

/// The part of the cluster in which all members of a group are to be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GroupDomain {
    /// `any`: the members may be on different nodes.
    #[default]
    Any,
    /// `node`: one node.
    Node,
    /// `link`: GPUs of one link group of one node.
    Link,
}

/// The outcome if no domain has room for all members of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DomainPolicy {
    /// `required`: the members are refused.
    Required,
    /// `preferred`: the members are placed as those of any group.
    #[default]
    Preferred,
}

impl GroupDomain {
    /// All domains.
    pub const ALL: [Self; 3] = [Self::Any, Self::Node, Self::Link];

    /// The name in annotations.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Any => "any",
            Self::Node => "node",
            Self::Link => "link",
        }
    }
}

impl DomainPolicy {
    /// The name in annotations.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Required => "required",
            Self::Preferred => "preferred",
        }
    }
}

impl FromStr for GroupDomain {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        named(text, Self::ALL, Self::as_str)
    }
}

/// The one of several values with the name `text`.
fn named<T: Copy, const N: usize>(text: &str, all: [T; N], name: fn(T) -> &'static str) -> Result<T, String> {
    let found = all.into_iter().find(|value| name(*value) == text);
    found.ok_or_else(|| format!("{} is none of {}", quoted(text), all.map(name).join(", ")))
}

/// The wish of a group for one domain; without annotations `any`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct GroupWish {
    /// The domain in which all members are to be.
    pub domain: GroupDomain,
    /// The outcome if no domain has room for all of them.
    pub policy: DomainPolicy,
}

impl GroupWish {
    /// Reads the annotations of a `PodGroup` or a pod; `None` if it has neither of the two.
    pub fn read(annotations: Option<&BTreeMap<String, String>>) -> Result<Option<Self>, AnnotationError> {
        let text = |key: &str| annotations?.get(key);
        let mut wish = None;
        if let Some(text) = text(GROUP_DOMAIN) {
            let domain = text
                .parse()
                .map_err(|rule: String| AnnotationError::new(GROUP_DOMAIN, rule))?;
            wish.get_or_insert(Self::default()).domain = domain;
        }
        if let Some(text) = text(GROUP_DOMAIN_POLICY) {
            let all = [DomainPolicy::Required, DomainPolicy::Preferred];
            let policy = named(text, all, DomainPolicy::as_str)
                .map_err(|rule| AnnotationError::new(GROUP_DOMAIN_POLICY, rule))?;
            wish.get_or_insert(Self::default()).policy = policy;
        }
        Ok(wish)
    }
}

/// An API in which `PodGroup`s are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PodGroupApi {
    /// Kubernetes 1.37 and later.
    V1Beta1,
    /// Kubernetes 1.37, if an operator turns it on.
    V1Alpha3,
    /// Kubernetes 1.36, if an operator turns it on.
    V1Alpha2,
    /// The custom resource of the coscheduling plugin.
    Coscheduling,
}

impl PodGroupApi {
    /// The APIs of Kubernetes, the newest first.
    pub const NATIVE: [Self; 3] = [Self::V1Beta1, Self::V1Alpha3, Self::V1Alpha2];

    /// `group/version`.
    pub const fn api_version(self) -> &'static str {
        match self {
            Self::V1Beta1 => "scheduling.k8s.io/v1beta1",
            Self::V1Alpha3 => "scheduling.k8s.io/v1alpha3",
            Self::V1Alpha2 => "scheduling.k8s.io/v1alpha2",
            Self::Coscheduling => "scheduling.x-k8s.io/v1alpha1",
        }
    }

    fn group_and_version(self) -> (&'static str, &'static str) {
        self.api_version().split_once('/').unwrap_or_default()
    }
}

/// A `PodGroup` of any of its APIs. The API is not part of it: lists leave `apiVersion` out of their items.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct PodGroup {
    /// Name, namespace and annotations.
    pub metadata: ObjectMeta,
    /// The desired state. JSON, as a custom resource may have any schema.
    pub spec: Value,
}

impl PodGroup {
    /// The least number of members that are placed together, within the bounds of 32 bits; `None` for a group without a size.
    pub fn min_count(&self) -> Option<u32> {
        // A `basic` policy of Kubernetes' APIs has no size.
        let count = match self.spec.pointer("/schedulingPolicy/gang") {
            Some(gang) if !gang.is_null() => gang.get("minCount"),
            // Of coscheduling's API.
            _ => self.spec.get("minMember"),
        };
        count?.as_i64().map(n_members)
    }

    /// `namespace/name`, as [`crate::pod::GroupRef::key`] of the members has it.
    pub fn key(&self) -> Box<str> {
        let namespace = self.metadata.namespace.as_deref().unwrap_or_default();
        let name = self.metadata.name.as_deref().unwrap_or_default();
        format!("{namespace}/{name}").into()
    }
}

impl Resource for PodGroup {
    type DynamicType = PodGroupApi;
    type Scope = NamespaceResourceScope;

    fn kind(_: &PodGroupApi) -> Cow<'_, str> {
        "PodGroup".into()
    }

    fn group(api: &PodGroupApi) -> Cow<'_, str> {
        api.group_and_version().0.into()
    }

    fn version(api: &PodGroupApi) -> Cow<'_, str> {
        api.group_and_version().1.into()
    }

    fn plural(_: &PodGroupApi) -> Cow<'_, str> {
        POD_GROUPS.into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

#[cfg(test)]
mod tests;
