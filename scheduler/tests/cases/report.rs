//! Totals, and what is said about them.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use super::case::{Case, Outcome};

/// What has become of all cases.
#[derive(Default)]
pub(crate) struct Report {
    n_passed: usize,
    failures: Vec<String>,
    skips: BTreeMap<String, Vec<String>>,
    notes: Vec<String>,
    problems: Vec<String>,
}

impl Report {
    /// Counts a case.
    pub(crate) fn count(&mut self, file: &str, case: &Case<'_>, outcome: Outcome) {
        match outcome {
            Outcome::Passed => self.n_passed += 1,
            Outcome::Failed(how) => self.failures.push(format!("{file} {} ({}): {how}", case.id, case.name)),
            Outcome::Skipped(why) => self.skips.entry(why).or_default().push(format!("{file} {}", case.id)),
        }
    }

    /// Something to be told that is no failure.
    pub(crate) fn note(&mut self, note: String) {
        self.notes.push(note);
    }

    /// Something that makes the run a failure.
    pub(crate) fn problem(&mut self, problem: String) {
        self.problems.push(problem);
    }

    /// Whether nothing failed and something was run.
    pub(crate) fn is_good(&self) -> bool {
        self.failures.is_empty() && self.problems.is_empty() && self.n_passed > 0
    }

    /// Prints everything to standard output.
    pub(crate) fn print(&self, directory: &Path) {
        let mut text = format!("cases of {}\n", directory.display());
        for note in &self.notes {
            text += &format!("  {note}\n");
        }
        for (why, cases) in &self.skips {
            text += &format!("  skipped {}: {why}\n", cases.len());
            for case in cases {
                text += &format!("    {case}\n");
            }
        }
        for failure in &self.failures {
            text += &format!("  FAILED {failure}\n");
        }
        for problem in &self.problems {
            text += &format!("  PROBLEM {problem}\n");
        }
        if self.n_passed == 0 && self.failures.is_empty() && self.problems.is_empty() {
            text += "  PROBLEM no case was run\n";
        }
        let n_skipped: usize = self.skips.values().map(Vec::len).sum();
        text += &format!("{} passed, {} failed, {n_skipped} skipped\n", self.n_passed, self.failures.len());
        // Nothing can be done for a reader who has gone.
        let _ = std::io::stdout().write_all(text.as_bytes());
    }
}
