//! The fields of bound pods by which a plan moves them: what keeps a pod on its node, and the nodes that its successor (the pod
//! that its controller creates in its place) may go to.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use placement::Obstacle;
use proto::pod::{EVICT, Pod, PodSpec};
use rustc_hash::{FxHashMap, FxHasher};

use crate::kube_scheduler::PodRules;

/// The label of nodes with their own name, as kubelet sets it.
const HOSTNAME: &str = "kubernetes.io/hostname";
/// The keys by which node affinity names nodes.
const NAME_KEYS: [&str; 2] = [HOSTNAME, "metadata.name"];

/// A bound pod as a plan moves it: the rules of its successor, or what keeps it from moving by its own fields.
pub(super) type Moving = Result<MovablePod, Box<Obstacle>>;

/// A bound pod that its own fields let move.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct MovablePod {
    /// The rules of its successor.
    pub(super) rules: Arc<PodRules>,
    /// True if it has claims of volumes that outlast it, which may bind it to its node.
    pub(super) has_claims: bool,
}

/// Rules of successors, of which pods of one template share one.
#[derive(Debug, Default)]
pub(super) struct SharedRules {
    by_hash: FxHashMap<u64, Arc<PodRules>>,
    /// The number of rules in use when those out of use were dropped last.
    n_used: usize,
}

impl SharedRules {
    /// Reads a bound pod: the rules of its successor, shared with pods of equal rules, or what keeps it on its node.
    pub(super) fn moving(&mut self, pod: &Pod) -> Moving {
        if let Some(obstacle) = obstacle(pod) {
            return Err(Box::new(obstacle));
        }
        let (node_selector, tolerations) = (&pod.spec.node_selector, &pod.spec.tolerations);
        let affinity = &pod.spec.affinity.node_affinity.required;
        // The claim of an ephemeral volume goes with the pod.
        let has_claims = pod.spec.volumes.iter().any(|volume| volume.is_claimed);
        let mut hasher = FxHasher::default();
        (node_selector, affinity, tolerations).hash(&mut hasher);
        let hash = hasher.finish();
        if let Some(rules) = self.by_hash.get(&hash)
            && rules.node_selector == *node_selector
            && rules.affinity == *affinity
            && rules.tolerations == *tolerations
        {
            let rules = Arc::clone(rules);
            return Ok(MovablePod { rules, has_claims });
        }
        // Seldom, so that the look at all rules costs each pod little, and often enough that memory stays bounded.
        if self.by_hash.len() > 2 * self.n_used + 16 {
            self.by_hash.retain(|_, rules| Arc::strong_count(rules) > 1);
            self.n_used = self.by_hash.len();
        }
        // A plan compares CPU, memory and devices itself, so that pods that differ by these share their rules.
        let rules = Arc::new(PodRules {
            node_selector: node_selector.clone(),
            affinity: affinity.clone(),
            tolerations: tolerations.clone(),
            ..PodRules::default()
        });
        self.by_hash.insert(hash, Arc::clone(&rules));
        Ok(MovablePod { rules, has_claims })
    }
}

/// The reason for which a pod must stay on its node, as far as its own fields show it.
fn obstacle(pod: &Pod) -> Option<Obstacle> {
    let Some(controller) = pod.controller_kind() else {
        return Some(Obstacle::NoController);
    };
    if pod.is_tied_to_node() {
        return Some(Obstacle::Controller(controller.into()));
    }
    if pod.is_deleting() {
        return Some(Obstacle::Leaving);
    }
    if pod.annotation(EVICT) == Some("false") {
        return Some(Obstacle::Annotation);
    }
    names_one_node(&pod.spec).then_some(Obstacle::Affinity)
}

/// Returns true if the pod's selector or required affinity names a single node.
fn names_one_node(spec: &PodSpec) -> bool {
    // Of several terms one has to match, and each may name another node.
    if let Some(required) = &spec.affinity.node_affinity.required
        && let [term] = required.node_selector_terms.as_slice()
    {
        for requirement in term.match_expressions.iter().chain(&term.match_fields) {
            let is_name = NAME_KEYS.contains(&requirement.key.as_str());
            if is_name && requirement.operator == "In" && requirement.values.len() == 1 {
                return true;
            }
        }
    }
    spec.node_selector.contains_key(HOSTNAME)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;

    fn pod() -> Value {
        let owner = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true});
        json!({"metadata": {"name": "p", "ownerReferences": [owner]}, "spec": {"containers": []}})
    }

    fn moving(pod: &Value) -> Moving {
        let pod: Pod = serde_json::from_value(pod.clone()).unwrap();
        SharedRules::default().moving(&pod)
    }

    #[rstest]
    #[case::no_controller("/metadata/ownerReferences/0/controller", json!(false), Obstacle::NoController)]
    #[case::no_owner("/metadata/ownerReferences", json!([]), Obstacle::NoController)]
    #[case::daemon_set("/metadata/ownerReferences/0/kind", json!("DaemonSet"), Obstacle::Controller("DaemonSet".into()))]
    #[case::static_pod("/metadata/ownerReferences/0/kind", json!("Node"), Obstacle::Controller("Node".into()))]
    #[case::leaving("/metadata/deletionTimestamp", json!("2026-01-01T00:00:00Z"), Obstacle::Leaving)]
    #[case::annotation("/metadata/annotations", json!({"gpushare/evict": "false"}), Obstacle::Annotation)]
    #[case::hostname("/spec/nodeSelector", json!({"kubernetes.io/hostname": "n1"}), Obstacle::Affinity)]
    #[case::name(
        "/spec/affinity",
        json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
            {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]},
        ]}}}),
        Obstacle::Affinity
    )]
    fn a_pod_stays(#[case] field: &str, #[case] value: Value, #[case] expected: Obstacle) {
        assert!(moving(&pod()).is_ok());
        let mut other = pod();
        let (parent, key) = field.rsplit_once('/').unwrap();
        other.pointer_mut(parent).unwrap()[key] = value;
        assert_eq!(moving(&other), Err(Box::new(expected)));
    }

    #[rstest]
    #[case::annotation("/metadata/annotations", json!({"gpushare/evict": "true"}))]
    #[case::other_label("/spec/nodeSelector", json!({"zone": "a"}))]
    #[case::ephemeral_volume("/spec/volumes", json!([{"name": "v", "ephemeral": {}}, {"name": "w", "emptyDir": {}}]))]
    fn a_pod_may_move(#[case] field: &str, #[case] value: Value) {
        let mut other = pod();
        let (parent, key) = field.rsplit_once('/').unwrap();
        other.pointer_mut(parent).unwrap()[key] = value;
        assert!(moving(&other).is_ok_and(|pod| !pod.has_claims));
    }

    #[test]
    fn claims_are_known() {
        let mut pod = pod();
        pod["spec"]["volumes"] = json!([{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]);
        assert!(moving(&pod).is_ok_and(|pod| pod.has_claims));
    }

    #[test]
    fn pods_of_one_template_share_their_rules() {
        let mut rules = SharedRules::default();
        let mut other = pod();
        other["spec"]["nodeSelector"] = json!({"a": "b"});
        let [one, same, other] = [pod(), pod(), other]
            .map(|pod| rules.moving(&serde_json::from_value(pod).unwrap()).unwrap().rules);
        assert!(Arc::ptr_eq(&one, &same) && !Arc::ptr_eq(&one, &other));
        assert_eq!(other.node_selector.len(), 1);
    }

    #[test]
    fn rules_out_of_use_are_dropped() {
        let mut rules = SharedRules::default();
        for n in 0..1000 {
            let mut pod = pod();
            pod["spec"]["nodeSelector"] = json!({"a": n.to_string()});
            rules.moving(&serde_json::from_value(pod).unwrap()).unwrap();
        }
        assert!(rules.by_hash.len() < 50);
    }
}
