//! The figures of runs, side by side.

use std::collections::BTreeMap;
use std::time::Duration;

use comfy_table::Table;
use serde::Serialize;

use super::Mode;
use super::book::Pages;
use crate::console::table;

/// The figures of one run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figures {
    /// How it ran.
    pub mode: Mode,
    /// Its seed.
    pub seed: u64,
    /// Steps that were taken.
    pub steps: usize,
    /// Pods that kubelet has admitted or refused.
    pub admissions: usize,
    /// Starts of containers.
    pub starts: usize,
    /// Starts with other devices than recorded.
    pub wrong: usize,
    /// Pods killed for good by an answer of the plugin.
    pub killed: usize,
    /// Pods that kubelet failed alone.
    pub died: usize,
    /// Starts refused for now, by reason.
    pub refusals: BTreeMap<String, usize>,
    /// What the plugin did about differences, by outcome.
    pub heals: BTreeMap<String, u64>,
    /// Median delay of a start, in milliseconds.
    pub median_ms: f64,
    /// Worst delay of a start, in milliseconds.
    pub worst_ms: f64,
    /// Violations of other invariants.
    pub violations: Vec<String>,
    /// Examples of wrong starts and of killed pods.
    pub quotes: Vec<String>,
    /// How long it took.
    pub seconds: f64,
}

impl Figures {
    /// The figures of what stands in a book.
    pub fn of(mode: Mode, seed: u64, pages: &Pages, heals: BTreeMap<String, u64>, took: Duration) -> Self {
        let mut delays = pages.delays.clone();
        delays.sort();
        let milliseconds = |delay: Option<&Duration>| delay.map_or(0.0, |delay| delay.as_secs_f64() * 1000.0);
        let killed = pages.killed.iter().take(5).map(|quote| format!("killed: {quote}"));
        let died = pages.died.iter().take(3).map(|quote| format!("died: {quote}"));
        Self {
            mode,
            seed,
            steps: pages.step,
            admissions: pages.admitted.len(),
            starts: pages.n_starts,
            wrong: pages.wrong.len(),
            killed: pages.killed.len(),
            died: pages.died.len(),
            refusals: pages.refusals.clone(),
            heals,
            median_ms: milliseconds(delays.get(delays.len() / 2)),
            worst_ms: milliseconds(delays.last()),
            violations: pages.violations.clone(),
            quotes: pages.wrong_quotes.iter().cloned().chain(killed).chain(died).collect(),
            seconds: took.as_secs_f64(),
        }
    }

    /// Whether the run kept what its mode promises.
    pub fn is_ok(&self) -> bool {
        self.violations.is_empty() && (self.mode == Mode::Timestamp || self.wrong == 0) && (self.mode != Mode::Cdi || self.killed == 0)
    }

    /// A count, with what it would be in 100,000 admissions.
    fn scaled(&self, count: usize) -> String {
        let per_admission = |count: usize| count.saturating_mul(100_000) / self.admissions.max(1);
        if count == 0 { "0".to_owned() } else { format!("{count} ({} in 100,000)", per_admission(count)) }
    }
}

/// Runs side by side.
pub fn render(runs: &[Figures]) -> String {
    let mut rows = Table::new();
    rows.clone_from(&table([""]));
    rows.set_header(std::iter::once(String::new()).chain(runs.iter().map(|run| run.mode.to_string())));
    let mut row = |name: &str, cell: &dyn Fn(&Figures) -> String| {
        rows.add_row(std::iter::once(name.to_owned()).chain(runs.iter().map(cell)));
    };
    row("pods admitted", &|run| run.admissions.to_string());
    row("containers started", &|run| run.starts.to_string());
    row("started with a wrong device", &|run| run.scaled(run.wrong));
    row("pods killed for good by our answer", &|run| run.scaled(run.killed));
    row("pods killed by kubelet alone", &|run| run.scaled(run.died));
    row("starts refused, tried again", &|run| run.scaled(run.refusals.values().sum()));
    let outcomes: std::collections::BTreeSet<&String> = runs.iter().flat_map(|run| run.heals.keys()).collect();
    for outcome in outcomes {
        row(&format!("  differences: {}", outcome.to_lowercase()), &|run| run.heals.get(outcome).copied().unwrap_or(0).to_string());
    }
    row("delay of a start, median", &|run| format!("{:.1} ms", run.median_ms));
    row("delay of a start, worst", &|run| format!("{:.0} ms", run.worst_ms));
    row("devices oversubscribed, and other violations", &|run| run.violations.len().to_string());
    row("seconds", &|run| format!("{:.1}", run.seconds));
    rows.to_string()
}
