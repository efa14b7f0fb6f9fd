//! Starts the daemon: what it was told, then [`scheduler::run`].

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use scheduler::config::Args;

#[tokio::main]
async fn main() -> ExitCode {
    match scheduler::run::run(Args::parse()).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The log may not be set up yet; a closed standard error leaves nobody to tell.
            let _ = writeln!(std::io::stderr(), "gpushare-scheduler: {error:#}");
            ExitCode::FAILURE
        }
    }
}
