//! The progress of kube-scheduler with a pod: conditions, nominated node, and the claims that make a binding wait.

use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer, Serialize};

use super::Pod;

/// The condition that kube-scheduler writes.
const POD_SCHEDULED: &str = "PodScheduled";

/// Reasons of that condition for an attempt that came to nothing.
const UNSCHEDULABLE: &str = "Unschedulable";
const SCHEDULER_ERROR: &str = "SchedulerError";

/// Labels by which the coscheduling plugin knows the pods of a group, newest first.
const GROUP_LABELS: [&str; 2] = [
    "scheduling.x-k8s.io/pod-group",
    "pod-group.scheduling.sigs.k8s.io",
];

/// The annotation by which Koordinator's coscheduling knows the pods of a gang.
const GANG_ANNOTATION: &str = "gang.scheduling.koordinator.sh/name";

/// A condition of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodCondition {
    /// Its type, such as `PodScheduled`.
    #[serde(rename = "type", default)]
    pub kind: String,
    /// `True`, `False` or `Unknown`.
    #[serde(default)]
    pub status: String,
    /// A word for why.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// A sentence for why.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// A volume, as far as it makes a binding wait.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Volume {
    /// True if it is claimed, by a claim of its own or of the pod's.
    #[serde(rename = "persistentVolumeClaim", default, deserialize_with = "is_set")]
    pub is_claimed: bool,
    /// True if its claim is made for the pod and goes with it.
    #[serde(rename = "ephemeral", default, deserialize_with = "is_set")]
    pub is_ephemeral: bool,
}

/// The group of a pod that is placed as a whole.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SchedulingGroup {
    /// Name of the `PodGroup`, in the namespace of the pod.
    #[serde(default)]
    pub pod_group_name: Option<String>,
}

impl Pod {
    /// The condition of the last attempt to schedule it, if that came to nothing.
    pub fn failed_attempt(&self) -> Option<&PodCondition> {
        let failed = |condition: &&PodCondition| {
            let reason = condition.reason.as_str();
            condition.kind == POD_SCHEDULED
                && condition.status == "False"
                && (reason == UNSCHEDULABLE || reason == SCHEDULER_ERROR)
        };
        self.status.conditions.iter().find(failed)
    }

    /// Returns true if a scheduler places the pod together with others or not at all: by kube-scheduler's `PodGroups`, or by a
    /// coscheduling plugin.
    pub fn is_in_gang(&self) -> bool {
        let labels = self.metadata.labels.as_ref();
        let annotations = self.metadata.annotations.as_ref();
        self.spec.scheduling_group.is_some()
            || labels.is_some_and(|labels| GROUP_LABELS.iter().any(|key| labels.contains_key(*key)))
            || annotations.is_some_and(|annotations| annotations.contains_key(GANG_ANNOTATION))
    }

    /// The `PodGroup` that it belongs to, in its namespace.
    pub fn pod_group(&self) -> Option<&str> {
        self.spec.scheduling_group.as_ref()?.pod_group_name.as_deref()
    }

    /// Returns true if kube-scheduler may wait before it binds the pod: for its volumes, or for the devices of its claims.
    ///
    /// The pod alone does not say which of its claims are bound already.
    pub fn may_wait_for_claims(&self) -> bool {
        self.uses_claims()
            || self
                .spec
                .volumes
                .iter()
                .any(|volume| volume.is_claimed || volume.is_ephemeral)
    }

    /// Number of the version of the object, by which later ones are known; `None` if it has none.
    pub fn version(&self) -> Option<u64> {
        self.metadata.resource_version.as_deref()?.parse().ok()
    }
}

impl PodCondition {
    /// Returns true if the attempt ended in an error, such as a call that timed out, and not in a refusal.
    pub fn is_error(&self) -> bool {
        self.reason == SCHEDULER_ERROR
    }
}

fn is_set<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    Option::<IgnoredAny>::deserialize(deserializer).map(|value| value.is_some())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;

    fn pod(value: Value) -> Pod {
        serde_json::from_value(value).unwrap()
    }

    fn condition(kind: &str, status: &str, reason: &str) -> Value {
        json!({"status": {"conditions": [{"type": kind, "status": status, "reason": reason, "message": "m", "lastTransitionTime": null}]}})
    }

    #[rstest]
    #[case::none(json!({}), None)]
    #[case::null(json!({"status": {"conditions": null}}), None)]
    #[case::unschedulable(condition("PodScheduled", "False", "Unschedulable"), Some(false))]
    #[case::error(condition("PodScheduled", "False", "SchedulerError"), Some(true))]
    #[case::gated(condition("PodScheduled", "False", "SchedulingGated"), None)]
    #[case::scheduled(condition("PodScheduled", "True", ""), None)]
    #[case::another(condition("Ready", "False", "Unschedulable"), None)]
    fn failed_attempts(#[case] value: Value, #[case] is_error: Option<bool>) {
        assert_eq!(pod(value).failed_attempt().map(PodCondition::is_error), is_error);
    }

    #[rstest]
    #[case::nothing(json!({"spec": {"volumes": [{"name": "tmp", "emptyDir": {}}]}}), false)]
    #[case::nulls(json!({"spec": {"volumes": null}}), false)]
    #[case::a_claim(json!({"spec": {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]}}), true)]
    #[case::its_own_claim(json!({"spec": {"volumes": [{"name": "data", "ephemeral": {"volumeClaimTemplate": {}}}]}}), true)]
    #[case::a_dra_claim(json!({"spec": {"resourceClaims": [{"name": "nic"}]}}), true)]
    fn what_makes_a_binding_wait(#[case] value: Value, #[case] expected: bool) {
        assert_eq!(pod(value).may_wait_for_claims(), expected);
    }

    #[rstest]
    #[case::alone(json!({}), false)]
    #[case::pod_group(json!({"spec": {"schedulingGroup": {"podGroupName": "g"}}}), true)]
    #[case::coscheduling(json!({"metadata": {"labels": {"scheduling.x-k8s.io/pod-group": "g"}}}), true)]
    #[case::old_coscheduling(json!({"metadata": {"labels": {"pod-group.scheduling.sigs.k8s.io": "g"}}}), true)]
    #[case::koordinator(json!({"metadata": {"annotations": {"gang.scheduling.koordinator.sh/name": "g"}}}), true)]
    #[case::another_label(json!({"metadata": {"labels": {"app": "g"}}}), false)]
    fn gangs(#[case] value: Value, #[case] expected: bool) {
        assert_eq!(pod(value).is_in_gang(), expected);
    }

    #[test]
    fn nominations() {
        assert_eq!(
            pod(json!({"status": {"nominatedNodeName": "n1"}})).nominated_node(),
            Some("n1")
        );
        assert_eq!(
            pod(json!({"status": {"nominatedNodeName": ""}})).nominated_node(),
            None
        );
    }
}
