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
use serde_json::json;
use tokio::sync::mpsc;
use tracing::warn;

use crate::pod_fields::condition;

/// The longest message of an Event, in characters.
const MAX_MESSAGE: usize = 1024;

/// The change of a pod's nominated node after preemption.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Nomination {
    /// The nominated node stays.
    Keep,
    /// The pod has no nominated node any more.
    Clear,
    /// The pod is nominated to this node.
    Node(String),
}

/// The result of an attempt, as a pod's user sees it.
#[derive(Clone, Debug)]
pub(super) enum ReportContent {
    /// The pod is bound to this node.
    Scheduled(String),
    /// No node fits, in the words of the diagnosis; and the change of the pod's nominated node.
    Unschedulable(String, Nomination),
    /// The attempt itself failed with this error, and the pod's nominated node is cleared.
    Failed(String),
}

/// A pod, as it was when the attempt ended, and the report about it.
pub(super) type Report = (Arc<Pod>, ReportContent);

/// The last event about a failure of each waiting pod, by the pod's UID.
type Failures = HashMap<String, FailureEvent>;

/// An event about failed attempts at a pod.
#[derive(Debug)]
struct FailureEvent {
    name: String,
    /// The resource version of the pod: a failure of a pod that has changed since is a new event.
    pod_version: Option<String>,
    /// True once the event has a series.
    is_series: bool,
}

/// Writes reports in their order until the loop, which sends them, has ended.
pub(super) async fn write_all(
    client: Client,
    component: String,
    mut reports: mpsc::UnboundedReceiver<Report>,
) {
    let mut failures = Failures::new();
    while let Some((pod, content)) = reports.recv().await {
        let written = match &content {
            ReportContent::Scheduled(node) => {
                let message = format!(
                    "Successfully assigned {}/{} to {node}",
                    namespace(&pod),
                    pod.name_any()
                );
                failures.remove(&pod.uid().unwrap_or_default());
                let event = ("Normal", "Scheduled");
                write_event(&client, &component, &pod, event, &message)
                    .await
                    .map(drop)
            }
            ReportContent::Unschedulable(message, nomination) => {
                let failure = ("Unschedulable", message.as_str());
                write_failure(&client, &component, &pod, failure, nomination, &mut failures).await
            }
            ReportContent::Failed(message) => {
                let failure = ("SchedulerError", message.as_str());
                write_failure(
                    &client,
                    &component,
                    &pod,
                    failure,
                    &Nomination::Clear,
                    &mut failures,
                )
                .await
            }
        };
        if let Err(error) = written {
            warn!(pod = pod.name_any(), ?content, %error, "cannot report the outcome of a scheduling attempt");
        }
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

/// Writes the event of a failed attempt, and the pod's condition and nomination if they change.
async fn write_failure(
    client: &Client,
    component: &str,
    pod: &Pod,
    (reason, message): (&str, &str),
    nomination: &Nomination,
    failures: &mut Failures,
) -> kube::Result<()> {
    write_failure_event(client, component, pod, message, failures).await?;
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
    if let (Some(nominated), Some(status)) = (nominated, status.as_object_mut()) {
        status.insert("nominatedNodeName".to_owned(), nominated.into());
    }
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace(pod));
    let patch = Patch::Strategic(json!({"metadata": {"uid": pod.uid()}, "status": status}));
    pods.patch_status(&pod.name_any(), &PatchParams::default(), &patch)
        .await
        .map(drop)
}

/// Writes an event about a failed attempt, or counts the attempt in the series of the last one.
async fn write_failure_event(
    client: &Client,
    component: &str,
    pod: &Pod,
    message: &str,
    failures: &mut Failures,
) -> kube::Result<()> {
    let uid = pod.uid().unwrap_or_default();
    let last = failures.get_mut(&uid);
    match last.filter(|last| last.pod_version == pod.resource_version()) {
        Some(last) if last.is_series => Ok(()),
        Some(last) => {
            let series = EventSeries {
                count: Some(2),
                last_observed_time: Some(MicroTime(Timestamp::now())),
            };
            let events: Api<Event> = Api::namespaced(client.clone(), namespace(pod));
            let patch = Patch::Merge(json!({"series": series}));
            events.patch(&last.name, &PatchParams::default(), &patch).await?;
            last.is_series = true;
            Ok(())
        }
        None => {
            let event = write_event(client, component, pod, ("Warning", "FailedScheduling"), message).await?;
            let failure = FailureEvent {
                name: event.name_any(),
                pod_version: pod.resource_version(),
                is_series: false,
            };
            failures.insert(uid, failure);
            Ok(())
        }
    }
}

/// Writes the node that a pod waits to be bound to into the pod's status.
pub(super) async fn nominate(client: &Client, pod: &Pod, node: &str) -> kube::Result<()> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace(pod));
    let patch =
        Patch::Strategic(json!({"metadata": {"uid": pod.uid()}, "status": {"nominatedNodeName": node}}));
    pods.patch_status(&pod.name_any(), &PatchParams::default(), &patch)
        .await
        .map(drop)
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

/// Writes an event about a pod, named as kube-scheduler names its events.
async fn write_event(
    client: &Client,
    component: &str,
    pod: &Pod,
    (event_type, reason): (&str, &str),
    message: &str,
) -> kube::Result<Event> {
    let events: Api<Event> = Api::namespaced(client.clone(), namespace(pod));
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
            component: Some(component.to_owned()),
            host: None,
        }),
        first_timestamp: Some(now.clone()),
        last_timestamp: Some(now),
        count: Some(1),
        ..Event::default()
    };
    events.create(&PostParams::default(), &event).await
}
