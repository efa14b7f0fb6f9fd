//! Writes into the Node whether this plugin serves kubelet ([`proto::plugin_reports::PluginState`]), for the scheduler.
//!
//! Written when that changes and at no other time: when kubelet has opened all device lists, when it has closed one, and before
//! the process ends. kubelet never waits for it.

use std::time::Duration;

use daemon::api_server::{Backoff, Connection, one_line};
use futures::future::{pending, select_all};
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{Patch, PatchParams};
use proto::node::Node;
use proto::plugin_reports::PluginState;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{PublishError, within};

/// Pauses after failures, doubled each time: the scheduler sends no pods before it knows.
const PAUSES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(3));

/// Writes the state of this plugin.
#[derive(Debug)]
pub struct StateWriter {
    nodes: Api<Node>,
    node_name: String,
    pod: Option<String>,
    backoff: Backoff,
}

impl StateWriter {
    /// A writer for the plugin of this node, which runs in the pod with this UID, if in any.
    pub fn new(connection: &Connection, node_name: String, pod: Option<String>) -> Self {
        Self {
            nodes: Api::all(connection.client.clone()),
            node_name,
            pod,
            backoff: connection.contact.backoff(PAUSES),
        }
    }

    /// Writes until the task is dropped. `registered` are the resources, `leaving` says that the process is to end; `is_written` is
    /// set when the Node says so, or has nothing to say.
    pub async fn run(
        mut self,
        mut registered: Vec<watch::Receiver<bool>>,
        leaving: CancellationToken,
        is_written: watch::Sender<bool>,
    ) {
        let mut written = None;
        loop {
            let is_leaving = leaving.is_cancelled();
            let serving = registered
                .iter_mut()
                .all(|is_registered| *is_registered.borrow_and_update())
                && !is_leaving;
            // A plugin that has not served yet has nothing to take back.
            if written.unwrap_or(false) != serving {
                match self.write(serving).await {
                    Ok(()) => {
                        written = Some(serving);
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
                continue;
            }
            if is_leaving {
                is_written.send_replace(true);
                return pending().await;
            }
            tokio::select! {
                () = leaving.cancelled() => {}
                () = any_changed(&mut registered) => {}
            }
        }
    }

    async fn write(&self, serving: bool) -> Result<(), PublishError> {
        let state = PluginState {
            serving,
            since: Timestamp::now(),
            pod: self.pod.clone(),
        };
        let patch = state.patch();
        within(
            "the plugin's state",
            self.nodes
                .patch(&self.node_name, &PatchParams::default(), &Patch::Merge(&patch)),
        )
        .await?;
        info!(serving, "published whether this plugin serves kubelet");
        Ok(())
    }
}

/// Returns when one of them has changed; one whose task has ended does not change.
async fn any_changed(registered: &mut [watch::Receiver<bool>]) {
    let changes = registered.iter_mut().map(|is_registered| {
        Box::pin(async {
            if is_registered.changed().await.is_err() {
                pending::<()>().await;
            }
        })
    });
    let changes: Vec<_> = changes.collect();
    if changes.is_empty() {
        return pending().await;
    }
    select_all(changes).await;
}

#[cfg(test)]
mod tests {
    use http::{Request, Response};
    use http_body_util::BodyExt;
    use kube::Client;
    use kube::client::Body;
    use tower_test::mock::{Handle, SendResponse};

    use super::*;
    use tokio_util::sync::CancellationToken;

    type Requests = Handle<Request<Body>, Response<Body>>;

    fn start() -> (
        Requests,
        watch::Sender<bool>,
        CancellationToken,
        watch::Receiver<bool>,
    ) {
        let (service, requests) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
        let writer = StateWriter::new(
            &Client::new(service, "default").into(),
            "n1".to_owned(),
            Some("u".to_owned()),
        );
        let (registered, receiver) = watch::channel(false);
        let leaving = CancellationToken::new();
        let (is_written, written) = watch::channel(false);
        tokio::spawn(writer.run(
            vec![receiver, watch::channel(true).1],
            leaving.clone(),
            is_written,
        ));
        (requests, registered, leaving, written)
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
    async fn what_changes_is_written_until_it_is_taken() {
        let (mut requests, registered, leaving, mut written) = start();
        registered.send_replace(true);
        let (state, answer) = next(&mut requests).await;
        assert!(state.serving && state.pod.as_deref() == Some("u"));
        answer.send_response(Response::builder().status(503).body(Body::empty()).unwrap());
        let (again, answer) = next(&mut requests).await;
        assert!(again.serving);
        answer.send_response(node());
        registered.send_replace(false);
        let (closed, answer) = next(&mut requests).await;
        assert!(!closed.serving && closed.since >= again.since);
        answer.send_response(node());
        registered.send_replace(true);
        next(&mut requests).await.1.send_response(node());
        leaving.cancel();
        let (leaving, answer) = next(&mut requests).await;
        assert!(!leaving.serving && !*written.borrow());
        answer.send_response(node());
        written.wait_for(|is_written| *is_written).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_plugin_that_never_served_writes_nothing() {
        let (_requests, _registered, leaving, mut written) = start();
        leaving.cancel();
        written.wait_for(|is_written| *is_written).await.unwrap();
    }
}
