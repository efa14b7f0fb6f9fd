//! Pod status as kubelet reports it: phase, conditions, container statuses.
//!
//! Renders only; when to write and in which order is the writer's.

use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use super::held::Holder;
use super::pod::{ContainerKind, ContainerSpec, PodSpec};
use super::process::Process;
use super::runtime::{Container, RunState};

impl Process {
    /// Reports a pod as its containers are now.
    pub(crate) fn publish_status(&self, pod: &PodSpec) {
        let containers = self.runtime.of_pod(&pod.uid);
        let mut pods = self.pods();
        let Some(record) = pods.0.get_mut(&pod.uid) else {
            return;
        };
        let phase = phase(pod, &containers, record.ended);
        let now = Timestamp::now();
        let truths = conditions(pod, &containers);
        let conditions: Vec<Value> = truths
            .iter()
            .map(|(name, holds)| {
                let last = record.conditions.entry(name).or_insert((*holds, now));
                if last.0 != *holds {
                    *last = (*holds, now);
                }
                condition(name, *holds, last.1, phase)
            })
            .collect();
        let started = record.started;
        drop(pods);
        let statuses = |wanted: fn(ContainerKind) -> bool| -> Vec<Value> {
            let listed = pod.containers.iter().filter(|container| wanted(container.kind));
            listed
                .map(|container| self.container_status(pod, container, containers.get(&container.name)))
                .collect()
        };
        let ip = self.config.address.to_string();
        let init = statuses(|kind| kind != ContainerKind::App);
        let status = json!({
            "phase": phase,
            "conditions": conditions,
            "hostIP": ip, "hostIPs": [{"ip": ip}],
            "podIP": ip, "podIPs": [{"ip": ip}],
            "startTime": text(started),
            "containerStatuses": statuses(|kind| kind == ContainerKind::App),
            "initContainerStatuses": if init.is_empty() { Value::Null } else { Value::Array(init) },
        });
        self.writer.status(pod, status);
        self.changed();
    }

    /// Reports a pod as refused, for good.
    pub(crate) fn publish_rejection(&self, pod: &PodSpec, reason: &str, message: &str) {
        let started = text(Timestamp::now());
        let message = format!("Pod was rejected: {message}");
        self.writer.status(
            pod,
            json!({"phase": "Failed", "reason": reason, "message": message, "startTime": started}),
        );
    }

    /// Deletes a pod whose containers have ended.
    pub(crate) fn publish_deletion(&self, pod: &PodSpec) {
        self.writer.delete(pod);
    }

    /// Tells people what went wrong.
    pub(crate) fn publish_event(&self, pod: &PodSpec, reason: &str, message: &str) {
        self.writer.event(pod, reason, message);
    }

    fn container_status(&self, pod: &PodSpec, container: &ContainerSpec, runs: Option<&Container>) -> Value {
        let running = matches!(runs.map(|runs| &runs.state), Some(RunState::Running { .. }));
        let completed = matches!(
            runs.map(|runs| &runs.state),
            Some(RunState::Exited { code: 0, .. })
        );
        let starts = runs.map_or(0, |runs| runs.starts);
        let allocated = if self.config.allocated_resources_status {
            self.allocated(pod, container)
        } else {
            Vec::new()
        };
        json!({
            "name": container.name,
            "image": container.image,
            "imageID": format!("testbed://{}", container.image),
            "ready": running || (completed && container.kind == ContainerKind::Init),
            "started": running,
            "restartCount": starts.saturating_sub(1),
            "state": state(pod, container, runs),
            "containerID": (starts > 0).then(|| format!("testbed://{}/{}/{starts}", pod.uid, container.name)),
            "allocatedResourcesStatus": if allocated.is_empty() { Value::Null } else { Value::Array(allocated) },
        })
    }

    fn allocated(&self, pod: &PodSpec, container: &ContainerSpec) -> Vec<Value> {
        let holder = Holder {
            pod: pod.uid.clone(),
            container: container.name.clone(),
        };
        let devices = self.devices();
        let of_resource = |resource: &String, grant: &super::held::Grant| {
            let health = |id: &str| {
                if devices.is_healthy(resource, id) {
                    "Healthy"
                } else {
                    "Unhealthy"
                }
            };
            let entries: Vec<Value> = grant
                .devices()
                .iter()
                .map(|id| json!({"resourceID": id.as_ref(), "health": health(id)}))
                .collect();
            json!({"name": resource, "resources": entries})
        };
        devices
            .held()
            .of(&holder)
            .map(|(resource, grant)| of_resource(resource, grant))
            .collect()
    }
}

fn state(pod: &PodSpec, container: &ContainerSpec, runs: Option<&Container>) -> Value {
    match runs.map(|runs| &runs.state) {
        None => {
            let initializing = container.kind == ContainerKind::App
                && pod
                    .containers
                    .iter()
                    .any(|other| other.kind == ContainerKind::Init);
            json!({"waiting": {"reason": if initializing { "PodInitializing" } else { "ContainerCreating" }}})
        }
        Some(RunState::Waiting { reason, message }) => {
            json!({"waiting": {"reason": reason, "message": message}})
        }
        Some(RunState::Running { since }) => json!({"running": {"startedAt": text(*since)}}),
        Some(RunState::Exited {
            code,
            started,
            finished,
        }) => {
            let reason = if *code == 0 { "Completed" } else { "Error" };
            json!({"terminated": {"exitCode": code, "reason": reason, "startedAt": text(*started), "finishedAt": text(*finished)}})
        }
    }
}

fn phase(pod: &PodSpec, containers: &BTreeMap<String, Container>, ended: bool) -> &'static str {
    let app = || {
        pod.containers
            .iter()
            .filter(|container| container.kind == ContainerKind::App)
            .map(|spec| containers.get(&spec.name))
    };
    if ended {
        let clean = |container: Option<&Container>| {
            matches!(
                container.map(|it| &it.state),
                Some(RunState::Exited { code: 0, .. })
            )
        };
        return if app().all(clean) { "Succeeded" } else { "Failed" };
    }
    if app().all(|container| container.is_some_and(|container| container.starts > 0)) {
        "Running"
    } else {
        "Pending"
    }
}

fn conditions(pod: &PodSpec, containers: &BTreeMap<String, Container>) -> [(&'static str, bool); 4] {
    let state = |spec: &ContainerSpec| containers.get(&spec.name).map(|container| &container.state);
    let of = |kind| {
        pod.containers
            .iter()
            .filter(move |container| container.kind == kind)
    };
    let running = |spec| matches!(state(spec), Some(RunState::Running { .. }));
    let sidecars = of(ContainerKind::Sidecar).all(running);
    let initialized = sidecars
        && of(ContainerKind::Init).all(|spec| matches!(state(spec), Some(RunState::Exited { code: 0, .. })));
    let ready = sidecars && of(ContainerKind::App).all(running);
    [
        ("PodScheduled", true),
        ("Initialized", initialized),
        ("ContainersReady", ready),
        ("Ready", ready),
    ]
}

fn condition(name: &str, holds: bool, since: Timestamp, phase: &str) -> Value {
    let reason = match (phase, name) {
        _ if holds => None,
        ("Succeeded", _) => Some("PodCompleted"),
        ("Failed", _) => Some("PodFailed"),
        (_, "Initialized") => Some("ContainersNotInitialized"),
        _ => Some("ContainersNotReady"),
    };
    let status = if holds { "True" } else { "False" };
    json!({"type": name, "status": status, "lastTransitionTime": text(since), "reason": reason})
}

/// A time in whole seconds, as Kubernetes writes it.
pub(crate) fn text(time: Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}
