//! The binary: reads the flags and runs the daemon.

use std::process::ExitCode;

use clap::Parser;
use daemon::process::{self, HANG_LIMIT};
use device_plugin::config::Config;
use device_plugin::run::run;
use tokio::runtime::Builder;

fn main() -> ExitCode {
    let config = Config::parse();
    // One thread is enough for the calls of one kubelet, and saves memory on every node.
    process::run(
        config.process.clone(),
        HANG_LIMIT,
        Builder::new_current_thread(),
        |process| run(config, process),
    )
}
