//! Restarts of kubelet: lost state, state from the checkpoint, and kubelet's faults.

use kit::kubelet::KubeletConfig;
use serde_json::{Value, json};

use crate::node::{Node, container, pod, refusal, slot_pod};
use crate::plugin::{Call, SLOTS, slots};

fn sockets(config: &KubeletConfig) -> Vec<String> {
    let names = std::fs::read_dir(config.plugin_dir())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}

#[tokio::test]
async fn the_checkpoint_has_the_form_of_kubelets() {
    let node = Node::start().await;
    let _plugin = node.plugin(slots(2).prefers(&["d1"])).await;
    let created = node.run(slot_pod("p", 1)).await;
    let text = std::fs::read_to_string(node.kubelet.config().checkpoint()).unwrap();
    let mut file: Value = serde_json::from_str(&text).unwrap();
    assert!(file["Checksum"].as_u64().is_some_and(|sum| sum > 0));
    file["Checksum"] = 0.into();
    let entry = json!({"PodUID": created.metadata.uid.unwrap(), "ContainerName": "main", "ResourceName": SLOTS,
        "DeviceIDs": {"-1": ["d1"]}, "AllocResp": ""});
    let data = json!({"PodDeviceEntries": [entry], "RegisteredDevices": {SLOTS: ["d0", "d1"]}});
    assert_eq!(file, json!({"Data": data, "Checksum": 0}));
}

#[tokio::test]
async fn a_restart_removes_sockets_and_keeps_the_checkpoint() {
    let mut node = Node::start().await;
    let plugin = node.plugin(slots(3).with_pre_start()).await;
    let created = node.run(slot_pod("p", 2)).await;
    node.node_lists(SLOTS, "3", "3").await;
    let held = node.slots(&created, "main");
    assert_eq!(
        sockets(node.kubelet.config()),
        [
            "example.com_slot.sock",
            "kubelet.sock",
            "kubelet_internal_checkpoint"
        ]
    );

    node.kubelet.restart().await.unwrap();
    node.node_lists(SLOTS, "0", "0").await;
    assert_eq!(
        sockets(node.kubelet.config()),
        ["kubelet.sock", "kubelet_internal_checkpoint"]
    );
    node.until(kit::kubelet::Kubelet::has_synced).await;
    assert_eq!(
        node.slots(&created, "main"),
        held,
        "the running container is left alone"
    );
    node.in_phase("p", "Running").await;

    drop(plugin);
    let plugin = node.plugin(slots(3).with_pre_start()).await;
    node.node_lists(SLOTS, "3", "3").await;
    node.kubelet.restart_container("default", "p", "main").unwrap();
    node.until(|kubelet| kubelet.container("default", "p", "main").unwrap().starts == 2)
        .await;
    assert_eq!(
        plugin.calls(),
        [Call::PreStart(held)],
        "restarted from the checkpoint: no Allocate, but PreStartContainer"
    );
    let next = node.run(slot_pod("q", 1)).await;
    assert_eq!(plugin.allocated(), [node.slots(&next, "main")]);
}

fn with_init() -> Value {
    pod(
        "p",
        json!({"initContainers": [container("i", &[(SLOTS, "1")])], "containers": [container("a", &[(SLOTS, "1")])]}),
    )
}

#[tokio::test]
async fn an_exited_init_container_with_a_device_kills_its_pod_at_a_restart() {
    let mut node = Node::start().await;
    let _plugin = node.plugin(slots(3)).await;
    node.run(with_init()).await;
    node.kubelet.restart().await.unwrap();
    let failed = node.in_phase("p", "Failed").await;
    let message = "Pod was rejected: Allocate failed due to no healthy devices present; \
                   cannot allocate unhealthy devices example.com/slot, which is unexpected";
    assert_eq!(
        refusal(&failed),
        ("UnexpectedAdmissionError".to_owned(), message.to_owned())
    );
}

#[tokio::test]
async fn a_kubelet_without_that_fault_lets_it_run_on() {
    let mut node = Node::start_with(|config| config.faults.exited_init_fails = false).await;
    let _plugin = node.plugin(slots(3)).await;
    node.run(with_init()).await;
    node.kubelet.restart().await.unwrap();
    node.until(|kubelet| kubelet.admissions().len() == 2 && kubelet.has_synced())
        .await;
    assert_eq!(node.kubelet.admissions()[1].refusal, None);
    assert_eq!(
        node.kubelet.container("default", "p", "i").unwrap().starts,
        1,
        "init containers do not run again"
    );
}

#[tokio::test]
async fn after_a_reboot_pods_with_devices_fail_if_the_plugin_is_late() {
    let node = Node::start().await;
    let _plugin = node.plugin(slots(3)).await;
    node.run(slot_pod("p", 1)).await;
    let config = node.kubelet.config().clone();
    let Node {
        kubelet,
        client,
        logs,
        dir,
        api,
    } = node;
    kubelet.stop().await;
    let kubelet = kit::kubelet::Kubelet::start(config).unwrap();
    let node = Node {
        kubelet,
        client,
        logs,
        dir,
        api,
    };
    assert!(
        refusal(&node.in_phase("p", "Failed").await)
            .1
            .contains("no healthy devices present")
    );
}

#[tokio::test]
async fn without_a_checkpoint_every_extended_resource_becomes_zero() {
    let mut node = Node::start().await;
    let _plugin = node.plugin(slots(3)).await;
    node.patch_node_status(json!({"capacity": {"example.com/patched": "17"}}))
        .await;
    node.node_lists("example.com/patched", "17", "17").await;
    node.kubelet.restart().await.unwrap();
    node.node_lists(SLOTS, "0", "0").await;
    node.node_lists("example.com/patched", "17", "17").await;
    node.kubelet
        .restart_with(|config| std::fs::remove_file(config.checkpoint()).unwrap())
        .await
        .unwrap();
    node.node_lists("example.com/patched", "0", "0").await;
    let cpu = node
        .nodes()
        .get("n1")
        .await
        .unwrap()
        .status
        .unwrap()
        .capacity
        .unwrap()["cpu"]
        .0
        .clone();
    assert_eq!(cpu, "64");
}

#[tokio::test]
async fn a_corrupt_checkpoint_is_ignored_and_resources_become_zero() {
    let mut node = Node::start().await;
    let _plugin = node.plugin(slots(3)).await;
    node.run(slot_pod("p", 1)).await;
    node.patch_node_status(json!({"capacity": {"example.com/patched": "17"}}))
        .await;
    let corrupt = |config: &KubeletConfig| {
        let text = std::fs::read_to_string(config.checkpoint()).unwrap();
        std::fs::write(config.checkpoint(), text.replace("\"main\"", "\"other\"")).unwrap();
    };
    node.kubelet.restart_with(corrupt).await.unwrap();
    node.until(kit::kubelet::Kubelet::has_synced).await;
    assert!(node.kubelet.allocations().is_empty());
    node.node_lists("example.com/patched", "17", "17").await;
}

#[tokio::test]
async fn pods_deleted_while_kubelet_was_down_free_their_devices() {
    let mut node = Node::start().await;
    let plugin = node.plugin(slots(3)).await;
    node.run(slot_pod("p", 3)).await;
    node.kubelet.restart_with(|_| drop(plugin)).await.unwrap();
    let plugin = node.plugin(slots(3)).await;
    node.delete("p").await;
    node.when_gone("p").await;
    node.run(slot_pod("q", 3)).await;
    assert_eq!(plugin.allocated().len(), 1);
}

#[tokio::test]
async fn connections_end_with_the_old_process() {
    let mut node = Node::start().await;
    let channel = crate::plugin::connect(&node.kubelet.config().pod_resources_socket()).await;
    let mut lister =
        proto::kubelet::podresources::pod_resources_lister_client::PodResourcesListerClient::new(channel);
    let _plugin = node.plugin(slots(3)).await;
    node.run(slot_pod("p", 1)).await;
    let request = proto::kubelet::podresources::ListPodResourcesRequest {};
    assert_eq!(
        lister
            .list(request)
            .await
            .unwrap()
            .into_inner()
            .pod_resources
            .len(),
        1
    );
    node.kubelet
        .restart_with(|config| std::fs::remove_file(config.pod_resources_socket()).unwrap())
        .await
        .unwrap();
    // The channel may notice the broken connection with its first call, and then connects to the new socket.
    let answer = match lister.list(request).await {
        Ok(answer) => answer,
        Err(_) => lister.list(request).await.unwrap(),
    };
    assert!(answer.into_inner().pod_resources.len() <= 1);
}
