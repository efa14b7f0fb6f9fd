//! The plugin `NodeAffinity`: a pod's `nodeSelector` and required node affinity.
//!
//! Terms that the API server refuses, such as a label value that is too long, are not checked for.

use std::cmp::Ordering;
use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Node, NodeSelectorRequirement, NodeSelectorTerm, Pod};
use kube::ResourceExt;

/// The only field of nodes that `matchFields` can name.
const NAME_FIELD: &str = "metadata.name";

/// The nodes to which the required node affinity of a pod limits the search, before any node is filtered (`PreFilter`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum AffineNodes {
    All,
    /// These nodes, as far as they exist.
    Named(BTreeSet<String>),
    /// None: every term names nodes that exclude each other.
    Conflict,
}

/// The nodes that the terms of a pod's required node affinity name. A term that names none leaves all nodes in.
pub(super) fn affine_nodes(pod: &Pod) -> AffineNodes {
    let mut names = BTreeSet::new();
    let terms = required_terms(pod).unwrap_or_default();
    for term in terms {
        let mut of_term: Option<BTreeSet<String>> = None;
        for requirement in term.match_fields.iter().flatten() {
            if requirement.key == NAME_FIELD && requirement.operator == "In" {
                let values: BTreeSet<String> = requirement.values.iter().flatten().cloned().collect();
                of_term = Some(match of_term {
                    Some(earlier) => earlier.intersection(&values).cloned().collect(),
                    None => values,
                });
            }
        }
        match of_term {
            Some(of_term) => names.extend(of_term),
            None => return AffineNodes::All,
        }
    }
    match (terms.is_empty(), names.is_empty()) {
        (true, _) => AffineNodes::All,
        (false, true) => AffineNodes::Conflict,
        (false, false) => AffineNodes::Named(names),
    }
}

/// Returns true if a node has all labels of the pod's `nodeSelector` and matches a term of its required node affinity.
pub(super) fn selects(pod: &Pod, node: &Node) -> bool {
    let mut labels = pod
        .spec
        .iter()
        .flat_map(|spec| spec.node_selector.iter().flatten());
    labels.all(|(key, value)| node.labels().get(key) == Some(value))
        && required_terms(pod).is_none_or(|terms| terms.iter().any(|term| matches_term(term, node)))
}

/// The terms of the pod's required node affinity; `None` if it has no such affinity.
fn required_terms(pod: &Pod) -> Option<&[NodeSelectorTerm]> {
    let affinity = pod.spec.as_ref()?.affinity.as_ref()?.node_affinity.as_ref()?;
    let required = affinity
        .required_during_scheduling_ignored_during_execution
        .as_ref()?;
    Some(&required.node_selector_terms)
}

/// Returns true if all requirements of a term hold. A term that is empty or cannot be read matches no node.
fn matches_term(term: &NodeSelectorTerm, node: &Node) -> bool {
    let labels = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    (!labels.is_empty() || !fields.is_empty())
        && labels.iter().all(|test| matches_label(test, node))
        && fields.iter().all(|test| matches_name(test, node))
}

/// Returns true if a requirement on a label holds. One whose number of values does not suit the operator cannot be read
/// (`labels.NewRequirement`).
fn matches_label(requirement: &NodeSelectorRequirement, node: &Node) -> bool {
    let label = node.labels().get(&requirement.key);
    let values = requirement.values.as_deref().unwrap_or_default();
    match (requirement.operator.as_str(), values) {
        ("In", [_, ..]) => label.is_some_and(|label| values.contains(label)),
        ("NotIn", [_, ..]) => label.is_none_or(|label| !values.contains(label)),
        ("Exists", []) => label.is_some(),
        ("DoesNotExist", []) => label.is_none(),
        ("Gt", [bound]) => compare(label, bound).is_some_and(Ordering::is_gt),
        ("Lt", [bound]) => compare(label, bound).is_some_and(Ordering::is_lt),
        _ => false,
    }
}

/// Compares two whole numbers; `None` if one of them is none.
fn compare(label: Option<&String>, bound: &str) -> Option<Ordering> {
    let (label, bound) = (label?.parse::<i64>().ok()?, bound.parse::<i64>().ok()?);
    Some(label.cmp(&bound))
}

/// Returns true if a requirement on the node's name holds; one on another field compares with the empty text.
fn matches_name(requirement: &NodeSelectorRequirement, node: &Node) -> bool {
    let name = if requirement.key == NAME_FIELD {
        node.name_any()
    } else {
        String::new()
    };
    let values = requirement.values.as_deref().unwrap_or_default();
    match (requirement.operator.as_str(), values) {
        ("In", [value]) => *value == name,
        ("NotIn", [value]) => *value != name,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;

    fn pod(terms: &Value) -> Pod {
        let required =
            json!({"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}});
        serde_json::from_value(json!({"spec": {"containers": [], "affinity": {"nodeAffinity": required}}}))
            .unwrap()
    }

    fn expressions(key: &str, operator: &str, values: &[&str]) -> Value {
        json!([{"matchExpressions": [{"key": key, "operator": operator, "values": values}]}])
    }

    fn fields(requirements: &[(&str, &[&str])]) -> Value {
        let mut fields = Vec::new();
        for (operator, values) in requirements {
            fields.push(json!({"key": NAME_FIELD, "operator": operator, "values": values}));
        }
        json!([{ "matchFields": fields }])
    }

    /// The cases of `nodeaffinity_test.go` that differ in more than words.
    #[rstest]
    #[case::value(expressions("zone", "In", &["b", "a"]), true)]
    #[case::no_value(expressions("zone", "In", &["b"]), false)]
    #[case::without_values(expressions("zone", "In", &[]), false)]
    #[case::other_value(expressions("zone", "NotIn", &["b"]), true)]
    #[case::absent_label(expressions("rack", "NotIn", &["b"]), true)]
    #[case::there(expressions("zone", "Exists", &[]), true)]
    #[case::exists_takes_no_value(expressions("zone", "Exists", &["a"]), false)]
    #[case::missing(expressions("rack", "DoesNotExist", &[]), true)]
    #[case::not_missing(expressions("zone", "DoesNotExist", &[]), false)]
    #[case::more(expressions("cores", "Gt", &["7"]), true)]
    #[case::not_more(expressions("cores", "Gt", &["8"]), false)]
    #[case::less(expressions("cores", "Lt", &["9"]), true)]
    #[case::label_is_no_number(expressions("zone", "Lt", &["9"]), false)]
    #[case::value_is_no_number(expressions("cores", "Gt", &["few"]), false)]
    #[case::two_values(expressions("cores", "Gt", &["1", "2"]), false)]
    #[case::unknown_operator(expressions("zone", "Like", &["a"]), false)]
    #[case::no_terms(json!([]), false)]
    #[case::empty_term(json!([{}]), false)]
    #[case::either_term(json!([{}, {"matchExpressions": [{"key": "zone", "operator": "Exists"}]}]), true)]
    #[case::both_requirements(
        json!([{"matchExpressions": [{"key": "zone", "operator": "Exists"}], "matchFields": [{"key": NAME_FIELD, "operator": "NotIn", "values": ["n"]}]}]),
        false
    )]
    #[case::name(fields(&[("In", &["n"])]), true)]
    #[case::other_name(fields(&[("In", &["m"])]), false)]
    #[case::not_the_name(fields(&[("NotIn", &["n"])]), false)]
    #[case::two_names(fields(&[("In", &["n", "m"])]), false)]
    fn required_affinity_matches_nodes_as_in_kube_scheduler(#[case] terms: Value, #[case] expected: bool) {
        let labels = json!({"zone": "a", "cores": "8"});
        let node = serde_json::from_value(json!({"metadata": {"name": "n", "labels": labels}})).unwrap();
        assert_eq!(selects(&pod(&terms), &node), expected);
    }

    #[test]
    fn names_in_all_terms_limit_the_search() {
        let limit = |terms: &Value| affine_nodes(&pod(terms));
        let names =
            |names: &[&str]| AffineNodes::Named(names.iter().map(|name| (*name).to_owned()).collect());
        assert_eq!(limit(&fields(&[("In", &["a"])])), names(&["a"]));
        assert_eq!(
            limit(&fields(&[("In", &["a"]), ("In", &["b"])])),
            AffineNodes::Conflict
        );
        let (one, other) = (fields(&[("In", &["a"])]), fields(&[("In", &["b"])]));
        assert_eq!(limit(&json!([one[0], other[0]])), names(&["a", "b"]));
        assert_eq!(limit(&json!([one[0], {}])), AffineNodes::All);
        assert_eq!(limit(&fields(&[("NotIn", &["a"])])), AffineNodes::All);
        assert_eq!(limit(&json!([])), AffineNodes::All);
    }
}
