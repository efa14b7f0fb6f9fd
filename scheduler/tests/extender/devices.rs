//! Pods that request more than shares of GPUs: whole ones by the vendor's resource name, RDMA, device types that only Device
//! objects name, all GPUs of a node; and devices that kubelet allocated to pods of other schedulers.

use proto::pod::Pod;
use scheduler::index::{Index, RawDevice};
use scheduler::offline;
use scheduler::read_api::explain;
use scheduler::watch::ObjectStore;
use serde_json::{Value, json};

use crate::objects::{annotated, device, gpu, node, on, phase, pod, shared, units, uuid};
use crate::world::World;

const RECORD: &str = "scheduling.koordinator.sh/device-allocated";

fn whole(name: &str, n: u64) -> Value {
    pod(name, &json!({"nvidia.com/gpu": n.to_string()}))
}

/// A pod that is to see all GPUs of its node.
fn monitor(name: &str) -> Value {
    annotated(
        pod(name, &json!({"koordinator.sh/gpu.shared": "1"})),
        "gpushare/all-devices",
        "true",
    )
}

fn card(kind: &str, minor: u32, resources: &Value) -> Value {
    json!({"type": kind, "id": format!("{kind}-{minor}"), "minor": minor, "health": true, "resources": resources})
}

/// The Device object with more devices.
fn and(mut device: Value, more: &[Value]) -> Value {
    device["spec"]["devices"]
        .as_array_mut()
        .unwrap()
        .extend_from_slice(more);
    device
}

/// The Device object of a node whose plugin of ours serves the vendor's name too.
fn serving_vendor(mut device: Value) -> Value {
    device["metadata"]["labels"]["gpushare/serves-vendor"] = "true".into();
    device
}

/// The Device object with checkpoints of these pods and GPUs.
fn given(mut device: Value, entries: &[(&str, &[&str])]) -> Value {
    let entries =
        entries.iter().map(|(uid, ids)| json!({"podUID": uid, "containerName": "c", "resourceName": "nvidia.com/gpu", "deviceIDs": ids}));
    let text = entries.collect::<Value>().to_string();
    device["metadata"]["annotations"]["node.koordinator.sh/devices-checkpoints"] = text.into();
    device
}

fn record(world: &World, pod: &Value) -> Value {
    let annotations = world.api.pod(pod)["metadata"]["annotations"].clone();
    annotations[RECORD]
        .as_str()
        .map_or(Value::Null, |text| serde_json::from_str(text).unwrap())
}

/// Used bytes of each GPU in MiB, and who is on it.
async fn used(world: &World, node: &str) -> Vec<(u64, Vec<String>)> {
    let shown = world.inspect(Some(node)).await;
    let gpus = shown["nodes"][0]["devs"].as_array().unwrap().clone();
    let gpu = |gpu: &Value| {
        let pods = gpu["pods"]
            .as_array()
            .unwrap()
            .iter()
            .map(|pod| pod["uid"].as_str().unwrap().to_owned());
        (gpu["usedBytes"].as_u64().unwrap() >> 20, pods.collect())
    };
    gpus.iter().map(gpu).collect()
}

async fn reason(world: &World, pod: &Value, node: &str) -> String {
    let answer = world.filter(pod, &[node]).await;
    answer["FailedAndUnresolvableNodes"][node]
        .as_str()
        .unwrap_or_default()
        .to_owned()
}

/// The state that a scheduler has which starts now.
fn restarted(world: &World, nodes: &[Value], devices: &[Value], pods: &[Value]) -> Index {
    let pods = pods.iter().map(|pod| world.api.pod(pod));
    offline::index(nodes.iter().cloned(), devices.iter().cloned(), pods)
}

fn holdings(index: &Index) -> Vec<String> {
    let mut all: Vec<String> = index
        .fleet()
        .nodes()
        .flat_map(|node| {
            node.held()
                .map(|held| format!("{} {:?}", held.owner, held.holdings))
                .collect::<Vec<_>>()
        })
        .collect();
    all.sort();
    all
}

#[tokio::test]
async fn a_node_gives_whole_gpus_and_shares_of_others_to_pods() {
    let world = World::new();
    let (node, device) = (node("n1", "MiB"), serving_vendor(device("n1", &[100, 100, 100])));
    world.apply_node(&node);
    world.apply_device(&device);
    let (share, vendor) = (shared("s", 1, 40), whole("v", 2));
    world.place(&share, "n1").await;
    world.place(&vendor, "n1").await;
    let full = json!({"koordinator.sh/gpu-core": "100", "koordinator.sh/gpu-memory": "100Mi", "koordinator.sh/gpu-memory-ratio": "100"});
    let entry = |minor: usize| json!({"minor": minor, "id": uuid("n1", minor), "resources": full});
    assert_eq!(record(&world, &vendor), json!({"gpu": [entry(1), entry(2)]}));
    assert!(
        reason(&world, &whole("w", 1), "n1")
            .await
            .contains("too few GPUs")
    );
    assert_eq!(
        used(&world, "n1").await,
        [
            (40, vec!["uid-s".to_owned()]),
            (100, vec!["uid-v".to_owned()]),
            (100, vec!["uid-v".to_owned()])
        ]
    );
    let restarted = restarted(&world, &[node], &[device], &[share, vendor]);
    assert_eq!(holdings(&restarted), holdings(&world.index.read()));
    assert_eq!(restarted.fleet().check(), Vec::new());
}

/// The vendor's plugin chooses the GPU; our plugin reports it in the Device object, and it counts until the pod is gone.
#[tokio::test]
async fn the_gpu_that_the_vendors_plugin_allocated_is_read_from_the_device_object() {
    let world = World::new().with_node("n1", &[100, 100]);
    let vendor = whole("v", 1);
    world.place(&vendor, "n1").await;
    assert_eq!(record(&world, &vendor), json!({}), "the GPU is not known yet");
    assert!(
        reason(&world, &shared("s", 1, 1), "n1")
            .await
            .contains("kept apart")
    );
    world.apply_device(&given(device("n1", &[100, 100]), &[("uid-v", &[&uuid("n1", 1)])]));
    assert_eq!(
        used(&world, "n1").await,
        [(0, vec![]), (100, vec!["uid-v".to_owned()])]
    );
    world.place(&shared("s", 1, 100), "n1").await;
    assert!(reason(&world, &whole("w", 1), "n1").await.contains("kept apart"));
    world.apply_device(&given(
        device("n1", &[100, 100]),
        &[("uid-v", &[&uuid("n1", 1)]), ("stranger", &["GPU-gone"])],
    ));
    world.apply_pod(&phase(on(vendor, "n1"), "Succeeded"));
    assert_eq!(
        used(&world, "n1").await[1],
        (0, vec![]),
        "the entry may stay longer than the pod's processes"
    );
}

/// The record of a pod that was restored from a backup names its former GPU, not the one that the vendor's plugin allocates now.
#[tokio::test]
async fn the_record_of_a_copied_pod_is_ignored_where_the_vendors_plugin_chooses() {
    let world = World::new().with_node("n1", &[100, 100]);
    let old = json!({"gpu": [{"minor": 0, "id": uuid("n1", 0), "resources": {"koordinator.sh/gpu-memory-ratio": "100"}}]});
    world
        .place(&annotated(whole("v", 1), RECORD, &old.to_string()), "n1")
        .await;
    assert!(
        reason(&world, &shared("s", 1, 1), "n1")
            .await
            .contains("kept apart"),
        "it may have got the other one"
    );
}

/// Either source may be wrong, so both GPUs are charged, but for one pod.
#[tokio::test]
async fn a_pod_is_charged_once_if_kubelet_and_its_record_name_different_gpus() {
    let world = World::new();
    world.apply_node(&node("n1", "MiB"));
    world.apply_device(&serving_vendor(device("n1", &[100, 100, 100])));
    let vendor = whole("v", 1);
    world.place(&vendor, "n1").await;
    assert_eq!(record(&world, &vendor)["gpu"][0]["minor"], 0);
    let reporting = |minor: usize| {
        serving_vendor(given(
            device("n1", &[100, 100, 100]),
            &[("uid-v", &[&uuid("n1", minor)])],
        ))
    };
    world.apply_device(&reporting(0));
    assert_eq!(
        used(&world, "n1")
            .await
            .iter()
            .map(|(mib, _)| *mib)
            .collect::<Vec<_>>(),
        [100, 0, 0]
    );
    world.apply_device(&reporting(2));
    assert_eq!(
        used(&world, "n1")
            .await
            .iter()
            .map(|(mib, _)| *mib)
            .collect::<Vec<_>>(),
        [100, 0, 100]
    );
    assert!(
        world.inspect(Some("n1")).await["nodes"][0]["devs"][0]["pods"][0]["problem"]
            .as_str()
            .unwrap()
            .contains("other GPUs than")
    );
}

/// An entry of the Device object may come before or after its pod, or without one.
#[tokio::test]
async fn devices_of_pods_of_other_schedulers_are_counted() {
    let world = World::new();
    world.apply_node(&node("n1", "MiB"));
    let (first, second) = (uuid("n1", 0), uuid("n1", 1));
    let stranger = [("uid-v", &[first.as_str()][..]), ("", &[second.as_str()])];
    world.apply_device(&given(device("n1", &[100, 100, 100]), &stranger));
    let all = |world: &World| {
        holdings(&world.index.read())
            .iter()
            .map(|held| held.split(' ').next().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(all(&world), ["@n1", "uid-v@n1"]);
    world.apply_pod(&on(whole("v", 1), "n1"));
    assert_eq!(all(&world), ["@n1", "uid-v"]);
    assert_eq!(
        world.fitting(&shared("s", 1, 100), &["n1"]).await,
        ["n1"],
        "on the third"
    );
    assert!(
        reason(&world, &shared("s", 2, 200), "n1")
            .await
            .contains("too few GPUs")
    );
    world.delete_pod(&on(whole("v", 1), "n1"));
    assert_eq!(all(&world), ["@n1", "uid-v@n1"], "as long as the node says so");
    world.apply_device(&given(device("n1", &[100, 100, 100]), &[("uid-v", &["0"])]));
    assert_eq!(all(&world), ["uid-v@n1"], "it may be any");
    let mut nonsense = device("n1", &[100, 100, 100]);
    nonsense["metadata"]["annotations"]["node.koordinator.sh/devices-checkpoints"] = "nonsense".into();
    world.apply_device(&nonsense);
    assert_eq!(all(&world), ["uid-v@n1"], "what was read before stays in force");
    world.apply_device(&device("n1", &[100, 100, 100]));
    assert_eq!(all(&world), [""; 0]);
}

/// A GPU that is not there takes none of those that are. One that is named by an index may be any of them, and the refusal says
/// so.
#[tokio::test]
async fn a_checkpoint_of_a_gpu_that_is_not_listed_closes_nothing_else() {
    let world = World::new().with_node("n1", &[100, 100]);
    let with = |ids: &[&str]| {
        let mut object = device("n1", &[100, 100]);
        let entries = json!([{"podUID": "uid-v", "resourceName": "nvidia.com/gpu", "deviceIDs": ids}]);
        object["metadata"]["annotations"]["node.koordinator.sh/gpu-checkpoints"] = entries.to_string().into();
        object
    };
    let problems = async || world.inspect(Some("n1")).await["nodes"][0]["problems"].clone();
    let text = |id: &str, effect: &str| {
        format!(
            "annotation node.koordinator.sh/gpu-checkpoints names GPU {id:?}, which the object does not list; {effect}"
        )
    };
    let gone = "GPU-36b27e44-b086-46f7-f2dc-73c36dc65991";
    for is_known in [false, true] {
        if is_known {
            world.apply_pod(&on(whole("v", 1), "n1"));
        }
        world.apply_device(&with(&[gone]));
        let expected = text(gone, "it counts on no other GPU");
        assert_eq!(problems().await, json!([format!("Device object: {expected}")]));
        assert_eq!(world.fitting(&shared("s", 2, 200), &["n1"]).await, ["n1"]);
        world.apply_device(&with(&["3"]));
        let expected = text("3", "until it names GPUs by UUID, no GPU of the node is shared");
        assert_eq!(problems().await, json!([format!("Device object: {expected}")]));
        let refusal = reason(&world, &shared("s", 1, 1), "n1").await;
        assert!(
            refusal.contains("kept apart") && refusal.ends_with(&expected),
            "{refusal}"
        );
        world.apply_device(&with(&[&uuid("n1", 1)]));
        assert_eq!(problems().await, Value::Null);
        assert_eq!(world.fitting(&shared("s", 1, 100), &["n1"]).await, ["n1"]);
        assert_ne!(reason(&world, &shared("s", 2, 200), "n1").await, "");
    }
}

/// GPUs that are set apart belong to the vendor's plugin; the others to those who share.
#[tokio::test]
async fn gpus_that_are_not_shared_are_left_to_the_vendors_plugin() {
    let world = World::new();
    world.apply_node(&node("n1", "MiB"));
    let mut apart = gpu("n1", 1, 100);
    apart["labels"]["gpushare/sharing"] = "disabled".into();
    world.apply_device(&and(device("n1", &[100]), &[apart]));
    world.place(&shared("s", 1, 100), "n1").await;
    world.place(&whole("v", 1), "n1").await;
    assert!(!reason(&world, &whole("w", 1), "n1").await.is_empty());
    assert!(!reason(&world, &shared("t", 1, 1), "n1").await.is_empty());
}

/// Its pods are counted once a Device object reports its GPUs.
#[tokio::test]
async fn a_node_without_inventory_takes_whole_gpus_of_the_vendors_plugin() {
    let world = World::new();
    world.apply_node(&json!({"metadata": {"name": "n1"}, "status": {"capacity": {"nvidia.com/gpu": "2"}}}));
    let vendor = whole("v", 1);
    assert_eq!(world.fitting(&vendor, &["n1"]).await, ["n1"]);
    world.place(&vendor, "n1").await;
    world.apply_device(&device("n1", &[100, 100]));
    assert!(
        reason(&world, &shared("s", 1, 1), "n1")
            .await
            .contains("kept apart")
    );
    assert_eq!(
        world.fitting(&whole("w", 1), &["n1"]).await,
        ["n1"],
        "one is left"
    );
}

#[tokio::test]
async fn one_record_has_the_gpus_and_the_rdma_adapters_of_a_pod() {
    let world = World::new();
    let (node, device) = (
        node("n1", "MiB"),
        and(
            device("n1", &[100]),
            &[
                card("rdma", 1, &json!({"koordinator.sh/rdma": "100"})),
                card("rdma", 0, &json!({"kubernetes.io/rdma": 100})),
            ],
        ),
    );
    world.apply_node(&node);
    world.apply_device(&device);
    let limits = json!({"koordinator.sh/gpu.shared": "1", "koordinator.sh/gpu-memory-ratio": "50", "koordinator.sh/rdma": "200"});
    let pod_both = pod("b", &limits);
    world.place(&pod_both, "n1").await;
    let nic = |minor: u32| json!({"minor": minor, "id": format!("rdma-{minor}"), "resources": {"koordinator.sh/rdma": "100"}});
    let share = json!({"minor": 0, "id": uuid("n1", 0), "resources": {"koordinator.sh/gpu-memory": "50Mi", "koordinator.sh/gpu-memory-ratio": "50"}});
    assert_eq!(
        record(&world, &pod_both),
        json!({"gpu": [share], "rdma": [nic(0), nic(1)]})
    );
    assert!(
        reason(&world, &pod("r", &json!({"koordinator.sh/rdma": "1"})), "n1")
            .await
            .contains("another type than GPU")
    );
    let shown = world.inspect(Some("n1")).await["nodes"][0]["otherDevices"][1].clone();
    assert_eq!(
        shown,
        json!({"type": "rdma", "id": "rdma-1", "minor": 1, "healthy": true, "resources": {"koordinator.sh/rdma": {"free": 0, "total": 100}}})
    );
    let restarted = restarted(&world, &[node], &[device], &[pod_both]);
    assert_eq!(holdings(&restarted), holdings(&world.index.read()));
}

/// Only the Device objects say that an `npu` has `example.com/npu-core`.
#[tokio::test]
async fn a_new_device_type_is_known_from_device_objects() {
    let world = World::new();
    world.apply_node(&node("n1", "MiB"));
    world.apply_node(&node("n2", "MiB"));
    let npu = pod(
        "p",
        &json!({"example.com/npu-core": "12", "example.com/npu-gib": "16", "cpu": "1"}),
    );
    for name in ["n1", "n2"] {
        assert_eq!(
            world.fitting(&npu, &[name]).await,
            [name],
            "a resource of another plugin, as far as is known"
        );
    }
    world.apply_pod(&on(pod("early", &json!({"example.com/npu-core": "1"})), "n1"));
    let cards: Vec<Value> = (0..3)
        .map(|minor| {
            card(
                "npu",
                minor,
                &json!({"example.com/npu-core": "6", "example.com/npu-gib": "8"}),
            )
        })
        .collect();
    world.apply_device(&and(device("n1", &[]), &cards));
    world.apply_device(&device("n2", &[100]));
    assert!(
        reason(&world, &npu, "n1").await.contains("another type than GPU"),
        "each card may be the one that the early pod is on"
    );
    world.delete_pod(&on(pod("early", &json!({"example.com/npu-core": "1"})), "n1"));
    assert_eq!(world.fitting(&npu, &["n1", "n2"]).await, ["n1"]);
    world.place(&npu, "n1").await;
    let entry = |minor: u32| json!({"minor": minor, "id": format!("npu-{minor}"), "resources": {"example.com/npu-core": "6", "example.com/npu-gib": "8"}});
    assert_eq!(record(&world, &npu), json!({"npu": [entry(0), entry(1)]}));
    world.apply_device(&device("n1", &[]));
    world.apply_device(&and(device("n1", &[]), &cards));
    assert_eq!(
        world
            .fitting(&pod("q", &json!({"example.com/npu-core": "12"})), &["n1"])
            .await,
        [""; 0],
        "what was held is still"
    );
    assert_eq!(
        world
            .fitting(&pod("q", &json!({"example.com/npu-core": "6"})), &["n1"])
            .await,
        ["n1"]
    );
}

#[tokio::test]
async fn a_pod_that_sees_all_gpus_is_charged_for_none() {
    let world = World::allowing_all_devices().with_node("n1", &[100, 100]);
    world.place(&shared("s", 1, 100), "n1").await;
    let pod = monitor("m");
    world.place(&pod, "n1").await;
    let entry = |minor: usize| json!({"minor": minor, "id": uuid("n1", minor), "resources": {}});
    assert_eq!(record(&world, &pod), json!({"gpu": [entry(1), entry(0)]}));
    let on = |uids: &[&str]| uids.iter().map(|uid| (*uid).to_owned()).collect::<Vec<_>>();
    assert_eq!(
        used(&world, "n1").await,
        [(100, on(&["uid-m", "uid-s"])), (0, on(&["uid-m"]))]
    );
    assert_eq!(world.fitting(&shared("t", 1, 100), &["n1"]).await, ["n1"]);
    let shown = explain(&world.index, "default", "m", true).unwrap();
    assert_eq!(shown.asked, "sight of all GPUs");
}

#[tokio::test]
async fn pods_that_see_all_gpus_are_refused_unless_the_operator_allows_them() {
    let world = World::new().with_node("n1", &[100]);
    let expected = "annotation gpushare/all-devices is not allowed in this cluster: a pod sees all devices of its node and is charged for \
                    none only where gpushare-scheduler and its device plugins run with --allow-all-devices; take the annotation out and ask \
                    for amounts";
    assert_eq!(reason(&world, &monitor("m"), "n1").await, expected);
    world.api.put(&monitor("m"));
    world.apply_pod(&monitor("m"));
    assert_eq!(world.bind(&monitor("m"), "n1").await, expected);
}

/// A pod that its author has bound, with a mark and a record of the author's own making, holds what it names.
#[tokio::test]
async fn a_forged_record_with_the_all_devices_annotation_is_charged_for_its_gpus() {
    let world = World::allowing_all_devices().with_node("n1", &[100, 100]);
    let forged = |minors: &[usize]| {
        let entries: Vec<Value> = minors
            .iter()
            .map(|minor| json!({"minor": minor, "id": uuid("n1", *minor), "resources": {}}))
            .collect();
        let mut pod = on(monitor("f"), "n1");
        pod["metadata"]["annotations"][RECORD] = json!({"gpu": entries}).to_string().into();
        pod
    };
    world.apply_pod(&forged(&[1]));
    assert_eq!(
        used(&world, "n1").await,
        [(0, vec![]), (100, vec!["uid-f".to_owned()])]
    );
    assert_eq!(
        world.fitting(&shared("s", 2, 100), &["n1"]).await,
        [""; 0],
        "one GPU is held by a pod that pays nothing for it"
    );
    world.apply_pod(&forged(&[0, 1]));
    assert_eq!(world.fitting(&shared("s", 2, 100), &["n1"]).await, ["n1"]);
}

/// Koordinator writes no ID, its predecessors other names; a record counts whatever the spec says.
#[tokio::test]
async fn records_of_other_schedulers_are_read() {
    let world = World::new().with_node("n1", &[100, 100]);
    let old = r#"{"gpu":[{"minor":1,"resouurces":{"kubernetes.io/gpu-core":100,"kubernetes.io/gpu-mem-ratio":100,"kubernetes.io/gpu-mem":"100Mi"}}]}"#;
    world.apply_pod(&annotated(
        on(pod("k", &json!({"koordinator.sh/gpu": "100"})), "n1"),
        RECORD,
        old,
    ));
    assert_eq!(
        used(&world, "n1").await,
        [(0, vec![]), (100, vec!["uid-k".to_owned()])]
    );
    let silent = annotated(
        on(pod("x", &json!({"cpu": "1"})), "n1"),
        RECORD,
        r#"{"gpu":[{"minor":0,"resources":{"koordinator.sh/gpu-memory":"40Mi"}}]}"#,
    );
    world.apply_pod(&silent);
    assert_eq!(used(&world, "n1").await[0], (40, vec!["uid-x".to_owned()]));
    world.apply_pod(&pod("x", &json!({"cpu": "1"})));
    assert_eq!(used(&world, "n1").await[0], (0, vec![]));
}

#[tokio::test]
async fn a_pod_with_an_isolation_provider_goes_to_nodes_that_have_it() {
    let world = World::new().with_node("n1", &[100]).with_node("n2", &[100]);
    let mut labelled = node("n2", "MiB");
    labelled["metadata"]["labels"]["koordinator.sh/gpu-isolation-provider"] = "HAMi-core".into();
    world.apply_node(&labelled);
    let mut wanting = shared("s", 1, 10);
    wanting["metadata"]["labels"]["koordinator.sh/gpu-isolation-provider"] = "HAMi-core".into();
    assert_eq!(world.fitting(&wanting, &["n1", "n2"]).await, ["n2"]);
    world.api.put(&wanting);
    world.apply_pod(&wanting);
    assert!(
        world
            .bind(&wanting, "n1")
            .await
            .contains("gpu-isolation-provider")
    );
    world.place(&wanting, "n2").await;
    let labels = |nth: usize| world.api.bindings()[nth]["metadata"]["labels"].clone();
    assert_eq!(
        labels(0),
        json!({"hami.io/vgpu-node": "n2"}),
        "the node's monitor looks for it by that"
    );
    world.place(&shared("t", 1, 10), "n2").await;
    assert_eq!(labels(1), Value::Null);
}

/// A node whose only GPU has this enforcement level.
fn with_level(world: World, name: &str, level: &str) -> World {
    let world = world.with_node(name, &[100]);
    let mut device = device(name, &[100]);
    device["spec"]["devices"][0]["labels"] = json!({"gpushare/enforcement": level});
    world.apply_device(&device);
    world
}

/// Pods of both dialects; whole GPUs, which the pod shares with no other, go anywhere.
#[tokio::test]
async fn a_pod_that_demands_the_drivers_limits_goes_where_they_are_enforced() {
    let all = ["n1", "n2", "n3", "n4"];
    let whole = json!({"koordinator.sh/gpu.shared": "1", "koordinator.sh/gpu-memory-ratio": "100"});
    let whole = pod("whole", &whole);
    let table = [
        (whole, "driver", &all[..]),
        (shared("share", 1, 10), "", &all),
        (shared("any-share", 1, 10), "any", &all),
        (shared("limited-share", 1, 10), "driver", &["n3"]),
        (units("unit", 1), "", &all),
        (units("any-unit", 1), "any", &all),
        (units("limited-unit", 1), "driver", &["n3"]),
    ];
    for (pod, demand, expected) in table {
        let pod = match demand {
            "" => pod,
            demand => annotated(pod, "gpushare/enforcement", demand),
        };
        // A new world for each pod: the answer for another one keeps its room.
        let world = with_level(World::new(), "n1", "none");
        let world = with_level(with_level(world, "n2", "hami-core"), "n3", "driver");
        let world = world.with_node("n4", &[100]);
        for node in all {
            let fits = !world.fitting(&pod, &[node]).await.is_empty();
            assert_eq!(fits, expected.contains(&node), "{pod} on {node}");
        }
    }
}

#[tokio::test]
async fn the_refusal_names_the_level_of_the_node() {
    let world = with_level(World::new(), "n1", "none");
    let world = with_level(world, "n2", "hami-core");
    let demanding = annotated(shared("s", 1, 10), "gpushare/enforcement", "driver");
    world.api.put(&demanding);
    world.apply_pod(&demanding);
    for (node, level) in [("n1", "none"), ("n2", "hami-core")] {
        let refused = world.bind(&demanding, node).await;
        assert!(
            refused.contains(&format!("GPUs of the node have level {level}")),
            "{refused}"
        );
    }
}

#[tokio::test]
async fn a_cluster_may_demand_the_drivers_limits_of_every_pod() {
    let world = with_level(World::demanding_limits(), "n1", "none");
    assert_eq!(world.fitting(&shared("s", 1, 10), &["n1"]).await, [""; 0]);
    let any = annotated(shared("s", 1, 10), "gpushare/enforcement", "any");
    assert_eq!(world.fitting(&any, &["n1"]).await, ["n1"]);
}

/// The pod with every wish that there is.
fn joined(pod: Value) -> Value {
    let pod = annotated(
        pod,
        "scheduling.koordinator.sh/device-joint-allocate",
        r#"{"deviceTypes": ["gpu", "rdma"]}"#,
    );
    let pod = annotated(pod, "scheduling.koordinator.sh/gpu-partition-spec", "{}");
    annotated(
        pod,
        "scheduling.koordinator.sh/device-allocate-hint",
        r#"{"rdma": {"vfSelector": {}, "exclusivePolicy": "PCIeLevel"}}"#,
    )
}

/// Objects of any content change nothing else: the engine holds its invariants and answers.
#[test]
fn no_device_object_breaks_an_invariant() {
    use proptest::prelude::*;
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "\\PC{0,8}".prop_map(Value::from),
        "(100|16Gi|-1|1e9|0)".prop_map(Value::from),
        Just(json!([])),
        Just(json!({})),
        any::<bool>().prop_map(Value::from),
    ];
    let amounts = proptest::collection::btree_map(
        "(koordinator.sh/(gpu-memory|gpu-core|rdma)|kubernetes.io/gpu-memory|example.com/x|)",
        leaf.clone(),
        0..4,
    );
    let field = |usual: &[Value]| {
        prop_oneof![4 => proptest::sample::select(usual.to_vec()), 1 => leaf.clone()].boxed()
    };
    let topology = (
        field(&[0.into(), 1.into(), (-1).into()]),
        field(&["0".into(), "1".into(), "".into()]),
    )
        .prop_map(|(numa, switch)| json!({"socketID": 0, "nodeID": numa, "pcieID": switch}));
    let function = (
        field(&["f".into(), "g".into(), "".into()]),
        field(&[0.into(), (-1).into()]),
    )
        .prop_map(|(id, minor)| json!([{"labels": {"type": "x"}, "vfs": [{"busID": id, "minor": minor}]}]));
    let traits = (
        prop_oneof![4 => topology, 1 => leaf.clone()],
        prop_oneof![4 => function, 1 => leaf.clone()],
    );
    let entry = (field(&["gpu".into(), "gpu".into(), "rdma".into(), "npu".into()]), field(&["a".into(), "b".into(), "".into()]), field(&[0.into(), 1.into()]), field(&[true.into()]), amounts, traits)
        .prop_map(|(kind, id, minor, health, resources, (topology, groups))| json!({"type": kind, "id": id, "minor": minor, "health": health, "resources": resources, "topology": topology, "vfGroups": groups}));
    let devices =
        prop_oneof![9 => proptest::collection::vec(entry, 0..5).prop_map(Value::from), 1 => leaf.clone()];
    let checkpoint = prop_oneof![
        "\\PC{0,20}",
        Just(r#"[{"podUID":"uid-p","resourceName":"nvidia.com/gpu","deviceIDs":["a","z"]}]"#.to_owned())
    ];
    let table = prop_oneof![
        "\\PC{0,20}",
        r#"\{"(1|2)": \[\{"minors": \[(0|1|0, 1|1, 7)\], "allocationScore": (0|-1|9)\}\]\}"#,
        Just(r#"[{"minors": [0, 1, 9], "links": 4}]"#.to_owned())
    ];
    let world = (
        devices,
        (checkpoint, table),
        proptest::option::of("(true|false|\\PC{0,4})"),
    );
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases: 300,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let result = runner.run(&proptest::collection::vec(world, 1..5), |worlds| {
        let pods = [on(whole("p", 1), "n1"), annotated(on(pod("q", &json!({"koordinator.sh/rdma": "100"})), "n1"), RECORD, r#"{"rdma":[{"minor":0,"id":"a","resources":{"koordinator.sh/rdma":"100"}}],"gpu":[{"minor":1}]}"#)];
        let index = offline::index([node("n1", "MiB")].into_iter(), [].into_iter(), pods.into_iter());
        let mut index = index.allowing_all_devices(true);
        for (devices, (checkpoint, table), serves) in worlds {
            let annotations = json!({"node.koordinator.sh/devices-checkpoints": checkpoint, "scheduling.koordinator.sh/gpu-partitions": table, "gpushare/gpu-links": table});
            let object = json!({"metadata": {"name": "n1", "labels": serves.map(|serves| json!({"gpushare/serves-vendor": serves})), "annotations": annotations}, "spec": {"devices": devices}});
            index.apply(serde_json::from_value::<RawDevice>(object).unwrap());
            let bad: Vec<_> = index.fleet().check().into_iter().filter(|violation| matches!(violation, placement::Violation::RowDiffers(_) | placement::Violation::Index(_))).collect();
            prop_assert_eq!(bad, vec![]);
            for asking in [whole("w", 1), shared("s", 1, 1), monitor("m"), pod("r", &json!({"koordinator.sh/rdma": "1", "example.com/x": "1"})), joined(whole("x", 2)), joined(pod("y", &json!({"koordinator.sh/rdma": "1"})))] {
                let asking: Pod = serde_json::from_value(asking).unwrap();
                let facts = scheduler::accounting::PodFacts::of(&asking, index.names()).unwrap();
                let ask = index.demand(asking.uid(), &facts).unwrap().unwrap();
                let _ = (index.filter().fit("n1", &ask), index.fleet().node_id("n1").map(|node| index.filter().batch(&ask).evaluate(node)), index.show_node("n1"));
            }
        }
        Ok(())
    });
    result.unwrap();
}
