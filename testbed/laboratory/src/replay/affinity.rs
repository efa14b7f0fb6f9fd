//! Required node affinity of pods. Pure.

use k8s_openapi::api::core::v1::{Node, NodeSelectorRequirement, NodeSelectorTerm, Pod};
use kube::ResourceExt;

/// The only field of nodes that terms may speak of.
const NAME: &str = "metadata.name";

/// True if a pod's required node affinity allows a node: one of its terms has to hold, if there are any.
pub fn allows(pod: &Pod, node: &Node) -> bool {
    let Some(affinity) = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.affinity.as_ref()?.node_affinity.as_ref())
    else {
        return true;
    };
    match &affinity.required_during_scheduling_ignored_during_execution {
        Some(required) => required.node_selector_terms.iter().any(|term| holds(term, node)),
        None => true,
    }
}

/// Returns true if a node meets all requirements of a node affinity term; a term without requirements holds for no node.
fn holds(term: &NodeSelectorTerm, node: &Node) -> bool {
    let expressions = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    for requirement in expressions {
        let label = node.labels().get(&requirement.key);
        if !is_met(requirement, label.map(String::as_str)) {
            return false;
        }
    }
    for requirement in fields {
        let name = node.metadata.name.as_deref();
        if !is_met(requirement, if requirement.key == NAME { name } else { None }) {
            return false;
        }
    }
    !expressions.is_empty() || !fields.is_empty()
}

/// Returns true if a node's label meets a requirement of a node affinity; `value` is none without the label.
fn is_met(requirement: &NodeSelectorRequirement, value: Option<&str>) -> bool {
    let values = requirement.values.as_deref().unwrap_or_default();
    let is_listed = values.iter().any(|listed| Some(listed.as_str()) == value);
    let number = value.and_then(|value| value.parse::<i64>().ok());
    let bound = values.first().and_then(|bound| bound.parse::<i64>().ok());
    match (requirement.operator.as_str(), number, bound) {
        ("In", ..) => is_listed,
        ("NotIn", ..) => !is_listed,
        ("Exists", ..) => value.is_some(),
        ("DoesNotExist", ..) => value.is_none(),
        ("Gt", Some(number), Some(bound)) => number > bound,
        ("Lt", Some(number), Some(bound)) => number < bound,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;

    fn with(key: &str, operator: &str, values: &[&str]) -> Value {
        json!({"matchExpressions": [{"key": key, "operator": operator, "values": values}]})
    }

    #[rstest]
    #[case::listed(&[with("model", "In", &["A", "T4"])], true)]
    #[case::not_listed(&[with("model", "In", &["A"])], false)]
    #[case::unwanted(&[with("model", "NotIn", &["T4"])], false)]
    #[case::without_the_label(&[with("other", "NotIn", &["T4"])], true)]
    #[case::there(&[with("model", "Exists", &[])], true)]
    #[case::not_there(&[with("model", "DoesNotExist", &[])], false)]
    #[case::greater(&[with("count", "Gt", &["3"])], true)]
    #[case::not_less(&[with("count", "Lt", &["4"])], false)]
    #[case::no_number(&[with("model", "Gt", &["3"])], false)]
    #[case::one_of_two_terms(&[with("model", "In", &["A"]), with("count", "Exists", &[])], true)]
    #[case::unknown_operator(&[with("model", "Like", &["T4"])], false)]
    #[case::empty_term(&[json!({})], false)]
    #[case::by_name(&[json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]})], true)]
    #[case::by_other_name(&[json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["m"]}]})], false)]
    fn one_term_has_to_hold(#[case] terms: &[Value], #[case] allowed: bool) {
        let node = serde_json::from_value(
            json!({"metadata": {"name": "n", "labels": {"model": "T4", "count": "4"}}}),
        )
        .unwrap();
        let affinity = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}});
        let pod = serde_json::from_value(
            json!({"metadata": {"name": "p"}, "spec": {"containers": [], "affinity": affinity}}),
        )
        .unwrap();
        assert_eq!(allows(&pod, &node), allowed);
    }

    #[test]
    fn a_pod_without_affinity_fits_every_node() {
        let pod =
            serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": {"containers": []}})).unwrap();
        assert!(allows(&pod, &Node::default()));
    }
}
