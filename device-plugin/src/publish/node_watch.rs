//! Follows this node's own Node object: kubelet takes our resources out of its status now and then.

use std::time::Duration;

use daemon::api_server::Connection;
use daemon::watch::{ObjectWatch, Update};
use kube::Api;
use kube::runtime::watcher;
use proto::node::Node;
use tokio::sync::watch;
use tracing::warn;

/// Nobody waits for this watch.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Watches until the task is dropped.
pub async fn watch_node(connection: Connection, node_name: String, node: watch::Sender<Option<Node>>) {
    let config = watcher::Config::default().fields(&format!("metadata.name={node_name}"));
    let mut is_listed = false;
    let Connection { client, contact } = connection;
    let mut watch = ObjectWatch::new(
        "this node",
        (Api::<Node>::all(client), &contact),
        config,
        LONGEST_PAUSE,
    );
    loop {
        if let Update::Event(event) = watch.next().await {
            take_in(event, &node_name, &mut is_listed, &node);
        }
    }
}

fn take_in(
    event: watcher::Event<Node>,
    node_name: &str,
    is_listed: &mut bool,
    node: &watch::Sender<Option<Node>>,
) {
    match event {
        watcher::Event::Init => *is_listed = false,
        watcher::Event::InitApply(found) => {
            *is_listed = true;
            hand_over(found, node);
        }
        watcher::Event::Apply(found) => hand_over(found, node),
        watcher::Event::InitDone if *is_listed => {}
        watcher::Event::InitDone | watcher::Event::Delete(_) => {
            warn!(
                node = node_name,
                "there is no such node; nothing is published until it is there"
            );
            node.send_replace(None);
        }
    }
}

/// Heartbeats are no news, only what we publish is.
fn hand_over(mut found: Node, node: &watch::Sender<Option<Node>>) {
    found.metadata.managed_fields = None;
    found.metadata.resource_version = None;
    node.send_if_modified(|held| {
        let is_news = held.as_ref() != Some(&found);
        *held = Some(found);
        is_news
    });
}
