//! Random bodies: each is answered, or refused as no request.

use http::StatusCode;
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::objects::units;
use crate::world::World;

/// JSON with the parts of requests in their places and elsewhere.
fn json_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        prop::sample::select(vec![
            "p",
            "n1",
            "uid-p",
            "100",
            "-1",
            "1e40",
            "koordinator.sh/gpu",
            "",
            "../n1"
        ])
        .prop_map(Value::from),
    ];
    let keys = prop::sample::select(vec![
        "metadata",
        "name",
        "uid",
        "annotations",
        "spec",
        "containers",
        "initContainers",
        "resources",
        "limits",
        "items",
        "aliyun.com/gpu-mem",
        "koordinator.sh/gpu.shared",
        "koordinator.sh/gpu-memory",
        "nvidia.com/gpu",
        "status",
        "capacity",
        "gpushare/all-devices",
    ]);
    leaf.prop_recursive(6, 32, 4, move |inner| {
        prop_oneof![
            1 => prop::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
            3 => prop::collection::btree_map(keys.clone().prop_map(str::to_owned), inner, 0..5)
                .prop_map(|fields| Value::Object(fields.into_iter().collect())),
        ]
    })
}

proptest! {
    /// Each body gets status 200 or 400, and none leads to a write or a holding.
    #[test]
    fn no_body_makes_a_verb_panic(parts in (json_value(), json_value(), json_value(), json_value()), amounts in json_value(), verb in 0..3_usize) {
        let verb = ["filter", "prioritize", "bind"][verb];
        let mut pod = units("p", 1);
        pod["spec"]["containers"][0]["resources"]["limits"] = amounts;
        let (first, second, third, fourth) = parts;
        let bodies = [
            json!({"Pod": first, "NodeNames": ["n1"]}),
            json!({"Pod": pod, "NodeNames": ["n1", "n2"]}),
            json!({"Pod": pod, "Nodes": {"items": [second, {"metadata": {"name": "n1"}}]}}),
            json!({"Pod": third, "Nodes": fourth, "NodeNames": null}),
            json!({"PodName": first, "PodNamespace": "default", "PodUID": second, "Node": "n1"}),
            third,
        ];
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let world = World::new().with_node("n1", &[1000]);
            for body in bodies {
                let (status, text) = world.send("POST", &format!("/gpushare-scheduler/{verb}"), body.to_string()).await;
                assert!(status == StatusCode::OK || status == StatusCode::BAD_REQUEST, "{status} to {body}: {text}");
            }
            assert_eq!(world.api.bindings().len(), 0);
            world.check();
        });
    }
}
