//! The leader's label on this replica's own pod, by which the extender's Service finds it.

use std::time::Duration;

use anyhow::Context;
use daemon::panics::named;
use http::{Method, Request, header};
use kube::Client;
use serde_json::{Value, json};
use tokio::sync::watch;
use tracing::{info, warn};

use super::{Leadership, PodName};

/// Label of the leader's pod: `"true"`.
pub const LABEL: &str = "gpushare/leader";
/// Annotation of it: when the replica set out to lead. The watch of pods shows it after all that was written before.
pub(super) const SINCE: &str = "gpushare/leader-since";

/// Longest time that one write may take.
const TIMEOUT: Duration = Duration::from_secs(4);
/// Pause after a write that failed.
const PAUSE: Duration = Duration::from_millis(500);

/// How the pod shall be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    /// Without the label.
    Plain,
    /// With the label, and this as the annotation.
    Leader(String),
}

/// Sees to one pod.
#[derive(Debug)]
pub(super) struct LabelKeeper {
    wanted: watch::Sender<Wanted>,
    /// What the pod is like.
    done: watch::Receiver<Option<Wanted>>,
}

impl LabelKeeper {
    /// Takes the label off first, in case an earlier process in this pod has left it.
    pub(super) fn start(client: Client, pod: PodName, leadership: Leadership) -> Self {
        let (wanted, wishes) = watch::channel(Wanted::Plain);
        let (report, done) = watch::channel(None);
        tokio::spawn(named(
            "leader's label",
            keep(client, pod, leadership, wishes, report),
        ));
        Self { wanted, done }
    }

    pub(super) fn want(&self, wanted: Wanted) {
        self.wanted.send_replace(wanted);
    }

    /// Where wishes go.
    pub(super) fn sender(&self) -> watch::Sender<Wanted> {
        self.wanted.clone()
    }

    /// Waits until the pod is so.
    pub(super) async fn done(&self, wanted: &Wanted) {
        let mut done = self.done.clone();
        if done.wait_for(|done| done.as_ref() == Some(wanted)).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

async fn keep(
    client: Client,
    pod: PodName,
    leadership: Leadership,
    mut wishes: watch::Receiver<Wanted>,
    report: watch::Sender<Option<Wanted>>,
) {
    loop {
        let wanted = wishes.borrow_and_update().clone();
        if report.borrow().as_ref() == Some(&wanted) {
            if wishes.changed().await.is_err() {
                return;
            }
            continue;
        }
        if wanted != Wanted::Plain {
            // From now on it may be there, whatever the answer says.
            leadership.set_stray(true);
        }
        report.send_replace(None);
        match patch(&client, &pod, &wanted).await {
            Ok(()) => {
                info!(
                    label = LABEL,
                    is_leader = wanted != Wanted::Plain,
                    "this pod's label is written"
                );
                leadership.set_stray(wanted != Wanted::Plain);
                report.send_replace(Some(wanted));
            }
            Err(error) => {
                warn!(
                    label = LABEL,
                    error = format!("{error:#}"),
                    "cannot write this pod's label, trying again"
                );
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

async fn patch(client: &Client, pod: &PodName, wanted: &Wanted) -> anyhow::Result<()> {
    let metadata = match wanted {
        Wanted::Plain => json!({"labels": {LABEL: null}, "annotations": {SINCE: null}}),
        Wanted::Leader(since) => json!({"labels": {LABEL: "true"}, "annotations": {SINCE: since}}),
    };
    let path = format!("/api/v1/namespaces/{}/pods/{}", pod.namespace, pod.name);
    let request = Request::builder()
        .method(Method::PATCH)
        .uri(path)
        .header(header::CONTENT_TYPE, "application/merge-patch+json");
    let request = request.body(serde_json::to_vec(&json!({"metadata": metadata}))?)?;
    let answer = tokio::time::timeout(TIMEOUT, client.request::<Value>(request))
        .await
        .context("no answer in time")?;
    match answer {
        // A pod that is gone bears no label.
        Err(kube::Error::Api(status)) if status.code == 404 && *wanted == Wanted::Plain => Ok(()),
        answer => answer
            .map(drop)
            .with_context(|| format!("pod {}/{}", pod.namespace, pod.name)),
    }
}
