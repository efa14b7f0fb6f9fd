//! The gRPC service of one resource, and its device list as a stream.
//!
//! Translates between kubelet's messages and [`NodeState`]; decides nothing.

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
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};
use tracing::debug;

use crate::extended_resource::ExtendedResource;
use crate::fleet::Fleet;
use crate::injection::Injection;
use crate::inventory::PhysicalId;

use super::NodeState;
use super::ids::{NUMA_NODES, Numbered, NumberedIds};

/// What kubelet is told on connect and at registration.
pub const OPTIONS: DevicePluginOptions = DevicePluginOptions {
    pre_start_required: true,
    get_preferred_allocation_available: true,
};

/// Serves one resource until it is stopped.
#[derive(Clone, Debug)]
pub struct DeviceService {
    resource: ExtendedResource,
    node: Arc<NodeState>,
    streams: watch::Sender<Streams>,
    stop: CancellationToken,
}

impl DeviceService {
    /// `streams` is kept up to date with the `ListAndWatch` streams; `stop` ends them.
    pub fn new(
        resource: ExtendedResource,
        node: Arc<NodeState>,
        streams: watch::Sender<Streams>,
        stop: CancellationToken,
    ) -> Self {
        Self {
            resource,
            node,
            streams,
            stop,
        }
    }
}

/// How many device lists are being streamed, and have been since the service began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Streams {
    /// Open now.
    pub n_open: usize,
    /// Ever opened: one that ends at once must not be taken for one that was never opened.
    pub n_ever: usize,
}

/// Counts one open stream for as long as it lives.
struct OpenStream(watch::Sender<Streams>);

impl OpenStream {
    fn new(streams: watch::Sender<Streams>) -> Self {
        streams.send_modify(|streams| {
            streams.n_open += 1;
            streams.n_ever += 1;
        });
        Self(streams)
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.0
            .send_modify(|streams| streams.n_open = streams.n_open.saturating_sub(1));
    }
}

/// What a list is made of: which virtual devices there are of each device, and what is said of it.
type Contents = Vec<Entry>;

/// The virtual devices of one device.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    ids: NumberedIds,
    is_healthy: bool,
    /// The NUMA node that kubelet is told.
    numa_node: Option<i32>,
}

/// One stream of device lists.
struct Listing {
    resource: ExtendedResource,
    fleet: watch::Receiver<Arc<Fleet>>,
    injection: watch::Receiver<Option<Injection>>,
    /// None for a resource of which the same list is never sent again: one of them is enough for kubelet to write its checkpoint.
    list_again: Option<watch::Receiver<()>>,
    stop: CancellationToken,
    /// What the list that was sent last was made of.
    sent: Option<Contents>,
    _open: OpenStream,
}

impl Listing {
    /// The list at once, and again whenever it has become another; the end when the service is stopped.
    async fn next(mut self) -> Option<(Result<ListAndWatchResponse, Status>, Self)> {
        let list = loop {
            let device_type = self.resource.device_type();
            let is_injectable = self
                .injection
                .borrow_and_update()
                .as_ref()
                .is_none_or(|injection| injection.is_possible_for(device_type));
            let contents = contents(&self.fleet.borrow_and_update(), self.resource, is_injectable);
            if self.sent.as_ref() != Some(&contents) {
                let list = list_of(&contents);
                self.sent = Some(contents);
                break list;
            }
            tokio::select! {
                // A service that ends because its devices are gone says so first.
                biased;
                changed = self.fleet.changed() => changed.ok()?,
                // Where nothing decides any more, the last decision stands.
                Ok(()) = self.injection.changed() => {}
                () = asked_again(&mut self.list_again) => self.sent = None,
                () = self.stop.cancelled() => return None,
            }
        };
        debug!(resource = ?self.resource, n_devices = list.devices.len(), "sending the device list");
        Some((Ok(list), self))
    }
}

/// Waits until the same list is to be sent again.
async fn asked_again(list_again: &mut Option<watch::Receiver<()>>) {
    if let Some(list_again) = list_again
        && list_again.changed().await.is_ok()
    {
        return;
    }
    std::future::pending::<()>().await;
}

/// A device that no container can get is as good as a sick one.
fn contents(fleet: &Fleet, resource: ExtendedResource, is_injectable: bool) -> Contents {
    let states = fleet
        .entries(resource.device_type())
        .map(|entry| (entry.key.id, (entry.is_healthy, entry.numa_node)));
    let states: BTreeMap<PhysicalId, (bool, Option<i32>)> = states.collect();
    let is_told = |node: &i32| fleet.ids.tells_numa_nodes() && NUMA_NODES.contains(node);
    let entry = |numbered: Numbered<'_>| {
        let (is_healthy, numa_node) = states.get(numbered.device).copied().unwrap_or_default();
        Entry {
            ids: numbered.ids,
            is_healthy: is_healthy && is_injectable,
            numa_node: numa_node.filter(is_told),
        }
    };
    fleet.ids.numbered(resource).map(entry).collect()
}

/// All virtual devices of a resource.
pub fn list(fleet: &Fleet, resource: ExtendedResource) -> ListAndWatchResponse {
    list_of(&contents(fleet, resource, true))
}

fn list_of(contents: &Contents) -> ListAndWatchResponse {
    let of_device = |entry: &Entry| {
        let health = if entry.is_healthy { HEALTHY } else { UNHEALTHY };
        let topology = entry.numa_node.map(|id| TopologyInfo {
            nodes: vec![NumaNode { id: i64::from(id) }],
        });
        let device = move |id| Device {
            id,
            health: health.to_owned(),
            topology: topology.clone(),
        };
        entry.ids.iter().map(device).collect::<Vec<_>>()
    };
    ListAndWatchResponse {
        devices: contents.iter().flat_map(of_device).collect(),
    }
}

#[tonic::async_trait]
impl DevicePlugin for DeviceService {
    type ListAndWatchStream = Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(OPTIONS))
    }

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let listing = Listing {
            resource: self.resource,
            fleet: self.node.fleet.clone(),
            injection: self.node.injection.clone(),
            // The shortest of the lists that every node has.
            list_again: (self.resource == ExtendedResource::Shared).then(|| self.node.list_again.subscribe()),
            stop: self.stop.clone(),
            sent: None,
            _open: OpenStream::new(self.streams.clone()),
        };
        Ok(Response::new(Box::pin(stream::unfold(listing, Listing::next))))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let _call = self.node.begin_call();
        let mut container_responses = Vec::new();
        for request in &request.into_inner().container_requests {
            container_responses.push(self.node.prefer(self.resource, request).await);
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
            container_responses.push(self.node.allocate(self.resource, request).await);
        }
        if let Some(gate) = self.node.gate.get() {
            gate.metrics().allocated(began.elapsed());
        }
        Ok(Response::new(AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        request: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        if let Some(gate) = self.node.gate.get() {
            let opened = gate
                .open(&self.node, self.resource, request.into_inner().device_ids)
                .await;
            opened.map_err(|held| Status::failed_precondition(daemon::api_server::one_line(&held)))?;
        }
        Ok(Response::new(PreStartContainerResponse {}))
    }
}

#[cfg(test)]
mod tests {
    use prost::Message;
    use proto::memory_unit::MemoryUnit;

    use super::*;
    use crate::builders;
    use crate::inventory::{Inventory, PciLocation};
    use crate::plugin::ids::IdScheme;

    /// Two GPUs and an adapter, on the NUMA nodes 1, none that is known, and 0.
    fn fleet(tells_numa_nodes: bool) -> Fleet {
        let at = |numa_node| PciLocation {
            numa_node,
            ..PciLocation::default()
        };
        let mut gpus = vec![builders::gpu(0), builders::gpu(1)];
        gpus[0].location = at(Some(1));
        let mut adapter = builders::adapter(3);
        adapter.location = at(Some(0));
        let ids = IdScheme::telling(tells_numa_nodes, &gpus, 2, MemoryUnit::GIB).unwrap();
        Fleet::new(
            Inventory {
                gpus,
                others: vec![adapter],
                ..Inventory::default()
            },
            ids,
        )
    }

    /// On request only, of every resource, and within the size that was reckoned with.
    #[test]
    fn numa_nodes_are_told_on_request() {
        for resource in [
            ExtendedResource::Shared,
            ExtendedResource::Memory,
            ExtendedResource::Whole,
            ExtendedResource::Rdma,
        ] {
            let nodes = |fleet: &Fleet| {
                let list = list(fleet, resource).devices;
                let mut told: Vec<_> = list
                    .into_iter()
                    .map(|device| device.topology.map(|topology| topology.nodes[0].id))
                    .collect();
                told.dedup();
                told
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
                (entry.is_healthy, entry.gpu.location.numa_node) = (false, Some(127));
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
