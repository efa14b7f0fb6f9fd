//! The fields of a Node that gpushare reads, decoded from watches and from the extender's requests.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use serde::{Deserialize, Deserializer, Serialize};

use crate::pod::{QuantityText, Taint, is_default, null_as_default};

/// The condition of a Node that is False while its plugin finds no GPU that pods can share.
pub const CONDITION_SHARING_READY: &str = "GPUSharingReady";

/// The fields of a Node that gpushare reads.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, Resource)]
#[resource(inherit = k8s_openapi::api::core::v1::Node)]
// Absent fields are empty: an extender request may carry the template of a node that has no status yet.
#[serde(default)]
pub struct Node {
    /// Name, labels and annotations.
    pub metadata: ObjectMeta,
    /// The desired state.
    pub spec: NodeSpec,
    /// The observed state.
    pub status: NodeStatus,
}

/// The desired state of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeSpec {
    /// True for a cordoned node (`kubectl cordon`).
    #[serde(skip_serializing_if = "is_default")]
    pub unschedulable: bool,
    /// Taints, which pods have to tolerate.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "Vec::is_empty")]
    pub taints: Vec<Taint>,
}

/// The observed state of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeStatus {
    /// All amounts by resource, those of unhealthy devices included.
    #[serde(deserialize_with = "null_as_default")]
    pub capacity: BTreeMap<String, QuantityText>,
    /// The amounts that pods may request together, by resource.
    #[serde(deserialize_with = "null_as_default")]
    pub allocatable: BTreeMap<String, QuantityText>,
    /// Versions of the node's software.
    #[serde(rename = "nodeInfo")]
    pub node_info: NodeInfo,
    /// The condition [`CONDITION_SHARING_READY`], if the node has it; no other.
    #[serde(deserialize_with = "own_conditions", skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<NodeCondition>,
}

/// A condition of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeCondition {
    /// The type of the condition.
    #[serde(rename = "type")]
    pub condition_type: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// The reason in one word.
    pub reason: String,
    /// The reason in a sentence.
    pub message: String,
}

/// Reads the condition [`CONDITION_SHARING_READY`] alone: kubelet's conditions change with every heartbeat.
fn own_conditions<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<NodeCondition>, D::Error> {
    let mut conditions: Vec<NodeCondition> = null_as_default(deserializer)?;
    conditions.retain(|condition| condition.condition_type == CONDITION_SHARING_READY);
    Ok(conditions)
}

/// Versions of a node's software.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeInfo {
    /// Name and version of the container runtime, such as `containerd://2.1.9`.
    pub container_runtime_version: String,
}

impl Node {
    /// The condition [`CONDITION_SHARING_READY`]; `None` if the node's plugin has never lacked GPUs to share.
    pub fn sharing_condition(&self) -> Option<&NodeCondition> {
        self.status.conditions.first()
    }

    /// The node's capacity of a resource, in whole units; `None` if it is absent, negative or not a whole number.
    pub fn capacity(&self, resource: &str) -> Option<u64> {
        // Capacity, not allocatable, because it includes unhealthy devices.
        self.status.capacity.get(resource)?.quantity().ok()?.unsigned()
    }
}
