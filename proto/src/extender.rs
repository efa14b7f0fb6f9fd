//! kube-scheduler's extender JSON, v1. Its Go types have no JSON names, so keys are capitalised and an absent map is `null`;
//! pods and nodes inside keep their usual spelling.
//!
//! Names are borrowed from the request's bytes: a request may carry thousands of them.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::node::Node;
use crate::pod::{Pod, null_as_default};

/// The request of `filter` and `prioritize`: a pod, and nodes in one of two forms.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct ExtenderArgs<'a> {
    /// The pod to place.
    pub pod: Pod,
    /// Whole nodes: the extender is not `nodeCacheCapable`, or an autoscaler asks about nodes that do not exist yet.
    #[serde(default)]
    pub nodes: Option<NodeList>,
    /// Names only: the extender is `nodeCacheCapable`.
    #[serde(default, borrow)]
    pub node_names: Option<Vec<Name<'a>>>,
}

/// A list of whole nodes, which the answer repeats unchanged.
#[derive(Debug, Default, Deserialize, Serialize)]
pub struct NodeList {
    /// The nodes, with all fields of the request.
    #[serde(default, deserialize_with = "null_as_default")]
    pub items: Vec<WholeNode>,
}

/// A whole node of a request.
#[derive(Debug)]
pub struct WholeNode {
    /// All fields of the request.
    pub raw: serde_json::Value,
    /// The fields that gpushare reads.
    pub node: Node,
}

impl WholeNode {
    /// The node's name; empty if it has none.
    pub fn name(&self) -> &str {
        self.node.metadata.name.as_deref().unwrap_or_default()
    }
}

impl<'de> Deserialize<'de> for WholeNode {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = serde_json::Value::deserialize(deserializer)?;
        let node = Node::deserialize(&raw).map_err(de::Error::custom)?;
        Ok(Self { raw, node })
    }
}

impl Serialize for WholeNode {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.raw.serialize(serializer)
    }
}

/// A node name, borrowed from the request unless it contains a JSON escape.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name<'a>(pub Cow<'a, str>);

impl<'de: 'a, 'a> Deserialize<'de> for Name<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(NameVisitor)
    }
}

struct NameVisitor;

impl<'de> Visitor<'de> for NameVisitor {
    type Value = Name<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a node name")
    }

    // A name without escapes is borrowed from the request's bytes, so that thousands of names cost no allocation.
    fn visit_borrowed_str<E: de::Error>(self, name: &'de str) -> Result<Self::Value, E> {
        Ok(Name(Cow::Borrowed(name)))
    }

    fn visit_str<E: de::Error>(self, name: &str) -> Result<Self::Value, E> {
        Ok(Name(Cow::Owned(name.to_owned())))
    }
}

/// The answer of `filter`.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct ExtenderFilterResult<'a> {
    /// Fitting nodes, if the request has whole nodes.
    pub nodes: Option<NodeList>,
    /// Fitting nodes, if the request has names.
    pub node_names: Option<Vec<&'a str>>,
    /// Reasons of nodes that do not fit, where preemption may help.
    #[serde(serialize_with = "as_map")]
    pub failed_nodes: Vec<(&'a str, Cow<'a, str>)>,
    /// Reasons of nodes that do not fit, where preemption cannot help.
    #[serde(serialize_with = "as_map")]
    pub failed_and_unresolvable_nodes: Vec<(&'a str, Cow<'a, str>)>,
    /// Fails the whole scheduling cycle; empty without an error.
    pub error: String,
}

fn as_map<S: Serializer>(entries: &[(&str, Cow<'_, str>)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(entries.iter().map(|(name, reason)| (name, reason)))
}

/// One entry of the answer of `prioritize`, which is a bare array.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct HostPriority<'a> {
    /// Node name.
    pub host: &'a str,
    /// 0 to 10.
    pub score: i64,
}

/// The request of `bind`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct ExtenderBindingArgs {
    /// Pod name.
    pub pod_name: String,
    /// Pod namespace.
    pub pod_namespace: String,
    /// Pod UID.
    #[serde(rename = "PodUID")]
    pub pod_uid: String,
    /// The node that kube-scheduler chose.
    pub node: String,
}

/// The answer of `bind`: an empty error means bound. Sent with HTTP 200 also on failure, or kube-scheduler drops the text.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct ExtenderBindingResult {
    /// Why the pod was not bound.
    pub error: String,
}

/// The request of `preempt`.
///
/// kube-scheduler sends UIDs to an extender that is `nodeCacheCapable`, and whole pods to any other.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct ExtenderPreemptionArgs {
    /// The pod that no node fits.
    pub pod: Pod,
    /// The proposed victims of each node, as whole pods.
    #[serde(default)]
    pub node_name_to_victims: Option<BTreeMap<String, Victims>>,
    /// The proposed victims of each node, by UID.
    #[serde(default)]
    pub node_name_to_meta_victims: Option<BTreeMap<String, MetaVictims>>,
}

/// Victims on one node, as whole pods.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Victims {
    /// The pods, in order of falling priority.
    #[serde(default, deserialize_with = "null_as_default")]
    pub pods: Vec<Pod>,
    /// The number of these pods whose eviction violates a `PodDisruptionBudget`.
    #[serde(default, rename = "NumPDBViolations")]
    pub n_pdb_violations: i64,
}

/// Victims on one node, by UID.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct MetaVictims {
    /// The pods, in order of falling priority.
    #[serde(default, deserialize_with = "null_as_default")]
    pub pods: Vec<MetaPod>,
    /// The number of these pods whose eviction violates a `PodDisruptionBudget`.
    #[serde(default, rename = "NumPDBViolations")]
    pub n_pdb_violations: i64,
}

/// One victim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetaPod {
    /// Its UID.
    #[serde(rename = "UID")]
    pub uid: String,
}

/// The answer of `preempt`. A node without an entry is no candidate; an entry has at least one victim.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct ExtenderPreemptionResult {
    /// The victims of each candidate.
    pub node_name_to_meta_victims: BTreeMap<String, MetaVictims>,
}

impl ExtenderPreemptionArgs {
    /// The pod, and the proposed victims of each node by UID, from either form of the request.
    pub fn into_proposals(self) -> (Pod, BTreeMap<String, MetaVictims>) {
        let proposals = match (self.node_name_to_meta_victims, self.node_name_to_victims) {
            (Some(by_uid), _) => by_uid,
            (None, whole) => whole
                .into_iter()
                .flatten()
                .map(|(node, victims)| (node, victims.into()))
                .collect(),
        };
        (self.pod, proposals)
    }
}

impl MetaVictims {
    /// Returns true if both name the same pods, in any order.
    pub fn are_same_pods(&self, other: &Self) -> bool {
        self.pods.len() == other.pods.len() && self.pods.iter().all(|pod| other.pods.contains(pod))
    }
}

impl From<Victims> for MetaVictims {
    fn from(victims: Victims) -> Self {
        let pods = victims.pods.into_iter().map(|pod| MetaPod {
            uid: pod.metadata.uid.unwrap_or_default(),
        });
        Self {
            pods: pods.collect(),
            n_pdb_violations: victims.n_pdb_violations,
        }
    }
}

/// The fields of a pod's spec for which it competes with other pods of its node: host ports, and volumes that one pod or one
/// node may use at a time.
#[derive(Debug, Default, Deserialize)]
struct SharedResources {
    #[serde(default, deserialize_with = "null_as_default")]
    containers: Vec<ContainerPorts>,
    #[serde(default, rename = "initContainers", deserialize_with = "null_as_default")]
    init_containers: Vec<ContainerPorts>,
    #[serde(default, deserialize_with = "null_as_default")]
    volumes: Vec<serde_json::Map<String, serde_json::Value>>,
}

#[derive(Debug, Default, Deserialize)]
struct ContainerPorts {
    #[serde(default, deserialize_with = "null_as_default")]
    ports: Vec<Port>,
}

#[derive(Debug, Default, Deserialize)]
struct Port {
    #[serde(default, rename = "hostPort")]
    host_port: Option<i32>,
}

impl Port {
    fn is_of_host(&self) -> bool {
        self.host_port.is_some_and(|port| port > 0)
    }
}

/// Fields of volumes that no other pod can use, so that evicting a pod does not free them.
const OWN_VOLUMES: [&str; 6] = [
    "name",
    "configMap",
    "downwardAPI",
    "emptyDir",
    "projected",
    "secret",
];

/// Returns true if other pods may keep the pod off a node by more than the resources that they use: by host ports, volumes, or
/// rules about pods near by. Every victim that kube-scheduler proposes may then be needed.
///
/// # Errors
/// The request cannot be read.
pub fn depends_on_other_pods(request: &[u8], pod: &Pod) -> Result<bool, serde_json::Error> {
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Request {
        pod: Spec,
    }
    #[derive(Deserialize)]
    struct Spec {
        #[serde(default)]
        spec: SharedResources,
    }
    // A second pass over the request: pods in memory do without these fields, which no other code reads.
    let Request { pod: Spec { spec } } = serde_json::from_slice(request)?;
    let mut containers = spec.containers.iter().chain(&spec.init_containers);
    let has_host_port = containers.any(|container| container.ports.iter().any(Port::is_of_host));
    let mut volume_fields = spec.volumes.iter().flat_map(serde_json::Map::keys);
    let has_shared_volume = volume_fields.any(|field| !OWN_VOLUMES.contains(&field.as_str()));
    Ok(has_host_port || has_shared_volume || pod.spec.has_required_pod_rules())
}

#[cfg(test)]
mod tests;
