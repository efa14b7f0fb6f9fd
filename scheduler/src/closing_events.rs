//! Events on Nodes whose annotation `gpushare/closed-gpus` has an entry that names none of the node's GPUs.
//!
//! The administrator who wrote the annotation looks at the Node, not at the scheduler's log.

use std::collections::BTreeMap;
use std::time::Duration;

use daemon::events::{Recorder, Subject};
use tokio::time::sleep;

use crate::index::{Index, Shared};
use crate::leader::Leadership;

const REASON: &str = "ClosedGPUsInvalid";
/// Most problems that are copied at a time, under one lock of the index.
const MOST_AT_A_TIME: usize = 64;
/// Pause before the problems that [`record_new`] has left.
const PAUSE: Duration = Duration::from_secs(1);

/// Records an event for each problem, and another one when the problem of a node changes. Never ends.
pub(crate) async fn record(index: Shared<Index>, leadership: Leadership, recorder: Recorder) {
    let change = index.read().closing_change();
    let mut known = BTreeMap::new();
    loop {
        change.notified().await;
        while !record_new(&index, &leadership, &recorder, &mut known) {
            sleep(PAUSE).await;
        }
    }
}

/// Records problems that are not in `known`, and adds them to it. Returns false if some may be left, or this replica does not
/// lead.
fn record_new(
    index: &Shared<Index>,
    leadership: &Leadership,
    recorder: &Recorder,
    known: &mut BTreeMap<Box<str>, String>,
) -> bool {
    // Only the leader writes the events, so that a problem gets one, and not one of each replica.
    if !leadership.is_leading() {
        return false;
    }
    let new: Vec<(Box<str>, String)> = {
        let index = index.read();
        let problems = index.closing_problems();
        // A problem that has changed, or comes back later, gets another event.
        known.retain(|node, problem| problems.get(&**node) == Some(&problem.as_str()));
        let new = problems.iter().filter(|(node, _)| !known.contains_key(**node));
        new.take(MOST_AT_A_TIME)
            .map(|(node, problem)| ((*node).into(), (*problem).to_owned()))
            .collect()
    };
    let are_all_copied = new.len() < MOST_AT_A_TIME;
    for (node, problem) in new {
        // The queue of events is half full: this problem and the rest have their turn after the pause.
        if !recorder.try_warn(Subject::node(&node), REASON, problem.clone()) {
            return false;
        }
        known.insert(node, problem);
    }
    are_all_copied
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

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
    use tokio::time::timeout;
    use tower::service_fn;

    use super::*;
    use crate::watch::ObjectStore;

    /// A node of the old plugin with two GPUs.
    fn node(name: &str, closed: &str) -> Node {
        let node = json!({
            "metadata": {"name": name, "annotations": {"gpushare/closed-gpus": closed}},
            "status": {"capacity": {"aliyun.com/gpu-count": "2", "aliyun.com/gpu-mem": "20"}},
        });
        serde_json::from_value(node).unwrap()
    }

    /// An index whose problems are recorded, and the events that reach the API server.
    fn start() -> (Shared<Index>, mpsc::UnboundedReceiver<Value>) {
        let (sender, written) = mpsc::unbounded_channel();
        let service = service_fn(move |request: Request<Body>| {
            let sender = sender.clone();
            async move {
                let body = request.into_body().collect().await?.to_bytes().to_vec();
                sender.send(serde_json::from_slice(&body).unwrap()).unwrap();
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
        (index, written)
    }

    #[tokio::test(start_paused = true)]
    async fn a_value_that_names_no_gpu_is_an_event_of_the_node() {
        let (index, mut written) = start();
        for (closed, shown) in [("1,x", "1,x"), ("7", "7")] {
            index.write().apply(node("n1", closed));
            let event = written.recv().await.unwrap();
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

    /// As `kubectl annotate nodes --all` writes them: far more than wait to be written at one time.
    #[tokio::test(start_paused = true)]
    async fn five_thousand_nodes_at_once_have_an_event_each() {
        let (index, mut written) = start();
        let names: BTreeSet<String> = (0..5000).map(|at| format!("n{at}")).collect();
        for name in &names {
            index.write().apply(node(name, "0,8"));
        }
        let mut seen = BTreeSet::new();
        while seen.len() < names.len() {
            let event = timeout(Duration::from_secs(3600), written.recv()).await;
            let event = event.unwrap().unwrap();
            let name = event["involvedObject"]["name"].as_str().unwrap().to_owned();
            assert!(seen.insert(name), "each node has one event");
        }
        assert_eq!(seen, names);
    }
}
