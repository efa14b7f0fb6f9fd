//! Pods of high priority that ask for a whole GPU where each GPU is half full, again and again while something else is measured.

use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::task::AbortOnDropHandle;

use super::fleet;
use kit::apiserver::ApiObjects;
use kit::http_client::HttpClient;
use kit::pods::set_in;

/// Time between two requests about one pod: kube-scheduler's longest back-off.
const BACK_OFF: Duration = Duration::from_secs(10);
/// The nodes on each of which one pod may be evicted, and makes room for one of the pods.
const N_ROOMS: u32 = 10;

/// The requests of the pods; they end when this is dropped.
#[derive(Debug)]
pub(super) struct Preemptors {
    _running: AbortOnDropHandle<()>,
}

/// Creates `n` pods that kube-scheduler has refused, and returns them.
pub(super) fn create(objects: &ApiObjects, n_nodes: u32, n: u32) -> Result<Vec<Value>> {
    let controller =
        json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": true}]);
    for idx in 0..N_ROOMS.min(n_nodes) {
        let owned = json!({"metadata": {"ownerReferences": controller}});
        objects.patch("pods", fleet::NAMESPACE, &format!("bound-{idx:06}"), owned)?;
    }
    let condition = json!({"type": "PodScheduled", "status": "False", "reason": "Unschedulable"});
    let mut pods = Vec::new();
    for idx in 0..n {
        let name = format!("preemptor-{idx:03}");
        let mut pod = fleet::pod(&name, &fleet::GIB_OF_GPU.to_string());
        set_in(&mut pod, "spec", "priority", json!(1000));
        objects.create("pods", pod)?;
        let refused = json!({"conditions": [condition]});
        let pod = objects.patch_status("pods", fleet::NAMESPACE, &name, &refused)?;
        pods.push((*pod).clone());
    }
    Ok(pods)
}

impl Preemptors {
    /// Asks about one of the pods and all nodes after the other, at an even pace.
    pub(super) fn start(pods: Vec<Value>, scheduler: &str, n_nodes: u32) -> Self {
        let url = format!("{scheduler}/gpushare-scheduler/filter");
        let running = tokio::spawn(async move {
            if let Err(error) = run(&pods, &url, n_nodes).await {
                tracing::error!(%error, "requests about preemptors have ended");
            }
        });
        Self {
            _running: AbortOnDropHandle::new(running),
        }
    }
}

/// Sends the filter requests, each about all nodes, one for each pod in [`BACK_OFF`].
async fn run(pods: &[Value], url: &str, n_nodes: u32) -> Result<()> {
    let names: Vec<String> = (0..n_nodes).map(fleet::node_name).collect();
    let client = HttpClient::new();
    let n_pods = u32::try_from(pods.len())?.max(1);
    let mut beats = interval(BACK_OFF / n_pods);
    beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for pod in pods.iter().cycle() {
        beats.tick().await;
        let request = json!({"Pod": pod, "Nodes": null, "NodeNames": names});
        let answered = client.post(url, request.to_string()).await;
        answered.context("filter does not answer about a preemptor")?;
    }
    Ok(())
}
