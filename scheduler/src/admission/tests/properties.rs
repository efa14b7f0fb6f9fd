//! What holds for every pod, sensible or not.

use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::{NOBODY, creation, mutated, request};
use crate::admission::{Rules, Verdict};

pub(super) const NAMES: [&str; 16] = [
    "koordinator.sh/gpu",
    "koordinator.sh/gpu-core",
    "koordinator.sh/gpu-memory",
    "koordinator.sh/gpu-memory-ratio",
    "koordinator.sh/gpu.shared",
    "koordinator.sh/rdma",
    "kubernetes.io/gpu",
    "kubernetes.io/gpu-core",
    "kubernetes.io/gpu-memory",
    "kubernetes.io/gpu-memory-ratio",
    "kubernetes.io/fpga",
    "aliyun.com/gpu-mem",
    "nvidia.com/gpu",
    "cpu",
    "memory",
    "example.com/gpu",
];

fn amount() -> impl Strategy<Value = Value> {
    prop_oneof![
        prop::sample::select(vec!["0", "1", "50", "100", "200", "1Gi", "1.5", "-1", "many", ""]).prop_map(Value::from),
        (0..400u32).prop_map(Value::from),
    ]
}

fn amounts(names: &'static [&'static str]) -> impl Strategy<Value = Value> {
    let some = prop::collection::btree_map(prop::sample::select(names), amount(), 0..4);
    let some = some.prop_map(|map| Value::Object(map.into_iter().map(|(key, value)| (key.to_owned(), value)).collect::<Map<_, _>>()));
    prop_oneof![8 => some, 1 => Just(Value::Null)]
}

fn container(names: &'static [&'static str]) -> impl Strategy<Value = Value> {
    (amounts(names), amounts(names), any::<bool>()).prop_map(|(limits, requests, same)| {
        let requests = if same { limits.clone() } else { requests };
        json!({"name": "c", "resources": {"limits": limits, "requests": requests}})
    })
}

pub(super) fn pod(names: &'static [&'static str], annotations: impl Strategy<Value = Value>) -> impl Strategy<Value = Value> {
    let containers = || prop::collection::vec(container(names), 0..3);
    (containers(), containers(), annotations).prop_map(|(init, apps, annotations)| {
        json!({"metadata": {"name": "p", "annotations": annotations}, "spec": {"initContainers": init, "containers": apps}})
    })
}

fn annotations() -> impl Strategy<Value = Value> {
    prop::sample::select(vec![
        Value::Null,
        json!({"gpushare/all-devices": "true"}),
        json!({"gpushare/all-devices": "false", "scheduling.koordinator.sh/device-allocated": "{}"}),
        json!({"kubernetes.io/config.mirror": "x"}),
    ])
}

fn json_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        "[a-z0-9./~{}\"]{0,12}".prop_map(Value::from),
    ];
    let keys = prop_oneof![
        prop::sample::select(vec![
            "metadata",
            "spec",
            "containers",
            "initContainers",
            "resources",
            "limits",
            "requests",
            "annotations",
            "env",
            "securityContext",
            "name"
        ])
        .prop_map(str::to_owned),
        prop::sample::select(NAMES.to_vec()).prop_map(str::to_owned),
        "[a-z~/]{0,4}",
    ];
    leaf.prop_recursive(6, 48, 5, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(keys.clone(), inner, 0..5).prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

fn rules() -> Rules {
    Rules { scheduler_name: Some("ours".to_owned()), deny_overrides: true, binders: Some(vec!["ours".to_owned()]), ..Rules::default() }
}

proptest! {
    #[test]
    fn mutating_twice_is_mutating_once(pod in pod(&NAMES, annotations())) {
        let once = mutated(&rules(), &pod);
        prop_assert_eq!(mutated(&rules(), &once), once.clone());
    }

    #[test]
    fn pods_that_ask_for_no_device_are_not_touched(pod in pod(&["cpu", "memory", "example.com/gpu"], Just(json!({"a": "b"})))) {
        prop_assert_eq!(rules().mutate(&creation(&pod)).unwrap(), Verdict::ALLOWED);
        prop_assert_eq!(rules().validate(&creation(&pod), &NOBODY).unwrap(), Verdict::ALLOWED);
    }

    /// Whatever is wrong with a pod: a change that changes nothing passes.
    #[test]
    fn a_pod_that_stays_as_it_is_passes(pod in pod(&NAMES, annotations())) {
        prop_assert_eq!(rules().validate(&request("UPDATE", "pods", "", &pod, &pod), &NOBODY).unwrap(), Verdict::ALLOWED);
    }

    /// What it changes is no other resource and no other field.
    #[test]
    fn other_resources_stay(pod in pod(&NAMES, annotations())) {
        let mutated = mutated(&rules(), &pod);
        for list in ["initContainers", "containers"] {
            for (before, after) in pod["spec"][list].as_array().unwrap().iter().zip(mutated["spec"][list].as_array().unwrap()) {
                for (amounts, name) in ["limits", "requests"].iter().flat_map(|a| NAMES[11..].iter().map(move |n| (a, n))) {
                    let at = |container: &Value| container["resources"][amounts].get(name).cloned();
                    prop_assert_eq!(at(before), at(after));
                }
            }
        }
    }

    #[test]
    fn no_object_makes_them_panic(object in json_value(), old in json_value()) {
        for (operation, subresource) in [("CREATE", ""), ("UPDATE", ""), ("UPDATE", "ephemeralcontainers"), ("CREATE", "binding")] {
            let request = request(operation, "pods", subresource, &object, &old);
            let _ = (rules().mutate(&request).is_ok(), rules().validate(&request, &NOBODY).is_ok());
        }
    }
}
