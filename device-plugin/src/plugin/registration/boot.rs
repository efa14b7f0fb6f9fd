//! Keeps kubelet from failing this node's pods after a boot, before the plugin's pod runs.
//!
//! kubelet admits its pods again less than a second after it takes connections, and fails those whose devices no plugin lists;
//! the plugin's own pod starts seconds later. A service of the host ([`run`]) lists the devices that kubelet's checkpoint names
//! meanwhile, and ends when the plugin serves. It knows no device, no pod and no API server: it allocates nothing, and starts
//! no container, which kubelet tries again. So what a container gets is decided by the plugin alone.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::Duration;

use daemon::api_server::one_line;
use futures::{Stream, StreamExt, stream};
use proto::kubelet::deviceplugin::device_plugin_server::{DevicePlugin, DevicePluginServer};
use proto::kubelet::deviceplugin::{
    AllocateRequest, AllocateResponse, Device, DevicePluginOptions, Empty, ListAndWatchResponse,
    PreStartContainerRequest, PreStartContainerResponse, PreferredAllocationRequest,
    PreferredAllocationResponse, RegisterRequest,
};
use proto::kubelet::{DEVICE_PLUGIN_VERSION, HEALTHY};
use tokio::net::UnixStream;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::transport::Server;
use tonic::{Request, Response, Status};
use tracing::{info, warn};

use crate::extended_resource::{ExtendedResource, ExtendedResourceNames};
use crate::kubelet_checkpoint::{self, CheckpointError};
use crate::plugin::server::OPTIONS;

use super::socket::OwnSocket;
use super::{CLOSING, KUBELET_SOCKET, RegistrationError, register, wait_for_kubelet};

/// Pause between looks at sockets: kubelet admits pods some 100 ms after its socket is there.
const LOOK: Duration = Duration::from_millis(10);

/// Longest time for which devices are listed without the plugin. After that its pod will not come.
const LONGEST: Duration = Duration::from_secs(300);

/// Longest time for which the plugin waits for the host's service to end.
const PATIENCE: Duration = Duration::from_secs(5);

/// The time that kubelet needs to notice the end of a stream: one that it notices after the next registration would end that.
const NOTICE: Duration = Duration::from_millis(200);

/// Why devices are not listed after a boot.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// It is not known which devices kubelet remembers.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// kubelet does not know of them.
    #[error(transparent)]
    Registration(#[from] RegistrationError),
}

/// A resource that kubelet remembers.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Remembered {
    resource: ExtendedResource,
    name: String,
    ids: BTreeSet<String>,
}

/// The plugin's resources in kubelet's checkpoint: the devices that were listed last, and those that pods hold.
fn remembered(dir: &Path, names: &ExtendedResourceNames) -> Result<Vec<Remembered>, CheckpointError> {
    let mut by_name: BTreeMap<String, BTreeSet<String>> = kubelet_checkpoint::registered(dir)?
        .into_iter()
        .map(|(name, ids)| (name, ids.into_iter().collect()))
        .collect();
    for entry in kubelet_checkpoint::read(dir)? {
        by_name
            .entry(entry.resource_name)
            .or_default()
            .extend(entry.device_ids);
    }
    let own = ExtendedResource::ALL
        .into_iter()
        .filter_map(|resource| Some((resource, names.of(resource)?)));
    let own = own.filter_map(|(resource, name)| {
        Some(Remembered {
            resource,
            name: name.to_owned(),
            ids: by_name.remove(name)?,
        })
    });
    Ok(own.filter(|found| !found.ids.is_empty()).collect())
}

/// The socket of the host's service.
fn socket_name(resource: ExtendedResource) -> String {
    format!("boot-{}", resource.socket())
}

/// Lists the devices that kubelet remembers until the plugin serves, for five minutes, or until the end is asked for.
///
/// # Errors
/// kubelet's checkpoint cannot be read, or kubelet does not take a registration.
pub async fn run(
    dir: &Path,
    names: &ExtendedResourceNames,
    stop: CancellationToken,
) -> Result<(), BootError> {
    // Before kubelet starts: it may forget what was listed when it writes the checkpoint again.
    let remembered = remembered(dir, names)?;
    if remembered.is_empty() {
        info!("kubelet remembers no device of the plugin");
        return Ok(());
    }
    let kubelet = dir.join(KUBELET_SOCKET);
    tokio::select! {
        () = stop.cancelled() => return Ok(()),
        _ = wait_for_kubelet(&kubelet, LOOK) => {}
    }
    let mut listings = Vec::new();
    for found in &remembered {
        listings.push(Listing::start(dir, found)?);
        let request = RegisterRequest {
            version: DEVICE_PLUGIN_VERSION.to_owned(),
            endpoint: socket_name(found.resource),
            resource_name: found.name.clone(),
            options: Some(OPTIONS),
        };
        register(&kubelet, request).await?;
        info!(
            resource = found.name,
            n_devices = found.ids.len(),
            "listing the devices that kubelet remembers"
        );
    }
    tokio::select! {
        () = stop.cancelled() => {}
        served = timeout(LONGEST, until_served(dir)) => {
            if served.is_ok() {
                info!("the plugin serves");
            } else {
                warn!("the plugin does not serve; its devices are no longer listed");
            }
        }
    }
    for listing in listings {
        listing.close().await;
    }
    Ok(())
}

/// Returns when the plugin listens.
async fn until_served(dir: &Path) {
    while !is_any_open(dir, |resource| resource.socket().to_owned()).await {
        sleep(LOOK).await;
    }
}

/// Returns when no service of the host lists devices any more, at once if none does. A service that does not end is left alone.
pub async fn until_left(dir: &Path) {
    if !is_any_open(dir, socket_name).await {
        return;
    }
    let left = async {
        while is_any_open(dir, socket_name).await {
            sleep(LOOK).await;
        }
    };
    if timeout(PATIENCE, left).await.is_err() {
        warn!("the host's service goes on listing devices; registering all the same");
    }
    sleep(NOTICE).await;
}

async fn is_any_open(dir: &Path, name: impl Fn(ExtendedResource) -> String) -> bool {
    for resource in ExtendedResource::ALL {
        if UnixStream::connect(dir.join(name(resource))).await.is_ok() {
            return true;
        }
    }
    false
}

/// One listed resource.
struct Listing {
    stop: DropGuard,
    task: JoinHandle<()>,
    _socket: OwnSocket,
}

impl Listing {
    fn start(dir: &Path, found: &Remembered) -> Result<Self, RegistrationError> {
        let path: PathBuf = dir.join(socket_name(found.resource));
        let (socket, listener) =
            OwnSocket::bind(path.clone()).map_err(|source| RegistrationError::Listen {
                path: path.clone(),
                source,
            })?;
        let stop = CancellationToken::new();
        let service = DevicePluginServer::new(Devices {
            ids: found.ids.clone(),
            stop: stop.clone(),
        });
        let guard = stop.clone().drop_guard();
        let task = tokio::spawn(async move {
            let server = Server::builder().add_service(service);
            let incoming = UnixListenerStream::new(listener);
            let ended = server.serve_with_incoming_shutdown(incoming, stop.cancelled_owned());
            if let Err(error) = ended.await {
                warn!(error = one_line(&error), "the server of a resource has failed");
            }
        });
        Ok(Self {
            stop: guard,
            task,
            _socket: socket,
        })
    }

    /// Ends the stream, then the connection.
    async fn close(mut self) {
        drop(self.stop);
        if timeout(CLOSING, &mut self.task).await.is_err() {
            self.task.abort();
        }
    }
}

/// The devices of one resource.
struct Devices {
    ids: BTreeSet<String>,
    stop: CancellationToken,
}

fn not_yet<T>() -> Result<Response<T>, Status> {
    Err(Status::unavailable(
        "the node has booted, and gpushare-device-plugin does not run yet",
    ))
}

#[tonic::async_trait]
impl DevicePlugin for Devices {
    type ListAndWatchStream = Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(OPTIONS))
    }

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let device = |id: &String| Device {
            id: id.clone(),
            health: HEALTHY.to_owned(),
            ..Device::default()
        };
        let list = ListAndWatchResponse {
            devices: self.ids.iter().map(device).collect(),
        };
        let end = stream::once(self.stop.clone().cancelled_owned()).filter_map(|()| std::future::ready(None));
        Ok(Response::new(Box::pin(
            stream::once(std::future::ready(Ok(list))).chain(end),
        )))
    }

    async fn get_preferred_allocation(
        &self,
        _: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        not_yet()
    }

    async fn allocate(&self, _: Request<AllocateRequest>) -> Result<Response<AllocateResponse>, Status> {
        not_yet()
    }

    async fn pre_start_container(
        &self,
        _: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        not_yet()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tokio::net::UnixListener;

    use super::*;

    fn checkpoint(dir: &Path, registered: &Value, entries: &Value) {
        let text =
            json!({"Data": {"PodDeviceEntries": entries, "RegisteredDevices": registered}, "Checksum": 1})
                .to_string();
        std::fs::write(dir.join(kubelet_checkpoint::FILE), text).unwrap();
    }

    fn entry(resource: &str, ids: &[&str]) -> Value {
        json!({"PodUID": "u", "ContainerName": "c", "ResourceName": resource, "DeviceIDs": {"-1": ids}})
    }

    /// A kubelet that ended soon after a boot has forgotten what was listed, and knows what pods hold.
    #[test]
    fn remembers_what_was_listed_and_what_pods_hold() {
        let dir = tempfile::tempdir().unwrap();
        let others =
            json!({"koordinator.sh/gpu.shared": null, "koordinator.sh/rdma": [], "nvidia.com/gpu": ["n"]});
        let mut registered = json!({"aliyun.com/gpu-mem": ["a", "b"]});
        registered
            .as_object_mut()
            .unwrap()
            .extend(others.as_object().unwrap().clone());
        let entries = json!([
            entry("aliyun.com/gpu-mem", &["b", "c"]),
            entry("koordinator.sh/gpu.shared", &["d"]),
            entry("x.com/y", &["e"])
        ]);
        checkpoint(dir.path(), &registered, &entries);
        let found = remembered(dir.path(), &ExtendedResourceNames::default()).unwrap();
        let found: Vec<_> = found
            .iter()
            .map(|found| {
                (
                    found.name.as_str(),
                    found.ids.iter().map(String::as_str).collect(),
                )
            })
            .collect();
        assert_eq!(
            found,
            [
                ("koordinator.sh/gpu.shared", vec!["d"]),
                ("aliyun.com/gpu-mem", vec!["a", "b", "c"])
            ]
        );
    }

    #[tokio::test]
    async fn a_node_without_devices_needs_nothing() {
        let dir = tempfile::tempdir().unwrap();
        checkpoint(dir.path(), &json!({}), &json!(null));
        run(
            dir.path(),
            &ExtendedResourceNames::default(),
            CancellationToken::new(),
        )
        .await
        .unwrap();
    }

    #[tokio::test]
    async fn the_plugin_waits_for_the_host_s_service_to_end() {
        let dir = tempfile::tempdir().unwrap();
        until_left(dir.path()).await;
        let socket = dir.path().join(socket_name(ExtendedResource::Memory));
        let listener = UnixListener::bind(socket).unwrap();
        let mut left = std::pin::pin!(until_left(dir.path()));
        assert!(timeout(5 * LOOK, &mut left).await.is_err());
        drop(listener);
        timeout(PATIENCE, left).await.unwrap();
    }
}
