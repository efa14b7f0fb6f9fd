//! The command line.

use std::io::IsTerminal;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand, ValueEnum};
use futures::FutureExt;
use tracing_subscriber::EnvFilter;

use crate::console::Console;
use crate::kube_scheduler::leader_election as kube_scheduler;
use crate::{apiserver, chaos, demo, e2e, waves};

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
    /// Serve an empty API server, for kubectl and Helm.
    ApiServer(apiserver::command::ApiServerArgs),
    /// Run the testbed's model of kube-scheduler alone, against any API server.
    KubeScheduler(kube_scheduler::KubeSchedulerArgs),
}

/// Parses the arguments and runs the command that they name.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    block_on(cli.log, async {
        let running = match cli.command {
            Command::Demo(args) => demo::run(args).boxed_local(),
            Command::E2e(args) => e2e::run(args).boxed_local(),
            Command::Chaos(args) => chaos::run(args).boxed_local(),
            Command::Waves(args) => waves::run(args).boxed_local(),
            Command::ApiServer(args) => apiserver::command::run(args).boxed_local(),
            // This command handles the interruption itself, as it releases its Lease first.
            Command::KubeScheduler(args) => {
                return kube_scheduler::run(args, interrupted()).await.map(exit_code);
            }
        };
        or_interrupted(running).await
    })
}

/// Runs a command of the testbed or the laboratory to its end, with logs that pass `log` on standard error.
pub fn block_on(log: EnvFilter, command: impl Future<Output = Result<ExitCode>>) -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(log)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&error.into()),
    };
    runtime.block_on(command).unwrap_or_else(|error| fail(&error))
}

/// Runs `command` until it ends or the program is interrupted. Dropping the command ends every process that it started.
pub async fn or_interrupted(command: impl Future<Output = Result<bool>>) -> Result<ExitCode> {
    tokio::select! {
        succeeded = command => succeeded.map(exit_code),
        () = interrupted() => Ok(ExitCode::from(130)),
    }
}

fn exit_code(succeeded: bool) -> ExitCode {
    if succeeded {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn fail(error: &anyhow::Error) -> ExitCode {
    Console::new(false).say(&format!("{error:#}"));
    ExitCode::FAILURE
}

/// The name of a value on the command line, and in files that use the same names.
pub fn value_name(value: &impl ValueEnum) -> String {
    let value = value.to_possible_value();
    value.map(|value| value.get_name().to_owned()).unwrap_or_default()
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
