use std::time::Duration;

use proto::pod::Pod;
use rstest::rstest;
use serde_json::json;
use tokio::time::timeout;

use super::prewarm;
use crate::index::{Index, Shared};
use crate::offline;
use crate::watch::ObjectStore;

fn pod(at: usize, node: Option<&str>, owner: &str) -> Pod {
    let containers = json!([{"name": "c", "resources": {"limits": {"aliyun.com/gpu-mem": at.to_string()}}}]);
    let owners =
        json!([{"apiVersion": "apps/v1", "kind": owner, "name": "o", "uid": "o", "controller": true}]);
    let metadata = json!({"name": "p", "namespace": "d", "uid": at.to_string(), "ownerReferences": owners});
    serde_json::from_value(
        json!({"metadata": metadata, "spec": {"containers": containers, "nodeName": node}}),
    )
    .unwrap()
}

/// Enough pods were bound for a new workload model.
fn with_bound_pods(mut index: Index) -> Index {
    (1..=20).for_each(|at| index.apply(pod(at, Some("n"), "ReplicaSet")));
    index
}

/// Pending pods are no sample of the workload, as a user may create any number of them; pods of a `DaemonSet` have a node from the start.
#[rstest]
#[case::bound(Some("n"), "ReplicaSet", 20)]
#[case::waiting(None, "ReplicaSet", 0)]
#[case::of_a_daemon_set(Some("n"), "DaemonSet", 0)]
#[case::image_of_a_static_pod(Some("n"), "Node", 0)]
fn the_workload_model_counts_pods_that_the_scheduler_bound(
    #[case] node: Option<&str>,
    #[case] owner: &str,
    #[case] n_kinds: usize,
) {
    let mut index = offline::index(std::iter::empty(), std::iter::empty(), std::iter::empty());
    (1..=20).for_each(|at| index.apply(pod(at, node, owner)));
    index.refresh_workload();
    assert_eq!(index.fleet().expected_workload().len(), n_kinds);
}

#[tokio::test(start_paused = true)]
async fn a_new_workload_model_takes_effect_after_its_prewarm() {
    let index = Shared::new(with_bound_pods(
        offline::index(std::iter::empty(), std::iter::empty(), std::iter::empty()).prewarming(),
    ));
    assert!(index.read().fleet().is_refreshing_workload());
    let learnt = async {
        while index.read().fleet().is_refreshing_workload() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        () = prewarm(index.clone()) => unreachable!("goes on until the process ends"),
        learnt = timeout(Duration::from_secs(1), learnt) => learnt.unwrap(),
    }
}

#[test]
fn without_prewarm_a_new_workload_model_takes_effect_at_once() {
    let index = with_bound_pods(offline::index(
        std::iter::empty(),
        std::iter::empty(),
        std::iter::empty(),
    ));
    assert!(!index.fleet().is_refreshing_workload());
}
