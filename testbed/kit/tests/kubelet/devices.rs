//! Containers' devices: the calls to the plugin for them, and what becomes of them when a plugin or kubelet goes.

use std::sync::atomic::{AtomicUsize, Ordering};

use proto::kubelet::deviceplugin::ContainerAllocateResponse;
use proto::kubelet::podresources::ListPodResourcesRequest;
use proto::kubelet::podresources::pod_resources_lister_client::PodResourcesListerClient;
use tonic::{Code, Status};

use crate::node::{Node, pod};
use crate::plugin::{Call, Plugin, connect, slots};

#[tokio::test]
async fn an_init_and_an_app_container_share_one_device_as_on_a_real_kubelet() {
    let node = Node::start().await;
    let plugin = node.plugin(slots(200)).await;
    node.run(pod("p", &[("init", 1)], &[("app", 1)])).await;
    let one = vec!["d0".to_owned()];
    let expected = [
        Call::Preferred(1),
        Call::Allocate(one.clone()),
        Call::Allocate(one.clone()),
        Call::PreStart(one.clone()),
        Call::PreStart(one),
    ];
    assert_eq!(plugin.calls(), expected);
}

#[tokio::test]
async fn a_failing_allocate_fails_the_pod_for_good_and_frees_its_devices() {
    let node = Node::start().await;
    let refuse_two = |ids: &[String]| match ids {
        [_, _] => Err(Status::unknown("not mine")),
        _ => Ok(ContainerAllocateResponse::default()),
    };
    let plugin = node.plugin(slots(2).answers(refuse_two)).await;
    node.create(pod("bad", &[], &[("main", 2)])).await;
    let message = "Pod was rejected: Allocate failed due to rpc error: code = Unknown desc = not mine, which is unexpected";
    assert_eq!(node.refusal("bad").await, message);
    node.run(pod("good", &[], &[("main", 1)])).await;
    node.run(pod("also", &[], &[("main", 1)])).await;
    let calls = plugin.calls();
    let n_allocate = calls
        .iter()
        .filter(|call| matches!(call, Call::Allocate(_)))
        .count();
    assert_eq!(n_allocate, 3, "the failed pod is not tried again");
}

#[tokio::test]
async fn a_crashed_container_restarts_with_the_same_answer_and_a_new_prestart_call() {
    let node = Node::start().await;
    let n_answers = AtomicUsize::new(0);
    let count = move |_: &[String]| {
        let n = n_answers.fetch_add(1, Ordering::SeqCst).to_string();
        Ok(ContainerAllocateResponse {
            envs: [("ANSWER".to_owned(), n)].into(),
            ..Default::default()
        })
    };
    let plugin = node.plugin(slots(1).answers(count)).await;
    node.run(pod("p", &[], &[("main", 1)])).await;
    node.kubelet.restart_container("default", "p", "main").unwrap();
    let main = |kubelet: &kit::kubelet::Kubelet| kubelet.container("default", "p", "main").unwrap();
    node.until(|kubelet| main(kubelet).starts == 2).await;
    assert_eq!(main(&node.kubelet).env["ANSWER"], "0");
    let ids = vec!["d0".to_owned()];
    let expected = [
        Call::Preferred(1),
        Call::Allocate(ids.clone()),
        Call::PreStart(ids.clone()),
        Call::PreStart(ids),
    ];
    assert_eq!(plugin.calls(), expected);
}

#[tokio::test]
async fn the_late_end_of_an_old_stream_disconnects_the_new_plugin_as_in_kubelet() {
    let node = Node::start().await;
    let old = node.plugin(slots(3)).await;
    let new = Plugin::serve(node.kubelet.config(), "second.sock", slots(4));
    new.register(node.kubelet.config()).await;
    node.until_slots((4, 4)).await;
    drop(old);
    node.until_slots((4, 0)).await;
}

#[tokio::test]
async fn an_exited_init_container_with_a_device_kills_its_pod_at_a_restart() {
    let mut node = Node::start().await;
    let _plugin = node.plugin(slots(3)).await;
    node.run(pod("p", &[("init", 1)], &[("app", 1)])).await;
    node.run(pod("q", &[], &[("app", 1)])).await;
    node.kubelet.restart().await.unwrap();
    let message = "Pod was rejected: Allocate failed due to no healthy devices present; \
                   cannot allocate unhealthy devices example.com/slot, which is unexpected";
    assert_eq!(node.refusal("p").await, message);
    node.until(kit::kubelet::Kubelet::has_synced).await;
    node.in_phase("q", "Running").await;
}

#[tokio::test]
async fn calls_of_list_beyond_the_rate_limit_are_refused() {
    let node = Node::start().await;
    let lister = PodResourcesListerClient::new(connect(&node.kubelet.config().pod_resources_socket()).await);
    let calls = (0..60).map(|_| {
        let mut lister = lister.clone();
        async move {
            lister
                .list(ListPodResourcesRequest {})
                .await
                .map_err(|status| status.code())
        }
    });
    let answers = futures::future::join_all(calls).await;
    let n_refused = answers
        .iter()
        .filter(|answer| matches!(answer, Err(Code::ResourceExhausted)))
        .count();
    let n_answered = answers.iter().filter(|answer| answer.is_ok()).count();
    assert_eq!(n_answered + n_refused, 60, "{answers:?}");
    assert!(n_answered >= 10 && n_refused > 0, "{n_answered} {n_refused}");
}
