//! A model of a vendor's device plugin: it offers whole GPUs under the vendor's resource name, among which
//! kubelet chooses.
//!
//! It models NVIDIA's plugin with `deviceIDStrategy=uuid` and `deviceListStrategy=envvar`, by its code; it is
//! not compared with recordings. Each GPU has one ID, the environment names the UUIDs, and no preference steers
//! kubelet. The real plugin registers again when kubelet restarts; here a test starts another one.

use std::path::Path;
use std::pin::Pin;

use anyhow::{Context, Result};
use futures::{Stream, StreamExt, stream};
use proto::kubelet::deviceplugin::device_plugin_server::{DevicePlugin, DevicePluginServer};
use proto::kubelet::deviceplugin::registration_client::RegistrationClient;
use proto::kubelet::deviceplugin::{
    AllocateRequest, AllocateResponse, ContainerAllocateResponse, Device, DevicePluginOptions, Empty,
    ListAndWatchResponse, PreStartContainerRequest, PreStartContainerResponse, PreferredAllocationRequest,
    PreferredAllocationResponse, RegisterRequest,
};
use proto::kubelet::{DEVICE_PLUGIN_VERSION, HEALTHY};
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::AbortOnDropHandle;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use crate::kubelet::nvidia_runtime::VISIBLE_DEVICES;
use crate::kubelet::socket;

/// The resource that NVIDIA's plugin serves.
pub const NVIDIA_GPU: &str = "nvidia.com/gpu";

/// A running stand-in; dropping it ends it as a crash would.
#[derive(Debug)]
pub struct VendorPlugin {
    _serving: AbortOnDropHandle<()>,
    /// Ends the connections, which outlive their listener.
    _connections: DropGuard,
}

impl VendorPlugin {
    /// Serves these GPUs to the kubelet of `plugin_dir`, and registers.
    pub async fn start(plugin_dir: &Path, resource: &str, uuids: Vec<String>) -> Result<Self> {
        let socket = plugin_dir.join(socket_name(resource));
        // An earlier plugin may have left its socket behind.
        let _ = std::fs::remove_file(&socket);
        let listener =
            UnixListener::bind(&socket).with_context(|| format!("cannot listen on {}", socket.display()))?;
        let ended = CancellationToken::new();
        let server = Server::builder().add_service(DevicePluginServer::new(WholeGpus {
            uuids,
            ended: ended.clone(),
        }));
        let serving = tokio::spawn(async move {
            if let Err(error) = server
                .serve_with_incoming(UnixListenerStream::new(listener))
                .await
            {
                tracing::error!(%error, "the vendor's plugin cannot serve");
            }
        });
        let plugin = Self {
            _serving: AbortOnDropHandle::new(serving),
            _connections: ended.drop_guard(),
        };
        register(plugin_dir, resource).await?;
        Ok(plugin)
    }
}

async fn register(plugin_dir: &Path, resource: &str) -> Result<()> {
    let kubelet = socket::dial(&plugin_dir.join("kubelet.sock")).await;
    let channel = kubelet.context("no kubelet answers")?;
    let request = RegisterRequest {
        version: DEVICE_PLUGIN_VERSION.to_owned(),
        endpoint: socket_name(resource),
        resource_name: resource.to_owned(),
        options: Some(DevicePluginOptions::default()),
    };
    let registered = RegistrationClient::new(channel).register(request).await;
    registered
        .map(drop)
        .with_context(|| format!("kubelet refuses {resource}"))
}

fn socket_name(resource: &str) -> String {
    format!("vendor-{}.sock", resource.replace('/', "-"))
}

#[derive(Debug)]
struct WholeGpus {
    uuids: Vec<String>,
    ended: CancellationToken,
}

#[tonic::async_trait]
impl DevicePlugin for WholeGpus {
    type ListAndWatchStream = Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(DevicePluginOptions::default()))
    }

    /// Lists all GPUs once as healthy; the stream stays open until the plugin ends.
    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let mut devices = Vec::new();
        for uuid in &self.uuids {
            devices.push(Device {
                id: uuid.clone(),
                health: HEALTHY.to_owned(),
                topology: None,
            });
        }
        let list = ListAndWatchResponse { devices };
        let lasting = stream::once(async { Ok(list) })
            .chain(stream::pending())
            .take_until(self.ended.clone().cancelled_owned());
        Ok(Response::new(Box::pin(lasting)))
    }

    async fn get_preferred_allocation(
        &self,
        _: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        Err(Status::unimplemented("this plugin has no preference"))
    }

    /// Answers with the variable that names the UUIDs to NVIDIA's runtime.
    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let mut container_responses = Vec::new();
        for container in request.into_inner().container_requests {
            if let Some(unknown) = container.device_ids.iter().find(|id| !self.uuids.contains(id)) {
                return Err(Status::unknown(format!(
                    "invalid allocation request for '{NVIDIA_GPU}': unknown device: {unknown}"
                )));
            }
            let envs = [(VISIBLE_DEVICES.to_owned(), container.device_ids.join(","))].into();
            container_responses.push(ContainerAllocateResponse {
                envs,
                ..ContainerAllocateResponse::default()
            });
        }
        Ok(Response::new(AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        _: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        Ok(Response::new(PreStartContainerResponse {}))
    }
}
