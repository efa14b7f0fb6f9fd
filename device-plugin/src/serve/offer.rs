//! The conditions under which a resource is served to kubelet.

use std::collections::BTreeSet;
use std::path::Path;

use kube::ResourceExt;
use proto::device::SERVES_VENDOR_LABEL;
use proto::kubelet_allocations::{DEVICES_CHECKPOINTS, KubeletAllocations};
use proto::node::Node;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::extended_resource::ExtendedResource;
use crate::fleet::Fleet;
use crate::kubelet::registration::Registration;
use crate::kubelet_checkpoint;
use crate::node_state::NodeState;
use crate::publish::device_watch::Held;
use crate::publish::unit;
use crate::settings::Settings;

/// What the API server holds of this node, and which devices of others it is to be told of.
#[derive(Clone, Debug)]
pub(super) struct Published {
    /// The Node object.
    pub(super) node: watch::Receiver<Option<Node>>,
    /// The Device object.
    pub(super) device: watch::Receiver<Held>,
    /// Devices of pods that somebody else placed; none as long as that is not known.
    pub(super) checkpoints: watch::Receiver<Option<KubeletAllocations>>,
    /// True if kubelet has the same memory units from an earlier process, which has published them.
    pub(super) keeps_units: bool,
}

/// Serves a resource until the end is asked for.
///
/// kubelet fails every pod that it admits while a resource is not registered, so nothing waits for the API server but what
/// would be counted wrongly: memory waits until the node says what a unit is, unless kubelet has the same units already, and
/// whole GPUs wait until the scheduler can know that it chooses them and which are taken.
pub(super) async fn serve(registration: Registration, published: Published, stop: CancellationToken) {
    tokio::select! {
        () = stop.cancelled() => return,
        () = prepare(registration.resource, &registration.node, published) => {}
    }
    registration.keep_offered(stop).await;
}

async fn prepare(resource: ExtendedResource, node: &NodeState, published: Published) {
    match resource {
        ExtendedResource::Memory if published.keeps_units => {}
        ExtendedResource::Memory => unit_published(published.node, &node.settings).await,
        ExtendedResource::Whole => whole_published(published.device, published.checkpoints).await,
        ExtendedResource::Shared | ExtendedResource::Rdma | ExtendedResource::Fpga => {}
    }
}

/// Returns true if kubelet has memory units from an earlier process, and these devices have the same: an earlier process
/// registered them after it had published their size.
///
/// A unit of another size passes for the same where no GPU has another number of them; the difference is less than one unit
/// for each GPU, and is published as soon as the API server answers. A GPU without units in kubelet's checkpoint was unhealthy.
pub(super) fn keeps_memory_units(dir: &Path, settings: &Settings, fleet: &Fleet) -> bool {
    let Ok(mut registered) = kubelet_checkpoint::registered(dir) else {
        return false;
    };
    let ids = registered
        .remove(&settings.names.cluster.memory)
        .unwrap_or_default();
    let mut registered: BTreeSet<String> = ids.into_iter().collect();
    let n_registered = registered.len();
    for device in fleet.ids.numbered(ExtendedResource::Memory) {
        let ids: Vec<String> = device.ids.iter().collect();
        let n_found = ids.iter().filter(|id| registered.remove(*id)).count();
        if n_found != 0 && n_found != ids.len() {
            return false;
        }
    }
    n_registered > 0 && registered.is_empty()
}

/// Returns when the Device object has been seen to tell that this plugin serves whole GPUs, and which of them pods of the
/// vendor's plugin still have: a pod that is placed before is placed without a record.
pub(super) async fn whole_published(
    mut device: watch::Receiver<Held>,
    mut checkpoints: watch::Receiver<Option<KubeletAllocations>>,
) {
    let is_told = |held: &Held, checkpoints: Option<&KubeletAllocations>| {
        let (Held::Object(object), Some(checkpoints)) = (held, checkpoints) else {
            return false;
        };
        object
            .labels()
            .get(SERVES_VENDOR_LABEL)
            .is_some_and(|value| value == "true")
            && object.annotations().contains_key(DEVICES_CHECKPOINTS) != checkpoints.entries.is_empty()
    };
    while !is_told(
        &device.borrow_and_update(),
        checkpoints.borrow_and_update().as_ref(),
    ) {
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
    let is_told = |node: &Option<Node>| {
        node.as_ref()
            .is_some_and(|node| unit::patch(node, &settings.names.cluster, settings.memory_unit).is_none())
    };
    if !is_told(&node.borrow()) {
        info!(resource = settings.names.cluster.memory, unit = %settings.memory_unit, "registering once the node's annotation tells the memory unit");
    }
    if node.wait_for(is_told).await.is_err() {
        // Without a watch of the node nobody will tell; the end of that task ends the process.
        std::future::pending::<()>().await;
    }
}
