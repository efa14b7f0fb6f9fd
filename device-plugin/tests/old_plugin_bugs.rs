//! Bugs of the old gpushare device plugin, by the names of the list of them (D1 to D6), which must not come back.

use super::node::{Node, SHARES, UNITS, gpushare, koordinator, pod, uuid};
use device_plugin::devices::extended_resource::ExtendedResource;
use device_plugin::start::assigned;
use serde_json::json;

/// D1: pods of one size on different GPUs were swapped. Admitted in the order of binding, each keeps its own, and
/// kubelet's device IDs name the same GPU as the environment.
#[tokio::test]
async fn d1_pods_of_one_size_keep_their_own_gpu() {
    let node = Node::new(4);
    let mut kubelet = node.kubelet().await;
    for (name, minor, assumed_at) in [("a", 2, 10), ("b", 0, 20), ("c", 3, 30)] {
        node.show(&pod(name, &[&[(UNITS, 4)]], &gpushare(minor, 4, assumed_at)));
    }
    for minor in [2, 0, 3] {
        let before = kubelet.plugin(UNITS).used.clone();
        assert_eq!(
            kubelet.container(&[(UNITS, 4)]).await.unwrap()["NVIDIA_VISIBLE_DEVICES"],
            uuid(minor)
        );
        let used = &kubelet.plugin(UNITS).used;
        let fleet = node.fleet.borrow();
        assert!(used.difference(&before).all(|id| {
            fleet
                .ids
                .device_of(ExtendedResource::Memory, id)
                .is_some_and(|gpu| gpu.as_str() == uuid(minor))
        }));
    }
}

/// D1: where kubelet's IDs say which GPU it is (those of an init container are handed on), they decide, not the order.
/// The check before the container starts decides where neither order nor IDs do.
#[tokio::test]
async fn d1_device_ids_decide_before_the_assume_time() {
    let node = Node::new(2);
    let mut kubelet = node.kubelet().await;
    node.show(&pod("first", &[&[(UNITS, 4)]], &gpushare(0, 4, 10)));
    node.show(&pod("second", &[&[(UNITS, 4)]], &gpushare(1, 4, 20)));
    let ids: Vec<String> = (0..4).map(|n| format!("4ff516e8-{n}")).collect();
    assert_eq!(
        kubelet.plugin(UNITS).allocate(&ids).await.unwrap()["NVIDIA_VISIBLE_DEVICES"],
        uuid(1)
    );
}

/// D2: a bound pod that never reached Allocate was taken for the next pod of its size, and so on down the line.
#[tokio::test]
async fn d2_a_pod_deleted_or_failed_before_admission_shifts_no_other_pod() {
    let node = Node::new(4);
    let mut kubelet = node.kubelet().await;
    let mut deleted = pod("deleted", &[&[(UNITS, 8)]], &gpushare(0, 8, 1));
    deleted["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    let mut failed = pod("failed", &[&[(UNITS, 8)]], &gpushare(1, 8, 2));
    failed["status"]["phase"] = json!("Failed");
    let mut admitted = pod("admitted", &[&[(UNITS, 8)]], &gpushare(1, 8, 3));
    admitted["status"]["startTime"] = json!("2026-01-01T00:00:00Z");
    for pod in [
        deleted,
        failed,
        admitted,
        pod("c", &[&[(UNITS, 8)]], &gpushare(2, 8, 4)),
        pod("d", &[&[(UNITS, 8)]], &gpushare(3, 8, 5)),
    ] {
        node.show(&pod);
    }
    for minor in [2, 3] {
        assert_eq!(
            kubelet.container(&[(UNITS, 8)]).await.unwrap()["NVIDIA_VISIBLE_DEVICES"],
            uuid(minor)
        );
    }
}

/// D3: a pod whose mark was not yet seen was matched a second time. Here answered calls are remembered by UID.
#[tokio::test]
async fn d3_an_answered_pod_is_not_matched_again() {
    let node = Node::new(2);
    let mut kubelet = node.kubelet().await;
    let unmarked = pod("a", &[&[(UNITS, 2)]], &gpushare(0, 2, 1));
    node.show(&unmarked);
    assert!(kubelet.container(&[(UNITS, 2)]).await.is_ok());
    node.show(&unmarked);
    node.show(&pod("b", &[&[(UNITS, 2)]], &gpushare(1, 2, 2)));
    assert_eq!(
        kubelet.container(&[(UNITS, 2)]).await.unwrap()["NVIDIA_VISIBLE_DEVICES"],
        uuid(1)
    );
    let unknown = kubelet.container(&[(UNITS, 2)]).await.unwrap();
    assert!(
        !unknown.contains_key("ALIYUN_COM_GPU_MEM_POD"),
        "no pod is due: {unknown:?}"
    );
}

/// D4: a call is for one container, and was compared with the pod's sum; the first one marked the whole pod.
#[tokio::test]
async fn d4_each_container_is_matched_and_the_first_start_sets_the_assigned_annotation() {
    let node = Node::new(4);
    let mut kubelet = node.kubelet().await;
    node.show(&pod("a", &[&[(UNITS, 2)], &[(UNITS, 3)]], &gpushare(3, 5, 1)));
    let n_due = || assigned::unmarked(&node.state.pods.borrow(), &node.state.log()).len();
    for (container, units) in [("2", 2), ("3", 3)] {
        let env = kubelet.container(&[(UNITS, units)]).await.unwrap();
        assert_eq!(env["NVIDIA_VISIBLE_DEVICES"], uuid(3));
        assert_eq!(
            (
                env["ALIYUN_COM_GPU_MEM_CONTAINER"].as_str(),
                env["ALIYUN_COM_GPU_MEM_POD"].as_str()
            ),
            (container, "5")
        );
        assert_eq!(n_due(), 0, "no proof yet");
    }
    node.state.log().note_start(
        &device_plugin::node::pods::PodUid::from("uid-a"),
        ExtendedResource::Memory,
        &[],
    );
    assert_eq!(n_due(), 1);
}

/// D5: every Allocate listed and patched pods while kubelet waited. This node has no API server at all.
#[tokio::test]
async fn d5_allocate_needs_no_api_server() {
    let node = Node::new(1);
    let mut kubelet = node.kubelet().await;
    for n in 0..16 {
        node.show(&pod(&format!("p{n}"), &[&[(UNITS, 1)]], &gpushare(0, 1, n)));
    }
    for _ in 0..16 {
        assert!(kubelet.container(&[(UNITS, 1)]).await.is_ok());
    }
}

/// D6: a pod that another scheduler placed got an environment that could not work. It gets one that could, is held before its
/// containers start, as no GPU is counted for it, and no other pod is affected.
#[tokio::test]
async fn d6_a_pod_that_the_scheduler_did_not_place_affects_no_other_pod() {
    for n_gpus in [1, 4] {
        let node = Node::new(n_gpus);
        let mut kubelet = node.kubelet().await;
        node.show(&pod("stray", &[&[(UNITS, 2)]], &json!({})));
        node.show(&pod("stray-too", &[&[(SHARES, 1)]], &json!({})));
        let ids = ["9507230f-0", "9507230f-1"].map(str::to_owned);
        assert_eq!(
            kubelet.plugin(UNITS).allocate(&ids).await.unwrap()["NVIDIA_VISIBLE_DEVICES"],
            uuid(0)
        );
        let ids = [format!("{}::7", uuid(0))];
        assert_eq!(
            kubelet.plugin(SHARES).allocate(&ids).await.unwrap()["NVIDIA_VISIBLE_DEVICES"],
            uuid(0)
        );
        node.show(&pod("placed", &[&[(SHARES, 1)]], &koordinator(&[n_gpus - 1], 1)));
        assert_eq!(
            kubelet.container(&[(SHARES, 1)]).await.unwrap()["NVIDIA_VISIBLE_DEVICES"],
            uuid(n_gpus - 1)
        );
    }
}
