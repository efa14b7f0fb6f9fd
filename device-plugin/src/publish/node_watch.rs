//! Follows this node's own Node object: kubelet takes our resources out of its status now and then.

use futures::{StreamExt, TryStreamExt};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use proto::node::Node;
use tokio::sync::watch;
use tracing::warn;

/// Watches until the task is dropped.
pub async fn watch_node(client: Client, node_name: String, node: watch::Sender<Option<Node>>) {
    let config = watcher::Config::default().fields(&format!("metadata.name={node_name}"));
    let mut events = watcher(Api::<Node>::all(client), config).default_backoff().into_stream().boxed();
    let mut is_listed = false;
    while let Some(event) = events.next().await {
        match event {
            Ok(watcher::Event::Init) => is_listed = false,
            Ok(watcher::Event::InitApply(found)) => {
                is_listed = true;
                hand_over(found, &node);
            }
            Ok(watcher::Event::Apply(found)) => hand_over(found, &node),
            Ok(watcher::Event::InitDone) if is_listed => {}
            Ok(watcher::Event::InitDone | watcher::Event::Delete(_)) => {
                warn!(node = node_name, "there is no such node; nothing is published until it is there");
                node.send_replace(None);
            }
            Err(error) => {
                warn!(error = %format!("{:#}", anyhow::Error::new(error)), "the watch of this node is interrupted, it is tried again");
            }
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
