//! A client of kubelet's pod-resources API, which lists the devices that containers hold by device plugins and by DRA drivers,
//! except those of ordinary init containers.
//!
//! A call can make kubelet forget the IDs of an allocation under way, for any plugin. So this plugin calls the API only before a
//! container starts, a while after a pod has changed, and once a minute.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use daemon::api_server::one_line;
use proto::kubelet::podresources::pod_resources_lister_client::PodResourcesListerClient;
use proto::kubelet::podresources::{ListPodResourcesRequest, ListPodResourcesResponse};
use tokio::time::{sleep, timeout};
use tonic::transport::Channel;
use tonic::{Code, Response, Status};

use crate::node::unix_channel::connect;

/// Longest duration of one call, the connection included.
const LIMIT: Duration = Duration::from_secs(5);

/// Longest message, in bytes: kubelet lists every device ID of every pod of the node in one message.
const MAX_BYTES: usize = 64 << 20;

/// Pauses before further tries after kubelet has answered that its rate limit is reached.
const PAUSES: [Duration; 3] = [
    Duration::from_millis(50),
    Duration::from_millis(200),
    Duration::from_millis(500),
];

/// kubelet did not list the devices: it cannot be reached, refuses, or takes too long.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("kubelet's pod-resources API does not answer ({}): {problem}", socket.display())]
pub struct PodResourcesError {
    socket: PathBuf,
    problem: String,
}

/// The socket of the API of the kubelet with this device plugin directory.
pub fn socket(device_plugin_dir: &Path) -> PathBuf {
    // kubelet keeps both directories below its root.
    let kubelet_root = device_plugin_dir.parent().unwrap_or(device_plugin_dir);
    kubelet_root.join("pod-resources/kubelet.sock")
}

/// The client of the pod-resources API. It keeps one connection, until kubelet restarts.
#[derive(Debug)]
pub struct PodResources {
    pub(crate) socket: PathBuf,
    client: Mutex<Option<PodResourcesListerClient<Channel>>>,
}

impl PodResources {
    pub(crate) fn new(socket: PathBuf) -> Self {
        Self {
            socket,
            client: Mutex::new(None),
        }
    }

    /// Lists the devices of all app containers and sidecars.
    pub(crate) async fn list(&self) -> Result<ListPodResourcesResponse, PodResourcesError> {
        let mut pauses = PAUSES.iter();
        loop {
            let answer = timeout(LIMIT, self.call()).await;
            let status = match answer {
                Ok(Ok(response)) => return Ok(response),
                Ok(Err(status)) => status,
                Err(_) => Status::deadline_exceeded(format!("no answer within {LIMIT:?}")),
            };
            // kubelet takes a hundred calls a second, and ten at once, from all programs of the node together.
            if is_rate_limited(&status)
                && let Some(pause) = pauses.next()
            {
                sleep(*pause).await;
                continue;
            }
            // The connection may be one to a kubelet that has ended.
            self.set_client(None);
            return Err(PodResourcesError {
                socket: self.socket.clone(),
                problem: status.message().to_owned(),
            });
        }
    }

    /// Calls over the kept connection, and over a new one if there is none or the call has failed.
    async fn call(&self) -> Result<ListPodResourcesResponse, Status> {
        // A clone shares the connection, and the lock must not be held during the call.
        let kept = self.client.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(mut client) = kept {
            let answer = client.list(ListPodResourcesRequest {}).await;
            if answer.is_ok() || answer.as_ref().is_err_and(is_rate_limited) {
                return answer.map(Response::into_inner);
            }
        }
        // kubelet may have restarted, so the call is tried over a new connection before it fails.
        let channel = connect(&self.socket).await;
        let channel = channel.map_err(|error| Status::unavailable(one_line(&error)))?;
        let mut client = PodResourcesListerClient::new(channel).max_decoding_message_size(MAX_BYTES);
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
