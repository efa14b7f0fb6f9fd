//! The leader label on this replica's own pod, which the Service of the extender selects.

use std::time::Duration;

use daemon::panics::named;
use http::StatusCode;
use kube::Client;
use serde_json::json;
use tokio::sync::watch;
use tracing::{info, warn};

use super::{Leadership, PodName};
use crate::api_server;

/// Label of the leader's pod, with the value `"true"`.
pub const LABEL: &str = "gpushare/leader";
/// Annotation of the leader's pod: the time at which its takeover began. The watch of pods shows this write after every earlier
/// one.
pub(super) const LEADER_SINCE: &str = "gpushare/leader-since";

/// Pause after a patch that failed.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

/// The leader label and its annotation on this replica's pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PodLabel {
    /// The pod has neither the label nor the annotation.
    Absent,
    /// The pod has the label, and this value of the annotation.
    Leader(String),
}

/// Keeps the label of this replica's pod as the elector wants it.
#[derive(Debug)]
pub(super) struct LabelKeeper {
    /// The label that the pod should have.
    wanted: watch::Sender<PodLabel>,
    /// The label on the pod; `None` while it is not known, as during a write.
    written: watch::Receiver<Option<PodLabel>>,
}

impl LabelKeeper {
    /// Starts the task that writes the label. It first removes a label that an earlier process in this pod may have left.
    pub(super) fn start(client: Client, pod: PodName, leadership: Leadership) -> Self {
        let (sender, wanted) = watch::channel(PodLabel::Absent);
        let (written_sender, written) = watch::channel(None);
        tokio::spawn(named(
            "leader's label",
            keep(client, pod, leadership, wanted, written_sender),
        ));
        Self {
            wanted: sender,
            written,
        }
    }

    /// Has the task give this replica's pod this label.
    pub(super) fn set_wanted(&self, wanted: PodLabel) {
        self.wanted.send_replace(wanted);
    }

    /// A sender for the label that the pod should have, for another task.
    pub(super) fn sender(&self) -> watch::Sender<PodLabel> {
        self.wanted.clone()
    }

    /// Waits until this replica's pod has this label.
    pub(super) async fn wait_for(&self, label: &PodLabel) {
        let mut written = self.written.clone();
        if written
            .wait_for(|written| written.as_ref() == Some(label))
            .await
            .is_err()
        {
            // The task has ended, which it does only with the process.
            std::future::pending::<()>().await;
        }
    }
}

/// Writes the wanted label whenever it differs from the written one, until all senders are dropped.
async fn keep(
    client: Client,
    pod: PodName,
    leadership: Leadership,
    mut wanted: watch::Receiver<PodLabel>,
    written: watch::Sender<Option<PodLabel>>,
) {
    loop {
        let label = wanted.borrow_and_update().clone();
        // Compared before the wait, since the wanted label may have changed during the last write.
        if written.borrow().as_ref() == Some(&label) {
            if wanted.changed().await.is_err() {
                return;
            }
            continue;
        }
        if label != PodLabel::Absent {
            // Before the write, since a write without an answer may have been carried out.
            leadership.state().may_have_label = true;
        }
        // Until the patch is answered, the label on the pod is unknown.
        written.send_replace(None);
        match patch(&client, &pod, &label).await {
            Ok(()) => {
                info!(
                    label = LABEL,
                    is_leader = label != PodLabel::Absent,
                    "this pod's label is written"
                );
                leadership.state().may_have_label = label != PodLabel::Absent;
                written.send_replace(Some(label));
            }
            Err(error) => {
                warn!(
                    label = LABEL,
                    error = format!("{error:#}"),
                    "cannot write this pod's label, trying again"
                );
                tokio::time::sleep(RETRY_PAUSE).await;
            }
        }
    }
}

/// Writes the label and the annotation in one patch.
async fn patch(client: &Client, pod: &PodName, label: &PodLabel) -> anyhow::Result<()> {
    let metadata = match label {
        PodLabel::Absent => json!({"labels": {LABEL: null}, "annotations": {LEADER_SINCE: null}}),
        PodLabel::Leader(since) => json!({"labels": {LABEL: "true"}, "annotations": {LEADER_SINCE: since}}),
    };
    let path = format!("/api/v1/namespaces/{}/pods/{}", pod.namespace, pod.name);
    let answer = api_server::merge(client, &path, &json!({"metadata": metadata})).await;
    let answer = answer.map_err(anyhow::Error::msg)?;
    // A pod that is gone has no label.
    let is_gone = answer.status == StatusCode::NOT_FOUND && *label == PodLabel::Absent;
    let is_written = answer.status.is_success() || is_gone;
    anyhow::ensure!(
        is_written,
        "pod {}/{}: {}",
        pod.namespace,
        pod.name,
        answer.message()
    );
    Ok(())
}
