//! The fields of a waiting pod that kube-scheduler compares with nodes.

use std::collections::{BTreeMap, BTreeSet};

use proto::pod::{NodeSelector, Pod, PodCondition, Toleration};

use super::node::NodeFacts;
use super::requests::{PodRequests, requests_of};

/// The fields of a waiting pod that kube-scheduler compares with nodes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PodRules {
    /// The node that the manifest names; a pod of the cluster that names one is bound.
    pub node_name: Option<Box<str>>,
    /// The labels that the node must have.
    pub node_selector: BTreeMap<String, String>,
    /// The terms of required node affinity, of which the node has to match one.
    pub affinity: Option<NodeSelector>,
    /// The taints that the pod tolerates.
    pub tolerations: Vec<Toleration>,
    /// All amounts that the pod requests.
    pub requests: PodRequests,
    /// The pod's priority: other pods that are nominated to a node count there if theirs is at least as high.
    pub priority: i32,
    /// The names of the scheduling gates: kube-scheduler does not try the pod before its last one is removed.
    pub gates: Box<[Box<str>]>,
    /// The condition `PodScheduled`, if kube-scheduler has written one that is not true.
    pub last_attempt: Option<PodCondition>,
}

impl PodRules {
    /// Reads a pod.
    pub fn of(pod: &Pod) -> Self {
        let gates = pod.spec.scheduling_gates.iter();
        let node_name = pod.spec.node_name.as_deref().filter(|name| !name.is_empty());
        Self {
            node_name: node_name.map(Into::into),
            node_selector: pod.spec.node_selector.clone(),
            affinity: pod.spec.affinity.node_affinity.required.clone(),
            tolerations: pod.spec.tolerations.clone(),
            requests: requests_of(pod),
            priority: pod.priority(),
            gates: gates.map(|gate| gate.name.as_str().into()).collect(),
            last_attempt: pod.unscheduled_condition().cloned(),
        }
    }

    /// The keys of the labels by which the pod chooses its nodes, each once.
    pub(crate) fn label_keys(&self) -> BTreeSet<&str> {
        let of_selector = self.node_selector.keys().map(String::as_str);
        let of_affinity = self.affinity.iter().flat_map(NodeSelector::label_keys);
        of_selector.chain(of_affinity).collect()
    }

    /// Returns true if the labels and the name of a node match the selector and the affinity.
    pub(super) fn selects(&self, node: &NodeFacts) -> bool {
        let mut selector = self.node_selector.iter();
        let has_labels = selector.all(|(key, value)| node.label(key) == Some(value));
        let affinity = self.affinity.as_ref();
        has_labels && affinity.is_none_or(|affinity| affinity.matches(&node.name, |key| node.label(key)))
    }
}
