//! Output of the commands: progress while they work, tables and checks at the end.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use comfy_table::{ContentArrangement, Row, Table, presets};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

/// Progress on standard error; results on standard output, for people or as JSON.
#[derive(Clone, Debug)]
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
        let mut bar = None;
        if std::io::stderr().is_terminal() {
            let spinner = bar.insert(ProgressBar::new_spinner());
            if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed:>4} {msg}") {
                spinner.set_style(style);
            }
            spinner.enable_steady_tick(Duration::from_millis(100));
        }
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
            let verdict = if check.is_ok() { "ok    " } else { "FAILED" };
            self.result(&format!("{verdict}  {}", check.name));
            for problem in &check.problems {
                self.result(&format!("        {problem}"));
            }
        }
    }

    /// Time since the start.
    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
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
