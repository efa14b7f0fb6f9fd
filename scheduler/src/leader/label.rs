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

const RETRY_PAUSE: Duration = Duration::from_millis(500);

/// Keeps the label of this replica's pod as the elector wants it.
#[derive(Debug)]
pub(super) struct LabelKeeper {
    /// The annotation [`LEADER_SINCE`] that the pod should have beside the label; `None` for neither of them.
    pub(super) wanted: watch::Sender<Option<String>>,
    /// True while the pod is known to have neither of them.
    is_removed: watch::Receiver<bool>,
}

impl LabelKeeper {
    /// Starts the task that writes the label. It first removes a label that an earlier process in this pod may have left.
    pub(super) fn start(client: Client, pod: PodName, leadership: Leadership) -> Self {
        let (sender, wanted) = watch::channel(None);
        let (removed_sender, is_removed) = watch::channel(false);
        let keep = keep(client, pod, leadership, wanted, removed_sender);
        tokio::spawn(named("leader's label", keep));
        Self {
            wanted: sender,
            is_removed,
        }
    }

    /// Waits until this replica's pod has no label.
    pub(super) async fn wait_until_removed(&self) {
        // An error is impossible: the task ends only when `wanted` is dropped.
        let _ = self.is_removed.clone().wait_for(|is_removed| *is_removed).await;
    }
}

/// Writes the wanted label whenever it differs from the written one, until all senders are dropped.
async fn keep(
    client: Client,
    pod: PodName,
    leadership: Leadership,
    mut wanted: watch::Receiver<Option<String>>,
    is_removed: watch::Sender<bool>,
) {
    // The label on the pod; `None` while it is not known, as after a write without an answer.
    let mut written = None;
    loop {
        let since = wanted.borrow_and_update().clone();
        // Compared before the wait, since the wanted label may have changed during the last write.
        if written.as_ref() == Some(&since) {
            if wanted.changed().await.is_err() {
                return;
            }
            continue;
        }
        is_removed.send_replace(false);
        if since.is_some() {
            // Before the write, since a write without an answer may have been carried out.
            leadership.state().may_have_label = true;
        }
        match patch(&client, &pod, since.as_deref()).await {
            Ok(()) => {
                let is_leader = since.is_some();
                info!(label = LABEL, is_leader, "this pod's label is written");
                leadership.state().may_have_label = is_leader;
                is_removed.send_replace(!is_leader);
                written = Some(since);
            }
            Err(error) => {
                warn!(
                    label = LABEL,
                    error, "cannot write this pod's label, trying again"
                );
                written = None;
                tokio::time::sleep(RETRY_PAUSE).await;
            }
        }
    }
}

/// Writes the label and the annotation in one patch, or removes both.
async fn patch(client: &Client, pod: &PodName, since: Option<&str>) -> Result<(), String> {
    let PodName { namespace, name } = pod;
    let label = since.is_some().then_some("true");
    let metadata = json!({"labels": {LABEL: label}, "annotations": {LEADER_SINCE: since}});
    let path = format!("/api/v1/namespaces/{namespace}/pods/{name}");
    let answer = api_server::merge(client, &path, &json!({"metadata": metadata})).await?;
    // A pod that is gone has no label.
    let is_gone = answer.status == StatusCode::NOT_FOUND && since.is_none();
    if answer.status.is_success() || is_gone {
        return Ok(());
    }
    Err(format!("pod {namespace}/{name}: {}", answer.message()))
}
