//! The container runtime's NRI socket (Node Resource Interface): a plugin receives the running containers, and may adjust
//! each container before it is made.
//!
//! As in containerd, one call runs at a time for the whole node, a plugin has 2 s for an answer, and the connection of a plugin
//! that takes longer is closed. Of adjustments it models only the parts that a recorded container shows.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use prost::Message as _;
use proto::nri::api::{
    self, ConfigureRequest, ConfigureResponse, ContainerAdjustment, ContainerState, CreateContainerRequest,
    CreateContainerResponse, Empty, LinuxContainer, LinuxDevice, PodSandbox, SynchronizeRequest,
    SynchronizeResponse,
};
use proto::nri::ttrpc::{Request, Response, Status};
use proto::nri::wire::{ConnectionId, Decoder, Kind, Message};
use proto::nri::{CREATE_CONTAINER_EVENT, PLUGIN_SERVICE};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Mutex, mpsc, oneshot, watch};
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

use super::pod::KubeletPod;
use super::runtime::{RunState, Runtime, RuntimeContainer};
use super::socket;

/// The deadline of a plugin's answer, after which its connection is closed.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// Most containers of one Synchronize message: so few that plugins meet lists in several messages.
const SYNCHRONIZE_CHUNK: usize = 2;

/// The reason for which a container is not created.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CreateError {
    #[error("failed to get NRI adjustment for container: rpc error: code = {} desc = {}", .0.code, .0.message)]
    Refused(Status),
    #[error("failed to validate NRI adjustment: a required plugin is not present")]
    Missing,
}

/// The runtime's side of the interface.
#[derive(Debug)]
pub(crate) struct Nri {
    plugins: Arc<Mutex<Vec<NriPlugin>>>,
    n_registered: watch::Receiver<usize>,
    /// True if no container is made while no plugin is registered.
    is_required: bool,
    _accepting: AbortOnDropHandle<()>,
}

impl Nri {
    /// Listens for plugins, on a new socket in place of one that is there.
    pub(crate) fn listen(path: &Path, runtime: Arc<Runtime>, is_required: bool) -> io::Result<Self> {
        socket::remove(path)?;
        let listener = UnixListener::bind(path)?;
        let plugins = Arc::new(Mutex::new(Vec::new()));
        let all_plugins = Arc::clone(&plugins);
        let (registrations, n_registered) = watch::channel(0);
        let registrations = Arc::new(registrations);
        let accepting = async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (all_plugins, runtime, registrations) = (
                    Arc::clone(&all_plugins),
                    Arc::clone(&runtime),
                    Arc::clone(&registrations),
                );
                tokio::spawn(async move {
                    // No container is made during Synchronize, or the plugin would miss it.
                    let mut plugins = all_plugins.lock().await;
                    if let Some(plugin) = NriPlugin::register(stream, &runtime).await {
                        plugins.push(plugin);
                        registrations.send_modify(|registrations| *registrations += 1);
                    }
                });
            }
        };
        Ok(Self {
            plugins,
            n_registered,
            is_required,
            _accepting: AbortOnDropHandle::new(tokio::spawn(accepting)),
        })
    }

    /// Waits until plugins have registered `times` times.
    pub(crate) async fn until_registered(&self, times: usize) {
        // The sender lives as long as plugins are accepted.
        let _ = self.n_registered.clone().wait_for(|count| *count >= times).await;
    }

    /// Calls `CreateContainer` of every plugin and applies the adjustments; returns the adjusted container.
    pub(crate) async fn make(
        &self,
        pod: &KubeletPod,
        mut container: RuntimeContainer,
    ) -> Result<RuntimeContainer, CreateError> {
        let mut plugins = self.plugins.lock().await;
        // Plugins whose connection has closed are left out of the list that is put together again below.
        let mut not_called = std::mem::take(&mut *plugins).into_iter();
        let mut outcome = Ok(());
        while outcome.is_ok()
            && let Some(mut plugin) = not_called.next()
        {
            let request = CreateContainerRequest {
                pod: Some(sandbox_of_pod(pod)),
                container: Some(as_message(&container)),
            };
            outcome = match plugin
                .call::<CreateContainerResponse>("CreateContainer", &request)
                .await
            {
                Ok(Ok(response)) => {
                    adjust(&mut container, response.adjust.unwrap_or_default());
                    Ok(())
                }
                Ok(Err(status)) => Err(CreateError::Refused(status)),
                // A plugin whose connection has closed is no obstacle: containerd goes on without it.
                Err(Closed) => continue,
            };
            plugins.push(plugin);
        }
        plugins.extend(not_called);
        if self.is_required && plugins.is_empty() {
            return Err(CreateError::Missing);
        }
        outcome.map(|()| container)
    }
}

/// The plugin gives no answer: its connection has closed, the answer is late, or it does not decode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Closed;

type AnswerSender = oneshot::Sender<Response>;

/// A plugin that has registered.
#[derive(Debug)]
struct NriPlugin {
    calls: mpsc::Sender<(Vec<u8>, AnswerSender)>,
    _link: AbortOnDropHandle<()>,
}

impl NriPlugin {
    /// Waits for a plugin to register, configures and synchronizes it; `None` if that fails.
    async fn register(stream: UnixStream, runtime: &Runtime) -> Option<Self> {
        let (calls, inbox) = mpsc::channel(1);
        let (registered, is_registered) = oneshot::channel();
        let link = Link {
            stream,
            decoder: Decoder::default(),
            registered: Some(registered),
            waiting: HashMap::new(),
            next_call: 1,
        };
        let link = AbortOnDropHandle::new(tokio::spawn(link.run(inbox)));
        let mut plugin = Self { calls, _link: link };
        timeout(ANSWER_LIMIT, is_registered).await.ok()?.ok()?;
        let request = ConfigureRequest {
            runtime_name: "testbed".to_owned(),
            ..ConfigureRequest::default()
        };
        let configured: ConfigureResponse = plugin.call("Configure", &request).await.ok()?.ok()?;
        if configured.events != CREATE_CONTAINER_EVENT {
            tracing::warn!(
                configured.events,
                "a plugin asks for other events than this runtime has"
            );
        }
        let running = runtime.all();
        let mut parts = running.chunks(SYNCHRONIZE_CHUNK).peekable();
        let mut is_last = false;
        while !is_last {
            let part = parts.next().unwrap_or_default();
            is_last = parts.peek().is_none();
            // Sandboxes come with the last part: a plugin must cope with containers that arrive before their sandboxes.
            let pods = if is_last {
                running.iter().map(sandbox_of_running).collect()
            } else {
                Vec::new()
            };
            let request = SynchronizeRequest {
                pods,
                containers: part.iter().map(as_message).collect(),
                more: !is_last,
            };
            let answer: SynchronizeResponse = plugin.call("Synchronize", &request).await.ok()?.ok()?;
            // A plugin that does not repeat `more` has not understood that the list goes on.
            (answer.more == request.more).then_some(())?;
        }
        Some(plugin)
    }

    /// Calls a method of the NRI plugin. The inner result is the plugin's answer.
    async fn call<A: prost::Message + Default>(
        &mut self,
        method: &str,
        message: &impl prost::Message,
    ) -> Result<Result<A, Status>, Closed> {
        let request = Request {
            service: PLUGIN_SERVICE.to_owned(),
            method: method.to_owned(),
            payload: message.encode_to_vec(),
            timeout_nano: i64::try_from(ANSWER_LIMIT.as_nanos()).unwrap_or(i64::MAX),
        };
        let (answer, answered) = oneshot::channel();
        self.calls
            .send((request.encode_to_vec(), answer))
            .await
            .map_err(|_| Closed)?;
        let response = timeout(ANSWER_LIMIT, answered)
            .await
            .map_err(|_| Closed)?
            .map_err(|_| Closed)?;
        Ok(match response.status {
            Some(status) if status.code != 0 => Err(status),
            _ => Ok(A::decode(response.payload.as_slice()).map_err(|_| Closed)?),
        })
    }
}

/// The connection to a plugin.
struct Link {
    stream: UnixStream,
    decoder: Decoder,
    /// Used up by the plugin's registration.
    registered: Option<oneshot::Sender<()>>,
    /// The callers that wait for an answer, by the number of their call.
    waiting: HashMap<u32, AnswerSender>,
    next_call: u32,
}

impl Link {
    /// Serves the connection, with the calls of `inbox`, until it closes.
    async fn run(mut self, mut inbox: mpsc::Receiver<(Vec<u8>, AnswerSender)>) {
        if let Err(error) = self.serve(&mut inbox).await {
            tracing::warn!(%error, "a plugin of the container runtime is closed");
        }
    }

    /// Passes calls to the plugin, and its answers to the callers.
    async fn serve(&mut self, inbox: &mut mpsc::Receiver<(Vec<u8>, AnswerSender)>) -> io::Result<()> {
        // Longer messages come in pieces, which the decoder puts together.
        let mut buffer = [0; 4096];
        loop {
            tokio::select! {
                read = self.stream.read(&mut buffer) => {
                    let n_read = read?;
                    if n_read == 0 {
                        return Ok(());
                    }
                    let bytes = buffer.get(..n_read).unwrap_or_default();
                    for message in self.decoder.feed(bytes).map_err(io::Error::other)? {
                        self.take(message).await?;
                    }
                }
                Some((payload, answer)) = inbox.recv() => {
                    let call = self.next_call;
                    // ttrpc: calls of the side that opens the connection have odd numbers.
                    self.next_call += 2;
                    self.waiting.insert(call, answer);
                    self.send(&Message { connection: ConnectionId::Plugin, call, kind: Kind::Request, payload }).await?;
                }
            }
        }
    }

    /// Handles a message of the plugin: its registration, or its answer to a call.
    async fn take(&mut self, message: Message) -> io::Result<()> {
        match (message.connection, message.kind) {
            (ConnectionId::Runtime, Kind::Request) => {
                let response = Response {
                    status: None,
                    payload: Empty {}.encode_to_vec(),
                };
                self.send(&Message {
                    kind: Kind::Response,
                    payload: response.encode_to_vec(),
                    ..message
                })
                .await?;
                if let Some(registered) = self.registered.take() {
                    // The receiver is gone if the registration has timed out.
                    let _ = registered.send(());
                }
            }
            (ConnectionId::Plugin, Kind::Response) => {
                let response = Response::decode(message.payload.as_slice()).map_err(io::Error::other)?;
                if let Some(answer) = self.waiting.remove(&message.call) {
                    let _ = answer.send(response);
                }
            }
            _ => {}
        }
        Ok(())
    }

    async fn send(&mut self, message: &Message) -> io::Result<()> {
        self.stream
            .write_all(&message.encode().map_err(io::Error::other)?)
            .await
    }
}

/// The sandbox of a pod whose container is about to be created. In this model its ID is the UID of the pod.
fn sandbox_of_pod(pod: &KubeletPod) -> PodSandbox {
    PodSandbox {
        id: pod.uid.clone(),
        name: pod.name.clone(),
        uid: pod.uid.clone(),
        namespace: pod.namespace.clone(),
        annotations: pod.annotations.clone().into_iter().collect(),
    }
}

/// The sandbox of a container that already runs; its annotations are not known here.
fn sandbox_of_running(container: &RuntimeContainer) -> PodSandbox {
    PodSandbox {
        id: container.pod_uid.clone(),
        name: container.pod.clone(),
        uid: container.pod_uid.clone(),
        namespace: container.namespace.clone(),
        annotations: HashMap::new(),
    }
}

/// A container in the form of an NRI message.
fn as_message(container: &RuntimeContainer) -> api::Container {
    let state = match container.state {
        RunState::Waiting { .. } => ContainerState::Created,
        RunState::Running { .. } => ContainerState::Running,
        RunState::Exited { .. } => ContainerState::Stopped,
    };
    let node = |path: &String| LinuxDevice {
        path: path.clone(),
        r#type: "c".to_owned(),
        major: 195,
        minor: 0,
    };
    api::Container {
        id: format!("{}/{}", container.pod_uid, container.name),
        pod_sandbox_id: container.pod_uid.clone(),
        name: container.name.clone(),
        state: state.into(),
        env: container
            .env
            .iter()
            .map(|(name, value)| format!("{name}={value}"))
            .collect(),
        linux: Some(LinuxContainer {
            devices: container.device_nodes.iter().map(node).collect(),
        }),
    }
}

/// Applies an NRI plugin's adjustment to the environment and device nodes of a container.
fn adjust(container: &mut RuntimeContainer, adjustment: ContainerAdjustment) {
    container
        .env
        .extend(adjustment.env.into_iter().map(|pair| (pair.key, pair.value)));
    let mut nodes: Vec<String> = Vec::new();
    for device in adjustment.linux.into_iter().flat_map(|linux| linux.devices) {
        match device.path.strip_prefix('-') {
            // NRI marks a removal by a minus before the path.
            Some(away) => container.device_nodes.retain(|path| path != away),
            None => nodes.push(device.path),
        }
    }
    // A node that is there already is replaced, not doubled.
    container.device_nodes.retain(|path| !nodes.contains(path));
    container.device_nodes.extend(nodes);
}
