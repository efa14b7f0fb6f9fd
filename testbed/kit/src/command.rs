//! Commands of the testbed and the laboratory, from their start to their exit code.

use std::io::IsTerminal;
use std::process::ExitCode;

use anyhow::Result;
use clap::ValueEnum;
use tracing_subscriber::EnvFilter;

use crate::console::Console;

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

/// The exit code of a command that has ended.
pub fn exit_code(succeeded: bool) -> ExitCode {
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
pub async fn interrupted() {
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
