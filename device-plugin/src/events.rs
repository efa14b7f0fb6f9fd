//! Events on pods and on this node: what happened, for whoever describes it. Lost if the API server is away; nobody waits
//! for them.

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
}

/// Both ends.
pub fn recorder(client: Client, node: String) -> (Recorder, Writer) {
    let (sender, events) = mpsc::channel(CAPACITY);
    (Recorder { node: node.clone(), events: sender }, Writer { client, node, events })
}

impl Recorder {
    /// Something about a pod that a person should look at.
    pub fn warn(&self, pod: &NodePod, reason: &'static str, message: String) {
        let (name, uid) = (pod.name.clone(), pod.uid.as_str().to_owned());
        self.send(Event { kind: "Pod", namespace: Some(pod.namespace.clone()), name, uid, weight: Weight::Warning, reason, message });
    }

    /// Something about this node. Its name stands for its UID, as in kubelet's own events.
    pub fn node(&self, weight: Weight, reason: &'static str, message: String) {
        let (name, uid) = (self.node.clone(), self.node.clone());
        self.send(Event { kind: "Node", namespace: None, name, uid, weight, reason, message });
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
        while let Some(event) = self.events.recv().await {
            match timeout(REQUEST_LIMIT, self.write(&event)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => warn!(object = event.name, reason = event.reason, error = one_line(&error), "an event is lost"),
                Err(_) => warn!(object = event.name, reason = event.reason, "an event is lost: no answer within {REQUEST_LIMIT:?}"),
            }
        }
        std::future::pending::<()>().await;
    }

    /// One event per object and message: what happens again is counted in the one that is there.
    async fn write(&self, event: &Event) -> kube::Result<()> {
        let api: Api<k8s_openapi::api::core::v1::Event> =
            Api::namespaced(self.client.clone(), event.namespace.as_deref().unwrap_or(NAMESPACE_OF_NODES));
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
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        })
    }
}
