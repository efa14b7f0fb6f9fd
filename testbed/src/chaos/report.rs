//! The figures of runs, and the table that shows runs side by side.

use std::collections::BTreeMap;
use std::time::Duration;

use comfy_table::{ContentArrangement, Table, presets};
use serde::Serialize;

use super::PluginMode;
use super::recorder::Tally;

/// The figures of one run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figures {
    /// The plugin's mode.
    pub mode: PluginMode,
    /// The seed of the schedule.
    pub seed: u64,
    /// Steps that were taken.
    pub steps: usize,
    /// Pods that kubelet has admitted or refused.
    pub admissions: usize,
    /// Starts of containers.
    pub starts: usize,
    /// Starts of containers whose record was not seen.
    pub unknown: usize,
    /// Starts with other devices than recorded.
    pub wrong: usize,
    /// Wrong starts that see a device which is not recorded.
    pub sees_more: usize,
    /// Starts with the content of a CDI spec that was not written for them.
    pub stale: usize,
    /// Starts with a driver limit other than the container's share.
    pub other_limits: usize,
    /// Pods that kubelet failed for good because the plugin answered with an error.
    pub killed: usize,
    /// Pods that the plugin evicted.
    pub evicted: usize,
    /// Pods that kubelet failed without an error from the plugin.
    pub died: usize,
    /// Starts that were refused and tried again, by reason.
    pub refusals: BTreeMap<String, usize>,
    /// The plugin's repairs of records and CDI specs, by outcome.
    pub heals: BTreeMap<String, u64>,
    /// The duration of kubelet's admission of a pod, in milliseconds: median and worst.
    pub admission_ms: [f64; 2],
    /// The delay of a start by the plugin, in milliseconds: median and worst.
    pub delay_ms: [f64; 2],
    /// Violations of other invariants.
    pub violations: Vec<String>,
    /// Examples of wrong starts, and of pods that kubelet failed.
    pub quotes: Vec<String>,
    /// The duration of the run.
    pub seconds: f64,
}

impl Figures {
    /// The figures of a run.
    pub(super) fn of(
        mode: PluginMode,
        seed: u64,
        tally: &Tally,
        heals: BTreeMap<String, u64>,
        took: Duration,
    ) -> Self {
        let mut quotes = tally.wrong_quotes.clone();
        for quote in tally.failed_by_plugin.iter().take(5) {
            quotes.push(format!("killed: {quote}"));
        }
        for quote in tally.failed_by_kubelet.iter().take(3) {
            quotes.push(format!("died: {quote}"));
        }
        Self {
            mode,
            seed,
            steps: tally.step,
            admissions: tally.admitted.len(),
            starts: tally.n_starts,
            unknown: tally.n_unknown,
            wrong: tally.wrong.len(),
            sees_more: tally.sees_more.len(),
            stale: tally.stale.len(),
            other_limits: tally.other_limits.len(),
            killed: tally.failed_by_plugin.len(),
            evicted: tally.evicted.len(),
            died: tally.failed_by_kubelet.len(),
            refusals: tally.refusals.clone(),
            heals,
            admission_ms: median_and_worst(&tally.admissions),
            delay_ms: median_and_worst(&tally.delays),
            violations: tally.violations.clone(),
            quotes,
            seconds: took.as_secs_f64(),
        }
    }

    /// Returns true if no start and no amount was wrong. With `envvar` a refused Allocate call may kill a pod.
    pub(super) fn is_ok(&self) -> bool {
        let faults = [
            self.wrong,
            self.sees_more,
            self.stale,
            self.other_limits,
            self.unknown,
        ];
        let may_kill = self.mode == PluginMode::Envvar;
        self.violations.is_empty() && faults == [0; 5] && (may_kill || self.killed == 0)
    }

    /// The number of the plugin's repairs that had this outcome.
    fn n_heals(&self, outcome: &str) -> usize {
        let count = self.heals.get(outcome).copied().unwrap_or(0);
        usize::try_from(count).unwrap_or(usize::MAX)
    }

    /// The cells of the run's column in the table; `heals` are the outcomes that have a row.
    fn cells(&self, heals: &[(&str, &str)]) -> Vec<String> {
        let mut cells = vec![
            self.mode.to_string(),
            self.scaled(self.wrong),
            self.scaled(self.sees_more),
            self.scaled(self.stale),
            self.scaled(self.other_limits),
            self.scaled(self.killed + self.evicted),
            self.scaled(self.died),
        ];
        for (outcome, _) in heals {
            cells.push(self.scaled(self.n_heals(outcome)));
        }
        cells.extend([
            self.scaled(self.refusals.values().sum()),
            self.delay_ms.map(milliseconds_in_words).join(", "),
            self.admission_ms.map(milliseconds_in_words).join(", "),
            self.scaled(self.violations.len()),
            format!("{}, {}", self.admissions, self.starts),
        ]);
        cells
    }

    /// A count scaled to 100,000 admissions, and the count itself.
    fn scaled(&self, count: usize) -> String {
        let scaled = count.saturating_mul(100_000) / self.admissions.max(1);
        if count == 0 {
            "0".to_owned()
        } else {
            format!("{scaled} ({count})")
        }
    }
}

/// The median and the longest of some durations, in milliseconds.
fn median_and_worst(durations: &[Duration]) -> [f64; 2] {
    let mut sorted = durations.to_vec();
    sorted.sort_unstable();
    let picked = [sorted.get(sorted.len() / 2), sorted.last()];
    picked.map(|duration| duration.map_or(0.0, Duration::as_secs_f64) * 1000.0)
}

/// Outcomes of the metric by which the plugin counts its repairs, and their names in the table.
const HEALS: [(&str, &str); 2] = [
    ("exchanged", "healed: records of two pods exchanged"),
    ("adopted", "healed: record written for a pod without one"),
];

/// A time in milliseconds, or in seconds from one second on.
fn milliseconds_in_words(milliseconds: f64) -> String {
    if milliseconds < 1000.0 {
        format!("{milliseconds:.1} ms")
    } else {
        format!("{:.1} s", milliseconds / 1000.0)
    }
}

/// The names of the rows above those of [`HEALS`]; the first is the head of the table.
const ROWS: [&str; 7] = [
    "in 100,000 admissions (and in this run)",
    "containers started with a wrong device",
    "containers that saw more than their record",
    "containers started with a stale spec",
    "containers with another limit than their part",
    "pods killed for good by us",
    "pods killed by kubelet alone",
];
/// The names of the rows below those of [`HEALS`].
const LAST_ROWS: [&str; 5] = [
    "starts refused, and tried again by kubelet",
    "added to a start: median, worst",
    "admission of a pod: median, worst",
    "oversubscribed, or counted wrongly",
    "admissions, starts",
];

/// Runs side by side, as a table of Markdown.
pub(super) fn render(runs: &[Figures]) -> String {
    let mut heals = HEALS.to_vec();
    heals.retain(|(outcome, _)| runs.iter().any(|run| run.n_heals(outcome) > 0));
    let heal_rows = heals.iter().map(|(_, name)| *name);
    let names = ROWS.into_iter().chain(heal_rows).chain(LAST_ROWS);
    let mut rows: Vec<Vec<String>> = names.map(|name| vec![name.to_owned()]).collect();
    for run in runs {
        for (row, cell) in rows.iter_mut().zip(run.cells(&heals)) {
            row.push(cell);
        }
    }
    let mut table = Table::new();
    table
        .load_style(presets::ASCII_MARKDOWN)
        .set_content_arrangement(ContentArrangement::Disabled);
    let mut rows = rows.into_iter();
    table.set_header(rows.next().unwrap_or_default()).add_rows(rows);
    table.to_string()
}
