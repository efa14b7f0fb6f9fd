//! Replays of a cluster that the testbed's API server shows.

use insta::assert_snapshot;
use proto::resource::{GPU_CORE, GPU_COUNT, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED};
use serde_json::json;

use super::*;
use crate::replay::objects as trace_objects;
use crate::replay::occupancy::GpuShare;
use crate::replay::{
    seen, trace,
    world::{ReplayInput, ReplayPod},
};
use kit::apiserver::{ApiObjects, ApiServer};
use kit::cluster::user_kubeconfig;

const DEVICES: &str = "devices.scheduling.koordinator.sh";

fn node(name: &str, model: &str) -> Value {
    let amounts = json!({
        "cpu": "16", "memory": "64Gi", "pods": "20", GPU_COUNT: "2", GPU_MEMORY: "32Gi",
        GPU_SHARED: "200", GPU_MEMORY_RATIO: "200", GPU_CORE: "200",
    });
    let labels = json!({"node.koordinator.sh/gpu-model": model});
    json!({"metadata": {"name": name, "labels": labels}, "status": {"capacity": amounts, "allocatable": amounts}})
}

/// A pod that asks for a percentage of one GPU, and has it on a node.
fn pod(name: &str, percent: u32, place: Option<(&str, u32)>) -> Value {
    let limits = json!({"cpu": "1", GPU_SHARED: "1", GPU_MEMORY_RATIO: percent.to_string(), GPU_CORE: percent.to_string()});
    let resources = json!({GPU_MEMORY_RATIO: percent.to_string(), GPU_CORE: percent.to_string()});
    let record =
        place.map(|(_, minor)| json!({"gpu": [{"minor": minor, "resources": resources}]}).to_string());
    let annotations =
        record.map(|record| json!({"scheduling.koordinator.sh/device-allocated": record, "mine": "kept"}));
    let containers = json!([{"name": "main", "image": "busybox:1.36", "resources": {"limits": limits, "requests": limits}}]);
    json!({
        "metadata": {"name": name, "namespace": "default", "annotations": annotations},
        "spec": {"nodeName": place.map(|(node, _)| node), "containers": containers},
    })
}

fn owned(mut pod: Value) -> Value {
    let owner =
        json!([{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "d", "controller": true}]);
    pod["metadata"]["ownerReferences"] = owner;
    pod
}

/// Two nodes that three pods use badly, a daemon's pod on one, and a pod that waits for a whole GPU.
fn fill(objects: &ApiObjects) -> Result<()> {
    let crd = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/base/crd.yaml"));
    objects.create(
        "customresourcedefinitions.apiextensions.k8s.io",
        serde_yaml_ng::from_str(crd)?,
    )?;
    for (name, model) in [("n1", "T4"), ("n2", "V100")] {
        objects.create("nodes", node(name, model))?;
        objects.create(DEVICES, trace_objects::device(name, 2, 16))?;
    }
    let pods = [
        pod("a", 40, Some(("n1", 1))),
        pod("b", 40, Some(("n2", 0))),
        pod("c", 40, Some(("n2", 1))),
        owned(pod("d", 20, Some(("n1", 0)))),
        pod("e", 100, None),
    ];
    for pod in pods {
        objects.create("pods", pod)?;
    }
    Ok(())
}

async fn shown_cluster() -> (ApiServer, tempfile::TempDir, ClusterObjects) {
    let api = ApiServer::start().await.unwrap();
    fill(api.objects()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let kubeconfig = user_kubeconfig(&api, dir.path(), "admin", &[]).unwrap();
    let seen = read(&kubeconfig).await.unwrap();
    (api, dir, seen)
}

fn places(world: &ReplayInput) -> Vec<(&str, usize, Vec<GpuShare>)> {
    world
        .present
        .iter()
        .map(|present| (&*present.pod.name, present.node, present.parts.clone()))
        .collect()
}

#[tokio::test]
async fn the_pods_of_a_live_cluster_are_placed_again() {
    let (_api, _dir, shown) = shown_cluster().await;
    let world = seen::world(&shown, None).unwrap();
    assert_eq!(
        places(&world),
        [("d", 0, vec![GpuShare { gpu: 0, milli: 200 }])],
        "it is tied to its node"
    );
    let pods: Vec<_> = world
        .pods
        .iter()
        .map(|pod| (&*pod.name, pod.gpus, pod.milli, pod.cpu))
        .collect();
    assert_eq!(
        pods,
        [
            ("a", 1, 400, 1000),
            ("b", 1, 400, 1000),
            ("c", 1, 400, 1000),
            ("e", 1, 1000, 1000)
        ]
    );
    let object = &world.pods[0].object;
    assert_eq!(object["metadata"]["annotations"], json!({"mine": "kept"}));
    assert!(object["spec"].get("nodeName").is_none());
    assert_eq!((world.capacity(), world.present_demand()), (4000, 200));
}

#[tokio::test]
async fn a_trace_is_added_to_the_present_pods() {
    let (_api, _dir, mut shown) = shown_cluster().await;
    shown.pods[0]["spec"]["nodeSelector"] = json!({"no": "node"});
    let pods = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\nx,1000,64,1,500,V100\n";
    let world = seen::world(&shown, Some(&trace::pods_of(pods).unwrap())).unwrap();
    assert_eq!(
        places(&world).iter().map(|(name, ..)| *name).collect::<Vec<_>>(),
        ["a", "b", "c", "d"]
    );
    let eligible = |pod: &ReplayPod| &*world.eligible[pod.eligible.unwrap()];
    assert_eq!(
        (world.pods.len(), eligible(&world.pods[0])),
        (1, &[false, true][..])
    );
    assert_eq!(eligible(&world.present[0].pod), [false, false]);
    assert_eq!(world.present_demand(), 1400);
}

/// Together they need 2.4 GPUs of four, and a whole one is free for the pod that waits, once the others share.
#[tokio::test]
async fn policies_are_compared_on_a_live_cluster() {
    let (_api, dir, _) = shown_cluster().await;
    let kubeconfig = dir.path().join("admin.kubeconfig");
    let words = format!(
        "--kubeconfig {} --policy best-fit,random --condition P --seeds 1,2",
        kubeconfig.display()
    );
    let summaries = crate::replay::tests::replayed_with(&words).await;
    assert_snapshot!(crate::replay::summary::render(&summaries));
}
