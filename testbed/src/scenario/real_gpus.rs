//! Scenarios on a node with a real GPU: `testbed e2e --real-gpus`. Each ends with a text and figures, for a table like that of
//! `docs/nvidia.md`.
//!
//! Their pods run `gpu-probe` (`testbed/gpu-probe`), which shows and uses a container's GPU by CUDA. The scenarios read what the
//! API server shows, the plugin's log and metrics included; pods read the node's CDI specs and the kernel's log.
//! Tests run them on the testbed's own cluster up to CUDA, for which a stand-in answers there, and then no scenario
//! counts as passed.

use std::time::Instant;

use anyhow::{Result, ensure};
use comfy_table::presets;
use futures::future::BoxFuture;
use serde::Serialize;
use serde_json::{Map, Value};

use super::World;
use super::needs::Needs;
use kit::console::{Console, table};
use kit::invariants;
use kit::parts::Commands;

pub use target::NodeVersions;

use target::TargetGpu;
use trial::{Finding, Trial};

mod answers;
mod computing;
mod containers;
mod fault;
mod memory;
mod plugin;
mod runtime_classes;
mod target;
mod trial;
mod usage;

/// The function of a scenario.
type Body = for<'a> fn(&'a mut Trial) -> BoxFuture<'a, Result<Finding>>;

/// The scenarios in their order: the one that compares with the state before all others is the last.
const LISTS: [&[GpuScenario]; 7] = [
    containers::SCENARIOS,
    runtime_classes::SCENARIOS,
    usage::SCENARIOS,
    fault::SCENARIOS,
    computing::SCENARIOS,
    memory::OVERRUN,
    memory::LEFT,
];

/// A scenario on a real GPU.
#[derive(Clone, Copy)]
pub struct GpuScenario {
    /// Name for `--scenario`.
    pub name: &'static str,
    /// The first column of the table: the pods, or the event, of the scenario.
    pub about: &'static str,
    /// Its needs beside the API of its cluster.
    pub needs: Needs,
    body: Body,
}

impl std::fmt::Debug for GpuScenario {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// Every scenario on real GPUs, in the order in which they run.
pub fn all() -> Vec<GpuScenario> {
    LISTS.concat()
}

/// The outcome of a scenario.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum GpuOutcome {
    /// All that the scenario promises was seen on a GPU.
    Passed,
    /// A check has failed.
    Failed,
    /// It could not run, or not up to its end; it does not count as passed.
    NotRun,
}

/// The result of a scenario.
#[derive(Clone, Debug, Serialize)]
pub struct GpuResult {
    /// Its name.
    pub scenario: &'static str,
    /// [`GpuScenario::about`].
    pub tried: &'static str,
    /// Passed, failed, or not run.
    pub outcome: GpuOutcome,
    /// The observation, or the reason that it failed or did not run.
    pub result: String,
    /// The measured values, by name.
    pub figures: Map<String, Value>,
    /// The duration of the scenario.
    pub seconds: f64,
}

/// The results of a run.
#[derive(Clone, Debug, Serialize)]
pub struct GpuReport {
    /// The versions of the node that the scenarios ran on; `None` if no GPU was found for them.
    pub versions: Option<NodeVersions>,
    /// One result for each scenario.
    pub results: Vec<GpuResult>,
}

impl GpuReport {
    /// True if no scenario has failed and at least one has passed.
    pub fn is_ok(&self) -> bool {
        let has = |outcome| self.results.iter().any(|result| result.outcome == outcome);
        has(GpuOutcome::Passed) && !has(GpuOutcome::Failed)
    }

    /// The versions and a table for people, in Markdown.
    pub fn text(&self) -> String {
        let mut lines = table(["tried", "outcome", "result"]);
        lines.load_style(presets::ASCII_MARKDOWN);
        for result in &self.results {
            let outcome = match result.outcome {
                GpuOutcome::Passed => "ok",
                GpuOutcome::Failed => "FAILED",
                GpuOutcome::NotRun => "not run",
            };
            // A line of the table is one line of text.
            let text = result.result.replace('\n', " ").replace('|', "\\|");
            lines.add_row([result.tried.to_owned(), outcome.to_owned(), text]);
        }
        match &self.versions {
            Some(versions) => format!("{versions}\n\n{lines}"),
            None => lines.to_string(),
        }
    }
}

/// The settings of a run.
#[derive(Clone, Debug)]
pub struct GpuOptions {
    /// The node; the one whose GPU has the most free memory if none is named.
    pub node: Option<String>,
    /// The image that has `gpu-probe`.
    pub image: String,
    /// True if simulated GPUs are accepted, on which no scenario counts as passed.
    pub simulated: bool,
    /// Times that the pods' programs are given.
    pub times: ProgramTimes,
}

/// Times that programs are given, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProgramTimes {
    /// The time from the creation of the first of several pods that compute side by side until all begin.
    pub ready: u64,
    /// The time for which they compute.
    pub compute: u64,
    /// The latest that one of them may begin after the others.
    pub latest: f64,
    /// The time before a program faults: in it the node's plugin, which lists processes every 15 s, lists the program.
    pub listed: u64,
}

impl GpuOptions {
    /// The settings for real GPUs.
    pub fn of_real_gpus(node: Option<String>, image: String) -> Self {
        Self {
            node,
            image,
            simulated: false,
            times: ProgramTimes {
                ready: 15,
                compute: 4,
                latest: 0.5,
                listed: 20,
            },
        }
    }
}

/// Runs scenarios one after the other on the node of one GPU; returns the world and the results.
///
/// # Errors
/// The pods of the run cannot be created.
pub async fn run(
    console: &Console,
    world: World,
    chosen: &[GpuScenario],
    options: &GpuOptions,
) -> Result<(World, GpuReport)> {
    let gpu = match TargetGpu::find(&world.observer.now(), options) {
        Ok(gpu) => gpu,
        Err(reason) => {
            let not_run = |scenario: &GpuScenario| scenario.ended(Finding::not_run(reason.as_str()), 0.0);
            let results = chosen.iter().map(not_run).collect();
            return Ok((
                world,
                GpuReport {
                    versions: None,
                    results,
                },
            ));
        }
    };
    trial::make_service_account(&world.client(), &world.namespace).await?;
    let mut trial = Trial {
        world,
        gpu,
        image: options.image.clone(),
        at_start: None,
        times: options.times,
    };
    let versions = Some(trial.versions().await);
    let mut results = Vec::new();
    for scenario in chosen {
        console.step(&format!("{}: {}", scenario.name, scenario.about));
        let mut result = scenario.run(&mut trial).await;
        if options.simulated && result.outcome == GpuOutcome::Passed {
            result.outcome = GpuOutcome::NotRun;
            result.result = format!("up to CUDA, for which a stand-in answers: {}", result.result);
        }
        if result.outcome == GpuOutcome::Failed {
            console.say(&format!("{} FAILED: {}", scenario.name, result.result));
        }
        results.push(result);
    }
    Ok((trial.world, GpuReport { versions, results }))
}

impl GpuScenario {
    /// Runs the scenario if the cluster allows it, and deletes its pods.
    async fn run(&self, trial: &mut Trial) -> GpuResult {
        let began = Instant::now();
        let none = Commands::default();
        let missing = self.needs.missing(trial.world.commands.as_ref().unwrap_or(&none));
        let found = match missing {
            Some(missing) => Ok(Finding::not_run(missing)),
            None => self.run_and_check(trial).await,
        };
        let cleared = trial.clear().await;
        let seconds = began.elapsed().as_secs_f64();
        match found.and_then(|found| cleared.map(|()| found)) {
            Ok(found) => self.ended(found, seconds),
            Err(error) => GpuResult {
                outcome: GpuOutcome::Failed,
                result: format!("{error:#}"),
                ..self.ended(Finding::default(), seconds)
            },
        }
    }

    /// Runs the scenario, and checks that no GPU is oversubscribed while its pods are there.
    async fn run_and_check(&self, trial: &mut Trial) -> Result<Finding> {
        let found = (self.body)(trial).await?;
        let accounts = invariants::held_amounts(&trial.world.observer.now(), &trial.world.excused);
        ensure!(
            accounts.violations.is_empty(),
            "{}",
            accounts.violations.join("; ")
        );
        Ok(found)
    }

    /// The result of a scenario with this finding: passed, or not run.
    fn ended(&self, found: Finding, seconds: f64) -> GpuResult {
        let outcome = match &found.not_run {
            Some(_) => GpuOutcome::NotRun,
            None => GpuOutcome::Passed,
        };
        GpuResult {
            scenario: self.name,
            tried: self.about,
            outcome,
            result: found.not_run.unwrap_or(found.text),
            figures: found.figures,
            seconds,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(ends: &[GpuOutcome]) -> GpuReport {
        let scenarios = all();
        let result = |(scenario, outcome): (&GpuScenario, &GpuOutcome)| GpuResult {
            outcome: *outcome,
            ..scenario.ended(Finding::new("seen\nas it is"), 1.0)
        };
        let versions = NodeVersions {
            node: "n".to_owned(),
            gpu: "H200".to_owned(),
            driver: "580.159.04".to_owned(),
            container_runtime: "containerd://2.1.9".to_owned(),
            kubernetes: "v1.36.2".to_owned(),
            ..NodeVersions::default()
        };
        GpuReport {
            versions: Some(versions),
            results: scenarios.iter().zip(ends).map(result).collect(),
        }
    }

    use GpuOutcome::{Failed, NotRun, Passed};

    #[test]
    fn a_run_is_a_success_if_something_was_seen_and_nothing_failed() {
        for (ends, expected) in [
            (&[Passed, NotRun][..], true),
            (&[NotRun, NotRun], false),
            (&[Passed, Failed], false),
            (&[], false),
        ] {
            assert_eq!(report(ends).is_ok(), expected, "{ends:?}");
        }
    }

    #[test]
    fn the_report_is_a_table_in_markdown() {
        insta::assert_snapshot!(report(&[Passed, Failed, NotRun]).text());
    }

    #[test]
    fn scenarios_have_names_of_their_own_and_the_last_compares_with_the_first() {
        let names: Vec<&str> = all().iter().map(|scenario| scenario.name).collect();
        let others = crate::scenario::all();
        assert!(
            names
                .iter()
                .all(|name| others.iter().all(|other| other.name != *name))
        );
        assert_eq!(
            (names.first(), names.last()),
            (Some(&"gpu-offered"), Some(&"gpu-nothing-left"))
        );
    }
}
