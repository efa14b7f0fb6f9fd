//! The scheduling loop's view of nodes and of the pods on them, assumed pods included.
//!
//! Pure. A pod counts on its node from the moment it is assumed until it has ended or is gone, or its binding has failed.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, Pod};

use super::amounts::ResourceAmounts;

#[derive(Clone, Debug)]
pub(super) struct CachedNode {
    pub(super) node: Arc<Node>,
    pub(super) allocatable: ResourceAmounts,
    pub(super) used: ResourceAmounts,
}

#[derive(Debug)]
struct Holding {
    node: String,
    pod: Arc<Pod>,
    amounts: ResourceAmounts,
    assumed: bool,
}

#[derive(Debug, Default)]
pub(super) struct Cache {
    nodes: BTreeMap<String, CachedNode>,
    holdings: HashMap<String, Holding>,
}

impl Cache {
    /// Updates a node; true if a part that scheduling looks at has changed.
    pub(super) fn put_node(&mut self, name: &str, node: Node) -> bool {
        let known = self.nodes.get(name);
        let changed = known.is_none_or(|known| is_changed(&known.node, &node));
        let used = match known {
            Some(known) => known.used.clone(),
            None => self.used_on(name),
        };
        let view = CachedNode {
            allocatable: ResourceAmounts::allocatable(&node),
            node: Arc::new(node),
            used,
        };
        self.nodes.insert(name.to_owned(), view);
        changed
    }

    /// The amounts of the pods on a node; the watch of pods may show them before the node.
    fn used_on(&self, node: &str) -> ResourceAmounts {
        let mut used = ResourceAmounts::default();
        for held in self.holdings.values().filter(|held| held.node == node) {
            used.add(&held.amounts);
        }
        used
    }

    pub(super) fn remove_node(&mut self, name: &str) -> bool {
        self.nodes.remove(name).is_some()
    }

    /// Removes all other nodes than these; true if there were any.
    pub(super) fn retain_nodes(&mut self, names: &BTreeSet<String>) -> bool {
        let before = self.nodes.len();
        self.nodes.retain(|name, _| names.contains(name));
        self.nodes.len() < before
    }

    pub(super) fn uids(&self) -> impl Iterator<Item = &String> {
        self.holdings.keys()
    }

    pub(super) fn nodes(&self) -> &BTreeMap<String, CachedNode> {
        &self.nodes
    }

    pub(super) fn assume(&mut self, uid: &str, node: &str, pod: &Arc<Pod>, amounts: ResourceAmounts) {
        self.hold(uid, node, pod, amounts, true);
    }

    /// Counts a bound pod; true if it was not counted before.
    pub(super) fn bind(&mut self, uid: &str, node: &str, pod: &Arc<Pod>) -> bool {
        if let Some(held) = self.holdings.get_mut(uid)
            && held.node == node
            && !held.assumed
        {
            held.pod = Arc::clone(pod);
            return false;
        }
        // The API server has accepted the pod, so the quantities of its containers parse.
        let amounts = ResourceAmounts::of_pod(pod).unwrap_or_default();
        self.hold(uid, node, pod, amounts, false);
        true
    }

    pub(super) fn pods(&self) -> BTreeMap<String, Vec<Arc<Pod>>> {
        let mut pods: BTreeMap<String, Vec<Arc<Pod>>> = BTreeMap::new();
        for held in self.holdings.values() {
            let on_node = pods.entry(held.node.clone()).or_default();
            on_node.push(Arc::clone(&held.pod));
        }
        pods
    }

    pub(super) fn is_assumed(&self, uid: &str) -> bool {
        self.holdings.get(uid).is_some_and(|held| held.assumed)
    }

    /// Stops counting a pod; true if it was counted.
    pub(super) fn release(&mut self, uid: &str) -> bool {
        let Some(held) = self.holdings.remove(uid) else {
            return false;
        };
        if let Some(view) = self.nodes.get_mut(&held.node) {
            view.used.subtract(&held.amounts);
        }
        true
    }

    /// Counts a pod on a node, assumed or bound, in the place of an earlier count of the same pod.
    fn hold(&mut self, uid: &str, node: &str, pod: &Arc<Pod>, amounts: ResourceAmounts, assumed: bool) {
        self.release(uid);
        if let Some(view) = self.nodes.get_mut(node) {
            view.used.add(&amounts);
        }
        let holding = Holding {
            node: node.to_owned(),
            pod: Arc::clone(pod),
            amounts,
            assumed,
        };
        self.holdings.insert(uid.to_owned(), holding);
    }
}

/// Returns true if a node has changed in a way that may let another pod fit.
fn is_changed(old: &Node, new: &Node) -> bool {
    // A heartbeat every few seconds must not wake pods, so only fields count that a filter reads
    // (NodeSchedulingPropertiesChange).
    let allocatable = |node: &Node| node.status.as_ref().and_then(|status| status.allocatable.clone());
    let (before, after) = (&old.metadata, &new.metadata);
    old.spec != new.spec
        || before.labels != after.labels
        || before.annotations != after.annotations
        || allocatable(old) != allocatable(new)
        || conditions(old) != conditions(new)
}

/// Types and values of a node's conditions, without their heartbeats.
fn conditions(node: &Node) -> BTreeMap<&str, &str> {
    let all = node
        .status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten());
    all.map(|condition| (condition.type_.as_str(), condition.status.as_str()))
        .collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn node(gpu_mem: u32) -> Node {
        let allocatable = json!({"a/b": gpu_mem.to_string()});
        let status = json!({"allocatable": allocatable, "conditions": [{"type": "Ready", "status": "True"}]});
        serde_json::from_value(json!({"metadata": {"name": "n"}, "status": status})).unwrap()
    }

    fn pod(amount: &str) -> Arc<Pod> {
        let containers = json!([{"name": "c", "resources": {"requests": {"a/b": amount}}}]);
        Arc::new(
            serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": {"containers": containers}}))
                .unwrap(),
        )
    }

    fn used(cache: &Cache) -> i128 {
        cache.nodes()["n"].used.get("a/b")
    }

    #[test]
    fn a_pod_counts_once_from_assumption_to_release() {
        let mut cache = Cache::default();
        assert!(cache.put_node("n", node(10)));
        cache.assume("u", "n", &pod("3"), ResourceAmounts::of_pod(&pod("3")).unwrap());
        assert_eq!(used(&cache), 3_000);
        assert!(cache.is_assumed("u"));
        assert!(cache.bind("u", "n", &pod("3")));
        assert!(!cache.bind("u", "n", &pod("3")), "seen already");
        assert_eq!(used(&cache), 3_000);
        assert!(cache.release("u") && !cache.release("u"));
        assert_eq!(used(&cache), 0);
    }

    #[test]
    fn a_heartbeat_is_no_change() {
        let mut cache = Cache::default();
        cache.put_node("n", node(10));
        let mut beat = node(10);
        beat.metadata.resource_version = Some("7".to_owned());
        assert!(!cache.put_node("n", beat));
        assert!(cache.put_node("n", node(11)));
    }
}
