//! `laboratory`: measures gpushare, and compares its policies with others.
//!
//! It replays traces of pods through the scheduler's own code, does the same on invented clusters, and puts
//! load on the real daemons. It is a program of its own so that the testbed's demo and scenarios compile
//! without it.
#![expect(
    unreachable_pub,
    reason = "`pub` separates a module's interface from its inner parts, and a program has no users outside"
)]

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use futures::FutureExt;
use kit::command::{block_on, or_interrupted};
use tracing_subscriber::EnvFilter;

mod families;
mod load;
mod plot;
mod replay;

/// Measures gpushare on this machine: how much of the GPUs its policies allocate, and how fast its daemons are.
#[derive(Debug, Parser)]
#[command(name = "laboratory", version, max_term_width = 100)]
struct Cli {
    /// Log filter of the laboratory and the testbed, on standard error, e.g. `info` or `kit::kubelet=debug`.
    #[arg(long, global = true, default_value = "error,kit::observer=info")]
    log: EnvFilter,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Put load on the real daemons and measure them; use a release build.
    Load(load::LoadArgs),
    /// Replay a trace of pods, or your own cluster's, and compare policies by how much of the GPUs they allocate.
    Replay(Box<replay::ReplayArgs>),
    /// Compare policies on clusters and workloads of many kinds, made up from numbers.
    Families(Box<families::FamiliesArgs>),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    block_on(cli.log, async {
        or_interrupted(match cli.command {
            Command::Load(args) => load::run(args).boxed_local(),
            Command::Replay(args) => replay::run(*args).boxed_local(),
            Command::Families(args) => families::run(*args).boxed_local(),
        })
        .await
    })
}
