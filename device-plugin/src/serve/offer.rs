//! What is waited for before a resource is served to kubelet.

use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt;
use proto::checkpoints::{DEVICES_CHECKPOINTS, DevicesCheckpoints};
use proto::device::SERVES_VENDOR_LABEL;
use proto::node::Node;
use tokio::sync::watch;
use tokio::time::timeout;
use tracing::{info, warn};

use crate::plugin::offer::keep_offered;
use crate::plugin::registration::KubeletDir;
use crate::plugin::{NodeState, Settings};
use crate::pods::Pods;
use crate::publish::device_watch::Held;
use crate::publish::unit;
use crate::served::Served;
use crate::stop::Stop;

/// How long the first registration waits for the pods of this node to be known.
const SYNC_WAIT: Duration = Duration::from_secs(5);

/// Longest wait of the first registration for the decision on how containers get their devices.
const INJECTION_WAIT: Duration = Duration::from_secs(5);

/// What the API server holds of this node, and which devices of others it is to be told of.
#[derive(Clone, Debug)]
pub(super) struct Published {
    /// The Node object.
    pub(super) node: watch::Receiver<Option<Node>>,
    /// The Device object.
    pub(super) device: watch::Receiver<Held>,
    /// Devices of pods that somebody else placed; none as long as that is not known.
    pub(super) checkpoints: watch::Receiver<Option<DevicesCheckpoints>>,
}

/// Serves a resource until the end is asked for: memory once the node says what a unit is, so that no unit is counted as
/// another, and whole GPUs once the scheduler can know that it chooses them and which are taken.
pub(super) async fn serve(
    dir: KubeletDir,
    resource: Served,
    node: Arc<NodeState>,
    published: Published,
    mut stop: Stop,
    is_registered: watch::Sender<bool>,
) {
    tokio::select! {
        () = stop.requested() => return,
        () = prepare(resource, &node, published) => {}
    }
    keep_offered(dir, resource, node, stop, is_registered).await;
}

async fn prepare(resource: Served, node: &NodeState, published: Published) {
    let mut pods = node.pods.clone();
    if timeout(SYNC_WAIT, pods.wait_for(Pods::is_synced)).await.is_err() {
        warn!("the API server has not told the pods of this node yet; serving kubelet all the same");
    }
    // Without a decision an answer names a CDI device, which shows no GPU to the wrong container.
    let _ = timeout(INJECTION_WAIT, node.injection.clone().wait_for(Option::is_some)).await;
    match resource {
        Served::Memory => unit_published(published.node, &node.settings).await,
        Served::Whole => whole_published(published.device, published.checkpoints).await,
        Served::Shared | Served::Rdma | Served::Fpga => {}
    }
}

/// Returns when the Device object has been seen to tell that this plugin serves whole GPUs, and which of them pods of the
/// vendor's plugin still have: a pod that is placed before is placed without a record.
pub(super) async fn whole_published(mut device: watch::Receiver<Held>, mut checkpoints: watch::Receiver<Option<DevicesCheckpoints>>) {
    let is_told = |held: &Held, checkpoints: Option<&DevicesCheckpoints>| {
        let (Held::Object(object), Some(checkpoints)) = (held, checkpoints) else { return false };
        object.labels().get(SERVES_VENDOR_LABEL).is_some_and(|value| value == "true")
            && object.annotations().contains_key(DEVICES_CHECKPOINTS) != checkpoints.entries.is_empty()
    };
    while !is_told(&device.borrow_and_update(), checkpoints.borrow_and_update().as_ref()) {
        let is_alive = tokio::select! {
            changed = device.changed() => changed.is_ok(),
            changed = checkpoints.changed() => changed.is_ok(),
        };
        if !is_alive {
            // Without these tasks nobody will tell; their end ends the process.
            std::future::pending::<()>().await;
        }
    }
}

/// Returns when the node's annotation has been seen to tell our unit. From then on the publisher keeps it so.
pub(super) async fn unit_published(mut node: watch::Receiver<Option<Node>>, settings: &Settings) {
    let is_told =
        |node: &Option<Node>| node.as_ref().is_some_and(|node| unit::patch(node, &settings.names.cluster, settings.memory_unit).is_none());
    if !is_told(&node.borrow()) {
        info!(resource = settings.names.cluster.memory, unit = %settings.memory_unit, "registering once the node's annotation tells the memory unit");
    }
    if node.wait_for(is_told).await.is_err() {
        // Without a watch of the node nobody will tell; the end of that task ends the process.
        std::future::pending::<()>().await;
    }
}
