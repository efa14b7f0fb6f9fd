//! `laboratory families`: compares policies on clusters and workloads of many kinds, and shows how far each is
//! behind the best.
//!
//! A trace shows one cluster. The clusters here are invented, so that there can be any number of them, and ones that no policy
//! was designed with. Pods are placed as in `laboratory replay`.

pub mod cluster;
pub mod mix;

use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use scheduler::config::AnswerNodes;
use serde::Serialize;

use crate::replay::conditions::{NamedConditions, Overrides, RunConditions};
use crate::replay::fragment::typical_pods;
use crate::replay::parallel::{RunThreads, on_threads};
use crate::replay::policy::Policy;
use crate::replay::run::{self, Job, RunOptions, RunResult};
use crate::replay::{Seeds, seeds};
use cluster::{AllocationMeasure, Family};
use kit::console::{Console, table};

const POLICIES: &str = "fill,binpack,best-fit,fgd,fullest,kube-default";

#[derive(Clone, Debug, Args)]
pub struct FamiliesArgs {
    /// Kinds of clusters and workloads; all by default.
    #[arg(long, value_delimiter = ',', value_enum)]
    kind: Vec<Family>,
    /// Random seeds of the clusters of each kind, such as 1-4: they decide the nodes and the mix of pods.
    #[arg(long, default_value = "1-4", value_parser = seeds)]
    numbers: Seeds,
    /// Random seeds of the runs, such as 1-3: they decide which pods of the mix come.
    #[arg(long, default_value = "1-3", value_parser = seeds)]
    seeds: Seeds,
    /// Policies to compare, as for `replay`.
    #[arg(long, value_delimiter = ',', default_value = POLICIES)]
    policy: Vec<Policy>,
    /// Conditions, as for `replay`.
    #[arg(long, value_enum, ignore_case = true, default_value = "A")]
    condition: NamedConditions,
    /// Runs at one time; as many as there are processors by default.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: Option<u16>,
    /// Print the results as JSON.
    #[arg(long)]
    json: bool,
}

/// The results of all policies on the invented cluster of one kind and number.
#[derive(Clone, Debug, Serialize)]
pub struct FamilyResult {
    pub kind: String,
    /// The random seed of the cluster, from `--numbers`: it decides the nodes and the mix of pods. The seeds of the runs decide
    /// which pods of that mix arrive.
    pub number: u64,
    /// For each policy, in the order of the command line, the GPUs that were allocated, in percent of all.
    pub allocated: Vec<SeedSpread>,
}

#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct SeedSpread {
    pub mean: f64,
    pub deviation: f64,
}

/// Runs and prints the comparison; always true, as a violated invariant is an error.
pub async fn run(args: FamiliesArgs) -> Result<bool> {
    let console = Console::new(args.json);
    let (progress, policies) = (console.clone(), args.policy.clone());
    let lines = on_threads(move |threads| compare(&args, &progress, threads)).await;
    console.finish();
    let lines = lines?;
    console.result(&render(&policies, &lines));
    console.json(&lines);
    Ok(true)
}

#[derive(Clone, Copy)]
struct Task {
    kind: Family,
    number: u64,
    seed: u64,
}

/// Runs every policy on every invented cluster, many clusters at a time; returns a line for each kind and number.
fn compare(args: &FamiliesArgs, console: &Console, threads: &RunThreads) -> Result<Vec<FamilyResult>> {
    let kinds = if args.kind.is_empty() {
        Family::value_variants()
    } else {
        &args.kind
    };
    let conditions = RunConditions::of(args.condition, Overrides::default());
    let (mut tasks, mut clusters) = (Vec::new(), Vec::new());
    for kind in kinds {
        for number in args.numbers.iter().copied() {
            clusters.push((kind.name(), number));
            for seed in args.seeds.iter().copied() {
                let kind = *kind;
                tasks.push(Task { kind, number, seed });
            }
        }
    }
    let done = threads.run_all(&tasks, args.threads, async |task| {
        task.run(&args.policy, &conditions, console, &threads.stop).await
    })?;
    let mut lines = Vec::new();
    // `done` has the seeds of the first cluster, then those of the second, and so on.
    for ((kind, number), runs) in clusters.into_iter().zip(done.chunks(args.seeds.len())) {
        let mut allocated = Vec::new();
        for at in 0..args.policy.len() {
            let of_policy: Vec<f64> = runs.iter().filter_map(|run| run.get(at).copied()).collect();
            allocated.push(SeedSpread::of(&of_policy));
        }
        lines.push(FamilyResult {
            kind,
            number,
            allocated,
        });
    }
    Ok(lines)
}

impl Task {
    /// Runs the policies one after the other; returns the allocated percentage of each, or `None` if `stop` was set.
    async fn run(
        self,
        policies: &[Policy],
        conditions: &RunConditions,
        console: &Console,
        stop: &AtomicBool,
    ) -> Result<Option<Vec<f64>>> {
        let Self { kind, number, seed } = self;
        let made = kind.make(number, seed)?;
        let typical = typical_pods(&made.world);
        let options = RunOptions {
            answer_nodes: AnswerNodes::default(),
            departures: true,
            stretch: 1.0,
            evictions: None,
            join: Vec::new(),
            check_every: 1000,
        };
        let label = format!("{} {number} seed {seed}", kind.name());
        // All policies get the same cluster and pods, so that their difference is the policies' alone.
        let mut allocated = Vec::new();
        for policy in policies {
            let job = Job {
                world: &made.world,
                typical: &typical,
                policy,
                conditions,
                seed,
                tune: None,
                // The invented list of pods has its final length, and the order in which they arrive.
                in_order: true,
                options: &options,
            };
            let outcome = run::run(job, stop).await;
            let Some(outcome) = outcome.with_context(|| format!("{label} {policy}"))? else {
                return Ok(None);
            };
            allocated.push(made.measure.of(&outcome));
        }
        console.step(&label);
        Ok(Some(allocated))
    }
}

impl AllocationMeasure {
    /// The allocated percentage of a run: at its end, or on average over its second half.
    fn of(self, outcome: &RunResult) -> f64 {
        let all = &outcome.allocated;
        match self {
            Self::End => all.last().copied().unwrap_or(0.0),
            Self::SecondHalf => mean(all.iter().skip(all.len() / 2).copied()),
        }
    }
}

impl SeedSpread {
    fn of(values: &[f64]) -> Self {
        let mean = mean(values.iter().copied());
        let deviation = self::mean(values.iter().map(|value| (value - mean).powi(2))).sqrt();
        Self { mean, deviation }
    }
}

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, n) = values.fold((0.0, 0.0), |(sum, n), value| (sum + value, n + 1.0));
    if n > 0.0 { sum / n } else { 0.0 }
}

/// A table with a line for each kind and number; the last two lines show how far each policy is behind the
/// best, at worst and on average.
fn render(policies: &[Policy], lines: &[FamilyResult]) -> String {
    let mut heads = vec!["KIND".to_owned(), "NO".to_owned()];
    heads.extend(policies.iter().map(ToString::to_string));
    let mut table = table(heads);
    let mut losses = vec![Vec::new(); policies.len()];
    for line in lines {
        let best = line
            .allocated
            .iter()
            .map(|spread| spread.mean)
            .fold(0.0, f64::max);
        let mut row = vec![line.kind.clone(), line.number.to_string()];
        for (spread, losses) in line.allocated.iter().zip(&mut losses) {
            let loss = best - spread.mean;
            losses.push(loss);
            let behind = if loss > 0.005 {
                format!(" (-{loss:.2})")
            } else {
                String::new()
            };
            row.push(format!("{:.2} ±{:.2}{behind}", spread.mean, spread.deviation));
        }
        table.add_row(row);
    }
    let mut worst = vec!["worst loss".to_owned(), String::new()];
    let mut average = vec!["mean loss".to_owned(), String::new()];
    for losses in losses {
        worst.push(format!("{:.2}", losses.iter().copied().fold(0.0, f64::max)));
        average.push(format!("{:.2}", mean(losses.into_iter())));
    }
    table.add_row(worst);
    table.add_row(average);
    table.to_string()
}

#[cfg(test)]
mod tests;
