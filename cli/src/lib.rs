//! `kubectl gpushare`: shows the GPUs of a cluster and their pods, explains why a pod waits, and checks the installation.
//!
//! It asks the scheduler's read API through a port-forward of its own. Without a scheduler it reads the objects itself, and
//! applies the scheduler's own library to them. Only `close`, `open` and `plan --evict` change something in the cluster: an
//! annotation of a Node, and pods, which they evict.

#![expect(
    clippy::format_push_string,
    reason = "a command builds its text once; no line of it is hot"
)]

mod args;
mod close;
mod connection;
mod doctor;
mod evict;
mod explain;
mod failure;
mod fields;
mod fits;
mod follow;
mod format;
mod gone;
mod jobs;
mod migrate;
mod offline;
mod output;
#[cfg(test)]
mod pictures;
mod plan;
mod pod_path;
mod pods;
mod read_api;
mod source;
mod top;
mod ui;
mod version;
mod volumes;

use std::process::ExitCode;

use clap::{CommandFactory, Parser};

use args::{Args, Command, Migrate, Top};
use connection::ClusterConnection;
use failure::{CommandFailure, CommandResult};
use output::Screen;

/// Runs the command of this process's arguments; the exit code is 0 for success or yes, 1 for a failure, 2 for no or for a node
/// or GPUs that do not exist, 3 for a plan that does not reach its goal, and 130 after Ctrl-C.
pub async fn run() -> ExitCode {
    let args = match Args::try_parse().and_then(Args::check) {
        Ok(args) => args,
        Err(error) => {
            // Help goes to standard output, a usage error to standard error; 2 would mean the answer no.
            let _ = error.print();
            return ExitCode::from(u8::from(error.use_stderr()));
        }
    };
    let screen = Screen::of_process(&args.output);
    // An eviction stops by itself at Ctrl-C, with a sentence on the pods that it may have evicted.
    let ends_itself = matches!(&args.command, Command::Plan(plan) if plan.evict);
    let done = tokio::select! {
        // Ctrl-C ends `top -w` and `ui`: it is no failure, and 130 is the shell's code for it.
        done = execute(args, &screen) => done,
        _ = tokio::signal::ctrl_c(), if !ends_itself => return ExitCode::from(130),
    };
    match done {
        Ok(code) => code,
        Err(CommandFailure::ClosedPipe) => ExitCode::SUCCESS,
        Err(failure) => {
            screen.complain(&format!("error: {failure}"));
            ExitCode::FAILURE
        }
    }
}

async fn execute(args: Args, screen: &Screen) -> CommandResult {
    let Args {
        connection, command, ..
    } = args;
    // The only command that needs no cluster, nor a kubeconfig.
    if let Command::Completion { shell } = command {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut Args::command(), "kubectl-gpushare", &mut script);
        screen.print(&String::from_utf8_lossy(&script))?;
        return Ok(ExitCode::SUCCESS);
    }
    let connection = ClusterConnection::new(connection).await;
    // Without a cluster the command's own version is still worth an answer.
    if matches!(command, Command::Version) {
        return version::run(connection, screen).await;
    }
    let connection = connection?;
    match command {
        Command::Top { kind, rows } => match kind {
            None => top::run(&connection, screen, top::gpus, rows).await,
            Some(Top::Nodes) => top::run(&connection, screen, top::nodes, rows).await,
            Some(Top::Pods { all_namespaces }) => pods::run(&connection, screen, all_namespaces, rows).await,
        },
        Command::Explain { pod, all } => explain::run(&connection, screen, &pod, all).await,
        Command::Fits(question) => fits::run(&connection, screen, &question).await,
        Command::Plan(args) => plan::run(&connection, screen, &args).await,
        Command::Close(at) => plan::or_no_such_goal(screen, close::close(&connection, screen, &at).await),
        Command::Open(at) => plan::or_no_such_goal(screen, close::open(&connection, screen, &at).await),
        Command::Doctor => doctor::run(&connection, screen).await,
        Command::Ui(options) => ui::run(&connection, screen, &options).await,
        Command::Migrate(Migrate::Status) => migrate::status(&connection, screen).await,
        Command::AutoscalerHints { node } => migrate::autoscaler_hints(&connection, screen, &node).await,
        // Both have returned above.
        Command::Completion { .. } | Command::Version => Ok(ExitCode::SUCCESS),
    }
}
