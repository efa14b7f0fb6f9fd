//! The command line.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use futures::FutureExt;
use tracing_subscriber::EnvFilter;

use kit::apiserver;
use kit::command::{block_on, exit_code, interrupted, or_interrupted};
use kit::kube_scheduler::leader_election as kube_scheduler;

use crate::{chaos, demo, e2e, waves};

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
