//! The demands of a pod on the labels and the name of its node: `nodeSelector` and required node affinity.
//!
//! Matches as kube-scheduler's plugin `NodeAffinity` does (`k8s.io/component-helpers/scheduling/corev1/nodeaffinity`). Preferred
//! terms are not read: kube-scheduler scores by them and refuses no node.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{is_default, null_as_default};

/// The field that [`NodeSelectorTerm::match_fields`] may name; the API server accepts no other.
const NAME_FIELD: &str = "metadata.name";

/// The terms of `requiredDuringSchedulingIgnoredDuringExecution`: a node has to match one of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeSelector {
    /// The terms; without any, no node matches.
    #[serde(deserialize_with = "null_as_default")]
    pub node_selector_terms: Vec<NodeSelectorTerm>,
}

/// A term: requirements of which a node has to meet all; a term without requirements matches no node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeSelectorTerm {
    /// Requirements on labels.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "is_default")]
    pub match_expressions: Vec<NodeSelectorRequirement>,
    /// Requirements on the field `metadata.name`.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "is_default")]
    pub match_fields: Vec<NodeSelectorRequirement>,
}

/// A requirement on one label or field.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeSelectorRequirement {
    /// The label's key, or the field.
    pub key: String,
    /// `In`, `NotIn`, `Exists`, `DoesNotExist`, `Gt` or `Lt`.
    pub operator: String,
    /// The values that the operator compares with.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "is_default")]
    pub values: Vec<String>,
}

/// The effect of terms about `metadata.name` on a node: kube-scheduler applies them before it filters nodes (`PreFilter`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameRule {
    /// kube-scheduler filters the node.
    Searched,
    /// Every term names nodes, and none names this one.
    NotNamed,
    /// Every term has requirements with `In` that no one name meets, so that no node can match.
    Conflict,
}

impl NodeSelector {
    /// The keys of the labels on which the terms have requirements.
    pub fn label_keys(&self) -> impl Iterator<Item = &str> {
        let terms = self.node_selector_terms.iter();
        let requirements = terms.flat_map(|term| &term.match_expressions);
        requirements.map(|requirement| requirement.key.as_str())
    }

    /// The effect of the terms about `metadata.name` on a node of this name.
    pub fn name_rule(&self, name: &str) -> NameRule {
        let (mut is_named, mut is_conflict) = (false, true);
        for term in &self.node_selector_terms {
            // The terms are alternatives: one that names no node leaves all nodes in.
            let Some(named) = term.named_nodes() else {
                return NameRule::Searched;
            };
            is_named |= named.contains(&name);
            is_conflict &= named.is_empty();
        }
        // Without terms kube-scheduler's filter refuses each node itself.
        if is_named || self.node_selector_terms.is_empty() {
            NameRule::Searched
        } else if is_conflict {
            NameRule::Conflict
        } else {
            NameRule::NotNamed
        }
    }

    /// 1, plus the number of its terms, requirements and values: a measure of the time that the comparison with a node takes.
    pub fn n_parts(&self) -> usize {
        let mut n_parts = 1 + self.node_selector_terms.len();
        for term in &self.node_selector_terms {
            for requirement in term.match_expressions.iter().chain(&term.match_fields) {
                n_parts += 1 + requirement.values.len();
            }
        }
        n_parts
    }

    /// Returns true if a node of this name matches; `label` looks up the value of one of its labels.
    pub fn matches<'a>(&self, name: &'a str, label: impl Fn(&str) -> Option<&'a str>) -> bool {
        let mut terms = self.node_selector_terms.iter();
        terms.any(|term| term.matches(name, &label))
    }
}

impl NodeSelectorTerm {
    /// The node names that all requirements with `In` on `metadata.name` have in common; `None` without such a requirement.
    fn named_nodes(&self) -> Option<Vec<&str>> {
        let mut common: Option<Vec<&str>> = None;
        for requirement in &self.match_fields {
            if requirement.key != NAME_FIELD || requirement.operator != "In" {
                continue;
            }
            let values = requirement.values.iter().map(String::as_str);
            common = Some(match common {
                None => values.collect(),
                Some(earlier) => values.filter(|value| earlier.contains(value)).collect(),
            });
        }
        common
    }

    fn matches<'a>(&self, name: &'a str, label: impl Fn(&str) -> Option<&'a str>) -> bool {
        if self.match_expressions.is_empty() && self.match_fields.is_empty() {
            return false;
        }
        let mut labels = self.match_expressions.iter();
        let mut fields = self.match_fields.iter();
        labels.all(|requirement| requirement.is_met_by(label(&requirement.key)))
            && fields.all(|requirement| requirement.key == NAME_FIELD && requirement.is_met_by(Some(name)))
    }
}

impl fmt::Display for NodeSelectorRequirement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.key, self.operator)?;
        if self.values.is_empty() {
            return Ok(());
        }
        write!(f, " {}", self.values.join(", "))
    }
}

impl NodeSelectorRequirement {
    fn is_met_by(&self, value: Option<&str>) -> bool {
        match (self.operator.as_str(), value) {
            ("In", Some(value)) => self.values.iter().any(|wanted| wanted == value),
            // A node without the label has none of the values.
            ("NotIn", value) => value.is_none_or(|value| !self.values.iter().any(|wanted| wanted == value)),
            ("Exists", value) => value.is_some(),
            ("DoesNotExist", value) => value.is_none(),
            ("Gt", Some(value)) => self.compares(value, i64::gt),
            ("Lt", Some(value)) => self.compares(value, i64::lt),
            _ => false,
        }
    }

    /// Returns true if a label's value and the one value of the requirement are whole numbers for which `compare` returns true.
    fn compares(&self, value: &str, compare: fn(&i64, &i64) -> bool) -> bool {
        // The API server accepts only one value for these operators.
        let [bound] = self.values.as_slice() else {
            return false;
        };
        match (value.parse(), bound.parse()) {
            (Ok(label), Ok(bound)) => compare(&label, &bound),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::{NameRule, NodeSelector};

    fn expression(key: &str, operator: &str, values: &[&str]) -> Value {
        json!({"key": key, "operator": operator, "values": values})
    }

    fn labels(expressions: &[Value]) -> Value {
        json!([{"matchExpressions": expressions}])
    }

    #[rstest]
    #[case::no_term(json!([]), false)]
    #[case::empty_term(json!([{}]), false)]
    #[case::null_terms(Value::Null, false)]
    #[case::one_of_the_values(labels(&[expression("zone", "In", &["a", "b"])]), true)]
    #[case::none_of_the_values(labels(&[expression("zone", "In", &["a"])]), false)]
    #[case::in_without_the_label(labels(&[expression("disk", "In", &["ssd"])]), false)]
    #[case::excluded_value(labels(&[expression("zone", "NotIn", &["b"])]), false)]
    #[case::excluded_and_without_the_label(labels(&[expression("disk", "NotIn", &["ssd"])]), true)]
    #[case::exists(labels(&[expression("zone", "Exists", &[])]), true)]
    #[case::must_not_exist(labels(&[expression("zone", "DoesNotExist", &[])]), false)]
    #[case::greater(labels(&[expression("gpus", "Gt", &["7"])]), true)]
    #[case::not_greater(labels(&[expression("gpus", "Gt", &["8"])]), false)]
    #[case::less(labels(&[expression("gpus", "Lt", &["9"])]), true)]
    #[case::no_number(labels(&[expression("zone", "Gt", &["1"])]), false)]
    #[case::two_bounds(labels(&[expression("gpus", "Gt", &["1", "2"])]), false)]
    #[case::every_requirement(labels(&[expression("zone", "In", &["b"]), expression("gpus", "Gt", &["9"])]), false)]
    #[case::unknown_operator(labels(&[expression("zone", "Near", &["b"])]), false)]
    #[case::name(json!([{"matchFields": [expression("metadata.name", "In", &["n1"])]}]), true)]
    #[case::another_name(json!([{"matchFields": [expression("metadata.name", "In", &["n2"])]}]), false)]
    #[case::another_field(json!([{"matchFields": [expression("metadata.uid", "In", &["n1"])]}]), false)]
    #[case::one_term_of_two(json!([{}, {"matchExpressions": [expression("zone", "Exists", &[])]}]), true)]
    fn nodes_match_as_kube_scheduler_compares_them(#[case] terms: Value, #[case] expected: bool) {
        let selector: NodeSelector = serde_json::from_value(json!({"nodeSelectorTerms": terms})).unwrap();
        let label = |key: &str| match key {
            "zone" => Some("b"),
            "gpus" => Some("8"),
            _ => None,
        };
        assert_eq!(selector.matches("n1", label), expected);
    }

    fn names(requirements: &[(&str, &str)]) -> Value {
        let mut fields = Vec::new();
        for (operator, name) in requirements {
            fields.push(expression("metadata.name", operator, &[name]));
        }
        json!({"matchFields": fields})
    }

    #[rstest]
    #[case::no_term(json!([]), NameRule::Searched)]
    #[case::named(json!([names(&[("In", "n1")])]), NameRule::Searched)]
    #[case::not_named(json!([names(&[("In", "n2")])]), NameRule::NotNamed)]
    #[case::one_term_of_two(json!([names(&[("In", "n2")]), names(&[("In", "n1")])]), NameRule::Searched)]
    #[case::another_term_without_names(json!([names(&[("In", "n2")]), {}]), NameRule::Searched)]
    #[case::excluded(json!([names(&[("NotIn", "n1")])]), NameRule::Searched)]
    #[case::conflict(json!([names(&[("In", "n1"), ("In", "n2")])]), NameRule::Conflict)]
    fn names_in_every_term_limit_the_search(#[case] terms: Value, #[case] expected: NameRule) {
        let selector: NodeSelector = serde_json::from_value(json!({"nodeSelectorTerms": terms})).unwrap();
        assert_eq!(selector.name_rule("n1"), expected);
    }
}
