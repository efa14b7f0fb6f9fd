//! The binary: reads the flags and runs the daemon; the exit code says whether it ended with an error.

use std::process::ExitCode;

use clap::Parser;
use device_plugin::config::Config;
use device_plugin::serve;
use tracing::error;

fn main() -> ExitCode {
    let config = Config::parse();
    daemon::logging::start(config.log_format, &config.log_level);
    match serve::start(config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            error!("{reason:#}");
            ExitCode::FAILURE
        }
    }
}
