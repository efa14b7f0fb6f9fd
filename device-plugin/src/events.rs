//! Events on pods and on this node: what happened, for whoever describes it. Nobody waits for them; while the API server is
//! away they are kept for an hour, each once however often it happened.

use std::collections::VecDeque;
use std::time::Duration;

use chrono::{DateTime, SecondsFormat, Utc};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};
use tracing::{debug, warn};

use crate::cdi::fnv1a;
use crate::connection::{Backoff, Connection};
use crate::pods::NodePod;
use crate::watching::one_line;

/// How long one request may take.
const REQUEST_LIMIT: Duration = Duration::from_secs(5);

/// How many events may wait to be taken in, and how many different ones to be written; more are dropped.
const CAPACITY: usize = 64;

/// How long an event is tried to be written: the API server keeps one no longer either.
const KEPT: Duration = Duration::from_secs(3600);

/// Pauses after failures, doubled each time.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(15));

/// Where events on nodes are kept.
const NAMESPACE_OF_NODES: &str = "default";

/// Whether a person should look at it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weight {
    /// All is well.
    Normal,
    /// Something is wrong.
    Warning,
}

/// Something that happened to a pod or to the node.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Event {
    kind: &'static str,
    /// None of a node.
    namespace: Option<String>,
    name: String,
    uid: String,
    weight: Weight,
    reason: &'static str,
    message: String,
}

/// An event that is to be written.
#[derive(Debug)]
struct Waiting {
    event: Event,
    since: Instant,
    first_at: DateTime<Utc>,
    last_at: DateTime<Utc>,
}

/// Takes in what happened. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Recorder {
    node: String,
    events: mpsc::Sender<Event>,
}

/// Writes what is taken in.
#[expect(missing_debug_implementations, reason = "a client has none")]
pub struct Writer {
    client: Client,
    node: String,
    events: mpsc::Receiver<Event>,
    waiting: VecDeque<Waiting>,
    backoff: Backoff,
}

/// Both ends.
pub fn recorder(connection: &Connection, node: String) -> (Recorder, Writer) {
    let (sender, events) = mpsc::channel(CAPACITY);
    let (client, backoff) = (connection.client.clone(), connection.contact.backoff(PAUSES));
    (
        Recorder {
            node: node.clone(),
            events: sender,
        },
        Writer {
            client,
            node,
            events,
            waiting: VecDeque::new(),
            backoff,
        },
    )
}

impl Recorder {
    /// The node of the events.
    pub fn node_name(&self) -> &str {
        &self.node
    }

    /// Something about a pod that a person should look at.
    pub fn warn(&self, pod: &NodePod, reason: &'static str, message: String) {
        let (name, uid) = (pod.name.clone(), pod.uid.as_str().to_owned());
        self.send(Event {
            kind: "Pod",
            namespace: Some(pod.namespace.clone()),
            name,
            uid,
            weight: Weight::Warning,
            reason,
            message,
        });
    }

    /// Something about this node. Its name stands for its UID, as in kubelet's own events.
    pub fn node(&self, weight: Weight, reason: &'static str, message: String) {
        let (name, uid) = (self.node.clone(), self.node.clone());
        self.send(Event {
            kind: "Node",
            namespace: None,
            name,
            uid,
            weight,
            reason,
            message,
        });
    }

    fn send(&self, event: Event) {
        if self.events.try_send(event).is_err() {
            debug!("an event is dropped");
        }
    }
}

impl Writer {
    /// Writes until the task is dropped.
    pub async fn run(mut self) {
        loop {
            while let Ok(event) = self.events.try_recv() {
                take_in(&mut self.waiting, event);
            }
            let Some(waiting) = self.waiting.pop_front() else {
                match self.events.recv().await {
                    Some(event) => take_in(&mut self.waiting, event),
                    None => std::future::pending().await,
                }
                continue;
            };
            let problem = match timeout(REQUEST_LIMIT, self.write(&waiting)).await {
                Ok(Ok(())) => {
                    self.backoff.reset();
                    continue;
                }
                Ok(Err(error)) => (one_line(&error), may_pass(&error)),
                Err(_) => (format!("no answer within {REQUEST_LIMIT:?}"), true),
            };
            let (error, may_pass) = problem;
            let (object, reason) = (&waiting.event.name, waiting.event.reason);
            if !may_pass || waiting.since.elapsed() >= KEPT {
                warn!(object, reason, error, "an event is lost");
                continue;
            }
            debug!(object, reason, error, "an event is written later");
            self.waiting.push_front(waiting);
            self.rest().await;
        }
    }

    /// Takes events in during the pause after a failure.
    async fn rest(&mut self) {
        let mut rest = std::pin::pin!(self.backoff.pause());
        loop {
            tokio::select! {
                () = &mut rest => return,
                Some(event) = self.events.recv() => take_in(&mut self.waiting, event),
            }
        }
    }

    /// One event per object and message: what happens again is counted in the one that is there.
    async fn write(&self, waiting: &Waiting) -> kube::Result<()> {
        let event = &waiting.event;
        let api: Api<k8s_openapi::api::core::v1::Event> = Api::namespaced(
            self.client.clone(),
            event.namespace.as_deref().unwrap_or(NAMESPACE_OF_NODES),
        );
        let name = format!(
            "{}.{:016x}",
            event.name,
            fnv1a(&format!("{}\n{}\n{}", event.uid, event.reason, event.message))
        );
        let object = serde_json::from_value(self.object(waiting, &name)).map_err(kube::Error::SerdeError)?;
        match api.create(&PostParams::default(), &object).await {
            Err(kube::Error::Api(status)) if status.code == 409 => {
                // The source again, by which the admission policy knows whose event this is.
                let patch = json!({"lastTimestamp": text(waiting.last_at), "source": self.source()});
                api.patch(&name, &PatchParams::default(), &Patch::Merge(&patch))
                    .await
                    .map(drop)
            }
            created => created.map(drop),
        }
    }

    fn source(&self) -> Value {
        json!({"component": "gpushare-device-plugin", "host": self.node})
    }

    fn object(&self, waiting: &Waiting, name: &str) -> Value {
        let event = &waiting.event;
        json!({
            "metadata": {"name": name, "namespace": event.namespace.as_deref().unwrap_or(NAMESPACE_OF_NODES)},
            // A node's has no namespace, which is the same as an empty one.
            "involvedObject": {
                "apiVersion": "v1",
                "kind": event.kind,
                "namespace": event.namespace.as_deref().unwrap_or_default(),
                "name": event.name,
                "uid": event.uid,
            },
            "type": format!("{:?}", event.weight),
            "reason": event.reason,
            "message": event.message,
            "source": self.source(),
            "firstTimestamp": text(waiting.first_at),
            "lastTimestamp": text(waiting.last_at),
            "count": 1,
        })
    }
}

/// Adds an event to those that are to be written; one that is there already happens again.
fn take_in(waiting: &mut VecDeque<Waiting>, event: Event) {
    let now = Utc::now();
    if let Some(known) = waiting.iter_mut().find(|known| known.event == event) {
        known.last_at = now;
    } else if waiting.len() < CAPACITY {
        waiting.push_back(Waiting {
            event,
            since: Instant::now(),
            first_at: now,
            last_at: now,
        });
    } else {
        debug!(object = event.name, reason = event.reason, "an event is dropped");
    }
}

fn text(at: DateTime<Utc>) -> String {
    at.to_rfc3339_opts(SecondsFormat::Secs, true)
}

/// Whether the same request may succeed later.
fn may_pass(error: &kube::Error) -> bool {
    match error {
        kube::Error::Api(status) => status.code == 429 || status.code >= 500,
        kube::Error::SerdeError(_) => false,
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use http::{Request, Response};
    use kube::client::Body;
    use tower_test::mock::{Handle, pair};

    use super::*;

    fn start() -> (Recorder, Handle<Request<Body>, Response<Body>>) {
        let (service, requests) = pair::<Request<Body>, Response<Body>>();
        let (recorder, writer) = recorder(&Client::new(service, "default").into(), "n1".to_owned());
        tokio::spawn(writer.run());
        (recorder, requests)
    }

    /// The reason and message of the next event, which is answered so.
    async fn next(requests: &mut Handle<Request<Body>, Response<Body>>, code: u16) -> String {
        let (request, response) = requests.next_request().await.unwrap();
        let body: Value =
            serde_json::from_slice(&request.into_body().collect_bytes().await.unwrap()).unwrap();
        let status =
            json!({"kind": "Status", "status": "Failure", "reason": "Broken", "code": code, "message": "no"});
        let answer = if code == 201 { &body } else { &status };
        response.send_response(
            Response::builder()
                .status(code)
                .body(Body::from(answer.to_string().into_bytes()))
                .unwrap(),
        );
        format!(
            "{} {}",
            body["reason"].as_str().unwrap(),
            body["message"].as_str().unwrap()
        )
    }

    #[tokio::test(start_paused = true)]
    async fn events_outlive_an_absence_of_the_api_server() {
        let (recorder, mut requests) = start();
        let began = Instant::now();
        recorder.node(Weight::Warning, "GPUUnhealthy", "first".to_owned());
        while began.elapsed() < Duration::from_secs(600) {
            assert_eq!(next(&mut requests, 503).await, "GPUUnhealthy first");
            // What happens again and again takes no room from others.
            for _ in 0..CAPACITY / 2 {
                recorder.node(Weight::Warning, "GPUNotReady", "again".to_owned());
            }
        }
        recorder.node(Weight::Normal, "GPUHealthy", "last".to_owned());
        let mut written = Vec::new();
        for _ in 0..3 {
            written.push(next(&mut requests, 201).await);
        }
        assert_eq!(
            written,
            ["GPUUnhealthy first", "GPUNotReady again", "GPUHealthy last"]
        );
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_refused_for_good_keeps_nothing_back() {
        let (recorder, mut requests) = start();
        recorder.node(Weight::Normal, "One", String::new());
        recorder.node(Weight::Normal, "Two", String::new());
        assert_eq!(next(&mut requests, 403).await, "One ");
        assert_eq!(next(&mut requests, 201).await, "Two ");
    }

    #[tokio::test(start_paused = true)]
    async fn an_event_of_yesterday_is_given_up() {
        let (recorder, mut requests) = start();
        recorder.node(Weight::Normal, "Old", String::new());
        let began = Instant::now();
        while began.elapsed() < KEPT {
            assert_eq!(next(&mut requests, 500).await, "Old ");
        }
        recorder.node(Weight::Normal, "New", String::new());
        assert_eq!(next(&mut requests, 201).await, "New ");
    }
}
