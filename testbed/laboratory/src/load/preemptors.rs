//! Pods of high priority that ask for a whole GPU where each GPU is half full, again and again while something else is measured.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use tokio::time::{MissedTickBehavior, interval};

use super::background::Background;
use super::fleet;
use kit::apiserver::ApiObjects;
use kit::http_client::HttpClient;
use kit::pods::set_in;

/// Time between two requests about one pod: kube-scheduler's longest back-off.
const BACK_OFF: Duration = Duration::from_secs(10);
/// The nodes on each of which one pod may be evicted, and makes room for one of the pods.
const N_ROOMS: u32 = 10;

/// Creates `n` pods that kube-scheduler has refused, and returns them.
pub(super) fn create(objects: &ApiObjects, n_nodes: u32, n: u32) -> Result<Vec<Value>> {
    let controller =
        json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true}]);
    for idx in 0..N_ROOMS.min(n_nodes) {
        let owned = json!({"metadata": {"ownerReferences": controller}});
        objects.patch("pods", fleet::NAMESPACE, &format!("bound-{idx:06}"), owned)?;
    }
    let condition = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable"});
    let refused = json!({"conditions": [condition]});
    let mut pods = Vec::new();
    for idx in 0..n {
        let name = format!("preemptor-{idx:03}");
        let mut pod = fleet::pod(&name, &fleet::GIB_OF_GPU.to_string());
        set_in(&mut pod, "spec", "priority", json!(1000));
        objects.create("pods", pod)?;
        let pod = objects.patch_status("pods", fleet::NAMESPACE, &name, &refused)?;
        pods.push((*pod).clone());
    }
    Ok(pods)
}

/// Asks about one of the pods and all nodes after the other, one for each pod in [`BACK_OFF`].
pub(super) fn start(pods: Vec<Value>, scheduler: &str, n_nodes: u32) -> Background {
    let pods = Arc::new(pods);
    Background::start("requests about preemptors", 1, |_| {
        run(
            Arc::clone(&pods),
            format!("{scheduler}/gpushare-scheduler/filter"),
            n_nodes,
        )
    })
}

async fn run(pods: Arc<Vec<Value>>, url: String, n_nodes: u32) -> Result<()> {
    let names: Vec<String> = (0..n_nodes).map(fleet::node_name).collect();
    let client = HttpClient::new();
    let mut beats = interval(BACK_OFF / u32::try_from(pods.len())?.max(1));
    beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for pod in pods.iter().cycle() {
        beats.tick().await;
        let request = json!({"Pod": pod, "Nodes": null, "NodeNames": names});
        let answered = client.post(&url, request.to_string()).await;
        answered.context("filter does not answer about a preemptor")?;
    }
    Ok(())
}
