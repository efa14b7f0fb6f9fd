//! The connection to one device plugin, and kubelet's calls over it.
//!
//! As in kubelet, `Allocate` and `GetPreferredAllocation` have no deadline, and a connection that is lost is
//! not made again: the plugin has to register again.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use parking_lot::Mutex;
use proto::kubelet::deviceplugin::device_plugin_client::DevicePluginClient;
use proto::kubelet::deviceplugin::{
    AllocateRequest, ContainerAllocateRequest, ContainerAllocateResponse,
    ContainerPreferredAllocationRequest, DevicePluginOptions, Empty, ListAndWatchResponse,
    PreStartContainerRequest, PreferredAllocationRequest,
};
use tokio::time::Instant;
use tonic::transport::Channel;
use tonic::{Status, Streaming};

use super::socket;

const DIAL_TIMEOUT: Duration = Duration::from_secs(10);
const PRE_START_TIMEOUT: Duration = Duration::from_secs(30);

/// The time from the loss of a plugin to the removal of its resource (`endpointStopGracePeriod`).
const GRACE: Duration = Duration::from_secs(5 * 60);

/// The error of a call to a plugin, in the words of grpc-go.
#[derive(Debug, thiserror::Error)]
#[error("rpc error: code = {} desc = {}", code_name(.0.code()), .0.message())]
struct RpcError(Status);

fn code_name(code: tonic::Code) -> String {
    match code {
        tonic::Code::Cancelled => "Canceled".to_owned(),
        code => format!("{code:?}"),
    }
}

/// The connection to one plugin, which has no client if only the checkpoint knows the resource.
#[derive(Debug)]
pub(crate) struct Endpoint {
    resource: String,
    client: Option<DevicePluginClient<Channel>>,
    options: DevicePluginOptions,
    /// Marks a plugin that is gone.
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
    pub(crate) async fn connect(resource: &str, socket: &Path) -> Result<Self> {
        let dialled = tokio::time::timeout(DIAL_TIMEOUT, dial_until_open(socket)).await;
        let path = socket.display();
        let channel = dialled
            .ok()
            .with_context(|| format!("failed to dial device plugin at {path}: context deadline exceeded"))?;
        let mut client =
            DevicePluginClient::new(channel).max_decoding_message_size(proto::kubelet::MAX_MESSAGE_BYTES);
        let options = client.get_device_plugin_options(Empty {}).await;
        let options = options
            .context("failed to get device plugin options")?
            .into_inner();
        Ok(Self {
            resource: resource.to_owned(),
            client: Some(client),
            options,
            stopped_at: Mutex::new(None),
        })
    }

    pub(crate) fn wants_pre_start(&self) -> bool {
        self.options.pre_start_required
    }

    pub(crate) fn stop(&self) {
        *self.stopped_at.lock() = Some(Instant::now());
    }

    /// The time at which the resource of a plugin that is gone is removed.
    pub(crate) fn expires_at(&self) -> Option<Instant> {
        self.stopped_at.lock().map(|at| at + GRACE)
    }

    pub(crate) async fn list_and_watch(&self) -> Result<Streaming<ListAndWatchResponse>> {
        let stream = self.live_client()?.list_and_watch(Empty {}).await;
        Ok(stream.map_err(RpcError)?.into_inner())
    }

    /// Calls the plugin's Allocate for one container; `None` if the answer has no container.
    pub(crate) async fn allocate(
        &self,
        device_ids: Vec<String>,
    ) -> Result<Option<ContainerAllocateResponse>> {
        let request = AllocateRequest {
            container_requests: vec![ContainerAllocateRequest { device_ids }],
        };
        let response = self.live_client()?.allocate(request).await.map_err(RpcError)?;
        Ok(response.into_inner().container_responses.into_iter().next())
    }

    /// Calls `GetPreferredAllocation`; empty if the plugin does not offer it.
    pub(crate) async fn preferred(
        &self,
        request: ContainerPreferredAllocationRequest,
    ) -> Result<Vec<String>> {
        if !self.options.get_preferred_allocation_available {
            return Ok(Vec::new());
        }
        let request = PreferredAllocationRequest {
            container_requests: vec![request],
        };
        let response = self.live_client()?.get_preferred_allocation(request).await;
        let mut containers = response
            .map_err(RpcError)?
            .into_inner()
            .container_responses
            .into_iter();
        Ok(containers.next().unwrap_or_default().device_ids)
    }

    /// Calls the plugin's `PreStartContainer`, and gives up after a deadline.
    pub(crate) async fn pre_start(&self, device_ids: Vec<String>) -> Result<()> {
        let mut client = self.live_client()?;
        let call = client.pre_start_container(PreStartContainerRequest { device_ids });
        let answer = tokio::time::timeout(PRE_START_TIMEOUT, call).await;
        let answer = answer.unwrap_or_else(|_| Err(Status::deadline_exceeded("context deadline exceeded")));
        answer.map_err(RpcError)?;
        Ok(())
    }

    fn live_client(&self) -> Result<DevicePluginClient<Channel>> {
        let client = self.client.clone().filter(|_| self.stopped_at.lock().is_none());
        client.with_context(|| format!("endpoint of {} has been stopped", self.resource))
    }
}

async fn dial_until_open(socket: &Path) -> Channel {
    loop {
        match socket::dial(socket).await {
            Ok(channel) => return channel,
            Err(error) => {
                tracing::debug!(socket = %socket.display(), %error, "plugin socket does not answer yet");
            }
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
