//! The pods that filters refused for want of room on devices, each with the nodes that its last request named and that refused
//! it.
//!
//! kube-scheduler asks about the nodes that its own filters pass, so that taints, affinity, ports and sums keep the pod from none
//! of these nodes. Nodes are remembered by their numbers in the fleet, one bit for each.

use std::cmp::Reverse;
use std::time::Instant;

use placement::NodeId;
use rustc_hash::FxHashMap;

use crate::bind::PodId;

/// The most pods that are remembered; the one that was asked about least recently gives way.
const MAX_PODS: usize = 1024;

/// The number of nodes in one word of a set.
const WORD: usize = u64::BITS as usize;

/// The pods that filters refused for want of room on devices.
#[derive(Debug, Default)]
pub(crate) struct RefusedPods {
    pods: FxHashMap<Box<str>, RefusedPod>,
    /// By number: the node that the number stands for in the sets of all pods, and the first refusal (of `n_refusals`) from which
    /// on it does. A new node may have the number of one that is gone.
    nodes: Vec<Option<(NodeId, u64)>>,
    n_refusals: u64,
}

/// A refused pod that may preempt others.
#[derive(Debug)]
pub(crate) struct RefusedPod {
    pub(crate) id: PodId,
    pub(crate) priority: i32,
    /// `metadata.creationTimestamp` in seconds since 1970.
    pub(crate) created: i64,
    /// The time of the first refusal since the pod fitted last.
    pub(crate) first_refused: Instant,
    last_refusal: u64,
    nodes: NodeSet,
}

/// A set of nodes: one bit for each number.
#[derive(Debug, Default)]
struct NodeSet(Vec<u64>);

impl RefusedPods {
    /// Notes a refusal of a pod by these nodes.
    pub(crate) fn refuse(
        &mut self,
        (id, priority, created): (PodId, i32, i64),
        nodes: impl Iterator<Item = NodeId>,
        now: Instant,
    ) {
        self.n_refusals += 1;
        let mut set = NodeSet::default();
        for node in nodes {
            self.assign_number(node);
            set.insert(node);
        }
        // Many sets are kept, and each may have a bit for every node.
        set.0.shrink_to_fit();
        let first_refused = self.pods.get(&*id.uid).map_or(now, |known| known.first_refused);
        if !self.pods.contains_key(&*id.uid) && self.pods.len() >= MAX_PODS {
            let oldest = self.pods.values().map(|pod| pod.last_refusal).min();
            self.pods.retain(|_, pod| Some(pod.last_refusal) != oldest);
        }
        let uid = id.uid.as_str().into();
        let refused = RefusedPod {
            id,
            priority,
            created,
            first_refused,
            last_refusal: self.n_refusals,
            nodes: set,
        };
        self.pods.insert(uid, refused);
    }

    /// Makes the number of a node stand for this node from the present refusal on; in earlier sets a new one is skipped.
    fn assign_number(&mut self, node: NodeId) {
        let at = node.number() as usize;
        if self.nodes.len() <= at {
            self.nodes.resize(at + 1, None);
        }
        if let Some(known) = self.nodes.get_mut(at)
            && known.is_none_or(|(known, _)| known != node)
        {
            *known = Some((node, self.n_refusals));
        }
    }

    /// Forgets a pod that fits, is bound or is rejected.
    pub(crate) fn forget(&mut self, uid: &str) {
        self.pods.remove(uid);
    }

    pub(crate) fn contains(&self, uid: &str) -> bool {
        self.pods.contains_key(uid)
    }

    /// Forgets all pods that do not wait any more, by their UID and the time of the first refusal.
    pub(crate) fn retain(&mut self, waits: impl Fn(&str, Instant) -> bool) {
        self.pods.retain(|uid, pod| waits(uid, pod.first_refused));
    }

    /// The pods in the order in which room is made for them: by falling priority, then by age.
    pub(crate) fn by_importance(&self) -> Vec<&RefusedPod> {
        let mut pods: Vec<&RefusedPod> = self.pods.values().collect();
        pods.sort_unstable_by_key(|pod| (Reverse(pod.priority), pod.created, pod.id.uid.as_str()));
        pods
    }

    /// The nodes that refused a pod at its last request.
    pub(crate) fn nodes_of(&self, uid: &str) -> Vec<NodeId> {
        let Some(pod) = self.pods.get(uid) else {
            return Vec::new();
        };
        let mut refusing = Vec::new();
        for (number, known) in self.nodes.iter().enumerate() {
            if let Some((node, since)) = known
                && *since <= pod.last_refusal
                && pod.nodes.has(number)
            {
                refusing.push(*node);
            }
        }
        refusing
    }
}

impl NodeSet {
    fn insert(&mut self, node: NodeId) {
        let number = node.number() as usize;
        let at = number / WORD;
        if self.0.len() <= at {
            self.0.resize(at + 1, 0);
        }
        if let Some(word) = self.0.get_mut(at) {
            *word |= 1 << (number % WORD);
        }
    }

    fn has(&self, number: usize) -> bool {
        let word = self.0.get(number / WORD);
        word.is_some_and(|word| word & (1 << (number % WORD)) != 0)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use placement::Fleet;

    use super::*;

    /// A fleet of nodes `n0`, `n1` and so on, and their identifiers.
    fn fleet(n_nodes: usize) -> (Fleet, Vec<NodeId>) {
        let mut fleet = Fleet::new();
        for nth in 0..n_nodes {
            fleet.set_inventory(&format!("n{nth}"), placement::Inventory::default());
        }
        let ids = (0..n_nodes).map(|nth| fleet.node_id(&format!("n{nth}")).unwrap());
        let ids = ids.collect();
        (fleet, ids)
    }

    fn pod(name: &str, priority: i32, created: i64) -> (PodId, i32, i64) {
        let id = PodId {
            namespace: "default".to_owned(),
            name: name.to_owned(),
            uid: format!("00000000-0000-0000-0000-{name:>012}"),
        };
        (id, priority, created)
    }

    fn uid(name: &str) -> String {
        pod(name, 0, 0).0.uid
    }

    #[test]
    fn the_last_request_counts_and_the_first_refusal_is_kept() {
        let (_, nodes) = fleet(130);
        let (mut pods, began) = (RefusedPods::default(), Instant::now());
        pods.refuse(pod("a", 1, 0), nodes.iter().copied(), began);
        let later = began + Duration::from_secs(5);
        pods.refuse(pod("a", 1, 0), [nodes[3], nodes[128]].into_iter(), later);
        assert_eq!(pods.nodes_of(&uid("a")), [nodes[3], nodes[128]]);
        assert_eq!(pods.by_importance()[0].first_refused, began);
        pods.forget(&uid("a"));
        assert_eq!(pods.nodes_of(&uid("a")), []);
    }

    /// Another node may have taints that kube-scheduler has not compared the pod with.
    #[test]
    fn a_node_with_the_number_of_another_is_not_taken_for_it() {
        let (mut fleet, nodes) = fleet(2);
        let mut pods = RefusedPods::default();
        pods.refuse(pod("a", 1, 0), nodes.iter().copied(), Instant::now());
        fleet.remove_inventory("n1");
        fleet.set_inventory("other", placement::Inventory::default());
        let other = fleet.node_id("other").unwrap();
        assert_eq!(other.number(), nodes[1].number());
        pods.refuse(pod("b", 1, 0), [other].into_iter(), Instant::now());
        assert_eq!(pods.nodes_of(&uid("a")), [nodes[0]]);
        assert_eq!(pods.nodes_of(&uid("b")), [other]);
    }

    #[test]
    fn pods_come_by_falling_priority_then_by_age() {
        let mut pods = RefusedPods::default();
        for (name, priority, created) in [("a", 1, 10), ("b", 2, 20), ("c", 2, 5), ("d", -1, 0)] {
            pods.refuse(pod(name, priority, created), std::iter::empty(), Instant::now());
        }
        let order = pods.by_importance().into_iter().map(|pod| pod.id.name.as_str());
        assert_eq!(order.collect::<Vec<_>>(), ["c", "b", "a", "d"]);
    }

    /// The bytes that all pods take, up to those that the allocator adds.
    fn n_bytes(pods: &RefusedPods) -> usize {
        let entry = size_of::<(Box<str>, RefusedPod)>() + 1;
        let nodes = pods.nodes.capacity() * size_of::<Option<(NodeId, u64)>>();
        let mut n_bytes = pods.pods.capacity() * entry + nodes;
        for (uid, pod) in &pods.pods {
            let texts = uid.len() + pod.id.uid.len() + pod.id.namespace.len() + pod.id.name.len();
            n_bytes += texts + pod.nodes.0.capacity() * size_of::<u64>();
        }
        n_bytes
    }

    /// The pod that was asked about least recently gives way, and each takes less than 1 KiB at 5,000 nodes.
    #[test]
    fn memory_is_bounded() {
        let (_, nodes) = fleet(5000);
        let mut pods = RefusedPods::default();
        for nth in 0..3 * MAX_PODS {
            let name = nth.to_string();
            pods.refuse(pod(&name, 1, 0), nodes.iter().copied(), Instant::now());
            pods.refuse(pod("0", 1, 0), nodes.iter().copied(), Instant::now());
        }
        assert_eq!(pods.pods.len(), MAX_PODS);
        assert!(pods.pods.contains_key(&*uid("0")) && !pods.pods.contains_key(&*uid("1")));
        let n_bytes = n_bytes(&pods) / MAX_PODS;
        assert!(
            n_bytes < 1024 + 150,
            "{n_bytes} bytes for each pod, its share of the tables included"
        );
        let n_bytes = pods.pods.values().map(|pod| pod.nodes.0.capacity() * 8).max();
        assert_eq!(n_bytes, Some(632), "the set of a pod");
    }
}
