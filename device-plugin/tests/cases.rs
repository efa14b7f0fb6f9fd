//! Koordinator's own cases of what a node reports: node resources, labels, where a GPU sits, why it is unhealthy.
//!
//! Reads the directory named by `GPUSHARE_CASES`, by default the copy in `proto/cases/koordinator`. Of the files there these are
//! this daemon's; the others are the scheduler's.

#![expect(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    reason = "a failed step fails the test"
)]

#[path = "cases/node_resource.rs"]
mod node_resource;
#[path = "cases/report.rs"]
mod report;

use std::env;
use std::fs;
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use serde_json::Value;

/// The outcome of a case.
enum Outcome {
    Passed,
    Skipped(&'static str),
    Failed(String),
}

impl Outcome {
    /// `Passed` if the found value is the expected one.
    fn of<T: PartialEq + std::fmt::Debug>(found: &T, expected: &T) -> Self {
        if found == expected {
            Self::Passed
        } else {
            Self::Failed(format!("expected {expected:?}, found {found:?}"))
        }
    }

    /// The first of the two that did not pass.
    fn and(self, other: impl FnOnce() -> Self) -> Self {
        if matches!(self, Self::Passed) {
            other()
        } else {
            self
        }
    }
}

/// The function that runs the cases of a file.
type Run = fn(&Value) -> Outcome;

const FILES: [(&str, Run); 2] = [
    ("node_resource.json", node_resource::run),
    ("node_agent.json", node_agent),
];

fn node_agent(case: &Value) -> Outcome {
    match case["kind"].as_str() {
        Some("pci_topology") => report::pci_topology(case),
        Some("report_device") => report::report_device(case),
        Some("inject_env") => Outcome::Skipped("this project injects UUIDs, not minors"),
        Some("pod_resources_proxy") => {
            Outcome::Skipped("Koordinator's proxy of the pod-resources API: kubelet's own lists the devices")
        }
        Some(kind) if kind.contains("partition") || kind.contains("link") => {
            Outcome::Skipped("partition tables from links, which other vendors' daemons report")
        }
        _ => Outcome::Failed("no such kind of case".to_owned()),
    }
}

fn directory() -> PathBuf {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let chosen =
        env::var_os("GPUSHARE_CASES").map_or_else(|| PathBuf::from("proto/cases/koordinator"), PathBuf::from);
    // A relative path is meant from where cargo was started, which is nearly always the repository.
    if chosen.is_dir() {
        chosen
    } else {
        repository.join(chosen)
    }
}

fn run(run: Run, case: &Value) -> Outcome {
    catch_unwind(AssertUnwindSafe(|| run(case)))
        .unwrap_or_else(|_| Outcome::Failed("the case is not of a form that is understood".to_owned()))
}

#[test]
fn koordinators_node_cases_pass() {
    let directory = directory();
    let (mut n_passed, mut n_failed, mut n_skipped) = (0, 0, 0);
    // Written past the harness, which shows only what failing tests print.
    let mut out = io::stdout().lock();
    for (file, run_case) in FILES {
        let Ok(text) = fs::read(directory.join(file)) else {
            writeln!(out, "{file}: not in {}", directory.display()).unwrap();
            continue;
        };
        let document: Value = serde_json::from_slice(&text).expect(file);
        for case in document["cases"].as_array().expect(file) {
            let id = case["id"].as_str().unwrap_or("(without id)");
            match run(run_case, case) {
                Outcome::Passed => n_passed += 1,
                Outcome::Skipped(reason) => {
                    n_skipped += 1;
                    writeln!(out, "skipped {file} {id}: {reason}").unwrap();
                }
                Outcome::Failed(problem) => {
                    n_failed += 1;
                    writeln!(out, "FAILED {file} {id}: {problem}").unwrap();
                }
            }
        }
    }
    writeln!(out, "{n_passed} passed, {n_failed} failed, {n_skipped} skipped").unwrap();
    drop(out);
    assert_eq!(n_failed, 0, "cases failed");
    assert!(n_passed + n_skipped > 0, "{} has no cases", directory.display());
}
