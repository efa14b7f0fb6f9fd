//! Averages over runs that differ by their seed only, as a table and as JSON.

use std::collections::BTreeMap;

use serde::Serialize;

use super::fragment::{self, TypicalPod};
use super::join::JoinGain;
use super::occupancy::FreeRoom;
use super::portion::{float, floor, percent, portion, real};
use super::queue::Waits;
use super::run::RunResult;
use super::world::{ReplayInput, ReplayPod};
use kit::console::table;

const GIB: i64 = 1 << 30;
const ALLOCATED_AT: usize = 100;
const FRAGMENT_AT: [usize; 2] = [80, 100];
/// The policy column of the line that shows a cluster before the replay.
const AS_IT_IS: &str = "as it is";

#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    pub list: String,
    pub policy: String,
    pub conditions: String,
    pub curve: Vec<AllocationSpread>,
    pub runs: Vec<RunResult>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct AllocationSpread {
    pub offered: usize,
    pub allocated: f64,
    pub allocated_sd: f64,
    pub fragment: f64,
    pub fragment_sd: f64,
}

impl Summary {
    pub fn of(list: &str, policy: String, conditions: &str, runs: Vec<RunResult>) -> Self {
        let mut points: BTreeMap<usize, (Vec<f64>, Vec<f64>)> = BTreeMap::new();
        for point in runs.iter().flat_map(|run| &run.curve) {
            let (allocated, fragment) = points.entry(point.offered).or_default();
            allocated.push(point.allocated);
            fragment.push(point.fragment);
        }
        let mut curve = Vec::new();
        for (offered, (allocated, fragment)) in points {
            let (allocated, allocated_sd) = mean_and_deviation(&allocated);
            let (fragment, fragment_sd) = mean_and_deviation(&fragment);
            curve.push(AllocationSpread {
                offered,
                allocated,
                allocated_sd,
                fragment,
                fragment_sd,
            });
        }
        Self {
            list: list.to_owned(),
            policy,
            conditions: conditions.to_owned(),
            curve,
            runs,
        }
    }

    pub fn at(&self, offered: usize) -> Option<&AllocationSpread> {
        self.curve.iter().find(|spread| spread.offered == offered)
    }

    /// The line of a cluster before the replay, with all pods on the nodes that they are bound to today.
    pub fn today(list: &str, world: &ReplayInput, typical: &[TypicalPod]) -> Self {
        let occupancy = FreeRoom::today(world);
        let capacity = world.capacity();
        let mut fragments = 0.0;
        for (at, free) in occupancy.nodes().iter().enumerate() {
            fragments += fragment::fragment(world, at, free, typical);
        }
        let demand = world.present_demand() + world.pods.iter().map(ReplayPod::demand).sum::<i64>();
        let end = AllocationSpread {
            offered: usize::try_from(floor(percent(demand, capacity) + 0.5)).unwrap_or(0),
            allocated: percent(occupancy.allocated_milli(), capacity),
            allocated_sd: 0.0,
            fragment: 100.0 * fragments / real(capacity.max(1)),
            fragment_sd: 0.0,
        };
        Self {
            list: list.to_owned(),
            policy: AS_IT_IS.to_owned(),
            conditions: absent(),
            curve: vec![end],
            runs: Vec::new(),
        }
    }

    /// The last five cells of the line: means over the runs of unplaced pods, sample refusals, missed pods, filter and run times.
    fn work(&self) -> [String; 5] {
        if self.runs.is_empty() {
            return std::array::from_fn(|_| absent());
        }
        let micros = self.mean(|run| run.filter_micros);
        [
            format!("{:.0}", self.mean(|run| float(run.unplaced))),
            format!("{:.0}", self.mean(|run| float(run.sample_refusals))),
            format!("{:.1}", self.mean(|run| float(run.missed))),
            if micros > 0.0 {
                format!("{micros:.0}")
            } else {
                absent()
            },
            format!("{:.1}", self.mean(|run| run.seconds)),
        ]
    }

    fn mean(&self, value: fn(&RunResult) -> f64) -> f64 {
        mean_and_deviation(&self.runs.iter().map(value).collect::<Vec<f64>>()).0
    }
}

/// The mean of some values, and their standard deviation as that of a sample.
fn mean_and_deviation(values: &[f64]) -> (f64, f64) {
    let n = float(values.len());
    let mean = values.iter().sum::<f64>() / n.max(1.0);
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (mean, (squares / (n - 1.0).max(1.0)).sqrt())
}

/// A table with a line for each summary: allocation and fragmentation at the end, and on the way there.
pub fn render(summaries: &[Summary]) -> String {
    const HEADS: &str = "PODS,POLICY,COND,RUNS,OFFERED,ALLOC,FRAG,ALLOC@100,FRAG@80,FRAG@100,UNPLACED,BY SAMPLE,MISSED,\
        FILTER us,RUN s";
    let mut results = table(HEADS.split(','));
    for summary in summaries {
        let end = summary.curve.last();
        let mut cells = vec![
            summary.list.clone(),
            summary.policy.clone(),
            summary.conditions.clone(),
            summary.runs.len().to_string(),
            end.map_or_else(absent, |spread| spread.offered.to_string()),
            end.map_or_else(absent, allocated),
            end.map_or_else(absent, fragment),
            summary.at(ALLOCATED_AT).map_or_else(absent, allocated),
        ];
        cells.extend(FRAGMENT_AT.map(|at| summary.at(at).map_or_else(absent, fragment)));
        cells.extend(summary.work());
        results.add_row(cells);
    }
    results.to_string()
}

/// A table with a line for each summary of runs with a queue: means over the runs.
pub fn render_waits(summaries: &[Summary]) -> String {
    const HEADS: &str = "PODS,POLICY,COND,HIGH WAIT h P50,P90,MEAN,OTHERS WAIT h P50,P90,MEAN,EVICTED/1000 PLACED,LOST %,LEFT";
    let mut results = table(HEADS.split(','));
    for summary in summaries {
        let waits: Vec<&Waits> = summary.runs.iter().filter_map(|run| run.waits.as_ref()).collect();
        let mut sums = [0.0; 9];
        for waits in &waits {
            let evicted = 1000.0 * (float(waits.evicted) / float(waits.placed.max(1)));
            let others = [evicted, waits.lost_percent, float(waits.left)];
            let values = waits.high_hours.iter().chain(&waits.other_hours).chain(&others);
            for (sum, value) in sums.iter_mut().zip(values) {
                *sum += value;
            }
        }
        let mut cells = vec![
            summary.list.clone(),
            summary.policy.clone(),
            summary.conditions.clone(),
        ];
        cells.extend(sums.map(|sum| format!("{:.2}", sum / float(waits.len()))));
        results.add_row(cells);
    }
    results.to_string()
}

/// A table with a line for each summary and each number of moves: means over the runs that became nearly full.
pub fn render_joins(summaries: &[Summary], most_moves: &[usize]) -> String {
    let mut results = table("PODS,POLICY,COND,MOVES AT MOST,PLANS,RESTARTS,GiB,GiB/RESTART".split(','));
    for summary in summaries {
        for most in most_moves {
            let runs = summary.runs.iter().flat_map(|run| &run.joins);
            let gains: Vec<&JoinGain> = runs.filter(|gain| gain.most == *most).collect();
            let n = i64::try_from(gains.len()).unwrap_or(0);
            let restarts: i64 = gains.iter().map(|gain| i64::from(gain.restarts)).sum();
            let bytes: u64 = gains.iter().map(|gain| gain.bytes).sum();
            let gib = portion(i64::try_from(bytes).unwrap_or(i64::MAX), GIB);
            results.add_row([
                summary.list.clone(),
                summary.policy.clone(),
                summary.conditions.clone(),
                most.to_string(),
                n.to_string(),
                format!("{:.1}", portion(restarts, n)),
                format!("{:.1}", gib / real(n.max(1))),
                format!("{:.2}", gib / real(restarts.max(1))),
            ]);
        }
    }
    results.to_string()
}

fn absent() -> String {
    "-".to_owned()
}

fn allocated(spread: &AllocationSpread) -> String {
    format!("{:.2} ±{:.2}", spread.allocated, spread.allocated_sd)
}

fn fragment(spread: &AllocationSpread) -> String {
    format!("{:.2} ±{:.2}", spread.fragment, spread.fragment_sd)
}
