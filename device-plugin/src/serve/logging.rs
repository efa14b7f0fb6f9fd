//! Where log lines go and in which form.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

use crate::config::{LogFormat, LogLevel};

/// Sends log lines to standard error from now on. Meant to be called once.
pub fn init(format: LogFormat, level: &LogLevel) {
    // The client logs every failed request, which whoever made the request does too.
    let filter = EnvFilter::new(format!("kube_client=off,{}", level.as_str()));
    // A line that cannot be written, as on a full disk, is lost: saying so would end the task that wanted to write it.
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .log_internal_errors(false);
    match format {
        LogFormat::Text => lines
            .with_target(false)
            .with_ansi(std::io::stderr().is_terminal())
            .init(),
        LogFormat::Json => lines.json().flatten_event(true).init(),
    }
}
