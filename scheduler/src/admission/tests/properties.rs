//! Properties of the webhooks for pods of any content.

use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::{creation, mutated, request, unseen};
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
        prop::sample::select(vec!["0", "1", "50", "100", "200", "1Gi", "1.5", "-1", "many", ""])
            .prop_map(Value::from),
        (0..400u32).prop_map(Value::from),
    ]
}

fn amounts(names: &'static [&'static str]) -> impl Strategy<Value = Value> {
    let some = prop::collection::btree_map(prop::sample::select(names), amount(), 0..4);
    let some = some.prop_map(|map| {
        Value::Object(
            map.into_iter()
                .map(|(key, value)| (key.to_owned(), value))
                .collect::<Map<_, _>>(),
        )
    });
    prop_oneof![8 => some, 1 => Just(Value::Null)]
}

fn env() -> impl Strategy<Value = Value> {
    let variable = prop::sample::select(vec![
        json!({"name": "A", "value": "all"}),
        json!({"name": "NVIDIA_VISIBLE_DEVICES"}),
        json!({"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}),
        json!({"name": "NVIDIA_VISIBLE_DEVICES", "value": "none"}),
        json!({"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}),
        json!({"name": "NVIDIA_VISIBLE_DEVICES", "value": "GPU-0,1"}),
        json!({"name": "NVIDIA_VISIBLE_DEVICES", "value": "nvidia.com/gpu=0"}),
        json!({"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}}),
    ]);
    prop_oneof![6 => Just(Value::Null), 1 => prop::collection::vec(variable, 0..3).prop_map(Value::from)]
}

fn container(names: &'static [&'static str]) -> impl Strategy<Value = Value> {
    (amounts(names), amounts(names), any::<bool>(), env()).prop_map(|(limits, requests, same, env)| {
        let requests = if same { limits.clone() } else { requests };
        json!({"name": "c", "env": env, "resources": {"limits": limits, "requests": requests}})
    })
}

pub(super) fn pod(
    names: &'static [&'static str],
    annotations: impl Strategy<Value = Value>,
) -> impl Strategy<Value = Value> {
    let containers = || prop::collection::vec(container(names), 0..3);
    (containers(), containers(), annotations).prop_map(|(init, apps, annotations)| {
        json!({"metadata": {"name": "p", "annotations": annotations}, "spec": {"initContainers": init, "containers": apps}})
    })
}

/// A pod that requests nothing, or devices by every rule, so that only its selection of visible devices can be refused.
fn valid_request_pod() -> impl Strategy<Value = Value> {
    let amounts = prop::sample::select(vec![
        json!({}),
        json!({"cpu": "1"}),
        json!({"example.com/gpu": "1"}),
        json!({"nvidia.com/gpu": "0"}),
        json!({"nvidia.com/gpu": "1"}),
        json!({"aliyun.com/gpu-mem": "1"}),
        json!({"koordinator.sh/rdma": "50"}),
    ]);
    let container = |asked: Value| {
        (any::<bool>(), env()).prop_map(move |(asks, env)| {
            let asked = if asks { asked.clone() } else { json!({}) };
            json!({"name": "c", "env": env, "resources": {"limits": asked, "requests": asked}})
        })
    };
    let annotations = prop::sample::select(vec![
        Value::Null,
        json!({"a": "b", "cdi.k8s.io": "nvidia.com/gpu=0"}),
        json!({"nvidia.cdi.k8s.io/pod": "nvidia.com/gpu=0"}),
        json!({"nvidia.cdi.k8s.io/container.c": ""}),
        json!({"cdi.k8s.io/a": "b=c"}),
        json!({"cdi.k8s.io/a": "b=c", "kubernetes.io/config.mirror": "x"}),
    ]);
    amounts.prop_flat_map(move |asked| {
        let containers = || prop::collection::vec(container(asked.clone()), 0..3);
        (containers(), containers(), annotations.clone()).prop_map(|(init, apps, annotations)| {
            json!({"metadata": {"name": "p", "annotations": annotations}, "spec": {"initContainers": init, "containers": apps}})
        })
    })
}

/// Returns true if a pod selects the devices that it sees; read from its JSON, without any of the types that the webhooks use.
fn selects_devices(pod: &Value) -> bool {
    let annotations = pod["metadata"]["annotations"].as_object().into_iter().flatten();
    let mut annotations = annotations.map(|(key, value)| (key.as_str(), value.as_str().unwrap()));
    if annotations
        .clone()
        .any(|(key, _)| key == "kubernetes.io/config.mirror")
    {
        return false;
    }
    let by_annotation = annotations.any(|(key, value)| {
        [
            "cdi.k8s.io/a",
            "nvidia.cdi.k8s.io/pod",
            "nvidia.cdi.k8s.io/container.c",
        ]
        .contains(&key)
            && !value.is_empty()
    });
    let containers = ["initContainers", "containers"]
        .iter()
        .flat_map(|list| pod["spec"][list].as_array().unwrap());
    let mut unserved =
        containers.filter(|container| container["resources"]["limits"]["aliyun.com/gpu-mem"].is_null());
    let shows = |variable: &Value| {
        let value = variable["value"].as_str().unwrap_or_default();
        variable["name"] == "NVIDIA_VISIBLE_DEVICES"
            && (variable.get("valueFrom").is_some() || !["", "void", "none"].contains(&value))
    };
    by_annotation
        || unserved.any(|container| {
            container["env"]
                .as_array()
                .is_some_and(|env| env.iter().any(shows))
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
            "ephemeralContainers",
            "NVIDIA_VISIBLE_DEVICES",
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
            prop::collection::btree_map(keys.clone(), inner, 0..5)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

fn rules() -> Rules {
    Rules {
        scheduler_name: Some("ours".to_owned()),
        allow_all_devices: true,
        deny_overrides: true,
        binders: Some(vec!["ours".to_owned()]),
        ..Rules::default()
    }
}

proptest! {
    #[test]
    fn a_second_mutation_changes_nothing(pod in pod(&NAMES, annotations())) {
        let once = mutated(&rules(), &pod);
        prop_assert_eq!(mutated(&rules(), &once), once.clone());
    }

    #[test]
    fn pods_that_ask_for_no_device_are_not_touched(pod in pod(&["cpu", "memory", "example.com/gpu"], Just(json!({"a": "b"})))) {
        prop_assert_eq!(rules().mutate(&creation(&pod)).unwrap(), Verdict::ALLOWED);
        prop_assert_eq!(rules().validate(&creation(&pod), &unseen()).unwrap() != Verdict::ALLOWED, selects_devices(&pod));
    }

    /// Refused exactly if the pod selects devices by the naive reading, and never in an unrestricted namespace.
    #[test]
    fn pods_that_choose_their_visible_devices_are_refused(pod in valid_request_pod()) {
        let judged = Rules::default().validate(&creation(&pod), &unseen()).unwrap();
        prop_assert_eq!(judged != Verdict::ALLOWED, selects_devices(&pod));
        let unrestricted = Rules { unrestricted_namespaces: vec!["default".to_owned()], ..Rules::default() };
        prop_assert_eq!(unrestricted.validate(&creation(&pod), &unseen()).unwrap(), Verdict::ALLOWED);
    }

    /// This holds for invalid pods too.
    #[test]
    fn an_update_that_changes_nothing_is_allowed(pod in pod(&NAMES, annotations())) {
        prop_assert_eq!(rules().validate(&request("UPDATE", "pods", "", &pod, &pod), &unseen()).unwrap(), Verdict::ALLOWED);
    }

    #[test]
    fn mutation_leaves_other_resources_and_fields_alone(pod in pod(&NAMES, annotations())) {
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
    fn no_object_makes_the_webhooks_panic(object in json_value(), old in json_value()) {
        for (operation, subresource) in [("CREATE", ""), ("UPDATE", ""), ("UPDATE", "ephemeralcontainers"), ("CREATE", "binding")] {
            let request = request(operation, "pods", subresource, &object, &old);
            let _ = (rules().mutate(&request).is_ok(), rules().validate(&request, &unseen()).is_ok());
        }
    }
}
