//! The figures of runs, side by side.

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
    /// Its seed.
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
    /// Those of them that see a device which is not recorded.
    pub sees_more: usize,
    /// Starts with the content of a CDI spec that was not written for them.
    pub stale: usize,
    /// Starts with another limit of the driver than the container's part.
    pub other_limits: usize,
    /// Pods killed for good by an answer of the plugin.
    pub killed: usize,
    /// Pods that the plugin evicted.
    pub evicted: usize,
    /// Pods that kubelet failed alone.
    pub died: usize,
    /// Starts refused for now, by reason.
    pub refusals: BTreeMap<String, usize>,
    /// The plugin's reactions to differences, by outcome.
    pub heals: BTreeMap<String, u64>,
    /// The duration of kubelet's admission of a pod, in milliseconds: median and worst.
    pub admission_ms: [f64; 2],
    /// By how much a start was delayed, in milliseconds: median and worst.
    pub delay_ms: [f64; 2],
    /// Violations of other invariants.
    pub violations: Vec<String>,
    /// Examples of wrong starts and of killed pods.
    pub quotes: Vec<String>,
    /// The duration of the run.
    pub seconds: f64,
}

impl Figures {
    /// The figures of a run.
    pub fn of(
        mode: PluginMode,
        seed: u64,
        tally: &Tally,
        heals: BTreeMap<String, u64>,
        took: Duration,
    ) -> Self {
        let killed = tally
            .killed
            .iter()
            .take(5)
            .map(|quote| format!("killed: {quote}"));
        let died = tally.died.iter().take(3).map(|quote| format!("died: {quote}"));
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
            killed: tally.killed.len(),
            evicted: tally.evicted.len(),
            died: tally.died.len(),
            refusals: tally.refusals.clone(),
            heals,
            admission_ms: median_and_worst(&tally.admissions),
            delay_ms: median_and_worst(&tally.delays),
            violations: tally.violations.clone(),
            quotes: tally
                .wrong_quotes
                .iter()
                .cloned()
                .chain(killed)
                .chain(died)
                .collect(),
            seconds: took.as_secs_f64(),
        }
    }

    /// True if the run kept the promises of its mode.
    pub fn is_ok(&self) -> bool {
        let is_right = self.wrong == 0
            && self.sees_more == 0
            && self.stale == 0
            && self.other_limits == 0
            && self.unknown == 0;
        self.violations.is_empty() && is_right && (self.mode == PluginMode::Envvar || self.killed == 0)
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

fn median_and_worst(durations: &[Duration]) -> [f64; 2] {
    let mut sorted = durations.to_vec();
    sorted.sort_unstable();
    let milliseconds =
        |duration: Option<&Duration>| duration.map_or(0.0, |duration| duration.as_secs_f64() * 1000.0);
    [
        milliseconds(sorted.get(sorted.len() / 2)),
        milliseconds(sorted.last()),
    ]
}

/// Outcomes that are heals, and their names in the table; refusals have a row of their own.
const HEALS: [(&str, &str); 3] = [
    ("exchanged", "healed: records of two pods exchanged"),
    ("rewritten", "healed: CDI spec rewritten"),
    ("adopted", "healed: record written for a pod without one"),
];

fn words(milliseconds: f64) -> String {
    if milliseconds < 1000.0 {
        format!("{milliseconds:.1} ms")
    } else {
        format!("{:.1} s", milliseconds / 1000.0)
    }
}

/// Runs side by side, as a table of Markdown.
pub fn render(runs: &[Figures]) -> String {
    let mut rows = Table::new();
    rows.load_style(presets::ASCII_MARKDOWN)
        .set_content_arrangement(ContentArrangement::Disabled);
    rows.set_header(
        std::iter::once("in 100,000 admissions (and in this run)".to_owned())
            .chain(runs.iter().map(|run| run.mode.to_string())),
    );
    let mut row = |name: &str, cell: &dyn Fn(&Figures) -> String| {
        rows.add_row(std::iter::once(name.to_owned()).chain(runs.iter().map(cell)));
    };
    row("containers started with a wrong device", &|run| {
        run.scaled(run.wrong)
    });
    row("containers that saw more than their record", &|run| {
        run.scaled(run.sees_more)
    });
    row("containers started with a stale spec", &|run| {
        run.scaled(run.stale)
    });
    row("containers with another limit than their part", &|run| {
        run.scaled(run.other_limits)
    });
    row("pods killed for good by us", &|run| {
        run.scaled(run.killed + run.evicted)
    });
    row("pods killed by kubelet alone", &|run| run.scaled(run.died));
    for (outcome, name) in HEALS {
        let count = |run: &Figures| {
            run.heals
                .get(outcome)
                .map_or(0, |count| usize::try_from(*count).unwrap_or(usize::MAX))
        };
        if runs.iter().any(|run| count(run) > 0) {
            row(name, &|run| run.scaled(count(run)));
        }
    }
    row("starts refused, and tried again by kubelet", &|run| {
        run.scaled(run.refusals.values().sum())
    });
    row("added to a start: median, worst", &|run| {
        run.delay_ms.map(words).join(", ")
    });
    row("admission of a pod: median, worst", &|run| {
        run.admission_ms.map(words).join(", ")
    });
    row("oversubscribed, or counted wrongly", &|run| {
        run.scaled(run.violations.len())
    });
    row("admissions, starts", &|run| {
        format!("{}, {}", run.admissions, run.starts)
    });
    rows.to_string()
}
