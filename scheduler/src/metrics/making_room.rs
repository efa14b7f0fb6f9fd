//! Metrics of the room that the leader makes by evictions.

use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use super::Counters;

/// Upper bounds of the buckets of the time from a pod's first refusal to its binding, in seconds: grace periods lie within.
const BUCKETS: [f64; 10] = [5.0, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 120.0, 300.0, 600.0];

const OUTCOMES: [&str; 6] = [
    "evicted",
    "reported",
    "no_victims",
    "refused",
    "over_budget",
    "late",
];

/// Counts and times of room that is made. Clones share them.
#[derive(Clone, Debug)]
pub struct RoomMetrics {
    outcomes: Counters,
    victims: Counter,
    seconds: Histogram,
    pending: Gauge,
}

impl RoomMetrics {
    /// Registers the metrics.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            outcomes: Family::default(),
            victims: Counter::default(),
            seconds: Histogram::new(BUCKETS),
            pending: Gauge::default(),
        };
        // Each from 0 on, so that a query sees the first increase too.
        for outcome in OUTCOMES {
            drop(metrics.outcomes.get_or_create(&[("outcome", outcome)]));
        }
        let help = "Decisions to make room for a pod by evictions, by the outcome";
        registry.register("make_room", help, metrics.outcomes.clone());
        let help = "Pods evicted to make room for others";
        registry.register("make_room_victims", help, metrics.victims.clone());
        let help = "Time from the first refusal of a pod that room was made for to its binding";
        registry.register_with_unit("make_room", help, Unit::Seconds, metrics.seconds.clone());
        let help = "Pods that room is being made for";
        registry.register("make_room_pending", help, metrics.pending.clone());
        metrics
    }

    pub(crate) fn count(&self, outcome: &'static str) {
        self.outcomes.get_or_create(&[("outcome", outcome)]).inc();
    }

    pub(crate) fn count_victim(&self) {
        self.victims.inc();
    }

    /// Counts a pod that was bound in the room that was made for it, `took` after its first refusal.
    pub(crate) fn observe(&self, took: Duration) {
        self.seconds.observe(took.as_secs_f64());
    }

    pub(crate) fn set_pending(&self, n_pods: usize) {
        self.pending.set(i64::try_from(n_pods).unwrap_or(i64::MAX));
    }
}
