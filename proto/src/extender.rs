//! kube-scheduler's extender JSON, v1. Its Go types have no JSON names, so keys are capitalised;
//! pods and nodes inside keep their usual spelling.
//!
//! Names are borrowed from the request's bytes: a request may carry thousands of them.

use std::borrow::Cow;
use std::fmt;

use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::node::Node;
use crate::pod::{Pod, null_as_default};

mod preemption;

pub use preemption::{
    ExtenderPreemptionArgs, ExtenderPreemptionResult, MetaPod, MetaVictims, Victims, minds_neighbours,
};

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

/// A list of whole nodes; each is kept as it came, to be handed back unchanged.
#[derive(Debug, Default, Deserialize, Serialize)]
pub struct NodeList {
    /// The nodes, with every field that the sender knew.
    #[serde(default, deserialize_with = "null_as_default")]
    pub items: Vec<WholeNode>,
}

/// A node both as it came and as gpushare reads it.
#[derive(Debug)]
pub struct WholeNode {
    /// As it came.
    pub raw: serde_json::Value,
    /// As gpushare reads it.
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

/// A name, borrowed from the request unless it has an escape in it.
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
    /// Fitting nodes, when whole nodes were sent.
    pub nodes: Option<NodeList>,
    /// Fitting nodes, when names were sent.
    pub node_names: Option<Vec<&'a str>>,
    /// Nodes that do not fit, where preemption may help, with the reason.
    #[serde(serialize_with = "as_map")]
    pub failed_nodes: Vec<(&'a str, Cow<'a, str>)>,
    /// Nodes that do not fit, where preemption cannot help, with the reason.
    #[serde(serialize_with = "as_map")]
    pub failed_and_unresolvable_nodes: Vec<(&'a str, Cow<'a, str>)>,
    /// Fails the whole scheduling cycle; empty if all is well.
    pub error: String,
}

fn as_map<S: Serializer>(entries: &[(&str, Cow<'_, str>)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(entries.iter().map(|(name, text)| (name, text)))
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

#[cfg(test)]
mod tests;
