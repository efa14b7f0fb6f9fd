//! The writes by which room is made: the nomination of a pod, and the evictions of others.
//!
//! As for bindings, nothing is sent unless this replica leads until the write is certainly over. Preconditions make the API
//! server refuse a write about another state of the pod than the one that the decision was made on.

use std::time::Duration;

use http::{Method, StatusCode};
use proto::pod::Pod;
use serde_json::json;
use tokio::time::timeout;

use crate::api_server::{Answer, send, send_as};
use crate::bind::{Binder, PodId, pod_path};
use crate::index::ROOM_MANAGER;
use crate::leader::{BIND_TIMEOUT, now};

/// The longest time of one write, as for bindings.
pub(super) const WRITE_LIMIT: Duration = BIND_TIMEOUT;

#[derive(Clone)]
pub(super) struct RoomWriter(pub(super) Binder);

/// The reason for which a write was not carried out.
#[derive(Debug, thiserror::Error)]
pub(super) enum WriteError {
    /// The API server refuses it, and has written nothing: a budget is used up, or the pod is not as it was.
    #[error("{0}")]
    Refused(String),
    #[error("the pod is gone")]
    Gone,
    /// It may have been carried out.
    #[error("outcome unknown: {0}")]
    Unknown(String),
    /// Nothing was sent: this replica may not lead until the write is over.
    #[error("nothing is sent: this replica may not lead for long enough")]
    NotLeading,
}

impl RoomWriter {
    /// Reads a pod; `None` if there is none of this UID any more.
    pub(super) async fn read(&self, pod: &PodId) -> Result<Option<Pod>, WriteError> {
        let found = self.0.get(pod).await.map_err(WriteError::Unknown)?;
        Ok(found.filter(|found| found.uid() == pod.uid))
    }

    /// Has the API server check the eviction of a pod without carrying it out (`dryRun`).
    pub(super) async fn try_eviction(&self, pod: &PodId) -> Result<(), WriteError> {
        let answer = self.post_eviction(pod, "&dryRun=All").await?;
        match answer.status {
            // The answer for a pod that two budgets select, for example. Nothing is written in any case.
            StatusCode::INTERNAL_SERVER_ERROR => Err(WriteError::Refused(answer.message())),
            _ => outcome(&answer),
        }
    }

    /// Evicts a pod, and no successor of its name.
    pub(super) async fn evict(&self, pod: &PodId) -> Result<(), WriteError> {
        outcome(&self.post_eviction(pod, "").await?)
    }

    /// Posts an `Eviction` of the pod with this UID; `query` is added to the parameters.
    async fn post_eviction(&self, pod: &PodId, query: &str) -> Result<Answer, WriteError> {
        let PodId { namespace, name, uid } = pod;
        let eviction = json!({
            "apiVersion": "policy/v1", "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace},
            "deleteOptions": {"preconditions": {"uid": uid}},
        });
        let path = format!("{}/eviction?{}{query}", pod_path(pod), timeout_parameter());
        self.write(send(&self.0.client, Method::POST, &path, Some(&eviction)))
            .await
    }

    /// Nominates a pod to a node, or to none, if the pod is still as it was read.
    pub(super) async fn nominate(
        &self,
        found: &Pod,
        pod: &PodId,
        node: Option<&str>,
    ) -> Result<(), WriteError> {
        let PodId { namespace, name, uid } = pod;
        let version = &found.metadata.resource_version;
        let metadata = json!({"namespace": namespace, "name": name, "uid": uid, "resourceVersion": version});
        let status = node.map_or(json!({}), |node| json!({"nominatedNodeName": node}));
        let object = json!({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": status});
        // Applied, so that the API server notes whose nomination it is: the next leader, and the end of a hold, go by that.
        let path = format!(
            "{}/status?{}&fieldManager={ROOM_MANAGER}&force=true",
            pod_path(pod),
            timeout_parameter()
        );
        let apply = "application/apply-patch+yaml";
        let written = send_as(&self.0.client, Method::PATCH, &path, apply, Some(&object));
        outcome(&self.write(written).await?)
    }

    /// Sends one write, if this replica certainly leads until it is over.
    async fn write(&self, write: impl Future<Output = Result<Answer, String>>) -> Result<Answer, WriteError> {
        let leadership = &self.0.leadership;
        // It counts as a bind, for whose end the replica waits before it releases the Lease.
        let began = leadership.begin_bind(now());
        let _in_work = began.map_err(|_| WriteError::NotLeading)?;
        if !leadership.covers(now(), now() + WRITE_LIMIT) {
            return Err(WriteError::NotLeading);
        }
        match timeout(WRITE_LIMIT, write).await {
            Ok(answer) => answer.map_err(WriteError::Unknown),
            Err(_) => Err(WriteError::Unknown(format!("no answer within {WRITE_LIMIT:?}"))),
        }
    }
}

/// The query parameter by which the API server gives a write up after the same time: one without an answer happens no later.
fn timeout_parameter() -> String {
    format!("timeout={}s", WRITE_LIMIT.as_secs())
}

fn outcome(answer: &Answer) -> Result<(), WriteError> {
    match answer.status {
        status if status.is_success() => Ok(()),
        StatusCode::NOT_FOUND => Err(WriteError::Gone),
        status if status == StatusCode::REQUEST_TIMEOUT || status.is_server_error() => {
            Err(WriteError::Unknown(answer.message()))
        }
        _ => Err(WriteError::Refused(answer.message())),
    }
}
