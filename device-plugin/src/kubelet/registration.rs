//! Keeps one resource registered with kubelet, through restarts of kubelet and of this plugin.
//!
//! kubelet removes the sockets of all plugins when it starts, and never connects to a plugin again by itself. So the plugin
//! closes everything when the stream of the device list has ended, or when the file of kubelet's socket or of its own was
//! removed or replaced and kubelet accepts connections, and only then registers again: kubelet finds plugins by resource name,
//! and the late end of an old stream would disconnect a new one.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use proto::kubelet::deviceplugin::device_plugin_server::DevicePluginServer;
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

use crate::devices::extended_resource::{ExtendedResource, Registrations};
use crate::devices::fleet::NodeFleet;
use crate::start::StartChecker;
use crate::start::node_state::NodeState;
use daemon::api_server::one_line;
use daemon::tick::next_tick;
use tokio_util::sync::CancellationToken;

use super::boot;
use super::server::DeviceService;
use super::socket::{FileId, KUBELET_SOCKET, PluginServer, RegistrationError, register, wait_for_kubelet};

/// Longest message of kubelet that the plugin reads: a request for preferred IDs has all available IDs, some of them twice.
const MAX_REQUEST_BYTES: usize = 4 * proto::kubelet::MAX_MESSAGE_BYTES;

/// A registration that has lasted this long was no failure, so the pause before the next one is the shortest.
const STABLE: Duration = Duration::from_secs(5);

/// Longest pause between registrations.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// kubelet's device plugin directory, and the limits of registrations in it.
#[derive(Clone, Debug)]
pub struct KubeletDir {
    /// The directory.
    pub path: PathBuf,
    /// The interval at which the plugin tries to connect to a kubelet that does not take connections, and at which it compares the
    /// socket files where changes of the directory cannot be watched.
    pub interval: Duration,
    /// Longest time for kubelet to answer a registration, and to open the stream after it.
    pub limit: Duration,
}

impl KubeletDir {
    /// The directory at this path, with an interval of 1 s and a limit of 10 s.
    pub fn new(path: PathBuf) -> Self {
        Self {
            path,
            interval: Duration::from_secs(1),
            limit: Duration::from_secs(10),
        }
    }
}

/// A resource that the plugin registers and serves, and everything that its service needs.
#[derive(Clone)]
#[expect(missing_debug_implementations, reason = "a client has none")]
pub struct Registration {
    /// kubelet's device plugin directory.
    pub dir: KubeletDir,
    /// The resource.
    pub resource: ExtendedResource,
    /// The state of this node, on which the answers to kubelet depend.
    pub node: Arc<NodeState>,
    /// Checks each container before it starts.
    pub starts: Arc<StartChecker>,
    /// True for each resource of this node that is registered; `Registration` sets the value of its own resource.
    pub registrations: watch::Sender<Registrations>,
    /// Changes of socket files in kubelet's directory, by [`watch_sockets`](super::socket_changes::watch_sockets).
    pub socket_changes: watch::Receiver<()>,
}

/// The reason that a registration has ended, for the log.
type End = &'static str;

const KUBELET_RESTARTED: End = "kubelet has restarted";
const SOCKET_REMOVED: End = "the plugin's socket was removed";

impl Registration {
    /// Serves the resource, and keeps it registered, while this node has devices of it, until `stop`.
    pub async fn keep_offered(self, stop: CancellationToken) {
        let mut fleet = self.node.fleet.clone();
        let is_there = |fleet: &Arc<NodeFleet>| fleet.advertises(self.resource, &self.node.settings.names);
        loop {
            // The readiness probe succeeds once all resources are registered, so one without devices passes for registered.
            self.set_registered(!is_there(&fleet.borrow()));
            tokio::select! {
                () = stop.cancelled() => return,
                found = fleet.wait_for(is_there) => if found.is_err() { return },
            }
            let serving_stop = stop.child_token();
            let mut serving = std::pin::pin!(self.keep_registered(serving_stop.clone()));
            tokio::select! {
                () = &mut serving => return,
                () = stop.cancelled() => {}
                // kubelet gets the empty list, and then the end of the stream.
                _ = fleet.wait_for(|fleet| !is_there(fleet)) => {}
            }
            // kubelet finds plugins by resource name: the end of this stream must not come after the next registration.
            serving_stop.cancel();
            serving.await;
            if stop.is_cancelled() {
                return;
            }
            info!(resource = ?self.resource, "this node has no device of this resource any more");
        }
    }

    fn set_registered(&self, is_registered: bool) {
        self.registrations
            .send_if_modified(|all| all.insert(self.resource, is_registered) != Some(is_registered));
    }

    /// Serves and registers the resource until `stop`. Returns at once if the resource has no name on this node.
    async fn keep_registered(&self, stop: CancellationToken) {
        // kubelet fails pods that it admits while a resource is not registered, so the next try comes soon.
        let shortest = self.dir.interval.min(Duration::from_millis(200));
        let Some(name) = self.node.settings.names.of(self.resource) else {
            return;
        };
        let mut pause = shortest;
        while !stop.is_cancelled() {
            let began = Instant::now();
            let kubelet = self.dir.path.join(KUBELET_SOCKET);
            let kubelet_id = FileId::read(&kubelet);
            let end = self.register_once(name, &stop).await;
            self.set_registered(false);
            // These ends are no failures, so the next registration needs no longer pause.
            let is_quick = matches!(end, Ok(Some(KUBELET_RESTARTED | SOCKET_REMOVED)));
            let longest = match &end {
                // kubelet is starting, or an ended kubelet left the socket file behind: trying again costs nothing.
                Err(RegistrationError::Connect { .. }) => Duration::from_secs(1),
                _ => LONGEST_PAUSE,
            };
            match end {
                Ok(None) => return,
                Ok(Some(reason)) => info!(resource = name, reason, "registering again"),
                Err(error) => {
                    warn!(
                        resource = name,
                        error = one_line(&error),
                        "not registered, trying again"
                    );
                }
            }
            // Another kubelet process remembers only its checkpoint, so the log of Allocate calls goes on from there.
            self.node.resume();
            pause = if is_quick || began.elapsed() >= STABLE {
                shortest
            } else {
                (pause * 2).min(longest)
            };
            tokio::select! {
                () = stop.cancelled() => return,
                () = sleep(pause) => {}
                // Failures with the kubelet before say nothing about another kubelet.
                () = until_other_kubelet(&kubelet, kubelet_id, self.socket_changes.clone()) => pause = shortest,
            }
        }
    }

    /// Listens, registers, and returns the reason for which the registration ended; none if that is `stop`.
    async fn register_once(
        &self,
        name: &str,
        stop: &CancellationToken,
    ) -> Result<Option<End>, RegistrationError> {
        let streams = watch::Sender::new(false);
        let streams_stop = CancellationToken::new();
        let service = DevicePluginServer::new(DeviceService {
            resource: self.resource,
            node: Arc::clone(&self.node),
            starts: Arc::clone(&self.starts),
            streams: streams.clone(),
            stop: streams_stop.clone(),
        });
        let service = service.max_decoding_message_size(MAX_REQUEST_BYTES);
        let path = self.dir.path.join(self.resource.socket());
        let serving = PluginServer::start(path, service, streams_stop)?;
        let ended = tokio::select! {
            () = stop.cancelled() => Ok(None),
            ended = self.register_and_wait(name, &serving, &streams) => ended.map(Some),
        };
        // kubelet would take a late end of this stream for that of the next registration.
        serving.close().await;
        ended
    }

    /// Registers when kubelet accepts connections, and returns the reason for which the registration ended.
    async fn register_and_wait(
        &self,
        name: &str,
        serving: &PluginServer,
        streams: &watch::Sender<bool>,
    ) -> Result<End, RegistrationError> {
        let kubelet = self.dir.path.join(KUBELET_SOCKET);
        let kubelet_id = wait_for_kubelet(&kubelet, self.dir.interval).await;
        // `boot::run` on the host may still list this resource after a boot. The late end of its stream would end this one's.
        boot::until_ended(&self.dir.path).await;
        // A kubelet that starts removes all sockets of plugins, also one that was made a moment ago.
        if !serving.socket.is_in_place() {
            return Ok(SOCKET_REMOVED);
        }
        let registration = async {
            let limit = self.dir.limit;
            timeout(limit, register(&kubelet, self.resource.socket(), name))
                .await
                .map_err(|_| RegistrationError::NoAnswer(limit))??;
            // kubelet answers before it opens the stream of the device list, and without a list it knows no device.
            let mut opened = streams.subscribe();
            if timeout(limit, opened.wait_for(|is_open| *is_open)).await.is_err() {
                return Ok("kubelet has not asked for the device list");
            }
            drop(opened);
            info!(resource = name, "registered with kubelet");
            self.set_registered(true);
            // Each open stream has a receiver, so the channel closes with the last of them.
            streams.closed().await;
            Ok("kubelet has closed the device list")
        };
        tokio::select! {
            ended = registration => ended,
            ended = self.until_socket_replaced((name, &kubelet), kubelet_id, serving) => Ok(ended),
        }
    }

    /// Returns when kubelet's socket file or the plugin's was removed or replaced, and kubelet accepts connections.
    async fn until_socket_replaced(
        &self,
        (name, kubelet): (&str, &Path),
        kubelet_id: FileId,
        serving: &PluginServer,
    ) -> End {
        let mut changes = self.socket_changes.clone();
        let mut is_logged = false;
        loop {
            let end = match FileId::read(kubelet) {
                Some(id) if id == kubelet_id && serving.socket.is_in_place() => {
                    is_logged = false;
                    next_change(&mut changes).await;
                    continue;
                }
                Some(id) if id == kubelet_id => SOCKET_REMOVED,
                Some(_) | None => KUBELET_RESTARTED,
            };
            // A kubelet whose socket file was removed may go on, and the open stream is its only connection to the plugin.
            if UnixStream::connect(kubelet).await.is_ok() {
                return end;
            }
            if !is_logged {
                warn!(resource = name, socket = %kubelet.display(), "kubelet's socket is gone; what is registered stays until a kubelet takes connections");
                is_logged = true;
            }
            // A kubelet makes the file of its socket before it takes connections.
            next_tick(self.dir.interval).await;
        }
    }
}

/// Returns when there is a socket file of kubelet other than `before`.
async fn until_other_kubelet(kubelet: &Path, before: Option<FileId>, mut changes: watch::Receiver<()>) {
    loop {
        let now = FileId::read(kubelet);
        if now.is_some() && now != before {
            return;
        }
        next_change(&mut changes).await;
    }
}

/// Waits for the next change; for ever after the end of `watch_sockets`, which ends the process.
async fn next_change(changes: &mut watch::Receiver<()>) {
    if changes.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}
