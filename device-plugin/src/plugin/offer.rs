//! Serves a resource to kubelet for as long as this node has anything of it.

use std::sync::Arc;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::extended_resource::ExtendedResource;
use crate::fleet::Fleet;

use super::NodeState;
use super::registration::{KubeletDir, keep_registered};

/// Serves and registers `resource` while there is anything of it, until `stop`; `is_registered` tells whether kubelet knows all
/// that there is.
pub async fn keep_offered(
    dir: KubeletDir,
    resource: ExtendedResource,
    node: Arc<NodeState>,
    stop: CancellationToken,
    is_registered: watch::Sender<bool>,
) {
    let mut fleet = node.fleet.clone();
    let is_there = |fleet: &Fleet| fleet.offers(resource, &node.settings.names);
    loop {
        is_registered.send_replace(!is_there(&fleet.borrow()));
        let found = tokio::select! {
            () = stop.cancelled() => return,
            found = fleet.wait_for(|fleet| is_there(fleet)) => found.is_ok(),
        };
        if !found {
            return;
        }
        let serving_stop = stop.child_token();
        let mut serving = std::pin::pin!(keep_registered(
            dir.clone(),
            resource,
            Arc::clone(&node),
            serving_stop.clone(),
            is_registered.clone()
        ));
        tokio::select! {
            () = &mut serving => return,
            () = stop.cancelled() => {}
            _ = fleet.wait_for(|fleet| !is_there(fleet)) => {}
        }
        serving_stop.cancel();
        serving.await;
        if stop.is_cancelled() {
            return;
        }
        info!(?resource, "no device has anything of this resource any more");
    }
}
