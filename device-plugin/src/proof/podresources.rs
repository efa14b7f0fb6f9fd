//! kubelet's pod-resources API: which pod's container holds which device IDs.
//!
//! Asked only before a container starts, never while kubelet allocates: there a question can make kubelet forget the IDs
//! that it is about to hand out.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use proto::kubelet::podresources::pod_resources_lister_client::PodResourcesListerClient;
use proto::kubelet::podresources::{ListPodResourcesRequest, ListPodResourcesResponse};
use tokio::net::UnixStream;
use tokio::time::{sleep, timeout};
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Response, Status};

use crate::extended_resource::{ExtendedResource, ExtendedResourceNames};

/// How long one answer may take, the connection included.
const LIMIT: Duration = Duration::from_secs(5);

/// kubelet lists every device ID of every pod of the node in one message.
const MAX_BYTES: usize = 64 << 20;

/// Pauses before asking again when kubelet answers that it is asked too often.
const PAUSES: [Duration; 3] = [
    Duration::from_millis(50),
    Duration::from_millis(200),
    Duration::from_millis(500),
];

/// The devices of one resource of one container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod; there is no UID.
    pub pod: String,
    /// The resource.
    pub resource: ExtendedResource,
    /// The device IDs, sorted.
    pub ids: Vec<String>,
}

/// kubelet cannot be asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("kubelet does not say which pod this is for ({}): {problem}", socket.display())]
pub struct PodResourcesError {
    socket: PathBuf,
    problem: String,
}

/// A connection to kubelet that lasts as long as kubelet does.
#[derive(Debug)]
pub struct Lister {
    socket: PathBuf,
    client: Mutex<Option<PodResourcesListerClient<Channel>>>,
}

impl Lister {
    /// Asks over this socket.
    pub fn new(socket: PathBuf) -> Self {
        Self {
            socket,
            client: Mutex::new(None),
        }
    }

    /// Asks kubelet for the devices of every container, app containers and sidecars only.
    ///
    /// # Errors
    /// It cannot be reached, refuses, or takes too long.
    pub async fn list(&self, names: &ExtendedResourceNames) -> Result<Vec<Listed>, PodResourcesError> {
        let fail = |problem: String| PodResourcesError {
            socket: self.socket.clone(),
            problem,
        };
        let mut pauses = PAUSES.iter();
        loop {
            let answer = timeout(LIMIT, self.ask())
                .await
                .unwrap_or_else(|_| Err(Status::deadline_exceeded(format!("no answer within {LIMIT:?}"))));
            match answer {
                Ok(response) => return Ok(of_response(&response, names)),
                Err(status) if is_too_often(&status) => match pauses.next() {
                    Some(pause) => sleep(*pause).await,
                    None => return Err(fail(status.message().to_owned())),
                },
                Err(status) => {
                    self.keep(None);
                    return Err(fail(status.message().to_owned()));
                }
            }
        }
    }

    /// Over the connection that there is; over a new one if there is none, or kubelet has gone since.
    async fn ask(&self) -> Result<ListPodResourcesResponse, Status> {
        let kept = self.client.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(mut client) = kept {
            let answer = client.list(ListPodResourcesRequest {}).await;
            if answer.as_ref().is_ok() || answer.as_ref().is_err_and(is_too_often) {
                return answer.map(Response::into_inner);
            }
        }
        let mut client = connect(&self.socket).await?;
        let answer = client.list(ListPodResourcesRequest {}).await?;
        self.keep(Some(client));
        Ok(answer.into_inner())
    }

    fn keep(&self, client: Option<PodResourcesListerClient<Channel>>) {
        *self.client.lock().unwrap_or_else(PoisonError::into_inner) = client;
    }
}

fn is_too_often(status: &Status) -> bool {
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
    let channel = channel.map_err(|error| Status::unavailable(daemon::api_server::one_line(&error)))?;
    Ok(PodResourcesListerClient::new(channel).max_decoding_message_size(MAX_BYTES))
}

/// kubelet has one entry per device or NUMA node.
fn of_response(response: &ListPodResourcesResponse, names: &ExtendedResourceNames) -> Vec<Listed> {
    let mut listed = Vec::new();
    for pod in &response.pod_resources {
        for container in &pod.containers {
            for resource in ExtendedResource::ALL {
                let own = container
                    .devices
                    .iter()
                    .filter(|devices| names.of(resource) == Some(devices.resource_name.as_str()));
                let mut ids: Vec<String> = own
                    .flat_map(|devices| devices.device_ids.iter().cloned())
                    .collect();
                ids.sort_unstable();
                if !ids.is_empty() {
                    listed.push(Listed {
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
