//! Writes bindings to the API server, and finds out the outcome of one: the only file that writes any.
//!
//! Knows nothing of devices: the annotations come ready. Never retries a write whose outcome it does not know.

use std::collections::BTreeMap;
use std::time::Duration;

use http::{Method, StatusCode};
use kube::Client;
use tokio::time::{Instant, sleep_until, timeout_at};
use tracing::error;

use crate::api_server::{Answer, send, shorten};
use crate::leader::{Leadership, is_refusal};

/// Pause before a busy API server is asked again, unless it says otherwise.
const BUSY_PAUSE: Duration = Duration::from_millis(200);
/// Longest time that one look at a pod may take.
const LOOK_TIMEOUT: Duration = Duration::from_secs(4);
/// Longest names and UIDs that are taken for such.
const MAX_NAMESPACE: usize = 63;
const MAX_NAME: usize = 253;
const MAX_UID: usize = 128;

/// A pod by everything that identifies it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodId {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// UID.
    pub uid: String,
}

/// A binding to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Order {
    /// The pod.
    pub pod: PodId,
    /// The node.
    pub node: String,
    /// Merged into the pod's annotations in the same write.
    pub annotations: BTreeMap<String, String>,
    /// Merged into the pod's labels in the same write, by API servers that do so (1.35, or the gate `PodTopologyLabelsAdmission`).
    pub labels: BTreeMap<String, String>,
}

/// What became of a write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The pod is bound to the node, by this write.
    Bound,
    /// The pod is on the node; whose write that was, its annotations say.
    OnNode(BTreeMap<String, String>),
    /// The API server refused: nothing was written.
    Refused(String),
    /// The API server had too much to do to take it up: nothing was written.
    Busy(String),
    /// It may have been written or not.
    Unknown(String),
}

/// What a look at a pod found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// Bound.
    On {
        /// The node.
        node: String,
        /// The pod's annotations.
        annotations: BTreeMap<String, String>,
    },
    /// Not bound.
    Unbound,
    /// There is no pod of this UID.
    Gone,
}

/// The API server's side of binding.
#[derive(Clone)]
pub struct Binder {
    client: Client,
    timeout: Duration,
    leadership: Leadership,
}

impl std::fmt::Debug for Binder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Binder")
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

/// A binding that got no answer.
enum Unanswered {
    /// It was not sent: the lease may end before the write does.
    Withheld,
    /// It may have been written.
    Lost(String),
}

impl Binder {
    /// Writes through `client`, while `leadership` covers it; a bind may take `timeout` in all.
    pub fn new(client: Client, timeout: Duration, leadership: Leadership) -> Self {
        Self {
            client,
            timeout,
            leadership,
        }
    }

    /// What binds are written on the strength of.
    pub fn leadership(&self) -> &Leadership {
        &self.leadership
    }

    /// How long a bind may take in all.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Binds a pod, and asks what became of it where the answer leaves that open and time is left.
    pub async fn bind(&self, order: &Order, deadline: Instant) -> Outcome {
        let posted = self.post_until(order, deadline).await;
        if !matches!(posted, Err(Unanswered::Withheld))
            && self.leadership.is_overdue(Instant::now().into_std())
        {
            let (namespace, pod, node) = (&order.pod.namespace, &order.pod.name, &order.node);
            error!(%namespace, %pod, %node, "the lease ended while a binding was on its way: another replica may not know of it");
        }
        if posted.as_ref().is_ok_and(|answer| is_refusal(answer.status)) {
            self.leadership.note_bind_refused();
        }
        match posted {
            Ok(answer) if answer.status == StatusCode::CONFLICT => {
                self.judge_conflict(order, &answer.message(), deadline).await
            }
            Ok(answer) => match outcome(&answer) {
                Outcome::Unknown(message) => self.judge_unknown(order, message, deadline).await,
                outcome => outcome,
            },
            Err(Unanswered::Lost(message)) => self.judge_unknown(order, message, deadline).await,
            Err(Unanswered::Withheld) => Outcome::Refused(
                "nothing is sent: this replica may not lead until the binding is written".to_owned(),
            ),
        }
    }

    /// Posts until the answer is another than "busy", or time is up.
    async fn post_until(&self, order: &Order, deadline: Instant) -> Result<Answer, Unanswered> {
        loop {
            // Asked right before it is sent; what takes too long after that is refused by nobody but the node.
            if !self
                .leadership
                .covers(Instant::now().into_std(), deadline.into_std())
            {
                return Err(Unanswered::Withheld);
            }
            let late =
                |_| Unanswered::Lost(format!("no answer from the API server within {:?}", self.timeout));
            let answer = timeout_at(deadline, self.post(order))
                .await
                .map_err(late)?
                .map_err(Unanswered::Lost)?;
            if answer.status != StatusCode::TOO_MANY_REQUESTS {
                return Ok(answer);
            }
            match Instant::now().checked_add(answer.retry_after.unwrap_or(BUSY_PAUSE)) {
                Some(again) if again < deadline => sleep_until(again).await,
                _ => return Ok(answer),
            }
        }
    }

    /// Success is certain if the pod is where it should be; that it is not yet there proves nothing.
    async fn judge_unknown(&self, order: &Order, message: String, deadline: Instant) -> Outcome {
        match timeout_at(deadline, self.find(&order.pod)).await {
            Ok(Ok(Found::On { node, annotations })) if node == order.node => Outcome::OnNode(annotations),
            _ => Outcome::Unknown(message),
        }
    }

    /// A conflict is success if this very pod is on this very node: an earlier bind got through.
    async fn judge_conflict(&self, order: &Order, message: &str, deadline: Instant) -> Outcome {
        match timeout_at(deadline, self.find(&order.pod)).await {
            Ok(Ok(Found::On { node, annotations })) if node == order.node => Outcome::OnNode(annotations),
            Ok(Ok(Found::On { node, .. })) => {
                Outcome::Refused(format!("the pod is already bound to node {node:?}"))
            }
            Ok(Ok(Found::Gone)) => Outcome::Refused(format!(
                "there is no pod with UID {} any more: {message}",
                order.pod.uid
            )),
            Ok(Ok(Found::Unbound)) => Outcome::Refused(message.to_owned()),
            Ok(Err(error)) => Outcome::Unknown(error),
            Err(_) => Outcome::Unknown(message.to_owned()),
        }
    }

    async fn post(&self, order: &Order) -> Result<Answer, String> {
        let PodId { namespace, name, uid } = &order.pod;
        let mut metadata = serde_json::json!({"name": name, "namespace": namespace, "uid": uid, "annotations": order.annotations});
        if let Some(metadata) = metadata.as_object_mut().filter(|_| !order.labels.is_empty()) {
            metadata.insert("labels".to_owned(), serde_json::json!(order.labels));
        }
        let target = serde_json::json!({"apiVersion": "v1", "kind": "Node", "name": order.node});
        let binding = serde_json::json!({"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": target});
        // The server gives up in time too, so that a write whose answer is lost does not land much later.
        let seconds = self.timeout.as_millis().div_ceil(1000);
        let path = format!("{}/binding?timeout={seconds}s", pod_path(&order.pod));
        send(
            &self.client,
            Method::POST,
            &path,
            binding.to_string().into_bytes(),
        )
        .await
    }

    /// Looks at a pod.
    ///
    /// # Errors
    /// Why it cannot be known, for people.
    pub async fn find(&self, pod: &PodId) -> Result<Found, String> {
        let Some(found) = self.get(pod).await? else {
            return Ok(Found::Gone);
        };
        Ok(match found.spec.node_name {
            _ if found.metadata.uid.as_deref() != Some(pod.uid.as_str()) => Found::Gone,
            Some(node) if !node.is_empty() => Found::On {
                node,
                annotations: found.metadata.annotations.unwrap_or_default(),
            },
            _ => Found::Unbound,
        })
    }

    /// Reads a pod by its name, whatever its UID; none if there is no pod of that name.
    ///
    /// # Errors
    /// Why it cannot be read, for people.
    pub async fn get(&self, pod: &PodId) -> Result<Option<proto::pod::Pod>, String> {
        let path = pod_path(pod);
        let answer =
            tokio::time::timeout(LOOK_TIMEOUT, send(&self.client, Method::GET, &path, Vec::new())).await;
        let answer =
            answer.map_err(|_| format!("no answer from the API server within {LOOK_TIMEOUT:?}"))??;
        if answer.status == StatusCode::NOT_FOUND {
            return Ok(None);
        }
        if !answer.status.is_success() {
            return Err(answer.message());
        }
        serde_json::from_slice(&answer.body)
            .map(Some)
            .map_err(|error| format!("cannot read the API server's answer: {error}"))
    }
}

/// The outcome of a write by its answer.
fn outcome(answer: &Answer) -> Outcome {
    match answer.status {
        status if status.is_success() => Outcome::Bound,
        // Said by what stands before a write: flow control, the limit of requests in flight, an admission webhook.
        StatusCode::TOO_MANY_REQUESTS => Outcome::Busy(answer.message()),
        StatusCode::REQUEST_TIMEOUT => Outcome::Unknown(answer.message()),
        status if status.is_server_error() => Outcome::Unknown(answer.message()),
        _ => Outcome::Refused(answer.message()),
    }
}

fn pod_path(pod: &PodId) -> String {
    format!("/api/v1/namespaces/{}/pods/{}", pod.namespace, pod.name)
}

impl PodId {
    /// Checks that these are names as the API server gives them: they come from a request, and stand in a path.
    ///
    /// # Errors
    /// What they say, for people.
    pub fn check(&self) -> Result<(), String> {
        let Self { namespace, name, uid } = self;
        let problem = || {
            shorten(&format!(
                "namespace {namespace:?}, name {name:?} and UID {uid:?} are those of no pod"
            ))
        };
        is_identity(uid, namespace, name)
            .then_some(())
            .ok_or_else(problem)
    }
}

/// Whether the API server can have named a pod so.
pub fn is_identity(uid: &str, namespace: &str, name: &str) -> bool {
    is_uid(uid) && is_name(namespace, MAX_NAMESPACE) && is_name(name, MAX_NAME)
}

fn is_name(text: &str, most: usize) -> bool {
    let legal = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.';
    (1..=most).contains(&text.len()) && text.bytes().all(legal) && !text.starts_with('.')
}

fn is_uid(text: &str) -> bool {
    (1..=MAX_UID).contains(&text.len())
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"-_.:".contains(&b))
}

#[cfg(test)]
mod tests;
