//! Metrics for Prometheus: counts and times of requests, and gauges of the state.
//!
//! Gauges of state are read from the index at scrape time, so they cannot drift from it.

mod allocations;
mod making_room;
mod unplaced;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use daemon::watch::WatchLag;
use placement::Reason;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};

use crate::index::{Shared, Snapshot};
use crate::leader::Leadership;
pub use allocations::{AllocationSnapshot, GpuSnapshot, NamespaceSnapshot};
pub use making_room::RoomMetrics;
use unplaced::{UnplacedPods, UnplacedSummary};

/// Upper bounds of the buckets of request times, in seconds: fine where filters are, wide enough for binds.
const BUCKETS: [f64; 24] = [
    0.000_02, 0.000_05, 0.000_075, 0.000_1, 0.000_15, 0.000_2, 0.000_3, 0.000_4, 0.000_5, 0.000_7, 0.001,
    0.001_5, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
];

/// Upper bounds of the buckets of the time from a pod's first filter to its binding, which may be hours, in seconds.
const PLACEMENT_BUCKETS: [f64; 16] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0,
];

/// Pods that are looked up under one lock of the index.
const PODS_PER_LOCK: usize = 256;

/// A verb of the extender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    Filter,
    Prioritize,
    Bind,
    Preempt,
    Inspect,
}

/// The outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    Ok,
    /// Answered with a refusal or an error text.
    Refused,
    /// The request cannot be read.
    Malformed,
    /// The watches have not synced.
    NotReady,
    NotLeading,
    /// A bind whose outcome is unknown: it may have been written.
    Unknown,
    /// The client disconnected before it had the whole answer.
    Broken,
}

impl Verb {
    const fn label(self) -> &'static str {
        match self {
            Self::Filter => "filter",
            Self::Prioritize => "prioritize",
            Self::Bind => "bind",
            Self::Preempt => "preempt",
            Self::Inspect => "inspect",
        }
    }
}

impl Ending {
    const fn label(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Refused => "refused",
            Self::Malformed => "malformed",
            Self::NotReady => "not_ready",
            Self::NotLeading => "not_leading",
            Self::Unknown => "unknown",
            Self::Broken => "broken",
        }
    }
}

type Labels<const N: usize> = [(&'static str, &'static str); N];

type Counters = Family<Labels<1>, Counter>;

type RequestSeconds = Family<Labels<1>, Histogram, fn() -> Histogram>;

/// Counts and times of requests.
#[derive(Clone, Debug)]
pub struct Metrics {
    requests: Family<Labels<2>, Counter>,
    request_seconds: RequestSeconds,
    refused_nodes: Counters,
    refused_binds: Counters,
    rechecked: Counters,
    preemption_candidates: Counters,
    retried: Counters,
    group_decisions: Family<Labels<2>, Counter>,
    room_announced: Counter,
    unplaced: UnplacedPods,
    placement_seconds: Histogram,
}

/// Measures one request; counts it when dropped.
#[derive(Debug)]
pub(crate) struct Timer<'a> {
    metrics: &'a Metrics,
    verb: Verb,
    started: Instant,
    /// The outcome that is counted when the timer is dropped.
    pub(crate) ending: Ending,
}

impl Metrics {
    /// Registers all metrics; the gauges of state read `index` and `leadership` at each scrape.
    pub fn register(
        registry: &mut Registry,
        index: Shared<crate::index::Index>,
        leadership: &Leadership,
    ) -> Self {
        let version = vec![("version", env!("CARGO_PKG_VERSION"))];
        registry.register("build", "Version of the scheduler", Info::new(version));
        let placement_seconds = Histogram::new(PLACEMENT_BUCKETS);
        let help = "Time from the first filter of a pod to its binding";
        registry.register_with_unit("placement", help, Unit::Seconds, placement_seconds.clone());
        let requests = Family::<Labels<2>, Counter>::default();
        registry.register("requests", "Requests by verb and outcome", requests.clone());
        let request_seconds: RequestSeconds = Family::new_with_constructor(|| Histogram::new(BUCKETS));
        let help = "Time from the whole request to its answer";
        registry.register_with_unit("request", help, Unit::Seconds, request_seconds.clone());
        let mut counters = |name: &str, help: &str| {
            let counters = Counters::default();
            registry.register(name, help, counters.clone());
            counters
        };
        let help = "Nodes refused by filters, by reason";
        let refused_nodes = counters("refused_nodes", help);
        let help = "Binds that came to nothing, by reason";
        let refused_binds = counters("refused_binds", help);
        // The metric has an old name, which dashboards and alerts of users go by.
        let help = "Refusals of pods held back until a watch had caught up, by what became of them";
        let rechecked = counters("refusals_thought_over", help);
        let help = "Nodes on which kube-scheduler would evict pods, by what became of them";
        let preemption_candidates = counters("preemption_candidates", help);
        let help = "Refusals whose text changes so that kube-scheduler tries the pod again soon, by cause";
        let retried = counters("refusals_tried_again", help);
        let group_decisions = Family::<Labels<2>, Counter>::default();
        let help =
            "Decisions for groups of pods that have to be, or prefer to be, in one domain, by the outcome";
        registry.register("group_decisions", help, group_decisions.clone());
        let room_announced = Counter::default();
        let help = "Writes by which kube-scheduler is made to try refused pods again, as room has opened without an event";
        registry.register("room_announced", help, room_announced.clone());
        let unplaced = UnplacedPods::default();
        registry.register_collector(Box::new(StateGauges {
            index,
            unplaced: unplaced.clone(),
            leadership: leadership.clone(),
        }));
        Self {
            requests,
            request_seconds,
            refused_nodes,
            refused_binds,
            rechecked,
            preemption_candidates,
            retried,
            group_decisions,
            room_announced,
            unplaced,
            placement_seconds,
        }
    }

    /// Starts to measure a request, which counts as [`Ending::Ok`] until the caller sets another ending.
    pub(crate) fn time(&self, verb: Verb) -> Timer<'_> {
        Timer {
            metrics: self,
            verb,
            started: Instant::now(),
            ending: Ending::Ok,
        }
    }

    pub(crate) fn record(&self, verb: Verb, ending: Ending, elapsed: Duration) {
        let verb = ("verb", verb.label());
        let labels = [verb, ("outcome", ending.label())];
        self.requests.get_or_create(&labels).inc();
        let times = self.request_seconds.get_or_create(&[verb]);
        times.observe(elapsed.as_secs_f64());
    }

    pub(crate) fn count_refused_nodes(&self, reason: Reason, n_nodes: u64) {
        let labels = [("reason", reason.label())];
        self.refused_nodes.get_or_create(&labels).inc_by(n_nodes);
    }

    pub(crate) fn count_refused_bind(&self, reason: &'static str) {
        self.refused_binds.get_or_create(&[("reason", reason)]).inc();
    }

    /// Counts a refusal by a sample of the nodes, whose text makes kube-scheduler try the pod again soon.
    pub(crate) fn count_sample_retry(&self) {
        self.retried.get_or_create(&[("cause", "sample")]).inc();
    }

    /// Counts a decision for a group of pods with a wish for this domain.
    pub(crate) fn count_group_decision(&self, domain: &'static str, outcome: &'static str) {
        let labels = [("domain", domain), ("outcome", outcome)];
        self.group_decisions.get_or_create(&labels).inc();
    }

    /// Notes the result of a pod's filter; `refusal` is the reason for which no node fits.
    pub(crate) fn note_filter(&self, uid: &str, refusal: Option<&'static str>, now: Instant) {
        self.unplaced.note_filter(uid, refusal, now);
    }

    /// Notes that a pod was bound, and the time since its first filter.
    pub(crate) fn note_bound(&self, uid: &str, now: Instant) {
        if let Some(took) = self.unplaced.note_bound(uid, now) {
            self.placement_seconds.observe(took.as_secs_f64());
        }
    }

    /// Counts a write by which kube-scheduler is made to try refused pods again.
    pub(crate) fn count_announcement(&self) {
        self.room_announced.inc();
    }

    /// Counts a refusal that was rechecked after a watch had caught up.
    pub(crate) fn count_recheck(&self, fits: bool) {
        let outcome = if fits { "fits" } else { "refused" };
        self.rechecked.get_or_create(&[("outcome", outcome)]).inc();
    }

    /// Counts nodes on which kube-scheduler would evict pods, by the outcome of the preempt request for them.
    pub(crate) fn count_candidates(&self, outcome: &'static str, n_nodes: usize) {
        let n_nodes = u64::try_from(n_nodes).unwrap_or(u64::MAX);
        let labels = [("outcome", outcome)];
        self.preemption_candidates.get_or_create(&labels).inc_by(n_nodes);
    }
}

impl Drop for Timer<'_> {
    fn drop(&mut self) {
        let elapsed = self.started.elapsed();
        self.metrics.record(self.verb, self.ending, elapsed);
    }
}

/// Registers the watch lag of each kind.
pub fn register_watches(registry: &mut Registry, watches: Vec<WatchLag>) {
    registry.register_collector(Box::new(Watches(watches)));
}

#[derive(Debug)]
struct Watches(Vec<WatchLag>);

impl Collector for Watches {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let help = "Time since the API server last sent an object, an event or a bookmark of a kind";
        let mut family =
            encoder.encode_descriptor("watch_age", help, Some(&Unit::Seconds), MetricType::Gauge)?;
        for lag in &self.0 {
            let gauge = ConstGauge::new(lag.age().as_secs_f64());
            gauge.encode(family.encode_family(&[("kind", lag.kind())])?)?;
        }
        Ok(())
    }
}

#[derive(Debug)]
struct StateGauges {
    index: Shared<crate::index::Index>,
    unplaced: UnplacedPods,
    leadership: Leadership,
}

impl StateGauges {
    fn forget_placed(&self, now: Instant) {
        for some in self.unplaced.ages(now).chunks(PODS_PER_LOCK) {
            let mut gone = Vec::new();
            let index = self.index.read();
            for (uid, age) in some {
                let is_waiting = match index.pod(uid) {
                    Some(_) => index.is_pending(uid),
                    // The watch may not have shown the pod yet.
                    None => UnplacedPods::is_new(*age),
                };
                if !is_waiting {
                    gone.push(Arc::clone(uid));
                }
            }
            drop(index);
            self.unplaced.forget(&gone);
        }
    }
}

impl Collector for StateGauges {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        // Copied out first, so that no lock is held while the text is written.
        let snapshot: Snapshot = self.index.read().snapshot();
        let now = Instant::now();
        self.forget_placed(now);
        let unplaced = self.unplaced.summarize(now);
        let help = "Whether a kind of object has been seen whole";
        let mut family = encoder.encode_descriptor("synced", help, None, MetricType::Gauge)?;
        for (kind, synced) in snapshot.synced {
            gauge(synced.into()).encode(family.encode_family(&[("kind", kind)])?)?;
        }
        // Until every kind is synced, the sums would be those of a part of the cluster.
        if !snapshot.synced.iter().all(|(_, synced)| *synced) {
            return Ok(());
        }
        let AllocationSnapshot { gpus, namespaces } = AllocationSnapshot::read(&self.index);
        let mut encode = |name, help, value| {
            let metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            gauge(value).encode(metric)
        };
        encode("nodes", "Nodes that the scheduler knows", snapshot.n_nodes)?;
        encode("gpu_nodes", "Nodes with GPUs to share", snapshot.n_gpu_nodes)?;
        let help =
            "GPUs that take no new pods because an annotation of their node closes them for maintenance";
        encode("closed_gpus", help, snapshot.n_closed_gpus)?;
        encode("pods", "Pods that hold a share", snapshot.n_pods)?;
        let help = "Unbound pods that ask for a share";
        encode("pending_pods", help, snapshot.n_pending)?;
        let help = "Pods that were chosen devices for and are not yet seen bound";
        encode("assumed_pods", help, snapshot.n_assumed)?;
        let help = "Pods whose record says more than they ask for or were given, and does not count for that";
        encode("contradicting_pods", help, snapshot.n_contradicting)?;
        let help = "Pods whose devices are not known for sure";
        encode("conservative_pods", help, snapshot.n_conservative)?;
        let help = "Pods that room is kept for until they are bound, and members of groups that were not asked about yet";
        encode("hints", help, snapshot.n_hints)?;
        let help = "Rooms that are kept for groups of pods in one domain";
        encode("group_rooms", help, snapshot.n_group_rooms)?;
        let help = "Nodes that rank behind all others because kubelet refused several pods there";
        encode("failing_nodes", help, snapshot.n_failing)?;
        let help = "Nodes that no pod is sent to because their device plugin does not serve kubelet";
        encode("plugin_away_nodes", help, snapshot.n_plugin_away)?;
        // kube-scheduler asks only the leader, so only the leader knows the pods that wait.
        if self.leadership.is_leading() {
            encode_unplaced(&mut encoder, &unplaced)?;
        }
        let help = "Part of the free memory of healthy GPUs on which no typical pod fits";
        let fragmentation =
            encoder.encode_descriptor("fragmentation_ratio", help, None, MetricType::Gauge)?;
        ConstGauge::new(fragmentation_ratio(&gpus)).encode(fragmentation)?;
        encode_namespaces(&mut encoder, &namespaces)?;
        encode_gpus(&mut encoder, &gpus)
    }
}

/// Writes the metrics of pods that kube-scheduler has asked about and that are not bound.
fn encode_unplaced(encoder: &mut DescriptorEncoder<'_>, unplaced: &UnplacedSummary) -> fmt::Result {
    let help = "Pods that kube-scheduler has asked about and that are not bound, by the reason of their last refusal";
    let mut family = encoder.encode_descriptor("unplaced_pods", help, None, MetricType::Gauge)?;
    for (reason, n_pods) in &unplaced.by_reason {
        gauge(*n_pods).encode(family.encode_family(&[("reason", *reason)])?)?;
    }
    let help = "Time since the first filter of the unbound pod that has waited longest, 0 without such a pod";
    let unit = Some(&Unit::Seconds);
    let oldest = encoder.encode_descriptor("oldest_unplaced_pod", help, unit, MetricType::Gauge)?;
    ConstGauge::new(unplaced.oldest.as_secs_f64()).encode(oldest)
}

/// Stranded memory divided by free memory; 0 without free memory.
fn fragmentation_ratio(gpus: &[GpuSnapshot]) -> f64 {
    let (mut stranded, mut free) = (0_u64, 0_u64);
    for gpu in gpus.iter().filter(|gpu| gpu.healthy && !gpu.closed) {
        stranded = stranded.saturating_add(gpu.stranded);
        free = free.saturating_add(gpu.total.saturating_sub(gpu.used));
    }
    // A full cluster, or one without GPUs, has no fragmentation, and 0 / 0 would break sums over clusters.
    if free == 0 {
        0.0
    } else {
        as_f64(stranded) / as_f64(free)
    }
}

fn encode_namespaces(
    encoder: &mut DescriptorEncoder<'_>,
    namespaces: &BTreeMap<String, NamespaceSnapshot>,
) -> fmt::Result {
    let mut encode = |name, help, value: fn(&NamespaceSnapshot) -> f64| -> fmt::Result {
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (namespace, sum) in namespaces {
            ConstGauge::new(value(sum)).encode(family.encode_family(&[("namespace", namespace)])?)?;
        }
        Ok(())
    };
    let help = "Memory of GPUs that the pods of a namespace hold";
    encode("namespace_gpu_memory_allocated_bytes", help, |sum| {
        as_f64(sum.bytes)
    })?;
    let help = "Computing power that the pods of a namespace hold; 1 is a whole GPU";
    encode("namespace_gpu_core_allocated_ratio", help, |sum| {
        as_ratio(sum.core)
    })?;
    let help = "Parts of GPUs that the pods of a namespace hold";
    encode("namespace_gpu_parts", help, |sum| as_f64(sum.n_parts))
}

fn encode_gpus(encoder: &mut DescriptorEncoder<'_>, gpus: &[GpuSnapshot]) -> fmt::Result {
    let mut encode = |name, help, value: fn(&GpuSnapshot) -> f64| -> fmt::Result {
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for gpu in gpus {
            let minor = gpu.minor.to_string();
            // The UUID is stable; the minor, which tools of the driver show, changes when a GPU is replaced.
            let labels = [("node", &gpu.node), ("minor", &minor), ("uuid", &gpu.uuid)];
            ConstGauge::new(value(gpu)).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    };
    let help = "Memory of a GPU";
    encode("gpu_memory_total_bytes", help, |gpu| as_f64(gpu.total))?;
    let help = "Memory of a GPU that pods hold";
    encode("gpu_memory_allocated_bytes", help, |gpu| as_f64(gpu.used))?;
    let help = "Free memory of a GPU on which no typical pod fits";
    encode("gpu_memory_stranded_bytes", help, |gpu| as_f64(gpu.stranded))?;
    let help = "Computing power of a GPU; 1 is a whole GPU";
    encode("gpu_core_total_ratio", help, |gpu| {
        as_ratio(gpu.core_total.into())
    })?;
    let help = "Computing power of a GPU that pods hold; 1 is a whole GPU";
    encode("gpu_core_allocated_ratio", help, |gpu| {
        as_ratio(gpu.core_held.into())
    })?;
    let help = "Containers that may request a share of a GPU as koordinator.sh/gpu.shared";
    encode("gpu_sharers_capacity", help, |gpu| gpu.slots_total.into())?;
    let help = "Containers that have requested a share of a GPU as koordinator.sh/gpu.shared";
    encode("gpu_sharers_allocated", help, |gpu| gpu.slots_held.into())?;
    let help = "Pods that hold a part of a GPU";
    encode("gpu_pods", help, |gpu| gpu.n_pods.into())?;
    let help = "1 while a GPU takes new pods";
    encode("gpu_healthy", help, |gpu| f64::from(u8::from(gpu.healthy)))
}

/// A number as Prometheus stores it.
#[expect(clippy::cast_precision_loss, reason = "exact up to 8 PiB of bytes")]
fn as_f64(number: u64) -> f64 {
    number as f64
}

/// A percentage as a ratio.
fn as_ratio(percent: u64) -> f64 {
    as_f64(percent) / 100.0
}

fn gauge(value: u64) -> ConstGauge<i64> {
    // The library has no gauges of unsigned numbers.
    ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX))
}
