//! `testbed e2e`: runs scenarios on the testbed's own cluster or on a real one, and prints their results.
//!
//! On a real cluster the scenarios that break something run if a file gives the commands for it. Those on real GPUs are a set of
//! their own.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::scenario::real_gpus::{self, GpuOptions, GpuScenario};
use crate::scenario::{self, Scenario, ScenarioStage, World};
use kit::cluster::{LocalCluster, client_of, default_deploy};
use kit::console::Console;
use kit::daemons::Binaries;
use kit::parts::Commands;

/// The image with `gpu-probe`, which `deploy/docker/Dockerfile` builds.
const PROBE_IMAGE: &str = concat!("ghcr.io/gpushare/gpushare-testbed:", env!("CARGO_PKG_VERSION"));

/// `testbed e2e`.
#[derive(Clone, Debug, Args)]
pub struct E2eArgs {
    /// A real cluster on which gpushare is deployed, with simulated GPUs unless --real-gpus is given; the testbed's own without
    /// it.
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Run the scenarios for a node with real GPUs instead (docs/nvidia.md). They pass on real GPUs alone.
    #[arg(long, requires = "kubeconfig")]
    real_gpus: bool,
    /// Node for --real-gpus; the one whose GPU has the most free memory without it.
    #[arg(long, value_name = "NAME", requires = "real_gpus")]
    node: Option<String>,
    /// Image of the pods of --real-gpus, which has the program gpu-probe.
    #[arg(long, value_name = "NAME", requires = "real_gpus", default_value = PROBE_IMAGE)]
    probe_image: String,
    /// Commands that kill, stop and start the parts of that cluster (docs/real-cluster.md); without them no scenario breaks any
    /// of it.
    #[arg(long, value_name = "FILE", requires = "kubeconfig")]
    break_with: Option<PathBuf>,
    /// Only these scenarios.
    #[arg(long = "scenario", value_name = "NAME")]
    scenarios: Vec<String>,
    /// List the scenarios and do nothing.
    #[arg(long)]
    list: bool,
    /// Scheduler of the pods, where gpushare is attached to a second one.
    #[arg(long, value_name = "NAME")]
    scheduler_name: Option<String>,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
    /// The directory deploy/ of the repository.
    #[arg(long, env = "TESTBED_DEPLOY", value_name = "DIR", default_value_os_t = default_deploy())]
    deploy: PathBuf,
}

/// The result of a scenario.
#[derive(Clone, Debug, Serialize)]
pub struct ScenarioResult {
    /// Its name.
    pub scenario: &'static str,
    /// The testbed's cluster that it ran on; empty for a real one.
    pub stage: String,
    /// Why it failed, if it did.
    pub failure: Option<String>,
    /// The duration of the scenario.
    pub seconds: f64,
}

impl E2eArgs {
    /// The scenarios among all that the arguments name; all if they name none.
    fn named<S>(&self, mut all: Vec<S>, name: fn(&S) -> &'static str, hint: &str) -> Result<Vec<S>> {
        for wanted in &self.scenarios {
            let is_known = all.iter().any(|scenario| name(scenario) == wanted);
            ensure!(is_known, "there is no scenario {wanted:?}{hint}");
        }
        if !self.scenarios.is_empty() {
            all.retain(|scenario| self.scenarios.iter().any(|wanted| wanted == name(scenario)));
        }
        Ok(all)
    }
}

/// Runs the scenarios of the arguments; true if all succeeded.
pub async fn run(args: E2eArgs) -> Result<bool> {
    if args.kubeconfig.is_none() && !args.list {
        Binaries::locate().await?;
    }
    let console = Console::new(args.json);
    let commands = match (&args.break_with, &args.kubeconfig) {
        (Some(file), Some(kubeconfig)) => Some(Commands::read(file, kubeconfig)?),
        _ => None,
    };
    if args.real_gpus {
        return on_real_gpus(&console, &args, commands).await;
    }
    let chosen = choose(&args, commands.as_ref().unwrap_or(&Commands::default()))?;
    if args.list {
        for Scenario {
            name, about, needs, ..
        } in chosen
        {
            console.result(&format!("{name:22}{about}{needs}"));
        }
        return Ok(true);
    }
    let results = match &args.kubeconfig {
        Some(kubeconfig) => {
            let mut world = real_world(&args, kubeconfig, commands).await?;
            let results = run_all(&console, &mut world, "", &chosen).await;
            world.end().await?;
            results
        }
        None => on_testbed(&console, &chosen, args.deploy).await?,
    };
    let heads = ["SCENARIO", "CLUSTER", "RESULT", "SECONDS", ""];
    console.report(heads, results.iter().map(row), &results);
    Ok(results.iter().all(|result| result.failure.is_none()))
}

/// A real cluster, with a namespace for the scenarios.
async fn real_world(args: &E2eArgs, kubeconfig: &Path, commands: Option<Commands>) -> Result<World> {
    let client = client_of(kubeconfig).await?;
    let namespace = format!("gpushare-e2e-{}", std::process::id());
    let world = World::new(client, &namespace, args.scheduler_name.clone(), None).await?;
    Ok(world.broken_by(commands))
}

/// Runs the scenarios on real GPUs; true if none has failed and one has passed at least.
async fn on_real_gpus(console: &Console, args: &E2eArgs, commands: Option<Commands>) -> Result<bool> {
    let hint = " on real GPUs; see --real-gpus --list";
    let chosen = args.named(real_gpus::all(), |scenario| scenario.name, hint)?;
    if args.list {
        for GpuScenario {
            name, about, needs, ..
        } in chosen
        {
            console.result(&format!("{name:22}{about}{needs}"));
        }
        return Ok(true);
    }
    let kubeconfig = args.kubeconfig.as_ref();
    let kubeconfig = kubeconfig.context("--real-gpus needs --kubeconfig")?;
    let options = GpuOptions::of_real_gpus(args.node.clone(), args.probe_image.clone());
    let world = real_world(args, kubeconfig, commands).await?;
    let (world, report) = real_gpus::run(console, world, &chosen, &options).await?;
    world.end().await?;
    console.finish();
    console.result(&report.text());
    console.json(&report);
    Ok(report.is_ok())
}

/// Starts the testbed's clusters that scenarios need, and runs the scenarios of different clusters
/// concurrently.
pub async fn on_testbed(
    console: &Console,
    chosen: &[Scenario],
    deploy: PathBuf,
) -> Result<Vec<ScenarioResult>> {
    console.step("starting the testbed");
    let on_stages = ScenarioStage::value_variants().iter();
    let results = on_stages.map(|stage| on_stage(console, *stage, chosen, deploy.clone()));
    Ok(futures::future::try_join_all(results).await?.concat())
}

/// Starts the cluster of a stage, runs scenarios on it, and stops it. The logs stay if a scenario has failed.
async fn on_stage(
    console: &Console,
    stage: ScenarioStage,
    chosen: &[Scenario],
    deploy: PathBuf,
) -> Result<Vec<ScenarioResult>> {
    let mut chosen = chosen.to_vec();
    chosen.retain(|scenario| scenario.stages.contains(&stage));
    if chosen.is_empty() {
        return Ok(Vec::new());
    }
    let started = LocalCluster::start(stage.spec(deploy)).await;
    let mut cluster = started.with_context(|| format!("stage {}", stage.name()))?;
    let client = cluster.client().clone();
    // The logs are kept unless everything succeeds.
    cluster.keep_files(true);
    let dir = cluster.dir().to_owned();
    let mut world = World::new(client, "e2e", None, Some(cluster)).await?;
    let results = run_all(console, &mut world, &stage.name(), &chosen).await;
    let is_ok = results.iter().all(|result| result.failure.is_none());
    if let Some(mut cluster) = world.end().await? {
        cluster.keep_files(!is_ok);
        cluster.stop().await?;
    }
    if !is_ok {
        console.say(&format!("logs are in {}", dir.display()));
    }
    Ok(results)
}

/// Runs scenarios one after the other; after a failure the world recovers before the next one.
async fn run_all(
    console: &Console,
    world: &mut World,
    stage: &str,
    chosen: &[Scenario],
) -> Vec<ScenarioResult> {
    let mut results = Vec::new();
    for scenario in chosen {
        console.step(&format!("{}: {}", scenario.name, scenario.about));
        let began = Instant::now();
        let failure = world.run(scenario).await.err();
        let failure = failure.map(|error| format!("{error:#}"));
        if let Some(failure) = &failure {
            console.say(&format!("{} FAILED: {failure}", scenario.name));
            world.recover().await;
        }
        results.push(ScenarioResult {
            scenario: scenario.name,
            stage: stage.to_owned(),
            failure,
            seconds: began.elapsed().as_secs_f64(),
        });
    }
    results
}

/// Selects the scenarios that the arguments name and that the cluster can run.
fn choose(args: &E2eArgs, commands: &Commands) -> Result<Vec<Scenario>> {
    let real_cluster = "it needs a real cluster: --kubeconfig".to_owned();
    let (mut chosen, mut left_out) = (Vec::new(), Vec::new());
    for scenario in args.named(scenario::all(), |scenario| scenario.name, "; see --list")? {
        let obstacle = match &args.kubeconfig {
            Some(_) => scenario.needs.missing(commands),
            None => scenario.stages.is_empty().then(|| real_cluster.clone()),
        };
        match obstacle.filter(|_| !args.list) {
            Some(obstacle) => left_out.push(format!("{}: {obstacle}", scenario.name)),
            None => chosen.push(scenario),
        }
    }
    if !args.scenarios.is_empty() && !left_out.is_empty() {
        bail!("cannot run {}", left_out.join("; "));
    }
    Ok(chosen)
}

/// The row of a scenario in the table of the results.
fn row(result: &ScenarioResult) -> [String; 5] {
    [
        result.scenario.to_owned(),
        result.stage.clone(),
        result.failure.as_ref().map_or("ok", |_| "FAILED").to_owned(),
        format!("{:.1}", result.seconds),
        result.failure.clone().unwrap_or_default(),
    ]
}
