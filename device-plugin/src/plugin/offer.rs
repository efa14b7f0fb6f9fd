//! Serves a resource to kubelet for as long as this node has anything of it.

use std::sync::Arc;

use tokio::sync::watch;
use tracing::info;

use crate::extended_resource::ExtendedResource;
use crate::fleet::Fleet;
use crate::stop::{Stop, Stopper};

use super::NodeState;
use super::registration::{KubeletDir, keep_registered};

/// Serves and registers `resource` while there is anything of it, until `stop`; `is_registered` tells whether kubelet knows all
/// that there is.
pub async fn keep_offered(
    dir: KubeletDir,
    resource: ExtendedResource,
    node: Arc<NodeState>,
    mut stop: Stop,
    is_registered: watch::Sender<bool>,
) {
    let mut fleet = node.fleet.clone();
    let is_there = |fleet: &Fleet| fleet.offers(resource, &node.settings.names);
    loop {
        is_registered.send_replace(!is_there(&fleet.borrow()));
        let found = tokio::select! {
            () = stop.requested() => return,
            found = fleet.wait_for(|fleet| is_there(fleet)) => found.is_ok(),
        };
        if !found {
            return;
        }
        let (stopper, ending) = Stopper::new();
        let mut serving = std::pin::pin!(keep_registered(
            dir.clone(),
            resource,
            Arc::clone(&node),
            ending,
            is_registered.clone()
        ));
        tokio::select! {
            () = &mut serving => return,
            () = stop.requested() => {}
            _ = fleet.wait_for(|fleet| !is_there(fleet)) => {}
        }
        stopper.stop();
        serving.await;
        if stop.is_requested() {
            return;
        }
        info!(?resource, "no device has anything of this resource any more");
    }
}
