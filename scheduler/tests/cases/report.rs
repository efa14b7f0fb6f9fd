//! Totals, and what is said about them.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Write;
use std::path::Path;

use super::case::{Case, Outcome};

/// The outcomes of all cases.
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
            Outcome::Failed(how) => self
                .failures
                .push(format!("{file} {} ({}): {how}", case.id, case.name)),
            Outcome::Skipped(why) => self
                .skips
                .entry(why)
                .or_default()
                .push(format!("{file} {} ({})", case.id, case.name)),
        }
    }

    /// A remark that is no failure.
    pub(crate) fn note(&mut self, note: String) {
        self.notes.push(note);
    }

    /// Something that makes the run a failure.
    pub(crate) fn problem(&mut self, problem: String) {
        self.problems.push(problem);
    }

    /// True if some case ran and none failed.
    pub(crate) fn is_good(&self) -> bool {
        self.failures.is_empty() && self.problems.is_empty() && self.n_passed > 0
    }

    /// Prints everything to standard output.
    pub(crate) fn print(&self, directory: &Path) {
        // Nothing can be done for a reader who has gone.
        let _ = write!(std::io::stdout(), "cases of {}\n{self}", directory.display());
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.notes.iter().try_for_each(|note| writeln!(f, "  {note}"))?;
        for (why, cases) in &self.skips {
            writeln!(f, "  skipped {}: {why}", cases.len())?;
            cases.iter().try_for_each(|case| writeln!(f, "    {case}"))?;
        }
        self.failures
            .iter()
            .try_for_each(|failure| writeln!(f, "  FAILED {failure}"))?;
        self.problems
            .iter()
            .try_for_each(|problem| writeln!(f, "  PROBLEM {problem}"))?;
        if self.n_passed == 0 {
            writeln!(f, "  PROBLEM no case has passed")?;
        }
        let n_skipped: usize = self.skips.values().map(Vec::len).sum();
        writeln!(
            f,
            "{} passed, {} failed, {n_skipped} skipped",
            self.n_passed,
            self.failures.len()
        )
    }
}
