//! The checks by which kube-scheduler refuses a node before it asks an extender, as far as Node and Pod objects show them.
//!
//! Pure: values in, a refusal out. The order is that of kube-scheduler's default plugins, which stop at the first refusal of a
//! node: `NodeUnschedulable`, `NodeName`, `TaintToleration`, `NodeAffinity`, `NodeResourcesFit`. Ports, volumes, affinity to
//! pods, spreading and DRA claims are not evaluated: kube-scheduler's words on them are in [`PodRules::last_attempt`].

mod node;
mod pod;
mod requests;

pub use node::NodeFacts;
pub use pod::PodRules;
pub use requests::{NodeRequests, PodRequests, RequestSums, requests_of};

use proto::pod::{NameRule, Taint};

/// The resource under which kube-scheduler counts the pods of a node themselves.
pub const PODS: &str = "pods";

/// The taint that a cordoned node has by its `unschedulable` field, and that `NodeUnschedulable` compares with tolerations.
const UNSCHEDULABLE_TAINT: &str = "node.kubernetes.io/unschedulable";

/// The reason for which kube-scheduler refuses a node without asking an extender.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeRefusal {
    /// Every term of the pod's required node affinity names other nodes.
    NotNamed,
    /// Every term of the pod's required node affinity names nodes that exclude each other.
    AffinityConflict,
    /// The node is cordoned.
    Unschedulable,
    /// The pod's manifest names another node.
    OtherNode,
    /// The node has this taint, which the pod does not tolerate.
    Taint(Taint),
    /// The node does not match the pod's `nodeSelector` or required node affinity.
    Affinity,
    /// The resources of which too little is free, in the order of their names.
    Insufficient(Vec<Shortage>),
}

/// A resource of which a node has too little free. Amounts are in whole units, those of CPU in thousandths.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// The resource's name; [`PODS`] for the number of pods.
    pub resource: Box<str>,
    /// The amount that the pod requests.
    pub asked: u64,
    /// The node's allocatable amount; 0 if the node does not offer the resource.
    pub allocatable: u64,
    /// The sum of the requests of the node's pods.
    pub requested: u128,
}

impl Shortage {
    /// The amount that the requests of the node's pods leave.
    pub fn free(&self) -> u64 {
        let free = u128::from(self.allocatable).saturating_sub(self.requested);
        u64::try_from(free).unwrap_or(u64::MAX)
    }

    /// The amount that has to become free; more than the pod asks for if the node is overcommitted.
    pub fn missing(&self) -> u64 {
        let wanted = self.requested + u128::from(self.asked);
        u64::try_from(wanted.saturating_sub(self.allocatable.into())).unwrap_or(u64::MAX)
    }

    /// Returns true if the pod asks for more than the node has at all, so that the end of other pods does not help.
    pub fn is_lasting(&self) -> bool {
        self.asked > self.allocatable
    }
}

impl NodeRefusal {
    /// Returns true if the end of pods on the node could end the refusal.
    pub fn is_lack_of_room(&self) -> bool {
        matches!(self, Self::Insufficient(shortages) if !shortages.iter().any(Shortage::is_lasting))
    }
}

/// Compares a pod with a node on which pods request `requested`; the error is the refusal of the first check that fails.
pub fn check(pod: &PodRules, node: &NodeFacts, requested: &RequestSums) -> Result<(), NodeRefusal> {
    if let Some(refusal) = obstacles(pod, node).into_iter().next() {
        return Err(refusal);
    }
    let shortages = shortages(&pod.requests, node, requested);
    if shortages.is_empty() {
        Ok(())
    } else {
        Err(NodeRefusal::Insufficient(shortages))
    }
}

/// All refusals of a pod by a node that free resources would not end, in the order of kube-scheduler's checks.
pub fn obstacles(pod: &PodRules, node: &NodeFacts) -> Vec<NodeRefusal> {
    let mut obstacles = Vec::new();
    // First, since kube-scheduler drops nodes that the affinity does not name (PreFilter) before it checks any taint.
    let affinity = pod.affinity.as_ref();
    let name_rule = affinity.map_or(NameRule::Searched, |affinity| affinity.name_rule(&node.name));
    match name_rule {
        NameRule::Searched => {}
        NameRule::NotNamed => obstacles.push(NodeRefusal::NotNamed),
        NameRule::Conflict => obstacles.push(NodeRefusal::AffinityConflict),
    }
    if node.unschedulable {
        let taint = Taint {
            key: UNSCHEDULABLE_TAINT.to_owned(),
            effect: "NoSchedule".to_owned(),
            ..Taint::default()
        };
        if !taint.is_tolerated_by(&pod.tolerations) {
            obstacles.push(NodeRefusal::Unschedulable);
        }
    }
    if pod.node_name.as_deref().is_some_and(|name| *name != *node.name) {
        obstacles.push(NodeRefusal::OtherNode);
    }
    for taint in &node.hard_taints {
        // The node controller adds this taint to a cordoned node, for which `Unschedulable` stands already.
        let is_reported = taint.key == UNSCHEDULABLE_TAINT && obstacles.contains(&NodeRefusal::Unschedulable);
        if !is_reported && !taint.is_tolerated_by(&pod.tolerations) {
            obstacles.push(NodeRefusal::Taint(taint.clone()));
        }
    }
    if name_rule == NameRule::Searched && !pod.selects(node) {
        obstacles.push(NodeRefusal::Affinity);
    }
    obstacles
}

/// The resources of which the node has too little free for these requests, if its pods request `requested`.
fn shortages(requests: &PodRequests, node: &NodeFacts, requested: &RequestSums) -> Vec<Shortage> {
    let mut shortages = Vec::new();
    // The pod itself takes one of the node's `pods`.
    let one_pod = (PODS, 1, u128::from(requested.n_pods));
    let amounts = requests.iter();
    let amounts = amounts.map(|(resource, amount)| (&**resource, *amount, requested.of(resource)));
    for (resource, asked, requested) in std::iter::once(one_pod).chain(amounts) {
        let shortage = Shortage {
            resource: resource.into(),
            asked,
            allocatable: node.allocatable(resource),
            requested,
        };
        // A request of zero is no shortage, not even on an overcommitted node.
        if asked > 0 && shortage.missing() > 0 {
            shortages.push(shortage);
        }
    }
    shortages
}

#[cfg(test)]
mod tests;
