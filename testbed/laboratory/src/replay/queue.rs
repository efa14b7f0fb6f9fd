//! Pods that wait until they fit, those of high priority first, and the evictions for these.
//!
//! Evictions take no time, and an evicted pod begins its run again. kube-scheduler's own evictions are modelled by the search of
//! `--make-room`, so that only GPU pods are evicted, on the nodes that lack CPU or GPUs by the sums of a node.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use clap::ValueEnum;
use kit::dice::dice;
use rand::RngExt;
use serde::Serialize;

use super::portion::{percent, portion, real};

const HIGH: i32 = 1000;
const ONE_OF: u32 = 10;
const SECONDS_PER_HOUR: i64 = 3600;

/// The evictions for a high pod that fits nowhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Evictions {
    /// None: it waits until others end.
    None,
    /// Those of the scheduler's `--make-room evict`, on nodes with enough free CPU and GPUs in total, where kube-scheduler evicts
    /// nothing.
    MakeRoom,
    /// kube-scheduler's, on nodes whose free CPU or GPUs are too few in total.
    KubeScheduler,
    /// Those of kube-scheduler, and where they do not help those of the scheduler.
    Both,
}

/// The pods of a run, which methods name by the index of their arrival (`at`), and those among them that wait.
#[derive(Debug)]
pub struct Queue {
    pub evictions: Evictions,
    /// Nodes with new room that waiting pods have not been compared with.
    pub freed: Vec<usize>,
    pods: Vec<QueuedPod>,
    waiting: BTreeSet<(Reverse<i32>, usize)>,
    n_evicted: usize,
    /// GPU thousandths times seconds that evicted pods had run for.
    lost: i64,
}

#[derive(Clone, Copy, Debug)]
struct QueuedPod {
    priority: i32,
    demand: i64,
    /// The time since which it waits, or runs.
    since: i64,
    /// The seconds that it has waited before.
    waited: i64,
}

/// Waiting times and evictions of one run, of the pods that ask for GPUs.
#[derive(Clone, Debug, Serialize)]
pub struct Waits {
    /// Hours that high pods waited: median, 90th percentile, mean.
    pub high_hours: [f64; 3],
    /// Hours that the others waited, after evictions too.
    pub other_hours: [f64; 3],
    pub placed: usize,
    pub left: usize,
    pub evicted: usize,
    /// GPU hours that evicted pods had run for, in percent of the GPU hours that all pods ask for.
    pub lost_percent: f64,
}

impl Queue {
    pub fn new(evictions: Evictions) -> Self {
        Self {
            evictions,
            freed: Vec::new(),
            pods: Vec::new(),
            waiting: BTreeSet::new(),
            n_evicted: 0,
            lost: 0,
        }
    }

    /// Adds a pod that arrives and waits. Its name and the seed decide whether it is high.
    pub fn add(&mut self, seed: u64, name: &str, demand: i64, now: i64) {
        let is_high = dice(seed, &["priority", name]).random_range(0..ONE_OF) == 0;
        let priority = if is_high { HIGH } else { 0 };
        self.waiting.insert((Reverse(priority), self.pods.len()));
        self.pods.push(QueuedPod {
            priority,
            demand,
            since: now,
            waited: 0,
        });
    }

    pub fn priority(&self, at: usize) -> i32 {
        self.pods.get(at).map_or(0, |pod| pod.priority)
    }

    pub fn may_preempt(&self, at: usize) -> bool {
        self.evictions != Evictions::None && self.priority(at) == HIGH
    }

    /// The waiting pods: high ones first, then by arrival.
    pub fn waiting(&self) -> Vec<usize> {
        self.waiting.iter().map(|(_, at)| *at).collect()
    }

    pub fn start(&mut self, at: usize, now: i64) {
        if let Some(pod) = self.pods.get_mut(at) {
            self.waiting.remove(&(Reverse(pod.priority), at));
            pod.waited += now - pod.since;
            pod.since = now;
        }
    }

    /// Notes that a pod is evicted from this node, and waits again.
    pub fn evict(&mut self, at: usize, node: usize, now: i64) {
        if let Some(pod) = self.pods.get_mut(at) {
            self.waiting.insert((Reverse(pod.priority), at));
            self.lost += (now - pod.since) * pod.demand;
            self.n_evicted += 1;
            pod.since = now;
        }
        self.freed.push(node);
    }

    /// The waiting times so far. `asked` is the GPU thousandths times seconds that all pods ask for.
    pub fn waits(&self, asked: i64) -> Waits {
        let (mut high, mut others, mut left) = (Vec::new(), Vec::new(), 0);
        for (at, pod) in self.pods.iter().enumerate().filter(|(_, pod)| pod.demand > 0) {
            if self.waiting.contains(&(Reverse(pod.priority), at)) {
                left += 1;
            } else if pod.priority == HIGH {
                high.push(pod.waited);
            } else {
                others.push(pod.waited);
            }
        }
        Waits {
            placed: high.len() + others.len(),
            high_hours: hours(high),
            other_hours: hours(others),
            left,
            evicted: self.n_evicted,
            lost_percent: percent(self.lost, asked),
        }
    }
}

/// The median, the 90th percentile and the mean of some seconds, in hours.
fn hours(mut seconds: Vec<i64>) -> [f64; 3] {
    seconds.sort_unstable();
    let n = seconds.len();
    let at = |percent: usize| seconds.get(n * percent / 100).copied().unwrap_or(0);
    let mean = portion(seconds.iter().sum(), i64::try_from(n).unwrap_or(0));
    [real(at(50)), real(at(90)), mean].map(|seconds| seconds / real(SECONDS_PER_HOUR))
}
