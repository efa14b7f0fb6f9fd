//! What the commands print: progress while they work, tables and checks at the end.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use comfy_table::{ContentArrangement, Table, presets};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

/// Progress and results on standard output, or progress on standard error if the results are for machines.
#[derive(Debug)]
pub struct Console {
    bar: Option<ProgressBar>,
    began: Instant,
    results_are_json: bool,
}

/// Something that was checked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What was checked.
    pub name: String,
    /// What is wrong, a sentence each; empty if all is well.
    pub problems: Vec<String>,
}

impl Check {
    /// A check with what it found.
    pub fn new(name: impl Into<String>, problems: Vec<String>) -> Self {
        Self { name: name.into(), problems }
    }

    /// A check of something that is, or is not, as it should be.
    pub fn equal<T: PartialEq + std::fmt::Debug>(name: impl Into<String>, found: &T, wanted: &T) -> Self {
        let problems = if found == wanted { Vec::new() } else { vec![format!("found {found:?}, wanted {wanted:?}")] };
        Self::new(name, problems)
    }

    /// Whether nothing is wrong.
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
        Self { bar, began: Instant::now(), results_are_json }
    }

    /// Says what is being done.
    pub fn step(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.set_message(text.to_owned()),
            None => note(&format!("{:6.1}s  {text}", self.began.elapsed().as_secs_f64())),
        }
    }

    /// Says something that stays.
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

    /// Prints a line per check.
    pub fn checks(&self, checks: &[Check]) {
        for check in checks {
            self.result(&format!("{}  {}", if check.is_ok() { "ok    " } else { "FAILED" }, check.name));
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
pub fn table<const N: usize>(heads: [&str; N]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled).set_header(heads);
    table
}

fn print(text: &str) {
    // Whoever closed standard output does not want to hear more.
    let _ = writeln!(std::io::stdout(), "{text}");
}

fn note(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}
