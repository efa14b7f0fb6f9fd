//! Times of bindings, as a watch shows them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, ResourceExt};
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

use super::fill::{LABEL, NAMESPACE, WAITING};
use kit::pod_fields::{node_of, unscheduled_because};

/// The longest wait without any event of the watch.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
struct BindingLog {
    /// True once the watch has listed what existed before.
    is_watching: bool,
    existing: BTreeSet<String>,
    /// The times at which the watch showed pods as bound, by name; also of pods that are gone.
    bound: BTreeMap<String, Instant>,
    /// The last message of a scheduler about a pod that it cannot place.
    refusal: Option<String>,
}

impl BindingLog {
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

#[derive(Debug)]
pub(super) struct BindingWatch {
    log: watch::Sender<BindingLog>,
    _watching: AbortOnDropHandle<()>,
}

impl BindingWatch {
    /// Starts the watch, and waits until it has listed the pods that are there.
    pub(super) async fn watch(client: &Client) -> Result<Self> {
        let pods: Api<Pod> = Api::namespaced(client.clone(), NAMESPACE);
        let log = watch::Sender::new(BindingLog::default());
        let watching = tokio::spawn(follow(pods, log.clone()));
        let bindings = Self {
            log,
            _watching: AbortOnDropHandle::new(watching),
        };
        bindings
            .until("the watch to begin", |log| log.is_watching)
            .await?;
        Ok(bindings)
    }

    /// Forgets the bindings of the last round; the pods of the next one have other names.
    pub(super) fn forget(&self) {
        self.log.send_modify(|log| {
            log.bound.clear();
            log.refusal = None;
        });
    }

    pub(super) fn last_bound(&self) -> Option<Instant> {
        self.log.borrow().bound.values().max().copied()
    }

    pub(super) async fn until_bound(&self, n_pods: usize) -> Result<()> {
        self.until("pods to be bound", |log| log.bound.len() >= n_pods)
            .await
    }

    pub(super) async fn until_gone(&self) -> Result<()> {
        self.until("pods to be gone", |log| log.existing.is_empty()).await
    }

    /// Waits until a condition holds; fails if the watch shows nothing new for [`PATIENCE`].
    async fn until(&self, what: &str, condition: impl Fn(&BindingLog) -> bool) -> Result<()> {
        let mut shown = self.log.subscribe();
        while !condition(&shown.borrow_and_update()) {
            if let Ok(changed) = timeout(PATIENCE, shown.changed()).await {
                changed?;
                continue;
            }
            let log = shown.borrow();
            let refusal = log.refusal.as_deref();
            let refusal = refusal.unwrap_or("no scheduler says anything; does one of this name run?");
            let (n_existing, n_bound) = (log.existing.len(), log.bound.len());
            bail!(
                "nothing happened for {PATIENCE:?} while waiting for {what}; {n_existing} pods are there, {n_bound} were bound: {refusal}"
            );
        }
        Ok(())
    }
}

/// Writes everything that a watch of the waiting pods shows into the log.
async fn follow(pods: Api<Pod>, log: watch::Sender<BindingLog>) {
    let config = watcher::Config::default().labels(&format!("{LABEL}={WAITING}"));
    let mut events = watcher(pods, config).default_backoff().boxed();
    while let Some(event) = events.next().await {
        match event {
            Ok(watcher::Event::Init) => log.send_modify(|log| log.existing.clear()),
            Ok(watcher::Event::InitDone) => log.send_modify(|log| log.is_watching = true),
            Ok(watcher::Event::InitApply(pod) | watcher::Event::Apply(pod)) => {
                log.send_modify(|log| log.apply(&pod));
            }
            Ok(watcher::Event::Delete(pod)) => log.send_modify(|log| {
                log.existing.remove(&pod.name_any());
            }),
            Err(error) => tracing::warn!(%error, "the watch starts again"),
        }
    }
}
