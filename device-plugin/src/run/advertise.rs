//! The conditions under which the plugin advertises a resource to kubelet.

use std::collections::BTreeSet;
use std::path::Path;

use kube::ResourceExt;
use proto::device::SERVES_VENDOR_LABEL;
use proto::kubelet_allocations::{DEVICES_CHECKPOINTS, KubeletAllocations};
use proto::node::Node;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::devices::extended_resource::ExtendedResource;
use crate::devices::fleet::NodeFleet;
use crate::inject::settings::NodeSettings;
use crate::kubelet::registration::Registration;
use crate::node::kubelet_checkpoint;
use crate::publish::node_patches;
use crate::publish::own_objects::StoredDevice;
use crate::start::node_state::NodeState;

/// The objects of this node as the API server has them, and the devices that other device plugins have allocated.
#[derive(Clone, Debug)]
pub(super) struct Published {
    pub(super) node: watch::Receiver<Option<Node>>,
    pub(super) device: watch::Receiver<StoredDevice>,
    /// The devices of pods that gpushare's scheduler did not place; `None` until they are known.
    pub(super) kubelet_allocations: watch::Receiver<Option<KubeletAllocations>>,
}

/// Advertises a resource to kubelet once the scheduler counts it rightly, and serves it until `stop`. `keeps_units` is the answer
/// of [`keeps_memory_units`].
pub(super) async fn serve(
    registration: Registration,
    published: Published,
    keeps_units: bool,
    stop: CancellationToken,
) {
    tokio::select! {
        () = stop.cancelled() => return,
        () = wait_until_advertisable(registration.resource, &registration.node, published, keeps_units) => {}
    }
    registration.keep_offered(stop).await;
}

/// Waits until the API server has the facts by which the scheduler counts the resource.
async fn wait_until_advertisable(
    resource: ExtendedResource,
    node: &NodeState,
    published: Published,
    keeps_units: bool,
) {
    // kubelet fails pods that it admits before the registration, so no other resource waits.
    match resource {
        ExtendedResource::Memory if keeps_units => {}
        ExtendedResource::Memory => unit_published(published.node, &node.settings).await,
        ExtendedResource::Whole => whole_published(published.device, published.kubelet_allocations).await,
        ExtendedResource::Shared | ExtendedResource::Rdma | ExtendedResource::Fpga => {}
    }
}

/// Returns true if kubelet's checkpoint lists exactly the memory units of these devices, as an earlier process registered them.
/// That process has published the size of a unit, so the registration need not wait for the API server.
///
/// A unit of another size is not noticed if every GPU has the same number of units with it. The difference is less than one unit
/// for each GPU, and the size is published as soon as the API server answers.
pub(super) fn keeps_memory_units(dir: &Path, settings: &NodeSettings, fleet: &NodeFleet) -> bool {
    let Ok(mut registered) = kubelet_checkpoint::registered(dir) else {
        return false;
    };
    let ids = registered
        .remove(&settings.names.cluster.memory)
        .unwrap_or_default();
    let mut registered: BTreeSet<String> = ids.into_iter().collect();
    let n_registered = registered.len();
    for device in fleet.ids.numbered(ExtendedResource::Memory) {
        let ids: Vec<String> = device.iter().collect();
        let n_found = ids.iter().filter(|id| registered.remove(*id)).count();
        // A GPU of which the checkpoint names no memory unit was unhealthy when kubelet wrote it.
        if n_found != 0 && n_found != ids.len() {
            return false;
        }
    }
    n_registered > 0 && registered.is_empty()
}

/// Waits until the Device object has the label that this plugin serves whole GPUs, and the present list of `allocations`: the
/// devices of pods that gpushare's scheduler did not place.
pub(super) async fn whole_published(
    mut device: watch::Receiver<StoredDevice>,
    mut allocations: watch::Receiver<Option<KubeletAllocations>>,
) {
    let is_published = |stored: &StoredDevice, allocations: Option<&KubeletAllocations>| {
        let (StoredDevice::Present(object), Some(allocations)) = (stored, allocations) else {
            return false;
        };
        let serves = object.labels().get(SERVES_VENDOR_LABEL);
        let list = allocations.annotation();
        serves.is_some_and(|value| value == "true")
            // A list that no annotation can hold is never published, and the scheduler would count its GPUs as free.
            && (list.is_some() || allocations.entries.is_empty())
            && object.annotations().get(DEVICES_CHECKPOINTS) == list.as_ref()
    };
    if !is_published(&device.borrow(), allocations.borrow().as_ref()) {
        info!(
            "registering whole GPUs once the Device object has this plugin's label and lists the GPUs of other schedulers' pods"
        );
    }
    while !is_published(
        &device.borrow_and_update(),
        allocations.borrow_and_update().as_ref(),
    ) {
        let is_alive = tokio::select! {
            changed = device.changed() => changed.is_ok(),
            changed = allocations.changed() => changed.is_ok(),
        };
        if !is_alive {
            // The end of these tasks ends the process.
            std::future::pending::<()>().await;
        }
    }
}

/// Waits until the Node in the API server has the size of the memory unit. From then on the publisher keeps it there.
pub(super) async fn unit_published(mut node: watch::Receiver<Option<Node>>, settings: &NodeSettings) {
    let is_published = |node: &Option<Node>| {
        node.as_ref().is_some_and(|node| {
            node_patches::memory_unit(node, &settings.names.cluster, settings.memory_unit).is_none()
        })
    };
    if !is_published(&node.borrow()) {
        info!(resource = settings.names.cluster.memory, unit = %settings.memory_unit, "registering once the node's annotation has the memory unit");
    }
    if node.wait_for(is_published).await.is_err() {
        // The end of the watch ends the process.
        std::future::pending::<()>().await;
    }
}
