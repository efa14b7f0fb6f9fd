//! Damaged objects of every kind that the watches deliver: the accounting stays whole, and every question is answered.

use std::sync::Arc;

use fuzz::damaged_json;
use http::StatusCode;
use placement::Violation;
use proptest::prelude::*;
use proto::node::Node;
use proto::pod::Pod;
use scheduler::index::{Index, RawDevice};
use scheduler::read_api::{ReadApi, router};
use scheduler::watch::ObjectStore;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::objects::{device, node, on, pod, shared, units};
use crate::world::World;

/// Device objects, with all that they may have.
fn devices() -> Vec<Value> {
    let plain = device("n1", &[16_384, 16_384, 24_576]);
    let mut full = device("n1", &[81_920; 4]);
    full["metadata"]["annotations"] = json!({
        "scheduling.koordinator.sh/gpu-partitions": json!({
            "2": [{"minors": [0, 1], "gpuLinkType": "NVLink", "ringBusBandwidth": "400Gi", "allocationScore": 1}],
            "1": [{"minors": [0]}],
        }).to_string(),
        "node.koordinator.sh/gpu-checkpoints": json!([{"podUID": "uid-a", "containerName": "main", "gpus": ["0"]}]).to_string(),
        "node.koordinator.sh/devices-checkpoints": json!([{"resource": "nvidia.com/gpu", "podUID": "uid-b", "devices": ["GPU-n1-2"]}]).to_string(),
        "gpushare/devices-revision": "7",
    });
    full["metadata"]["labels"] =
        json!({"node.koordinator.sh/gpu-partition-policy": "Honor", "node.koordinator.sh/gpu-model": "H100"});
    for minor in 0..4_usize {
        full["spec"]["devices"][minor]["topology"] = json!({"nodeID": minor / 2, "pcieID": format!("{minor}"), "socketID": 0, "busID": format!("0000:0{minor}:00.0")});
        full["spec"]["devices"][minor]["conditions"] =
            json!([{"type": "Healthy", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}]);
        full["spec"]["devices"][minor]["labels"]["gpushare/reserved-memory"] = json!("471859200");
    }
    let adapter = json!({
        "type": "rdma", "minor": 0, "id": "0000:01:00.0", "health": true, "resources": {"koordinator.sh/rdma": "100"},
        "topology": {"nodeID": 0, "pcieID": "0", "socketID": 0},
        "vfGroups": [{"labels": {"type": "fast"}, "vfs": [{"minor": 0, "busID": "0000:01:00.2"}, {"minor": 1, "busID": "0000:01:00.3"}]}],
    });
    full["spec"]["devices"].as_array_mut().unwrap().push(adapter);
    // The record of a pod below claims more of the adapter than this object has.
    let mut shrunken = full.clone();
    shrunken["spec"]["devices"][4]["resources"]["koordinator.sh/rdma"] = json!("0");
    vec![plain, full, shrunken]
}

/// Nodes, one of them with all that the scheduler reads.
fn nodes() -> Vec<Value> {
    let mut full = node("n1", "GiB");
    full["metadata"]["labels"] = json!({"kubernetes.io/hostname": "n1", "zone": "a"});
    full["metadata"]["annotations"] = json!({"gpushare/plugin-state": "{\"version\": \"1\"}"});
    full["spec"] =
        json!({"unschedulable": false, "taints": [{"key": "k", "value": "v", "effect": "NoSchedule"}]});
    full["status"]["allocatable"] = json!({"cpu": "8", "memory": "64Gi", "pods": "110", "aliyun.com/gpu-mem": "56", "koordinator.sh/gpu.shared": "100"});
    vec![node("n1", "MiB"), full]
}

/// Pods that wait, with every annotation and field that decides something.
fn waiting() -> Vec<Value> {
    let mut hinted = shared("asked", 2, 4096);
    hinted["metadata"]["annotations"] = json!({
        "scheduling.koordinator.sh/device-allocate-hint": json!({
            "gpu": {"selector": {"matchLabels": {"gpu.koordinator.sh/model": "H100"}, "matchExpressions": [{"key": "a", "operator": "In", "values": ["b"]}]}, "allocateStrategy": "RequestsAsCount", "exclusivePolicy": "PCIExpressLevel", "requiredTopologyScope": "NUMANode"},
            "rdma": {"vfSelector": {"matchLabels": {"type": "fast"}}, "allocateStrategy": "ApplyForAll"},
        }).to_string(),
        "scheduling.koordinator.sh/device-joint-allocate": json!({"deviceTypes": ["gpu", "rdma"], "requiredScope": "SamePCIe"}).to_string(),
        "scheduling.koordinator.sh/gpu-partition-spec": json!({"allocatePolicy": "BestEffort", "ringBusBandwidth": "200Gi"}).to_string(),
        "gpushare/node-policy": "spread",
        "gpushare/device-policy": "binpack",
    });
    let mut picky = units("asked", 4);
    picky["spec"]["nodeSelector"] = json!({"zone": "a"});
    picky["spec"]["tolerations"] =
        json!([{"key": "k", "operator": "Exists", "effect": "NoSchedule", "tolerationSeconds": 5}]);
    picky["spec"]["priority"] = json!(7);
    picky["spec"]["affinity"] = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution":
        {"nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "NotIn", "values": ["b"]}]}]}}});
    picky["spec"]["initContainers"] = json!([{"name": "i", "restartPolicy": "Always", "resources": {"limits": {"aliyun.com/gpu-mem": "1"}, "requests": {"aliyun.com/gpu-mem": "1"}}}]);
    let whole = pod("asked", &json!({"nvidia.com/gpu": "2"}));
    let mut all = pod("asked", &json!({"koordinator.sh/gpu.shared": "1"}));
    all["metadata"]["annotations"] = json!({"gpushare/all-devices": "true"});
    vec![
        hinted,
        picky,
        whole,
        all,
        units("asked", 1),
        shared("asked", 1, 1024),
    ]
}

/// Pods with a record.
fn placed() -> Vec<Value> {
    let mut koordinator = on(shared("placed", 1, 4096), "n1");
    koordinator["metadata"]["annotations"] = json!({
        "scheduling.koordinator.sh/device-allocated": json!({
            "gpu": [{"minor": 1, "id": "GPU-n1-1", "resources": {"koordinator.sh/gpu-memory": "4Gi", "koordinator.sh/gpu-core": "10", "koordinator.sh/gpu-memory-ratio": "25"}}],
            "rdma": [{"minor": 0, "resources": {"koordinator.sh/rdma": "1"}, "extension": {"vfs": [{"minor": 0, "busID": "0000:01:00.2"}]}}],
        }).to_string(),
        "scheduling.koordinator.sh/bind-timestamp": "1700000000000000000",
        "scheduling.koordinator.sh/gpu-minors": "1",
    });
    let mut old = on(units("placed", 4), "n1");
    old["metadata"]["annotations"] = json!({
        "ALIYUN_COM_GPU_MEM_IDX": "0", "ALIYUN_COM_GPU_MEM_POD": "4", "ALIYUN_COM_GPU_MEM_DEV": "16",
        "ALIYUN_COM_GPU_MEM_ASSIGNED": "true", "ALIYUN_COM_GPU_MEM_ASSUME_TIME": "1700000000000000000",
    });
    old["status"] = json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]});
    vec![koordinator, old]
}

/// Has the watch deliver an object, which it leaves out if it does not parse.
fn deliver<K: DeserializeOwned>(world: &World, object: &Value)
where
    Index: ObjectStore<K>,
{
    if let Ok(object) = serde_json::from_value::<K>(object.clone()) {
        world.index.write().apply(object);
        oversubscribed_by_records(world);
    }
}

/// The violations that objects from outside make: a record may claim more than its device has. There must be no others.
fn oversubscribed_by_records(world: &World) -> Vec<Violation> {
    let violations = world.index.read().fleet().check();
    for violation in &violations {
        assert!(
            matches!(violation, Violation::Oversubscribed { .. }),
            "{violation:?}"
        );
    }
    violations
}

async fn ask_all(world: &World, asked: &Value, whole: &Value) -> Result<(), TestCaseError> {
    let names = json!(["n1", "n2"]);
    let meta = &asked["metadata"];
    let api = ReadApi::new(Arc::clone(&world.extender), None, CancellationToken::new());
    let read_api = router(&Arc::new(api), "", false);
    let ours = |verb: &str| format!("/gpushare-scheduler/{verb}");
    let sent = [
        (
            &world.router,
            ours("filter"),
            json!({"Pod": asked, "NodeNames": names}),
        ),
        (
            &world.router,
            ours("filter"),
            json!({"Pod": asked, "Nodes": {"items": [whole]}}),
        ),
        (
            &world.router,
            ours("prioritize"),
            json!({"Pod": asked, "NodeNames": names}),
        ),
        (
            &world.router,
            ours("preempt"),
            json!({"Pod": asked, "NodeNameToMetaVictims": {"n1": {"Pods": [{"UID": "uid-placed"}], "NumPDBViolations": 0}}}),
        ),
        (
            &world.router,
            ours("bind"),
            json!({"PodName": meta["name"], "PodNamespace": meta["namespace"], "PodUID": meta["uid"], "Node": "n1"}),
        ),
        (
            &read_api,
            "/v1/fit".to_owned(),
            json!({"pod": asked, "replicas": 3, "addNodes": [{"like": "n1", "count": 1}]}),
        ),
        (
            &read_api,
            "/v1/fit".to_owned(),
            json!({"pod": asked, "replicas": 3, "addNodes": [{"like": "n1", "count": 1}], "domain": "link"}),
        ),
    ];
    let before = oversubscribed_by_records(world);
    for (routes, path, body) in sent {
        let (status, text) = world.send_to(routes, "POST", &path, body.to_string()).await;
        prop_assert_ne!(status, StatusCode::INTERNAL_SERVER_ERROR, "{}: {}", path, text);
        prop_assert_eq!(&oversubscribed_by_records(world), &before, "after {}", path);
    }
    for path in [
        "/v1/state",
        "/v1/doctor",
        "/v1/pods/default/asked/explain?all=true",
    ] {
        let (status, text) = world.send_to(&read_api, "GET", path, "").await;
        prop_assert_ne!(status, StatusCode::INTERNAL_SERVER_ERROR, "{}: {}", path, text);
    }
    let (status, _) = world.send("GET", "/metrics", "").await;
    prop_assert_eq!(status, StatusCode::OK);
    Ok(())
}

proptest! {
    #![proptest_config(fuzz::config(300))]

    #[test]
    fn damaged_objects_break_no_answer(
        device in damaged_json(devices()),
        node in damaged_json(nodes()),
        placed in damaged_json(placed()),
        asked in damaged_json(waiting()),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        runtime.block_on(async {
            let world = World::new().with_node("n2", &[16_384, 16_384]);
            deliver::<Node>(&world, &node);
            deliver::<RawDevice>(&world, &device);
            deliver::<Pod>(&world, &placed);
            deliver::<Pod>(&world, &asked);
            ask_all(&world, &asked, &node).await
        })?;
    }
}
