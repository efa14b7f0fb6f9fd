//! Keeps [`Pods`] in step with the API server by one watch of the pods bound to this node.
//!
//! Writes nothing. While the watch is interrupted the last known set stays.

use kube::runtime::watcher;
use kube::{Api, Client};
use proto::resource::ResourceNames;
use tokio::sync::watch;
use tracing::{debug, info};

use crate::watching::follow;

use super::{NodePod, PodUid, Pods, WatchedPod};

/// Watches until the task is dropped.
pub async fn watch_pods(client: Client, node: String, names: ResourceNames, pods: watch::Sender<Pods>) {
    let config = watcher::Config::default().fields(&format!("spec.nodeName={node}"));
    let mut listing = Vec::new();
    follow("pods of this node", Api::<WatchedPod>::all(client), config, |event| take_in(event, &node, &names, &mut listing, &pods)).await;
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
