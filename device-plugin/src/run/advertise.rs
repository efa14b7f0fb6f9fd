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
use crate::publish::own_objects::StoredDevice;
use crate::publish::{PublisherInputs, node_patches};
use crate::start::node_state::NodeState;

/// Advertises a resource to kubelet once the scheduler counts it rightly, and serves it until `stop`. `keeps_units` is the answer
/// of [`keeps_memory_units`].
pub(super) async fn serve(
    registration: Registration,
    published: PublisherInputs,
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
    published: PublisherInputs,
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

/// Returns true if kubelet's checkpoint lists exactly the memory units of these devices. The process that registered them has
/// published the size of a unit, so the registration need not wait for the API server. Another size is not noticed if every GPU
/// has the same number of units with it; it is published as soon as the API server answers.
pub(super) fn keeps_memory_units(dir: &Path, settings: &NodeSettings, fleet: &NodeFleet) -> bool {
    let Ok(mut registered) = kubelet_checkpoint::registered(dir) else {
        return false;
    };
    let ids = registered.remove(&settings.names.cluster.memory);
    let mut registered = BTreeSet::from_iter(ids.unwrap_or_default());
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

/// Waits until the Device object has the label that this plugin serves whole GPUs, and the present list of `allocations`.
pub(super) async fn whole_published(
    mut device: watch::Receiver<StoredDevice>,
    mut allocations: watch::Receiver<Option<KubeletAllocations>>,
) {
    if !is_whole_published(&device.borrow(), allocations.borrow().as_ref()) {
        info!(
            "registering whole GPUs once the Device object has this plugin's label and lists the GPUs of other schedulers' pods"
        );
    }
    while !is_whole_published(
        &device.borrow_and_update(),
        allocations.borrow_and_update().as_ref(),
    ) {
        tokio::select! {
            Ok(()) = device.changed() => {}
            Ok(()) = allocations.changed() => {}
            // The end of both tasks ends the process.
            else => std::future::pending().await,
        }
    }
}

fn is_whole_published(stored: &StoredDevice, allocations: Option<&KubeletAllocations>) -> bool {
    let (StoredDevice::Present(object), Some(allocations)) = (stored, allocations) else {
        return false;
    };
    let serves = object.labels().get(SERVES_VENDOR_LABEL).map(String::as_str);
    let list = allocations.annotation();
    serves == Some("true")
        // A list that no annotation can hold is never published, and the scheduler would count its GPUs as free.
        && (list.is_some() || allocations.entries.is_empty())
        && object.annotations().get(DEVICES_CHECKPOINTS) == list.as_ref()
}

/// Waits until the Node in the API server has the size of the memory unit. From then on the publisher keeps it there.
pub(super) async fn unit_published(mut node: watch::Receiver<Option<Node>>, settings: &NodeSettings) {
    let (names, unit) = (&settings.names.cluster, settings.memory_unit);
    let is_published = |node: &Option<Node>| match node {
        Some(node) => node_patches::memory_unit(node, names, unit).is_none(),
        None => false,
    };
    if !is_published(&node.borrow()) {
        info!(resource = names.memory, %unit, "registering once the node's annotation has the memory unit");
    }
    if node.wait_for(is_published).await.is_err() {
        // The end of the watch ends the process.
        std::future::pending::<()>().await;
    }
}
