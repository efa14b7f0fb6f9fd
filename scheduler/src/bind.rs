//! Writes bindings to the API server, and reads their outcome. No other file writes bindings.
//!
//! The caller has chosen the devices and made the annotations. A write whose outcome is unknown is not repeated here.

use std::collections::BTreeMap;
use std::time::Duration;

use http::{Method, StatusCode};
use kube::Client;
use tokio::time::{Instant, sleep_until, timeout_at};
use tracing::error;

use crate::api_server::{Answer, send, send_as, shorten};
use crate::leader::{Leadership, is_refusal};

/// Pause before a binding is sent again to a busy API server, unless its answer names another pause (`Retry-After`).
const BUSY_PAUSE: Duration = Duration::from_millis(200);
/// The lengths of the longest valid names and UIDs, in bytes.
const MAX_NAMESPACE: usize = 63;
const MAX_NAME: usize = 253;
const MAX_UID: usize = 128;

/// The identity of a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "fields of every Kubernetes object")]
pub struct PodId {
    pub namespace: String,
    pub name: String,
    pub uid: String,
}

/// A binding to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodBinding {
    /// The pod.
    pub pod: PodId,
    /// The node.
    pub node: String,
    /// The API server merges these into the pod's annotations in the same write.
    pub annotations: BTreeMap<String, String>,
    /// API servers of 1.35 and later, or with the gate `PodTopologyLabelsAdmission`, merge these into the pod's labels.
    pub labels: BTreeMap<String, String>,
}

impl PodBinding {
    /// The binding of a pod for which no devices are chosen.
    pub(crate) fn without_devices(pod: PodId, node: &str) -> Self {
        Self {
            pod,
            node: node.to_owned(),
            annotations: BTreeMap::new(),
            labels: BTreeMap::new(),
        }
    }
}

/// The outcome of a write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum BindOutcome {
    Bound,
    /// The pod is on the node and has these annotations, by this write or an earlier one.
    OnNode(BTreeMap<String, String>),
    Refused(String),
    /// The API server was too busy, and wrote nothing.
    Busy(String),
    Unknown(String),
}

/// The state of a pod that the API server returned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PodLookup {
    Bound {
        node: String,
        annotations: BTreeMap<String, String>,
    },
    Unbound,
    /// The API server has no pod with this UID.
    Gone,
}

/// Writes bindings and reads pods.
#[expect(missing_debug_implementations, reason = "a client of the API server has none")]
#[derive(Clone)]
pub struct Binder {
    pub(crate) client: Client,
    /// The longest time that a bind may take as a whole.
    pub(crate) timeout: Duration,
    /// The leadership of this replica, which allows the writes.
    pub(crate) leadership: Leadership,
}

impl Binder {
    /// A binder that writes only while `leadership` allows it. `timeout` is for one bind as a whole.
    pub fn new(client: Client, timeout: Duration, leadership: Leadership) -> Self {
        Self {
            client,
            timeout,
            leadership,
        }
    }

    /// Writes a binding. Reads the pod if the answer leaves the outcome open and there is time left.
    pub(crate) async fn bind(&self, binding: &PodBinding, deadline: Instant) -> BindOutcome {
        let Some(posted) = self.post_until(binding, deadline).await else {
            let text = "nothing is sent: this replica may not lead until the binding is written";
            return BindOutcome::Refused(text.to_owned());
        };
        if self.leadership.is_overdue(Instant::now().into_std()) {
            let (namespace, pod, node) = (&binding.pod.namespace, &binding.pod.name, &binding.node);
            // The write cannot be taken back; the metric and this line are all that can be done.
            error!(%namespace, %pod, %node, "the lease ended while a binding was on its way: another replica may not know of it");
        }
        let answer = match posted {
            Ok(answer) => answer,
            Err(message) => return self.resolve(binding, message, false, deadline).await,
        };
        let (status, message) = (answer.status, answer.message());
        if is_refusal(status) {
            self.leadership.note_bind_refused();
        }
        match status {
            status if status.is_success() => BindOutcome::Bound,
            // Flow control, the limit of requests in flight and admission webhooks answer 429, all of them before a write.
            StatusCode::TOO_MANY_REQUESTS => BindOutcome::Busy(message),
            // The pod has a node, is another one, is being deleted or has gates: this write was not carried out, but an earlier
            // one may have been.
            StatusCode::CONFLICT => self.resolve(binding, message, true, deadline).await,
            status if status == StatusCode::REQUEST_TIMEOUT || status.is_server_error() => {
                self.resolve(binding, message, false, deadline).await
            }
            _ => BindOutcome::Refused(message),
        }
    }

    /// Sends the binding until the API server is not too busy, or time is up. `None` if nothing was sent, as the lease may end
    /// before the binding is written; after an error the binding may have been written.
    async fn post_until(&self, binding: &PodBinding, deadline: Instant) -> Option<Result<Answer, String>> {
        loop {
            // Checked right before the write, which the API server gives up after the timeout in its path.
            if !self
                .leadership
                .covers(Instant::now().into_std(), deadline.into_std())
            {
                return None;
            }
            let answer = match timeout_at(deadline, self.post(binding)).await {
                Ok(Ok(answer)) => answer,
                Ok(Err(message)) => return Some(Err(message)),
                Err(_) => {
                    let message = format!("no answer from the API server within {:?}", self.timeout);
                    return Some(Err(message));
                }
            };
            // A busy API server has written nothing, so sending again is safe.
            if answer.status != StatusCode::TOO_MANY_REQUESTS {
                return Some(Ok(answer));
            }
            match Instant::now().checked_add(answer.retry_after.unwrap_or(BUSY_PAUSE)) {
                Some(again) if again < deadline => sleep_until(again).await,
                _ => return Some(Ok(answer)),
            }
        }
    }

    /// Reads the pod, since the answer leaves the outcome open: the pod may be on the node by this write or an earlier one.
    /// `is_final` if the API server has certainly not written what it answered with `message`.
    async fn resolve(
        &self,
        binding: &PodBinding,
        message: String,
        is_final: bool,
        deadline: Instant,
    ) -> BindOutcome {
        let Ok(found) = timeout_at(deadline, self.find(&binding.pod)).await else {
            return BindOutcome::Unknown(message);
        };
        match found {
            Ok(PodLookup::Bound { node, annotations }) if node == binding.node => {
                BindOutcome::OnNode(annotations)
            }
            // The pod is not on the node, and a write that is still under way may yet bind it there.
            _ if !is_final => BindOutcome::Unknown(message),
            Ok(PodLookup::Bound { node, .. }) => {
                BindOutcome::Refused(format!("the pod is already bound to node {node:?}"))
            }
            Ok(PodLookup::Gone) => {
                let uid = &binding.pod.uid;
                BindOutcome::Refused(format!("there is no pod with UID {uid} any more: {message}"))
            }
            Ok(PodLookup::Unbound) => BindOutcome::Refused(message),
            Err(error) => BindOutcome::Unknown(error),
        }
    }

    /// Sends the binding once, to the subresource `binding` of the pod.
    async fn post(&self, binding: &PodBinding) -> Result<Answer, String> {
        let PodId { namespace, name, uid } = &binding.pod;
        // The UID makes the API server refuse to bind a successor of the same name.
        let mut metadata = serde_json::json!({"name": name, "namespace": namespace, "uid": uid, "annotations": binding.annotations});
        let has_labels = !binding.labels.is_empty();
        if has_labels && let Some(metadata) = metadata.as_object_mut() {
            metadata.insert("labels".to_owned(), serde_json::json!(binding.labels));
        }
        let target = serde_json::json!({"apiVersion": "v1", "kind": "Node", "name": binding.node});
        let body = serde_json::json!({"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": target});
        // The API server gives up in time too, so that a write whose answer is lost does not happen much later.
        let seconds = self.timeout.as_millis().div_ceil(1000);
        let path = format!("{}/binding?timeout={seconds}s", pod_path(&binding.pod));
        send_as(&self.client, Method::POST, &path, "application/json", Some(&body)).await
    }

    /// Reads the state of a pod. An error is for people.
    pub(crate) async fn find(&self, pod: &PodId) -> Result<PodLookup, String> {
        let found = self.get(pod).await?;
        // A pod of the same name with another UID is a successor.
        let Some(found) = found.filter(|found| found.uid() == pod.uid) else {
            return Ok(PodLookup::Gone);
        };
        Ok(match found.spec.node_name {
            Some(node) if !node.is_empty() => PodLookup::Bound {
                node,
                annotations: found.metadata.annotations.unwrap_or_default(),
            },
            _ => PodLookup::Unbound,
        })
    }

    /// Reads a pod by its name, whatever its UID; `None` if there is no pod of that name. An error is for people.
    pub(crate) async fn get(&self, pod: &PodId) -> Result<Option<proto::pod::Pod>, String> {
        let answer = send(&self.client, Method::GET, &pod_path(pod), None).await?;
        if answer.status == StatusCode::NOT_FOUND {
            return Ok(None);
        }
        if !answer.status.is_success() {
            return Err(answer.message());
        }
        let pod = serde_json::from_slice(&answer.body);
        pod.map_err(|error| format!("cannot read the API server's answer: {error}"))
    }
}

pub(crate) fn pod_path(pod: &PodId) -> String {
    format!("/api/v1/namespaces/{}/pods/{}", pod.namespace, pod.name)
}

impl PodId {
    /// Checks that these are a valid namespace, name and UID: they come from a request, and become part of a path.
    pub fn check(&self) -> Result<(), String> {
        let Self { namespace, name, uid } = self;
        if is_pod_identity(uid, namespace, name) {
            return Ok(());
        }
        Err(shorten(&format!(
            "namespace {namespace:?}, name {name:?} and UID {uid:?} are not those of a pod"
        )))
    }
}

/// Returns true if the API server could have a pod with this UID, namespace and name.
pub fn is_pod_identity(uid: &str, namespace: &str, name: &str) -> bool {
    // UIDs of mirror pods are hashes, so any text of legal characters counts.
    is_uid(uid) && is_name(namespace, MAX_NAMESPACE) && is_name(name, MAX_NAME)
}

/// Returns true if the text can be the name of a namespace or a pod, and is safe in a path.
fn is_name(text: &str, max_length: usize) -> bool {
    // "." and ".." would lead to other paths.
    let is_legal = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.';
    (1..=max_length).contains(&text.len()) && text.bytes().all(is_legal) && !text.starts_with('.')
}

fn is_uid(text: &str) -> bool {
    let is_legal = |b: u8| b.is_ascii_alphanumeric() || b"-_.:".contains(&b);
    (1..=MAX_UID).contains(&text.len()) && text.bytes().all(is_legal)
}

#[cfg(test)]
mod tests;
