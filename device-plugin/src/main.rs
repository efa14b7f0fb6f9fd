//! The binary: reads the flags, runs the daemon, tells how it ended.

use std::process::ExitCode;

use clap::Parser;
use device_plugin::config::{Args, Config};
use device_plugin::serve;
use tracing::error;

fn main() -> ExitCode {
    let config = Config::from(Args::parse());
    serve::init_logging(config.log_format, &config.log_level);
    match serve::start(config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            error!("{reason:#}");
            ExitCode::FAILURE
        }
    }
}
