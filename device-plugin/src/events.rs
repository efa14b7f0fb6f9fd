//! Events on pods: what happened to one, for whoever describes it. Lost if the API server is away; nobody waits for them.

use std::time::Duration;

use chrono::{SecondsFormat, Utc};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tracing::{debug, warn};

use crate::cdi::fnv1a;
use crate::pods::NodePod;
use crate::watching::one_line;

/// How long one request may take.
const REQUEST_LIMIT: Duration = Duration::from_secs(5);

/// How many events may wait to be written; more are dropped.
const CAPACITY: usize = 64;

/// Something that happened to a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Event {
    namespace: String,
    name: String,
    uid: String,
    reason: &'static str,
    message: String,
}

/// Takes in what happened. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Recorder(mpsc::Sender<Event>);

/// Writes what is taken in.
#[expect(missing_debug_implementations, reason = "a client has none")]
pub struct Writer {
    client: Client,
    node: String,
    events: mpsc::Receiver<Event>,
}

/// Both ends.
pub fn recorder(client: Client, node: String) -> (Recorder, Writer) {
    let (sender, events) = mpsc::channel(CAPACITY);
    (Recorder(sender), Writer { client, node, events })
}

impl Recorder {
    /// Something that a person should look at.
    pub fn warn(&self, pod: &NodePod, reason: &'static str, message: String) {
        let event = Event { namespace: pod.namespace.clone(), name: pod.name.clone(), uid: pod.uid.as_str().to_owned(), reason, message };
        if self.0.try_send(event).is_err() {
            debug!("an event is dropped");
        }
    }
}

impl Writer {
    /// Writes until the task is dropped.
    pub async fn run(mut self) {
        while let Some(event) = self.events.recv().await {
            match timeout(REQUEST_LIMIT, self.write(&event)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => warn!(pod = event.name, reason = event.reason, error = one_line(&error), "an event is lost"),
                Err(_) => warn!(pod = event.name, reason = event.reason, "an event is lost: no answer within {REQUEST_LIMIT:?}"),
            }
        }
        std::future::pending::<()>().await;
    }

    /// One event per pod and message: what happens again is counted in the one that is there.
    async fn write(&self, event: &Event) -> kube::Result<()> {
        let api: Api<k8s_openapi::api::core::v1::Event> = Api::namespaced(self.client.clone(), &event.namespace);
        let name = format!("{}.{:016x}", event.name, fnv1a(&format!("{}\n{}\n{}", event.uid, event.reason, event.message)));
        let now = Utc::now().to_rfc3339_opts(SecondsFormat::Secs, true);
        let object = serde_json::from_value(self.object(event, &name, &now)).map_err(kube::Error::SerdeError)?;
        match api.create(&PostParams::default(), &object).await {
            Err(kube::Error::Api(status)) if status.code == 409 => {
                // The source again, by which the admission policy knows whose event this is.
                let patch = json!({"lastTimestamp": now, "source": self.source()});
                api.patch(&name, &PatchParams::default(), &Patch::Merge(&patch)).await.map(drop)
            }
            created => created.map(drop),
        }
    }

    fn source(&self) -> Value {
        json!({"component": "gpushare-device-plugin", "host": self.node})
    }

    fn object(&self, event: &Event, name: &str, now: &str) -> Value {
        json!({
            "metadata": {"name": name, "namespace": event.namespace},
            "involvedObject": {"apiVersion": "v1", "kind": "Pod", "namespace": event.namespace, "name": event.name, "uid": event.uid},
            "type": "Warning",
            "reason": event.reason,
            "message": event.message,
            "source": self.source(),
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        })
    }
}
