//! The JSON of kube-scheduler's extender API, `k8s.io/kube-scheduler/extender/v1`. Its Go types have no JSON names, so keys are
//! capitalised and an absent map is `null`; pods and nodes inside keep their usual spelling.
//!
//! Names are borrowed from the request's bytes: a request may carry thousands of them.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::de;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

use crate::node::Node;
use crate::pod::{Pod, null_as_default};

/// The request of `filter` and `prioritize`: a pod, and nodes in one of two forms.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct ExtenderArgs<'a> {
    /// The pod to place.
    pub pod: Pod,
    /// Whole nodes, if the extender is not `nodeCacheCapable`; also from an autoscaler, about nodes that do not exist yet.
    #[serde(default)]
    pub nodes: Option<NodeList>,
    /// Names of nodes, if the extender is `nodeCacheCapable`.
    #[serde(default, borrow)]
    pub node_names: Option<Vec<Name<'a>>>,
}

/// The whole nodes of a request.
#[derive(Debug, Deserialize)]
pub struct NodeList {
    /// The nodes, with all fields of the request.
    #[serde(default, deserialize_with = "null_as_default")]
    pub items: Vec<WholeNode>,
}

/// A whole node of a request, which the answer repeats unchanged.
#[derive(Debug)]
pub struct WholeNode {
    /// All fields of the node in the request.
    pub raw: Value,
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
        // All fields are kept: kube-scheduler takes the nodes of the answer in place of its own.
        let raw = Value::deserialize(deserializer)?;
        // From `raw`, which is parsed already, so that the bytes are not read twice.
        let node = Node::deserialize(&raw).map_err(de::Error::custom)?;
        Ok(Self { raw, node })
    }
}

impl Serialize for WholeNode {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.raw.serialize(serializer)
    }
}

/// A node name, borrowed from the request unless it contains a JSON escape: thousands of names cost no allocation.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
pub struct Name<'a>(#[serde(borrow)] pub Cow<'a, str>);

/// The answer of `filter`.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct ExtenderFilterResult<'a> {
    /// The nodes that fit, if the request has whole nodes.
    pub nodes: Option<FittingNodes<'a>>,
    /// The names of the nodes that fit, if the request has names. A name that the request lacks is an error to kube-scheduler.
    pub node_names: Option<Vec<&'a str>>,
    /// The reasons of nodes that do not fit and where preemption may help, by name.
    // A list, because a map of thousands of names would be built only to be written.
    #[serde(serialize_with = "as_map")]
    pub failed_nodes: Vec<(&'a str, Cow<'a, str>)>,
    /// The reasons of nodes that do not fit and where preemption cannot help, by name.
    #[serde(serialize_with = "as_map")]
    pub failed_and_unresolvable_nodes: Vec<(&'a str, Cow<'a, str>)>,
    /// An error that fails the whole scheduling cycle of the pod, unless the extender is `ignorable`; empty without one.
    pub error: String,
}

/// The whole nodes of an answer, as they were in the request.
#[derive(Debug, Serialize)]
pub struct FittingNodes<'a> {
    /// The nodes, with all fields of the request.
    pub items: Vec<&'a WholeNode>,
}

fn as_map<S: Serializer>(entries: &[(&str, Cow<'_, str>)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(entries.iter().map(|(name, reason)| (name, reason)))
}

/// One node's score in the answer of `prioritize`, which is a bare array of them.
#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct HostPriority<'a> {
    /// The node's name.
    pub host: &'a str,
    /// 0 to 10, higher is better; kube-scheduler multiplies it by the extender's weight, and by 10.
    pub score: i64,
}

/// The request of `bind`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct ExtenderBindingArgs {
    /// The pod's name.
    pub pod_name: String,
    /// The pod's namespace.
    pub pod_namespace: String,
    /// The pod's UID.
    #[serde(rename = "PodUID")]
    pub pod_uid: String,
    /// The node that kube-scheduler chose.
    pub node: String,
}

/// The answer of `bind`. Sent with HTTP 200 also on failure, since kube-scheduler drops the text of any other status.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct ExtenderBindingResult {
    /// The reason that the pod was not bound; empty if it was.
    pub error: String,
}

/// The request of `preempt`: UIDs for an extender that is `nodeCacheCapable`, and whole pods for any other.
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

/// A pod that preemption would evict.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetaPod {
    /// The pod's UID.
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
        // kube-scheduler sends one of the two forms, and null for the other.
        let mut proposals = self.node_name_to_meta_victims.unwrap_or_default();
        for (node, victims) in self.node_name_to_victims.into_iter().flatten() {
            let mut by_uid = MetaVictims {
                n_pdb_violations: victims.n_pdb_violations,
                ..MetaVictims::default()
            };
            for pod in victims.pods {
                let uid = pod.metadata.uid.unwrap_or_default();
                by_uid.pods.push(MetaPod { uid });
            }
            proposals.entry(node).or_insert(by_uid);
        }
        (self.pod, proposals)
    }
}

impl MetaVictims {
    /// Returns true if two lists of victims have the same pods, in any order.
    pub fn are_same_pods(&self, other: &Self) -> bool {
        self.pods.len() == other.pods.len() && self.pods.iter().all(|pod| other.pods.contains(pod))
    }
}

/// The name of a volume, and the kinds of volumes over which no two pods conflict: evicting one pod helps no other.
const OWN_VOLUMES: [&str; 6] = [
    "name",
    "configMap",
    "downwardAPI",
    "emptyDir",
    "projected",
    "secret",
];

/// Returns true if host ports, volumes or rules about other pods may keep the pod off a node: each proposed victim may be needed.
pub fn depends_on_other_pods(request: &[u8], pod: &Pod) -> Result<bool, serde_json::Error> {
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Request {
        pod: Value,
    }
    // A second pass over the request, since [`Pod`] lacks host ports and the kinds of volumes.
    let request: Request = serde_json::from_slice(request)?;
    let spec = request.pod.get("spec").unwrap_or(&Value::Null);
    for container in list(spec, "containers").chain(list(spec, "initContainers")) {
        for port in list(container, "ports") {
            // A port of 0 is one that a template leaves open.
            if port.get("hostPort").and_then(Value::as_u64).unwrap_or(0) > 0 {
                return Ok(true);
            }
        }
    }
    for volume in list(spec, "volumes").filter_map(Value::as_object) {
        // Pods may conflict over a kind of volume that this code does not know.
        if volume.keys().any(|field| !OWN_VOLUMES.contains(&field.as_str())) {
            return Ok(true);
        }
    }
    Ok(pod.spec.has_required_pod_rules())
}

/// The entries of a list in a JSON object; none if it is absent.
fn list<'a>(object: &'a Value, field: &str) -> impl Iterator<Item = &'a Value> + use<'a> {
    let entries = object.get(field).and_then(Value::as_array);
    entries.into_iter().flatten()
}

#[cfg(test)]
mod tests;
