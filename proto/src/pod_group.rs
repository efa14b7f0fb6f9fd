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

/// Annotation of a `PodGroup` or of its members: the part of the cluster in which all members are to be, one of
/// [`GroupDomain::ALL`].
pub const GROUP_DOMAIN: &str = "gpushare/group-domain";
/// Annotation of a `PodGroup` or of its members: the outcome if no such domain has room, one of [`DomainPolicy::ALL`].
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

/// A text that is the name of no domain or policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text} is none of {choice}")]
pub struct GroupWishError {
    text: String,
    choice: String,
}

impl GroupWishError {
    fn new(text: &str, choice: &[&str]) -> Self {
        Self {
            text: quoted(text),
            choice: choice.join(", "),
        }
    }
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
    /// All policies.
    pub const ALL: [Self; 2] = [Self::Required, Self::Preferred];

    /// The name in annotations.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Required => "required",
            Self::Preferred => "preferred",
        }
    }
}

impl FromStr for GroupDomain {
    type Err = GroupWishError;

    fn from_str(text: &str) -> Result<Self, GroupWishError> {
        let named = Self::ALL.into_iter().find(|domain| domain.as_str() == text);
        named.ok_or_else(|| GroupWishError::new(text, &Self::ALL.map(Self::as_str)))
    }
}

impl FromStr for DomainPolicy {
    type Err = GroupWishError;

    fn from_str(text: &str) -> Result<Self, GroupWishError> {
        let named = Self::ALL.into_iter().find(|policy| policy.as_str() == text);
        named.ok_or_else(|| GroupWishError::new(text, &Self::ALL.map(Self::as_str)))
    }
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
    ///
    /// # Errors
    /// A value is none of those that its annotation may have.
    pub fn read(annotations: Option<&BTreeMap<String, String>>) -> Result<Option<Self>, AnnotationError> {
        let domain = read_name(annotations, GROUP_DOMAIN)?;
        let policy = read_name(annotations, GROUP_DOMAIN_POLICY)?;
        if domain.is_none() && policy.is_none() {
            return Ok(None);
        }
        Ok(Some(Self {
            domain: domain.unwrap_or_default(),
            policy: policy.unwrap_or_default(),
        }))
    }
}

/// Parses the value of an annotation, if it is there.
fn read_name<T: FromStr<Err = GroupWishError>>(
    annotations: Option<&BTreeMap<String, String>>,
    key: &'static str,
) -> Result<Option<T>, AnnotationError> {
    let text = annotations.and_then(|annotations| annotations.get(key));
    text.map(|text| text.parse())
        .transpose()
        .map_err(|error: GroupWishError| AnnotationError::new(key, error.to_string()))
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

    /// The two parts of [`Self::api_version`].
    fn group_and_version(self) -> (&'static str, &'static str) {
        self.api_version().split_once('/').unwrap_or_default()
    }
}

/// A `PodGroup` of any of its APIs, with the fields that are read of it.
///
/// The API is not part of the object: lists leave `apiVersion` out of their items.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct PodGroup {
    /// Name, namespace and annotations.
    pub metadata: ObjectMeta,
    /// The size of the group.
    pub spec: Option<PodGroupSpec>,
}

/// The desired state of a `PodGroup`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodGroupSpec {
    /// Of Kubernetes' APIs.
    pub scheduling_policy: Option<PodGroupSchedulingPolicy>,
    /// Of coscheduling's API: the least number of members that may run. JSON, as a custom resource may have any schema.
    pub min_member: Option<Value>,
}

/// The way in which kube-scheduler places the members of a `PodGroup`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct PodGroupSchedulingPolicy {
    /// Present if members are placed all or none; a `basic` policy has no size.
    pub gang: Option<GangSchedulingPolicy>,
}

/// The size of a `PodGroup` whose members are placed all or none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GangSchedulingPolicy {
    /// The least number of members that are placed together.
    pub min_count: Option<Value>,
}

impl PodGroup {
    /// The least number of members that are placed together; `None` for a group without a size. A negative number is read as 0, a
    /// larger one than 32 bits hold as the largest.
    pub fn min_count(&self) -> Option<u32> {
        let spec = self.spec.as_ref()?;
        let gang = spec
            .scheduling_policy
            .as_ref()
            .and_then(|policy| policy.gang.as_ref());
        let count = match gang {
            Some(gang) => &gang.min_count,
            None => &spec.min_member,
        };
        count.as_ref()?.as_i64().map(n_members)
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
