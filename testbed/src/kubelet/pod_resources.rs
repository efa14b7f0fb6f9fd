//! The pod-resources v1 service: which container holds which devices, by device plugins and by claims.
//!
//! Lists active pods and no ordinary init containers; has one entry per device, and no UID.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use proto::kubelet::podresources::pod_resources_lister_server::PodResourcesLister;
use proto::kubelet::podresources::{
    AllocatableResourcesRequest, AllocatableResourcesResponse, ContainerDevices, ContainerResources,
    GetPodResourcesRequest, GetPodResourcesResponse, ListPodResourcesRequest, ListPodResourcesResponse,
    NumaNode, PodResources, TopologyInfo,
};
use tonic::{Request, Response, Status};

use super::claims::Claims;
use super::devices::Devices;
use super::held::Holder;
use super::pod::{ContainerKind, PodSpec};
use super::process::Process;
use super::rate_limit::RateLimit;

/// pod-resources/kubelet.sock.
#[derive(Debug)]
pub(crate) struct PodResourcesService {
    pub(crate) process: Arc<Process>,
    pub(crate) limit: RateLimit,
}

impl PodResourcesService {
    fn admit_call(&self) -> Result<(), Status> {
        if self.limit.allow() {
            Ok(())
        } else {
            Err(Status::resource_exhausted("rejected by rate limit"))
        }
    }
}

#[tonic::async_trait]
impl PodResourcesLister for PodResourcesService {
    async fn list(
        &self,
        _: Request<ListPodResourcesRequest>,
    ) -> Result<Response<ListPodResourcesResponse>, Status> {
        self.process.counts.lists.fetch_add(1, Ordering::AcqRel);
        self.admit_call()?;
        let active: Vec<Arc<PodSpec>> = self.process.pods().active().cloned().collect();
        self.process.free_ended();
        let devices = self.process.devices();
        let pod_resources = active
            .iter()
            .map(|pod| of_pod(&devices, &self.process.claims, pod))
            .collect();
        Ok(Response::new(ListPodResourcesResponse { pod_resources }))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<AllocatableResourcesRequest>,
    ) -> Result<Response<AllocatableResourcesResponse>, Status> {
        self.admit_call()?;
        let devices = self.process.devices();
        let entry = |resource: &String, id: &String| one_device(&devices, resource, id);
        let registered = devices.registered();
        let devices = registered
            .iter()
            .flat_map(|(resource, ids)| ids.iter().map(move |id| entry(resource, id)))
            .collect();
        Ok(Response::new(AllocatableResourcesResponse {
            devices,
            ..AllocatableResourcesResponse::default()
        }))
    }

    async fn get(
        &self,
        request: Request<GetPodResourcesRequest>,
    ) -> Result<Response<GetPodResourcesResponse>, Status> {
        self.admit_call()?;
        let GetPodResourcesRequest {
            pod_name,
            pod_namespace,
        } = request.into_inner();
        let pod = self
            .process
            .pods()
            .find_active(&pod_namespace, &pod_name)
            .cloned();
        let missing = || Status::unknown(format!("pod {pod_name} in namespace {pod_namespace} not found"));
        let pod = pod.ok_or_else(missing)?;
        let pod_resources = Some(of_pod(&self.process.devices(), &self.process.claims, &pod));
        Ok(Response::new(GetPodResourcesResponse { pod_resources }))
    }
}

fn of_pod(devices: &Devices, claims: &Claims, pod: &PodSpec) -> PodResources {
    let listed = pod
        .containers
        .iter()
        .filter(|container| container.kind != ContainerKind::Init);
    let containers = listed.map(|container| {
        let holder = Holder {
            pod: pod.uid.clone(),
            container: container.name.clone(),
        };
        let grants = devices.held().of(&holder).flat_map(|(resource, grant)| {
            grant
                .devices()
                .into_iter()
                .map(|id| one_device(devices, resource, &id))
                .collect::<Vec<_>>()
        });
        ContainerResources {
            name: container.name.clone(),
            devices: grants.collect(),
            dynamic_resources: claims.of(pod, container),
            ..ContainerResources::default()
        }
    });
    PodResources {
        name: pod.name.clone(),
        namespace: pod.namespace.clone(),
        containers: containers.collect(),
    }
}

fn one_device(devices: &Devices, resource: &str, id: &str) -> ContainerDevices {
    let topology = devices.topology(resource, id);
    let nodes = topology.map(|topology| TopologyInfo {
        nodes: topology
            .nodes
            .iter()
            .map(|node| NumaNode { id: node.id })
            .collect(),
    });
    ContainerDevices {
        resource_name: resource.to_owned(),
        device_ids: vec![id.to_owned()],
        topology: nodes,
    }
}
