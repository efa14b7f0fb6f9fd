//! kubelet's status manager: renders pod status, and writes status, deletions and events to the API server.
//!
//! Admission never waits for a write. Writes of one pod keep their order, and a newer status replaces one that
//! was not written yet. Conditions have no reasons.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use super::config::ADDRESS;
use super::device_manager::DeviceManager;
use super::devices::DeviceHolder;
use super::pod::{ContainerSpec, ContainerType, KubeletPod};
use super::run::KubeletRun;
use super::runtime::{RunState, RuntimeContainer};

/// Most requests to the API server at one time.
const MAX_IN_FLIGHT: usize = 32;

#[derive(Debug)]
pub(crate) struct StatusManager {
    run: Arc<KubeletRun>,
    devices: Arc<DeviceManager>,
    /// Pods with a task that writes, by UID.
    pending: Mutex<BTreeMap<String, PendingWrites>>,
    permits: Semaphore,
    n_events: AtomicU64,
}

/// The writes about one pod that have not been performed yet.
#[derive(Debug, Default)]
struct PendingWrites {
    status: Option<Value>,
    delete: bool,
}

impl StatusManager {
    pub(crate) fn new(run: &Arc<KubeletRun>, devices: &Arc<DeviceManager>) -> Self {
        Self {
            run: Arc::clone(run),
            devices: Arc::clone(devices),
            pending: Mutex::default(),
            permits: Semaphore::new(MAX_IN_FLIGHT),
            n_events: AtomicU64::new(0),
        }
    }

    /// Writes the status of a pod as its containers are now.
    pub(crate) fn publish_status(self: &Arc<Self>, pod: &KubeletPod) {
        let containers = self.run.machine.runtime.of_pod(&pod.uid);
        let mut pods = self.run.pods.lock();
        let Some(record) = pods.records.get_mut(&pod.uid) else {
            return;
        };
        let phase = phase(pod, &containers, record.ended);
        let now = Timestamp::now();
        let mut shown = Vec::new();
        for (name, holds) in conditions(pod, &containers) {
            let (held, since) = record.conditions.entry(name).or_insert((holds, now));
            // A condition keeps its lastTransitionTime until its status changes, whatever else is written.
            if *held != holds {
                (*held, *since) = (holds, now);
            }
            let status = if holds { "True" } else { "False" };
            shown.push(json!({"type": name, "status": status, "lastTransitionTime": Time(*since)}));
        }
        let started = record.started;
        drop(pods);
        let (mut init, mut app, mut ephemeral) = (Vec::new(), Vec::new(), Vec::new());
        for container in &pod.containers {
            let status = self.container_status(pod, container, containers.get(&container.name));
            match container.kind {
                ContainerType::App => app.push(status),
                ContainerType::Ephemeral => ephemeral.push(status),
                ContainerType::Init | ContainerType::Sidecar => init.push(status),
            }
        }
        let status = json!({
            "phase": phase,
            "conditions": shown,
            "hostIP": ADDRESS, "hostIPs": [{"ip": ADDRESS}],
            "podIP": ADDRESS, "podIPs": [{"ip": ADDRESS}],
            "startTime": Time(started),
            "containerStatuses": app,
            "initContainerStatuses": null_if_empty(init),
            "ephemeralContainerStatuses": null_if_empty(ephemeral),
        });
        self.submit(pod, |pending| pending.status = Some(status));
        self.run.machine.notify();
    }

    /// Writes the status of a pod that kubelet has refused for good.
    pub(crate) fn publish_rejection(self: &Arc<Self>, pod: &KubeletPod, reason: &str, message: &str) {
        let started = Time(Timestamp::now());
        // rejectPod. The phase Failed is final: no kubelet admits the pod again.
        let message = format!("Pod was rejected: {message}");
        let status = json!({"phase": "Failed", "reason": reason, "message": message, "startTime": started});
        self.submit(pod, |pending| pending.status = Some(status));
    }

    /// Deletes a pod whose containers have ended, after its last status is written.
    pub(crate) fn publish_deletion(self: &Arc<Self>, pod: &KubeletPod) {
        self.submit(pod, |pending| pending.delete = true);
    }

    /// Creates a Warning event about a pod.
    pub(crate) fn publish_event(&self, pod: &KubeletPod, reason: &str, message: &str) {
        let now = Time(Timestamp::now());
        let serial = self.n_events.fetch_add(1, Ordering::Relaxed);
        let event = json!({
            "metadata": {"name": format!("{}.{:x}.{serial:x}", pod.name, Timestamp::now().as_nanosecond()), "namespace": pod.namespace},
            "involvedObject": {"apiVersion": "v1", "kind": "Pod", "namespace": pod.namespace, "name": pod.name, "uid": pod.uid},
            "reason": reason, "message": message, "type": "Warning", "count": 1,
            "firstTimestamp": now, "lastTimestamp": now,
            "source": {"component": "kubelet", "host": self.run.machine.config.node},
            "reportingComponent": "kubelet", "reportingInstance": self.run.machine.config.node,
        });
        let api: Api<Event> = Api::namespaced(self.run.machine.config.client.clone(), &pod.namespace);
        self.run.spawn(async move {
            let event = serde_json::from_value(event).map_err(kube::Error::SerdeError);
            let written = async { api.create(&PostParams::default(), &event?).await };
            if let Err(error) = written.await {
                tracing::warn!(%error, "event not written");
            }
        });
    }

    fn container_status(
        &self,
        pod: &KubeletPod,
        container: &ContainerSpec,
        in_runtime: Option<&RuntimeContainer>,
    ) -> Value {
        let (running, completed) = (is_running(in_runtime), has_completed(in_runtime));
        let starts = in_runtime.map_or(0, |in_runtime| in_runtime.starts);
        json!({
            "name": container.name,
            "image": container.image,
            "imageID": format!("testbed://{}", container.image),
            // An init container is ready once it has completed; a sidecar while it runs.
            "ready": running || (completed && container.kind == ContainerType::Init),
            "started": running,
            "restartCount": starts.saturating_sub(1),
            "state": state(pod, container, in_runtime),
            "containerID": in_runtime.filter(|in_runtime| in_runtime.starts > 0).map(|in_runtime| format!("testbed://{}", in_runtime.id())),
            "allocatedResourcesStatus": null_if_empty(self.allocated(pod, container)),
        })
    }

    fn allocated(&self, pod: &KubeletPod, container: &ContainerSpec) -> Vec<Value> {
        let devices = self.devices.lock();
        let mut resources = Vec::new();
        for (resource, grant) in devices.held().of(&DeviceHolder::new(pod, container)) {
            let mut entries = Vec::new();
            for id in grant.device_ids() {
                let is_healthy = devices.is_healthy(resource, &id);
                let health = if is_healthy { "Healthy" } else { "Unhealthy" };
                entries.push(json!({"resourceID": id, "health": health}));
            }
            resources.push(json!({"name": resource, "resources": entries}));
        }
        resources
    }

    /// Adds a write to the pending writes of a pod, and starts the task that performs them if none runs.
    fn submit(self: &Arc<Self>, pod: &KubeletPod, change: impl FnOnce(&mut PendingWrites)) {
        let mut all = self.pending.lock();
        let has_task = all.contains_key(&pod.uid);
        change(all.entry(pod.uid.clone()).or_default());
        drop(all);
        if !has_task {
            let api = Api::namespaced(self.run.machine.config.client.clone(), &pod.namespace);
            let (manager, name, uid) = (Arc::clone(self), pod.name.clone(), pod.uid.clone());
            self.run
                .spawn(async move { manager.write_all(&api, &name, &uid).await });
        }
    }

    async fn write_all(&self, api: &Api<Pod>, name: &str, uid: &str) {
        while let Some(write) = self.next_write(uid) {
            let Ok(permit) = self.permits.acquire().await else {
                return;
            };
            let outcome = match &write.status {
                Some(status) => write_status(api, name, uid, status).await,
                None => delete(api, name, uid).await,
            };
            drop(permit);
            // Writes of one pod follow each other, so that an older status never replaces a newer one.
            let Err(error) = outcome else { continue };
            if is_final(&error) {
                tracing::debug!(name, %error, "the API server refuses a write");
                continue;
            }
            tracing::warn!(name, %error, "a write to the API server is tried again");
            self.put_back(uid, write);
            tokio::time::sleep(self.run.machine.config.delays.api_retry).await;
        }
    }

    /// The next write: the status, or the deletion if there is no status.
    fn next_write(&self, uid: &str) -> Option<PendingWrites> {
        let mut all = self.pending.lock();
        let pending = all.get_mut(uid)?;
        let status = pending.status.take();
        let delete = status.is_none() && std::mem::take(&mut pending.delete);
        if status.is_none() && !delete {
            all.remove(uid);
            return None;
        }
        Some(PendingWrites { status, delete })
    }

    /// Keeps a write that has failed, so that it is tried again, unless a newer status has come.
    fn put_back(&self, uid: &str, write: PendingWrites) {
        if let Some(pending) = self.pending.lock().get_mut(uid) {
            pending.status = pending.status.take().or(write.status);
            pending.delete |= write.delete;
        }
    }
}

fn null_if_empty(items: Vec<Value>) -> Value {
    if items.is_empty() {
        Value::Null
    } else {
        Value::Array(items)
    }
}

async fn write_status(api: &Api<Pod>, name: &str, uid: &str, status: &Value) -> kube::Result<()> {
    // The UID makes the write fail for another pod of this name.
    let patch = Patch::Strategic(json!({"metadata": {"uid": uid}, "status": status}));
    api.patch_status(name, &PatchParams::default(), &patch)
        .await
        .map(drop)
}

/// Deletes a pod whose containers have ended, if it is still the pod with this UID.
async fn delete(api: &Api<Pod>, name: &str, uid: &str) -> kube::Result<()> {
    let preconditions = Some(Preconditions {
        uid: Some(uid.to_owned()),
        resource_version: None,
    });
    let params = DeleteParams {
        // kubelet confirms a deletion with a grace period of zero once the containers have ended.
        grace_period_seconds: Some(0),
        preconditions,
        ..DeleteParams::default()
    };
    api.delete(name, &params).await.map(drop)
}

/// Returns true if a repeated write would fail too: the pod is gone, another pod has its name, or the request is wrong.
fn is_final(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if (400..500).contains(&status.code) && status.code != 429)
}

/// The `state` of a container's status: waiting, running or terminated.
fn state(pod: &KubeletPod, container: &ContainerSpec, in_runtime: Option<&RuntimeContainer>) -> Value {
    match in_runtime.map(|in_runtime| &in_runtime.state) {
        None => {
            // App containers wait as PodInitializing while the pod has init containers at all, also after these have ended.
            let has_init = pod
                .containers
                .iter()
                .any(|other| other.kind == ContainerType::Init);
            let initializing = container.kind == ContainerType::App && has_init;
            json!({"waiting": {"reason": if initializing { "PodInitializing" } else { "ContainerCreating" }}})
        }
        Some(RunState::Waiting { reason, message }) => {
            json!({"waiting": {"reason": reason, "message": message}})
        }
        Some(RunState::Running { since }) => json!({"running": {"startedAt": Time(*since)}}),
        Some(RunState::Exited {
            code,
            started,
            finished,
        }) => {
            let reason = if *code == 0 { "Completed" } else { "Error" };
            json!({"terminated": {"exitCode": code, "reason": reason, "startedAt": Time(*started), "finishedAt": Time(*finished)}})
        }
    }
}

fn is_running(in_runtime: Option<&RuntimeContainer>) -> bool {
    in_runtime.is_some_and(|in_runtime| matches!(in_runtime.state, RunState::Running { .. }))
}

fn has_completed(in_runtime: Option<&RuntimeContainer>) -> bool {
    in_runtime.is_some_and(|in_runtime| matches!(in_runtime.state, RunState::Exited { code: 0, .. }))
}

/// The phase of a pod, by its containers. None succeeds, as app containers run until they are killed.
fn phase(pod: &KubeletPod, containers: &BTreeMap<String, RuntimeContainer>, ended: bool) -> &'static str {
    if ended {
        return "Failed";
    }
    for spec in &pod.containers {
        let starts = containers.get(&spec.name).map_or(0, |found| found.starts);
        if spec.kind == ContainerType::App && starts == 0 {
            return "Pending";
        }
    }
    "Running"
}

/// The conditions of a pod, by its containers, and whether each holds.
fn conditions(
    pod: &KubeletPod,
    containers: &BTreeMap<String, RuntimeContainer>,
) -> [(&'static str, bool); 4] {
    let (mut initialized, mut ready) = (true, true);
    for spec in &pod.containers {
        let in_runtime = containers.get(&spec.name);
        match spec.kind {
            ContainerType::Init => initialized &= has_completed(in_runtime),
            ContainerType::App => ready &= is_running(in_runtime),
            ContainerType::Ephemeral => {}
            ContainerType::Sidecar => {
                initialized &= is_running(in_runtime);
                ready &= is_running(in_runtime);
            }
        }
    }
    [
        ("PodScheduled", true),
        ("Initialized", initialized),
        ("ContainersReady", ready),
        ("Ready", ready),
    ]
}
