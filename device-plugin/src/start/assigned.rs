//! Marks pods with the annotations of the old gpushare extender as assigned, once all their containers have their devices.
//!
//! Level-triggered: the pods to mark follow from the pods and the log of Allocate calls at each change, so no mark is lost while
//! the API server is away, and pods that an earlier process left unmarked are marked too.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use proto::record::MEM_ASSIGNED;
use tracing::warn;

use crate::node::pods::annotate::annotate;
use crate::node::pods::{NodePod, NodePods};
use crate::start::matching::AllocateLog;
use crate::start::node_state::NodeState;
use daemon::api_server::{Connection, one_line};

/// Pauses after failures: the first, which doubles each time, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(30));

/// The pods with annotations of the old gpushare extender that have their devices and are not marked.
pub fn unmarked(pods: &NodePods, log: &AllocateLog) -> Vec<NodePod> {
    let mut unmarked = Vec::new();
    for pod in pods.iter() {
        let gpushare = pod.record().and_then(|record| record.gpushare);
        // kubelet starts no container before it has allocated all devices of the pod. Until a start the pod of a call is a guess.
        if gpushare.is_some_and(|gpushare| !gpushare.assigned) && log.is_started(pod) {
            unmarked.push(pod.clone());
        }
    }
    unmarked
}

/// Marks the [`unmarked`] pods at each change of the pods and after each answer or start.
pub(crate) async fn mark_assigned(connection: Connection, node: Arc<NodeState>) {
    let Connection { client, contact } = connection;
    let mut pods = node.pods.clone();
    // Pods that this task has marked, and that the watch does not show as marked yet.
    let mut marked = BTreeSet::new();
    let mut backoff = contact.backoff(PAUSES);
    loop {
        let due = {
            let pods = pods.borrow_and_update();
            let mut log = node.log();
            log.forget_gone(&pods);
            unmarked(&pods, &log)
        };
        // Pods that are not due any more are marked in the watch by now, or gone.
        marked.retain(|uid| due.iter().any(|pod| pod.uid == *uid));
        let mut has_failed = false;
        for pod in &due {
            if marked.contains(&pod.uid) {
                continue;
            }
            let mark = [(MEM_ASSIGNED.to_owned(), "true".to_owned())].into();
            match annotate(&client, pod, &mark).await {
                Ok(()) => {
                    marked.insert(pod.uid.clone());
                }
                Err(error) => {
                    has_failed = true;
                    warn!(
                        pod = pod.display_name(),
                        error = one_line(&error),
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

#[cfg(test)]
mod tests;
