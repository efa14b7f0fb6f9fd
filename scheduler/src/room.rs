//! The object by which kube-scheduler sees an event when room has opened for pods that the extender refused.
//!
//! A `CSIStorageCapacity` is the one kind that every kube-scheduler with an extender watches from 1.28 on, that a Role of one
//! namespace can grant, and that means nothing else: it describes no storage, as no class has its name and it can be reached
//! from no node. A change of the object makes kube-scheduler try all pods again that an extender refused; from 1.32 on it leaves
//! pods alone that wait for volumes, since the capacity does not grow.

use std::time::Duration;

use http::StatusCode;
use kube::Client;
use serde_json::{Value, json};

use crate::api_server;
use crate::read_api::unix_time;

/// Name of the object, and of the storage class that it names and no cluster has.
pub const NAME: &str = "gpushare-room";
/// Annotation of the object: the time of the last announcement, in nanoseconds since 1970.
const OPENED_ANNOTATION: &str = "gpushare/room-opened";
/// The end of the error's text where the API server refuses the write: the Role that grants the rights.
const NEEDED_RIGHTS: &str = "; the Role gpushare-scheduler-room grants create and patch";
/// Pause after a write that failed.
const PAUSE: Duration = Duration::from_secs(5);
/// Pause after a write that the API server refuses until something is configured: a right is missing, or the kind.
const LONG_PAUSE: Duration = Duration::from_secs(60);

/// The `CSIStorageCapacity` [`NAME`] of one namespace, and the client that writes it.
#[expect(missing_debug_implementations, reason = "a client of the API server has none")]
#[derive(Clone)]
pub struct Room {
    client: Client,
    namespace: String,
}

/// The reason for which an announcement was not written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write CSIStorageCapacity {namespace}/{NAME}: {message}{}", if *.is_refused { NEEDED_RIGHTS } else { "" })]
pub struct AnnounceError {
    namespace: String,
    /// The API server's words, or the cause for which there are none.
    message: String,
    /// True if the API server refuses such a write until something is configured.
    is_refused: bool,
}

impl AnnounceError {
    /// The time to wait before the next attempt.
    pub(crate) const fn pause(&self) -> Duration {
        if self.is_refused { LONG_PAUSE } else { PAUSE }
    }
}

impl Room {
    /// The object in the namespace of the scheduler.
    pub fn new(client: Client, namespace: String) -> Self {
        Self { client, namespace }
    }

    /// Announces that room has opened: writes the object, which kube-scheduler sees as an event.
    ///
    /// # Errors
    /// The API server's refusal, or the reason for which there is no answer.
    pub async fn announce(&self) -> Result<(), AnnounceError> {
        let namespace = &self.namespace;
        let path = format!("/apis/storage.k8s.io/v1/namespaces/{namespace}/csistoragecapacities/{NAME}");
        let (message, is_refused) = match api_server::apply(&self.client, &path, &self.object()).await {
            Ok(answer) if answer.status.is_success() => return Ok(()),
            Ok(answer) => {
                // A right is missing, the API server does not know the kind, or an admission policy denies it.
                let refusals = [
                    StatusCode::FORBIDDEN,
                    StatusCode::NOT_FOUND,
                    StatusCode::UNPROCESSABLE_ENTITY,
                ];
                (answer.message(), refusals.contains(&answer.status))
            }
            Err(message) => (message, false),
        };
        Err(AnnounceError {
            namespace: namespace.clone(),
            message,
            is_refused,
        })
    }

    /// The object as it is written, different each time.
    fn object(&self) -> Value {
        // A write that changes nothing causes no watch event, and kube-scheduler would retry no pod.
        let opened = unix_time();
        json!({
            "apiVersion": "storage.k8s.io/v1", "kind": "CSIStorageCapacity",
            "metadata": {
                "name": NAME, "namespace": self.namespace,
                "labels": {"app.kubernetes.io/name": "gpushare-scheduler", "app.kubernetes.io/part-of": "gpushare"},
                "annotations": {OPENED_ANNOTATION: opened.as_nanos().to_string()},
            },
            // Without `nodeTopology` the storage can be reached from no node.
            "storageClassName": NAME,
        })
    }
}
