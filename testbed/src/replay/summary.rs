//! What several runs that differ by their seed come to together, as a table and for machines.

use serde::Serialize;

use super::curve::Point;
use super::portion::real;
use super::run::Outcome;
use crate::console::table;

/// Percentages of offered demand at which allocation is told.
const ALLOCATED_AT: [usize; 2] = [100, 130];
/// Percentages of offered demand at which fragmentation is told.
const FRAGMENT_AT: [usize; 2] = [80, 100];

/// A policy under some conditions, over all seeds.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// Where the pods came from.
    pub list: String,
    /// Who chose.
    pub policy: String,
    /// Under which conditions.
    pub conditions: String,
    /// The averages over all runs, by percent of offered demand.
    pub curve: Vec<Spread>,
    /// The runs.
    pub runs: Vec<Outcome>,
}

/// Averages over runs at one percentage of offered demand.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// GPUs that have been asked for, in percent of all.
    pub offered: usize,
    /// GPUs that are allocated, in percent of all.
    pub allocated: f64,
    /// Standard deviation of that.
    pub allocated_sd: f64,
    /// Idle GPUs that typical pods could not use, in percent of all.
    pub fragment: f64,
    /// Standard deviation of that.
    pub fragment_sd: f64,
}

impl Summary {
    /// Sums up runs.
    pub fn of(list: &str, policy: String, conditions: &str, runs: Vec<Outcome>) -> Self {
        let most = runs.iter().flat_map(|run| &run.curve).map(|point| point.offered).max().unwrap_or(0);
        let averages = |offered: usize| {
            let points = || runs.iter().filter_map(move |run| run.curve.iter().find(|point| point.offered == offered));
            points().next()?;
            let of = |value: fn(&Point) -> f64| mean_and_deviation(&points().map(value).collect::<Vec<f64>>());
            let ((allocated, allocated_sd), (fragment, fragment_sd)) = (of(|point| point.allocated), of(|point| point.fragment));
            Some(Spread { offered, allocated, allocated_sd, fragment, fragment_sd })
        };
        let curve = (0..=most).filter_map(averages).collect();
        Self { list: list.to_owned(), policy, conditions: conditions.to_owned(), curve, runs }
    }

    /// The averages at a percentage of offered demand, if it was reached.
    pub fn at(&self, offered: usize) -> Option<&Spread> {
        self.curve.iter().find(|spread| spread.offered == offered)
    }

    fn mean(&self, value: fn(&Outcome) -> f64) -> f64 {
        mean_and_deviation(&self.runs.iter().map(value).collect::<Vec<f64>>()).0
    }
}

fn mean_and_deviation(values: &[f64]) -> (f64, f64) {
    let n = real(i64::try_from(values.len()).unwrap_or(0));
    let mean = values.iter().sum::<f64>() / n.max(1.0);
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (mean, (squares / (n - 1.0).max(1.0)).sqrt())
}

/// A line for each.
pub fn render(summaries: &[Summary]) -> String {
    let heads = ["PODS", "POLICY", "COND", "RUNS", "ALLOC@100", "ALLOC@130", "FRAG@80", "FRAG@100", "UNPLACED", "FILTER us", "RUN s"];
    let mut results = table(heads);
    for summary in summaries {
        let cell = |at: usize, value: fn(&Spread) -> (f64, f64)| {
            let text = |spread| {
                let (mean, deviation) = value(spread);
                format!("{mean:.2} ±{deviation:.2}")
            };
            summary.at(at).map_or_else(|| "-".to_owned(), text)
        };
        let allocated = ALLOCATED_AT.map(|at| cell(at, |spread| (spread.allocated, spread.allocated_sd)));
        let fragment = FRAGMENT_AT.map(|at| cell(at, |spread| (spread.fragment, spread.fragment_sd)));
        let unplaced = summary.mean(|run| real(i64::try_from(run.unplaced).unwrap_or(0)));
        let micros = summary.mean(|run| run.filter_micros);
        let named = [summary.list.clone(), summary.policy.clone(), summary.conditions.clone(), summary.runs.len().to_string()];
        let micros = if micros > 0.0 { format!("{micros:.0}") } else { "-".to_owned() };
        let rest = [format!("{unplaced:.0}"), micros, format!("{:.1}", summary.mean(|run| run.seconds))];
        results.add_row(named.into_iter().chain(allocated).chain(fragment).chain(rest));
    }
    results.to_string()
}
