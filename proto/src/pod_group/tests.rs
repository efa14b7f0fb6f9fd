//! Wishes in annotations, and `PodGroup`s as the API servers of their APIs show them.

use rstest::rstest;
use serde_json::{Value, json};

use super::*;

const ANY: GroupWish = GroupWish {
    domain: GroupDomain::Any,
    policy: DomainPolicy::Preferred,
};

fn annotations(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs
        .iter()
        .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
        .collect()
}

#[rstest]
#[case::nothing(&[], None)]
#[case::others(&[("gpushare/node-policy", "spread")], None)]
#[case::any(&[("gpushare/group-domain", "any")], Some(ANY))]
#[case::node(&[("gpushare/group-domain", "node")], Some(GroupWish { domain: GroupDomain::Node, ..ANY }))]
#[case::link(
    &[("gpushare/group-domain", "link"), ("gpushare/group-domain-policy", "preferred")],
    Some(GroupWish { domain: GroupDomain::Link, ..ANY })
)]
#[case::required(
    &[("gpushare/group-domain", "link"), ("gpushare/group-domain-policy", "required")],
    Some(GroupWish { domain: GroupDomain::Link, policy: DomainPolicy::Required })
)]
#[case::policy_alone(&[("gpushare/group-domain-policy", "required")], Some(GroupWish { policy: DomainPolicy::Required, ..ANY }))]
fn a_wish_is_read(#[case] pairs: &[(&str, &str)], #[case] expected: Option<GroupWish>) {
    assert_eq!(GroupWish::read(Some(&annotations(pairs))), Ok(expected));
}

#[test]
fn an_object_without_annotations_has_no_wish() {
    assert_eq!(GroupWish::read(None), Ok(None));
    assert_eq!(GroupWish::default(), ANY);
}

#[rstest]
#[case::domain(
    &[("gpushare/group-domain", "rack")],
    "annotation gpushare/group-domain: \"rack\" is none of any, node, link"
)]
#[case::case_matters(
    &[("gpushare/group-domain", "Link")],
    "annotation gpushare/group-domain: \"Link\" is none of any, node, link"
)]
#[case::empty(
    &[("gpushare/group-domain", "")],
    "annotation gpushare/group-domain: \"\" is none of any, node, link"
)]
#[case::policy(
    &[("gpushare/group-domain", "node"), ("gpushare/group-domain-policy", "must")],
    "annotation gpushare/group-domain-policy: \"must\" is none of required, preferred"
)]
fn an_unknown_value_is_an_error_with_the_choice(#[case] pairs: &[(&str, &str)], #[case] expected: &str) {
    let error = GroupWish::read(Some(&annotations(pairs))).unwrap_err();
    assert_eq!(error.to_string(), expected);
}

#[test]
fn an_error_shows_the_beginning_of_a_long_value() {
    let text = "x".repeat(10_000);
    let error = text.parse::<GroupDomain>().unwrap_err();
    assert!(error.len() < 200, "{error}");
}

/// A `PodGroup` in the form of Kubernetes 1.37.
fn v1beta1(policy: &Value) -> Value {
    json!({
        "apiVersion": "scheduling.k8s.io/v1beta1", "kind": "PodGroup",
        "metadata": {
            "name": "train", "namespace": "team", "uid": "0b5c2f0e-7d0c-4b2e-9a56-1f6f4d9a2c11", "resourceVersion": "812",
            "creationTimestamp": "2026-09-01T09:00:00Z", "annotations": {"gpushare/group-domain": "link"},
        },
        "spec": {
            "schedulingPolicy": policy, "disruptionMode": {"single": {}}, "priority": 0,
            "preemptionPolicy": "PreemptLowerPriority",
            "schedulingConstraints": {"topology": [{"key": "topology.kubernetes.io/rack"}]},
            "workloadRef": {"workloadName": "train", "podGroupTemplateName": "workers"},
        },
        "status": {"conditions": [{
            "type": "PodGroupScheduled", "status": "True", "reason": "Scheduled", "message": "",
            "lastTransitionTime": "2026-09-01T09:00:01Z",
        }]},
    })
}

/// A `PodGroup` in the form of Kubernetes 1.36.
fn v1alpha2(policy: &Value) -> Value {
    json!({
        "apiVersion": "scheduling.k8s.io/v1alpha2", "kind": "PodGroup", "metadata": {"name": "train", "namespace": "team"},
        "spec": {
            "schedulingPolicy": policy,
            "podGroupTemplateRef": {"workload": {"workloadName": "train", "podGroupTemplateName": "workers"}},
        },
    })
}

/// A `PodGroup` of the coscheduling plugin.
fn coscheduling(min_member: &Value) -> Value {
    json!({
        "apiVersion": "scheduling.x-k8s.io/v1alpha1", "kind": "PodGroup", "metadata": {"name": "train", "namespace": "team"},
        "spec": {"minMember": min_member, "minResources": {"cpu": "4"}, "scheduleTimeoutSeconds": 60},
        "status": {"phase": "Scheduling", "running": 1, "scheduleStartTime": "2026-09-01T09:00:00Z"},
    })
}

#[rstest]
#[case::v1beta1(v1beta1(&json!({"gang": {"minCount": 4}})), Some(4))]
#[case::v1beta1_basic(v1beta1(&json!({"basic": {}})), None)]
#[case::v1alpha2(v1alpha2(&json!({"gang": {"minCount": 3}})), Some(3))]
#[case::v1alpha2_basic(v1alpha2(&json!({"basic": {}})), None)]
#[case::coscheduling(coscheduling(&json!(8)), Some(8))]
#[case::zero(v1beta1(&json!({"gang": {"minCount": 0}})), Some(0))]
#[case::negative(v1beta1(&json!({"gang": {"minCount": -4}})), Some(0))]
#[case::ten_thousand(v1beta1(&json!({"gang": {"minCount": 10_000}})), Some(10_000))]
#[case::more_than_32_bits(coscheduling(&json!(i64::MAX)), Some(u32::MAX))]
#[case::less_than_32_bits(coscheduling(&json!(i64::MIN)), Some(0))]
#[case::more_than_64_bits(coscheduling(&json!(1e300)), None)]
#[case::no_number(coscheduling(&json!("8")), None)]
#[case::no_count(v1beta1(&json!({"gang": {}})), None)]
#[case::nulls(
    json!({"metadata": {"name": "train", "namespace": "team"}, "spec": {"schedulingPolicy": null, "minMember": null}}),
    None
)]
#[case::no_spec(json!({"metadata": {"name": "train", "namespace": "team"}, "spec": null}), None)]
fn a_pod_group_has_its_size(#[case] object: Value, #[case] expected: Option<u32>) {
    let group: PodGroup = serde_json::from_value(object).unwrap();
    assert_eq!(group.min_count(), expected);
    assert_eq!(&*group.key(), "team/train");
}

#[rstest]
#[case::v1beta1(PodGroupApi::V1Beta1, "/apis/scheduling.k8s.io/v1beta1/podgroups")]
#[case::v1alpha3(PodGroupApi::V1Alpha3, "/apis/scheduling.k8s.io/v1alpha3/podgroups")]
#[case::v1alpha2(PodGroupApi::V1Alpha2, "/apis/scheduling.k8s.io/v1alpha2/podgroups")]
#[case::coscheduling(PodGroupApi::Coscheduling, "/apis/scheduling.x-k8s.io/v1alpha1/podgroups")]
fn each_api_has_its_path(#[case] api: PodGroupApi, #[case] expected: &str) {
    assert_eq!(PodGroup::url_path(&api, None), expected);
}
