//! Request bodies as kube-scheduler 1.36.2 sent them, byte for byte, from a cluster of two nodes.
//!
//! `whole-nodes` was sent with `nodeCacheCapable: false`.

use std::collections::BTreeSet;

use http::StatusCode;
use insta::assert_snapshot;
use rstest::rstest;
use serde_json::{Value, json};

use crate::objects::{device, node};
use crate::world::World;

const URL: &str = "/gpushare-scheduler";

/// The nodes of the recording: two GPUs and one.
fn recorded() -> World {
    let world = World::new();
    for (name, mibs) in [("node-1", &[16_276, 16_276][..]), ("node-2", &[16_276][..])] {
        world.apply_node(&node(name, "GiB"));
        world.apply_device(&device(name, mibs));
    }
    world
}

fn parsed(body: &str) -> Value {
    serde_json::from_str(body).unwrap()
}

async fn answer(world: &World, verb: &str, body: &str) -> String {
    let (status, text) = world
        .send("POST", &format!("{URL}/{verb}"), body.to_owned())
        .await;
    world.check();
    assert_eq!(status, StatusCode::OK, "{text}");
    text
}

/// The tests' own requests may use only these keys.
#[rstest]
#[case::names(include_str!("golden/filter-gpushare-memory.json"), &["Pod", "Nodes", "NodeNames"])]
#[case::whole_nodes(include_str!("golden/prioritize-whole-nodes.json"), &["Pod", "Nodes", "NodeNames"])]
#[case::bind(include_str!("golden/bind-two-gpus.json"), &["PodName", "PodNamespace", "PodUID", "Node"])]
fn keys(#[case] body: &str, #[case] expected: &[&str]) {
    let body = parsed(body);
    let keys: BTreeSet<&str> = body.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(keys, expected.iter().copied().collect());
}

#[tokio::test]
async fn filter_and_prioritize_by_names() {
    let world = recorded();
    let filtered = answer(
        &world,
        "filter",
        include_str!("golden/filter-gpushare-memory.json"),
    )
    .await;
    assert_snapshot!(filtered, @r#"{"Nodes":null,"NodeNames":["node-2"],"FailedNodes":{},"FailedAndUnresolvableNodes":{},"Error":""}"#);
    let ranked = answer(
        &world,
        "prioritize",
        include_str!("golden/prioritize-gpushare-memory.json"),
    )
    .await;
    assert_snapshot!(ranked, @r#"[{"Host":"node-1","Score":9},{"Host":"node-2","Score":10}]"#);
}

#[tokio::test]
async fn filter_of_a_pod_that_fits_one_node_only() {
    let world = recorded();
    let filtered = answer(&world, "filter", include_str!("golden/filter-two-gpus.json")).await;
    assert_snapshot!(filtered, @r#"{"Nodes":null,"NodeNames":["node-1"],"FailedNodes":{},"FailedAndUnresolvableNodes":{},"Error":""}"#);
}

#[tokio::test]
async fn filter_and_prioritize_by_whole_nodes() {
    let world = recorded();
    let body = include_str!("golden/filter-whole-nodes.json");
    let filtered = parsed(&answer(&world, "filter", body).await);
    assert_eq!(filtered["NodeNames"], Value::Null);
    assert_eq!(
        filtered["Nodes"]["items"],
        json!([parsed(body)["Nodes"]["items"][1]]),
        "the one that is left fuller"
    );
    let ranked = answer(
        &world,
        "prioritize",
        include_str!("golden/prioritize-whole-nodes.json"),
    )
    .await;
    assert_snapshot!(ranked, @r#"[{"Host":"node-1","Score":9},{"Host":"node-2","Score":10}]"#);
}

/// The pod of a recorded filter is the pod that the watch shows, so its recorded bind finds it.
#[rstest]
#[case::gpushare(include_str!("golden/filter-gpushare-memory.json"), include_str!("golden/bind-gpushare-memory.json"), "4", "GPU-node-2-0")]
#[case::many_containers(include_str!("golden/filter-many-containers.json"), include_str!("golden/bind-many-containers.json"), "4", "GPU-node-2-0")]
#[case::koordinator(include_str!("golden/filter-two-gpus.json"), include_str!("golden/bind-two-gpus.json"), "", "GPU-node-1-1")]
#[tokio::test]
async fn bind_of_a_pod(#[case] filter: &str, #[case] bind: &str, #[case] units: &str, #[case] uuid: &str) {
    let pod = parsed(filter)["Pod"].clone();
    let world = recorded().with_pod(&pod);
    answer(&world, "filter", filter).await;
    assert_eq!(answer(&world, "bind", bind).await, r#"{"Error":""}"#);
    let bound = world.api.pod(&pod);
    let annotations = &bound["metadata"]["annotations"];
    assert_eq!(bound["spec"]["nodeName"], parsed(bind)["Node"]);
    assert_eq!(
        annotations["ALIYUN_COM_GPU_MEM_POD"].as_str().unwrap_or_default(),
        units
    );
    let record = annotations["scheduling.koordinator.sh/device-allocated"]
        .as_str()
        .unwrap();
    assert!(record.contains(&format!("{uuid:?}")), "{record}");
}
