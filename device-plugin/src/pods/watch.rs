//! Keeps [`Pods`] in step with the API server by one watch of the pods bound to this node.
//!
//! Writes nothing. A watch that breaks is begun again with backoff, and the last known set stays.

use futures::{StreamExt, TryStreamExt};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use proto::resource::ResourceNames;
use tokio::sync::watch;
use tracing::{debug, info, warn};

use super::{NodePod, PodUid, Pods, WatchedPod};

/// Watches until the task is dropped.
pub async fn watch_pods(client: Client, node: String, names: ResourceNames, pods: watch::Sender<Pods>) {
    let config = watcher::Config::default().fields(&format!("spec.nodeName={node}"));
    let events = watcher(Api::<WatchedPod>::all(client), config).default_backoff();
    let mut events = events.into_stream().boxed();
    let mut listing = Vec::new();
    while let Some(event) = events.next().await {
        match event {
            Ok(event) => take_in(event, &node, &names, &mut listing, &pods),
            Err(error) => warn!(error = %anyhow::Error::new(error), "the watch of this node's pods is interrupted, it is tried again"),
        }
    }
}

fn take_in(event: watcher::Event<WatchedPod>, node: &str, names: &ResourceNames, listing: &mut Vec<NodePod>, pods: &watch::Sender<Pods>) {
    match event {
        watcher::Event::Init => listing.clear(),
        watcher::Event::InitApply(pod) => listing.extend(NodePod::of(&pod, node, names)),
        watcher::Event::InitDone => {
            info!(n_pods = listing.len(), "the pods of this node are known");
            let complete = std::mem::take(listing);
            pods.send_modify(|pods| pods.reset(complete));
        }
        watcher::Event::Apply(pod) => {
            if let Some(pod) = NodePod::of(&pod, node, names) {
                debug!(pod = pod.display_name(), stage = ?pod.stage, "pod has changed");
                // A pod that only repeats what is known must not wake everybody.
                pods.send_if_modified(|pods| {
                    let is_news = pods.get(&pod.uid) != Some(&pod);
                    pods.apply(pod);
                    is_news
                });
            }
        }
        watcher::Event::Delete(pod) => {
            let uid = PodUid::from(pod.metadata.uid.as_deref().unwrap_or_default());
            pods.send_modify(|pods| pods.delete(&uid));
        }
    }
}
