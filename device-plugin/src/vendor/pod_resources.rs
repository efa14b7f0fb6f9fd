//! kubelet's pod-resources API: which devices the containers of its pods hold.
//!
//! Ordinary init containers are not in it; their devices are those of the containers that follow them.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use proto::kubelet::podresources::pod_resources_lister_client::PodResourcesListerClient;
use proto::kubelet::podresources::{ContainerResources, ListPodResourcesRequest, ListPodResourcesResponse, PodResources};
use tokio::net::UnixStream;
use tokio::time::timeout;
use tonic::Code;
use tonic::transport::Endpoint;

use super::{Allocation, PodName};

/// How long kubelet may take: it answers one question at a time.
const LIMIT: Duration = Duration::from_secs(10);

/// Longest answer that is taken. Every device ID of every container is in it, those of memory units too.
const MAX_ANSWER_BYTES: usize = 32 << 20;

/// Why kubelet has not told.
#[derive(Debug, thiserror::Error)]
pub enum PodResourcesError {
    /// It has no such API.
    #[error("there is no pod-resources API")]
    Absent,
    /// Its socket takes no connection.
    #[error("no connection")]
    Connect(#[source] tonic::transport::Error),
    /// It refuses to tell.
    #[error("kubelet does not tell")]
    Refused(#[source] Box<tonic::Status>),
    /// It says nothing.
    #[error("no answer within {LIMIT:?}")]
    Silent,
}

/// What the containers of kubelet's pods hold.
pub(super) async fn list(socket: &Path) -> Result<Vec<Allocation>, PodResourcesError> {
    if socket.try_exists().is_ok_and(|exists| !exists) {
        return Err(PodResourcesError::Absent);
    }
    let answer = timeout(LIMIT, ask(socket)).await.map_err(|_| PodResourcesError::Silent)??;
    Ok(answer.pod_resources.into_iter().flat_map(of_pod).collect())
}

async fn ask(socket: &Path) -> Result<ListPodResourcesResponse, PodResourcesError> {
    let path = socket.to_owned();
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { Ok::<_, io::Error>(TokioIo::new(UnixStream::connect(path).await?)) }
    });
    // The address is not looked at; the host name is what Go sends.
    let endpoint = Endpoint::from_static("http://localhost");
    let channel = endpoint.connect_with_connector(connector).await.map_err(PodResourcesError::Connect)?;
    let mut client = PodResourcesListerClient::new(channel).max_decoding_message_size(MAX_ANSWER_BYTES);
    let answer = client.list(ListPodResourcesRequest {}).await.map_err(|status| match status.code() {
        Code::Unimplemented => PodResourcesError::Absent,
        _ => PodResourcesError::Refused(Box::new(status)),
    })?;
    Ok(answer.into_inner())
}

fn of_pod(pod: PodResources) -> impl Iterator<Item = Allocation> {
    let PodResources { name, namespace, containers } = pod;
    containers.into_iter().flat_map(move |container| of_container(&namespace, &name, container))
}

/// One resource may come in several parts, one for each NUMA node.
fn of_container(namespace: &str, name: &str, container: ContainerResources) -> Vec<Allocation> {
    let mut by_resource = BTreeMap::<String, Vec<String>>::new();
    for devices in container.devices {
        by_resource.entry(devices.resource_name).or_default().extend(devices.device_ids);
    }
    let allocation = |(resource, device_ids)| Allocation {
        pod: PodName::Named { namespace: namespace.to_owned(), name: name.to_owned() },
        container: container.name.clone(),
        resource,
        device_ids,
        is_by_record: false,
    };
    by_resource.into_iter().map(allocation).collect()
}
