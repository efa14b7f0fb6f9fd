//! `testbed chaos`: the real daemons under adversarial orders, deletions, restarts and faults, decided by a seed.
//!
//! The devices of every container that starts are compared with its pod's record at that moment. The seed
//! decides the schedule; how the processes interleave is left to chance, and no result may depend on it.

mod accounting;
mod recorder;
mod report;
mod runner;
mod schedule;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use serde::Serialize;

use kit::cluster::{NodeKind, NodeSetup, RuntimeSpec, default_deploy};
use kit::console::Console;
use kit::daemons::Binaries;

pub use report::Figures;

use recorder::RunRecorder;
use report::render;
use schedule::schedule;

/// The nodes of [`PluginMode::NodeKinds`], each with its container runtime. A runtime that obeys the `NVIDIA_VISIBLE_DEVICES`
/// of images also requires gpushare's NRI plugin.
const KINDS: [(NodeKind, RuntimeSpec); 4] = [
    (NodeKind::VariableWithSpec, RuntimeSpec::RequiredPlugins),
    (NodeKind::PlainCdi, RuntimeSpec::Plain),
    (NodeKind::OperatorDefaultRuntime, RuntimeSpec::RequiredPlugins),
    (NodeKind::Hardened, RuntimeSpec::Plain),
];

/// The way in which the plugins of a run hand devices over. The proof is the plugin's check in `PreStartContainer` that a
/// container's devices are those of its pod's record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum PluginMode {
    /// Devices by CDI, proof before every start.
    Cdi,
    /// Devices by environment variable, proof before every start.
    Envvar,
    /// Nodes of several kinds, each with the mode that the plugin detects. Their container runtimes read
    /// changed CDI specs with a delay.
    #[value(name = "kinds")]
    #[serde(rename = "kinds")]
    NodeKinds,
}

impl fmt::Display for PluginMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cdi => "proof, cdi",
            Self::Envvar => "proof, envvar",
            Self::NodeKinds => "proof, kinds of nodes",
        })
    }
}

impl PluginMode {
    /// The number of nodes of the cluster that chaos runs on in this mode.
    fn n_nodes(self) -> usize {
        match self {
            Self::Cdi | Self::Envvar => 2,
            Self::NodeKinds => KINDS.len(),
        }
    }

    /// The setup of a node of the cluster in this mode; with [`PluginMode::NodeKinds`] the index selects its kind.
    fn node(self, at: usize, name: &str, mib_of_gpus: &[u64]) -> NodeSetup {
        let usual = NodeSetup::new(name, mib_of_gpus);
        match (self, KINDS.get(at)) {
            (Self::NodeKinds, Some((kind, runtime))) => NodeSetup {
                runtime: *runtime,
                inject: "auto",
                ..NodeSetup::of_kind(*kind, name, mib_of_gpus)
            },
            (Self::Envvar, _) => NodeSetup {
                inject: "envvar",
                // In this mode the plugin cannot correct a running pod's environment: without eviction a wrong pod would be held
                // for ever.
                plugin_args: ["--evict", "mismatch"].map(str::to_owned).into(),
                ..usual
            },
            _ => NodeSetup {
                inject: "cdi",
                driver_limits: true,
                ..usual
            },
        }
    }
}

/// `testbed chaos`.
#[derive(Clone, Debug, Args)]
pub struct ChaosArgs {
    /// Seed of the schedule: the same seed gives the same steps.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The number of steps.
    #[arg(long, default_value_t = 120)]
    steps: usize,
    /// The plugin's mode.
    #[arg(long, value_enum, default_value = "cdi")]
    mode: PluginMode,
    /// Run the modes cdi and envvar one after the other on the same steps.
    #[arg(long, conflicts_with = "mode")]
    compare: bool,
    /// Print the steps without running them.
    #[arg(long)]
    list: bool,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
    /// The directory deploy/ of the repository.
    #[arg(long, env = "TESTBED_DEPLOY", value_name = "DIR", default_value_os_t = default_deploy())]
    deploy: PathBuf,
}

/// Runs the schedule; returns true if every run kept the promises of its mode.
pub async fn run(args: ChaosArgs) -> Result<bool> {
    let console = Console::new(args.json);
    if args.list {
        let steps = schedule(args.seed, args.steps, args.mode.n_nodes());
        for (nth, step) in (1..).zip(steps) {
            console.result(&format!("{nth:4}  {step:?}"));
        }
        return Ok(true);
    }
    Binaries::locate().await?;
    let modes = if args.compare {
        vec![PluginMode::Cdi, PluginMode::Envvar]
    } else {
        vec![args.mode]
    };
    let mut runs = Vec::new();
    for mode in modes {
        runs.push(run_schedule(&console, mode, args.seed, args.steps, args.deploy.clone()).await?);
    }
    console.finish();
    console.result(&render(&runs));
    for run in &runs {
        for quote in run.quotes.iter().chain(&run.violations).take(12) {
            console.result(&format!("{}: {quote}", run.mode));
        }
    }
    console.json(&runs);
    Ok(runs.iter().all(Figures::is_ok))
}

/// Runs all steps of a schedule in one mode.
pub async fn run_schedule(
    console: &Console,
    mode: PluginMode,
    seed: u64,
    n_steps: usize,
    deploy: PathBuf,
) -> Result<Figures> {
    console.step(&format!("{mode}: starting the testbed"));
    let steps = schedule(seed, n_steps, mode.n_nodes());
    let recorder = Arc::new(RunRecorder::default());
    let mut runner = runner::Runner::start(mode, seed, deploy, &recorder).await?;
    let crashes = runner.crashes().clone();
    let began = Instant::now();
    for (nth, step) in (1..).zip(&steps) {
        let taken = tokio::select! {
            biased;
            crash = crashes.first() => Err(crash.into()),
            taken = runner.run_step(step) => taken,
        };
        let dir = runner.dir().display();
        taken.with_context(|| {
            format!("{mode}, seed {seed}, step {nth} of {n_steps}: {step:?}; logs are in {dir}")
        })?;
        let tally = recorder.tally();
        console.step(&format!(
            "{mode}: step {nth} of {n_steps}, {} pods admitted, {} wrong, {} stale, {} killed by us, {} by kubelet",
            tally.admitted.len(),
            tally.wrong.len(),
            tally.stale.len(),
            tally.failed_by_plugin.len(),
            tally.failed_by_kubelet.len()
        ));
    }
    let took = began.elapsed();
    let is_clean = recorder.tally().is_clean();
    let dir = runner.dir().to_owned();
    let heals = runner.end(!is_clean).await?;
    if !is_clean {
        console.say(&format!("logs are in {}", dir.display()));
    }
    Ok(Figures::of(mode, seed, &recorder.tally(), heals, took))
}
