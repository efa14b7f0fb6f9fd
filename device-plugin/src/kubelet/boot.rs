//! Keeps kubelet from failing this node's pods after a boot, before the plugin's pod runs.
//!
//! kubelet admits its pods again less than a second after it accepts connections, and fails those whose devices no plugin lists;
//! the plugin's own pod starts seconds later. Until then a service of the host ([`run`]) lists the devices that kubelet's
//! checkpoint names, and ends when the plugin serves. The service uses no device, no pod and no API server: it allocates nothing
//! and lets no container start (kubelet tries again), so the plugin alone decides the devices of a container.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::pin::Pin;
use std::time::Duration;

use futures::{Stream, StreamExt, stream};
use proto::kubelet::HEALTHY;
use proto::kubelet::deviceplugin::device_plugin_server::{DevicePlugin, DevicePluginServer};
use proto::kubelet::deviceplugin::{
    AllocateRequest, AllocateResponse, Device, DevicePluginOptions, Empty, ListAndWatchResponse,
    PreStartContainerRequest, PreStartContainerResponse, PreferredAllocationRequest,
    PreferredAllocationResponse,
};
use tokio::net::UnixStream;
use tokio::time::{sleep, timeout};
use tonic::{Request, Response, Status};
use tracing::{info, warn};

use crate::devices::extended_resource::{ExtendedResource, ExtendedResourceNames};
use crate::node::kubelet_checkpoint::{self, CheckpointError};
use tokio_util::sync::CancellationToken;

use super::server::OPTIONS;
use super::socket::{KUBELET_SOCKET, PluginServer, register, wait_for_kubelet};

/// Pause between two checks of sockets: kubelet admits pods some 100 ms after its socket is there.
const POLL: Duration = Duration::from_millis(10);

/// Longest time for which the host's service lists devices: after it the plugin's pod is not expected any more.
const LIST_LIMIT: Duration = Duration::from_secs(300);

/// Longest time for which the plugin waits for the host's service to end.
const END_LIMIT: Duration = Duration::from_secs(5);

/// Time for kubelet to notice that the host's service has ended its stream. A late notice would end the plugin's registration.
const STREAM_END_DELAY: Duration = Duration::from_millis(200);

/// A resource of the plugin whose devices the host's service lists.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ListedResource {
    resource: ExtendedResource,
    name: String,
    ids: BTreeSet<String>,
}

/// The plugin's resources in kubelet's checkpoint, each with the device IDs that its last list had and those that pods hold.
fn resources_to_list(
    dir: &Path,
    names: &ExtendedResourceNames,
) -> Result<Vec<ListedResource>, CheckpointError> {
    let mut by_name = BTreeMap::<String, BTreeSet<String>>::new();
    for (name, ids) in kubelet_checkpoint::registered(dir)? {
        by_name.entry(name).or_default().extend(ids);
    }
    // The list that kubelet kept may lack devices that pods hold.
    for entry in kubelet_checkpoint::read(dir)? {
        by_name
            .entry(entry.resource_name)
            .or_default()
            .extend(entry.device_ids);
    }
    let mut resources = Vec::new();
    for resource in ExtendedResource::ALL {
        if let Some(name) = names.of(resource)
            && let Some(ids) = by_name.remove(name)
            && !ids.is_empty()
        {
            resources.push(ListedResource {
                resource,
                name: name.to_owned(),
                ids,
            });
        }
    }
    Ok(resources)
}

fn socket_name(resource: ExtendedResource) -> String {
    format!("boot-{}", resource.socket())
}

/// Lists the devices of kubelet's checkpoint until the plugin serves, at most for five minutes, or until `stop`.
///
/// # Errors
/// kubelet's checkpoint cannot be read, or kubelet does not accept a registration.
pub async fn run(dir: &Path, names: &ExtendedResourceNames, stop: CancellationToken) -> anyhow::Result<()> {
    // Before kubelet starts: when it writes the checkpoint again, the devices of plugins that have not registered are missing.
    let resources = resources_to_list(dir, names)?;
    if resources.is_empty() {
        info!("kubelet's checkpoint has no device of the plugin");
        return Ok(());
    }
    let kubelet = dir.join(KUBELET_SOCKET);
    tokio::select! {
        () = stop.cancelled() => return Ok(()),
        _ = wait_for_kubelet(&kubelet, POLL) => {}
    }
    let mut listings = Vec::new();
    for found in &resources {
        let end_of_streams = CancellationToken::new();
        let service = DevicePluginServer::new(BootService {
            ids: found.ids.clone(),
            stop: end_of_streams.clone(),
        });
        let socket = socket_name(found.resource);
        listings.push(PluginServer::start(dir.join(&socket), service, end_of_streams)?);
        register(&kubelet, &socket, &found.name).await?;
        info!(
            resource = found.name,
            n_devices = found.ids.len(),
            "listing the devices of kubelet's checkpoint"
        );
    }
    tokio::select! {
        () = stop.cancelled() => {}
        served = timeout(LIST_LIMIT, until_served(dir)) => {
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

/// Returns when the plugin listens on one of its sockets.
async fn until_served(dir: &Path) {
    while !is_any_open(dir, |resource| resource.socket().to_owned()).await {
        sleep(POLL).await;
    }
}

/// Returns when the host's service lists devices no more, or after five seconds: the plugin registers all the same then.
pub(crate) async fn until_ended(dir: &Path) {
    if !is_any_open(dir, socket_name).await {
        return;
    }
    let ended = async {
        while is_any_open(dir, socket_name).await {
            sleep(POLL).await;
        }
    };
    if timeout(END_LIMIT, ended).await.is_err() {
        warn!("the host's service has not stopped listing devices; registering all the same");
    }
    sleep(STREAM_END_DELAY).await;
}

/// True if a process listens on the socket `name` of any resource.
async fn is_any_open(dir: &Path, name: impl Fn(ExtendedResource) -> String) -> bool {
    for resource in ExtendedResource::ALL {
        // The file alone says nothing: a process that was killed leaves it behind.
        if UnixStream::connect(dir.join(name(resource))).await.is_ok() {
            return true;
        }
    }
    false
}

/// The host's gRPC service for one resource, which only lists devices.
struct BootService {
    ids: BTreeSet<String>,
    stop: CancellationToken,
}

/// The error for calls that only the plugin can answer: kubelet tries starts again, and fails pods that it newly admits.
fn unavailable<T>() -> Result<Response<T>, Status> {
    Err(Status::unavailable(
        "the node has booted, and gpushare-device-plugin does not run yet",
    ))
}

#[tonic::async_trait]
impl DevicePlugin for BootService {
    type ListAndWatchStream = Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        Ok(Response::new(OPTIONS))
    }

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let mut devices = Vec::new();
        for id in &self.ids {
            devices.push(Device {
                id: id.clone(),
                // kubelet admits no pod again whose devices are unhealthy, and only the plugin probes their health.
                health: HEALTHY.to_owned(),
                ..Device::default()
            });
        }
        let list = Ok(ListAndWatchResponse { devices });
        // kubelet keeps the resource as long as the stream is open, so the stream stays open behind the list until `stop`.
        let lists = stream::iter([list]).chain(stream::pending());
        let until_stop = lists.take_until(self.stop.clone().cancelled_owned());
        Ok(Response::new(Box::pin(until_stop)))
    }

    async fn get_preferred_allocation(
        &self,
        _: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        unavailable()
    }

    async fn allocate(&self, _: Request<AllocateRequest>) -> Result<Response<AllocateResponse>, Status> {
        unavailable()
    }

    async fn pre_start_container(
        &self,
        _: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        unavailable()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tokio::net::UnixListener;

    use super::*;

    fn entry(resource: &str, ids: &[&str]) -> Value {
        json!({"PodUID": "u", "ContainerName": "c", "ResourceName": resource, "DeviceIDs": {"-1": ids}})
    }

    /// The checkpoint of a kubelet that ended soon after a boot lacks the listed devices, and has those that pods hold.
    #[test]
    fn after_a_boot_registered_devices_and_those_of_pods_are_listed() {
        let dir = tempfile::tempdir().unwrap();
        let registered = json!({
            "aliyun.com/gpu-mem": ["a", "b"], "koordinator.sh/gpu.shared": null, "koordinator.sh/rdma": [], "nvidia.com/gpu": ["n"],
        });
        let entries = json!([
            entry("aliyun.com/gpu-mem", &["b", "c"]),
            entry("koordinator.sh/gpu.shared", &["d"]),
            entry("x.com/y", &["e"])
        ]);
        kubelet_checkpoint::tests::write(dir.path(), &entries, &registered);
        let found = resources_to_list(dir.path(), &ExtendedResourceNames::default()).unwrap();
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
    async fn after_a_boot_a_node_without_devices_lists_none() {
        let dir = tempfile::tempdir().unwrap();
        kubelet_checkpoint::tests::write(dir.path(), &Value::Null, &json!({}));
        run(
            dir.path(),
            &ExtendedResourceNames::default(),
            CancellationToken::new(),
        )
        .await
        .unwrap();
    }

    #[tokio::test]
    async fn the_plugin_waits_until_the_boot_service_has_ended() {
        let dir = tempfile::tempdir().unwrap();
        until_ended(dir.path()).await;
        let socket = dir.path().join(socket_name(ExtendedResource::Memory));
        let listener = UnixListener::bind(socket).unwrap();
        let mut left = std::pin::pin!(until_ended(dir.path()));
        assert!(timeout(5 * POLL, &mut left).await.is_err());
        drop(listener);
        timeout(END_LIMIT, left).await.unwrap();
    }
}
