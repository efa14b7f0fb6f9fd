//! The connection to one device plugin, and kubelet's calls over it.
//!
//! As in kubelet, `Allocate` and `GetPreferredAllocation` have no deadline, and a connection that is lost is
//! not made again: the plugin has to register again.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use proto::kubelet::deviceplugin::device_plugin_client::DevicePluginClient;
use proto::kubelet::deviceplugin::{
    AllocateRequest, ContainerAllocateRequest, ContainerAllocateResponse,
    ContainerPreferredAllocationRequest, DevicePluginOptions, Empty, ListAndWatchResponse,
    PreStartContainerRequest, PreferredAllocationRequest,
};
use tokio::net::UnixStream;
use tokio::time::Instant;
use tonic::transport::Channel;
use tonic::{Status, Streaming};

/// The deadline of the connection to a plugin's socket.
const DIAL_TIMEOUT: Duration = Duration::from_secs(10);
/// The deadline of one `PreStartContainer` call.
const PRE_START_TIMEOUT: Duration = Duration::from_secs(30);

/// The error of a registration whose plugin cannot be reached.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectError {
    #[error("failed to dial device plugin at {}: context deadline exceeded", .0.display())]
    Deadline(PathBuf),
    #[error("failed to get device plugin options: {0}")]
    Options(Status),
}

/// The error of a call to a plugin.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EndpointError {
    #[error("no containers return in allocation response")]
    EmptyAnswer,
    #[error("endpoint of {0} has been stopped")]
    Stopped(String),
    #[error("rpc error: code = {} desc = {}", code_name(.0.code()), .0.message())]
    Rpc(Status),
}

/// The name that grpc-go gives a code.
fn code_name(code: tonic::Code) -> String {
    match code {
        tonic::Code::Cancelled => "Canceled".to_owned(),
        code => format!("{code:?}"),
    }
}

/// The connection to one plugin. It has no client if only the checkpoint knows the resource; `stopped_at` marks a plugin that is
/// gone.
#[derive(Debug)]
pub(crate) struct Endpoint {
    resource: String,
    client: Option<DevicePluginClient<Channel>>,
    options: DevicePluginOptions,
    stopped_at: Mutex<Option<Instant>>,
}

impl Endpoint {
    /// An endpoint for a resource that only the checkpoint knows.
    pub(crate) fn stopped(resource: &str) -> Self {
        Self {
            resource: resource.to_owned(),
            client: None,
            options: DevicePluginOptions::default(),
            stopped_at: Mutex::new(Some(Instant::now())),
        }
    }

    /// Dials a plugin's socket, then asks for the plugin's options.
    pub(crate) async fn connect(resource: &str, socket: &Path) -> Result<Self, ConnectError> {
        let dialled = tokio::time::timeout(DIAL_TIMEOUT, dial_until_open(socket)).await;
        let channel = dialled.map_err(|_| ConnectError::Deadline(socket.to_owned()))?;
        let mut client =
            DevicePluginClient::new(channel).max_decoding_message_size(proto::kubelet::MAX_MESSAGE_BYTES);
        let options = client.get_device_plugin_options(Empty {}).await;
        let options = options.map_err(ConnectError::Options)?.into_inner();
        Ok(Self {
            resource: resource.to_owned(),
            client: Some(client),
            options,
            stopped_at: Mutex::new(None),
        })
    }

    /// Returns true if the plugin has asked for `PreStartContainer` calls.
    pub(crate) fn wants_pre_start(&self) -> bool {
        self.options.pre_start_required
    }

    /// Marks the plugin as gone from now on.
    pub(crate) fn stop(&self) {
        *self.stopped_at.lock() = Some(Instant::now());
    }

    pub(crate) fn stopped_at(&self) -> Option<Instant> {
        *self.stopped_at.lock()
    }

    /// Returns true if the plugin has been gone for `grace`.
    pub(crate) fn grace_expired(&self, grace: Duration) -> bool {
        self.stopped_at().is_some_and(|at| at.elapsed() >= grace)
    }

    pub(crate) async fn list_and_watch(&self) -> Result<Streaming<ListAndWatchResponse>, EndpointError> {
        let mut client = self.live_client()?;
        let stream = client.list_and_watch(Empty {}).await;
        Ok(stream.map_err(EndpointError::Rpc)?.into_inner())
    }

    /// Calls the plugin's Allocate for one container.
    pub(crate) async fn allocate(
        &self,
        device_ids: Vec<String>,
    ) -> Result<ContainerAllocateResponse, EndpointError> {
        let mut client = self.live_client()?;
        let request = AllocateRequest {
            container_requests: vec![ContainerAllocateRequest { device_ids }],
        };
        let response = client.allocate(request).await.map_err(EndpointError::Rpc)?;
        let mut containers = response.into_inner().container_responses.into_iter();
        containers.next().ok_or(EndpointError::EmptyAnswer)
    }

    /// Calls `GetPreferredAllocation`; empty if the plugin does not offer it.
    pub(crate) async fn preferred(
        &self,
        request: ContainerPreferredAllocationRequest,
    ) -> Result<Vec<String>, EndpointError> {
        if !self.options.get_preferred_allocation_available {
            return Ok(Vec::new());
        }
        let mut client = self.live_client()?;
        let request = PreferredAllocationRequest {
            container_requests: vec![request],
        };
        let response = client
            .get_preferred_allocation(request)
            .await
            .map_err(EndpointError::Rpc)?;
        let mut containers = response.into_inner().container_responses.into_iter();
        Ok(containers.next().unwrap_or_default().device_ids)
    }

    /// Calls the plugin's `PreStartContainer`, and gives up after a deadline.
    pub(crate) async fn pre_start(&self, device_ids: Vec<String>) -> Result<(), EndpointError> {
        let mut client = self.live_client()?;
        let call = client.pre_start_container(PreStartContainerRequest { device_ids });
        let late = |_| Status::deadline_exceeded("context deadline exceeded");
        let answered = tokio::time::timeout(PRE_START_TIMEOUT, call).await.map_err(late);
        answered.flatten().map(drop).map_err(EndpointError::Rpc)
    }

    /// The client of a plugin whose connection has not ended.
    fn live_client(&self) -> Result<DevicePluginClient<Channel>, EndpointError> {
        let stopped = || EndpointError::Stopped(self.resource.clone());
        if self.stopped_at().is_some() {
            Err(stopped())
        } else {
            self.client.clone().ok_or_else(stopped)
        }
    }
}

/// Dials the plugin's socket again and again until it answers.
async fn dial_until_open(socket: &Path) -> Channel {
    let path: Arc<Path> = Arc::from(socket);
    loop {
        let path = Arc::clone(&path);
        let connector = tower::service_fn(move |_| {
            let path = Arc::clone(&path);
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        });
        // A Unix socket has no host name; "localhost" is the authority that HTTP/2 servers accept.
        match tonic::transport::Endpoint::from_static("http://localhost")
            .connect_with_connector(connector)
            .await
        {
            Ok(channel) => return channel,
            Err(error) => {
                tracing::debug!(socket = %socket.display(), %error, "plugin socket does not answer yet");
            }
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
