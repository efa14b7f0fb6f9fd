//! The `SchedulerLeader` object, which names the one replica whose bindings the API server accepts.
//!
//! The policy `gpushare-scheduler-bindings` compares the pod of a scheduler's token with the holder in this object. It does not
//! read the Lease itself: kube-apiserver watches the objects that are parameters of policies, and its watch of a built-in kind,
//! such as Lease, ends for good with the last policy binding of that kind (kubernetes/kubernetes#133827).

use std::time::{Duration, Instant};

use anyhow::anyhow;
use daemon::events::Recorder;
use http::{Method, StatusCode};
use kube::Client;
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

use super::{LEASE, Leadership, PodName, now};
use crate::api_server::{self, Answer};

/// API group and version of the object.
const API_VERSION: &str = "gpushare.io/v1alpha1";
/// The kind of the object.
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

/// The Lease by which a replica leads, and the holders that the Lease and the object name while it leads.
#[derive(Clone, Debug)]
pub(super) struct FenceSettings {
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

/// Makes the API server accept the bindings of this replica and of no other replica, for one term.
#[derive(Clone)]
pub(super) struct Fence {
    client: Client,
    recorder: Recorder,
    settings: FenceSettings,
    leadership: Leadership,
}

/// The outcome of a dry-run binding.
#[derive(Debug, PartialEq, Eq)]
enum BindingProbe {
    /// The policy lets this replica bind.
    Accepted,
    /// The API server refused the binding with this message.
    Refused(String),
    /// The answer does not show whether the policy lets this replica bind, for this reason.
    Unknown(String),
}

impl Fence {
    /// The fence for the terms of this replica. It writes to the API server through `client`, and events through `recorder`.
    pub(super) fn new(
        (client, recorder): (Client, Recorder),
        settings: FenceSettings,
        leadership: Leadership,
    ) -> Self {
        Self {
            client,
            recorder,
            settings,
            leadership,
        }
    }

    /// Names this replica in the object, and returns when that is written.
    ///
    /// The API server refuses the bindings of an earlier leader as soon as its own watch has seen the object change.
    pub(super) async fn name_this_replica(&self) {
        let mut report = RefusalReport::new(self);
        while let Err(error) = self.write_holder().await {
            report.note_refused(&format!("{error:#}"));
            sleep(RETRY_PAUSE).await;
        }
    }

    /// Waits until the API server accepts this replica's bindings.
    pub(super) async fn wait_until_accepted(&self) {
        let mut report = RefusalReport::new(self);
        loop {
            let problem = match self.probe().await {
                BindingProbe::Accepted => return report.note_accepted(),
                BindingProbe::Refused(message) | BindingProbe::Unknown(message) => message,
            };
            // A person, or a replica that was deposed, may have changed the object meanwhile.
            let written = self.write_holder().await;
            // A failed write explains the refusal better than the API server's message.
            report.note_refused(&written.map_or_else(|error| format!("{error:#}"), |()| problem));
            sleep(RETRY_PAUSE).await;
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
    ///
    /// The check of leadership follows the read: a replica that was deposed since then either fails the check, or fails to write,
    /// because the next leader has replaced that version.
    async fn write_holder(&self) -> anyhow::Result<()> {
        let FenceSettings { pod, holder, .. } = &self.settings;
        let namespace = &pod.namespace;
        let collection = format!("/apis/{API_VERSION}/namespaces/{namespace}/{PLURAL}");
        let path = format!("{collection}/{LEASE}");
        let answer = self.send(Method::GET, &path, None).await?;
        let found = json_of(&answer);
        // The version to replace; `None` to create the object.
        let version = match answer.status {
            // The object names this replica already, as when the API server refuses a binding for another reason.
            StatusCode::OK if holder_of(&found) == holder => return Ok(()),
            StatusCode::OK => Some(
                found
                    .pointer("/metadata/resourceVersion")
                    .cloned()
                    .unwrap_or_default(),
            ),
            StatusCode::NOT_FOUND => None,
            _ => return Err(request_error("read", &answer)),
        };
        // A replica that was paused since it read the object must not take it from the next leader.
        self.check_lease().await?;
        self.leadership.check(now())?;
        let mut metadata = json!({"name": LEASE, "namespace": namespace, "labels": {"app.kubernetes.io/part-of": "gpushare"}});
        if let Some((version, metadata)) = version.clone().zip(metadata.as_object_mut()) {
            // The API server refuses the write if another replica has written since.
            metadata.insert("resourceVersion".to_owned(), version);
        }
        let spec = json!({"holderIdentity": holder, "acquireTime": jiff::Timestamp::now().to_string()});
        let object = json!({"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec});
        let (method, path) = if version.is_some() {
            (Method::PUT, path)
        } else {
            (Method::POST, collection)
        };
        let answer = self.send(method, &path, Some(&object)).await?;
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
    async fn check_lease(&self) -> anyhow::Result<()> {
        let FenceSettings { pod, lease, .. } = &self.settings;
        let path = format!(
            "/apis/coordination.k8s.io/v1/namespaces/{}/leases/{lease}",
            pod.namespace
        );
        let answer = self.send(Method::GET, &path, None).await?;
        let object = json_of(&answer);
        let is_held =
            answer.status == StatusCode::OK && holder_of(&object).starts_with(&self.settings.lease_holder);
        anyhow::ensure!(is_held, "the Lease {lease} does not name this replica any more");
        Ok(())
    }

    /// Tries a dry-run binding of this replica's own pod, which writes nothing. The policy refuses it, or lets it pass; then it
    /// is a conflict, since that pod is bound.
    async fn probe(&self) -> BindingProbe {
        let PodName { namespace, name } = &self.settings.pod;
        let target = json!({"apiVersion": "v1", "kind": "Node", "name": NO_NODE});
        let metadata = json!({"name": name, "namespace": namespace});
        let binding = json!({"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": target});
        let path = format!("/api/v1/namespaces/{namespace}/pods/{name}/binding?dryRun=All");
        match self.send(Method::POST, &path, Some(&binding)).await {
            Ok(answer) if is_refusal(answer.status) => BindingProbe::Refused(answer.text()),
            Ok(Answer { status, .. })
                // A conflict shows that the policy has let the binding pass, since admission comes before the check of the pod.
                if status.is_success() || [StatusCode::CONFLICT, StatusCode::NOT_FOUND].contains(&status) =>
            {
                BindingProbe::Accepted
            }
            Ok(answer) => BindingProbe::Unknown(answer.message()),
            Err(error) => BindingProbe::Unknown(format!("{error:#}")),
        }
    }

    /// Sends a request to the API server; an error means that no answer came.
    async fn send(&self, method: Method, path: &str, body: Option<&Value>) -> anyhow::Result<Answer> {
        let answer = api_server::send(&self.client, method, path, body).await;
        answer.map_err(anyhow::Error::msg)
    }
}

/// Reports refusals of this replica's bindings, one after another: once, and only if they last.
struct RefusalReport<'a> {
    fence: &'a Fence,
    /// The time of the first refusal in a row; `None` before it.
    first: Option<Instant>,
    is_reported: bool,
}

impl<'a> RefusalReport<'a> {
    /// A report before the first refusal.
    fn new(fence: &'a Fence) -> Self {
        Self {
            fence,
            first: None,
            is_reported: false,
        }
    }

    /// Notes a refusal. Once refusals have gone on for `REPORT_AFTER`, the replica is not ready, and an event of its pod says so.
    fn note_refused(&mut self, problem: &str) {
        let first = *self.first.get_or_insert_with(now);
        if now().duration_since(first) < REPORT_AFTER {
            return;
        }
        self.fence.leadership.state().refused = Some(problem.to_owned());
        // One event until the API server accepts a binding again, not five a second.
        if !self.is_reported {
            self.is_reported = true;
            warn!(
                problem,
                "this replica holds the Lease, and the API server does not take its bindings"
            );
            let text = format!(
                "this replica holds the Lease, and the API server does not take its bindings: {problem}. If the object SchedulerLeader \
                 names this pod, restart kube-apiserver; else see that the CRD, the Role and the policy of this version are installed"
            );
            let pod = &self.fence.settings.pod;
            self.fence.recorder.warn(pod, "BindingsRefused", text);
        }
    }

    /// Notes that the API server takes the bindings of this replica: it is ready, as far as the fence is concerned.
    fn note_accepted(self) {
        self.fence.leadership.state().refused = None;
        if self.is_reported {
            info!("the API server accepts this replica's bindings again");
        }
    }
}

/// Returns true if a status means that RBAC (403) or an admission policy (422) has refused a request.
pub(crate) fn is_refusal(status: StatusCode) -> bool {
    matches!(status, StatusCode::FORBIDDEN | StatusCode::UNPROCESSABLE_ENTITY)
}

/// The error for a request about the object `SchedulerLeader` that the API server has refused.
fn request_error(verb: &str, answer: &Answer) -> anyhow::Error {
    anyhow!(
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
