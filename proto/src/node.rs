//! The parts of a Node that gpushare reads.

use std::borrow::Cow;
use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use kube::core::ClusterResourceScope;
use serde::{Deserialize, Serialize};

use crate::pod::{QuantityText, Taint, null_as_default};

/// A node as gpushare sees it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Node {
    /// Name, labels and annotations.
    #[serde(default)]
    pub metadata: ObjectMeta,
    /// What keeps pods away from it.
    #[serde(default)]
    pub spec: NodeSpec,
    /// Its resources.
    #[serde(default)]
    pub status: NodeStatus,
}

/// What keeps pods away from a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeSpec {
    /// Marks that pods have to tolerate.
    #[serde(
        default,
        deserialize_with = "null_as_default",
        skip_serializing_if = "Vec::is_empty"
    )]
    pub taints: Vec<Taint>,
}

/// Resources of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStatus {
    /// Everything the node has, healthy or not.
    #[serde(default, deserialize_with = "null_as_default")]
    pub capacity: BTreeMap<String, QuantityText>,
    /// What pods may be given.
    #[serde(default, deserialize_with = "null_as_default")]
    pub allocatable: BTreeMap<String, QuantityText>,
    /// What runs there.
    #[serde(rename = "nodeInfo", default)]
    pub node_info: NodeInfo,
}

/// Versions of what runs on a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeInfo {
    /// Name and version of the container runtime, such as `containerd://2.1.9`.
    #[serde(default)]
    pub container_runtime_version: String,
}

impl Node {
    /// The whole, non-negative number of a resource that the node has; none if it is absent or no such number.
    pub fn capacity(&self, resource: &str) -> Option<u64> {
        self.status.capacity.get(resource)?.quantity().ok()?.unsigned()
    }
}

impl Resource for Node {
    type DynamicType = ();
    type Scope = ClusterResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        "Node".into()
    }

    fn group((): &()) -> Cow<'_, str> {
        "".into()
    }

    fn version((): &()) -> Cow<'_, str> {
        "v1".into()
    }

    fn plural((): &()) -> Cow<'_, str> {
        "nodes".into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}
