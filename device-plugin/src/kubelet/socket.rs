//! The socket files of this plugin and of kubelet, and the registration over kubelet's socket.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use daemon::api_server::one_line;
use proto::kubelet::DEVICE_PLUGIN_VERSION;
use proto::kubelet::deviceplugin::RegisterRequest;
use proto::kubelet::deviceplugin::device_plugin_server::{DevicePlugin, DevicePluginServer};
use proto::kubelet::deviceplugin::registration_client::RegistrationClient;
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::transport::Server;
use tracing::warn;

use crate::node::unix_channel::connect;

use super::server::OPTIONS;

pub(super) const KUBELET_SOCKET: &str = "kubelet.sock";

/// Longest wait for a server's graceful end, after which the server is aborted.
const CLOSE_LIMIT: Duration = Duration::from_secs(2);

/// The reason that a resource is not registered with kubelet. The plugin tries again.
#[derive(Debug, thiserror::Error)]
pub(super) enum RegistrationError {
    #[error("cannot listen on {}", path.display())]
    Listen {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot connect to kubelet at {}", path.display())]
    Connect {
        path: PathBuf,
        #[source]
        source: tonic::transport::Error,
    },
    #[error("kubelet does not accept {resource}")]
    Refused {
        resource: String,
        #[source]
        source: Box<tonic::Status>,
    },
    #[error("kubelet did not answer within {0:?}")]
    NoAnswer(Duration),
}

/// The identity of the file at a path. The inode number alone is not enough, as numbers of removed files are used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileId {
    device: u64,
    inode: u64,
    modified: (i64, i64),
}

impl FileId {
    /// Reads the identity of the file at `path`; none if there is no file.
    pub(super) fn read(path: &Path) -> Option<Self> {
        let found = fs::symlink_metadata(path).ok()?;
        Some(Self {
            device: found.dev(),
            inode: found.ino(),
            modified: (found.mtime(), found.mtime_nsec()),
        })
    }
}

/// A socket file that this process listens on. Dropping it removes the file, unless it has been replaced.
#[derive(Debug)]
pub(super) struct OwnSocket {
    path: PathBuf,
    id: FileId,
}

impl OwnSocket {
    /// Listens at `path`, in place of a socket that an earlier process left there.
    fn bind(path: PathBuf) -> io::Result<(Self, UnixListener)> {
        match fs::symlink_metadata(&path) {
            // The system binds no path that exists, whether anything listens there or not.
            Ok(found) if found.file_type().is_socket() => fs::remove_file(&path)?,
            Ok(_) => return Err(io::Error::other("there is a file that is no socket")),
            Err(_) => {}
        }
        let listener = UnixListener::bind(&path)?;
        // Only kubelet connects, which is root. The directory keeps others out too, unless its mode was changed.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
        let id = FileId::read(&path).ok_or_else(|| io::Error::other("the socket has vanished"))?;
        Ok((Self { path, id }, listener))
    }

    /// True if the file is still there and this process made it.
    pub(super) fn is_in_place(&self) -> bool {
        FileId::read(&self.path) == Some(self.id)
    }
}

impl Drop for OwnSocket {
    fn drop(&mut self) {
        // The next process may listen at this path already.
        if self.is_in_place() {
            // If the removal fails, the next process replaces the file.
            let _ = fs::remove_file(&self.path);
        }
    }
}

pub(super) struct PluginServer {
    stop: DropGuard,
    task: JoinHandle<()>,
    pub(super) socket: OwnSocket,
}

impl PluginServer {
    /// Listens at `path`. `stop` ends the service's streams and then the server.
    pub(super) fn start<S: DevicePlugin>(
        path: PathBuf,
        service: DevicePluginServer<S>,
        stop: CancellationToken,
    ) -> Result<Self, RegistrationError> {
        let bound = OwnSocket::bind(path.clone());
        let (socket, listener) = bound.map_err(|source| RegistrationError::Listen { path, source })?;
        let server = Server::builder().add_service(service);
        // A server that is dropped without `close` ends its streams too.
        let guard = stop.clone().drop_guard();
        let task = tokio::spawn(async move {
            let incoming = UnixListenerStream::new(listener);
            let ended = server.serve_with_incoming_shutdown(incoming, stop.cancelled_owned());
            if let Err(error) = ended.await {
                warn!(error = one_line(&error), "the server of a resource has failed");
            }
        });
        Ok(Self {
            stop: guard,
            task,
            socket,
        })
    }

    /// Ends the streams, then the connections.
    pub(super) async fn close(mut self) {
        // A graceful end waits for open streams, and kubelet never ends its own.
        drop(self.stop);
        if timeout(CLOSE_LIMIT, &mut self.task).await.is_err() {
            self.task.abort();
        }
    }
}

/// Returns the identity of kubelet's socket when kubelet takes connections.
pub(super) async fn wait_for_kubelet(kubelet: &Path, interval: Duration) -> FileId {
    // The loop looks often: less than a second after it takes connections, kubelet fails the running pods whose init containers
    // hold devices of a resource that is not registered.
    let interval = interval.min(Duration::from_millis(100));
    let mut is_logged = false;
    loop {
        if let Some(id) = FileId::read(kubelet)
            // A kubelet that has ended leaves the file behind.
            && UnixStream::connect(kubelet).await.is_ok()
        {
            return id;
        }
        if !is_logged {
            warn!(socket = %kubelet.display(), "kubelet takes no connection: is it running, and is its directory mounted here? Waiting for it");
            is_logged = true;
        }
        sleep(interval).await;
    }
}

/// Registers `resource`, which this plugin serves at the socket `endpoint`.
pub(super) async fn register(
    kubelet: &Path,
    endpoint: &str,
    resource: &str,
) -> Result<(), RegistrationError> {
    let path = kubelet.to_owned();
    let channel = connect(kubelet).await;
    let channel = channel.map_err(|source| RegistrationError::Connect { path, source })?;
    let request = RegisterRequest {
        version: DEVICE_PLUGIN_VERSION.to_owned(),
        endpoint: endpoint.to_owned(),
        resource_name: resource.to_owned(),
        options: Some(OPTIONS),
    };
    let registered = RegistrationClient::new(channel).register(request).await;
    registered.map(drop).map_err(|source| RegistrationError::Refused {
        resource: resource.to_owned(),
        source: Box::new(source),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_socket_is_for_its_owner_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.sock");
        let (socket, _listener) = OwnSocket::bind(path.clone()).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(socket.is_in_place());
    }
}
