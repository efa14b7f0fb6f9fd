//! Annotations with hints, and the texts of refusals.

use proptest::prelude::*;
use rstest::rstest;
use serde_json::{Value, json};

use super::*;

fn pod(key: &str, text: &str) -> Pod {
    serde_json::from_value(json!({"metadata": {"annotations": {key: text}}})).unwrap()
}

fn read(key: &str, text: &str) -> Result<Hints, String> {
    Hints::read(&pod(key, text)).map_err(|error| error.to_string())
}

#[test]
fn all_fields_of_the_proposals_are_read() {
    let text = r#"{"rdma": {"selector": {"matchLabels": {"type": "fakeW"}}, "vfSelector": {"matchExpressions": [
        {"key": "type", "operator": "In", "values": ["general", "fakeG"]}, {"key": "isGDR", "operator": "NotIn", "values": ["false"]},
        {"key": "a", "operator": "Exists"}, {"key": "b", "operator": "DoesNotExist", "values": []}]},
        "allocateStrategy": "RequestsAsCount", "requiredTopologyScope": "PCIe", "exclusivePolicy": "PCIeLevel"}, "gpu": null}"#;
    let requirement = |key: &str, test| LabelRequirement {
        key: key.to_owned(),
        test,
    };
    let texts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
    let functions = vec![
        requirement("type", LabelTest::In(texts(&["general", "fakeG"]))),
        requirement("isGDR", LabelTest::NotIn(texts(&["false"]))),
        requirement("a", LabelTest::Exists),
        requirement("b", LabelTest::DoesNotExist),
    ];
    let rdma = DeviceHint {
        selector: Some(vec![requirement("type", LabelTest::In(texts(&["fakeW"])))]),
        vf_selector: Some(functions),
        strategy: Some(AllocateStrategy::RequestsAsCount),
        exclusive: Some(ExclusivePolicy::PcieLevel),
        scope: Some(TopologyScope::Pcie),
    };
    let by_type = [
        ("gpu".to_owned(), DeviceHint::default()),
        ("rdma".to_owned(), rdma),
    ]
    .into();
    assert_eq!(
        read(ALLOCATE_HINT, text),
        Ok(Hints {
            by_type,
            ..Hints::default()
        })
    );
}

#[test]
fn an_empty_selector_differs_from_none() {
    let hints = read(ALLOCATE_HINT, r#"{"rdma": {"vfSelector": {}, "selector": null}}"#).unwrap();
    let rdma = &hints.by_type["rdma"];
    assert_eq!(
        (&rdma.vf_selector, &rdma.selector),
        (&Some(LabelSelector::default()), &None)
    );
}

#[rstest]
#[case::both(r#"{"deviceTypes": ["gpu", "rdma"], "requiredScope": "SamePCIe"}"#, Some((&["gpu", "rdma"][..], true)))]
#[case::anywhere(r#"{"deviceTypes": ["rdma"]}"#, Some((&["rdma"][..], false)))]
#[case::nothing(r#"{"requiredScope": "SamePCIe"}"#, None)]
fn joint_allocation(#[case] text: &str, #[case] expected: Option<(&[&str], bool)>) {
    let joint = read(JOINT_ALLOCATE, text).unwrap().joint;
    let shown = joint.as_ref().map(|joint| {
        (
            joint.device_types.iter().map(String::as_str).collect::<Vec<_>>(),
            joint.same_pcie,
        )
    });
    assert_eq!(shown, expected.map(|(kinds, same)| (kinds.to_vec(), same)));
}

#[rstest]
#[case::empty("{}", false, None)]
#[case::best_effort(r#"{"allocatePolicy": "BestEffort"}"#, false, None)]
#[case::restricted(r#"{"allocatePolicy": "Restricted", "ringBusBandwidth": "200Gi"}"#, true, Some(200 << 30))]
#[case::a_bare_number(r#"{"ringBusBandwidth": 100}"#, false, Some(100))]
fn the_partition_spec_is_read(
    #[case] text: &str,
    #[case] restricted: bool,
    #[case] ring_bus_bandwidth: Option<u64>,
) {
    assert_eq!(
        read(PARTITION_SPEC, text).unwrap().partition,
        Some(PartitionSpec {
            restricted,
            ring_bus_bandwidth
        })
    );
}

/// The refusal names the field, its value, and the valid values.
#[rstest]
#[case::strategy(
    ALLOCATE_HINT,
    r#"{"rdma": {"allocateStrategy": "All"}}"#,
    r#"rdma.allocateStrategy is "All", none of ApplyForAll, RequestsAsCount"#
)]
#[case::policy(
    ALLOCATE_HINT,
    r#"{"rdma": {"exclusivePolicy": "PCIe"}}"#,
    r#"rdma.exclusivePolicy is "PCIe", none of DeviceLevel, PCIeLevel"#
)]
#[case::scope(
    ALLOCATE_HINT,
    r#"{"gpu": {"requiredTopologyScope": "NUMA"}}"#,
    r#"gpu.requiredTopologyScope is "NUMA", none of Device, PCIe, NUMANode, Node"#
)]
#[case::operator(
    ALLOCATE_HINT,
    r#"{"rdma": {"selector": {"matchExpressions": [{"key": "k", "operator": "Gt", "values": ["1"]}]}}}"#,
    r#"rdma.selector.matchExpressions[0].operator is "Gt", none of In, NotIn, Exists, DoesNotExist"#
)]
#[case::in_nothing(
    ALLOCATE_HINT,
    r#"{"rdma": {"vfSelector": {"matchExpressions": [{"key": "k", "operator": "In"}]}}}"#,
    "rdma.vfSelector.matchExpressions[0].values is empty, and In needs one"
)]
#[case::exists_with_values(
    ALLOCATE_HINT,
    r#"{"rdma": {"selector": {"matchExpressions": [{"key": "k", "operator": "Exists", "values": ["v"]}]}}}"#,
    "values is not empty, and Exists takes none"
)]
#[case::no_key(
    ALLOCATE_HINT,
    r#"{"rdma": {"selector": {"matchLabels": {"": "v"}}}}"#,
    "rdma.selector has an empty key"
)]
#[case::twice(
    JOINT_ALLOCATE,
    r#"{"deviceTypes": ["gpu", "rdma", "gpu"]}"#,
    r#"deviceTypes names "gpu" twice"#
)]
#[case::empty_type(JOINT_ALLOCATE, r#"{"deviceTypes": ["gpu", ""]}"#, "deviceTypes[1] is empty")]
#[case::joint_scope(
    JOINT_ALLOCATE,
    r#"{"deviceTypes": ["gpu"], "requiredScope": "PCIe"}"#,
    r#"requiredScope is "PCIe", none of SamePCIe"#
)]
#[case::partition_policy(
    PARTITION_SPEC,
    r#"{"allocatePolicy": "Honor"}"#,
    r#"allocatePolicy is "Honor", none of BestEffort, Restricted"#
)]
#[case::odd_bandwidth(PARTITION_SPEC, r#"{"ringBusBandwidth": "200GB"}"#, "is not a quantity")]
#[case::negative_bandwidth(
    PARTITION_SPEC,
    r#"{"ringBusBandwidth": "-1"}"#,
    "ringBusBandwidth is -1, not a whole number of bytes up to 2^50"
)]
#[case::a_list(PARTITION_SPEC, r#"["Restricted"]"#, "not a JSON object")]
fn refusals(#[case] key: &str, #[case] text: &str, #[case] rule: &str) {
    let refusal = read(key, text).unwrap_err();
    assert!(
        refusal.starts_with(&format!("annotation {key} is ")) && refusal.contains(rule),
        "{refusal}"
    );
}

/// A key that no type has is refused with the key that was probably meant, or with all of them.
#[rstest]
#[case::one_letter(
    JOINT_ALLOCATE,
    r#"{"requiredScop": "SamePCIe"}"#,
    r#"unknown key "requiredScop" (case does not matter); did you mean "requiredScope"?"#
)]
#[case::wrong_case_too(
    JOINT_ALLOCATE,
    r#"{"devicetype": []}"#,
    r#"unknown key "devicetype" (case does not matter); did you mean "deviceTypes"?"#
)]
#[case::far(
    JOINT_ALLOCATE,
    r#"{"foo": null}"#,
    r#"unknown key "foo"; known are deviceTypes, requiredScope"#
)]
#[case::partition(
    PARTITION_SPEC,
    r#"{"ringBandwidth": 1}"#,
    r#"did you mean "ringBusBandwidth"?"#
)]
#[case::empty(
    PARTITION_SPEC,
    r#"{"": 1}"#,
    r#"unknown key ""; known are allocatePolicy, ringBusBandwidth"#
)]
#[case::hint(
    ALLOCATE_HINT,
    r#"{"rdma": {"vfSelectors": {}}}"#,
    r#"unknown key "rdma.vfSelectors" (case does not matter); did you mean "rdma.vfSelector"?"#
)]
#[case::selector(
    ALLOCATE_HINT,
    r#"{"gpu": {"selector": {"matchLabel": {}}}}"#,
    r#"did you mean "gpu.selector.matchLabels"?"#
)]
#[case::expression(
    ALLOCATE_HINT,
    r#"{"gpu": {"selector": {"matchExpressions": [{"key": "a", "operator": "Exists", "value": []}]}}}"#,
    r#"did you mean "gpu.selector.matchExpressions[0].values"?"#
)]
#[case::twice(
    JOINT_ALLOCATE,
    r#"{"deviceTypes": [], "devicetypes": ["gpu"]}"#,
    "duplicate field `deviceTypes`"
)]
#[case::a_list(
    ALLOCATE_HINT,
    r#"{"gpu": []}"#,
    "gpu: invalid type: sequence, expected a JSON object"
)]
fn unknown_keys_are_refused(#[case] key: &str, #[case] text: &str, #[case] rule: &str) {
    let refusal = read(key, text).unwrap_err();
    assert!(refusal.ends_with(rule), "{refusal}");
}

/// Labels and device types are data, not keys of a type: they are as the author wrote them.
#[test]
fn labels_keep_their_case() {
    let hints = read(
        ALLOCATE_HINT,
        r#"{"NIC": {"selector": {"matchLabels": {"Key": "V"}}}}"#,
    )
    .unwrap();
    let selector = hints.by_type["NIC"].selector.as_ref().unwrap();
    assert_eq!(selector[0].key, "Key");
}

/// The devices of a placed pod were chosen without the unknown key, and by the rest.
#[test]
fn unknown_keys_of_a_placed_pod_are_skipped() {
    let placed = pod(
        ALLOCATE_HINT,
        r#"{"rdma": {"exclusivePolicy": "PCIeLevel", "foo": 1}}"#,
    );
    let exclusive = Hints::read_placed(&placed).by_type["rdma"].exclusive;
    assert_eq!(exclusive, Some(ExclusivePolicy::PcieLevel));
}

/// Impossible hints about GPUs are refused for new pods that request GPUs, and ignored otherwise.
#[rstest]
#[case::functions_of_gpus(
    r#"{"gpu": {"vfSelector": {}}}"#,
    "gpu.vfSelector: GPUs are not given by virtual functions"
)]
#[case::two_in_one(
    r#"{"gpu": {"requiredTopologyScope": "Device"}}"#,
    "gpu.requiredTopologyScope is Device, but the pod asks for 2 GPUs"
)]
#[case::all_gpus(
    r#"{"gpu": {"allocateStrategy": "ApplyForAll"}}"#,
    "gpu.allocateStrategy: ApplyForAll is not for GPUs, whose number is that of the pod's resources; take it out"
)]
fn impossible_hints_are_refused(#[case] text: &str, #[case] rule: &str) {
    let of = |limits: Value| {
        let pod = json!({"metadata": {"annotations": {ALLOCATE_HINT: text}}, "spec": {"containers": [{"name": "c", "resources": {"limits": limits}}]}});
        PodRequest::read_new(
            &serde_json::from_value(pod).unwrap(),
            &crate::resource::ResourceNames::default(),
        )
        .map(drop)
    };
    let refusal = of(json!({"nvidia.com/gpu": 2})).unwrap_err().to_string();
    assert!(refusal.ends_with(rule), "{refusal}");
    assert_eq!(of(json!({"koordinator.sh/rdma": 1})), Ok(()));
}

proptest! {
    #[test]
    fn no_annotation_panics(text in r#"(\{|\}|\[|"|:|,|rdma|gpu|selector|matchLabels|allocateStrategy|.){0,60}"#) {
        for hint in HINTS {
            let _ = Hints::check(hint, &pod(hint, &text));
        }
    }
}

/// The API server allows 256 KiB, which the scheduler would evaluate for thousands of nodes.
#[test]
fn an_annotation_that_is_too_long_is_refused() {
    let selector = |n: usize| {
        let values = vec![r#""a""#; n].join(",");
        read(
            ALLOCATE_HINT,
            &format!(
                r#"{{"rdma":{{"selector":{{"matchExpressions":[{{"key":"k","operator":"In","values":[{values}]}}]}}}}}}"#
            ),
        )
    };
    assert!(selector(2000).is_ok());
    assert!(selector(2100).unwrap_err().ends_with("longer than 8192 bytes"));
    for key in [JOINT_ALLOCATE, PARTITION_SPEC] {
        assert!(read(key, &format!("{{}}{}", " ".repeat(8192))).is_err());
    }
}

/// An error in one annotation does not remove the exclusive policy of another.
#[test]
fn the_readable_hints_of_a_bound_pod_count() {
    let annotations = json!({ALLOCATE_HINT: r#"{"rdma": {"exclusivePolicy": "PCIeLevel"}}"#, JOINT_ALLOCATE: "{", PARTITION_SPEC: "[]"});
    let placed: Pod = serde_json::from_value(json!({"metadata": {"annotations": annotations}})).unwrap();
    let rdma = DeviceHint {
        exclusive: Some(ExclusivePolicy::PcieLevel),
        ..DeviceHint::default()
    };
    assert_eq!(
        Hints::read_placed(&placed),
        Hints {
            by_type: [("rdma".to_owned(), rdma)].into(),
            ..Hints::default()
        }
    );
    assert!(Hints::read(&placed).is_err());
    let bad = pod(ALLOCATE_HINT, r#"{"rdma": {"exclusivePolicy": "Everything"}}"#);
    assert_eq!(Hints::read_placed(&bad), Hints::default());
}
