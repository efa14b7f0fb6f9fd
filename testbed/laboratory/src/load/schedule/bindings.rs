//! Times of bindings, as a watch shows them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, ResourceExt};
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use super::fill::{LABEL, NAMESPACE, WAITING};
use kit::pod_fields::{node_of, unscheduled_because};

/// The longest wait without any event of the watch.
const PATIENCE: Duration = Duration::from_secs(60);

/// The pods and bindings that the watch has shown so far.
#[derive(Debug, Default)]
pub(super) struct BindingLog {
    /// True once the watch has listed what existed before.
    is_watching: bool,
    /// The names of the pods that exist.
    existing: BTreeSet<String>,
    /// The times at which the watch showed pods as bound, by name.
    bound: BTreeMap<String, Instant>,
    /// The last message of a scheduler about a pod that it cannot place.
    refusal: Option<String>,
}

impl BindingLog {
    /// The time of the last binding, also of a pod that is gone.
    pub(super) fn last_bound(&self) -> Option<Instant> {
        self.bound.values().max().copied()
    }

    /// Takes note of a pod that the watch shows: it is there, may be bound, or may be refused.
    fn apply(&mut self, pod: &Pod) {
        let name = pod.name_any();
        if node_of(pod).is_some() {
            // Later changes of a bound pod must not move the time of its binding.
            self.bound.entry(name.clone()).or_insert_with(Instant::now);
        }
        if let Some(refusal) = unscheduled_because(pod) {
            self.refusal = Some(refusal.to_owned());
        }
        self.existing.insert(name);
    }
}

/// A watch on the pods that the schedulers have to place.
#[derive(Debug)]
pub(super) struct BindingWatch {
    shown: watch::Receiver<BindingLog>,
    sender: watch::Sender<BindingLog>,
    _watching: AbortOnDropHandle<()>,
}

impl BindingWatch {
    /// Starts the watch, and waits until it has listed the pods that are there.
    pub(super) async fn watch(client: &Client) -> Result<Self> {
        let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
        let (sender, shown) = watch::channel(BindingLog::default());
        let watching = AbortOnDropHandle::new(tokio::spawn(follow(pods, sender.clone())));
        let mut bindings = Self {
            shown,
            sender,
            _watching: watching,
        };
        bindings
            .until("the watch to begin", |shown| shown.is_watching)
            .await?;
        Ok(bindings)
    }

    /// Forgets the bindings of the last round; the pods of the next one have other names.
    pub(super) fn forget(&self) {
        self.sender.send_modify(|shown| {
            shown.bound.clear();
            shown.refusal = None;
        });
    }

    /// Returns the pods and bindings that the watch has shown so far.
    pub(super) fn shown(&self) -> watch::Ref<'_, BindingLog> {
        self.shown.borrow()
    }

    /// Waits until `n_pods` have been bound.
    pub(super) async fn until_bound(&mut self, n_pods: usize) -> Result<()> {
        self.until("pods to be bound", |shown| shown.bound.len() >= n_pods)
            .await
    }

    /// Waits until no pod is left.
    pub(super) async fn until_gone(&mut self) -> Result<()> {
        self.until("pods to be gone", |shown| shown.existing.is_empty())
            .await
    }

    /// Waits until a condition holds; fails if the watch shows nothing new for [`PATIENCE`].
    async fn until(&mut self, what: &str, condition: impl Fn(&BindingLog) -> bool) -> Result<()> {
        loop {
            if condition(&self.shown.borrow_and_update()) {
                return Ok(());
            }
            if let Ok(changed) = tokio::time::timeout(PATIENCE, self.shown.changed()).await {
                changed?;
                continue;
            }
            let shown = self.shown.borrow();
            let refusal = shown
                .refusal
                .as_deref()
                .unwrap_or("no scheduler says anything; does one of this name run?");
            let (n_existing, n_bound) = (shown.existing.len(), shown.bound.len());
            bail!(
                "nothing happened for {PATIENCE:?} while waiting for {what}; {n_existing} pods are there, {n_bound} were bound: {refusal}"
            );
        }
    }
}

/// Writes everything that a watch of the waiting pods shows into the log.
async fn follow(pods: Api<Pod>, sender: watch::Sender<BindingLog>) {
    let config = watcher::Config::default().labels(&format!("{LABEL}={WAITING}"));
    let mut events = watcher(pods, config).default_backoff().boxed();
    while let Some(event) = events.next().await {
        match event {
            Ok(watcher::Event::Init) => sender.send_modify(|shown| shown.existing.clear()),
            Ok(watcher::Event::InitDone) => sender.send_modify(|shown| shown.is_watching = true),
            Ok(watcher::Event::InitApply(pod) | watcher::Event::Apply(pod)) => {
                sender.send_modify(|shown| shown.apply(&pod));
            }
            Ok(watcher::Event::Delete(pod)) => sender.send_modify(|shown| {
                shown.existing.remove(&pod.name_any());
            }),
            Err(error) => tracing::warn!(%error, "the watch starts again"),
        }
    }
}
