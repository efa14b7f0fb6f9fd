//! The gRPC service of one resource, and the stream of its device list. The answers come from [`super::allocate`],
//! [`super::preferred`] and [`crate::start`].

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;

use futures::{Stream, stream};
use proto::kubelet::deviceplugin::device_plugin_server::DevicePlugin;
use proto::kubelet::deviceplugin::{
    AllocateRequest, AllocateResponse, Device, DevicePluginOptions, Empty, ListAndWatchResponse, NumaNode,
    PreStartContainerRequest, PreStartContainerResponse, PreferredAllocationRequest,
    PreferredAllocationResponse, TopologyInfo,
};
use proto::kubelet::{HEALTHY, UNHEALTHY};
use tokio::sync::watch;
use tokio::time::Instant;
use tonic::{Request, Response, Status};
use tracing::debug;

use crate::devices::device_ids::{NUMA_NODES, NumberedIds};
use crate::devices::extended_resource::ExtendedResource;
use crate::devices::fleet::NodeFleet;
use crate::devices::inventory::PhysicalId;
use crate::inject::mode::Injection;
use crate::start::StartChecker;
use crate::start::node_state::NodeState;
use daemon::api_server::one_line;
use tokio_util::sync::CancellationToken;

use super::allocate::allocate;
use super::preferred::prefer;

/// The options that the plugin sends to kubelet, with its registration and on request.
pub(crate) const OPTIONS: DevicePluginOptions = DevicePluginOptions {
    pre_start_required: true,
    get_preferred_allocation_available: true,
};

/// Serves one resource to kubelet.
#[derive(Clone)]
pub(crate) struct DeviceService {
    pub(crate) resource: ExtendedResource,
    pub(crate) node: Arc<NodeState>,
    pub(crate) starts: Arc<StartChecker>,
    /// True once kubelet has opened a stream. Each open stream holds a receiver of it.
    pub(crate) streams: watch::Sender<bool>,
    /// Ends the streams when it is cancelled.
    pub(crate) stop: CancellationToken,
}

/// One device in kubelet's list, which has an entry for each of the device's IDs with the same health and NUMA node.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ListedDevice {
    ids: NumberedIds,
    is_healthy: bool,
    numa_node: Option<i32>,
}

struct DeviceListing {
    resource: ExtendedResource,
    fleet: watch::Receiver<Arc<NodeFleet>>,
    injection: watch::Receiver<Option<Injection>>,
    /// Has an unchanged list sent again. Closed for all resources but one, which is enough for kubelet to write its checkpoint.
    list_again: watch::Receiver<()>,
    stop: CancellationToken,
    /// The entries of the list that was sent last.
    sent: Option<Vec<ListedDevice>>,
    _open: watch::Receiver<bool>,
}

impl DeviceListing {
    /// The next item of the stream: the list at once, and again whenever it has changed; none when the service is stopped.
    async fn next(mut self) -> Option<(Result<ListAndWatchResponse, Status>, Self)> {
        let list = loop {
            let is_injectable = match &*self.injection.borrow_and_update() {
                Some(injection) => injection.is_possible_for(self.resource.device_type()),
                None => true,
            };
            let entries = listed_devices(&self.fleet.borrow_and_update(), self.resource, is_injectable);
            // kubelet writes its whole checkpoint for every list that it receives, so an unchanged one is not sent.
            if self.sent.as_ref() != Some(&entries) {
                let list = list_message(&entries);
                self.sent = Some(entries);
                break list;
            }
            tokio::select! {
                // A service that ends because its devices are gone sends the empty list first.
                biased;
                changed = self.fleet.changed() => changed.ok()?,
                // An error means that the sender has ended: the last decision stays.
                Ok(()) = self.injection.changed() => {}
                Ok(()) = self.list_again.changed() => self.sent = None,
                () = self.stop.cancelled() => return None,
            }
        };
        debug!(resource = ?self.resource, n_devices = list.devices.len(), "sending the device list");
        Some((Ok(list), self))
    }
}

/// The devices of a resource as kubelet's list shows them: unhealthy if they cannot be injected into containers.
fn listed_devices(fleet: &NodeFleet, resource: ExtendedResource, is_injectable: bool) -> Vec<ListedDevice> {
    let mut by_id = BTreeMap::<PhysicalId, (bool, Option<i32>)>::new();
    for device in fleet.entries(resource.device_type()) {
        by_id.insert(device.key.id, (device.is_healthy, device.location.numa_node));
    }
    let mut entries = Vec::new();
    for numbered in fleet.ids.numbered(resource) {
        // A device that has IDs and is not on the node any more is listed as unhealthy.
        let (is_healthy, numa_node) = by_id.get(&numbered.device).copied().unwrap_or_default();
        entries.push(ListedDevice {
            ids: numbered.clone(),
            // kubelet allocates no unhealthy device, and leaves the containers that hold one alone.
            is_healthy: is_healthy && is_injectable,
            numa_node: numa_node.filter(|node| fleet.ids.lists_numa_nodes() && NUMA_NODES.contains(node)),
        });
    }
    entries
}

/// The entries as kubelet's message, with one device for each ID.
fn list_message(entries: &[ListedDevice]) -> ListAndWatchResponse {
    let mut devices = Vec::new();
    for entry in entries {
        let health = if entry.is_healthy { HEALTHY } else { UNHEALTHY };
        let topology = entry.numa_node.map(|id| TopologyInfo {
            nodes: vec![NumaNode { id: i64::from(id) }],
        });
        for id in entry.ids.iter() {
            devices.push(Device {
                id,
                health: health.to_owned(),
                topology: topology.clone(),
            });
        }
    }
    ListAndWatchResponse { devices }
}

#[tonic::async_trait]
impl DevicePlugin for DeviceService {
    type ListAndWatchStream = Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        // kubelet uses this answer, and not the options of the registration.
        Ok(Response::new(OPTIONS))
    }

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        // The receiver comes first: to the registration, an opened channel without one is a stream that kubelet has closed.
        let open = self.streams.subscribe();
        self.streams.send_replace(true);
        let listing = DeviceListing {
            resource: self.resource,
            fleet: self.node.fleet.clone(),
            injection: self.node.injection.clone(),
            // Every node has the resources `Shared` and `Memory`, and the list of shares is the shorter one.
            list_again: if self.resource == ExtendedResource::Shared {
                self.node.list_again.subscribe()
            } else {
                watch::channel(()).1
            },
            stop: self.stop.clone(),
            sent: None,
            _open: open,
        };
        let lists = stream::unfold(listing, DeviceListing::next);
        Ok(Response::new(Box::pin(lists)))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        // While a call is counted, `ended_pods` does not call kubelet's pod-resources API: kubelet would forget the IDs that it
        // is allocating.
        let _call = self.node.begin_call();
        let mut container_responses = Vec::new();
        for request in &request.into_inner().container_requests {
            container_responses.push(prefer(&self.node, self.resource, request).await);
        }
        Ok(Response::new(PreferredAllocationResponse { container_responses }))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let (_call, began) = (self.node.begin_call(), Instant::now());
        let mut container_responses = Vec::new();
        for request in &request.into_inner().container_requests {
            // kubelet sends one container at a time; its API allows several.
            container_responses.push(allocate(&self.node, self.resource, request).await);
        }
        self.starts.context.metrics.allocated(began.elapsed());
        Ok(Response::new(AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        request: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        let ids = request.into_inner().device_ids;
        match self.starts.check_start(self.resource, ids).await {
            Ok(()) => Ok(Response::new(PreStartContainerResponse {})),
            // kubelet tries again after some 10 s, and shows the text with the pod until then.
            Err(blocked) => Err(Status::failed_precondition(one_line(&blocked))),
        }
    }
}

#[cfg(test)]
mod tests {
    use prost::Message;
    use proto::memory_unit::MemoryUnit;

    use super::*;
    use crate::devices::device_ids::IdScheme;
    use crate::devices::inventory::{NodeInventory, PciLocation};
    use crate::tests::builders;

    /// Two GPUs and an adapter, on the NUMA nodes 1, none that is known, and 0.
    fn fleet(lists_numa_nodes: bool) -> NodeFleet {
        let at = |numa_node| PciLocation {
            numa_node,
            ..PciLocation::default()
        };
        let mut gpus = vec![builders::gpu(0), builders::gpu(1)];
        gpus[0].location = at(Some(1));
        let mut adapter = builders::adapter(3);
        adapter.location = at(Some(0));
        let ids = IdScheme::with_numa_nodes(lists_numa_nodes, &gpus, 2, MemoryUnit::GIB).unwrap();
        NodeFleet::new(
            NodeInventory {
                gpus,
                others: vec![adapter],
                ..NodeInventory::default()
            },
            ids,
        )
    }

    /// The list of all virtual devices of a resource, as if each could be injected.
    fn list(fleet: &NodeFleet, resource: ExtendedResource) -> ListAndWatchResponse {
        list_message(&listed_devices(fleet, resource, true))
    }

    /// For every resource, and within the size that [`IdScheme`] computes.
    #[test]
    fn numa_nodes_are_listed_if_the_flag_is_set() {
        for resource in [
            ExtendedResource::Shared,
            ExtendedResource::Memory,
            ExtendedResource::Whole,
            ExtendedResource::Rdma,
        ] {
            let nodes = |fleet: &NodeFleet| {
                let list = list(fleet, resource).devices;
                let mut listed: Vec<_> = list
                    .into_iter()
                    .map(|device| device.topology.map(|topology| topology.nodes[0].id))
                    .collect();
                listed.dedup();
                listed
            };
            let expected = if resource == ExtendedResource::Rdma {
                vec![Some(0)]
            } else {
                vec![Some(1), None]
            };
            assert_eq!(
                (nodes(&fleet(true)), nodes(&fleet(false))),
                (expected, vec![None]),
                "{resource:?}"
            );
            let mut all_sick = fleet(true);
            for entry in &mut all_sick.gpus {
                (entry.is_healthy, entry.device.location.numa_node) = (false, Some(127));
            }
            all_sick.others[0].is_healthy = false;
            all_sick.others[0].device.location.numa_node = Some(127);
            assert_eq!(
                list(&all_sick, resource).encoded_len() as u64,
                all_sick.ids.longest_list_bytes(resource),
                "{resource:?}"
            );
        }
    }
}
