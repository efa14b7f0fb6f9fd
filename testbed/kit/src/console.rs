//! Output of the commands: progress while they work, tables and checks at the end.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use comfy_table::{ContentArrangement, Row, Table, presets};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use serde::Serialize;

/// Progress on standard error; results on standard output, for people or as JSON.
#[derive(Debug)]
pub struct Console {
    bar: Option<ProgressBar>,
    began: Instant,
    results_are_json: bool,
}

/// A check with its result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// The name of the check.
    pub name: String,
    /// Problems, a sentence each; empty if there are none.
    pub problems: Vec<String>,
}

impl Check {
    /// A check with its problems.
    pub fn new(name: impl Into<String>, problems: Vec<String>) -> Self {
        Self {
            name: name.into(),
            problems,
        }
    }

    /// A check that two values are equal.
    pub fn equal<T: PartialEq + std::fmt::Debug>(name: impl Into<String>, found: &T, wanted: &T) -> Self {
        let problems = if found == wanted {
            Vec::new()
        } else {
            vec![format!("found {found:?}, wanted {wanted:?}")]
        };
        Self::new(name, problems)
    }

    /// True if there are no problems.
    pub fn is_ok(&self) -> bool {
        self.problems.is_empty()
    }
}

impl Console {
    /// A console with a live line on a terminal and plain lines elsewhere.
    pub fn new(results_are_json: bool) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new_spinner();
            if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed:>4} {msg}") {
                bar.set_style(style);
            }
            bar.enable_steady_tick(Duration::from_millis(100));
            bar
        });
        Self {
            bar,
            began: Instant::now(),
            results_are_json,
        }
    }

    /// Shows the current step.
    pub fn step(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.set_message(text.to_owned()),
            None => note(&format!("{:6.1}s  {text}", self.began.elapsed().as_secs_f64())),
        }
    }

    /// Prints a line that stays, unlike a step on a terminal.
    pub fn say(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| note(text)),
            None => note(text),
        }
    }

    /// Ends the live line.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    /// Prints a result for people; nothing if results are for machines.
    pub fn result(&self, text: &str) {
        if !self.results_are_json {
            print(text);
        }
    }

    /// Prints a result for machines; nothing if results are for people.
    pub fn json(&self, value: &impl Serialize) {
        if self.results_are_json
            && let Ok(text) = serde_json::to_string_pretty(value)
        {
            print(&text);
        }
    }

    /// Ends the live line and shows results: for people a table with these column heads, for machines `values`.
    pub fn report<R: Into<Row>>(
        &self,
        heads: impl Into<Row>,
        rows: impl IntoIterator<Item = R>,
        values: &impl Serialize,
    ) {
        self.finish();
        let mut results = table(heads);
        results.add_rows(rows);
        self.result(&results.to_string());
        self.json(values);
    }

    /// Prints a line per check.
    pub fn checks(&self, checks: &[Check]) {
        for check in checks {
            self.result(&format!(
                "{}  {}",
                if check.is_ok() { "ok    " } else { "FAILED" },
                check.name
            ));
            for problem in &check.problems {
                self.result(&format!("        {problem}"));
            }
        }
    }

    /// Bars for work that is done in parallel, below the live line.
    pub fn bars(&self) -> Bars {
        let all = self.bar.as_ref().map(|bar| {
            let all = MultiProgress::new();
            all.add(bar.clone());
            all
        });
        Bars {
            all,
            began: self.began,
        }
    }

    /// Time since the start.
    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }
}

/// Bars on a terminal; elsewhere a line for each piece of work that ends.
#[derive(Debug)]
pub struct Bars {
    all: Option<MultiProgress>,
    began: Instant,
}

/// The progress of one piece of work.
#[derive(Debug)]
pub struct Bar {
    shown: Option<ProgressBar>,
    label: String,
    began: Instant,
}

impl Bars {
    /// A bar for work that begins.
    pub fn begin(&self, label: &str) -> Bar {
        let shown = self.all.as_ref().map(|all| {
            let bar = all.add(ProgressBar::new(0));
            if let Ok(style) = ProgressStyle::with_template("  {bar:30} {pos:>6}/{len} {eta:>4}  {msg}") {
                bar.set_style(style);
            }
            bar.set_message(label.to_owned());
            bar
        });
        Bar {
            shown,
            label: label.to_owned(),
            began: self.began,
        }
    }
}

impl Bar {
    /// Sets the number of steps of the work.
    pub fn set_length(&self, n_steps: usize) {
        if let Some(bar) = &self.shown {
            bar.set_length(u64::try_from(n_steps).unwrap_or(u64::MAX));
        }
    }

    /// Counts one step of the work as done.
    pub fn advance(&self) {
        if let Some(bar) = &self.shown {
            bar.inc(1);
        }
    }

    /// Ends the bar; elsewhere than on a terminal prints a line with the result.
    pub fn end(&self, result: &str) {
        match &self.shown {
            Some(bar) => bar.finish_and_clear(),
            None => note(&format!(
                "{:6.1}s  {}: {result}",
                self.began.elapsed().as_secs_f64(),
                self.label
            )),
        }
    }
}

/// A table with these column heads.
pub fn table(heads: impl Into<Row>) -> Table {
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Disabled)
        .set_header(heads);
    table
}

fn print(text: &str) {
    // The write fails if the reader has closed standard output, which is no error.
    let _ = writeln!(std::io::stdout(), "{text}");
}

fn note(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}
