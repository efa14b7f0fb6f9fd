//! Reports to users: a pod's `PodScheduled` condition and its Events.
//!
//! One task writes the reports in order. A failed write is logged and dropped, as in kube-scheduler: the next attempt reports
//! again. Failures of a pod that has not changed are one event with a series, as client-go's event broadcaster makes them: the
//! second failure sets the series' count to 2. Left out: its later writes, every 30 minutes, and the end of a series after 6.

use std::collections::HashMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Event, EventSeries, EventSource, ObjectReference, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tracing::warn;

use crate::pod_fields::condition;
use crate::pods::set;

/// The longest message of an Event, in characters.
const MAX_MESSAGE: usize = 1024;

/// The change of a pod's nominated node after preemption.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Nomination {
    Keep,
    Clear,
    Node(String),
}

/// The result of an attempt, as a pod's user sees it.
#[derive(Clone, Debug)]
pub(super) enum ReportContent {
    Scheduled(String),
    /// No node fits, in the words of the diagnosis; and the change of the pod's nominated node.
    Unschedulable(String, Nomination),
    /// The attempt itself failed with this error, and the pod's nominated node is cleared.
    Failed(String),
}

/// A pod, as it was when the attempt ended, and the report about it.
pub(super) type Report = (Arc<Pod>, ReportContent);

#[derive(Debug)]
struct FailureEvent {
    name: String,
    /// The resource version of the pod: a failure of a pod that has changed since is a new event.
    pod_version: Option<String>,
    is_series: bool,
}

pub(super) struct Reporter {
    client: Client,
    /// The name of the scheduler in events.
    component: String,
    /// The last event about a failure of each waiting pod, by the pod's UID.
    failures: HashMap<String, FailureEvent>,
}

impl Reporter {
    pub(super) fn new(client: Client, component: String) -> Self {
        Self {
            client,
            component,
            failures: HashMap::new(),
        }
    }

    /// Writes reports in their order until the loop, which sends them, has ended.
    pub(super) async fn run(mut self, mut reports: mpsc::UnboundedReceiver<Report>) {
        while let Some((pod, content)) = reports.recv().await {
            let written = match &content {
                ReportContent::Scheduled(node) => self.write_binding(&pod, node).await,
                ReportContent::Unschedulable(message, nomination) => {
                    self.write_failure(&pod, ("Unschedulable", message), nomination)
                        .await
                }
                ReportContent::Failed(message) => {
                    self.write_failure(&pod, ("SchedulerError", message), &Nomination::Clear)
                        .await
                }
            };
            if let Err(error) = written {
                warn!(pod = pod.name_any(), ?content, %error, "cannot report the outcome of a scheduling attempt");
            }
        }
    }

    async fn write_binding(&mut self, pod: &Pod, node: &str) -> kube::Result<()> {
        self.failures.remove(&pod.uid().unwrap_or_default());
        let message = format!(
            "Successfully assigned {}/{} to {node}",
            namespace(pod),
            pod.name_any()
        );
        self.write_event(pod, ("Normal", "Scheduled"), &message)
            .await
            .map(drop)
    }

    /// Writes the event of a failed attempt, and the pod's condition and nomination if they change.
    async fn write_failure(
        &mut self,
        pod: &Pod,
        (reason, message): (&str, &str),
        nomination: &Nomination,
    ) -> kube::Result<()> {
        self.write_failure_event(pod, message).await?;
        let nominated = match nomination {
            Nomination::Keep => None,
            Nomination::Clear => Some(None),
            Nomination::Node(node) => Some(Some(node.as_str())),
        };
        // kube-scheduler sends no patch that would change nothing.
        let nominated = nominated.filter(|nominated| *nominated != nominated_node(pod));
        if is_reported_already(pod, reason, message) && nominated.is_none() {
            return Ok(());
        }
        let condition = json!({
            "type": "PodScheduled", "status": "False", "reason": reason, "message": message,
            "lastProbeTime": null, "lastTransitionTime": Time(Timestamp::now()),
        });
        let mut status = json!({"conditions": [condition]});
        if let Some(nominated) = nominated {
            set(&mut status, "nominatedNodeName", nominated.into());
        }
        patch_status(&self.client, pod, &status).await
    }

    /// Writes an event about a failed attempt, or counts the attempt in the series of the last one.
    async fn write_failure_event(&mut self, pod: &Pod, message: &str) -> kube::Result<()> {
        let uid = pod.uid().unwrap_or_default();
        if let Some(last) = self.failures.get_mut(&uid)
            && last.pod_version == pod.resource_version()
        {
            if !last.is_series {
                let series = EventSeries {
                    count: Some(2),
                    last_observed_time: Some(MicroTime(Timestamp::now())),
                };
                let events: Api<Event> = Api::namespaced(self.client.clone(), namespace(pod));
                let patch = Patch::Merge(json!({"series": series}));
                events.patch(&last.name, &PatchParams::default(), &patch).await?;
                last.is_series = true;
            }
            return Ok(());
        }
        let event = self
            .write_event(pod, ("Warning", "FailedScheduling"), message)
            .await?;
        let failure = FailureEvent {
            name: event.name_any(),
            pod_version: pod.resource_version(),
            is_series: false,
        };
        self.failures.insert(uid, failure);
        Ok(())
    }

    /// Writes an event about a pod, named as kube-scheduler names its events.
    async fn write_event(
        &self,
        pod: &Pod,
        (event_type, reason): (&str, &str),
        message: &str,
    ) -> kube::Result<Event> {
        let events: Api<Event> = Api::namespaced(self.client.clone(), namespace(pod));
        let now = Time(Timestamp::now());
        let event = Event {
            metadata: ObjectMeta {
                generate_name: Some(format!("{}.", pod.name_any())),
                ..ObjectMeta::default()
            },
            involved_object: ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some("Pod".to_owned()),
                name: pod.metadata.name.clone(),
                namespace: Some(namespace(pod).to_owned()),
                uid: pod.uid(),
                resource_version: pod.resource_version(),
                ..ObjectReference::default()
            },
            type_: Some(event_type.to_owned()),
            reason: Some(reason.to_owned()),
            message: Some(message.chars().take(MAX_MESSAGE).collect()),
            source: Some(EventSource {
                component: Some(self.component.clone()),
                host: None,
            }),
            first_timestamp: Some(now.clone()),
            last_timestamp: Some(now),
            count: Some(1),
            ..Event::default()
        };
        events.create(&PostParams::default(), &event).await
    }
}

pub(super) fn namespace(pod: &Pod) -> &str {
    pod.metadata.namespace.as_deref().unwrap_or("default")
}

/// The node that kube-scheduler keeps for a pod.
pub(super) fn nominated_node(pod: &Pod) -> Option<&str> {
    pod.status
        .as_ref()?
        .nominated_node_name
        .as_deref()
        .filter(|node| !node.is_empty())
}

/// Patches the status of a pod, if it is still the pod with this UID.
pub(super) async fn patch_status(client: &Client, pod: &Pod, status: &Value) -> kube::Result<()> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace(pod));
    let patch = Patch::Strategic(json!({"metadata": {"uid": pod.uid()}, "status": status}));
    let patched = pods
        .patch_status(&pod.name_any(), &PatchParams::default(), &patch)
        .await;
    patched.map(drop)
}

/// Returns true if the pod's condition already has this reason and message.
fn is_reported_already(pod: &Pod, reason: &str, message: &str) -> bool {
    let Some(scheduled) = condition(pod, "PodScheduled") else {
        return false;
    };
    scheduled.status == "False"
        && scheduled.reason.as_deref() == Some(reason)
        && scheduled.message.as_deref() == Some(message)
}
