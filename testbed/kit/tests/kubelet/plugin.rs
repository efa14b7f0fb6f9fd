//! A scripted device plugin that serves on a real socket and remembers what kubelet asked.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use futures::Stream;
use futures::StreamExt as _;
use hyper_util::rt::TokioIo;
use kit::kubelet::KubeletConfig;
use proto::kubelet::deviceplugin::device_plugin_server::{DevicePlugin, DevicePluginServer};
use proto::kubelet::deviceplugin::registration_client::RegistrationClient;
use proto::kubelet::deviceplugin::{
    AllocateRequest, AllocateResponse, ContainerAllocateResponse, ContainerPreferredAllocationRequest,
    ContainerPreferredAllocationResponse, Device, DevicePluginOptions, Empty, ListAndWatchResponse, NumaNode,
    PreStartContainerRequest, PreStartContainerResponse, PreferredAllocationRequest,
    PreferredAllocationResponse, RegisterRequest, TopologyInfo,
};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio_stream::wrappers::{UnixListenerStream, WatchStream};
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status};

/// The calls of kubelet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Preferred {
        n_available: usize,
        must_include: Vec<String>,
        size: i32,
    },
    Allocate(Vec<String>),
    PreStart(Vec<String>),
}

type Answer<Q, A> = Arc<dyn Fn(Q) -> Result<A, Status> + Send + Sync>;

/// The plugin's answers.
#[derive(Clone)]
pub(crate) struct Script {
    pub(crate) resource: &'static str,
    pub(crate) options: DevicePluginOptions,
    pub(crate) devices: Vec<Device>,
    pub(crate) preferred: Answer<ContainerPreferredAllocationRequest, Vec<String>>,
    pub(crate) allocate: Answer<Vec<String>, ContainerAllocateResponse>,
    pub(crate) pre_start: Answer<Vec<String>, ()>,
}

pub(crate) const SLOTS: &str = "example.com/slot";

/// `n` healthy devices of [`SLOTS`], no options, empty answers.
pub(crate) fn slots(n: usize) -> Script {
    Script {
        resource: SLOTS,
        options: DevicePluginOptions::default(),
        devices: devices(n),
        preferred: Arc::new(|_| Ok(Vec::new())),
        allocate: Arc::new(|_| Ok(ContainerAllocateResponse::default())),
        pre_start: Arc::new(|_| Ok(())),
    }
}

pub(crate) fn devices(n: usize) -> Vec<Device> {
    (0..n).map(|i| device(&format!("d{i}"), "Healthy")).collect()
}

pub(crate) fn device(id: &str, health: &str) -> Device {
    Device {
        id: id.to_owned(),
        health: health.to_owned(),
        topology: None,
    }
}

pub(crate) fn on_numa(id: &str, node: i64) -> Device {
    Device {
        topology: Some(TopologyInfo {
            nodes: vec![NumaNode { id: node }],
        }),
        ..device(id, "Healthy")
    }
}

pub(crate) fn envs(pairs: &[(&str, &str)]) -> HashMap<String, String> {
    pairs
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
        .collect()
}

impl Script {
    pub(crate) fn with_pre_start(mut self) -> Self {
        self.options.pre_start_required = true;
        self
    }

    /// Prefers the lowest numbers.
    pub(crate) fn with_preference(mut self) -> Self {
        self.options.get_preferred_allocation_available = true;
        self.preferred = Arc::new(|request| {
            let mut ids = request.available_device_ids;
            ids.sort_by_key(|id| id.trim_start_matches('d').parse::<u32>().unwrap_or_default());
            ids.retain(|id| !request.must_include_device_ids.contains(id));
            let wanted = usize::try_from(request.allocation_size).unwrap_or_default();
            Ok(request
                .must_include_device_ids
                .into_iter()
                .chain(ids)
                .take(wanted)
                .collect())
        });
        self
    }

    pub(crate) fn prefers(mut self, ids: &'static [&'static str]) -> Self {
        self.options.get_preferred_allocation_available = true;
        self.preferred = Arc::new(|_| Ok(ids.iter().map(|id| (*id).to_owned()).collect()));
        self
    }

    pub(crate) fn answers(
        mut self,
        allocate: impl Fn(Vec<String>) -> Result<ContainerAllocateResponse, Status> + Send + Sync + 'static,
    ) -> Self {
        self.allocate = Arc::new(allocate);
        self
    }

    pub(crate) fn answers_pre_start(
        mut self,
        pre_start: impl Fn(Vec<String>) -> Result<(), Status> + Send + Sync + 'static,
    ) -> Self {
        self.pre_start = Arc::new(pre_start);
        self
    }
}

/// The plugin at work.
pub(crate) struct Plugin {
    pub(crate) shared: Arc<Shared>,
    list: watch::Sender<Vec<Device>>,
    socket: String,
    serving: CancellationToken,
}

pub(crate) struct Shared {
    script: Script,
    calls: Mutex<Vec<Call>>,
    list: watch::Receiver<Vec<Device>>,
    /// Ends the streams when cancelled.
    streams: CancellationToken,
    allocating: AtomicUsize,
    pub(crate) most_at_once: AtomicUsize,
}

impl Plugin {
    /// Serves on a socket of its own without registering.
    pub(crate) fn serve(config: &KubeletConfig, socket: &str, script: Script) -> Self {
        let (list, receiver) = watch::channel(script.devices.clone());
        let shared = Arc::new(Shared {
            script,
            calls: Mutex::default(),
            list: receiver,
            streams: CancellationToken::new(),
            allocating: AtomicUsize::new(0),
            most_at_once: AtomicUsize::new(0),
        });
        let path = config.plugin_dir().join(socket);
        let _ = std::fs::remove_file(&path);
        let incoming = UnixListenerStream::new(UnixListener::bind(path).unwrap());
        let service =
            DevicePluginServer::new(Service(Arc::clone(&shared))).max_decoding_message_size(64 << 20);
        let serving = CancellationToken::new();
        let until = serving.clone().cancelled_owned();
        tokio::spawn(
            Server::builder()
                .add_service(service)
                .serve_with_incoming_shutdown(incoming, until),
        );
        Self {
            shared,
            list,
            socket: socket.to_owned(),
            serving,
        }
    }

    /// Serves, and registers as kubelet's documentation asks.
    pub(crate) async fn start(config: &KubeletConfig, script: Script) -> Self {
        let socket = format!("{}.sock", script.resource.replace('/', "_"));
        let plugin = Self::serve(config, &socket, script);
        plugin.register(config).await.unwrap();
        plugin
    }

    pub(crate) async fn register(&self, config: &KubeletConfig) -> Result<(), Status> {
        register(config, "v1beta1", &self.socket, self.shared.script.resource).await
    }

    pub(crate) fn send(&self, devices: Vec<Device>) {
        self.list.send_replace(devices);
    }

    pub(crate) fn end_streams(&self) {
        self.shared.streams.cancel();
    }

    /// Everything asked so far, IDs sorted.
    pub(crate) fn calls(&self) -> Vec<Call> {
        self.shared.calls.lock().unwrap().clone()
    }

    pub(crate) fn allocated(&self) -> Vec<Vec<String>> {
        let ids = |call| {
            if let Call::Allocate(ids) = call {
                Some(ids)
            } else {
                None
            }
        };
        self.calls().into_iter().filter_map(ids).collect()
    }
}

impl Drop for Plugin {
    fn drop(&mut self) {
        self.end_streams();
        self.serving.cancel();
    }
}

pub(crate) async fn register(
    config: &KubeletConfig,
    version: &str,
    socket: &str,
    resource: &str,
) -> Result<(), Status> {
    let mut client = RegistrationClient::new(connect(&config.plugin_socket()).await);
    let request = RegisterRequest {
        version: version.to_owned(),
        endpoint: socket.to_owned(),
        resource_name: resource.to_owned(),
        options: None,
    };
    client.register(request).await.map(drop)
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

struct Service(Arc<Shared>);

impl Service {
    fn note(&self, call: Call) {
        self.0.calls.lock().unwrap().push(call);
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
        Ok(Response::new(self.0.script.options))
    }

    type ListAndWatchStream =
        std::pin::Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let lists = WatchStream::new(self.0.list.clone()).map(|devices| Ok(ListAndWatchResponse { devices }));
        Ok(Response::new(Box::pin(
            lists.take_until(self.0.streams.clone().cancelled_owned()),
        )))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let mut requests = request.into_inner().container_requests;
        assert_eq!(requests.len(), 1);
        let request = requests.remove(0);
        self.note(Call::Preferred {
            n_available: request.available_device_ids.len(),
            must_include: sorted(request.must_include_device_ids.clone()),
            size: request.allocation_size,
        });
        let device_ids = (self.0.script.preferred)(request)?;
        Ok(Response::new(PreferredAllocationResponse {
            container_responses: vec![ContainerPreferredAllocationResponse { device_ids }],
        }))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let now = self.0.allocating.fetch_add(1, Ordering::SeqCst) + 1;
        self.0.most_at_once.fetch_max(now, Ordering::SeqCst);
        for _ in 0..16 {
            tokio::task::yield_now().await;
        }
        let mut requests = request.into_inner().container_requests;
        assert_eq!(requests.len(), 1, "kubelet asks for one container at a time");
        let ids = sorted(requests.remove(0).device_ids);
        self.note(Call::Allocate(ids.clone()));
        self.0.allocating.fetch_sub(1, Ordering::SeqCst);
        Ok(Response::new(AllocateResponse {
            container_responses: vec![(self.0.script.allocate)(ids)?],
        }))
    }

    async fn pre_start_container(
        &self,
        request: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        let ids = sorted(request.into_inner().device_ids);
        self.note(Call::PreStart(ids.clone()));
        (self.0.script.pre_start)(ids).map(|()| Response::new(PreStartContainerResponse {}))
    }
}
