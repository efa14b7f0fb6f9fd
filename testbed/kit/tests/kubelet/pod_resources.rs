//! The pod-resources socket.

use proto::kubelet::podresources::pod_resources_lister_client::PodResourcesListerClient;
use proto::kubelet::podresources::{
    AllocatableResourcesRequest, GetPodResourcesRequest, ListPodResourcesRequest, NumaNode, PodResources,
    TopologyInfo,
};
use serde_json::json;
use tonic::Code;
use tonic::transport::Channel;

use crate::node::{Node, container, pod, slot_pod};
use crate::plugin::{SLOTS, connect, device, on_numa, slots};

async fn lister(node: &Node) -> PodResourcesListerClient<Channel> {
    PodResourcesListerClient::new(connect(&node.kubelet.config().pod_resources_socket()).await)
}

async fn list(node: &Node) -> Vec<PodResources> {
    lister(node)
        .await
        .list(ListPodResourcesRequest {})
        .await
        .unwrap()
        .into_inner()
        .pod_resources
}

#[tokio::test]
async fn active_pods_are_listed_with_sidecars_and_without_init_containers() {
    let node = Node::start().await;
    let mut script = slots(0);
    script.devices = vec![device("d0", "Healthy"), on_numa("d1", 1)];
    let _plugin = node.plugin(script).await;
    let sidecar = json!({"name": "s", "image": "work", "restartPolicy": "Always"});
    let spec = json!({"initContainers": [container("i", &[(SLOTS, "1")]), sidecar], "containers": [container("a", &[(SLOTS, "2")])]});
    node.run(pod("p", spec.clone())).await;
    node.create(pod("refused", spec)).await;
    node.in_phase("refused", "Failed").await;
    let listed = list(&node).await;
    assert_eq!(listed.len(), 1);
    assert_eq!(
        (listed[0].namespace.as_str(), listed[0].name.as_str()),
        ("default", "p")
    );
    let containers: Vec<_> = listed[0]
        .containers
        .iter()
        .map(|it| (it.name.as_str(), it.devices.len()))
        .collect();
    assert_eq!(containers, [("s", 0), ("a", 2)]);
    let devices: Vec<_> = listed[0].containers[1]
        .devices
        .iter()
        .map(|it| (it.device_ids.join(","), it.topology.clone()))
        .collect();
    let numa = Some(TopologyInfo {
        nodes: vec![NumaNode { id: 1 }],
    });
    assert_eq!(devices, [("d0".to_owned(), None), ("d1".to_owned(), numa)]);
}

#[tokio::test]
async fn get_returns_one_pod_and_allocatable_resources_the_healthy_devices() {
    let node = Node::start().await;
    let mut script = slots(3);
    script.devices.push(device("broken", "Unhealthy"));
    let _plugin = node.plugin(script).await;
    node.run(slot_pod("p", 1)).await;
    let mut lister = lister(&node).await;
    let named = |name: &str| GetPodResourcesRequest {
        pod_name: name.to_owned(),
        pod_namespace: "default".to_owned(),
    };
    let found = lister
        .get(named("p"))
        .await
        .unwrap()
        .into_inner()
        .pod_resources
        .unwrap();
    assert_eq!(found.containers[0].devices.len(), 1);
    let missing = lister.get(named("q")).await.unwrap_err();
    assert_eq!(missing.message(), "pod q in namespace default not found");
    let all = lister
        .get_allocatable_resources(AllocatableResourcesRequest {})
        .await
        .unwrap()
        .into_inner();
    let ids: Vec<_> = all
        .devices
        .iter()
        .flat_map(|devices| devices.device_ids.clone())
        .collect();
    assert_eq!(ids, ["d0", "d1", "d2"]);
}

#[tokio::test]
async fn calls_beyond_the_rate_limit_are_refused() {
    let node = Node::start().await;
    let lister = lister(&node).await;
    let calls = (0..60).map(|_| {
        let mut lister = lister.clone();
        async move {
            lister
                .list(ListPodResourcesRequest {})
                .await
                .map_or_else(|status| status.code(), |_| Code::Ok)
        }
    });
    let codes = futures::future::join_all(calls).await;
    let n_of = |wanted: Code| codes.iter().filter(|code| **code == wanted).count();
    assert!(
        n_of(Code::Ok) >= 10 && n_of(Code::ResourceExhausted) > 0,
        "{codes:?}"
    );
    assert_eq!(n_of(Code::Ok) + n_of(Code::ResourceExhausted), 60);
}

#[tokio::test]
async fn a_pod_in_admission_is_listed_without_devices() {
    let node = Node::start().await;
    let socket = node.kubelet.config().pod_resources_socket();
    let (seen, mut listed) = tokio::sync::mpsc::unbounded_channel();
    let runtime = tokio::runtime::Handle::current();
    let script = slots(4).answers(move |_| {
        let (seen, socket) = (seen.clone(), socket.clone());
        runtime.spawn(async move {
            let mut client = PodResourcesListerClient::new(connect(&socket).await);
            let answer = client
                .list(ListPodResourcesRequest {})
                .await
                .unwrap()
                .into_inner();
            let _ = seen.send(answer.pod_resources);
        });
        Ok(proto::kubelet::deviceplugin::ContainerAllocateResponse::default())
    });
    let _plugin = node.plugin(script).await;
    node.run(slot_pod("p", 1)).await;
    let listed = listed.recv().await.unwrap();
    assert_eq!(
        listed.iter().map(|pod| pod.name.as_str()).collect::<Vec<_>>(),
        ["p"]
    );
}
