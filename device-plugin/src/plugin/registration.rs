//! Keeps one resource registered with kubelet, through kubelet's restarts and ours.
//!
//! kubelet removes every plugin's socket when it starts, never dials a plugin again by itself, and
//! forgets a resource whose device list has ended. So three things are watched: the file of
//! kubelet's socket, the file of our own, and our open stream. Everything is closed when the stream has ended, or when one of
//! the files is another or gone and kubelet takes connections, and only then begun anew: kubelet finds plugins by resource
//! name, and the late end of an old stream would disconnect a new one. As long as no kubelet takes connections the open stream
//! stays: a kubelet whose socket's file somebody has removed goes on with it, and would lose all devices without it.

pub mod boot;
mod socket;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use daemon::api_server::one_line;
use hyper_util::rt::TokioIo;
use proto::kubelet::DEVICE_PLUGIN_VERSION;
use proto::kubelet::deviceplugin::RegisterRequest;
use proto::kubelet::deviceplugin::device_plugin_server::DevicePluginServer;
use proto::kubelet::deviceplugin::registration_client::RegistrationClient;
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::transport::{Endpoint, Server};
use tracing::{info, warn};

use crate::extended_resource::ExtendedResource;

use super::NodeState;
use super::server::{DeviceService, OPTIONS, Streams};
use socket::{FileId, OwnSocket};

/// kubelet sends every available ID in one message, and those that must be included once more.
const MAX_REQUEST_BYTES: usize = 4 * proto::kubelet::MAX_MESSAGE_BYTES;

/// How long a graceful end may take before it is forced.
const CLOSING: Duration = Duration::from_secs(2);

/// Name of kubelet's socket in the device plugin directory.
const KUBELET_SOCKET: &str = "kubelet.sock";

/// Where and how often to look.
#[derive(Clone, Debug)]
pub struct KubeletDir {
    /// kubelet's device plugin directory.
    pub path: PathBuf,
    /// How often the sockets are looked at.
    pub interval: Duration,
    /// How long kubelet may take to answer a registration and to open the stream after it.
    pub patience: Duration,
}

impl KubeletDir {
    /// A directory looked at every second.
    pub fn new(path: PathBuf) -> Self {
        Self {
            path,
            interval: Duration::from_secs(1),
            patience: Duration::from_secs(10),
        }
    }
}

/// Why a resource is not registered. All of them are tried again.
#[derive(Debug, thiserror::Error)]
pub enum RegistrationError {
    /// Our own socket cannot be made.
    #[error("cannot listen on {}", path.display())]
    Listen {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// kubelet's socket takes no connection.
    #[error("cannot connect to kubelet at {}", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// What went wrong.
        #[source]
        source: tonic::transport::Error,
    },
    /// kubelet refuses the registration.
    #[error("kubelet does not accept {resource}")]
    Refused {
        /// The resource.
        resource: String,
        /// What it said.
        #[source]
        source: Box<tonic::Status>,
    },
    /// kubelet says nothing.
    #[error("kubelet did not answer within {0:?}")]
    Silent(Duration),
}

/// Why a registration has come to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Stopped,
    KubeletRestarted,
    SocketRemoved,
    StreamEnded,
    StreamNeverOpened,
}

impl End {
    fn describe(self) -> &'static str {
        match self {
            Self::Stopped => "this plugin is stopping",
            Self::KubeletRestarted => "kubelet has restarted",
            Self::SocketRemoved => "the plugin's socket was removed",
            Self::StreamEnded => "kubelet has closed the device list",
            Self::StreamNeverOpened => "kubelet has not asked for the device list",
        }
    }
}

/// Serves and registers `resource` until `stop`; `is_registered` tells how things are. Returns at once if the resource has no
/// name on this node.
pub async fn keep_registered(
    dir: KubeletDir,
    resource: ExtendedResource,
    node: Arc<NodeState>,
    stop: CancellationToken,
    is_registered: watch::Sender<bool>,
) {
    /// How long a registration must have lasted for the next one to come without a pause.
    const STABLE: Duration = Duration::from_secs(5);
    const LONGEST_PAUSE: Duration = Duration::from_secs(10);
    let shortest = dir.interval.min(Duration::from_millis(200));
    let Some(name) = node.settings.names.of(resource).map(str::to_owned) else {
        return;
    };
    let mut pause = shortest;
    while !stop.is_cancelled() {
        let began = Instant::now();
        let kubelet = dir.path.join(KUBELET_SOCKET);
        let kubelet_id = FileId::of(&kubelet);
        let end = register_once(&dir, (resource, &name), &node, &stop, &is_registered).await;
        is_registered.send_replace(false);
        let is_quick = matches!(end, Ok(End::KubeletRestarted | End::SocketRemoved));
        let longest = match &end {
            // A process that is starting, or a file that one left behind: trying costs nothing.
            Err(RegistrationError::Connect { .. }) => Duration::from_secs(1),
            _ => LONGEST_PAUSE,
        };
        match end {
            Ok(End::Stopped) => return,
            Ok(end) => info!(resource = name, reason = end.describe(), "registering again"),
            Err(error) => warn!(
                resource = name,
                error = one_line(&error),
                "not registered, trying again"
            ),
        }
        node.resume();
        pause = if is_quick || began.elapsed() >= STABLE {
            shortest
        } else {
            (pause * 2).min(longest)
        };
        tokio::select! {
            () = stop.cancelled() => return,
            () = sleep(pause) => {}
            // Another kubelet is there, which knows nothing of the trouble with the one before.
            () = until_replaced(&kubelet, kubelet_id, dir.interval) => pause = shortest,
        }
    }
}

/// From listening to the end of one registration. Everything is closed when it returns.
async fn register_once(
    dir: &KubeletDir,
    (resource, name): (ExtendedResource, &str),
    node: &Arc<NodeState>,
    stop: &CancellationToken,
    is_registered: &watch::Sender<bool>,
) -> Result<End, RegistrationError> {
    let path = dir.path.join(resource.socket());
    let listen = |source| RegistrationError::Listen {
        path: path.clone(),
        source,
    };
    let (socket, listener) = OwnSocket::bind(path.clone()).map_err(listen)?;
    let serving = Serving::start(resource, Arc::clone(node), UnixListenerStream::new(listener));
    let kubelet = dir.path.join(KUBELET_SOCKET);
    let ended = tokio::select! {
        () = stop.cancelled() => Ok(End::Stopped),
        ended = follow(dir, &kubelet, &socket, (resource, name), &serving, is_registered) => ended,
    };
    serving.close().await;
    ended
}

/// Registers when kubelet is there, and returns when that has come to its end.
async fn follow(
    dir: &KubeletDir,
    kubelet: &Path,
    socket: &OwnSocket,
    (resource, name): (ExtendedResource, &str),
    serving: &Serving,
    is_registered: &watch::Sender<bool>,
) -> Result<End, RegistrationError> {
    let kubelet_id = wait_for_kubelet(kubelet, dir.interval).await;
    boot::until_left(&dir.path).await;
    if !socket.is_in_place() {
        return Ok(End::SocketRemoved);
    }
    let request = RegisterRequest {
        version: DEVICE_PLUGIN_VERSION.to_owned(),
        endpoint: resource.socket().to_owned(),
        resource_name: name.to_owned(),
        options: Some(OPTIONS),
    };
    let mut streams = serving.streams.subscribe();
    let registration = async {
        timeout(dir.patience, register(kubelet, request))
            .await
            .map_err(|_| RegistrationError::Silent(dir.patience))??;
        if !matches!(
            timeout(dir.patience, streams.wait_for(|streams| streams.n_ever > 0)).await,
            Ok(Ok(_))
        ) {
            return Ok(End::StreamNeverOpened);
        }
        info!(resource = name, "registered with kubelet");
        is_registered.send_replace(true);
        // An error says that the server is gone, and the streams with it.
        let _ = streams.wait_for(|streams| streams.n_open == 0).await;
        Ok(End::StreamEnded)
    };
    tokio::select! {
        ended = registration => ended,
        ended = until_moved((name, kubelet), kubelet_id, socket, dir.interval) => Ok(ended),
    }
}

/// Returns when one of the two sockets is no longer the file that it was, and kubelet takes connections.
async fn until_moved(
    (name, kubelet): (&str, &Path),
    kubelet_id: FileId,
    socket: &OwnSocket,
    interval: Duration,
) -> End {
    let mut is_told = false;
    loop {
        sleep(interval).await;
        let end = match FileId::of(kubelet) {
            Some(id) if id == kubelet_id && socket.is_in_place() => {
                is_told = false;
                continue;
            }
            Some(id) if id == kubelet_id => End::SocketRemoved,
            Some(_) | None => End::KubeletRestarted,
        };
        if UnixStream::connect(kubelet).await.is_ok() {
            return end;
        }
        if !is_told {
            warn!(resource = name, socket = %kubelet.display(), "kubelet's socket is gone; what is registered stays until a kubelet takes connections");
            is_told = true;
        }
    }
}

/// Until there is a socket of kubelet that is not this one.
async fn until_replaced(kubelet: &Path, before: Option<FileId>, interval: Duration) {
    loop {
        let now = FileId::of(kubelet);
        if now.is_some() && now != before {
            return;
        }
        sleep(interval).await;
    }
}

/// Returns when kubelet takes connections; a kubelet that has ended leaves its socket's file behind.
///
/// kubelet fails running pods whose init containers hold devices of a resource that is not registered when it looks at
/// the pods, less than a second after it takes connections, so this looks often.
async fn wait_for_kubelet(kubelet: &Path, interval: Duration) -> FileId {
    let interval = interval.min(Duration::from_millis(100));
    let mut is_told = false;
    loop {
        if let Some(id) = FileId::of(kubelet)
            && UnixStream::connect(kubelet).await.is_ok()
        {
            return id;
        }
        if !is_told {
            warn!(socket = %kubelet.display(), "kubelet takes no connection: is it running, and is its directory mounted here? Waiting for it");
            is_told = true;
        }
        sleep(interval).await;
    }
}

async fn register(kubelet: &Path, request: RegisterRequest) -> Result<(), RegistrationError> {
    let path = kubelet.to_owned();
    let connect = tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    // The address is not used, its host becomes the authority that grpc-go expects.
    let channel = Endpoint::from_static("http://localhost")
        .connect_with_connector(connect)
        .await;
    let channel = channel.map_err(|source| RegistrationError::Connect {
        path: kubelet.to_owned(),
        source,
    })?;
    let resource = request.resource_name.clone();
    let refused = |source| RegistrationError::Refused {
        resource,
        source: Box::new(source),
    };
    RegistrationClient::new(channel)
        .register(request)
        .await
        .map_err(refused)?;
    Ok(())
}

/// A running server and its streams.
struct Serving {
    stop: DropGuard,
    streams: watch::Sender<Streams>,
    task: JoinHandle<()>,
}

impl Serving {
    fn start(resource: ExtendedResource, node: Arc<NodeState>, incoming: UnixListenerStream) -> Self {
        let stop = CancellationToken::new();
        let streams = watch::Sender::new(Streams::default());
        let service = DeviceService::new(resource, node, streams.clone(), stop.clone());
        let service = DevicePluginServer::new(service).max_decoding_message_size(MAX_REQUEST_BYTES);
        let server = Server::builder().add_service(service);
        let guard = stop.clone().drop_guard();
        let task = tokio::spawn(async move {
            let ended = server.serve_with_incoming_shutdown(incoming, stop.cancelled_owned());
            if let Err(error) = ended.await {
                warn!(
                    error = one_line(&error),
                    ?resource,
                    "the server of a resource has failed"
                );
            }
        });
        Self {
            stop: guard,
            streams,
            task,
        }
    }

    /// Ends the streams, then the connections.
    async fn close(mut self) {
        drop(self.stop);
        if timeout(CLOSING, &mut self.task).await.is_err() {
            self.task.abort();
        }
    }
}
