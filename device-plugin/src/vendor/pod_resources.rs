//! kubelet's pod-resources API: the devices that containers hold by device plugins and by DRA drivers.
//!
//! Ordinary init containers are not in it. The devices that plugins gave them are those of the containers that follow; a claim
//! that they alone use is not listed.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use proto::kubelet::podresources::pod_resources_lister_client::PodResourcesListerClient;
use proto::kubelet::podresources::{
    ContainerDevices, DynamicResource, ListPodResourcesRequest, ListPodResourcesResponse,
};
use tokio::net::UnixStream;
use tokio::time::timeout;
use tonic::Code;
use tonic::transport::Endpoint;

use super::allocation::{Allocation, ClaimName, DraDevice, PodName};
use super::claims::ClaimedDevice;

/// Longest time of one request: kubelet answers one at a time.
const LIMIT: Duration = Duration::from_secs(10);

/// Longest accepted answer. It has every device ID of every container, memory units included.
const MAX_ANSWER_BYTES: usize = 32 << 20;

/// The devices cannot be listed.
#[derive(Debug, thiserror::Error)]
pub enum PodResourcesError {
    /// kubelet has no such API.
    #[error("there is no pod-resources API")]
    Absent,
    /// Its socket accepts no connection.
    #[error("no connection")]
    Connect(#[source] tonic::transport::Error),
    /// kubelet answers with an error.
    #[error("kubelet answers with an error")]
    Refused(#[source] Box<tonic::Status>),
    /// kubelet does not answer in time.
    #[error("no answer within {LIMIT:?}")]
    Silent,
}

/// The devices of kubelet's containers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Listed {
    /// Devices of device plugins.
    pub(super) allocations: Vec<Allocation>,
    /// Devices of DRA drivers.
    pub(super) claimed: Vec<ClaimedDevice>,
}

/// Lists the devices of all containers.
pub(super) async fn list(socket: &Path) -> Result<Listed, PodResourcesError> {
    if socket.try_exists().is_ok_and(|exists| !exists) {
        return Err(PodResourcesError::Absent);
    }
    let answer = timeout(LIMIT, request(socket))
        .await
        .map_err(|_| PodResourcesError::Silent)??;
    Ok(Listed::from(answer))
}

async fn request(socket: &Path) -> Result<ListPodResourcesResponse, PodResourcesError> {
    let path = socket.to_owned();
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { Ok::<_, io::Error>(TokioIo::new(UnixStream::connect(path).await?)) }
    });
    // Nothing resolves the address; Go clients send this host name.
    let endpoint = Endpoint::from_static("http://localhost");
    let channel = endpoint
        .connect_with_connector(connector)
        .await
        .map_err(PodResourcesError::Connect)?;
    let mut client = PodResourcesListerClient::new(channel).max_decoding_message_size(MAX_ANSWER_BYTES);
    let answer = client
        .list(ListPodResourcesRequest {})
        .await
        .map_err(|status| match status.code() {
            Code::Unimplemented => PodResourcesError::Absent,
            _ => PodResourcesError::Refused(Box::new(status)),
        })?;
    Ok(answer.into_inner())
}

impl From<ListPodResourcesResponse> for Listed {
    fn from(answer: ListPodResourcesResponse) -> Self {
        let mut listed = Self::default();
        for pod in answer.pod_resources {
            let name = PodName::Named {
                namespace: pod.namespace,
                name: pod.name,
            };
            for container in pod.containers {
                listed
                    .allocations
                    .extend(of_plugins(&name, &container.name, container.devices));
                for claim in container.dynamic_resources {
                    listed.claimed.extend(of_claim(&name, &container.name, claim));
                }
            }
        }
        listed
    }
}

/// The devices of plugins. A resource may come in several parts, one for each NUMA node.
fn of_plugins(pod: &PodName, container: &str, devices: Vec<ContainerDevices>) -> Vec<Allocation> {
    let mut by_resource = BTreeMap::<String, Vec<String>>::new();
    for devices in devices {
        by_resource
            .entry(devices.resource_name)
            .or_default()
            .extend(devices.device_ids);
    }
    let mut allocations = Vec::new();
    for (resource, device_ids) in by_resource {
        allocations.push(Allocation {
            pod: pod.clone(),
            container: container.to_owned(),
            resource,
            device_ids,
            is_by_record: false,
            claim: None,
        });
    }
    allocations
}

/// All devices of a claim, whichever of its requests the container names.
fn of_claim(pod: &PodName, container: &str, resource: DynamicResource) -> Vec<ClaimedDevice> {
    let claim = ClaimName {
        namespace: resource.claim_namespace,
        name: resource.claim_name,
    };
    let mut claimed = Vec::new();
    for device in resource.claim_resources {
        let cdi_devices = device.cdi_devices.into_iter();
        claimed.push(ClaimedDevice {
            pod: pod.clone(),
            container: container.to_owned(),
            claim: claim.clone(),
            device: DraDevice {
                driver: device.driver_name,
                pool: device.pool_name,
                name: device.device_name,
            },
            cdi_names: cdi_devices.map(|device| device.name).collect(),
        });
    }
    claimed
}
