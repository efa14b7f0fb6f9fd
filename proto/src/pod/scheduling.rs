//! The fields of a pod that concern its scheduling: affinity, spreading, taints and tolerations, volumes, groups, conditions.
//!
//! gpushare counts preferences and does not evaluate them: kube-scheduler filters and scores by them.

use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer, Serialize};

use super::null_as_default;

/// Node and pod affinity.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Affinity {
    /// Terms about the labels of nodes.
    #[serde(deserialize_with = "null_as_default")]
    pub node_affinity: AffinityTerms,
    /// Terms that ask for nodes near certain pods.
    #[serde(deserialize_with = "null_as_default")]
    pub pod_affinity: AffinityTerms,
    /// Terms that ask for nodes away from certain pods.
    #[serde(deserialize_with = "null_as_default")]
    pub pod_anti_affinity: AffinityTerms,
}

/// The number of terms of one kind of affinity.
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
    // A list for pod affinity, an object for node affinity: only its presence is read.
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
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Toleration {
    /// The key of the taints; empty for any key.
    pub key: String,
    /// `Exists`, or `Equal`, which is the default.
    pub operator: String,
    /// The value of the taints, compared by `Equal` only.
    pub value: String,
    /// The effect of the taints; empty for any effect.
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

impl SpreadConstraint {
    pub(super) fn is_preference(&self) -> bool {
        self.when_unsatisfiable == "ScheduleAnyway"
    }

    pub(super) fn is_required(&self) -> bool {
        // The field is required, so that the API server stores no other value.
        self.when_unsatisfiable == "DoNotSchedule"
    }
}

impl Taint {
    /// Returns true if the taint only lowers the node's rank.
    pub fn is_prefer_no_schedule(&self) -> bool {
        self.effect == "PreferNoSchedule"
    }
}

impl Toleration {
    /// Returns true if a pod with this toleration tolerates the taint, by the rules of Kubernetes.
    pub(super) fn covers(&self, taint: &Taint) -> bool {
        let same_value = match self.operator.as_str() {
            "Exists" => true,
            "" | "Equal" => self.value == taint.value,
            // `Lt` and `Gt`, which newer versions may have, are taken for no match: the node then ranks lower.
            _ => false,
        };
        // An empty key stands for all keys, but only with `Exists`.
        let same_key = if self.key.is_empty() {
            self.operator == "Exists"
        } else {
            self.key == taint.key
        };
        same_key && same_value && (self.effect.is_empty() || self.effect == taint.effect)
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
fn length<'de, D: Deserializer<'de>>(deserializer: D) -> Result<usize, D::Error> {
    null_as_default(deserializer).map(|entries: Vec<IgnoredAny>| entries.len())
}

/// Returns true if a field is there and not null, whatever it holds.
fn is_set<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    Option::<IgnoredAny>::deserialize(deserializer).map(|value| value.is_some())
}
