//! Keeps [`NodePods`] in step with the API server by one watch of the pods bound to this node.
//!
//! While the watch is interrupted, the last known pods stay.

use daemon::api_server::Connection;
use daemon::watch::{ObjectWatch, Update};
use std::time::Duration;

use kube::Api;
use kube::runtime::watcher;
use proto::pod::Pod;
use proto::resource::ResourceNames;
use tokio::sync::watch;
use tracing::{debug, info};

use super::{Claimant, NodePod, NodePods, PodStage, PodUid};

/// Longest pause of the watch after failures: kubelet may wait for a pod that the watch does not show yet.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

pub(crate) async fn watch_pods(
    connection: Connection,
    node: String,
    names: ResourceNames,
    pods: watch::Sender<NodePods>,
) {
    let config = watcher::Config::default().fields(&format!("spec.nodeName={node}"));
    let mut listed = Vec::new();
    let Connection { client, contact } = connection;
    let mut watch = ObjectWatch::new(
        "pods of this node",
        (Api::<Pod>::all(client), &contact),
        config,
        LONGEST_PAUSE,
    );
    loop {
        match watch.next().await {
            Update::Event(event) => apply_event(event, &node, &names, &mut listed, &pods),
            Update::Interrupted | Update::UnknownKind => {
                pods.send_modify(|pods| pods.set_interrupted(true));
            }
            Update::Restored => pods.send_modify(|pods| pods.set_interrupted(false)),
        }
    }
}

/// Applies one event of the watch to the pods; `listed` are the pods of a list that is not complete yet.
fn apply_event(
    event: watcher::Event<Pod>,
    node: &str,
    names: &ResourceNames,
    listed: &mut Vec<Pod>,
    pods: &watch::Sender<NodePods>,
) {
    match event {
        watcher::Event::Init => listed.clear(),
        watcher::Event::InitApply(pod) => listed.push(pod),
        watcher::Event::InitDone => {
            let mut complete = std::mem::take(listed);
            info!(n_pods = complete.len(), "the pods of this node are known");
            // A list is in the order of names; kubelet admits its pods by age.
            complete.sort_by_cached_key(|pod| pod.metadata.creation_timestamp.clone());
            pods.send_modify(|pods| {
                let found = complete.iter();
                pods.reset(found.filter_map(|pod| NodePod::from_pod(pod, node, names)));
                // `reset` adds only pods that request devices; this adds the facts about the others.
                for pod in &complete {
                    apply(pods, pod, node, names);
                }
            });
        }
        // An event without a change must not wake the tasks that wait for one.
        watcher::Event::Apply(pod) => drop(pods.send_if_modified(|pods| apply(pods, &pod, node, names))),
        watcher::Event::Delete(pod) => pods.send_modify(|pods| pods.delete(&uid_of(&pod))),
    }
}

/// Applies the present state of one pod to `pods`; returns true if that changes anything.
fn apply(pods: &mut NodePods, pod: &Pod, node: &str, names: &ResourceNames) -> bool {
    if let Some(class) = pod.spec.runtime_class_name.clone() {
        pods.note_runtime_class(uid_of(pod), class);
    }
    let is_claimant_new = Claimant::from_pod(pod).is_some_and(|claimant| pods.note_claimant(claimant));
    let is_changed = match NodePod::from_pod(pod, node, names) {
        Some(found) => {
            debug!(pod = found.display_name(), stage = ?found.stage, "pod has changed");
            pods.apply(found)
        }
        None => pods.note_without_requests(uid_of(pod), PodStage::of_recorded(pod)),
    };
    is_claimant_new || is_changed
}

fn uid_of(pod: &Pod) -> PodUid {
    PodUid::from(pod.metadata.uid.as_deref().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use http::{Request, Response};
    use kube::Client;
    use kube::client::Body;
    use serde_json::{Value, json};
    use tokio::time::timeout;

    use super::*;

    fn pod(name: &str, units: &str, version: u64) -> Value {
        json!({
            "metadata": {"name": name, "namespace": "default", "uid": name, "resourceVersion": version.to_string()},
            "spec": {"nodeName": "n1", "containers": [{"name": "c", "resources": {"limits": {"aliyun.com/gpu-mem": units}}}]},
        })
    }

    /// Names of the known pods once there are `n`.
    async fn names(pods: &mut watch::Receiver<NodePods>, n: usize) -> Vec<String> {
        let enough = timeout(
            Duration::from_secs(20),
            pods.wait_for(|pods| pods.is_synced() && pods.iter().count() == n),
        )
        .await;
        enough
            .expect("the pods do not come")
            .unwrap()
            .iter()
            .map(|pod| pod.name.clone())
            .collect()
    }

    #[tokio::test]
    async fn pods_are_listed_then_watched_and_a_broken_watch_is_restarted() {
        let (service, mut requests) = tower_test::mock::pair::<Request<Body>, Response<Body>>();
        let client = Client::new(service, "default");
        let (sender, mut pods) = watch::channel(NodePods::default());
        tokio::spawn(watch_pods(
            client.into(),
            "n1".to_owned(),
            ResourceNames::default(),
            sender,
        ));
        let answer = |text: String| Response::builder().body(Body::from(text.into_bytes())).unwrap();
        let list = |items: Value| {
            json!({"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "5"}, "items": items}).to_string()
        };
        let event = |kind: &str, pod: &Value| json!({"type": kind, "object": pod}).to_string() + "\n";

        let (request, response) = requests.next_request().await.unwrap();
        assert!(
            request
                .uri()
                .query()
                .unwrap()
                .contains("fieldSelector=spec.nodeName%3Dn1"),
            "{}",
            request.uri()
        );
        response.send_response(answer(list(
            json!([pod("a", "1", 4), {"metadata": {"name": "other", "uid": "o"}, "spec": {"nodeName": "n1", "runtimeClassName": "nvidia"}}]),
        )));
        assert_eq!(names(&mut pods, 1).await, ["a"]);
        let class = |pods: &watch::Receiver<NodePods>, uid| {
            let class = pods.borrow().runtime_class(&PodUid::from(uid))?.to_owned();
            Some(class)
        };
        assert_eq!(
            (class(&pods, "a"), class(&pods, "o")),
            (None, Some("nvidia".to_owned()))
        );

        let (request, response) = requests.next_request().await.unwrap();
        assert!(
            request.uri().query().unwrap().contains("watch=true"),
            "{}",
            request.uri()
        );
        response.send_response(answer(
            event("ADDED", &pod("b", "2", 6))
                + &event("DELETED", &pod("a", "1", 7))
                + &event("ADDED", &pod("c", "2", 8)),
        ));
        assert_eq!(names(&mut pods, 2).await, ["b", "c"]);

        let (_, response) = requests.next_request().await.unwrap();
        let gone = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "too old", "reason": "Expired", "code": 410});
        response.send_response(answer(
            json!({"type": "ERROR", "object": gone}).to_string() + "\n",
        ));
        let (_, response) = requests.next_request().await.unwrap();
        response.send_response(answer(list(json!([pod("d", "1", 9)]))));
        assert_eq!(names(&mut pods, 1).await, ["d"]);
        assert_eq!(class(&pods, "o"), None);
    }
}
