//! The command line.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use futures::FutureExt;
use tracing_subscriber::EnvFilter;

use crate::console::Console;
use crate::kube_scheduler::process as kube_scheduler;
use crate::{chaos, demo, e2e, families, load, replay, waves};

/// Runs gpushare's real daemons in a small Kubernetes on this machine, without a cluster and without a GPU.
#[derive(Debug, Parser)]
#[command(name = "testbed", version, max_term_width = 100)]
struct Cli {
    /// Log filter of the testbed itself, on standard error, e.g. `info` or `testbed::kubelet=debug`.
    #[arg(long, global = true, default_value = "error,testbed::observer=info")]
    log: EnvFilter,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show gpushare at work: the proposal's figures, then the sample pods.
    Demo(demo::DemoArgs),
    /// Run scenarios, faults included, and check every invariant after each.
    E2e(e2e::E2eArgs),
    /// Try for as long as you like to make a container see a wrong device.
    Chaos(chaos::ChaosArgs),
    /// Kill the parts of a cluster in turn while waves of pods start, and count the pods that this costs.
    Waves(waves::WavesArgs),
    /// Measure the real scheduler; use a release build.
    Load(load::LoadArgs),
    /// Replay a trace of pods, or your own cluster's, and compare policies by what they get out of the GPUs.
    Replay(Box<replay::ReplayArgs>),
    /// Compare policies on clusters and workloads of many kinds, made up from numbers.
    Families(Box<families::FamiliesArgs>),
    /// Run the testbed's model of kube-scheduler alone, against any API server.
    KubeScheduler(kube_scheduler::KubeSchedulerArgs),
}

/// Parses the arguments and does what they say.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    tracing_subscriber::fmt()
        .with_env_filter(cli.log)
        .with_writer(std::io::stderr)
        .init();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&error.into()),
    };
    runtime.block_on(async {
        let running = match cli.command {
            Command::Demo(args) => demo::run(args).boxed_local(),
            Command::E2e(args) => e2e::run(args).boxed_local(),
            Command::Chaos(args) => chaos::run(args).boxed_local(),
            Command::Waves(args) => waves::run(args).boxed_local(),
            Command::Load(args) => load::run(args).boxed_local(),
            Command::Replay(args) => replay::run(*args).boxed_local(),
            Command::Families(args) => families::run(*args).boxed_local(),
            // It has something to do once it is asked to end.
            Command::KubeScheduler(args) => return exit_code(kube_scheduler::run(args, interrupted()).await),
        };
        // Dropping the command ends every process that it started.
        tokio::select! {
            result = running => exit_code(result),
            () = interrupted() => ExitCode::from(130),
        }
    })
}

fn exit_code(result: anyhow::Result<bool>) -> ExitCode {
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => fail(&error),
    }
}

fn fail(error: &anyhow::Error) -> ExitCode {
    Console::new(false).say(&format!("{error:#}"));
    ExitCode::FAILURE
}

/// Waits for Ctrl-C or SIGTERM.
async fn interrupted() {
    let terminated = async {
        match tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()) {
            Ok(mut signal) => signal.recv().await,
            Err(_) => std::future::pending().await,
        }
    };
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        _ = terminated => {}
    }
}
