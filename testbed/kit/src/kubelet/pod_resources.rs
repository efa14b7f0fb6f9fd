//! The pod-resources v1 service: the devices of each container, from device plugins and from claims. Only List is modelled.
//!
//! As in kubelet, it lists active pods without their ordinary init containers, has one entry per device, and
//! shows no UID of pods.

use std::sync::Arc;

use parking_lot::Mutex;
use proto::kubelet::podresources::pod_resources_lister_server::PodResourcesLister;
use proto::kubelet::podresources::{
    AllocatableResourcesRequest, AllocatableResourcesResponse, ContainerDevices, ContainerResources,
    GetPodResourcesRequest, GetPodResourcesResponse, ListPodResourcesRequest, ListPodResourcesResponse,
    NumaNode, PodResources, TopologyInfo,
};
use tokio::time::Instant;
use tonic::{Request, Response, Status};

use super::claims::PreparedClaims;
use super::device_manager::DeviceManager;
use super::devices::{DeviceHolder, DeviceManagerState};
use super::pod::{ContainerType, KubeletPod};
use super::run::KubeletRun;

/// The service of `pod-resources/kubelet.sock`.
#[derive(Debug)]
pub(crate) struct PodResourcesService {
    run: Arc<KubeletRun>,
    devices: Arc<DeviceManager>,
    limit: RateLimit,
}

impl PodResourcesService {
    pub(crate) fn new(run: &Arc<KubeletRun>, devices: &Arc<DeviceManager>) -> Self {
        Self {
            run: Arc::clone(run),
            devices: Arc::clone(devices),
            limit: RateLimit::full(),
        }
    }
}

#[tonic::async_trait]
impl PodResourcesLister for PodResourcesService {
    async fn list(
        &self,
        _: Request<ListPodResourcesRequest>,
    ) -> Result<Response<ListPodResourcesResponse>, Status> {
        self.run.machine.counts.lock().lists += 1;
        if !self.limit.allow() {
            return Err(Status::resource_exhausted("rejected by rate limit"));
        }
        // List frees the devices of ended pods first (UpdateAllocatedDevices), so a caller never sees them.
        let active: Vec<Arc<KubeletPod>> = self.run.pods.lock().active().cloned().collect();
        self.devices.free_ended();
        let devices = self.devices.lock();
        let pod_resources = active
            .iter()
            .map(|pod| devices_of_pod(&devices, &self.run.machine.claims, pod))
            .collect();
        Ok(Response::new(ListPodResourcesResponse { pod_resources }))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<AllocatableResourcesRequest>,
    ) -> Result<Response<AllocatableResourcesResponse>, Status> {
        Err(Status::unimplemented("not modelled"))
    }

    async fn get(
        &self,
        _: Request<GetPodResourcesRequest>,
    ) -> Result<Response<GetPodResourcesResponse>, Status> {
        Err(Status::unimplemented("not modelled"))
    }
}

fn devices_of_pod(devices: &DeviceManagerState, claims: &PreparedClaims, pod: &KubeletPod) -> PodResources {
    let mut containers = Vec::new();
    for container in &pod.containers {
        // kubelet leaves out ordinary init containers, as they have ended before the pod runs.
        if container.kind == ContainerType::Init {
            continue;
        }
        let mut listed = Vec::new();
        for (resource, grant) in devices.held().of(&DeviceHolder::new(pod, container)) {
            for id in grant.device_ids() {
                listed.push(one_device(devices, resource, id));
            }
        }
        containers.push(ContainerResources {
            name: container.name.clone(),
            devices: listed,
            dynamic_resources: claims.of(pod, container),
            ..ContainerResources::default()
        });
    }
    PodResources {
        name: pod.name.clone(),
        namespace: pod.namespace.clone(),
        containers,
    }
}

fn one_device(devices: &DeviceManagerState, resource: &str, id: String) -> ContainerDevices {
    let topology = devices.topology(resource, &id).map(|topology| TopologyInfo {
        nodes: topology
            .nodes
            .iter()
            .map(|node| NumaNode { id: node.id })
            .collect(),
    });
    ContainerDevices {
        resource_name: resource.to_owned(),
        device_ids: vec![id],
        topology,
    }
}

/// Calls per second that kubelet answers.
const PER_SECOND: f64 = 100.0;
/// Calls that kubelet answers at once after a pause.
const BURST: f64 = 10.0;

/// kubelet's token bucket: the tokens, and the time at which they were counted.
#[derive(Debug)]
pub(crate) struct RateLimit(Mutex<(f64, Instant)>);

impl RateLimit {
    pub(crate) fn full() -> Self {
        Self(Mutex::new((BURST, Instant::now())))
    }

    /// Returns true if a call may be answered now; it then uses up one of the limit's tokens.
    pub(crate) fn allow(&self) -> bool {
        let mut bucket = self.0.lock();
        let (tokens, filled) = *bucket;
        let now = Instant::now();
        let tokens = (tokens + now.duration_since(filled).as_secs_f64() * PER_SECOND).min(BURST);
        let allowed = tokens >= 1.0;
        *bucket = (if allowed { tokens - 1.0 } else { tokens }, now);
        allowed
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::RateLimit;

    #[tokio::test(start_paused = true)]
    async fn calls_are_limited_to_a_burst_of_ten_and_a_hundred_per_second() {
        let limit = RateLimit::full();
        assert_eq!((0..15).filter(|_| limit.allow()).count(), 10);
        tokio::time::advance(Duration::from_millis(35)).await;
        assert_eq!((0..15).filter(|_| limit.allow()).count(), 3);
        tokio::time::advance(Duration::from_secs(60)).await;
        assert_eq!((0..15).filter(|_| limit.allow()).count(), 10);
    }
}
