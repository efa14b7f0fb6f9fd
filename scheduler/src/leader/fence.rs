//! The `SchedulerLeader` object, which names the one replica whose bindings the API server accepts.
//!
//! The policy `gpushare-scheduler-bindings` compares the pod of a scheduler's token with the holder in this object. It does not
//! read the Lease itself: kube-apiserver watches the objects that are parameters of policies, and its watch of a built-in kind,
//! such as Lease, ends for good with the last policy binding of that kind (kubernetes/kubernetes#133827).

use std::time::{Duration, Instant};

use daemon::events::Recorder;
use http::{Method, StatusCode};
use kube::Client;
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

use super::{LEASE, Leadership, PodName, now, subject};
use crate::api_server::{Answer, send};

const API_VERSION: &str = "gpushare.io/v1alpha1";
const KIND: &str = "SchedulerLeader";
/// The name of the kind in paths of the API server.
const PLURAL: &str = "schedulerleaders";
/// Pause between two dry-run bindings while the API server accepts them.
const PROBE_INTERVAL: Duration = Duration::from_secs(10);
/// Pause after a request that failed or a binding that was refused: no pod is bound meanwhile.
const RETRY_PAUSE: Duration = Duration::from_millis(200);
/// The time for which refusals may last before they are reported: the API server takes a moment to see a new holder.
const REPORT_AFTER: Duration = Duration::from_secs(3);
/// The node of the dry-run binding, which need not exist.
const NO_NODE: &str = "gpushare-dry-run";

/// Makes the API server accept the bindings of this replica and of no other replica, for one term.
#[derive(Clone)]
pub(super) struct Fence {
    pub(super) client: Client,
    pub(super) recorder: Recorder,
    pub(super) leadership: Leadership,
    /// This replica's pod, in the namespace of the object and of the Lease.
    pub(super) pod: PodName,
    /// The object's `holderIdentity` while this replica leads.
    pub(super) holder: String,
    /// Name of the Lease by which this replica leads.
    pub(super) lease: String,
    /// The beginning of the Lease's `holderIdentity` while this replica leads. The Lease of a kube-scheduler names the host
    /// alone.
    pub(super) lease_holder: String,
}

impl Fence {
    /// Names this replica in the object, and returns when that is written.
    ///
    /// The API server refuses the bindings of an earlier leader as soon as its own watch has seen the object change.
    pub(super) async fn name_this_replica(&self) {
        let began = now();
        while let Err(problem) = self.write_holder().await {
            self.note_refused(began, problem);
            sleep(RETRY_PAUSE).await;
        }
    }

    /// Waits until the API server accepts this replica's bindings.
    pub(super) async fn wait_until_accepted(&self) {
        let began = now();
        while let Err(problem) = self.probe().await {
            // A person, or a replica that was deposed, may have changed the object meanwhile.
            let written = self.write_holder().await;
            // A failed write explains the refusal better than the API server's message.
            self.note_refused(began, written.err().unwrap_or(problem));
            sleep(RETRY_PAUSE).await;
        }
        let reported = self.leadership.state().refused.take();
        if reported.is_some() {
            info!("the API server accepts this replica's bindings again");
        }
    }

    /// Keeps the API server accepting this replica's bindings, until the future is dropped at the end of the term.
    pub(super) async fn keep(&self) {
        loop {
            // A refused binding ends the pause at once; otherwise the pause ends with the timeout, which is no error.
            let _ = timeout(PROBE_INTERVAL, self.leadership.0.bind_refused.notified()).await;
            self.wait_until_accepted().await;
        }
    }

    /// Reads the object and, if it does not name this replica, writes this replica's name over the version that was read.
    async fn write_holder(&self) -> Result<(), String> {
        let (namespace, holder) = (&self.pod.namespace, &self.holder);
        let collection = format!("/apis/{API_VERSION}/namespaces/{namespace}/{PLURAL}");
        let path = format!("{collection}/{LEASE}");
        let answer = send(&self.client, Method::GET, &path, None).await?;
        let found = json_of(&answer);
        // The version to replace; `None` to create the object.
        let version = match answer.status {
            // The object names this replica already, as when the API server refuses a binding for another reason.
            StatusCode::OK if holder_of(&found) == holder => return Ok(()),
            StatusCode::OK => found.pointer("/metadata/resourceVersion"),
            StatusCode::NOT_FOUND => None,
            _ => return Err(request_error("read", &answer)),
        };
        // A replica that was paused since it read the object must not take it from the next leader. One that is deposed after
        // this check fails to write, because the next leader has replaced the version that was read.
        self.check_lease().await?;
        self.leadership.check(now()).map_err(|error| error.to_string())?;
        let mut metadata = json!({"name": LEASE, "namespace": namespace, "labels": {"app.kubernetes.io/part-of": "gpushare"}});
        if let (Some(version), Some(metadata)) = (version, metadata.as_object_mut()) {
            // The API server refuses the write if another replica has written since.
            metadata.insert("resourceVersion".to_owned(), version.clone());
        }
        let spec = json!({"holderIdentity": holder, "acquireTime": jiff::Timestamp::now().to_string()});
        let object = json!({"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec});
        let (method, path) = match version {
            Some(_) => (Method::PUT, path),
            None => (Method::POST, collection),
        };
        let answer = send(&self.client, method, &path, Some(&object)).await?;
        if !answer.status.is_success() {
            return Err(request_error("write", &answer));
        }
        info!(
            name = LEASE,
            holder,
            "the SchedulerLeader object names this replica: the API server refuses the bindings of others"
        );
        Ok(())
    }

    /// Checks that the Lease names this replica: a person may have written another holder into it, which then leads.
    async fn check_lease(&self) -> Result<(), String> {
        let (namespace, lease) = (&self.pod.namespace, &self.lease);
        let path = format!("/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{lease}");
        let answer = send(&self.client, Method::GET, &path, None).await?;
        if answer.status == StatusCode::OK && holder_of(&json_of(&answer)).starts_with(&self.lease_holder) {
            return Ok(());
        }
        Err(format!("the Lease {lease} does not name this replica any more"))
    }

    /// Tries a dry-run binding of this replica's own pod, which writes nothing. The policy refuses it, or lets it pass; then it
    /// is a conflict, since that pod is bound.
    async fn probe(&self) -> Result<(), String> {
        let PodName { namespace, name } = &self.pod;
        let target = json!({"apiVersion": "v1", "kind": "Node", "name": NO_NODE});
        let metadata = json!({"name": name, "namespace": namespace});
        let binding = json!({"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": target});
        let path = format!("/api/v1/namespaces/{namespace}/pods/{name}/binding?dryRun=All");
        let answer = send(&self.client, Method::POST, &path, Some(&binding)).await?;
        match answer.status {
            // A conflict shows that the policy has let the binding pass, since admission comes before the check of the pod.
            StatusCode::CONFLICT | StatusCode::NOT_FOUND => Ok(()),
            status if status.is_success() => Ok(()),
            status if is_refusal(status) => Err(answer.text()),
            _ => Err(answer.message()),
        }
    }

    /// Notes that bindings are refused since `began`. Once that has gone on for `REPORT_AFTER`, the replica is not ready, and an
    /// event of its pod says so.
    fn note_refused(&self, began: Instant, problem: String) {
        if now().duration_since(began) < REPORT_AFTER {
            return;
        }
        let text = format!(
            "this replica holds the Lease, and the API server does not take its bindings: {problem}. If the object SchedulerLeader names \
             this pod, restart kube-apiserver; else see that the CRD, the Role and the policy of this version are installed"
        );
        let reported = self.leadership.state().refused.replace(problem);
        // One event until the API server accepts a binding again, not five a second.
        if reported.is_none() {
            warn!("{text}");
            self.recorder.warn(subject(&self.pod), "BindingsRefused", text);
        }
    }
}

/// Returns true if a status means that RBAC (403) or an admission policy (422) has refused a request.
pub(crate) fn is_refusal(status: StatusCode) -> bool {
    matches!(status, StatusCode::FORBIDDEN | StatusCode::UNPROCESSABLE_ENTITY)
}

/// The error for a request about the object `SchedulerLeader` that the API server has refused.
fn request_error(verb: &str, answer: &Answer) -> String {
    format!(
        "cannot {verb} {KIND} {LEASE} ({}): {}",
        answer.status,
        answer.text()
    )
}

/// The holder that a Lease or the object `SchedulerLeader` names; empty if it names none.
fn holder_of(object: &Value) -> &str {
    let holder = object.pointer("/spec/holderIdentity");
    holder.and_then(Value::as_str).unwrap_or_default()
}

/// The object in an answer; null if the answer is no JSON.
fn json_of(answer: &Answer) -> Value {
    serde_json::from_slice(&answer.body).unwrap_or_default()
}

#[cfg(test)]
mod tests;
