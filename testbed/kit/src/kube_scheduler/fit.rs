//! kube-scheduler's own filters that matter to gpushare, in its order and words: `NodeUnschedulable`, `NodeName`,
//! `TaintToleration`, `NodeAffinity` and `NodeResourcesFit`.
//!
//! The first filter that refuses a node gives the reason. Ports, volumes, topology spread and affinity between pods are not
//! modelled, and neither are the operators `Gt` and `Lt` of tolerations, which a feature gate turns on.

use k8s_openapi::api::core::v1::{Node, Pod, Taint, Toleration};
use kube::ResourceExt;

use crate::pod_fields::node_of;

use super::amounts::ResourceAmounts;
use super::cache::CachedNode;
use super::diagnosis::FilterRefusal;
use super::node_affinity::selects;

const UNSCHEDULABLE_TAINT: &str = "node.kubernetes.io/unschedulable";

/// The reasons of kube-scheduler's own filters why a node cannot take a pod; `None` if it can.
pub(super) fn refusal(pod: &Pod, request: &ResourceAmounts, view: &CachedNode) -> Option<FilterRefusal> {
    let (reasons, unresolvable) = match repulsion(pod, &view.node) {
        Some(reason) => (vec![reason.to_owned()], true),
        None => request.shortages(&view.allocatable, &view.used),
    };
    (!reasons.is_empty()).then_some(FilterRefusal {
        reasons,
        unresolvable,
        by_extender: false,
    })
}

/// True if a pod cannot go to a node, with any amount of free resources.
pub fn repels(pod: &Pod, node: &Node) -> bool {
    repulsion(pod, node).is_some()
}

/// The reason for which a pod cannot go to a node: it is cordoned, not the named one, tainted or not selected. `None` if it can.
fn repulsion(pod: &Pod, node: &Node) -> Option<&'static str> {
    if is_cordoned(node) && !tolerates_cordon(pod) {
        Some("node(s) were unschedulable")
    } else if node_of(pod).is_some_and(|name| name != node.name_any()) {
        Some("node(s) didn't match the requested node name")
    } else if has_untolerated_taint(pod, node) {
        Some("node(s) had untolerated taint(s)")
    } else if selects(pod, node) {
        None
    } else {
        Some("node(s) didn't match Pod's node affinity/selector")
    }
}

fn is_cordoned(node: &Node) -> bool {
    node.spec
        .as_ref()
        .is_some_and(|spec| spec.unschedulable == Some(true))
}

/// Returns true if a pod tolerates the taint of cordoned nodes.
fn tolerates_cordon(pod: &Pod) -> bool {
    let taint = Taint {
        key: UNSCHEDULABLE_TAINT.to_owned(),
        effect: "NoSchedule".to_owned(),
        ..Taint::default()
    };
    tolerations(pod).any(|toleration| tolerates(toleration, &taint))
}

/// Returns true if a taint of the node keeps the pod away.
fn has_untolerated_taint(pod: &Pod, node: &Node) -> bool {
    let mut taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
    taints.any(|taint| {
        let is_blocking = matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute");
        is_blocking && !tolerations(pod).any(|toleration| tolerates(toleration, taint))
    })
}

fn tolerations(pod: &Pod) -> impl Iterator<Item = &Toleration> {
    pod.spec.iter().flat_map(|spec| spec.tolerations.iter().flatten())
}

/// `ToleratesTaint`: an absent key, effect or operator of a toleration stands for every key, every effect and `Equal`.
fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let effect = toleration.effect.as_deref().unwrap_or_default();
    let key = toleration.key.as_deref().unwrap_or_default();
    let value = toleration.value.as_deref().unwrap_or_default();
    let matches_value = match toleration.operator.as_deref() {
        Some("Exists") => true,
        None | Some("" | "Equal") => value == taint.value.as_deref().unwrap_or_default(),
        Some(_) => false,
    };
    matches_value && (effect.is_empty() || effect == taint.effect) && (key.is_empty() || key == taint.key)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;

    fn refused(pod_spec: &Value, node: &Value) -> Option<FilterRefusal> {
        let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": pod_spec})).unwrap();
        let node: Node = serde_json::from_value(node.clone()).unwrap();
        let allocatable = ResourceAmounts::allocatable(&node);
        let view = CachedNode {
            node: Arc::new(node),
            allocatable,
            used: ResourceAmounts::default(),
        };
        refusal(&pod, &ResourceAmounts::of_pod(&pod).unwrap(), &view)
    }

    fn node(spec: &Value) -> Value {
        json!({"metadata": {"name": "n", "labels": {"zone": "a"}}, "spec": spec, "status": {"allocatable": {"pods": "10", "a/b": "4"}}})
    }

    fn spec(extra: &Value) -> Value {
        let mut spec = json!({"containers": [{"name": "c", "resources": {"requests": {"a/b": "4"}}}]});
        spec.as_object_mut()
            .unwrap()
            .extend(extra.as_object().unwrap().clone());
        spec
    }

    #[rstest]
    #[case::plain(json!({}), json!({}), None)]
    #[case::selected(json!({"nodeSelector": {"zone": "a"}}), json!({}), None)]
    #[case::other_zone(json!({"nodeSelector": {"zone": "b"}}), json!({}), Some("node(s) didn't match Pod's node affinity/selector"))]
    #[case::cordoned(json!({}), json!({"unschedulable": true}), Some("node(s) were unschedulable"))]
    #[case::tainted(json!({}), json!({"taints": [{"key": "k", "value": "v", "effect": "NoSchedule"}]}), Some("node(s) had untolerated taint(s)"))]
    #[case::preferred_taint(json!({}), json!({"taints": [{"key": "k", "effect": "PreferNoSchedule"}]}), None)]
    #[case::tolerated(json!({"tolerations": [{"key": "k", "operator": "Exists"}]}), json!({"taints": [{"key": "k", "value": "v", "effect": "NoSchedule"}]}), None)]
    #[case::other_value(json!({"tolerations": [{"key": "k", "value": "w"}]}), json!({"taints": [{"key": "k", "value": "v", "effect": "NoSchedule"}]}), Some("node(s) had untolerated taint(s)"))]
    #[case::other_effect(json!({"tolerations": [{"key": "k", "operator": "Exists", "effect": "NoExecute"}]}), json!({"taints": [{"key": "k", "effect": "NoSchedule"}]}), Some("node(s) had untolerated taint(s)"))]
    #[case::comparison(json!({"tolerations": [{"key": "k", "operator": "Gt", "value": "1"}]}), json!({"taints": [{"key": "k", "value": "2", "effect": "NoSchedule"}]}), Some("node(s) had untolerated taint(s)"))]
    #[case::named(json!({"nodeName": "n"}), json!({}), None)]
    #[case::other_name(json!({"nodeName": "m"}), json!({"taints": [{"key": "k", "effect": "NoSchedule"}]}), Some("node(s) didn't match the requested node name"))]
    #[case::cordoned_first(json!({"nodeName": "m"}), json!({"unschedulable": true}), Some("node(s) were unschedulable"))]
    #[case::everything_tolerated(json!({"tolerations": [{"operator": "Exists"}]}), json!({"unschedulable": true, "taints": [{"key": "k", "effect": "NoSchedule"}]}), None)]
    fn in_tree_filters_refuse_with_the_messages_of_kube_scheduler(
        #[case] pod: Value,
        #[case] node_spec: Value,
        #[case] reason: Option<&str>,
    ) {
        let found = refused(&spec(&pod), &node(&node_spec));
        assert_eq!(
            found.as_ref().map(|r| r.reasons.join("|")),
            reason.map(str::to_owned)
        );
        assert!(found.is_none_or(|r| r.unresolvable));
    }

    #[test]
    fn a_request_larger_than_the_empty_node_is_unresolvable() {
        let pod = json!({"containers": [{"name": "c", "resources": {"requests": {"a/b": "5"}}}]});
        let refusal = refused(&pod, &node(&json!({}))).unwrap();
        assert_eq!(
            refusal,
            FilterRefusal {
                reasons: vec!["Insufficient a/b".to_owned()],
                unresolvable: true,
                by_extender: false
            }
        );
    }
}
