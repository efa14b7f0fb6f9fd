//! Runs cases taken from Koordinator's own tests: inputs and expected outputs as JSON, one file per subject.
//!
//! Turns every input into calls of this project's code and compares what comes out; knows no rule itself. Reads the
//! directory that the variable `GPUSHARE_CASES` names, or the copy in `proto/cases/koordinator`, prints the totals with the
//! reason of every skip, and fails if a case fails. The README beside the files describes their form.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "a case that is no case should end the run of it"
)]

#[path = "cases/accounting.rs"]
mod accounting;
#[path = "cases/allocate.rs"]
mod allocate;
#[path = "cases/annotations.rs"]
mod annotations;
#[path = "cases/case.rs"]
mod case;
#[path = "cases/numa.rs"]
mod numa;
#[path = "cases/partition.rs"]
mod partition;
#[path = "cases/report.rs"]
mod report;
#[path = "cases/requests.rs"]
mod requests;
#[path = "cases/scoring.rs"]
mod scoring;
#[path = "cases/webhooks.rs"]
mod webhooks;
#[path = "cases/world.rs"]
mod world;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use case::{Case, Outcome};
use report::Report;

/// The function that runs the cases of a file.
type Runner = fn(&Case<'_>) -> Outcome;

/// Files and what runs their cases.
const RUNNERS: &[(&str, Runner)] = &[
    ("allocate.json", allocate::run),
    ("annotations.json", annotations::run),
    ("desired_count.json", allocate::count),
    ("device_cache.json", accounting::run),
    ("device_plugin_adapter.json", annotations::adapt),
    ("request_validation.json", requests::run),
    ("scoring.json", scoring::run),
    ("webhook_mutate.json", webhooks::mutate),
    ("webhook_validate.json", webhooks::validate),
    ("partition.json", partition::run),
    ("topology_hints.json", numa::run),
];

/// Files that another crate's test runs.
const ELSEWHERE: &[&str] = &["node_resource.json", "node_agent.json"];

fn main() -> ExitCode {
    let given = std::env::var_os("GPUSHARE_CASES")
        .map_or_else(|| PathBuf::from("proto/cases/koordinator"), PathBuf::from);
    // cargo runs tests in the crate's folder, but a given directory is relative to the repository.
    let directory = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap()
        .join(given);
    let mut report = Report::default();
    match files(&directory) {
        Ok(files) => files.iter().for_each(|file| run(file, &mut report)),
        Err(error) => report.problem(format!("{}: {error}", directory.display())),
    }
    report.print(&directory);
    if report.is_good() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// The JSON files of a directory, by name.
fn files(directory: &Path) -> std::io::Result<Vec<PathBuf>> {
    let paths = std::fs::read_dir(directory)?.map(|entry| entry.map(|entry| entry.path()));
    let mut files: Vec<PathBuf> = paths.collect::<std::io::Result<_>>()?;
    files.retain(|file| file.extension().is_some_and(|extension| extension == "json"));
    files.sort();
    Ok(files)
}

fn run(path: &Path, report: &mut Report) {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let Some((_, runner)) = RUNNERS.iter().find(|(file, _)| *file == name) else {
        let by = if ELSEWHERE.contains(&&*name) {
            "cargo test -p device-plugin --test cases runs it"
        } else {
            "no test knows it"
        };
        report.note(format!("{name}: not understood here; {by}"));
        return;
    };
    match case::File::read(path) {
        Ok(file) => {
            for case in file.cases() {
                report.count(&name, &case, case.run(*runner));
            }
        }
        Err(error) => report.problem(format!("{name}: {error}")),
    }
}
