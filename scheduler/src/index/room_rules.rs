//! The pods for which the leader makes room.

use proto::pod::Pod;

/// `spec.preemptionPolicy` of a pod for which no other pod is evicted.
const NEVER: &str = "Never";

/// The reason of the condition `PodScheduled` of a pod that no node fits.
const UNSCHEDULABLE: &str = "Unschedulable";

/// The reason for which no room is made for a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NotPreemptor {
    #[error("the pod has a node")]
    Bound,
    #[error("the pod is being deleted")]
    Leaving,
    #[error("the pod has no priority, or a negative one")]
    NoPriority,
    #[error("its preemptionPolicy is Never")]
    Never,
    #[error("it has a scheduling gate")]
    Gated,
    #[error("it is a member of a group")]
    InGroup,
    #[error("kube-scheduler has nominated it to a node")]
    Nominated,
    #[error("no node that kube-scheduler asked about last has refused it for want of room on devices")]
    NotRefused,
    #[error(
        "this replica remembers no request of kube-scheduler in which nodes refused it for want of room on devices"
    )]
    NotRemembered,
}

/// Checks the fields of a pod that no attempt to schedule it changes.
///
/// # Errors
/// The reason for which no room is made for it.
pub(crate) fn check_spec(pod: &Pod) -> Result<(), NotPreemptor> {
    let spec = &pod.spec;
    if !spec.node_name.as_deref().unwrap_or_default().is_empty() {
        Err(NotPreemptor::Bound)
    } else if pod.is_deleting() {
        Err(NotPreemptor::Leaving)
    } else if spec.priority.is_none_or(|priority| priority < 0) {
        Err(NotPreemptor::NoPriority)
    } else if spec.preemption_policy.as_deref() == Some(NEVER) {
        Err(NotPreemptor::Never)
    } else if !spec.scheduling_gates.is_empty() {
        Err(NotPreemptor::Gated)
    } else if pod.is_in_gang() {
        Err(NotPreemptor::InGroup)
    } else {
        Ok(())
    }
}

/// Checks that room may be made for a pod that filters have refused for devices on this number of nodes.
///
/// # Errors
/// The reason for which no room is made for it.
pub(crate) fn check(pod: &Pod, n_refusing: usize) -> Result<(), NotPreemptor> {
    check_spec(pod)?;
    if pod.nominated_node().is_some() {
        return Err(NotPreemptor::Nominated);
    }
    // The condition is part of the pod, so that it is never older than the pod itself.
    match pod.unscheduled_condition() {
        Some(condition) if n_refusing > 0 && is_refusal(&condition.reason) => Ok(()),
        _ => Err(NotPreemptor::NotRefused),
    }
}

/// Returns true if a condition `PodScheduled` with this reason means that no node fits.
pub(crate) fn is_refusal(reason: &str) -> bool {
    reason == UNSCHEDULABLE
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;

    /// A refused pod with a field that differs.
    fn refused(field: &str, value: Value) -> Pod {
        let condition = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable"});
        let mut pod = json!({
            "metadata": {"name": "p", "namespace": "d", "uid": "u"},
            "spec": {"containers": [], "priority": 1000},
            "status": {"conditions": [condition]},
        });
        if let Some((parent, key)) = field.rsplit_once('/') {
            pod.pointer_mut(parent).unwrap()[key] = value;
        }
        serde_json::from_value(pod).unwrap()
    }

    #[rstest]
    #[case::as_refused("", json!(null), Ok(()))]
    #[case::priority_zero("/spec/priority", json!(0), Ok(()))]
    #[case::priority_negative("/spec/priority", json!(-1), Err(NotPreemptor::NoPriority))]
    #[case::priority_missing("/spec/priority", json!(null), Err(NotPreemptor::NoPriority))]
    #[case::policy_lower("/spec/preemptionPolicy", json!("PreemptLowerPriority"), Ok(()))]
    #[case::policy_never("/spec/preemptionPolicy", json!("Never"), Err(NotPreemptor::Never))]
    #[case::gate("/spec/schedulingGates", json!([{"name": "example.com/quota"}]), Err(NotPreemptor::Gated))]
    #[case::group("/spec/schedulingGroup", json!({"podGroupName": "g"}), Err(NotPreemptor::InGroup))]
    #[case::gang("/metadata/labels", json!({"scheduling.x-k8s.io/pod-group": "g"}), Err(NotPreemptor::InGroup))]
    #[case::nominated("/status/nominatedNodeName", json!("n1"), Err(NotPreemptor::Nominated))]
    #[case::bound("/spec/nodeName", json!("n1"), Err(NotPreemptor::Bound))]
    #[case::leaving("/metadata/deletionTimestamp", json!("2026-01-01T00:00:00Z"), Err(NotPreemptor::Leaving))]
    #[case::untried("/status/conditions", json!([]), Err(NotPreemptor::NotRefused))]
    #[case::an_error("/status/conditions", json!([{"type": "PodScheduled", "status": "False", "reason": "SchedulerError"}]), Err(NotPreemptor::NotRefused))]
    fn pods_with_room_made_for_them(
        #[case] field: &str,
        #[case] value: Value,
        #[case] expected: Result<(), NotPreemptor>,
    ) {
        let pod = refused(field, value);
        assert_eq!(check(&pod, 1), expected);
        assert!(check(&pod, 0).is_err(), "no node has refused it for devices");
    }
}
