//! Metrics for Prometheus: counts and times of requests, and gauges of the state.
//!
//! Gauges of state are read from the index at scrape time, so they cannot drift from it.

mod unplaced;

use std::fmt;
use std::time::{Duration, Instant};

use daemon::watch::WatchLag;
use placement::Reason;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};

use crate::index::{GpuSnapshot, NamespaceSnapshot, Shared, Snapshot};
use unplaced::UnplacedPods;

/// Upper bounds of the buckets of request times, in seconds: fine where filters are, wide enough for binds.
const BUCKETS: [f64; 24] = [
    0.000_02, 0.000_05, 0.000_075, 0.000_1, 0.000_15, 0.000_2, 0.000_3, 0.000_4, 0.000_5, 0.000_7, 0.001,
    0.001_5, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
];

/// Upper bounds of the buckets of the time from a pod's first filter to its binding, in seconds: pods may wait for room for hours.
const PLACEMENT_BUCKETS: [f64; 16] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0,
];

/// A verb of the extender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// Finds the nodes that fit.
    Filter,
    /// Scores them.
    Prioritize,
    /// Bind a pod.
    Bind,
    /// Name the pods that must go for a pod.
    Preempt,
    /// Show the state.
    Inspect,
}

/// The outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Answered.
    Ok,
    /// Answered with a refusal or an error text.
    Refused,
    /// Not a request that can be read.
    Malformed,
    /// The watches have not synced.
    NotReady,
    /// Another replica leads.
    NotLeading,
    /// A bind whose outcome is unknown: it may have been written.
    Unknown,
    /// The client went before it had all of the answer.
    Broken,
}

/// The outcome for a node on which kube-scheduler would evict pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Candidate {
    /// With the victims that it proposes.
    Kept,
    /// With other victims.
    Replaced,
    /// Left out: no victims help there.
    Dropped,
    /// Left out: the pod's earlier victims have not ended.
    Waiting,
}

impl Candidate {
    const fn label(self) -> &'static str {
        match self {
            Self::Kept => "kept",
            Self::Replaced => "replaced",
            Self::Dropped => "dropped",
            Self::Waiting => "waiting",
        }
    }
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

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    verb: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct VerbLabels {
    verb: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabels {
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CauseLabels {
    cause: &'static str,
}

/// Counts and times of requests.
#[derive(Clone, Debug)]
pub struct Metrics {
    requests: Family<RequestLabels, Counter>,
    seconds: Family<VerbLabels, Histogram, fn() -> Histogram>,
    refusals: Family<ReasonLabels, Counter>,
    bind_refusals: Family<ReasonLabels, Counter>,
    thought_over: Family<OutcomeLabels, Counter>,
    preemption_candidates: Family<OutcomeLabels, Counter>,
    tried_again: Family<CauseLabels, Counter>,
    room_announced: Counter,
    unplaced: UnplacedPods,
    placement: Histogram,
}

/// Measures one request; counts it when dropped.
#[derive(Debug)]
pub struct Timer<'a> {
    metrics: &'a Metrics,
    verb: Verb,
    started: Instant,
    /// The outcome that is counted when the timer is dropped.
    pub ending: Ending,
}

impl Metrics {
    /// Registers everything, the gauges of `index` too.
    pub fn register(registry: &mut Registry, index: Shared<crate::index::Index>) -> Self {
        let metrics = Self {
            requests: Family::default(),
            seconds: Family::new_with_constructor(|| Histogram::new(BUCKETS)),
            refusals: Family::default(),
            bind_refusals: Family::default(),
            thought_over: Family::default(),
            preemption_candidates: Family::default(),
            tried_again: Family::default(),
            room_announced: Counter::default(),
            unplaced: UnplacedPods::default(),
            placement: Histogram::new(PLACEMENT_BUCKETS),
        };
        let version = vec![("version", env!("CARGO_PKG_VERSION"))];
        registry.register("build", "Version of the scheduler", Info::new(version));
        registry.register_with_unit(
            "placement",
            "Time from the first filter of a pod to its binding",
            Unit::Seconds,
            metrics.placement.clone(),
        );
        registry.register(
            "requests",
            "Requests by verb and outcome",
            metrics.requests.clone(),
        );
        registry.register_with_unit(
            "request",
            "Time from the whole request to its answer",
            Unit::Seconds,
            metrics.seconds.clone(),
        );
        registry.register(
            "refused_nodes",
            "Nodes refused by filters, by reason",
            metrics.refusals.clone(),
        );
        registry.register(
            "refused_binds",
            "Binds that came to nothing, by reason",
            metrics.bind_refusals.clone(),
        );
        let help = "Refusals of pods held back until a watch had caught up, by what became of them";
        registry.register("refusals_thought_over", help, metrics.thought_over.clone());
        let help = "Nodes on which kube-scheduler would evict pods, by what became of them";
        registry.register(
            "preemption_candidates",
            help,
            metrics.preemption_candidates.clone(),
        );
        let help = "Refusals whose text changes so that kube-scheduler tries the pod again soon, by cause";
        registry.register("refusals_tried_again", help, metrics.tried_again.clone());
        let help = "Writes by which kube-scheduler is made to try refused pods again, as room has opened without an event";
        registry.register("room_announced", help, metrics.room_announced.clone());
        let unplaced = metrics.unplaced.clone();
        registry.register_collector(Box::new(State { index, unplaced }));
        metrics
    }

    /// Starts to measure a request.
    pub fn time(&self, verb: Verb) -> Timer<'_> {
        Timer {
            metrics: self,
            verb,
            started: Instant::now(),
            ending: Ending::Ok,
        }
    }

    /// Counts a request that has ended, and how long it took.
    pub fn record(&self, verb: Verb, ending: Ending, elapsed: Duration) {
        self.requests
            .get_or_create(&RequestLabels {
                verb: verb.label(),
                outcome: ending.label(),
            })
            .inc();
        self.seconds
            .get_or_create(&VerbLabels { verb: verb.label() })
            .observe(elapsed.as_secs_f64());
    }

    /// Counts nodes that a filter refused.
    pub fn refused(&self, reason: Reason, n_nodes: u64) {
        self.refusals
            .get_or_create(&ReasonLabels {
                reason: reason.label(),
            })
            .inc_by(n_nodes);
    }
}

impl Metrics {
    /// Counts a bind that came to nothing.
    pub fn bind_refused(&self, reason: &'static str) {
        self.bind_refusals.get_or_create(&ReasonLabels { reason }).inc();
    }

    /// Counts a refusal whose text changes so that the pod is tried again soon.
    pub fn tried_again(&self, cause: &'static str) {
        self.tried_again.get_or_create(&CauseLabels { cause }).inc();
    }

    /// Notes the result of a pod's filter; `refusal` is the reason for which no node fits.
    pub fn note_filter(&self, uid: &str, refusal: Option<&'static str>, now: Instant) {
        self.unplaced.note_filter(uid, refusal, now);
    }

    /// Counts a pod that was bound.
    pub fn note_bound(&self, uid: &str, now: Instant) {
        if let Some(took) = self.unplaced.note_bound(uid, now) {
            self.placement.observe(took.as_secs_f64());
        }
    }

    /// Counts an announcement that room has opened.
    pub fn room_announced(&self) {
        self.room_announced.inc();
    }

    /// Counts a refusal that was held back; whether the pod was let through in the end.
    pub fn thought_over(&self, fits: bool) {
        let outcome = if fits { "fits" } else { "refused" };
        self.thought_over.get_or_create(&OutcomeLabels { outcome }).inc();
    }
}

impl Metrics {
    /// Counts nodes on which kube-scheduler would evict pods.
    pub fn preempted(&self, candidate: Candidate, n_nodes: usize) {
        let n_nodes = u64::try_from(n_nodes).unwrap_or(u64::MAX);
        self.preemption_candidates
            .get_or_create(&OutcomeLabels {
                outcome: candidate.label(),
            })
            .inc_by(n_nodes);
    }
}

impl Drop for Timer<'_> {
    fn drop(&mut self) {
        self.metrics
            .record(self.verb, self.ending, self.started.elapsed());
    }
}

/// Registers the watch lag of each kind.
pub fn register_watches(registry: &mut Registry, watches: Vec<WatchLag>) {
    registry.register_collector(Box::new(Watches(watches)));
}

/// Reads the lags.
#[derive(Debug)]
struct Watches(Vec<WatchLag>);

impl Collector for Watches {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let help = "Time since the API server last sent an object, an event or a bookmark of a kind";
        let mut family =
            encoder.encode_descriptor("watch_age", help, Some(&Unit::Seconds), MetricType::Gauge)?;
        for lag in &self.0 {
            let gauge = ConstGauge::new(lag.age().as_secs_f64());
            gauge.encode(family.encode_family(&KindLabels { kind: lag.kind() })?)?;
        }
        Ok(())
    }
}

/// Reads gauges from the index.
#[derive(Debug)]
struct State {
    index: Shared<crate::index::Index>,
    unplaced: UnplacedPods,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct GpuLabels {
    node: String,
    minor: u32,
    uuid: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct NamespaceLabels {
    namespace: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindLabels {
    kind: &'static str,
}

impl Collector for State {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        // Copied out first, so that a slow reader of the metrics holds no lock.
        let (snapshot, unplaced) = {
            let index = self.index.read();
            let is_waiting = |uid: &str, age| match index.pod(uid) {
                Some(_) => index.is_pending(uid),
                None => UnplacedPods::is_new(age),
            };
            let snapshot: Snapshot = index.snapshot();
            (snapshot, self.unplaced.summarize(Instant::now(), is_waiting))
        };
        let mut gauge = |name: &str, help: &str, value: u64| -> Result<(), fmt::Error> {
            let gauge = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
            let metric = encoder.encode_descriptor(name, help, None, gauge.metric_type())?;
            gauge.encode(metric)
        };
        gauge("nodes", "Nodes that the scheduler knows", snapshot.n_nodes)?;
        gauge("gpu_nodes", "Nodes with GPUs to share", snapshot.n_gpu_nodes)?;
        gauge("pods", "Pods that hold a share", snapshot.n_pods)?;
        gauge(
            "pending_pods",
            "Unbound pods that ask for a share",
            snapshot.n_pending,
        )?;
        gauge(
            "assumed_pods",
            "Pods that were chosen devices for and are not yet seen bound",
            snapshot.n_assumed,
        )?;
        let help = "Pods whose record says more than they ask for or were given, and does not count for that";
        gauge("contradicting_pods", help, snapshot.n_contradicting)?;
        gauge(
            "conservative_pods",
            "Pods whose devices are not known for sure",
            snapshot.n_conservative,
        )?;
        gauge(
            "hints",
            "Pods that room is kept for until they are bound",
            snapshot.n_hints,
        )?;
        gauge(
            "failing_nodes",
            "Nodes that rank behind all others because kubelet refused several pods there",
            snapshot.n_failing,
        )?;
        gauge(
            "plugin_away_nodes",
            "Nodes that no pod is sent to because their device plugin does not serve kubelet",
            snapshot.n_plugin_away,
        )?;
        per_kind(&mut encoder, &snapshot)?;
        let help = "Pods that kube-scheduler has asked about and that are not bound, by the reason of their last refusal";
        let mut family = encoder.encode_descriptor("unplaced_pods", help, None, MetricType::Gauge)?;
        for (reason, n_pods) in &unplaced.by_reason {
            let labels = ReasonLabels { reason };
            let gauge = ConstGauge::new(i64::try_from(*n_pods).unwrap_or(i64::MAX));
            gauge.encode(family.encode_family(&labels)?)?;
        }
        let help =
            "Time since the first filter of the unbound pod that has waited longest, 0 without such a pod";
        let oldest = encoder.encode_descriptor(
            "oldest_unplaced_pod",
            help,
            Some(&Unit::Seconds),
            MetricType::Gauge,
        )?;
        ConstGauge::new(unplaced.oldest.as_secs_f64()).encode(oldest)?;
        for (name, help, value) in NAMESPACE_GAUGES {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for (namespace, sum) in &snapshot.namespaces {
                let labels = NamespaceLabels {
                    namespace: namespace.clone(),
                };
                ConstGauge::new(value(sum)).encode(family.encode_family(&labels)?)?;
            }
        }
        for (name, help, value) in GPU_GAUGES {
            per_gpu(&mut encoder, &snapshot, name, help, value)?;
        }
        Ok(())
    }
}

/// A gauge of each namespace: name, help and value.
type NamespaceGauge = (&'static str, &'static str, fn(&NamespaceSnapshot) -> f64);

const NAMESPACE_GAUGES: [NamespaceGauge; 3] = [
    (
        "namespace_gpu_memory_allocated_bytes",
        "Memory of GPUs that the pods of a namespace hold",
        |sum| number(sum.bytes),
    ),
    (
        "namespace_gpu_core_allocated_ratio",
        "Computing power that the pods of a namespace hold; 1 is a whole GPU",
        |sum| number(sum.core) / 100.0,
    ),
    (
        "namespace_gpu_parts",
        "Parts of GPUs that the pods of a namespace hold",
        |sum| number(sum.n_parts),
    ),
];

/// A gauge of each GPU: name, help and value.
type GpuGauge = (&'static str, &'static str, fn(&GpuSnapshot) -> f64);

const GPU_GAUGES: [GpuGauge; 8] = [
    ("gpu_memory_total_bytes", "Memory of a GPU", |gpu| {
        number(gpu.total)
    }),
    (
        "gpu_memory_allocated_bytes",
        "Memory of a GPU that pods hold",
        |gpu| number(gpu.used),
    ),
    (
        "gpu_core_total_ratio",
        "Computing power of a GPU; 1 is a whole GPU",
        |gpu| f64::from(gpu.core.1) / 100.0,
    ),
    (
        "gpu_core_allocated_ratio",
        "Computing power of a GPU that pods hold; 1 is a whole GPU",
        |gpu| f64::from(gpu.core.0) / 100.0,
    ),
    (
        "gpu_sharers_capacity",
        "Containers that may request a share of a GPU as koordinator.sh/gpu.shared",
        |gpu| gpu.slots.1.into(),
    ),
    (
        "gpu_sharers_allocated",
        "Containers that have requested a share of a GPU as koordinator.sh/gpu.shared",
        |gpu| gpu.slots.0.into(),
    ),
    ("gpu_pods", "Pods that hold a part of a GPU", |gpu| {
        gpu.n_pods.into()
    }),
    ("gpu_healthy", "1 while a GPU takes new pods", |gpu| {
        f64::from(u8::from(gpu.healthy))
    }),
];

/// A number as Prometheus stores it.
#[expect(clippy::cast_precision_loss, reason = "exact up to 8 PiB of bytes")]
fn number(number: u64) -> f64 {
    number as f64
}

fn per_kind(encoder: &mut DescriptorEncoder<'_>, snapshot: &Snapshot) -> Result<(), fmt::Error> {
    let mut family = encoder.encode_descriptor(
        "synced",
        "Whether a kind of object has been seen whole",
        None,
        MetricType::Gauge,
    )?;
    for (kind, synced) in snapshot.synced {
        ConstGauge::new(i64::from(synced)).encode(family.encode_family(&KindLabels { kind })?)?;
    }
    Ok(())
}

fn per_gpu(
    encoder: &mut DescriptorEncoder<'_>,
    snapshot: &Snapshot,
    name: &str,
    help: &str,
    value: fn(&GpuSnapshot) -> f64,
) -> Result<(), fmt::Error> {
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for gpu in &snapshot.gpus {
        let labels = GpuLabels {
            node: gpu.node.clone(),
            minor: gpu.minor,
            uuid: gpu.uuid.clone(),
        };
        ConstGauge::new(value(gpu)).encode(family.encode_family(&labels)?)?;
    }
    Ok(())
}
