use std::time::Duration;

use proto::pod::Pod;
use serde_json::json;
use tokio::time::timeout;

use super::rehearse;
use crate::index::{Index, Shared};
use crate::offline;
use crate::watch::Follow;

fn pod(at: usize) -> Pod {
    let containers = json!([{"name": "c", "resources": {"limits": {"aliyun.com/gpu-mem": at.to_string()}}}]);
    serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "d", "uid": at.to_string()}, "spec": {"containers": containers}}))
        .unwrap()
}

/// So many pods have come that it is worth learning.
fn told_of_pods(mut index: Index) -> Index {
    (1..=20).for_each(|at| index.apply(pod(at)));
    index
}

#[tokio::test(start_paused = true)]
async fn what_is_learnt_counts_once_it_has_been_rehearsed() {
    let index = Shared::new(told_of_pods(offline::index(std::iter::empty(), std::iter::empty(), std::iter::empty()).rehearsing()));
    assert!(index.read().fleet().is_learning());
    let learnt = async {
        while index.read().fleet().is_learning() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        () = rehearse(index.clone()) => unreachable!("goes on until the process ends"),
        learnt = timeout(Duration::from_secs(1), learnt) => learnt.unwrap(),
    }
}

/// Who rehearses nothing learns at once.
#[test]
fn without_rehearsals_nothing_waits() {
    let index = told_of_pods(offline::index(std::iter::empty(), std::iter::empty(), std::iter::empty()));
    assert!(!index.fleet().is_learning());
}
