//! Events on Nodes whose annotation `gpushare/closed-gpus` names no GPU in a part of its value.
//!
//! The administrator who wrote the annotation looks at the Node, and not at the scheduler's log. Only the leader writes the events.

use std::collections::BTreeMap;
use std::time::Duration;

use daemon::events::{Recorder, Subject};
use tokio::time::sleep;

use crate::index::{Index, Shared};
use crate::leader::Leadership;

/// The reason of the events.
const REASON: &str = "ClosedGPUsInvalid";
/// Pause between two looks of a replica that does not lead at whether it leads now.
const PAUSE: Duration = Duration::from_secs(1);

/// Records an event for each problem, once as long as the annotation is the same.
pub(crate) async fn record(index: Shared<Index>, leadership: Leadership, recorder: Recorder) {
    let change = index.read().closing_change();
    let mut known = BTreeMap::new();
    loop {
        change.notified().await;
        while !leadership.is_leading() {
            sleep(PAUSE).await;
        }
        let problems = index.read().closing_problems().clone();
        for (node, problem) in &problems {
            if known.get(node) != Some(problem) {
                recorder.warn(node_subject(node), REASON, problem.clone());
            }
        }
        known = problems;
    }
}

/// A node as the subject of an event. The UID is the node's name, as in kubelet's own events.
fn node_subject(name: &str) -> Subject {
    Subject {
        kind: "Node",
        namespace: String::new(),
        name: name.to_owned(),
        uid: name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use daemon::events;
    use http::{Request, Response};
    use http_body_util::BodyExt;
    use kube::Client;
    use kube::client::Body;
    use placement::Policies;
    use proto::node::Node;
    use proto::resource::ResourceNames;
    use serde_json::{Value, json};
    use tokio::sync::mpsc;
    use tower::service_fn;

    use super::*;
    use crate::watch::ObjectStore;

    /// A node of the old plugin with two GPUs.
    fn node(closed: &str) -> Node {
        let node = json!({
            "metadata": {"name": "n1", "annotations": {"gpushare/closed-gpus": closed}},
            "status": {"capacity": {"aliyun.com/gpu-count": "2", "aliyun.com/gpu-mem": "20"}},
        });
        serde_json::from_value(node).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn a_value_that_names_no_gpu_is_an_event_of_the_node() {
        let (sender, mut written) = mpsc::unbounded_channel();
        let service = service_fn(move |request: Request<Body>| {
            let sender = sender.clone();
            async move {
                let body = request.into_body().collect().await?.to_bytes().to_vec();
                sender.send(body.clone()).unwrap();
                Ok::<_, kube::Error>(Response::new(Body::from(body)))
            }
        });
        let connection = Client::new(service, "default").into();
        let (recorder, writer) = events::recorder(&connection, "gpushare-scheduler", None);
        let hint_ttl = Duration::from_secs(30);
        let index = Index::new(ResourceNames::default(), Policies::default(), hint_ttl);
        let index = Shared::new(index);
        tokio::spawn(writer.run());
        tokio::spawn(record(index.clone(), Leadership::alone(), recorder));
        for (closed, shown) in [("1,x", "1,x"), ("7", "7")] {
            index.write().apply(node(closed));
            let event: Value = serde_json::from_slice(&written.recv().await.unwrap()).unwrap();
            assert_eq!(event["involvedObject"]["kind"], "Node");
            assert_eq!(event["involvedObject"]["name"], "n1");
            assert_eq!(event["reason"], REASON);
            let message = event["message"].as_str().unwrap();
            assert!(
                message.contains(&format!("{shown:?}")) && message.contains("minors 0,1"),
                "{message}"
            );
        }
    }
}
