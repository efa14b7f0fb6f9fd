//! What a pod says about nodes that only influences the choice among them: preferences, and taints that it minds.
//!
//! What a pod demands of nodes is kube-scheduler's business, and so is what its preferences say: here they only are or
//! are not there.

use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer, Serialize};

use super::{PodSpec, null_as_default};

/// The effect of a taint that pods had better avoid.
const PREFER_NO_SCHEDULE: &str = "PreferNoSchedule";

/// The `whenUnsatisfiable` of a spread constraint that is a demand.
const DO_NOT_SCHEDULE: &str = "DoNotSchedule";

/// What a pod would rather be near, or far from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Affinity {
    /// Nodes.
    #[serde(default, deserialize_with = "null_as_default")]
    pub node_affinity: Preferred,
    /// Pods to be near to.
    #[serde(default, deserialize_with = "null_as_default")]
    pub pod_affinity: Preferred,
    /// Pods to be far from.
    #[serde(default, deserialize_with = "null_as_default")]
    pub pod_anti_affinity: Preferred,
}

/// How many preferences there are of one kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Preferred {
    /// Their number.
    #[serde(
        default,
        rename = "preferredDuringSchedulingIgnoredDuringExecution",
        deserialize_with = "number"
    )]
    pub n: usize,
    /// True if there are demands too.
    #[serde(
        default,
        rename = "requiredDuringSchedulingIgnoredDuringExecution",
        deserialize_with = "is_there"
    )]
    pub is_required: bool,
}

/// How a pod is spread beside others like it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SpreadConstraint {
    /// `ScheduleAnyway` for a preference.
    #[serde(default)]
    pub when_unsatisfiable: String,
}

/// A mark on a node that keeps pods away.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Taint {
    /// Its key.
    #[serde(default)]
    pub key: String,
    /// Its value.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub value: String,
    /// How it keeps pods away.
    #[serde(default)]
    pub effect: String,
}

/// Taints that a pod does not mind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Toleration {
    /// Their key; any, if empty.
    #[serde(default)]
    pub key: String,
    /// `Equal` unless said otherwise, or `Exists`.
    #[serde(default)]
    pub operator: String,
    /// Their value, which only `Equal` looks at.
    #[serde(default)]
    pub value: String,
    /// Their effect; any, if empty.
    #[serde(default)]
    pub effect: String,
}

impl PodSpec {
    /// Whether the pod has preferences among nodes that it may run on.
    pub fn has_preferences(&self) -> bool {
        let Affinity {
            node_affinity,
            pod_affinity,
            pod_anti_affinity,
        } = &self.affinity;
        let mut spreads = self.topology_spread_constraints.iter();
        [node_affinity, pod_affinity, pod_anti_affinity]
            .into_iter()
            .any(|preferred| preferred.n > 0)
            || spreads.any(|constraint| constraint.when_unsatisfiable == "ScheduleAnyway")
    }

    /// Returns true if the pod demands that certain pods are, or are not, near by.
    pub fn demands_neighbours(&self) -> bool {
        let Affinity {
            pod_affinity,
            pod_anti_affinity,
            ..
        } = &self.affinity;
        let mut spreads = self.topology_spread_constraints.iter();
        pod_affinity.is_required
            || pod_anti_affinity.is_required
            || spreads.any(|constraint| constraint.when_unsatisfiable == DO_NOT_SCHEDULE)
    }

    /// Whether the pod had better avoid a node with these taints.
    pub fn avoids(&self, taints: &[Taint]) -> bool {
        let mut soft = taints.iter().filter(|taint| taint.is_soft());
        soft.any(|taint| !self.tolerations.iter().any(|toleration| toleration.covers(taint)))
    }
}

impl Taint {
    /// Whether it only makes a node less welcome.
    pub fn is_soft(&self) -> bool {
        self.effect == PREFER_NO_SCHEDULE
    }
}

impl Toleration {
    fn covers(&self, taint: &Taint) -> bool {
        let same_value = match self.operator.as_str() {
            "Exists" => true,
            "" | "Equal" => self.value == taint.value,
            _ => false,
        };
        let same_key = if self.key.is_empty() {
            self.operator == "Exists"
        } else {
            self.key == taint.key
        };
        same_key && same_value && (self.effect.is_empty() || self.effect == taint.effect)
    }
}

fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<usize, D::Error> {
    null_as_default(deserializer).map(|entries: Vec<IgnoredAny>| entries.len())
}

fn is_there<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    Option::<IgnoredAny>::deserialize(deserializer).map(|demands| demands.is_some())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;

    fn spec(value: Value) -> PodSpec {
        serde_json::from_value(value).unwrap()
    }

    const TERM: &str = "preferredDuringSchedulingIgnoredDuringExecution";

    #[rstest]
    #[case::nothing(json!({}), false)]
    #[case::nulls(json!({"affinity": null, "topologySpreadConstraints": null, "tolerations": null}), false)]
    #[case::demands(json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}}}), false)]
    #[case::no_term(json!({"affinity": {"podAffinity": {TERM: []}, "nodeAffinity": null}}), false)]
    #[case::nodes(json!({"affinity": {"nodeAffinity": {TERM: [{"weight": 1, "preference": {}}]}}}), true)]
    #[case::pods(json!({"affinity": {"podAffinity": {TERM: [{"weight": 1}]}}}), true)]
    #[case::away_from_pods(json!({"affinity": {"podAntiAffinity": {TERM: [{}]}}}), true)]
    #[case::strict_spread(json!({"topologySpreadConstraints": [{"maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}]}), false)]
    #[case::loose_spread(json!({"topologySpreadConstraints": [{"whenUnsatisfiable": "DoNotSchedule"}, {"whenUnsatisfiable": "ScheduleAnyway"}]}), true)]
    fn preferences(#[case] pod: Value, #[case] expected: bool) {
        assert_eq!(spec(pod).has_preferences(), expected);
    }

    #[rstest]
    #[case::of_nothing(json!([]), true)]
    #[case::by_value(json!([{"key": "spot", "value": "yes", "effect": "PreferNoSchedule"}]), false)]
    #[case::by_equal(json!([{"key": "spot", "operator": "Equal", "value": "yes"}]), false)]
    #[case::of_another_value(json!([{"key": "spot", "value": "no"}]), true)]
    #[case::of_another_key(json!([{"key": "other", "operator": "Exists"}]), true)]
    #[case::of_another_effect(json!([{"key": "spot", "operator": "Exists", "effect": "NoSchedule"}]), true)]
    #[case::by_key(json!([{"key": "spot", "operator": "Exists"}]), false)]
    #[case::of_everything(json!([{"operator": "Exists"}]), false)]
    #[case::of_no_key(json!([{"value": "yes"}]), true)]
    #[case::by_an_unknown_word(json!([{"key": "spot", "operator": "Gt", "value": "yes"}]), true)]
    fn taints(#[case] tolerations: Value, #[case] avoids: bool) {
        let pod = spec(json!({"tolerations": tolerations}));
        let taint = |effect: &str| Taint {
            key: "spot".to_owned(),
            value: "yes".to_owned(),
            effect: effect.to_owned(),
        };
        assert_eq!(
            pod.avoids(&[taint("NoExecute"), taint("PreferNoSchedule")]),
            avoids
        );
        assert!(
            !pod.avoids(&[taint("NoSchedule")]),
            "what forbids is kube-scheduler's business"
        );
    }
}
