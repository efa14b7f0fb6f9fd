//! Times of bindings, as a watch shows them, and pods per second.

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
    /// The times of bindings, also of pods that are gone.
    pub(super) fn bound(&self) -> Vec<Instant> {
        self.bound.values().copied().collect()
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

/// Rates of binding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Rates {
    /// Seconds from the beginning to the last binding.
    pub(super) seconds: f64,
    /// Pods per second in this time.
    pub(super) per_second: f64,
    /// Pods per second from when a tenth was bound to when nine tenths were.
    pub(super) middle_per_second: f64,
}

impl Rates {
    /// The rates for pods that were bound at these times after the beginning.
    pub(super) fn of(mut bound: Vec<Duration>) -> Self {
        bound.sort_unstable();
        let n_bound = bound.len();
        let at = |idx: usize| {
            bound
                .get(idx.saturating_sub(1))
                .map_or(0.0, Duration::as_secs_f64)
        };
        let rate = |n: usize, seconds: f64| {
            if seconds > 0.0 {
                crate::load::float(n) / seconds
            } else {
                0.0
            }
        };
        // The first pods wait for the scheduler to get going, and the last ones for retries.
        let (begin, end) = (n_bound / 10, n_bound - n_bound / 10);
        let seconds = at(n_bound);
        Self {
            seconds,
            per_second: rate(n_bound, seconds),
            middle_per_second: rate(end - begin, at(end) - at(begin)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[rstest::rstest]
    #[case::steady(&[10, 20, 30, 40, 50, 60, 70, 80, 90, 100], [0.1, 100.0, 100.0])]
    #[case::late_begin_and_long_tail(&[500, 510, 520, 530, 540, 550, 560, 570, 580, 1000], [1.0, 10.0, 100.0])]
    #[case::out_of_order(&[100, 30, 20, 40, 50, 60, 70, 80, 90, 10], [0.1, 100.0, 100.0])]
    #[case::too_few_for_a_middle(&[0], [0.0, 0.0, 0.0])]
    #[case::none(&[], [0.0, 0.0, 0.0])]
    fn rates_of_bindings(#[case] millis: &[u64], #[case] wanted: [f64; 3]) {
        let rates = Rates::of(
            millis
                .iter()
                .map(|millis| Duration::from_millis(*millis))
                .collect(),
        );
        let found = [rates.seconds, rates.per_second, rates.middle_per_second];
        assert!(
            found
                .iter()
                .zip(wanted)
                .all(|(found, wanted)| (found - wanted).abs() < 1e-6),
            "{found:?}"
        );
    }
}
