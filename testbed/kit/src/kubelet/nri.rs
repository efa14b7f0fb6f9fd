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

use anyhow::{Result, anyhow, ensure};
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
use tokio::sync::{Mutex, watch};
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

use super::pod::KubeletPod;
use super::runtime::{RunState, Runtime, RuntimeContainer};
use super::socket;

/// The deadline of a plugin's answer, after which its connection is closed.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);

/// Most containers of one Synchronize message: so few that plugins meet lists in several messages.
const SYNCHRONIZE_CHUNK: usize = 2;

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
        let accepting = async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (all_plugins, runtime) = (Arc::clone(&all_plugins), Arc::clone(&runtime));
                let registrations = registrations.clone();
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

    pub(crate) async fn until_registered(&self, times: usize) {
        // The sender lives as long as plugins are accepted.
        let _ = self.n_registered.clone().wait_for(|count| *count >= times).await;
    }

    /// Calls `CreateContainer` of every plugin and applies the adjustments; returns the adjusted container.
    pub(crate) async fn make(
        &self,
        pod: &KubeletPod,
        mut container: RuntimeContainer,
    ) -> Result<RuntimeContainer> {
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
            match plugin
                .call::<CreateContainerResponse>("CreateContainer", &request)
                .await
            {
                Some(Ok(response)) => adjust(&mut container, response.adjust.unwrap_or_default()),
                Some(Err(Status { code, message, .. })) => {
                    outcome = Err(anyhow!(
                        "failed to get NRI adjustment for container: rpc error: code = {code} desc = {message}"
                    ));
                }
                // A plugin whose connection has closed is no obstacle: containerd goes on without it.
                None => continue,
            }
            plugins.push(plugin);
        }
        plugins.extend(not_called);
        ensure!(
            !self.is_required || !plugins.is_empty(),
            "failed to validate NRI adjustment: a required plugin is not present"
        );
        outcome.map(|()| container)
    }
}

#[derive(Debug)]
struct NriPlugin {
    stream: UnixStream,
    decoder: Decoder,
    next_call: u32,
}

impl NriPlugin {
    /// Waits for a plugin to register, configures and synchronizes it; `None` if that fails.
    async fn register(stream: UnixStream, runtime: &Runtime) -> Option<Self> {
        let mut plugin = Self {
            stream,
            decoder: Decoder::default(),
            next_call: 1,
        };
        timeout(ANSWER_LIMIT, plugin.take_registration())
            .await
            .ok()?
            .ok()?;
        let request = ConfigureRequest {
            runtime_name: "testbed".to_owned(),
            ..ConfigureRequest::default()
        };
        let configured: ConfigureResponse = plugin.call("Configure", &request).await?.ok()?;
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
            let answer: SynchronizeResponse = plugin.call("Synchronize", &request).await?.ok()?;
            // A plugin that does not repeat `more` has not understood that the list goes on.
            (answer.more == request.more).then_some(())?;
        }
        Some(plugin)
    }

    /// Reads the call by which the plugin registers, and answers it.
    async fn take_registration(&mut self) -> io::Result<()> {
        let call = self.receive(ConnectionId::Runtime, Kind::Request).await?;
        let response = Response {
            status: None,
            payload: Empty {}.encode_to_vec(),
        };
        let answer = Message {
            kind: Kind::Response,
            payload: response.encode_to_vec(),
            ..call
        };
        self.send(&answer).await
    }

    /// Calls a method of the plugin; `None` if the connection has closed, the answer is late, or it does not decode.
    async fn call<A: prost::Message + Default>(
        &mut self,
        method: &str,
        message: &impl prost::Message,
    ) -> Option<Result<A, Status>> {
        let request = Request {
            service: PLUGIN_SERVICE.to_owned(),
            method: method.to_owned(),
            payload: message.encode_to_vec(),
            timeout_nano: i64::try_from(ANSWER_LIMIT.as_nanos()).unwrap_or(i64::MAX),
        };
        let response = match timeout(ANSWER_LIMIT, self.exchange(&request)).await {
            Ok(Ok(response)) => response,
            Ok(Err(error)) => {
                tracing::warn!(%error, "a plugin of the container runtime is closed");
                return None;
            }
            Err(_) => return None,
        };
        match response.status {
            Some(status) if status.code != 0 => Some(Err(status)),
            _ => A::decode(response.payload.as_slice()).ok().map(Ok),
        }
    }

    /// Sends a call and waits for its answer; there is one call at a time.
    async fn exchange(&mut self, request: &Request) -> io::Result<Response> {
        let message = Message {
            connection: ConnectionId::Plugin,
            call: self.next_call,
            kind: Kind::Request,
            payload: request.encode_to_vec(),
        };
        // ttrpc: calls of the side that opens the connection have odd numbers.
        self.next_call += 2;
        self.send(&message).await?;
        let answer = self.receive(ConnectionId::Plugin, Kind::Response).await?;
        Response::decode(answer.payload.as_slice()).map_err(io::Error::other)
    }

    /// The next message of this kind on a connection; others mean nothing to this runtime.
    async fn receive(&mut self, connection: ConnectionId, kind: Kind) -> io::Result<Message> {
        // Longer messages come in pieces, which the decoder puts together.
        let mut buffer = [0; 4096];
        loop {
            let n_read = self.stream.read(&mut buffer).await?;
            if n_read == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let bytes = buffer.get(..n_read).unwrap_or_default();
            for message in self.decoder.feed(bytes).map_err(io::Error::other)? {
                if (message.connection, message.kind) == (connection, kind) {
                    return Ok(message);
                }
            }
        }
    }

    async fn send(&mut self, message: &Message) -> io::Result<()> {
        let bytes = message.encode().map_err(io::Error::other)?;
        self.stream.write_all(&bytes).await
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

fn as_message(container: &RuntimeContainer) -> api::Container {
    let state = match container.state {
        RunState::Waiting { .. } => ContainerState::Created,
        RunState::Running { .. } => ContainerState::Running,
        RunState::Exited { .. } => ContainerState::Stopped,
    };
    let mut devices = Vec::new();
    for path in &container.device_nodes {
        devices.push(LinuxDevice {
            path: path.clone(),
            r#type: "c".to_owned(),
            major: 195,
            minor: 0,
        });
    }
    let env = container
        .env
        .iter()
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    api::Container {
        id: format!("{}/{}", container.pod_uid, container.name),
        pod_sandbox_id: container.pod_uid.clone(),
        name: container.name.clone(),
        state: state.into(),
        env,
        linux: Some(LinuxContainer { devices }),
    }
}

/// Applies an NRI plugin's adjustment to the environment and device nodes of a container.
fn adjust(container: &mut RuntimeContainer, adjustment: ContainerAdjustment) {
    for pair in adjustment.env {
        container.env.insert(pair.key, pair.value);
    }
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
