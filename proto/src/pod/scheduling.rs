//! The fields of a pod that concern its scheduling: affinity, spreading, taints and tolerations, volumes, groups, conditions.
//!
//! gpushare counts preferences and does not evaluate them: kube-scheduler scores by them.

use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer, Serialize};

use super::node_affinity::NodeSelector;
use super::{is_default, null_as_default};

/// Node and pod affinity. Only required node affinity is encoded again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Affinity {
    /// Terms about the labels of nodes.
    #[serde(deserialize_with = "null_as_default", skip_serializing_if = "is_default")]
    pub node_affinity: NodeAffinity,
    /// Terms that ask for nodes near certain pods.
    #[serde(deserialize_with = "null_as_default", skip_serializing)]
    pub pod_affinity: AffinityTerms,
    /// Terms that ask for nodes away from certain pods.
    #[serde(deserialize_with = "null_as_default", skip_serializing)]
    pub pod_anti_affinity: AffinityTerms,
}

/// Terms about the labels of nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeAffinity {
    /// The number of preferred terms.
    #[serde(
        rename = "preferredDuringSchedulingIgnoredDuringExecution",
        deserialize_with = "length",
        skip_serializing
    )]
    pub n_preferred: usize,
    /// The terms of which a node has to match one.
    #[serde(
        rename = "requiredDuringSchedulingIgnoredDuringExecution",
        skip_serializing_if = "Option::is_none"
    )]
    pub required: Option<NodeSelector>,
}

/// The number of terms about other pods.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct AffinityTerms {
    /// The number of preferred terms.
    #[serde(
        rename = "preferredDuringSchedulingIgnoredDuringExecution",
        deserialize_with = "length"
    )]
    pub n_preferred: usize,
    /// True if there are required terms.
    #[serde(
        rename = "requiredDuringSchedulingIgnoredDuringExecution",
        deserialize_with = "is_set"
    )]
    pub is_required: bool,
}

/// A topology spread constraint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SpreadConstraint {
    /// `DoNotSchedule`, or `ScheduleAnyway` for a preference.
    pub when_unsatisfiable: String,
}

/// A taint of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Taint {
    /// The taint's key.
    pub key: String,
    /// The taint's value; empty if it has none.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub value: String,
    /// `NoSchedule`, `PreferNoSchedule` or `NoExecute`.
    pub effect: String,
}

/// A toleration of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct Toleration {
    /// The key of the taints; empty for any key.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub key: String,
    /// `Exists`, or `Equal`, which is the default.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub operator: String,
    /// The value of the taints, compared by `Equal` only.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub value: String,
    /// The effect of the taints; empty for any effect.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub effect: String,
}

/// A volume, of which only the kinds that can delay a binding are distinguished.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Volume {
    /// True for a persistent volume claim.
    #[serde(rename = "persistentVolumeClaim", deserialize_with = "is_set")]
    pub is_claimed: bool,
    /// True for an ephemeral volume, whose claim is created with the pod and deleted with it.
    #[serde(rename = "ephemeral", deserialize_with = "is_set")]
    pub is_ephemeral: bool,
}

/// A pod's membership in a group that is placed as a whole.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct SchedulingGroup {
    /// Name of the `PodGroup`, in the namespace of the pod.
    pub pod_group_name: Option<String>,
}

/// A condition of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PodCondition {
    /// The condition's type, such as `PodScheduled`.
    #[serde(rename = "type")]
    pub kind: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// The reason of the status in CamelCase.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// The reason of the status in a sentence.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
}

impl Taint {
    /// Returns true if the taint only lowers the node's rank.
    pub fn is_prefer_no_schedule(&self) -> bool {
        self.effect == "PreferNoSchedule"
    }

    /// Returns true if the taint keeps pods that do not tolerate it away from the node.
    pub fn is_hard(&self) -> bool {
        ["NoSchedule", "NoExecute"].contains(&self.effect.as_str())
    }

    /// Returns true if one of these tolerations covers the taint.
    pub fn is_tolerated_by(&self, tolerations: &[Toleration]) -> bool {
        tolerations.iter().any(|toleration| toleration.covers(self))
    }
}

impl Toleration {
    /// Returns true if a pod with this toleration tolerates the taint, by the rules of Kubernetes.
    fn covers(&self, taint: &Taint) -> bool {
        let is_same = match self.operator.as_str() {
            // An empty key stands for all keys.
            "Exists" => self.key.is_empty() || self.key == taint.key,
            "" | "Equal" => !self.key.is_empty() && self.key == taint.key && self.value == taint.value,
            // Operators of newer Kubernetes versions, such as `Lt` and `Gt`, are not evaluated, and count as no match.
            _ => false,
        };
        is_same && (self.effect.is_empty() || self.effect == taint.effect)
    }
}

impl PodCondition {
    /// Returns true if the attempt to schedule the pod ended in an error, such as a timeout, and not in a refusal.
    pub fn is_error(&self) -> bool {
        // kube-scheduler's reason for every attempt that no plugin refused.
        self.reason == "SchedulerError"
    }
}

/// The length of a list, whose entries are skipped.
pub(super) fn length<'de, D: Deserializer<'de>>(deserializer: D) -> Result<usize, D::Error> {
    Ok(null_as_default::<_, Vec<IgnoredAny>>(deserializer)?.len())
}

/// Returns true if a field is there and not null, whatever its value.
pub(super) fn is_set<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    Ok(Option::<IgnoredAny>::deserialize(deserializer)?.is_some())
}
