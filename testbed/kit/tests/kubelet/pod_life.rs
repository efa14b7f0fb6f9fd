//! Pod status from arrival to deletion.

use kit::kubelet::EXIT_AFTER;
use serde_json::json;

use crate::node::{Node, container, pod, slot_pod};
use crate::plugin::{SLOTS, slots};

#[tokio::test]
async fn a_running_pod_reports_its_devices() {
    let node = Node::start().await;
    let _plugin = node.plugin(slots(4).prefers(&["d3", "d1"])).await;
    node.create(pod(
        "p",
        json!({"initContainers": [container("i", &[])], "containers": [container("a", &[(SLOTS, "2")])]}),
    ))
    .await;
    let ready = node
        .when("p", |pod| {
            let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_ref());
            conditions
                .into_iter()
                .flatten()
                .any(|condition| condition.type_ == "Ready" && condition.status == "True")
        })
        .await;
    let status = ready.status.unwrap();
    assert_eq!(status.phase.as_deref(), Some("Running"));
    assert_eq!(
        (status.host_ip.as_deref(), status.pod_ip.as_deref()),
        (Some("127.0.0.1"), Some("127.0.0.1"))
    );
    assert!(status.start_time.is_some());
    let init = &status.init_container_statuses.unwrap()[0];
    assert_eq!(
        init.state
            .as_ref()
            .unwrap()
            .terminated
            .as_ref()
            .unwrap()
            .exit_code,
        0
    );
    let app = &status.container_statuses.unwrap()[0];
    assert!(app.ready && app.state.as_ref().unwrap().running.is_some());
    let allocated = serde_json::to_value(&app.allocated_resources_status).unwrap();
    let healthy = |id: &str| json!({"resourceID": id, "health": "Healthy"});
    assert_eq!(
        allocated,
        json!([{"name": SLOTS, "resources": [healthy("d1"), healthy("d3")]}])
    );
}

#[tokio::test]
async fn device_ids_are_not_in_the_status_if_the_feature_is_off() {
    let node = Node::start_with(|config| config.allocated_resources_status = false).await;
    let _plugin = node.plugin(slots(4)).await;
    let running = node.run(slot_pod("p", 2)).await;
    assert!(
        running.status.unwrap().container_statuses.unwrap()[0]
            .allocated_resources_status
            .is_none()
    );
}

#[tokio::test]
async fn pods_that_finish_succeed_and_their_sidecars_end() {
    let node = Node::start().await;
    let sidecar = json!({"name": "s", "image": "work", "restartPolicy": "Always"});
    let mut annotated = pod(
        "annotated",
        json!({"restartPolicy": "OnFailure", "initContainers": [sidecar], "containers": [container("a", &[])]}),
    );
    annotated["metadata"]["annotations"] = json!({EXIT_AFTER: "0s"});
    node.create(annotated).await;
    let done = node.in_phase("annotated", "Succeeded").await;
    assert!(
        done.status.unwrap().init_container_statuses.unwrap()[0]
            .state
            .as_ref()
            .unwrap()
            .terminated
            .is_some()
    );

    let mut short = container("a", &[]);
    short["command"] = json!(["true"]);
    node.create(pod(
        "short",
        json!({"restartPolicy": "Never", "containers": [short.clone()]}),
    ))
    .await;
    node.in_phase("short", "Succeeded").await;
    node.run(pod("always", json!({"containers": [short]}))).await;
}

#[tokio::test]
async fn a_deleted_pod_is_removed_when_its_containers_have_ended() {
    let node = Node::start().await;
    node.run(pod("p", json!({"containers": [container("a", &[])]})))
        .await;
    node.delete("p").await;
    node.when_gone("p").await;
    node.until(|kubelet| kubelet.containers().is_empty()).await;
}

#[tokio::test]
async fn an_existing_node_object_keeps_its_labels() {
    let node = Node::start_with(|config| {
        config
            .labels
            .insert("example.com/zone".to_owned(), "z".to_owned());
    })
    .await;
    let object = node.nodes().get("n1").await.unwrap();
    let labels = object.metadata.labels.unwrap();
    assert_eq!(
        (
            labels["kubernetes.io/hostname"].as_str(),
            labels["example.com/zone"].as_str()
        ),
        ("n1", "z")
    );
    let addresses = object.status.unwrap().addresses.unwrap();
    assert!(
        addresses
            .iter()
            .any(|address| address.type_ == "InternalIP" && address.address == "127.0.0.1")
    );
}
