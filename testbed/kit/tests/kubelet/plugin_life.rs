//! Plugins that come, change, go, and come back.

use std::time::Duration;

use kit::kubelet::KubeletConfig;

use crate::node::{Node, refusal, slot_pod};
use crate::plugin::{Plugin, SLOTS, device, devices, register, slots};

#[tokio::test]
async fn node_status_follows_the_plugins_list_and_leaves_other_resources_alone() {
    let node = Node::start().await;
    node.patch_node_status(serde_json::json!({"capacity": {"example.com/patched": "17"}}))
        .await;
    node.node_lists("example.com/patched", "17", "17").await;
    let plugin = node.plugin(slots(3)).await;
    node.node_lists(SLOTS, "3", "3").await;
    plugin.send(vec![
        device("d0", "Healthy"),
        device("d1", "Unhealthy"),
        device("d2", "Unhealthy"),
        device("d3", "Healthy"),
    ]);
    node.node_lists(SLOTS, "4", "2").await;
    node.node_lists("example.com/patched", "17", "17").await;
}

#[tokio::test]
async fn a_lost_stream_makes_every_device_unhealthy() {
    let node = Node::start().await;
    let plugin = node.plugin(slots(3).with_pre_start()).await;
    node.run(slot_pod("before", 1)).await;
    node.node_lists(SLOTS, "3", "3").await;
    plugin.end_streams();
    node.node_lists(SLOTS, "3", "0").await;
    node.create(slot_pod("after", 1)).await;
    let message = "Pod was rejected: Allocate failed due to no healthy devices present; \
                   cannot allocate unhealthy devices example.com/slot, which is unexpected";
    assert_eq!(refusal(&node.in_phase("after", "Failed").await).1, message);
    node.kubelet
        .restart_container("default", "before", "main")
        .unwrap();
    let refused = |kubelet: &kit::kubelet::Kubelet| {
        let state = kubelet
            .container("default", "before", "main")
            .map(|main| main.state);
        matches!(state, Some(kit::kubelet::RunState::Waiting { message, .. }) if message.ends_with("endpoint of example.com/slot has been stopped"))
    };
    node.until(refused).await;
}

#[tokio::test]
async fn kubelet_can_close_the_stream_itself() {
    let node = Node::start().await;
    let plugin = node.plugin(slots(3)).await;
    assert!(node.kubelet.drop_stream(SLOTS));
    node.until(|kubelet| kubelet.capacity()[SLOTS] == (3, 0)).await;
    assert!(!node.kubelet.drop_stream(SLOTS));
    plugin.register(node.kubelet.config()).await.unwrap();
    node.until(|kubelet| kubelet.capacity()[SLOTS] == (3, 3)).await;
}

#[tokio::test]
async fn after_the_grace_period_the_resource_is_zero() {
    let node = Node::start_with(|config| config.delays.endpoint_grace = Duration::from_millis(50)).await;
    let plugin = node.plugin(slots(3)).await;
    node.node_lists(SLOTS, "3", "3").await;
    plugin.end_streams();
    node.node_lists(SLOTS, "0", "0").await;
    assert!(node.kubelet.capacity().is_empty());
    plugin.register(node.kubelet.config()).await.unwrap();
}

#[tokio::test]
async fn a_list_above_four_mebibytes_ends_the_stream() {
    let node = Node::start().await;
    let plugin = node.plugin(slots(2)).await;
    // 4 MiB hold 72,315 healthy devices whose IDs have 45 characters, and not one more.
    let list = |n: usize| {
        (0..n)
            .map(|i| device(&format!("{i:045}"), "Healthy"))
            .collect::<Vec<_>>()
    };
    plugin.send(list(72_315));
    node.until(|kubelet| kubelet.capacity()[SLOTS] == (72_315, 72_315))
        .await;
    plugin.send(list(72_316));
    node.until(|kubelet| kubelet.capacity()[SLOTS] == (72_315, 0))
        .await;
}

#[tokio::test]
async fn a_plugin_that_registers_again_after_its_stream_ended_takes_over() {
    let node = Node::start().await;
    let old = node.plugin(slots(3)).await;
    let held = node.run(slot_pod("p", 1)).await;
    old.end_streams();
    node.until(|kubelet| kubelet.capacity()[SLOTS] == (3, 0)).await;
    drop(old);
    let new = node.plugin(slots(5)).await;
    node.until(|kubelet| kubelet.capacity()[SLOTS] == (5, 5)).await;
    let next = node.run(slot_pod("q", 2)).await;
    assert_eq!(new.allocated(), [node.slots(&next, "main")]);
    assert!(
        !node.slots(&next, "main").contains(&node.slots(&held, "main")[0]),
        "held devices stay held"
    );
}

async fn replaced_before_its_end(change: impl FnOnce(&mut KubeletConfig)) -> (Node, Plugin) {
    let node = Node::start_with(change).await;
    let old = node.plugin(slots(3)).await;
    let new = Plugin::serve(node.kubelet.config(), "second.sock", slots(4));
    new.register(node.kubelet.config()).await.unwrap();
    node.until(|kubelet| kubelet.capacity()[SLOTS] == (4, 4)).await;
    old.end_streams();
    (node, new)
}

#[tokio::test]
async fn the_late_end_of_an_old_stream_disconnects_the_new_plugin_as_in_kubelet() {
    let (node, _new) = replaced_before_its_end(|_| {}).await;
    node.until(|kubelet| kubelet.capacity()[SLOTS] == (4, 0)).await;
}

#[tokio::test]
async fn a_kubelet_without_that_fault_keeps_the_new_plugin() {
    let (node, new) =
        replaced_before_its_end(|config| config.faults.late_end_disconnects_successor = false).await;
    new.send(devices(6));
    node.until(|kubelet| kubelet.capacity()[SLOTS] == (6, 6)).await;
    node.run(slot_pod("p", 6)).await;
}

#[tokio::test]
async fn invalid_registrations_are_refused_with_kubelets_messages() {
    let node = Node::start_with(|config| config.delays.dial = Duration::from_millis(50)).await;
    let config = node.kubelet.config();
    let refusal = |version: &'static str, resource: &'static str| async move {
        register(config, version, "none.sock", resource)
            .await
            .unwrap_err()
            .message()
            .to_owned()
    };
    let version =
        "requested API version \"v1alpha\" is not supported by kubelet. Supported version is [v1beta1]";
    assert_eq!(refusal("v1alpha", SLOTS).await, version);
    assert_eq!(
        refusal("v1beta1", "cpu").await,
        "the ResourceName \"cpu\" is invalid"
    );
    assert_eq!(
        refusal("v1beta1", "kubernetes.io/x").await,
        "the ResourceName \"kubernetes.io/x\" is invalid"
    );
    let unreachable = refusal("v1beta1", SLOTS).await;
    assert!(
        unreachable.starts_with("failed to dial device plugin") && unreachable.ends_with("deadline exceeded"),
        "{unreachable}"
    );
    assert!(node.kubelet.capacity().is_empty());
}
