//! The counters and histograms of `/metrics`; [`crate::publish::node_gauges`] has the gauges.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Metric, Registry};

/// The outcome of a check of pods and their records that found something wrong. A check without a finding is not counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Two pods swapped their records.
    Exchanged,
    /// A pod without an allocation record got one.
    Adopted,
    /// The start was refused for now.
    Refused,
    /// The start was refused, and another attempt cannot help.
    Impossible,
    Evicted,
    /// The record of a running pod was changed to the devices that the pod has.
    Recorded,
    /// The Device object had lost the records that pods have swapped, and the plugin wrote them again.
    Restored,
    /// A pod that kubelet gave no devices had the mark of an assigned pod, and the plugin removed it.
    Unflagged,
    /// A running pod has other devices than its allocation record names, and there was no remedy.
    Reported,
}

impl Outcome {
    const ALL: [Self; 9] = [
        Self::Exchanged,
        Self::Adopted,
        Self::Refused,
        Self::Impossible,
        Self::Evicted,
        Self::Recorded,
        Self::Restored,
        Self::Unflagged,
        Self::Reported,
    ];
}

/// The outcome of the runtime hook (NRI) for a new container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HookOutcome {
    /// The plugin does not serve the container.
    Left,
    /// The container already had its devices.
    Confirmed,
    /// The container got the devices of its pod's allocation record in place of others.
    Adjusted,
    /// The container requests no GPU, and its image or author would have shown it some.
    Hidden,
    /// The hook refused the creation of the container.
    Refused,
}

type Labels<const N: usize> = [(&'static str, String); N];

/// The label of a counter: the outcome's variant in lower case, such as `exchanged`.
fn label_of(outcome: impl fmt::Debug) -> Labels<1> {
    [("outcome", format!("{outcome:?}").to_lowercase())]
}

/// The counters and histograms. Clones share them.
#[derive(Clone, Debug)]
pub struct Metrics {
    mismatches: Family<Labels<1>, Counter>,
    pre_start: Histogram,
    allocate: Histogram,
    hooked: Family<Labels<1>, Counter>,
    is_hook_connected: Arc<AtomicBool>,
}

impl Metrics {
    /// Registers the metrics.
    pub fn register(registry: &mut Registry) -> Self {
        // From 1 ms, doubled each time, to 16 s; kubelet waits 30 s.
        let bounds = exponential_buckets(0.001, 2.0, 15);
        // From 62.5 us, doubled each time, to 4 s; kubelet admits no other pod of the node meanwhile.
        let fine_bounds = exponential_buckets(0.000_062_5, 2.0, 17);
        let version = vec![("version", env!("CARGO_PKG_VERSION"))];
        registry.register(
            "gpushare_device_plugin_build",
            "Version of the plugin",
            Info::new(version),
        );
        let help = "Repairs, refusals and reports of the checks of pods and their records, by outcome";
        let mismatches = add(registry, "identity_mismatch", help, Family::default());
        let help = "Time that a container's start was delayed";
        let pre_start = add(registry, "pre_start_seconds", help, Histogram::new(bounds));
        let help = "Time that kubelet waited for an answer to Allocate";
        let allocate = add(registry, "allocate_seconds", help, Histogram::new(fine_bounds));
        let help = "Containers that the runtime was about to create, by outcome of the runtime hook";
        let hooked = add(registry, "runtime_hook", help, Family::default());
        let metrics = Self {
            mismatches,
            pre_start,
            allocate,
            hooked,
            is_hook_connected: Arc::default(),
        };
        // At zero from the start, so that an alert on the increase fires at the first one.
        for outcome in Outcome::ALL {
            drop(metrics.mismatches.get_or_create(&label_of(outcome)));
        }
        metrics
    }

    pub(crate) fn count(&self, outcome: Outcome) {
        self.mismatches.get_or_create(&label_of(outcome)).inc();
    }

    pub(crate) fn count_hook(&self, outcome: HookOutcome) {
        self.hooked.get_or_create(&label_of(outcome)).inc();
    }

    /// Sets whether the container runtime is connected to the runtime hook; returns the value before.
    pub(crate) fn set_hook_connected(&self, is_connected: bool) -> bool {
        self.is_hook_connected.swap(is_connected, Ordering::Relaxed)
    }

    pub(crate) fn is_hook_connected(&self) -> bool {
        self.is_hook_connected.load(Ordering::Relaxed)
    }

    pub(crate) fn allocated(&self, took: Duration) {
        self.allocate.observe(took.as_secs_f64());
    }

    pub(crate) fn pre_started(&self, took: Duration) {
        self.pre_start.observe(took.as_secs_f64());
    }
}

fn add<M: Metric + Clone>(registry: &mut Registry, name: &str, help: &str, metric: M) -> M {
    registry.register(format!("gpushare_device_plugin_{name}"), help, metric.clone());
    metric
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_keep_their_names_and_labels() {
        let mut registry = Registry::default();
        let metrics = Metrics::register(&mut registry);
        metrics.count(Outcome::Exchanged);
        metrics.pre_started(Duration::from_millis(3));
        metrics.allocated(Duration::from_micros(300));
        metrics.count_hook(HookOutcome::Adjusted);
        assert!(!metrics.set_hook_connected(true) && metrics.set_hook_connected(true));
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        assert!(
            text.contains("gpushare_device_plugin_identity_mismatch_total{outcome=\"exchanged\"} 1"),
            "{text}"
        );
        assert!(
            text.contains("gpushare_device_plugin_runtime_hook_total{outcome=\"adjusted\"} 1"),
            "{text}"
        );
        assert!(metrics.is_hook_connected());
        assert!(
            text.contains("gpushare_device_plugin_pre_start_seconds_bucket{le=\"0.004\"} 1"),
            "{text}"
        );
        assert!(
            text.contains("gpushare_device_plugin_allocate_seconds_bucket{le=\"0.0005\"} 1"),
            "{text}"
        );
    }
}
