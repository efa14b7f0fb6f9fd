//! Writes pod status, deletions and events to the API server without ever making admission wait.
//!
//! Writes of one pod are in order, and a status that was not written yet is replaced by a newer one.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::config::KubeletConfig;
use super::pod::PodSpec;
use super::status::text;

/// Requests that are under way at most.
const IN_FLIGHT: usize = 32;

/// The writing side of kubelet towards the API server.
#[derive(Debug)]
pub(crate) struct StatusWriter {
    node: String,
    client: SilentClient,
    retry: Duration,
    /// Pods with a task that writes, by UID.
    slots: Mutex<BTreeMap<String, Slot>>,
    permits: Semaphore,
    n_events: AtomicU64,
    cancel: CancellationToken,
    tasks: TaskTracker,
}

/// A client, which has no `Debug` of its own.
struct SilentClient(Client);

impl std::fmt::Debug for SilentClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Client")
    }
}

#[derive(Debug)]
struct Slot {
    namespace: String,
    name: String,
    status: Option<Value>,
    delete: bool,
}

impl StatusWriter {
    pub(crate) fn new(config: &KubeletConfig, cancel: CancellationToken, tasks: TaskTracker) -> Self {
        Self {
            node: config.node.clone(),
            client: SilentClient(config.client.clone()),
            retry: config.delays.api_retry,
            slots: Mutex::default(),
            permits: Semaphore::new(IN_FLIGHT),
            n_events: AtomicU64::new(0),
            cancel,
            tasks,
        }
    }

    /// Writes this status after what was asked for before.
    pub(crate) fn status(self: &Arc<Self>, pod: &PodSpec, status: Value) {
        self.submit(pod, |slot| slot.status = Some(status));
    }

    /// Deletes the pod after its last status is written.
    pub(crate) fn delete(self: &Arc<Self>, pod: &PodSpec) {
        self.submit(pod, |slot| slot.delete = true);
    }

    /// Creates a warning event about the pod.
    pub(crate) fn event(self: &Arc<Self>, pod: &PodSpec, reason: &str, message: &str) {
        let now = text(Timestamp::now());
        let serial = self.n_events.fetch_add(1, Ordering::Relaxed);
        let event = json!({
            "metadata": {"name": format!("{}.{:x}.{serial:x}", pod.name, Timestamp::now().as_nanosecond()), "namespace": pod.namespace},
            "involvedObject": {"apiVersion": "v1", "kind": "Pod", "namespace": pod.namespace, "name": pod.name, "uid": pod.uid},
            "reason": reason, "message": message, "type": "Warning", "count": 1,
            "firstTimestamp": now, "lastTimestamp": now,
            "source": {"component": "kubelet", "host": self.node},
            "reportingComponent": "kubelet", "reportingInstance": self.node,
        });
        let api: Api<Event> = Api::namespaced(self.client.0.clone(), &pod.namespace);
        self.spawn(async move {
            let written = match serde_json::from_value(event) {
                Ok(event) => api.create(&PostParams::default(), &event).await.map(drop),
                Err(error) => Err(kube::Error::SerdeError(error)),
            };
            if let Err(error) = written {
                tracing::warn!(%error, "event not written");
            }
        });
    }

    fn submit(self: &Arc<Self>, pod: &PodSpec, change: impl FnOnce(&mut Slot)) {
        let mut slots = self.lock();
        if let Some(slot) = slots.get_mut(&pod.uid) {
            return change(slot);
        }
        let mut slot = Slot {
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            status: None,
            delete: false,
        };
        change(&mut slot);
        slots.insert(pod.uid.clone(), slot);
        drop(slots);
        let writer = Arc::clone(self);
        let uid = pod.uid.clone();
        self.spawn(async move { writer.drain(&uid).await });
    }

    async fn drain(&self, uid: &str) {
        while let Some((namespace, name, status)) = self.next(uid) {
            let api: Api<Pod> = Api::namespaced(self.client.0.clone(), &namespace);
            let Ok(permit) = self.permits.acquire().await else {
                return;
            };
            let outcome = if let Some(status) = &status {
                let patch = Patch::Strategic(json!({"metadata": {"uid": uid}, "status": status}));
                api.patch_status(&name, &PatchParams::default(), &patch)
                    .await
                    .map(drop)
            } else {
                let preconditions = Some(Preconditions {
                    uid: Some(uid.to_owned()),
                    resource_version: None,
                });
                let params = DeleteParams {
                    grace_period_seconds: Some(0),
                    preconditions,
                    ..DeleteParams::default()
                };
                api.delete(&name, &params).await.map(drop)
            };
            drop(permit);
            let Err(error) = outcome else { continue };
            if is_final(&error) {
                tracing::debug!(namespace, name, %error, "the API server refuses a write");
                continue;
            }
            tracing::warn!(namespace, name, %error, "a write to the API server is tried again");
            self.put_back(uid, status);
            tokio::time::sleep(self.retry).await;
        }
    }

    /// What to write next: the status, then the deletion.
    fn next(&self, uid: &str) -> Option<(String, String, Option<Value>)> {
        let mut slots = self.lock();
        let slot = slots.get_mut(uid)?;
        let status = slot.status.take();
        if status.is_none() && !std::mem::take(&mut slot.delete) {
            slots.remove(uid);
            return None;
        }
        Some((slot.namespace.clone(), slot.name.clone(), status))
    }

    fn put_back(&self, uid: &str, status: Option<Value>) {
        if let Some(slot) = self.lock().get_mut(uid) {
            match status {
                Some(status) => slot.status = Some(slot.status.take().unwrap_or(status)),
                None => slot.delete = true,
            }
        }
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let cancel = self.cancel.clone();
        self.tasks.spawn(async move {
            cancel.run_until_cancelled(task).await;
        });
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether trying again cannot help: the pod is gone, is another one, or the request is wrong.
fn is_final(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if (400..500).contains(&status.code) && status.code != 429)
}
