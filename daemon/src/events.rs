//! Kubernetes events: a recorder for all tasks of a daemon, and the one task that writes the events to the API server.
//!
//! No task waits for an event to be written. While the API server does not answer, the writer keeps events for an hour, and
//! merges equal ones.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, SecondsFormat, Utc};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};
use tracing::{debug, warn};

use crate::api_server::{Backoff, Connection, one_line};

const REQUEST_LIMIT: Duration = Duration::from_secs(5);

/// Most events in the channel to the writer, and most different events that the writer keeps. A full channel drops further ones.
const CAPACITY: usize = 64;

/// Time after which an unwritten event is dropped: as long as the API server keeps events by default.
const KEPT_FOR: Duration = Duration::from_secs(3600);

/// Shortest and longest pause after a request that failed.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(15));

/// The namespace of events about nodes, which are in none: kubelet and `kubectl describe node` use the same.
const NAMESPACE_OF_NODES: &str = "default";

/// The type of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EventType {
    /// Something happened as expected.
    Normal,
    /// An operator or the owner of the object should look at it.
    Warning,
}

/// The object that an event is about.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Subject {
    /// `Pod` or `Node`.
    pub kind: &'static str,
    /// The object's namespace; empty for a node.
    pub namespace: String,
    /// The object's name.
    pub name: String,
    /// The object's UID; empty if it is unknown.
    pub uid: String,
}

impl Subject {
    /// A node. The UID is its name, as in kubelet's own events.
    pub fn node(name: &str) -> Self {
        Self {
            kind: "Node",
            namespace: String::new(),
            name: name.to_owned(),
            uid: name.to_owned(),
        }
    }
}

/// An event as the daemon records it. It has no time, so that a repeated event is equal to the first.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Event {
    subject: Subject,
    severity: EventType,
    reason: &'static str,
    message: String,
}

#[derive(Debug)]
struct WaitingEvent {
    event: Event,
    since: Instant,
    /// The times at which the writer received the event first and last, for the Event object.
    first_at: DateTime<Utc>,
    last_at: DateTime<Utc>,
}

/// Sends events to the [`Writer`]. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Recorder {
    /// The node that this daemon runs on and writes about; empty for a daemon that does not run on each node.
    node: Arc<str>,
    events: mpsc::Sender<Event>,
}

/// Writes the events of its [`Recorder`].
#[expect(missing_debug_implementations, reason = "a client has none")]
pub struct Writer {
    client: Client,
    /// The field `source` of Event objects: the daemon that writes them, and its node if it runs on each node.
    source: Value,
    events: mpsc::Receiver<Event>,
    waiting: VecDeque<WaitingEvent>,
    backoff: Backoff,
}

/// A recorder and its writer, with the source in each event; `host` is the node of a daemon that runs on each node.
pub fn recorder(
    connection: &Connection,
    component: &'static str,
    host: Option<String>,
) -> (Recorder, Writer) {
    let (sender, events) = mpsc::channel(CAPACITY);
    let source = match &host {
        Some(host) => json!({"component": component, "host": host}),
        None => json!({"component": component}),
    };
    let recorder = Recorder {
        node: host.unwrap_or_default().into(),
        events: sender,
    };
    let writer = Writer {
        client: connection.client.clone(),
        source,
        events,
        waiting: VecDeque::new(),
        backoff: connection.contact.backoff(PAUSES),
    };
    (recorder, writer)
}

impl Recorder {
    /// The node that this daemon runs on; empty for a daemon that does not run on each node.
    pub fn node_name(&self) -> &str {
        &self.node
    }

    /// Records a warning and returns true, unless the channel to the [`Writer`] is half full: callers try again later. The other
    /// half is left to events that tasks record only once.
    pub fn try_warn(&self, subject: impl Into<Subject>, reason: &'static str, message: String) -> bool {
        self.events.capacity() > CAPACITY / 2
            && self.send(subject.into(), EventType::Warning, reason, message)
    }

    /// Records a warning about a pod.
    pub fn warn(&self, pod: impl Into<Subject>, reason: &'static str, message: String) {
        self.pod(pod, EventType::Warning, reason, message);
    }

    /// Records an event about a pod.
    pub fn pod(&self, pod: impl Into<Subject>, severity: EventType, reason: &'static str, message: String) {
        self.send(pod.into(), severity, reason, message);
    }

    /// Records an event about the node that this daemon runs on.
    pub fn node(&self, severity: EventType, reason: &'static str, message: String) {
        self.send(Subject::node(&self.node), severity, reason, message);
    }

    /// Hands an event to the [`Writer`]; drops it and returns false if the channel between them is full.
    fn send(&self, subject: Subject, severity: EventType, reason: &'static str, message: String) -> bool {
        let event = Event {
            subject,
            severity,
            reason,
            message,
        };
        // Waiting for room in the channel would stop the task that records while the API server does not answer.
        let sent = self.events.try_send(event);
        sent.inspect_err(|_| debug!("an event is dropped")).is_ok()
    }
}

impl Writer {
    /// Writes events until the task is dropped.
    pub async fn run(mut self) {
        loop {
            self.receive();
            let Some(waiting) = self.waiting.pop_front() else {
                match self.events.recv().await {
                    Some(event) => add(&mut self.waiting, event),
                    // Every recorder is gone. A task that returned would end the process.
                    None => std::future::pending().await,
                }
                continue;
            };
            let (error, may_pass) = match timeout(REQUEST_LIMIT, self.write(&waiting)).await {
                Ok(Ok(())) => {
                    self.backoff.reset();
                    continue;
                }
                Ok(Err(error)) => (one_line(&error), may_pass(&error)),
                Err(_) => (format!("no answer within {REQUEST_LIMIT:?}"), true),
            };
            let (object, reason) = (&waiting.event.subject.name, waiting.event.reason);
            if !may_pass || waiting.since.elapsed() >= KEPT_FOR {
                warn!(object, reason, error, "an event is lost");
                continue;
            }
            debug!(object, reason, error, "an event is written later");
            self.waiting.push_front(waiting);
            self.pause().await;
        }
    }

    /// Receives events as long as there is room for them; the others stay in the channel.
    fn receive(&mut self) {
        while self.waiting.len() < CAPACITY
            && let Ok(event) = self.events.try_recv()
        {
            add(&mut self.waiting, event);
        }
    }

    /// Pauses after a failure, and receives events meanwhile: a full channel would drop them.
    async fn pause(&mut self) {
        let mut pause = std::pin::pin!(self.backoff.pause());
        loop {
            tokio::select! {
                () = &mut pause => return,
                Some(event) = self.events.recv(), if self.waiting.len() < CAPACITY => add(&mut self.waiting, event),
            }
        }
    }

    /// Creates the Event object; for a repeated event updates the time of the existing object.
    async fn write(&self, waiting: &WaitingEvent) -> kube::Result<()> {
        let subject = &waiting.event.subject;
        let namespace = match subject.namespace.as_str() {
            "" => NAMESPACE_OF_NODES,
            namespace => namespace,
        };
        let api: Api<k8s_openapi::api::core::v1::Event> = Api::namespaced(self.client.clone(), namespace);
        // The name follows from the content: an equal event conflicts with the first, and only gets a later time.
        let name = format!("{}.{:016x}", subject.name, hash(&waiting.event));
        let object = self.object(waiting, namespace, &name);
        let object = serde_json::from_value(object).map_err(kube::Error::SerdeError)?;
        match api.create(&PostParams::default(), &object).await {
            Err(kube::Error::Api(status)) if status.code == 409 => {
                // The admission policy in deploy/ compares the node in the source with that of the writer's token, so the patch
                // repeats the source although it does not change.
                let patch = json!({"lastTimestamp": rfc3339(waiting.last_at), "source": self.source});
                api.patch(&name, &PatchParams::default(), &Patch::Merge(&patch))
                    .await
                    .map(drop)
            }
            created => created.map(drop),
        }
    }

    fn object(&self, waiting: &WaitingEvent, namespace: &str, name: &str) -> Value {
        let Event {
            subject,
            severity,
            reason,
            message,
        } = &waiting.event;
        json!({
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": {
                "apiVersion": "v1",
                "kind": subject.kind,
                "namespace": subject.namespace,
                "name": subject.name,
                "uid": subject.uid,
            },
            "type": format!("{severity:?}"),
            "reason": reason,
            "message": message,
            "source": self.source,
            "firstTimestamp": rfc3339(waiting.first_at),
            "lastTimestamp": rfc3339(waiting.last_at),
            "count": 1,
        })
    }
}

/// A hash that equal events share, also after a restart of the same build.
fn hash(event: &Event) -> u64 {
    // Unlike `RandomState`, this hasher has the same keys in every process.
    let mut hasher = DefaultHasher::new();
    event.hash(&mut hasher);
    hasher.finish()
}

/// Adds an event to those that wait to be written, or updates the time of an equal event there.
fn add(waiting: &mut VecDeque<WaitingEvent>, event: Event) {
    let now = Utc::now();
    if let Some(known) = waiting.iter_mut().find(|known| known.event == event) {
        known.last_at = now;
    } else {
        waiting.push_back(WaitingEvent {
            event,
            since: Instant::now(),
            first_at: now,
            last_at: now,
        });
    }
}

fn rfc3339(at: DateTime<Utc>) -> String {
    at.to_rfc3339_opts(SecondsFormat::Secs, true)
}

fn may_pass(error: &kube::Error) -> bool {
    match error {
        // The API server is busy, starts, or has lost etcd.
        kube::Error::Api(status) => status.code == 429 || status.code >= 500,
        // The object itself is wrong, so a further request would fail too.
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
        let (recorder, writer) = recorder(
            &Client::new(service, "default").into(),
            "test",
            Some("n1".to_owned()),
        );
        tokio::spawn(writer.run());
        (recorder, requests)
    }

    /// Answers the next event with this status code, and returns its reason and message.
    async fn next(requests: &mut Handle<Request<Body>, Response<Body>>, code: u16) -> String {
        let asked = timeout(KEPT_FOR, requests.next_request()).await;
        let (request, response) = asked.expect("no event is written").unwrap();
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
    async fn events_outlast_an_outage_of_the_api_server() {
        let (recorder, mut requests) = start();
        let began = Instant::now();
        recorder.node(EventType::Warning, "GPUUnhealthy", "first".to_owned());
        while began.elapsed() < Duration::from_secs(600) {
            assert_eq!(next(&mut requests, 503).await, "GPUUnhealthy first");
            // A repeated event takes no room from others.
            for _ in 0..CAPACITY / 2 {
                recorder.node(EventType::Warning, "GPUNotReady", "again".to_owned());
            }
        }
        recorder.node(EventType::Normal, "GPUHealthy", "last".to_owned());
        let mut written = Vec::new();
        for _ in 0..3 {
            written.push(next(&mut requests, 201).await);
        }
        assert_eq!(
            written,
            ["GPUUnhealthy first", "GPUNotReady again", "GPUHealthy last"]
        );
    }

    #[test]
    fn events_that_can_wait_leave_room_for_others() {
        let (sender, _events) = mpsc::channel(CAPACITY);
        let recorder = Recorder {
            node: "n1".into(),
            events: sender,
        };
        let taken = (0..CAPACITY).filter(|_| recorder.try_warn(Subject::node("n1"), "Again", String::new()));
        assert_eq!(taken.count(), CAPACITY / 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_refused_event_delays_no_other() {
        let (recorder, mut requests) = start();
        recorder.node(EventType::Normal, "One", String::new());
        recorder.node(EventType::Normal, "Two", String::new());
        assert_eq!(next(&mut requests, 403).await, "One ");
        assert_eq!(next(&mut requests, 201).await, "Two ");
    }

    #[tokio::test(start_paused = true)]
    async fn an_old_event_is_dropped() {
        let (recorder, mut requests) = start();
        recorder.node(EventType::Normal, "Old", String::new());
        let began = Instant::now();
        while began.elapsed() < KEPT_FOR {
            assert_eq!(next(&mut requests, 500).await, "Old ");
        }
        recorder.node(EventType::Normal, "New", String::new());
        assert_eq!(next(&mut requests, 201).await, "New ");
    }
}
