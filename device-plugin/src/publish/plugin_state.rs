//! Writes the state of this plugin ([`proto::plugin_reports::PluginState`]) into the Node, for the scheduler.
//!
//! The state says whether the plugin serves kubelet. The plugin writes it only when that changes: when kubelet has opened all
//! device lists, when it has closed one, and before the process ends. kubelet never waits for this write.

use std::time::Duration;

use daemon::api_server::{Connection, one_line};
use futures::future::pending;
use k8s_openapi::jiff::Timestamp;
use proto::plugin_reports::PluginState;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::devices::extended_resource::Registrations;

use super::node_patches::NodeWriter;

/// The shortest and the longest pause after a failure: the scheduler sends no pods before it knows the state.
const PAUSES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(3));

/// Writes the state of the plugin of this node, which runs in the pod with this UID, if in a pod: at each change, and after
/// `shutdown` that it does not serve. `is_written` becomes true once the Node says so.
pub(crate) async fn write_plugin_state(
    connection: Connection,
    node_name: String,
    pod_uid: Option<String>,
    mut registered: watch::Receiver<Registrations>,
    shutdown: CancellationToken,
    is_written: watch::Sender<bool>,
) {
    let mut backoff = connection.contact.backoff(PAUSES);
    let node_writer = NodeWriter::new(connection.client, node_name);
    // A plugin that has not served yet need not write that it does not serve.
    let mut written = false;
    loop {
        let is_ending = shutdown.is_cancelled();
        let serving = !is_ending
            && registered
                .borrow_and_update()
                .values()
                .all(|is_registered| *is_registered);
        if written != serving {
            let state = PluginState {
                serving,
                since: Timestamp::now(),
                pod: pod_uid.clone(),
            };
            let patch = Some(state.patch());
            if let Err(error) = node_writer.write("the plugin's state", patch).await {
                warn!(
                    error = one_line(&error),
                    "writing the plugin's state is tried again"
                );
                backoff.pause().await;
            } else {
                written = serving;
                backoff.reset();
            }
            // The registrations or `shutdown` may have changed during the write.
            continue;
        }
        // `serve_until_signal` ends the process in order; a task that returns would end it at once.
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

#[cfg(test)]
mod tests {
    use proto::node::Node;
    use serde_json::{Value, json};

    use super::*;
    use crate::devices::extended_resource::ExtendedResource;
    use crate::tests::api_server::{ApiServer, DueAnswer};

    fn registrations(is_shared_registered: bool) -> Registrations {
        let shared = (ExtendedResource::Shared, is_shared_registered);
        [shared, (ExtendedResource::Memory, true)].into()
    }

    fn start() -> (
        ApiServer,
        watch::Sender<Registrations>,
        CancellationToken,
        watch::Receiver<bool>,
    ) {
        let (client, server) = ApiServer::new();
        let (registered, receiver) = watch::channel(registrations(false));
        let shutdown = CancellationToken::new();
        let (is_written, written) = watch::channel(false);
        let (pod, signal) = (Some("u".to_owned()), shutdown.clone());
        tokio::spawn(write_plugin_state(
            client.into(),
            "n1".to_owned(),
            pod,
            receiver,
            signal,
            is_written,
        ));
        (server, registered, shutdown, written)
    }

    /// The next state that is written.
    async fn next(server: &mut ApiServer) -> (PluginState, DueAnswer) {
        let (line, body, answer) = server.next().await;
        assert_eq!(line, "PATCH /api/v1/nodes/n1");
        let node: Node = serde_json::from_value(body).unwrap();
        (
            PluginState::read(node.metadata.annotations.as_ref())
                .unwrap()
                .unwrap(),
            answer,
        )
    }

    #[tokio::test(start_paused = true)]
    async fn each_change_is_written_until_the_api_server_accepts_it() {
        let node = json!({"metadata": {"name": "n1"}});
        let (mut server, registered, shutdown, mut written) = start();
        registered.send_replace(registrations(true));
        let (state, answer) = next(&mut server).await;
        assert!(state.serving && state.pod.as_deref() == Some("u"));
        answer.send(503, &Value::Null);
        let (again, answer) = next(&mut server).await;
        assert!(again.serving);
        answer.send(200, &node);
        registered.send_replace(registrations(false));
        let (closed, answer) = next(&mut server).await;
        assert!(!closed.serving && closed.since >= again.since);
        answer.send(200, &node);
        registered.send_replace(registrations(true));
        next(&mut server).await.1.send(200, &node);
        shutdown.cancel();
        let (ending, answer) = next(&mut server).await;
        assert!(!ending.serving && !*written.borrow());
        answer.send(200, &node);
        written.wait_for(|is_written| *is_written).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_plugin_that_never_served_writes_nothing() {
        let (_server, _registered, shutdown, mut written) = start();
        shutdown.cancel();
        written.wait_for(|is_written| *is_written).await.unwrap();
    }
}
