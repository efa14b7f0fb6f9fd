//! A kubelet as plugins see it: registration, device lists, and admission of one pod at a time.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use proto::kubelet::HEALTHY;
use proto::kubelet::deviceplugin::device_plugin_client::DevicePluginClient;
use proto::kubelet::deviceplugin::registration_server::{Registration, RegistrationServer};
use proto::kubelet::deviceplugin::{
    AllocateRequest, ContainerAllocateRequest, ContainerAllocateResponse,
    ContainerPreferredAllocationRequest, Device, Empty, ListAndWatchResponse, PreferredAllocationRequest,
    RegisterRequest,
};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status, Streaming};

/// Longest wait for something that must happen.
pub(crate) const SOON: Duration = Duration::from_secs(20);

/// The environment of a container, or why its pod has failed.
pub(crate) type Outcome = Result<BTreeMap<String, String>, String>;

struct Desk(mpsc::UnboundedSender<RegisterRequest>);

#[tonic::async_trait]
impl Registration for Desk {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let _ = self.0.send(request.into_inner());
        Ok(Response::new(Empty {}))
    }
}

/// kubelet's side of a device plugin directory.
pub(crate) struct FakeKubelet {
    dir: PathBuf,
    registered: mpsc::UnboundedReceiver<RegisterRequest>,
    server: JoinHandle<()>,
    pub(crate) plugins: BTreeMap<String, Plugin>,
}

/// One registered resource.
pub(crate) struct Plugin {
    pub(crate) client: DevicePluginClient<Channel>,
    pub(crate) stream: Streaming<ListAndWatchResponse>,
    pub(crate) devices: Vec<Device>,
    pub(crate) used: BTreeSet<String>,
    /// Every answer to Allocate.
    pub(crate) answers: Vec<ContainerAllocateResponse>,
}

impl FakeKubelet {
    /// Starts as kubelet does: removes every socket, then listens.
    pub(crate) fn start(dir: &Path) -> Self {
        for entry in fs::read_dir(dir)
            .unwrap()
            .map(Result::unwrap)
            .filter(|entry| entry.file_type().unwrap().is_socket())
        {
            fs::remove_file(entry.path()).unwrap();
        }
        let listener = UnixListener::bind(dir.join("kubelet.sock")).unwrap();
        let (sender, registered) = mpsc::unbounded_channel();
        let server = Server::builder().add_service(RegistrationServer::new(Desk(sender)));
        let server = tokio::spawn(async move {
            server
                .serve_with_incoming(UnixListenerStream::new(listener))
                .await
                .unwrap();
        });
        Self {
            dir: dir.to_owned(),
            registered,
            server,
            plugins: BTreeMap::new(),
        }
    }

    /// Ends without a word, as a killed process does; its socket stays.
    pub(crate) async fn kill(self) {
        self.server.abort();
        let _ = self.server.await;
    }

    /// Takes in the next registration and returns the resource's name.
    pub(crate) async fn register(&mut self) -> String {
        let request = timeout(SOON, self.registered.recv())
            .await
            .expect("no plugin registers")
            .unwrap();
        assert_eq!(request.version, "v1beta1");
        let mut client = connect(self.dir.join(&request.endpoint)).await;
        let options = client
            .get_device_plugin_options(Empty {})
            .await
            .unwrap()
            .into_inner();
        assert!(options.get_preferred_allocation_available && options.pre_start_required);
        let stream = client.list_and_watch(Empty {}).await.unwrap().into_inner();
        let mut plugin = Plugin {
            client,
            stream,
            devices: Vec::new(),
            used: BTreeSet::new(),
            answers: Vec::new(),
        };
        plugin.next_list().await;
        self.plugins.insert(request.resource_name.clone(), plugin);
        request.resource_name
    }

    /// Takes in the registrations of both resources.
    pub(crate) async fn register_both(&mut self) {
        let mut names = [self.register().await, self.register().await];
        names.sort();
        assert_eq!(names, ["aliyun.com/gpu-mem", "koordinator.sh/gpu.shared"]);
    }

    pub(crate) fn plugin(&mut self, resource: &str) -> &mut Plugin {
        self.plugins.get_mut(resource).unwrap()
    }

    /// Allocates for one container, as kubelet does for each resource of its limits.
    pub(crate) async fn container(&mut self, limits: &[(&str, usize)]) -> Outcome {
        let mut env = BTreeMap::new();
        for (resource, count) in limits {
            let plugin = self.plugin(resource);
            let ids = plugin.preferred(*count, &[]).await;
            let answer = plugin
                .allocate(&ids)
                .await
                .map_err(|status| status.message().to_owned())?;
            plugin.used.extend(ids);
            for (key, value) in answer {
                let before = env.insert(key.clone(), value.clone());
                assert!(
                    before.is_none_or(|before| before == value),
                    "conflicting values of {key}"
                );
            }
        }
        Ok(env)
    }
}

impl Plugin {
    /// The next device list of the stream.
    pub(crate) async fn next_list(&mut self) -> &[Device] {
        let next = timeout(SOON, self.stream.message()).await.expect("no list");
        self.devices = next.unwrap().expect("the stream has ended").devices;
        &self.devices
    }

    /// The plugin's preferred devices, completed to the size from free ones.
    pub(crate) async fn preferred(&mut self, count: usize, must: &[String]) -> Vec<String> {
        let healthy = self.devices.iter().filter(|device| device.health == HEALTHY);
        let available: Vec<String> = healthy
            .map(|device| device.id.clone())
            .filter(|id| !self.used.contains(id))
            .collect();
        let request = ContainerPreferredAllocationRequest {
            available_device_ids: available.clone(),
            must_include_device_ids: must.to_vec(),
            allocation_size: i32::try_from(count).unwrap(),
        };
        let request = PreferredAllocationRequest {
            container_requests: vec![request],
        };
        let answer = self
            .client
            .get_preferred_allocation(request)
            .await
            .unwrap()
            .into_inner();
        let ids = answer.container_responses[0].device_ids.clone();
        assert_eq!(ids.len(), count);
        assert!(
            ids.iter().all(|id| available.contains(id) || must.contains(id)),
            "{ids:?}"
        );
        ids
    }

    pub(crate) async fn allocate(&mut self, ids: &[String]) -> Result<BTreeMap<String, String>, Status> {
        let request = AllocateRequest {
            container_requests: vec![ContainerAllocateRequest {
                device_ids: ids.to_vec(),
            }],
        };
        let answer = timeout(SOON, self.client.allocate(request))
            .await
            .expect("no answer")?
            .into_inner();
        self.answers.push(answer.container_responses[0].clone());
        Ok(answer.container_responses[0].envs.clone().into_iter().collect())
    }
}

async fn connect(path: PathBuf) -> DevicePluginClient<Channel> {
    let connect = tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let channel = Endpoint::from_static("http://localhost")
        .connect_with_connector(connect)
        .await
        .unwrap();
    DevicePluginClient::new(channel).max_decoding_message_size(4 << 20)
}
