//! Marks gpushare pods assigned once all their containers have their devices.
//!
//! Level-triggered: what is due is read off the pods and the books each time something changes, so
//! nothing is lost when the API server is away, and pods that a predecessor of this process left
//! unmarked are marked too. The assume time is never touched: it is the order of the pods.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use daemon::api_server::{Connection, one_line};
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use proto::pod::Pod;
use proto::record::MEM_ASSIGNED;
use serde_json::json;
use tokio::time::timeout;
use tracing::{info, warn};

use crate::identity::Ledger;
use crate::plugin::NodeState;
use crate::pods::{NodePod, PodUid, Pods, Stage};

/// How long one request may take.
const REQUEST_LIMIT: Duration = Duration::from_secs(10);

/// Pauses after failures, doubled each time.
const PAUSES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(30));

/// A pod to mark.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Due {
    /// Its UID: a pod of the same name that came since must not be marked.
    pub uid: PodUid,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

/// The gpushare pods that have their devices and are not marked.
pub fn due(pods: &Pods, ledger: &Ledger) -> Vec<Due> {
    let is_unmarked = |pod: &&NodePod| {
        pod.placement
            .as_ref()
            .is_ok_and(|placement| placement.gpushare.is_some() && !placement.is_assigned())
    };
    // kubelet starts no container before all of a pod's devices are allocated, and until then it is a guess whose they are.
    let has_devices = |pod: &&NodePod| {
        pod.stage == Stage::Running || (pod.stage != Stage::Terminal && ledger.is_confirmed(&pod.uid))
    };
    let due = |pod: &NodePod| Due {
        uid: pod.uid.clone(),
        namespace: pod.namespace.clone(),
        name: pod.name.clone(),
    };
    pods.iter()
        .filter(is_unmarked)
        .filter(has_devices)
        .map(due)
        .collect()
}

/// Brings the books up to date with the pods before they are read.
fn observe(pods: &Pods, ledger: &mut Ledger) -> Vec<Due> {
    ledger.observe(pods);
    due(pods, ledger)
}

/// Marks pods until the task is dropped.
pub async fn mark_assigned(connection: Connection, node: Arc<NodeState>) {
    let Connection { client, contact } = connection;
    let mut pods = node.pods.clone();
    // Marked here, and not yet seen marked in the watch.
    let mut marked = BTreeSet::new();
    let mut backoff = contact.backoff(PAUSES);
    loop {
        let due = observe(&pods.borrow_and_update(), &mut node.ledger());
        let (seen_late, due): (Vec<Due>, Vec<Due>) =
            due.into_iter().partition(|pod| marked.contains(&pod.uid));
        marked = seen_late.into_iter().map(|pod| pod.uid).collect();
        let mut has_failed = false;
        for pod in due {
            match mark(&client, &pod).await {
                Ok(()) => {
                    marked.insert(pod.uid);
                }
                Err(error) => {
                    has_failed = true;
                    warn!(
                        pod = format!("{}/{}", pod.namespace, pod.name),
                        error = one_line(error.as_ref()),
                        "cannot mark the pod assigned, trying again"
                    );
                }
            }
        }
        if !has_failed {
            backoff.reset();
        }
        tokio::select! {
            () = node.answered.notified() => {}
            _ = pods.changed() => {}
            () = backoff.pause(), if has_failed => {}
        }
    }
}

/// Marks one pod; one that is gone, or replaced by another of its name, counts as done.
async fn mark(client: &Client, pod: &Due) -> anyhow::Result<()> {
    let api: Api<Pod> = Api::namespaced(client.clone(), &pod.namespace);
    let patch = json!({"metadata": {"uid": pod.uid.as_str(), "annotations": {MEM_ASSIGNED: "true"}}});
    let params = PatchParams::default();
    match timeout(
        REQUEST_LIMIT,
        api.patch(&pod.name, &params, &Patch::Merge(&patch)),
    )
    .await?
    {
        Ok(_) => {
            info!(pod = format!("{}/{}", pod.namespace, pod.name), "marked assigned");
            Ok(())
        }
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(kube::Error::Api(status))
            if status.code == 409 && status.message.to_lowercase().contains("uid") =>
        {
            Ok(())
        }
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests;
