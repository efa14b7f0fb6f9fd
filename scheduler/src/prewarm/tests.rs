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

/// So many pods have come that it is worth learning.
fn told_of_pods(mut index: Index) -> Index {
    (1..=20).for_each(|at| index.apply(pod(at, Some("n"), "ReplicaSet")));
    index
}

/// Whoever waits may ask for anything, as often as they like; and pods of a `DaemonSet` look for no node.
#[rstest]
#[case::bound(Some("n"), "ReplicaSet", 20)]
#[case::waiting(None, "ReplicaSet", 0)]
#[case::of_a_daemon_set(Some("n"), "DaemonSet", 0)]
#[case::image_of_a_static_pod(Some("n"), "Node", 0)]
fn only_pods_that_found_their_node_are_learnt_from(
    #[case] node: Option<&str>,
    #[case] owner: &str,
    #[case] n_kinds: usize,
) {
    let mut index = offline::index(std::iter::empty(), std::iter::empty(), std::iter::empty());
    (1..=20).for_each(|at| index.apply(pod(at, node, owner)));
    index.learn();
    assert_eq!(index.fleet().expected_workload().len(), n_kinds);
}

#[tokio::test(start_paused = true)]
async fn what_is_learnt_counts_once_it_has_been_rehearsed() {
    let index = Shared::new(told_of_pods(
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

/// Who rehearses nothing learns at once.
#[test]
fn without_rehearsals_nothing_waits() {
    let index = told_of_pods(offline::index(
        std::iter::empty(),
        std::iter::empty(),
        std::iter::empty(),
    ));
    assert!(!index.fleet().is_refreshing_workload());
}
