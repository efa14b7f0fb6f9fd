//! A client of kubelet's pod-resources API, which lists the device IDs of each container.
//!
//! It is called only before a container starts, never while kubelet allocates: then a call can make kubelet forget the IDs of
//! the allocation under way.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use daemon::api_server::one_line;
use hyper_util::rt::TokioIo;
use proto::kubelet::podresources::pod_resources_lister_client::PodResourcesListerClient;
use proto::kubelet::podresources::{ListPodResourcesRequest, ListPodResourcesResponse};
use tokio::net::UnixStream;
use tokio::time::{sleep, timeout};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Response, Status};

use crate::extended_resource::{ExtendedResource, ExtendedResourceNames};

/// Longest duration of one call, the connection included.
const LIMIT: Duration = Duration::from_secs(5);

/// Longest message: kubelet lists every device ID of every pod of the node in one.
const MAX_BYTES: usize = 64 << 20;

/// Pauses before further tries when kubelet answers that its rate limit is reached.
const PAUSES: [Duration; 3] = [
    Duration::from_millis(50),
    Duration::from_millis(200),
    Duration::from_millis(500),
];

/// The devices of one resource of one container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedDevices {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod; the API has no UIDs.
    pub pod: String,
    /// The resource.
    pub resource: ExtendedResource,
    /// The device IDs, sorted.
    pub ids: Vec<String>,
}

/// kubelet has not listed the devices.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("kubelet's pod-resources API does not answer ({}): {problem}", socket.display())]
pub struct PodResourcesError {
    socket: PathBuf,
    problem: String,
}

/// The client, with a connection that lasts as long as kubelet does.
#[derive(Debug)]
pub struct PodResources {
    socket: PathBuf,
    client: Mutex<Option<PodResourcesListerClient<Channel>>>,
}

impl PodResources {
    /// A client of this socket.
    pub fn new(socket: PathBuf) -> Self {
        Self {
            socket,
            client: Mutex::new(None),
        }
    }

    /// Lists the devices of this plugin's resources that app containers and sidecars hold.
    ///
    /// # Errors
    /// kubelet cannot be reached, refuses, or takes too long.
    pub async fn list(&self, names: &ExtendedResourceNames) -> Result<Vec<ListedDevices>, PodResourcesError> {
        let fail = |problem: String| PodResourcesError {
            socket: self.socket.clone(),
            problem,
        };
        let mut pauses = PAUSES.iter();
        loop {
            let answer = timeout(LIMIT, self.call())
                .await
                .unwrap_or_else(|_| Err(Status::deadline_exceeded(format!("no answer within {LIMIT:?}"))));
            match answer {
                Ok(response) => return Ok(of_response(&response, names)),
                Err(status) if is_rate_limited(&status) => match pauses.next() {
                    Some(pause) => sleep(*pause).await,
                    None => return Err(fail(status.message().to_owned())),
                },
                Err(status) => {
                    self.set_client(None);
                    return Err(fail(status.message().to_owned()));
                }
            }
        }
    }

    /// Calls over the open connection, or over a new one if there is none or kubelet has restarted.
    async fn call(&self) -> Result<ListPodResourcesResponse, Status> {
        let kept = self.client.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(mut client) = kept {
            let answer = client.list(ListPodResourcesRequest {}).await;
            if answer.as_ref().is_ok() || answer.as_ref().is_err_and(is_rate_limited) {
                return answer.map(Response::into_inner);
            }
        }
        let mut client = connect(&self.socket).await?;
        let answer = client.list(ListPodResourcesRequest {}).await?;
        self.set_client(Some(client));
        Ok(answer.into_inner())
    }

    fn set_client(&self, client: Option<PodResourcesListerClient<Channel>>) {
        *self.client.lock().unwrap_or_else(PoisonError::into_inner) = client;
    }
}

fn is_rate_limited(status: &Status) -> bool {
    status.code() == Code::ResourceExhausted && status.message().contains("rate limit")
}

async fn connect(socket: &Path) -> Result<PodResourcesListerClient<Channel>, Status> {
    let path = socket.to_owned();
    let connect = tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    // The address is not used, its host becomes the authority that grpc-go expects.
    let channel = Endpoint::from_static("http://localhost")
        .connect_with_connector(connect)
        .await;
    let channel = channel.map_err(|error| Status::unavailable(one_line(&error)))?;
    Ok(PodResourcesListerClient::new(channel).max_decoding_message_size(MAX_BYTES))
}

/// Merges kubelet's entries, of which a container has one per device or NUMA node.
fn of_response(response: &ListPodResourcesResponse, names: &ExtendedResourceNames) -> Vec<ListedDevices> {
    let mut listed = Vec::new();
    for pod in &response.pod_resources {
        for container in &pod.containers {
            for resource in ExtendedResource::ALL {
                let mut ids = Vec::new();
                for devices in &container.devices {
                    if names.of(resource) == Some(devices.resource_name.as_str()) {
                        ids.extend(devices.device_ids.iter().cloned());
                    }
                }
                ids.sort_unstable();
                if !ids.is_empty() {
                    listed.push(ListedDevices {
                        namespace: pod.namespace.clone(),
                        pod: pod.name.clone(),
                        resource,
                        ids,
                    });
                }
            }
        }
    }
    listed
}
