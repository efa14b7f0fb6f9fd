//! The fields of a node that kube-scheduler compares with a pod's.

use proto::node::Node;
use proto::pod::Taint;
use proto::totals::CPU;

/// The fields of a node that kube-scheduler compares with a pod's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeFacts {
    /// The node's name.
    pub name: Box<str>,
    /// True for a cordoned node.
    pub unschedulable: bool,
    /// The taints with effect `NoSchedule` or `NoExecute`.
    pub hard_taints: Box<[Taint]>,
    /// All labels in one text, as lines of `key=value`, to save memory: thousands of nodes may have dozens of labels each.
    labels: Box<str>,
    /// The allocatable amounts by resource: whole units, of CPU thousandths.
    allocatable: Box<[(Box<str>, u64)]>,
}

impl NodeFacts {
    /// Reads a Node object.
    pub fn of(node: &Node) -> Self {
        let mut labels = String::new();
        for (key, value) in node.metadata.labels.iter().flatten() {
            // Neither a key nor a value may have an equals sign or a line break.
            for part in [key, "=", value, "\n"] {
                labels.push_str(part);
            }
        }
        let mut allocatable = Vec::with_capacity(node.status.allocatable.len());
        for (resource, amount) in &node.status.allocatable {
            let amount = if resource == CPU {
                amount.thousandths()
            } else {
                amount.units()
            };
            allocatable.push((resource.as_str().into(), amount));
        }
        let taints = node.spec.taints.iter().filter(|taint| taint.is_hard());
        Self {
            name: node.metadata.name.as_deref().unwrap_or_default().into(),
            unschedulable: node.spec.unschedulable,
            hard_taints: taints.cloned().collect(),
            labels: labels.into(),
            allocatable: allocatable.into(),
        }
    }

    /// The value of the node's label with this key.
    pub fn label(&self, key: &str) -> Option<&str> {
        // No key has an equals sign, so that the text in front of the first one is the whole key.
        let mut labels = self.labels.lines();
        labels.find_map(|label| label.strip_prefix(key)?.strip_prefix('='))
    }

    /// The allocatable amount of a resource in whole units, of CPU in thousandths; 0 if the node does not offer it.
    pub fn allocatable(&self, resource: &str) -> u64 {
        let mut amounts = self.allocatable.iter();
        let offered = amounts.find(|(name, _)| **name == *resource);
        offered.map_or(0, |(_, amount)| *amount)
    }

    /// Returns true if the node lists the resource among its allocatable ones, with any amount.
    pub fn lists(&self, resource: &str) -> bool {
        self.allocatable.iter().any(|(name, _)| **name == *resource)
    }
}
