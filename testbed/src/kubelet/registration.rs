//! The Registration service, and the life of a plugin from Register to the end of its stream.
//!
//! A plugin is found by its resource name only, also when a stream ends: the late end of a replaced stream
//! therefore disconnects its successor, as in kubelet 1.36, unless that fault is turned off.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use proto::kubelet::DEVICE_PLUGIN_VERSION;
use proto::kubelet::deviceplugin::registration_server::Registration;
use proto::kubelet::deviceplugin::{Empty, RegisterRequest};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::endpoint::Endpoint;
use super::fit::is_extended;
use super::process::Process;

/// A plugin whose stream is read.
#[derive(Debug)]
pub(crate) struct Plugin {
    endpoint: Arc<Endpoint>,
    /// Ends the stream when the connection is closed from this side.
    pub(crate) closed: CancellationToken,
}

/// kubelet.sock.
#[derive(Debug)]
pub(crate) struct RegistrationService(pub(crate) Arc<Process>);

#[tonic::async_trait]
impl Registration for RegistrationService {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let RegisterRequest {
            version,
            endpoint,
            resource_name,
            ..
        } = request.into_inner();
        if version != DEVICE_PLUGIN_VERSION {
            let supported = format!("[{DEVICE_PLUGIN_VERSION}]");
            return Err(Status::unknown(format!(
                "requested API version \"{version}\" is not supported by kubelet. Supported version is {supported}"
            )));
        }
        if !is_extended(&resource_name) {
            return Err(Status::unknown(format!(
                "the ResourceName \"{resource_name}\" is invalid"
            )));
        }
        self.0
            .connect(&resource_name, &endpoint)
            .await
            .map_err(|error| Status::unknown(error.to_string()))?;
        Ok(Response::new(Empty {}))
    }
}

impl Process {
    async fn connect(
        self: &Arc<Self>,
        resource: &str,
        socket: &str,
    ) -> Result<(), super::endpoint::ConnectError> {
        let path = self.config.plugin_dir().join(socket);
        let endpoint = Arc::new(Endpoint::connect(resource, &path, self.config.delays.dial).await?);
        let plugin = Arc::new(Plugin {
            endpoint: Arc::clone(&endpoint),
            closed: CancellationToken::new(),
        });
        self.plugins().insert(resource.to_owned(), Arc::clone(&plugin));
        self.devices().connect(resource, endpoint);
        tracing::info!(resource, socket, "device plugin connected");
        self.counts.registrations.fetch_add(1, Ordering::AcqRel);
        self.changed();
        let process = Arc::clone(self);
        let resource = resource.to_owned();
        self.spawn(async move { process.run_plugin(&resource, plugin).await });
        Ok(())
    }

    async fn run_plugin(&self, resource: &str, plugin: Arc<Plugin>) {
        plugin
            .closed
            .run_until_cancelled(self.read_stream(resource, &plugin.endpoint))
            .await;
        let mut plugins = self.plugins();
        let replaced = plugins
            .get(resource)
            .is_none_or(|current| !Arc::ptr_eq(current, &plugin));
        if replaced && !self.config.faults.late_end_disconnects_successor {
            return;
        }
        let Some(current) = plugins.remove(resource) else {
            return;
        };
        drop(plugins);
        current.closed.cancel();
        self.devices().disconnect(resource);
        tracing::info!(resource, "device plugin disconnected");
        self.devices_changed();
    }

    async fn read_stream(&self, resource: &str, endpoint: &Endpoint) {
        let mut stream = match endpoint.list_and_watch().await {
            Ok(stream) => stream,
            Err(error) => return tracing::warn!(resource, %error, "ListAndWatch ended unexpectedly"),
        };
        loop {
            match stream.message().await {
                Ok(Some(response)) => {
                    self.devices().offer(resource, response.devices);
                    self.write_checkpoint();
                    self.devices_changed();
                }
                Ok(None) => return tracing::warn!(resource, "ListAndWatch ended: EOF"),
                Err(error) => return tracing::warn!(resource, %error, "ListAndWatch ended unexpectedly"),
            }
        }
    }
}
