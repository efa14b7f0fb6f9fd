//! Writes the state of this plugin ([`proto::plugin_reports::PluginState`]) into the Node, for the scheduler.
//!
//! The state says whether the plugin serves kubelet. It is written when that changes and at no other time: when kubelet has opened all
//! device lists, when it has closed one, and before the process ends. kubelet never waits for it.

use std::time::Duration;

use daemon::api_server::{Backoff, Connection, one_line};
use futures::future::pending;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{Patch, PatchParams};
use proto::node::Node;
use proto::plugin_reports::PluginState;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::devices::extended_resource::Registrations;
use crate::node::api_request::{ApiRequestError, within};

use super::REQUEST_LIMIT;

/// The shortest and the longest pause after a failure: the scheduler sends no pods before it knows the state.
const PAUSES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(3));

/// Writes the state of this plugin.
#[derive(Debug)]
pub struct PluginStateWriter {
    nodes: Api<Node>,
    node_name: String,
    pod_uid: Option<String>,
    backoff: Backoff,
}

impl PluginStateWriter {
    /// A writer for the plugin of this node, which runs in the pod with this UID, if in a pod.
    pub fn new(connection: &Connection, node_name: String, pod_uid: Option<String>) -> Self {
        Self {
            nodes: Api::all(connection.client.clone()),
            node_name,
            pod_uid,
            backoff: connection.contact.backoff(PAUSES),
        }
    }

    /// Writes until the task is dropped. The plugin serves while all resources are registered; after `shutdown` is
    /// cancelled the plugin no longer counts as serving, and `is_written` becomes true once the Node says so.
    pub async fn run(
        mut self,
        mut registered: watch::Receiver<Registrations>,
        shutdown: CancellationToken,
        is_written: watch::Sender<bool>,
    ) {
        // The Node need not say that a plugin that has not served yet does not serve.
        let mut written = false;
        loop {
            let is_ending = shutdown.is_cancelled();
            let serving = !is_ending
                && registered
                    .borrow_and_update()
                    .values()
                    .all(|is_registered| *is_registered);
            if written != serving {
                match self.write(serving).await {
                    Ok(()) => {
                        written = serving;
                        self.backoff.reset();
                    }
                    Err(error) => {
                        warn!(
                            error = one_line(&error),
                            "writing the plugin's state is tried again"
                        );
                        self.backoff.pause().await;
                    }
                }
                // The flags may have changed during the write.
                continue;
            }
            // The process ends at some other place, and a task that ends would end it at once.
            if is_ending {
                is_written.send_replace(true);
                return pending().await;
            }
            tokio::select! {
                () = shutdown.cancelled() => {}
                Ok(()) = registered.changed() => {}
            }
        }
    }

    /// Writes into an annotation of the Node whether this plugin serves kubelet.
    async fn write(&self, serving: bool) -> Result<(), ApiRequestError> {
        let state = PluginState {
            serving,
            since: Timestamp::now(),
            pod: self.pod_uid.clone(),
        };
        let (params, patch) = (PatchParams::default(), Patch::Merge(state.patch()));
        let request = self.nodes.patch(&self.node_name, &params, &patch);
        within(REQUEST_LIMIT, "write the plugin's state", request).await?;
        info!(serving, "published whether this plugin serves kubelet");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use http::{Request, Response};
    use http_body_util::BodyExt;
    use kube::Client;
    use kube::client::Body;
    use tower_test::mock::{Handle, SendResponse};

    use super::*;
    use crate::devices::extended_resource::ExtendedResource;

    type Requests = Handle<Request<Body>, Response<Body>>;

    fn registrations(is_shared_registered: bool) -> Registrations {
        let shared = (ExtendedResource::Shared, is_shared_registered);
        [shared, (ExtendedResource::Memory, true)].into()
    }

    fn start() -> (
        Requests,
        watch::Sender<Registrations>,
        CancellationToken,
        watch::Receiver<bool>,
    ) {
        let (service, requests) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
        let writer = PluginStateWriter::new(
            &Client::new(service, "default").into(),
            "n1".to_owned(),
            Some("u".to_owned()),
        );
        let (registered, receiver) = watch::channel(registrations(false));
        let shutdown = CancellationToken::new();
        let (is_written, written) = watch::channel(false);
        tokio::spawn(writer.run(receiver, shutdown.clone(), is_written));
        (requests, registered, shutdown, written)
    }

    /// The next state that is written.
    async fn next(requests: &mut Requests) -> (PluginState, SendResponse<Response<Body>>) {
        let (request, answer) = requests.next_request().await.unwrap();
        assert_eq!(
            (request.method().as_str(), request.uri().path()),
            ("PATCH", "/api/v1/nodes/n1")
        );
        let body = request.into_body().collect().await.unwrap().to_bytes();
        let node: Node = serde_json::from_slice(&body).unwrap();
        (
            PluginState::read(node.metadata.annotations.as_ref())
                .unwrap()
                .unwrap(),
            answer,
        )
    }

    fn node() -> Response<Body> {
        Response::builder()
            .body(Body::from(br#"{"metadata":{"name":"n1"}}"#.to_vec()))
            .unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn each_change_is_written_until_the_api_server_accepts_it() {
        let (mut requests, registered, shutdown, mut written) = start();
        registered.send_replace(registrations(true));
        let (state, answer) = next(&mut requests).await;
        assert!(state.serving && state.pod.as_deref() == Some("u"));
        answer.send_response(Response::builder().status(503).body(Body::empty()).unwrap());
        let (again, answer) = next(&mut requests).await;
        assert!(again.serving);
        answer.send_response(node());
        registered.send_replace(registrations(false));
        let (closed, answer) = next(&mut requests).await;
        assert!(!closed.serving && closed.since >= again.since);
        answer.send_response(node());
        registered.send_replace(registrations(true));
        next(&mut requests).await.1.send_response(node());
        shutdown.cancel();
        let (ending, answer) = next(&mut requests).await;
        assert!(!ending.serving && !*written.borrow());
        answer.send_response(node());
        written.wait_for(|is_written| *is_written).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_plugin_that_never_served_writes_nothing() {
        let (_requests, _registered, shutdown, mut written) = start();
        shutdown.cancel();
        written.wait_for(|is_written| *is_written).await.unwrap();
    }
}
