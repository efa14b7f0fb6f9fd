//! A scripted device plugin that serves on a real socket and remembers the calls of kubelet.

use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use futures::{Stream, StreamExt as _};
use hyper_util::rt::TokioIo;
use kit::kubelet::KubeletConfig;
use proto::kubelet::deviceplugin::device_plugin_server::{DevicePlugin, DevicePluginServer};
use proto::kubelet::deviceplugin::registration_client::RegistrationClient;
use proto::kubelet::deviceplugin::{
    AllocateRequest, AllocateResponse, ContainerAllocateResponse, ContainerPreferredAllocationResponse,
    Device, DevicePluginOptions, Empty, ListAndWatchResponse, PreStartContainerRequest,
    PreStartContainerResponse, PreferredAllocationRequest, PreferredAllocationResponse, RegisterRequest,
};
use tokio::net::{UnixListener, UnixStream};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status};

pub(crate) const SLOTS: &str = "example.com/slot";

/// The calls of kubelet: the size of a preferred allocation, and sorted device IDs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Preferred(i32),
    Allocate(Vec<String>),
    PreStart(Vec<String>),
}

type Answer = dyn Fn(&[String]) -> Result<ContainerAllocateResponse, Status> + Send + Sync;

/// The plugin's devices and its answers to Allocate. It prefers the first devices by name, and wants `PreStartContainer`.
#[derive(Clone)]
pub(crate) struct Script {
    pub(crate) n_devices: usize,
    allocate: Arc<Answer>,
}

/// `n_devices` healthy devices, empty answers.
pub(crate) fn slots(n_devices: usize) -> Script {
    Script {
        n_devices,
        allocate: Arc::new(|_| Ok(ContainerAllocateResponse::default())),
    }
}

impl Script {
    pub(crate) fn answers(
        mut self,
        allocate: impl Fn(&[String]) -> Result<ContainerAllocateResponse, Status> + Send + Sync + 'static,
    ) -> Self {
        self.allocate = Arc::new(allocate);
        self
    }
}

/// The plugin at work. Dropping it ends its streams.
pub(crate) struct Plugin {
    calls: Arc<Mutex<Vec<Call>>>,
    socket: &'static str,
    _serving: DropGuard,
}

impl Plugin {
    /// Serves on a socket without registering.
    pub(crate) fn serve(config: &KubeletConfig, socket: &'static str, script: Script) -> Self {
        let calls: Arc<Mutex<Vec<Call>>> = Arc::default();
        let serving = CancellationToken::new();
        let service = Service {
            script,
            calls: Arc::clone(&calls),
            serving: serving.clone(),
        };
        let incoming = UnixListenerStream::new(UnixListener::bind(config.plugin_dir().join(socket)).unwrap());
        let until = serving.clone().cancelled_owned();
        tokio::spawn(
            Server::builder()
                .add_service(DevicePluginServer::new(service))
                .serve_with_incoming_shutdown(incoming, until),
        );
        Self {
            calls,
            socket,
            _serving: serving.drop_guard(),
        }
    }

    pub(crate) async fn register(&self, config: &KubeletConfig) {
        let mut client = RegistrationClient::new(connect(&config.plugin_socket()).await);
        let request = RegisterRequest {
            version: "v1beta1".to_owned(),
            endpoint: self.socket.to_owned(),
            resource_name: SLOTS.to_owned(),
            options: None,
        };
        client.register(request).await.unwrap();
    }

    /// All calls so far, in order.
    pub(crate) fn calls(&self) -> Vec<Call> {
        self.calls.lock().unwrap().clone()
    }
}

pub(crate) async fn connect(socket: &Path) -> Channel {
    let socket = socket.to_owned();
    let connector = tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    Endpoint::from_static("http://localhost")
        .connect_with_connector(connector)
        .await
        .unwrap()
}

struct Service {
    script: Script,
    calls: Arc<Mutex<Vec<Call>>>,
    serving: CancellationToken,
}

impl Service {
    fn note(&self, call: Call) {
        self.calls.lock().unwrap().push(call);
    }
}

fn sorted(mut ids: Vec<String>) -> Vec<String> {
    ids.sort();
    ids
}

#[tonic::async_trait]
impl DevicePlugin for Service {
    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(DevicePluginOptions {
            pre_start_required: true,
            get_preferred_allocation_available: true,
        }))
    }

    type ListAndWatchStream = Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let device = |i| Device {
            id: format!("d{i}"),
            health: "Healthy".to_owned(),
            topology: None,
        };
        let devices = (0..self.script.n_devices).map(device).collect();
        let list = futures::stream::iter([Ok(ListAndWatchResponse { devices })]);
        let until = self.serving.clone().cancelled_owned();
        Ok(Response::new(Box::pin(
            list.chain(futures::stream::pending()).take_until(until),
        )))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let request = request.into_inner().container_requests.remove(0);
        self.note(Call::Preferred(request.allocation_size));
        let mut device_ids = sorted(request.available_device_ids);
        device_ids.truncate(usize::try_from(request.allocation_size).unwrap());
        Ok(Response::new(PreferredAllocationResponse {
            container_responses: vec![ContainerPreferredAllocationResponse { device_ids }],
        }))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let mut requests = request.into_inner().container_requests;
        assert_eq!(requests.len(), 1, "kubelet asks for one container at a time");
        let ids = sorted(requests.remove(0).device_ids);
        self.note(Call::Allocate(ids.clone()));
        Ok(Response::new(AllocateResponse {
            container_responses: vec![(self.script.allocate)(&ids)?],
        }))
    }

    async fn pre_start_container(
        &self,
        request: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        let ids = sorted(request.into_inner().device_ids);
        self.note(Call::PreStart(ids));
        Ok(Response::new(PreStartContainerResponse {}))
    }
}
