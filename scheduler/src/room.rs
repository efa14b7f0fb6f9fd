//! The object by which kube-scheduler sees an event when room has opened for pods that the extender refused.
//!
//! A `CSIStorageCapacity` is the one kind that every kube-scheduler with an extender watches from 1.28 on, that a Role of one
//! namespace can grant, and that means nothing else: it describes no storage, as no class has its name and it can be reached
//! from no node. kube-scheduler tries all pods that an extender refused again when it changes; those that wait for volumes it
//! leaves alone from 1.32 on, since the capacity does not grow.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::StatusCode;
use kube::Client;
use serde_json::{Value, json};

use crate::api_server;

/// Name of the object, and of the storage class that it names and no cluster has.
pub const NAME: &str = "gpushare-room";
/// Annotation of the object: the time of the last announcement, in nanoseconds since 1970.
const OPENED: &str = "gpushare/room-opened";
/// Pause after a write that failed.
const PAUSE: Duration = Duration::from_secs(5);
/// Pause after a write that the API server refuses until something is configured: a right is missing, or the kind.
const LONG_PAUSE: Duration = Duration::from_secs(60);

/// The object in one namespace.
#[expect(missing_debug_implementations, reason = "a client of the API server has none")]
#[derive(Clone)]
pub struct Room {
    client: Client,
    namespace: String,
}

/// The reason for which an announcement was not written.
#[derive(Debug, thiserror::Error)]
pub enum AnnounceError {
    /// The API server does not take it.
    #[error(
        "cannot write CSIStorageCapacity {namespace}/{NAME}: {message}; the Role gpushare-scheduler-room grants create and patch"
    )]
    Refused {
        /// Its namespace.
        namespace: String,
        /// The API server's words.
        message: String,
    },
    /// The write may succeed a little later.
    #[error("cannot write CSIStorageCapacity {namespace}/{NAME}: {message}")]
    Failed {
        /// Its namespace.
        namespace: String,
        /// The cause.
        message: String,
    },
}

impl AnnounceError {
    /// Time until another attempt makes sense.
    pub(crate) const fn pause(&self) -> Duration {
        match self {
            Self::Refused { .. } => LONG_PAUSE,
            Self::Failed { .. } => PAUSE,
        }
    }
}

impl Room {
    /// The object in this namespace.
    pub fn new(client: Client, namespace: String) -> Self {
        Self { client, namespace }
    }

    /// Writes the object, which kube-scheduler sees as an event.
    ///
    /// # Errors
    /// The API server's refusal, or the reason for which there is no answer.
    pub async fn announce(&self) -> Result<(), AnnounceError> {
        let namespace = &self.namespace;
        let path = format!("/apis/storage.k8s.io/v1/namespaces/{namespace}/csistoragecapacities/{NAME}");
        let failed = |message| AnnounceError::Failed {
            namespace: namespace.clone(),
            message,
        };
        let answer = api_server::apply(&self.client, &path, &self.object()).await;
        let answer = answer.map_err(failed)?;
        match answer.status {
            status if status.is_success() => Ok(()),
            StatusCode::FORBIDDEN | StatusCode::NOT_FOUND | StatusCode::UNPROCESSABLE_ENTITY => {
                Err(AnnounceError::Refused {
                    namespace: namespace.clone(),
                    message: answer.message(),
                })
            }
            _ => Err(failed(answer.message())),
        }
    }

    /// The object as it is written, different each time.
    fn object(&self) -> Value {
        // A write that changes nothing causes no watch event, and kube-scheduler would retry no pod.
        let nanos = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_nanos();
        json!({
            "apiVersion": "storage.k8s.io/v1", "kind": "CSIStorageCapacity",
            "metadata": {
                "name": NAME, "namespace": self.namespace,
                "labels": {"app.kubernetes.io/name": "gpushare-scheduler", "app.kubernetes.io/part-of": "gpushare"},
                "annotations": {OPENED: nanos.to_string()},
            },
            // Without `nodeTopology` the storage can be reached from no node.
            "storageClassName": NAME,
        })
    }
}
