//! Pods of every form that the API server may send.

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
#[case::required(json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}}}), false)]
#[case::no_term(json!({"affinity": {"podAffinity": {TERM: []}, "nodeAffinity": null}}), false)]
#[case::nodes(json!({"affinity": {"nodeAffinity": {TERM: [{"weight": 1, "preference": {}}]}}}), true)]
#[case::pods(json!({"affinity": {"podAffinity": {TERM: [{"weight": 1}]}}}), true)]
#[case::away_from_pods(json!({"affinity": {"podAntiAffinity": {TERM: [{}]}}}), true)]
#[case::strict_spread(json!({"topologySpreadConstraints": [{"maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}]}), false)]
#[case::loose_spread(json!({"topologySpreadConstraints": [{"whenUnsatisfiable": "DoNotSchedule"}, {"whenUnsatisfiable": "ScheduleAnyway"}]}), true)]
fn scheduling_preferences_are_recognised(#[case] pod: Value, #[case] expected: bool) {
    assert_eq!(spec(pod).has_preferences(), expected);
}

/// The API server leaves out an empty value.
#[rstest]
#[case::text(json!({"name": "A", "value": "x"}), Some("x"))]
#[case::empty(json!({"name": "A", "value": ""}), Some(""))]
#[case::left_out(json!({"name": "A"}), Some(""))]
#[case::of_a_config_map(json!({"name": "A", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}}), None)]
fn a_variable_has_the_value_that_the_spec_says(#[case] variable: Value, #[case] value: Option<&str>) {
    let variable: Variable = serde_json::from_value(variable).unwrap();
    assert_eq!(variable.own_value(), value);
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
#[case::by_an_unknown_operator(json!([{"key": "spot", "operator": "Gt", "value": "yes"}]), true)]
fn an_untolerated_prefer_no_schedule_taint_is_avoided(#[case] tolerations: Value, #[case] avoids: bool) {
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
        "kube-scheduler itself filters by these"
    );
}

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
fn a_failed_scheduling_attempt_is_read_from_the_condition(
    #[case] value: Value,
    #[case] is_error: Option<bool>,
) {
    assert_eq!(pod(value).failed_attempt().map(PodCondition::is_error), is_error);
}

#[rstest]
#[case::nothing(json!({"spec": {"volumes": [{"name": "tmp", "emptyDir": {}}]}}), false)]
#[case::nulls(json!({"spec": {"volumes": null}}), false)]
#[case::a_claim(json!({"spec": {"volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]}}), true)]
#[case::an_ephemeral_claim(json!({"spec": {"volumes": [{"name": "data", "ephemeral": {"volumeClaimTemplate": {}}}]}}), true)]
#[case::a_dra_claim(json!({"spec": {"resourceClaims": [{"name": "nic"}]}}), true)]
fn volumes_and_claims_can_delay_a_binding(#[case] value: Value, #[case] expected: bool) {
    assert_eq!(pod(value).may_wait_for_claims(), expected);
}

#[rstest]
#[case::alone(json!({}), None)]
#[case::another_label(json!({"metadata": {"labels": {"app": "g"}}}), None)]
#[case::pod_group(json!({"spec": {"schedulingGroup": {"podGroupName": "g"}}}), Some((GroupKind::Native, "/g")))]
#[case::pod_group_without_a_name(json!({"spec": {"schedulingGroup": {}}}), None)]
#[case::coscheduling(
    json!({"metadata": {"namespace": "d", "labels": {"scheduling.x-k8s.io/pod-group": "g"}}}),
    Some((GroupKind::Coscheduling, "d/g"))
)]
#[case::old_coscheduling(
    json!({"metadata": {"namespace": "d", "labels": {"pod-group.scheduling.sigs.k8s.io": "g"}}}),
    Some((GroupKind::Coscheduling, "d/g"))
)]
#[case::koordinator(
    json!({"metadata": {"namespace": "d", "annotations": {"gang.scheduling.koordinator.sh/name": "g"}}}),
    Some((GroupKind::Koordinator, "d/g"))
)]
#[case::empty_names(
    json!({"spec": {"schedulingGroup": {"podGroupName": ""}}, "metadata": {"namespace": "d",
        "labels": {"scheduling.x-k8s.io/pod-group": "", "pod-group.scheduling.sigs.k8s.io": "g"},
        "annotations": {"gang.scheduling.koordinator.sh/name": "h"}}}),
    Some((GroupKind::Coscheduling, "d/g"))
)]
#[case::all_marks(
    json!({"spec": {"schedulingGroup": {"podGroupName": "f"}}, "metadata": {"namespace": "d",
        "labels": {"scheduling.x-k8s.io/pod-group": "g"}, "annotations": {"gang.scheduling.koordinator.sh/name": "h"}}}),
    Some((GroupKind::Native, "d/f"))
)]
fn the_group_of_a_pod_is_read_from_its_marks(
    #[case] value: Value,
    #[case] expected: Option<(GroupKind, &str)>,
) {
    let pod = pod(value);
    let group = pod.group().map(|group| (group.kind, group.key()));
    assert_eq!(group, expected.map(|(kind, key)| (kind, key.into())));
    assert_eq!(pod.is_in_gang(), expected.is_some());
}

#[rstest]
#[case::two("2", Some(2))]
#[case::negative("-1", Some(0))]
#[case::more_than_32_bits("9999999999", Some(u32::MAX))]
#[case::more_than_64_bits("99999999999999999999", None)]
#[case::no_number("all", None)]
#[case::empty("", None)]
fn the_least_size_of_a_koordinator_gang_is_read(#[case] text: &str, #[case] expected: Option<u32>) {
    let annotations = json!({"gang.scheduling.koordinator.sh/min-available": text});
    assert_eq!(
        pod(json!({"metadata": {"annotations": annotations}})).gang_min_available(),
        expected
    );
    assert_eq!(pod(json!({})).gang_min_available(), None);
}

#[test]
fn the_nominated_node_of_a_pod_is_read() {
    assert_eq!(
        pod(json!({"status": {"nominatedNodeName": "n1"}})).nominated_node(),
        Some("n1")
    );
    assert_eq!(
        pod(json!({"status": {"nominatedNodeName": ""}})).nominated_node(),
        None
    );
}
